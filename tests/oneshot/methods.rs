//! Each method against a reference that is written out.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig, RmsNorm, RmsNormConfig};
use burn::tensor::activation::{relu, silu};
use burn::tensor::{Device, Tensor, TensorData};
use burn_lean::oneshot::{
    Compressed, LayerReport, OneShot, Order, Pattern, Preset, Prune, PruneMethod, Quantize,
    Rounding, Scaling, Target,
};

use crate::parameter;
use crate::support::{each_device, numbers, on_each, tensor, values, with_numbers};

pub(crate) const INPUTS: usize = 12;
pub(crate) const OUTPUTS: usize = 5;

pub(crate) fn layer(device: &Device) -> Linear {
    with_numbers(
        LinearConfig::new(INPUTS, OUTPUTS)
            .with_bias(false)
            .init(device),
        3,
    )
}

/// Inputs with something in common, so that one can make good for another.
pub(crate) fn inputs(device: &Device) -> Vec<Tensor<2>> {
    let mixed = |seed: u64| {
        let mut x = numbers(seed, 40 * INPUTS);
        for row in x.chunks_exact_mut(INPUTS) {
            for at in 1..INPUTS {
                row[at] = 0.6 * row[at - 1] + row[at] * (1.0 + at as f32 / 4.0);
            }
        }
        Tensor::from_data(TensorData::new(x, [40, INPUTS]), device)
    };
    vec![mixed(1), mixed(2)]
}

pub(crate) fn compressed(device: &Device, preset: Preset) -> Compressed<Linear> {
    let done =
        OneShot::new(preset).compress(layer(device), inputs(device), |layer, x| layer.forward(x));
    done.unwrap()
}

/// XᵀX / n in F64.
fn gram() -> Vec<Vec<f64>> {
    let mut gram = vec![vec![0.0; INPUTS]; INPUTS];
    for batch in inputs(&Device::flex()) {
        for row in values(batch).chunks_exact(INPUTS) {
            for i in 0..INPUTS {
                for j in 0..INPUTS {
                    gram[i][j] += f64::from(row[i]) * f64::from(row[j]) / 80.0;
                }
            }
        }
    }
    gram
}

/// The weight by outputs.
pub(crate) fn rows(layer: &Linear) -> Vec<Vec<f64>> {
    let weight = values(layer.weight.val().transpose());
    weight
        .chunks_exact(INPUTS)
        .map(|row| row.iter().map(|w| f64::from(*w)).collect())
        .collect()
}

/// ½ Σ (q − w)ᵀ H (q − w).
pub(crate) fn output_error(model: &Linear) -> f64 {
    let (gram, dense) = (gram(), rows(&layer(&Device::flex())));
    let mut sum = 0.0;
    for (q, w) in rows(model).iter().zip(&dense) {
        for i in 0..INPUTS {
            for j in 0..INPUTS {
                sum += 0.5 * (q[i] - w[i]) * gram[i][j] * (q[j] - w[j]);
            }
        }
    }
    sum
}

/// The inverse by Gauss-Jordan.
fn inverse(matrix: &[Vec<f64>]) -> Vec<Vec<f64>> {
    let n = matrix.len();
    let mut a: Vec<Vec<f64>> = matrix.to_vec();
    for (i, row) in a.iter_mut().enumerate() {
        row.extend((0..n).map(|j| f64::from(u8::from(i == j))));
    }
    for i in 0..n {
        let pivot = a[i][i];
        a[i].iter_mut().for_each(|x| *x /= pivot);
        for k in (0..n).filter(|k| *k != i) {
            let by = a[k][i];
            let row = a[i].clone();
            a[k].iter_mut().zip(row).for_each(|(x, y)| *x -= by * y);
        }
    }
    a.into_iter().map(|row| row[n..].to_vec()).collect()
}

