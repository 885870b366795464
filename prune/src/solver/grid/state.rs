//! Weights on the grid with their residual, kept up to date.
//!
//! ```text
//! e = −G (w − w₀) − a·1                 the residual less what the first-order term adds
//! Q = ½‖e‖² + λ‖w − w₀‖² + constant
//! moving w_j by δ adds    g_j δ + ½ h_j δ²,   g_j = −a_jᵀe + 2λ(w_j − w₀_j),  h_j = ‖a_j‖² + 2λ
//! and makes of e          e − δ a_j
//! ```
//!
//! All of it in F64, O(n) for a weight.

use crate::error::PruneError;
use crate::problem::Problem;
use crate::problem::objective::Objective;
use crate::solver::grid::columns::{Columns, add, dot};
use crate::solver::grid::levels::Levels;

/// Weights, most of them on a grid.
#[derive(Debug, Clone)]
pub(crate) struct State<'a> {
    pub(crate) problem: &'a Problem,
    pub(crate) columns: &'a Columns<'a>,
    pub(crate) levels: Levels,
    /// Code of each weight, `[p]`; 0 for a pruned one and for a real number.
    pub(crate) codes: Vec<i32>,
    /// Value of each weight, `[p]`.
    pub(crate) weights: Vec<f32>,
    /// e, `[n]`
    pub(crate) residual: Vec<f64>,
    /// h, `[p]`
    pub(crate) curvature: &'a [f64],
}

impl<'a> State<'a> {
    /// The state at these real values, before anything is rounded.
    pub(crate) fn new(
        problem: &'a Problem,
        columns: &'a Columns<'a>,
        curvature: &'a [f64],
        levels: Levels,
        weights: Vec<f32>,
    ) -> Result<Self, PruneError> {
        let mut residual: Vec<f64> = problem.shift().map(|a| -a).collect();
        let pairs = weights.iter().zip(problem.dense());
        let change: Vec<f64> = pairs.map(|(w, d)| f64::from(*w) - f64::from(*d)).collect();
        let moved: Vec<usize> = (0..weights.len()).filter(|j| change[*j] != 0.0).collect();
        columns.each(&moved, |index, column| {
            add(&mut residual, -change[index], column);
        })?;
        Ok(Self {
            codes: vec![0; weights.len()],
            problem,
            columns,
            levels,
            weights,
            residual,
            curvature,
        })
    }

    /// h of all weights.
    pub(crate) fn curvature(
        problem: &Problem,
        columns: &Columns<'_>,
    ) -> Result<Vec<f64>, PruneError> {
        let all: Vec<usize> = (0..problem.parameters()).collect();
        let ridge = 2.0 * problem.lambda();
        let mut curvature = Vec::with_capacity(all.len());
        columns.each(&all, |_, column| {
            let squares = column.iter().map(|a| f64::from(*a) * f64::from(*a));
            curvature.push(ridge + squares.sum::<f64>());
        })?;
        Ok(curvature)
    }

    /// w_j − w₀_j
    pub(crate) fn change(&self, index: usize) -> f64 {
        f64::from(self.weights[index]) - f64::from(self.problem.dense()[index])
    }

    /// The objective, term by term.
    pub(crate) fn objective(&self) -> Objective {
        let residual: Vec<f64> = self
            .residual
            .iter()
            .zip(self.problem.shift())
            .map(|(e, a)| e + a)
            .collect();
        let terms = self.problem.objective_from(&[], &residual);
        let changes = (0..self.weights.len()).map(|index| self.change(index).powi(2));
        Objective {
            ridge: self.problem.lambda() * changes.sum::<f64>(),
            ..terms
        }
    }

    /// What of the objective is a sum of squares.
    pub(crate) fn squares(&self) -> f64 {
        self.objective().total() - self.problem.completed_square()
    }

    /// g_j
    pub(crate) fn slope(&self, index: usize, column: &[f32]) -> f64 {
        2.0 * self.problem.lambda() * self.change(index) - dot(column, &self.residual)
    }

    /// Moves a weight; `code` is 0 for a real number.
    pub(crate) fn put(&mut self, index: usize, code: i32, value: f32, column: &[f32]) {
        let step = f64::from(value) - f64::from(self.weights[index]);
        self.codes[index] = code;
        self.weights[index] = value;
        if step != 0.0 {
            add(&mut self.residual, -step, column);
        }
    }

    /// The nearest weight to a real value: its code and what that stands for.
    pub(crate) fn nearest(&self, index: usize, value: f64) -> (i32, f32) {
        match self.levels.group(index) {
            Some(group) => {
                let code = self.levels.nearest(group, value);
                (code, self.levels.value(group, code))
            }
            None => (0, value as f32),
        }
    }

    /// Rounds the weights of a support (ascending) to their nearest codes.
    pub(crate) fn round(&mut self, support: &[usize]) -> Result<(), PruneError> {
        let columns = self.columns;
        columns.each(support, |index, column| {
            let (code, value) = self.nearest(index, f64::from(self.weights[index]));
            self.put(index, code, value, column);
        })
    }
}
