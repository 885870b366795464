//! SparseGPT: one pass over the columns.
//!
//! ([Frantar & Alistarh, 2023](https://arxiv.org/abs/2301.00774)). With U the upper Cholesky factor
//! of H⁻¹, column by column: what is pruned of column j leaves an error w_j/U_jj, which the columns to
//! its right make good (`compensation.rs`). Which weights go is decided a block of columns at a time, by
//! w_j²/U_jj², with the weights as they are by then.

use rayon::prelude::*;

use crate::compensation::Compensation;
use crate::error::LayerwiseError;
use crate::{Keep, LayerProblem, Support};

/// Weights `[o, d]` and support of SparseGPT with blocks of that many columns.
pub(crate) fn sparse_gpt(
    problem: &LayerProblem,
    keep: &Keep,
    block: usize,
) -> Result<(Vec<f64>, Support), LayerwiseError> {
    let (o, d) = (problem.outputs(), problem.features());
    let inverse = problem.factor().inverse();
    let compensation = Compensation::of_inverse(inverse, (0..d).collect(), problem.ridge())?;
    // Where H is that of the weights themselves, this is w₀.
    let mut weights = problem.optimum();
    // Blocks of columns hold whole groups.
    let group = match keep {
        Keep::NOfM { m, .. } => *m,
        _ => 1,
    };
    let block = (block.clamp(1, d.max(1)).div_ceil(group) * group).min(d);
    let errors = |first: usize, left: &[f64]| -> Vec<f64> {
        let pairs = left[..block.min(left.len())].iter().enumerate();
        pairs
            .map(|(at, w)| (w / compensation.upper(first + at)[0]).powi(2))
            .collect()
    };
    // As many as are due by the end of this block.
    let due = |total: usize, step: usize| {
        (total as u128 * d.min(step + block) as u128 / d as u128) as usize
    };
    let part = |keep: &Keep, first: usize| {
        let before = |total| match first {
            0 => 0,
            _ => due(total, first - block),
        };
        match *keep {
            Keep::Weights(count) => Keep::Weights(due(count, first) - before(count)),
            Keep::PerRow(count) => Keep::PerRow(due(count, first) - before(count)),
            groups @ Keep::NOfM { .. } => groups,
        }
    };
    let mut kept: Vec<Vec<bool>> = vec![vec![false; d]; o];
    let mark = |kept: &mut [bool], first: usize, chosen: &[bool]| {
        kept[first..first + chosen.len()].copy_from_slice(chosen);
    };
    let of_all_rows = matches!(keep, Keep::Weights(_));
    // Rows that choose by themselves may do so several times in a block of compensation.
    let together = match of_all_rows {
        true => block,
        false => 128_usize.div_ceil(block) * block,
    };
    for first in (0..d).step_by(together.max(1)) {
        let last = d.min(first + together);
        if of_all_rows {
            let scores: Vec<f64> = weights
                .par_chunks_exact(d)
                .enumerate()
                .flat_map_iter(|(row, weights)| {
                    let importance = problem.importance(row);
                    let errors = errors(first, &weights[first..]);
                    errors.into_iter().map(move |error| importance * error)
                })
                .collect();
            let chosen = part(keep, first).select(&scores, last - first);
            for (row, kept) in kept.iter_mut().enumerate() {
                mark(kept, first, chosen.row(row));
            }
        }
        compensation.pass_block(first..last, &mut weights, &mut kept, |kept, step, left| {
            if !of_all_rows && step % block == 0 {
                let errors = errors(step, left);
                let chosen = part(keep, step).select(&errors, errors.len());
                mark(kept, step, chosen.row(0));
            }
            if kept[step] { left[0] } else { 0.0 }
        });
    }
    Ok((weights, Support::of(d, kept.concat())))
}
