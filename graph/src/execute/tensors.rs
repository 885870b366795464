//! The tensors that are alive while a graph runs, and what happens to an operand on its way in.

use burn::backend::ir::{TensorId, TensorIr};
use burn::backend::ops::{BoolTensorOps, FloatTensorOps, IntTensorOps, QTensorOps};
use burn::backend::{
    Dispatch, DispatchDevice, DispatchTensor, TensorMetadata, get_device_settings,
};
use burn::tensor::{DType, FloatDType, TensorData};
use half::{bf16, f16};
// Names of tensors are numbers of our own, looked up for each operand of each operation.
use rustc_hash::{FxHashMap as HashMap, FxHashSet as HashSet};

use super::cast;
use super::plan::Step;
use super::recompute::Recompute;
use super::storage::HalfStorage;
use crate::interpret::Operands;
use crate::rules::is_castable;
use crate::{Arithmetic, Assignment, Graph, GraphError, Precision, Rules};

/// Tensors by the names that they have in the graph.
pub(crate) struct Alive<'a> {
    graph: &'a Graph,
    device: DispatchDevice,
    arithmetic: Arithmetic,
    half: FloatDType,
    values: HashMap<TensorId, DispatchTensor>,
    /// Copies of values in another dtype: a tensor is cast once, whoever reads it.
    casts: HashMap<(TensorId, Form), DispatchTensor>,
    /// Values that are on the half grid, where half is emulated.
    on_grid: HashSet<TensorId>,
    /// Values that somebody else keeps, in F32: parameters, inputs and constants.
    given: HashSet<TensorId>,
    /// Values that the backward pass computes again where it reads them, in F32.
    again: HashSet<TensorId>,
    /// Operands of composites that are under way, and those that were freed meanwhile.
    held: HashMap<TensorId, DispatchTensor>,
    put_back: Vec<TensorId>,
    recompute: Recompute,
    /// The current operation.
    assignment: Assignment,
    moves: bool,
    /// It gives what somebody else keeps another shape.
    shows_given: bool,
    /// It is recomputed in the backward pass.
    is_recomputed: bool,
    /// In which half dtype the backward pass finds its operand.
    stored_in: Option<FloatDType>,
    /// It has several float operands.
    has_several: bool,
    /// No gradient goes to its operand.
    stops: bool,
    index: usize,
}

/// A form that an operand is brought into.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Form {
    /// A dtype.
    Is(FloatDType),
    /// F32 numbers on a half grid; stored in half for the backward pass.
    Widened(FloatDType),
    /// F32 numbers on a half grid.
    Rounded(FloatDType),
    /// F32 numbers on a half grid; rounded again, not kept, for the backward pass.
    RoundedAgain(FloatDType),
    /// A half dtype, as the device has it, in which what is finite stays finite.
    Limited(FloatDType),
}

impl<'a> Alive<'a> {
    pub(crate) fn new(
        graph: &'a Graph,
        parameters: &[DispatchTensor],
        inputs: &[DispatchTensor],
        device: DispatchDevice,
        rules: &impl Rules,
    ) -> Self {
        let mut values: HashMap<TensorId, DispatchTensor> = HashMap::default();
        for (parameter, value) in graph.parameters.iter().zip(parameters) {
            values.insert(parameter.tensor, value.clone());
        }
        for (id, value) in graph.inputs.iter().zip(inputs) {
            values.insert(*id, value.clone());
        }
        let constants = graph.uploaded.on(&device, || {
            let each = graph.constants.iter();
            each.map(|(id, data)| (*id, upload(data.clone(), &device)))
                .collect()
        });
        values.extend(constants.iter().cloned());
        // Without a second owner, what is not kept can be reused.
        drop(constants);
        Self {
            graph,
            given: values.keys().copied().collect(),
            recompute: Recompute::on(&device),
            device,
            arithmetic: rules.arithmetic(),
            half: rules.half(),
            values,
            casts: HashMap::default(),
            on_grid: HashSet::default(),
            again: HashSet::default(),
            held: HashMap::default(),
            put_back: Vec::new(),
            assignment: Assignment {
                precision: Precision::AsRecorded,
                operands: None,
                results: None,
                widened: false,
            },
            moves: false,
            shows_given: false,
            is_recomputed: false,
            stored_in: None,
            has_several: false,
            stops: false,
            index: 0,
        }
    }

