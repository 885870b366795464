//! A training loop written by hand, with and without mixed precision, over several seeds.
//!
//! ```sh
//! cargo run -p burn-lean --release --example amp_custom_loop -- --data path/to/mnist
//! cargo run -p burn-lean --release --example amp_custom_loop -- --seeds 5      # the embedded 8×8 digits
//! cargo run -p burn-lean --release --example amp_custom_loop -- --accumulate 4 --max-norm 1
//! cargo run -p burn-lean --release --example amp_custom_loop -- --dtype f16    # with a loss scale
//! ```
//!
//! The loop is the same for both: autocast in F32 casts nothing, and a scaler without a loss scale
//! does nothing. Besides the four AMP lines of the quickstart it shows gradient accumulation and
//! the clipping of the global gradient norm, which both must see the right gradients: scaled ones
//! are accumulated, unscaled ones are clipped.

mod support;

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::{AdamWConfig, GradientsAccumulator, GradientsParams};
use burn::tensor::{Device, FloatDType};
use burn_lean::amp::{AmpError, GradScalerConfig};
use clap::Parser;
use support::{Cell, ConvNet, ImageSet, Options, Table};

/// Train a convolutional network in FP32 and with mixed precision, and compare test accuracies.
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
    /// Clip the global L2 norm of the gradients to this.
    #[arg(long, value_name = "NORM")]
    max_norm: Option<f32>,
    /// Repeat with this many seeds, from `--seed` on.
    #[arg(long, default_value_t = 1, value_parser = support::at_least_one)]
    seeds: usize,
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
    if cli.data.is_none() {
        println!("no --data: training on the embedded digits instead of MNIST");
    }
    let epochs = cli
        .epochs
        .unwrap_or(if cli.data.is_some() { 2 } else { 15 });

    let mut table = Table::new(
        format!(
            "{}: {} training and {} test images, {epochs} epochs, {} seeds from {}",
            images.name,
            images.train.len(),
            images.test.len(),
            cli.seeds,
            cli.options.seed,
        ),
        &[
            "dtype",
            "test accuracy [%]",
            "standard deviation",
            "standard error",
            "accuracies [%]",
            "skipped steps",
            "time [s]",
        ],
    );
    let mut dtypes = vec![FloatDType::F32, cli.options.dtype(&device)];
    dtypes.dedup();
    for dtype in dtypes {
        let mut results = Vec::with_capacity(cli.seeds);
        for offset in 0..cli.seeds as u64 {
            let seed = cli.options.seed.wrapping_add(offset);
            results.push(train(cli, dtype, seed, epochs, &images, &device)?);
        }
        table.push(summary(&results));
    }
    table.publish(cli.options.json.as_deref())?;
    Ok(())
}

/// What one run leaves.
struct Outcome {
    dtype: String,
    accuracy: f64,
    skipped_steps: u64,
    seconds: f64,
}

fn train(
    cli: &Cli,
    dtype: FloatDType,
    seed: u64,
    epochs: usize,
    images: &ImageSet,
    device: &Device,
) -> Result<Outcome, AmpError> {
    device.seed(seed);
    let mut model = ConvNet::new(images.train.side(), device);
    let autocast = cli.options.autocast(dtype).init(device)?;
    let mut scaler = GradScalerConfig::for_dtype(autocast.dtype())
        .with_max_norm(cli.max_norm)
        .init()?;
    let mut optim = AdamWConfig::new().init();
    let mut accumulator = GradientsAccumulator::new();
    let cross_entropy = CrossEntropyLossConfig::new().init(device);

    let batches = images.train.len().div_ceil(BATCH_SIZE);
    let bar = support::progress(epochs * batches, format!("{dtype:?} seed {seed}"));
    let start = Instant::now();
    for epoch in 0..epochs {
        let order = seed.wrapping_add(epoch as u64);
        for (index, batch) in images.train.shuffled(order, BATCH_SIZE, device).enumerate() {
            let batch = (batch.images, batch.labels);
            // At the end of an epoch fewer batches may be left.
            let first = index - index % cli.accumulate;
            let group = cli.accumulate.min(batches - first);
            let loss = autocast.run(&model, batch, |model, (images, labels)| {
                let loss = cross_entropy.forward(model.forward(images), labels);
                // The mean over the accumulated batches is the sum of their shares in it.
                loss.div_scalar(group as f64)
            })?;
            let grads = scaler.scale(loss)?.backward();
            let grads = GradientsParams::from_grads(grads, &model);
            // All of them carry the same loss scale: it changes in `step` only.
            accumulator.accumulate(&model, grads);
            if (index + 1) % cli.accumulate == 0 || index + 1 == batches {
                model = scaler.step(&mut optim, LEARNING_RATE, model, accumulator.grads())?;
            }
            bar.inc(1);
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    bar.finish_and_clear();

    let model = model.valid();
    let accuracy = support::accuracy(&images.test, &device.clone().inner(), |images| {
        // The weights are F32, and so is the model outside of `run`.
        model.forward(images)
    });
    Ok(Outcome {
        dtype: support::dtype_name(&autocast),
        accuracy,
        skipped_steps: scaler.state().skipped_steps,
        seconds,
    })
}

/// The row of one dtype: mean, standard deviation and standard error over the seeds.
fn summary(results: &[Outcome]) -> [Cell; 7] {
    let n = results.len() as f64;
    let mean = results.iter().map(|result| result.accuracy).sum::<f64>() / n;
    let squares = results
        .iter()
        .map(|result| (result.accuracy - mean).powi(2))
        .sum::<f64>();
    // Of a single seed nothing is known about the spread.
    let spread = |value: f64| match results.len() {
        1 => Cell::Empty,
        _ => Cell::Number(value, 2),
    };
    let deviation = (squares / (n - 1.0)).sqrt();
    let accuracies: Vec<String> = results
        .iter()
        .map(|result| format!("{:.2}", result.accuracy))
        .collect();
    [
        results[0].dtype.as_str().into(),
        Cell::Number(mean, 2),
        spread(deviation),
        spread(deviation / n.sqrt()),
        accuracies.join(" ").into(),
        Cell::Integer(results.iter().map(|result| result.skipped_steps).sum()),
        Cell::Number(results.iter().map(|result| result.seconds).sum(), 1),
    ]
}
