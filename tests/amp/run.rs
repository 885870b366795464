//! Mixed precision operation by operation: `Autocast::run`.

use std::cell::Cell;

use burn::module::{Module, Param, ParamGroup, Quantizer};
use burn::nn::{BatchNorm, BatchNormConfig, DropoutConfig, EmbeddingConfig, Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::activation::sigmoid;
use burn::tensor::quantization::{Calibration, QuantValue};
use burn::tensor::{DType, Device, FloatDType, Int, Tensor};
use burn_lean::amp::{
    AmpError, Autocast, AutocastConfig, Fallback, GradScalerConfig, GraphError, Precision,
    full_precision,
};
use burn_lean::graph::Tensors;
use burn_lean::prune::Masks;
use burn_lean::quant::{QatConfig, QuantizedForward, quantizers};

use crate::model::Mlp;
use crate::support::{each_device, on_tracked, parameters, tensor, values, warnings, with_numbers};

/// What people write, and what a region needs an edit for.
#[derive(Module, Debug)]
struct Net {
    first: Linear,
    norm: BatchNorm,
    second: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        let linear = |a, b| LinearConfig::new(a, b).init(device);
        let net = Self {
            first: linear(6, 8),
            norm: BatchNormConfig::new(8).init(device),
            second: linear(8, 3),
        };
        with_numbers(net, 2)
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.second
            .forward(self.norm.forward(self.first.forward(x)))
    }
}

pub(crate) fn emulating(dtype: FloatDType) -> Autocast {
    Autocast::new(dtype).with_fallback(Fallback::Emulate)
}

#[test]
fn an_unedited_network_trains_with_its_statistics() {
    on_tracked(|device| {
        let mut model = Net::new(&device);
        let autocast = emulating(FloatDType::F16);
        let mut scaler = GradScalerConfig::for_dtype(FloatDType::F16).init().unwrap();
        let mut optim = AdamWConfig::new().init();
        let before = parameters(&model.norm.valid());
        let mut losses = Vec::new();
        for _ in 0..20 {
            let x = tensor::<2>(5, [7, 6], &device);
            let loss = autocast.run(&model, x, |model, x| model.forward(x).square().mean());
            let loss = loss.unwrap();
            assert_eq!(loss.dtype(), DType::F32);
            losses.push(loss.clone().into_scalar::<f32>());
            let grads = scaler.scale(loss).unwrap().backward();
            let grads = GradientsParams::from_grads(grads, &model);
            model = scaler.step(&mut optim, 0.05, model, grads).unwrap();
        }
        assert!(losses[19] < 0.5 * losses[0], "{losses:?}");
        let after = parameters(&model.norm.valid());
        assert!(before.iter().zip(&after).all(|(a, b)| a.values != b.values));
    });
}

#[test]
fn exceptions_choose_another_precision_by_name_and_by_module() {
    let device = Device::flex();
    let model = (Net::new(&device), Net::new(&device));
    let of = |autocast: Autocast| {
        let x = tensor::<2>(5, [7, 6], &device);
        let operations = autocast.explain(&model, x, |model, x| {
            let x = x.clone() + model.0.first.forward(x).mean_dim(1);
            model.1.first.forward(x).exp()
        });
        let products = |path: &str| {
            let operations = operations.as_ref().unwrap().iter();
            let mut reading = operations.filter(|one| one.parameters.contains(&path.to_string()));
            reading.next().unwrap().operands
        };
        let exp = operations.as_ref().unwrap().last().unwrap();
        assert_eq!(exp.name, "exp");
        (
            products("0.first.weight"),
            products("1.first.weight"),
            exp.operands,
        )
    };
    let (half, full) = (Some(FloatDType::BF16), Some(FloatDType::F32));
    let autocast = Autocast::new(FloatDType::BF16);
    assert_eq!(of(autocast.clone()), (half, half, full));
    let group = ParamGroup::from_predicate("1.first");
    let one = autocast.clone().with_module(group, Precision::Full);
    assert_eq!(of(one), (half, full, full));
    let all = autocast.with_operation("exp", Precision::Half);
    assert_eq!(of(all), (half, half, half));
}

