//! All three on one weight: a network is pruned, then fine-tuned in mixed precision with its zeros
//! held and its weights and activations fake-quantized, and converted to sparse INT8.
//!
//! ```sh
//! cargo run -p burn-lean --release --features train --example combined
//! cargo run -p burn-lean --release --features train --example combined -- \
//!     --dtype f16 --sparsity 0.9 --data path/to/mnist
//! ```
//!
//! Mask and quantizer say what a weight is worth in the forward pass; Burn holds one such meaning per
//! weight, so they go on together, as a chain. The forward pass is recorded, so that quantizers act on
//! activations, too, and each operation runs in the precision that it needs. The fine-tuning is shown
//! twice, as a plain loop and through Burn's Learner.

mod support;

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataset::InMemDataset;
use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, Int, Tensor};
use burn::train::{Learner, SupervisedTraining};
use burn_lean::amp::{Amp, AmpError, AmpInferenceStep, AmpTrainStep, Autocast, GradScalerConfig};
use burn_lean::prune::{Budget, FisherConfig, Masks, PrunerConfig, SolverConfig};
use burn_lean::quant::{ConvertConfig, QatConfig, QuantizedForward, Schedule, Unsupported};
use burn_lean::reparam::{ChainReparameterizer, attach};
use clap::Parser;
use support::{Batch, Cell, ImageSet, MlpNet, Options, ProgressRenderer, Table, ToBatch};

/// Prune a network, fine-tune it in mixed precision with fake quantization, and convert it.
#[derive(Debug, Parser)]
#[command(allow_negative_numbers = true)]
struct Cli {
    #[command(flatten)]
    options: Options,
    /// Folder with the four MNIST files; without it, the embedded 8×8 digits.
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
    /// Fraction of the weights to prune.
    #[arg(long, default_value_t = 0.8, value_parser = support::fraction)]
    sparsity: f64,
    /// Passes over the training images before pruning, in FP32.
    #[arg(long, default_value_t = 15, value_parser = support::at_least_one)]
    epochs: usize,
    /// Passes over the training images after it.
    #[arg(long, default_value_t = 6, value_parser = support::at_least_one)]
    fine_tuning: usize,
    /// Training images, at most; at least 10.
    #[arg(long, default_value_t = 10_000, value_parser = support::at_least_ten)]
    limit: usize,
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
    if images.train.len() < 10 {
        let found = images.train.len();
        return Err(
            format!("{found} training images are too few: pruning needs at least 10").into(),
        );
    }

    let model = dense(cli, &images, &device);
    let mut table = Table::new(
        format!(
            "{}: {} training and {} test images, seed {}",
            images.name,
            images.train.len(),
            images.test.len(),
            cli.options.seed
        ),
        &["model", "test accuracy [%]", "zeros among the weights [%]"],
    );
    table.push(row("FP32, dense", &model, &images, &device)?);
    let (model, masks) = prune(cli, model, &images, &device)?;
    table.push(row("FP32, pruned", &model, &images, &device)?);

    let (prepared, autocast) = prepare(cli, model, &masks, &images, &device)?;
    let dtype = support::dtype_name(&autocast);
    let model = plain_loop(cli, prepared.clone(), autocast.clone(), &images, &device)?;
    let name = format!("pruned, INT8, {dtype} plain loop");
    table.push(row(&name, &convert(model)?, &images, &device)?);
    let model = learner(cli, prepared, autocast, &images, &device)?;
    let name = format!("pruned, INT8, {dtype} Learner");
    table.push(row(&name, &convert(model)?, &images, &device)?);
    table.publish(cli.options.json.as_deref())?;
    Ok(())
}

/// The model: nothing in it knows about masks, quantizers or casts.
#[derive(Module, Debug)]
struct Classifier {
    network: MlpNet,
}

impl Classifier {
    fn loss(&self, autocast: &Autocast, batch: Batch) -> Result<Tensor<1>, AmpError> {
        autocast.run(
            self,
            (batch.images, batch.labels),
            |model, (images, labels)| {
                let logits = model.network.forward(images);
                let cross_entropy = CrossEntropyLossConfig::new().init(&logits.device());
                cross_entropy.forward(logits, labels)
            },
        )
    }
}

/// Trains in FP32.
fn dense(cli: &Cli, images: &ImageSet, device: &Device) -> Classifier {
    device.seed(cli.options.seed);
    let mut model = Classifier {
        network: MlpNet::new(images.train.side(), device),
    };
    let cross_entropy = CrossEntropyLossConfig::new().init(device);
    let mut optim = AdamWConfig::new().init();
    for epoch in 0..cli.epochs as u64 {
        let order = cli.options.seed.wrapping_add(epoch);
        for batch in images.train.shuffled(order, BATCH_SIZE, device) {
            let logits = model.network.forward(batch.images);
            let loss = cross_entropy.forward(logits, batch.labels);
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            model = optim.step(LEARNING_RATE, model, grads);
        }
    }
    model
}

