//! How large the inputs are that each weight meets, for Wanda.

use std::collections::HashMap;

use burn::module::Module;
use burn::tensor::Tensor;
use burn_lean_graph::{AsRecorded, GraphError, Node, Observed, Observer};

use crate::fisher::finder::uses;
use crate::fisher::uses::Use;
use crate::host::read;
use crate::model::layout::Layout;
use crate::model::recorded::record_loss;
use crate::{Batch, PruneError, Selection};

/// For each prunable weight the L2 norm of its input over all examples and positions of `batches`,
/// `[p]`: what [`Method::Wanda`](crate::Method::Wanda) multiplies magnitudes with
/// ([A Simple and Effective Pruning Approach for Large Language Models, Sun et al.,
/// 2023](https://arxiv.org/abs/2306.11695)).
///
/// The model runs in evaluation mode, as [`FisherConfig`](crate::FisherConfig) runs it; `loss` is
/// recorded and executed operation by operation to see the inputs inside of it.
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::tensor::{Device, Tensor};
/// use burn_lean_prune::{Selection, activation_norms};
///
/// let device = Device::flex();
/// let model = LinearConfig::new(2, 3).with_bias(false).init(&device);
/// let selection = Selection::of(&model, None)?;
/// let x = Tensor::<2>::from_floats([[3., 0.], [4., 1.]], &device);
/// let norms = activation_norms(&model, &selection, |model, x: &Tensor<2>| {
///     model.forward(x.clone()).mean()
/// }, [x])?;
/// assert_eq!(norms, [5., 5., 5., 1., 1., 1.]);
/// # Ok::<(), burn_lean_prune::PruneError>(())
/// ```
///
/// # Errors
///
/// [`PruneError::NoSamples`] without batches, [`PruneError::Mismatch`] where the parts of one have
/// other numbers of examples, [`PruneError::Trace`] where the forward pass cannot be recorded or
/// executed, or uses a weight in a way that is not known.
pub fn activation_norms<M: Module, B: Batch>(
    model: &M,
    selection: &Selection,
    loss: impl Fn(&M, &B) -> Tensor<1>,
    batches: impl IntoIterator<Item = B>,
) -> Result<Vec<f32>, PruneError> {
    let model = model.valid();
    let layout = selection.layout();
    let mut squares = Squares {
        layout,
        uses: HashMap::new(),
        sums: vec![None; layout.layers().len()],
    };
    let mut any = false;
    for batch in batches {
        any = true;
        batch.check()?;
        let failed = |reason: String| PruneError::Trace { reason };
        let of_graph = |error: GraphError| failed(error.to_string());
        let recording = record_loss(&model, &loss, &batch).map_err(of_graph)?;
        let all = 0..layout.len();
        let graph = recording.graph();
        // Sums over examples need not tell them apart.
        squares.uses = uses(graph, selection, &all, 1).map_err(failed)?;
        recording
            .execute_observed(&model, &(), &AsRecorded, &mut squares)
            .map_err(of_graph)?;
    }
    if !any {
        return Err(PruneError::NoSamples);
    }
    let mut norms = Vec::with_capacity(layout.len());
    for (layer, sum) in layout.layers().iter().zip(squares.sums) {
        match sum {
            Some(sum) => norms.extend(read(sum)?.into_iter().map(f32::sqrt)),
            None => norms.extend(std::iter::repeat_n(0.0, layer.len())),
        }
    }
    Ok(norms)
}

/// Sums squares of what meets each weight.
struct Squares<'a> {
    layout: &'a Layout,
    uses: HashMap<usize, Use>,
    /// Per layer, `[weights]`.
    sums: Vec<Option<Tensor<1>>>,
}

impl Observer for Squares<'_> {
    fn before(&mut self, node: &Node<'_>, tensors: &Observed<'_, '_>) {
        if let Some(of_weight) = self.uses.get(&node.index())
            && let Some(operand) = tensors.get(of_weight.operand)
        {
            let layer = of_weight.layer;
            let squares = of_weight.squares(operand, self.layout.layers()[layer].len());
            let sum = &mut self.sums[layer];
            *sum = Some(match sum.take() {
                Some(sum) => sum + squares,
                None => squares,
            });
        }
    }
}
