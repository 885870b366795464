//! Fake quantization: its throughput, and what it adds to a training step.
//!
//! `cargo bench --bench quant -- --device flex --json FILE`
//!
//! All variants of a table run interleaved in one process; times and ratios are medians.

#[path = "support/mod.rs"]
mod harness;
#[path = "../examples/support/mod.rs"]
mod support;

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use burn::tensor::{Device, Distribution, Tensor};
use burn_lean::quant::{Granularity, NumberFormat, QuantParams, Scheme, fake_quantize};
use clap::Parser;
use harness::{Variant, interleave};
use support::{Cell, DeviceName, Table};

/// Benchmark of quantization.
#[derive(Parser)]
struct Arguments {
    /// Where to compute.
    #[arg(long, value_enum, default_value_t = DeviceName::Flex)]
    device: DeviceName,
    /// Samples of each variant.
    #[arg(long, default_value_t = 15)]
    samples: usize,
    /// Steps in a sample.
    #[arg(long, default_value_t = 3)]
    steps: usize,
    /// Only tables whose name contains this: `throughput`, `step`, `size`.
    #[arg(long, default_value = "")]
    table: String,
    /// Also write the tables to FILE-throughput.json and so on.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Passed by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

impl Arguments {
    fn publish(&self, name: &str, table: &Table) -> Result<(), String> {
        let stem = self.json.as_deref().map(Path::display);
        let path = stem.map(|stem| PathBuf::from(format!("{stem}-{name}.json")));
        table.publish(path.as_deref())
    }
}

fn main() -> ExitCode {
    support::exit(run(&Arguments::parse()))
}

fn run(arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    let device = arguments.device.open()?;
    if "throughput".contains(&arguments.table) {
        throughput(arguments, &device)?;
    }
    Ok(())
}

/// Rows and columns of the tensor of the throughput table: 16 MiB, more than a cache holds.
const SHAPE: [usize; 2] = [2048, 2048];

fn throughput(arguments: &Arguments, device: &Device) -> Result<(), Box<dyn Error>> {
    let x = Tensor::<2>::random(SHAPE, Distribution::Normal(0.0, 1.0), device);
    let schemes = [
        ("per tensor", Granularity::PerTensor),
        ("per row", Granularity::PerChannel { axis: 0 }),
        ("per column", Granularity::PerChannel { axis: 1 }),
    ];
    let copied = x.clone();
    let mut names = vec!["copy".to_string()];
    let mut variants = vec![Variant::new(move || {
        // Reads and writes every element, as a copy does; `clone` would only count a reference.
        let _ = copied.clone().mul_scalar(1.0);
        Ok(())
    })];
    for (name, granularity) in schemes {
        let scheme = Scheme::symmetric(NumberFormat::int8()).with_granularity(granularity);
        let qparams = QuantParams::of(&x, &scheme)?;
        names.push(format!("fake quantize, {name}"));
        let value = x.clone();
        let (inference, params) = (scheme.clone(), qparams.clone());
        variants.push(Variant::new(move || {
            let _ = fake_quantize(value.clone(), &params, &inference);
            Ok(())
        }));
        names.push(format!("fake quantize with backward, {name}"));
        let leaf = Tensor::from_data(x.to_data(), &device.clone().autodiff()).require_grad();
        variants.push(Variant::new(move || {
            let y = fake_quantize(leaf.clone(), &qparams, &scheme);
            let _ = leaf.grad(&y.backward());
            Ok(())
        }));
    }
    let bar = support::progress((arguments.samples + 1) * variants.len(), "throughput");
    interleave(
        &mut variants,
        arguments.samples,
        arguments.steps,
        device,
        &bar,
    )?;

    let mut table = Table::new(
        format!("{SHAPE:?} F32 numbers on {device:?}; bytes read and written once"),
        &["operation", "ms", "GB/s", "time of the copy"],
    );
    let bytes = (2 * 4 * SHAPE[0] * SHAPE[1]) as f64;
    for (name, variant) in names.iter().zip(&variants) {
        let milliseconds = variant.median();
        table.push([
            name.as_str().into(),
            Cell::optional(milliseconds, 2),
            Cell::optional(milliseconds.map(|ms| bytes / ms / 1e6), 2),
            Cell::optional(variant.compared(&variants[0], |with, copy| with / copy), 2),
        ]);
    }
    arguments.publish("throughput", &table)?;
    Ok(())
}
