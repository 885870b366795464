//! One weight after the other to its code, those still to come at their best values each time.
//!
//! The rule is that of [Optimal Brain Quantization, Frantar & Alistarh,
//! 2022](https://arxiv.org/abs/2208.11580) and GPTQ for H = GᵀG + 2λI over the whole network, which is
//! never formed. With the weights B of a block that comes next, the weights R after it, d = w − w₀ and
//! the residual e of those decided:
//!
//! ```text
//! K = 2λI + G_R G_Rᵀ = L Lᵀ            n x n, downdated from block to block
//! V = L⁻¹ G_B,  z = L⁻¹ e
//! min over d_R of ½‖e − G_B d_B − G_R d_R‖² + λ‖d‖²  =  λ‖z − V d_B‖² + λ‖d_B‖²
//! M = VᵀV + I = FᵀF, F lower           a block of it
//! M d* = Vᵀz
//! for each j of B in its order:
//!     the best value:  d*_j − Σ_{k<j} F_jk (d_k − d*_k) / F_jj
//!     d_j ← what its nearest code stands for
//! ```
//!
//! O(n²) for a weight with blocks of about n/2. The largest curvature comes first, while the most
//! others can make up for it; real numbers come last.

use faer::Mat;

use crate::error::PruneError;
use crate::solver::factor::Symmetric;
use crate::solver::grid::state::State;

/// Weights of a block, between these and about half of the samples.
const LEAST: usize = 32;
const MOST: usize = 512;

/// Rounds the weights of `support`; the state is at the dense values on it, at zeros elsewhere.
pub(crate) fn compensate(state: &mut State<'_>, support: &[usize]) -> Result<(), PruneError> {
    let problem = state.problem;
    let mut order = support.to_vec();
    order.sort_by(|a, b| {
        let is_real = |index: &usize| state.levels.group(*index).is_none();
        let larger = state.curvature[*b].total_cmp(&state.curvature[*a]);
        is_real(a).cmp(&is_real(b)).then(larger).then(a.cmp(b))
    });
    let samples = problem.samples();
    let width = (samples / 2).clamp(LEAST, MOST);
    let mut kernel = Symmetric::ridge(samples, problem.lambda())?;
    for block in order.chunks(width).skip(1) {
        kernel.add_exact_gram(1.0, state.columns.matrix(block)?.as_ref());
    }
    let blocks = order.len().div_ceil(width);
    for (number, block) in order.chunks(width).enumerate() {
        // Later weights first, so that the Cholesky factor is that of the reversed order.
        let reversed: Vec<usize> = block.iter().rev().copied().collect();
        let columns = state.columns.matrix(&reversed)?;
        if number > 0 {
            kernel.add_exact_gram(-1.0, columns.as_ref());
        }
        if number + 1 == blocks {
            // Nothing is left: exactly so.
            kernel = Symmetric::ridge(samples, problem.lambda())?;
        }
        round(state, &reversed, &columns, &kernel)?;
    }
    Ok(())
}

/// Rounds the weights of a block, which lie in reversed order.
fn round(
    state: &mut State<'_>,
    reversed: &[usize],
    columns: &Mat<f64>,
    kernel: &Symmetric,
) -> Result<(), PruneError> {
    let ridge = state.problem.ridge();
    let factor = kernel.factor(ridge)?;
    let projected = factor.half_solve(columns);
    let residual = Mat::from_fn(columns.nrows(), 1, |row, _| state.residual[row]);
    let right = projected.transpose() * factor.half_solve(&residual);
    // 2λI at λ = ½ is the identity.
    let mut system = Symmetric::ridge(reversed.len(), 0.5)?;
    system.add_exact_gram(1.0, projected.transpose());
    let system = system.factor(ridge)?;
    let best = system.solve(right.col_as_slice(0));
    let lower = system.lower();
    // d − d* of the weights that are decided.
    let mut errors = vec![0.0; reversed.len()];
    for at in (0..reversed.len()).rev() {
        let index = reversed[at];
        let factors = lower.col(at);
        let decided = at + 1..reversed.len();
        let moved: f64 = decided.map(|other| factors[other] * errors[other]).sum();
        let best = best[at];
        let dense = f64::from(state.problem.dense()[index]);
        let (code, value) = state.nearest(index, dense + best - moved / factors[at]);
        let step = f64::from(value) - dense;
        errors[at] = step - best;
        state.codes[index] = code;
        state.weights[index] = value;
        let column = columns.col_as_slice(at).iter();
        let pairs = state.residual.iter_mut().zip(column);
        pairs.for_each(|(e, a)| *e -= step * a);
    }
    Ok(())
}
