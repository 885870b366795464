//! Weights on a grid, close to the optimum of a layer's quadratic.
//!
//! f(q) = ½ (q − w)ᵀ H (q − w) for each output, over codes and, in the refinement, scales. GPTQ goes
//! over the inputs once, each of which those after it make up for ([`Compensation`]). Coordinate descent
//! then sets every code to the best one given all others, and the scales of an output to the solution of
//! the small system (BᵀHB) s = BᵀHw, with one column of multiples for each group in B; neither can
//! make f larger.

mod zeros;

use std::borrow::Cow;
use std::sync::OnceLock;

use burn_lean_layerwise::{Compensation, LayerwiseError};
use faer::linalg::solvers::Solve;
use faer::{Mat, Side};
use rayon::prelude::*;

pub(crate) use zeros::Zeros;

use crate::grid::Range;
use crate::{Grid, Quantize, Rounding};

/// Most inputs for which an output with zeros has a factor of its own.
const OWN_FACTOR: usize = 1024;

/// Codes of a matrix `[outputs, inputs]`, with a range for each group of an output.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Rounded {
    pub(crate) codes: Vec<u8>,
    /// `[outputs, groups]`
    pub(crate) ranges: Vec<Range>,
}

/// An output that is rounded.
struct Row<'a> {
    optimum: &'a [f64],
    kept: Cow<'a, [bool]>,
    codes: Vec<u8>,
    ranges: Vec<Range>,
    /// The group whose range GPTQ has taken last.
    reached: Option<usize>,
}

/// What is rounded.
pub(crate) struct RoundingProblem<'a> {
    /// `[inputs, inputs]`, with the ridge; to the nearest codes nobody asks for it.
    pub(crate) hessian: &'a [f64],
    /// How much each input counts, `[inputs]`: the diagonal of that.
    pub(crate) diagonal: &'a [f64],
    /// The optimum, `[outputs, inputs]`: on the support where there is one.
    pub(crate) optimum: &'a [f64],
    /// Weights that are not zero, `[outputs, inputs]`; the optimum is 0 at the others.
    pub(crate) kept: Option<&'a [bool]>,
    /// Where there are some, whether and where zeros may move.
    pub(crate) zeros: Option<Zeros<'a>>,
    pub(crate) inputs: usize,
    pub(crate) ridge: f64,
    pub(crate) quantize: &'a Quantize,
    /// Where the compensation of all inputs is kept for other layers with the same H.
    pub(crate) shared: Option<&'a OnceLock<Compensation>>,
}

impl Rounded {
    /// The values, `[outputs, inputs]`.
    pub(crate) fn values(&self, inputs: usize, quantize: &Quantize) -> Vec<f32> {
        let group = group_size(inputs, quantize);
        let groups = inputs.div_ceil(group);
        let value = |(at, code): (usize, &u8)| {
            let range = &self.ranges[at / inputs * groups + at % inputs / group];
            range.value(*code) as f32
        };
        self.codes.iter().enumerate().map(value).collect()
    }

    /// Puts weights that took no part, each with its place and in that order, at their nearest codes. A group of
    /// zeros gets a range for them: any is right for zeros.
    pub(crate) fn put_nearest(
        &mut self,
        weights: &[(usize, f32)],
        inputs: usize,
        quantize: &Quantize,
    ) {
        let group = group_size(inputs, quantize);
        let groups = inputs.div_ceil(group);
        let group_of = |at: usize| Grid::group_at(group, inputs, at);
        for part in weights.chunk_by(|one, next| group_of(one.0) == group_of(next.0)) {
            let of = group_of(part[0].0);
            let (row, first) = (of / groups * inputs, of % groups * group);
            let start = row + first;
            let codes = &mut self.codes[start..row + inputs.min(first + group)];
            let range = &mut self.ranges[of];
            if codes.iter().all(|code| *code == range.zero) {
                let values: Vec<f64> = part.iter().map(|(_, w)| f64::from(*w)).collect();
                *range = Range::of(&values, &vec![1.0; values.len()], quantize);
                codes.fill(range.zero);
            }
            for (at, weight) in part {
                codes[*at - start] = range.code(f64::from(*weight));
            }
        }
    }
}

/// Inputs that share a range.
pub(crate) fn group_size(inputs: usize, quantize: &Quantize) -> usize {
    quantize.group.unwrap_or(inputs).clamp(1, inputs.max(1))
}

