//! From training to a small, fast model by a recipe in a file: mixed precision, pruning,
//! quantization, export. Killed at any moment, it goes on where it was; at the end a report says how
//! far the small model can be trusted.
//!
//! ```sh
//! cargo run -p burn-lean --release --example recipe                                    # the embedded digits
//! cargo run -p burn-lean --release --example recipe -- --state state --report report.html
//! cargo run -p burn-lean --release --example recipe -- \
//!     --config examples/recipe/resnet20.toml --data path/to/data
//! ```
//!
//! `--config` is a recipe (TOML or JSON) with a table `task` for the example itself: the network
//! (`attention`, `mlpnet`, `resnet20`), its batch size, a checkpoint. `--data` is a folder with the
//! files of MNIST (of CIFAR-10 for `resnet20`), or with folders `mnist` and `cifar10`. Bounds, a table
//! `bounds` of the recipe or `--max-accuracy-drop`, make it the gate of a CI: where one is broken, the exit code
//! is 1.

#[path = "recipe/data.rs"]
mod data;
mod support;

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

use burn::nn::loss::CrossEntropyLossConfig;
use burn::tensor::{Device, Tensor};
use burn_lean::recipe::{Bounds, Latency, Recipe, RecipeError, Run, Task, TrustConfig};
use clap::Parser;
use data::{NetworkName, TaskTable};
use support::{AttentionNet, Cell, DeviceName, ImageSet, MlpNet, Network, ResNet20, Table};

/// The recipe without `--config`.
const DIGITS: &str = include_str!("recipe/digits.toml");

/// Train, prune, quantize and export by a recipe.
#[derive(Debug, Parser)]
#[command(allow_negative_numbers = true)]
struct Cli {
    /// The recipe, `.toml` or `.json` [default: examples/recipe/digits.toml].
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Folder with MNIST or CIFAR-10; without it, the embedded 8×8 digits.
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
    /// Keep finished stages and checkpoints in this folder, and go on from there.
    #[arg(long, value_name = "DIR")]
    state: Option<PathBuf>,
    /// Folder for the models.
    #[arg(long, value_name = "DIR", default_value = "out/recipe")]
    out: PathBuf,
    /// Also write the printed table to this file, as JSON.
    #[arg(long, value_name = "FILE", value_parser = support::output_file)]
    json: Option<PathBuf>,
    /// Instead of the seed of the recipe.
    #[arg(long)]
    seed: Option<u64>,
    /// Where to compute.
    #[arg(long, value_enum, default_value_t = DeviceName::Flex)]
    device: DeviceName,
    /// Compare the last model with the dense one on the test images; a page, and beside it JSON (`.trust.json`).
    #[arg(long, value_name = "FILE.html", value_parser = support::output_file)]
    report: Option<PathBuf>,
    /// Accuracy that the last model may lose [points], instead of that of the recipe's `bounds`, which may have
    /// more of them; where one is broken, the exit code is 1.
    #[arg(long, value_parser = points)]
    max_accuracy_drop: Option<f64>,
}

/// Below 0 for a model that has to gain.
fn points(text: &str) -> Result<f64, String> {
    support::number(
        text,
        |points: &f64| points.is_finite(),
        "must be a finite number",
    )
}

fn main() -> ExitCode {
    support::init_tracing();
    support::exit(run(&Cli::parse()))
}

fn run(cli: &Cli) -> Result<(), Box<dyn Error>> {
    let (mut recipe, table): (Recipe, TaskTable) = match &cli.config {
        Some(path) => Recipe::open_with(path, "task")?,
        None => Recipe::from_toml_with(DIGITS, "task")?,
    };
    recipe.seed = cli.seed.unwrap_or(recipe.seed);
    let device = cli.device.open()?.autodiff();
    let images = table.images(cli.data.as_deref())?;
    device.seed(recipe.seed);
    let side = images.train.side();
    match table.network {
        NetworkName::Attention => {
            let model = AttentionNet::new(side, &device);
            cook(cli, &recipe, &table, &images, &device, model)
        }
        NetworkName::MlpNet => {
            let model = MlpNet::new(side, &device);
            cook(cli, &recipe, &table, &images, &device, model)
        }
        NetworkName::ResNet20 => {
            let model = ResNet20::new(&device);
            cook(cli, &recipe, &table, &images, &device, model)
        }
    }
}

/// Runs the recipe on a network.
fn cook<M: Network>(
    cli: &Cli,
    recipe: &Recipe,
    table: &TaskTable,
    images: &ImageSet,
    device: &Device,
    mut model: M,
) -> Result<(), Box<dyn Error>> {
    if let Some(path) = table.checkpoint(cli.config.as_deref(), cli.data.as_deref())? {
        model = support::load(model, &path)?;
        // The statistics of a checkpoint may be of other pixels. Images as the network was trained with,
        // moved and mirrored where the recipe says so; without BatchNorm nothing happens.
        model = support::recalibrated(model, M::logits, &images.train, device)?;
    }
    let cross_entropy = CrossEntropyLossConfig::new().init(device);
    let inner = device.clone().without_autodiff();
    let test = || {
        let batches = images.test.ordered(250, &inner);
        batches.map(|batch| (batch.images, batch.labels))
    };
    let task = Task::new(
        |model: &M, images: Tensor<4>| model.logits(images),
        |logits, labels| cross_entropy.forward(logits, labels),
        |seed| {
            let batches = images.train.shuffled(seed, table.batch_size, device);
            batches.map(|batch| (batch.images, batch.labels))
        },
    )
    .with_logits(|logits: &Tensor<2>| logits.clone())
    .with_evaluation(|predict| {
        let mut correct = 0;
        for (images, labels) in test() {
            let predicted = predict(images)?.argmax(1).flatten::<1>(0, 1);
            correct += predicted.equal(labels).int().sum().into_scalar::<i64>();
        }
        Ok::<_, RecipeError>(100.0 * correct as f64 / images.test.len() as f64)
    });

    let mut run = Run::new(recipe)
        .with_latency(Latency::Engine)
        .with_output(&cli.out)
        .with_identity(table.identity(images))?;
    if let Some(state) = &cli.state {
        run = run.with_state(state);
    }
    let outcome = run.run(model, &task)?;

    let mut rows = Table::new(
        format!(
            "{}: {} training and {} test images, seed {}",
            images.name,
            images.train.len(),
            images.test.len(),
            recipe.seed
        ),
        &[
            "stage",
            "accuracy",
            "bytes",
            "nonzeros",
            "latency_ms",
            "seconds",
        ],
    );
    for row in outcome.rows() {
        rows.push([
            row.stage.clone().into(),
            Cell::optional(row.accuracy, 2),
            Cell::Integer(row.bytes),
            Cell::Integer(row.nonzeros),
            Cell::optional(row.latency_ms, 3),
            Cell::Number(row.seconds, 1),
        ]);
    }
    rows.publish(cli.json.as_deref())?;
    println!("models: {}", cli.out.display());

    let bounds = Bounds {
        max_accuracy_drop: cli.max_accuracy_drop.or(recipe.bounds.max_accuracy_drop),
        ..recipe.bounds
    };
    if cli.report.is_none() && bounds == Bounds::default() {
        return Ok(());
    }
    let trust = TrustConfig::new().with_bounds(bounds).compare(
        &task,
        outcome.dense(),
        outcome.last(),
        test,
    )?;
    if let Some(path) = &cli.report {
        trust.save(path)?;
        println!("report: {}", path.display());
    }
    Ok(trust.check()?)
}
