//! Quantization-aware training where bits hurt: ResNet20 on CIFAR-10, from a trained checkpoint.
//!
//! ```sh
//! cargo bench --bench qat -- --data path/to/cifar10 --checkpoint resnet20_cifar10.safetensors
//! ```
//!
//! Learned step sizes (LSQ, [Esser et al., 2020](https://arxiv.org/abs/1902.08153)) for weights, one per
//! channel, all levels of so many bits, and for the inputs of layers; the first and the last layer with 8 bits, as is usual. SGD with
//! momentum, the learning rate falls along half a cosine. Every row of training sees the same images in the
//! same order; `FP32, tuned` is trained for as long. With `--first N` all rows, PTQ too, start from the
//! checkpoint trained for N epochs in FP32, as one would do with a network that meets other images than its
//! own; with `--distill` trained rows learn from that network, too. `PTQ` quantizes after training, with
//! nothing chosen: BatchNorm folded, 512 training images. Settings are those of the literature: no image was
//! looked at to choose them.

#[path = "../examples/support/mod.rs"]
mod support;

use std::cell::RefCell;
use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use burn::module::Module;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::{Device, Tensor};
use burn_lean::quant::{
    FakeQuantizeConfig, Learned, NumberFormat, Override, PtqConfig, QatConfig, QuantError,
    QuantizedForward, Schedule, Scheme, WeightConfig, fold_for, module::learned_parameters,
};
use burn_lean::recipe::Distillation;
use clap::Parser;
use support::{Cell, CifarFiles, DeviceName, ImageSet, Images, Network, ResNet20, Table};

/// Learning rate at the start.
const RATE: f64 = 0.01;

/// Fake quantization of ResNet20, trained and not.
#[derive(Debug, Parser)]
struct Arguments {
    /// Folder with CIFAR-10's binary files.
    #[arg(long, value_name = "DIR", required_unless_present = "test")]
    data: Option<PathBuf>,
    /// ResNet20 with PyTorch's names.
    #[arg(
        long,
        value_name = "FILE.safetensors",
        required_unless_present = "test"
    )]
    checkpoint: Option<PathBuf>,
    /// Which files of CIFAR-10.
    #[arg(long, value_enum, default_value_t = CifarFiles::Standard)]
    cifar_files: CifarFiles,
    /// Bits of weights and of activations.
    #[arg(long, value_delimiter = ',', default_value = "8,4,3,2", value_parser = clap::value_parser!(u8).range(2..=8))]
    bits: Vec<u8>,
    /// Passes over the training images.
    #[arg(long, default_value_t = 10, value_parser = support::at_least_one)]
    epochs: usize,
    /// Passes in FP32 before that, for all rows; their order is that of `--seed`.
    #[arg(long, default_value_t = 0)]
    first: usize,
    /// Learn from the network in FP32 that training starts from, too: T = 4, nine tenths of the loss.
    #[arg(long)]
    distill: bool,
    /// Leave out the row of FP32 trained for as long, which is the same for all bits.
    #[arg(long)]
    without_fp32: bool,
    /// Images of a step.
    #[arg(long, default_value_t = 64, value_parser = support::at_least_one)]
    batch: usize,
    /// Training images, at most.
    #[arg(long, default_value_t = 20_000, value_parser = support::at_least_one)]
    limit: usize,
    /// Test images, at most.
    #[arg(long, value_parser = support::at_least_one)]
    test_limit: Option<usize>,
    /// Where to compute.
    #[arg(long, value_enum, default_value_t = DeviceName::Flex)]
    device: DeviceName,
    /// Seed of the order of the data.
    #[arg(long, default_value_t = 42)]
    seed: u64,
    /// Repeat with this many seeds, from `--seed` on.
    #[arg(long, default_value_t = 1, value_parser = support::at_least_one)]
    seeds: usize,
    /// Also write the rows to this file, as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Passed by cargo.
    #[arg(long, hide = true)]
    bench: bool,
    /// Passed by cargo: nothing is measured.
    #[arg(long, hide = true)]
    test: bool,
}

fn main() -> ExitCode {
    support::init_tracing();
    support::exit(run(&Arguments::parse()))
}

