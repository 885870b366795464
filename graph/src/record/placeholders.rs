//! A model whose parameters are placeholders, and the values they stand for.

use std::collections::VecDeque;

use burn::backend::ir::TensorId;
use burn::backend::{DispatchTensor, TensorMetadata};
use burn::module::{Flag, Module, Param, ParamId};
use burn::tensor::{DType, Device, Shape, Tensor};
use burn_lean_reparam::{PathMapper, PathVisitor, Trail, map_kinds, visit_kinds, visit_with_path};
use rustc_hash::{FxHashMap as HashMap, FxHashSet as HashSet};

use super::places::Places;
use crate::capture::{as_autodiff, as_leaf, id, placeholder};
use crate::graph::ParamPlace;
use crate::record::Halves;
use crate::rules::is_castable;
use crate::{Parameter, hooks};

/// How parameters take part in the recording.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Evaluation: plain tensors.
    Evaluate,
    /// Training: autodiff tensors without gradients.
    Train,
    /// Training, of which autodiff is to know: what has a gradient in the model is a leaf.
    TrainWithGradients,
}

/// The dtype that a recording gives a tensor.
pub(crate) fn recorded(dtype: DType, halves: Halves) -> DType {
    match (dtype, halves) {
        // The capture device holds no quantized tensors: an execution dequantizes them.
        (DType::QFloat(_), _) | (DType::F16 | DType::BF16, Halves::AsF32) => DType::F32,
        (dtype, _) => dtype,
    }
}

/// How the user's model is set, which [`valid`](Module::valid) changes.
#[derive(Debug, Default)]
pub(crate) struct Switches {
    /// Whether training behaviour is on, in the order of modules.
    flags: VecDeque<bool>,
    /// Whether a float tensor has no gradient: what is frozen, and running states.
    pub(crate) has_buffers: bool,
    /// Those that have one, where leaves are wanted.
    trained: HashSet<ParamPlace>,
    /// Whether the model carries hooks.
    hooked: bool,
    /// What is counted for them.
    places: Option<Places>,
}

impl Switches {
    pub(crate) fn of<M: Module>(model: &M, mode: Mode, hooked: bool) -> Self {
        let mut switches = Self {
            hooked,
            places: (mode == Mode::TrainWithGradients).then(Places::default),
            ..Self::default()
        };
        visit_with_path(model, &mut switches);
        switches
    }

    fn meet(&mut self, at: &Trail) -> Option<ParamPlace> {
        Some(self.places.as_mut()?.meet(at))
    }
}

impl PathVisitor for Switches {
    fn float<const D: usize>(&mut self, at: &Trail, param: &Param<Tensor<D>>) {
        self.has_buffers |= !param.is_require_grad();
        let place = self.meet(at).filter(|_| param.is_tracked());
        self.trained.extend(place);
    }

    visit_kinds!(int, bool: |self, at, _| {
        self.meet(at);
    });

    fn flag(&mut self, _at: &Trail, flag: &Param<Flag>) {
        self.flags.push_back(flag.is_enabled());
    }
}

/// Replaces the values of all parameters by placeholders.
pub(crate) struct Placeholders<'a> {
    capture: &'a Device,
    mode: Mode,
    halves: Halves,
    switches: Switches,
    places: Places,
    pub(crate) found: Vec<Parameter>,
    /// The dtypes of what is stored in half and recorded as F32.
    pub(crate) stored: HashMap<TensorId, DType>,
    /// Those whose gradients autodiff is to know.
    pub(crate) leaves: HashMap<TensorId, DispatchTensor>,
}

/// What takes the place of a tensor.
struct StandIn {
    tensor: DispatchTensor,
    id: TensorId,
    /// It stands for a running statistic, which Burn's BatchNorm moves to the device of its input: a
    /// capture device takes none with autodiff.
    running: bool,
    /// The tensor of the model has a gradient.
    trained: bool,
}

