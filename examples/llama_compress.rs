//! Compresses a language model in one pass over calibration text, and measures what it costs.
//!
//! ```sh
//! cargo run -p burn-lean --release --example llama_compress     # trains a tiny character model itself
//! cargo run -p burn-lean --release --example llama_compress -- --checkpoint model.safetensors \
//!     --tokens tokens.safetensors --method gptq --bits 4 --group 32 --asymmetric
//! cargo run -p burn-lean --release --example llama_compress -- --checkpoint model.safetensors \
//!     --tokens tokens.safetensors --method magnitude,wanda,sparsegpt,best-subset --sparsity 2:4
//! cargo run -p burn-lean --release --example llama_compress -- --checkpoint model.safetensors \
//!     --tokens tokens.safetensors --preset w8a8 --kv int8
//! cargo run -p burn-lean --release --example llama_compress -- --checkpoint model.safetensors \
//!     --tokens tokens.safetensors --preset w4a8-g32 --engine
//! cargo run -p burn-lean --release --example llama_compress -- --checkpoint Llama-3.1-8B/ \
//!     --tokens tokens.safetensors --preset w4a16-g32 --stream blocks --pretrained Llama-3.1-8B-w4a16
//! cargo run -p burn-lean --release --example llama_compress -- --checkpoint Llama-3.1-8B/ \
//!     --tokens tokens.safetensors --preset sparse-2:4-w4a16-g32 --stream blocks --state state --pretrained DIR
//! ```
//!
//! The checkpoint is a Llama with the names of Hugging Face or of Meta, in F32, F16 or BF16, which become
//! F32; one with biases or other tensors that the network does not have is refused. A folder as it comes
//! from Hugging Face has a `config.json`, which says all that the network needs, scaled rotations of
//! Llama 3.1 among it, and `model.safetensors` or shards with their index; a configuration of another
//! network, or of weights that are codes already, is refused. A file beside such a configuration is taken with it.
//! A file by itself does not say how positions are rotated and norms computed: as in
//! Llama 2, unless `--rope-theta` and `--norm-eps` say otherwise. Windows that are longer than the model's longest
//! sequence are refused.
//!
//! The tokens are I32 tensors `calibration` and `eval`, `[windows, tokens]`, here of 512 tokens each:
//!
//! ```python
//! import numpy, safetensors.numpy, transformers
//! tokenizer = transformers.AutoTokenizer.from_pretrained("Llama-3.1-8B")
//!
//! def windows(path, length=512):
//!     ids = tokenizer(open(path, encoding="utf-8").read())["input_ids"]
//!     return numpy.array(ids[: len(ids) // length * length], dtype=numpy.int32).reshape(-1, length)
//!
//! tokens = {"calibration": windows("calibration.txt"), "eval": windows("eval.txt")}
//! safetensors.numpy.save_file(tokens, "tokens.safetensors")
//! ```
//!
//! At least as many calibration tokens as the widest layer has inputs (14,336 for 8B), without the last of each
//! window, which is nobody's input; what is too few is refused before a weight is loaded.
//!
//! Perplexity is over all windows
//! of `eval`, each token but the first of a window predicted from those before it. The tiny model is trained
//! on all of its 3,300 characters, calibrated on the first three quarters and evaluated on the last: its
//! table says how much of what it has learnt by heart a method keeps. `--json` writes a row for each
//! method: `method`, `bits`, `group`, `asymmetric`, `sparsity`, `perplexity`, `bytes` (as `--out` writes
//! them: what is not compressed in F32), `seconds`, `peak_bytes`, `fp32_perplexity`, and of generation
//! after and before `tokens_per_second` and `fp32_tokens_per_second`, with `--engine` `engine_perplexity` and
//! `engine_bytes` (of weights and constants between runs). Linear layers are compressed; the
//! embedding is not, nor is the head, but with `--head` one that is a matrix of its own.
//!
//! A preset with 8-bit inputs (`w8a8`) gives a model whose layers round what they are given, a scale
//! for each token, in evaluation and in generation. `--kv int8` keeps keys and values in 8 bits, too.
//! `--engine` also compiles each compressed model for the inference engine, and measures it there.
//! `--finetune 150` adds a row for what is left of a pruned model after so many steps of distillation
//! from the original on the calibration text, with the zeros held. `--stream` has one block in memory at a
//! time, for models that are too large, and measures the perplexity block by block, too; it generates
//! nothing. `--pretrained` writes a folder that Transformers loads, with floats in F32;
//! `tools/read_pretrained.py` measures its perplexity there. vLLM loads it where it has kernels for the grid: for
//! `w4a8-g32` it has none, see `PretrainedFolder`. The layout has no place for a group that is smaller than
//! the others, so layers whose inputs the groups do not divide stay floats in the folder: 576 inputs take
//! `-g64`, not `-g128`. What a folder will be is said before the run, and one of mostly floats is refused.
//! Zeros of 2:4 are stored like other weights, as floats or as codes: a folder is no smaller for them,
//! readers of today know no layout without them. With `--state` the same command goes on after a kill,
//! and writes the unfinished folder of `--pretrained` anew.