#[test]
fn what_a_config_keeps_in_full_precision_runs_in_it() {
    each_device(|target| {
        let linear = |outputs, number: f32| {
            let mut linear = LinearConfig::new(2, outputs)
                .with_bias(false)
                .init(&target.device);
            linear.weight = linear.weight.map(|weight| weight.full_like(number));
            linear
        };
        // Infinite in F16.
        let model: (Linear, Linear) = (linear(2, 0.5), linear(1, 70_000.0));
        let config = AutocastConfig::new(FloatDType::F16)
            .with_fallback(Fallback::Emulate)
            .with_full_precision(Some(ParamGroup::from_predicate("1.")));
        for (model, autocast) in [
            config.prepare(model.clone()).unwrap(),
            config.materialize_half(model.clone()).unwrap(),
            (model, config.init(&target.device).unwrap()),
        ] {
            let x = Tensor::<2>::ones([1, 2], &target.device);
            let y = autocast.run(&model, x, |model, x| model.1.forward(model.0.forward(x)));
            assert_eq!(values(y.unwrap()), [140_000.0]);
        }
    });
}

#[test]
fn the_gradients_of_a_token_that_comes_often_are_summed_in_f32() {
    on_tracked(|device| {
        let model = EmbeddingConfig::new(3, 2).init(&device);
        let tokens = || Tensor::<2, Int>::ones([1, 4096], &device);
        for dtype in [FloatDType::F16, FloatDType::BF16] {
            let unedited = emulating(dtype).run(&model, tokens(), |model, tokens| {
                model.forward(tokens).sum()
            });
            let (prepared, region) = AutocastConfig::new(dtype)
                .with_fallback(Fallback::Emulate)
                .prepare(model.clone())
                .unwrap();
            let called = region.forward(tokens(), |tokens| {
                full_precision(tokens, |tokens| prepared.forward(tokens))
            });
            for (weight, loss) in [
                (&model.weight, unedited.unwrap()),
                (&prepared.weight, called.sum()),
            ] {
                let gradient = weight.base().grad(&loss.backward()).unwrap();
                let expected = [0.0, 0.0, 4096.0, 4096.0, 0.0, 0.0];
                assert_eq!(values(gradient), expected, "{dtype:?}");
            }
        }
    });
}

#[cfg(feature = "ndarray")]
#[test]
fn a_model_that_moves_is_run_as_its_device_can() {
    #[allow(deprecated)]
    let (able, lacking) = (Device::flex(), Device::ndarray());
    let config = AutocastConfig::new(FloatDType::F16);
    let run = |model: &Net, autocast: &Autocast| {
        let x = tensor::<2>(5, [7, 6], &model.first.weight.device());
        autocast.run(model, x, |model, x| model.forward(x))
    };
    let (model, autocast) = config.prepare(Net::new(&able)).unwrap();
    assert!(run(&model, &autocast).is_ok());
    let error = run(&model.to_device(&lacking), &autocast).unwrap_err();
    assert_matches!(error, AmpError::UnsupportedDtype { .. });

    let emulating = config.with_fallback(Fallback::Emulate);
    let (model, autocast) = emulating.prepare(Net::new(&lacking)).unwrap();
    let model = model.to_device(&able);
    let [found, expected] = [&autocast, &Autocast::new(FloatDType::F16)]
        .map(|autocast| values(run(&model, autocast).unwrap()));
    assert_eq!(found, expected);
}

#[test]
fn a_cached_pass_is_recorded_once_for_its_shapes() {
    let device = Device::flex().autodiff();
    let model = Net::new(&device);
    // Once more at the second use, whether it still holds.
    for (autocast, expected) in [
        (Autocast::new(FloatDType::BF16), [1, 2, 3, 4]),
        (Autocast::new(FloatDType::BF16).cached(), [1, 2, 2, 3]),
    ] {
        let count = Cell::new(0);
        let recorded: Vec<i32> = [5, 5, 5, 7]
            .into_iter()
            .map(|batch| {
                let x = tensor::<2>(5, [batch, 6], &device);
                let y = autocast.run(&model, x.clone(), |model, x| {
                    count.set(count.get() + 1);
                    model.forward(x)
                });
                assert_eq!(y.unwrap().dims(), [batch, 3]);
                count.get()
            })
            .collect();
        assert_eq!(recorded, expected);
    }
}

