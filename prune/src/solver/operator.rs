//! Products with some columns of G, many times over.

use burn::tensor::Tensor;

use crate::error::PruneError;
use crate::fisher::gradient_matrix::{add_product, column};
use crate::host::read;
use crate::problem::{Problem, narrow};

#[derive(Debug)]
pub(crate) struct Operator<'a> {
    problem: &'a Problem,
    indices: &'a [usize],
    /// Where they are few: gathered, a part at a time.
    columns: Option<Vec<Tensor<2>>>,
}

impl<'a> Operator<'a> {
    pub(crate) fn new(problem: &'a Problem, indices: &'a [usize]) -> Result<Self, PruneError> {
        // All columns need no copy: they are read in order where they lie.
        let some = indices.len() < problem.parameters();
        let gradients = problem.gradients();
        let small = some && gradients.may_keep(problem.samples() * indices.len());
        let columns = gradients.chunks(indices).map(|chunk| Ok(chunk?.1));
        Ok(Self {
            problem,
            indices,
            columns: match small {
                true => Some(columns.collect::<Result<_, PruneError>>()?),
                false => None,
            },
        })
    }

    pub(crate) fn multiply(&self, change: &[f32]) -> Result<Vec<f64>, PruneError> {
        match &self.columns {
            Some(parts) => {
                let mut product = vec![0.0; self.problem.samples()];
                let mut first = 0;
                for columns in parts {
                    let end = first + columns.dims()[1];
                    add_product(&mut product, 1.0, columns, &change[first..end])?;
                    first = end;
                }
                Ok(product)
            }
            None => self.problem.gradients().multiply_at(self.indices, change),
        }
    }

    pub(crate) fn transpose_multiply(&self, dual: &[f64]) -> Result<Vec<f32>, PruneError> {
        match &self.columns {
            Some(parts) => {
                let dual = column(&narrow(dual), &self.problem.device()).transpose();
                let mut product = Vec::with_capacity(self.indices.len());
                for columns in parts {
                    product.extend(read(dual.clone().matmul(columns.clone()))?);
                }
                Ok(product)
            }
            None => {
                let gradients = self.problem.gradients();
                gradients.transpose_multiply_at(self.indices, &narrow(dual))
            }
        }
    }
}
