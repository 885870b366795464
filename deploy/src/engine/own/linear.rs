//! Products of rows with a matrix.

use std::sync::Arc;

use burn_lean_kernels::{Epilogue, FloatMatrix, IntegerMatrix, Rows, SparseMatrix};

use super::failed;
use super::value::{Floats, Scale, Value, ordered};
use crate::DeployError;

/// `x · W`, and what follows.
#[derive(Debug)]
pub(super) struct Linear {
    pub(super) weight: Matrix,
    pub(super) ends: Arc<Ends>,
    /// Axes that the weight has more than two.
    pub(super) rank: usize,
}

#[derive(Debug, Clone)]
pub(super) enum Matrix {
    Codes(Arc<IntegerMatrix>),
    Floats(Arc<FloatMatrix>),
    Sparse(Arc<SparseMatrix>),
    /// Mostly zero, before [`Runner::settle`](super::Runner::settle) has measured it.
    Undecided(Arc<Undecided>),
}

/// A matrix as its nonzero numbers, and as all of them.
#[derive(Debug)]
pub(super) struct Undecided {
    pub(super) name: String,
    /// Of the parameter.
    pub(super) path: String,
    pub(super) sparse: Arc<SparseMatrix>,
    pub(super) dense: Arc<FloatMatrix>,
}

impl Matrix {
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Codes(matrix) => matrix.bytes(),
            Self::Floats(matrix) => matrix.bytes(),
            Self::Sparse(matrix) => matrix.bytes(),
            Self::Undecided(both) => both.dense.bytes(),
        }
    }

    fn shape(&self) -> [usize; 2] {
        match self {
            Self::Codes(matrix) => matrix.shape(),
            Self::Floats(matrix) => matrix.shape(),
            Self::Sparse(matrix) => matrix.shape(),
            Self::Undecided(both) => both.dense.shape(),
        }
    }
}

/// What happens to sums; where the scale of the input is that of the values at hand, its factor is
/// still missing.
#[derive(Debug, PartialEq)]
pub(super) struct Ends {
    pub(super) epilogue: Epilogue,
    /// Scales of the weight, for inputs of a dynamic scale.
    pub(super) dynamic: Option<Vec<f32>>,
}

impl Ends {
    pub(super) fn bytes(&self) -> usize {
        self.epilogue.bytes() + 4 * self.dynamic.as_ref().map_or(0, Vec::len)
    }

    pub(super) fn with<T>(&self, scale: &Scale, run: impl FnOnce(&Epilogue) -> T) -> T {
        let with_scale = |scales: &[f32]| self.epilogue.clone().with_scale(scales);
        match (&self.dynamic, scale) {
            (None, _) => run(&self.epilogue),
            (Some(scales), Scale::OfAll(scale)) => {
                let scales: Vec<f32> = scales.iter().map(|of| scale * of).collect();
                run(&with_scale(&scales))
            }
            (Some(scales), Scale::OfRows(rows)) => {
                run(&with_scale(scales).with_row_scale(rows.clone()))
            }
        }
    }
}

impl Linear {
    pub(super) fn run(&self, x: Value) -> Result<Floats, DeployError> {
        self.times(&self.weight, x)
    }

    /// The product with a form of the weight.
    pub(super) fn times(&self, weight: &Matrix, x: Value) -> Result<Floats, DeployError> {
        let [terms, columns] = weight.shape();
        let output = |shape: &[usize]| -> Result<(Vec<usize>, Vec<f32>), DeployError> {
            let (last, front) = match shape.split_last() {
                Some((last, front)) if *last == terms => (*last, front),
                _ => return Err(failed(format!("rows of {terms} numbers, not {shape:?}"))),
            };
            let rows = shape.iter().product::<usize>() / last.max(1);
            let mut shape = vec![1; self.rank.saturating_sub(shape.len())];
            shape.extend_from_slice(front);
            shape.push(columns);
            Ok((shape, vec![0.0; rows * columns]))
        };
        let (shape, data) = match (weight, x) {
            (Matrix::Codes(matrix), Value::Codes(x)) if !x.last => {
                let (shape, mut data) = output(&x.shape)?;
                if !data.is_empty() {
                    let left = Rows::dense(&x.codes, terms);
                    self.ends
                        .with(&x.scale, |ends| matrix.multiply(&left, ends, &mut data));
                    x.spoil(&mut data, columns);
                }
                (shape, data)
            }
            (Matrix::Floats(matrix), x) => {
                let x = ordered(x.floats()?);
                let (shape, mut data) = output(&x.shape)?;
                if !data.is_empty() {
                    let left = Rows::dense(&x.data, terms);
                    matrix.multiply(&left, &self.ends.epilogue, &mut data);
                }
                (shape, data)
            }
            (Matrix::Sparse(matrix), x) => {
                let x = ordered(x.floats()?);
                let (shape, mut data) = output(&x.shape)?;
                matrix.multiply(&x.data, &self.ends.epilogue, &mut data);
                (shape, data)
            }
            (Matrix::Undecided(both), x) => {
                return self.times(&Matrix::Floats(both.dense.clone()), x);
            }
            _ => return Err(failed("a product of codes got no codes")),
        };
        Ok(Floats::new(shape, data))
    }
}
