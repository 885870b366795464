//! Quantizes a trained network without training it: what is quantized, what it costs, and a file
//! with the quantized weights.
//!
//! ```sh
//! cargo run -p burn-lean --release --example ptq_calibrate                        # trains a small one itself
//! cargo run -p burn-lean --release --example ptq_calibrate -- --data path/to/mnist \
//!     --checkpoint mlpnet_mnist.safetensors --arch mlpnet --weight-bits 4 --rounding gptq
//! cargo run -p burn-lean --release --example ptq_calibrate -- --data path/to/cifar10 \
//!     --checkpoint resnet20_cifar10.safetensors --arch resnet20 --weight-bits 4 --mixed
//! cargo run -p burn-lean --release --example ptq_calibrate -- --data path/to/cifar10 \
//!     --checkpoint resnet8_cifar10.safetensors --arch resnet8 --onnx resnet8.onnx
//! ```
//!
//! The steps: load the checkpoint, fold its batch norms, calibrate on training images, audit what
//! is quantized in the forward pass, measure what each layer costs alone, convert, save, load the
//! file into a new model and measure that.

#[path = "ptq_calibrate/network.rs"]
mod network;
#[path = "ptq_calibrate/options.rs"]
mod options;
#[path = "ptq_calibrate/resnet8.rs"]
mod resnet8;
mod support;

use std::error::Error;
use std::process::ExitCode;

use burn::tensor::Device;
use burn_lean::quant::{
    ConvertConfig, MixedPrecisionConfig, PtqConfig, QatConfig, QuantError, Unsupported, audit,
    fold_for, health, inspect::AllocationReport, load_safetensors, ptq::PtqReport,
    save_safetensors, sensitivity,
};
use clap::Parser;
use network::{loss, quantized};
use options::{Arch, Cli};
use support::{Batch, Cell, ImageSet, Images, MlpNet, Network, ResNet20, Table};

fn main() -> ExitCode {
    support::init_tracing();
    support::exit(run(&Cli::parse()))
}

fn run(cli: &Cli) -> Result<(), Box<dyn Error>> {
    cli.check()?;
    if cli.arch == Arch::Resnet8 {
        return resnet8::run(cli);
    }
    let device = cli.device.open()?;
    let images = cli.images()?;
    device.seed(cli.seed());
    let training = device.clone().autodiff();
    match cli.arch {
        Arch::Mlpnet => {
            let side = images.train.side();
            Run::new(cli, images, device)?.run(|| MlpNet::new(side, &training))
        }
        Arch::Resnet20 => Run::new(cli, images, device)?.run(|| ResNet20::new(&training)),
        Arch::Resnet8 => resnet8::run(cli),
    }
}

/// One invocation.
struct Run<'a> {
    cli: &'a Cli,
    images: ImageSet,
    /// Without autodiff.
    device: Device,
    /// Some training images, in batches.
    calibration: Vec<Batch>,
}

/// Images per forward pass.
const BATCH_SIZE: usize = 64;
/// Images that sensitivities are measured on, at most.
const SENSITIVITY: usize = 1000;

impl<'a> Run<'a> {
    fn new(cli: &'a Cli, images: ImageSet, device: Device) -> Result<Self, String> {
        let calibration = images.train.take(cli.calibration(images.train.len())?);
        let calibration = calibration.ordered(BATCH_SIZE, &device).collect();
        Ok(Self {
            cli,
            images,
            device,
            calibration,
        })
    }

