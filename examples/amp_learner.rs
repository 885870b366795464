//! Mixed precision under Burn's Learner: loss scaling, checkpoints, a schedule that waits for
//! skipped steps, and the loss scale among the metrics.
//!
//! ```sh
//! cargo run -p burn-lean --release --features train --example amp_learner
//! cargo run -p burn-lean --release --features train --example amp_learner -- \
//!     --data path/to/mnist --epochs 2
//! cargo run -p burn-lean --release --features train --example amp_learner -- --dtype f16   # a loss scale
//! ```
//!
//! The model implements Burn's `TrainStep` and `InferenceStep` and nothing else: `OwnSteps` runs the latter
//! in mixed precision, operation by operation, and has found in the first step that both have the same
//! gradients. `AmpTrainStep` is for a step of one's own, in a region for example. A run that is
//! interrupted goes on with `--resume EPOCH` from Burn's own checkpoints in `--out`, the loss scale
//! included: the run in `--dtype`, without the one in FP32. On a CPU it ends with the very weights of
//! an uninterrupted run: what Burn's checkpoints lack, the place in the order of the data, is made up
//! for by `ResumedDataLoader`.

mod support;

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataset::InMemDataset;
use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::AdamWConfig;
use burn::tensor::{Device, FloatDType};
use burn::train::metric::{AccuracyMetric, LossMetric};
use burn::train::{
    ClassificationOutput, InferenceStep, Learner, SupervisedTraining, TrainOutput, TrainStep,
};
use burn_lean::amp::{
    Amp, GradScalerConfig, LossScaleMetric, OwnSteps, ResumableOptimizer, ResumedDataLoader,
    SkippedStepsMetric,
};
use clap::Parser;
use support::{Batch, Cell, ConvNet, ImageSet, Images, Options, ProgressRenderer, Table, ToBatch};

/// Train a convolutional network through Burn's Learner, in FP32 and with mixed precision.
#[derive(Debug, Parser)]
#[command(allow_negative_numbers = true)]
struct Cli {
    #[command(flatten)]
    options: Options,
    /// Folder with the four MNIST files; without it, the embedded 8×8 digits.
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
    /// Passes over the training images [default: 2 for MNIST, 15 for the digits].
    #[arg(long, value_parser = support::at_least_one)]
    epochs: Option<usize>,
    /// Training images, at most.
    #[arg(long, default_value_t = 10_000, value_parser = support::at_least_one)]
    limit: usize,
    /// Batches whose gradients are added up for one step.
    #[arg(long, default_value_t = 1, value_parser = support::at_least_one)]
    accumulate: usize,
    /// Folder for Burn's logs and checkpoints.
    #[arg(long, default_value = "out/amp_learner", value_name = "DIR")]
    out: PathBuf,
    /// Go on after this epoch with the run in `--dtype`, from its checkpoint.
    #[arg(long, value_name = "EPOCH", value_parser = support::at_least_one)]
    resume: Option<usize>,
}

const BATCH_SIZE: usize = 32;
const LEARNING_RATE: f64 = 3e-3;

fn main() -> ExitCode {
    support::init_tracing();
    support::exit(run(&Cli::parse()))
}

fn run(cli: &Cli) -> Result<(), Box<dyn Error>> {
    let device = cli.options.device()?;
    let mut images = ImageSet::load(cli.data.as_deref())?;
    images.train = images.train.take(cli.limit);
    let epochs = cli
        .epochs
        .unwrap_or(if cli.data.is_some() { 2 } else { 15 });

    if let Some(epoch) = cli.resume.filter(|epoch| *epoch >= epochs) {
        return Err(format!(
            "`--resume {epoch}` leaves none of {epochs} epochs to train: raise `--epochs`"
        )
        .into());
    }
    let mut table = Table::new(
        format!(
            "{}: {} training and {} test images, {epochs} epochs, seed {}",
            images.name,
            images.train.len(),
            images.test.len(),
            cli.options.seed,
        ),
        &[
            "dtype",
            "test accuracy [%]",
            "final loss scale",
            "skipped steps",
            "time [s]",
        ],
    );
    std::fs::create_dir_all(&cli.out)
        .map_err(|error| format!("cannot create {}: {error}", cli.out.display()))?;
    // Each dtype has a folder of its own, so F32 runs once, and only one run is gone on with.
    let dtype = cli.options.dtype(&device);
    let runs = match dtype == FloatDType::F32 || cli.resume.is_some() {
        true => vec![dtype],
        false => vec![FloatDType::F32, dtype],
    };
    for dtype in runs {
        table.push(train(cli, dtype, epochs, &images, &device)?);
    }
    table.publish(cli.options.json.as_deref())?;
    Ok(())
}