#[test]
fn a_kept_recording_is_of_inputs_of_one_form() {
    let model = Net::new(&Device::flex());
    let autocast = Autocast::new(FloatDType::BF16).cached();
    let x = || tensor::<2>(5, [7, 6], &Device::flex());
    let run = |input: (Option<Tensor<2>>, Option<Tensor<2>>, usize)| {
        let y = autocast.run(&model, input, |model, (added, subtracted, times)| {
            let y = match (added, subtracted) {
                (Some(x), _) => model.forward(x),
                (None, x) => -model.forward(x.unwrap()),
            };
            y * times as f32
        });
        values(y.unwrap())
    };
    let times = |factor: f32, y: &[f32]| y.iter().map(|y| factor * y).collect::<Vec<_>>();
    let y = run((Some(x()), None, 1));
    assert_eq!(run((None, Some(x()), 1)), times(-1.0, &y));
    assert_eq!(run((Some(x()), None, 4)), times(4.0, &y));
    assert_eq!(run((Some(x()), None, 1)), y);
}

#[test]
fn a_kept_recording_is_of_what_is_frozen() {
    on_tracked(|device| {
        let model = Net::new(&device);
        let frozen = model.clone().freeze();
        let autocast = emulating(FloatDType::F16);
        let autocast = autocast.cached().without_verification();
        let run = |model: &Net| {
            let x = tensor::<2>(5, [7, 6], &device);
            let y = autocast.run(model, x, |model, x| model.forward(x));
            values(y.unwrap())
        };
        let trained = run(&model);
        let before = parameters(&frozen.valid());
        // Copies share their statistics, which a frozen one reads and does not change.
        assert_ne!(run(&frozen), trained);
        assert_eq!(parameters(&frozen.valid()), before);
    });
}

/// A function of the user's that closures go through.
fn step<O: Tensors + Send + Sync + 'static>(
    autocast: &Autocast,
    model: &Net,
    forward: impl FnOnce(&Net, Tensor<2>) -> O,
) -> Result<O, AmpError> {
    let x = tensor::<2>(5, [7, 6], &model.first.weight.device());
    autocast.run(model, x, forward)
}

#[test]
fn closures_that_go_through_one_function_are_told_apart() {
    let model = Net::new(&Device::flex().autodiff());
    let autocast = Autocast::new(FloatDType::BF16);
    step(&autocast, &model, |model, x| model.forward(x).sum()).unwrap();
    let stopped = step(&autocast, &model, |model, x| {
        let y = model.forward(x);
        (y.clone() * y.detach()).sum()
    });
    let error = stopped.unwrap_err();
    assert_matches!(error, AmpError::Graph(GraphError::StopsGradients { .. }));
    let autocast = autocast.cached();
    let one = step(&autocast, &model, |model, x| model.forward(x)).unwrap();
    let two = step(&autocast, &model, |model, x| model.forward(x) * 2.0).unwrap();
    let twice: Vec<f32> = values(one).iter().map(|y| 2.0 * y).collect();
    assert_eq!(values(two), twice);
}

#[test]
fn a_result_that_is_detached_has_no_gradient_in_any_step() {
    let device = Device::flex().autodiff();
    let model = Net::new(&device);
    let new = || Autocast::new(FloatDType::BF16);
    for autocast in [new(), new().cached(), new().without_verification()] {
        for _ in 0..3 {
            let x = tensor::<2>(5, [7, 6], &device);
            let run = autocast.run(&model, x, |model, x| {
                let y = model.forward(x);
                (y.clone(), y.detach().abs())
            });
            let (y, z) = run.unwrap();
            assert!(y.is_tracked());
            assert!(!z.is_tracked());
        }
    }
}

#[test]
fn a_pass_that_stops_gradients_is_refused_at_its_first_step() {
    let device = Device::flex().autodiff();
    let model = Net::new(&device);
    let run = |autocast: Autocast| {
        let x = tensor::<2>(5, [7, 6], &device);
        autocast.run(&model, x, |model, x| {
            let y = model.forward(x);
            (y.clone() * y.detach()).sum()
        })
    };
    let error = run(Autocast::new(FloatDType::BF16)).unwrap_err();
    let AmpError::Graph(GraphError::StopsGradients { .. }) = &error else {
        panic!("{error}");
    };
    assert_says!(error, "Autocast::forward");
    assert!(run(Autocast::new(FloatDType::BF16).without_verification()).is_ok());
}

/// A pooling, an activation or a loss by itself, after layers that train.
#[test]
fn a_function_without_parameters_takes_an_input_that_has_a_gradient() {
    on_tracked(|device| {
        let dropout = DropoutConfig::new(0.0).init();
        let h = Tensor::<2>::full([2, 2], 3.0, &device).require_grad();
        let run = emulating(FloatDType::F16).run(&dropout, h.clone(), |_, h| h.clone().matmul(h));
        let y = run.unwrap();
        assert_eq!(values(y.clone()), [18.0; 4]);
        // Of each number its row of one factor and its column of the other.
        let gradients = y.sum().backward();
        assert_eq!(values(h.grad(&gradients).unwrap()), [12.0; 4]);
        let stops = emulating(FloatDType::F16).run(&dropout, h, |_, h| h.clone() * h.detach());
        let error = stops.unwrap_err();
        assert_matches!(error, AmpError::Graph(GraphError::StopsGradients { .. }));
    });
}

