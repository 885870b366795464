//! The command line of the study.

use std::error::Error;
use std::fmt;
use std::path::PathBuf;

use clap::{Parser, ValueEnum};

use crate::support::{self, Arch, CifarFiles, DeviceName, Dtype, ImageSet};

/// Share of the training images that validates.
const VALIDATION: f64 = 0.1;

/// Gradual pruning with training between the stages: methods with one budget of epochs.
#[derive(Debug, Parser)]
pub(crate) struct Cli {
    /// The network.
    #[arg(long, value_enum, default_value_t = Arch::Mlpnet)]
    pub(crate) arch: Arch,
    /// Folder with MNIST or CIFAR-10; without it, MLPNet is trained on the embedded digits.
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
    /// The trained network with PyTorch's names.
    #[arg(long, value_name = "FILE.safetensors", requires = "data")]
    pub(crate) checkpoint: Option<PathBuf>,
    /// Which files of CIFAR-10.
    #[arg(long, value_enum, default_value_t = CifarFiles::Original)]
    cifar_files: CifarFiles,
    /// Fractions of zeros, ascending, that one run passes: a row for each.
    #[arg(long = "sparsity", value_delimiter = ',', default_value = "0.9,0.95,0.98",
          value_parser = support::fraction)]
    pub(crate) sparsities: Vec<f64>,
    /// What prunes in a stage; `dense` is trained for as long.
    #[arg(
        long = "method",
        value_enum,
        value_delimiter = ',',
        default_value = "dense,magnitude,layerwise,chita"
    )]
    pub(crate) methods: Vec<MethodName>,
    /// Stages to the first sparsity, polynomial from 0.5; each further sparsity has one.
    #[arg(long, default_value_t = 4, value_parser = support::at_least_one)]
    pub(crate) stages: usize,
    /// Epochs after the stage that reaches a sparsity.
    #[arg(long, value_name = "EPOCHS", default_value_t = 4, value_parser = support::at_least_one)]
    pub(crate) last_epochs: usize,
    /// Images of a step.
    #[arg(long, default_value_t = 64, value_parser = support::at_least_one)]
    pub(crate) batch: usize,
    /// Compute dtypes of the training: F32, or mixed precision.
    #[arg(
        long = "dtype",
        value_enum,
        value_delimiter = ',',
        default_value = "f32"
    )]
    pub(crate) dtypes: Vec<Dtype>,
    /// Learn from the dense network, too: T = 4, nine tenths of the loss.
    #[arg(long)]
    pub(crate) distill: bool,
    /// Train in Burn's Learner instead of a plain loop.
    #[arg(long)]
    pub(crate) learner: bool,
    /// Training images, at most.
    #[arg(long, value_parser = support::at_least_one)]
    limit: Option<usize>,
    /// Where to compute.
    #[arg(long, value_enum, default_value_t = DeviceName::Flex)]
    pub(crate) device: DeviceName,
    /// Seed of the order of the data.
    #[arg(long, default_value_t = 42)]
    pub(crate) seed: u64,
    /// Repeat with this many seeds, from `--seed` on.
    #[arg(long, default_value_t = 1, value_parser = support::at_least_one)]
    pub(crate) seeds: usize,
    /// Also write the rows to this file, as JSON.
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Passed by cargo.
    #[arg(long, hide = true)]
    bench: bool,
    /// Passed by cargo: nothing is measured.
    #[arg(long, hide = true)]
    pub(crate) test: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum MethodName {
    /// Nothing is pruned.
    Dense,
    Magnitude,
    /// What magnitude keeps, its values fitted layer by layer.
    Fitted,
    /// `Pruner`, without tuning.
    Layerwise,
    /// `PrunerConfig`, from 500 gradients.
    Chita,
}

impl fmt::Display for MethodName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&support::option_name(self))
    }
}

impl Cli {
    /// Refuses what would say nothing.
    pub(crate) fn check(&self) -> Result<(), String> {
        match self.sparsities.is_sorted_by(|a, b| a < b) && self.sparsities[0] > 0.5 {
            true => Ok(()),
            false => Err("`--sparsity`: above 0.5 and ascending, as one run passes them".into()),
        }
    }

    /// Training, validation and test images, normalized as the checkpoints were trained; those of
    /// CIFAR-10 are moved and mirrored in training. No validation image is trained on.
    pub(crate) fn images(&self) -> Result<(ImageSet, support::Images), Box<dyn Error>> {
        let mut images = self.arch.images(self.data.as_deref(), self.cifar_files)?;
        let (train, validation) = images.train.split(VALIDATION);
        images.train = train.take(self.limit.unwrap_or(train.len()));
        if self.arch == Arch::Resnet20 {
            images.train = images.train.augmented();
        }
        Ok((images, validation))
    }
}
