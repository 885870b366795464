//! What the examples share: command-line options, image sets, tables and curves.

// Every example compiles this module for itself and uses a part of it.
#![allow(dead_code, unused_imports)]

mod arch;
mod attention_net;
mod bars;
mod cifar;
mod conv_net;
mod curve;
mod idx;
mod image_encoder;
mod image_set;
pub(crate) mod learner_checkpoint;
mod memory;
mod mlp_net;
mod options;
#[cfg(feature = "train")]
mod progress_renderer;
mod res_net;
mod res_net8;
mod table;
#[cfg(feature = "train")]
mod to_batch;
mod training;

use std::error::Error;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;
use std::time::{Duration, Instant};

use burn_lean::amp::Autocast;
use burn_lean::prune::SparsityPattern;
use clap::ValueEnum;
use indicatif::{ProgressBar, ProgressStyle};

pub(crate) use arch::Arch;
pub(crate) use attention_net::AttentionNet;
pub(crate) use bars::{Bar, write_bars};
pub(crate) use cifar::{CifarFiles, read as read_cifar, read_part as read_cifar_part};
pub(crate) use conv_net::ConvNet;
pub(crate) use curve::{Axes, Curve, Values, write_csv, write_svg, write_svg_over};
pub(crate) use idx::IdxError;
pub(crate) use image_encoder::ImageEncoder;
pub(crate) use image_set::{Batch, ImageSet, Images, accuracy};
pub(crate) use memory::PeakMemory;
pub(crate) use mlp_net::MlpNet;
pub(crate) use options::{DeviceName, Dtype, Options};
#[cfg(feature = "train")]
pub(crate) use progress_renderer::ProgressRenderer;
pub(crate) use res_net::ResNet20;
pub(crate) use res_net8::ResNet8;
pub(crate) use table::{Cell, Table};
#[cfg(feature = "train")]
pub(crate) use to_batch::ToBatch;
pub(crate) use training::{Network, cross_entropy, load, recalibrated, train};

/// Prints an error for people (Rust would print its fields) and turns it into exit code 1.
pub(crate) fn exit(result: Result<(), Box<dyn Error>>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Prints what the libraries report: errors and dtype fallbacks; skipped steps with `RUST_LOG=warn`,
/// every change of the loss scale with `RUST_LOG=info`.
pub(crate) fn init_tracing() {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| {
        tracing_subscriber::EnvFilter::new(
            "error,burn_lean_amp::autocast=warn,burn_lean_recipe=warn",
        )
    });
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
}

/// A progress bar over `steps` steps; it stays away when stderr is no terminal.
pub(crate) fn progress(steps: usize, name: impl Into<String>) -> ProgressBar {
    let style = ProgressStyle::with_template("{prefix:>22} {wide_bar} {pos}/{len} {msg} {eta}")
        .expect("the template is valid");
    ProgressBar::new(steps as u64)
        .with_style(style)
        .with_prefix(name.into())
}

/// The compute dtype of a region as a table shows it.
pub(crate) fn dtype_name(autocast: &Autocast) -> String {
    match autocast.is_emulated() {
        true => format!("{:?} (emulated)", autocast.dtype()),
        false => format!("{:?}", autocast.dtype()),
    }
}

/// The name of a value on the command line.
pub(crate) fn option_name(value: &impl ValueEnum) -> String {
    let value = value.to_possible_value();
    value.map_or_else(String::new, |value| value.get_name().into())
}

/// Reads a number; where it does not fit, the error says what it must be.
pub(crate) fn number<N: FromStr<Err: ToString>>(
    text: &str,
    fits: impl FnOnce(&N) -> bool,
    must: &str,
) -> Result<N, String> {
    match text.parse() {
        Ok(number) if fits(&number) => Ok(number),
        Ok(_) => Err(must.into()),
        Err(error) => Err(error.to_string()),
    }
}

/// Reads a count that must not be 0.
pub(crate) fn at_least_one(text: &str) -> Result<usize, String> {
    number(text, |count| *count > 0, "must be at least 1")
}

/// A command line number above 0.
pub(crate) fn positive(text: &str) -> Result<f64, String> {
    let fits = |number: &f64| *number > 0.0 && number.is_finite();
    number(text, fits, "must be above 0")
}

/// A command line number of training images that can be pruned and quantized with.
pub(crate) fn at_least_ten(text: &str) -> Result<usize, String> {
    match at_least_one(text)? {
        1..10 => Err("must be at least 10: pruning learns from some and judges by others".into()),
        limit => Ok(limit),
    }
}

/// So many seeds from `first` on; after the largest comes 0.
pub(crate) fn seeds(first: u64, count: usize) -> impl Iterator<Item = u64> {
    (0..count as u64).map(move |at| first.wrapping_add(at))
}

/// A file that is written at the end: its folder must be there at the beginning.
pub(crate) fn output_file(text: &str) -> Result<PathBuf, String> {
    let file = PathBuf::from(text);
    if file.is_dir() {
        return Err(format!("{text} is a folder"));
    }
    let folder = file.parent().unwrap_or(Path::new(""));
    match folder == Path::new("") || folder.is_dir() {
        true => Ok(file),
        false => Err(format!("there is no folder {}", folder.display())),
    }
}

/// A command line share, strictly between none and all.
pub(crate) fn fraction(text: &str) -> Result<f64, String> {
    let fits = |share: &f64| *share > 0.0 && *share < 1.0;
    number(text, fits, "must be above 0 and below 1: 0.9 is 90 %")
}

/// A command line number that is not negative.
pub(crate) fn not_negative(text: &str) -> Result<f64, String> {
    let fits = |number: &f64| *number >= 0.0 && number.is_finite();
    number(text, fits, "must be at least 0")
}

/// Reads `N:M`.
pub(crate) fn pattern(text: &str) -> Result<SparsityPattern, String> {
    let expected = |_| "expected two numbers, for example 2:4".to_string();
    text.parse().map_err(expected)
}

/// The median time of a call in milliseconds: of at least 31 calls, and of as many as fit in a fifth of a
/// second; the first tenth of a second, in which caches fill and threads wake up, does not count.
pub(crate) fn median_ms(mut call: impl FnMut()) -> f64 {
    let begin = Instant::now();
    let mut times = Vec::new();
    while times.len() < 31 || begin.elapsed() < Duration::from_millis(300) {
        let start = Instant::now();
        call();
        if begin.elapsed() > Duration::from_millis(100) {
            times.push(1e3 * start.elapsed().as_secs_f64());
        }
    }
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
