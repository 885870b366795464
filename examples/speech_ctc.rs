//! Spoken digits to text with the CTC loss, in FP32, with AMP, pruned, and with 8 bits.
//!
//! ```sh
//! cargo run -p burn-lean --release --example speech_ctc                      # tones instead of speech
//! cargo run -p burn-lean --release --example speech_ctc -- --data path/to/fsdd
//! cargo run -p burn-lean --release --example speech_ctc -- --data path/to/fsdd --json speech.json --seed 1
//! ```
//!
//! `--data` names the folder of the [Free Spoken Digit Dataset], or its folder `recordings`: 3,000
//! recordings of single digits by six speakers. They are joined to strings of one to five digits,
//! with silence of any length before, between and after them and each as loud as it happens to be; the
//! recordings of the dataset's own test split are joined to other strings, on which the character
//! error rate is measured: the edits that make of what was heard what was said, in percent of the
//! symbols said. (The speakers of both are the same.) Without `--data` each symbol is a chord of
//! two tones, in pure noise.
//!
//! # The blank
//!
//! The network says something every 80 ms, but nobody says where in a recording a symbol begins or
//! ends, and the strings have other lengths than the sounds. Connectionist temporal classification
//! (Graves et al. 2006) takes all alignments: every sequence of one class per step from which the
//! string remains once repeats are made one and then the *blank* is dropped. The loss is the
//! negative logarithm of the probability of all of them together.
//!
//! The blank is a class of its own that means "nothing new here". It is not silence, although it is
//! likeliest there, too: it is what lets the network wait until it is sure and then say a symbol
//! for a step or two, in the middle of a sound that goes on; and it is what tells "6, 6" from one
//! long "6", since two sixes without a blank between them are made one. The figure shows both:
//! peaks where symbols are spoken (shaded), the blank nearly everywhere else, and between two equal
//! symbols. Greedy decoding takes the likeliest class of each step, makes repeats one and drops the
//! blanks.
//!
//! A network that knows nothing says blanks everywhere first, which costs least as long as it does not
//! know what is said. It stays there for a shorter time where strings are short: the first quarter of
//! the epochs has single symbols, the second up to three.
//!
//! # The variants
//!
//! Each is measured as it is read back from the file that it is shipped in.
//!
//! - `fp32`: the network, four convolutions and a layer of attention, as Burn has them.
//! - `amp`: trained and run by `Autocast::run`, from the same weights over the same batches.
//! - `pruned`: `fp32`, pruned with the defaults and fine-tuned with its zeros held.
//! - `w8a8`: `fp32`, quantized after training: 8 bits for weights and for inputs of layers.
//!
//! [Free Spoken Digit Dataset]: https://github.com/Jakobovski/free-spoken-digit-dataset

#[path = "speech_ctc/acoustic_model.rs"]
mod acoustic_model;
#[path = "speech_ctc/alignment_figure.rs"]
mod alignment_figure;
#[path = "speech_ctc/batches.rs"]
mod batches;
#[path = "speech_ctc/corpus.rs"]
mod corpus;
#[path = "speech_ctc/decoding.rs"]
mod decoding;
#[path = "speech_ctc/log_mel.rs"]
mod log_mel;
#[path = "speech_ctc/speech_error.rs"]
mod speech_error;
mod support;
#[path = "speech_ctc/tones.rs"]
mod tones;
#[path = "speech_ctc/training.rs"]
mod training;
#[path = "speech_ctc/utterance.rs"]
mod utterance;
#[path = "speech_ctc/variants.rs"]
mod variants;

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

use burn::tensor::activation::softmax;
use clap::Parser;
use corpus::Corpus;
use support::{Cell, Options, Table};
use training::Speech;
use variants::{Variant, Variants};

/// Recognize strings of spoken digits in FP32, with mixed precision, pruned and quantized.
#[derive(Debug, Parser)]
#[command(allow_negative_numbers = true)]
struct Cli {
    #[command(flatten)]
    options: Options,
    /// Folder with the recordings, or with the folder `recordings`; without it, tones.
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
    /// Passes over the training recordings [default: 24 for speech, 120 for tones].
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..100_000))]
    epochs: Option<u64>,
    /// Passes over them after pruning [default: two fifths of the epochs].
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..100_000))]
    fine_tuning: Option<u64>,
    /// Training recordings, at most; at least 20, that there are strings to prune with.
    #[arg(long, value_parser = at_least_twenty)]
    limit: Option<usize>,
    /// Learning rate of AdamW, at its highest.
    #[arg(long, default_value_t = 3e-3, value_parser = support::positive)]
    learning_rate: f64,
    /// Fraction of the weights to prune.
    #[arg(long, default_value_t = 0.8, value_parser = support::fraction)]
    sparsity: f64,
    /// Measure on recordings that are held out of the training instead of the test split: for those
    /// who choose settings.
    #[arg(long, requires = "data")]
    validate: bool,
    /// Folder for the models, and the figure of an alignment.
    #[arg(long, value_name = "DIR", default_value = "out")]
    out: PathBuf,
}

