//! CHITA and the methods around it, with every choice that they have: what the figures of its papers
//! were repeated with. The example `prune_chita` is the way to begin.
//!
//! ```sh
//! cargo bench --bench chita                                    # the embedded 8×8 digits
//! cargo bench --bench chita -- --data path/to/mnist \
//!     --checkpoint mlpnet_mnist.safetensors --arch mlpnet --method chita++ --stages 16
//! cargo bench --bench chita -- --data path/to/cifar10 \
//!     --checkpoint resnet20_cifar10.safetensors --arch resnet20 --sparsity 0.4,0.6,0.8
//! ```
//!
//! With `--bits` it rounds what CHITA has pruned in one stage instead: `--bits 4,3,2 --sparsity
//! 0,0.5,0.8`, rows by how codes are found.
//!
//! The methods with one stage share one collection of gradients; `chita++` collects fresh ones in
//! every stage, at the weights that the stage before left. Each row of `--json` has the objective
//! of the (last) problem, over all prunable weights, and `peak_bytes`, the largest resident memory
//! while pruning beyond what data and model took before (Linux; the gradient matrix is in it).
//!
//! Beside methods with one stage, `chita++` takes their batch size of 1; alone it takes 16. On the
//! digits a stage draws 8,000 images for its gradients then, from 1,437: those that judge its ridges
//! are not held out. With MNIST or CIFAR-10 most of them are.

#[path = "chita/grid.rs"]
mod grid;
#[path = "chita/network.rs"]
mod network;
#[path = "chita/options.rs"]
mod options;
#[path = "../examples/support/mod.rs"]
mod support;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::error::Error;
use std::process::ExitCode;
use std::time::Instant;

use burn::tensor::Device;
use burn_lean::prune::{
    Budget, ChitaConfig, Masks, Method, Problem, PruneError, PruneReport, Pruner, PrunerConfig,
    RidgeChoice, RunningStatistics, Selection, SolverConfig, SparsityPattern, flops, mean_loss,
    run::StageReport, solve_with_ridge,
};
use clap::Parser;
use network::loss;
use options::{Cli, MethodName};
use support::{Arch, Batch, Cell, ImageSet, MlpNet, Network, PeakMemory, ResNet20, Table};

/// Added to the seed of the loader for fresh samples.
const FRESH: u64 = 1 << 32;
/// Images that the loader yields at a time, about.
const LOADED: usize = 256;

fn main() -> ExitCode {
    support::init_tracing();
    support::exit(run(&Cli::parse()))
}

fn run(cli: &Cli) -> Result<(), Box<dyn Error>> {
    cli.check()?;
    let device = cli.device.open()?;
    let images = cli.images()?;
    device.seed(cli.seed);
    match cli.arch() {
        Arch::Mlpnet => {
            let model = MlpNet::new(images.train.side(), &device.clone().autodiff());
            Run::prepare(cli, images, device, model)?.run()
        }
        Arch::Resnet20 => {
            let model = ResNet20::new(&device.clone().autodiff());
            Run::prepare(cli, images, device, model)?.run()
        }
    }
}

/// One invocation: a trained model and what to do with it.
struct Run<'a, M> {
    cli: &'a Cli,
    images: ImageSet,
    device: Device,
    model: M,
    selection: Selection,
    table: Table,
}

impl<'a, M: Network> Run<'a, M> {
    /// Loads or trains the model, after a look at what would be refused later.
    fn prepare(
        cli: &'a Cli,
        images: ImageSet,
        device: Device,
        model: M,
    ) -> Result<Self, Box<dyn Error>> {
        let default = Selection::of(&model, None)?;
        cli.check_exclude(&default)?;
        let group = cli.group(&default);
        let selection = Selection::of(&model, group.as_ref())?;
        cli.check_sparsities(selection.layout().len())?;
        let (count, m) = (images.train.len(), cli.batch_size());
        if count < m {
            return Err(format!(
                "there are {count} training images, but a Fisher sample takes {m}: lower \
                 `--batch-size`, or raise `--limit`"
            )
            .into());
        }
        let mut model = match &cli.checkpoint {
            Some(path) => support::load(model, path)?,
            None => support::train(model, &M::logits, &images.train, cli.epochs, cli.seed),
        };
        if M::HAS_BATCH_NORM && cli.checkpoint.is_some() {
            println!(
                "accuracy as stored: {:.2} %",
                network::accuracy(&model, &images, &device)
            );
            model = network::normalized(model, &images, &device)?;
        }
        let one: Vec<Batch> = images.test.take(1).ordered(1, &device).collect();
        let selection =
            Selection::of(&model, group.as_ref())?.with_flops(&flops(&model, loss::<M>, &one[0])?);
        println!("{}", PruneReport::new(&model, &selection)?);
        let accuracy = network::accuracy(&model, &images, &device);
        println!("dense accuracy: {accuracy:.2} %");
        let table = Table::new(
            format!(
                "{}: {} training and {} test images, n = {}, m = {}, dense {accuracy:.2} %",
                images.name,
                images.train.len(),
                images.test.len(),
                cli.samples(),
                cli.batch_size(),
            ),
            &[
                "method",
                "stages",
                "sparsity",
                "accuracy",
                "objective",
                "nonzeros",
                "gradient_seconds",
                "solve_seconds",
                "peak_bytes",
                "ridge",
                "tempering",
                "held_out_loss",
                "fresh_objective",
                "steps",
            ],
        );
        Ok(Self {
            cli,
            images,
            device,
            model,
            selection,
            table,
        })
    }

