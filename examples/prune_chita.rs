//! Prunes a trained network at several sparsities: by magnitude, by `Pruner` with nothing chosen, and
//! by CHITA.
//!
//! ```sh
//! cargo run -p burn-lean --release --example prune_chita                          # the embedded 8×8 digits
//! cargo run -p burn-lean --release --example prune_chita -- --data path/to/cifar10 --arch resnet20 \
//!     --checkpoint resnet20_cifar10.safetensors --cifar-files original --augment --sparsity 0.8
//! ```
//!
//! `Pruner` wants inputs, no labels; `PrunerConfig` (CHITA) wants a loss. Running statistics of BatchNorm
//! are measured anew: by `Pruner` on its way, by CHITA where that lowers the loss on held-out examples, by
//! the example behind magnitude; `--no-recalibration` leaves them alone. What CHITA can be told is in
//! `benches/chita.rs`.

#[path = "prune_chita/options.rs"]
mod options;
mod support;

use std::error::Error;
use std::process::ExitCode;
use std::time::Instant;

use burn::module::Module;
use burn::tensor::{Int, Tensor};
use burn_lean::prune::{
    Budget, FisherConfig, Masks, Pruner, PrunerConfig, RunningStatistics, Selection, SolverConfig,
    SparsityPattern,
};
use clap::Parser;
use options::{Arch, Cli, MethodName};
use support::{Cell, ImageEncoder, ImageSet, MlpNet, PeakMemory, ResNet8, ResNet20, Table};

#[rustfmt::skip]
const COLUMNS: [&str; 9] = [
    "method", "stages", "sparsity", "accuracy", "objective", "nonzeros", "gradient_seconds",
    "solve_seconds", "peak_bytes",
];

fn main() -> ExitCode {
    support::init_tracing();
    support::exit(run(&Cli::parse()))
}

fn run(cli: &Cli) -> Result<(), Box<dyn Error>> {
    cli.check()?;
    let images = cli.images()?;
    let device = cli.device.open()?;
    device.seed(cli.seed);
    let (side, device) = (images.train.side(), device.autodiff());
    match cli.arch {
        Arch::Mlpnet => compare(cli, &images, MlpNet::new(side, &device), MlpNet::forward),
        Arch::Encoder => {
            let model = ImageEncoder::new(side, &device);
            compare(cli, &images, model, ImageEncoder::forward)
        }
        Arch::Resnet8 => compare(cli, &images, ResNet8::new(&device), ResNet8::forward),
        Arch::Resnet20 => compare(cli, &images, ResNet20::new(&device), ResNet20::forward),
    }
}

/// Every method at every sparsity.
fn compare<M: Module + 'static>(
    cli: &Cli,
    images: &ImageSet,
    model: M,
    forward: impl Fn(&M, Tensor<4>) -> Tensor<2>,
) -> Result<(), Box<dyn Error>> {
    let device = cli.device.open()?;
    let accuracy = |model: &M| {
        let model = model.valid();
        support::accuracy(&images.test, &device, |x| forward(&model, x))
    };
    let inputs = |seed: u64| images.train.endless(seed, 256, &device);
    let recalibrated = |model: M| support::recalibrated(model, &forward, &images.train, &device);
    let model = match &cli.checkpoint {
        // The statistics of a checkpoint may be stale, too.
        Some(path) => recalibrated(support::load(model, path)?)?,
        None => support::train(model, &forward, &images.train, 30, cli.seed),
    };
    let title = format!("{}: dense {:.2} %", images.name, accuracy(&model));
    let mut table = Table::new(title, &COLUMNS);
    let memory = PeakMemory::start();
    for method in &cli.methods {
        for sparsity in &cli.sparsities {
            let budget = Budget::Sparsity(*sparsity);
            let start = Instant::now();
            memory.forget_peak();
            let (pruned, masks, stages) = match method {
                MethodName::Magnitude => {
                    let selection = Selection::of(&model, None)?;
                    let pattern = SparsityPattern::Unstructured;
                    let masks = Masks::by_magnitude(&model, &selection, &pattern, &budget)?;
                    let pruned = masks.attach(model.clone())?.materialize();
                    (pruned, masks, Vec::new())
                }
                MethodName::Default => {
                    let mut pruner = Pruner::new(budget);
                    pruner.recalibrate = !cli.no_recalibration;
                    // Once: what judges is not what layers were fitted to.
                    let batches = images.train.shuffled(cli.seed, 256, &device);
                    let batches = batches.map(|batch| batch.images);
                    let pruned = pruner.prune(model.clone(), &forward, batches)?;
                    println!("{}", pruned.report);
                    (pruned.model, pruned.masks, Vec::new())
                }
                MethodName::Chita | MethodName::ChitaPlusPlus => {
                    let fisher = FisherConfig::new(1000.min(images.train.len() / 2));
                    let loss = |model: &M, (x, labels): &(Tensor<4>, Tensor<1, Int>)| {
                        support::cross_entropy(forward(model, x.clone()), labels.clone())
                    };
                    let batches = |seed| inputs(seed).map(|batch| (batch.images, batch.labels));
                    let stages = match method {
                        MethodName::ChitaPlusPlus => cli.stages.unwrap_or(16),
                        _ => 1,
                    };
                    let statistics = match cli.no_recalibration {
                        true => RunningStatistics::Kept,
                        false => RunningStatistics::Judged,
                    };
                    let config = PrunerConfig::new(SolverConfig::new(budget), fisher)
                        .with_stages(stages)
                        .with_running_statistics(statistics)
                        .with_seed(cli.seed);
                    let pruned = config.prune(model.clone(), loss, batches)?;
                    (pruned.model, pruned.masks, pruned.stages)
                }
            };
            let gradients: f64 = stages.iter().map(|stage| stage.gradients.seconds).sum();
            let seconds = start.elapsed().as_secs_f64() - gradients;
            let peak = memory.bytes();
            // The others have done so, or have found it worse.
            let pruned = match (method, cli.no_recalibration) {
                (MethodName::Magnitude, false) => recalibrated(pruned)?,
                _ => pruned,
            };
            table.push([
                method.to_string().into(),
                Cell::Integer(stages.len().max(1) as u64),
                Cell::Number(*sparsity, 4),
                Cell::Number(accuracy(&pruned), 2),
                Cell::optional(stages.last().map(|stage| stage.objective), 4),
                Cell::Integer(masks.nonzeros() as u64),
                Cell::Number(gradients, 2),
                Cell::Number(seconds, 3),
                Cell::optional_integer(peak),
            ]);
        }
    }
    Ok(table.publish(cli.json.as_deref())?)
}
