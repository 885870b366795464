//! One weight: its problem, its zeros, its codes.

use std::sync::OnceLock;

use burn_lean_layerwise::{
    Compensation, Gram, Keep, LayerProblem, LayerwiseError, Method, ProblemConfig, solve,
};

use crate::round::{Rounded, RoundingProblem, Zeros, group_size};
use crate::{Grid, OneShotError, Pattern, Preset, PruneMethod, Quantize, Rounding, Target};

/// Values of a weight, and how good they are.
pub(crate) struct Solved {
    pub(crate) values: Vec<f32>,
    pub(crate) grid: Option<Grid>,
    pub(crate) objective: f64,
    /// What the objective is a part of.
    pub(crate) scale: f64,
    pub(crate) dead_inputs: usize,
    /// What was added to the diagonal of XᵀX/n.
    pub(crate) ridge: f64,
    /// Nothing arrived in any row: the objective is that of the weights themselves.
    pub(crate) is_unseen: bool,
}

/// Compresses a weight `dense`, `[outputs, inputs]`. `shared` is of layers with the same XᵀX.
pub(crate) fn compress(
    gram: Gram,
    dense: &[f32],
    preset: &Preset,
    path: &str,
    shared: Option<&OnceLock<Compensation>>,
) -> Result<Solved, OneShotError> {
    let of_path = |source| failed(path, source);
    let dead = gram.dead_features(false).len();
    if gram.rows() > 0 && dead == gram.features() {
        return Ok(Solved {
            dead_inputs: dead,
            is_unseen: true,
            ..compress_blindly(dense, gram.features(), &preset.unseen(), path)?
        });
    }
    let mut config = ProblemConfig::new();
    config.ridge = preset.ridge;
    let problem = LayerProblem::new(&gram, dense, &config).map_err(of_path)?;
    drop(gram);
    let (values, grid) = solve_problem(&problem, dense, preset, shared).map_err(of_path)?;
    Ok(Solved {
        objective: problem.error(&values).map_err(of_path)?,
        scale: problem.scale(),
        dead_inputs: dead,
        ridge: problem.ridge(),
        is_unseen: false,
        values,
        grid,
    })
}

/// Compresses a weight `dense` by its own values: the largest ones stay, each at its nearest code. No
/// input counts more than another, so that there is no system to set up.
pub(crate) fn compress_blindly(
    dense: &[f32],
    inputs: usize,
    preset: &Preset,
    path: &str,
) -> Result<Solved, OneShotError> {
    let of_path = |source| failed(path, source);
    if let Some(index) = dense.iter().position(|w| !w.is_finite()) {
        let what = "the dense weights";
        return Err(of_path(LayerwiseError::NotFinite { what, index }));
    }
    let mut values = dense.to_vec();
    let mut kept = None;
    if let Some(prune) = &preset.prune {
        let scores: Vec<f64> = dense.iter().map(|w| f64::from(w.abs())).collect();
        let keep = keep(&prune.pattern, dense.len() / inputs.max(1), inputs);
        let support = keep.highest(&scores, inputs).map_err(of_path)?;
        let pairs = values.iter_mut().zip(support.kept());
        // Not -0, as a product has it.
        pairs
            .filter(|(_, kept)| !**kept)
            .for_each(|(w, _)| *w = 0.0);
        kept = Some(support);
    }
    let mut codes = None;
    if let Some(quantize) = &preset.quantize {
        let start: Vec<f64> = values.iter().map(|w| f64::from(*w)).collect();
        let ones = vec![1.0; inputs];
        let rounded = RoundingProblem {
            hessian: &[],
            diagonal: &ones,
            optimum: &start,
            kept: kept.as_ref().map(|support| support.kept()),
            zeros: None,
            inputs,
            ridge: 0.0,
            quantize,
            shared: None,
        };
        let rounded = rounded.round().map_err(of_path)?;
        values = rounded.values(inputs, quantize);
        codes = Some(grid(rounded, inputs, quantize));
    }
    let off = values.iter().zip(dense);
    Ok(Solved {
        objective: off
            .map(|(v, w)| (f64::from(*v) - f64::from(*w)).powi(2))
            .sum(),
        scale: dense.iter().map(|w| f64::from(*w).powi(2)).sum(),
        dead_inputs: 0,
        ridge: 0.0,
        is_unseen: false,
        values,
        grid: codes,
    })
}

