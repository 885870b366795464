//! Fake quantization of a tensor in memory, in one pass.

use rayon::prelude::*;

use crate::fake::Clip;
use crate::fake::kernel::{Rule, Wanted};
use crate::format::groups::{Counts, Groups, Run};
use crate::format::number_format::Grid;
use crate::format::step::{Integers, Round, Step};

/// Elements that a thread takes.
const SHARE: usize = 1 << 15;

/// The [`Step`] of each group.
#[derive(Debug)]
pub(crate) struct Steps {
    grid: Grid,
    scale: Vec<f32>,
    inverse: Vec<f32>,
    low: Vec<f32>,
    high: Vec<f32>,
    limit: Option<f32>,
}

impl Steps {
    pub(crate) fn new(rule: &Rule, scale: &[f32], zero_point: &[f32]) -> Self {
        let (min, max) = rule.grid.bounds();
        Self {
            grid: rule.grid,
            limit: rule.limit,
            scale: scale.to_vec(),
            inverse: scale.iter().map(|scale| 1.0 / scale).collect(),
            low: zero_point.iter().map(|zero| min - zero).collect(),
            high: zero_point.iter().map(|zero| max - zero).collect(),
        }
    }

    fn at(&self, group: usize) -> Step {
        Step {
            scale: self.scale[group],
            inverse: self.inverse[group],
            low: self.low[group],
            high: self.high[group],
        }
    }

    /// The steps of neighbouring groups.
    fn from(&self, group: usize, len: usize) -> impl Iterator<Item = Step> {
        let groups = group..group + len;
        let bounds = self.low[groups.clone()]
            .iter()
            .zip(&self.high[groups.clone()]);
        let scales = self.scale[groups.clone()].iter().zip(&self.inverse[groups]);
        scales
            .zip(bounds)
            .map(|((scale, inverse), (low, high))| Step {
                scale: *scale,
                inverse: *inverse,
                low: *low,
                high: *high,
            })
    }

    /// Changes `x` to what the nearest numbers stand for.
    pub(crate) fn quantize(&self, x: &mut [f32], runs: &[Run]) {
        match self.grid {
            Grid::Int { .. } => self.quantize_to(Integers, x, runs),
            Grid::Float { floats, .. } => self.quantize_to(floats, x, runs),
        }
        self.limit_finite(x);
    }

    /// Puts finite results within the limit, where there is one and a group has numbers beyond it.
    fn limit_finite(&self, y: &mut [f32]) {
        let Some(limit) = self.limit else { return };
        let bounds = self.low.iter().zip(&self.high);
        let mut groups = self.scale.iter().zip(bounds);
        let is_beyond = |y: f32| y.abs() > limit;
        if groups.any(|(scale, (low, high))| is_beyond(low * scale) || is_beyond(high * scale)) {
            for y in y.iter_mut().filter(|y| is_beyond(**y) && y.is_finite()) {
                *y = limit.copysign(*y);
            }
        }
    }

    fn quantize_to(&self, numbers: impl Round, x: &mut [f32], runs: &[Run]) {
        for_each_chunk(runs, |start, len, groups| {
            let x = &mut x[start..start + len];
            match groups {
                Chunk::Same(group) => {
                    let step = self.at(group);
                    let quantize = |x: &mut [f32]| {
                        for x in x {
                            *x = step.quantize(numbers, *x).0 * step.scale;
                        }
                    };
                    match len >= 2 * SHARE {
                        true => x.par_chunks_mut(SHARE).for_each(quantize),
                        false => quantize(x),
                    }
                }
                Chunk::Each(group) => {
                    for (x, step) in x.iter_mut().zip(self.from(group, len)) {
                        *x = step.quantize(numbers, *x).0 * step.scale;
                    }
                }
            }
        });
    }

    /// As [`quantize`](Self::quantize), with where `x` was clipped.
    pub(crate) fn quantize_masked(&self, x: &[f32], runs: &[Run]) -> (Vec<f32>, Vec<bool>) {
        let (mut y, clipped) = match self.grid {
            Grid::Int { .. } => self.quantize_masked_to(Integers, x, runs),
            Grid::Float { floats, .. } => self.quantize_masked_to(floats, x, runs),
        };
        self.limit_finite(&mut y);
        (y, clipped)
    }