burn_lean::amp::tensors!(Batch { images, labels });

/// The model as Burn's Learner takes it: nothing in it knows of mixed precision.
#[derive(Module, Debug)]
struct Classifier {
    network: ConvNet,
}

impl InferenceStep for Classifier {
    type Input = Batch;
    type Output = ClassificationOutput;

    fn step(&self, batch: Batch) -> ClassificationOutput {
        let logits = self.network.forward(batch.images);
        let loss = CrossEntropyLossConfig::new()
            .init(&logits.device())
            .forward(logits.clone(), batch.labels.clone());
        ClassificationOutput::new(loss, logits, batch.labels)
    }
}

impl TrainStep for Classifier {
    type Input = Batch;
    type Output = ClassificationOutput;

    fn step(&self, batch: Batch) -> TrainOutput<ClassificationOutput> {
        let item = InferenceStep::step(self, batch);
        TrainOutput::new(self, item.loss.backward(), item)
    }
}

/// Trains in `dtype` and returns the row of the table.
fn train(
    cli: &Cli,
    dtype: FloatDType,
    epochs: usize,
    images: &ImageSet,
    device: &Device,
) -> Result<[Cell; 5], Box<dyn Error>> {
    let directory = cli.out.join(format!("{dtype:?}").to_lowercase());
    if let Some(epoch) = cli.resume {
        support::learner_checkpoint::check(&directory, epoch)?;
    }
    device.seed(cli.options.seed);
    let model = Classifier {
        network: ConvNet::new(images.train.side(), device),
    };
    let amp = Amp::new(
        OwnSteps::new(model),
        &cli.options.autocast(dtype),
        &GradScalerConfig::for_dtype(dtype),
    )?;

    let loader = |images: &Images| {
        DataLoaderBuilder::new(ToBatch {
            side: images.side(),
        })
        .batch_size(BATCH_SIZE)
        .shuffle(cli.options.seed)
        .build(InMemDataset::new(images.items()))
    };
    let steps = epochs * images.train.len().div_ceil(BATCH_SIZE * cli.accumulate);
    let schedule = amp.lr_scheduler(CosineAnnealingLrSchedulerConfig::new(LEARNING_RATE, steps))?;
    let monitor = amp.monitor();
    let autocast = amp.autocast();

    println!("metrics and checkpoints: {}", directory.display());
    let train = ResumedDataLoader::wrap(loader(&images.train), cli.resume.unwrap_or(0));
    let mut training = SupervisedTraining::new(directory, train, loader(&images.test))
        .metrics((AccuracyMetric::new(), LossMetric::new()))
        .metric_train_numeric(LossScaleMetric::new(&monitor))
        .metric_train_numeric(SkippedStepsMetric::new(&monitor))
        .with_default_checkpointers()
        .with_interrupter(monitor.interrupter())
        .with_application_logger(None)
        .renderer(Box::new(ProgressRenderer::new(format!("{dtype:?}"))))
        .num_epochs(epochs);
    if cli.accumulate > 1 {
        training = training.grads_accumulation(cli.accumulate);
    }
    if let Some(epoch) = cli.resume {
        training = training.checkpoint(epoch);
    }

    let start = Instant::now();
    // Its state loads on the device of the model, also where there is no GPU for Burn's default.
    let optim = ResumableOptimizer::new(AdamWConfig::new().build(), device).init();
    let result = training.launch(Learner::new(amp, optim, schedule));
    let seconds = start.elapsed().as_secs_f64();
    if let Some(error) = monitor.error() {
        return Err(error.into());
    }
    if let Some(error) = result.error {
        return Err(error.to_string().into());
    }

    let amp = result.model;
    let state = amp.state()?;
    let test_device = device.clone().inner();
    let accuracy = support::accuracy(&images.test, &test_device, |images| {
        amp.model().model().network.forward(images)
    });
    Ok([
        support::dtype_name(&autocast).into(),
        Cell::Number(accuracy, 2),
        match dtype {
            FloatDType::F16 => Cell::Number(state.scale.into(), 0),
            _ => Cell::Empty,
        },
        Cell::Integer(state.skipped_steps),
        Cell::Number(seconds, 1),
    ])
}
