//! Solves a pruning problem that comes as a file, for people who collect gradients in Python.
//!
//! ```sh
//! cargo run -p burn-lean --release --example chita_solve -- --problem problem.safetensors --sparsity 0.9 \
//!     --lambda2 5 --out solution.safetensors
//! ```
//!
//! `problem.safetensors` holds `gradients` [n, p] F32, row i the gradient of the loss of example
//! (or mini-batch) i, and `weights` [p] F32, the weights at which they were taken. In PyTorch:
//!
//! ```python
//! save_file({"gradients": torch.stack(rows), "weights": weights}, "problem.safetensors")
//! ```
//!
//! `solution.safetensors` holds `weights` [p] F32 and `support` [k] I64, the indices of the kept
//! weights in ascending order. Standard output is one JSON object: `objective`, its terms in
//! `objective_reference_terms`, `relative_gap`, `nonzeros`, `dead_columns`, `seconds` of the solver,
//! `iterations`, `termination` (always `completed`), and `peak_bytes`, the largest resident memory of this
//! process (Linux).

#[path = "chita_solve/problem_file.rs"]
mod problem_file;
mod support;

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use burn_lean::prune::{
    Budget, ChitaConfig, DeadColumns, Layout, Method, Problem, SolverConfig, SparsityPattern, solve,
};
use clap::{Parser, ValueEnum};
use support::{DeviceName, PeakMemory};

