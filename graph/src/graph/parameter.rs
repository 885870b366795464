//! What stands for a parameter.

use burn::backend::ir::TensorId;
use burn::module::ParamId;

/// Where walks through a model meet a tensor of it: its path, and how many came at that path before. A
/// module may show several at one.
pub(crate) type ParamPlace = (String, usize);

/// A parameter of the recorded model, or a buffer of it.
#[derive(Debug, Clone)]
pub struct Parameter {
    /// Path in the module, for example `encoder.0.weight`.
    pub path: String,
    /// Burn's identity of it.
    pub id: ParamId,
    /// Shape.
    pub shape: Vec<usize>,
    /// The tensor that stands for it in the operations.
    pub tensor: TensorId,
    /// A running state that the forward pass has updated: the tensor with its next value.
    pub update: Option<TensorId>,
    /// Which of the parameters at this path: 0 but for a module that shows several at one path.
    pub(crate) occurrence: usize,
    /// A running state, or what looks like a running statistic.
    pub(crate) running: bool,
}

impl Parameter {
    /// Where walks through a model meet it.
    pub(crate) fn place(&self) -> ParamPlace {
        (self.path.clone(), self.occurrence)
    }
}
