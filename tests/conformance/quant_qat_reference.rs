//! PyTorch's quantization-aware training of the trajectories, in plain F32.
//!
//! In its order: products are fused and added up one after the other, and SGD rounds once.

use std::array::from_fn;

use serde_json::Value;

use crate::{float, floats, near};

/// What is quantized: the inputs of the layers, their weights, and the output.
pub(crate) const X: usize = 0;
pub(crate) const W1: usize = 1;
pub(crate) const H: usize = 2;
pub(crate) const W2: usize = 3;
pub(crate) const Y: usize = 4;

/// The unit roundoff.
const UNIT: f32 = f32::EPSILON / 2.0;

/// What a step starts from.
#[derive(Debug, Clone, Default)]
pub(crate) struct State {
    /// W1, b1, W2, b2.
    pub(crate) parameters: [Vec<f32>; 4],
    /// Lowest and highest value of each group; none before the first step.
    pub(crate) ranges: [Vec<[f32; 2]>; 5],
    /// Of the step before.
    pub(crate) scales: [Vec<f32>; 5],
    pub(crate) zero_points: [Vec<f32>; 5],
}

/// What a step gives.
#[derive(Debug)]
pub(crate) struct Reference {
    pub(crate) loss: f32,
    pub(crate) output: Vec<f32>,
    pub(crate) gradients: [Vec<f32>; 4],
    pub(crate) state: State,
}

/// A case.
pub(crate) struct Run<'a> {
    case: &'a Value,
    x: Vec<f32>,
    wanted: Vec<f32>,
    lr: f32,
    losses: Vec<f32>,
    weight_averaging: f32,
    activation_averaging: f32,
    pub(crate) quantize_from: usize,
    pub(crate) freeze_at: Option<usize>,
    pub(crate) output_is_quantized: bool,
}

/// Decisions that a rounding error may turn.
struct Ties {
    /// A bit for each that is taken the other way, in order.
    flipped: u64,
    met: usize,
}

impl Ties {
    fn is_flipped(&mut self, in_doubt: bool) -> bool {
        let flipped = in_doubt && (self.flipped >> self.met.min(63)) & 1 == 1;
        self.met += usize::from(in_doubt);
        flipped
    }

    /// The integer next to `x`, or where `x ± unsure` may be nearer to another, and it is flipped, that.
    fn round(&mut self, x: f32, unsure: f32) -> f32 {
        let nearest = x.round_ties_even();
        let off = x - nearest;
        match self.is_flipped(0.5 - off.abs() < unsure) {
            true => nearest + 1f32.copysign(off),
            false => nearest,
        }
    }
}

/// A step under way.
struct Pass<'a> {
    run: &'a Run<'a>,
    start: &'a State,
    step: usize,
    /// What is known to the bit.
    exact: &'a [usize],
    ties: Ties,
    next: State,
}

