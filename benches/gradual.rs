//! Gradual pruning with fine-tuning between the stages, the way pruning is deployed: magnitude, layer by
//! layer and CHITA with one budget of epochs, beside the dense network trained for as long.
//!
//! ```sh
//! cargo bench --features train --bench gradual                       # the embedded 8×8 digits
//! cargo bench --features train --bench gradual -- --data path/to/mnist \
//!     --checkpoint mlpnet_mnist.safetensors --sparsity 0.98,0.99 --dtype f32,bf16 --seeds 3
//! cargo bench --features train --bench gradual -- --data path/to/cifar10 --arch resnet20 \
//!     --checkpoint resnet20_cifar10.safetensors --distill
//! ```
//!
//! A run passes its sparsities one after the other; each has a row after its training. All methods see the
//! same images in the same order for as many epochs, and have BatchNorm statistics measured anew in every
//! stage and before a row. A tenth of the training images validates: what is chosen is chosen by that
//! column.

#[path = "gradual/options.rs"]
mod options;
#[path = "../examples/support/mod.rs"]
mod support;
#[path = "gradual/training.rs"]
mod training;

use std::cell::Cell;
use std::error::Error;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use burn::tensor::{Device, FloatDType, Int, Tensor};
use burn_lean::amp::Autocast;
use burn_lean::prune::{
    Budget, FisherConfig, GradualConfig, GradualPruner, Masks, PruneError, PrunerConfig,
    RunningStatistics, Selection, SolverConfig, SparsitySchedule, StageMethod,
    layerwise::SupportMethod,
};
use burn_lean::reparam::Rejected;
use clap::Parser;
use options::{Cli, MethodName};
use support::{Arch, Cell as Entry, Dtype, ImageSet, Images, MlpNet, ResNet20, Table};
use training::{Trained, Trainer};

/// Gradients of a stage of CHITA.
const SAMPLES: usize = 500;
/// Epochs after each stage to the first sparsity but the last.
const EPOCHS_BETWEEN: usize = 2;
/// Learning rate of SGD after each stage; half a cosine takes it down to a ten thousandth.
const RATE: f64 = 0.05;
const LAST_RATE: f64 = 1e-4 * RATE;

fn main() -> ExitCode {
    support::init_tracing();
    support::exit(run(&Cli::parse()))
}

fn run(cli: &Cli) -> Result<(), Box<dyn Error>> {
    if cli.test {
        return Ok(());
    }
    cli.check()?;
    let (images, validation) = cli.images()?;
    let device = cli.device.open()?;
    device.seed(cli.seed);
    let (side, autodiff) = (images.train.side(), device.clone().autodiff());
    match cli.arch {
        Arch::Mlpnet => Study::run(
            cli,
            images,
            validation,
            device,
            MlpNet::new(side, &autodiff),
        ),
        Arch::Resnet20 => Study::run(cli, images, validation, device, ResNet20::new(&autodiff)),
    }
}

/// One invocation: a trained network and what to do with it.
struct Study<'a, M> {
    cli: &'a Cli,
    images: ImageSet,
    validation: Images,
    /// Without autodiff.
    device: Device,
    dense: M,
    table: Table,
}

