//! What a stage is trained with: a plain loop, or Burn's Learner; mixed precision and a teacher in both.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use burn::data::dataloader::{DataLoader, DataLoaderIterator, Progress};
use burn::data::dataset::DatasetError;
use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::module::ModuleDisplay;
use burn::optim::decay::WeightDecayConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::{Device, Int, Tensor};
use burn::train::{Learner, SupervisedTraining};
use burn_lean::amp::{Amp, AmpError, AmpInferenceStep, AmpTrainStep, Autocast, GradScalerConfig};
use burn_lean::prune::PruneError;
use burn_lean::recipe::Distillation;
use burn_lean::reparam::Rejected;

use crate::options::Cli;
use crate::support::{self, Images, MlpNet, Network, ProgressRenderer, ResNet20};

/// T and the teacher's share of the loss.
const DISTILLATION: (f64, f64) = (4.0, 0.9);

/// Images, labels, and what the teacher says of the images.
pub(crate) type Taught = (Tensor<4>, Tensor<1, Int>, Option<Tensor<2>>);

/// A network that both loops train.
pub(crate) trait Trained:
    Network + ModuleDisplay + Sync + AmpTrainStep<Input = Taught> + AmpInferenceStep<Input = Taught>
{
}

fn loss<M: Network>(model: &M, autocast: &Autocast, batch: Taught) -> Result<Tensor<1>, AmpError> {
    autocast.run(model, batch, |model, (images, labels, taught)| {
        let logits = model.logits(images);
        let at_labels = support::cross_entropy(logits.clone(), labels);
        match taught {
            None => at_labels,
            Some(taught) => {
                let (temperature, share) = DISTILLATION;
                Distillation::new(temperature, share).loss(at_labels, logits, taught)
            }
        }
    })
}

macro_rules! trained {
    ($($network:ty),*) => {$(
        impl Trained for $network {}

        impl AmpTrainStep for $network {
            type Input = Taught;
            type Output = ();

            fn train_step(&self, autocast: &Autocast, batch: Taught) -> (Tensor<1>, ()) {
                (loss(self, autocast, batch).expect("the network can be recorded"), ())
            }
        }

        impl AmpInferenceStep for $network {
            type Input = Taught;
            type Output = ();

            fn inference_step(&self, _autocast: &Autocast, _batch: Taught) {}
        }
    )*};
}

trained!(MlpNet, ResNet20);

/// Trains the stages of one run.
pub(crate) struct Trainer<'a, M> {
    pub(crate) cli: &'a Cli,
    pub(crate) images: &'a Images,
    /// With autodiff.
    pub(crate) device: Device,
    pub(crate) autocast: Autocast,
    /// A copy of the dense network without autodiff.
    pub(crate) teacher: Option<M>,
    pub(crate) seed: u64,
    /// Epochs so far: the seeds of their orders go on over the stages.
    pub(crate) done: Cell<usize>,
}

