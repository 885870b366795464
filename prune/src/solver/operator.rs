//! Products with some columns of G, many times over.

use burn::tensor::Tensor;

use crate::error::PruneError;
use crate::gradient_matrix::{column, read};
use crate::problem::{Problem, narrow};

/// Whether this many elements of G may be gathered and kept on the device: a small part of G, or
/// little in absolute terms. What is larger is read from G each time.
pub(crate) fn fits(problem: &Problem, elements: usize) -> bool {
    let all = problem.samples() * problem.parameters();
    elements <= (all / 8).max(RESIDENT_ELEMENTS)
}

/// 96 MiB in F32.
const RESIDENT_ELEMENTS: usize = 24 << 20;

#[derive(Debug)]
pub(crate) struct Operator<'a> {
    problem: &'a Problem,
    indices: &'a [usize],
    columns: Option<Tensor<2>>,
}

impl<'a> Operator<'a> {
    pub(crate) fn new(problem: &'a Problem, indices: &'a [usize]) -> Self {
        // All columns need no copy: they are read in order where they lie.
        let some = indices.len() < problem.parameters();
        let small = some && fits(problem, problem.samples() * indices.len());
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
