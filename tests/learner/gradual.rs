//! Gradual pruning whose stages are trained by the Learner, in mixed precision, from a teacher.

use std::sync::Arc;

use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::{Dataset, DatasetError};
use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::module::Module;
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn::train::{Interrupter, Learner, SupervisedTraining};
use burn_lean::prune::{
    Budget, FisherConfig, GradualConfig, GradualPruner, Masks, PruneError, PrunerConfig,
    RidgeChoice, SolverConfig, SparsitySchedule, StageMethod, run::StageTraining,
};
use burn_lean::recipe::Distillation;
use burn_lean::reparam::{Rejected, Training, attached};
use burn_lean_amp::{
    Amp, AmpInferenceStep, AmpTrainStep, Autocast, AutocastConfig, Fallback, GradScalerConfig,
};

use crate::devices::{Perceptron, on_tracked};
use crate::support::{Batch, Recorder, Row, Rows, batch, bits, loader, samples};

/// 2 × 16 + 16 × 2 = 64 weights; two logits.
fn net(device: &Device) -> Perceptron {
    Perceptron::new([2, 16, 2], 8, device)
}

/// Half of the loss is what the teacher, who is wrong about nothing, says of the inputs.
fn loss(net: &Perceptron, autocast: &Autocast, batch: Batch) -> Tensor<1> {
    let teacher = self::net(&batch.x.device().inner());
    let taught = Tensor::from_inner(teacher.forward(batch.x.clone().without_autodiff()));
    let inputs = (batch.x, batch.y, taught);
    let loss = autocast.run(net, inputs, |net, (x, y, taught)| {
        let logits = net.forward(x);
        let at_targets = (logits.clone().slice_dim(1, 0..1) - y).square().mean();
        Distillation::new(2.0, 0.5).loss(at_targets, logits, taught)
    });
    loss.unwrap()
}

impl AmpTrainStep for Perceptron {
    type Input = Batch;
    type Output = ();

    fn train_step(&self, autocast: &Autocast, batch: Batch) -> (Tensor<1>, ()) {
        (loss(self, autocast, batch), ())
    }
}

impl AmpInferenceStep for Perceptron {
    type Input = Batch;
    type Output = ();

    fn inference_step(&self, _autocast: &Autocast, _batch: Batch) {}
}

const ROWS: usize = 24;
const BATCH: usize = 8;

fn autocast(dtype: FloatDType, device: &Device) -> Autocast {
    let config = AutocastConfig::new(dtype).with_fallback(Fallback::Emulate);
    config.init(device).unwrap()
}

fn under_the_learner(
    net: Perceptron,
    training: &StageTraining,
    autocast: &Autocast,
) -> Result<Perceptron, Rejected<Perceptron, PruneError>> {
    let train = loader(samples(ROWS), BATCH);
    on_batches(net, training, autocast, train, |_| ())
}

/// The stage of the manual; `before` gets what the training can be stopped by.
fn on_batches(
    net: Perceptron,
    training: &StageTraining,
    autocast: &Autocast,
    train: Arc<dyn DataLoader<Batch>>,
    before: impl FnOnce(&Interrupter),
) -> Result<Perceptron, Rejected<Perceptron, PruneError>> {
    let scaler = GradScalerConfig::for_dtype(autocast.dtype());
    let trains = Training::of(&net);
    let amp = Amp::from_prepared(net, autocast.clone(), &scaler).unwrap();
    let steps = training.epochs * train.num_items().div_ceil(BATCH);
    let cosine = CosineAnnealingLrSchedulerConfig::new(training.learning_rate(0.0), steps)
        .with_min_lr(training.learning_rate(1.0));
    let (monitor, schedule) = (amp.monitor(), amp.lr_scheduler(cosine).unwrap());
    let folder = tempfile::tempdir().unwrap();
    let valid = loader(samples(BATCH), BATCH);
    before(&monitor.interrupter());
    let result = SupervisedTraining::new(folder.path(), train, valid)
        .with_application_logger(None)
        .renderer(Box::new(Recorder::default()))
        .with_interrupter(monitor.interrupter())
        .num_epochs(training.epochs)
        .launch(Learner::new(amp, SgdConfig::new().init(), schedule));
    let net = trains.restore(result.model.into_model());
    match (monitor.error(), result.error, result.interrupted) {
        (None, None, None) => Ok(net),
        (Some(error), ..) => Err(PruneError::training(net, error)),
        (_, Some(error), _) => Err(PruneError::training(net, error)),
        (.., Some(stop)) => {
            let reason = stop.reason.unwrap_or_else(|| "it was stopped".into());
            Err(PruneError::training(net, reason))
        }
    }
}

fn in_a_plain_loop(
    mut net: Perceptron,
    training: &StageTraining,
    autocast: &Autocast,
) -> Result<Perceptron, Rejected<Perceptron, PruneError>> {
    let mut scaler = GradScalerConfig::for_dtype(autocast.dtype())
        .init()
        .unwrap();
    let mut optim = SgdConfig::new().init();
    let device = net.devices().remove(0);
    let steps = training.epochs * ROWS / BATCH;
    for step in 0..steps {
        let rows = samples(ROWS);
        let rows = rows.chunks(BATCH).nth(step % (ROWS / BATCH)).unwrap();
        let loss = loss(&net, autocast, batch(rows, &device));
        let grads = scaler.scale(loss).unwrap().backward();
        let grads = GradientsParams::from_grads(grads, &net);
        let rate = training.learning_rate(step as f64 / steps as f64);
        net = scaler.step(&mut optim, rate, net, grads).unwrap();
    }
    Ok(net)
}

