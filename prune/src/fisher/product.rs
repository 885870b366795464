//! The uses of prunable weights in a recorded loss: which tensor meets which weight, and how.

use std::collections::HashMap;
use std::ops::Range;

use burn::backend::ir::{
    BaseOperationIr, FloatOperationIr, ModuleOperationIr, OperationIr, TensorId, TensorIr,
};
use burn::backend::ops::{FloatTensorOps, IntTensorOps, UnfoldOptions};
use burn::backend::{Dispatch, DispatchTensor, TensorMetadata};
use burn::tensor::module::unfold4d;
use burn::tensor::{DType, FloatDType, IndexingUpdateOp, Int, Slice, Tensor};

use crate::Selection;
use crate::fisher::executor::{Tensors, name};
use crate::fisher::kernel_rows::{KernelShape, kernel_rows};
use crate::fisher::per_example::Uses;
use crate::fisher::trace::Trace;

/// One use of a prunable weight.
pub(crate) struct Product {
    /// Position of the parameter in the layout.
    pub(crate) layer: usize,
    /// What the weight is multiplied with; its first axis counts examples, perhaps times positions.
    input: DispatchTensor,
    kind: Kind,
}

#[derive(Clone)]
enum Kind {
    /// `[..., d_input]` to `[..., d_output]`.
    Linear { input: usize, output: usize },
    /// Of a table `[rows, width]`: which rows were looked up.
    Embedding { rows: usize, width: usize },
    /// `[batch, channels, height, width]`; that of a 1-d convolution has height 1.
    Conv {
        kernel: [usize; 2],
        options: UnfoldOptions,
        groups: usize,
        /// Shape of what comes out.
        output: [usize; 4],
    },
}

impl Product {
    /// The same use outside of the graph of the backward pass.
    pub(crate) fn without_autodiff(mut self) -> Self {
        if !matches!(self.kind, Kind::Embedding { .. }) {
            let shape = self.input.shape();
            let input = flat(self.input).without_autodiff().into_dispatch();
            self.input = Dispatch::float_reshape(input, shape);
        }
        self
    }

    /// About how many elements of each row [`rows`](Self::rows) makes to have some columns of the
    /// `weights` of the parameter.
    pub(crate) fn made(&self, columns: usize, weights: usize) -> usize {
        match self.kind {
            Kind::Linear { .. } => columns,
            Kind::Embedding { .. } | Kind::Conv { .. } => weights,
        }
    }

    /// Gradients of the weight for some rows: Σ xᵢ ⊗ δᵢ over the examples of each,
    /// `[rows, columns]`: those weights of the parameter. `delta` is the flat gradient in the output,
    /// of all rows.
    pub(crate) fn rows(
        &self,
        delta: &Tensor<1>,
        rows: Range<usize>,
        columns: Range<usize>,
        uses: &Uses,
    ) -> Tensor<2> {
        let (groups, size) = (rows.len(), uses.size);
        let part = |length: usize| {
            let per_row = length / uses.groups;
            rows.start * per_row..rows.end * per_row
        };
        let delta = delta.clone().slice([part(delta.dims()[0])]);
        let elements = delta.dims()[0];
        let input = self.input.clone();
        let shape = input.shape();
        let mut slices = vec![Slice::from(part(shape[0]))];
        slices.extend(shape.iter().skip(1).map(|length| Slice::from(0..*length)));
        let input = match self.kind {
            Kind::Embedding { .. } => Dispatch::int_slice(input, &slices),
            _ => Dispatch::float_slice(input, &slices),
        };
        // The rows, and which weight is their first.
        let (rows, first) = match self.kind.clone() {
            Kind::Linear {
                input: from,
                output: to,
            } => {
                let positions = elements / groups / to;
                let delta = delta.reshape([groups, positions, to]);
                let features = columns.start / to..columns.end.div_ceil(to);
                let first = features.start * to;
                let input = flat(input).reshape([groups, positions, from]);
                let input = input.slice([0..groups, 0..positions, features.clone()]);
                let input = input.swap_dims(1, 2);
                // An outer product alone is no work for a matrix product.
                let rows = match positions {
                    1 => input * delta,
                    _ => input.matmul(delta),
                };
                (rows.reshape([groups, features.len() * to]), first)
            }
            Kind::Embedding { rows, width } => {
                let positions = elements / groups / width;
                let firsts: Vec<i64> = (0..groups * positions)
                    .map(|at| (at / positions * rows) as i64)
                    .collect();
                let firsts = Tensor::<1, Int>::from_data(&firsts[..], &delta.device());
                let table =
                    Tensor::<2>::zeros([groups * rows, width], (&delta.device(), delta.dtype()));
                let delta = delta.reshape([groups * positions, width]);
                let found = indices(input) + firsts;
                let table = table.select_assign(0, found, delta, IndexingUpdateOp::Add);
                (table.reshape([groups, rows * width]), 0)
            }
            Kind::Conv {
                kernel,
                options,
                groups: split,
                output: [_, channels, height, width],
            } => {
                let input = images(input);
                let delta = delta.reshape([groups * size, channels, height, width]);
                let shape = KernelShape {
                    kernel,
                    options,
                    split,
                    groups,
                    size,
                };
                (kernel_rows(input, delta, &shape), 0)
            }
        };
        let [_, width] = rows.dims();
        match columns.len() == width {
            true => rows,
            false => rows.slice([0..groups, columns.start - first..columns.end - first]),
        }
    }

