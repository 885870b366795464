//! What has to happen after each step: quantizers advance, masks follow a schedule.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::module::{Module, ModuleDisplay};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::activation::relu;
use burn::tensor::{Device, FloatDType, Tensor};
use burn::train::{
    ExecutionStrategy, InferenceStep, Learner, MultiDeviceOptim, SupervisedTraining, TrainOutput,
    TrainStep, TrainingStrategy,
};
use burn_lean::prune::{LayerKind, Layout, Masks};
use burn_lean::quant::{
    ForwardQ, Learned, QatConfig, QuantizedForward, Schedule, WeightConfig, advance, calibrate,
    module::Phase, quantizers,
};
use burn_lean::reparam::{ChainReparameterizer, join_copies};
use burn_lean_amp::{
    AfterStep, Amp, AmpInferenceStep, AmpTrainStep, Autocast, AutocastConfig, Fallback,
    GradScalerConfig, LossScale,
};

use crate::devices::{on_tracked, values, with_numbers};
use crate::support::{Batch, Recorder, Row, batch, bits, loader, samples};
use crate::training::step as take_step;

/// Two linear layers with quantized inputs, in mixed precision and without.
#[derive(Module, Debug)]
struct Net {
    first: Linear,
    second: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        let linear = |from, to| LinearConfig::new(from, to).with_bias(false).init(device);
        let net = Self {
            first: linear(2, 8),
            second: linear(8, 1),
        };
        with_numbers(net, 3)
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.second.forward_q(relu(self.first.forward_q(x)))
    }
}

impl AmpTrainStep for Net {
    type Input = Batch;
    type Output = ();

    fn train_step(&self, autocast: &Autocast, batch: Batch) -> (Tensor<1>, ()) {
        let y = autocast.forward(batch.x, |x| self.forward(x));
        ((y - batch.y).square().mean(), ())
    }
}

impl TrainStep for Net {
    type Input = Batch;
    type Output = ();

    fn step(&self, batch: Batch) -> TrainOutput<()> {
        let loss = (self.forward(batch.x) - batch.y).square().mean();
        TrainOutput::new(self, loss.backward(), ())
    }
}

/// Nothing is validated here.
macro_rules! without_inference {
    ($($net:ty),*) => {$(
        impl AmpInferenceStep for $net {
            type Input = Batch;
            type Output = ();

            fn inference_step(&self, _autocast: &Autocast, _batch: Batch) {}
        }

        impl InferenceStep for $net {
            type Input = Batch;
            type Output = ();

            fn step(&self, _batch: Batch) {}
        }
    )*};
}

without_inference!(Net, Normed, Tied);

/// The same net with plain calls: its forward pass is run with the quantizers that it carries.
#[derive(Module, Debug)]
struct Unedited {
    net: Net,
    #[module(skip)]
    quantized: QuantizedForward,
}

impl Unedited {
    fn new(device: &Device) -> Self {
        Self {
            net: quant().prepare(Net::new(device)).unwrap(),
            quantized: QuantizedForward::new(),
        }
    }
}

impl TrainStep for Unedited {
    type Input = Batch;
    type Output = ();

    fn step(&self, batch: Batch) -> TrainOutput<()> {
        let plain = |net: &Net, (x, y): (Tensor<2>, Tensor<2>)| {
            let output: Tensor<2> = net.second.forward(relu(net.first.forward(x)));
            (output - y).square().mean()
        };
        let loss = self.quantized.run(&self.net, (batch.x, batch.y), plain);
        TrainOutput::new(self, loss.unwrap().backward(), ())
    }
}

impl InferenceStep for Unedited {
    type Input = Batch;
    type Output = ();

    fn step(&self, _batch: Batch) {}
}

fn quant() -> QatConfig {
    let schedule = Schedule::new()
        .with_quantize_from(3)
        .with_freeze_observers_at(Some(5));
    QatConfig::new().with_schedule(schedule)
}

fn autocast() -> AutocastConfig {
    AutocastConfig::new(FloatDType::F16).with_fallback(Fallback::Emulate)
}

/// At which nothing overflows by itself.
fn scaler() -> GradScalerConfig {
    GradScalerConfig::new(LossScale::Static(128.0))
}

