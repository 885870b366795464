//! What a quantizer knows on the host: its schedule, its step, what has been done.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use burn::module::{Content, Devices, Module, ModuleDisplay, ModuleDisplayDefault};
use burn::module::{ModuleMapper, ModuleVisitor};
use burn::tensor::{Device, FloatDType};

use crate::module::schedule::{Phase, Schedule};
use crate::range::state::HostIntegers;
use crate::{
    Dequantize, Granularity, Mapping, NumberFormat, Scheme,
    format::{ScaleFormat, ScaleRounding},
};

/// How the schedule is overruled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// It is not.
    Scheduled,
    /// Values pass through.
    Off,
    /// Ranges are collected on any device; values pass through.
    Calibrating,
}

/// Who counted the step that is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Counted {
    /// Nobody yet.
    No,
    /// The run of a recorded forward pass.
    ByRun,
    /// The same, and the step of the optimizer was taken.
    ByRunOfStep,
    /// Who took the step of the optimizer.
    ByStep,
}

const LAYOUT: i32 = 2;
const LEN: usize = 19;
/// Where the scheme starts.
const SCHEME: usize = 13;

/// The control state, recorded as integers.
#[derive(Debug, Clone)]
pub(crate) struct Control {
    pub(crate) schedule: Schedule,
    pub(crate) step: u64,
    /// [`advance`](crate::advance) does not count it again.
    pub(crate) counted: Counted,
    pub(crate) mode: Mode,
    /// Whether there is a range.
    pub(crate) observed: bool,
    /// Whether the observer holds scale and zero point themselves, in the place of a range.
    pub(crate) exact: bool,
    /// Of a converted weight: whether what is stored are its codes, with a scale of 1, in the place of
    /// its values. Scale and zero point are then exact.
    pub(crate) codes: bool,
    /// Whether the learned scale has its first value.
    pub(crate) initialized: bool,
    /// Whether values were seen that are no numbers, in a calibration.
    pub(crate) non_finite: bool,
    /// Of a weight: the dtype of its values.
    pub(crate) dtype: FloatDType,
    /// Of a converted weight: when its values are computed.
    pub(crate) dequantize: Option<Dequantize>,
    /// The scheme, in the record's words.
    scheme: [i32; 6],
    /// What a loaded record said about its scheme, where it differs.
    pub(crate) foreign: Option<[i32; 6]>,
    /// How many values came by, in this model or a copy of it.
    called: Arc<AtomicU64>,
    /// How many of them when a step was last taken.
    called_before: u64,
    /// Whether it was said that none came by.
    pub(crate) is_warned: bool,
    integers: HostIntegers,
    /// Whether the last mapper replaced the integers, as the one that loads a record does.
    pub(crate) was_loaded: bool,
}

impl Control {
    pub(crate) fn new(scheme: &Scheme, schedule: Schedule, device: &Device) -> Self {
        Self {
            schedule,
            step: 0,
            counted: Counted::No,
            mode: Mode::Scheduled,
            observed: false,
            exact: false,
            codes: false,
            initialized: false,
            non_finite: false,
            dtype: FloatDType::F32,
            dequantize: None,
            scheme: fingerprint(scheme),
            foreign: None,
            called: Arc::default(),
            called_before: 0,
            is_warned: false,
            integers: HostIntegers::new(vec![0; LEN], device),
            was_loaded: false,
        }
    }

    /// Whether a value ever came by.
    pub(crate) fn was_called(&self) -> bool {
        self.called.load(Ordering::Relaxed) > 0
    }

    /// Whether a value came by since a step was last taken.
    pub(crate) fn has_acted(&self) -> bool {
        self.called.load(Ordering::Relaxed) != self.called_before
    }

    /// An optimizer has taken a step, which a run may have counted.
    pub(crate) fn step_taken(&mut self) {
        self.counted = match self.counted {
            Counted::ByRun => Counted::ByRunOfStep,
            Counted::No | Counted::ByRunOfStep | Counted::ByStep => {
                self.count_step();
                Counted::ByStep
            }
        };
        self.called_before = self.called.load(Ordering::Relaxed);
    }

    /// What [`advance`](crate::advance) says of the step that is over.
    pub(crate) fn advance(&mut self) {
        if self.counted == Counted::No {
            self.count_step();
        }
        self.counted = Counted::No;
        self.called_before = self.called.load(Ordering::Relaxed);
    }