#[path = "llama_compress/check.rs"]
mod check;
#[path = "llama_compress/checkpoint.rs"]
mod checkpoint;
#[path = "llama_compress/cli.rs"]
mod cli;
#[path = "llama_compress/engine.rs"]
mod engine;
#[path = "llama_compress/evaluate.rs"]
mod evaluate;
#[path = "llama_compress/finetune.rs"]
mod finetune;
#[path = "llama_compress/llama.rs"]
mod llama;
#[path = "llama_compress/own.rs"]
mod own;
#[path = "llama_compress/pretrained.rs"]
mod pretrained;
#[path = "llama_compress/rows.rs"]
mod rows;
#[path = "llama_compress/streamed.rs"]
mod streamed;
mod support;

use std::error::Error;
use std::process::ExitCode;
use std::time::Instant;

use burn::module::Module;
use burn::tensor::Device;
use burn_lean::oneshot::{Compressed, OneShot, OneShotError, Preset};
use burn_lean::quant::{ConvertConfig, Dequantize, KvFormat, Unsupported, quantizers};
use burn_lean::reparam::Rejected;
use checkpoint::{Checkpoint, Windows};
use clap::Parser;
use cli::Cli;
use engine::in_engine;
use evaluate::{batches, even, perplexity, speak};
use finetune::{Finetuning, finetune};
use llama::{Llama, Sizes};
use pretrained::Pretrained;
use rows::{Measured, Row, Rows};
use support::PeakMemory;

fn main() -> ExitCode {
    support::init_tracing();
    support::exit(run(&Cli::parse()))
}