    fn quantize_masked_to(
        &self,
        numbers: impl Round,
        x: &[f32],
        runs: &[Run],
    ) -> (Vec<f32>, Vec<bool>) {
        let mut y = vec![0.0; x.len()];
        let mut clipped = vec![false; x.len()];
        for_each_chunk(runs, |start, len, groups| {
            let chunk = start..start + len;
            let x = &x[chunk.clone()];
            let (y, clipped) = (&mut y[chunk.clone()], &mut clipped[chunk]);
            match groups {
                Chunk::Same(group) => {
                    let step = self.at(group);
                    let quantize = |x: &[f32], y: &mut [f32], clipped: &mut [bool]| {
                        for (x, (y, clipped)) in x.iter().zip(y.iter_mut().zip(clipped)) {
                            let (number, inside) = step.quantize(numbers, *x);
                            *y = number * step.scale;
                            *clipped = !inside;
                        }
                    };
                    match len >= 2 * SHARE {
                        true => {
                            let outputs = y.par_chunks_mut(SHARE);
                            let outputs = outputs.zip(clipped.par_chunks_mut(SHARE));
                            let shares = x.par_chunks(SHARE).zip(outputs);
                            shares.for_each(|(x, (y, clipped))| quantize(x, y, clipped));
                        }
                        false => quantize(x, y, clipped),
                    }
                }
                Chunk::Each(group) => {
                    let inputs = x.iter().zip(self.from(group, len));
                    for ((x, step), (y, clipped)) in inputs.zip(y.iter_mut().zip(clipped)) {
                        let (number, inside) = step.quantize(numbers, *x);
                        *y = number * step.scale;
                        *clipped = !inside;
                    }
                }
            }
        });
        (y, clipped)
    }

    /// The gradients of `x`, the scales and, where wanted, the zero points for an incoming
    /// gradient `dy`.
    pub(crate) fn gradients(&self, x: &[f32], dy: &[f32], runs: &[Run], wanted: Wanted) -> Sums {
        let Wanted { clip, zero_point } = wanted;
        match (self.grid, zero_point) {
            (Grid::Int { .. }, true) => self.gradients_to::<true>(Integers, x, dy, runs, clip),
            (Grid::Int { .. }, false) => self.gradients_to::<false>(Integers, x, dy, runs, clip),
            (Grid::Float { floats, .. }, true) => {
                self.gradients_to::<true>(floats, x, dy, runs, clip)
            }
            (Grid::Float { floats, .. }, false) => {
                self.gradients_to::<false>(floats, x, dy, runs, clip)
            }
        }
    }

    /// `ZERO`: whether the gradient of the zero point is computed.
    fn gradients_to<const ZERO: bool>(
        &self,
        numbers: impl Round,
        x: &[f32],
        dy: &[f32],
        runs: &[Run],
        clip: Clip,
    ) -> Sums {
        /// Elements at a time: their terms stay in the fastest cache.
        const BLOCK: usize = 256;
        let mut gradients = Sums {
            x: vec![0.0; x.len()],
            scale: vec![0.0; self.scale.len()],
            zero_point: vec![0.0; if ZERO { self.scale.len() } else { 0 }],
        };
        // The terms are computed apart from their sums, so that both become vector instructions.
        let mut terms = ([0.0; BLOCK], [0.0; BLOCK]);
        for_each_chunk(runs, |start, len, groups| {
            let mut done = 0;
            while done < len {
                let block = BLOCK.min(len - done);
                let range = start + done..start + done + block;
                let (x, dy) = (&x[range.clone()], &dy[range.clone()]);
                let dx = &mut gradients.x[range];
                let terms = (&mut terms.0[..block], &mut terms.1[..block]);
                let inputs = x.iter().zip(dy);
                let outputs = dx
                    .iter_mut()
                    .zip(terms.0.iter_mut().zip(terms.1.iter_mut()));
                match groups {
                    Chunk::Same(group) => {
                        let step = self.at(group);
                        for ((x, dy), (dx, (of_scale, of_zero))) in inputs.zip(outputs) {
                            let zero;
                            (*dx, *of_scale, zero) = learned(step, numbers, clip, *x, *dy);
                            if ZERO {
                                *of_zero = zero;
                            }
                        }
                        gradients.scale[group] += sum(terms.0);
                        if ZERO {
                            gradients.zero_point[group] += sum(terms.1);
                        }
                    }
                    Chunk::Each(group) => {
                        let group = group + done;
                        let elements = inputs.zip(self.from(group, block)).zip(outputs);
                        for (((x, dy), step), (dx, (of_scale, of_zero))) in elements {
                            let zero;
                            (*dx, *of_scale, zero) = learned(step, numbers, clip, *x, *dy);
                            if ZERO {
                                *of_zero = zero;
                            }
                        }
                        let groups = group..group + block;
                        add(&mut gradients.scale[groups.clone()], terms.0);
                        if ZERO {
                            add(&mut gradients.zero_point[groups], terms.1);
                        }
                    }
                }
                done += block;
            }
        });
        gradients
    }
}

/// The gradient of one element, and its terms of the gradients of scale and zero point.
#[inline(always)]
fn learned(step: Step, numbers: impl Round, clip: Clip, x: f32, dy: f32) -> (f32, f32, f32) {
    let (number, inside) = step.quantize(numbers, x);
    let exact = x / step.scale;
    let inside = match clip {
        Clip::AfterRounding => inside,
        Clip::BeforeRounding => (exact > step.low) & (exact < step.high),
    };
    let of_scale = if inside { number - exact } else { number };
    let dx = if inside { dy } else { 0.0 };
    let of_zero = if inside { 0.0 } else { -dy * step.scale };
    (dx, dy * of_scale, of_zero)
}

