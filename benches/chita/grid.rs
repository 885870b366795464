//! Pruned and on a grid: nearest codes, codes of a layer's inputs (GPTQ), and those of the Fisher.

use std::error::Error;
use std::fmt;
use std::time::Instant;

use burn::tensor::Tensor;
use burn_lean::prune::{
    Budget, ChitaConfig, GridConfig, Layout, Method, Problem, PruneError, Ridge, SolverConfig,
    solve_with_ridge, solver::LayerGrid,
};
use burn_lean::quant::{
    GptqConfig, PtqConfig, PtqMode, QatConfig, Rounding, RoundingConfig, WeightConfig, WeightRange,
};

use crate::network::loss;
use crate::support::{Batch, Cell, Network, Table};
use crate::{LOADED, Run, options};

/// How pruned weights get their codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Codes {
    /// They stay real numbers.
    None,
    /// The nearest ones.
    Nearest,
    /// Layer by layer, from the inputs of each.
    Gptq,
    /// One after the other, with the Fisher.
    Compensated,
    /// And then better codes and scales.
    Fitted,
}

impl Codes {
    const OF_FISHER: [Self; 3] = [Self::Nearest, Self::Compensated, Self::Fitted];

    fn grid(self, layout: &Layout, bits: u8) -> Option<GridConfig> {
        let layers = layers(layout, bits);
        match self {
            Self::None | Self::Gptq => None,
            Self::Nearest => Some(GridConfig::nearest(layers)),
            Self::Compensated => Some(GridConfig::compensated(layers)),
            Self::Fitted => Some(GridConfig::new(layers)),
        }
    }
}

impl fmt::Display for Codes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "real numbers",
            Self::Nearest => "nearest",
            Self::Gptq => "gptq",
            Self::Compensated => "prune, then round",
            Self::Fitted => "codes and scales",
        })
    }
}

/// A scale for each output channel, and codes of so many bits without the lowest.
fn layers(layout: &Layout, bits: u8) -> Vec<LayerGrid> {
    let largest = (1 << (bits.min(8) - 1)) - 1;
    let layers = layout.layers().iter().map(|layer| {
        let mut groups = vec![1; layer.shape.len()];
        if let Some(axis) = layer.output_axis() {
            groups[axis] = layer.shape[axis];
        }
        LayerGrid::new(layer.path.clone(), groups, (-largest, largest))
    });
    layers.collect()
}

/// What is known of a row beside the model.
struct Found {
    codes: Codes,
    bits: u8,
    sparsity: f64,
    objective: f64,
    ridge: Option<Ridge>,
    seconds: f64,
}

impl<M: Network> Run<'_, M> {
    /// Every way to codes, at every number of bits and every sparsity; 0 prunes nothing.
    pub(crate) fn on_grids(&self) -> Result<(), Box<dyn Error>> {
        let mut images = self.loader(self.cli.seed);
        let fisher =
            self.cli
                .fisher()
                .collect(&self.model, &self.selection, loss::<M>, images.by_ref())?;
        let held_out = images.take(self.cli.held_out.div_ceil(LOADED)).collect();
        println!("{}", options::gradients(&fisher.report));
        let weights = self.selection.flatten(&self.model)?;
        let layout = self.selection.layout().clone();
        let mut study = Study {
            run: self,
            problem: Problem::new(fisher.gradients, weights.clone(), layout)?,
            held_out,
            table: Table::new(
                format!(
                    "{}: codes for kept weights, n = {}, m = {}, a scale for each output channel",
                    self.images.name,
                    self.cli.samples(),
                    self.cli.batch_size()
                ),
                &[
                    "codes",
                    "bits",
                    "sparsity",
                    "objective",
                    "held_out_loss",
                    "accuracy",
                    "nonzeros",
                    "ridge",
                    "tempering",
                    "seconds",
                ],
            ),
        };
        for sparsity in self.cli.sparsities() {
            let real = match sparsity {
                0.0 => weights.clone(),
                _ => study.solved(sparsity, 32, Codes::None)?,
            };
            for bits in self.cli.bits.clone() {
                for codes in Codes::OF_FISHER {
                    study.solved(sparsity, bits, codes)?;
                }
                study.gptq(sparsity, bits, real.clone())?;
            }
        }
        Ok(study.table.publish(self.cli.json.as_deref())?)
    }
}

