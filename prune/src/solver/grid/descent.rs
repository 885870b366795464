//! Coordinate descent over codes, and the best scales for them.
//!
//! A weight moves to the code nearest to w_j − g_j/h_j, the best one while the others stay: the
//! objective is a parabola in it. Given the codes c, the objective is a ridge regression in the scales:
//!
//! ```text
//! b_g = Σ_{j∈g} c_j a_j,  D_g = Σ_{j∈g} c_j²,  ŝ_g = Σ_{j∈g} c_j w₀_j / D_g,  x_g = √D_g (s_g − ŝ_g)
//! minimise ½‖e₀ − Σ_g b_g ŝ_g − Σ_g (b_g/√D_g) x_g‖² + λ‖x‖²
//! ```
//!
//! with e₀ the residual without these weights; as many unknowns as groups or samples, whichever are
//! fewer. Neither raises the objective.

use faer::Mat;

use crate::error::PruneError;
use crate::solver::factor::Symmetric;
use crate::solver::grid::columns::add;
use crate::solver::grid::state::State;

/// One sweep over the weights of `support` (ascending); how many have moved.
pub(crate) fn sweep(state: &mut State<'_>, support: &[usize]) -> Result<usize, PruneError> {
    let mut moved = 0;
    let columns = state.columns;
    columns.each(support, |index, column| {
        let (slope, curvature) = (state.slope(index, column), state.curvature[index]);
        let now = state.weights[index];
        let (code, value) = state.nearest(index, f64::from(now) - slope / curvature);
        let step = f64::from(value) - f64::from(now);
        if slope * step + 0.5 * curvature * step * step < 0.0 {
            state.put(index, code, value, column);
            moved += 1;
        }
    })?;
    Ok(moved)
}

/// Gives the groups the best scales for the codes on `support` (ascending), where they lower the
/// objective. A scale that would not be above 0 stays.
pub(crate) fn fit_scales(state: &mut State<'_>, support: &[usize]) -> Result<(), PruneError> {
    let mut sums = Sums::new(state, support)?;
    loop {
        if sums.groups.is_empty() {
            return Ok(());
        }
        let scales = sums.solve(state)?;
        if scales.iter().all(|scale| *scale > 0.0 && scale.is_finite()) {
            return accept(state, support, &sums.groups, &scales);
        }
        sums.keep(&scales);
    }
}

/// Takes new scales over, unless rounding to F32 took more than they gave.
fn accept(
    state: &mut State<'_>,
    support: &[usize],
    groups: &[usize],
    scales: &[f32],
) -> Result<(), PruneError> {
    let mut next = state.clone();
    for (group, scale) in groups.iter().zip(scales) {
        next.levels.scales[*group] = *scale;
    }
    let columns = state.columns;
    columns.each(support, |index, column| {
        if let Some(group) = next.levels.group(index) {
            let code = next.codes[index];
            let value = next.levels.value(group, code);
            next.put(index, code, value, column);
        }
    })?;
    if next.objective().total() < state.objective().total() {
        *state = next;
    }
    Ok(())
}

/// What the codes of each group add up to.
struct Sums {
    /// Groups with a code that is not 0.
    groups: Vec<usize>,
    /// b, a column for each of them.
    columns: Mat<f64>,
    /// D and Σ c w₀.
    squares: Vec<f64>,
    dense: Vec<f64>,
}

impl Sums {
    fn new(state: &State<'_>, support: &[usize]) -> Result<Self, PruneError> {
        let group = |index: &usize| match state.codes[*index] {
            0 => None,
            _ => state.levels.group(*index),
        };
        let mut place = vec![None; state.levels.groups()];
        let mut groups = Vec::new();
        for group in support.iter().filter_map(group) {
            if place[group].is_none() {
                place[group] = Some(groups.len());
                groups.push(group);
            }
        }
        let mut sums = Self {
            columns: Mat::zeros(state.residual.len(), groups.len()),
            squares: vec![0.0; groups.len()],
            dense: vec![0.0; groups.len()],
            groups,
        };
        state.columns.each(support, |index, column| {
            if let Some(place) = group(&index).and_then(|group| place[group]) {
                let code = f64::from(state.codes[index]);
                add(sums.columns.col_as_slice_mut(place), code, column);
                sums.squares[place] += code * code;
                sums.dense[place] += code * f64::from(state.problem.dense()[index]);
            }
        })?;
        Ok(sums)
    }

    /// The best scales of these groups, those of the others as they are.
    fn solve(&self, state: &State<'_>) -> Result<Vec<f32>, PruneError> {
        let count = self.groups.len();
        let lambda = state.problem.lambda();
        let mut right = state.residual.clone();
        let mut columns = self.columns.clone();
        let mut centers = Vec::with_capacity(count);
        for (at, group) in self.groups.iter().enumerate() {
            let center = self.dense[at] / self.squares[at];
            let now = f64::from(state.levels.scales[*group]);
            let root = self.squares[at].sqrt();
            let column = columns.col_as_slice_mut(at);
            for (value, e) in column.iter_mut().zip(&mut right) {
                *e += (now - center) * *value;
                *value /= root;
            }
            centers.push(center);
        }
        let product = |vector: &[f64]| -> Vec<f64> {
            let columns = (0..count).map(|at| columns.col_as_slice(at));
            columns
                .map(|column| column.iter().zip(vector).map(|(a, b)| a * b).sum())
                .collect()
        };
        let ridge = state.problem.ridge();
        let solved = match count <= right.len() {
            true => {
                let mut system = Symmetric::ridge(count, lambda)?;
                system.add_exact_gram(1.0, columns.transpose());
                system.factor(ridge)?.solve(&product(&right))
            }
            false => {
                let mut system = Symmetric::ridge(right.len(), lambda)?;
                system.add_exact_gram(1.0, columns.as_ref());
                product(&system.factor(ridge)?.solve(&right))
            }
        };
        let scale = |at: usize| (centers[at] + solved[at] / self.squares[at].sqrt()) as f32;
        Ok((0..count).map(scale).collect())
    }

    /// Leaves the groups out whose scale would not be above 0.
    fn keep(&mut self, scales: &[f32]) {
        let kept: Vec<usize> = (0..scales.len())
            .filter(|at| scales[*at] > 0.0 && scales[*at].is_finite())
            .collect();
        let columns = &self.columns;
        let columns = Mat::from_fn(columns.nrows(), kept.len(), |row, at| {
            columns[(row, kept[at])]
        });
        let of = |values: &[f64]| kept.iter().map(|at| values[*at]).collect();
        *self = Self {
            groups: kept.iter().map(|at| self.groups[*at]).collect(),
            columns,
            squares: of(&self.squares),
            dense: of(&self.dense),
        };
    }
}
