//! Fake quantization of a tensor in memory, in one pass.

use crate::Clip;
use crate::groups::{Counts, Run};
use crate::number_format::Grid;
use crate::step::{Integers, Round, Step};

/// The [`Step`] of each group.
#[derive(Debug)]
pub(crate) struct Steps {
    grid: Grid,
    scale: Vec<f32>,
    inverse: Vec<f32>,
    low: Vec<f32>,
    high: Vec<f32>,
}

impl Steps {
    pub(crate) fn new(grid: Grid, scale: &[f32], zero_point: &[f32]) -> Self {
        let (min, max) = grid.bounds();
        Self {
            grid,
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

    /// What the numbers nearest to `x` stand for.
    pub(crate) fn quantize(&self, x: &[f32], runs: &[Run]) -> Vec<f32> {
        match self.grid {
            Grid::Int { .. } => self.quantize_to(Integers, x, runs),
            Grid::Float { floats, .. } => self.quantize_to(floats, x, runs),
        }
    }

    fn quantize_to(&self, numbers: impl Round, x: &[f32], runs: &[Run]) -> Vec<f32> {
        let mut y = Vec::with_capacity(x.len());
        for_each_chunk(runs, |start, len, groups| {
            let x = &x[start..start + len];
            match groups {
                Chunk::Same(group) => {
                    let step = self.at(group);
                    y.extend(x.iter().map(|x| step.quantize(numbers, *x).0 * step.scale));
                }
                Chunk::Each(group) => {
                    let x = x.iter().zip(self.from(group, len));
                    y.extend(x.map(|(x, step)| step.quantize(numbers, *x).0 * step.scale));
                }
            }
        });
        y
    }

    /// As [`quantize`](Self::quantize), with where `x` was clipped.
    pub(crate) fn quantize_masked(&self, x: &[f32], runs: &[Run]) -> (Vec<f32>, Vec<bool>) {
        match self.grid {
            Grid::Int { .. } => self.quantize_masked_to(Integers, x, runs),
            Grid::Float { floats, .. } => self.quantize_masked_to(floats, x, runs),
        }
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
            let x = x[chunk.clone()].iter();
            let outputs = y[chunk.clone()].iter_mut().zip(&mut clipped[chunk]);
            match groups {
                Chunk::Same(group) => {
                    let step = self.at(group);
                    for (x, (y, clipped)) in x.zip(outputs) {
                        let (number, inside) = step.quantize(numbers, *x);
                        *y = number * step.scale;
                        *clipped = !inside;
                    }
                }
                Chunk::Each(group) => {
                    for ((x, step), (y, clipped)) in x.zip(self.from(group, len)).zip(outputs) {
                        let (number, inside) = step.quantize(numbers, *x);
                        *y = number * step.scale;
                        *clipped = !inside;
                    }
                }
            }
        });
        (y, clipped)
    }

    /// The gradients of `x`, the scales and the zero points for an incoming gradient `dy`.
    pub(crate) fn gradients(
        &self,
        x: &[f32],
        dy: &[f32],
        runs: &[Run],
        clip: Clip,
    ) -> LearnedGradients {
        match self.grid {
            Grid::Int { .. } => self.gradients_to(Integers, x, dy, runs, clip),
            Grid::Float { floats, .. } => self.gradients_to(floats, x, dy, runs, clip),
        }
    }

    fn gradients_to(
        &self,
        numbers: impl Round,
        x: &[f32],
        dy: &[f32],
        runs: &[Run],
        clip: Clip,
    ) -> LearnedGradients {
        let mut gradients = LearnedGradients {
            x: vec![0.0; x.len()],
            scale: vec![0.0; self.scale.len()],
            zero_point: vec![0.0; self.scale.len()],
        };
        let paper = clip == Clip::BeforeRounding;
        // One element: gradient of x, terms of the sums for scale and zero point.
        let element = |step: Step, x: f32, dy: f32| {
            let (number, inside) = step.quantize(numbers, x);
            let exact = x / step.scale;
            let inside = match paper {
                true => (exact > step.low) & (exact < step.high),
                false => inside,
            };
            let scale = match inside {
                true => number - exact,
                false => number,
            };
            match inside {
                true => (dy, dy * scale, 0.0),
                false => (0.0, dy * scale, -dy * step.scale),
            }
        };
        // Sums in F64: a scale is shared by up to all elements.
        for_each_chunk(runs, |start, len, groups| {
            let chunk = start..start + len;
            let inputs = x[chunk.clone()].iter().zip(&dy[chunk.clone()]);
            let inputs = inputs.zip(&mut gradients.x[chunk]);
            match groups {
                Chunk::Same(group) => {
                    let step = self.at(group);
                    let (mut scale, mut zero_point) = (0.0, 0.0);
                    for ((x, dy), dx) in inputs {
                        let (gradient, of_scale, of_zero) = element(step, *x, *dy);
                        *dx = gradient;
                        scale += f64::from(of_scale);
                        zero_point += f64::from(of_zero);
                    }
                    gradients.scale[group] += scale;
                    gradients.zero_point[group] += zero_point;
                }
                Chunk::Each(group) => {
                    let sums = gradients.scale[group..group + len].iter_mut();
                    let sums = sums.zip(&mut gradients.zero_point[group..group + len]);
                    let steps = self.from(group, len).zip(sums);
                    for (((x, dy), dx), (step, (scale, zero_point))) in inputs.zip(steps) {
                        let (gradient, of_scale, of_zero) = element(step, *x, *dy);
                        *dx = gradient;
                        *scale += f64::from(of_scale);
                        *zero_point += f64::from(of_zero);
                    }
                }
            }
        });
        gradients
    }
}

/// What [`Steps::gradients`] gives.
#[derive(Debug)]
pub(crate) struct LearnedGradients {
    pub(crate) x: Vec<f32>,
    pub(crate) scale: Vec<f64>,
    pub(crate) zero_point: Vec<f64>,
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
