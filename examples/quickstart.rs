//! The whole of burn-lean in one file: a small convolution and attention network learns handwritten
//! digits in FP32 and then, from the same initial weights and over the same batches, with AMP. The
//! FP32 model is then fine-tuned with fake quantization and converted to INT8, and pruned with CHITA
//! and fine-tuned with its zeros held.
//!
//! ```sh
//! cargo run --release --example quickstart
//! cargo run --release --example quickstart -- --dtype f16
//! ```
//!
//! What AMP adds to a training loop are the lines marked 1 to 4, quantization those marked 5 to 8,
//! pruning those marked 9 to 11. `qat_finetune` and `prune_chita` go deeper. The 1,797 digits are
//! part of the binary; `--data` trains on a folder with MNIST instead. On a CPU half precision saves
//! memory, not time: flex widens BF16, the default there, to F32, and computes F16 element by element
//! in software. `--dtype f16` shows the loss scale at work.

mod support;

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use burn::module::Module;
use burn::nn::attention::{MultiHeadAttention, MultiHeadAttentionConfig};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig, PaddingConfig2d};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::activation::relu;
use burn::tensor::{Device, FloatDType, Int, Tensor};
use burn_lean::amp::{AmpError, Autocast, GradScalerConfig, Memory, audit};
use burn_lean::prune::{Budget, FisherConfig, PrunerConfig, SolverConfig, SparseRecord};
use burn_lean::quant::{
    ConvertConfig, MhaInput, QatConfig, Unsupported, advance, quantize_calls, save_safetensors,
};
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
    /// Training images, at most; at least 2.
    #[arg(long, default_value_t = 10_000, value_parser = at_least_two)]
    limit: usize,
}

/// Reads a number of training images that can be pruned with.
fn at_least_two(text: &str) -> Result<usize, String> {
    match support::at_least_one(text)? {
        1 => Err("must be at least 2: pruning learns from one and judges by another".into()),
        limit => Ok(limit),
    }
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
    let (row, model) = train(cli, FloatDType::F32, &images, &device)?;
    table.push(row);
    table.push(train(cli, cli.options.dtype(&device), &images, &device)?.0);
    table.publish(cli.options.json.as_deref())?;

    let mut table = Table::new(
        "The FP32 model, quantized and pruned",
        &["model", "test accuracy [%]", "file to ship [bytes]"],
    );
    let bytes = model.valid().into_record().into_bytes()?.len();
    let accuracy = accuracy(&model, &images, &device);
    table.push([
        "FP32".into(),
        Cell::Number(accuracy, 2),
        Cell::Integer(bytes as u64),
    ]);
    table.push(quantize(cli, model.clone(), &images, &device)?);
    table.push(prune(cli, model, &images, &device)?);
    table.publish(None)?;
    Ok(())
}

/// An ordinary Burn model: nothing in it knows about mixed precision, quantization or pruning.
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

// 5. The attribute lets the layers called below quantize what they are given. In a model that is
// not prepared for that, it changes nothing.
#[quantize_calls(crate = burn_lean::quant)]
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

/// Trains in `dtype` and returns the row of the table, and the model.
fn train(
    cli: &Cli,
    dtype: FloatDType,
    images: &ImageSet,
    device: &Device,
) -> Result<([Cell; 7], Network), AmpError> {
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

    let valid = model.valid();
    let accuracy = support::accuracy(&images.test, &device.clone().inner(), |images| {
        autocast.forward(images, |images| valid.forward(images))
    });
    let row = [
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
    ];
    // Without the casts: the FP32 master weights.
    Ok((row, model.materialize()))
}

/// Passes over the training images to fine-tune with.
const FINE_TUNING: u64 = 3;

/// A plain training loop at a tenth of the learning rate; `after_step` is where quantization has
/// its say.
fn fine_tune(
    cli: &Cli,
    mut model: Network,
    images: &ImageSet,
    device: &Device,
    after_step: impl Fn(Network) -> Network,
) -> Network {
    let mut optim = AdamWConfig::new().init();
    let cross_entropy = CrossEntropyLossConfig::new().init(device);
    for epoch in 0..FINE_TUNING {
        let order = cli.options.seed.wrapping_add(1000 + epoch);
        for batch in images.train.shuffled(order, BATCH_SIZE, device) {
            let loss = cross_entropy.forward(model.forward(batch.images), batch.labels);
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            model = after_step(optim.step(0.1 * LEARNING_RATE, model, grads));
        }
    }
    model
}

/// Fine-tunes with fake quantization, 8 bits for weights and activations, and converts.
fn quantize(
    cli: &Cli,
    model: Network,
    images: &ImageSet,
    device: &Device,
) -> Result<[Cell; 3], Box<dyn Error>> {
    // 6. Attach quantizers to the weights; they hold those of the activations, too.
    let model = QatConfig::new().prepare(model)?;
    // 7. Train, and tell the quantizers when a step is done.
    let model = fine_tune(cli, model, images, device, advance);
    // 8. Convert: the weights become integers, with the scales of the training; those that the
    // device cannot hold as integers stay as they are.
    let (model, _) = ConvertConfig::new()
        .with_unsupported(Unsupported::KeepFakeQuantized)
        .convert(model)?;
    // A file has the integers with as many bits as they have, whatever holds them on the device.
    let name = format!("quickstart-{}.safetensors", std::process::id());
    let file = std::env::temp_dir().join(name);
    let bytes = save_safetensors(&model, &file);
    std::fs::remove_file(&file).ok();
    Ok([
        "INT8 weights and activations".into(),
        Cell::Number(accuracy(&model, images, device), 2),
        Cell::Integer(bytes?),
    ])
}

/// Removes four of five weights and fine-tunes the others.
fn prune(
    cli: &Cli,
    model: Network,
    images: &ImageSet,
    device: &Device,
) -> Result<[Cell; 3], Box<dyn Error>> {
    let cross_entropy = CrossEntropyLossConfig::new().init(device);
    // 9. Choose the weights whose loss costs least, by the gradients of 256 images, or of half of
    // what there are; of the others some judge the ridge.
    let solver = SolverConfig::new(Budget::Sparsity(0.8));
    let fisher = FisherConfig::new(256.min(images.train.len() / 2));
    let pruned = PrunerConfig::new(solver, fisher).prune(
        model,
        |model, (images, labels): &(Tensor<4>, Tensor<1, Int>)| {
            cross_entropy.forward(model.forward(images.clone()), labels.clone())
        },
        |seed| {
            let batches = images.train.shuffled(seed, BATCH_SIZE, device);
            batches.map(|batch| (batch.images, batch.labels))
        },
    )?;
    // 10. Hold the zeros while the other weights are trained.
    let model = pruned.masks.attach(pruned.model)?;
    let model = fine_tune(cli, model, images, device, |model| model);
    // 11. Fold the masks in, and ship without the zeros.
    let model = model.valid().materialize();
    let bytes = SparseRecord::from_module(&model)?.to_bytes()?.len();
    Ok([
        "80 % of the weights pruned".into(),
        Cell::Number(accuracy(&model, images, device), 2),
        Cell::Integer(bytes as u64),
    ])
}

fn accuracy(model: &Network, images: &ImageSet, device: &Device) -> f64 {
    let model = model.valid();
    support::accuracy(&images.test, &device.clone().inner(), |images| {
        model.forward(images)
    })
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
