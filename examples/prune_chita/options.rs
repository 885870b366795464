//! The command line, and the data that it names.

use std::error::Error;
use std::fmt;
use std::path::PathBuf;

use clap::{Parser, ValueEnum};

use crate::support::{self, CifarFiles, DeviceName, ImageSet, Images};

/// Prune a trained network at several sparsities and compare methods.
#[derive(Debug, Parser)]
#[command(allow_negative_numbers = true)]
pub(crate) struct Cli {
    /// Methods to compare.
    #[arg(
        long = "method",
        value_enum,
        value_delimiter = ',',
        default_value = "magnitude,default"
    )]
    pub(crate) methods: Vec<MethodName>,
    /// Fractions of zeros.
    #[arg(long = "sparsity", value_delimiter = ',', default_value = "0.5,0.7,0.8,0.9", value_parser = support::fraction)]
    pub(crate) sparsities: Vec<f64>,
    /// Stages of chita++ [default: 16].
    #[arg(long, value_parser = support::at_least_one)]
    pub(crate) stages: Option<usize>,
    /// The network.
    #[arg(long, value_enum, default_value = "mlpnet")]
    pub(crate) arch: Arch,
    /// A checkpoint with PyTorch's names, instead of training; needs `--data`.
    #[arg(long, value_name = "FILE.safetensors", requires = "data")]
    pub(crate) checkpoint: Option<PathBuf>,
    /// Folder with MNIST (mlpnet, encoder) or CIFAR-10 (resnets); without it, the embedded digits.
    #[arg(long, value_name = "DIR")]
    pub(crate) data: Option<PathBuf>,
    /// Which files of CIFAR-10 [default: standard].
    #[arg(long, value_enum)]
    cifar_files: Option<CifarFiles>,
    /// Move and mirror the training images at random, as is usual for CIFAR-10.
    #[arg(long)]
    pub(crate) augment: bool,
    /// Where to compute.
    #[arg(long, value_enum, default_value_t = DeviceName::Flex)]
    pub(crate) device: DeviceName,
    /// BatchNorm statistics of the dense network for every method.
    #[arg(long)]
    pub(crate) no_recalibration: bool,
    /// Seed of the weights and of the order of the data.
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
    /// Also write the table to this file, as JSON.
    #[arg(long, value_name = "FILE", value_parser = support::output_file)]
    pub(crate) json: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, ValueEnum)]
pub(crate) enum MethodName {
    /// The largest weights stay.
    Magnitude,
    /// `Pruner` with nothing chosen: no labels.
    Default,
    /// `PrunerConfig` with nothing chosen: one stage of CHITA.
    Chita,
    /// Several stages.
    #[value(name = "chita++")]
    ChitaPlusPlus,
}

#[derive(Debug, Clone, Copy, PartialEq, ValueEnum)]
pub(crate) enum Arch {
    /// Three linear layers.
    Mlpnet,
    /// Two layers of attention, with LayerNorm.
    Encoder,
    /// MLPerf Tiny's residual network of 8 layers.
    Resnet8,
    /// A residual network of 20 layers.
    Resnet20,
}

impl fmt::Display for MethodName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&support::option_name(self))
    }
}

impl Cli {
    /// Refuses options that nothing here has a use for.
    pub(crate) fn check(&self) -> Result<(), String> {
        let runs = |method| self.methods.contains(&method);
        let is_residual = matches!(self.arch, Arch::Resnet8 | Arch::Resnet20);
        let unused = [
            (
                self.stages.is_some() && !runs(MethodName::ChitaPlusPlus),
                "--stages is for `--method chita++`",
            ),
            (
                self.cifar_files.is_some() && !is_residual,
                "--cifar-files is for `--arch resnet8` and `resnet20`",
            ),
        ];
        match unused.iter().find(|(is_unused, _)| *is_unused) {
            Some((_, why)) => Err(why.to_string()),
            None => Ok(()),
        }
    }

    /// The data, scaled as the checkpoints of the architecture were trained.
    pub(crate) fn images(&self) -> Result<ImageSet, Box<dyn Error>> {
        let files = self.cifar_files.unwrap_or(CifarFiles::Standard);
        let mut images = match (self.arch, &self.data) {
            (Arch::Resnet8 | Arch::Resnet20, None) => {
                return Err("`--arch resnet8` and `resnet20` need `--data`".into());
            }
            (Arch::Resnet8, Some(dir)) => {
                let images = support::read_cifar(dir, files)?;
                ImageSet {
                    train: images.train.in_bytes(),
                    test: images.test.in_bytes(),
                    ..images
                }
            }
            (Arch::Resnet20, Some(dir)) => support::read_cifar(dir, files)?.normalized_as_cifar10(),
            (_, None) => ImageSet::digits(),
            (_, dir) => ImageSet::load(dir.as_deref())?.normalized_as_mnist(),
        };
        if self.augment {
            images.train = Images::augmented(images.train);
        }
        Ok(images)
    }
}
