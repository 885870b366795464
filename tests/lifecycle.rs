//! Every reparameterization, alone and chained, through the lifecycle of a model on every device.

#[macro_use]
mod support;

use burn::module::{Lora, LoraAdapter, Module, Param, Reparameterization, Reparameterizer};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{Device, FloatDType, Tensor};
use burn_lean::amp::{Autocast, AutocastConfig, Fallback, autocast::MasterWeight};
use burn_lean::prune::{LayerKind, Layout, Mask, Masks};
use burn_lean::quant::{
    FakeQuantizeConfig, ForwardQ, Learned, NumberFormat, QatConfig, Scheme, Site, WeightConfig,
    WeightQuantizer, quantizers,
};
use burn_lean::reparam::{AttachError, Chain, ChainReparameterizer, attach, attached, find};
use support::lifecycle::{Lifecycle, parameter};
use support::{
    Parameter, each_device, nearest, on_tracked, parameters, tensor, values, with_numbers,
};

const INPUTS: usize = 6;
const OUTPUTS: usize = 4;

#[derive(Module, Debug)]
struct Model {
    first: Linear,
    second: Linear,
}

fn model(device: &Device) -> Model {
    Model {
        first: LinearConfig::new(INPUTS, OUTPUTS).init(device),
        second: LinearConfig::new(OUTPUTS, 2).init(device),
    }
}

fn forward(model: &Model, x: Tensor<2>) -> Tensor<2> {
    model.second.forward(model.first.forward(x))
}

fn weight(model: &Model) -> &Param<Tensor<2>> {
    &model.first.weight
}

/// F16, emulated where the device has none.
fn config() -> AutocastConfig {
    AutocastConfig::new(FloatDType::F16).with_fallback(Fallback::Emulate)
}

/// Runs `body` in the region of `autocast`.
fn inside(autocast: Autocast, body: &mut dyn FnMut()) {
    autocast.forward((), |()| body());
}

fn rounded(values: &[f32]) -> Vec<f32> {
    values
        .iter()
        .map(|value| nearest(FloatDType::F16, *value))
        .collect()
}

/// A reparameterization with a state of its own: the base times a trained factor.
#[derive(Module, Debug)]
struct Scaled {
    factor: Param<Tensor<1>>,
}

impl Reparameterization for Scaled {
    const NAME: &'static str = "scaled";

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        base * self.factor.val().reshape([1; D])
    }
}

struct ScaleMatrices;

impl Reparameterizer for ScaleMatrices {
    type Reparam = Scaled;

    fn reparameterize<const D: usize>(
        &mut self,
        _path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<Scaled>) {
        if D != 2 {
            return (param, None);
        }
        let factor = Tensor::ones([1], &param.lazy_device());
        let factor = Param::from_tensor(factor);
        (param, Some(Scaled { factor }))
    }
}

#[test]
fn master_weights_survive_the_lifecycle() {
    each_device(|target| {
        let (_, autocast) = config().prepare(model(&target.device)).unwrap();
        Lifecycle {
            build: &|seed, device| {
                let (model, _) = config().prepare(model(device)).unwrap();
                with_numbers(model, seed)
            },
            weight,
            expected: &|parameters| rounded(parameter(parameters, "first.weight")),
            tolerance: 0.0,
            inside: &|body| inside(autocast.clone(), body),
            trained: &["first.weight"],
        }
        .assert(target);
    });
}

#[test]
fn lora_under_autocast_survives_the_lifecycle() {
    const RANK: usize = 2;
    const ALPHA: f64 = 3.0;
    let adapted = |device: &Device| {
        let (model, _) = config()
            .prepare_with(model(device), Lora::new(RANK, ALPHA))
            .unwrap();
        model
    };
    let factor = |name| format!("first.weight.chain.first.{name}");
    each_device(|target| {
        let (_, autocast) = config().prepare(model(&target.device)).unwrap();
        Lifecycle {
            build: &|seed, device| with_numbers(adapted(device), seed),
            weight,
            expected: &|parameters| {
                let base = parameter(parameters, "first.weight");
                let (a, b) = (
                    parameter(parameters, &factor("a")),
                    parameter(parameters, &factor("b")),
                );
                let scale = (ALPHA / RANK as f64) as f32;
                let sum = |i: usize, o: usize| -> f32 {
                    (0..RANK)
                        .map(|r| a[i * RANK + r] * b[r * OUTPUTS + o])
                        .sum()
                };
                let adapted: Vec<f32> = (0..INPUTS * OUTPUTS)
                    .map(|at| base[at] + scale * sum(at / OUTPUTS, at % OUTPUTS))
                    .collect();
                rounded(&adapted)
            },
            // One unit in the last place of F16 below 8: F32 sums in another order may fall on the
            // other side of a tie.
            tolerance: 2f32.powi(-8),
            inside: &|body| inside(autocast.clone(), body),
            trained: &[&factor("a"), &factor("b")],
        }
        .assert(target);
    });
}

