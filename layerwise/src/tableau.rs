//! All that single moves of one row need, kept up to date by rank-one steps.
//!
//! For a support S and the other features N, the swept system
//!
//! ```text
//! M = H_SS⁻¹     B = H_SS⁻¹ H_SN     C = H_NN − H_NS H_SS⁻¹ H_SN
//! w = M g_S      r = H_NS w − g_N
//! ```
//!
//! says what each move gains when all kept weights are solved for again:
//!
//! ```text
//! i leaves    + w_i²/2M_ii
//! j enters    − r_j²/2C_jj
//! both        + w_i²/2M_ii − (r_j − B_ij w_i/M_ii)² / 2(C_jj + B_ij²/M_ii)
//! ```
//!
//! Either move changes every number by a rank-one step: the sweep operator
//! ([Beaton, 1964](https://doi.org/10.1002/j.2333-8504.1964.tb00689.x)).

use faer::linalg::matmul::matmul;
use faer::{Accum, Mat, Par};

use crate::LayerProblem;
use crate::dense::{Factor, principal};
use crate::error::LayerwiseError;
use crate::support::places;

/// The swept system of one row.
#[derive(Debug, Clone)]
pub(crate) struct Tableau {
    size: usize,
    /// M, B and C in the places of H, `[d, d]`; B in both halves.
    table: Vec<f64>,
    kept: Vec<bool>,
    /// w where kept, else 0.
    weights: Vec<f64>,
    /// r where not kept, else 0.
    gradient: Vec<f64>,
    objective: f64,
}

impl Tableau {
    /// Of one row of a problem with that support.
    pub(crate) fn new(
        problem: &LayerProblem,
        row: usize,
        kept: &[bool],
    ) -> Result<Self, LayerwiseError> {
        let size = problem.features();
        let inside = places(kept);
        let outside: Vec<usize> = (0..size).filter(|at| !kept[*at]).collect();
        let h = problem.matrix();
        let g = problem.linear(row);
        let factor = Factor::of_part(h, &inside, problem.ridge())?;
        let m = factor.inverse();
        let cross = Mat::from_fn(inside.len(), outside.len(), |i, j| {
            h[(inside[i], outside[j])]
        });
        let b = factor.solve(&cross);
        let mut c = principal(h, &outside);
        matmul(
            c.as_mut(),
            Accum::Add,
            cross.transpose(),
            b.as_ref(),
            -1.0,
            Par::Seq,
        );
        let mut tableau = Self {
            size,
            table: vec![0.0; size * size],
            kept: kept.to_vec(),
            weights: vec![0.0; size],
            gradient: vec![0.0; size],
            objective: 0.0,
        };
        for (i, at) in inside.iter().enumerate() {
            for (j, other) in inside.iter().enumerate() {
                tableau.table[at * size + other] = m[(i, j)];
                tableau.weights[*at] += m[(i, j)] * g[*other];
            }
            for (j, other) in outside.iter().enumerate() {
                tableau.table[at * size + other] = b[(i, j)];
                tableau.table[other * size + at] = b[(i, j)];
            }
        }
        for (i, at) in outside.iter().enumerate() {
            for (j, other) in outside.iter().enumerate() {
                tableau.table[at * size + other] = c[(i, j)];
            }
            let hw: f64 = inside
                .iter()
                .map(|k| h[(*at, *k)] * tableau.weights[*k])
                .sum();
            tableau.gradient[*at] = hw - g[*at];
        }
        tableau.objective = -0.5
            * inside
                .iter()
                .map(|k| tableau.weights[*k] * g[*k])
                .sum::<f64>();
        Ok(tableau)
    }

    pub(crate) fn size(&self) -> usize {
        self.size
    }

    pub(crate) fn kept(&self) -> &[bool] {
        &self.kept
    }

    /// ½ wᵀHw − gᵀw.
    pub(crate) fn objective(&self) -> f64 {
        self.objective
    }