impl Pass<'_> {
    /// Observes and quantizes; with where it was not clipped. The values are within `unsure`.
    fn through(
        &mut self,
        site: usize,
        x: &[f32],
        groups: usize,
        unsure: f32,
    ) -> (Vec<f32>, Vec<bool>) {
        let run = self.run;
        let is_weight = [W1, W2].contains(&site);
        let (lowest, highest, averaging) = match is_weight {
            true => (-128.0, 127.0, run.weight_averaging),
            false => (0.0, 255.0, run.activation_averaging),
        };
        let observes = run.freeze_at.is_none_or(|at| self.step < at);
        let quantizes = self.step >= run.quantize_from;
        let is_exact = self.exact.contains(&site);
        let mut out = (Vec::new(), Vec::new());
        for (group, x) in x.chunks(x.len() / groups).enumerate() {
            let batch = [
                x.iter().copied().fold(f32::INFINITY, f32::min),
                x.iter().copied().fold(f32::NEG_INFINITY, f32::max),
            ];
            let range = match self.start.ranges[site].get(group) {
                None => batch,
                Some(old) if !observes => *old,
                Some(old) => from_fn(|end| old[end] + averaging * (batch[end] - old[end])),
            };
            let [min, max] = [range[0].min(0.0), range[1].max(0.0)];
            let scale = match is_weight {
                true => max.max(-min) / 127.5,
                false => (max - min) / 255.0,
            };
            let scale = scale.max(f32::EPSILON);
            // A code is a product of a value, or a range, of a scale and a reciprocal, on both sides.
            let doubt = |code: f32| match is_exact {
                true => 0.0,
                false => unsure / scale + 8.0 * UNIT * code.abs(),
            };
            let zero_point = match is_weight {
                true => 0.0,
                false => -self.ties.round(min / scale, doubt(min / scale)),
            };
            let zero_point = zero_point.clamp(lowest, highest);
            self.next.ranges[site].push(range);
            self.next.scales[site].push(scale);
            self.next.zero_points[site].push(zero_point);
            for x in x {
                if !quantizes {
                    out.0.push(*x);
                    out.1.push(true);
                    continue;
                }
                let code = x * (1.0 / scale);
                let code = self.ties.round(code, doubt(code)) + zero_point;
                out.0
                    .push((code.clamp(lowest, highest) - zero_point) * scale);
                out.1.push((lowest..=highest).contains(&code));
            }
        }
        out
    }
}

impl<'a> Run<'a> {
    pub(crate) fn of(case: &'a Value) -> Self {
        let name = case["name"].as_str().unwrap();
        let or = |field: &str, other: f32| case.get(field).map_or(other, float);
        // The file has the schedule in the name alone.
        let (quantize_from, freeze_at) = match name {
            "float_baseline" => (usize::MAX, None),
            "qat_fake_quant_from_step5_observer_frozen_at_10" => (5, Some(10)),
            _ => (0, None),
        };
        Self {
            case,
            x: floats(&case["X"]),
            wanted: floats(&case["T"]),
            lr: float(&case["lr"]),
            losses: floats(&case["losses"]),
            // Of the float model, which it observes, too, the file does not say.
            weight_averaging: or("weight_averaging", 1.0),
            activation_averaging: or("act_averaging", 0.01),
            quantize_from,
            freeze_at,
            output_is_quantized: name == "qat_output_quantized",
        }
    }

    pub(crate) fn steps(&self) -> usize {
        self.losses.len()
    }