/// In F64, because a scale may be shared by all elements of a tensor.
fn sum(terms: &[f32]) -> f64 {
    const LANES: usize = 8;
    let mut sums = [0.0; LANES];
    let (chunks, rest) = terms.as_chunks::<LANES>();
    for chunk in chunks {
        for lane in 0..LANES {
            sums[lane] += f64::from(chunk[lane]);
        }
    }
    let rest = rest.iter().map(|term| f64::from(*term));
    sums.into_iter().chain(rest).sum()
}

fn add(sums: &mut [f64], terms: &[f32]) {
    for (sum, term) in sums.iter_mut().zip(terms) {
        *sum += f64::from(*term);
    }
}

/// What [`Steps::gradients`] gives.
#[derive(Debug)]
pub(crate) struct Sums {
    pub(crate) x: Vec<f32>,
    pub(crate) scale: Vec<f64>,
    /// Empty where it is not wanted.
    pub(crate) zero_point: Vec<f64>,
}

/// The lowest and the highest value of each group; NaN if there is one.
pub(crate) fn range(x: &[f32], groups: &Groups) -> (Vec<f32>, Vec<f32>) {
    let mut min = vec![f32::INFINITY; groups.count()];
    let mut max = vec![f32::NEG_INFINITY; groups.count()];
    for_each_chunk(groups.runs(), |start, len, chunk| {
        let x = &x[start..start + len];
        match chunk {
            Chunk::Same(group) => {
                let (lowest, highest) = range_of(x);
                min[group] = lower(min[group], lowest);
                max[group] = higher(max[group], highest);
            }
            Chunk::Each(group) => {
                let bounds = min[group..group + len].iter_mut();
                let bounds = bounds.zip(&mut max[group..group + len]);
                for (x, (min, max)) in x.iter().zip(bounds) {
                    *min = lower(*min, *x);
                    *max = higher(*max, *x);
                }
            }
        }
    });
    (min, max)
}

/// In parallel lanes, because a compiler must not reorder the comparisons of one.
fn range_of(x: &[f32]) -> (f32, f32) {
    const LANES: usize = 16;
    let none = || ([f32::INFINITY; LANES], [f32::NEG_INFINITY; LANES]);
    let lanes = |chunks: &[[f32; LANES]]| {
        let (mut min, mut max) = none();
        for chunk in chunks {
            for lane in 0..LANES {
                min[lane] = lower(min[lane], chunk[lane]);
                max[lane] = higher(max[lane], chunk[lane]);
            }
        }
        (min, max)
    };
    let (chunks, rest) = x.as_chunks::<LANES>();
    let (min, max) = match x.len() >= 2 * SHARE {
        // Joined lane by lane: of 0 and −0, too, the one stays that does on one thread.
        true => chunks.par_chunks(SHARE / LANES).map(lanes).reduce(
            none,
            |(mut min, mut max), (lowest, highest)| {
                for lane in 0..LANES {
                    min[lane] = lower(min[lane], lowest[lane]);
                    max[lane] = higher(max[lane], highest[lane]);
                }
                (min, max)
            },
        ),
        false => lanes(chunks),
    };
    let rest = || rest.iter().copied();
    (
        min.into_iter().chain(rest()).fold(f32::INFINITY, lower),
        max.into_iter()
            .chain(rest())
            .fold(f32::NEG_INFINITY, higher),
    )
}

/// The lower of both; NaN if one is.
#[inline(always)]
fn lower(a: f32, b: f32) -> f32 {
    // No comparison with NaN holds, so `a` stays NaN, and `b` has to be asked.
    if (b < a) | b.is_nan() { b } else { a }
}

/// The higher of both; NaN if one is.
#[inline(always)]
fn higher(a: f32, b: f32) -> f32 {
    if (b > a) | b.is_nan() { b } else { a }
}

/// The groups of the elements of a contiguous chunk.
enum Chunk {
    /// All are of this one.
    Same(usize),
    /// The first is of this one, the second of the next, …
    Each(usize),
}

/// Start, length and groups of each stretch of elements along the innermost run, in order.
fn for_each_chunk(runs: &[Run], mut f: impl FnMut(usize, usize, Chunk)) {
    let Some((inner, outer)) = runs.split_last() else {
        return f(0, 1, Chunk::Same(0));
    };
    // How far apart the groups of neighbours along each outer run are.
    let mut stride = match inner.counts {
        Counts::Groups => inner.len,
        Counts::Elements => 1,
    };
    let mut strides = vec![0; outer.len()];
    for (run, group_stride) in outer.iter().zip(&mut strides).rev() {
        if run.counts == Counts::Groups {
            *group_stride = stride;
            stride *= run.len;
        }
    }
    let mut index = vec![0; outer.len()];
    let (mut start, mut group) = (0, 0);
    loop {
        let chunk = match inner.counts {
            Counts::Groups => Chunk::Each(group),
            Counts::Elements => Chunk::Same(group),
        };
        f(start, inner.len, chunk);
        start += inner.len;
        let mut axis = outer.len();
        loop {
            let Some(next) = axis.checked_sub(1) else {
                return;
            };
            axis = next;
            index[axis] += 1;
            group += strides[axis];
            if index[axis] < outer[axis].len {
                break;
            }
            group -= strides[axis] * outer[axis].len;
            index[axis] = 0;
        }
    }
}
