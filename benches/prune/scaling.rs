//! Time and memory of the solver over the size of the problem.

use std::error::Error;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Distribution, FloatDType, Tensor};
use burn_lean::prune::{
    Budget, ChitaConfig, FisherConfig, GradientMatrix, Layout, Method, Problem, PrunerConfig,
    RidgeChoice, SolverConfig, solve,
};

use crate::support::{Cell, DeviceName, PeakMemory, Table};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// Sparsity of all problems.
const SPARSITY: f64 = 0.9;
const HEADER: [&str; 6] = ["p", "n", "seconds", "bytes_of_g", "peak_bytes", "exponent"];

/// One stage of CHITA at p = 10⁴, 10⁵, 10⁶ with n = 500, and n = 100 to 1000 at p = 10⁵. Exponents
/// of the time over p, over n, and over n·p of all. Each problem has a process of its own.
pub(crate) fn scaling(device: DeviceName, samples: usize) -> Result<Table, Box<dyn Error>> {
    let mut table = Table::new("solver, one stage", &HEADER);
    let device = device.to_possible_value().ok_or("the device has no name")?;
    let over_p = [10_000, 100_000, 1_000_000].map(|p| (p, 500));
    let over_n = [100, 200, 500, 1000].map(|n| (100_000, n));
    let mut all = Vec::new();
    for (sizes, size) in [
        (&over_p[..], (|(p, _)| p) as fn((usize, usize)) -> usize),
        (&over_n[..], |(_, n)| n),
    ] {
        let mut points = Vec::new();
        for (p, n) in sizes.iter().copied() {
            let output = Command::new(std::env::current_exe()?)
                .args(["--one", &p.to_string(), &n.to_string()])
                .args(["--samples", &samples.to_string()])
                .args(["--device", device.get_name()])
                .stderr(Stdio::inherit())
                .output()?;
            let solved: Solved = serde_json::from_slice(&output.stdout)?;
            points.push((size((p, n)) as f64, solved.seconds));
            all.push(((n * p) as f64, solved.seconds));
            table.push([
                Cell::Integer(p as u64),
                Cell::Integer(n as u64),
                Cell::Number(solved.seconds, 3),
                Cell::Integer(solved.bytes_of_g),
                Cell::optional_integer(solved.peak_bytes),
                match points.len() == sizes.len() {
                    true => Cell::Number(exponent(&points), 3),
                    false => Cell::Empty,
                },
            ]);
        }
    }
    table.push([
        "n·p".into(),
        Cell::Empty,
        Cell::Empty,
        Cell::Empty,
        Cell::Empty,
        Cell::Number(exponent(&all), 3),
    ]);
    Ok(table)
}

/// What a process of its own reports.
#[derive(Serialize, Deserialize)]
struct Solved {
    seconds: f64,
    bytes_of_g: u64,
    peak_bytes: Option<u64>,
}

/// Solves one problem and prints what it took; the fastest of `samples` times.
pub(crate) fn one(
    p: usize,
    n: usize,
    device: &Device,
    samples: usize,
) -> Result<(), Box<dyn Error>> {
    let memory = PeakMemory::start();
    let problem = problem(p, n, device)?;
    memory.forget_peak();
    let mut seconds = f64::INFINITY;
    for _ in 0..samples {
        let config = SolverConfig::new(Budget::Sparsity(SPARSITY))
            .with_method(Method::Chita(ChitaConfig::new()));
        let start = Instant::now();
        solve(&problem, &config)?;
        seconds = seconds.min(start.elapsed().as_secs_f64());
    }
    let solved = Solved {
        seconds,
        bytes_of_g: problem.gradients().bytes() as u64,
        peak_bytes: memory.bytes(),
    };
    println!("{}", serde_json::to_string(&solved)?);
    Ok(())
}