#[cfg(feature = "ndarray")]
#[test]
fn a_device_without_the_dtype_is_refused_or_computes_in_f32() {
    #[allow(deprecated)]
    let device = Device::ndarray();
    let model = Net::new(&device);
    let x = || tensor::<2>(5, [7, 6], &device);
    let run = |autocast: &Autocast| autocast.run(&model, x(), |model, x| model.forward(x));
    let error = run(&Autocast::new(FloatDType::F16)).unwrap_err();
    assert_matches!(error, AmpError::UnsupportedDtype { .. });
    assert!(AutocastConfig::new(FloatDType::F16).init(&device).is_err());
    let f32 = Autocast::new(FloatDType::F16).with_fallback(Fallback::F32);
    assert_eq!(values(run(&f32).unwrap()), values(model.forward(x())));
    let error = run(&Autocast::new(FloatDType::F64)).unwrap_err();
    assert_matches!(error, AmpError::NotAComputeDtype { .. });
}

#[test]
fn numbers_that_f16_does_not_have_do_not_become_infinities() {
    on_tracked(|device| {
        let model = Net::new(&device);
        let x = tensor::<2>(5, [7, 6], &device);
        let autocast = emulating(FloatDType::F16);
        let probabilities = autocast.run(&model, x, |model, x| {
            let y = model.forward(x);
            // A whole row is masked.
            let mask = y.clone().equal(y.clone());
            burn::tensor::activation::softmax(y.mask_fill(mask, -1e9), 1)
        });
        for probability in values(probabilities.unwrap()) {
            assert!((probability - 1.0 / 3.0).abs() < 1e-6, "{probability}");
        }
    });
}

/// The derivative of `σ` vanishes as that of the logarithm grows: both of the same operand.
#[test]
fn a_logarithm_of_what_saturates_has_its_gradient() {
    on_tracked(|device| {
        for dtype in [FloatDType::F16, FloatDType::BF16] {
            let mut model = LinearConfig::new(1, 64).with_bias(false).init(&device);
            model.weight = Param::from_tensor(tensor::<2>(3, [1, 64], &device) * 10.0 - 60.0);
            let x = Tensor::<2>::ones([1, 64], &device);
            // Not a matrix product, which would round the operand of both.
            let loss = emulating(dtype).run(&model, x, |model, x| {
                sigmoid(model.weight.val() * x).log().sum()
            });
            let grads = loss.unwrap().backward();
            for found in values(model.weight.grad(&grads).unwrap()) {
                assert!((found - 1.0).abs() < 1e-4, "{found}");
            }
        }
    });
}

#[test]
fn a_model_with_fake_quantization_runs_with_all_of_it() {
    let device = Device::flex().autodiff();
    let model = with_numbers(Net::new(&device), 3);
    let prepared = QatConfig::new().prepare(model.clone()).unwrap();
    let x = tensor::<2>(5, [7, 6], &device);
    let forward = |model: &Net, x: Tensor<2>| model.forward(x).square().mean();
    let autocast = Autocast::new(FloatDType::BF16);
    let loss = autocast.run(&prepared, x.clone(), forward).unwrap();
    let all = quantizers(&prepared);
    assert!(!all.is_empty());
    assert!(all.iter().all(|located| located.quantizer.is_observed()));
    let [found, float] = [
        loss.clone(),
        autocast.run(&model, x.clone(), forward).unwrap(),
    ]
    .map(|loss| loss.into_scalar::<f32>());
    let exact = QuantizedForward::new().run(&prepared, x, forward).unwrap();
    let exact = exact.into_scalar::<f32>();
    assert_ne!(found, float);
    assert!((found - exact).abs() < 2e-2 * exact, "{found} for {exact}");
    let grads = GradientsParams::from_grads(loss.backward(), &prepared);
    assert!(grads.len() >= 4, "{} gradients", grads.len());
}

