//! The lottery ticket experiment: a trained network is pruned by magnitude, its survivors go back to what
//! they were early in training, and are trained again. Do they reach the dense network alone, and is it
//! their values or only their places?
//!
//! ```sh
//! cargo run -p burn-lean --release --example lottery_ticket                        # the embedded 8×8 digits
//! cargo run -p burn-lean --release --example lottery_ticket -- --data path/to/mnist --seeds 5
//! ```
//!
//! Three ways from one set of masks, each trained for as long as the dense network: the survivors at
//! their early values (`rewound`), at new random ones (`re-initialized`), and as many weights at their
//! early values in places drawn at random (`random places`). The first is the winning ticket of
//! [Frankle & Carbin, 2019](https://arxiv.org/abs/1803.03635); the early values after some epochs, and
//! not the first ones, are from [Frankle et al., 2020](https://arxiv.org/abs/1912.05671).

mod support;

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

use burn::module::Module;
use burn::tensor::Device;
use burn_lean::prune::{Budget, Masks, Selection, SparsityPattern, rewind};
use clap::Parser;
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use support::{Cell, DeviceName, ImageSet, MlpNet, Table};

/// Prune, go back, train again.
#[derive(Debug, Parser)]
#[command(allow_negative_numbers = true)]
struct Cli {
    /// Folder with MNIST; without it, the embedded digits.
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
    /// Fractions of zeros.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "0.5,0.8,0.9,0.95",
        value_parser = support::fraction
    )]
    sparsity: Vec<f64>,
    /// Epochs of each training [default: 15, of MNIST 3].
    #[arg(long, value_parser = support::at_least_one)]
    epochs: Option<usize>,
    /// Epochs after which the early values are taken; 0 for those before training.
    #[arg(long, default_value_t = 0)]
    rewind_to: usize,
    /// Repetitions, each with other weights and another order of the data.
    #[arg(long, default_value_t = 3, value_parser = support::at_least_one)]
    seeds: usize,
    /// The first of the seeds.
    #[arg(long, default_value_t = 42)]
    seed: u64,
    /// Where to compute.
    #[arg(long, value_enum, default_value_t = DeviceName::Flex)]
    device: DeviceName,
    /// Also write the table to this file, as JSON.
    #[arg(long, value_name = "FILE", value_parser = support::output_file)]
    json: Option<PathBuf>,
}

fn main() -> ExitCode {
    support::init_tracing();
    support::exit(run(&Cli::parse()))
}

fn run(cli: &Cli) -> Result<(), Box<dyn Error>> {
    let images = match &cli.data {
        Some(dir) => ImageSet::load(Some(dir))?.normalized_as_mnist(),
        None => ImageSet::digits(),
    };
    let device = cli.device.open()?;
    let epochs = cli
        .epochs
        .unwrap_or(if cli.data.is_some() { 3 } else { 15 });
    let mut dense = Vec::new();
    // For each sparsity the accuracies of the ways, seed after seed.
    let mut found = vec![<[Vec<f64>; 4]>::default(); cli.sparsity.len()];
    for seed in support::seeds(cli.seed, cli.seeds) {
        let trial = Trial {
            images: &images,
            device: &device,
            seed,
        };
        let early = trial.train(trial.new_model(0), cli.rewind_to);
        let trained = trial.train(early.clone(), epochs);
        dense.push(trial.accuracy(&trained));
        let selection = Selection::of(&trained, None)?;
        for (sparsity, found) in cli.sparsity.iter().zip(&mut found) {
            let budget = Budget::Sparsity(*sparsity);
            let pattern = SparsityPattern::Unstructured;
            let masks = Masks::by_magnitude(&trained, &selection, &pattern, &budget)?;
            let pruned = masks.attach(trained.clone())?;
            let rewound = rewind(pruned.clone(), early.clone().into_record())?;
            let other = masks.attach(trial.new_model(1))?;
            let random = shuffled(&selection, &masks, seed)?.attach(early.clone())?;
            found[0].push(trial.accuracy(&pruned));
            // Values of another seed have not been trained for the epochs of the early ones.
            let trained = [
                (rewound, epochs),
                (other, cli.rewind_to + epochs),
                (random, epochs),
            ];
            for (accuracies, (model, epochs)) in found[1..].iter_mut().zip(trained) {
                accuracies.push(trial.accuracy(&trial.train(model, epochs)));
            }
        }
    }
    let (mean, error) = mean_and_error(&dense);
    // A single seed says nothing of another one.
    let known = |error: f64| (cli.seeds > 1).then_some(error);
    let error = known(error).map_or(String::new(), |error| format!(" ± {error:.2}"));
    let title = format!(
        "{}: dense {mean:.2}{error} %, {} seeds, {epochs} epochs, early values after {}",
        images.name, cli.seeds, cli.rewind_to
    );
    let ways = ["pruned", "rewound", "re-initialized", "random places"];
    let mut table = Table::new(title, &["sparsity", "way", "accuracy", "standard error"]);
    for (sparsity, found) in cli.sparsity.iter().zip(&found) {
        for (way, accuracies) in ways.into_iter().zip(found) {
            let (mean, error) = mean_and_error(accuracies);
            table.push([
                Cell::Number(*sparsity, 3),
                way.into(),
                Cell::Number(mean, 2),
                Cell::optional(known(error), 2),
            ]);
        }
    }
    Ok(table.publish(cli.json.as_deref())?)
}

/// What is trained with one seed.
struct Trial<'a> {
    images: &'a ImageSet,
    device: &'a Device,
    seed: u64,
}

impl Trial<'_> {
    fn new_model(&self, which: u64) -> MlpNet {
        self.device.seed(self.seed.wrapping_add(1000 * which));
        let model = MlpNet::new(self.images.train.side(), &self.device.clone().autodiff());
        // Burn makes the values of a parameter when they are first asked for.
        model.valid().train()
    }

    fn train(&self, model: MlpNet, epochs: usize) -> MlpNet {
        let images = &self.images.train;
        support::train(model, &MlpNet::forward, images, epochs, self.seed)
    }

    fn accuracy(&self, model: &MlpNet) -> f64 {
        let model = model.valid();
        support::accuracy(&self.images.test, self.device, |x| model.forward(x))
    }
}

/// As many weights in each layer, in places drawn at random.
fn shuffled(selection: &Selection, masks: &Masks, seed: u64) -> Result<Masks, Box<dyn Error>> {
    let mut random = StdRng::seed_from_u64(seed);
    let mut support = Vec::new();
    for (layer, mask) in selection.layout().layers().iter().zip(masks.parameters()) {
        let mut places: Vec<usize> = layer.range().collect();
        places.shuffle(&mut random);
        support.extend_from_slice(&places[..mask.nonzeros()]);
    }
    Ok(Masks::from_support(selection.layout(), &support)?)
}

fn mean_and_error(values: &[f64]) -> (f64, f64) {
    let count = values.len() as f64;
    let mean = values.iter().sum::<f64>() / count;
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    (mean, (squares / (count - 1.0).max(1.0) / count).sqrt())
}
