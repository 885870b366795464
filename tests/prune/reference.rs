//! The regression in F64, slowly and obviously, and random problems to try it on.

use burn::tensor::{Device, Tensor, TensorData};
use burn_lean::prune::{GradientMatrix, Layout, Problem};

use crate::support::{largest, numbers};

/// A problem as plain numbers.
#[derive(Debug, Clone)]
pub(crate) struct Plain {
    /// Rows of G.
    pub(crate) gradients: Vec<Vec<f64>>,
    pub(crate) dense: Vec<f64>,
    pub(crate) ridge: f64,
    pub(crate) first_order: f64,
}

impl Plain {
    /// n samples and p weights from a seed. The columns have different lengths, and the rows lie
    /// near a space of fewer dimensions, as gradients of a network do.
    pub(crate) fn random(seed: u64, n: usize, p: usize) -> Self {
        let rank = 1 + n.min(p) / 2;
        let left = numbers(4 * seed, n * rank);
        let right = numbers(4 * seed + 1, rank * p);
        let noise = numbers(4 * seed + 2, n * p);
        let dense = numbers(4 * seed + 3, p);
        let element = |row: usize, column: usize| {
            let inner = (0..rank).map(|k| left[row * rank + k] * right[k * p + column]);
            let scale = 1.0 + 2.0 * dense[(column + 1) % p].abs();
            scale * (inner.sum::<f32>() + 0.2 * noise[row * p + column])
        };
        let rows = (0..n).map(|row| {
            (0..p)
                .map(|column| f64::from(element(row, column)))
                .collect()
        });
        Self {
            gradients: rows.collect(),
            dense: dense.iter().map(|weight| f64::from(*weight)).collect(),
            ridge: 0.05,
            first_order: 0.0,
        }
    }

    pub(crate) fn n(&self) -> usize {
        self.gradients.len()
    }

    pub(crate) fn p(&self) -> usize {
        self.dense.len()
    }

    pub(crate) fn lambda(&self) -> f64 {
        self.ridge * self.n() as f64 / 2.0
    }

    /// The same problem for the crate.
    pub(crate) fn problem(&self, device: &Device) -> Problem {
        self.problem_with(Layout::anonymous(self.p()), device)
    }

    pub(crate) fn problem_with(&self, layout: Layout, device: &Device) -> Problem {
        let gradients: Vec<f32> = self.gradients.iter().flatten().map(|g| *g as f32).collect();
        let gradients = TensorData::new(gradients, [self.n(), self.p()]);
        let gradients = GradientMatrix::from_tensor(Tensor::from_data(gradients, device)).unwrap();
        Problem::new(gradients, vector(&self.dense, device), layout)
            .unwrap()
            .with_ridge(self.ridge)
            .unwrap()
            .with_first_order(self.first_order)
            .unwrap()
    }

    /// G v
    pub(crate) fn multiply(&self, v: &[f64]) -> Vec<f64> {
        self.gradients.iter().map(|row| dot(row, v)).collect()
    }

    /// Gᵀ u
    pub(crate) fn transpose_multiply(&self, u: &[f64]) -> Vec<f64> {
        let column = |j: usize| {
            self.gradients
                .iter()
                .zip(u)
                .map(|(row, u)| row[j] * u)
                .sum()
        };
        (0..self.p()).map(column).collect()
    }

    /// y − G w
    pub(crate) fn residual(&self, w: &[f64]) -> Vec<f64> {
        let y = self.multiply(&self.dense);
        y.iter().zip(self.multiply(w)).map(|(y, g)| y - g).collect()
    }

    /// ½‖y − G w‖² + λ‖w − w₀‖² + αᵀw, α = a Gᵀ1
    pub(crate) fn objective(&self, w: &[f64]) -> f64 {
        let r = self.residual(w);
        let d: Vec<f64> = w.iter().zip(&self.dense).map(|(w, d)| w - d).collect();
        let linear: f64 = self.multiply(w).iter().sum();
        0.5 * dot(&r, &r) + self.lambda() * dot(&d, &d) + self.first_order * linear
    }

