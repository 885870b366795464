//! One-shot compression at size: a Llama with random weights, one block in memory at a time.
//!
//! ```sh
//! cargo bench --bench oneshot -- --size 110m --preset w4a16-g128 --json FILE
//! cargo bench --bench oneshot -- --size 1b --blocks 22 --windows 12 --as-published --state FOLDER
//! ```
//!
//! A block is made, compressed on what arrives at it, written to a file and dropped, as
//! `llama_compress --stream` does with those of a checkpoint; all blocks of a model are alike. A row is
//! a block: seconds, and the most memory beyond what there was before it was made, of which `weights`
//! are the block's in F32, `gram_bytes` the sums XᵀX and XᵀY in F64 of the layers that are solved
//! together, and `activations` what is alive between two layers over all batches. `process_bytes` is
//! the most beyond the start of the program: where it grew from block to block, something would stay.
//!
//! All blocks of a model are written to one file, one after the other. With `--state` a run that was
//! ended goes on after the last finished block, whose row it has kept; the folder takes a byte for each
//! weight on a grid, and four for each other one. The widest layer has 2,048 inputs in the 110m model
//! and 5,632 in the 1b one: so many tokens of calibration there have to be at least.

#[path = "../examples/llama_compress/llama.rs"]
#[allow(dead_code)]
mod llama;
#[path = "oneshot/row.rs"]
mod row;
#[path = "../examples/support/mod.rs"]
mod support;

use std::cell::RefCell;
use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use burn::module::Module;
use burn::tensor::{Distribution, Tensor};
use burn_lean::oneshot::{Compressed, OneShot, Preset, PruneMethod};
use clap::{Parser, ValueEnum};
use llama::{LoneBlock, Sizes};
use row::BlockRow;
use support::{Cell, DeviceName, PeakMemory, Table};

/// Tokens of a window.
const LENGTH: usize = 512;

/// Seconds and bytes of compression, block by block.
#[derive(Debug, Parser)]
struct Cli {
    /// Sizes of the model.
    #[arg(long, value_enum, default_value_t = Size::Small)]
    size: Size,
    /// Blocks to compress, at most all.
    #[arg(long, default_value_t = 2, value_parser = support::at_least_one)]
    blocks: usize,
    /// What is done.
    #[arg(long, default_value = "w4a16-g128")]
    preset: Preset,
    /// The methods as they were published.
    #[arg(long)]
    as_published: bool,
    /// Zeros by SparseGPT, not by best subsets.
    #[arg(long)]
    sparsegpt: bool,
    /// Windows of calibration.
    #[arg(long, default_value_t = 16, value_parser = support::at_least_one)]
    windows: usize,
    /// Keeps finished blocks and their rows here, and goes on after the last one.
    #[arg(long, value_name = "FOLDER")]
    state: Option<PathBuf>,
    /// Where to compute.
    #[arg(long, value_enum, default_value_t = DeviceName::Flex)]
    device: DeviceName,
    /// Writes a row for each block.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Given by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Size {
    /// 110 million weights: 12 blocks of width 768, 12 heads, a vocabulary of 32,000.
    #[value(name = "110m")]
    Small,
    /// 1.1 billion: 22 blocks of width 2048, 32 heads over 4 of keys and values.
    #[value(name = "1b")]
    Large,
}

impl Size {
    fn sizes(self) -> Sizes {
        let (width, hidden, layers, heads, kv_heads) = match self {
            Self::Small => (768, 2048, 12, 12, 12),
            Self::Large => (2048, 5632, 22, 32, 4),
        };
        Sizes {
            vocabulary: 32_000,
            width,
            hidden,
            layers,
            heads,
            kv_heads,
            positions: LENGTH,
            own_head: matches!(self, Self::Large),
            rope_theta: llama::ROPE_THETA,
            rope_scaling: None,
            norm_epsilon: llama::NORM_EPSILON,
        }
    }
}

fn main() -> ExitCode {
    support::init_tracing();
    support::exit(run(&Cli::parse()))
}

