//! What low-bit weights and activations cost, and what fine-tuning gives back.
//!
//! ```sh
//! cargo run -p burn-lean --release --example qat_finetune
//! cargo run -p burn-lean --release --example qat_finetune -- --seeds 5
//! cargo run -p burn-lean --release --example qat_finetune -- --data path/to/mnist
//! ```
//!
//! A convolutional network is trained in FP32. For each precision (W4A8: weights of 4 bits,
//! activations of 8) it is then quantized after training (PTQ), and fine-tuned with fake
//! quantization (QAT); both are converted to integers, saved and compared with the fake-quantized
//! model. A row `FP32, tuned` trains on in FP32 for as long as QAT does.
//!
//! Of several ways of post-training quantization (full or least-squares ranges of the weights;
//! nearest, GPTQ or adaptive rounding) the one that is best on validation images counts: 10 % of
//! the training images, which no model is trained on. Of the settings of QAT the same holds, but
//! they were chosen once and are defaults here. Test images are only looked at for the table.
//!
//! The figure goes to `out/qat_finetune.svg`.

#[path = "qat_finetune/recipe.rs"]
mod recipe;
mod support;

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use burn::module::Module;
use burn::tensor::{Device, Tensor};
use burn_lean::quant::{ConvertConfig, QuantError, Unsupported, compare, save_safetensors};
use clap::Parser;
use recipe::{Bits, Training, logits, quantize_after_training, quantize_in_training, train};
use support::{Axes, Cell, ConvNet, Curve, DeviceName, ImageSet, Images, Table, Values};

/// Quantize a small convolutional network after training and in training, at several precisions.
#[derive(Debug, Parser)]
#[command(allow_negative_numbers = true)]
struct Cli {
    /// Where to compute.
    #[arg(long, value_enum, default_value_t = DeviceName::Flex)]
    device: DeviceName,
    /// Folder with the four MNIST files; without it, the embedded 8×8 digits.
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
    /// Training images, at most.
    #[arg(long, default_value_t = 10_000, value_parser = support::at_least_one)]
    limit: usize,
    /// Passes over the training images in FP32 [default: 3 for MNIST, 20 for the digits].
    #[arg(long, value_parser = support::at_least_one)]
    epochs: Option<usize>,
    /// Passes over the training images with fake quantization [default: as many].
    #[arg(long, value_parser = support::at_least_one)]
    finetune_epochs: Option<usize>,
    /// Learning rate of the fine-tuning, at its start; it falls to zero.
    #[arg(long, default_value_t = 1e-3, value_parser = support::not_negative)]
    finetune_rate: f64,
    /// Seed of the initial weights and of the order of the data.
    #[arg(long, default_value_t = 42)]
    seed: u64,
    /// Repeat with this many seeds, from `--seed` on.
    #[arg(long, default_value_t = 1, value_parser = support::at_least_one)]
    seeds: usize,
    /// Show accuracies on the validation images instead of the test images: for those who choose
    /// settings.
    #[arg(long)]
    validate: bool,
    /// Folder for the figure and the converted models.
    #[arg(long, value_name = "DIR", default_value = "out")]
    out: PathBuf,
    /// Also write the printed table to this file, as JSON.
    #[arg(long, value_name = "FILE", value_parser = support::output_file)]
    json: Option<PathBuf>,
}

fn main() -> ExitCode {
    support::init_tracing();
    support::exit(run(&Cli::parse()))
}

fn run(cli: &Cli) -> Result<(), Box<dyn Error>> {
    let device = cli.device.open()?;
    let images = ImageSet::load(cli.data.as_deref())?;
    let (train, validation) = images.train.take(cli.limit).split(0.1);
    if validation.len() == 0 {
        return Err(format!(
            "of {} training images none is left to validate on: raise `--limit`",
            train.len()
        )
        .into());
    }
    let scored = match cli.validate {
        true => validation.clone(),
        false => images.test,
    };
    let epochs = cli
        .epochs
        .unwrap_or(if cli.data.is_some() { 3 } else { 20 });
    let finetune_epochs = cli.finetune_epochs.unwrap_or(epochs);
    std::fs::create_dir_all(&cli.out)
        .map_err(|error| format!("cannot create {}: {error}", cli.out.display()))?;

    let experiment = Experiment {
        cli,
        device,
        train,
        validation,
        scored,
        pretraining: Training::new(epochs, 3e-3),
        finetuning: Training::new(finetune_epochs, cli.finetune_rate),
    };
    let mut rows: Vec<Row> = Vec::new();
    for seed in support::seeds(cli.seed, cli.seeds) {
        for (index, outcome) in experiment.run(seed)?.into_iter().enumerate() {
            match rows.get_mut(index) {
                Some(row) => row.outcomes.push(outcome),
                None => rows.push(Row {
                    outcomes: vec![outcome],
                }),
            }
        }
    }
    experiment.publish(images.name, &rows)?;
    Ok(())
}

