//! Codes of the weights that are kept: rounding with the same Fisher as pruning.
//!
//! ```text
//! codes ← the first ones: nearest, or one after the other with compensation
//! repeat until little changes: a sweep of coordinate descent over codes; the best scales
//! ```
//!
//! No step after the first codes raises the objective.

mod columns;
mod compensate;
pub(crate) mod config;
mod descent;
pub(crate) mod levels;
mod state;

use crate::error::PruneError;
use crate::problem::Problem;
use crate::problem::objective::Objective;
use crate::problem::solution::{Rounded, RoundedLayer, Step};
use crate::solver::clock::Clock;
use columns::Columns;
use compensate::compensate;
use config::{FirstCodes, GridConfig};
use descent::{fit_scales, sweep};
use levels::Levels;
use state::State;

/// Weights on their grid.
pub(crate) struct OnGrid {
    /// `[p]`
    pub(crate) weights: Vec<f32>,
    /// Weights that are not 0, ascending.
    pub(crate) support: Vec<usize>,
    pub(crate) terms: Objective,
    pub(crate) rounded: Rounded,
}

/// Rounds `weights`, the best real values on `support` (ascending).
pub(crate) fn on_grid(
    problem: &Problem,
    config: &GridConfig,
    (weights, support): (Vec<f32>, Vec<usize>),
    clock: &mut Clock,
) -> Result<OnGrid, PruneError> {
    let few = problem.over_few_rows()?;
    let columns = Columns::new(&few)?;
    let curvature = State::curvature(&few, &columns)?;
    let mut levels = Levels::new(config, few.layout())?;
    levels.choose_scales(&weights, few.dense());
    let mut nearest = State::new(&few, &columns, &curvature, levels, weights)?;
    let real = nearest.objective().total();
    nearest.round(&support)?;
    let rounded_to_nearest = nearest.objective().total();
    let state = match config.first {
        FirstCodes::Nearest => nearest,
        FirstCodes::Compensated => {
            let mut weights = vec![0.0; few.parameters()];
            support
                .iter()
                .for_each(|index| weights[*index] = few.dense()[*index]);
            let levels = nearest.levels.clone();
            let mut compensated = State::new(&few, &columns, &curvature, levels, weights)?;
            compensate(&mut compensated, &support)?;
            match compensated.objective().total() < rounded_to_nearest {
                true => compensated,
                false => nearest,
            }
        }
    };
    let mut search = Search {
        state,
        support,
        config,
        clock,
    };
    search.note(Step::Round);
    search.descend()?;
    let Search {
        state, mut support, ..
    } = search;
    support.retain(|index| state.weights[*index] != 0.0);
    let layers = config.layers.iter().filter_map(|grid| {
        let range = few.layout().layer(&grid.path)?.range();
        let first = state.levels.group(range.start)?;
        let count: usize = grid.groups.iter().product();
        Some(RoundedLayer {
            path: grid.path.clone(),
            groups: grid.groups.clone(),
            scales: state.levels.scales[first..first + count].to_vec(),
            codes: state.codes[range].to_vec(),
        })
    });
    Ok(OnGrid {
        rounded: Rounded {
            layers: layers.collect(),
            real,
            nearest: rounded_to_nearest,
        },
        terms: state.objective(),
        weights: state.weights,
        support,
    })
}

struct Search<'s, 'c> {
    state: State<'s>,
    support: Vec<usize>,
    config: &'c GridConfig,
    clock: &'c mut Clock,
}

impl Search<'_, '_> {
    /// Sweeps and scales until little changes.
    fn descend(&mut self) -> Result<(), PruneError> {
        for _ in 0..self.config.sweeps {
            let before = self.state.squares();
            let moved = sweep(&mut self.state, &self.support)?;
            self.note(Step::CodeDescent);
            if self.config.fit_scales {
                fit_scales(&mut self.state, &self.support)?;
                self.note(Step::Scales);
            } else if moved == 0 {
                break;
            }
            if self.is_settled(before) {
                break;
            }
        }
        Ok(())
    }

    fn is_settled(&self, before: f64) -> bool {
        before - self.state.squares() <= self.config.tolerance * before
    }

    fn note(&mut self, step: Step) {
        let weights = self.support.iter().map(|index| self.state.weights[*index]);
        let nonzeros = weights.filter(|weight| *weight != 0.0).count();
        let objective = self.state.objective().total();
        self.clock.note(step, objective, nonzeros);
    }
}