/// What a budget and blocks add to the time of one stage, n = 100: at p = 10⁶, in ten layers whose
/// weights cost 2 to 1024 operations each, a bound of the operations beside a sparsity, by CHITA and by
/// magnitude alone; at p = 10⁵ blocks of more weights than there are samples beside the whole.
pub(crate) fn budgets(device: &Device, samples: usize) -> Result<Table, Box<dyn Error>> {
    let header = ["p", "n", "method", "budget", "block", "seconds", "of_first"];
    let mut table = Table::new("budgets and blocks, one stage", &header);
    let n = 100;
    let kept = 1.0 - SPARSITY;
    let sparsity = Budget::Sparsity(SPARSITY);
    let flops = Budget::Flops {
        kept,
        sparsity: None,
    };
    let chita = Method::Chita(ChitaConfig::new());
    let runs = [
        (1_000_000, &chita, "CHITA", &sparsity, "sparsity", None),
        (1_000_000, &chita, "CHITA", &flops, "operations", None),
        (
            1_000_000,
            &Method::Magnitude,
            "magnitude",
            &sparsity,
            "sparsity",
            None,
        ),
        (
            1_000_000,
            &Method::Magnitude,
            "magnitude",
            &flops,
            "operations",
            None,
        ),
        (100_000, &chita, "CHITA", &sparsity, "sparsity", None),
        (100_000, &chita, "CHITA", &sparsity, "sparsity", Some(1000)),
        (
            100_000,
            &chita,
            "CHITA",
            &sparsity,
            "sparsity",
            Some(10_000),
        ),
    ];
    let mut first = (0, "", 0.0);
    for (p, method, name, budget, of, block) in runs {
        let gradients = Tensor::random([n, p], Distribution::Normal(0.0, 1.0), device);
        let weights = Tensor::random([p], Distribution::Normal(0.0, 1.0), device);
        let mut layout = Layout::new();
        for layer in 0..10 {
            let flops = f64::from(2 << layer);
            let kind = burn_lean::prune::LayerKind::Other;
            layout.push(format!("weight{layer}"), vec![p / 10], kind, flops);
        }
        let gradients = GradientMatrix::from_tensor(gradients)?;
        let problem = Problem::new(gradients, weights, layout)?;
        let config = SolverConfig::new(budget.clone())
            .with_method(method.clone())
            .with_block_size(block);
        let mut seconds = f64::INFINITY;
        for _ in 0..samples {
            let start = Instant::now();
            solve(&problem, &config)?;
            seconds = seconds.min(start.elapsed().as_secs_f64());
        }
        if (first.0, first.1) != (p, name) {
            first = (p, name, seconds);
        }
        table.push([
            Cell::Integer(p as u64),
            Cell::Integer(n as u64),
            name.into(),
            of.into(),
            Cell::optional_integer(block.map(|block| block as u64)),
            Cell::Number(seconds, 3),
            Cell::Number(seconds / first.2, 2),
        ]);
    }
    Ok(table)
}

/// One stage with p = 10⁶ and n = 500 (2 GB in F32): gradients that may use an eighth of that, in a file,
/// and gradients in memory.
pub(crate) fn disk(device: &Device, folder: &Path) -> Result<Table, Box<dyn Error>> {
    let header = [
        "place",
        "dtype",
        "p",
        "n",
        "gradient_seconds",
        "solve_seconds",
        "bytes_of_g",
        "peak_bytes",
    ];
    let mut table = Table::new("gradients in a file and in memory", &header);
    let (side, n) = (1000, 500);
    let p = side * side;
    let model = LinearConfig::new(side, side)
        .with_bias(false)
        .init(&device.clone().autodiff());
    let x = Tensor::<2>::random([n, side], Distribution::Normal(0.0, 1.0), device);
    let loss =
        |model: &Linear, x: &Tensor<2>| model.forward(x.clone()).square().mean() * side as f64;
    // What is in memory comes last: freed memory may be used again unseen.
    for (on_disk, dtype) in [
        (true, FloatDType::BF16),
        (true, FloatDType::F32),
        (false, FloatDType::BF16),
        (false, FloatDType::F32),
    ] {
        let bytes = GradientMatrix::bytes_needed(n, p, FloatDType::F32);
        let fisher = FisherConfig::new(n).with_dtype(dtype).with_progress(false);
        let fisher = match on_disk {
            true => fisher
                .with_memory_bound(bytes / 8)
                .with_on_disk(Some(folder.into())),
            false => fisher,
        };
        let solver = SolverConfig::new(Budget::Sparsity(SPARSITY));
        let ridge = RidgeChoice::Fixed(Problem::DEFAULT_RIDGE);
        let pruner = PrunerConfig::new(solver, fisher).with_ridge(ridge);
        let memory = PeakMemory::start();
        let pruned = pruner.prune(model.clone(), loss, |_| [x.clone()])?;
        let stage = &pruned.stages[0];
        assert_eq!(stage.gradients.on_disk, on_disk);
        table.push([
            if on_disk { "file" } else { "memory" }.into(),
            format!("{dtype:?}").into(),
            Cell::Integer(p as u64),
            Cell::Integer(n as u64),
            Cell::Number(stage.gradients.seconds, 2),
            Cell::Number(stage.solve_seconds, 2),
            Cell::Integer(stage.gradients.bytes as u64),
            Cell::optional_integer(memory.bytes()),
        ]);
    }
    Ok(table)
}

/// Gradients and weights of normal random numbers.
fn problem(p: usize, n: usize, device: &Device) -> Result<Problem, Box<dyn Error>> {
    let normal = Distribution::Normal(0.0, 1.0);
    let gradients = GradientMatrix::from_tensor(Tensor::random([n, p], normal, device))?;
    let weights = Tensor::random([p], normal, device);
    let mut layout = Layout::new();
    layout.push("weight", vec![p], burn_lean::prune::LayerKind::Other, 2.0);
    Ok(Problem::new(gradients, weights, layout)?)
}

/// Slope of the line through the points, both on a logarithmic scale, by least squares.
fn exponent(points: &[(f64, f64)]) -> f64 {
    let logs: Vec<(f64, f64)> = points.iter().map(|(x, y)| (x.ln(), y.ln())).collect();
    let mean = |of: fn(&(f64, f64)) -> f64| logs.iter().map(of).sum::<f64>() / logs.len() as f64;
    let (x, y) = (mean(|(x, _)| *x), mean(|(_, y)| *y));
    let along: f64 = logs.iter().map(|point| (point.0 - x) * (point.1 - y)).sum();
    along / logs.iter().map(|point| (point.0 - x).powi(2)).sum::<f64>()
}
