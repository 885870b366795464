//! Why F16 needs a loss scale: a sequence-to-sequence model, trained in FP32 and in F16.
//!
//! ```sh
//! cargo run -p burn-lean --release --example loss_scaling
//! ```
//!
//! The task: write a random sequence of tokens backwards. Two LSTMs with attention between them
//! learn it from data that the example makes up as it goes. Three FP32 runs with different seeds
//! show how much a result depends on luck; then F16 runs with the seed of the middle one, so from
//! the same initial weights and over the same data:
//!
//! - loss scale 1 (none at all),
//! - loss scale 1024,
//! - dynamic.
//!
//! F16 gradients below 2⁻²⁴ are zero, and gradients are small for ordinary reasons. The loss is a
//! mean over all tokens of a step, so every gradient is divided by their number: up to millions in
//! the training of large language models (0.5 to 3.2 million in Table 2.1 of
//! [Brown et al., 2020](https://arxiv.org/abs/2005.14165)). Attention starts out uniform and divides
//! by the length once more; small initial weights divide at every layer.
//!
//! A small machine sees the same numbers in the place of one data-parallel worker among many: its
//! loss is its *share* of the mean over the whole batch, 0.8 million tokens by default
//! (`--workers`). All runs have the same gradients up to rounding, and Adam, which divides by the
//! size of the gradient, trains in FP32 with them. With `--workers 1` few gradients underflow, and
//! F16 trains without a loss scale too.
//!
//! With loss scale 1 the gradients of the attention and of the encoder are zeros, and the model
//! does not learn where to look. With a loss scale F16 does what FP32 does. The language model of
//! [Mixed Precision Training, Micikevicius et al., 2018](https://arxiv.org/abs/1710.03740), an LSTM,
//! was such a case: it needed a loss scale to match FP32.
//!
//! How the picture depends on the choices: the stall without a loss scale is there with every seed
//! and epsilon that was tried. That scaled F16 lies *within* the spread of three seeds is weaker:
//! it ends a thousandth from the FP32 run of the same seed, so it takes that run's place in the
//! spread, and the middle seed has room on both sides. Adam's epsilon is 1e-8 throughout; with
//! 1e-12 the runs scatter more, and one of the scaled ones ended better than all FP32 runs.
//!
//! Without `--dtype` the half-precision runs are in F16 on every device: its exponents are the small ones.
//! Curves go to `out/loss_scaling.csv` and `out/loss_scaling.svg`.

#[path = "loss_scaling/source.rs"]
mod source;
mod support;
#[path = "loss_scaling/translator.rs"]
mod translator;

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, FloatDType, Int, Tensor, TensorData};
use burn_lean::amp::{AmpError, DynamicLossScale, GradScalerConfig, LossScale, inspect_gradients};
use clap::Parser;
use rand::SeedableRng;
use rand::rngs::StdRng;
use source::Source;
use support::{Cell, Curve, Options, Table};
use translator::Translator;

/// Train a sequence-to-sequence model in FP32, and in F16 with and without a loss scale.
#[derive(Debug, Parser)]
#[command(allow_negative_numbers = true)]
struct Cli {
    #[command(flatten)]
    options: Options,
    /// Folder with text files (*.txt) to take the sequences from; without it, random tokens.
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
    /// Folder for the curves.
    #[arg(long, value_name = "DIR", default_value = "out")]
    out: PathBuf,
    /// Training steps of each run.
    #[arg(long, default_value_t = 300, value_parser = support::at_least_one)]
    steps: usize,
    /// Sequences per step.
    #[arg(long, default_value_t = 64, value_parser = support::at_least_one)]
    batch_size: usize,
    /// Data-parallel workers among which the batch is divided; this process is one of them, and
    /// its loss is its share of the mean over all.
    #[arg(long, default_value_t = 1024, value_parser = support::at_least_one)]
    workers: usize,
}

fn main() -> ExitCode {
    support::init_tracing();
    let mut cli = Cli::parse();
    // Loss scaling is for the small exponents of F16.
    cli.options.dtype.get_or_insert(support::Dtype::F16);
    support::exit(run(&cli))
}

