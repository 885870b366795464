//! Sums behind a product: what its outputs are added to.

use burn::backend::ir::{
    ModuleOperationIr, NumericOperationIr, OperationIr, ScalarIr, TensorId, TensorIr,
};

use super::Walk;
use super::product::{Kind, Product};
use crate::{Node, Tensors};

/// The other summand of a product's outputs, as in `s + f(x)`.
#[derive(Debug, Clone)]
pub struct Residual {
    /// The summand, of the shape of the sum.
    pub other: TensorId,
    /// How many axes it has.
    pub rank: usize,
    /// Which of them is that of the channels, one for each output of the product: behind a convolution the
    /// second one, elsewhere the last.
    pub axis: usize,
    /// The normalization between the product and the sum.
    pub norm: Option<ResidualNorm>,
}

/// A BatchNorm with running statistics.
#[derive(Debug, Clone)]
pub struct ResidualNorm {
    /// γ, one number for each channel.
    pub gamma: TensorId,
    /// The running variance.
    pub variance: TensorId,
    /// What is added to it.
    pub epsilon: ScalarIr,
}

impl<O: Tensors> Walk<O> {
    /// What the outputs of a product are added to, if that is known before operation `first`, and if
    /// nothing else reads them: behind biases, changes of shape that keep the rows, and a BatchNorm at most.
    ///
    /// A layer that is fitted there can make up for what was changed in the other summand.
    pub fn residual(&self, product: &Product, first: usize) -> Option<Residual> {
        // A weight on the left has its outputs on another axis.
        if !matches!(product.kind, Kind::Last | Kind::Patches(_)) {
            return None;
        }
        let script = &self.scripts[0];
        let graph = &script.graph;
        let mut node = graph.node(product.node);
        let mut norm = None;
        loop {
            let out = node.operation().outputs().next()?;
            // Rows stay rows, and channels channels.
            if channels(product, out) != Some(product.outputs) || graph.outputs.contains(&out.id) {
                return None;
            }
            let readers: Vec<Node<'_>> = node.readers().collect();
            let [only] = readers[..] else {
                return None;
            };
            node = only;
            match node.operation() {
                OperationIr::Module(ModuleOperationIr::BatchNorm(op))
                    if norm.is_none()
                        && op.x.id == out.id
                        && (product.is_convolution() || out.shape.num_dims() == 2) =>
                {
                    norm = Some(ResidualNorm {
                        gamma: op.gamma.id,
                        variance: op.variance.id,
                        epsilon: op.epsilon,
                    });
                }
                OperationIr::NumericFloat(_, NumericOperationIr::Add(op)) => {
                    let other = match op.lhs.id == out.id {
                        true => &op.rhs,
                        false => &op.lhs,
                    };
                    if script.view(other.id).is_some() {
                        continue;
                    }
                    let made_later = graph.nodes().skip(first).any(|node| {
                        let mut outputs = node.operation().outputs();
                        outputs.any(|made| made.id == other.id)
                    });
                    // A size of 1 in one batch may be another one in the next.
                    let at = node.index();
                    let alike = self.scripts.iter().all(|script| {
                        let operation = &script.graph.operations[at];
                        let rows = matches!(
                            operation,
                            OperationIr::NumericFloat(_, NumericOperationIr::Add(op))
                                if op.lhs.shape == op.rhs.shape
                        );
                        let sum = operation.outputs().next();
                        rows && sum
                            .is_some_and(|sum| channels(product, sum) == Some(product.outputs))
                    });
                    let fits = other.id != out.id && alike && !made_later;
                    let rank = other.shape.num_dims();
                    return fits.then_some(Residual {
                        other: other.id,
                        rank,
                        axis: match product.is_convolution() {
                            true => 1,
                            false => rank - 1,
                        },
                        norm,
                    });
                }
                _ if node.name() == "reshape" && !product.is_convolution() => {}
                _ => return None,
            }
        }
    }
}

/// The size of the axis of the channels, in the form of a product's outputs.
fn channels(product: &Product, tensor: &TensorIr) -> Option<usize> {
    let sizes = tensor.shape.to_vec();
    match product.is_convolution() {
        true => sizes.get(1).copied(),
        false => sizes.last().copied(),
    }
}