/// The error of a weight.
fn failed(path: &str, source: LayerwiseError) -> OneShotError {
    match source {
        LayerwiseError::DoesNotDivide { .. } => OneShotError::DoesNotFit {
            path: path.into(),
            why: format!("{source} (`skip`)"),
        },
        source => OneShotError::Layer {
            path: path.into(),
            source,
        },
    }
}

impl Preset {
    /// Refuses groups of inputs that do not divide those of a layer.
    pub(crate) fn check_pattern(&self, path: &str, inputs: usize) -> Result<(), OneShotError> {
        match self.prune.as_ref().map(|prune| &prune.pattern) {
            Some(Pattern::NOfM { m, .. }) if !inputs.is_multiple_of((*m).max(1)) => Err(failed(
                path,
                LayerwiseError::DoesNotDivide {
                    group: *m,
                    features: inputs,
                },
            )),
            _ => Ok(()),
        }
    }

    /// Whether a method needs more of XᵀX than its diagonal.
    pub(crate) fn solves(&self) -> bool {
        let rounds = self
            .quantize
            .as_ref()
            .is_some_and(|one| one.rounding != Rounding::Nearest);
        let prunes = self.prune.as_ref().is_some_and(|one| {
            matches!(one.method, PruneMethod::SparseGpt | PruneMethod::BestSubset)
        });
        rounds || prunes || self.target == Target::Original
    }

    /// Whether the weights alone decide: nothing is asked of calibration data.
    pub(crate) fn is_blind(&self) -> bool {
        let rounds = self
            .quantize
            .as_ref()
            .is_none_or(|one| one.rounding == Rounding::Nearest && !one.search_range);
        let prunes = self
            .prune
            .as_ref()
            .is_none_or(|one| one.method == PruneMethod::Magnitude);
        rounds && prunes && self.target == Target::OwnInputs && self.scaling.is_none()
    }

    /// What is done to a layer that sees nothing, an expert that no token is sent to: all weights stay, since
    /// nothing says which could go, each at its nearest code.
    fn unseen(&self) -> Self {
        let nearest = |one: &Quantize| {
            one.clone()
                .with_rounding(Rounding::Nearest)
                .with_exchange_zeros(false)
        };
        self.clone()
            .with_prune(None)
            .with_quantize(self.quantize.as_ref().map(nearest))
    }
}