/// QAT under AMP.
fn prepared(device: &Device) -> Amp<Net> {
    let net = Net::new(device);
    let quantizers = quant().reparameterizer(&net).unwrap();
    let (net, region) = autocast().prepare_with(net, quantizers).unwrap();
    Amp::from_prepared(net, region, &scaler()).unwrap()
}

/// The same with quantizers that are told to advance.
fn amp(device: &Device) -> Amp<Net> {
    prepared(device).with_after_step(advance)
}

/// In which step the quantizers are, and what they do there.
fn step_of<M: Module>(model: &M) -> (u64, Phase) {
    let all = quantizers(model);
    assert_eq!(all.len(), 4);
    let steps = all.iter().map(|located| {
        let quantizer = &located.quantizer;
        (quantizer.step(), quantizer.phase())
    });
    let mut steps: Vec<_> = steps.collect();
    steps.dedup();
    assert_eq!(steps.len(), 1, "{steps:?}");
    steps[0]
}

#[test]
fn quantizers_advance_under_amp_and_wait_for_skipped_steps() {
    on_tracked(|device| {
        let mut learner = Learner::new(amp(&device), SgdConfig::new().init(), 0.1);
        let mut taken = 0;
        for sound in [true, true, false, true, true, false, true, true] {
            let mut rows = samples(4);
            if !sound {
                // An infinite input would be clipped to the range of its quantizer.
                rows[0].1 = f32::INFINITY;
            }
            take_step(&mut learner, &rows, &device);
            taken += u64::from(sound);
            let expected = match taken {
                0..3 => Phase::Observe,
                3..5 => Phase::ObserveAndQuantize,
                _ => Phase::Quantize,
            };
            assert_eq!(step_of(learner.model().model()), (taken, expected));
        }
        assert_eq!(learner.model().monitor().error(), None);
        assert_eq!(taken, 6);
    });
}

#[test]
fn quantizers_count_the_steps_that_are_taken_by_themselves() {
    on_tracked(|device| {
        let mut learner = Learner::new(prepared(&device), SgdConfig::new().init(), 0.1);
        for (sound, taken) in [(true, 1), (false, 1), (true, 2)] {
            let mut rows = samples(4);
            if !sound {
                rows[0].1 = f32::INFINITY;
            }
            take_step(&mut learner, &rows, &device);
            assert_eq!(step_of(learner.model().model()).0, taken);
        }

        let mut net = quant().prepare(Net::new(&device)).unwrap();
        let autocast = Autocast::new(FloatDType::F16).with_fallback(Fallback::Emulate);
        let (mut scaler, mut optim) = (scaler().init().unwrap(), SgdConfig::new().init());
        let Batch { x, y } = batch(&samples(4), &device);
        let loss = |net: &Net| {
            autocast.run(net, (x.clone(), y.clone()), |net, (x, y)| {
                let output: Tensor<2> = net.second.forward(relu(net.first.forward(x)));
                (output - y).square().mean()
            })
        };
        for step in 1..=4 {
            let scaled = scaler.scale(loss(&net).unwrap()).unwrap();
            let grads = GradientsParams::from_grads(scaled.backward(), &net);
            net = scaler.step(&mut optim, 0.1, net, grads).unwrap();
            assert_eq!(step_of(&net).0, step);
            if step > 2 {
                net = advance(net);
                assert_eq!(step_of(&net).0, step, "counted once");
            }
        }
        // Two optimizers of one model take one step.
        let mut unscaled = || {
            let scaled = scaler.scale(loss(&net).unwrap()).unwrap();
            let grads = GradientsParams::from_grads(scaled.backward(), &net);
            scaler.unscale(&net, grads).unwrap()
        };
        for unscaled in [unscaled(), unscaled()] {
            net = scaler.apply(&mut optim, 0.1, net, unscaled).unwrap();
        }
        scaler.update().unwrap();
        assert_eq!(step_of(&net).0, 5);
    });
}

