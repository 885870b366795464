//! Zeros that move while codes are chosen.
//!
//! f(q) = ½ (q − w)ᵀ H (q − w) with w the minimum without any zero, and its gradient g = H (q − w). A
//! kept weight i that becomes zero moves by δ_i, a zero j that takes its place by δ_j:
//!
//! ```text
//! Δ = g_i δ_i + ½ H_ii δ_i² + (g_j + H_ij δ_i) δ_j + ½ H_jj δ_j²
//! ```
//!
//! δ_j is the best step to a code that is not zero. Only what lowers f is done, the best of what was
//! looked at first; in a pattern n:m only within a group.

use super::RoundingProblem;
use crate::grid::Range;

/// Weights of either side that are looked at together.
const LOOKED_AT: usize = 64;
/// Part of the objective of a row that an exchange has to take away.
const TOLERANCE: f64 = 1e-9;

/// Where zeros may move to.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Zeros<'a> {
    /// The minimum without any zero, `[outputs, inputs]`.
    pub(crate) optimum: &'a [f64],
    /// Inputs of a group that they stay in; `None` for the whole output.
    pub(crate) group: Option<usize>,
}

/// A kept weight and a zero that change places.
struct Exchange {
    leaves: usize,
    enters: usize,
    code: u8,
    delta: f64,
}

impl RoundingProblem<'_> {
    /// Exchanges weights of one output until none lowers its objective; how many there were.
    pub(crate) fn exchange(
        &self,
        zeros: Zeros<'_>,
        row: usize,
        kept: &mut [bool],
        codes: &mut [u8],
        ranges: &[Range],
    ) -> usize {
        let d = self.inputs;
        let optimum = &zeros.optimum[row * d..(row + 1) * d];
        let range = |at: usize| &ranges[at / self.group()];
        let off: Vec<f64> = (0..d)
            .map(|at| range(at).value(codes[at]) - optimum[at])
            .collect();
        let mut gradient = self.times(&off);
        let objective: f64 = gradient
            .iter()
            .zip(&off)
            .map(|(g, off)| 0.5 * g * off)
            .sum();
        let mut exchanged = 0;
        // Each lowers the objective, so that none can come back for ever; the bound is for rounding.
        while exchanged < d {
            let found = self.best(zeros.group, &gradient, kept, codes, ranges);
            let Some(found) = found.filter(|found| found.delta < -TOLERANCE * objective) else {
                break;
            };
            let Exchange {
                leaves,
                enters,
                code,
                ..
            } = found;
            let out = -range(leaves).value(codes[leaves]);
            let step = range(enters).value(code);
            codes[leaves] = range(leaves).zero;
            codes[enters] = code;
            (kept[leaves], kept[enters]) = (false, true);
            for (at, g) in gradient.iter_mut().enumerate() {
                *g += out * self.hessian[leaves * d + at] + step * self.hessian[enters * d + at];
            }
            exchanged += 1;
        }
        exchanged
    }

    /// The best exchange among the cheapest kept weights and the zeros that gain most.
    fn best(
        &self,
        group: Option<usize>,
        gradient: &[f64],
        kept: &[bool],
        codes: &[u8],
        ranges: &[Range],
    ) -> Option<Exchange> {
        let range = |at: usize| &ranges[at / self.group()];
        let diagonal = |at: usize| self.diagonal[at];
        let adds = |at: usize, g: f64, step: f64| step * (g + 0.5 * step * diagonal(at));
        let cost = |at: usize| adds(at, gradient[at], -range(at).value(codes[at]));
        // The best code that is not zero, at this gradient.
        let entering = |at: usize, g: f64| {
            let code = nonzero(range(at), -g / diagonal(at));
            (code, adds(at, g, range(at).value(code)))
        };
        let ranked = |are: bool, score: &dyn Fn(usize) -> f64| -> Vec<usize> {
            let places = (0..kept.len()).filter(|at| kept[*at] == are);
            let mut scored: Vec<(f64, usize)> = places.map(|at| (score(at), at)).collect();
            scored.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
            scored.truncate(LOOKED_AT);
            scored.into_iter().map(|(_, at)| at).collect()
        };
        let (cheapest, enters) = match group {
            None => {
                let gain = |at| entering(at, gradient[at]).1;
                (ranked(true, &cost), ranked(false, &gain))
            }
            // Of groups any may have its best pair.
            Some(_) => (
                Vec::new(),
                (0..kept.len()).filter(|at| !kept[*at]).collect(),
            ),
        };
        let mut best: Option<Exchange> = None;
        for enters in enters {
            let leaving: Vec<usize> = match group {
                None => cheapest.clone(),
                Some(m) => {
                    let of_group = enters / m * m..(enters / m + 1) * m;
                    of_group.filter(|at| kept[*at]).collect()
                }
            };
            for leaves in leaving {
                let out = -range(leaves).value(codes[leaves]);
                let g = gradient[enters] + self.hessian[leaves * self.inputs + enters] * out;
                let (code, gain) = entering(enters, g);
                let delta = cost(leaves) + gain;
                if best.as_ref().is_none_or(|best| delta < best.delta) {
                    best = Some(Exchange {
                        leaves,
                        enters,
                        code,
                        delta,
                    });
                }
            }
        }
        best
    }
}

/// The nearest code that is not zero.
fn nonzero(range: &Range, value: f64) -> u8 {
    match range.code(value) {
        code if code != range.zero => code,
        _ if range.zero == range.most || (value < 0.0 && range.zero > range.least) => {
            range.zero - 1
        }
        _ => range.zero + 1,
    }
}