fn run(cli: &Cli) -> Result<(), Box<dyn Error>> {
    let device = cli.device.open()?;
    let mut presets = cli.presets()?;
    for (_, preset) in &presets {
        preset.validate()?;
        if cli.finetune.is_some() && (preset.prune.is_none() || preset.quantize.is_some()) {
            return Err("--finetune is for methods that prune and leave weights floats".into());
        }
    }
    let folders = [&cli.state, &cli.out, &cli.pretrained, &cli.stream];
    if folders.iter().any(|folder| folder.is_some()) && presets.len() > 1 {
        return Err("--state, --out, --pretrained and --stream are of one method: name one".into());
    }
    let Opened {
        checkpoint,
        sizes,
        text,
    } = open(cli)?;
    for (_, preset) in &mut presets {
        check::leave_head(preset, &sizes, cli.head)?;
    }
    let Text { calibration, eval } = &text;
    let windows = calibration.count();
    // The last token of a window is nobody's input.
    let rows = windows * (calibration.length - 1);
    for line in check::check(&presets, &sizes, rows, cli.pretrained.is_some())? {
        println!("{line}");
    }
    let mut pretrained = (cli.pretrained.as_deref())
        .map(|to| Pretrained::create(to, cli.state.is_some(), &sizes, checkpoint.as_ref()))
        .transpose()?;
    if let (Some(folder), Some(checkpoint)) = (&cli.stream, &checkpoint) {
        let method = presets.remove(0);
        return streamed::run(cli, folder, checkpoint, &text, method, pretrained, &device);
    }
    let model = match &checkpoint {
        Some(checkpoint) => checkpoint.load(&device)?,
        None => own::train(&sizes, cli.steps, cli.seed, &device)?,
    };
    let batches = batches(
        calibration,
        windows,
        calibration_batch(cli, windows),
        &device,
    );
    let measured = |name: &str, model: &Llama, kv: KvFormat| Measured {
        perplexity: perplexity(model, eval, cli.batch, kv, &device),
        rate: said(name, cli, model, kv, &device),
    };
    let original = measured("original", &model, KvFormat::Float);
    println!(
        "{} weights, perplexity {:.4}",
        model.num_params(),
        original.perplexity
    );
    let mut rows = Rows::new(format!("Compressed on {windows} windows"), original);
    // One for all rows: a later one finds in its hands what an earlier one has left.
    let memory = PeakMemory::start();
    let mut compress =
        |rows: &mut Rows, name: String, preset: Preset| -> Result<(), Box<dyn Error>> {
            memory.forget_peak();
            let start = Instant::now();
            let bar = support::progress(0, name.clone());
            let oneshot = one_shot(cli, OneShot::new(preset.clone())).with_progress(|_, _, of| {
                bar.set_length(of as u64);
                bar.inc(1);
            });
            let inputs = batches.iter().map(|(inputs, _)| inputs.clone());
            let done =
                oneshot.compress(model.clone(), inputs, |model, tokens| model.forward(tokens))?;
            bar.finish_and_clear();
            let seconds = start.elapsed().as_secs_f64();
            let peak = memory.bytes();
            if let (Some(file), None) = (&cli.out, cli.finetune) {
                done.save(file)?;
            }
            let in_use = match &preset.activations {
                None => done.model.clone(),
                Some(rounded) => done.clone().prepare(Some(rounded))?.model,
            };
            let compressed = perplexity(&in_use, eval, cli.batch, cli.kv.into(), &device);
            let of_codes = match cli.engine || cli.generate > 0 || pretrained.is_some() {
                true => with_codes(&done, &preset, in_use)?,
                false => in_use,
            };
            let compressed = Measured {
                perplexity: compressed,
                rate: match cli.generate {
                    0 => None,
                    _ => said(
                        &name,
                        cli,
                        &deployed(of_codes.clone())?,
                        cli.kv.into(),
                        &device,
                    ),
                },
            };
            if cli.finetune.is_none()
                && let Some(mut folder) = pretrained.take()
            {
                folder.add(&of_codes, None)?;
                folder.finish()?;
            }
            let engine = cli.engine.then_some(of_codes);
            let engine = engine.map(|model| in_engine(&name, &model, eval, cli.batch, &device));
            let row = Row {
                compressed,
                engine: engine.transpose()?,
                bytes: stored(&model, &done),
                seconds,
                peak,
            };
            rows.push(&name, &preset, &row);
            if let Some(steps) = cli.finetune {
                memory.forget_peak();
                let start = Instant::now();
                let how = Finetuning {
                    steps,
                    seed: cli.seed,
                };
                let bar = support::progress(steps, "fine-tuning");
                let tuned = finetune(&done, &model, calibration, how, &device, |_| bar.inc(1))?;
                bar.finish_and_clear();
                let tuned_seconds = start.elapsed().as_secs_f64();
                let tuned_peak = memory.bytes();
                if let Some(file) = &cli.out {
                    tuned.save(file)?;
                }
                if let Some(mut folder) = pretrained.take() {
                    folder.add(&tuned.model, None)?;
                    folder.finish()?;
                }
                let name = format!("{name}, {steps} steps");
                let engine = (cli.engine)
                    .then(|| in_engine(&name, &tuned.model, eval, cli.batch, &device))
                    .transpose()?;
                let row = Row {
                    compressed: measured(&name, &tuned.model, cli.kv.into()),
                    engine,
                    seconds: seconds + tuned_seconds,
                    peak: peak.max(tuned_peak),
                    ..row
                };
                rows.push(&name, &preset, &row);
            }
            Ok(())
        };
    let mut presets = presets.into_iter();
    let done = presets.try_for_each(|(name, preset)| compress(&mut rows, name, preset));
    // Also what came before a method that failed.
    rows.publish(cli.json.as_deref())?;
    done
}