    pub(super) fn begin(&mut self, index: usize, assignment: Assignment, step: Step) {
        self.index = index;
        self.assignment = assignment;
        self.moves = step.moves;
        self.has_several = step.has_several;
        self.stops = step.stops;
        let is_emulated = self.arithmetic == Arithmetic::Emulated;
        let is_full = assignment.precision == Precision::Full;
        let gives_half = self.half_result().is_some();
        self.shows_given = self.arithmetic == Arithmetic::Widened
            && step
                .reshaped
                .is_some_and(|shown| self.given.contains(&shown) && self.is_f32(shown));
        let shows_again = step.reshaped.is_some_and(|id| self.again.contains(&id));
        self.is_recomputed = !is_emulated
            && !self.shows_given
            && (step.is_light && gives_half
                || step.is_composed && is_full && !gives_half
                || shows_again);
        self.stored_in = (self.is_lean() && is_full && step.is_smooth).then_some(self.half);
    }

    pub(crate) fn end(&mut self, index: usize) {
        let freed = &self.graph.lifetimes[index].freed;
        for id in freed {
            self.values.remove(id);
        }
        if !self.casts.is_empty() && !freed.is_empty() {
            self.casts.retain(|(id, _), _| !freed.contains(id));
        }
    }

    /// A tensor of the result.
    pub(crate) fn output(&self, id: TensorId) -> Result<DispatchTensor, GraphError> {
        let value = self.values.get(&id).cloned();
        value.ok_or(GraphError::NotAlive {
            tensor: id,
            operation: self.index,
        })
    }

    /// Puts another value in the place of one: nothing that was known of it holds any more.
    pub(crate) fn replace(
        &mut self,
        id: TensorId,
        change: impl FnOnce(DispatchTensor) -> DispatchTensor,
    ) {
        let Some(value) = self.values.remove(&id) else {
            return;
        };
        self.casts.retain(|(of, _), _| *of != id);
        self.on_grid.remove(&id);
        self.given.remove(&id);
        self.again.remove(&id);
        self.values.insert(id, change(value));
    }

    /// The float operand of a hook: also one that is stored quantized, as it is.
    pub(crate) fn stored(&mut self, tensor: &TensorIr) -> DispatchTensor {
        match self.values.get(&tensor.id).map(TensorMetadata::dtype) {
            Some(DType::QFloat(_)) => self.take(tensor),
            _ => self.float(tensor),
        }
    }

    fn is_last_read(&self, id: TensorId) -> bool {
        self.graph.lifetimes[self.index].moved.contains(&id)
    }

    /// The value as it is; given away where nothing reads it afterwards, so that Burn can reuse
    /// its memory.
    fn take(&mut self, tensor: &TensorIr) -> DispatchTensor {
        let value = match self.is_last_read(tensor.id) {
            true => self.values.remove(&tensor.id),
            false => self.values.get(&tensor.id).cloned(),
        };
        value.unwrap_or_else(|| panic!("tensor {} is not alive: a defect of the graph", tensor.id))
    }