    pub(crate) fn count_step(&mut self) {
        self.step = self.step.saturating_add(1);
    }

    pub(crate) fn was_counted_by_run(&self) -> bool {
        matches!(self.counted, Counted::ByRun | Counted::ByRunOfStep)
    }

    /// The step that is over, when [`advance`](crate::advance) is called.
    pub(crate) fn last_step(&self) -> u64 {
        self.step - u64::from(self.counted == Counted::ByStep && self.step > 0)
    }

    /// Remembers that a value came by, for all copies of this quantizer.
    pub(crate) fn call(&self) {
        self.called.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn phase(&self) -> Phase {
        self.phase_at(self.step)
    }

    pub(crate) fn phase_at(&self, step: u64) -> Phase {
        match self.mode {
            Mode::Scheduled => self.schedule.phase(step),
            Mode::Off => Phase::Off,
            Mode::Calibrating => Phase::Observe,
        }
    }

    fn encode(&self) -> Vec<i32> {
        let step = |step: u64| i32::try_from(step).unwrap_or(i32::MAX);
        let optional = |at: Option<u64>| at.map_or(-1, step);
        let mut values = vec![
            LAYOUT,
            step(self.step),
            step(self.schedule.quantize_from),
            optional(self.schedule.freeze_observers_at),
            optional(self.schedule.freeze_batch_norm_at),
            self.mode as i32,
            i32::from(self.observed),
            i32::from(self.initialized),
            i32::from(self.non_finite),
            i32::from(self.exact) + i32::from(self.codes),
            dtype_code(self.dtype),
            match self.dequantize {
                None => 0,
                // Whether a product reads codes, a device shows.
                Some(Dequantize::Once | Dequantize::InProduct) => 1,
                Some(Dequantize::EveryUse) => 2,
            },
            i32::from(self.was_called()),
        ];
        // What was loaded is of another scheme still, in a record as to a mapper.
        values.extend(self.foreign.unwrap_or(self.scheme));
        values
    }

    /// Takes over what a record holds, unless it is of another scheme or layout.
    fn decode(&mut self, values: &[i32]) {
        let scheme: Option<[i32; 6]> = values.get(SCHEME..).and_then(|tail| tail.try_into().ok());
        let (Some(&LAYOUT), Some(scheme)) = (values.first(), scheme) else {
            self.foreign = Some([-1; 6]);
            return;
        };
        if scheme != self.scheme {
            self.foreign = Some(scheme);
            return;
        }
        let optional = |value: i32| u64::try_from(value).ok();
        let step = |value| optional(value).unwrap_or(0);
        self.step = step(values[1]);
        self.counted = Counted::No;
        self.schedule = Schedule {
            quantize_from: step(values[2]),
            freeze_observers_at: optional(values[3]),
            freeze_batch_norm_at: optional(values[4]),
        };
        self.mode = match values[5] {
            1 => Mode::Off,
            2 => Mode::Calibrating,
            _ => Mode::Scheduled,
        };
        self.observed = values[6] != 0;
        self.initialized = values[7] != 0;
        self.non_finite = values[8] != 0;
        self.exact = values[9] != 0;
        self.codes = values[9] == 2;
        self.dtype = dtype_of(values[10]);
        self.dequantize = match values[11] {
            1 => Some(Dequantize::Once),
            2 => Some(Dequantize::EveryUse),
            _ => None,
        };
        // Of its own: copies that were not loaded are asked for themselves.
        self.called_before = u64::from(self.was_called() || values[12] != 0);
        self.called = Arc::new(self.called_before.into());
        self.foreign = None;
    }
}

fn dtype_code(dtype: FloatDType) -> i32 {
    match dtype {
        FloatDType::F32 => 0,
        FloatDType::F16 => 1,
        FloatDType::BF16 => 2,
        FloatDType::F64 => 3,
        FloatDType::Flex32 => 4,
    }
}

fn dtype_of(code: i32) -> FloatDType {
    match code {
        1 => FloatDType::F16,
        2 => FloatDType::BF16,
        3 => FloatDType::F64,
        4 => FloatDType::Flex32,
        _ => FloatDType::F32,
    }
}

/// The scheme in six integers: format, bounds, mapping, granularity and format of the scales, axis
/// or block.
fn fingerprint(scheme: &Scheme) -> [i32; 6] {
    let format = match scheme.format {
        NumberFormat::Int { signed, .. } => i32::from(signed),
        NumberFormat::E4M3 => 2,
        NumberFormat::E5M2 => 3,
        NumberFormat::E2M1 => 4,
    };
    let (granularity, detail) = match &scheme.granularity {
        Granularity::PerTensor => (0, 0),
        Granularity::PerChannel { axis } => (1, *axis as i32),
        Granularity::PerToken => (2, 0),
        Granularity::PerBlock { extents } => {
            let fold = |all: i32, extent: &usize| all.wrapping_mul(4099) + *extent as i32;
            (3, extents.iter().fold(0, fold))
        }
    };
    let scale = match scheme.scale_format {
        ScaleFormat::F32 => 0,
        ScaleFormat::PowerOfTwo(ScaleRounding::Up) => 1,
        ScaleFormat::PowerOfTwo(ScaleRounding::Standard) => 2,
        ScaleFormat::E4M3(ScaleRounding::Up) => 3,
        ScaleFormat::E4M3(ScaleRounding::Standard) => 4,
    };
    [
        format,
        scheme.quant_min() as i32,
        scheme.quant_max() as i32,
        scheme.mapping as i32,
        granularity + 4 * scale,
        detail,
    ]
}

/// A scheme in a record's words, as it prints beside that of the model.
pub(crate) fn described(found: [i32; 6], own: &Scheme) -> String {
    let [format, min, max, mapping, granularity, detail] = found;
    // Also of a damaged record.
    let bits = (max.max(0).unsigned_abs() + 1).ilog2() as u8;
    let format = match format {
        0 => NumberFormat::uint(bits),
        1 if min == max.wrapping_neg() => NumberFormat::int(bits + 1).narrow(),
        1 => NumberFormat::int(bits + 1),
        2 => NumberFormat::E4M3,
        3 => NumberFormat::E5M2,
        4 => NumberFormat::E2M1,
        _ => return "the state of a quantizer of another version".into(),
    };
    let mapping = match mapping {
        0 => Mapping::Symmetric,
        1 => Mapping::SymmetricNoClipping,
        _ => Mapping::Affine,
    };
    let scale_format = match granularity.div_euclid(4) {
        1 => ScaleFormat::PowerOfTwo(ScaleRounding::Up),
        2 => ScaleFormat::PowerOfTwo(ScaleRounding::Standard),
        3 => ScaleFormat::E4M3(ScaleRounding::Up),
        4 => ScaleFormat::E4M3(ScaleRounding::Standard),
        _ => ScaleFormat::F32,
    };
    let of_blocks = matches!(own.granularity, Granularity::PerBlock { .. });
    let granularity = match granularity.rem_euclid(4) {
        0 => Granularity::PerTensor.to_string(),
        1 => {
            let axis = detail.unsigned_abs() as usize;
            Granularity::PerChannel { axis }.to_string()
        }
        2 => Granularity::PerToken.to_string(),
        // Of extents the number only says whether they are the same.
        _ if of_blocks && detail == fingerprint(own)[5] => own.granularity.to_string(),
        _ if of_blocks => "per block of other extents".into(),
        _ => "per block".into(),
    };
    let scales = scale_format.suffix();
    format!("{format}, {mapping}, {granularity}{scales}")
}

impl Module for Control {
    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        let mut integers = self.integers.clone();
        integers.values = self.encode();
        integers.visit(visitor);
    }

    fn map<M: ModuleMapper>(mut self, mapper: &mut M) -> Self {
        let values = self.encode();
        self.integers.values.clone_from(&values);
        (self.integers, self.was_loaded) = self.integers.mapped(mapper);
        if self.integers.values != values {
            let loaded = self.integers.values.clone();
            self.decode(&loaded);
        }
        self
    }

    fn to_device(mut self, device: &Device) -> Self {
        if self.dequantize == Some(Dequantize::InProduct) && !self.integers.is_on(device) {
            self.dequantize = Some(Dequantize::Once);
        }
        self.integers = self.integers.to_device(device);
        self
    }

    fn collect_devices(&self, devices: Devices) -> Devices {
        self.integers.collect_devices(devices)
    }

    crate::range::state::plain_state!();
}

impl ModuleDisplayDefault for Control {
    fn content(&self, content: Content) -> Option<Content> {
        content.add_formatted(&self.phase()).optional()
    }
}

impl ModuleDisplay for Control {}
