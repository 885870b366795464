//! The use of a prunable weight in a recorded loss: which tensor it meets, and how.

use burn::backend::ir::TensorId;
use burn::backend::ops::{FloatTensorOps, IntTensorOps, UnfoldOptions};
use burn::backend::{Dispatch, DispatchTensor, TensorMetadata};
use burn::tensor::{DType, FloatDType, Int, Tensor};

use crate::fisher::factors::{Factors, Parts};
use crate::fisher::kernel_rows::KernelShape;
use crate::fisher::view::View;

/// One use of a prunable weight.
#[derive(Debug, Clone)]
pub(crate) struct Use {
    /// Position of the parameter in the layout.
    pub(crate) layer: usize,
    pub(crate) view: View,
    /// What the weight is multiplied with; its first axis counts examples, perhaps times positions.
    pub(crate) operand: TensorId,
    pub(crate) kind: Kind,
}

#[derive(Debug, Clone)]
pub(crate) enum Kind {
    /// Vectors times a matrix.
    Product {
        input: usize,
        output: usize,
        /// The parameter is `[output, input]`.
        transposed: bool,
        /// The vectors are the columns of the operand, not its rows.
        columns: bool,
    },
    /// Of a table `[length, width]`: which lines were looked up.
    Lookup { length: usize, width: usize },
    /// `[batch, channels, height, width]`; that of a 1-d convolution has height 1.
    Kernel {
        kernel: [usize; 2],
        options: UnfoldOptions,
        groups: usize,
        /// The operand is what a convolution of the result would give.
        transposed: bool,
    },
}

impl Use {
    /// What rows are made from, in F32: of `groups` rows, the value of the operand and the gradient in
    /// the result.
    pub(crate) fn factors(
        &self,
        operand: DispatchTensor,
        delta: DispatchTensor,
        groups: usize,
    ) -> Factors {
        let (operand, delta) = (in_f32(operand), in_f32(delta));
        let parts = match self.kind {
            Kind::Product {
                input,
                output,
                transposed,
                columns,
            } => {
                let input = vectors(operand, input, groups, columns);
                let delta = vectors(delta, output, groups, columns);
                let (left, right) = match transposed {
                    false => (input, delta),
                    true => (delta, input),
                };
                Parts::Product { left, right }
            }
            Kind::Lookup { length, width } => {
                let delta = vectors(delta, width, groups, false);
                let [_, positions, _] = delta.dims();
                Parts::Lookup {
                    indices: indices(operand).reshape([groups, positions]),
                    delta,
                    length,
                }
            }
            Kind::Kernel {
                kernel,
                ref options,
                groups: split,
                transposed,
            } => {
                let (operand, delta) = (images(operand), images(delta));
                let shape = KernelShape {
                    kernel,
                    options: options.clone(),
                    split,
                    size: operand.dims()[0] / groups,
                };
                let (input, delta) = match transposed {
                    false => (operand, delta),
                    true => (delta, operand),
                };
                Parts::Kernel {
                    input,
                    delta,
                    shape,
                }
            }
        };
        Factors {
            layer: self.layer,
            view: self.view.clone(),
            parts,
        }
    }

    /// A product with a transposed matrix is one of the matrix, with the factors in another order.
    pub(crate) fn turn(&mut self) {
        if let Kind::Product {
            input,
            output,
            transposed,
            ..
        } = &mut self.kind
        {
            let matrix = match transposed {
                false => [*input, *output],
                true => [*output, *input],
            };
            if let Some(view) = self.view.before_transposition(matrix) {
                self.view = view;
                *transposed = !*transposed;
            }
        }
    }
}

/// A float tensor in F32; indices as they are.
fn in_f32(tensor: DispatchTensor) -> DispatchTensor {
    match tensor.dtype() {
        DType::F32 => tensor,
        dtype if dtype.is_float() => Dispatch::float_cast(tensor, FloatDType::F32),
        _ => tensor,
    }
}

/// Any float tensor as `[rows, positions, width]`: vectors that lie along its last axis, or along
/// the one before.
fn vectors(tensor: DispatchTensor, width: usize, rows: usize, columns: bool) -> Tensor<3> {
    let shape = tensor.shape();
    let elements = shape.num_elements();
    let reshape = |tensor, shape: [usize; 3]| -> Tensor<3> {
        Tensor::from_dispatch(Dispatch::float_reshape(tensor, shape.into()))
    };
    let of_rows = [rows, elements / rows / width, width];
    match columns {
        false => reshape(tensor, of_rows),
        true => {
            let count = shape[shape.num_dims() - 1];
            reshape(tensor, [elements / width / count, width, count])
                .swap_dims(1, 2)
                .reshape(of_rows)
        }
    }
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
