//! Pruning: how fast gradients come, how the solver scales.
//!
//! `cargo bench --bench prune -- --json FILE`
//!
//! Gradients: seconds of n Fisher samples against n backward passes whose gradients are dropped.
//! Scaling: CPU time and memory of one solution of made-up problems at 90 % sparsity, with the
//! exponents that fit them best. Budgets: what a bound of the operations and what blocks add to that. Disk: a
//! stage whose gradients are in memory, and in a file of the folder `--on-disk`.

#[path = "support/mod.rs"]
mod harness;
#[path = "prune/scaling.rs"]
mod scaling;
#[path = "../examples/support/mod.rs"]
mod support;

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Distribution, Int, Tensor};
use burn_lean::prune::{FisherConfig, Selection, fisher::GradientMethod};
use clap::Parser;
use harness::ConvNet;
use support::{Cell, DeviceName, MlpNet, ResNet20, Table};

/// Benchmark of pruning.
#[derive(Parser)]
struct Arguments {
    /// Where to compute.
    #[arg(long, value_enum, default_value_t = DeviceName::Flex)]
    device: DeviceName,
    /// Only tables whose name contains this: `gradients`, `scaling`, `budgets`, `disk`.
    #[arg(long, default_value = "")]
    table: String,
    /// Of the gradients, only networks whose name contains this.
    #[arg(long, default_value = "")]
    network: String,
    /// Folder for the files of the table `disk` [default: that for temporary files].
    #[arg(long, value_name = "DIR")]
    on_disk: Option<PathBuf>,
    /// Runs of each variant; the fastest counts.
    #[arg(long, default_value_t = 3, value_parser = support::at_least_one)]
    samples: usize,
    /// Also write the tables to FILE-gradients.json and so on.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Solve one made-up problem with p weights and n samples, and print seconds and bytes: what
    /// the scaling table starts a process for, so that memory is not used a second time.
    #[arg(long, num_args = 2, value_names = ["P", "N"], hide = true)]
    one: Option<Vec<usize>>,
    /// Passed by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> ExitCode {
    support::exit(run(&Arguments::parse()))
}

fn run(arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    let device = arguments.device.open()?;
    device.seed(0);
    if let Some([p, n]) = arguments.one.as_deref() {
        return scaling::one(*p, *n, &device, arguments.samples);
    }
    if "gradients".contains(&arguments.table) {
        gradients(arguments, &device)?;
    }
    if "scaling".contains(&arguments.table) {
        let table = scaling::scaling(arguments.device, arguments.samples)?;
        table.publish_as(arguments.json.as_deref(), "scaling")?;
    }
    if "budgets".contains(&arguments.table) {
        let table = scaling::budgets(&device, arguments.samples)?;
        table.publish_as(arguments.json.as_deref(), "budgets")?;
    }
    if "disk".contains(&arguments.table) {
        let folder = arguments.on_disk.clone().unwrap_or_else(std::env::temp_dir);
        let table = scaling::disk(&device, &folder)?;
        table.publish_as(arguments.json.as_deref(), "disk")?;
    }
    Ok(())
}

/// Layers whose gradients of one example are far larger than what they are made of.
#[derive(Module, Debug)]
struct WideMlp {
    layers: [Linear; 3],
}

impl WideMlp {
    fn new(device: &Device) -> Self {
        let sizes = [(784, 1024), (1024, 1024), (1024, 10)];
        Self {
            layers: sizes.map(|(from, to)| LinearConfig::new(from, to).init(device)),
        }
    }

    fn forward(&self, images: Tensor<4>) -> Tensor<2> {
        let [first, second, third] = &self.layers;
        let x = relu(first.forward(images.flatten(1, 3)));
        third.forward(relu(second.forward(x)))
    }
}

type Images = (Tensor<4>, Tensor<1, Int>);