struct Experiment<'a> {
    cli: &'a Cli,
    /// Without autodiff.
    device: Device,
    train: Images,
    validation: Images,
    /// What the accuracies of the table are of.
    scored: Images,
    pretraining: Training,
    finetuning: Training,
}

/// How one model of one seed did.
struct Outcome {
    model: String,
    bits: Option<Bits>,
    /// [%]
    accuracy: f64,
    /// Of the converted model [%].
    converted_accuracy: Option<f64>,
    /// Size of the file.
    bytes: u64,
    /// Largest difference of a weight's or an activation's code between the fake-quantized and the
    /// converted model.
    codes_off: Option<u32>,
    /// Largest difference of a logit between the two.
    logits_off: Option<f32>,
    seconds: f64,
}

/// One model over the seeds.
struct Row {
    outcomes: Vec<Outcome>,
}

impl Experiment<'_> {
    fn run(&self, seed: u64) -> Result<Vec<Outcome>, Box<dyn Error>> {
        let training_device = self.device.clone().autodiff();
        training_device.seed(seed);
        let model = ConvNet::new(self.train.side(), &training_device);
        let start = Instant::now();
        let model = train(model, &self.pretraining, &self.train, seed, "FP32")?;
        let mut outcomes = vec![self.outcome("FP32", &model, start)?];

        // Another order of the images than before.
        let order = seed.wrapping_add(1 << 32);
        let start = Instant::now();
        let tuned = train(
            model.clone(),
            &self.finetuning,
            &self.train,
            order,
            "FP32, tuned",
        )?;
        outcomes.push(self.outcome("FP32, tuned", &tuned, start)?);

        for bits in Bits::ALL {
            let start = Instant::now();
            let (quantized, method) =
                quantize_after_training(model.valid(), bits, &self.train, |model| {
                    self.accuracy(model, &self.validation)
                })?;
            tracing::info!(%bits, seed, method, "post-training quantization");
            outcomes.push(self.converted("PTQ", bits, &quantized, start)?);

            let start = Instant::now();
            let tuning = (&self.finetuning, order);
            let quantized = quantize_in_training(model.clone(), bits, tuning, &self.train)?;
            outcomes.push(self.converted("QAT", bits, &quantized, start)?);
        }
        Ok(outcomes)
    }

    fn accuracy(&self, model: &ConvNet, images: &Images) -> f64 {
        let model = model.valid();
        support::accuracy(images, &self.device, |images| {
            logits(&model, images).expect("what was trained can be evaluated")
        })
    }

    /// Of a float model.
    fn outcome(
        &self,
        name: &str,
        model: &ConvNet,
        start: Instant,
    ) -> Result<Outcome, Box<dyn Error>> {
        let seconds = start.elapsed().as_secs_f64();
        let slug = name.to_lowercase().replace(", ", "_");
        let file = self
            .cli
            .out
            .join(format!("qat_finetune_{slug}.safetensors"));
        Ok(Outcome {
            model: name.to_string(),
            bits: None,
            accuracy: self.accuracy(model, &self.scored),
            converted_accuracy: None,
            bytes: save_safetensors(&model.valid(), file)?,
            codes_off: None,
            logits_off: None,
            seconds,
        })
    }

    /// Of a fake-quantized model, which is converted and saved.
    fn converted(
        &self,
        how: &str,
        bits: Bits,
        model: &ConvNet,
        start: Instant,
    ) -> Result<Outcome, QuantError> {
        let seconds = start.elapsed().as_secs_f64();
        let model = model.valid();
        let (converted, mut report) = ConvertConfig::new()
            .with_unsupported(Unsupported::KeepFakeQuantized)
            .convert(model.clone())?;
        let samples: Vec<Tensor<4>> = self
            .scored
            .ordered(64, &self.device)
            .take(2)
            .map(|batch| batch.images)
            .collect();
        compare(&mut report, &model, &converted, samples, |model, images| {
            logits(model, images.clone())
        })?;
        let name = format!("{}_{bits}.safetensors", how.to_lowercase());
        Ok(Outcome {
            model: format!("{how} {bits}"),
            bits: Some(bits),
            accuracy: self.accuracy(&model, &self.scored),
            converted_accuracy: Some(self.accuracy(&converted, &self.scored)),
            bytes: save_safetensors(&converted, self.cli.out.join(name))?,
            codes_off: report.largest_mismatch(),
            logits_off: report.output_difference,
            seconds,
        })
    }

    fn publish(&self, data: &str, rows: &[Row]) -> Result<(), String> {
        let cli = self.cli;
        let mut table = Table::new(
            format!(
                "{data}: {} training images, {} epochs, then {} of fine-tuning; accuracy on {} {} \
                 images; {} seeds from {}",
                self.train.len(),
                self.pretraining.epochs,
                self.finetuning.epochs,
                self.scored.len(),
                if cli.validate { "validation" } else { "test" },
                cli.seeds,
                cli.seed,
            ),
            &[
                "model",
                "accuracy [%]",
                "std",
                "below FP32",
                "converted [%]",
                "bytes on disk",
                "of FP32",
                "codes off",
                "logits off",
                "time [s]",
            ],
        );
        let (float_accuracy, float_bytes) = (rows[0].accuracy(), rows[0].outcomes[0].bytes as f64);
        for row in rows {
            let first = &row.outcomes[0];
            let converted = first
                .converted_accuracy
                .and_then(|_| row.mean(|outcome| outcome.converted_accuracy.unwrap_or_default()));
            let largest = |of: fn(&Outcome) -> Option<f64>| {
                let all = row.outcomes.iter().filter_map(of);
                all.reduce(f64::max)
            };
            table.push([
                first.model.as_str().into(),
                Cell::Number(row.accuracy(), 2),
                Cell::optional(row.deviation(), 2),
                Cell::Number(float_accuracy - row.accuracy(), 2),
                Cell::optional(converted, 2),
                Cell::Integer(first.bytes),
                Cell::Number(first.bytes as f64 / float_bytes, 3),
                Cell::optional(largest(|outcome| Some(f64::from(outcome.codes_off?))), 0),
                Cell::optional(largest(|outcome| Some(outcome.logits_off?.into())), 6),
                Cell::optional(row.mean(|outcome| outcome.seconds), 1),
            ]);
        }
        table.publish(cli.json.as_deref())?;

        let svg = cli.out.join("qat_finetune.svg");
        let curve = |name: &str| {
            let of_name = rows
                .iter()
                .filter(|row| row.outcomes[0].model.starts_with(name));
            let points =
                of_name.filter_map(|row| Some((row.outcomes[0].bits?.place()?, row.accuracy())));
            Curve {
                name: name.to_string(),
                points: points.collect(),
            }
        };
        // What bits do not change, at all of them.
        let level = |name: &str| {
            let mut rows = rows.iter();
            let row = rows.find(|row| row.outcomes[0].model == name)?;
            let mut level = curve("QAT");
            let points = level.points.iter_mut();
            points.for_each(|point| point.1 = row.accuracy());
            level.name = name.into();
            Some(level)
        };
        let levels = ["FP32", "FP32, tuned"].into_iter().filter_map(level);
        let curves: Vec<Curve> = levels.chain([curve("PTQ"), curve("QAT")]).collect();
        let names = Bits::ALL.map(|bits| bits.to_string());
        let axes = Axes {
            step: "bits of weights and activations",
            steps: &names,
            joined: true,
            value: "accuracy [%]",
            values: Values::Percent,
        };
        support::write_svg_over(&svg, &format!("{data}: accuracy over bits"), axes, &curves)?;
        println!("figure: {}", svg.display());
        Ok(())
    }
}

impl Row {
    fn mean(&self, of: impl Fn(&Outcome) -> f64) -> Option<f64> {
        Some(self.outcomes.iter().map(of).sum::<f64>() / self.outcomes.len() as f64)
    }

    fn accuracy(&self) -> f64 {
        self.mean(|outcome| outcome.accuracy).unwrap_or_default()
    }

    /// Standard deviation of the accuracy; of a single seed nothing is known about it.
    fn deviation(&self) -> Option<f64> {
        let mean = self.accuracy();
        let squares = self
            .outcomes
            .iter()
            .map(|outcome| (outcome.accuracy - mean).powi(2));
        match self.outcomes.len() {
            1 => None,
            n => Some((squares.sum::<f64>() / (n - 1) as f64).sqrt()),
        }
    }
}
