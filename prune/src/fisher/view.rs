//! How a weight was turned before it is used: transposed, cut, reshaped.

use burn::backend::ir::BaseOperationIr;
use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, TensorMetadata};
use burn::tensor::{Shape, Slice, Tensor};

/// From a parameter to the tensor that an operation reads, whose numbers are some of the
/// parameter's, in another order.
///
/// Reshapes do not change the order of the numbers, so they leave no trace here.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct View(Vec<Step>);

#[derive(Debug, Clone, PartialEq)]
enum Step {
    /// Axes in another order.
    Permute { from: Vec<usize>, axes: Vec<usize> },
    /// A part of a tensor `from`.
    Slice {
        from: Vec<usize>,
        part: Vec<Slice>,
        to: Vec<usize>,
    },
}

impl View {
    /// This view, then an operation; `None` where that does more than to move numbers.
    pub(crate) fn then(&self, operation: &BaseOperationIr) -> Option<Self> {
        let mut view = self.clone();
        match operation {
            BaseOperationIr::Reshape(_) => {}
            BaseOperationIr::Expand(op) if long(&op.input.shape) == long(&op.out.shape) => {}
            BaseOperationIr::Permute(op) => view.permute(&op.input.shape, op.axes.clone()),
            BaseOperationIr::SwapDims(op) => {
                let mut axes: Vec<usize> = (0..op.input.shape.num_dims()).collect();
                axes.swap(op.dim1, op.dim2);
                view.permute(&op.input.shape, axes);
            }
            BaseOperationIr::Slice(op) => view.0.push(Step::Slice {
                from: op.tensor.shape.to_vec(),
                part: op.ranges.clone(),
                to: op.out.shape.to_vec(),
            }),
            _ => return None,
        }
        Some(view)
    }

    fn permute(&mut self, from: &Shape, axes: Vec<usize>) {
        let moved = axes.iter().filter(|axis| from[**axis] != 1);
        if !moved.is_sorted() {
            let from = from.to_vec();
            self.0.push(Step::Permute { from, axes });
        }
    }

    /// The view without a transposition at its end that makes a matrix of this shape.
    pub(crate) fn before_transposition(&self, matrix: [usize; 2]) -> Option<Self> {
        let (last, before) = self.0.split_last()?;
        match last {
            // Of two long axes there is one other order.
            Step::Permute { from, .. }
                if long(&Shape::from(from.clone())) == [matrix[1], matrix[0]] =>
            {
                Some(Self(before.to_vec()))
            }
            _ => None,
        }
    }

    pub(crate) fn is_whole(&self) -> bool {
        self.0.is_empty()
    }

    /// Gradients `[rows, elements of the view]` as those of the parameter, `[rows, weights]`: the
    /// numbers go back to where they came from, and to the others no gradient goes.
    pub(crate) fn back(&self, rows: Tensor<2>) -> Tensor<2> {
        let [count, _] = rows.dims();
        let with_rows = |shape: &[usize]| -> Shape {
            let shape = std::iter::once(&count).chain(shape);
            shape.copied().collect::<Vec<_>>().into()
        };
        let mut gradient = rows.into_dispatch();
        for step in self.0.iter().rev() {
            gradient = match step {
                Step::Permute { from, axes } => {
                    let permuted: Vec<usize> = axes.iter().map(|axis| from[*axis]).collect();
                    let gradient = Dispatch::float_reshape(gradient, with_rows(&permuted));
                    let mut inverse = vec![0; axes.len() + 1];
                    for (position, axis) in axes.iter().enumerate() {
                        inverse[axis + 1] = position + 1;
                    }
                    Dispatch::float_permute(gradient, &inverse)
                }
                Step::Slice { from, part, to } => {
                    let gradient = Dispatch::float_reshape(gradient, with_rows(to));
                    let device = gradient.device();
                    let dtype = gradient.dtype();
                    let zeros = Dispatch::float_zeros(with_rows(from), &device, dtype.into());
                    let mut slices = vec![Slice::from(0..count)];
                    slices.extend(part);
                    Dispatch::float_slice_assign(zeros, &slices, gradient)
                }
            };
        }
        let elements = gradient.shape().num_elements();
        let shape = Shape::from([count, elements / count]);
        Tensor::from_dispatch(Dispatch::float_reshape(gradient, shape))
    }
}

/// Lengths of the axes that are longer than 1.
fn long(shape: &Shape) -> Vec<usize> {
    shape
        .iter()
        .copied()
        .filter(|length| *length != 1)
        .collect()
}
