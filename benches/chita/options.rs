//! The command line of the study.

use std::error::Error;
use std::fmt;
use std::path::PathBuf;

use burn::module::ParamGroup;
use burn::tensor::FloatDType;
use burn_lean::prune::{
    Budget, ChitaConfig, DeadColumns, FisherConfig, PruneError, Ridge, RidgeChoice,
    RunningStatistics, Selection, SparsityPattern, SparsitySchedule, fisher::FisherReport,
    run::StageReport,
};
use clap::{Parser, ValueEnum};

use crate::support::{self, Arch, CifarFiles, DeviceName, ImageSet};

/// Share of the training images that `--validate` takes.
const VALIDATED: f64 = 0.1;

/// Stages of chita++.
const STAGES: usize = 16;
/// Sparsity of the first of them.
const BASE: f64 = 0.1;

/// Prune a trained network at several sparsities and compare methods.
#[derive(Debug, Parser)]
pub(crate) struct Cli {
    /// Methods to compare [default: magnitude,obd,chita,chita++].
    #[arg(long = "method", value_enum, value_delimiter = ',')]
    methods: Vec<MethodName>,
    /// Fractions of zeros [default: 0.5,0.7,0.8,0.9].
    #[arg(long = "sparsity", value_delimiter = ',', value_parser = fraction)]
    sparsities: Vec<f64>,
    /// Compare ways to put what CHITA keeps on a grid of so many bits, instead of methods; a sparsity
    /// of 0 prunes nothing.
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u8).range(2..=8),
          conflicts_with = "methods")]
    pub(crate) bits: Vec<u8>,
    /// Stages of chita++.
    #[arg(long, default_value_t = STAGES, value_parser = support::at_least_one)]
    pub(crate) stages: usize,
    /// How the sparsity rises over the stages of chita++.
    #[arg(long, value_enum, default_value_t = ScheduleName::Exponential)]
    schedule: ScheduleName,
    /// Sparsity of the first stage of chita++, at most that of the run.
    #[arg(long, default_value_t = BASE, value_parser = fraction)]
    base: f64,
    /// Run chita++ once, to the highest sparsity, with a row for the first stage that reaches each
    /// of the sparsities.
    #[arg(long)]
    pub(crate) one_run: bool,
    /// Leave out parameters whose path contains this; the published ResNet20 figures leave out
    /// `downsample`.
    #[arg(long, value_name = "TEXT")]
    exclude: Option<String>,
    /// What solves the stages of chita++.
    #[arg(long, value_enum, default_value_t = MethodName::Chita)]
    pub(crate) stage_method: MethodName,
    /// Rounds of splicing of `chita`, at most; several for a row each [default: that of the library].
    #[arg(long, value_delimiter = ',', value_name = "ROUNDS")]
    splices: Vec<usize>,
    /// Keep at most N of every M inputs of an output, besides the sparsity.
    #[arg(long, value_name = "N:M", value_parser = support::pattern)]
    pattern: Option<SparsityPattern>,
    /// Also the objective of what methods with one stage find over as many fresh samples.
    #[arg(long)]
    pub(crate) fresh: bool,
    /// Fisher samples n [default: 1000; 500 for the embedded digits].
    #[arg(long, value_parser = support::at_least_one)]
    samples: Option<usize>,
    /// Examples m that are averaged into one Fisher sample [default: 1; 16 where only chita++ runs].
    #[arg(long, value_parser = support::at_least_one)]
    batch_size: Option<usize>,
    /// Storage of the gradients.
    #[arg(long, value_enum, default_value_t = StorageName::F32)]
    storage: StorageName,
    /// Ridge on the normalised Fisher [default: a sweep, judged on held-out training images].
    #[arg(long, value_parser = support::positive)]
    pub(crate) ridge: Option<f64>,
    /// Try every ridge with gradients that are made equally long, too: those of the few images that
    /// the network gets wrong are the longest by far.
    #[arg(long)]
    temper: bool,
    /// Let weights without any gradient compete, at the price of the ridge, instead of pruning them
    /// first. The objectives of the published solver are of that kind.
    #[arg(long)]
    dead_columns_priced: bool,
    /// Training images that judge a sweep.
    #[arg(long, default_value_t = 1000, value_parser = support::at_least_one)]
    pub(crate) held_out: usize,
    /// A checkpoint with PyTorch's names, instead of training; needs `--data`.
    #[arg(long, value_name = "FILE.safetensors", requires = "data")]
    pub(crate) checkpoint: Option<PathBuf>,
    /// The network [default: mlpnet].
    #[arg(long, value_enum)]
    arch: Option<Arch>,
    /// Folder with MNIST (mlpnet) or CIFAR-10 (resnet20); without it, the embedded 8×8 digits.
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
    /// Which files of CIFAR-10.
    #[arg(long, value_enum, default_value_t = CifarFiles::Standard)]
    cifar_files: CifarFiles,
    /// Move and mirror the training images at random, as is usual for CIFAR-10.
    #[arg(long)]
    augment: bool,
    /// BatchNorm statistics of a pruned network [default: judged; recomputed beside `default`].
    #[arg(long, value_enum)]
    running_statistics: Option<StatisticsName>,
    /// Take the last tenth of the training images for the test images, to choose settings on.
    #[arg(long)]
    validate: bool,
    /// Training images, at most.
    #[arg(long, value_parser = support::at_least_one)]
    limit: Option<usize>,
    /// Test images, at most.
    #[arg(long, value_parser = support::at_least_one)]
    test_limit: Option<usize>,
    /// Epochs of training, where there is no checkpoint.
    #[arg(long, default_value_t = 30, value_parser = support::at_least_one)]
    pub(crate) epochs: usize,
    /// Where to compute.
    #[arg(long, value_enum, default_value_t = DeviceName::Flex)]
    pub(crate) device: DeviceName,
    /// Seed of the weights and of the order of the data.
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
    /// Also write the table to this file, as JSON.
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// What `cargo bench` adds.
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum StorageName {
    F32,
    F16,
    Bf16,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum StatisticsName {
    /// New ones where they lower the loss on held-out images.
    Judged,
    /// New ones.
    Recomputed,
    /// Those of the dense network.
    Kept,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum MethodName {
    Random,
    Magnitude,
    /// `Pruner` with nothing chosen: layer by layer, without labels.
    Default,
    /// Optimal Brain Damage: the diagonal of the Fisher.
    Obd,
    /// Inverted blocks of the Fisher.
    #[value(name = "woodfisher")]
    WoodFisher,
    /// Magnitude, then the exact regression on the kept weights.
    BackSolve,
    /// One stage of CHITA.
    Chita,
    /// Several stages of CHITA with fresh gradients.
    #[value(name = "chita++")]
    ChitaPlusPlus,
}

impl MethodName {
    pub(crate) fn is_staged(self) -> bool {
        self == Self::ChitaPlusPlus
    }

    /// Whether its support and values need no gradient.
    pub(crate) fn is_without_gradients(self) -> bool {
        matches!(self, Self::Magnitude | Self::Default)
    }
}

impl MethodName {
    /// Whether its solution depends on a ridge.
    pub(crate) fn has_ridge(self) -> bool {
        !matches!(self, Self::Random | Self::Magnitude | Self::Default)
    }
}

impl fmt::Display for MethodName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&support::option_name(self))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum ScheduleName {
    Exponential,
    Polynomial,
    Linear,
    Constant,
}

impl Cli {
    pub(crate) fn methods(&self) -> Vec<MethodName> {
        use MethodName::*;
        match self.methods.is_empty() {
            true => vec![Magnitude, Obd, Chita, ChitaPlusPlus],
            false => self.methods.clone(),
        }
    }

    pub(crate) fn has_default(&self) -> bool {
        self.methods().contains(&MethodName::Default)
    }

    pub(crate) fn sparsities(&self) -> Vec<f64> {
        match self.sparsities.is_empty() {
            true => vec![0.5, 0.7, 0.8, 0.9],
            false => self.sparsities.clone(),
        }
    }

    pub(crate) fn arch(&self) -> Arch {
        self.arch.unwrap_or(Arch::Mlpnet)
    }

    pub(crate) fn samples(&self) -> usize {
        let default = if self.data.is_some() { 1000 } else { 500 };
        self.samples.unwrap_or(default)
    }

    pub(crate) fn batch_size(&self) -> usize {
        let mut methods = self.methods().into_iter();
        let only_staged = self.bits.is_empty() && methods.all(|method| method.is_staged());
        self.batch_size.unwrap_or(if only_staged { 16 } else { 1 })
    }

    /// How gradients are collected.
    pub(crate) fn fisher(&self) -> FisherConfig {
        let dtype = match self.storage {
            StorageName::F32 => FloatDType::F32,
            StorageName::F16 => FloatDType::F16,
            StorageName::Bf16 => FloatDType::BF16,
        };
        FisherConfig::new(self.samples())
            .with_batch_size(self.batch_size())
            .with_dtype(dtype)
    }

    pub(crate) fn ridge(&self) -> RidgeChoice {
        let swept = [1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0];
        // Each with gradients as they are, and with all of them equally long.
        let tempered = |ridges: &[f64]| {
            let both = |value: f64| {
                [0.0, 1.0].map(|exponent| Ridge {
                    value,
                    first_order: None,
                    tempering: Some(exponent),
                })
            };
            RidgeChoice::Sweep(ridges.iter().copied().flat_map(both).collect())
        };
        match (self.ridge, self.temper) {
            (None, false) => RidgeChoice::sweep(),
            (Some(ridge), false) => RidgeChoice::Fixed(ridge),
            (None, true) => tempered(&swept),
            (Some(ridge), true) => tempered(&[ridge]),
        }
    }

    /// What CHITA is run with: one config for each number of rounds.
    pub(crate) fn chita(&self) -> Vec<ChitaConfig> {
        match self.splices.is_empty() {
            true => vec![ChitaConfig::new()],
            false => {
                let rounds = self.splices.iter();
                rounds
                    .map(|rounds| ChitaConfig::new().with_max_splices(*rounds))
                    .collect()
            }
        }
    }

    pub(crate) fn pattern(&self) -> SparsityPattern {
        let pattern = self.pattern.clone();
        pattern.unwrap_or(SparsityPattern::Unstructured)
    }

    pub(crate) fn running_statistics(&self) -> RunningStatistics {
        match self.running_statistics {
            None if self.has_default() => RunningStatistics::Recomputed,
            None | Some(StatisticsName::Judged) => RunningStatistics::Judged,
            Some(StatisticsName::Recomputed) => RunningStatistics::Recomputed,
            Some(StatisticsName::Kept) => RunningStatistics::Kept,
        }
    }

    pub(crate) fn dead_columns(&self) -> DeadColumns {
        match self.dead_columns_priced {
            true => DeadColumns::Priced,
            false => DeadColumns::PrunedFirst,
        }
    }

    /// The sparsities that chita++ has runs for.
    pub(crate) fn staged_sparsities(&self) -> Vec<f64> {
        match self.one_run {
            true => vec![self.highest_sparsity()],
            false => self.sparsities(),
        }
    }

    pub(crate) fn highest_sparsity(&self) -> f64 {
        self.sparsities().into_iter().fold(0.0, f64::max)
    }

    /// Refuses options that none of the methods would look at.
    pub(crate) fn check(&self) -> Result<(), String> {
        let given = [
            ("--one-run", self.one_run),
            ("--stages", self.stages != STAGES),
            ("--base", self.base != BASE),
        ];
        let staged = self.methods().iter().any(|method| method.is_staged());
        match given.iter().find(|(_, given)| *given && !staged) {
            Some((option, _)) => Err(format!("`{option}` is about `--method chita++`")),
            None => Ok(()),
        }
    }

    /// Refuses what would keep none or all of the prunable weights, of which there are
    /// `parameters`, in a run or a stage.
    pub(crate) fn check_sparsities(&self, parameters: usize) -> Result<(), PruneError> {
        let mut targets = self.sparsities();
        if self.bits.is_empty() && self.methods().iter().any(|method| method.is_staged()) {
            for sparsity in self.staged_sparsities() {
                targets.extend(self.schedule().targets(sparsity, self.stages)?);
            }
        }
        for target in targets {
            let k = Budget::kept_count(target, parameters)?;
            if k == parameters && !self.bits.is_empty() {
                continue;
            }
            if k == 0 || k >= parameters {
                return Err(PruneError::KeptCount {
                    k,
                    parameters,
                    path: None,
                });
            }
        }
        Ok(())
    }

    /// Refuses a text to leave out that no path contains.
    pub(crate) fn check_exclude(&self, default: &Selection) -> Result<(), String> {
        let layers = default.layout().layers();
        match &self.exclude {
            Some(text) if !layers.iter().any(|layer| layer.path.contains(text)) => {
                let paths: Vec<&str> = layers.iter().map(|layer| layer.path.as_str()).collect();
                let paths = paths.join(", ");
                Err(format!(
                    "`--exclude {text}` is in none of the paths {paths}"
                ))
            }
            _ => Ok(()),
        }
    }

    /// The parameters to prune, given those of the default.
    pub(crate) fn group(&self, default: &Selection) -> Option<ParamGroup> {
        let exclude = self.exclude.as_ref()?;
        let layers = default
            .layout()
            .layers()
            .iter()
            .map(|layer| layer.path.clone());
        Some(ParamGroup::from_paths(
            layers.filter(|path| !path.contains(exclude)).collect(),
        ))
    }

    pub(crate) fn schedule(&self) -> SparsitySchedule {
        let base = self.base;
        match self.schedule {
            ScheduleName::Exponential => SparsitySchedule::Exponential { base },
            ScheduleName::Polynomial => SparsitySchedule::Polynomial { base },
            ScheduleName::Linear => SparsitySchedule::Linear { base },
            ScheduleName::Constant => SparsitySchedule::Constant,
        }
    }

    /// The data, normalized as the checkpoints of the architecture were trained.
    pub(crate) fn images(&self) -> Result<ImageSet, Box<dyn Error>> {
        let arch = self.arch();
        let mut images = arch.images(self.data.as_deref(), self.cifar_files)?;
        if self.validate {
            (images.train, images.test) = images.train.split(VALIDATED);
        }
        if let Some(limit) = self.limit {
            images.train = images.train.take(limit);
        }
        if let Some(limit) = self.test_limit {
            images.test = images.test.take(limit);
        }
        if self.augment {
            images.train = images.train.augmented();
        }
        Ok(images)
    }
}

/// Reads a sparsity.
fn fraction(text: &str) -> Result<f64, String> {
    let fits = |fraction: &f64| (0.0..1.0).contains(fraction);
    support::number(text, fits, "a sparsity is in [0, 1): 0.9 is 90 % zeros")
}

/// One line on a collection of gradients.
pub(crate) fn gradients(report: &FisherReport) -> String {
    let zeros: usize = report.zero_columns.iter().map(|(_, count)| count).sum();
    let how = match &report.fallback {
        Some(reason) => format!("one backward pass each, since {reason}"),
        None => format!("{} of them batched", report.batched_rows),
    };
    format!(
        "gradients: {} samples of {} examples in {:.2} s ({how}), {} bytes, mean loss {:.4}, \
         {zeros} weights without any gradient",
        report.samples, report.batch_size, report.seconds, report.bytes, report.loss
    )
}

/// One line on a stage.
pub(crate) fn stage(stage: &StageReport) -> String {
    format!(
        "stage {:>2}/{}: sparsity {:.4}, objective {:.4}, loss before {:.4}, gradients {:.1} s, \
         solver {:.1} s, ridge {:e}",
        stage.stage + 1,
        stage.stages,
        stage.target,
        stage.objective,
        stage.gradients.loss,
        stage.gradients.seconds,
        stage.solve_seconds,
        stage.ridge.value
    )
}
