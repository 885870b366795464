//! The command line.

use std::error::Error;
use std::path::PathBuf;

use burn_lean::quant::{
    AdaRoundConfig, FakeQuantizeConfig, GptqConfig, NumberFormat, PtqConfig, PtqMode, QatConfig,
    Rounding, RoundingConfig, Scheme, WeightConfig,
};
use clap::{Parser, ValueEnum};

use crate::support::{self, DeviceName, ImageSet};

/// Quantize a trained network after training.
#[derive(Debug, Parser)]
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
    /// Training images to calibrate with.
    #[arg(long, default_value_t = 512, value_parser = support::at_least_one)]
    pub(crate) calibration: usize,
    /// What is quantized.
    #[arg(long, value_enum, default_value_t = Mode::Static)]
    mode: Mode,
    /// Bits of the weights.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u8).range(2..=8))]
    weight_bits: u8,
    /// Bits of the activations, where they are quantized [default: 8].
    #[arg(long, value_parser = clap::value_parser!(u8).range(2..=8))]
    activation_bits: Option<u8>,
    /// How weights are rounded.
    #[arg(long, value_enum, default_value_t = RoundingName::Auto)]
    rounding: RoundingName,
    /// Keep the most sensitive layers at 8 bits until the accuracy is within `--max-drop`. Takes
    /// static activations, and weights that are rounded to nearest.
    #[arg(long, conflicts_with_all = ["mode", "rounding"])]
    pub(crate) mixed: bool,
    /// Accuracy that may be lost with `--mixed` [points].
    #[arg(
        long,
        default_value_t = 1.0,
        value_parser = support::not_negative,
        requires = "mixed"
    )]
    pub(crate) max_drop: f64,
    /// Seed of the training.
    #[arg(long, default_value_t = 42)]
    pub(crate) seed: u64,
    /// The quantized model.
    #[arg(
        long,
        value_name = "FILE",
        default_value = "out/ptq_calibrate.safetensors"
    )]
    pub(crate) output: PathBuf,
    /// Write the quantized network of `--arch resnet8` to this file, as ONNX.
    #[arg(long, value_name = "FILE")]
    pub(crate) onnx: Option<PathBuf>,
    /// Also write the last table to this file, as JSON.
    #[arg(long, value_name = "FILE")]
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
    pub(crate) fn bits(&self) -> String {
        let weight = self.weight_bits;
        match self.mode {
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
            .with_weight(WeightConfig::int(self.weight_bits))
            .with_activation(Some(FakeQuantizeConfig::new(activation)));
        PtqConfig::new()
            .with_quantize(quantize)
            .with_mode(match self.mode {
                Mode::WeightOnly => PtqMode::WeightOnly,
                Mode::Dynamic => PtqMode::Dynamic,
                Mode::Static => PtqMode::Static,
            })
            .with_rounding(self.rounding.config())
    }

    /// The data, normalized as the checkpoints of the network were trained.
    pub(crate) fn images(&self) -> Result<ImageSet, Box<dyn Error>> {
        if self.mode == Mode::WeightOnly && self.activation_bits.is_some() {
            return Err("`--mode weight-only` quantizes no activations: leave \
                        `--activation-bits` out"
                .into());
        }
        if let Some(folder) = self.output.parent() {
            std::fs::create_dir_all(folder)
                .map_err(|error| format!("cannot create {}: {error}", folder.display()))?;
        }
        let mut images = match (self.arch, &self.data) {
            (Arch::Resnet8, _) => return Err("`--arch resnet8` reads its images by itself".into()),
            (Arch::Resnet20, None) => return Err("`--arch resnet20` needs `--data`".into()),
            (Arch::Resnet20, Some(dir)) => support::read_cifar(dir, support::CifarFiles::Standard)?
                .normalized_as(&[0.4914, 0.4822, 0.4465], &[0.2023, 0.1994, 0.2010]),
            (Arch::Mlpnet, Some(dir)) => {
                ImageSet::load(Some(dir))?.normalized_as(&[0.1307], &[0.3081])
            }
            (Arch::Mlpnet, None) => ImageSet::digits(),
        };
        if let Some(limit) = self.test_limit {
            images.test = images.test.take(limit);
        }
        Ok(images)
    }
}