/// The model in use, with quantizers where its weights are codes: only these say so.
fn with_codes<M: Module>(
    done: &Compressed<M>,
    preset: &Preset,
    in_use: M,
) -> Result<M, OneShotError> {
    match (&preset.quantize, &preset.activations) {
        (Some(_), None) => Ok(done
            .clone()
            .prepare(None)
            .map_err(Rejected::into_error)?
            .model),
        _ => Ok(in_use),
    }
}

/// As it runs in Burn: kernels multiply by codes where they are not slower than floats, and where the device has
/// them.
fn deployed(model: Llama) -> Result<Llama, Box<dyn Error>> {
    if quantizers(&model).is_empty() {
        return Ok(model);
    }
    let config = ConvertConfig::new()
        .with_unsupported(Unsupported::KeepFakeQuantized)
        .with_dequantize(Dequantize::InProduct);
    let (model, report) = config.convert(model)?;
    let weights = &report.weights;
    let of_codes = weights
        .iter()
        .filter(|weight| weight.dequantize == Dequantize::InProduct);
    println!(
        "{} of {} weights are multiplied as codes; {} bytes in memory",
        of_codes.count(),
        weights.len(),
        report.resident_bytes()
    );
    Ok(model)
}

/// The options of the command line.
fn one_shot<'a>(cli: &Cli, mut oneshot: OneShot<'a>) -> OneShot<'a> {
    if let Some(folder) = &cli.state {
        oneshot = oneshot.with_state(folder);
    }
    match &cli.spill {
        Some(folder) => oneshot.spilling_to(folder),
        None => oneshot,
    }
}

/// What a run is about, before a weight is loaded.
struct Opened {
    /// Without it the model is trained here.
    checkpoint: Option<Checkpoint>,
    sizes: Sizes,
    text: Text,
}

/// Windows of tokens.
struct Text {
    calibration: Windows,
    eval: Windows,
}

fn open(cli: &Cli) -> Result<Opened, Box<dyn Error>> {
    let first = |windows: Windows| windows.first(cli.windows.unwrap_or(usize::MAX));
    let (Some(checkpoint), Some(tokens)) = (&cli.checkpoint, &cli.tokens) else {
        let (calibration, eval) = own::windows();
        let calibration = first(calibration);
        return Ok(Opened {
            checkpoint: None,
            sizes: own::sizes(cli.generate),
            text: Text { calibration, eval },
        });
    };
    let calibration = first(Windows::load(tokens, "calibration")?);
    let eval = Windows::load(tokens, "eval")?;
    let longest = calibration.length.max(eval.length) - 1;
    let generated = match cli.stream {
        Some(_) => 0,
        None => cli.generate,
    };
    let checkpoint = Checkpoint::open(checkpoint, cli.heads, longest.max(generated))?
        .with_options(cli.rope_theta, cli.norm_eps)?;
    calibration.check("calibration", checkpoint.sizes.vocabulary)?;
    eval.check("eval", checkpoint.sizes.vocabulary)?;
    Ok(Opened {
        sizes: checkpoint.sizes,
        checkpoint: Some(checkpoint),
        text: Text { calibration, eval },
    })
}

/// Windows in a batch of calibration text.
fn calibration_batch(cli: &Cli, windows: usize) -> usize {
    let size = even(windows, cli.batch);
    if 2 * size < cli.batch.min(windows) {
        println!(
            "{windows} windows of calibration text go in batches of {size}, since all are of one size: {} of them \
             (--windows) would go in batches of {}",
            windows - windows % cli.batch,
            cli.batch
        );
    }
    size
}

/// Prints what a model says by itself; tokens in a second.
fn said(name: &str, cli: &Cli, model: &Llama, kv: KvFormat, device: &Device) -> Option<f64> {
    if cli.generate == 0 {
        return None;
    }
    let said = speak(model, cli.generate, kv, device);
    println!(
        "{name}: {:.0} tokens/s, {} bytes of keys and values: {}",
        said.per_second,
        said.cache_bytes,
        shown(cli, &said.tokens)
    );
    Some(said.per_second)
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