/// Chooses the weights to keep; the model that comes back has the zeros, the masks say where.
fn prune(
    cli: &Cli,
    model: Classifier,
    images: &ImageSet,
    device: &Device,
) -> Result<(Classifier, Masks), Box<dyn Error>> {
    let cross_entropy = CrossEntropyLossConfig::new().init(device);
    let solver = SolverConfig::new(Budget::Sparsity(cli.sparsity));
    let fisher = FisherConfig::new(256.min(images.train.len() / 2));
    let pruned = PrunerConfig::new(solver, fisher).prune(
        model,
        |model, (images, labels): &(Tensor<4>, Tensor<1, Int>)| {
            cross_entropy.forward(model.network.forward(images.clone()), labels.clone())
        },
        |seed| {
            let batches = images.train.shuffled(seed, BATCH_SIZE, device);
            batches.map(|batch| (batch.images, batch.labels))
        },
    )?;
    Ok((pruned.model, pruned.masks))
}

/// One chain per weight: mask, then quantizer.
fn prepare(
    cli: &Cli,
    model: Classifier,
    masks: &Masks,
    images: &ImageSet,
    device: &Device,
) -> Result<(Classifier, Autocast), Box<dyn Error>> {
    // Ranges are observed in the first epoch, for 50 steps at most; then they are quantized with.
    let epoch = images.train.len().div_ceil(BATCH_SIZE) as u64;
    let quant = QatConfig::new().with_schedule(Schedule::new().with_quantize_from(epoch.min(50)));
    let mask_and_quantize = ChainReparameterizer::new(
        masks.reparameterizer(&model)?,
        quant.reparameterizer(&model)?,
    );
    let dtype = cli.options.dtype(device);
    let autocast = cli.options.autocast(dtype).init(device)?;
    let prepared = attach(model, mask_and_quantize).map_err(|rejected| rejected.into_error())?;
    Ok((prepared, autocast))
}

fn plain_loop(
    cli: &Cli,
    mut model: Classifier,
    autocast: Autocast,
    images: &ImageSet,
    device: &Device,
) -> Result<Classifier, Box<dyn Error>> {
    let mut scaler = GradScalerConfig::for_dtype(autocast.dtype()).init()?;
    let mut optim = AdamWConfig::new().init();
    for epoch in 0..cli.fine_tuning as u64 {
        let order = cli.options.seed.wrapping_add(1000 + epoch);
        for batch in images.train.shuffled(order, BATCH_SIZE, device) {
            let loss = scaler.scale(model.loss(&autocast, batch)?)?;
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            model = scaler.step(&mut optim, 0.1 * LEARNING_RATE, model, grads)?;
        }
    }
    Ok(model)
}

impl AmpTrainStep for Classifier {
    type Input = Batch;
    type Output = ();

    fn train_step(&self, autocast: &Autocast, batch: Batch) -> (Tensor<1>, ()) {
        let loss = self.loss(autocast, batch);
        (loss.expect("the plain loop has run the same pass"), ())
    }
}

impl AmpInferenceStep for Classifier {
    type Input = Batch;
    type Output = ();

    fn inference_step(&self, _autocast: &Autocast, _batch: Batch) {}
}

fn learner(
    cli: &Cli,
    model: Classifier,
    autocast: Autocast,
    images: &ImageSet,
    device: &Device,
) -> Result<Classifier, Box<dyn Error>> {
    let scaler = GradScalerConfig::for_dtype(autocast.dtype());
    let amp =
        Amp::from_prepared(model, autocast, &scaler).map_err(|rejected| rejected.into_error())?;
    let monitor = amp.monitor();
    let loader = |images: &support::Images| {
        let side = images.side();
        DataLoaderBuilder::new(ToBatch { side })
            .batch_size(BATCH_SIZE)
            .shuffle(cli.options.seed)
            .set_device(device.clone())
            .build(InMemDataset::new(images.items()))
    };
    let logs = tempfile::tempdir()?;
    let (train, test) = (loader(&images.train), loader(&images.test));
    let result = SupervisedTraining::new(logs.path(), train, test)
        .with_interrupter(monitor.interrupter())
        .with_application_logger(None)
        .renderer(Box::new(ProgressRenderer::new("Learner".into())))
        .num_epochs(cli.fine_tuning)
        .launch(Learner::new(
            amp,
            AdamWConfig::new().init(),
            0.1 * LEARNING_RATE,
        ));
    if let Some(error) = monitor.error() {
        return Err(error.into());
    }
    match result.error {
        Some(error) => Err(error.to_string().into()),
        None => Ok(result.model.into_model()),
    }
}

/// INT8 weights with the scales of the training; the codes of pruned weights are those of 0.
fn convert(model: Classifier) -> Result<Classifier, Box<dyn Error>> {
    let config = ConvertConfig::new().with_unsupported(Unsupported::KeepFakeQuantized);
    let converted = config.convert(model);
    let (model, _report) = converted.map_err(|rejected| rejected.into_error())?;
    Ok(model)
}

/// Accuracy in F32, with the quantizers if there are any, and zeros.
fn row(
    name: &str,
    model: &Classifier,
    images: &ImageSet,
    device: &Device,
) -> Result<[Cell; 3], Box<dyn Error>> {
    let model = model.valid();
    let accuracy = support::accuracy(&images.test, &device.clone().inner(), |images| {
        QuantizedForward::new()
            .run(&model, images, |model, images| {
                model.network.forward(images)
            })
            .expect("what was trained can be evaluated")
    });
    let zeros = model.network.zeros();
    Ok([
        name.into(),
        Cell::Number(accuracy, 2),
        Cell::Number(100.0 * zeros, 1),
    ])
}
