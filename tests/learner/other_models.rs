//! Models with a frozen copy, a BatchNorm, an F64 parameter.

use burn::module::{Module, ModuleDisplay, Param};
use burn::nn::{BatchNorm, BatchNormConfig};
use burn::optim::{GradientsAccumulator, SgdConfig};
use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn::train::{InferenceStep, Learner, TrainOutput, TrainStep};
use burn_lean_amp::{
    AfterStep, Amp, AmpInferenceStep, AmpTrainStep, Autocast, AutocastConfig, Fallback,
    GradScalerConfig, LossScale, full_precision,
};

use crate::devices::{each_device, on_tracked, values};
use crate::support::{Batch, Mlp, batch, bits, samples, samples_with_infinity};
use crate::training;

fn learner<M>(model: M, scaler: &GradScalerConfig) -> Learner<Amp<M>>
where
    M: Module + ModuleDisplay + AmpTrainStep + AmpInferenceStep + 'static,
{
    let autocast = AutocastConfig::new(FloatDType::F16).with_fallback(Fallback::Emulate);
    let amp = Amp::new(model, &autocast, scaler).unwrap();
    Learner::new(amp, SgdConfig::new().init(), 0.1)
}

/// What these models have in common: a loss.
macro_rules! steps {
    ($model:ty) => {
        impl AmpTrainStep for $model {
            type Input = Batch;
            type Output = ();

            fn train_step(&self, autocast: &Autocast, batch: Batch) -> (Tensor<1>, ()) {
                (self.loss(autocast, batch), ())
            }
        }

        impl AmpInferenceStep for $model {
            type Input = Batch;
            type Output = ();

            fn inference_step(&self, _autocast: &Autocast, _batch: Batch) {}
        }
    };
}

#[derive(Module, Debug)]
struct WithTarget {
    online: Mlp,
    target: Mlp,
}
steps!(WithTarget);

impl WithTarget {
    fn loss(&self, autocast: &Autocast, batch: Batch) -> Tensor<1> {
        self.online.train_step(autocast, batch).0
    }
}

#[test]
fn a_frozen_copy_with_the_same_identities_changes_no_step() {
    each_device(|target| {
        let device = target.device.clone().autodiff();
        let config = GradScalerConfig::new(LossScale::Static(1024.0)).with_max_norm(Some(0.01));
        let online = Mlp::new(&device);
        let mut pair = learner(
            WithTarget {
                target: online.clone().no_grad(),
                online,
            },
            &config,
        );
        let mut alone = learner(Mlp::new(&device), &config);
        for _ in 0..3 {
            training::step(&mut pair, &samples(4), &device);
            training::step(&mut alone, &samples(4), &device);
        }
        let (pair, alone) = (pair.model(), alone.model());
        assert_eq!(bits(&pair.model().online), bits(alone.model()));
        assert_eq!(bits(&pair.model().target), bits(&Mlp::new(&device)));
        let norms = [pair.monitor(), alone.monitor()].map(|monitor| {
            let report = monitor.report().unwrap();
            report.grad_norm.unwrap()
        });
        assert_eq!(norms[0], norms[1]);
    });
}

/// Burn's optimizers step the first place of an identity, whether it trains or not.
#[derive(Module, Debug)]
struct TargetFirst {
    target: Mlp,
    online: Mlp,
}
steps!(TargetFirst);

impl TargetFirst {
    fn new(device: &Device) -> Self {
        let online = Mlp::new(device);
        Self {
            target: online.clone().no_grad(),
            online,
        }
    }

    fn loss(&self, autocast: &Autocast, batch: Batch) -> Tensor<1> {
        self.online.train_step(autocast, batch).0
    }
}

impl TrainStep for TargetFirst {
    type Input = Batch;
    type Output = ();

    fn step(&self, batch: Batch) -> TrainOutput<()> {
        let loss = self.loss(&Autocast::new(FloatDType::F32), batch);
        TrainOutput::new(self, loss.backward(), ())
    }
}

impl InferenceStep for TargetFirst {
    type Input = Batch;
    type Output = ();

    fn step(&self, _batch: Batch) {}
}

#[test]
fn a_frozen_copy_in_front_of_the_trained_one_stays_as_it_is() {
    each_device(|target| {
        let device = target.device.clone().autodiff();
        let config = GradScalerConfig::new(LossScale::Static(1024.0));
        let mut pair = learner(TargetFirst::new(&device), &config);
        let mut alone = learner(Mlp::new(&device), &config);
        let after_step = AfterStep::new(TargetFirst::new(&device), |pair| pair);
        let mut plain = Learner::new(after_step, SgdConfig::new().init(), 0.1);
        for _ in 0..3 {
            training::step(&mut pair, &samples(4), &device);
            training::step(&mut alone, &samples(4), &device);
            training::step(&mut plain, &samples(4), &device);
        }
        let (pair, plain) = (pair.model(), plain.model());
        let first = bits(&Mlp::new(&device));
        assert_eq!(bits(&pair.model().online), bits(alone.model().model()));
        assert_ne!(bits(&plain.model().online), first);
        for pair in [pair.model(), plain.model()] {
            assert_eq!(bits(&pair.target), first);
            assert_eq!(pair.target.first.weight.id, pair.online.first.weight.id);
        }
    });
}

#[derive(Module, Debug)]
struct Normalized {
    norm: BatchNorm,
    mlp: Mlp,
}
steps!(Normalized);