/// Choose which weights to keep, and their values, at the least loss.
#[derive(Debug, Parser)]
#[command(allow_negative_numbers = true)]
struct Cli {
    /// File with `gradients` [n, p] F32 and `weights` [p] F32.
    #[arg(long, value_name = "FILE")]
    problem: PathBuf,
    /// Fraction of zeros, above 0 and below 1.
    #[arg(long, required_unless_present_any = ["k", "pattern"])]
    sparsity: Option<f64>,
    /// Weights to keep.
    #[arg(long, conflicts_with = "sparsity")]
    k: Option<usize>,
    /// Keep at most N of every M consecutive weights, for example 2:4.
    #[arg(long, value_name = "N:M", value_parser = support::pattern)]
    pattern: Option<SparsityPattern>,
    /// Factor of ‖w − w₀‖²; n/2 times the ridge on the normalised Fisher. Default: a ridge of 0.01.
    #[arg(long, value_name = "X")]
    lambda2: Option<f64>,
    /// Factor of the sum of the gradients: 1/m where each is the mean over m examples, 0 for off.
    #[arg(long, value_name = "A", default_value_t = 0.0)]
    first_order: f64,
    /// Divide every gradient by its length to this power, in [0, 1].
    #[arg(long, value_name = "EXPONENT", default_value_t = 0.0)]
    tempering: f64,
    /// How the support is chosen.
    #[arg(long, value_enum, default_value_t = MethodName::Chita)]
    method: MethodName,
    /// Stages in which the support of `chita` shrinks. Default: that of the library.
    #[arg(long, value_parser = support::at_least_one)]
    stages: Option<usize>,
    /// First support of `chita`, as a multiple of k. Default: that of the library.
    #[arg(long)]
    expansion: Option<f64>,
    /// Rounds of splicing of `chita`, at most; 0 for none. Default: that of the library.
    #[arg(long)]
    splices: Option<usize>,
    /// Consecutive weights in a block of a block-diagonal Fisher. Default: one block.
    #[arg(long)]
    block_size: Option<usize>,
    /// Prune weights without any gradient first, whatever the ridge charges for them: better for a
    /// network, but another problem than the one in the file.
    #[arg(long)]
    dead_columns_first: bool,
    /// Where to compute.
    #[arg(long, value_enum, default_value_t = DeviceName::Flex)]
    device: DeviceName,
    /// Seed of the random method.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Where to write the solution.
    #[arg(long, value_name = "FILE", value_parser = support::output_file)]
    out: Option<PathBuf>,
    /// Also print the objective after each step.
    #[arg(long)]
    trace: bool,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum MethodName {
    Random,
    Magnitude,
    /// Diagonal of the empirical Fisher (OBD).
    DiagonalFisher,
    /// Inverted blocks of the empirical Fisher; `--block-size`, default 50.
    WoodFisher,
    /// Largest weights, then the exact regression on them.
    BackSolve,
    Chita,
}

fn main() -> ExitCode {
    support::init_tracing();
    support::exit(run(&Cli::parse()))
}

fn run(cli: &Cli) -> Result<(), Box<dyn Error>> {
    let memory = PeakMemory::start();
    let device = cli.device.open()?;
    let (gradients, weights) = problem_file::read(&cli.problem, &device)?;
    let layout = Layout::anonymous(gradients.parameters());
    let samples = gradients.samples() as f64;
    let mut problem =
        Problem::new(gradients, weights, layout)?.with_first_order(cli.first_order)?;
    problem = problem.with_tempering(cli.tempering)?;
    if let Some(lambda2) = cli.lambda2 {
        problem = problem.with_ridge(2.0 * lambda2 / samples)?;
    }

    let config = config(cli)?;
    let start = Instant::now();
    let solution = solve(&problem, &config)?;
    let seconds = start.elapsed().as_secs_f64();

    let mut report = serde_json::json!({
        "objective": solution.objective,
        "objective_reference_terms": solution.terms,
        "relative_gap": solution.relative_gap,
        "nonzeros": solution.support.len(),
        "dead_columns": problem.dead().len(),
        "seconds": seconds,
        "iterations": solution.iterations,
        // What scripts ask for: every method takes all of its steps.
        "termination": "completed",
        "peak_bytes": memory.bytes(),
    });
    if cli.trace {
        report["trace"] = serde_json::to_value(&solution.trace)?;
    }
    // First what no path can refuse.
    println!("{report}");
    if let Some(path) = &cli.out {
        problem_file::write(path, solution.weights, &solution.support)?;
    }
    Ok(())
}

fn config(cli: &Cli) -> Result<SolverConfig, String> {
    let chita_only = [
        ("--stages", cli.stages.is_some()),
        ("--expansion", cli.expansion.is_some()),
        ("--splices", cli.splices.is_some()),
    ];
    let is_chita = matches!(cli.method, MethodName::Chita);
    if let Some((option, _)) = chita_only.iter().find(|(_, given)| *given && !is_chita) {
        return Err(format!("`{option}` is about `--method chita`"));
    }
    let budget = match (cli.sparsity, cli.k) {
        (Some(sparsity), _) => Budget::Sparsity(sparsity),
        (None, Some(k)) => Budget::Keep(k),
        (None, None) => Budget::Pattern,
    };
    let mut chita = ChitaConfig::new();
    if let Some(stages) = cli.stages {
        chita = chita.with_stages(stages);
    }
    if let Some(expansion) = cli.expansion {
        chita = chita.with_expansion(expansion);
    }
    if let Some(rounds) = cli.splices {
        chita = chita.with_max_splices(rounds);
    }
    let method = match cli.method {
        MethodName::Random => Method::Random,
        MethodName::Magnitude => Method::Magnitude,
        MethodName::DiagonalFisher => Method::DiagonalFisher,
        MethodName::WoodFisher => Method::WoodFisher {
            block_size: cli.block_size.unwrap_or(50),
        },
        MethodName::BackSolve => Method::BackSolve,
        MethodName::Chita => Method::Chita(chita),
    };
    let dead_columns = match cli.dead_columns_first {
        true => DeadColumns::PrunedFirst,
        false => DeadColumns::Priced,
    };
    let pattern = cli.pattern.clone();
    // The blocks of WoodFisher are its own.
    let block_size = match cli.method {
        MethodName::WoodFisher => None,
        _ => cli.block_size,
    };
    Ok(SolverConfig::new(budget)
        .with_pattern(pattern.unwrap_or(SparsityPattern::Unstructured))
        .with_method(method)
        .with_block_size(block_size)
        .with_dead_columns(Some(dead_columns))
        .with_seed(cli.seed))
}