    /// For each input feature of the weight (input, or channel and kernel position), the sum of its
    /// squares over examples and positions; and how that spreads over the weight.
    pub(crate) fn squares(self) -> (Tensor<1>, Spread) {
        match self.kind {
            Kind::Linear { input, output } => {
                let elements = self.input.shape().num_elements();
                let rows = flat(self.input).cast(FloatDType::F32);
                let rows = rows.reshape([elements / input, input]);
                let squares = rows.square().sum_dim(0).reshape([input]);
                (
                    squares,
                    Spread {
                        before: 1,
                        after: output,
                        groups: 1,
                    },
                )
            }
            Kind::Embedding { rows, width } => {
                let found = indices(self.input);
                let device = found.device();
                let ones = Tensor::ones(found.dims(), (&device, DType::F32));
                let counts = Tensor::<1>::zeros([rows], (&device, DType::F32));
                let counts = counts.select_assign(0, found, ones, IndexingUpdateOp::Add);
                (
                    counts,
                    Spread {
                        before: 1,
                        after: width,
                        groups: 1,
                    },
                )
            }
            Kind::Conv {
                kernel,
                options,
                groups,
                ..
            } => {
                let patches = unfold4d(images(self.input), kernel, options);
                let patches = patches.cast(FloatDType::F32);
                let taken = patches.dims()[1];
                let squares = patches.square().sum_dim(2).sum_dim(0).reshape([taken]);
                (
                    squares,
                    Spread {
                        before: 0,
                        after: 1,
                        groups,
                    },
                )
            }
        }
    }
}

/// How numbers per input feature spread over a weight.
pub(crate) struct Spread {
    before: usize,
    after: usize,
    groups: usize,
}

impl Spread {
    /// `features` repeated for `weights` weights: `[d_input, d_output]` has a feature per row, a
    /// kernel `[channels_out, channels_in / groups, ...]` all features of its group per output.
    pub(crate) fn over(&self, features: &[f32], weights: usize) -> Vec<f32> {
        match self.before {
            1 => features
                .iter()
                .flat_map(|x| std::iter::repeat_n(*x, self.after))
                .collect(),
            _ => {
                let group = features.len() / self.groups;
                let outputs = weights / group / self.groups;
                let parts = features.chunks(group.max(1));
                parts
                    .flat_map(|part| (0..outputs).flat_map(|_| part.iter().copied()))
                    .collect()
            }
        }
    }
}

/// Any float tensor as a vector.
fn flat(tensor: DispatchTensor) -> Tensor<1> {
    let elements = tensor.shape().num_elements();
    Tensor::from_dispatch(Dispatch::float_reshape(tensor, [elements].into()))
}

/// Indices of any shape as a vector.
fn indices(tensor: DispatchTensor) -> Tensor<1, Int> {
    let elements = tensor.shape().num_elements();
    Tensor::from_dispatch(Dispatch::int_reshape(tensor, [elements].into()))
}

/// `[batch, channels, height, width]`, or `[batch, channels, width]` with height 1.
fn images(tensor: DispatchTensor) -> Tensor<4> {
    let shape = tensor.shape();
    Tensor::from_dispatch(match shape.num_dims() {
        3 => Dispatch::float_reshape(tensor, [shape[0], shape[1], 1, shape[2]].into()),
        _ => tensor,
    })
}

/// Finds the uses of prunable weights while a trace is executed.
pub(crate) struct Products {
    /// Prunable weights by their tensors: position in the layout.
    weights: HashMap<TensorId, usize>,
    examples: usize,
}

impl Products {
    /// Of the parameters that have a part in `columns`.
    pub(crate) fn new(
        trace: &Trace,
        selection: &Selection,
        columns: &Range<usize>,
        examples: usize,
    ) -> Self {
        let layers = selection.layout().layers();
        let position = |path: &String| {
            let position = selection.layer_at(path)?;
            let range = layers[position].range();
            (range.start < columns.end && columns.start < range.end).then_some(position)
        };
        let weights = trace.parameters.iter();
        let weights = weights.filter_map(|(id, path)| Some((*id, position(path)?)));
        Self {
            weights: weights.collect(),
            examples,
        }
    }

