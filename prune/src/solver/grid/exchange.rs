//! Kept weights that become zeros, and pruned ones that take their place with their best codes.
//!
//! With the quantities of [`state`](super::state), for a kept weight i that goes to zero, δ_i = −w_i,
//! and a pruned weight j that gets δ_j:
//!
//! ```text
//! the exchange adds    g_i δ_i + ½ h_i δ_i² + g_j δ_j + ½ h_j δ_j² + a_iᵀa_j δ_i δ_j
//! ```
//!
//! A kept weight whose code is 0 already costs nothing. The most promising pruned weights meet some of
//! the cheapest kept ones of their block or pool; what an exchange adds is computed at the residual
//! that those before it have left, and the best one is done where that is below 0.

use std::collections::HashMap;

use crate::error::PruneError;
use crate::problem::feasible::Feasible;
use crate::solver::dead::Dead;
use crate::solver::grid::columns::{add, dot};
use crate::solver::grid::state::State;

/// Pruned weights that are looked at in a round.
const ENTERING: usize = 4096;
/// Kept weights that one of them is offered.
const OFFERS: usize = 4;
/// An exchange lowers the objective by this part of its squares, or is none.
const TOLERANCE: f64 = 1e-9;

/// One round; how many weights were exchanged. `support` is ascending, and stays so.
pub(crate) fn exchange(
    state: &mut State<'_>,
    feasible: &Feasible,
    dead: &Dead,
    support: &mut Vec<usize>,
) -> Result<usize, PruneError> {
    let offers = offers(state, feasible, dead, support)?;
    let of = |(enters, kept): &(usize, Vec<usize>)| kept.iter().copied().chain([*enters]).collect();
    let mut indices: Vec<usize> = offers.iter().flat_map::<Vec<usize>, _>(of).collect();
    indices.sort_unstable();
    indices.dedup();
    let place: HashMap<usize, usize> = indices.iter().copied().zip(0..).collect();
    let samples = state.residual.len();
    let mut values = Vec::with_capacity(indices.len() * samples);
    state
        .columns
        .each(&indices, |_, column| values.extend_from_slice(column))?;
    let column = |index: usize| {
        let first = place[&index] * samples;
        &values[first..first + samples]
    };
    let least = TOLERANCE * state.squares();
    let mut occupancy = feasible.occupancy(support);
    let mut left = vec![false; state.weights.len()];
    let mut entered = Vec::new();
    for (enters, kept) in offers {
        let new = column(enters);
        let slope = state.slope(enters, new);
        let allowed = |leaves: &usize| {
            !left[*leaves] && feasible.allows_exchange(*leaves, enters, &occupancy)
        };
        let exchanges = kept.into_iter().filter(allowed).map(|leaves| {
            let out = column(leaves);
            let gone = -f64::from(state.weights[leaves]);
            let of_out = state.slope(leaves, out);
            let cost = of_out * gone + 0.5 * state.curvature[leaves] * gone * gone;
            // The slope at j once i is gone.
            let slope = match gone {
                0.0 => slope,
                gone => slope + gone * product(out, new),
            };
            let curvature = state.curvature[enters];
            let (code, value) = nonzero(state, enters, -slope / curvature);
            let step = f64::from(value);
            let adds = cost + slope * step + 0.5 * curvature * step * step;
            (adds, leaves, code, value)
        });
        let best = exchanges.min_by(|a, b| a.0.total_cmp(&b.0));
        if let Some((adds, leaves, code, value)) = best
            && adds < -least
        {
            state.put(leaves, 0, 0.0, column(leaves));
            state.put(enters, code, value, new);
            feasible.record_exchange(leaves, enters, &mut occupancy);
            left[leaves] = true;
            entered.push(enters);
        }
    }
    let exchanged = entered.len();
    support.retain(|index| !left[*index]);
    support.extend(entered);
    support.sort_unstable();
    Ok(exchanged)
}

/// The nearest weight to a value that is not 0.
fn nonzero(state: &State<'_>, index: usize, value: f64) -> (i32, f32) {
    match state.levels.group(index) {
        Some(group) => {
            let code = state.levels.nearest_nonzero(group, value);
            (code, state.levels.value(group, code))
        }
        None => (0, value as f32),
    }
}

fn product(a: &[f32], b: &[f32]) -> f64 {
    let mut wide = vec![0.0; a.len()];
    add(&mut wide, 1.0, a);
    dot(b, &wide)
}

/// The most promising pruned weights, each with kept ones that it may take the place of.
fn offers(
    state: &State<'_>,
    feasible: &Feasible,
    dead: &Dead,
    support: &[usize],
) -> Result<Vec<(usize, Vec<usize>)>, PruneError> {
    let mut is_kept = vec![false; state.weights.len()];
    support.iter().for_each(|index| is_kept[*index] = true);
    let all: Vec<usize> = (0..state.weights.len()).collect();
    // What each kept weight costs, by the bucket that it makes room in; what each pruned one gains.
    let mut kept: HashMap<usize, Bucket> = HashMap::new();
    let mut pruned = Vec::new();
    state.columns.each(&all, |index, column| {
        let (slope, curvature) = (state.slope(index, column), state.curvature[index]);
        let adds = |step: f64| slope * step + 0.5 * curvature * step * step;
        match is_kept[index] {
            true => {
                let cost = adds(-f64::from(state.weights[index]));
                let bucket = kept.entry(feasible.bucket(index)).or_default();
                bucket.kept.push((cost, index));
            }
            false if dead.contains(index) => {}
            false => {
                let (_, value) = nonzero(state, index, -slope / curvature);
                pruned.push((adds(f64::from(value)), index));
            }
        }
    })?;
    let ascending = |a: &(f64, usize), b: &(f64, usize)| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1));
    kept.values_mut()
        .for_each(|bucket| bucket.kept.sort_by(ascending));
    pruned.sort_by(ascending);
    pruned.truncate(ENTERING);
    let mut offers = Vec::with_capacity(pruned.len());
    for (_, enters) in pruned {
        if let Some(bucket) = kept.get_mut(&feasible.bucket(enters)) {
            offers.push((enters, bucket.next()));
        }
    }
    Ok(offers)
}

/// Kept weights that make room for each other's places, the cheapest first.
#[derive(Default)]
struct Bucket {
    kept: Vec<(f64, usize)>,
    /// How often some were offered.
    offered: usize,
}

impl Bucket {
    /// Those from the next one on, around the end.
    fn next(&mut self) -> Vec<usize> {
        let count = self.kept.len();
        let first = self.offered;
        self.offered += 1;
        let offers = (0..OFFERS.min(count)).map(|at| self.kept[(first + at) % count].1);
        offers.collect()
    }
}
