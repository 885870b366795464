//! Products with some columns of G, many times over.

use burn::tensor::Tensor;

use crate::error::PruneError;
use crate::gradient_matrix::{column, read};
use crate::problem::{Problem, narrow};

/// Part of G that may be gathered and kept on the device; what is larger is read from G each time.
pub(crate) const RESIDENT_FRACTION: f64 = 0.15;

/// Products with G_S, gathered once where it is small, else through all of G.
#[derive(Debug)]
pub(crate) struct Operator<'a> {
    problem: &'a Problem,
    indices: &'a [usize],
    columns: Option<Tensor<2>>,
}

impl<'a> Operator<'a> {
    pub(crate) fn new(problem: &'a Problem, indices: &'a [usize]) -> Self {
        let small = indices.len() as f64 <= RESIDENT_FRACTION * problem.parameters() as f64;
        Self {
            problem,
            indices,
            columns: small.then(|| problem.gradients().columns(indices)),
        }
    }

    pub(crate) fn multiply(&self, change: &[f32]) -> Result<Vec<f64>, PruneError> {
        match &self.columns {
            Some(columns) => {
                let change = column(change, &columns.device());
                let product = read(columns.clone().matmul(change))?;
                Ok(product.into_iter().map(f64::from).collect())
            }
            None => self.problem.gradients().multiply_at(self.indices, change),
        }
    }

    pub(crate) fn transpose_multiply(&self, dual: &[f64]) -> Result<Vec<f32>, PruneError> {
        match &self.columns {
            Some(columns) => {
                let dual = column(&narrow(dual), &columns.device()).transpose();
                read(dual.matmul(columns.clone()))
            }
            None => {
                let gradients = self.problem.gradients();
                gradients.transpose_multiply_at(self.indices, &narrow(dual))
            }
        }
    }
}