impl Cli {
    fn preset(&self) -> Result<Preset, String> {
        let mut preset = match self.as_published {
            true => self.preset.clone().as_published(),
            false => self.preset.clone(),
        };
        if self.sparsegpt {
            let prune = preset.prune.as_mut();
            let prune = prune.ok_or("--sparsegpt is for presets with zeros, sparse-2:4 for one")?;
            prune.method = PruneMethod::SparseGpt;
        }
        Ok(preset)
    }
}

fn run(cli: &Cli) -> Result<(), Box<dyn Error>> {
    let device = cli.device.open()?;
    let sizes = cli.size.sizes();
    let count = cli.blocks.min(sizes.layers);
    let preset = cli.preset()?;
    let whole = PeakMemory::start();
    let folder = tempfile::tempdir()?;
    let shape = [1, LENGTH, sizes.width];
    device.seed(0);
    let inputs: Vec<Tensor<3>> = (0..cli.windows)
        .map(|_| Tensor::random(shape, Distribution::Normal(0.0, 1.0), &device))
        .collect();
    let header = [
        "block",
        "seconds",
        "solve_seconds",
        "peak_bytes",
        "process_bytes",
        "weights",
        "gram_bytes",
        "activations",
        "file_bytes",
        "relative_error",
    ];
    let title = format!(
        "{} on {} windows of {LENGTH} tokens, {count} of {} blocks",
        preset.name(),
        cli.windows,
        sizes.layers
    );
    let mut table = Table::new(title, &header);
    let measured = RefCell::new((PeakMemory::start(), Instant::now()));
    let blocks = (0..count).map(|number| -> Result<_, Box<dyn Error>> {
        measured.replace((PeakMemory::start(), Instant::now()));
        // Whatever was drawn before it: a resumed run makes the same block.
        device.seed(1 + number as u64);
        Ok((format!("layers.{number}"), sizes.lone_block(&device)))
    });
    let store = |number: usize, done: Compressed<LoneBlock>| -> Result<(), Box<dyn Error>> {
        let file = folder.path().join("block.safetensors");
        done.save(&file)?;
        let block = &done.report.blocks[0];
        let kept = cli.state.as_ref();
        let kept = kept.map(|folder| folder.join(format!("row-{number:04}.json")));
        let earlier = match &kept {
            Some(file) if block.resumed => BlockRow::load(file)?,
            _ => None,
        };
        let row = match earlier {
            Some(row) => row,
            None => {
                let (memory, start) = &*measured.borrow();
                let now = !block.resumed;
                let layers = &done.report.layers;
                let errors = layers.iter().map(|one| one.relative_error);
                let row = BlockRow {
                    seconds: match now {
                        true => start.elapsed().as_secs_f64(),
                        false => block.seconds,
                    },
                    solve_seconds: block.seconds,
                    peak_bytes: memory.bytes().filter(|_| now),
                    process_bytes: whole.bytes().filter(|_| now),
                    weights: 4 * done.model.num_params() as u64,
                    gram_bytes: block.gram_bytes as u64,
                    activations: block.activation_bytes as u64,
                    file_bytes: std::fs::metadata(&file)?.len(),
                    relative_error: errors.sum::<f64>() / layers.len() as f64,
                };
                if let (Some(file), true) = (&kept, now) {
                    row.save(file)?;
                }
                row
            }
        };
        let bytes = |bytes: Option<u64>| bytes.map_or("?".to_string(), |bytes| bytes.to_string());
        println!(
            "layers.{number}: {:.1} s, {} bytes at most, {} of the process",
            row.seconds,
            bytes(row.peak_bytes),
            bytes(row.process_bytes)
        );
        table.push([
            Cell::Integer(number as u64),
            Cell::Number(row.seconds, 1),
            Cell::Number(row.solve_seconds, 1),
            Cell::optional_integer(row.peak_bytes),
            Cell::optional_integer(row.process_bytes),
            Cell::Integer(row.weights),
            Cell::Integer(row.gram_bytes),
            Cell::Integer(row.activations),
            Cell::Integer(row.file_bytes),
            Cell::Number(row.relative_error, 5),
        ]);
        Ok(())
    };
    let mut oneshot = OneShot::new(preset);
    if let Some(folder) = &cli.state {
        oneshot = oneshot.with_state(folder);
    }
    oneshot.compress_blocks(inputs, blocks, |block, x| block.forward(x), store)?;
    Ok(table.publish(cli.json.as_deref())?)
}
