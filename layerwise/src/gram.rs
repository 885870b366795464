//! XᵀX of a layer's inputs, streamed.

use faer::linalg::matmul::matmul;
use faer::linalg::matmul::triangular::{self, BlockStructure};
use faer::{Accum, Mat, MatRef, get_global_parallelism};

use crate::error::{LayerwiseError, finite, same};

/// Rows whose products are summed in F32.
const CHUNK: usize = 1024;

/// A sum of squares in F32 below which some of them may have underflown.
const UNDERFLOWS: f32 = 1e-30;

/// The sums XᵀX `[d, d]`, Σx, and with targets XᵀY `[d, o]`, Σy, Σy², over rows that come in parts.
///
/// Everything is summed about a shift, the mean of the first rows, so that a mean that is large
/// beside the deviation costs no digits.
#[derive(Debug, Clone)]
pub struct Gram {
    features: usize,
    outputs: usize,
    rows: usize,
    shift: Vec<f32>,
    target_shift: Vec<f32>,
    /// Σ(x−s)(x−s)ᵀ, of which the lower triangle counts.
    xx: Mat<f64>,
    x: Vec<f64>,
    /// Σ(x−s)(y−t)ᵀ
    xy: Mat<f64>,
    y: Vec<f64>,
    yy: Vec<f64>,
}

/// Second moments per row of data, about zero or about the mean.
pub(crate) struct Moments {
    /// `[d, d]`, symmetric.
    pub(crate) xx: Mat<f64>,
    /// `[d, o]`
    pub(crate) xy: Mat<f64>,
    /// `[o]`
    pub(crate) yy: Vec<f64>,
}

impl Gram {
    /// An empty sum over inputs `[n, features]`.
    pub fn new(features: usize) -> Self {
        Self::with_targets(features, 0)
    }

    /// An empty sum over inputs `[n, features]` and targets `[n, outputs]`.
    pub fn with_targets(features: usize, outputs: usize) -> Self {
        Self {
            features,
            outputs,
            rows: 0,
            shift: vec![0.0; features],
            target_shift: vec![0.0; outputs],
            xx: Mat::zeros(features, features),
            x: vec![0.0; features],
            xy: Mat::zeros(features, outputs),
            y: vec![0.0; outputs],
            yy: vec![0.0; outputs],
        }
    }

    /// Features of an input, d.
    pub fn features(&self) -> usize {
        self.features
    }

    /// Outputs to reach, o; 0 without targets.
    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// Rows that were added, n.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Adds inputs, `[rows, d]` row by row.
    ///
    /// # Errors
    ///
    /// [`LayerwiseError::Mismatch`] where this is no whole number of rows, or where the Gram matrix
    /// has targets; [`LayerwiseError::NotFinite`]. Then nothing is added.
    pub fn add(&mut self, inputs: &[f32]) -> Result<(), LayerwiseError> {
        same("outputs of rows without targets", 0, self.outputs)?;
        self.add_with_targets(inputs, &[])
    }

    /// Adds inputs, `[rows, d]`, and their targets, `[rows, o]`, row by row.
    ///
    /// # Errors
    ///
    /// [`LayerwiseError::Mismatch`], [`LayerwiseError::NotFinite`]. Then nothing is added.
    pub fn add_with_targets(
        &mut self,
        inputs: &[f32],
        targets: &[f32],
    ) -> Result<(), LayerwiseError> {
        let rows = inputs.len() / self.features.max(1);
        same("numbers in whole rows", rows * self.features, inputs.len())?;
        same("numbers in the targets", rows * self.outputs, targets.len())?;
        finite("the inputs", inputs)?;
        finite("the targets", targets)?;
        if rows == 0 {
            return Ok(());
        }
        if self.rows == 0 {
            self.shift = means(inputs, self.features);
            self.target_shift = means(targets, self.outputs);
        }
        self.rows += rows;
        for first in (0..rows).step_by(CHUNK) {
            let last = rows.min(first + CHUNK);
            let part = |values: &[f32], width: usize, shift: &[f32]| -> Vec<f32> {
                let part = values[first * width..last * width].chunks_exact(width.max(1));
                part.flat_map(|row| row.iter().zip(shift).map(|(value, s)| value - s))
                    .collect()
            };
            let x = part(inputs, self.features, &self.shift);
            let y = part(targets, self.outputs, &self.target_shift);
            self.add_chunk(last - first, &x, &y);
        }
        Ok(())
    }

