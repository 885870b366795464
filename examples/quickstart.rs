//! The whole way in one file: a small convolution and attention network
//! (`support/attention_net.rs`, in terms of Burn alone) learns handwritten digits in
//! FP32 and, from the same initial weights and over the same batches, with automatic mixed precision;
//! nine of ten of its weights are pruned; and what is left is quantized to INT8 and INT4,
//! each fine-tuned for a moment.
//!
//! ```sh
//! cargo run -p burn-lean --release --example quickstart
//! cargo run -p burn-lean --release --example quickstart -- --dtype f16
//! ```
//!
//! Each line of the table is a file on the disk (`--out`), beside a picture of them; its latency is
//! that of one image in the engine for the CPU, on the threads of rayon's pool. Mixed precision is the
//! lines marked 1 to 3, pruning those marked 4 to 6, quantization those marked 7 to 9, inference those
//! marked 10.
//! `amp_custom_loop`, `prune_chita` and `qat_finetune` go deeper, each into one of them. The 1,797
//! digits are part of the binary; `--data` trains on a folder with MNIST instead. On a CPU half
//! precision saves memory, not time. `RUST_LOG=burn_lean_amp=info` before the command, with `--dtype f16`,
//! shows the loss scale at work.

mod support;

use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, FloatDType, Int, Tensor};
use burn_lean::amp::{Autocast, GradScalerConfig};
use burn_lean::deploy::{EngineConfig, Export};
use burn_lean::prune::{Budget, Masks, Pruner, SparseRecord};
use burn_lean::quant::{ConvertConfig, QatConfig, QuantizedForward, Unsupported, WeightConfig};
use burn_lean::reparam::{ChainReparameterizer, attach, each_plain_float};
use clap::Parser;
use support::{AttentionNet, Bar, Cell, ImageSet, Options, Table, median_ms, write_bars};

/// Train a small network, prune it and quantize it.
#[derive(Debug, Parser)]
#[command(allow_negative_numbers = true)]
struct Cli {
    #[command(flatten)]
    options: Options,
    /// Folder with the four MNIST files; without it, the embedded 8×8 digits.
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
    /// Folder for the models and the picture of them.
    #[arg(long, value_name = "DIR", default_value = "out/quickstart")]
    out: PathBuf,
    /// Passes over the training images.
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..))]
    epochs: u32,
    /// Training images, at most; at least 10.
    #[arg(long, default_value_t = 10_000, value_parser = support::at_least_ten)]
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
    if images.train.len() < 10 {
        let found = images.train.len();
        return Err(
            format!("{found} training images are too few: pruning needs at least 10").into(),
        );
    }
    fs::create_dir_all(&cli.out)
        .map_err(|error| format!("cannot make the folder {}: {error}", cli.out.display()))?;
    let mut way = Way {
        cli,
        images: &images,
        device: &device,
        table: Table::new(
            format!(
                "{}: {} training and {} test images, {} epochs, seed {}",
                images.name,
                images.train.len(),
                images.test.len(),
                cli.epochs,
                cli.options.seed
            ),
            &[
                "stage",
                "accuracy",
                "bytes",
                "nonzeros",
                "latency_ms",
                "seconds",
            ],
        ),
        bars: Vec::new(),
    };

    device.seed(cli.options.seed);
    let initial = AttentionNet::new(images.train.side(), &device);
    let epochs = u64::from(cli.epochs);
    way.stage("FP32", |way| {
        let model = initial.clone();
        let model = way.train(model, FloatDType::F32, epochs, LEARNING_RATE)?;
        way.dense(model)
    })?;
    let half = cli.options.dtype(&device);
    // Named after what runs: the dtype, or its fallback.
    let autocast = cli.options.autocast(half).init(&device)?;
    let name = format!("AMP {}", support::dtype_name(&autocast));
    let model = way.stage(&name, |way| {
        let model = way.train(initial, half, epochs, LEARNING_RATE)?;
        way.dense(model)
    })?;
    let mut masks = None;
    let model = way.stage("pruned 90 %", |way| {
        let (stage, found) = way.prune(model, half)?;
        masks = Some(found);
        Ok(stage)
    })?;
    let masks = masks.expect("the stage has run");
    for (name, weight) in [
        ("W8A8", WeightConfig::int(8)),
        ("W4A8", WeightConfig::int(4)),
    ] {
        way.stage(&format!("pruned 90 %, {name}"), |way| {
            way.quantize(model.clone(), &masks, weight, half)
        })?;
    }

    way.table.publish(cli.options.json.as_deref())?;
    let picture = cli.out.join("quickstart.svg");
    write_bars(&picture, "Bytes on disk", &way.bars)?;
    println!("models and picture: {}", cli.out.display());
    Ok(())
}