#[test]
fn the_learner_gives_the_numbers_of_the_plain_loop() {
    on_tracked(|device| {
        let mut learner = Learner::new(amp(&device), SgdConfig::new().init(), 0.1);
        let (mut model, region) = {
            let amp = amp(&device);
            (amp.model().clone(), amp.autocast())
        };
        let (mut scaler, mut optim) = (scaler().init().unwrap(), SgdConfig::new().init());
        for _ in 0..6 {
            take_step(&mut learner, &samples(4), &device);
            let (loss, ()) = model.train_step(&region, batch(&samples(4), &device));
            let grads = scaler.scale(loss).unwrap().backward();
            let grads = GradientsParams::from_grads(grads, &model);
            model = advance(scaler.step(&mut optim, 0.1, model, grads).unwrap());
        }
        assert_eq!(step_of(&model), (6, Phase::Quantize));
        assert_eq!(bits(learner.model().model()), bits(&model));
    });
}

#[test]
fn quantizers_advance_in_a_plain_learner() {
    on_tracked(|device| {
        let net = quant().prepare(Net::new(&device)).unwrap();
        let model = AfterStep::new(net.clone(), advance);
        let mut learner = Learner::new(model, SgdConfig::new().init(), 0.1);
        let mut expected = net;
        let mut optim = SgdConfig::new().init();
        for _ in 0..6 {
            take_step(&mut learner, &samples(4), &device);
            let output = TrainStep::step(&expected, batch(&samples(4), &device));
            expected = advance(optim.step(0.1, expected, output.grads));
        }
        assert_eq!(step_of(learner.model().model()), (6, Phase::Quantize));
        assert_eq!(bits(learner.model().model()), bits(&expected));
    });
}

#[test]
fn quantizers_of_an_unedited_model_advance_by_themselves() {
    on_tracked(|device| {
        let mut learner = Learner::new(Unedited::new(&device), SgdConfig::new().init(), 0.1);
        let mut expected = quant().prepare(Net::new(&device)).unwrap();
        let mut optim = SgdConfig::new().init();
        for step in 0..6 {
            assert_eq!(step_of(&learner.model().net).0, step);
            take_step(&mut learner, &samples(4), &device);
            let output = TrainStep::step(&expected, batch(&samples(4), &device));
            expected = advance(optim.step(0.1, expected, output.grads));
        }
        assert_eq!(step_of(&learner.model().net), (6, Phase::Quantize));
        let found = learner.model().net.clone();
        assert_eq!(bits(&found), bits(&expected));
    });
}

/// A silent training; validation does nothing.
pub(crate) fn training<M>(directory: &std::path::Path, rows: Vec<Row>) -> SupervisedTraining<M>
where
    M: TrainStep<Input = Batch, Output = ()>
        + InferenceStep<Input = Batch, Output = ()>
        + Module
        + ModuleDisplay
        + std::fmt::Display
        + 'static,
{
    SupervisedTraining::new(directory, loader(rows, 4), loader(samples(4), 4))
        .with_application_logger(None)
        .with_metric_logger(burn::train::logger::InMemoryMetricLogger::new())
        .renderer(Box::new(Recorder::default()))
}

#[test]
fn the_step_of_the_quantizers_is_in_the_checkpoint() {
    let device = Device::flex().autodiff();
    let amp = assert_resumes(|| amp(&device));
    assert_eq!(step_of(amp.model()), (8, Phase::Quantize));
}

/// Normalized inputs.
#[derive(Module, Debug)]
struct Normed {
    norm: BatchNorm,
    net: Net,
}

impl Normed {
    /// Prepared; statistics are frozen in the middle of an epoch of four steps.
    fn new(device: &Device) -> Self {
        let net = Self {
            norm: BatchNormConfig::new(2).init(device),
            net: Net::new(device),
        };
        let schedule = Schedule::new().with_freeze_batch_norm_at(Some(2));
        let config = QatConfig::new().with_schedule(schedule);
        config.prepare(net).unwrap()
    }
}

impl AmpTrainStep for Normed {
    type Input = Batch;
    type Output = ();

    fn train_step(&self, autocast: &Autocast, batch: Batch) -> (Tensor<1>, ()) {
        let x = self.norm.forward(batch.x);
        let y = autocast.forward(x, |x| self.net.forward(x));
        ((y - batch.y).square().mean(), ())
    }
}

impl TrainStep for Normed {
    type Input = Batch;
    type Output = ();

