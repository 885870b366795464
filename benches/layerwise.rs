//! Pruning layer by layer: what each part of it adds, on a trained network.
//!
//! ```sh
//! cargo bench --bench layerwise -- --arch resnet20 --data path/to/cifar10 \
//!     --checkpoint resnet20_cifar10.safetensors --sparsity 0.8,0.9 --seed 0,1,2 --json FILE
//! ```
//!
//! A row is a support rule, with dense or fitted values, with the BatchNorm statistics of the dense
//! network or new ones, and a rule for how many weights each layer keeps; its accuracy is on test
//! images, its divergence from the dense network on training images that no layer was fitted to. The
//! seed draws and augments the training images.

#[path = "../examples/support/mod.rs"]
mod support;

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

use burn::module::Module;
use burn::tensor::{Device, Tensor};
use burn_lean::prune::{
    Budget, Pruner, Shares,
    layerwise::{JudgedCandidate, SupportMethod},
};
use clap::Parser;
use support::{Arch, Cell, CifarFiles, DeviceName, ImageSet, MlpNet, ResNet20, Table};

/// What each part of layer-wise pruning adds.
#[derive(Debug, Parser)]
struct Cli {
    /// The network.
    #[arg(long, value_enum, default_value_t = Arch::Mlpnet)]
    arch: Arch,
    /// Folder with MNIST (mlpnet) or CIFAR-10 (resnet20).
    #[arg(long)]
    data: PathBuf,
    /// Which files of CIFAR-10.
    #[arg(long, value_enum, default_value_t = CifarFiles::Original)]
    cifar_files: CifarFiles,
    /// A checkpoint with PyTorch's names.
    #[arg(long, value_name = "FILE.safetensors")]
    checkpoint: PathBuf,
    /// Fractions of zeros.
    #[arg(long, value_delimiter = ',', default_value = "0.8,0.9")]
    sparsity: Vec<f64>,
    /// Seeds of the training images.
    #[arg(long, value_delimiter = ',', default_value = "0")]
    seed: Vec<u64>,
    /// Only some rows, by number from 0: 1,12 for magnitude and what is the default.
    #[arg(long, value_delimiter = ',')]
    only: Vec<usize>,
    /// Also the pruner's own candidates.
    #[arg(long)]
    candidates: bool,
    /// Ridge of a layer.
    #[arg(long)]
    ridge: Option<f64>,
    /// Passes of tuning.
    #[arg(long, default_value_t = 0)]
    tuning: usize,
    /// Training images that judge.
    #[arg(long)]
    held_out: Option<usize>,
    /// Where to compute.
    #[arg(long, value_enum, default_value_t = DeviceName::Flex)]
    device: DeviceName,
    /// Also write the table to this file, as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// What `cargo bench` adds.
    #[arg(long, hide = true)]
    bench: bool,
}

/// Support, fitted values, new statistics, shares.
type Parts = (SupportMethod, bool, bool, Shares);

const PARTS: [Parts; 11] = {
    use SupportMethod::{BestSubset, Magnitude, Obs, SparseGpt, Wanda};
    [
        (Magnitude, false, false, Shares::Magnitude),
        (Magnitude, false, true, Shares::Magnitude),
        (Magnitude, true, false, Shares::Magnitude),
        (Magnitude, true, true, Shares::Magnitude),
        (Wanda, true, true, Shares::Magnitude),
        (SparseGpt, true, true, Shares::Magnitude),
        (Obs, true, true, Shares::Magnitude),
        (BestSubset, true, false, Shares::Magnitude),
        (BestSubset, true, true, Shares::Lamp),
        (BestSubset, true, true, Shares::Magnitude),
        (BestSubset, true, true, Shares::Auto),
    ]
};

fn main() -> ExitCode {
    support::init_tracing();
    support::exit(run(&Cli::parse()))
}

fn run(cli: &Cli) -> Result<(), Box<dyn Error>> {
    let device = cli.device.open()?;
    let mut images = cli.arch.images(Some(&cli.data), cli.cifar_files)?;
    match cli.arch {
        Arch::Mlpnet => {
            let model = support::load(MlpNet::new(images.train.side(), &device), &cli.checkpoint)?;
            study(cli, &images, &device, model, |model, x| model.forward(x))
        }
        Arch::Resnet20 => {
            images.train = images.train.augmented();
            let model = support::load(ResNet20::new(&device), &cli.checkpoint)?;
            let model = support::recalibrated(model, ResNet20::forward, &images.train, &device)?;
            study(cli, &images, &device, model, |model, x| model.forward(x))
        }
    }
}

fn study<M: Module + 'static>(
    cli: &Cli,
    images: &ImageSet,
    device: &Device,
    model: M,
    forward: impl Fn(&M, Tensor<4>) -> Tensor<2>,
) -> Result<(), Box<dyn Error>> {
    let accuracy = |model: &M| support::accuracy(&images.test, device, |x| forward(model, x));
    let mut table = Table::new(
        format!("{}: dense {:.2} %", images.name, accuracy(&model)),
        &[
            "support",
            "values",
            "statistics",
            "shares",
            "sparsity",
            "seed",
            "accuracy",
            "divergence",
            "disagreement",
            "seconds",
        ],
    );
    let is_wanted = |at: usize| cli.only.is_empty() || cli.only.contains(&at);
    let parts = || PARTS.iter().enumerate().filter(|(at, _)| is_wanted(*at));
    for sparsity in &cli.sparsity {
        for seed in &cli.seed {
            for (_, (support, refit, recalibrate, shares)) in parts() {
                let mut pruner = Pruner::new(Budget::Sparsity(*sparsity));
                pruner.support = Some(*support);
                pruner.refit = *refit;
                pruner.recalibrate = *recalibrate;
                pruner.shares = *shares;
                pruner.candidates = cli.candidates;
                pruner.ridge = cli.ridge.unwrap_or(pruner.ridge);
                pruner.tuning = Some(cli.tuning);
                pruner.held_out = cli.held_out.unwrap_or(pruner.held_out);
                let inputs = images.train.shuffled(*seed, 256, device);
                let inputs = inputs.map(|batch| batch.images);
                let pruned = pruner.prune(model.clone(), &forward, inputs)?;
                let report = &pruned.report;
                if cli.candidates {
                    println!("{report}");
                }
                let is_chosen = |one: &&JudgedCandidate| one.candidate == report.chosen;
                let judged = report.candidates.iter().find(is_chosen);
                let judged = judged.ok_or("a report names one of its candidates")?;
                table.push([
                    format!("{support:?}").as_str().into(),
                    if *refit { "fitted" } else { "dense" }.into(),
                    if *recalibrate { "new" } else { "dense" }.into(),
                    format!("{shares:?}").as_str().into(),
                    Cell::Number(*sparsity, 2),
                    Cell::Integer(*seed),
                    Cell::Number(accuracy(&pruned.model), 2),
                    Cell::Number(judged.divergence, 5),
                    Cell::Number(judged.disagreement, 4),
                    Cell::Number(pruned.report.seconds, 1),
                ]);
            }
        }
    }
    table.publish(cli.json.as_deref())?;
    Ok(())
}