fn range(values: &[f64], bits: u32, symmetric: bool) -> (f64, f64, f64, f64) {
    let low = values.iter().copied().fold(0.0, f64::min);
    let high = values.iter().copied().fold(0.0, f64::max);
    if symmetric {
        let most = f64::from((1 << (bits - 1)) - 1);
        return (
            f64::from((low.abs().max(high) / most) as f32),
            0.0,
            -most,
            most,
        );
    }
    let most = f64::from((1 << bits) - 1);
    let scale = f64::from(((high - low) / most) as f32);
    let zero = (-low / scale).round_ties_even();
    (scale, zero, 0.0, most)
}

fn nearest(value: f64, (scale, zero, low, high): (f64, f64, f64, f64)) -> f64 {
    let code = ((value / scale).round_ties_even() + zero).clamp(low, high);
    (code - zero) * scale
}

/// Optimal brain quantization in the order of inputs, the inverse computed anew for every input.
fn gptq_by_hand(bits: u32, group: usize, symmetric: bool) -> Vec<Vec<f64>> {
    let mut hessian = gram();
    let mean = (0..INPUTS).map(|j| hessian[j][j]).sum::<f64>() / INPUTS as f64;
    (0..INPUTS).for_each(|j| hessian[j][j] += 0.01 * mean);
    let mut weights = rows(&layer(&Device::flex()));
    for row in &mut weights {
        let mut on = (1.0, 0.0, 0.0, 0.0);
        for j in 0..INPUTS {
            if j % group == 0 {
                on = range(&row[j..INPUTS.min(j + group)], bits, symmetric);
            }
            let left: Vec<Vec<f64>> = hessian[j..].iter().map(|row| row[j..].to_vec()).collect();
            let inverse = inverse(&left);
            let q = nearest(row[j], on);
            let error = (row[j] - q) / inverse[0][0];
            for k in j + 1..INPUTS {
                row[k] -= error * inverse[0][k - j];
            }
            row[j] = q;
        }
    }
    weights
}

fn near(expected: &[Vec<f64>], model: &Linear, what: &str) {
    let found = rows(model);
    assert_eq!(found.len(), expected.len(), "{what}");
    for (row, (expected, found)) in expected.iter().zip(found).enumerate() {
        assert_eq!(found.len(), expected.len(), "{what} [{row}]");
        for (at, (e, f)) in expected.iter().zip(found).enumerate() {
            assert!(
                (e - f).abs() < 1e-5,
                "{what} [{row}, {at}]: {f} instead of {e}"
            );
        }
    }
}

pub(crate) fn grid(
    bits: u8,
    group: Option<usize>,
    symmetric: bool,
    rounding: Rounding,
) -> Quantize {
    Quantize::new(bits)
        .with_group(group)
        .with_symmetric(symmetric)
        .with_search_range(false)
        .with_rounding(rounding)
}

#[test]
fn nearest_rounding_is_that_of_each_group_by_hand() {
    each_device(|target| {
        // 5 does not divide 12: groups of 5, 5 and 2.
        for (group, symmetric) in [
            (None, true),
            (Some(5), true),
            (Some(5), false),
            (Some(4), false),
        ] {
            let preset = Preset::new()
                .with_quantize(Some(grid(4, group, symmetric, Rounding::Nearest)))
                .as_published();
            let expected: Vec<Vec<f64>> = rows(&layer(&target.device))
                .iter()
                .map(|row| {
                    let parts = row.chunks(group.unwrap_or(INPUTS));
                    parts
                        .flat_map(|part| {
                            let on = range(part, 4, symmetric);
                            part.iter()
                                .map(move |w| nearest(*w, on))
                                .collect::<Vec<_>>()
                        })
                        .collect()
                })
                .collect();
            near(
                &expected,
                &compressed(&target.device, preset).model,
                "nearest",
            );
        }
    });
}

#[test]
fn gptq_is_optimal_brain_quantization_by_hand() {
    each_device(|target| {
        for (group, symmetric) in [(None, true), (Some(5), false), (Some(4), true)] {
            let rounding = Rounding::Compensated {
                activation_order: false,
                sweeps: 0,
            };
            let preset = Preset::new()
                .with_quantize(Some(grid(3, group, symmetric, rounding)))
                .as_published();
            let expected = gptq_by_hand(3, group.unwrap_or(INPUTS), symmetric);
            near(&expected, &compressed(&target.device, preset).model, "GPTQ");
        }
    });
}