    fn step(&self, batch: Batch) -> TrainOutput<()> {
        let y = self.net.forward(self.norm.forward(batch.x));
        let loss = (y - batch.y).square().mean();
        TrainOutput::new(self, loss.backward(), ())
    }
}

fn assert_resumes<M>(model: impl Fn() -> M) -> M
where
    M: TrainStep<Input = Batch, Output = ()>
        + InferenceStep<Input = Batch, Output = ()>
        + Module
        + ModuleDisplay
        + std::fmt::Display
        + 'static,
{
    let learner = || Learner::new(model(), SgdConfig::new().init(), 0.1);
    let whole = tempfile::tempdir().unwrap();
    let whole = training(whole.path(), samples(16))
        .num_epochs(2)
        .launch(learner());
    assert!(whole.error.is_none(), "{:?}", whole.error);

    let directory = tempfile::tempdir().unwrap();
    let train = || training(directory.path(), samples(16)).with_default_checkpointers();
    train().num_epochs(1).launch(learner());
    let resumed = train().num_epochs(2).checkpoint(1).launch(learner());
    assert_eq!(bits(&resumed.model), bits(&whole.model));
    whole.model
}

#[test]
fn statistics_that_a_schedule_froze_stay_frozen_in_a_resumed_training() {
    let device = Device::flex().autodiff();
    assert_resumes(|| AfterStep::new(Normed::new(&device), advance));
    let float = Autocast::new(FloatDType::F32);
    let scaler = GradScalerConfig::for_dtype(FloatDType::F32);
    assert_resumes(|| {
        let amp = Amp::from_prepared(Normed::new(&device), float.clone(), &scaler).unwrap();
        amp.with_after_step(advance)
    });
}

/// One layer in two places.
#[derive(Module, Debug)]
struct Tied {
    a: Linear,
    b: Linear,
}

impl Tied {
    fn new(device: &Device) -> Self {
        let layer = LinearConfig::new(2, 2).with_bias(false).init(device);
        let layer = with_numbers(layer, 5);
        Self {
            a: layer.clone(),
            b: layer,
        }
    }

    fn loss(&self, batch: Batch) -> Tensor<1> {
        let y = self.b.forward(self.a.forward(batch.x));
        (y.slice_dim(1, 0..1) - batch.y).square().mean()
    }
}

impl AmpTrainStep for Tied {
    type Input = Batch;
    type Output = ();

    fn train_step(&self, _autocast: &Autocast, batch: Batch) -> (Tensor<1>, ()) {
        (self.loss(batch), ())
    }
}

impl TrainStep for Tied {
    type Input = Batch;
    type Output = ();

    fn step(&self, batch: Batch) -> TrainOutput<()> {
        TrainOutput::new(self, self.loss(batch).backward(), ())
    }
}

#[test]
fn a_layer_in_two_places_gets_the_gradients_of_both() {
    on_tracked(|device| {
        let (sgd, scaler) = (
            SgdConfig::new(),
            GradScalerConfig::for_dtype(FloatDType::F32),
        );
        let float = Autocast::new(FloatDType::F32);
        let amp = Amp::from_prepared(Tied::new(&device), float, &scaler).unwrap();
        let mut in_amp = Learner::new(amp, sgd.init(), 0.1);
        let after_step = AfterStep::new(Tied::new(&device), |tied| tied);
        let mut plain = Learner::new(after_step, sgd.init(), 0.1);
        // As every training begins.
        in_amp.fork(&device);
        plain.fork(&device);
        let (mut expected, mut optim) = (Tied::new(&device), sgd.init());
        for _ in 0..3 {
            take_step(&mut in_amp, &samples(4), &device);
            take_step(&mut plain, &samples(4), &device);
            let output = TrainStep::step(&expected, batch(&samples(4), &device));
            expected = join_copies(optim.step(0.1, expected, output.grads));
        }
        assert_eq!(bits(in_amp.model().model()), bits(&expected));
        assert_eq!(bits(plain.model().model()), bits(&expected));
    });
}

