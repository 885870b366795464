//! Plain loops in F64 to compare with.

use burn_lean::layerwise::{Gram, LayerProblem, ProblemConfig};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// Numbers of a layer: `x` `[n, d]`, dense weights `[o, d]`.
pub(crate) struct Layer {
    pub(crate) x: Vec<f32>,
    pub(crate) w: Vec<f32>,
    pub(crate) n: usize,
    pub(crate) d: usize,
}

impl Layer {
    /// With features that depend on each other.
    pub(crate) fn random(n: usize, d: usize, o: usize, seed: u64) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let mut number = || random.random_range(-1.0..1.0_f32);
        let mix: Vec<f32> = (0..d * d).map(|_| number()).collect();
        let mut x = Vec::with_capacity(n * d);
        for _ in 0..n {
            let sources: Vec<f32> = (0..d / 2 + 1).map(|_| number()).collect();
            x.extend((0..d).map(|j| {
                let mixed: f32 = sources.iter().zip(&mix[j * d..]).map(|(s, m)| s * m).sum();
                mixed + 0.2 * number()
            }));
        }
        let w = (0..o * d).map(|_| number()).collect();
        Self { x, w, n, d }
    }

    pub(crate) fn gram(&self) -> Gram {
        let mut gram = Gram::new(self.d);
        gram.add(&self.x).unwrap();
        gram
    }

    pub(crate) fn problem(&self) -> LayerProblem {
        LayerProblem::new(&self.gram(), &self.w, &ProblemConfig::new()).unwrap()
    }

    /// H with the ridge of the defaults.
    pub(crate) fn hessian(&self) -> Vec<Vec<f64>> {
        let mut h = second_moments(&self.x, self.n, self.d);
        let mean = (0..self.d).map(|j| h[j][j]).sum::<f64>() / self.d as f64;
        (0..self.d).for_each(|j| h[j][j] += 0.01 * mean);
        h
    }

    pub(crate) fn dense(&self, row: usize) -> Vec<f64> {
        let row = &self.w[row * self.d..(row + 1) * self.d];
        row.iter().map(|w| f64::from(*w)).collect()
    }

    /// ½ (w − w₀)ᵀ H (w − w₀) of a row.
    pub(crate) fn loss(&self, row: usize, w: &[f64]) -> f64 {
        let h = self.hessian();
        let change: Vec<f64> = w
            .iter()
            .zip(self.dense(row))
            .map(|(w, w0)| w - w0)
            .collect();
        0.5 * dot(&change, &times(&h, &change))
    }

    /// The best weights of a row on a support, and what they cost.
    pub(crate) fn best(&self, row: usize, support: &[bool]) -> (Vec<f64>, f64) {
        let h = self.hessian();
        let g = times(&h, &self.dense(row));
        let places: Vec<usize> = (0..self.d).filter(|j| support[*j]).collect();
        let part: Vec<Vec<f64>> = places
            .iter()
            .map(|i| places.iter().map(|j| h[*i][*j]).collect())
            .collect();
        let solved = gauss(part, places.iter().map(|j| g[*j]).collect());
        let mut w = vec![0.0; self.d];
        places
            .iter()
            .zip(solved)
            .for_each(|(j, value)| w[*j] = value);
        let loss = self.loss(row, &w);
        (w, loss)
    }
}

pub(crate) fn second_moments(x: &[f32], n: usize, d: usize) -> Vec<Vec<f64>> {
    let mut h = vec![vec![0.0; d]; d];
    for row in x.chunks_exact(d) {
        for i in 0..d {
            for j in 0..d {
                h[i][j] += f64::from(row[i]) * f64::from(row[j]) / n as f64;
            }
        }
    }
    h
}

pub(crate) fn times(h: &[Vec<f64>], v: &[f64]) -> Vec<f64> {
    h.iter().map(|row| dot(row, v)).collect()
}

pub(crate) fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Elimination with pivots.
pub(crate) fn gauss(mut a: Vec<Vec<f64>>, mut b: Vec<f64>) -> Vec<f64> {
    let size = b.len();
    for k in 0..size {
        let largest = (k..size).max_by(|i, j| a[*i][k].abs().total_cmp(&a[*j][k].abs()));
        let pivot = largest.unwrap();
        a.swap(k, pivot);
        b.swap(k, pivot);
        for i in k + 1..size {
            let factor = a[i][k] / a[k][k];
            let row = a[k].clone();
            let rest = a[i].iter_mut().zip(row).skip(k);
            rest.for_each(|(x, y)| *x -= factor * y);
            b[i] -= factor * b[k];
        }
    }
    for k in (0..size).rev() {
        let known: f64 = (k + 1..size).map(|j| a[k][j] * b[j]).sum();
        b[k] = (b[k] - known) / a[k][k];
    }
    b
}

/// Whether two numbers agree to that relative error.
pub(crate) fn close(a: f64, b: f64, tolerance: f64) -> bool {
    (a - b).abs() <= tolerance * a.abs().max(b.abs()).max(1e-12)
}