fn run(cli: &Cli) -> Result<(), Box<dyn Error>> {
    let device = cli.options.device()?;
    let source = Source::load(cli.data.as_deref(), VOCABULARY, LENGTH)?;
    std::fs::create_dir_all(&cli.out)
        .map_err(|error| format!("cannot create {}: {error}", cli.out.display()))?;

    let mut table = Table::new(
        format!(
            "{LENGTH} tokens backwards, vocabulary {VOCABULARY}, {} sequences a step, {} steps",
            cli.batch_size, cli.steps
        ),
        &[
            "run",
            "seed",
            "final perplexity",
            "zero gradients [%]",
            "final loss scale",
            "skipped steps",
            "time [s]",
        ],
    );
    let mut curves = Vec::new();
    let mut train = |name: &str, dtype, loss_scale, seed| -> Result<f64, AmpError> {
        let name = format!("{dtype:?} {name}");
        let run = Run {
            name: name.clone(),
            dtype,
            loss_scale,
            seed,
        };
        let start = Instant::now();
        let outcome = train(cli, &run, &source, &device)?;
        let last = perplexity(&outcome.losses[outcome.losses.len() * 9 / 10..]);
        table.push([
            name.as_str().into(),
            Cell::Integer(seed),
            Cell::Number(last, 3),
            Cell::Number(outcome.zero_gradients, 1),
            Cell::Number(outcome.loss_scale.into(), 0),
            Cell::Integer(outcome.skipped_steps),
            Cell::Number(start.elapsed().as_secs_f64(), 1),
        ]);
        curves.push(outcome.curve(name));
        Ok(last)
    };

    // Scale 1 changes nothing, but makes the scaler read the loss, which the curves need.
    let none = LossScale::Static(1.0);
    let mut full_precision = Vec::new();
    for index in 0..3 {
        let seed = cli.options.seed.wrapping_add(index);
        let name = format!("run {}", index + 1);
        full_precision.push((train(&name, FloatDType::F32, none, seed)?, seed));
    }
    full_precision.sort_by(|(a, _), (b, _)| a.total_cmp(b));
    let [(lowest, _), (middle, seed), (highest, _)] = full_precision[..] else {
        unreachable!("there are three runs");
    };

    let dynamic = LossScale::Dynamic(DynamicLossScale::default());
    let dtype = cli.options.dtype(&device);
    let mut verdicts = Vec::new();
    for (name, loss_scale) in [
        ("loss scale 1", none),
        ("loss scale 1024", LossScale::Static(1024.0)),
        ("dynamic loss scale", dynamic),
    ] {
        let last = train(name, dtype, loss_scale, seed)?;
        let place = match (lowest..=highest).contains(&last) {
            true => "within",
            false => "outside",
        };
        verdicts.push(format!(
            "{name}: {place} the spread of F32, {:+.3} from the run with the same seed",
            last - middle
        ));
    }

    support::write_csv(&cli.out.join("loss_scaling.csv"), &curves)?;
    let svg = cli.out.join("loss_scaling.svg");
    support::write_svg(&svg, "Loss scaling", "training perplexity", &curves)?;
    table.publish(cli.options.json.as_deref())?;
    println!("spread of F32: {lowest:.3} to {highest:.3} (mean over the last tenth of the steps)");
    println!("{}\ncurves: {}", verdicts.join("\n"), svg.display());
    Ok(())
}

/// One training run.
struct Run {
    name: String,
    dtype: FloatDType,
    loss_scale: LossScale,
    seed: u64,
}

/// Tokens per sequence.
const LENGTH: usize = 12;

/// Different tokens.
const VOCABULARY: usize = 16;

/// Features of the LSTMs.
const HIDDEN: usize = 64;

/// Of Adam, for all runs.
const LEARNING_RATE: f64 = 3e-3;

/// What a run leaves.
struct Outcome {
    /// Mean loss per token of each step [nats].
    losses: Vec<f32>,
    /// Share of exact zeros among the gradients, mean over the run [%].
    zero_gradients: f64,
    loss_scale: f32,
    skipped_steps: u64,
}