#[test]
fn quantizers_act_in_f32_too() {
    let device = Device::flex().autodiff();
    let model = with_numbers(Net::new(&device), 3);
    let x = tensor::<2>(5, [7, 6], &device);
    let forward = |model: &Net, x: Tensor<2>| model.forward(x).square().mean();
    let prepared = || QatConfig::new().prepare(model.clone()).unwrap();
    let found = Autocast::new(FloatDType::F32).run(&prepared(), x.clone(), forward);
    let exact = QuantizedForward::new().run(&prepared(), x.clone(), forward);
    let [found, exact] = [found.unwrap(), exact.unwrap()].map(|loss| loss.into_scalar::<f32>());
    assert_eq!(found, exact);
    assert_ne!(found, forward(&model, x).into_scalar::<f32>());
}

#[test]
fn weights_that_burn_has_quantized_are_those_numbers() {
    each_device(|target| {
        // It computes the numbers in half there.
        if target.is_gpu() {
            return;
        }
        let scheme = target.device.settings().quantization.scheme;
        let scheme = scheme.with_value(QuantValue::Q8S);
        let mut quantizer = Quantizer::new(Calibration::MinMax, scheme);
        let group = ParamGroup::from_predicate("weight");
        let model = Mlp::new(1, &target.device);
        let quantized = model.quantize_weights_group(&mut quantizer, group);
        assert_matches!(quantized.first.weight.base().dtype(), DType::QFloat(_));
        let mut float = quantized.clone();
        float.first.weight = float.first.weight.map(|weight| weight.dequantize());
        float.second.weight = float.second.weight.map(|weight| weight.dequantize());
        for dtype in [FloatDType::F16, FloatDType::BF16] {
            let run = |model: &Mlp| {
                let x = tensor::<2>(5, [7, 6], &target.device);
                let y = emulating(dtype).run(model, x, |model, x| model.forward(x));
                values(y.unwrap())
            };
            assert_eq!(run(&quantized), run(&float));
        }
    });
}

#[test]
fn masked_weights_stay_masked() {
    on_tracked(|device| {
        let mut model = Net::new(&device);
        // Its zeros are what is pruned.
        let keep = tensor::<2>(9, [6, 8], &device).greater_elem(0.0).float();
        model.first.weight = model
            .first
            .weight
            .map(|weight| (weight * keep.clone()).detach().require_grad());
        let masks = Masks::from_zeros(&model, &ParamGroup::from_predicate("first.weight"));
        let mut model = masks.unwrap().attach(model).unwrap();
        let zeros = |model: &Net| {
            values(model.first.weight.val())
                .iter()
                .filter(|w| **w == 0.0)
                .count()
        };
        let before = zeros(&model);
        let autocast = emulating(FloatDType::F16);
        let mut optim = AdamWConfig::new().init();
        for _ in 0..3 {
            let x = tensor::<2>(5, [7, 6], &device);
            let loss = autocast.run(&model, x, |model, x| model.forward(x).square().mean());
            let grads = GradientsParams::from_grads(loss.unwrap().backward(), &model);
            model = optim.step(0.05, model, grads);
        }
        assert!(before > 10);
        assert_eq!(zeros(&model), before);
    });
}

#[cfg(feature = "ndarray")]
#[test]
#[allow(deprecated)] // `Device::ndarray`: the backend without half precision.
fn a_fallback_is_reported_once_and_not_in_every_step() {
    let device = Device::ndarray();
    let model = Net::new(&device);
    let autocast = emulating(FloatDType::F16);
    let ((), said) = warnings("burn_lean_amp", || {
        for _ in 0..3 {
            let x = tensor::<2>(5, [7, 6], &device);
            let run = autocast.clone().run(&model, x, |model, x| model.forward(x));
            run.unwrap();
        }
    });
    assert_eq!(said.len(), 1, "{said:?}");
}

#[test]
fn gradients_that_cannot_be_compared_are_reported() {
    let device = Device::flex().autodiff();
    let model = Net::new(&device);
    let autocast = Autocast::new(FloatDType::BF16);
    let x = || tensor::<2>(5, [7, 6], &device);
    // Roots of negative numbers: tried in each step.
    let ((), of_roots) = warnings("burn_lean_graph", || {
        for _ in 0..2 {
            let run = autocast.run(&model, x(), |model, x| {
                (model.forward(x) - 1e6).sqrt().sum()
            });
            run.unwrap();
        }
    });
    assert_eq!(of_roots.len(), 2, "{of_roots:?}");
    let ((), of_others) = warnings("burn_lean_graph", || {
        let run = autocast.run(&model, x(), |model, x| model.forward(x).sum());
        run.unwrap();
    });
    assert!(of_others.is_empty(), "{of_others:?}");
}