fn run(arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    let (Some(data), Some(checkpoint)) = (&arguments.data, &arguments.checkpoint) else {
        return Ok(());
    };
    let device = arguments.device.open()?;
    let images = support::read_cifar(data, arguments.cifar_files)?;
    let ImageSet { name, train, test } = images.normalized_as_cifar10();
    let train = Images::augmented(train.take(arguments.limit));
    let test = test.take(arguments.test_limit.unwrap_or(test.len()));
    let study = Study {
        arguments,
        train,
        test,
        device: device.clone(),
    };
    let model = support::load(ResNet20::new(&device.autodiff()), checkpoint)?;
    // The statistics in the checkpoint are those of another normalization.
    let model = support::recalibrated(model, ResNet20::forward, &study.train, &study.device)?;

    let mut table = Table::new(
        format!(
            "{name}: {} training images, {} epochs; {} test images",
            study.train.len(),
            arguments.epochs,
            study.test.len()
        ),
        &["model", "seed", "accuracy", "seconds"],
    );
    let mut row = |name: &str, seed: Option<u64>, accuracy: f64, start: Instant| {
        table.push([
            name.into(),
            Cell::optional_integer(seed),
            Cell::Number(accuracy, 2),
            Cell::Number(start.elapsed().as_secs_f64(), 0),
        ]);
        println!("{name}: {accuracy:.2} %");
    };
    let start = Instant::now();
    row("FP32", None, study.accuracy(&model)?, start);
    let model = match arguments.first {
        0 => model,
        first => {
            let start = Instant::now();
            let model = study.train(model, None, arguments.seed, first, "FP32 first")?;
            row("FP32 first", None, study.accuracy(&model)?, start);
            model
        }
    };
    let teacher = arguments.distill.then(|| model.valid());
    for bits in &arguments.bits {
        let start = Instant::now();
        let quantized = study.after_training(model.clone(), *bits)?;
        row(
            &format!("PTQ W{bits}A{bits}"),
            None,
            study.accuracy(&quantized)?,
            start,
        );
    }
    for seed in support::seeds(arguments.seed, arguments.seeds) {
        let train =
            |model, name: &str| study.train(model, teacher.as_ref(), seed, arguments.epochs, name);
        if !arguments.without_fp32 {
            let start = Instant::now();
            let tuned = train(own(&model), "FP32")?;
            row("FP32, tuned", Some(seed), study.accuracy(&tuned)?, start);
        }
        for bits in &arguments.bits {
            let start = Instant::now();
            // Eight steps collect ranges.
            let schedule = Schedule::new().with_quantize_from(8);
            let config = config(*bits, Learned::Lsq).with_schedule(schedule);
            let name = format!("QAT W{bits}A{bits}");
            let prepared = config.prepare(own(&model))?;
            let trained = train(prepared, &name)?;
            row(&name, Some(seed), study.accuracy(&trained)?, start);
        }
    }
    table.publish(arguments.json.as_deref())?;
    Ok(())
}

/// A copy with running statistics of its own.
fn own(model: &ResNet20) -> ResNet20 {
    model.valid().train()
}

fn config(bits: u8, learned: Learned) -> QatConfig {
    let of = |bits: u8| {
        let activation = Scheme::affine(NumberFormat::uint(bits));
        (
            WeightConfig::new()
                .with_format(NumberFormat::int(bits))
                .with_learned(learned),
            FakeQuantizeConfig::new(activation).with_learned(learned),
        )
    };
    let (weight, activation) = of(bits);
    let ends = ["conv1", "fc"].map(|path| {
        let (weight, activation) = of(8);
        Override::new(path.into())
            .with_weight(Some(weight))
            .with_activation(Some(activation))
    });
    QatConfig::new()
        .with_weight(weight)
        .with_activation(Some(activation))
        .with_overrides(ends.to_vec())
}

struct Study<'a> {
    arguments: &'a Arguments,
    train: Images,
    test: Images,
    /// Without autodiff.
    device: Device,
}

impl Study<'_> {
    fn accuracy(&self, model: &ResNet20) -> Result<f64, QuantError> {
        let model = model.valid();
        let quantized = QuantizedForward::new().cached();
        let failed = RefCell::new(None);
        let accuracy = support::accuracy(&self.test, &self.device, |images| {
            let classes = [images.dims()[0], 10];
            let logits = quantized.run(&model, images, ResNet20::logits);
            logits.unwrap_or_else(|error| {
                failed.replace(Some(error));
                Tensor::zeros(classes, &self.device)
            })
        });
        match failed.into_inner() {
            Some(error) => Err(error),
            None => Ok(accuracy),
        }
    }

    fn train(
        &self,
        mut model: ResNet20,
        teacher: Option<&ResNet20>,
        seed: u64,
        epochs: usize,
        name: &str,
    ) -> Result<ResNet20, QuantError> {
        let batch = self.arguments.batch;
        let device = model.devices().remove(0);
        let sgd = || {
            let momentum = MomentumConfig::new().with_dampening(0.0).with_momentum(0.9);
            SgdConfig::new().with_momentum(Some(momentum))
        };
        let decay = burn::optim::decay::WeightDecayConfig::new(1e-4);
        let optimizer: ModuleOptimizer = sgd().with_weight_decay(Some(decay)).init();
        let mut optimizer = optimizer.with_group(learned_parameters(), sgd().build(), None);
        let quantized = QuantizedForward::new();
        let steps = epochs * self.train.len().div_ceil(batch);
        let bar = support::progress(steps, format!("{name}, seed {seed}"));
        for epoch in 0..epochs as u64 {
            for batch in self
                .train
                .shuffled(seed.wrapping_add(epoch), batch, &device)
            {
                let taught = teacher.map(|teacher| teacher.logits(batch.images.clone().inner()));
                let logits = quantized.run(&model, batch.images, ResNet20::logits)?;
                let mut loss = support::cross_entropy(logits.clone(), batch.labels);
                if let Some(taught) = taught {
                    let taught = Tensor::from_inner(taught);
                    loss = Distillation::new(4.0, 0.9).loss(loss, logits, taught);
                }
                let gradients = GradientsParams::from_grads(loss.backward(), &model);
                let progress = bar.position() as f64 / steps as f64;
                let rate = 0.5 * RATE * (1.0 + (std::f64::consts::PI * progress).cos());
                model = optimizer.step(rate, model, gradients);
                bar.inc(1);
            }
        }
        bar.finish_and_clear();
        Ok(model)
    }

    fn after_training(&self, model: ResNet20, bits: u8) -> Result<ResNet20, Box<dyn Error>> {
        let some = self.train.take(512);
        let batches = || some.ordered(64, &self.device).map(|batch| batch.images);
        let sample = batches().next().ok_or("there is no training image")?;
        let folded = fold_for(model.valid(), sample, ResNet20::logits)?;
        let ptq = PtqConfig::new().with_quantize(config(bits, Learned::None));
        let (model, _) = ptq.quantize_for(folded, batches, ResNet20::logits)?;
        Ok(model)
    }
}
