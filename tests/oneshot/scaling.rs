//! Factors between layers: where they move, and where there is no place for them.

use burn::module::{Module, Param, ParamGroup};
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig, RmsNorm, RmsNormConfig};
use burn::tensor::activation::relu;
use burn::tensor::{Device, FloatDType, Int, Tensor};
use burn_lean::oneshot::{Compressed, OneShot, Preset, Quantize, Rounding, Scaling};

use crate::support::{cast, on_each, parameters, tensor, values, with_numbers};

/// Layers that read one norm, as queries, keys and values do.
#[derive(Module, Debug)]
struct Normed {
    norm: RmsNorm,
    layers: Vec<Linear>,
}

impl Normed {
    fn new(layers: usize, device: &Device) -> Self {
        let linear = |_| LinearConfig::new(8, 16).init(device);
        let normed = Self {
            norm: RmsNormConfig::new(8).init(device),
            layers: (0..layers).map(linear).collect(),
        };
        with_numbers(normed, 5)
    }

    fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        let x = self.norm.forward(x);
        let outputs = self.layers.iter().map(|layer| layer.forward(x.clone()));
        outputs.reduce(|sum, output| sum + output).unwrap()
    }
}

/// Features of very different sizes.
fn spread(device: &Device) -> Tensor<1> {
    Tensor::from_floats([9.0, 1.0, 0.2, 1.0, 4.0, 1.0, 1.0, 0.5], device)
}

/// At 8 bits hardly anything is rounded: what is left is what the factors do.
fn scaled<M: Module, const D: usize>(
    model: &M,
    scaling: &Scaling,
    x: Tensor<D>,
    forward: impl Fn(&M, Tensor<D>) -> Tensor<D>,
) -> Compressed<M> {
    let preset = Preset::w8a16().with_scaling(Some(scaling.clone()));
    let before = values(forward(model, x.clone()));
    let done = OneShot::new(preset).compress(model.clone(), [x.clone()], &forward);
    let done = done.unwrap();
    let after = values(forward(&done.model, x));
    let size = before.iter().fold(0.0f32, |most, y| most.max(y.abs()));
    assert!(size > 0.0);
    assert_near!(before.iter(), after, 0.03 * size);
    done
}

/// A gate for each place, as many as there are features.
#[derive(Module, Debug)]
struct Gated {
    body: Linear,
    gate: Linear,
    head: Linear,
}

impl Gated {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let [batch, places, features] = x.dims();
        let mean = x.clone().mean_dim(1).reshape([batch, features]);
        let gate = self.gate.forward(mean).reshape([batch, places, 1]);
        self.head.forward(relu(self.body.forward(x)) * gate)
    }
}

#[test]
fn factors_are_of_features_and_not_of_places() {
    on_each(|device| {
        let linear =
            |outputs: usize, bias: bool| LinearConfig::new(8, outputs).with_bias(bias).init(device);
        let gated = Gated {
            body: linear(8, true),
            gate: linear(8, false),
            head: linear(16, true),
        };
        let model = with_numbers(gated, 5);
        let x = tensor::<3>(7, [32, 8, 8], device) * spread(device).unsqueeze();
        for scaling in [Scaling::SmoothQuant { alpha: 0.5 }, Scaling::Awq] {
            scaled(&model, &scaling, x.clone(), Gated::forward);
        }
    });
}

/// Burn's linear layers reshape a batch of short sequences into rows, each for itself.
#[test]
fn sequences_in_a_batch_are_scaled_as_their_rows_are() {
    on_each(|device| {
        let model = Normed::new(3, device);
        let rows = tensor::<2>(7, [48, 8], device) * spread(device).unsqueeze();
        let sequences = rows.clone().reshape([16, 3, 8]);
        for scaling in [Scaling::SmoothQuant { alpha: 0.5 }, Scaling::Awq] {
            let flat = scaled(&model, &scaling, rows.clone(), Normed::forward::<2>);
            let batched = scaled(&model, &scaling, sequences.clone(), Normed::forward::<3>);
            assert!(batched.report.layers.iter().all(|layer| !layer.unscaled));
            assert_ne!(
                values(batched.model.norm.gamma.val()),
                values(model.norm.gamma.val())
            );
            let pairs = parameters(&flat.model)
                .into_iter()
                .zip(parameters(&batched.model));
            for (flat, batched) in pairs {
                for (a, b) in flat.values.iter().zip(&batched.values) {
                    assert!((a - b).abs() < 1e-4, "{}: {a} {b}", flat.path);
                }
            }
        }
    });
}

