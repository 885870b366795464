//! Mixed precision operation by operation: `Autocast::run`.

use std::cell::Cell;

use burn::module::{Module, ParamGroup};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_lean::amp::{
    AmpError, Autocast, AutocastConfig, Fallback, GradScalerConfig, GraphError, Precision,
};
use burn_lean::prune::Masks;
use burn_lean::quant::{QatConfig, QuantizedForward, quantizers};

use crate::support::{each_device, parameters, tensor, values, with_numbers};

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

fn emulating(dtype: FloatDType) -> Autocast {
    Autocast::new(dtype).with_fallback(Fallback::Emulate)
}

#[test]
fn an_unedited_network_trains_with_its_statistics() {
    each_device(|target| {
        let device = target.device.clone().autodiff();
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
fn a_cached_pass_is_recorded_once_for_its_shapes() {
    let device = Device::flex().autodiff();
    let model = Net::new(&device);
    for (autocast, expected) in [
        (Autocast::new(FloatDType::BF16), [1, 2, 3, 4]),
        (Autocast::new(FloatDType::BF16).cached(), [1, 1, 2, 2]),
    ] {
        let count = Cell::new(0);
        let recorded: Vec<i32> = [5, 5, 7, 5]
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
    assert!(error.to_string().contains("Autocast::forward"), "{error}");
    assert!(run(Autocast::new(FloatDType::BF16).without_verification()).is_ok());
}

#[test]
fn a_device_without_the_dtype_is_refused_or_computes_in_f32() {
    #[allow(deprecated)]
    let device = Device::ndarray();
    let model = Net::new(&device);
    let x = || tensor::<2>(5, [7, 6], &device);
    let run = |autocast: &Autocast| autocast.run(&model, x(), |model, x| model.forward(x));
    let error = run(&Autocast::new(FloatDType::F16)).unwrap_err();
    assert!(
        matches!(error, AmpError::UnsupportedDtype { .. }),
        "{error}"
    );
    assert!(AutocastConfig::new(FloatDType::F16).init(&device).is_err());
    let f32 = Autocast::new(FloatDType::F16).with_fallback(Fallback::F32);
    assert_eq!(values(run(&f32).unwrap()), values(model.forward(x())));
    let error = run(&Autocast::new(FloatDType::F64)).unwrap_err();
    assert!(
        matches!(error, AmpError::NotAComputeDtype { .. }),
        "{error}"
    );
}

#[test]
fn numbers_that_f16_does_not_have_do_not_become_infinities() {
    each_device(|target| {
        let device = target.device.clone().autodiff();
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
            assert!(
                (probability - 1.0 / 3.0).abs() < 1e-6,
                "{probability} on {}",
                target.name
            );
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
fn masked_weights_stay_masked() {
    each_device(|target| {
        let device = target.device.clone().autodiff();
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

/// Counts what is reported at the level of a warning.
#[derive(Clone, Default)]
struct Warnings(std::sync::Arc<std::sync::atomic::AtomicUsize>);

impl tracing::Subscriber for Warnings {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() == tracing::Level::WARN && metadata.target().starts_with("burn_lean_amp")
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn event(&self, _: &tracing::Event<'_>) {
        self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    }
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

#[test]
#[allow(deprecated)] // `Device::ndarray`: the backend without half precision.
fn a_fallback_is_reported_once_and_not_in_every_step() {
    let device = Device::ndarray();
    let model = Net::new(&device);
    let autocast = emulating(FloatDType::F16);
    let warnings = Warnings::default();
    tracing::subscriber::with_default(warnings.clone(), || {
        for _ in 0..3 {
            let x = tensor::<2>(5, [7, 6], &device);
            let run = autocast.clone().run(&model, x, |model, x| model.forward(x));
            run.unwrap();
        }
    });
    assert_eq!(warnings.0.load(std::sync::atomic::Ordering::Relaxed), 1);
}