fn gradients(arguments: &Arguments, device: &Device) -> Result<(), Box<dyn Error>> {
    let mut table = Table::new(
        "gradient collection",
        &[
            "network",
            "weights",
            "n",
            "m",
            "passes_s",
            "plain_s",
            "batched_s",
            "plain/passes",
            "batched/passes",
        ],
    );
    let mlp = MlpNet::new(28, &device.clone().autodiff());
    let wide = WideMlp::new(&device.clone().autodiff());
    let small = ConvNet::new(false, &device.clone().autodiff());
    let residual = ResNet20::new(&device.clone().autodiff());
    let runs = arguments.samples;
    let wanted = |name: &str| name.contains(&arguments.network);
    let name = "mlp 784-40-20-10";
    for size in [[1000, 1], [1000, 16]].into_iter().filter(|_| wanted(name)) {
        let forward = |model: &MlpNet, x| model.forward(x);
        table.push(row(name, &mlp, forward, [1, 28], size, runs)?);
    }
    let name = "mlp 784-1024-1024-10";
    for size in [[100, 1], [50, 4]].into_iter().filter(|_| wanted(name)) {
        let forward = |model: &WideMlp, x| model.forward(x);
        table.push(row(name, &wide, forward, [1, 28], size, runs)?);
    }
    let name = "two convolutions";
    for size in [[200, 1], [50, 16]].into_iter().filter(|_| wanted(name)) {
        let forward = |model: &ConvNet, x| model.forward(x);
        table.push(row(name, &small, forward, [3, 32], size, runs)?);
    }
    let name = "resnet20";
    for size in [[200, 1], [50, 16]].into_iter().filter(|_| wanted(name)) {
        let forward = |model: &ResNet20, x| model.forward(x);
        table.push(row(name, &residual, forward, [3, 32], size, runs)?);
    }
    Ok(table.publish_as(arguments.json.as_deref(), "gradients")?)
}

/// One row: the fastest of `runs` runs of each way, in turn.
fn row<M: Module>(
    name: &str,
    model: &M,
    forward: impl Fn(&M, Tensor<4>) -> Tensor<2>,
    [channels, side]: [usize; 2],
    [n, m]: [usize; 2],
    runs: usize,
) -> Result<Vec<Cell>, Box<dyn Error>> {
    let selection = Selection::of(model, None)?;
    let device = selection.device();
    let loss = |model: &M, (images, labels): &Images| {
        let logits = forward(model, images.clone());
        let loss = CrossEntropyLossConfig::new().init(&logits.device());
        loss.forward(logits, labels.clone())
    };
    let shape = [n * m, channels, side, side];
    let images = Tensor::<4>::random(shape, Distribution::Default, device);
    let labels: Vec<i64> = (0..n * m).map(|index| (index * 7 % 10) as i64).collect();
    let data: Images = (images, Tensor::from_data(&labels[..], device));
    // As a loader would: some at a time.
    let batches: Vec<Images> = (0..n * m)
        .step_by(256)
        .map(|at| burn_lean::prune::Batch::slice(&data, at..(at + 256).min(n * m)))
        .collect();
    let collect = |method: GradientMethod| -> Result<f64, Box<dyn Error>> {
        let config = FisherConfig::new(n)
            .with_batch_size(m)
            .with_method(method)
            .with_progress(false);
        let fisher = config.collect(model, &selection, loss, batches.iter().cloned())?;
        match (method, fisher.report.fallback) {
            (GradientMethod::Batched, Some(reason)) => Err(reason.into()),
            _ => Ok(fisher.report.seconds),
        }
    };
    let evaluated = burn_lean::prune::Batch::to_device(data.clone(), device);
    let passes = || -> Result<f64, Box<dyn Error>> {
        let start = Instant::now();
        for first in (0..n * m).step_by(m) {
            let batch = burn_lean::prune::Batch::slice(&evaluated, first..first + m);
            drop(loss(model, &batch).backward());
        }
        device.sync()?;
        Ok(start.elapsed().as_secs_f64())
    };
    let mut best = [f64::INFINITY; 3];
    for _ in 0..runs {
        let seconds = [
            passes()?,
            collect(GradientMethod::Plain)?,
            collect(GradientMethod::Batched)?,
        ];
        for (best, seconds) in best.iter_mut().zip(seconds) {
            *best = best.min(seconds);
        }
    }
    let [passes, plain, batched] = best;
    Ok(vec![
        name.into(),
        Cell::Integer(selection.layout().len() as u64),
        Cell::Integer(n as u64),
        Cell::Integer(m as u64),
        Cell::Number(passes, 3),
        Cell::Number(plain, 3),
        Cell::Number(batched, 3),
        Cell::Number(plain / passes, 2),
        Cell::Number(batched / passes, 2),
    ])
}