#[test]
fn scales_of_weights_are_learned_on_several_devices() {
    let device = Device::flex().autodiff();
    let scales = |rows: usize| -> [Vec<f32>; 2] {
        let weight = WeightConfig::int(4).with_learned(Learned::Lsq);
        let config = QatConfig::new().with_activation(None).with_weight(weight);
        let net = config.prepare(Net::new(&device)).unwrap();
        let devices = vec![device.clone(), device.clone()];
        let strategy = ExecutionStrategy::multi(devices, MultiDeviceOptim::OptimMainDevice);
        let directory = tempfile::tempdir().unwrap();
        let learner = Learner::new(AfterStep::new(net, advance), SgdConfig::new().init(), 0.05);
        let result = training(directory.path(), samples(rows))
            .with_training_strategy(TrainingStrategy::Default(strategy))
            .launch(learner);
        assert!(result.error.is_none(), "{:?}", result.error);
        let net = result.model.into_model();
        let x = batch(&samples(4), &device.clone().inner()).x;
        let anew = calibrate(net.clone(), |net| drop(net.forward(x))).unwrap();
        [net, anew].map(|net| {
            let scale = quantizers(&net).into_iter().map(|located| {
                assert!(located.quantizer.is_learning(), "{}", located.path);
                values(located.quantizer.qparams().unwrap().scale)
            });
            scale.flatten().collect()
        })
    };
    // After the first step, of two batches, they begin from the weights; in the second they are trained.
    let [found, begun] = scales(8);
    assert_eq!(found, begun);
    let [found, begun] = scales(16);
    assert_ne!(found, begun);
}

#[test]
fn the_hook_runs_once_for_a_step_of_several_devices() {
    for place in [
        MultiDeviceOptim::OptimMainDevice,
        MultiDeviceOptim::OptimSharded,
    ] {
        let device = Device::flex().autodiff();
        let devices = vec![device.clone(), device.clone()];
        let train = |directory: &std::path::Path| {
            training(directory, samples(32)).with_training_strategy(TrainingStrategy::Default(
                ExecutionStrategy::multi(devices.clone(), place),
            ))
        };
        let calls = Arc::new(AtomicUsize::new(0));
        let counted = calls.clone();
        let amp = amp(&device).with_after_step(move |model| {
            counted.fetch_add(1, Ordering::Relaxed);
            advance(model)
        });
        let directory = tempfile::tempdir().unwrap();
        let learner = Learner::new(amp, SgdConfig::new().init(), 0.05);
        let result = train(directory.path()).launch(learner);
        assert!(result.error.is_none(), "{:?}", result.error);
        // Of 32 samples, 8 a step.
        assert_eq!(step_of(result.model.model()).0, 4);
        assert_eq!(calls.load(Ordering::Relaxed), 4);
    }
}

/// Prunes the first layer from the last weight on, a little more with each step.
fn masks(step: usize) -> Masks {
    let mut layout = Layout::new();
    layout.push("first.weight", [2, 8], LayerKind::Linear, 2.0);
    let support: Vec<usize> = (0..16 - 3 * step.min(4)).collect();
    Masks::from_support(&layout, &support).unwrap()
}

#[test]
fn masks_quantizers_and_casts_on_one_weight_follow_their_schedules() {
    on_tracked(|device| {
        let net = Net::new(&device);
        let first = ChainReparameterizer::new(
            masks(0).reparameterizer(&net).unwrap(),
            quant().reparameterizer(&net).unwrap(),
        );
        let (net, region) = autocast().prepare_with(net, first).unwrap();
        let mut steps = 0;
        let amp = Amp::from_prepared(net, region, &scaler()).unwrap();
        let amp = amp.with_after_step(move |model| {
            steps += 1;
            advance(masks(steps).replace(model).unwrap())
        });
        let mut learner = Learner::new(amp, SgdConfig::new().init(), 0.1);
        for step in 1..=6 {
            take_step(&mut learner, &samples(4), &device);
            let amp = learner.model();
            assert_eq!(amp.monitor().error(), None);
            assert_eq!(step_of(amp.model()).0, step as u64);
            let weight = values(amp.model().first.weight.val());
            let kept = 16 - 3 * step.min(4);
            assert!(
                weight[kept..].iter().all(|weight| *weight == 0.0),
                "{weight:?}"
            );
            assert!(
                weight[..kept]
                    .iter()
                    .filter(|weight| **weight != 0.0)
                    .count()
                    > kept / 2
            );
            assert_eq!(Masks::of(amp.model()).unwrap(), masks(step));
        }
    });
}