impl RoundingProblem<'_> {
    pub(crate) fn round(&self) -> Result<Rounded, LayerwiseError> {
        let d = self.inputs;
        let mut rows: Vec<Row<'_>> = (0..self.optimum.len() / d.max(1))
            .into_par_iter()
            .map(|row| self.row(row))
            .collect();
        if let Rounding::Compensated { sweeps, .. } = self.quantize.rounding {
            let (own, shared): (Vec<_>, Vec<_>) = rows
                .iter_mut()
                .partition(|row| d <= OWN_FACTOR && row.kept.contains(&false));
            if !shared.is_empty() {
                let own = OnceLock::new();
                let place = self.shared.unwrap_or(&own);
                let of_all = match place.get() {
                    Some(of_all) => of_all,
                    None => {
                        let of_all = self.compensation(0..d)?;
                        place.get_or_init(|| of_all)
                    }
                };
                self.pass(of_all, shared);
            }
            let own = own.into_par_iter();
            own.filter(|row| row.kept.contains(&true))
                .try_for_each(|row| {
                    let kept = (0..d).filter(|at| row.kept[*at]);
                    self.pass(&self.compensation(kept)?, vec![row]);
                    Ok::<_, LayerwiseError>(())
                })?;
            let rows = rows.par_iter_mut().enumerate();
            rows.for_each(|(at, row)| self.improve(at, row, sweeps));
        }
        let ranges = rows.iter().flat_map(|row| row.ranges.iter().copied());
        Ok(Rounded {
            ranges: ranges.collect(),
            codes: rows
                .iter()
                .flat_map(|row| row.codes.iter().copied())
                .collect(),
        })
    }

    /// A row, each of its weights at its nearest code.
    fn row(&self, row: usize) -> Row<'_> {
        let d = self.inputs;
        let optimum = &self.optimum[row * d..(row + 1) * d];
        let kept = match self.kept {
            Some(kept) => Cow::Borrowed(&kept[row * d..(row + 1) * d]),
            None => Cow::Owned(vec![true; d]),
        };
        let ranges = self.ranges(optimum);
        let codes = (0..d).map(|at| {
            let range = &ranges[at / self.group()];
            match kept[at] {
                true => range.code(optimum[at]),
                false => range.zero,
            }
        });
        Row {
            codes: codes.collect(),
            optimum,
            kept,
            ranges,
            reached: None,
        }
    }

    /// After GPTQ: better codes and scales, and zeros elsewhere.
    fn improve(&self, at: usize, row: &mut Row<'_>, sweeps: usize) {
        let d = self.inputs;
        let Row {
            optimum,
            kept,
            codes,
            ranges,
            ..
        } = row;
        // A range that is another one now may have another zero.
        for at in (0..d).filter(|at| !kept[*at]) {
            codes[at] = ranges[at / self.group()].zero;
        }
        self.refine(optimum, kept, sweeps, codes, ranges);
        if let Some(zeros) = self.zeros {
            let whole = &zeros.optimum[at * d..(at + 1) * d];
            let kept = kept.to_mut();
            for _ in 0..sweeps {
                if self.exchange(zeros, at, kept, codes, ranges) == 0 {
                    break;
                }
                self.refine(whole, kept, sweeps, codes, ranges);
            }
        }
    }

    pub(crate) fn group(&self) -> usize {
        group_size(self.inputs, self.quantize)
    }

    /// The range of each group.
    fn ranges(&self, weights: &[f64]) -> Vec<Range> {
        let group = self.group();
        let parts = weights.chunks(group).zip(self.diagonal.chunks(group));
        parts
            .map(|(part, by)| Range::of(part, by, self.quantize))
            .collect()
    }

    /// For these inputs in the order of rounding.
    fn compensation(
        &self,
        inputs: impl Iterator<Item = usize>,
    ) -> Result<Compensation, LayerwiseError> {
        let mut order: Vec<usize> = inputs.collect();
        if let Rounding::Compensated {
            activation_order: true,
            ..
        } = self.quantize.rounding
        {
            order.sort_by(|a, b| self.diagonal[*b].total_cmp(&self.diagonal[*a]));
        }
        Compensation::new(order, self.ridge, |i, j| self.hessian[i * self.inputs + j])
    }

    /// GPTQ. Ranges of a group are those of its weights when it is reached, or, in another order
    /// than that of the groups, the ones given.
    fn pass(&self, compensation: &Compensation, mut rows: Vec<&mut Row<'_>>) {
        let order = compensation.order();
        let group = self.group();
        let keeps_ranges = matches!(
            self.quantize.rounding,
            Rounding::Compensated {
                activation_order: true,
                ..
            }
        );
        let weights = rows
            .iter()
            .flat_map(|row| order.iter().map(|at| row.optimum[*at]));
        let choose = |row: &mut &mut Row<'_>, step: usize, left: &[f64]| {
            let at = order[step];
            let of_group = at / group;
            if !keeps_ranges && row.reached != Some(of_group) {
                row.reached = Some(of_group);
                let own = order[step..].iter().zip(left);
                let own = own.take_while(|(other, _)| *other / group == of_group);
                let (values, by): (Vec<f64>, Vec<f64>) = own
                    .filter(|(other, _)| row.kept[**other])
                    .map(|(other, value)| (*value, self.diagonal[*other]))
                    .unzip();
                row.ranges[of_group] = Range::of(&values, &by, self.quantize);
            }
            let range = &row.ranges[of_group];
            row.codes[at] = match row.kept[at] {
                true => range.code(left[0]),
                false => range.zero,
            };
            range.value(row.codes[at])
        };
        let weights = weights.collect();
        // Groups of some of the inputs begin anywhere, and look at all their values then.
        match keeps_ranges || order.len() == self.inputs {
            true => compensation.pass(weights, group, &mut rows, choose),
            false => compensation.pass_whole(weights, &mut rows, choose),
        }
    }

    /// Coordinate descent over codes, and the best scales for them, in turns.
    fn refine(
        &self,
        optimum: &[f64],
        kept: &[bool],
        sweeps: usize,
        codes: &mut [u8],
        ranges: &mut [Range],
    ) {
        let (d, group) = (self.inputs, self.group());
        if sweeps == 0 {
            return;
        }
        let right = self.times(optimum);
        let mut columns = self.columns(codes, ranges);
        for sweep in 0..sweeps {
            // H (q - w), from the products of the codes alone.
            let mut gradient: Vec<f64> = right.iter().map(|right| -right).collect();
            for (column, range) in columns.iter().zip(ranges.iter()) {
                add(&mut gradient, f64::from(range.scale), column);
            }
            let mut changed = false;
            for at in (0..d).filter(|at| kept[*at]) {
                let range = &ranges[at / group];
                let now = range.value(codes[at]);
                let code = range.code(now - gradient[at] / self.diagonal[at]);
                if code == codes[at] {
                    continue;
                }
                let step = range.value(code) - now;
                // The code nearest to the minimum along a coordinate is the best one on it.
                let gain = -step * (gradient[at] + 0.5 * step * self.diagonal[at]);
                if gain <= 0.0 {
                    continue;
                }
                let steps = f64::from(code) - f64::from(codes[at]);
                codes[at] = code;
                changed = true;
                let row = &self.hessian[at * d..(at + 1) * d];
                add(&mut gradient, step, row);
                add(&mut columns[at / group], steps, row);
            }
            let rescaled = self.rescale(&right, &columns, codes, ranges);
            if !changed && (sweep > 0 || !rescaled) {
                break;
            }
        }
    }

    /// H B, a column for each group, of the multiples of its scale. A zero's code is its range's zero.
    fn columns(&self, codes: &[u8], ranges: &[Range]) -> Vec<Vec<f64>> {
        let (d, group) = (self.inputs, self.group());
        let mut columns = vec![vec![0.0; d]; ranges.len()];
        for (at, row) in self.hessian.chunks_exact(d).enumerate() {
            let by = ranges[at / group].multiple(codes[at]);
            if by != 0.0 {
                add(&mut columns[at / group], by, row);
            }
        }
        columns
    }

    /// The best scales for the codes; whether there were better ones. `right` is H w, `columns` H B.
    fn rescale(
        &self,
        right: &[f64],
        columns: &[Vec<f64>],
        codes: &[u8],
        ranges: &mut [Range],
    ) -> bool {
        let (d, group) = (self.inputs, self.group());
        let groups = ranges.len();
        let within = |values: &[f64], of: usize| -> f64 {
            let places = of * group..d.min((of + 1) * group);
            let terms = places.map(|at| ranges[of].multiple(codes[at]) * values[at]);
            terms.sum()
        };
        let mut system = Mat::from_fn(groups, groups, |i, j| within(&columns[j], i));
        let mut sides = Mat::from_fn(groups, 1, |i, _| within(right, i));
        for i in 0..groups {
            // A group of zeros has no say, and keeps what it has.
            if system[(i, i)] == 0.0 {
                system[(i, i)] = 1.0;
                sides[(i, 0)] = f64::from(ranges[i].scale);
            }
        }
        let Ok(factor) = system.llt(Side::Lower) else {
            return false;
        };
        let scales = factor.solve(&sides);
        let mut better = false;
        for (of, range) in ranges.iter_mut().enumerate() {
            let (old, new) = (f64::from(range.scale), scales[(of, 0)]);
            // All groups at once are best; far from the old one the codes would be of another grid.
            if new > 0.25 * old && new < 4.0 * old {
                better |= (new - old).abs() > 1e-4 * old;
            } else {
                return false;
            }
        }
        if better {
            for (of, range) in ranges.iter_mut().enumerate() {
                *range = range.with_scale(scales[(of, 0)]);
            }
        }
        better
    }

    /// H v.
    ///
    /// H is symmetric: row by row, where sums are independent of each other, with the order of a dot product.
    pub(crate) fn times(&self, vector: &[f64]) -> Vec<f64> {
        let mut sums = vec![0.0; self.inputs];
        for (v, row) in vector.iter().zip(self.hessian.chunks_exact(self.inputs)) {
            add(&mut sums, *v, row);
        }
        sums
    }
}

/// sums += by · row.
fn add(sums: &mut [f64], by: f64, row: &[f64]) {
    sums.iter_mut().zip(row).for_each(|(sum, h)| *sum += by * h);
}
