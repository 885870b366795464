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
    let mut kept = vec![false; o * d];
    // Blocks of columns hold whole groups.
    let group = match keep {
        Keep::NOfM { m, .. } => *m,
        _ => 1,
    };
    let block = (block.clamp(1, d.max(1)).div_ceil(group) * group).min(d);
    let mut selected = 0;
    for first in (0..d).step_by(block) {
        let last = d.min(first + block);
        let width = last - first;
        let scores: Vec<f64> = (0..o * width)
            .map(|at| {
                let (row, j) = (at / width, first + at % width);
                let error = weights[row * d + j] / compensation.diagonal(j);
                problem.importance(row) * error * error
            })
            .collect();
        // As many as are due by the end of this block.
        let due = |total: usize| (total as u128 * last as u128 / d as u128) as usize;
        let part = match *keep {
            Keep::Weights(count) => {
                Keep::Weights(due(count) - std::mem::replace(&mut selected, due(count)))
            }
            Keep::PerRow(count) => {
                Keep::PerRow(due(count) - std::mem::replace(&mut selected, due(count)))
            }
            groups @ Keep::NOfM { .. } => groups,
        };
        let chosen = part.select(&scores, width);
        weights
            .par_chunks_exact_mut(d)
            .zip(kept.par_chunks_exact_mut(d))
            .enumerate()
            .for_each(|(row, (weights, kept))| {
                kept[first..last].copy_from_slice(chosen.row(row));
                for j in first..last {
                    if kept[j] {
                        continue;
                    }
                    let off = std::mem::take(&mut weights[j]);
                    compensation.make_good(j, off, &mut weights[j + 1..]);
                }
            });
    }
    Ok((weights, Support::of(d, kept)))
}