#[test]
fn a_custom_reparameterization_under_autocast_survives_the_lifecycle() {
    each_device(|target| {
        let (_, autocast) = config().prepare(model(&target.device)).unwrap();
        Lifecycle {
            build: &|seed, device| {
                let (model, _) = config().prepare_with(model(device), ScaleMatrices).unwrap();
                with_numbers(model, seed)
            },
            weight,
            expected: &|parameters| {
                let factor = parameter(parameters, "first.weight.chain.first.factor")[0];
                let base = parameter(parameters, "first.weight");
                rounded(&base.iter().map(|value| value * factor).collect::<Vec<_>>())
            },
            tolerance: 0.0,
            inside: &|body| inside(autocast.clone(), body),
            trained: &["first.weight", "first.weight.chain.first.factor"],
        }
        .assert(target);
    });
}

/// Keeps two thirds of the weights of `first`, others for another seed.
fn masks(seed: u64) -> Masks {
    let mut layout = Layout::new();
    layout.push("first.weight", [INPUTS, OUTPUTS], LayerKind::Linear, 2.0);
    let support: Vec<usize> = (0..layout.len())
        .filter(|at| !(at + seed as usize).is_multiple_of(3))
        .collect();
    Masks::from_support(&layout, &support).unwrap()
}

/// The base, with the zeros of seed 1. The base itself is not zero there.
fn masked(parameters: &[Parameter]) -> Vec<f32> {
    let base = parameter(parameters, "first.weight");
    let masks = masks(1);
    let kept = masks.get("first.weight").unwrap().kept();
    base.iter()
        .zip(kept)
        .map(|(value, kept)| if *kept { *value } else { 0.0 })
        .collect()
}

#[test]
fn masks_survive_the_lifecycle() {
    each_device(|target| {
        Lifecycle {
            build: &|seed, device| {
                let model = masks(seed).attach(model(device)).unwrap();
                with_numbers(model, seed)
            },
            weight,
            expected: &masked,
            tolerance: 0.0,
            inside: &|body| body(),
            trained: &["first.weight"],
        }
        .assert(target);
    });
}

#[test]
fn masks_under_autocast_survive_the_lifecycle() {
    let prepared = |seed, device: &Device| {
        let model = model(device);
        let masks = masks(seed).reparameterizer(&model).unwrap();
        config().prepare_with(model, masks).unwrap()
    };
    each_device(|target| {
        let (model, autocast) = prepared(1, &target.device);
        let chain = model
            .first
            .weight
            .reparameterization::<Chain<Mask, MasterWeight>>()
            .unwrap();
        assert!(chain.first.is_some() && chain.second.is_some());
        Lifecycle {
            build: &|seed, device| with_numbers(prepared(seed, device).0, seed),
            weight,
            expected: &|parameters| rounded(&masked(parameters)),
            tolerance: 0.0,
            inside: &|body| inside(autocast.clone(), body),
            trained: &["first.weight"],
        }
        .assert(target);
    });
}

/// INT8 per output channel, computed as the scheme's formulas say.
fn fake_quantized(weight: &[f32], scales: Option<&[f32]>) -> Vec<f32> {
    let scale = |channel: usize| {
        let column = weight.iter().skip(channel).step_by(OUTPUTS);
        column.fold(0.0f32, |all, weight| all.max(weight.abs())) / 127.0
    };
    let quantize = |(at, weight): (usize, &f32)| {
        let scale = scales.map_or_else(|| scale(at % OUTPUTS), |scales| scales[at % OUTPUTS]);
        let code = (weight * (1.0 / scale)).round_ties_even();
        code.clamp(-127.0, 127.0) * scale
    };
    weight.iter().enumerate().map(quantize).collect()
}