impl Normalized {
    fn loss(&self, autocast: &Autocast, mut batch: Batch) -> Tensor<1> {
        batch.x = full_precision(batch.x, |x| self.norm.forward(x));
        self.mlp.train_step(autocast, batch).0
    }
}

#[test]
fn a_broken_first_step_leaves_no_nan_in_running_statistics() {
    on_tracked(|device| {
        let new = || Normalized {
            norm: BatchNormConfig::new(2).init(&device),
            mlp: Mlp::new(&device),
        };
        let config = GradScalerConfig::for_dtype(FloatDType::F16);
        let statistics = |amp: &Amp<Normalized>| {
            let norm = amp.model().valid().norm;
            [norm.running_mean.value(), norm.running_var.value()].map(values)
        };
        let mut before = learner(new(), &config);
        training::step(&mut before, &samples(4), &device);
        // Burn keeps the update of the last forward pass apart until then.
        let _ = before.model().valid();
        let record = before.model().into_record();

        // From the start, and after a restart from a record.
        for loaded in [false, true] {
            let mut learner = learner(new(), &config);
            if loaded {
                learner.load_model(record.clone());
            }
            let expected = statistics(&learner.model());
            assert_eq!(expected[0] != [0.0, 0.0], loaded);
            // Of an accumulated step, the first batch is broken.
            let mut accumulator = GradientsAccumulator::new();
            for broken in [&[0][..], &[]] {
                let rows = samples_with_infinity(4, broken);
                let output = learner.train_step(batch(&rows, &device));
                accumulator.accumulate(&learner.model(), output.grads);
            }
            // Evaluation takes what the forward passes did in.
            let _ = learner.model().valid();
            learner.lr_step();
            learner.optimizer_step(accumulator.grads());
            assert_eq!(learner.model().state().unwrap().skipped_steps, 1);
            let found = statistics(&learner.model());
            let broken = [found[0][0], found[1][0]];
            assert_eq!(broken, [expected[0][0], expected[1][0]]);
            assert!(found.concat().iter().all(|x| x.is_finite()), "{found:?}");
        }
    });
}

#[test]
fn replicas_on_threads_of_their_own_get_their_own_statistics_back() {
    let device = Device::flex().autodiff();
    let config = GradScalerConfig::for_dtype(FloatDType::F16);
    let model = Normalized {
        norm: BatchNormConfig::new(2).init(&device),
        mlp: Mlp::new(&device),
    };
    let main = learner(model, &config);
    // With running states of its own, which clones would share.
    let copy = main.model().valid().train();
    let mut other = Learner::new(copy, SgdConfig::new().init(), 0.1);
    let statistics = |learner: &Learner<Amp<Normalized>>| {
        let norm = learner.model().model().valid().norm;
        [norm.running_mean.value(), norm.running_var.value()].map(|value| values(value)[0])
    };
    training::step(&mut other, &samples(4), &device);
    let expected = statistics(&other);
    assert_ne!(expected, statistics(&main));
    // One is in the middle of its step while the other takes a broken one.
    let _ = main.train_step(batch(&samples(4), &device));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut accumulator = GradientsAccumulator::new();
            for broken in [&[0][..], &[]] {
                let rows = samples_with_infinity(4, broken);
                let output = other.train_step(batch(&rows, &device));
                accumulator.accumulate(&other.model(), output.grads);
            }
            other.lr_step();
            other.optimizer_step(accumulator.grads());
        });
    });
    assert_eq!(other.model().state().unwrap().skipped_steps, 1);
    assert_eq!(statistics(&other), expected);
}

#[derive(Module, Debug)]
struct Wide {
    mlp: Mlp,
    factor: Param<Tensor<1>>,
}
steps!(Wide);

impl Wide {
    fn loss(&self, autocast: &Autocast, batch: Batch) -> Tensor<1> {
        let factor = self.factor.val().cast(DType::F32);
        self.mlp.train_step(autocast, batch).0 + factor.sum() * 3.0
    }
}

#[test]
fn an_f64_parameter_is_unscaled_clipped_and_stepped() {
    each_device(|target| {
        if !target.device.supports_dtype(FloatDType::F64) {
            return;
        }
        let device = target.device.clone().autodiff();
        let factor = Tensor::<1>::from_data([1.0, 1.0], (&device, DType::F64));
        let wide = |max_norm| {
            let model = Wide {
                mlp: Mlp::new(&device),
                factor: Param::from_tensor(factor.clone()),
            };
            let scaler = GradScalerConfig::new(LossScale::Static(8.0)).with_max_norm(max_norm);
            let mut learner = learner(model, &scaler);
            training::step(&mut learner, &samples(4), &device);
            assert_eq!(learner.model().monitor().error(), None);
            learner.model()
        };
        let plain = wide(None).model().factor.base();
        assert_eq!(plain.dtype(), DType::F64);
        // 1 - 0.1 · 3.
        assert!(
            values(plain)
                .iter()
                .all(|factor| (factor - 0.7).abs() < 1e-6)
        );

        let clipped = wide(Some(1.0));
        let norm = clipped.monitor().report().unwrap().grad_norm.unwrap();
        assert!(norm > 3.0 * 2f32.sqrt());
        let expected = 1.0 - 0.3 / norm;
        let found = values(clipped.model().factor.base());
        assert!(found.iter().all(|factor| (factor - expected).abs() < 1e-6));
    });
}