#[test]
fn layers_that_read_one_norm_are_scaled_together_in_a_group_of_parameters_too() {
    let device = Device::flex();
    let model = Normed::new(3, &device);
    let x = tensor::<2>(7, [48, 8], &device) * spread(&device).unsqueeze();
    let preset = Preset::w8a16().with_scaling(Some(Scaling::SmoothQuant { alpha: 0.5 }));
    let compress = |oneshot: OneShot<'_>| {
        let done = oneshot.compress(model.clone(), [x.clone()], Normed::forward::<2>);
        done.unwrap()
    };
    let without = compress(OneShot::new(preset.clone()));
    let with = compress(OneShot::new(preset).with_blocks_of(ParamGroup::all()));
    assert!(with.report.layers.iter().all(|layer| !layer.unscaled));
    assert_eq!(parameters(&without.model), parameters(&with.model));
}

/// Layers with a norm before each.
#[derive(Module, Debug)]
struct Stack {
    norms: Vec<RmsNorm>,
    layers: Vec<Linear>,
}

impl Stack {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let norms = self.norms.iter().cycle();
        let layers = self.layers.iter().zip(norms);
        layers.fold(x, |x, (layer, norm)| layer.forward(norm.forward(x)))
    }
}

#[test]
fn a_norm_that_two_layers_use_keeps_its_gain_and_the_report_says_so() {
    let device = Device::flex();
    let norm = |seed: u64| with_numbers(RmsNormConfig::new(8).init(&device), seed);
    let linear = |seed: u64| with_numbers(LinearConfig::new(8, 8).init(&device), seed);
    let x = tensor::<2>(7, [64, 8], &device) * spread(&device).unsqueeze();
    let used_twice = vec![norm(1)];
    let cloned = vec![used_twice[0].clone(), used_twice[0].clone()];
    let of_their_own = vec![norm(1), norm(2)];
    for (norms, unscaled) in [(used_twice, true), (cloned, true), (of_their_own, false)] {
        let layers = vec![linear(3), linear(4)];
        let model = Stack { norms, layers };
        let scaling = Scaling::SmoothQuant { alpha: 0.5 };
        let done = scaled(&model, &scaling, x.clone(), Stack::forward);
        let said: Vec<bool> = done.report.layers.iter().map(|one| one.unscaled).collect();
        assert_eq!(said, [unscaled; 2]);
        for (before, after) in model.norms.iter().zip(&done.model.norms) {
            let (before, after) = (values(before.gamma.val()), values(after.gamma.val()));
            assert_eq!(before == after, unscaled);
        }
    }
}

/// Three places of a sequence side by side, each normalized for itself.
#[derive(Module, Debug)]
struct Flattened {
    norm: LayerNorm,
    head: Linear,
}

impl Flattened {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let [rows, _] = x.dims();
        let x = self.norm.forward(x.reshape([rows, 3, 4]));
        self.head.forward(x.reshape([rows, 12]))
    }
}

/// Its four gains cannot take twelve factors.
#[test]
fn a_norm_of_fewer_features_has_no_place_for_factors() {
    let device = Device::flex();
    let model = Flattened {
        norm: LayerNormConfig::new(4).init(&device),
        head: LinearConfig::new(12, 5).init(&device),
    };
    let model = with_numbers(model, 5);
    for scaling in [Scaling::SmoothQuant { alpha: 0.5 }, Scaling::Awq] {
        let x = tensor::<2>(7, [48, 12], &device);
        let done = scaled(&model, &scaling, x, Flattened::forward);
        assert!(done.report.layers[0].unscaled);
        let (before, after) = (&model.norm.gamma, &done.model.norm.gamma);
        assert_eq!(values(before.val()), values(after.val()));
    }
}

/// A gain before a layer, in whatever place.
#[derive(Module, Debug)]
struct Gained {
    gain: Param<Tensor<1>>,
    row: Param<Tensor<2>>,
    layer: Linear,
}

#[test]
fn a_gain_that_is_no_vector_of_the_features_has_no_place_for_factors() {
    type Gain = fn(&Gained) -> Tensor<3>;
    let device = Device::flex();
    let model = Gained {
        gain: Param::from_tensor(tensor(1, [8], &device) + 2.0),
        row: Param::from_tensor(tensor(2, [1, 8], &device) + 2.0),
        layer: with_numbers(LinearConfig::new(8, 16).init(&device), 3),
    };
    // As many places as features.
    let x = tensor::<3>(7, [32, 8, 8], &device) * spread(&device).unsqueeze();
    let gains: [(Gain, bool); 5] = [
        (|model| model.gain.val().unsqueeze(), false),
        (|model| model.gain.val().reshape([1, 8, 1]), true),
        (
            |model| model.gain.val().reshape([1, 8, 1]).expand([1, 8, 8]),
            true,
        ),
        (|model| model.gain.val().flip([0]).unsqueeze(), true),
        (|model| model.row.val().unsqueeze(), true),
    ];
    for (gain, unscaled) in gains {
        for scaling in [Scaling::SmoothQuant { alpha: 0.5 }, Scaling::Awq] {
            let forward = |model: &Gained, x: Tensor<3>| model.layer.forward(x * gain(model));
            let done = scaled(&model, &scaling, x.clone(), forward);
            assert_eq!(done.report.layers[0].unscaled, unscaled);
        }
    }
}

