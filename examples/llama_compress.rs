//! Compresses a language model in one pass over calibration text, and measures what it costs.
//!
//! ```sh
//! cargo run --release --example llama_compress              # trains a tiny character model itself
//! cargo run --release --example llama_compress -- --checkpoint model.safetensors \
//!     --tokens tokens.safetensors --method gptq --bits 4 --group 32 --asymmetric
//! cargo run --release --example llama_compress -- --checkpoint model.safetensors \
//!     --tokens tokens.safetensors --method magnitude,wanda,sparsegpt,best-subset --sparsity 2:4
//! ```
//!
//! The checkpoint is a Llama with the names of Hugging Face or of Meta; the tokens are I32 tensors
//! `calibration` and `eval`, `[windows, tokens]`. Perplexity is over all windows of `eval`, each
//! token but the first of a window predicted from those before it. `--json` writes a row for each
//! method: `method`, `bits`, `group`, `asymmetric`, `sparsity`, `perplexity`, `bytes`, `seconds`,
//! `peak_bytes`, and `fp32_perplexity`. Linear layers are compressed; embedding and tied head are not.

#[path = "llama_compress/checkpoint.rs"]
mod checkpoint;
#[path = "llama_compress/llama.rs"]
mod llama;
#[path = "llama_compress/own.rs"]
mod own;
mod support;

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use burn::module::Module;
use burn::tensor::activation::log_softmax;
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_lean::oneshot::{
    Compressed, OneShot, Pattern, Preset, Prune, PruneMethod, Quantize, Rounding, Scaling,
};
use checkpoint::Windows;
use clap::{Parser, ValueEnum};
use llama::{Cache, Llama};
use support::{Cell, DeviceName, PeakMemory, Table};

#[derive(Debug, Parser)]
#[command(about = "Compresses a language model in one pass over calibration text")]
struct Cli {
    /// A Llama checkpoint (safetensors); without it a tiny character model is trained.
    #[arg(long, value_name = "FILE", requires = "tokens")]
    checkpoint: Option<PathBuf>,
    /// Windows of tokens `calibration` and `eval` (safetensors, I32).
    #[arg(long, value_name = "FILE", requires = "checkpoint")]
    tokens: Option<PathBuf>,
    /// Attention heads, where the checkpoint does not say.
    #[arg(long)]
    heads: Option<usize>,
    /// One or more methods [default: gptq, or best-subset with --sparsity].
    #[arg(long, value_enum, value_delimiter = ',')]
    method: Vec<Method>,
    /// A preset instead of a method: w8a16, w4a16-g32, sparse-2:4, sparse-2:4-w4a16-g32.
    #[arg(long, conflicts_with_all = ["method", "bits", "group", "asymmetric", "sparsity"])]
    preset: Option<Preset>,
    /// Bits of a weight, 2 to 8 [default: 4 for the methods that quantize].
    #[arg(long)]
    bits: Option<u8>,
    /// Inputs that share a scale [default: all].
    #[arg(long)]
    group: Option<usize>,
    /// A zero point for each scale.
    #[arg(long)]
    asymmetric: bool,
    /// A fraction of zeros (0.5), or kept:of (2:4) [default: 0.5 for the methods that prune].
    #[arg(long)]
    sparsity: Option<Pattern>,
    /// The method as it was published, without what this project adds.
    #[arg(long)]
    as_published: bool,
    /// With --as-published: GPTQ in the order of activations, with ranges fixed beforehand.
    #[arg(long)]
    activation_order: bool,
    /// Windows of calibration text, at most [default: all].
    #[arg(long, value_parser = support::at_least_one)]
    windows: Option<usize>,
    /// Windows in a batch.
    #[arg(long, default_value_t = 8, value_parser = support::at_least_one)]
    batch: usize,
    /// Steps in which the model without checkpoint is trained.
    #[arg(long, default_value_t = 300)]
    steps: usize,
    /// Tokens to generate before and after; 0 for none.
    #[arg(long, default_value_t = 64)]
    generate: usize,
    /// Writes the compressed model (one method only).
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Keeps finished blocks here, and goes on after the last one (one method only).
    #[arg(long, value_name = "FOLDER")]
    state: Option<PathBuf>,
    /// Keeps activations in files here.
    #[arg(long, value_name = "FOLDER")]
    spill: Option<PathBuf>,
    /// Where to compute.
    #[arg(long, value_enum, default_value_t = DeviceName::Flex)]
    device: DeviceName,
    /// Seed of the model that is trained.
    #[arg(long, default_value_t = 42)]
    seed: u64,
    /// Writes a row for each method.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, ValueEnum)]
enum Method {
    Rtn,
    Gptq,
    Awq,
    #[value(name = "smoothquant")]
    SmoothQuant,
    Magnitude,
    Wanda,
    #[value(name = "sparsegpt")]
    SparseGpt,
    BestSubset,
}

impl Method {
    fn name(self) -> String {
        self.to_possible_value()
            .map_or_else(String::new, |value| value.get_name().into())
    }