#[test]
fn the_order_of_activations_rounds_the_largest_inputs_first() {
    let device = Device::flex();
    let rounding = |activation_order| Rounding::Compensated {
        activation_order,
        sweeps: 0,
    };
    let model = |activation_order| {
        let quantize = grid(3, Some(4), false, rounding(activation_order));
        let preset = Preset::new().with_quantize(Some(quantize)).as_published();
        compressed(&device, preset).model
    };
    let nearest = Preset::new()
        .with_quantize(Some(grid(3, Some(4), false, Rounding::Nearest)))
        .as_published();
    let nearest = compressed(&device, nearest).model;
    // The input with the largest second moment is rounded as it is, to its group's own range.
    let gram = gram();
    let first = (0..INPUTS)
        .max_by(|a, b| gram[*a][*a].total_cmp(&gram[*b][*b]))
        .unwrap();
    assert_ne!(first, 0);
    for (a, b) in rows(&model(true)).iter().zip(rows(&nearest)) {
        assert_eq!(a[first], b[first]);
    }
    assert_ne!(rows(&model(true)), rows(&model(false)));
}

#[test]
fn sweeps_and_searched_ranges_lower_the_error_and_the_report_says_it() {
    let device = Device::flex();
    let error = |search: bool, sweeps: usize| {
        let rounding = Rounding::Compensated {
            activation_order: true,
            sweeps,
        };
        let quantize = grid(3, Some(4), false, rounding).with_search_range(search);
        let mut preset = Preset::new().with_quantize(Some(quantize));
        preset.target = Target::OwnInputs;
        preset.ridge = 0.0;
        let done = compressed(&device, preset);
        let error = output_error(&done.model);
        // Without ridge the objective is this error, as a part of what the dense layer gives.
        let (gram, mut whole) = (gram(), 0.0);
        for w in rows(&layer(&device)) {
            for i in 0..INPUTS {
                for j in 0..INPUTS {
                    whole += 0.5 * w[i] * gram[i][j] * w[j];
                }
            }
        }
        let reported = done.report.layers[0].relative_error;
        assert!(
            (reported - error / whole).abs() < 1e-4 * reported.max(1e-9),
            "{reported}"
        );
        error
    };
    let plain = error(false, 0);
    let (swept, both) = (error(false, 8), error(true, 8));
    assert!(swept < 0.95 * plain, "{swept} against {plain}");
    assert!(both < 0.9 * plain, "{both} against {plain}");
}

#[test]
fn damping_is_reported_as_what_came_onto_the_diagonal() {
    let done = compressed(&Device::flex(), Preset::w4a16().with_group(4));
    let gram = gram();
    let mean = (0..INPUTS).map(|j| gram[j][j]).sum::<f64>() / INPUTS as f64;
    let line = &done.report.layers[0];
    assert!((line.ridge / (0.01 * mean) - 1.0).abs() < 1e-5, "{line:?}");
    // A state that was written without it.
    let mut older = serde_json::to_value(line).unwrap();
    older.as_object_mut().unwrap().remove("ridge");
    let read: LayerReport = serde_json::from_value(older).unwrap();
    let expected = LayerReport {
        ridge: 0.0,
        ..line.clone()
    };
    assert_eq!(read, expected);
}

fn pruned(device: &Device, pattern: Pattern, method: PruneMethod) -> Compressed<Linear> {
    let preset = Preset::new().with_prune(Some(Prune::new(pattern, method)));
    compressed(device, preset.as_published())
}