    fn add_chunk(&mut self, rows: usize, x: &[f32], y: &[f32]) {
        let (d, o) = (self.features, self.outputs);
        let inputs = MatRef::from_row_major_slice(x, rows, d);
        let mut product = Mat::<f32>::zeros(d, d);
        triangular::matmul(
            product.as_mut(),
            BlockStructure::TriangularLower,
            Accum::Replace,
            inputs.transpose(),
            BlockStructure::Rectangular,
            inputs,
            BlockStructure::Rectangular,
            1.0,
            get_global_parallelism(),
        );
        for column in 0..d {
            let sums = &mut self.xx.col_as_slice_mut(column)[column..];
            let products = &product.col_as_slice(column)[column..];
            add(sums, products);
            // Of a feature with such squares alone the sum would be 0, as that of a dead one is.
            if products[0] < UNDERFLOWS {
                let values = x.iter().skip(column).step_by(d);
                let squares: f64 = values.map(|x| f64::from(*x).powi(2)).sum();
                sums[0] += squares - f64::from(products[0]);
            }
        }
        for row in x.chunks_exact(d) {
            add(&mut self.x, row);
        }
        if o == 0 {
            return;
        }
        let mut product = Mat::<f32>::zeros(d, o);
        matmul(
            product.as_mut(),
            Accum::Replace,
            inputs.transpose(),
            MatRef::from_row_major_slice(y, rows, o),
            1.0,
            get_global_parallelism(),
        );
        for column in 0..o {
            add(
                self.xy.col_as_slice_mut(column),
                product.col_as_slice(column),
            );
        }
        for row in y.chunks_exact(o) {
            add(&mut self.y, row);
            let squares = self.yy.iter_mut().zip(row);
            squares.for_each(|(sum, y)| *sum += f64::from(*y) * f64::from(*y));
        }
    }

    /// The same inputs, with some of the targets.
    ///
    /// # Panics
    ///
    /// For outputs that it does not have.
    pub fn of_outputs(&self, outputs: std::ops::Range<usize>) -> Self {
        let count = outputs.len();
        Self {
            features: self.features,
            outputs: count,
            rows: self.rows,
            shift: self.shift.clone(),
            target_shift: self.target_shift[outputs.clone()].to_vec(),
            xx: self.xx.clone(),
            x: self.x.clone(),
            xy: self.xy.as_ref().subcols(outputs.start, count).to_owned(),
            y: self.y[outputs.clone()].to_vec(),
            yy: self.yy[outputs].to_vec(),
        }
    }

    /// Adds all rows of another one.
    ///
    /// # Errors
    ///
    /// [`LayerwiseError::Mismatch`] for other features or outputs.
    pub fn merge(&mut self, other: &Self) -> Result<(), LayerwiseError> {
        same("features", self.features, other.features)?;
        same("outputs", self.outputs, other.outputs)?;
        if self.rows == 0 {
            *self = other.clone();
            return Ok(());
        }
        // Σ(x−s)(x−s)ᵀ = Σ(x−r)(x−r)ᵀ + δ Σ(x−r)ᵀ + Σ(x−r) δᵀ + n δδᵀ with δ = r − s.
        let n = other.rows as f64;
        let by = |from: &[f32], to: &[f32]| -> Vec<f64> {
            let pairs = from.iter().zip(to);
            pairs.map(|(r, s)| f64::from(*r) - f64::from(*s)).collect()
        };
        let dx = by(&other.shift, &self.shift);
        let dy = by(&other.target_shift, &self.target_shift);
        for j in 0..self.features {
            for i in j..self.features {
                self.xx[(i, j)] +=
                    other.xx[(i, j)] + dx[i] * other.x[j] + other.x[i] * dx[j] + n * dx[i] * dx[j];
            }
            for (k, dy) in dy.iter().enumerate() {
                self.xy[(j, k)] +=
                    other.xy[(j, k)] + dx[j] * other.y[k] + other.x[j] * dy + n * dx[j] * dy;
            }
        }
        for (k, dy) in dy.iter().enumerate() {
            self.yy[k] += other.yy[k] + 2.0 * dy * other.y[k] + n * dy * dy;
            self.y[k] += other.y[k] + n * dy;
        }
        for (j, dx) in dx.iter().enumerate() {
            self.x[j] += other.x[j] + n * dx;
        }
        self.rows += other.rows;
        Ok(())
    }

