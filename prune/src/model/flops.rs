//! Floating-point operations per weight, counted on a recorded forward pass.

use std::collections::{HashMap, HashSet};

use burn::backend::ir::{FloatOperationIr, ModuleOperationIr, OperationIr, TensorId, TensorIr};
use burn::module::Module;
use burn::tensor::Tensor;
use burn_lean_graph::Graph;
use burn_lean_reparam::each_plain_float;

use crate::model::recorded::record_loss;
use crate::{Batch, PruneError};

/// Floating-point operations that one nonzero weight of each parameter costs per example, by the
/// path of the parameter: 2 (multiply, add) for every time the weight is used, 0 for the parameters
/// that no such operation uses.
///
/// `loss` is recorded on `batch` and not computed. Counted are matrix products, linear layers and
/// convolutions; a table that is looked up costs nothing. A weight that is reached through a mask,
/// a cast or another transformation of its own size counts for its parameter.
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::nn::conv::Conv2dConfig;
/// use burn::tensor::{Device, Tensor};
/// use burn_lean_prune::flops;
///
/// let device = Device::flex();
/// let conv = Conv2dConfig::new([1, 2], [3, 3]).with_bias(false).init(&device);
/// let images = Tensor::<4>::zeros([5, 1, 6, 6], &device);
/// let counted = flops(&conv, |conv, x: &Tensor<4>| conv.forward(x.clone()).mean(), &images)?;
/// // Each weight is used at 4 × 4 positions of an image.
/// assert_eq!(counted["weight"], 2.0 * 16.0);
/// # Ok::<(), burn_lean_prune::PruneError>(())
/// ```
///
/// # Errors
///
/// [`PruneError::Trace`] where the closure reads numbers, which do not exist while it is recorded;
/// [`PruneError::Mismatch`] where the parts of the batch have other numbers of examples.
pub fn flops<M: Module, B: Batch>(
    model: &M,
    loss: impl Fn(&M, &B) -> Tensor<1>,
    batch: &B,
) -> Result<HashMap<String, f64>, PruneError> {
    batch.check()?;
    let examples = batch.examples().max(1) as f64;
    let recording = record_loss(&model.valid(), &loss, batch);
    let recording = recording.map_err(|error| PruneError::Trace {
        reason: error.to_string(),
    })?;
    let mut zeros = HashMap::new();
    each_plain_float(model, |at, _| {
        zeros.insert(at.path(), 0.0);
    });
    // What the batch holds is among the constants.
    Ok(count(recording.graph(), zeros, examples, HashSet::new()))
}

/// What one weight of each of these parameters costs per example. `fixed`: constants that are of no input.
pub(crate) fn count(
    graph: &Graph,
    mut counted: HashMap<String, f64>,
    examples: f64,
    mut fixed: HashSet<TensorId>,
) -> HashMap<String, f64> {
    let parameters = graph.parameters().iter();
    let mut origin: HashMap<TensorId, String> = parameters
        .filter(|parameter| counted.contains_key(&parameter.path))
        .map(|parameter| (parameter.tensor, parameter.path.clone()))
        .collect();
    // What depends on no input.
    fixed.extend(graph.parameters().iter().map(|parameter| parameter.tensor));
    for node in graph.nodes() {
        let operation = node.operation();
        if operation.inputs().all(|input| fixed.contains(&input.id)) {
            fixed.extend(operation.outputs().map(|output| output.id));
        }
        if let Some(product) = Product::of(operation) {
            for weight in product.operands {
                if let Some(path) = origin.get(&weight.id) {
                    let weights = weight.shape.num_elements().max(1) as f64;
                    *counted.entry(path.clone()).or_default() += product.flops / weights / examples;
                }
            }
        } else {
            inherit(operation, &fixed, &mut origin);
        }
    }
    counted
}

/// An operation that multiplies weights with something.
struct Product<'a> {
    operands: Vec<&'a TensorIr>,
    flops: f64,
}

impl<'a> Product<'a> {
    fn of(operation: &'a OperationIr) -> Option<Self> {
        let elements = |tensor: &TensorIr| tensor.shape.num_elements() as f64;
        // [outputs, inputs per output...]: every output sums over a whole kernel.
        let over_kernel = |weight: &'a TensorIr, places: &TensorIr| {
            let kernel = elements(weight) / weight.shape[0] as f64;
            (weight, elements(places) * kernel)
        };
        let (operands, multiplications) = match operation {
            OperationIr::Float(_, FloatOperationIr::Matmul(op)) => {
                let inner = op.lhs.shape[op.lhs.shape.num_dims() - 1] as f64;
                (vec![&op.lhs, &op.rhs], elements(&op.out) * inner)
            }
            OperationIr::Module(op) => {
                use ModuleOperationIr::*;
                let (weight, multiplications) = match op {
                    Linear(op) => (&op.weight, elements(&op.out) * op.weight.shape[0] as f64),
                    Conv1d(op) => over_kernel(&op.weight, &op.out),
                    Conv2d(op) => over_kernel(&op.weight, &op.out),
                    Conv3d(op) => over_kernel(&op.weight, &op.out),
                    DeformableConv2d(op) => over_kernel(&op.weight, &op.out),
                    // [inputs, outputs per input...]: every input is spread over a whole kernel.
                    ConvTranspose1d(op) => over_kernel(&op.weight, &op.x),
                    ConvTranspose2d(op) => over_kernel(&op.weight, &op.x),
                    ConvTranspose3d(op) => over_kernel(&op.weight, &op.x),
                    _ => return None,
                };
                (vec![weight], multiplications)
            }
            _ => return None,
        };
        Some(Self {
            operands,
            flops: 2.0 * multiplications,
        })
    }
}

/// A tensor made of one parameter, of nothing that depends on an input, and of its size is that parameter
/// transformed.
fn inherit(
    operation: &OperationIr,
    fixed: &HashSet<TensorId>,
    origin: &mut HashMap<TensorId, String>,
) {
    if !operation.inputs().all(|input| fixed.contains(&input.id)) {
        return;
    }
    let mut sources = operation.inputs().filter_map(|input| {
        let path = origin.get(&input.id)?;
        Some((path.clone(), input.shape.num_elements()))
    });
    let Some((path, elements)) = sources.next() else {
        return;
    };
    if sources.any(|(other, _)| other != path) {
        return;
    }
    drop(sources);
    let outputs: Vec<TensorId> = operation
        .outputs()
        .filter(|output| output.shape.num_elements() == elements)
        .map(|output| output.id)
        .collect();
    for output in outputs {
        origin.insert(output, path.clone());
    }
}
