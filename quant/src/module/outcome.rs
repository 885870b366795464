//! What a run of a model comes to.

use burn::tensor::Tensor;

use crate::QuantError;

/// What a closure that runs a model may return: nothing, or a result whose value is of no interest.
///
/// So [`QuantizedForward::run`](crate::QuantizedForward::run), which can fail, is such a closure as
/// it is.
pub trait RunOutcome {
    /// Whether it went well.
    ///
    /// # Errors
    ///
    /// What went wrong.
    fn outcome(self) -> Result<(), QuantError>;
}

impl RunOutcome for () {
    fn outcome(self) -> Result<(), QuantError> {
        Ok(())
    }
}

impl<T> RunOutcome for Result<T, QuantError> {
    fn outcome(self) -> Result<(), QuantError> {
        self.map(drop)
    }
}

/// What a closure that gives a tensor may return: the tensor, or a result of it.
pub trait TensorOutcome<const D: usize> {
    /// The tensor.
    ///
    /// # Errors
    ///
    /// What went wrong.
    fn tensor(self) -> Result<Tensor<D>, QuantError>;
}

impl<const D: usize> TensorOutcome<D> for Tensor<D> {
    fn tensor(self) -> Result<Self, QuantError> {
        Ok(self)
    }
}

impl<const D: usize> TensorOutcome<D> for Result<Tensor<D>, QuantError> {
    fn tensor(self) -> Self {
        self
    }
}