fn quantized(config: &QatConfig, seed: u64, device: &Device) -> Model {
    with_numbers(config.prepare(model(device)).unwrap(), seed)
}

#[test]
fn quantizers_survive_the_lifecycle() {
    let config = QatConfig::new();
    each_device(|target| {
        Lifecycle {
            build: &|seed, device| quantized(&config, seed, device),
            weight,
            expected: &|parameters| fake_quantized(parameter(parameters, "first.weight"), None),
            tolerance: 0.0,
            inside: &|body| body(),
            trained: &["first.weight"],
        }
        .assert(target);
    });
}

#[test]
fn learned_scales_survive_the_lifecycle() {
    const SCALE: &str = "first.weight.quant.weight.learned_scale";
    let weights = WeightConfig::new().with_learned(Learned::Lsq);
    let config = QatConfig::new().with_weight(weights).with_activation(None);
    each_device(|target| {
        Lifecycle {
            build: &|seed, device| quantized(&config, seed, device),
            weight,
            expected: &|parameters| {
                let base = parameter(parameters, "first.weight");
                fake_quantized(base, Some(parameter(parameters, SCALE)))
            },
            tolerance: 0.0,
            inside: &|body| body(),
            trained: &["first.weight", SCALE],
        }
        .assert(target);
    });
}

#[test]
fn quantizers_after_a_stranger_survive_the_lifecycle() {
    let config = QatConfig::new();
    each_device(|target| {
        Lifecycle {
            build: &|seed, device| {
                let model = model(device);
                let quantizers = config.reparameterizer(&model).unwrap();
                let both = ChainReparameterizer::new(ScaleMatrices, quantizers);
                with_numbers(attach(model, both).unwrap(), seed)
            },
            weight,
            expected: &|parameters| {
                let factor = parameter(parameters, "first.weight.chain.first.factor")[0];
                let base = parameter(parameters, "first.weight");
                let scaled: Vec<f32> = base.iter().map(|value| value * factor).collect();
                fake_quantized(&scaled, None)
            },
            tolerance: 0.0,
            inside: &|body| body(),
            trained: &["first.weight", "first.weight.chain.first.factor"],
        }
        .assert(target);
    });
}

#[test]
fn quantizers_under_autocast_survive_the_lifecycle() {
    let quant = QatConfig::new();
    each_device(|target| {
        let (_, autocast) = config().prepare(model(&target.device)).unwrap();
        Lifecycle {
            build: &|seed, device| {
                let model = model(device);
                let quantizers = quant.reparameterizer(&model).unwrap();
                let (model, _) = config().prepare_with(model, quantizers).unwrap();
                with_numbers(model, seed)
            },
            weight,
            expected: &|parameters| {
                let base = parameter(parameters, "first.weight");
                rounded(&fake_quantized(base, None))
            },
            tolerance: 0.0,
            inside: &|body| inside(autocast.clone(), body),
            trained: &["first.weight"],
        }
        .assert(target);
    });
}