fn solve_problem(
    problem: &LayerProblem,
    dense: &[f32],
    preset: &Preset,
    shared: Option<&OnceLock<Compensation>>,
) -> Result<(Vec<f32>, Option<Grid>), LayerwiseError> {
    let (outputs, inputs) = (problem.outputs(), problem.features());
    let mut kept = None;
    let mut start: Vec<f64> = match preset.target {
        Target::OwnInputs => dense.iter().map(|w| f64::from(*w)).collect(),
        Target::Original => problem.optimum(),
    };
    let mut values: Vec<f32> = start.iter().map(|w| *w as f32).collect();
    if let Some(prune) = &preset.prune {
        let keep = keep(&prune.pattern, outputs, inputs);
        let method = match prune.method {
            PruneMethod::Magnitude => Method::Magnitude,
            PruneMethod::Wanda => Method::Wanda,
            PruneMethod::SparseGpt => Method::SparseGpt {
                // As published: 128 inputs at a time, of patterns each group when it is reached.
                block: match prune.pattern {
                    Pattern::NOfM { m, .. } => m,
                    _ => 128,
                },
            },
            PruneMethod::BestSubset => Method::BestSubset,
        };
        let solution = solve(problem, &keep, &method)?;
        start = solution.weights.iter().map(|w| f64::from(*w)).collect();
        values = solution.weights;
        kept = Some(solution.support.kept().to_vec());
    }
    let exchanges = kept.is_some()
        && preset
            .quantize
            .as_ref()
            .is_some_and(|one| one.exchange_zeros);
    // Weights of dead inputs cost nothing, which says nothing of what they are for: those that stay are what
    // they were. Zeros that move take their places first.
    let unknown = match exchanges {
        true => Vec::new(),
        false => unknown(problem, dense, kept.as_deref()),
    };
    for (at, weight) in &unknown {
        start[*at] = f64::from(*weight);
        values[*at] = *weight;
    }
    let Some(quantize) = &preset.quantize else {
        return Ok((values, None));
    };
    let optimum = exchanges.then(|| problem.optimum());
    let group = match preset.prune.as_ref().map(|prune| &prune.pattern) {
        Some(Pattern::NOfM { m, .. }) => Some(*m),
        _ => None,
    };
    let hessian = problem.hessian();
    let mut diagonal: Vec<f64> = (0..inputs).map(|at| hessian[at * inputs + at]).collect();
    let is_nearest = quantize.rounding == Rounding::Nearest;
    for at in problem.dead_features() {
        match is_nearest {
            // Ranges hold them like any other, and the ridge is all that pulls at them.
            true => diagonal[*at] = problem.ridge(),
            // As in GPTQ they take no part in ranges.
            false => start
                .iter_mut()
                .skip(*at)
                .step_by(inputs)
                .for_each(|w| *w = 0.0),
        }
    }
    let mut rounded = RoundingProblem {
        hessian,
        diagonal: &diagonal,
        optimum: &start,
        kept: kept.as_deref(),
        zeros: optimum.as_deref().map(|optimum| Zeros { optimum, group }),
        inputs,
        ridge: problem.ridge(),
        quantize,
        shared,
    }
    .round()?;
    if !is_nearest {
        rounded.put_nearest(&unknown, inputs, quantize);
    }
    let values = rounded.values(inputs, quantize);
    Ok((values, Some(grid(rounded, inputs, quantize))))
}

/// The weights of dead inputs that are kept, with their places.
fn unknown(problem: &LayerProblem, dense: &[f32], kept: Option<&[bool]>) -> Vec<(usize, f32)> {
    let rows = (0..dense.len()).step_by(problem.features());
    let places = rows.flat_map(|row| problem.dead_features().iter().map(move |at| row + at));
    places
        .filter(|at| kept.is_none_or(|kept| kept[*at]))
        .map(|at| (at, dense[at]))
        .collect()
}

/// How many weights a pattern keeps.
fn keep(pattern: &Pattern, outputs: usize, inputs: usize) -> Keep {
    // 0.29 · 100 is 28.999999999999996.
    let removed = |fraction: f64, of: usize| (fraction * of as f64 * (1.0 + 1e-12)) as usize;
    let kept = |fraction: f64, of: usize| of.saturating_sub(removed(fraction, of));
    match *pattern {
        Pattern::PerLayer(fraction) => Keep::Weights(kept(fraction, outputs * inputs)),
        Pattern::PerOutput(fraction) => Keep::PerRow(kept(fraction, inputs)),
        Pattern::NOfM { n, m } => Keep::NOfM { n, m },
    }
}

/// Rounds to the nearest grid points alone, each input with a weight of its own.
pub(crate) fn nearest(
    values: &[f64],
    diagonal: &[f64],
    quantize: &Quantize,
) -> Result<Vec<f32>, LayerwiseError> {
    let inputs = diagonal.len();
    let quantize = quantize.clone().with_rounding(Rounding::Nearest);
    let rounded = RoundingProblem {
        hessian: &[],
        diagonal,
        optimum: values,
        kept: None,
        zeros: None,
        inputs,
        ridge: 0.0,
        quantize: &quantize,
        shared: None,
    }
    .round()?;
    Ok(rounded.values(inputs, &quantize))
}

fn grid(rounded: Rounded, inputs: usize, quantize: &Quantize) -> Grid {
    Grid {
        bits: quantize.bits,
        group: group_size(inputs, quantize),
        symmetric: quantize.symmetric,
        scales: rounded.ranges.iter().map(|range| range.scale).collect(),
        zero_points: rounded.ranges.iter().map(|range| range.zero).collect(),
        codes: rounded.codes,
    }
}