impl<M: Trained> Study<'_, M> {
    fn run(
        cli: &Cli,
        images: ImageSet,
        validation: Images,
        device: Device,
        model: M,
    ) -> Result<(), Box<dyn Error>> {
        let dense = match &cli.checkpoint {
            Some(path) => support::load(model, path)?,
            None => support::train(model, &M::logits, &images.train, 15, cli.seed),
        };
        let mut study = Study {
            cli,
            images,
            validation,
            device,
            table: Table::new("", &[]),
            dense,
        };
        study.dense = study.recalibrated(study.dense.clone())?;
        let [validated, tested] = study.accuracies(&study.dense);
        study.table = Table::new(
            format!(
                "{}: {} training, {} validation and {} test images; dense {validated:.2} and \
                 {tested:.2} %; {} stages from 0.5, {EPOCHS_BETWEEN} epochs between and {} after, rate {RATE}, {}, \
                 {}",
                study.images.name,
                study.images.train.len(),
                study.validation.len(),
                study.images.test.len(),
                cli.stages,
                cli.last_epochs,
                if cli.distill {
                    "taught"
                } else {
                    "labels alone"
                },
                if cli.learner { "Learner" } else { "plain loop" },
            ),
            &[
                "method",
                "dtype",
                "seed",
                "sparsity",
                "epochs",
                "validation",
                "test",
                "nonzeros",
                "pruning_seconds",
                "training_seconds",
            ],
        );
        println!("dense: {validated:.2} % of validation, {tested:.2} % of test images");
        let done = study.all();
        // What is finished is kept, whatever went wrong after it.
        study.table.publish(cli.json.as_deref())?;
        done
    }

    fn all(&mut self) -> Result<(), Box<dyn Error>> {
        for seed in support::seeds(self.cli.seed, self.cli.seeds) {
            for dtype in &self.cli.dtypes {
                for method in &self.cli.methods {
                    self.pass(*method, *dtype, seed)?;
                }
            }
        }
        Ok(())
    }

    /// One run through all sparsities.
    fn pass(&mut self, method: MethodName, dtype: Dtype, seed: u64) -> Result<(), Box<dyn Error>> {
        let Study { cli, dense, .. } = &*self;
        let trainer = Trainer {
            cli,
            images: &self.images.train,
            device: self.device.clone().autodiff(),
            autocast: Autocast::new(FloatDType::from(dtype)),
            teacher: cli.distill.then(|| dense.valid()),
            seed,
            done: Cell::new(0),
        };
        let mut model = dense.valid().train();
        let (mut pruning, mut training) = (Duration::ZERO, Duration::ZERO);
        let mut rows = Vec::new();
        for (at, sparsity) in cli.sparsities.iter().enumerate() {
            let start = Instant::now();
            let stages = if at == 0 { cli.stages } else { 1 };
            let trained = Cell::new(Duration::ZERO);
            let train = |model: M, epochs: usize, rate: &dyn Fn(f64) -> f64| {
                let start = Instant::now();
                let result = trainer.train(model, epochs, rate);
                trained.set(trained.get() + start.elapsed());
                result
            };
            model = self.step(method, model, (*sparsity, stages), seed, train)?;
            training += trained.get();
            pruning += start.elapsed() - trained.get();
            model = self.recalibrated(model)?;
            let [validated, tested] = self.accuracies(&model);
            let epochs = trainer.done.get();
            println!(
                "{method} {dtype:?} seed {seed}, {sparsity} after {epochs} epochs: {validated:.2} % of \
                 validation, {tested:.2} % of test images; {:.0} s of pruning, {:.0} s of training",
                pruning.as_secs_f64(),
                training.as_secs_f64(),
            );
            rows.push([
                method.to_string().into(),
                format!("{dtype:?}").to_lowercase().into(),
                Entry::Integer(seed),
                match method {
                    MethodName::Dense => Entry::Number(0.0, 2),
                    _ => Entry::Number(*sparsity, 2),
                },
                Entry::Integer(epochs as u64),
                Entry::Number(validated, 2),
                Entry::Number(tested, 2),
                Entry::Integer(self.nonzeros(&model)? as u64),
                Entry::Number(pruning.as_secs_f64(), 1),
                Entry::Number(training.as_secs_f64(), 1),
            ]);
        }
        rows.into_iter().for_each(|row| self.table.push(row));
        Ok(())
    }

    /// From one sparsity to the next, with the training after each stage.
    fn step(
        &self,
        method: MethodName,
        model: M,
        (sparsity, stages): (f64, usize),
        seed: u64,
        train: impl Fn(M, usize, &dyn Fn(f64) -> f64) -> Result<M, Rejected<M, PruneError>>,
    ) -> Result<M, Rejected<M, PruneError>> {
        let cli = self.cli;
        let schedule = SparsitySchedule::Polynomial { base: 0.5 };
        let budget = Budget::Sparsity(sparsity);
        let by_inputs = || {
            let mut gradual =
                GradualPruner::new(budget.clone(), stages, EPOCHS_BETWEEN, cli.last_epochs);
            gradual.method = match method {
                MethodName::Magnitude => StageMethod::Magnitude,
                _ => StageMethod::Layerwise,
            };
            if let MethodName::Fitted = method {
                gradual.pruner.support = Some(SupportMethod::Magnitude);
            }
            gradual.schedule = schedule;
            (gradual.learning_rate, gradual.last_learning_rate) = (RATE, LAST_RATE);
            gradual.seed = seed;
            gradual
        };
        match method {
            MethodName::Dense => {
                let mut model = model;
                for stage in 1..=stages {
                    let epochs = match stage == stages {
                        true => cli.last_epochs,
                        false => EPOCHS_BETWEEN,
                    };
                    let cosine = |t: f64| {
                        let half = 0.5 * (1.0 + (std::f64::consts::PI * t).cos());
                        LAST_RATE + half * (RATE - LAST_RATE)
                    };
                    model = train(model, epochs, &cosine)?;
                }
                Ok(model)
            }
            MethodName::Magnitude | MethodName::Fitted | MethodName::Layerwise => {
                let pruned = by_inputs().prune_by_stage(
                    model,
                    |model, images| model.logits(images),
                    |seed| self.batches(seed).map(|batch| batch.images),
                    |model, training| train(model, training.epochs, &|t| training.learning_rate(t)),
                )?;
                Ok(pruned.model)
            }
            MethodName::Chita => {
                let pruner =
                    PrunerConfig::new(SolverConfig::new(budget), FisherConfig::new(SAMPLES))
                        .with_stages(stages)
                        .with_schedule(schedule)
                        .with_running_statistics(RunningStatistics::Recomputed)
                        .with_seed(seed);
                let pruned = GradualConfig::new(pruner, EPOCHS_BETWEEN, cli.last_epochs)
                    .with_learning_rate(RATE)
                    .with_last_learning_rate(LAST_RATE)
                    .prune_by_stage(
                        model,
                        |model, (images, labels): &(Tensor<4>, Tensor<1, Int>)| {
                            support::cross_entropy(model.logits(images.clone()), labels.clone())
                        },
                        |seed| self.batches(seed).map(|batch| (batch.images, batch.labels)),
                        |model, training| {
                            train(model, training.epochs, &|t| training.learning_rate(t))
                        },
                    )?;
                Ok(pruned.model)
            }
        }
    }

    fn batches(&self, seed: u64) -> impl Iterator<Item = support::Batch> + '_ {
        self.images.train.endless(seed, 256, &self.device)
    }

    /// With BatchNorm statistics measured anew on training images.
    fn recalibrated(&self, model: M) -> Result<M, PruneError> {
        Ok(support::recalibrated(
            model,
            M::logits,
            &self.images.train,
            &self.device,
        )?)
    }

    /// Of validation and test images [%].
    fn accuracies(&self, model: &M) -> [f64; 2] {
        let model = model.valid();
        [&self.validation, &self.images.test]
            .map(|images| support::accuracy(images, &self.device, |images| model.logits(images)))
    }

    /// Prunable weights that are not zero.
    fn nonzeros(&self, model: &M) -> Result<usize, PruneError> {
        let selection = Selection::of(model, None)?;
        let paths = selection.layout().layers().iter();
        let group = burn::module::ParamGroup::from_paths(paths.map(|l| l.path.clone()).collect());
        Ok(Masks::from_zeros(model, &group)?.nonzeros())
    }
}