const BATCH_SIZE: usize = 32;
const LEARNING_RATE: f64 = 3e-3;
/// Passes over the training images to fine-tune with, and its learning rate.
const FINE_TUNING: u64 = 10;
const FINE_TUNING_RATE: f64 = 1e-3;

/// A model as it is after a stage, and the file that it is shipped in.
struct Stage {
    model: AttentionNet,
    file: Vec<u8>,
}

/// What the stages share, and what they have shown so far.
struct Way<'a> {
    cli: &'a Cli,
    images: &'a ImageSet,
    device: &'a Device,
    table: Table,
    bars: Vec<Bar>,
}

impl Way<'_> {
    /// Runs a stage, measures its model and writes its file; gives the model to go on with.
    fn stage(
        &mut self,
        name: &str,
        stage: impl FnOnce(&Self) -> Result<Stage, Box<dyn Error>>,
    ) -> Result<AttentionNet, Box<dyn Error>> {
        let start = Instant::now();
        let Stage { model, file } = stage(self)?;
        let seconds = start.elapsed().as_secs_f64();
        let path = self.cli.out.join(format!("{}.model", slug(name)));
        let bytes = write(&path, &file)?;
        let valid = model.valid();
        let device = self.device.clone().inner();
        // With the quantizers of the activations, where there are some.
        let quantized = QuantizedForward::new().cached();
        let accuracy = support::accuracy(&self.images.test, &device, |images| {
            let logits = quantized.run(&valid, images, |model, images| model.forward(images));
            logits.expect("it has been trained in the same way")
        });
        // 10. One image in the engine for the CPU, with integers where they are faster.
        let side = self.images.test.side();
        let image = Tensor::<4>::zeros([1, 1, side, side], &device);
        let export = Export::record(&valid, &image, |model, image| model.forward(image))?;
        let engine = EngineConfig::new().compile(export)?;
        engine.run(&image)?;
        let latency = median_ms(|| {
            engine.run(&image).expect("it has run before");
        });
        let mut nonzeros = 0;
        each_plain_float(&valid, |_, float| {
            let values = float.values();
            nonzeros += values.iter().filter(|value| **value != 0.0).count() as u64;
        });
        self.table.push([
            name.into(),
            Cell::Number(accuracy, 2),
            Cell::Integer(bytes),
            Cell::Integer(nonzeros),
            Cell::Number(latency, 3),
            Cell::Number(seconds, 1),
        ]);
        self.bars.push(Bar {
            name: name.into(),
            value: bytes as f64,
            label: format!("{:.1} kB, {accuracy:.2} %", bytes as f64 / 1000.0),
        });
        Ok(model)
    }

    /// A plain training loop in `dtype`.
    fn train(
        &self,
        mut model: AttentionNet,
        dtype: FloatDType,
        epochs: u64,
        learning_rate: f64,
    ) -> Result<AttentionNet, Box<dyn Error>> {
        // 1. Which precision, and a scaler for the loss: dynamic for F16, one that only looks at the
        // gradients for BF16, and none for F32. The model stays as it is.
        let autocast = Autocast::new(dtype).with_fallback(self.cli.options.fallback());
        let mut scaler = GradScalerConfig::for_dtype(dtype).init()?;
        let mut optim = AdamWConfig::new().init();
        let cross_entropy = CrossEntropyLossConfig::new().init(self.device);
        let batches = self.images.train.len().div_ceil(BATCH_SIZE);
        let bar = support::progress(epochs as usize * batches, format!("{dtype:?}"));
        for epoch in 0..epochs {
            for batch in self.shuffled(epoch) {
                // 2. Each operation runs in the precision that it needs.
                let loss = autocast.run(&model, batch, |model, (images, labels)| {
                    cross_entropy.forward(model.forward(images), labels)
                })?;
                // 3. Scale the loss, go backward, and let the scaler step or skip.
                let grads = scaler.scale(loss)?.backward();
                let grads = GradientsParams::from_grads(grads, &model);
                model = scaler.step(&mut optim, learning_rate, model, grads)?;
                bar.inc(1);
            }
        }
        bar.finish_and_clear();
        Ok(model)
    }

    /// Removes nine of ten weights and fine-tunes the others in mixed precision.
    fn prune(
        &self,
        model: AttentionNet,
        half: FloatDType,
    ) -> Result<(Stage, Masks), Box<dyn Error>> {
        // 4. Layer by layer, keep the weights, with new values, that reproduce what the dense layers
        // compute; no labels and no gradients. Some images judge the outcome.
        let images = &self.images.train;
        let size = BATCH_SIZE.min(images.len() / 2);
        let batches = images.shuffled(self.cli.options.seed, size, self.device);
        // All of one size.
        let batches = batches.take(images.len() / size);
        let pruned = Pruner::new(Budget::Sparsity(0.9)).prune(
            model,
            |model: &AttentionNet, images| model.forward(images),
            batches.map(|batch| batch.images),
        )?;
        // 5. Hold the zeros while the other weights are trained.
        let masks = pruned.masks;
        let model = masks.attach(pruned.model)?;
        let model = self.train(model, half, FINE_TUNING, FINE_TUNING_RATE)?;
        // 6. Fold the masks in, and ship without the zeros.
        let model = model.materialize();
        let file = SparseRecord::from_module(&model.valid())?.to_bytes()?;
        Ok((Stage { model, file }, masks))
    }

    /// Fine-tunes with fake quantization in mixed precision, the zeros held, and converts.
    fn quantize(
        &self,
        model: AttentionNet,
        masks: &Masks,
        weight: WeightConfig,
        half: FloatDType,
    ) -> Result<Stage, Box<dyn Error>> {
        // 7. Attach masks and quantizers to the weights, one after the other; those of the
        // activations live there, too.
        let chain = ChainReparameterizer::new(
            masks.reparameterizer(&model)?,
            QatConfig::new()
                .with_weight(weight)
                .reparameterizer(&model)?,
        );
        let model = attach(model, chain)?;
        // 8. Train as always: the scaler's step moves the quantizers' schedules on.
        let model = self.train(model, half, FINE_TUNING, FINE_TUNING_RATE)?;
        // 9. Convert: the weights become integers, with the scales of the training; those that the
        // device cannot hold as integers stay as they are. The file has the codes of what is kept.
        let (model, _) = ConvertConfig::new()
            .with_unsupported(Unsupported::KeepFakeQuantized)
            .convert(model)?;
        let file = SparseRecord::from_module(&model.valid())?.to_bytes()?;
        Ok(Stage { model, file })
    }

    /// The model and its record as Burn writes it.
    fn dense(&self, model: AttentionNet) -> Result<Stage, Box<dyn Error>> {
        let file = model.valid().into_record().into_bytes()?.to_vec();
        Ok(Stage { model, file })
    }

    /// The training images in the order of a seed, in batches.
    fn shuffled(&self, seed: u64) -> impl Iterator<Item = (Tensor<4>, Tensor<1, Int>)> {
        let seed = self.cli.options.seed.wrapping_add(seed);
        let batches = self.images.train.shuffled(seed, BATCH_SIZE, self.device);
        batches.map(|batch| (batch.images, batch.labels))
    }
}

/// Writes a file and says how many bytes the disk has of it.
fn write(path: &Path, file: &[u8]) -> Result<u64, String> {
    fs::write(path, file)
        .and_then(|()| fs::metadata(path))
        .map(|metadata| metadata.len())
        .map_err(|error| format!("cannot write {}: {error}", path.display()))
}

/// The name of a stage as that of a file.
fn slug(name: &str) -> String {
    let words = name.split(|letter: char| !letter.is_alphanumeric());
    let words: Vec<_> = words.filter(|word| !word.is_empty()).collect();
    words.join("-").to_lowercase()
}