impl<'a> Placeholders<'a> {
    pub(crate) fn new(capture: &'a Device, mode: Mode, halves: Halves, switches: Switches) -> Self {
        Self {
            capture,
            mode,
            halves,
            switches,
            places: Places::default(),
            found: Vec::new(),
            stored: HashMap::default(),
            leaves: HashMap::default(),
        }
    }

    fn stand_in(&mut self, at: &Trail, param: ParamId, shape: Shape, dtype: DType) -> StandIn {
        let tensor = placeholder(shape.clone(), dtype, self.capture);
        let id = id(&tensor).expect("the placeholder is on the capture device");
        let running = matches!(at.name(), "running_mean" | "running_var");
        let place = self.places.meet(at);
        let trained = self.switches.trained.contains(&place);
        let (path, occurrence) = place;
        self.found.push(Parameter {
            path,
            id: param,
            shape: shape.to_vec(),
            tensor: id,
            update: None,
            occurrence,
            running,
        });
        StandIn {
            tensor,
            id,
            running,
            trained,
        }
    }
}

impl PathMapper for Placeholders<'_> {
    fn float<const D: usize>(&mut self, at: &Trail, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, value, mapper) = param.consume();
        let dtype = recorded(value.dtype(), self.halves);
        let stand_in = self.stand_in(at, id, value.shape(), dtype);
        if is_castable(value.dtype()) && value.dtype() != dtype {
            self.stored.insert(stand_in.id, value.dtype());
        }
        let tensor = match self.mode {
            Mode::Evaluate => stand_in.tensor,
            // Buffers take part without gradients.
            Mode::Train | Mode::TrainWithGradients if stand_in.running => stand_in.tensor,
            // What is frozen may be detached, too: no gradient of it is compared.
            Mode::TrainWithGradients if stand_in.trained => {
                let leaf = as_leaf(stand_in.tensor);
                self.leaves.insert(stand_in.id, leaf.clone());
                leaf
            }
            // What a hook makes of it has a gradient where the hook has parameters of its own, the scale
            // of a quantizer say.
            Mode::TrainWithGradients if self.switches.hooked => as_leaf(stand_in.tensor),
            Mode::Train | Mode::TrainWithGradients => as_autodiff(stand_in.tensor),
        };
        Param::from_mapped_value(id, Tensor::from_dispatch(tensor), mapper)
    }

    map_kinds!(int, bool: |self, at, param| {
        let (id, value, mapper) = param.consume();
        let tensor = self.stand_in(at, id, value.shape(), value.dtype()).tensor;
        Param::from_mapped_value(id, Tensor::from_dispatch(tensor), mapper)
    });

    /// `valid` has switched all modules out of training mode; some of the user's may be in it.
    fn flag(&mut self, _at: &Trail, flag: Param<Flag>) -> Param<Flag> {
        match self.switches.flags.pop_front() {
            Some(enabled) => flag.with_value(enabled),
            None => flag,
        }
    }
}

/// The tensors of a model by their places, as its placeholders are.
#[derive(Default)]
pub(crate) struct Values {
    places: Places,
    found: HashMap<ParamPlace, DispatchTensor>,
}

impl Values {
    pub(crate) fn of<M: Module>(model: &M) -> Self {
        let mut values = Self::default();
        hooks::sharing(|| visit_with_path(model, &mut values));
        values
    }

    fn insert(&mut self, at: &Trail, value: DispatchTensor) {
        self.found.insert(self.places.meet(at), value);
    }

    pub(crate) fn get(&self, parameter: &Parameter) -> Option<&DispatchTensor> {
        let value = self.found.get(&parameter.place())?;
        (value.shape().to_vec() == parameter.shape).then_some(value)
    }
}

impl PathVisitor for Values {
    fn float<const D: usize>(&mut self, at: &Trail, param: &Param<Tensor<D>>) {
        self.insert(at, param.base().into_dispatch());
    }

    visit_kinds!(int, bool: |self, at, param| self.insert(at, param.val().into_dispatch()));
}