/// The mean is of numbers whose sum no half can hold.
#[test]
fn awq_knows_the_inputs_of_a_model_in_half() {
    let device = Device::flex();
    let mut model = Normed::new(1, &device);
    let gain = [64.0, 4.0, 4.0, 4.0, 64.0, 4.0, 4.0, 4.0];
    let gain = Tensor::<1>::from_floats(gain, &device);
    model.norm.gamma = model.norm.gamma.map(|_| gain);
    let model = cast(model, FloatDType::F16);
    let x = tensor::<2>(7, [4096, 8], &device).cast(FloatDType::F16);
    let quantize = Quantize::new(3)
        .with_search_range(false)
        .with_rounding(Rounding::Nearest);
    let preset = Preset::new()
        .with_quantize(Some(quantize))
        .with_scaling(Some(Scaling::Awq));
    let done = OneShot::new(preset)
        .compress(model.clone(), [x], |model, x| model.forward::<2>(x))
        .unwrap();
    let (before, after) = (
        values(model.norm.gamma.val()),
        values(done.model.norm.gamma.val()),
    );
    assert_ne!(before, after);
    assert!(after.iter().all(|gain| gain.is_finite() && *gain > 0.0));
}

/// The weights take the factors as they are: the gain is divided by the same, not by the halves next to them.
#[test]
fn a_gain_in_half_is_divided_by_the_factors_themselves() {
    let device = Device::flex();
    let ones = |linear: Linear| Linear {
        weight: linear.weight.map(|weight| weight.ones_like()),
        ..linear
    };
    let model = Gained {
        gain: Param::from_tensor(Tensor::ones([8], &device)),
        row: Param::from_tensor(Tensor::ones([1, 8], &device)),
        layer: ones(LinearConfig::new(8, 16).with_bias(false).init(&device)),
    };
    let model = cast(model, FloatDType::F16);
    let largest = [[5.5, 6.875, 7.125, 7.375, 7.75, 7.875, 8.625, 8.75]];
    let largest = Tensor::<2>::from_floats(largest, &device);
    let x = Tensor::cat(vec![tensor::<2>(7, [47, 8], &device), largest.clone()], 0);
    let preset = Preset::w8a16().with_scaling(Some(Scaling::SmoothQuant { alpha: 0.5 }));
    let forward = |model: &Gained, x| model.layer.forward::<2>(x * model.gain.val().unsqueeze());
    let done = OneShot::new(preset)
        .compress(model, [x.cast(FloatDType::F16)], forward)
        .unwrap();
    let expected = largest.sqrt().recip().cast(FloatDType::F16);
    assert_eq!(values(done.model.gain.val()), values(expected));
}

/// A table whose rows are selected, and that is multiplied in the end.
#[derive(Module, Debug)]
struct Tied {
    table: Param<Tensor<2>>,
    body: Linear,
    norm: RmsNorm,
}

#[test]
fn a_table_that_rows_are_selected_of_takes_no_factors() {
    let device = Device::flex();
    let model = Tied {
        table: Param::from_tensor(tensor(1, [16, 8], &device)),
        body: LinearConfig::new(8, 8).init(&device),
        norm: RmsNormConfig::new(8).init(&device),
    };
    let model = with_numbers(model, 3);
    let rows: Vec<i64> = (0..48).map(|row| row * 7 % 16).collect();
    let forward = |model: &Tied, x: Tensor<2>| {
        let rows = Tensor::<1, Int>::from_ints(&rows[..], &x.device());
        let x = x + model.table.val().select(0, rows);
        let x = model.norm.forward(model.body.forward(x));
        x.matmul(model.table.val().transpose())
    };
    let x = tensor::<2>(7, [48, 8], &device) * spread(&device).unsqueeze();
    for scaling in [Scaling::SmoothQuant { alpha: 0.5 }, Scaling::Awq] {
        let done = scaled(&model, &scaling, x.clone(), forward);
        assert_eq!(values(done.model.table.val()), values(model.table.val()));
        let paths: Vec<&str> = done.report.layers.iter().map(|one| &one.path[..]).collect();
        assert_eq!(paths, ["body.weight"]);
    }
}