    /// Mean input, `[d]`; zeros without rows.
    pub fn mean(&self) -> Vec<f64> {
        mean(&self.x, &self.shift, self.rows)
    }

    /// Mean target, `[o]`; zeros without rows.
    pub(crate) fn target_mean(&self) -> Vec<f64> {
        mean(&self.y, &self.target_shift, self.rows)
    }

    /// Second moment E x² of each feature, `[d]`; about the mean if `centered`.
    pub fn squares(&self, centered: bool) -> Vec<f64> {
        let (dx, _) = self.offsets(centered);
        let n = self.rows.max(1) as f64;
        let values = (0..self.features).map(|j| {
            let sum = self.xx[(j, j)] + 2.0 * dx[j] * self.x[j] + self.rows as f64 * dx[j] * dx[j];
            (sum / n).max(0.0)
        });
        values.collect()
    }

    /// Second moment E y² of each target, `[o]`; about the mean if `centered`.
    pub fn target_squares(&self, centered: bool) -> Vec<f64> {
        let (_, dy) = self.offsets(centered);
        let n = self.rows as f64;
        let values = (0..self.outputs).map(|k| {
            let sum = self.yy[k] + 2.0 * dy[k] * self.y[k] + n * dy[k] * dy[k];
            sum.max(0.0) / n.max(1.0)
        });
        values.collect()
    }

    /// XᵀX/n `[d, d]`; about the mean if `centered`.
    pub fn matrix(&self, centered: bool) -> Vec<f64> {
        let moments = self.moments(centered);
        let d = self.features;
        (0..d * d).map(|at| moments.xx[(at / d, at % d)]).collect()
    }

    /// Features that are 0 (or constant, if `centered`) in every row.
    pub fn dead_features(&self, centered: bool) -> Vec<usize> {
        let squares = self.squares(centered);
        let means = self.mean();
        // About the mean, a constant leaves the rounding of F32.
        let is_dead = |j: &usize| match centered {
            true => squares[*j] <= 1e-12 * means[*j] * means[*j],
            false => squares[*j] == 0.0,
        };
        (0..self.features).filter(is_dead).collect()
    }

    /// What turns sums about the shift into sums about zero or about the mean.
    fn offsets(&self, centered: bool) -> (Vec<f64>, Vec<f64>) {
        let n = self.rows.max(1) as f64;
        let offsets = |sums: &[f64], shift: &[f32]| match centered {
            true => sums.iter().map(|sum| -sum / n).collect(),
            false => shift.iter().map(|s| f64::from(*s)).collect(),
        };
        (
            offsets(&self.x, &self.shift),
            offsets(&self.y, &self.target_shift),
        )
    }

    pub(crate) fn moments(&self, centered: bool) -> Moments {
        let (dx, dy) = self.offsets(centered);
        let n = self.rows as f64;
        let per_row = 1.0 / n.max(1.0);
        let xx = Mat::from_fn(self.features, self.features, |i, j| {
            // To the bit the same on both sides of the diagonal.
            let (i, j) = (i.max(j), i.min(j));
            let sum = self.xx[(i, j)];
            (sum + dx[i] * self.x[j] + self.x[i] * dx[j] + n * dx[i] * dx[j]) * per_row
        });
        let xy = Mat::from_fn(self.features, self.outputs, |j, k| {
            let sum = self.xy[(j, k)];
            (sum + dx[j] * self.y[k] + self.x[j] * dy[k] + n * dx[j] * dy[k]) * per_row
        });
        Moments {
            xx,
            xy,
            yy: self.target_squares(centered),
        }
    }
}

fn add(sums: &mut [f64], values: &[f32]) {
    let pairs = sums.iter_mut().zip(values);
    pairs.for_each(|(sum, value)| *sum += f64::from(*value));
}

/// Column means, rounded.
fn means(values: &[f32], width: usize) -> Vec<f32> {
    let mut sums = vec![0.0; width];
    let rows = values.len() / width.max(1);
    for row in values.chunks_exact(width.max(1)) {
        add(&mut sums, row);
    }
    sums.iter().map(|sum| (sum / rows as f64) as f32).collect()
}

fn mean(sums: &[f64], shift: &[f32], rows: usize) -> Vec<f64> {
    let pairs = sums.iter().zip(shift);
    pairs
        .map(|(sum, s)| f64::from(*s) + sum / rows.max(1) as f64)
        .collect()
}
