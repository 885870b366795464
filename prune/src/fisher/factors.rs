//! What the rows of one weight are made from: what it meets, and gradients in what comes out.

use std::ops::Range;

use burn::tensor::{IndexingUpdateOp, Int, Tensor};

use crate::fisher::kernel_rows::{KernelShape, kernel_rows};
use crate::fisher::view::View;

/// Inputs and output gradients of the uses of one weight, or of a view of it, in one pass.
pub(crate) struct Factors {
    /// Position of the parameter in the layout.
    pub(crate) layer: usize,
    pub(crate) view: View,
    pub(crate) parts: Parts,
}

/// The two factors; their first axis counts rows.
pub(crate) enum Parts {
    /// Row: leftᵀ · right, of `[rows, positions, a]` and `[rows, positions, b]`.
    Product { left: Tensor<3>, right: Tensor<3> },
    /// Row: a table of `length` lines; those looked up get gradients `[rows, positions, width]`.
    Lookup {
        indices: Tensor<2, Int>,
        delta: Tensor<3>,
        length: usize,
    },
    /// Row: the gradient of a convolution's kernel, of `[rows · size, channels, height, width]`.
    Kernel {
        input: Tensor<4>,
        delta: Tensor<4>,
        shape: KernelShape,
    },
}

impl Factors {
    /// Joins uses of the same weight: one product over the positions of all of them.
    pub(crate) fn joined(factors: Vec<Self>) -> Vec<Self> {
        let mut joined: Vec<(Self, Vec<Tensor<3>>, Vec<Tensor<3>>)> = Vec::new();
        for one in factors {
            let Parts::Product { left, right } = &one.parts else {
                joined.push((one, Vec::new(), Vec::new()));
                continue;
            };
            let (left, right) = (left.clone(), right.clone());
            let same = |other: &&mut (Self, Vec<Tensor<3>>, Vec<Tensor<3>>)| {
                (other.0.layer, &other.0.view) == (one.layer, &one.view)
                    && other.1.first().map(|first| first.dims()[2]) == Some(left.dims()[2])
            };
            match joined.iter_mut().find(same) {
                Some((_, lefts, rights)) => {
                    lefts.push(left);
                    rights.push(right);
                }
                None => joined.push((one, vec![left], vec![right])),
            }
        }
        let join = |(mut one, lefts, rights): (Self, Vec<_>, Vec<_>)| {
            if lefts.len() > 1 {
                let (left, right) = (Tensor::cat(lefts, 1), Tensor::cat(rights, 1));
                one.parts = Parts::Product { left, right };
            }
            one
        };
        joined.into_iter().map(join).collect()
    }

    /// Some rows, `[rows, weights]`.
    pub(crate) fn rows(&self, rows: Range<usize>) -> Tensor<2> {
        let count = rows.len();
        let made = match &self.parts {
            Parts::Product { left, right } => {
                let [_, positions, height] = left.dims();
                let [.., width] = right.dims();
                let left = left.clone().slice([rows.clone()]).swap_dims(1, 2);
                let right = right.clone().slice([rows]);
                // An outer product alone is no work for a matrix product.
                let product = match positions {
                    1 => left * right,
                    _ => left.matmul(right),
                };
                product.reshape([count, height * width])
            }
            Parts::Lookup {
                indices,
                delta,
                length,
            } => {
                let [_, positions, width] = delta.dims();
                let firsts: Vec<i64> = (0..count * positions)
                    .map(|at| (at / positions * length) as i64)
                    .collect();
                let device = delta.device();
                let firsts = Tensor::<1, Int>::from_data(&firsts[..], &device);
                let indices = indices.clone().slice([rows.clone()]);
                // Those of the user may be in another dtype than the device's own.
                let indices = indices.cast(firsts.dtype());
                let found = indices.reshape([count * positions]) + firsts;
                let delta = delta.clone().slice([rows]);
                let table = Tensor::<2>::zeros([count * length, width], (&device, delta.dtype()));
                let delta = delta.reshape([count * positions, width]);
                let table = table.select_assign(0, found, delta, IndexingUpdateOp::Add);
                table.reshape([count, length * width])
            }
            Parts::Kernel {
                input,
                delta,
                shape,
            } => {
                let examples = rows.start * shape.size..rows.end * shape.size;
                let input = input.clone().slice([examples.clone()]);
                let delta = delta.clone().slice([examples]);
                kernel_rows(input, delta, shape)
            }
        };
        match self.view.is_whole() {
            true => made,
            false => self.view.back(made),
        }
    }
}