/// Reads a number of recordings that can be pruned with.
fn at_least_twenty(text: &str) -> Result<usize, String> {
    match support::at_least_one(text)? {
        0..20 => Err("must be at least 20".into()),
        count => Ok(count),
    }
}

fn main() -> ExitCode {
    support::init_tracing();
    support::exit(run(&Cli::parse()))
}

fn run(cli: &Cli) -> Result<(), Box<dyn Error>> {
    let device = cli.options.device()?;
    let dtype = cli.options.dtype(&device);
    let mut corpus = Corpus::load(cli.data.as_deref(), cli.validate)?;
    if let Some(limit) = cli.limit {
        corpus.limit(limit, cli.options.seed);
    }
    if corpus.train.len() < 20 {
        let found = corpus.train.len();
        return Err(format!(
            "{found} training recordings are too few: there must be at least 20, that there are \
             strings to prune with"
        )
        .into());
    }
    if cli.data.is_none() {
        println!("no --data: tones instead of speech");
    }
    let epochs = cli.epochs.unwrap_or(match cli.data.is_some() {
        true => 24,
        false => 120,
    });
    std::fs::create_dir_all(&cli.out)
        .map_err(|error| format!("cannot create {}: {error}", cli.out.display()))?;

    let speech = Speech::new(corpus, device, cli.options.seed);
    let variants = Variants {
        speech: &speech,
        options: &cli.options,
        epochs,
        fine_tuning: cli.fine_tuning.unwrap_or((2 * epochs).div_ceil(5)),
        rate: cli.learning_rate,
        sparsity: cli.sparsity,
        out: cli.out.clone(),
    };
    let (fp32, model) = variants.fp32()?;
    let rows = [
        announced(fp32),
        announced(variants.amp(dtype)?),
        announced(variants.pruned(model.clone())?),
        announced(variants.w8a8(&model)?),
    ];
    publish(cli, &speech, &rows)?;
    draw(cli, &speech, &variants)
}

/// For those who wait for the table, with `RUST_LOG=info`.
fn announced(row: Variant) -> Variant {
    tracing::info!(
        variant = row.name,
        cer = row.errors.rate(),
        bytes = row.bytes,
        "variant"
    );
    row
}

fn publish(cli: &Cli, speech: &Speech, rows: &[Variant]) -> Result<(), String> {
    let mut table = Table::new(
        format!(
            "{}: {} training and {} {} recordings, these in {} strings; seed {}",
            speech.corpus.name,
            speech.corpus.train.len(),
            speech.corpus.test.len(),
            if cli.validate { "validation" } else { "test" },
            speech.test.len(),
            cli.options.seed,
        ),
        &[
            "variant", "cer", "edits", "symbols", "bytes", "seconds", "note",
        ],
    );
    for row in rows {
        table.push([
            row.name.into(),
            Cell::Number(row.errors.rate(), 2),
            Cell::Integer(row.errors.edits as u64),
            Cell::Integer(row.errors.symbols as u64),
            Cell::Integer(row.bytes),
            Cell::Number(row.seconds, 1),
            row.note.as_str().into(),
        ]);
    }
    table.publish(cli.options.json.as_deref())
}

/// Draws the alignment that the shipped FP32 model finds.
fn draw(cli: &Cli, speech: &Speech, variants: &Variants<'_>) -> Result<(), Box<dyn Error>> {
    let Some(utterance) = alignment_figure::to_show(&speech.test) else {
        return Ok(());
    };
    let svg = cli.out.join("speech_ctc.svg");
    let device = speech.device.clone().inner();
    let (spectra, ..) = batches::batch(&[utterance], &speech.log_mel, &device);
    let logits = variants.load_fp32()?.forward(spectra);
    let probabilities = softmax(logits, 2).try_into_vec_as::<f32>()?;
    alignment_figure::write(&svg, utterance, &probabilities)?;
    println!("figure: {}", svg.display());
    Ok(())
}