impl<M: Trained> Trainer<'_, M> {
    /// So many epochs with a new optimizer; `rate` is the learning rate at a share of them.
    pub(crate) fn train(
        &self,
        model: M,
        epochs: usize,
        rate: impl Fn(f64) -> f64,
    ) -> Result<M, Rejected<M, PruneError>> {
        let loader = Loader {
            images: self.images.clone(),
            batch: self.cli.batch,
            teacher: self.teacher.clone(),
            device: self.device.clone(),
            seed: Arc::new(AtomicU64::new(1000 * self.seed + self.done.get() as u64)),
        };
        self.done.set(self.done.get() + epochs);
        match self.cli.learner {
            false => self.plain(model, &loader, epochs, rate),
            true => self.learner(model, loader, epochs, rate),
        }
    }

    fn plain(
        &self,
        mut model: M,
        loader: &Loader<M>,
        epochs: usize,
        rate: impl Fn(f64) -> f64,
    ) -> Result<M, Rejected<M, PruneError>> {
        let scaler = GradScalerConfig::for_dtype(self.autocast.dtype()).init();
        let mut scaler = match scaler {
            Ok(scaler) => scaler,
            Err(error) => return Err(PruneError::training(model, error)),
        };
        let mut optimizer = optimizer();
        let steps = epochs * self.steps();
        let bar = support::progress(steps, "training");
        for _ in 0..epochs {
            for batch in loader.batches() {
                let scaled =
                    loss(&model, &self.autocast, batch).and_then(|loss| scaler.scale(loss));
                let gradients = match scaled {
                    Ok(loss) => GradientsParams::from_grads(loss.backward(), &model),
                    Err(error) => return Err(PruneError::training(model, error)),
                };
                let rate = rate(bar.position() as f64 / steps as f64);
                let stepped = scaler.step(&mut optimizer, rate, model, gradients);
                model = stepped.map_err(|rejected| {
                    let (model, error) = rejected.into_parts();
                    PruneError::training(model, error)
                })?;
                bar.inc(1);
            }
        }
        bar.finish_and_clear();
        Ok(model)
    }

    fn learner(
        &self,
        model: M,
        loader: Loader<M>,
        epochs: usize,
        rate: impl Fn(f64) -> f64,
    ) -> Result<M, Rejected<M, PruneError>> {
        let scaler = GradScalerConfig::for_dtype(self.autocast.dtype());
        let amp = match Amp::from_prepared(model, self.autocast.clone(), &scaler) {
            Ok(amp) => amp,
            Err(rejected) => {
                let (model, error) = rejected.into_parts();
                return Err(PruneError::training(model, error));
            }
        };
        let cosine = CosineAnnealingLrSchedulerConfig::new(rate(0.0), epochs * self.steps())
            .with_min_lr(rate(1.0));
        let (monitor, schedule, logs) = match (amp.lr_scheduler(cosine), tempfile::tempdir()) {
            (Ok(schedule), Ok(logs)) => (amp.monitor(), schedule, logs),
            (Err(error), _) => return Err(PruneError::training(amp.into_model(), error)),
            (_, Err(error)) => return Err(PruneError::training(amp.into_model(), error)),
        };
        // The study looks at validation images by itself, at the end of a run.
        let validation = Loader {
            images: self.images.take(1),
            // Its epochs are not those of the training.
            seed: Arc::default(),
            ..loader.clone()
        };
        let result = SupervisedTraining::new(logs.path(), Arc::new(loader), Arc::new(validation))
            .with_interrupter(monitor.interrupter())
            .with_application_logger(None)
            .renderer(Box::new(ProgressRenderer::new("Learner".into())))
            .num_epochs(epochs)
            .launch(Learner::new(amp, optimizer(), schedule));
        // It comes back as it is deployed.
        let model = result.model.into_model().train();
        match (monitor.error(), result.error, result.interrupted) {
            (None, None, None) => Ok(model),
            (Some(error), ..) => Err(PruneError::training(model, error)),
            (_, Some(error), _) => Err(PruneError::training(model, error)),
            (.., Some(stop)) => {
                let reason = stop.reason.unwrap_or_else(|| "it was stopped".into());
                Err(PruneError::training(model, reason))
            }
        }
    }

    fn steps(&self) -> usize {
        self.images.len().div_ceil(self.cli.batch)
    }
}

fn optimizer() -> ModuleOptimizer {
    let momentum = MomentumConfig::new().with_dampening(0.0).with_momentum(0.9);
    SgdConfig::new()
        .with_momentum(Some(momentum))
        .with_weight_decay(Some(WeightDecayConfig::new(1e-4)))
        .init()
}

/// Epochs of images, each in an order of its own, with what the teacher says of them.
#[derive(Clone)]
struct Loader<M> {
    images: Images,
    batch: usize,
    teacher: Option<M>,
    device: Device,
    /// Of the next epoch.
    seed: Arc<AtomicU64>,
}

impl<M: Trained> Loader<M> {
    fn batches(&self) -> impl Iterator<Item = Taught> + '_ {
        let seed = self.seed.fetch_add(1, Ordering::Relaxed);
        let batches = self.images.shuffled(seed, self.batch, &self.device);
        batches.map(|batch| {
            let taught = self.teacher.as_ref().map(|teacher| {
                let images = batch.images.clone().without_autodiff();
                Tensor::from_inner(teacher.logits(images))
            });
            (batch.images, batch.labels, taught)
        })
    }
}

impl<M: Trained> DataLoader<Taught> for Loader<M> {
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<Taught> + 'a> {
        Box::new(Batches {
            batches: self.batches(),
            done: 0,
            all: self.images.len(),
        })
    }

    fn num_items(&self) -> usize {
        self.images.len()
    }

    fn to_device(&self, device: &Device) -> Arc<dyn DataLoader<Taught>> {
        Arc::new(Self {
            device: device.clone(),
            ..self.clone()
        })
    }

    fn slice(&self, _start: usize, _end: usize) -> Arc<dyn DataLoader<Taught>> {
        unreachable!("one device trains")
    }
}

struct Batches<I> {
    batches: I,
    done: usize,
    all: usize,
}

impl<I: Iterator<Item = Taught>> Iterator for Batches<I> {
    type Item = Result<Taught, DatasetError>;

    fn next(&mut self) -> Option<Self::Item> {
        let batch = self.batches.next()?;
        self.done += batch.1.dims()[0];
        Some(Ok(batch))
    }
}

impl<I: Iterator<Item = Taught>> DataLoaderIterator<Taught> for Batches<I> {
    fn progress(&self) -> Progress {
        Progress::new(self.done, self.all, Some("images".into()))
    }
}