    /// One step of training, and how many ties it met; those whose bits are set are rounded the other way.
    pub(crate) fn step(
        &self,
        start: &State,
        step: usize,
        exact: &[usize],
        flipped: u64,
    ) -> (Reference, usize) {
        let [w1, b1, w2, b2] = &start.parameters;
        let (hidden, outputs) = (b1.len(), b2.len());
        let inputs = w1.len() / hidden;
        let rows = self.x.len() / inputs;
        let mut pass = Pass {
            run: self,
            start,
            step,
            exact,
            ties: Ties { flipped, met: 0 },
            next: State::default(),
        };
        let (x, _) = pass.through(X, &self.x, 1, 0.0);
        let (w1, of_w1) = pass.through(W1, w1, hidden, 0.0);
        let (z, unsure) = linear(&x, &w1, b1);
        let h: Vec<f32> = z.iter().map(|z| z.max(0.0)).collect();
        let (h, of_h) = pass.through(H, &h, 1, unsure);
        let (w2, of_w2) = pass.through(W2, w2, outputs, 0.0);
        let (mut y, unsure_y) = linear(&h, &w2, b2);
        let mut of_y = vec![true; y.len()];
        if self.output_is_quantized {
            (y, of_y) = pass.through(Y, &y, 1, unsure_y);
        }

        let errors: Vec<f32> = y.iter().zip(&self.wanted).map(|(y, t)| y - t).collect();
        let squares = errors.iter().map(|error| f64::from(error * error));
        let loss = (squares.sum::<f64>() / errors.len() as f64) as f32;
        let factor = 2.0 / errors.len() as f32;
        let dy = masked(errors.iter().map(|error| error * factor).collect(), &of_y);
        let dw2 = product(
            [outputs, rows, hidden],
            |o, r| dy[r * outputs + o],
            |r, k| h[r * hidden + k],
        );
        let db2 = product([1, rows, outputs], |_, _| 1.0, |r, o| dy[r * outputs + o]);
        let of_z = of_h.iter().zip(&z).map(|(inside, z)| {
            let flipped = pass.ties.is_flipped(z.abs() < unsure);
            *inside && (*z > 0.0) != flipped
        });
        let of_z: Vec<bool> = of_z.collect();
        let dz = product(
            [rows, outputs, hidden],
            |r, o| dy[r * outputs + o],
            |o, k| w2[o * hidden + k],
        );
        let dz = masked(dz, &of_z);
        let dw1 = product(
            [hidden, rows, inputs],
            |k, r| dz[r * hidden + k],
            |r, i| x[r * inputs + i],
        );
        let db1 = product([1, rows, hidden], |_, _| 1.0, |r, k| dz[r * hidden + k]);

        let gradients = [masked(dw1, &of_w1), db1, masked(dw2, &of_w2), db2];
        let updated = |index: usize| {
            let pairs = start.parameters[index].iter().zip(&gradients[index]);
            pairs
                .map(|(weight, gradient)| gradient.mul_add(-self.lr, *weight))
                .collect()
        };
        let state = State {
            parameters: from_fn(updated),
            ..pass.next
        };
        let met = pass.ties.met;
        let reference = Reference {
            loss,
            output: y,
            gradients,
            state,
        };
        (reference, met)
    }

    /// What each step starts from, and what the last one ends in: those of the file to 1e-6.
    ///
    /// The file has the weights of the first and of the last step only. Should one that lies on a tie be an
    /// ulp off in between, since PyTorch added a bias's gradient up in another order, it is rounded the other
    /// way: once in a step, and in two of the steps.
    pub(crate) fn trajectory(&self) -> Vec<State> {
        let init = &self.case["init"];
        let start = State {
            parameters: ["W1", "b1", "W2", "b2"].map(|name| floats(&init[name])),
            ..State::default()
        };
        let plain = self.step(&start, 0, &[X], 0).0;
        self.continued(start, 0, 2).unwrap_or_else(|| {
            panic!(
                "{}: no rounding of ties gives the numbers of the file; first {plain:?}",
                self.case["name"]
            )
        })
    }

    fn continued(&self, start: State, step: usize, flips: usize) -> Option<Vec<State>> {
        if step == self.steps() {
            return self.ends_in(&start).then(|| vec![start]);
        }
        let (plain, met) = self.step(&start, step, &[X], 0);
        let met = if flips > 0 { met.min(63) } else { 0 };
        let flipped = (0..met).map(|tie| (1u64 << tie, flips - 1));
        let tried = flipped.map(|(tie, left)| (self.step(&start, step, &[X], tie).0, left));
        let mut tried = std::iter::once((plain, flips)).chain(tried);
        let mut states = tried.find_map(|(reference, left)| {
            let follows = self.is_followed(step, &reference);
            follows.then(|| self.continued(reference.state, step + 1, left))?
        })?;
        states.insert(0, start);
        Some(states)
    }

    /// Whether the step is that of the file.
    fn is_followed(&self, step: usize, found: &Reference) -> bool {
        let expected = floats(&self.case["act_scale_then_zero_point_per_step"][step]);
        let sites = [X, H, Y].into_iter().take(expected.len() / 2);
        let found_scales = sites.clone().flat_map(|site| &found.state.scales[site]);
        let found_zero_points = sites.flat_map(|site| &found.state.zero_points[site]);
        let (scales, zero_points) = expected.split_at(expected.len() / 2);
        let first = &self.case["first_grads"];
        let names = ["dW1", "db1", "dW2", "db2"];
        let mut gradients = names.iter().zip(&found.gradients);
        near(found.loss, self.losses[step], 1e-6)
            && found_scales.zip(scales).all(|(a, b)| near(*a, *b, 1e-6))
            && found_zero_points.eq(zero_points)
            && (step > 0
                || close(&found.output, &floats(&self.case["first_output"]), 1e-6)
                    && gradients.all(|(name, found)| close(found, &floats(&first[*name]), 1e-6)))
    }