    pub(crate) fn row(&self, at: usize) -> &[f64] {
        &self.table[at * self.size..(at + 1) * self.size]
    }

    pub(crate) fn diagonal(&self, at: usize) -> f64 {
        self.table[at * self.size + at]
    }

    pub(crate) fn weight(&self, at: usize) -> f64 {
        self.weights[at]
    }

    pub(crate) fn gradient(&self) -> &[f64] {
        &self.gradient
    }

    /// What it costs that a kept weight leaves.
    pub(crate) fn cost(&self, at: usize) -> f64 {
        0.5 * self.weights[at] * self.weights[at] / self.diagonal(at)
    }

    /// What it gains that a feature enters.
    pub(crate) fn gain(&self, at: usize) -> f64 {
        0.5 * self.gradient[at] * self.gradient[at] / self.diagonal(at)
    }

    /// A feature enters the support.
    pub(crate) fn enter(&mut self, j: usize) {
        debug_assert!(!self.kept[j]);
        let column = self.row(j).to_vec();
        let pivot = column[j];
        let weight = -self.gradient[j] / pivot;
        self.objective += 0.5 * self.gradient[j] * weight;
        for (at, c) in column.iter().enumerate() {
            match self.kept[at] {
                true => self.weights[at] -= c * weight,
                false => self.gradient[at] += c * weight,
            }
        }
        self.step(&column, -1.0 / pivot);
        self.set_column(j, &column);
        self.kept[j] = true;
        self.weights[j] = weight;
        self.gradient[j] = 0.0;
    }

    /// A weight leaves the support.
    pub(crate) fn leave(&mut self, i: usize) {
        debug_assert!(self.kept[i]);
        let column = self.row(i).to_vec();
        let pivot = column[i];
        let factor = self.weights[i] / pivot;
        self.objective += 0.5 * self.weights[i] * factor;
        for (at, c) in column.iter().enumerate() {
            match self.kept[at] {
                true => self.weights[at] -= c * factor,
                false => self.gradient[at] -= c * factor,
            }
        }
        self.step(&column, 1.0 / pivot);
        self.set_column(i, &column);
        self.kept[i] = false;
        self.weights[i] = 0.0;
        self.gradient[i] = -factor;
    }

    /// The column of a pivot, before it enters or leaves.
    fn set_column(&mut self, of: usize, column: &[f64]) {
        let pivot = column[of];
        for (at, c) in column.iter().enumerate() {
            let value = match self.kept[at] {
                true => -c / pivot,
                false => c / pivot,
            };
            self.set(at, of, value);
        }
        self.set(of, of, 1.0 / pivot);
    }

    fn set(&mut self, a: usize, b: usize, value: f64) {
        self.table[a * self.size + b] = value;
        self.table[b * self.size + a] = value;
    }

    /// C ← C + f·c cᵀ, M ← M − f·c cᵀ, B ← B + s·f·c cᵀ, with s = 1 where a feature enters (f < 0)
    /// and −1 where a weight leaves.
    fn step(&mut self, column: &[f64], factor: f64) {
        let inside: Vec<f64> = self.rows_of(column, factor, true);
        let outside: Vec<f64> = self.rows_of(column, factor, false);
        let rows = self.table.chunks_exact_mut(self.size);
        for ((row, c), kept) in rows.zip(column).zip(&self.kept) {
            let add = if *kept { &inside } else { &outside };
            let values = row.iter_mut().zip(add);
            values.for_each(|(value, add)| *value += c * add);
        }
    }

    /// What a row's own number multiplies.
    fn rows_of(&self, column: &[f64], factor: f64, inside: bool) -> Vec<f64> {
        let cross = -factor.abs();
        let pairs = column.iter().zip(&self.kept);
        pairs
            .map(|(c, kept)| match (inside, *kept) {
                (true, true) => -factor * c,
                (false, false) => factor * c,
                _ => cross * c,
            })
            .collect()
    }
}