/// Half, then three quarters of 64.
fn prune(
    method: StageMethod,
    device: &Device,
    mut train: impl FnMut(
        Perceptron,
        &StageTraining,
    ) -> Result<Perceptron, Rejected<Perceptron, PruneError>>,
) -> Perceptron {
    let mut gradual = GradualPruner::new(Budget::Sparsity(0.75), 2, 1, 4);
    gradual.method = method;
    gradual.schedule = SparsitySchedule::Linear { base: 0.5 };
    let inner = device.clone().inner();
    let mut zeros = Vec::new();
    let pruned = gradual
        .prune_by_stage(
            net(device),
            |net, x: Tensor<2>| net.forward(x),
            |_seed| [batch(&samples(15), &inner).x, batch(&samples(9), &inner).x],
            |net, training| {
                let net = train(net, training)?;
                zeros.push(net.zeros());
                Ok(net)
            },
        )
        .unwrap();
    // A layer may be fitted with zeros among what it keeps.
    assert!(
        zeros.len() == 2 && zeros[0] >= 32 && zeros[1] >= 48,
        "{zeros:?}"
    );
    assert_eq!(pruned.masks.nonzeros(), 16);
    pruned.model
}

#[test]
fn the_learner_and_the_plain_loop_prune_gradually_to_the_same_bits() {
    on_tracked(|device| {
        for dtype in [FloatDType::F32, FloatDType::BF16] {
            let autocast = autocast(dtype, &device);
            for method in [StageMethod::Magnitude, StageMethod::Layerwise] {
                let learner = prune(method, &device, |net, training| {
                    under_the_learner(net, training, &autocast)
                });
                let plain = prune(method, &device, |net, training| {
                    in_a_plain_loop(net, training, &autocast)
                });
                assert_eq!(bits(&learner), bits(&plain), "{dtype:?} {method:?}");
                assert_eq!(learner.first.weight.val().dtype(), DType::F32);
                assert!(attached(&learner).is_empty());
                assert!(learner.first.weight.is_require_grad());
                let untrained = prune(method, &device, |net, _| Ok(net));
                let loss = |net: &Perceptron| {
                    let batch = batch(&samples(ROWS), &device);
                    let autocast = Autocast::new(FloatDType::F32);
                    loss(net, &autocast, batch).into_scalar::<f32>()
                };
                let (trained, untrained) = (loss(&learner), loss(&untrained));
                assert!(trained < untrained, "{trained} {untrained}");
            }
        }
    });
}

/// A file that is gone.
struct Unreadable;

impl Dataset<Row> for Unreadable {
    fn get(&self, _index: usize) -> Result<Row, DatasetError> {
        Err(DatasetError::new(std::io::Error::other("gone")))
    }

    fn len(&self) -> usize {
        ROWS
    }
}

/// Burn hands back the model of such a training as that of one that ended.
#[test]
fn a_stage_whose_training_broke_off_ends_the_pruning() {
    let device = Device::flex().autodiff();
    let autocast = autocast(FloatDType::F32, &device);
    for (is_stopped, reason) in [(false, "gone"), (true, "enough")] {
        let mut gradual = GradualPruner::new(Budget::Sparsity(0.75), 2, 1, 1);
        gradual.method = StageMethod::Magnitude;
        gradual.schedule = SparsitySchedule::Linear { base: 0.5 };
        let mut stages = 0;
        let pruned = gradual.prune_by_stage(
            net(&device),
            |net, x: Tensor<2>| net.forward(x),
            |_seed| [batch(&samples(15), &device.clone().inner()).x],
            |net, training| {
                stages += 1;
                match is_stopped {
                    true => {
                        let train = loader(samples(ROWS), BATCH);
                        on_batches(net, training, &autocast, train, |interrupter| {
                            interrupter.stop(Some("enough"));
                        })
                    }
                    false => {
                        let train = DataLoaderBuilder::new(Rows)
                            .batch_size(BATCH)
                            .build(Unreadable);
                        on_batches(net, training, &autocast, train, |_| ())
                    }
                }
            },
        );
        let rejected = pruned.unwrap_err();
        assert_matches!(rejected.error(), PruneError::Training { .. });
        assert_says!(rejected.error(), reason);
        assert_eq!(stages, 1);
        // What comes back trains on, with its masks.
        assert_eq!(Masks::of(rejected.value()).unwrap().nonzeros(), 32);
        assert!(rejected.value().first.weight.is_require_grad());
    }
}

#[test]
fn stages_from_gradients_are_trained_by_the_learner_with_their_masks() {
    on_tracked(|device| {
        let autocast = autocast(FloatDType::BF16, &device);
        let solver = SolverConfig::new(Budget::Sparsity(0.75));
        let pruner = PrunerConfig::new(solver, FisherConfig::new(ROWS))
            .with_stages(2)
            .with_schedule(SparsitySchedule::Linear { base: 0.5 })
            .with_ridge(RidgeChoice::Fixed(1e-2));
        let mut nonzeros = Vec::new();
        let inner = device.clone().inner();
        let pruned = GradualConfig::new(pruner, 1, 2)
            .prune_by_stage(
                net(&device),
                |net, (x, y): &(Tensor<2>, Tensor<2>)| {
                    let output = net.forward(x.clone()).slice_dim(1, 0..1);
                    (output - y.clone()).square().mean()
                },
                |_seed| {
                    let batch = batch(&samples(ROWS), &inner);
                    [(batch.x, batch.y)]
                },
                |net, training| {
                    let net = under_the_learner(net, training, &autocast)?;
                    nonzeros.push((training.epochs, Masks::of(&net).unwrap().nonzeros()));
                    Ok(net)
                },
            )
            .unwrap();
        assert_eq!(nonzeros, [(1, 32), (2, 16)]);
        assert!(pruned.model.zeros() >= 48);
        assert!(pruned.model.first.weight.is_require_grad());
    });
}
