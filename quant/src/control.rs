//! What a quantizer knows on the host: its schedule, its step, what has been done.

use burn::module::{Content, Devices, Module, ModuleDisplay, ModuleDisplayDefault};
use burn::module::{ModuleMapper, ModuleVisitor};
use burn::tensor::Device;

use crate::schedule::{Phase, Schedule};
use crate::state::HostIntegers;
use crate::{Granularity, NumberFormat, ScaleFormat, ScaleRounding, Scheme};

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

const LAYOUT: i32 = 1;
const LEN: usize = 15;

/// The control state, recorded as integers.
#[derive(Debug, Clone)]
pub(crate) struct Control {
    pub(crate) schedule: Schedule,
    pub(crate) step: u64,
    pub(crate) mode: Mode,
    /// Whether there is a range.
    pub(crate) observed: bool,
    /// Whether the learned scale has its first value.
    pub(crate) initialized: bool,
    /// Whether values were seen that are no numbers, in a calibration.
    pub(crate) non_finite: bool,
    /// The scheme, in the record's words.
    scheme: [i32; 6],
    /// What a loaded record said about its scheme, where it differs.
    pub(crate) foreign: Option<[i32; 6]>,
    integers: HostIntegers,
}

impl Control {
    pub(crate) fn new(scheme: &Scheme, schedule: Schedule, device: &Device) -> Self {
        Self {
            schedule,
            step: 0,
            mode: Mode::Scheduled,
            observed: false,
            initialized: false,
            non_finite: false,
            scheme: fingerprint(scheme),
            foreign: None,
            integers: HostIntegers::new(vec![0; LEN], device),
        }
    }

    pub(crate) fn phase(&self) -> Phase {
        match self.mode {
            Mode::Scheduled => self.schedule.phase(self.step),
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
        ];
        values.extend(self.scheme);
        values
    }

    /// Takes over what a record holds, unless it is of another scheme or layout.
    fn decode(&mut self, values: &[i32]) {
        let scheme: Option<[i32; 6]> = values.get(9..).and_then(|tail| tail.try_into().ok());
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
        self.foreign = None;
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

impl Module for Control {
    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        let mut integers = self.integers.clone();
        integers.values = self.encode();
        integers.visit(visitor);
    }

    fn map<M: ModuleMapper>(mut self, mapper: &mut M) -> Self {
        let values = self.encode();
        self.integers.values.clone_from(&values);
        self.integers = self.integers.map(mapper);
        if self.integers.values != values {
            let loaded = self.integers.values.clone();
            self.decode(&loaded);
        }
        self
    }

    fn to_device(mut self, device: &Device) -> Self {
        self.integers = self.integers.to_device(device);
        self
    }

    fn fork(self, device: &Device) -> Self {
        self.to_device(device)
    }

    fn collect_devices(&self, devices: Devices) -> Devices {
        self.integers.collect_devices(devices)
    }

    fn valid(&self) -> Self {
        self.clone()
    }

    fn train(self) -> Self {
        self
    }

    fn materialize(self) -> Self {
        self
    }
}

impl ModuleDisplayDefault for Control {
    fn content(&self, content: Content) -> Option<Content> {
        content.add_formatted(&self.phase()).optional()
    }
}

impl ModuleDisplay for Control {}