    fn prunes(self) -> Option<PruneMethod> {
        match self {
            Self::Magnitude => Some(PruneMethod::Magnitude),
            Self::Wanda => Some(PruneMethod::Wanda),
            Self::SparseGpt => Some(PruneMethod::SparseGpt),
            Self::BestSubset => Some(PruneMethod::BestSubset),
            _ => None,
        }
    }
}

impl Cli {
    /// What is done, each with a name.
    fn presets(&self) -> Vec<(String, Preset)> {
        if let Some(preset) = &self.preset {
            return vec![(preset.name(), preset.clone())];
        }
        let methods = match (&self.method[..], self.sparsity) {
            ([], None) => vec![Method::Gptq],
            ([], Some(_)) => vec![Method::BestSubset],
            (methods, _) => methods.to_vec(),
        };
        methods
            .iter()
            .map(|method| (method.name(), self.of_method(*method)))
            .collect()
    }

    fn of_method(&self, method: Method) -> Preset {
        let mut preset = Preset::new();
        let prunes = method.prunes();
        if prunes.is_none() || self.bits.is_some() {
            let rounding = match method {
                Method::Rtn | Method::Awq | Method::SmoothQuant => Rounding::Nearest,
                _ => match self.as_published {
                    true => Rounding::Compensated {
                        activation_order: self.activation_order,
                        sweeps: 0,
                    },
                    false => Rounding::refined(),
                },
            };
            // Plain rounding is what others are compared with: ranges as they are.
            let searched = !matches!(method, Method::Rtn | Method::SmoothQuant);
            let quantize = Quantize::new(self.bits.unwrap_or(4))
                .with_group(self.group)
                .with_symmetric(!self.asymmetric)
                .with_search_range(searched)
                .with_rounding(rounding);
            preset.quantize = Some(quantize);
        }
        if prunes.is_some() || self.sparsity.is_some() {
            let pattern = self.sparsity.unwrap_or(Pattern::PerLayer(0.5));
            let pattern = match (method, pattern) {
                // As in its paper.
                (Method::Wanda, Pattern::PerLayer(fraction)) => Pattern::PerOutput(fraction),
                (_, pattern) => pattern,
            };
            let method = prunes.unwrap_or(PruneMethod::SparseGpt);
            preset.prune = Some(Prune::new(pattern, method));
        }
        preset.scaling = match method {
            Method::Awq => Some(Scaling::Awq),
            Method::SmoothQuant => Some(Scaling::SmoothQuant { alpha: 0.5 }),
            _ => None,
        };
        let plain = matches!(method, Method::Rtn | Method::Magnitude | Method::Wanda);
        let published = self.as_published || plain || method == Method::SparseGpt;
        match published {
            true => preset.as_published(),
            false => preset,
        }
    }
}

fn main() -> ExitCode {
    support::init_tracing();
    support::exit(run(&Cli::parse()))
}

fn run(cli: &Cli) -> Result<(), Box<dyn Error>> {
    let device = cli.device.open()?;
    let presets = cli.presets();
    for (_, preset) in &presets {
        preset.validate()?;
    }
    if (cli.state.is_some() || cli.out.is_some()) && presets.len() > 1 {
        return Err("--state and --out are of one method: name one".into());
    }
    let (model, calibration, eval) = match (&cli.checkpoint, &cli.tokens) {
        (Some(checkpoint), Some(tokens)) => {
            let calibration = Windows::load(tokens, "calibration")?;
            let eval = Windows::load(tokens, "eval")?;
            let positions = calibration.length.max(eval.length).max(cli.generate + 1);
            let model = checkpoint::load(checkpoint, cli.heads, positions, &device)?;
            (model, calibration, eval)
        }
        _ => (
            own::train(cli.steps, cli.seed, &device)?,
            own::windows(),
            own::windows(),
        ),
    };
    let all = calibration.count();
    let windows = cli.windows.unwrap_or(all).min(all);
    // A window without its last token, which is nobody's input.
    let batches = batches(&calibration, windows, cli.batch, &device);
    let fp32 = perplexity(&model, &eval, cli.batch, &device);
    println!("{} weights, perplexity {fp32:.4}", model.num_params());
    let before = speed(&model, cli.generate, &device);
    if let Some((text, rate)) = &before {
        println!("{rate:.0} tokens/s: {}", shown(cli, text));
    }
    let header = [
        "method",
        "bits",
        "group",
        "asymmetric",
        "sparsity",
        "perplexity",
        "bytes",
        "seconds",
        "peak_bytes",
        "fp32_perplexity",
    ];
    let mut table = Table::new(format!("Compressed on {windows} windows"), &header);
    for (name, preset) in presets {
        let memory = PeakMemory::start();
        let start = Instant::now();
        let mut oneshot = OneShot::new(preset.clone());
        if let Some(folder) = &cli.state {
            oneshot = oneshot.with_state(folder);
        }
        if let Some(folder) = &cli.spill {
            oneshot = oneshot.spilling_to(folder);
        }
        let bar = support::progress(0, name.clone());
        let oneshot = oneshot.with_progress(|_, _, of| {
            bar.set_length(of as u64);
            bar.inc(1);
        });
        let inputs = batches.iter().map(|(inputs, _)| inputs.clone());
        let done =
            oneshot.compress(model.clone(), inputs, |model, tokens| model.forward(tokens))?;
        bar.finish_and_clear();
        let seconds = start.elapsed().as_secs_f64();
        let peak = memory.bytes();
        let perplexity = perplexity(&done.model, &eval, cli.batch, &device);
        if let Some((text, rate)) = speed(&done.model, cli.generate, &device) {
            println!("{name}: {rate:.0} tokens/s: {}", shown(cli, &text));
        }
        if let Some(file) = &cli.out {
            done.save(file)?;
        }
        let quantize = preset.quantize.as_ref();
        let integer = |number: Option<usize>| Cell::optional_integer(number.map(|n| n as u64));
        table.push([
            Cell::from(name),
            integer(quantize.map(|one| usize::from(one.bits))),
            integer(quantize.and_then(|one| one.group)),
            match quantize {
                Some(one) => Cell::Flag(!one.symmetric),
                None => Cell::Empty,
            },
            match preset.prune.as_ref().map(|one| one.pattern) {
                Some(Pattern::NOfM { n, m }) => Cell::from(format!("{n}:{m}")),
                Some(Pattern::PerLayer(part) | Pattern::PerOutput(part)) => Cell::Number(part, 2),
                None => Cell::Empty,
            },
            Cell::Number(perplexity, 4),
            Cell::Integer(stored(&model, &done) as u64),
            Cell::Number(seconds, 1),
            Cell::optional_integer(peak),
            Cell::Number(fp32, 4),
        ]);
    }
    Ok(table.publish(cli.json.as_deref())?)
}

/// Inputs and targets `[windows, tokens − 1]` in batches of `size` at most, all of one size: Burn
/// computes a batch of one by other operations, and a walk is over batches of the same ones.
fn batches(
    windows: &Windows,
    count: usize,
    size: usize,
    device: &Device,
) -> Vec<(Tensor<2, Int>, Tensor<2, Int>)> {
    let length = windows.length;
    let size = (1..=size.min(count))
        .rev()
        .find(|size| count.is_multiple_of(*size));
    let size = size.unwrap_or(1);
    let parts = windows.tokens[..count * length].chunks(size * length);
    parts
        .map(|part| {
            let rows = part.len() / length;
            let part = TensorData::new(part.to_vec(), [rows, length]);
            let part = Tensor::<2, Int>::from_data(part, device);
            (
                part.clone().slice([0..rows, 0..length - 1]),
                part.slice([0..rows, 1..length]),
            )
        })
        .collect()
}

/// exp of the mean negative log-likelihood over all windows.
fn perplexity(model: &Llama, windows: &Windows, size: usize, device: &Device) -> f64 {
    let (mut sum, mut count) = (0.0, 0);
    for (inputs, targets) in batches(windows, windows.count(), size, device) {
        let [rows, length] = inputs.dims();
        let scores = log_softmax(model.forward(inputs), 2);
        let scores = scores.gather(2, targets.unsqueeze_dim(2));
        let scores = scores.reshape([rows * length]).into_data();
        sum -= scores.iter::<f32>().map(f64::from).sum::<f64>();
        count += rows * length;
    }
    (sum / count.max(1) as f64).exp()
}

/// The likeliest continuation of the first token, and tokens in a second.
fn speed(model: &Llama, tokens: usize, device: &Device) -> Option<(Vec<i64>, f64)> {
    let mut cache = Cache::default();
    let mut text = vec![1];
    let start = Instant::now();
    for _ in 0..tokens {
        let last = [*text.last()?];
        let input = Tensor::<1, Int>::from_data(last, device).reshape([1, 1]);
        let logits = model.forward_cache(input, &mut cache);
        text.push(logits.argmax(2).into_scalar::<i64>());
    }
    (tokens > 0).then(|| (text, tokens as f64 / start.elapsed().as_secs_f64()))
}

/// Characters where the model is of characters, else numbers of tokens.
fn shown(cli: &Cli, text: &[i64]) -> String {
    if cli.checkpoint.is_some() {
        return format!("{text:?}");
    }
    let letters = own::alphabet();
    let letter = |token: &i64| letters.get(*token as usize).copied().unwrap_or('?');
    format!("{:?}", text.iter().map(letter).collect::<String>())
}

/// Bytes of all parameters as they would be stored: F32, but for compressed weights.
fn stored(model: &Llama, done: &Compressed<Llama>) -> usize {
    let compressed: usize = done.report.layers.iter().map(|layer| layer.weights).sum();
    4 * (model.num_params() - compressed) + done.report.bytes()
}
