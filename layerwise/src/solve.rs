//! From a problem to a support and the values on it.

use std::collections::HashMap;

use faer::Mat;
use rayon::prelude::*;

use crate::conjugate::conjugate;
use crate::dense::Factor;
use crate::elimination::obs;
use crate::error::{LayerwiseError, finite, same};
use crate::search::{TOLERANCE, best_entry, cheapest, improve};
use crate::sparse_gpt::sparse_gpt;
use crate::splitting::{Pace, splitting};
use crate::support::places;
use crate::tableau::Tableau;
use crate::{Keep, LayerProblem, Support, scores};

/// Operations of optimal brain surgeon, o·d³/3, up to which a layer is searched.
const MAX_OPERATIONS: f64 = 1e11;
/// Rounds in which rows of a [`Keep::Weights`] layer give weights to each other.
const TRANSFERS: usize = 3;

/// How the support of a layer is chosen, and where its values come from.
///
/// | method | support | values |
/// |---|---|---|
/// | `Magnitude` | largest \|w₀\| | dense |
/// | `Wanda` | largest \|w₀\|·‖x‖ | dense |
/// | `SparseGpt` | w²/\[H⁻¹\] in one pass over the columns | of that pass |
/// | `Obs` | one weight after the other, the cheapest first | exact |
/// | `Splitting` | those at which the alternating direction method of multipliers ends | nearly exact |
/// | `BestSubset` | the best of those above, and `Splitting`'s, exact on each, then exchanges and splicing | exact |
///
/// The objective of `BestSubset` is not above that of any other one. For a layer with o·d³/3 beyond 10¹¹ it
/// is the best of those above as they are, but `Obs`, and its splitting takes a third of the iterations.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum Method {
    /// The largest weights.
    Magnitude,
    /// Magnitude times the norm of the input; with [`Keep::PerRow`] as in the paper
    /// ([Sun et al., 2023](https://arxiv.org/abs/2306.11695)).
    Wanda,
    /// One pass over the columns ([Frantar & Alistarh, 2023](https://arxiv.org/abs/2301.00774)).
    SparseGpt {
        /// Columns whose support is decided together; the paper has 128.
        block: usize,
    },
    /// Optimal brain surgeon, one weight after the other: d³/3 operations for each row.
    Obs,
    /// The support on which a dense and a sparse solution agree, which are pulled together
    /// ([ALPS, Meng et al., 2024](https://arxiv.org/abs/2406.07831)), with values by conjugate gradients:
    /// some 10 d³ operations, and 4 d² for each row in each of some dozens of iterations.
    Splitting,
    /// Local search from the best start.
    BestSubset,
}

/// Weights of a layer, on a support.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerSolution {
    /// `[o, d]` row by row, 0 where not kept.
    pub weights: Vec<f32>,
    /// Which are kept.
    pub support: Support,
    /// f at the weights.
    pub objective: f64,
}

/// Chooses a support and finds its values.
///
/// # Errors
///
/// [`LayerwiseError::DoesNotDivide`] and [`LayerwiseError::KeepsTooMany`] where `keep` does not fit,
/// [`LayerwiseError::InvalidConfig`], [`LayerwiseError::NotPositiveDefinite`]; [`LayerwiseError::NotFinite`]
/// where weights are beyond F32.
pub fn solve(
    problem: &LayerProblem,
    keep: &Keep,
    method: &Method,
) -> Result<LayerSolution, LayerwiseError> {
    let d = problem.features();
    keep.check(problem.outputs(), d)?;
    match method {
        Method::Magnitude => masked(problem, &keep.select(&scores::magnitude(problem), d)),
        Method::Wanda => masked(problem, &keep.select(&scores::wanda(problem), d)),
        Method::SparseGpt { block } => {
            let (weights, support) = sparse_gpt(problem, keep, *block)?;
            solution(problem, weights, support)
        }
        Method::Obs => back_solve(problem, &obs(problem, keep)),
        Method::Splitting => split(problem, keep, Pace::Slow),
        Method::BestSubset => {
            let operations = problem.outputs() as f64 * (d as f64).powi(3) / 3.0;
            if operations > MAX_OPERATIONS {
                return beyond(problem, keep);
            }
            let mut best = back_solve(problem, &obs(problem, keep));
            let starts = [
                sparse_gpt(problem, keep, 128)?.1,
                keep.select(&scores::magnitude(problem), d),
                keep.select(&scores::wanda(problem), d),
            ];
            // What one weight after the other leads to is another valley than what all at once do.
            let split = splitting(problem, keep, Pace::Slow).map(|(_, support)| support);
            for start in starts.into_iter().chain(split) {
                best = better(best, back_solve(problem, &start));
            }
            let best = best?;
            let found = search(problem, keep, &best.support)?;
            better(Ok(best), back_solve(problem, &found))
        }
    }
}