#[test]
fn magnitude_and_wanda_keep_what_they_say_as_it_was() {
    each_device(|target| {
        let dense = rows(&layer(&target.device));
        let gram = gram();
        let checks = [
            (PruneMethod::Magnitude, Pattern::PerLayer(0.5)),
            (PruneMethod::Wanda, Pattern::PerOutput(0.5)),
        ];
        for (method, pattern) in checks {
            let done = pruned(&target.device, pattern, method.clone());
            let score = |at: usize, w: f64| match method {
                PruneMethod::Wanda => w.abs() * gram[at][at].sqrt(),
                _ => w.abs(),
            };
            let found = rows(&done.model);
            let (mut kept, mut gone) = (Vec::new(), Vec::new());
            for (row, (before, after)) in dense.iter().zip(&found).enumerate() {
                let first = (kept.len(), gone.len());
                for at in 0..INPUTS {
                    match after[at] == 0.0 {
                        true => gone.push(score(at, before[at])),
                        false => {
                            assert_eq!(after[at], before[at]);
                            kept.push(score(at, before[at]));
                        }
                    }
                }
                if let Pattern::PerOutput(_) = pattern {
                    assert_eq!(gone.len(), INPUTS / 2 * (row + 1));
                    let least = kept[first.0..].iter().copied().fold(f64::MAX, f64::min);
                    assert!(gone[first.1..].iter().all(|one| *one <= least));
                }
            }
            assert_eq!(gone.len(), INPUTS * OUTPUTS / 2);
            if let Pattern::PerLayer(_) = pattern {
                let least = kept.iter().copied().fold(f64::MAX, f64::min);
                assert!(gone.iter().all(|one| *one <= least));
            }
        }
    });
}

#[test]
fn best_subsets_are_not_worse_than_sparse_gpt_nor_that_than_magnitude() {
    let device = Device::flex();
    for pattern in [
        Pattern::PerLayer(0.5),
        Pattern::PerOutput(0.7),
        Pattern::NOfM { n: 2, m: 4 },
    ] {
        let error = |method| output_error(&pruned(&device, pattern, method).model);
        let (best, one_pass) = (
            error(PruneMethod::BestSubset),
            error(PruneMethod::SparseGpt),
        );
        let magnitude = error(PruneMethod::Magnitude);
        assert!(best <= one_pass * 1.001, "{pattern:?}: {best} {one_pass}");
        assert!(one_pass < magnitude, "{pattern:?}: {one_pass} {magnitude}");
    }
}

#[test]
fn two_of_four_are_kept_in_every_group() {
    each_device(|target| {
        for method in [
            PruneMethod::Magnitude,
            PruneMethod::Wanda,
            PruneMethod::SparseGpt,
            PruneMethod::BestSubset,
        ] {
            let done = pruned(&target.device, Pattern::NOfM { n: 2, m: 4 }, method);
            for row in rows(&done.model) {
                for group in row.chunks_exact(4) {
                    assert_eq!(group.iter().filter(|w| **w != 0.0).count(), 2);
                }
            }
        }
    });
}

/// A group's range follows what the inputs before it leave, and its zero point with it.
#[test]
fn two_of_four_are_kept_where_ranges_move_while_codes_are_chosen() {
    let device = Device::flex();
    let linear = LinearConfig::new(INPUTS, 30).with_bias(false).init(&device);
    let linear: Linear = with_numbers(linear, 3);
    for (method, bits) in [(PruneMethod::Magnitude, 3), (PruneMethod::SparseGpt, 4)] {
        let rounding = Rounding::Compensated {
            activation_order: false,
            sweeps: 0,
        };
        let preset = Preset::new()
            .with_prune(Some(Prune::new(Pattern::NOfM { n: 2, m: 4 }, method)))
            .with_quantize(Some(grid(bits, Some(4), false, rounding)))
            .as_published();
        let done = OneShot::new(preset)
            .compress(linear.clone(), inputs(&device), |linear, x| {
                linear.forward(x)
            })
            .unwrap();
        for group in done.weights[0].values.chunks_exact(4) {
            let kept = group.iter().filter(|w| **w != 0.0).count();
            assert!(kept <= 2, "{bits} bits: {group:?}");
        }
    }
}

/// What factors move through: a norm to two layers, a gate, a rectifier.
#[derive(Module, Debug)]
struct Chain {
    norm: RmsNorm,
    gate: Linear,
    up: Linear,
    down: Linear,
    head: Linear,
}

