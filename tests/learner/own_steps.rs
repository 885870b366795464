//! Models with Burn's own steps, as they are.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::{Module, ModuleDisplay, Param};
use burn::nn::{BatchNorm, BatchNormConfig, Dropout, DropoutConfig};
use burn::optim::{GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::activation::relu;
use burn::tensor::{Device, FloatDType, Tensor, TensorData};
use burn::train::{InferenceStep, Learner, RegressionOutput, TrainOutput, TrainStep};
use burn_lean_amp::{
    Amp, AmpError, AmpInferenceStep, AmpTrainStep, Autocast, AutocastConfig, Fallback,
    GradScalerConfig, OwnSteps,
};
use burn_lean_quant::{
    FakeQuantizeConfig, NumberFormat, QatConfig, QuantizedForward, Scheme, WeightConfig,
};
use burn_lean_reparam::each_float;

use crate::devices::{on_tracked, seeded};
use crate::support::{Mlp, batch, bits, samples};

type Pair = (Tensor<2>, Tensor<2>);

/// What Burn's own examples look like: one forward pass with its loss, in both steps.
#[derive(Module, Debug)]
struct Net {
    mlp: Mlp,
    norm: BatchNorm,
    dropout: Dropout,
    /// Of a penalty that the training alone has.
    penalized: Param<Tensor<1>>,
    /// What the loss is multiplied by in training.
    #[module(skip)]
    weight: f64,
    #[module(skip)]
    penalty: f64,
    /// Where the first weights are drawn to in training.
    #[module(skip)]
    start: Option<Vec<f32>>,
    /// Bound of all weights after a step.
    #[module(skip)]
    bound: f64,
    /// How often the step of the training ran.
    #[module(skip)]
    trained: Arc<AtomicUsize>,
}

impl Net {
    fn new(dropout: f64, device: &Device) -> Self {
        Self {
            mlp: Mlp::new(device),
            norm: BatchNormConfig::new(3).init(device),
            dropout: DropoutConfig::new(dropout).init(),
            penalized: Param::from_tensor(Tensor::ones([1], device)),
            weight: 1.0,
            penalty: 0.0,
            start: None,
            bound: f64::INFINITY,
            trained: Arc::default(),
        }
    }

    fn output(&self, (x, y): Pair) -> RegressionOutput {
        let h = self.norm.forward(relu(self.mlp.first.forward(x)));
        let output = self.mlp.second.forward(self.dropout.forward(h));
        let loss = (output.clone() - y.clone()).square().mean();
        RegressionOutput::new(loss, output, y)
    }
}

impl TrainStep for Net {
    type Input = Pair;
    type Output = RegressionOutput;

    fn step(&self, batch: Pair) -> TrainOutput<RegressionOutput> {
        self.trained.fetch_add(1, Ordering::Relaxed);
        let item = self.output(batch);
        let penalty = self.penalized.val() * self.penalty;
        let mut loss = item.loss.clone() * self.weight + penalty;
        if let Some(start) = &self.start {
            let weight = self.mlp.first.weight.val();
            let start = TensorData::new(start.clone(), weight.shape());
            let start = Tensor::from_data(start, &weight.device());
            loss = loss + (weight - start).square().sum();
        }
        TrainOutput::new(self, loss.backward(), item)
    }

    fn optimize(
        self,
        optim: &mut ModuleOptimizer,
        lr: ModuleLearningRate,
        grads: GradientsParams,
    ) -> Self {
        let mut net = optim.step(lr, self, grads);
        let bound = net.bound;
        net.mlp.first.weight = net
            .mlp
            .first
            .weight
            .map(|weight| weight.clamp(-bound, bound).detach().require_grad());
        net
    }
}

impl InferenceStep for Net {
    type Input = Pair;
    type Output = RegressionOutput;

    fn step(&self, batch: Pair) -> RegressionOutput {
        self.output(batch)
    }
}

/// The same by hand.
#[derive(Module, Debug)]
struct ByHand {
    net: Net,
}

impl AmpTrainStep for ByHand {
    type Input = Pair;
    type Output = RegressionOutput;

    fn train_step(&self, autocast: &Autocast, batch: Pair) -> (Tensor<1>, RegressionOutput) {
        let output = autocast.run(&self.net, batch, Net::output).unwrap();
        (output.loss.clone(), output)
    }
}

impl AmpInferenceStep for ByHand {
    type Input = Pair;
    type Output = RegressionOutput;

    fn inference_step(&self, _autocast: &Autocast, batch: Pair) -> RegressionOutput {
        self.net.output(batch)
    }
}

fn learner<M>(model: M) -> Learner<Amp<M>>
where
    M: Module
        + ModuleDisplay
        + AmpTrainStep<Input = Pair, Output = RegressionOutput>
        + AmpInferenceStep<Input = Pair, Output = RegressionOutput>
        + 'static,
{
    let autocast = AutocastConfig::new(FloatDType::F16).with_fallback(Fallback::Emulate);
    let scaler = GradScalerConfig::for_dtype(FloatDType::F16);
    let amp = Amp::new(model, &autocast, &scaler).unwrap();
    Learner::new(amp, SgdConfig::new().init(), 0.05)
}

/// The losses of so many steps.
fn train<M>(learner: &mut Learner<Amp<M>>, steps: usize, device: &Device) -> Vec<f32>
where
    M: Module
        + ModuleDisplay
        + AmpTrainStep<Input = Pair, Output = RegressionOutput>
        + AmpInferenceStep<Input = Pair, Output = RegressionOutput>
        + 'static,
{
    let mut losses = Vec::new();
    for _ in 0..steps {
        let batch = batch(&samples(8), device);
        let step = learner.train_step((batch.x, batch.y));
        learner.lr_step();
        learner.optimizer_step(step.grads);
        losses.push(step.item.loss.into_scalar::<f32>());
    }
    losses
}

/// Running statistics, too: the comparison moves none of them.
#[test]
fn they_train_as_a_step_by_hand_to_the_bit() {
    on_tracked(|device| {
        let mut own = learner(OwnSteps::new(Net::new(0.0, &device)));
        let mut by_hand = learner(ByHand {
            net: Net::new(0.0, &device),
        });
        let losses = train(&mut own, 6, &device);
        assert_eq!(losses, train(&mut by_hand, 6, &device));
        assert!(losses[5] < losses[0], "{losses:?}");
        let (own, by_hand) = (own.model(), by_hand.model());
        let own = own.model().model();
        assert_eq!(bits(own), bits(&by_hand.model().net));
        // Once per step, of values that are not 0.
        each_float(own, |at, float| {
            if at.path() == "norm.running_mean" {
                assert!(float.values().iter().any(|mean| *mean != 0.0));
            }
        });
    });
}

/// Both steps draw the same numbers where they are compared.
#[test]
fn dropout_is_no_difference() {
    let device = Device::flex().autodiff();
    let _alone = seeded(&device, 3);
    let mut learner = learner(OwnSteps::new(Net::new(0.3, &device)));
    train(&mut learner, 3, &device);
    assert_eq!(learner.model().monitor().error(), None);
    assert_eq!(learner.model().state().unwrap().steps, 3);
}

/// Activations, too, which a plain call leaves float.
#[test]
fn a_model_in_quantization_aware_training_is_validated_as_it_is_quantized() {
    on_tracked(|device| {
        let config = QatConfig::new()
            .with_weight(WeightConfig::int(4))
            .with_activation(Some(FakeQuantizeConfig::new(Scheme::affine(
                NumberFormat::uint(2),
            ))));
        let net = config.prepare(Net::new(0.0, &device)).unwrap();
        let autocast = Autocast::new(FloatDType::F16).with_fallback(Fallback::Emulate);
        let scaler = GradScalerConfig::for_dtype(FloatDType::F16);
        let amp = Amp::from_prepared(OwnSteps::new(net), autocast, &scaler).unwrap();
        let mut learner = Learner::new(amp, SgdConfig::new().init(), 0.05);
        train(&mut learner, 8, &device);
        let amp = learner.model().valid();
        let batch = batch(&samples(8), &device.inner());
        let pair = (batch.x, batch.y);
        let shown = InferenceStep::step(&amp, pair.clone()).output.into_data();
        let net = amp.model().model();
        let quantized = QuantizedForward::new().run(net, pair.clone(), Net::output);
        assert_eq!(shown, quantized.unwrap().output.into_data());
        assert_ne!(shown, net.output(pair).output.into_data());
    });
}

/// It has no gradient before the first step.
#[test]
fn a_penalty_on_the_way_from_the_first_weights_is_found_in_the_second_step() {
    on_tracked(|device| {
        let mut net = Net::new(0.0, &device);
        let weight = net.mlp.first.weight.val();
        net.start = Some(weight.into_data().iter().collect());
        let mut learner = learner(OwnSteps::new(net));
        train(&mut learner, 1, &device);
        assert_eq!(learner.model().monitor().error(), None);
        let before = bits(learner.model().model());
        train(&mut learner, 2, &device);
        let error = learner.model().monitor().error();
        let Some(AmpError::StepsDiffer { path, .. }) = error else {
            panic!("{error:?}")
        };
        assert_eq!(path, "mlp.first.weight");
        assert_eq!(bits(learner.model().model()), before);
    });
}

#[test]
fn steps_that_differ_are_refused_with_nothing_changed() {
    on_tracked(|device| {
        let mut net = Net::new(0.0, &device);
        net.weight = 2.0;
        let before = bits(&net);
        let mut learner = learner(OwnSteps::new(net));
        train(&mut learner, 2, &device);
        match learner.model().monitor().error() {
            Some(AmpError::StepsDiffer {
                path,
                training,
                inference,
            }) => {
                assert!(path.starts_with("mlp.first"), "{path}");
                assert!((training - 2.0 * inference).abs() < 1e-4 * training.abs());
            }
            other => panic!("{other:?}"),
        }
        let model = learner.model();
        assert_eq!(bits(model.model().model()), before);
    });
}

/// Burn's strategy of several devices has other threads in each epoch.
#[test]
fn steps_are_compared_as_seldom_in_threads_of_their_own() {
    let device = Device::flex().autodiff();
    let net = Net::new(0.0, &device);
    let compared = net.trained.clone();
    let steps = OwnSteps::new(net);
    for _ in 0..8 {
        let (steps, device) = (steps.clone(), device.clone());
        let epoch = move || {
            let autocast = Autocast::new(FloatDType::F32);
            for _ in 0..4 {
                let batch = batch(&samples(8), &device);
                let (loss, _) = steps.try_train_step(&autocast, (batch.x, batch.y));
                loss.unwrap();
            }
        };
        thread::spawn(epoch).join().unwrap();
    }
    // In passes 1, 2, 4, 8, 16 and 32.
    assert_eq!(compared.load(Ordering::Relaxed), 6);
}

/// However small the gradients are that differ, beside those of others.
#[test]
fn a_small_penalty_in_training_alone_is_a_difference() {
    let device = Device::flex().autodiff();
    let mut net = Net::new(0.0, &device);
    net.penalty = 1e-4;
    let mut learner = learner(OwnSteps::new(net));
    train(&mut learner, 1, &device);
    match learner.model().monitor().error() {
        Some(AmpError::StepsDiffer {
            path,
            training,
            inference,
        }) => assert_eq!(
            (path.as_str(), training, inference),
            ("penalized", 1e-4, 0.0)
        ),
        other => panic!("{other:?}"),
    }
}

#[test]
fn an_optimizer_step_of_its_own_is_taken() {
    let device = Device::flex().autodiff();
    let mut net = Net::new(0.0, &device);
    net.bound = 0.125;
    let mut learner = learner(OwnSteps::new(net));
    train(&mut learner, 1, &device);
    assert_eq!(learner.model().monitor().error(), None);
    let model = learner.model();
    let weight = model.model().model().mlp.first.weight.val();
    let weight: Vec<f32> = weight.into_data().iter::<f32>().collect();
    assert!(
        weight.iter().all(|weight| weight.abs() <= 0.125),
        "{weight:?}"
    );
}
