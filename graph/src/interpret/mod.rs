//! Computes recorded operations, one by one.
//!
//! Every result comes from an operation of Burn's [`Dispatch`](burn::backend::Dispatch): it runs on
//! every device, and with gradients where operands are tracked. Each family of operations has a
//! file. No match has a wildcard, so that an operation that is new in Burn does not compile here
//! before somebody has thought of it.

#[macro_use]
mod shapes;

mod activation;
mod base;
mod boolean;
mod float;
mod int;
mod module;
mod names;
mod noise;
mod numeric;
#[cfg(test)]
mod tests;

use burn::backend::ir::{DistributedOperationIr, OperationIr, TensorIr};
use burn::backend::{DispatchDevice, DispatchTensor};

pub use names::name;
pub(crate) use noise::{noise, noise_of};

/// Where an operation's operands come from and its results go.
///
/// Operands are fetched in the order of [`OperationIr::inputs`], each as often as it is named
/// there.
pub(crate) trait Operands {
    /// The float operand, in the dtype that the rules want; a quantized operand as it is.
    ///
    /// Operations on two floats expect them in one dtype.
    fn float(&mut self, tensor: &TensorIr) -> DispatchTensor;
    /// What is added to the logits of an attention: a mask may be numbers that no half dtype has.
    fn bias(&mut self, tensor: &TensorIr) -> DispatchTensor {
        self.float(tensor)
    }
    /// The int operand; as the float one, where nothing else is said.
    fn int(&mut self, tensor: &TensorIr) -> DispatchTensor {
        self.float(tensor)
    }
    /// The bool operand, likewise.
    fn bool(&mut self, tensor: &TensorIr) -> DispatchTensor {
        self.float(tensor)
    }
    /// Stores a result.
    fn set(&mut self, tensor: &TensorIr, value: DispatchTensor);
    /// The device of the execution.
    ///
    /// Bools are made as it stores them, whatever was recorded. Ints are made in the dtype that was
    /// recorded: a recording has the device's own only if the recording device was configured with
    /// it.
    fn device(&self) -> DispatchDevice;
}

/// An operation that cannot be executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Unsupported {
    /// Its [`name`].
    pub(crate) name: &'static str,
    /// The reason.
    pub(crate) why: &'static str,
}

/// What an operation of a family returns: the reason, where it cannot be executed.
type Done = Result<(), &'static str>;

/// Computes one recorded operation.
///
/// Initializations and drops do nothing: `operands` has the values and decides how long they live.
pub(crate) fn run(
    operation: &OperationIr,
    operands: &mut impl Operands,
) -> Result<(), Unsupported> {
    use DistributedOperationIr::{AllReduce, SyncCollective};
    let done = match operation {
        OperationIr::BaseFloat(op) => base::float(op, operands),
        OperationIr::BaseInt(op) => base::int(op, operands),
        OperationIr::BaseBool(op) => base::bool(op, operands),
        OperationIr::NumericFloat(_, op) => numeric::float(op, operands),
        OperationIr::NumericInt(_, op) => numeric::int(op, operands),
        OperationIr::Float(_, op) => float::run(op, operands),
        OperationIr::Int(op) => int::run(op, operands),
        OperationIr::Bool(op) => boolean::run(op, operands),
        OperationIr::Module(op) => module::run(op, operands),
        OperationIr::Activation(op) => activation::run(op, operands),
        OperationIr::Init(_) | OperationIr::Drop(_) => Ok(()),
        OperationIr::Custom(_) => Err("what it computes is known to its backend alone"),
        OperationIr::Distributed(AllReduce(_) | SyncCollective) => {
            Err("it takes part of several devices, and the graph runs on one")
        }
    };
    done.map_err(|why| Unsupported {
        name: name(operation),
        why,
    })
}
