//! Who looks at the operations of an execution.

use burn::backend::DispatchTensor;
use burn::backend::ir::TensorId;

use super::tensors::Alive;
use crate::Node;

/// Looks at the operations of an execution, and may replace what they compute.
///
/// Under rules for a half dtype the parts of a softmax or a layer norm may be computed as one: what is
/// between them is not there.
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::tensor::{Device, Tensor};
/// use burn_lean_graph::{AsRecorded, Node, Observed, Observer, record};
///
/// /// The largest number that any operation computes.
/// struct Largest(f32);
///
/// impl Observer for Largest {
///     fn after(&mut self, node: &Node<'_>, tensors: &mut Observed<'_, '_>) {
///         for result in node.operation().outputs() {
///             let value = tensors.get(result.id).unwrap();
///             let value = Tensor::<2>::from_dispatch(value).max().into_scalar::<f32>();
///             self.0 = self.0.max(value);
///         }
///     }
/// }
///
/// let device = Device::flex();
/// let model = LinearConfig::new(4, 2).init(&device);
/// let x = Tensor::<2>::ones([3, 4], &device);
/// let recording = record(&model, &x, |model, x| model.forward(x) * 100.0)?;
/// let mut largest = Largest(f32::MIN);
/// let y = recording.execute_observed(&model, &x, &AsRecorded, &mut largest)?;
/// assert!(largest.0 >= y.max().into_scalar::<f32>());
/// # Ok::<(), burn_lean_graph::GraphError>(())
/// ```
pub trait Observer {
    /// Called before each operation: what it reads is there.
    fn before(&mut self, _node: &Node<'_>, _tensors: &Observed<'_, '_>) {}

    /// Called after each operation: what it computes is there.
    fn after(&mut self, _node: &Node<'_>, _tensors: &mut Observed<'_, '_>) {}
}

/// Nobody looks.
impl Observer for () {}

/// The tensors that are alive at an operation.
pub struct Observed<'a, 'g>(pub(super) &'a mut Alive<'g>);

impl std::fmt::Debug for Observed<'_, '_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Observed")
    }
}

impl Observed<'_, '_> {
    /// The value of a tensor, as it is stored: before the casts of the rules. `None` where it is
    /// not alive.
    pub fn get(&self, tensor: TensorId) -> Option<DispatchTensor> {
        self.0.output(tensor).ok()
    }

    /// Puts another value in the place of one, with the same shape and dtype; nothing happens to a
    /// tensor that is not alive.
    pub fn replace(
        &mut self,
        tensor: TensorId,
        change: impl FnOnce(DispatchTensor) -> DispatchTensor,
    ) {
        self.0.replace(tensor, change);
    }
}