#[test]
fn quantizers_between_an_adapter_and_a_cast_observe_and_quantize_in_f32() {
    for dtype in [FloatDType::F16, FloatDType::BF16] {
        on_tracked(|device| {
            let model = model(&device);
            let scheme = Scheme::affine(NumberFormat::uint8());
            let activation = FakeQuantizeConfig::new(scheme.clone());
            let quant = QatConfig::new().with_activation(Some(activation));
            let first = ChainReparameterizer::new(
                Lora::new(2, 3.0),
                quant.reparameterizer(&model).unwrap(),
            );
            let (model, autocast) = AutocastConfig::new(dtype)
                .with_fallback(Fallback::Emulate)
                .prepare_with(model, first)
                .unwrap();
            let model = with_numbers(model, 1);
            // Three types, of which none knows all.
            assert!(find::<LoraAdapter, 2>(&model.first.weight).is_some());
            assert!(find::<MasterWeight, 2>(&model.first.weight).is_some());
            let quantizer = WeightQuantizer::of(&model.first.weight).unwrap();

            let x = tensor::<2>(3, [5, INPUTS], &device);
            let y = autocast.forward(x.clone(), |x| {
                model.second.forward_q(model.first.forward_q(x))
            });
            // The statistics are those of the half values, in F32.
            let seen: Vec<f32> = values(x).iter().map(|x| nearest(dtype, *x)).collect();
            let input = quantizer.input.as_ref().unwrap();
            let range = input.range().unwrap();
            assert_eq!(range.min.dtype(), burn::tensor::DType::F32);
            let lowest = seen.iter().copied().fold(0.0, f32::min);
            let highest = seen.iter().copied().fold(0.0, f32::max);
            assert_eq!(values(range.min), [lowest]);
            assert_eq!(values(range.max), [highest]);
            assert_eq!(
                values(input.qparams().unwrap().scale),
                [(highest - lowest) / 255.0]
            );
            let grads = GradientsParams::from_grads(y.square().mean().backward(), &model);
            let model = SgdConfig::new().init().step(0.1, model, grads);
            for located in quantizers(&model) {
                let observed = located.site == Site::Weight || located.quantizer.is_observed();
                assert!(observed, "{}", located.path);
            }
        });
    }
}

#[test]
fn a_step_under_autocast_trains_the_adapter_and_leaves_the_base() {
    on_tracked(|device| {
        let (model, autocast) = config()
            .prepare_with(model(&device), Lora::new(2, 3.0))
            .unwrap();
        let model = with_numbers(model, 1);
        let before = parameters(&model);
        let y = autocast.forward(tensor(3, [5, INPUTS], &device), |x| forward(&model, x));
        let grads = GradientsParams::from_grads(y.square().mean().backward(), &model);
        let model = SgdConfig::new().init().step(0.1, model, grads);
        for (before, after) in before.iter().zip(parameters(&model)) {
            let factor = before.path.contains(".chain.first.");
            assert_eq!(before.values != after.values, factor, "{}", before.path);
        }
    });
}

#[test]
fn attaching_lora_after_autocast_is_refused_with_the_path() {
    each_device(|target| {
        let (model, _) = config().prepare(model(&target.device)).unwrap();
        let error = attach(model, Lora::new(2, 3.0)).unwrap_err().into_error();
        let expected = AttachError::AlreadyAttached {
            path: "first.weight".into(),
            existing: "master_weight".into(),
        };
        assert_eq!(error, expected);
    });
}

#[test]
fn a_refused_model_comes_back_unharmed() {
    on_tracked(|device| {
        let (model, autocast) = config().prepare(model(&device)).unwrap();
        let model = with_numbers(model, 1);
        let (parameters_before, attached_before) = (parameters(&model), attached(&model));
        let x = tensor(3, [5, INPUTS], &device);
        let output = |model: &Model| values(autocast.forward(x.clone(), |x| forward(model, x)));
        let output_before = output(&model);

        let model = attach(model, Lora::new(2, 3.0)).unwrap_err().into_value();

        // Trainable, as they were: LoRA freezes what it adapts.
        assert_eq!(parameters(&model), parameters_before);
        assert_eq!(attached(&model), attached_before);
        assert_eq!(output(&model), output_before);
    });
}

#[test]
fn a_plain_checkpoint_loads_into_a_prepared_model_and_back() {
    each_device(|target| {
        let plain = with_numbers(model(&target.device), 1);
        let (prepared, _) = config().prepare(model(&target.device)).unwrap();
        let prepared = prepared
            .try_load_record(plain.clone().into_record())
            .unwrap();
        assert_eq!(parameters(&prepared), parameters(&plain));
        let back = model(&target.device)
            .try_load_record(prepared.into_record())
            .unwrap();
        assert_eq!(parameters(&back), parameters(&plain));
    });
}

#[test]
fn a_record_with_state_is_refused_before_attaching() {
    let (adapted, _) = config()
        .prepare_with(model(&Device::flex()), Lora::new(2, 3.0))
        .unwrap();
    let error = model(&Device::flex())
        .try_load_record(adapted.into_record())
        .unwrap_err();
    assert_says!(error, "Unused tensors");
}