/// One block of it.
#[derive(Module, Debug)]
struct Stack {
    layers: Vec<Chain>,
}

impl Stack {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.layers.iter().fold(x, |x, chain| chain.forward(x))
    }
}

impl Chain {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let x = self.norm.forward(x);
        let x = silu(self.gate.forward(x.clone())) * self.up.forward(x);
        self.head.forward(relu(self.down.forward(x)))
    }
}

#[test]
fn factors_move_without_a_change_of_the_model() {
    on_each(|device| {
        let linear = |from, to| LinearConfig::new(from, to).init(device);
        let model = Chain {
            norm: RmsNormConfig::new(8).init(device),
            gate: linear(8, 10),
            up: linear(8, 10),
            down: linear(10, 6),
            head: linear(6, 3),
        };
        let model = with_numbers(
            Stack {
                layers: vec![model],
            },
            5,
        );
        let spread = Tensor::<1>::from_floats([9.0, 1.0, 0.2, 1.0, 4.0, 1.0, 1.0, 0.5], device);
        let x = tensor::<2>(7, [64, 8], device) * spread.unsqueeze();
        for scaling in [Scaling::SmoothQuant { alpha: 0.5 }, Scaling::Awq] {
            // At 8 bits hardly anything is rounded: what is left is what the factors do.
            let preset = Preset::w8a16().with_scaling(Some(scaling));
            let done = OneShot::new(preset)
                .compress(model.clone(), [x.clone()], |model, x| model.forward(x));
            let done = done.unwrap().model;
            for path in ["norm.gamma", "up.bias", "down.bias"].map(|one| format!("layers.0.{one}"))
            {
                let path = path.as_str();
                assert_ne!(parameter(&model, path), parameter(&done, path), "{path}");
            }
            let gate = "layers.0.gate.bias";
            assert_eq!(parameter(&model, gate), parameter(&done, gate));
            let (before, after) = (
                values(model.forward(x.clone())),
                values(done.forward(x.clone())),
            );
            let size = before.iter().fold(0.0f32, |most, y| most.max(y.abs()));
            assert!(size > 0.0);
            assert_near!(before.iter(), after, 0.03 * size);
        }
    });
}

#[test]
fn awq_beats_plain_rounding_where_inputs_differ_in_size() {
    let device = Device::flex();
    let model = Chain {
        norm: RmsNormConfig::new(16).init(&device),
        gate: LinearConfig::new(16, 10).init(&device),
        up: LinearConfig::new(16, 10).init(&device),
        down: LinearConfig::new(10, 6).init(&device),
        head: LinearConfig::new(6, 3).init(&device),
    };
    let mut model = with_numbers(
        Stack {
            layers: vec![model],
        },
        5,
    );
    // Two channels are much larger than the rest.
    let gain: Vec<f32> = (0..16)
        .map(|at| if at % 8 == 0 { 8.0 } else { 0.3 })
        .collect();
    let gain = Tensor::<1>::from_floats(gain.as_slice(), &device);
    let norm = &mut model.layers[0].norm;
    norm.gamma = norm.gamma.clone().map(|_| gain);
    let x = tensor::<2>(7, [128, 16], &device);
    let error = |scaling: Option<Scaling>| {
        let quantize = grid(3, None, true, Rounding::Nearest);
        let mut preset = Preset::new()
            .with_quantize(Some(quantize))
            .with_scaling(scaling);
        preset.target = Target::OwnInputs;
        preset.order = Order::Block;
        let done =
            OneShot::new(preset).compress(model.clone(), [x.clone()], |model, x| model.forward(x));
        let done = done.unwrap().model;
        let off = model.forward(x.clone()) - done.forward(x.clone());
        values(off).iter().map(|e| e * e).sum::<f32>()
    };
    let (plain, scaled) = (error(None), error(Some(Scaling::Awq)));
    assert!(scaled < 0.7 * plain, "{scaled} against {plain}");
}