/// [`Method::BestSubset`] of a layer beyond [`MAX_OPERATIONS`].
fn beyond(problem: &LayerProblem, keep: &Keep) -> Result<LayerSolution, LayerwiseError> {
    let others = [
        Method::SparseGpt { block: 128 },
        Method::Magnitude,
        Method::Wanda,
    ];
    let others = others.iter().map(|method| solve(problem, keep, method));
    others.fold(split(problem, keep, Pace::Fast), better)
}

/// The support of [`Method::Splitting`] and its values; SparseGPT's where it has none.
fn split(problem: &LayerProblem, keep: &Keep, pace: Pace) -> Result<LayerSolution, LayerwiseError> {
    let (weights, support) = match splitting(problem, keep, pace) {
        Some(split) => split,
        None => sparse_gpt(problem, keep, 128)?,
    };
    let weights = conjugate(problem, &support, weights);
    solution(problem, weights, support)
}

/// The minimum of the problem on a support: a Cholesky factor for each set of features that some
/// rows keep.
///
/// # Errors
///
/// [`LayerwiseError::Mismatch`] for a support of another size,
/// [`LayerwiseError::NotPositiveDefinite`]; [`LayerwiseError::NotFinite`] where weights are beyond F32.
pub fn back_solve(
    problem: &LayerProblem,
    support: &Support,
) -> Result<LayerSolution, LayerwiseError> {
    let (o, d) = (problem.outputs(), problem.features());
    same("weights of the support", o * d, support.kept().len())?;
    let mut sharing: HashMap<&[bool], Vec<usize>> = HashMap::new();
    for row in 0..o {
        sharing.entry(support.row(row)).or_default().push(row);
    }
    // By rows, so that of several that have no factor the first is named.
    let mut sharing: Vec<(&[bool], Vec<usize>)> = sharing.into_iter().collect();
    sharing.sort_unstable_by_key(|(_, rows)| rows[0]);
    let solved: Vec<Result<_, LayerwiseError>> = sharing
        .into_par_iter()
        .map(|(kept, rows)| {
            let places = places(kept);
            if places.is_empty() {
                return Ok(Vec::new());
            }
            let right = Mat::from_fn(places.len(), rows.len(), |at, row| {
                problem.linear(rows[row])[places[at]]
            });
            let solved = match places.len() == d {
                true => problem.factor().solve(&right),
                false => Factor::of_part(problem.matrix(), &places, problem.ridge())?.solve(&right),
            };
            let rows = rows.into_iter().enumerate();
            let rows =
                rows.map(|(at, row)| (row, places.clone(), solved.col_as_slice(at).to_vec()));
            Ok(rows.collect())
        })
        .collect();
    let mut weights = vec![0.0; o * d];
    for rows in solved {
        for (row, places, values) in rows? {
            for (place, value) in places.into_iter().zip(values) {
                weights[row * d + place] = value;
            }
        }
    }
    solution(problem, weights, support.clone())
}

/// The dense weights on a support.
///
/// # Errors
///
/// [`LayerwiseError::Mismatch`] for a support of another size.
pub fn masked(problem: &LayerProblem, support: &Support) -> Result<LayerSolution, LayerwiseError> {
    let dense = problem.dense();
    same("weights of the support", dense.len(), support.kept().len())?;
    let pairs = dense.iter().zip(support.kept());
    let weights = pairs.map(|(w, kept)| if *kept { f64::from(*w) } else { 0.0 });
    solution(problem, weights.collect(), support.clone())
}

fn solution(
    problem: &LayerProblem,
    weights: Vec<f64>,
    support: Support,
) -> Result<LayerSolution, LayerwiseError> {
    // Rounded as they will be used.
    let weights: Vec<f32> = weights.iter().map(|w| *w as f32).collect();
    finite("the solution", &weights)?;
    let exact: Vec<f64> = weights.iter().map(|w| f64::from(*w)).collect();
    Ok(LayerSolution {
        objective: problem.value(&exact),
        weights,
        support,
    })
}

/// The one with the lower objective; a solution beyond F32 is none.
fn better(
    one: Result<LayerSolution, LayerwiseError>,
    other: Result<LayerSolution, LayerwiseError>,
) -> Result<LayerSolution, LayerwiseError> {
    match (one, other) {
        (Ok(one), Ok(other)) => Ok(match other.objective < one.objective {
            true => other,
            false => one,
        }),
        (Ok(found), Err(LayerwiseError::NotFinite { .. }))
        | (Err(LayerwiseError::NotFinite { .. }), Ok(found)) => Ok(found),
        (Err(error), _) | (_, Err(error)) => Err(error),
    }
}

/// What a row can still gain or give.
struct Searched {
    kept: Vec<bool>,
    cheapest: Option<(usize, f64)>,
    best_entry: Option<(usize, f64)>,
}

