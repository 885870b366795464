//! The command line.

use std::error::Error;
use std::path::PathBuf;

use burn_lean::quant::{
    FakeQuantizeConfig, GptqConfig, NumberFormat, PtqConfig, PtqMode, QatConfig, Rounding,
    RoundingConfig, Scheme, WeightConfig, rounding::AdaRoundConfig,
};
use clap::{Parser, ValueEnum};

use crate::support::{self, DeviceName, ImageSet};

/// Quantize a trained network after training.
#[derive(Debug, Parser)]
#[command(allow_negative_numbers = true)]
pub(crate) struct Cli {
    /// Where to compute.
    #[arg(long, value_enum, default_value_t = DeviceName::Flex)]
    pub(crate) device: DeviceName,
    /// The network.
    #[arg(long, value_enum, default_value_t = Arch::Mlpnet)]
    pub(crate) arch: Arch,
    /// Its weights, with PyTorch's names; without them it is trained here.
    #[arg(long, value_name = "FILE.safetensors", requires = "data")]
    pub(crate) checkpoint: Option<PathBuf>,
    /// Folder with the MNIST or CIFAR-10 files; without it, the embedded 8×8 digits.
    #[arg(long, value_name = "DIR")]
    pub(crate) data: Option<PathBuf>,
    /// Test images, at most.
    #[arg(long, value_parser = support::at_least_one)]
    pub(crate) test_limit: Option<usize>,
    /// Passes over the training images, where there is no checkpoint.
    #[arg(
        long,
        default_value_t = 20,
        value_parser = support::at_least_one,
        conflicts_with = "checkpoint"
    )]
    pub(crate) epochs: usize,
    /// Training images to calibrate with [default: 512; of resnet8 500].
    #[arg(long, value_parser = support::at_least_one)]
    calibration: Option<usize>,
    /// What is quantized [default: static].
    #[arg(long, value_enum)]
    mode: Option<Mode>,
    /// Bits of the weights [default: 8].
    #[arg(long, value_parser = clap::value_parser!(u8).range(2..=8))]
    weight_bits: Option<u8>,
    /// Bits of the activations, where they are quantized [default: 8].
    #[arg(long, value_parser = clap::value_parser!(u8).range(2..=8))]
    activation_bits: Option<u8>,
    /// How weights are rounded [default: auto].
    #[arg(long, value_enum)]
    rounding: Option<RoundingName>,
    /// Keep the most sensitive layers at 8 bits until the accuracy is within `--max-drop`. Takes
    /// static activations, and weights that are rounded to nearest.
    #[arg(long, conflicts_with_all = ["mode", "rounding"])]
    pub(crate) mixed: bool,
    /// Accuracy that may be lost with `--mixed` [points; default: 1].
    #[arg(long, value_parser = support::not_negative, requires = "mixed")]
    max_drop: Option<f64>,
    /// Seed of the training [default: 42].
    #[arg(long)]
    seed: Option<u64>,
    /// The quantized model [default: out/ptq_calibrate.safetensors].
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Write the quantized network of `--arch resnet8` to this file, as ONNX, and the float one beside it.
    #[arg(long, value_name = "FILE", value_parser = support::output_file)]
    pub(crate) onnx: Option<PathBuf>,
    /// Also write the last table to this file, as JSON.
    #[arg(long, value_name = "FILE", value_parser = support::output_file)]
    pub(crate) json: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Arch {
    /// 784-40-20-10 without biases.
    Mlpnet,
    /// ResNet20 for CIFAR-10.
    Resnet20,
    /// ResNet8 for CIFAR-10, of MLPerf Tiny: on two test sets, and as ONNX.
    Resnet8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Mode {
    /// Weights only.
    WeightOnly,
    /// Weights, and activations with the range of the batch at hand.
    Dynamic,
    /// Weights, and activations with calibrated ranges.
    Static,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum RoundingName {
    /// By GPTQ to 4 bits and less, else to nearest.
    Auto,
    Nearest,
    Gptq,
    Adaround,
}

impl RoundingName {
    fn config(self) -> RoundingConfig {
        let config = RoundingConfig::new();
        match self {
            Self::Auto => config.with_rounding(Rounding::Auto),
            Self::Nearest => nearest(),
            Self::Gptq => config.with_rounding(Rounding::Gptq(GptqConfig::new())),
            Self::Adaround => config.with_rounding(Rounding::AdaRound(AdaRoundConfig::new())),
        }
    }
}

/// The nearest codes, biases as they are.
pub(crate) fn nearest() -> RoundingConfig {
    RoundingConfig::new()
        .with_rounding(Rounding::Nearest)
        .with_bias_correction(false)
}

impl Cli {
    /// Refuses options that have no effect beside the others.
    pub(crate) fn check(&self) -> Result<(), String> {
        if self.arch != Arch::Resnet8 {
            if self.onnx.is_some() {
                return Err("`--onnx` is for `--arch resnet8`".into());
            }
            return match self.mode() == Mode::WeightOnly && self.activation_bits.is_some() {
                true => Err("`--mode weight-only` quantizes no activations: leave \
                             `--activation-bits` out"
                    .into()),
                false => Ok(()),
            };
        }
        let given = [
            ("--mode", self.mode.is_some()),
            ("--weight-bits", self.weight_bits.is_some()),
            ("--activation-bits", self.activation_bits.is_some()),
            ("--rounding", self.rounding.is_some()),
            ("--mixed", self.mixed),
            ("--max-drop", self.max_drop.is_some()),
            ("--seed", self.seed.is_some()),
            ("--output", self.output.is_some()),
        ];
        match given.iter().find(|(_, given)| *given) {
            Some((option, _)) => Err(format!(
                "`{option}` has no effect with `--arch resnet8`, which shows W8A8 and W4A8 with \
                 nothing else chosen: leave it out"
            )),
            None => Ok(()),
        }
    }

    /// Of so many training images, those to calibrate with.
    pub(crate) fn calibration(&self, images: usize) -> Result<usize, String> {
        let default = match self.arch {
            Arch::Resnet8 => 500,
            _ => 512,
        };
        match self.calibration {
            Some(count) if count > images => Err(format!(
                "`--calibration` is {count}, but must be at most {images}, the training images"
            )),
            count => Ok(count.unwrap_or(default).min(images)),
        }
    }

    pub(crate) fn seed(&self) -> u64 {
        self.seed.unwrap_or(42)
    }

    pub(crate) fn max_drop(&self) -> f64 {
        self.max_drop.unwrap_or(1.0)
    }

    pub(crate) fn output(&self) -> PathBuf {
        let output = self.output.clone();
        output.unwrap_or_else(|| "out/ptq_calibrate.safetensors".into())
    }

    fn mode(&self) -> Mode {
        self.mode.unwrap_or(Mode::Static)
    }

    fn weight_bits(&self) -> u8 {
        self.weight_bits.unwrap_or(8)
    }

    pub(crate) fn bits(&self) -> String {
        let weight = self.weight_bits();
        match self.mode() {
            Mode::WeightOnly => format!("PTQ W{weight}"),
            _ if self.mixed => format!("PTQ W{weight}A{} and W8A8", self.of_activations()),
            _ => format!("PTQ W{weight}A{}", self.of_activations()),
        }
    }

    fn of_activations(&self) -> u8 {
        self.activation_bits.unwrap_or(8)
    }

    /// Weights of these bits with a scale for each channel, and activations of 8 bits.
    pub(crate) fn ptq_of(&self, weight_bits: u8) -> PtqConfig {
        let activation = Scheme::affine(NumberFormat::uint8());
        let quantize = QatConfig::new()
            .with_weight(WeightConfig::int(weight_bits))
            .with_activation(Some(FakeQuantizeConfig::new(activation)));
        PtqConfig::new().with_quantize(quantize)
    }

    pub(crate) fn ptq(&self) -> PtqConfig {
        let activation = Scheme::affine(NumberFormat::uint(self.of_activations()));
        let quantize = QatConfig::new()
            .with_weight(WeightConfig::int(self.weight_bits()))
            .with_activation(Some(FakeQuantizeConfig::new(activation)));
        PtqConfig::new()
            .with_quantize(quantize)
            .with_mode(match self.mode() {
                Mode::WeightOnly => PtqMode::WeightOnly,
                Mode::Dynamic => PtqMode::Dynamic,
                Mode::Static => PtqMode::Static,
            })
            .with_rounding(self.rounding.unwrap_or(RoundingName::Auto).config())
    }

    /// The data, normalized as the checkpoints of the network were trained.
    pub(crate) fn images(&self) -> Result<ImageSet, Box<dyn Error>> {
        if self.output().is_dir() {
            return Err(format!("{} is a folder", self.output().display()).into());
        }
        if let Some(folder) = self.output().parent() {
            std::fs::create_dir_all(folder)
                .map_err(|error| format!("cannot create {}: {error}", folder.display()))?;
        }
        let mut images = match (self.arch, &self.data) {
            (Arch::Resnet8, _) => return Err("`--arch resnet8` reads its images by itself".into()),
            (Arch::Resnet20, None) => return Err("`--arch resnet20` needs `--data`".into()),
            (Arch::Resnet20, Some(dir)) => {
                support::read_cifar(dir, support::CifarFiles::Standard)?.normalized_as_cifar10()
            }
            (Arch::Mlpnet, Some(dir)) => ImageSet::load(Some(dir))?.normalized_as_mnist(),
            (Arch::Mlpnet, None) => ImageSet::digits(),
        };
        if let Some(limit) = self.test_limit {
            images.test = images.test.take(limit);
        }
        Ok(images)
    }
}