    fn run<M: Network>(&self, new: impl Fn() -> M) -> Result<(), Box<dyn Error>> {
        let mut table = Table::new(
            format!(
                "{}: {} test images",
                self.images.name,
                self.images.test.len()
            ),
            &["model", "accuracy [%]", "bytes on disk", "of FP32"],
        );
        let float = self.trained(new())?;
        let output = self.cli.output();
        let float_file = output.with_extension("fp32.safetensors");
        let float_bytes = save_safetensors(&float.valid(), &float_file)?;
        let mut row = |name: &str, accuracy: f64, bytes: Option<u64>| {
            table.push([
                name.into(),
                Cell::Number(accuracy, 2),
                bytes.map_or(Cell::Empty, Cell::Integer),
                Cell::optional(bytes.map(|bytes| bytes as f64 / float_bytes as f64), 3),
            ]);
        };
        row("FP32", self.accuracy(&float), Some(float_bytes));

        // A batch norm is folded into the layer before it: the forward pass shows the pairs.
        let sample = || self.calibration[0].images.clone();
        let float = fold_for(float, sample(), M::logits)?;
        if M::HAS_BATCH_NORM {
            row("FP32, folded", self.accuracy(&float), None);
        }

        // What only the forward pass shows belongs to the config, which prepares other models, too.
        let mut ptq = self.cli.ptq();
        ptq.quantize = ptq
            .quantize
            .with_sites_of(&float.valid(), sample(), M::logits)?;
        let (quantized, config) = match self.cli.mixed {
            true => {
                let (model, config, report) = self.mixed(&ptq, float)?;
                println!("\n{report}");
                (model, config)
            }
            false => {
                // What nearest rounding costs is what better rounding has to win back.
                let nearest = ptq.clone().with_rounding(options::nearest());
                self.report_costs(&self.calibrated(&nearest, float.clone())?.0)?;
                let (model, report) = self.calibrated(&ptq, float)?;
                println!("\n{report}");
                (model, ptq.qat_config())
            }
        };
        println!("\n{}", audit(&quantized, sample(), M::logits)?);
        row(&self.cli.bits(), self.accuracy(&quantized), None);

        let (converted, _) = ConvertConfig::new()
            .with_unsupported(Unsupported::KeepFakeQuantized)
            .convert(quantized)?;
        let bytes = save_safetensors(&converted, &output)?;
        // Into a new model, as an application would: prepared alike, with no data at hand.
        let prepared = config.prepare(fold_for(new(), sample(), M::logits)?)?;
        let loaded = load_safetensors(prepared.valid(), &output)?;
        row(
            "converted, saved and loaded",
            self.accuracy(&loaded),
            Some(bytes),
        );
        table.publish(self.cli.json.as_deref())?;
        println!("quantized model: {}", output.display());
        Ok(())
    }

    /// The checkpoint, or a model that is trained here.
    fn trained<M: Network>(&self, model: M) -> Result<M, Box<dyn Error>> {
        let Some(checkpoint) = &self.cli.checkpoint else {
            let (images, cli) = (&self.images.train, self.cli);
            return Ok(support::train(
                model,
                &M::logits,
                images,
                cli.epochs,
                cli.seed(),
            ));
        };
        let model = support::load(model, checkpoint)?;
        match M::HAS_BATCH_NORM {
            // The statistics in the checkpoint are those of another normalization.
            true => network::normalized(model, &self.images.train, &self.device),
            false => Ok(model),
        }
    }

    fn calibrated<M: Network>(
        &self,
        config: &PtqConfig,
        float: M,
    ) -> Result<(M, PtqReport), QuantError> {
        let batches = || self.calibration.iter().map(|batch| batch.images.clone());
        Ok(config.quantize_for(float, batches, M::logits)?)
    }

    /// Layers of the wanted precision, but those that need more bits keep 8.
    fn mixed<M: Network>(
        &self,
        ptq: &PtqConfig,
        float: M,
    ) -> Result<(M, QatConfig, AllocationReport), Box<dyn Error>> {
        let some = self.images.train.take(SENSITIVITY);
        let allocation = MixedPrecisionConfig::new(ptq.quantize.clone())
            .with_max_drop(self.cli.max_drop())
            .allocate(
                float.valid(),
                |model| {
                    let mut batches = self.calibration.iter();
                    batches.try_for_each(|batch| quantized(model, batch.images.clone()).map(drop))
                },
                |model| quantized(model, self.calibration[0].images.clone()),
                |model| self.accuracy_on(&some, model),
            )?;
        Ok((allocation.model, allocation.config, allocation.report))
    }

    /// Prints how well each quantizer does, and what each layer costs alone.
    fn report_costs<M: Network>(&self, calibrated: &M) -> Result<(), Box<dyn Error>> {
        let sample = &self.calibration[0];
        let health = health(calibrated, |model| quantized(model, sample.images.clone()))?;
        println!("\n{health}");
        let some = self.images.train.take(SENSITIVITY);
        let sensitivity = sensitivity(
            calibrated,
            |model| quantized(model, sample.images.clone()),
            |model| self.accuracy_on(&some, model),
        )?
        .with_gradient_scores(&calibrated.clone().train(), |model| loss(model, sample))?;
        println!(
            "\naccuracy on {} training images:\n{sensitivity}\n",
            some.len()
        );
        Ok(())
    }

    fn accuracy<M: Network>(&self, model: &M) -> f64 {
        self.accuracy_on(&self.images.test, &model.valid())
    }

    fn accuracy_on<M: Network>(&self, images: &Images, model: &M) -> f64 {
        support::accuracy(images, &self.device, |images| {
            quantized(model, images).expect("what was calibrated can be run")
        })
    }
}