    /// The use that an operation makes of a weight, if it makes one; fails with the reason where
    /// per-example gradients of such a use are not known.
    pub(crate) fn find(
        &mut self,
        operation: &OperationIr,
        tensors: &Tensors,
    ) -> Result<Option<Product>, String> {
        let Some(layer) = operation
            .inputs()
            .find_map(|input| self.weights.get(&input.id).copied())
        else {
            return Ok(None);
        };
        let product = match operation {
            OperationIr::Module(ModuleOperationIr::Linear(op)) if self.is(&op.weight) => {
                self.linear(layer, &op.x, &op.weight, tensors)?
            }
            OperationIr::Float(_, FloatOperationIr::Matmul(op))
                if self.is(&op.rhs) && !self.is(&op.lhs) =>
            {
                self.linear(layer, &op.lhs, &op.rhs, tensors)?
            }
            OperationIr::Module(ModuleOperationIr::Conv2d(op)) if self.is(&op.weight) => {
                let options = &op.options;
                let window = Window {
                    padding: options.padding,
                    stride: options.stride,
                    dilation: options.dilation,
                    groups: options.groups,
                };
                self.convolution(layer, [&op.x, &op.weight, &op.out], window, tensors)?
            }
            OperationIr::Module(ModuleOperationIr::Conv1d(op)) if self.is(&op.weight) => {
                let options = &op.options;
                let window = Window {
                    padding: [(0, 0), options.padding[0]],
                    stride: [1, options.stride[0]],
                    dilation: [1, options.dilation[0]],
                    groups: options.groups,
                };
                self.convolution(layer, [&op.x, &op.weight, &op.out], window, tensors)?
            }
            OperationIr::Module(ModuleOperationIr::Embedding(op)) if self.is(&op.weights) => {
                self.batch_first(&op.indices)?;
                Product {
                    layer,
                    input: tensors.get(&op.indices)?,
                    kind: Kind::Embedding {
                        rows: op.weights.shape[0],
                        width: op.weights.shape[1],
                    },
                }
            }
            // The same weight with axes of length 1 around it.
            OperationIr::BaseFloat(BaseOperationIr::Reshape(op)) if same(&op.input, &op.out) => {
                self.weights.insert(op.out.id, layer);
                return Ok(None);
            }
            other => return Err(format!("a weight is used by {}", name(other))),
        };
        Ok(Some(product))
    }

    fn is(&self, tensor: &TensorIr) -> bool {
        self.weights.contains_key(&tensor.id)
    }

    fn linear(
        &self,
        layer: usize,
        x: &TensorIr,
        weight: &TensorIr,
        tensors: &Tensors,
    ) -> Result<Product, String> {
        let rank = weight.shape.num_dims();
        let (input, output) = (weight.shape[rank - 2], weight.shape[rank - 1]);
        if input * output != weight.shape.num_elements() {
            return Err("a weight is a batch of matrices".into());
        }
        self.batch_first(x)?;
        Ok(Product {
            layer,
            input: tensors.get(x)?,
            kind: Kind::Linear { input, output },
        })
    }

    fn convolution(
        &self,
        layer: usize,
        [x, weight, out]: [&TensorIr; 3],
        window: Window,
        tensors: &Tensors,
    ) -> Result<Product, String> {
        let [(top, bottom), (left, right)] = window.padding;
        if top != bottom || left != right {
            return Err("a convolution is padded on one side more".into());
        }
        self.batch_first(x)?;
        // Of 1-d tensors the height is left out.
        let height = |tensor: &TensorIr| match tensor.shape.num_dims() {
            3 => 1,
            _ => tensor.shape[2],
        };
        let width = |tensor: &TensorIr| tensor.shape[tensor.shape.num_dims() - 1];
        Ok(Product {
            layer,
            input: tensors.get(x)?,
            kind: Kind::Conv {
                kernel: [height(weight), width(weight)],
                options: UnfoldOptions::new(window.stride, [top, left], window.dilation),
                groups: window.groups,
                output: [out.shape[0], out.shape[1], height(out), width(out)],
            },
        })
    }

    /// The first axis counts examples, or examples times positions.
    fn batch_first(&self, x: &TensorIr) -> Result<(), String> {
        match x.shape[0] % self.examples {
            0 => Ok(()),
            _ => Err(format!(
                "the input of a layer has the shape {:?}, which does not begin with {} examples",
                x.shape.to_vec(),
                self.examples
            )),
        }
    }
}

/// How a convolution moves over its input.
struct Window {
    /// Before and after each axis.
    padding: [(usize, usize); 2],
    stride: [usize; 2],
    dilation: [usize; 2],
    groups: usize,
}

/// Whether two shapes differ in axes of length 1 only.
fn same(one: &TensorIr, other: &TensorIr) -> bool {
    let long = |tensor: &TensorIr| -> Vec<usize> {
        tensor
            .shape
            .iter()
            .copied()
            .filter(|length| *length != 1)
            .collect()
    };
    long(one) == long(other)
}