impl Outcome {
    /// Training perplexity in 50 windows.
    fn curve(&self, name: String) -> Curve {
        let windows = self.losses.chunks(self.losses.len().div_ceil(50));
        let points = windows.scan(0, |step, window| {
            *step += window.len();
            Some((*step, perplexity(window)))
        });
        Curve {
            name,
            points: points.collect(),
        }
    }
}

fn train(cli: &Cli, run: &Run, source: &Source, device: &Device) -> Result<Outcome, AmpError> {
    device.seed(run.seed);
    let model = Translator::new(VOCABULARY, HIDDEN, device);
    let (mut model, autocast) = cli.options.autocast(run.dtype).prepare(model)?;
    let mut scaler = GradScalerConfig::new(run.loss_scale).init()?;
    // Adam divides by the size of the gradient: only gradients that are zero do not count, if its
    // epsilon is small. Burn's default, 1e-5, is not small enough; this is PyTorch's.
    let mut optim = AdamWConfig::new().with_epsilon(1e-8).init();
    let cross_entropy = CrossEntropyLossConfig::new().init(device);
    let mut rng = StdRng::seed_from_u64(run.seed);

    let mut losses = Vec::with_capacity(cli.steps);
    let mut zero_shares = Vec::new();
    let bar = support::progress(cli.steps, run.name.as_str());
    for step in 0..cli.steps {
        let batch = Sequences::new(cli, source, &mut rng, device);
        let logits = autocast.forward((batch.source, batch.shifted), |(source, shifted)| {
            model.forward(source, shifted)
        });
        // This worker's share of the mean over the tokens of all workers.
        let loss = cross_entropy
            .forward(logits, batch.target)
            .div_scalar(cli.workers as f64);
        let grads = scaler.scale(loss)?.backward();
        let grads = GradientsParams::from_grads(grads, &model);
        if step % 20 == 0 {
            zero_shares.push(zero_share(&model, &grads)?);
        }
        model = scaler.step(&mut optim, LEARNING_RATE, model, grads)?;
        // The scaler has read the loss together with its verdict on the gradients.
        if let Some(share) = scaler.report().and_then(|report| report.loss) {
            losses.push(share * cli.workers as f32);
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(Outcome {
        losses,
        zero_gradients: 100.0 * zero_shares.iter().sum::<f64>() / zero_shares.len() as f64,
        loss_scale: scaler.loss_scale(),
        skipped_steps: scaler.state().skipped_steps,
    })
}

/// Perplexity of the mean of `losses`.
fn perplexity(losses: &[f32]) -> f64 {
    let mean = losses.iter().copied().map(f64::from).sum::<f64>() / losses.len() as f64;
    mean.exp()
}

/// A batch of the task.
struct Sequences {
    /// `[batch, length]`
    source: Tensor<2, Int>,
    /// The target one step late, behind a start token, `[batch, length]`.
    shifted: Tensor<2, Int>,
    /// The source backwards, `[batch · length]`.
    target: Tensor<1, Int>,
}

impl Sequences {
    fn new(cli: &Cli, from: &Source, rng: &mut StdRng, device: &Device) -> Self {
        let [n, length] = [cli.batch_size, LENGTH];
        let start_token = VOCABULARY as i64;
        let mut source: Vec<i64> = Vec::with_capacity(n * length);
        let mut shifted = Vec::with_capacity(n * length);
        let mut target: Vec<i64> = Vec::with_capacity(n * length);
        for _ in 0..n {
            let tokens = from.sequence(length, rng);
            shifted.push(start_token);
            shifted.extend(tokens.iter().rev().take(length - 1));
            target.extend(tokens.iter().rev());
            source.extend(tokens);
        }
        Self {
            source: Tensor::from_data(TensorData::new(source, [n, length]), device),
            shifted: Tensor::from_data(TensorData::new(shifted, [n, length]), device),
            target: Tensor::from_data(TensorData::new(target, [n * length]), device),
        }
    }
}

/// Share of exact zeros among all gradients.
fn zero_share(model: &Translator, grads: &GradientsParams) -> Result<f64, AmpError> {
    let found = inspect_gradients(model, grads)?;
    let zeros: usize = found.iter().map(|gradient| gradient.zeros).sum();
    let elements: usize = found.iter().map(|gradient| gradient.elements).sum();
    Ok(zeros as f64 / elements as f64)
}
