//! One-shot compression at size: a Llama with random weights, one block in memory at a time.
//!
//! ```sh
//! cargo bench --bench oneshot -- --size 110m --preset w4a16-g128 --json FILE
//! cargo bench --bench oneshot -- --size 1b --blocks 1 --windows 8 --preset sparse-2:4
//! ```
//!
//! A block is made, compressed on what arrives at it, written to a file and dropped, as
//! `llama_compress --stream` does with those of a checkpoint; all blocks of a model are alike. A row is
//! a block: seconds, and the most memory beyond what there was before it was made, of which `weights`
//! are the block's in F32, `gram_bytes` the sums XᵀX and XᵀY in F64 of the layers that are solved
//! together, and `activations` what is alive between two layers over all batches.

#[path = "../examples/llama_compress/llama.rs"]
#[allow(dead_code)]
mod llama;
#[path = "../examples/support/mod.rs"]
mod support;

use std::cell::RefCell;
use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use burn::module::Module;
use burn::tensor::{Distribution, Tensor};
use burn_lean::oneshot::{Compressed, OneShot, Preset};
use clap::{Parser, ValueEnum};
use llama::{LoneBlock, Sizes};
use support::{Cell, DeviceName, PeakMemory, Table};

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
    /// Windows of calibration.
    #[arg(long, default_value_t = 16, value_parser = support::at_least_one)]
    windows: usize,
    /// Tokens of a window.
    #[arg(long, default_value_t = 512, value_parser = support::at_least_one)]
    length: usize,
    /// Keeps activations between layers in files here.
    #[arg(long, value_name = "FOLDER")]
    spill: Option<PathBuf>,
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
    fn sizes(self, positions: usize) -> Sizes {
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
            positions,
            own_head: matches!(self, Self::Large),
        }
    }
}

fn main() -> ExitCode {
    support::init_tracing();
    support::exit(run(&Cli::parse()))
}

fn run(cli: &Cli) -> Result<(), Box<dyn Error>> {
    let device = cli.device.open()?;
    device.seed(0);
    let sizes = cli.size.sizes(cli.length);
    let count = cli.blocks.min(sizes.layers);
    let preset = match cli.as_published {
        true => cli.preset.clone().as_published(),
        false => cli.preset.clone(),
    };
    let folder = tempfile::tempdir()?;
    let shape = [1, cli.length, sizes.width];
    let inputs = (0..cli.windows)
        .map(|_| Tensor::<3>::random(shape, Distribution::Normal(0.0, 1.0), &device));
    let header = [
        "block",
        "seconds",
        "solve_seconds",
        "peak_bytes",
        "weights",
        "gram_bytes",
        "activations",
        "file_bytes",
        "relative_error",
    ];
    let title = format!(
        "{} on {} windows of {} tokens, {count} of {} blocks",
        preset.name(),
        cli.windows,
        cli.length,
        sizes.layers
    );
    let mut table = Table::new(title, &header);
    let measured = RefCell::new((PeakMemory::start(), Instant::now()));
    let blocks = (0..count).map(|number| -> Result<_, Box<dyn Error>> {
        measured.replace((PeakMemory::start(), Instant::now()));
        Ok((format!("layers.{number}"), sizes.lone_block(&device)))
    });
    let store = |number: usize, done: Compressed<LoneBlock>| -> Result<(), Box<dyn Error>> {
        let file = folder.path().join("block.safetensors");
        done.save(&file)?;
        let (memory, start) = &*measured.borrow();
        let block = &done.report.blocks[0];
        let layers = &done.report.layers;
        let error = layers.iter().map(|one| one.relative_error).sum::<f64>() / layers.len() as f64;
        let row = [
            Cell::Integer(number as u64),
            Cell::Number(start.elapsed().as_secs_f64(), 1),
            Cell::Number(block.seconds, 1),
            Cell::optional_integer(memory.bytes()),
            Cell::Integer(4 * done.model.num_params() as u64),
            Cell::Integer(block.gram_bytes as u64),
            Cell::Integer(block.activation_bytes as u64),
            Cell::Integer(std::fs::metadata(&file)?.len()),
            Cell::Number(error, 5),
        ];
        tracing::info!(?row, "block");
        table.push(row);
        Ok(())
    };
    let mut oneshot = OneShot::new(preset);
    if let Some(folder) = &cli.spill {
        oneshot = oneshot.spilling_to(folder);
    }
    oneshot.compress_blocks(inputs, blocks, |block, x| block.forward(x), store)?;
    Ok(table.publish(cli.json.as_deref())?)
}