    /// The form in which the current operation gets an operand of this dtype.
    fn form(&self, id: TensorId, dtype: DType) -> Option<Form> {
        // Rounded where it is read: nothing else is kept then.
        let casts = is_castable(dtype) && !self.shows_given;
        // What was stored in half beside what was computed, which is held in F32.
        let meets = self.has_several && self.arithmetic != Arithmetic::Native;
        let is_half = |dtype| matches!(dtype, DType::F16 | DType::BF16);
        if casts && meets && is_half(dtype) && self.assignment.operands.is_none() {
            return Some(Form::Is(FloatDType::F32));
        }
        let to = self.assignment.operands.filter(|_| casts)?;
        let half = matches!(to, FloatDType::F16 | FloatDType::BF16);
        match self.arithmetic {
            Arithmetic::Native if self.assignment.widened => Some(match dtype == to.into() {
                true => Form::Is(FloatDType::F32),
                false => Form::Widened(to),
            }),
            Arithmetic::Native => (dtype != DType::from(to)).then_some(Form::Is(to)),
            _ if !half => (dtype != DType::from(to)).then_some(Form::Is(to)),
            _ if self.on_grid.contains(&id) => None,
            Arithmetic::Widened if dtype == DType::F32 && self.is_kept_or_again(id) => {
                Some(Form::RoundedAgain(to))
            }
            Arithmetic::Widened => Some(Form::Widened(to)),
            Arithmetic::Emulated => Some(Form::Rounded(to)),
        }
    }

    fn bring(&self, value: DispatchTensor, form: Form) -> DispatchTensor {
        let bfloat = |half| half == FloatDType::BF16;
        match (form, self.arithmetic) {
            (Form::Is(FloatDType::F32), Arithmetic::Native) => match value.dtype() {
                DType::F16 => Dispatch::widen(value, false),
                DType::BF16 => Dispatch::widen(value, true),
                _ => cast(value, FloatDType::F32),
            },
            (Form::Is(dtype), _) => cast(value, dtype),
            (Form::Widened(half), _) => through(value, half),
            (Form::Rounded(half), _) => {
                Dispatch::round(cast(value, FloatDType::F32), bfloat(half), false)
            }
            (Form::RoundedAgain(half), _) => Dispatch::round(value, bfloat(half), true),
            (Form::Limited(half), arithmetic) => {
                let value = limited(value, half);
                match arithmetic {
                    Arithmetic::Native => cast(value, half),
                    Arithmetic::Widened => through(value, half),
                    Arithmetic::Emulated => Dispatch::round(value, bfloat(half), false),
                }
            }
        }
    }

    /// An operand in another form; the same numbers for all that read it.
    fn brought(&mut self, tensor: &TensorIr, form: Form) -> DispatchTensor {
        if let Some(copy) = self.casts.get(&(tensor.id, form)) {
            return self.used_again(tensor.id, form, copy.clone());
        }
        let last = self.is_last_read(tensor.id);
        let value = self.take(tensor);
        let value = self.bring(value, form);
        if !last {
            self.casts.insert((tensor.id, form), value.clone());
        }
        value
    }

    /// A copy that another operation got before. Where it is half, each use has a gradient of its own: they are
    /// summed in F32.
    fn used_again(&self, id: TensorId, form: Form, copy: DispatchTensor) -> DispatchTensor {
        let Form::Is(half @ (FloatDType::F16 | FloatDType::BF16)) = form else {
            return copy;
        };
        match self.values.get(&id) {
            Some(value) if value.dtype() == DType::F32 => {
                Dispatch::used_again(value.clone(), copy, half == FloatDType::BF16)
            }
            _ => copy,
        }
    }

    /// Whether the current operation is the only one that reads a computed tensor.
    fn is_read_here_alone(&self, tensor: &TensorIr) -> bool {
        let readers = self.graph.readers.get(&tensor.id);
        !self.given.contains(&tensor.id) && readers.is_some_and(|readers| readers.len() == 1)
    }

    /// Whether the backward pass has a value in F32 without keeping it.
    fn is_kept_or_again(&self, id: TensorId) -> bool {
        self.given.contains(&id) || self.again.contains(&id)
    }

    /// Notes that the backward pass computes a result again where it reads it.
    pub(super) fn is_computed_again(&mut self, tensor: &TensorIr) {
        self.again.insert(tensor.id);
    }