    /// −Gᵀr + α + 2λ(w − w₀)
    pub(crate) fn gradient(&self, w: &[f64]) -> Vec<f64> {
        let r = self.residual(w);
        let shifted: Vec<f64> = r.iter().map(|r| self.first_order - r).collect();
        let d = w.iter().zip(&self.dense).map(|(w, d)| w - d);
        let g = self.transpose_multiply(&shifted);
        g.iter()
            .zip(d)
            .map(|(g, d)| g + 2.0 * self.lambda() * d)
            .collect()
    }

    /// The minimum on a support: (G_SᵀG_S + 2λI) w_S = G_Sᵀy + 2λ w₀_S − α_S.
    pub(crate) fn back_solve(&self, support: &[usize]) -> Vec<f64> {
        let y = self.multiply(&self.dense);
        let shifted: Vec<f64> = y.iter().map(|y| y - self.first_order).collect();
        let right = self.transpose_multiply(&shifted);
        let column = |j: usize| -> Vec<f64> { self.gradients.iter().map(|row| row[j]).collect() };
        let columns: Vec<Vec<f64>> = support.iter().map(|j| column(*j)).collect();
        let mut system: Vec<Vec<f64>> = Vec::new();
        for (i, index) in support.iter().enumerate() {
            let mut row: Vec<f64> = columns.iter().map(|c| dot(&columns[i], c)).collect();
            row[i] += 2.0 * self.lambda();
            row.push(right[*index] + 2.0 * self.lambda() * self.dense[*index]);
            system.push(row);
        }
        let mut w = vec![0.0; self.p()];
        for (index, value) in support.iter().zip(eliminate(system)) {
            w[*index] = value;
        }
        w
    }

    /// The best objective over all supports of k weights, and its support.
    pub(crate) fn brute_force(&self, k: usize) -> (f64, Vec<usize>) {
        let mut best = (f64::INFINITY, Vec::new());
        for bits in 0u32..1 << self.p() {
            if bits.count_ones() as usize == k {
                let support: Vec<usize> = (0..self.p()).filter(|j| bits >> j & 1 == 1).collect();
                let objective = self.objective(&self.back_solve(&support));
                if objective < best.0 {
                    best = (objective, support);
                }
            }
        }
        best
    }
}

pub(crate) fn vector(values: &[f64], device: &Device) -> Tensor<1> {
    let values: Vec<f32> = values.iter().map(|value| *value as f32).collect();
    let length = values.len();
    Tensor::from_data(TensorData::new(values, [length]), device)
}

pub(crate) fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Largest difference of two vectors, relative to the largest element of the second.
pub(crate) fn distance(found: &[f32], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let scale = expected
        .iter()
        .fold(1e-30, |max: f64, value| max.max(value.abs()));
    let difference = |(found, expected): (&f32, &f64)| (f64::from(*found) - expected).abs();
    largest(found.iter().zip(expected).map(difference)) / scale
}

/// Gaussian elimination without pivoting, which a positive definite matrix does not need.
fn eliminate(mut rows: Vec<Vec<f64>>) -> Vec<f64> {
    let size = rows.len();
    for pivot in 0..size {
        for row in pivot + 1..size {
            let factor = rows[row][pivot] / rows[pivot][pivot];
            let (above, below) = rows.split_at_mut(row);
            for (value, other) in below[0].iter_mut().zip(&above[pivot]).skip(pivot) {
                *value -= factor * other;
            }
        }
    }
    let mut solution = vec![0.0; size];
    for row in (0..size).rev() {
        let known: f64 = (row + 1..size).map(|c| rows[row][c] * solution[c]).sum();
        solution[row] = (rows[row][size] - known) / rows[row][row];
    }
    solution
}