/// Best-subset search from a support: every row by itself, then weights go from rows that miss them
/// least to rows that gain most by them, and those rows are searched again.
fn search(problem: &LayerProblem, keep: &Keep, start: &Support) -> Result<Support, LayerwiseError> {
    let mut support = start.clone();
    let mut dirty: Vec<usize> = (0..problem.outputs()).collect();
    let mut rows: Vec<Option<Searched>> = dirty.iter().map(|_| None).collect();
    let free_rows = matches!(keep, Keep::Weights(_));
    for round in 0..=TRANSFERS {
        let searched: Result<Vec<(usize, Searched)>, LayerwiseError> = dirty
            .par_iter()
            .map(|row| {
                let tableau = Tableau::new(problem, *row, support.row(*row))?;
                let tableau = improve(tableau, keep, problem.constant(*row));
                let weigh = |(at, value)| (at, problem.importance(*row) * value);
                let searched = Searched {
                    kept: tableau.kept().to_vec(),
                    cheapest: cheapest(&tableau).map(weigh),
                    best_entry: best_entry(&tableau).map(weigh),
                };
                Ok((*row, searched))
            })
            .collect();
        for (row, searched) in searched? {
            support.row_mut(row).copy_from_slice(&searched.kept);
            rows[row] = Some(searched);
        }
        dirty.clear();
        if !free_rows || round == TRANSFERS {
            break;
        }
        // The rows that gain most against those that lose least, one weight each.
        let mut takers: Vec<(f64, usize, usize)> = Vec::new();
        let mut givers: Vec<(f64, usize, usize)> = Vec::new();
        for (row, searched) in rows.iter().enumerate() {
            let Some(searched) = searched else { continue };
            takers.extend(searched.best_entry.map(|(at, gain)| (gain, row, at)));
            givers.extend(searched.cheapest.map(|(at, cost)| (cost, row, at)));
        }
        takers.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        givers.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        let mut is_used = vec![false; rows.len()];
        let mut givers = &givers[..];
        for (gain, taker, entering) in takers {
            if is_used[taker] {
                continue;
            }
            while let [(_, giver, _), rest @ ..] = givers
                && is_used[*giver]
            {
                givers = rest;
            }
            let is_free = |giver: usize| !is_used[giver] && giver != taker;
            let mut cheapest = givers.iter().filter(|(_, giver, _)| is_free(*giver));
            let Some(&(cost, giver, leaving)) = cheapest.next() else {
                break;
            };
            if gain <= cost * (1.0 + TOLERANCE) {
                break;
            }
            support.row_mut(taker)[entering] = true;
            support.row_mut(giver)[leaving] = false;
            is_used[taker] = true;
            is_used[giver] = true;
            dirty.extend([taker, giver]);
        }
        if dirty.is_empty() {
            break;
        }
    }
    Ok(support)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Gram, ProblemConfig};

    #[test]
    fn a_layer_beyond_the_operations_is_not_above_simpler_methods() {
        let (rows, d, o) = (100, 36, 6);
        for step in [0.37, 0.71, 1.3, 2.9] {
            let number = |at: usize| ((at * at) as f64 * step).sin() as f32;
            let inputs: Vec<f32> = (0..rows * d).map(number).collect();
            let dense: Vec<f32> = (0..o * d).map(|at| number(at + 7)).collect();
            let mut gram = Gram::new(d);
            gram.add(&inputs).unwrap();
            let problem = LayerProblem::new(&gram, &dense, &ProblemConfig::new()).unwrap();
            for keep in [
                Keep::Weights(o * d / 2),
                Keep::Weights(o * d / 10),
                Keep::PerRow(d / 3),
                Keep::NOfM { n: 2, m: 4 },
            ] {
                let found = beyond(&problem, &keep).unwrap();
                for method in [
                    Method::Magnitude,
                    Method::Wanda,
                    Method::SparseGpt { block: 128 },
                ] {
                    let other = solve(&problem, &keep, &method).unwrap();
                    assert!(found.objective <= other.objective, "{keep:?}, {method:?}");
                }
            }
        }
    }

    /// Row r keeps one feature alone, the r-th from the end.
    #[test]
    fn of_several_rows_without_a_factor_the_first_is_named() {
        const D: usize = 24;
        let mut gram = Gram::new(D);
        gram.add(&[1.0; D]).unwrap();
        let problem = LayerProblem::new(&gram, &[1.0; D * D], &ProblemConfig::new()).unwrap();
        let at = |i: usize, j: usize| f64::from(u8::from(i == j));
        let negative = (0..D * D).map(|index| -at(index / D, index % D));
        let problem = problem.with_matrix(negative.collect());
        let kept = (0..D * D).map(|index| index / D + index % D == D - 1);
        let support = Support::new(D, kept.collect()).unwrap();
        let error = back_solve(&problem, &support).unwrap_err();
        let expected = LayerwiseError::NotPositiveDefinite {
            feature: D - 1,
            ridge: problem.ridge(),
        };
        assert_eq!(error, expected);
    }
}
