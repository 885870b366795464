//! How large the inputs are that each weight meets, for Wanda.

use burn::backend::DispatchTensor;
use burn::backend::ir::OperationIr;
use burn::module::Module;
use burn::tensor::Tensor;

use crate::fisher::executor::{Observer, Tensors, execute};
use crate::fisher::gradient_matrix::read;
use crate::fisher::per_example::{bases, by_tensor};
use crate::fisher::product::{Products, Spread};
use crate::fisher::trace::Trace;
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
/// other numbers of examples, [`PruneError::Trace`] where the forward pass cannot be recorded or has
/// an operation that is not known.
pub fn activation_norms<M: Module, B: Batch>(
    model: &M,
    selection: &Selection,
    loss: impl Fn(&M, &B) -> Tensor<1>,
    batches: impl IntoIterator<Item = B>,
) -> Result<Vec<f32>, PruneError> {
    let model = model.valid();
    let parameters = bases(&model);
    let layers = selection.layout().layers();
    let mut sums: Vec<Vec<(Tensor<1>, Spread)>> = layers.iter().map(|_| Vec::new()).collect();
    let mut any = false;
    for batch in batches {
        any = true;
        batch.check()?;
        let batch = batch.to_device(selection.device());
        let failed = |reason: String| PruneError::Trace { reason };
        let trace = Trace::record(&model, &loss, &batch).map_err(failed)?;
        let mut squares = Squares {
            products: Products::new(
                &trace,
                selection,
                &(0..selection.layout().len()),
                batch.examples(),
            ),
            sums: &mut sums,
        };
        execute(
            &trace,
            &by_tensor(&trace, &parameters),
            selection.device(),
            &mut squares,
        )
        .map_err(failed)?;
    }
    if !any {
        return Err(PruneError::NoSamples);
    }
    let mut norms = Vec::with_capacity(selection.layout().len());
    for (layer, uses) in layers.iter().zip(sums) {
        let mut total = vec![0.0; layer.len()];
        for (squares, spread) in uses {
            let squares = spread.over(&read(squares)?, layer.len());
            total
                .iter_mut()
                .zip(squares)
                .for_each(|(total, square)| *total += square);
        }
        norms.extend(total.into_iter().map(f32::sqrt));
    }
    Ok(norms)
}

/// Sums squares of what meets each weight: per layer one sum for each use, on the device.
struct Squares<'a> {
    products: Products,
    sums: &'a mut Vec<Vec<(Tensor<1>, Spread)>>,
}

impl Observer for Squares<'_> {
    fn observe(
        &mut self,
        operation: &OperationIr,
        tensors: &Tensors,
        output: DispatchTensor,
    ) -> Result<DispatchTensor, String> {
        if let Some(product) = self.products.find(operation, tensors)? {
            let layer = product.layer;
            let (squares, spread) = product.squares();
            let uses = &mut self.sums[layer];
            match uses.pop() {
                // One sum per layer: its uses see as many features.
                Some((sum, spread)) => uses.push((sum + squares, spread)),
                None => uses.push((squares, spread)),
            }
        }
        Ok(output)
    }
}