/// One set of gradients, and what came of it.
struct Study<'a, M> {
    run: &'a Run<'a, M>,
    problem: Problem,
    held_out: Vec<Batch>,
    table: Table,
}

impl<M: Network> Study<'_, M> {
    /// The weights whose ridge is judged best, and their row.
    fn solved(
        &mut self,
        sparsity: f64,
        bits: u8,
        codes: Codes,
    ) -> Result<Tensor<1>, Box<dyn Error>> {
        let (budget, method) = match sparsity {
            0.0 => (Budget::All, Method::BackSolve),
            _ => {
                let chita = Method::Chita(ChitaConfig::new());
                (Budget::Sparsity(sparsity), chita)
            }
        };
        let config = SolverConfig::new(budget)
            .with_method(method)
            .with_dead_columns(Some(self.run.cli.dead_columns()))
            .with_grid(codes.grid(self.problem.layout(), bits));
        let start = Instant::now();
        let ridge = self.run.cli.ridge();
        let sweep = solve_with_ridge(&self.problem, &config, &ridge, &mut |solution| {
            Ok(self.model(solution.weights.clone())?.1)
        })?;
        let found = Found {
            codes,
            bits,
            sparsity,
            objective: sweep.solution.objective,
            ridge: Some(sweep.chosen),
            seconds: start.elapsed().as_secs_f64(),
        };
        self.push(found, sweep.solution.weights.clone())?;
        Ok(sweep.solution.weights)
    }

    /// These pruned weights, rounded layer by layer over the images of the Fisher samples.
    fn gptq(&mut self, sparsity: f64, bits: u8, real: Tensor<1>) -> Result<(), Box<dyn Error>> {
        let start = Instant::now();
        let (model, _) = self.model(real)?;
        let rounding = RoundingConfig::new()
            .with_rounding(Rounding::Gptq(GptqConfig::new()))
            .with_bias_correction(false);
        let config = PtqConfig::new()
            .with_quantize(QatConfig::new().with_weight(WeightConfig::int(bits)))
            .with_mode(PtqMode::WeightOnly)
            .with_weight_range(WeightRange::LeastSquares)
            .with_rounding(rounding)
            .with_progress(false);
        let cli = self.run.cli;
        let seen = (cli.samples() * cli.batch_size()).div_ceil(LOADED);
        let batches = || {
            let batches = self.run.loader(cli.seed).map(|batch| batch.images);
            batches.take(seen)
        };
        let (model, _) =
            config.quantize_for(model, batches, |model, images| model.logits(images))?;
        let weights = self.run.selection.flatten(&model.materialize())?;
        let found = Found {
            codes: Codes::Gptq,
            bits,
            sparsity,
            objective: self.problem.objective(weights.clone())?.total(),
            ridge: None,
            seconds: start.elapsed().as_secs_f64(),
        };
        self.push(found, weights)
    }

    /// The model with these weights and the running statistics of the options, and its loss on
    /// held-out images.
    fn model(&self, weights: Tensor<1>) -> Result<(M, f64), PruneError> {
        let model = self.run.model.clone();
        let model = self.run.selection.unflatten(model, weights)?;
        self.run.with_statistics(model, &self.held_out)
    }

    fn push(&mut self, found: Found, weights: Tensor<1>) -> Result<(), Box<dyn Error>> {
        let (model, loss) = self.model(weights.clone())?;
        let accuracy = self.run.accuracy(&model);
        let nonzeros = weights.not_equal_elem(0.0).int().sum();
        let codes = found.codes;
        let (bits, sparsity, seconds) = (found.bits, found.sparsity, found.seconds);
        println!("{codes}, {bits} bits, {sparsity}: {accuracy:.2} %, {loss:.4}, {seconds:.1} s");
        self.table.push([
            codes.to_string().into(),
            Cell::Integer(bits.into()),
            Cell::Number(sparsity, 2),
            Cell::Number(found.objective, 4),
            Cell::Number(loss, 4),
            Cell::Number(accuracy, 2),
            Cell::Integer(nonzeros.into_scalar::<i64>() as u64),
            Cell::optional(found.ridge.map(|ridge| ridge.value), 5),
            Cell::optional(found.ridge.and_then(|ridge| ridge.tempering), 1),
            Cell::Number(seconds, 1),
        ]);
        Ok(())
    }
}