    /// Whether operations may keep less than Burn's own do: the rules are for a half dtype, which is
    /// not emulated.
    pub(super) fn is_lean(&self) -> bool {
        let is_half = matches!(self.half, FloatDType::F16 | FloatDType::BF16);
        is_half && self.arithmetic != Arithmetic::Emulated
    }

    /// Keeps operands that are there for an operation to come, whatever is freed before it.
    pub(super) fn hold(&mut self, operands: Vec<&TensorIr>) {
        for tensor in operands {
            if let Some(value) = self.values.get(&tensor.id) {
                self.held.insert(tensor.id, value.clone());
            }
        }
    }

    /// Puts back what was held, as far as it was freed.
    pub(super) fn release(&mut self, operands: Vec<&TensorIr>) {
        for tensor in operands {
            if let Some(value) = self.held.remove(&tensor.id) {
                self.values.entry(tensor.id).or_insert_with(|| {
                    self.put_back.push(tensor.id);
                    value
                });
            }
        }
    }

    /// Frees what was put back.
    pub(super) fn free_put_back(&mut self) {
        for id in std::mem::take(&mut self.put_back) {
            self.values.remove(&id);
            self.casts.retain(|(of, _), _| *of != id);
        }
    }

    /// An operand in F32, whatever the current operation gets its operands in.
    pub(super) fn wide(&mut self, tensor: &TensorIr) -> DispatchTensor {
        let operands = self.assignment.operands.replace(FloatDType::F32);
        let value = self.float(tensor);
        self.assignment.operands = operands;
        value
    }

    /// Whether the current operation reads this operand in half, widened, and no gradient goes to it.
    pub(super) fn is_constant_in_half(&self, tensor: &TensorIr) -> bool {
        let is_widened = self.arithmetic == Arithmetic::Widened
            && self.assignment.operands == Some(self.half)
            && matches!(self.device, DispatchDevice::Autodiff(_));
        let value = self.values.get(&tensor.id).filter(|_| is_widened);
        value.is_some_and(|value| value.dtype() == DType::F32 && !Dispatch::is_tracked(value))
    }

    /// Such an operand: not rounded where somebody keeps it in F32, which is said too.
    pub(super) fn constant(&mut self, tensor: &TensorIr) -> (DispatchTensor, bool) {
        match self.given.contains(&tensor.id) {
            true => (self.take(tensor), true),
            false => (self.float(tensor), false),
        }
    }

    /// The half dtype of the rules.
    pub(super) fn half(&self) -> FloatDType {
        self.half
    }

    /// Whether a value is there in F32.
    pub(super) fn is_f32(&self, id: TensorId) -> bool {
        let value = self.values.get(&id);
        value.is_some_and(|value| value.dtype() == DType::F32)
    }

    /// Whether the current operation gets its operands in half.
    pub(super) fn reads_half(&self) -> bool {
        self.assignment.operands == Some(self.half)
    }

    /// The dtype in which the current operation gives its float results, if it is half.
    pub(super) fn half_result(&self) -> Option<FloatDType> {
        match self.assignment.results? {
            DType::F16 => Some(FloatDType::F16),
            DType::BF16 => Some(FloatDType::BF16),
            _ => None,
        }
    }
}