    fn run(mut self) -> Result<(), Box<dyn Error>> {
        if !self.cli.bits.is_empty() {
            return self.on_grids();
        }
        let pruned = self.prune();
        // What is finished is kept, whatever went wrong after it.
        let published = match self.table.is_empty() {
            true => Ok(()),
            false => self.table.publish(self.cli.json.as_deref()),
        };
        pruned?;
        Ok(published?)
    }

    /// Every method at every sparsity.
    fn prune(&mut self) -> Result<(), Box<dyn Error>> {
        let methods = self.cli.methods().into_iter();
        let (staged, single): (Vec<_>, Vec<_>) = methods.partition(|method| method.is_staged());
        let free = single.iter().all(|method| method.is_without_gradients());
        match free && self.cli.has_default() {
            true => self.without_gradients(&single)?,
            false => {
                let (free, single): (Vec<_>, Vec<_>) = single
                    .into_iter()
                    .partition(|method| *method == MethodName::Default);
                self.without_gradients(&free)?;
                if !single.is_empty() {
                    self.single_stage(&single)?;
                }
            }
        }
        match staged.is_empty() {
            true => Ok(()),
            false => self.multi_stage(),
        }
    }

    /// The training images in the order of a seed, again and again until there are enough.
    fn loader(&self, seed: u64) -> impl Iterator<Item = Batch> + '_ {
        let m = self.cli.batch_size();
        let size = m * (LOADED / m).max(1);
        let batches = self.images.train.endless(seed, size, &self.device);
        // What is left over in an epoch fills no batch of m.
        batches.filter(move |batch| batch.labels.dims()[0] >= m)
    }

    /// `magnitude` and `default`, which look at no gradient.
    fn without_gradients(&mut self, methods: &[MethodName]) -> Result<(), Box<dyn Error>> {
        for name in methods {
            for sparsity in self.cli.sparsities() {
                let memory = PeakMemory::start();
                let start = Instant::now();
                let model = self.model.clone();
                let (model, nonzeros) = if *name == MethodName::Magnitude {
                    let (pattern, budget) =
                        (SparsityPattern::Unstructured, Budget::Sparsity(sparsity));
                    let masks = Masks::by_magnitude(&model, &self.selection, &pattern, &budget)?;
                    let nonzeros = masks.nonzeros();
                    (masks.attach(model)?.materialize(), nonzeros)
                } else {
                    let mut pruner = Pruner::new(Budget::Sparsity(sparsity));
                    pruner.group = self.cli.group(&self.selection);
                    let inputs = self.loader(self.cli.seed).map(|batch| batch.images);
                    let pruned = pruner.prune(model, |model, x| model.logits(x), inputs)?;
                    println!("{}", pruned.report);
                    (pruned.model, pruned.masks.nonzeros())
                };
                let seconds = start.elapsed().as_secs_f64();
                let peak = memory.bytes();
                let model = match M::HAS_BATCH_NORM {
                    true => network::normalized(model, &self.images, &self.device)?,
                    false => model,
                };
                let accuracy = self.accuracy(&model);
                self.table.push([
                    name.to_string().into(),
                    Cell::Integer(1),
                    Cell::Number(sparsity, 4),
                    Cell::Number(accuracy, 2),
                    Cell::Empty,
                    Cell::Integer(nonzeros as u64),
                    Cell::Number(0.0, 2),
                    Cell::Number(seconds, 3),
                    Cell::optional_integer(peak),
                    Cell::Empty,
                    Cell::Empty,
                    Cell::Empty,
                    Cell::Empty,
                    Cell::Empty,
                ]);
            }
        }
        Ok(())
    }

    /// All methods on one collection of gradients.
    fn single_stage(&mut self, methods: &[MethodName]) -> Result<(), Box<dyn Error>> {
        let memory = PeakMemory::start();
        let mut images = self.loader(self.cli.seed);
        let fisher =
            self.cli
                .fisher()
                .collect(&self.model, &self.selection, loss::<M>, images.by_ref())?;
        let held_out = self.cli.held_out.div_ceil(LOADED);
        let held_out: Vec<Batch> = images.take(held_out).collect();
        let report = fisher.report;
        println!("{}", options::gradients(&report));
        let layout = self.selection.layout().clone();
        let problem = Problem::new(
            fisher.gradients,
            self.selection.flatten(&self.model)?,
            layout,
        )?;
        let fresh = self.fresh_problem()?;
        for (name, method) in self.with_choices(methods) {
            for sparsity in self.cli.sparsities() {
                memory.forget_peak();
                let config = SolverConfig::new(Budget::Sparsity(sparsity))
                    .with_pattern(self.cli.pattern())
                    .with_method(method.clone())
                    .with_dead_columns(Some(self.cli.dead_columns()))
                    .with_seed(self.cli.seed);
                let start = Instant::now();
                let ridge = match name.has_ridge() {
                    true => self.cli.ridge(),
                    false => RidgeChoice::Fixed(self.cli.ridge.unwrap_or(Problem::DEFAULT_RIDGE)),
                };
                let sweep = solve_with_ridge(&problem, &config, &ridge, &mut |solution| {
                    let weights = solution.weights.clone();
                    let model = self.selection.unflatten(self.model.clone(), weights)?;
                    Ok(self.with_statistics(model, &held_out)?.1)
                })?;
                let solution = sweep.solution;
                let seconds = start.elapsed().as_secs_f64();
                let peak = memory.bytes();
                let fresh = match &fresh {
                    Some(problem) => {
                        let problem = problem.clone().with_ridge(sweep.chosen.value)?;
                        Some(problem.objective(solution.weights.clone())?.total())
                    }
                    None => None,
                };
                let model = self
                    .selection
                    .unflatten(self.model.clone(), solution.weights)?;
                let (model, held_out_loss) = self.with_statistics(model, &held_out)?;
                let accuracy = self.accuracy(&model);
                self.table.push([
                    name.to_string().into(),
                    Cell::Integer(1),
                    Cell::Number(sparsity, 4),
                    Cell::Number(accuracy, 2),
                    Cell::Number(solution.objective, 4),
                    Cell::Integer(solution.support.len() as u64),
                    Cell::Number(report.seconds, 2),
                    Cell::Number(seconds, 3),
                    Cell::optional_integer(peak),
                    Cell::Number(sweep.chosen.value, 5),
                    Cell::Number(sweep.chosen.tempering.unwrap_or(0.0), 1),
                    Cell::Number(held_out_loss, 4),
                    Cell::optional(fresh, 4),
                    Cell::Integer(solution.iterations as u64),
                ]);
            }
        }
        Ok(())
    }

    /// The methods, CHITA once for each of its configs.
    fn with_choices(&self, methods: &[MethodName]) -> Vec<(MethodName, Method)> {
        let mut all = Vec::new();
        for name in methods {
            match name {
                MethodName::Chita => {
                    let configs = self.cli.chita().into_iter();
                    all.extend(configs.map(|config| (*name, Method::Chita(config))));
                }
                _ => all.push((*name, self.method(*name))),
            }
        }
        all
    }

    /// The same problem over another draw of samples.
    fn fresh_problem(&self) -> Result<Option<Problem>, Box<dyn Error>> {
        if !self.cli.fresh {
            return Ok(None);
        }
        let images = self.loader(self.cli.seed.wrapping_add(FRESH));
        let fisher = self
            .cli
            .fisher()
            .collect(&self.model, &self.selection, loss::<M>, images)?;
        let layout = self.selection.layout().clone();
        let weights = self.selection.flatten(&self.model)?;
        Ok(Some(Problem::new(fisher.gradients, weights, layout)?))
    }

    /// CHITA++ to each sparsity, or once to the highest with a row for every stage.
    fn multi_stage(&mut self) -> Result<(), Box<dyn Error>> {
        for sparsity in self.cli.staged_sparsities() {
            let memory = PeakMemory::start();
            let mut finished = Vec::new();
            // A stage that an earlier run has finished is not among them, but for the last.
            let mut measured = HashMap::new();
            let targets = self.cli.schedule().targets(sparsity, self.cli.stages)?;
            let pruned = self.pruner(sparsity).prune_with(
                self.model.clone(),
                loss::<M>,
                |seed| self.loader(seed),
                |model, _, stage| {
                    if self.has_row(stage, &targets) {
                        let accuracy = self.accuracy(&model);
                        measured.insert(stage.stage, (accuracy, memory.bytes()));
                    }
                    println!("{}", options::stage(stage));
                    finished.push(stage.clone());
                    Ok(model)
                },
            );
            let pruned = match pruned {
                Ok(pruned) => pruned,
                Err(error) => {
                    self.push_stages(&finished, &targets, &measured);
                    return Err(error.into());
                }
            };
            let last = &pruned.stages[pruned.stages.len() - 1];
            if let Entry::Vacant(entry) = measured.entry(last.stage) {
                entry.insert((self.accuracy(&pruned.model), None));
            }
            println!("{}", options::gradients(&last.gradients));
            self.push_stages(&pruned.stages, &targets, &measured);
        }
        Ok(())
    }

    /// Whether a stage has a row: the last of a run, and of a single run the first to reach each of
    /// the sparsities.
    fn has_row(&self, stage: &StageReport, targets: &[f64]) -> bool {
        let before = stage.stage.checked_sub(1).map_or(0.0, |at| targets[at]);
        let reached = |sparsity: &f64| {
            let least = sparsity - 1e-9;
            before < least && least <= stage.target
        };
        let last = stage.stage + 1 == stage.stages;
        last || self.cli.one_run && self.cli.sparsities().iter().any(reached)
    }

    /// Adds the rows of a run; `measured` has the accuracy [%] and the memory [bytes] of its stages.
    fn push_stages(
        &mut self,
        stages: &[StageReport],
        targets: &[f64],
        measured: &HashMap<usize, (f64, Option<u64>)>,
    ) {
        let (mut gradient_seconds, mut solve_seconds) = (0.0, 0.0);
        for stage in stages {
            gradient_seconds += stage.gradients.seconds;
            solve_seconds += stage.solve_seconds;
            if !self.has_row(stage, targets) {
                continue;
            }
            let measured = measured.get(&stage.stage);
            let peak = measured.and_then(|(_, peak)| *peak);
            self.table.push([
                "chita++".into(),
                Cell::Integer(stage.stage as u64 + 1),
                Cell::Number(stage.target, 4),
                measured.map_or(Cell::Empty, |(accuracy, _)| Cell::Number(*accuracy, 2)),
                Cell::Number(stage.objective, 4),
                Cell::Integer(stage.nonzeros as u64),
                Cell::Number(gradient_seconds, 2),
                Cell::Number(solve_seconds, 3),
                Cell::optional_integer(peak),
                Cell::Number(stage.ridge.value, 5),
                Cell::Number(stage.ridge.tempering.unwrap_or(0.0), 1),
                Cell::Empty,
                Cell::Empty,
                Cell::Empty,
            ]);
        }
    }

    fn pruner(&self, sparsity: f64) -> PrunerConfig {
        let solver = SolverConfig::new(Budget::Sparsity(sparsity))
            .with_pattern(self.cli.pattern())
            .with_method(self.method(self.cli.stage_method))
            .with_dead_columns(Some(self.cli.dead_columns()))
            .with_seed(self.cli.seed);
        PrunerConfig::new(solver, self.cli.fisher())
            .with_stages(self.cli.stages)
            .with_schedule(self.cli.schedule())
            .with_ridge(self.cli.ridge())
            .with_held_out(self.cli.held_out)
            .with_running_statistics(self.cli.running_statistics())
            .with_seed(self.cli.seed)
            .with_group(self.cli.group(&self.selection))
    }

    fn method(&self, name: MethodName) -> Method {
        match name {
            MethodName::Random => Method::Random,
            MethodName::Magnitude | MethodName::Default => Method::Magnitude,
            MethodName::Obd => Method::DiagonalFisher,
            MethodName::WoodFisher => Method::WoodFisher { block_size: 50 },
            MethodName::BackSolve => Method::BackSolve,
            MethodName::Chita | MethodName::ChitaPlusPlus => {
                let configs = self.cli.chita();
                Method::Chita(configs.into_iter().next().unwrap_or_else(ChitaConfig::new))
            }
        }
    }

    /// Test accuracy [%].
    fn accuracy(&self, model: &M) -> f64 {
        network::accuracy(model, &self.images, &self.device)
    }

    /// A pruned model with the running statistics of the options, and its loss on held-out images:
    /// what `PrunerConfig` does after a stage.
    fn with_statistics(&self, model: M, held_out: &[Batch]) -> Result<(M, f64), PruneError> {
        let how = self.cli.running_statistics();
        let kept = mean_loss(&model, loss::<M>, held_out)?;
        if !M::HAS_BATCH_NORM || how == RunningStatistics::Kept {
            return Ok((model, kept));
        }
        let renewed = network::normalized(model.clone(), &self.images, &self.device)?;
        let new = mean_loss(&renewed, loss::<M>, held_out)?;
        Ok(match new < kept || how == RunningStatistics::Recomputed {
            true => (renewed, new),
            false => (model, kept),
        })
    }
}
