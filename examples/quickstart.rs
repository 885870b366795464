//! Mixed precision in one file: a small convolution and attention network learns handwritten
//! digits in FP32 and then, from the same initial weights and over the same batches, with AMP.
//!
//! ```sh
//! cargo run --release --example quickstart
//! cargo run --release --example quickstart -- --dtype bf16
//! ```
//!
//! What AMP adds to a training loop are the lines marked 1 to 4. The 1,797 digits are part of the
//! binary; `--data` trains on a folder with MNIST instead. On a CPU half precision saves memory,
//! not time: flex computes F16 element by element in software.

mod support;

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use burn::module::Module;
use burn::nn::attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig, PaddingConfig2d};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::activation::relu;
use burn::tensor::{Device, FloatDType, Int, Tensor};
use burn_lean::amp::{AmpError, Autocast, GradScalerConfig, Memory, audit};
use clap::Parser;
use support::{Cell, ImageSet, Options, Table};

/// Train a small convolution and attention network in FP32 and with mixed precision.
#[derive(Debug, Parser)]
struct Cli {
    #[command(flatten)]
    options: Options,
    /// Folder with the four MNIST files; without it, the embedded 8×8 digits.
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
    /// Passes over the training images.
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..))]
    epochs: u32,
    /// Training images, at most.
    #[arg(long, default_value_t = 10_000, value_parser = support::at_least_one)]
    limit: usize,
}

fn main() -> ExitCode {
    support::init_tracing();
    support::exit(run(&Cli::parse()))
}

fn run(cli: &Cli) -> Result<(), Box<dyn Error>> {
    let device = cli.options.device()?;
    let mut images = ImageSet::load(cli.data.as_deref())?;
    images.train = images.train.take(cli.limit);

    let mut table = Table::new(
        format!(
            "{}: {} training and {} test images, {} epochs, seed {}",
            images.name,
            images.train.len(),
            images.test.len(),
            cli.epochs,
            cli.options.seed
        ),
        &[
            "dtype",
            "test accuracy [%]",
            "final loss scale",
            "skipped steps",
            "weights [bytes]",
            "activations [bytes]",
            "time [s]",
        ],
    );
    for dtype in [FloatDType::F32, cli.options.dtype()] {
        table.push(train(cli, dtype, &images, &device)?);
    }
    table.publish(cli.options.json.as_deref())?;
    Ok(())
}

/// An ordinary Burn model: nothing in it knows about mixed precision.
#[derive(Module, Debug)]
struct Network {
    stem: Conv2d,
    patches: Conv2d,
    norm: LayerNorm,
    attention: MultiHeadAttention,
    head: Linear,
}

/// Channels after the stem.
const CHANNELS: usize = 16;
/// Features of each position that attention sees.
const FEATURES: usize = 32;
/// Positions along each side of the image.
const GRID: usize = 4;

impl Network {
    fn new(side: usize, device: &Device) -> Self {
        let patch = side / GRID;
        Self {
            stem: Conv2dConfig::new([1, CHANNELS], [3, 3])
                .with_padding(PaddingConfig2d::Same)
                .init(device),
            patches: Conv2dConfig::new([CHANNELS, FEATURES], [2 * patch - 1, 2 * patch - 1])
                .with_stride([patch, patch])
                .with_padding(PaddingConfig2d::Explicit(
                    patch - 1,
                    patch - 1,
                    patch - 1,
                    patch - 1,
                ))
                .init(device),
            norm: LayerNormConfig::new(FEATURES).init(device),
            attention: MultiHeadAttentionConfig::new(FEATURES, 4)
                .with_dropout(0.0)
                .init(device),
            head: LinearConfig::new(GRID * GRID * FEATURES, 10).init(device),
        }
    }

    /// Images `[batch, 1, side, side]` to logits `[batch, 10]`.
    fn forward(&self, images: Tensor<4>) -> Tensor<2> {
        let x = relu(self.stem.forward(images));
        let x = relu(self.patches.forward(x));
        let x: Tensor<3> = x.flatten::<3>(2, 3).swap_dims(1, 2);
        let attended = self
            .attention
            .forward(MhaInput::self_attn(self.norm.forward(x.clone())));
        self.head.forward((x + attended.context).flatten(1, 2))
    }
}

const BATCH_SIZE: usize = 32;
const LEARNING_RATE: f64 = 3e-3;

/// Trains in `dtype` and returns the row of the table.
fn train(
    cli: &Cli,
    dtype: FloatDType,
    images: &ImageSet,
    device: &Device,
) -> Result<[Cell; 7], AmpError> {
    device.seed(cli.options.seed);
    let model = Network::new(images.train.side(), device);

    // 1. Prepare the model: its parameters become FP32 master weights.
    let (mut model, autocast) = cli.options.autocast(dtype).prepare(model)?;
    // 2. A scaler for the loss: dynamic for F16, and one that does nothing for BF16 and F32.
    let mut scaler = GradScalerConfig::for_dtype(autocast.dtype()).init()?;

    let mut optim = AdamWConfig::new().init();
    let cross_entropy = CrossEntropyLossConfig::new().init(device);
    let memory = memory(&model, &autocast, images.train.side())?;
    let batches = images.train.len().div_ceil(BATCH_SIZE);
    let bar = support::progress(cli.epochs as usize * batches, format!("{dtype:?}"));
    let start = Instant::now();

    for epoch in 0..u64::from(cli.epochs) {
        let order = cli.options.seed.wrapping_add(epoch);
        for batch in images.train.shuffled(order, BATCH_SIZE, device) {
            // 3. Run the forward pass in half precision; the loss is computed in F32, outside.
            let logits = autocast.forward(batch.images, |images| model.forward(images));
            let loss = cross_entropy.forward(logits, batch.labels);
            // 4. Scale the loss, go backward, and let the scaler step or skip.
            let grads = scaler.scale(loss)?.backward();
            let grads = GradientsParams::from_grads(grads, &model);
            model = scaler.step(&mut optim, LEARNING_RATE, model, grads)?;
            bar.inc(1);
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    bar.finish_and_clear();

    let model = model.valid();
    let accuracy = support::accuracy(&images.test, &device.clone().inner(), |images| {
        autocast.forward(images, |images| model.forward(images))
    });
    Ok([
        support::dtype_name(&autocast).into(),
        Cell::Number(accuracy, 2),
        match scaler.is_disabled() {
            true => Cell::Empty,
            false => Cell::Number(scaler.loss_scale().into(), 0),
        },
        Cell::Integer(scaler.state().skipped_steps),
        Cell::Integer((memory.master_weights + memory.cast_weights) as u64),
        Cell::Integer(memory.activations as u64),
        Cell::Number(seconds, 1),
    ])
}

/// Bytes of the weights and of what one batch keeps for the backward pass, by the audit.
fn memory(model: &Network, autocast: &Autocast, side: usize) -> Result<Memory, AmpError> {
    let audit = audit(model, autocast, |model, autocast, device| {
        let images = Tensor::zeros([BATCH_SIZE, 1, side, side], device);
        let labels = Tensor::<1, Int>::zeros([BATCH_SIZE], device);
        let logits = autocast.forward(images, |images| model.forward(images));
        CrossEntropyLossConfig::new()
            .init(device)
            .forward(logits, labels)
    })?;
    // No operation mixes dtypes, and the device can compute in all of them.
    audit.check()?;
    Ok(audit.memory)
}