    /// Whether it is the end of the file, as far as that has one.
    fn ends_in(&self, state: &State) -> bool {
        let field = |field: &str, name: &str| self.case.get(field)?.get(name).map(floats);
        let is = |expected: Option<Vec<f32>>, found: &[f32]| {
            expected.is_none_or(|expected| close(found, &expected, 1e-6))
        };
        let mut parameters = ["W1", "b1", "W2", "b2"].iter().zip(&state.parameters);
        let mut weights = [("W1", W1), ("W2", W2)].into_iter();
        let activations = self.case.get("final_act").and_then(Value::as_array);
        let mut activations = [X, H, Y].into_iter().zip(activations.into_iter().flatten());
        parameters.all(|(name, found)| is(field("final", name), found))
            && weights.all(|(name, site)| {
                let expected = field("final_weight_scale", name);
                expected.is_none_or(|expected| {
                    let mut pairs = expected.iter().zip(&state.scales[site]);
                    pairs.all(|(a, b)| near(*b, *a, 1e-6))
                })
            })
            && activations.all(|(site, expected)| {
                let range = [float(&expected["min"]), float(&expected["max"])];
                close(&state.ranges[site][0], &range, 1e-6)
                    && near(state.scales[site][0], float(&expected["scale"]), 1e-6)
                    && state.zero_points[site] == floats(&expected["zero_point"])
            })
    }
}

/// x · wᵀ + b, and how far two sides that add up in another order may be apart: each of up to 9 terms, of a
/// range that is as uncertain, and of inputs that are.
fn linear(x: &[f32], w: &[f32], b: &[f32]) -> (Vec<f32>, f32) {
    let outputs = b.len();
    let inputs = w.len() / outputs;
    let sums = |part: fn(f32) -> f32| -> Vec<f32> {
        let sums = product(
            [x.len() / inputs, inputs, outputs],
            |row, k| part(x[row * inputs + k]),
            |k, output| part(w[output * inputs + k]),
        );
        let sums = sums.into_iter().zip(b.iter().cycle());
        sums.map(|(sum, b)| sum + part(*b)).collect()
    };
    let magnitude = sums(f32::abs).into_iter().fold(0.0, f32::max);
    (sums(|x| x), 64.0 * UNIT * magnitude)
}

/// The product of two matrices, `[rows, depth]` and `[depth, columns]`.
fn product(
    [rows, depth, columns]: [usize; 3],
    a: impl Fn(usize, usize) -> f32,
    b: impl Fn(usize, usize) -> f32,
) -> Vec<f32> {
    let mut out = Vec::with_capacity(rows * columns);
    for row in 0..rows {
        for column in 0..columns {
            out.push((0..depth).fold(0.0, |sum, k| a(row, k).mul_add(b(k, column), sum)));
        }
    }
    out
}

fn masked(mut gradient: Vec<f32>, inside: &[bool]) -> Vec<f32> {
    for (gradient, inside) in gradient.iter_mut().zip(inside) {
        if !inside {
            *gradient = 0.0;
        }
    }
    gradient
}

/// Whether all are within `tolerance`, or that fraction of the largest number expected.
pub(crate) fn close(found: &[f32], expected: &[f32], tolerance: f32) -> bool {
    let largest = expected.iter().fold(1f32, |max, x| max.max(x.abs()));
    found.len() == expected.len()
        && (found.iter().zip(expected))
            .all(|(found, expected)| (found - expected).abs() <= tolerance * largest)
}