impl Operands for Alive<'_> {
    fn float(&mut self, tensor: &TensorIr) -> DispatchTensor {
        let dtype = match self.values.get(&tensor.id) {
            Some(value) => value.dtype(),
            None => tensor.dtype,
        };
        if matches!(dtype, DType::QFloat(_)) && tensor.dtype.is_float() {
            // Where nothing says how, in the dtype that was recorded; where half is no dtype to compute in,
            // in F32.
            let to = match self.arithmetic {
                Arithmetic::Native => self.assignment.operands.unwrap_or(tensor.dtype.into()),
                Arithmetic::Widened | Arithmetic::Emulated => FloatDType::F32,
            };
            let value = Dispatch::dequantize(self.take(tensor), to);
            return match self.form(tensor.id, to.into()) {
                None => value,
                Some(form) => self.bring(value, form),
            };
        }
        let mut value = match self.form(tensor.id, dtype) {
            None => self.take(tensor),
            Some(form) => self.brought(tensor, form),
        };
        if self.stops {
            return Dispatch::float_detach(value);
        }
        if let Some(half) = self.stored_in.filter(|_| self.is_read_here_alone(tensor)) {
            value = Dispatch::store_in_half(value, half == FloatDType::BF16);
        }
        if self.is_recomputed {
            self.recompute.mark(&mut value);
        }
        value
    }

    fn bias(&mut self, tensor: &TensorIr) -> DispatchTensor {
        match self.assignment.operands {
            Some(half @ (FloatDType::F16 | FloatDType::BF16)) if self.is_f32(tensor.id) => {
                self.brought(tensor, Form::Limited(half))
            }
            _ => self.float(tensor),
        }
    }

    fn int(&mut self, tensor: &TensorIr) -> DispatchTensor {
        self.take(tensor)
    }

    fn bool(&mut self, tensor: &TensorIr) -> DispatchTensor {
        self.take(tensor)
    }

    fn set(&mut self, tensor: &TensorIr, value: DispatchTensor) {
        let mut value = value;
        if self.shows_given {
            self.given.insert(tensor.id);
        } else if let Some(half) = self.half_result().filter(|_| tensor.dtype.is_float()) {
            match self.arithmetic {
                Arithmetic::Native if self.assignment.widened => {
                    value = Dispatch::narrow(value, half == FloatDType::BF16);
                }
                Arithmetic::Native => {}
                Arithmetic::Widened => {
                    self.on_grid.insert(tensor.id);
                    if value.dtype() == DType::from(half) {
                        value = Dispatch::widen(value, half == FloatDType::BF16);
                    } else if !self.moves {
                        value = through(value, half);
                    }
                }
                Arithmetic::Emulated => {
                    self.on_grid.insert(tensor.id);
                    if !self.moves {
                        value = Dispatch::round(value, half == FloatDType::BF16, false);
                    }
                }
            }
        }
        if self.is_recomputed {
            self.recompute.unmark(&mut value);
            self.again.insert(tensor.id);
        }
        self.values.insert(tensor.id, value);
    }

    fn device(&self) -> DispatchDevice {
        self.device.clone()
    }
}

/// F32 numbers, of which those that are finite stay so in a half dtype, also with a logit added: half of its range.
fn limited(value: DispatchTensor, half: FloatDType) -> DispatchTensor {
    let largest = match half {
        FloatDType::BF16 => bf16::MAX.to_f32() / 2.0,
        _ => f16::MAX.to_f32() / 2.0,
    };
    let dtype = get_device_settings::<Dispatch>(&value.device()).bool_dtype;
    let is_infinite = Dispatch::float_is_inf(value.clone(), dtype);
    let within = Dispatch::float_clamp(value.clone(), (-largest).into(), largest.into());
    Dispatch::float_mask_where(within, is_infinite, value)
}

/// F32 numbers that have been in a half dtype, and are kept in it for the backward pass.
fn through(value: DispatchTensor, half: FloatDType) -> DispatchTensor {
    let bfloat = half == FloatDType::BF16;
    Dispatch::widen(
        Dispatch::narrow(cast(value, FloatDType::F32), bfloat),
        bfloat,
    )
}

/// A tensor of any kind on a device.
pub(crate) fn upload(data: TensorData, device: &DispatchDevice) -> DispatchTensor {
    let dtype = data.dtype();
    if dtype.is_float() {
        Dispatch::float_from_data(data, device)
    } else if dtype.is_bool() {
        // In the form in which the device stores them: it takes no other.
        let store = get_device_settings::<Dispatch>(device).bool_dtype;
        Dispatch::bool_from_data(data.convert_dtype(store.into()), device)
    } else {
        Dispatch::int_from_data(data, device)
    }
}
