//! Pruning layer by layer: each layer's weights are fitted to what the dense layer returns.

mod attempt;
pub(crate) mod candidates;
mod division;
pub(crate) mod effort;
pub(crate) mod inputs;
mod norm;
pub(crate) mod report;
mod residual;
mod rows;
mod settle;
pub(crate) mod shares;
pub(crate) mod stops;
pub(crate) mod support;
mod ties;
mod tuning;

pub use candidates::{Candidate, JudgedCandidate, Outputs};
pub use effort::Effort;
pub use report::{LayerwiseLayer, LayerwisePruned, LayerwiseReport, Refitted};
pub use shares::Shares;
pub use support::SupportMethod;

use std::time::{Duration, Instant};

use burn::module::{Module, ParamGroup};
use burn::tensor::{Device, Tensor};
use burn_lean_graph::{GraphError, Tensors, Walk, cloned};
use burn_lean_reparam::{Rejected, Training, attached};
use serde::{Deserialize, Serialize};

use crate::layerwise::attempt::Setting;
use crate::layerwise::candidates::Tried;
use crate::layerwise::inputs::Plain;
use crate::layerwise::rows::Sampling;
use crate::layerwise::tuning::Tuning;
use crate::masks::magnitude::largest;
use crate::model::checks;
use crate::statistics::batch_norm;
use crate::{Budget, Masks, PruneError, Selection, SparsityPattern};

/// Prunes a network from inputs alone: no labels, no loss.
///
/// The network is walked through once, all calibration examples at each layer. A layer gets the
/// weights that best reproduce the dense layer's outputs from the inputs that the layers before it,
/// pruned already, give: the support by best-subset search on XᵀX, its values by least squares. Biases
/// follow, and the running statistics of BatchNorm are measured anew on the way. The last layer before a
/// residual sum also makes up for what pruning changed in the other summand, where a BatchNorm is between
/// them. How many weights a layer keeps is what magnitude over the whole network would leave it, or
/// [layer-adaptive magnitude](Shares::Lamp) where that changes the outputs less.
///
/// At the end, where the [`Effort`] affords it, the values of all layers are tuned together towards the
/// dense network's outputs. Magnitude is a candidate, too. Held-out examples judge: who diverges least
/// from the dense network's outputs is taken; they are logits, unless [`outputs`](Self::outputs) says
/// otherwise.
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_lean_prune::{Budget, Pruner};
///
/// let device = Device::flex();
/// let model = LinearConfig::new(8, 4).init(&device);
/// let batches = [64, 32].map(|examples| {
///     Tensor::<2>::random([examples, 8], Distribution::Normal(0.0, 1.0), &device)
/// });
/// let pruner = Pruner::new(Budget::Sparsity(0.75));
/// let pruned = pruner.prune(model, |model, x: Tensor<2>| model.forward(x), batches)?;
/// assert_eq!(pruned.masks.nonzeros(), 8);
/// assert_eq!(pruned.report.held_out_examples, 32);
/// # Ok::<(), burn_lean_prune::PruneError>(())
/// ```
///
/// Every model that can be recorded ([`Walk`]) will do. [`PrunerConfig`](crate::PrunerConfig) prunes
/// the others, from the gradients of a loss (CHITA); it also knows groups and budgets of operations.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Pruner {
    /// How many weights remain.
    pub budget: Budget,
    /// The shape of the zeros: single weights (the default), or N:M with [`Budget::Pattern`].
    pub pattern: SparsityPattern,
    /// How supports are chosen. Default: best-subset search.
    pub support: SupportMethod,
    /// Whether values are fitted. Default: yes.
    pub refit: bool,
    /// Whether running statistics of BatchNorm are measured anew; not of one that was folded into the layer
    /// before it. Default: yes.
    pub recalibrate: bool,
    /// How many weights each layer keeps. Default: [`Shares::Auto`].
    pub shares: Shares,
    /// What the network's outputs are, for those who judge candidates by them. Default:
    /// [`Outputs::Logits`].
    #[serde(default)]
    pub outputs: Outputs,
    /// Whether magnitude is a candidate beside what is configured, with [`Effort::Thorough`] also with
    /// fitted values. Default: yes.
    pub candidates: bool,
    /// How much is done beyond one walk through the layers. Default: [`Effort::Standard`].
    pub effort: Effort,
    /// Passes over the examples in which the values of all layers are tuned together; 0 for none.
    /// Default: as many as the effort affords, see [`Effort`].
    pub tuning: Option<usize>,
    /// Time after which nothing new is begun, and tuning ends: what is finished by then is judged. A
    /// run that it cuts short is not repeatable to the bit. Default: none.
    pub time: Option<Duration>,
    /// Examples that layers are fitted to, in whole batches: the first ones, up to the one that reaches
    /// this number. Default 1024.
    pub examples: usize,
    /// Examples after those that judge candidates, in whole batches likewise. Default 512.
    pub held_out: usize,
    /// Rows that XᵀX of a layer is summed over, about, at most: of a convolution, places of images.
    /// Default 131,072.
    pub rows: usize,
    /// Ridge of a layer, as a fraction of the mean of the diagonal of XᵀX. Default 0.01.
    pub ridge: f64,
    /// The parameters to prune. Default: see [`Selection::of`].
    pub group: Option<ParamGroup>,
    /// Show progress bars, where standard error is a terminal. Default: yes.
    #[serde(skip, default = "shown")]
    pub progress: bool,
}

fn shown() -> bool {
    true
}

impl Pruner {
    /// With the defaults.
    pub fn new(budget: Budget) -> Self {
        Self {
            budget,
            pattern: SparsityPattern::Unstructured,
            support: SupportMethod::BestSubset,
            refit: true,
            recalibrate: true,
            shares: Shares::Auto,
            outputs: Outputs::Logits,
            candidates: true,
            effort: Effort::Standard,
            tuning: None,
            time: None,
            examples: 1024,
            held_out: 512,
            rows: 131_072,
            ridge: 0.01,
            group: None,
            progress: true,
        }
    }

    /// With another effort, and the support rule that goes with it: optimal brain surgeon for
    /// [`Effort::Quick`], best-subset search otherwise.
    pub fn with_effort(mut self, effort: Effort) -> Self {
        self.effort = effort;
        self.support = match effort {
            Effort::Quick => SupportMethod::Obs,
            _ => SupportMethod::BestSubset,
        };
        self
    }

    /// With outputs that are no logits of classes along their last axis.
    pub fn with_outputs(mut self, outputs: Outputs) -> Self {
        self.outputs = outputs;
        self
    }

    /// Prunes `model`.
    ///
    /// `forward` gives the outputs, logits for example, of a batch of inputs; `batches` are inputs like
    /// those of training: the first ones for the layers, until [`examples`](Self::examples) are
    /// reached, then [`held_out`](Self::held_out) to judge by; of a single batch the last quarter judges, where
    /// its parts give what the whole gives, otherwise all of it does both. One without an example is left out. The model is taken as it is deployed (evaluation mode) and comes back on its
    /// devices.
    ///
    /// # Errors
    ///
    /// The model comes back in the error, unchanged.
    /// - [`PruneError::NotRecorded`] where the forward pass cannot be recorded,
    ///   [`PruneError::NotLayerwise`] for patterns and budgets that mean nothing layer by layer: both
    ///   name the way that is left.
    /// - [`PruneError::LayerSystem`] with the path of a layer whose inputs are not finite, or the same in all
    ///   examples, or whose system is singular; [`PruneError::CarriesReparameterization`].
    /// - [`PruneError::NaNOutputs`] where the dense network gives NaN for inputs that judge.
    /// - [`PruneError::NoSamples`] without an example, [`PruneError::InvalidConfig`], and what
    ///   [`Selection::of`] and the budget refuse.
    pub fn prune<M: Module, I: Tensors, O: Tensors>(
        &self,
        model: M,
        forward: impl Fn(&M, I) -> O,
        batches: impl IntoIterator<Item = I>,
    ) -> Result<LayerwisePruned<M>, Rejected<M, PruneError>> {
        self.prune_as(Candidate::Configured, model, forward, batches)
    }

    /// [`prune`](Self::prune), or magnitude with new statistics and nothing else.
    pub(crate) fn prune_as<M: Module, I: Tensors, O: Tensors>(
        &self,
        first: Candidate,
        model: M,
        forward: impl Fn(&M, I) -> O,
        batches: impl IntoIterator<Item = I>,
    ) -> Result<LayerwisePruned<M>, Rejected<M, PruneError>> {
        match self.pruned(first, &model, forward, batches) {
            Ok((pruned, masks, selection, report)) => Ok(LayerwisePruned {
                model: Training::of(&model).restore(pruned),
                masks,
                selection,
                report,
            }),
            Err(error) => Err(Rejected::new(model, error)),
        }
    }

    fn pruned<M: Module, I: Tensors, O: Tensors>(
        &self,
        first: Candidate,
        model: &M,
        forward: impl Fn(&M, I) -> O,
        batches: impl IntoIterator<Item = I>,
    ) -> Result<(M, Masks, Selection, LayerwiseReport), PruneError> {
        let start = Instant::now();
        self.check()?;
        let selection = Selection::for_pattern(model, self.group.as_ref(), &self.pattern)?;
        selection.warn_of_excluded();
        for carrier in attached(model) {
            if selection.ids().contains(&carrier.id) {
                return Err(PruneError::CarriesReparameterization {
                    path: carrier.path,
                    name: carrier.name,
                });
            }
        }
        let layout = selection.layout();
        let weights = selection.finite_weights(model)?;
        let mut magnitude = vec![false; weights.len()];
        for index in largest(&weights, &self.pattern, &self.budget, layout)? {
            magnitude[index] = true;
        }
        // A copy, of running statistics, too.
        let dense = model.valid();
        let folded = batch_norm::folded(&dense)?;
        let device = dense.devices().into_iter().next();
        let (mut batches, fitted, mut examples, mut held_out) =
            self.split(batches, device.as_ref())?;
        // By magnitude alone nothing is fitted, nor chosen.
        let is_judged = self.held_out > 0 && first != Candidate::Magnitude;
        if let ([only], true) = (&batches[..], is_judged) {
            match division::to_fit_and_to_judge(&dense, &forward, only)? {
                Some(parts) => {
                    (examples, held_out) = (count(&parts[0]), count(&parts[1]));
                    batches = parts.into();
                }
                None => tracing::warn!(
                    "layers are fitted to the only batch, which judges them, too: give another one"
                ),
            }
        }
        let judges = match held_out {
            0 => 0..fitted,
            _ => fitted..batches.len(),
        };
        let everything: Vec<usize> = (0..batches.len()).collect();
        let record = |model: &M, which: &[usize]| {
            let again = which.iter().map(|at| cloned(&batches[*at]));
            Walk::record(model, again, &forward).map_err(failed)
        };
        // A time that no clock reaches is none.
        let deadline = self.time.and_then(|time| start.checked_add(time));
        let is_late = || deadline.is_some_and(|deadline| Instant::now() >= deadline);
        let sampling = Sampling {
            batches: fitted,
            rows: self.rows,
        };
        let is_global =
            first == Candidate::Configured && shares::is_global(&self.pattern, &self.budget);
        let mut shares = match self.shares {
            _ if !is_global => Shares::Magnitude,
            shares => shares,
        };
        let keep = magnitude.iter().filter(|kept| **kept).count();
        let adaptive = match shares {
            Shares::Magnitude => None,
            _ => Some(shares::lamp(&weights, keep, layout)),
        };
        if let (Shares::Lamp, Some(adaptive)) = (shares, &adaptive) {
            magnitude.clone_from(adaptive);
        }
        // The first batch, and those that judge.
        let few: Vec<usize> = match held_out {
            0 => everything.clone(),
            _ => [0].into_iter().chain(fitted..batches.len()).collect(),
        };
        let judges_few = match held_out {
            0 => judges.clone(),
            _ => 1..few.len(),
        };
        let first_batch = Sampling {
            batches: 1,
            ..sampling
        };
        // How magnitude does on them, once it is known.
        let mut screened = None;
        if let (Shares::Auto, Some(adaptive)) = (shares, adaptive) {
            // Behind a layer without a weight everything is constant, which diverges less than what only
            // needs other values: those are fitted before it is compared.
            let how = match shares::empties_any(&magnitude, layout) {
                true => Candidate::Configured,
                false => Candidate::Magnitude,
            };
            let seen = |kept: &[bool], how: Candidate, outputs: Option<&[Tensor<2>]>| {
                let setting = Setting {
                    pruner: self,
                    selection: &selection,
                    magnitude: kept,
                    sampling: first_batch,
                    folded: &folded,
                    judges: judges_few.clone(),
                };
                let walk = record(&dense, &few)?;
                setting.attempt(dense.valid(), walk, how, outputs)
            };
            shares = Shares::Magnitude;
            // What is wrong with the inputs, the walk through all of them says of its layer or batch.
            if adaptive != magnitude
                && let Ok(whole) = seen(&magnitude, how, None)
                && let Ok(by_layer) = seen(&adaptive, how, Some(&whole.dense))
            {
                let outputs = &whole.dense;
                let mut is_below = by_layer.divergences.are_below(&whole.divergences);
                // Two that are hardly better than a network that says one thing of everything: which of them is
                // less lost says nothing of what fitted values make of it.
                let constant = candidates::of_the_mean(self.outputs, &outputs[judges_few.clone()])?;
                let lost = 0.5 * constant.mean();
                let least = f64::min(whole.divergences.mean(), by_layer.divergences.mean());
                if how == Candidate::Magnitude
                    && self.refit
                    && !(least < lost)
                    && let Ok(whole) = seen(&magnitude, Candidate::MagnitudeFitted, Some(outputs))
                    && let Ok(by_layer) = seen(&adaptive, Candidate::MagnitudeFitted, Some(outputs))
                {
                    let least = f64::min(whole.divergences.mean(), by_layer.divergences.mean());
                    // Of two that are no better than that network the one that leaves no layer next to nothing:
                    // training can mend it.
                    is_below = !(least < constant.mean())
                        || by_layer.divergences.are_below(&whole.divergences);
                }
                let mut least = whole.divergences;
                if is_below {
                    shares = Shares::Lamp;
                    magnitude = adaptive;
                    least = by_layer.divergences;
                }
                screened = (how == Candidate::Magnitude).then_some(least);
            }
        }
        let setting = Setting {
            pruner: self,
            selection: &selection,
            magnitude: &magnitude,
            sampling,
            folded: &folded,
            judges,
        };
        let mut tried = Tried::default();
        let walk = record(&dense, &everything)?;
        let each = effort::multiplications(&walk) * fitted as f64;
        let passes = match first {
            Candidate::Magnitude => 0,
            _ => self
                .tuning
                .unwrap_or_else(|| self.effort.passes(each, examples)),
        };
        let begun = Instant::now();
        let mut attempt = setting.attempt(dense.valid(), walk, first, None)?;
        tried.add(first, &attempt.divergences, begun);
        let outputs = std::mem::take(&mut attempt.dense);
        for candidate in self.beside(first) {
            if is_late() {
                break;
            }
            let begun = Instant::now();
            // A few examples say enough of one that is far behind.
            if candidate == Candidate::Magnitude && fitted > 1 && held_out > 0 {
                let seen = match screened.take() {
                    Some(seen) => seen,
                    None => {
                        let screen = Setting {
                            sampling: first_batch,
                            judges: judges_few.clone(),
                            ..setting.clone()
                        };
                        let outputs: Vec<Tensor<2>> =
                            few.iter().map(|at| outputs[*at].clone()).collect();
                        let walk = record(&dense, &few)?;
                        let seen = screen.attempt(dense.valid(), walk, candidate, Some(&outputs));
                        seen?.divergences
                    }
                };
                let (behind, error) = tried.least().behind(&seen);
                if behind > f64::max(4.0 * error, 0.5 * tried.least().mean()) {
                    tried.add(candidate, &seen, begun);
                    continue;
                }
            }
            let walk = record(&dense, &everything)?;
            let other = setting.attempt(dense.valid(), walk, candidate, Some(&outputs))?;
            if tried.add(candidate, &other.divergences, begun) {
                attempt = other;
            }
        }
        let support: Vec<usize> = (0..layout.len()).filter(|at| attempt.kept[*at]).collect();
        let masks = Masks::from_support(layout, &support)?;
        let mut steps = 0;
        if passes > 0 && !is_late() {
            let begun = Instant::now();
            let tuning = Tuning {
                selection: &selection,
                masks: &masks,
                recalibrate: self.recalibrate,
                folded: &folded,
                only: self.group.as_ref().map(|_| selection.ids().to_vec()),
                passes,
                progress: self.progress,
                deadline,
                outputs: self.outputs,
                steps: division::steps(&dense, &forward, &batches[..fitted], &outputs)?,
            };
            let judge = |tuned: M| {
                let walk = record(&tuned, &everything)?;
                setting.settle(tuned, walk, &outputs)
            };
            let ((tuned, divergences), taken) = tuning.tune_while_it_helps(
                &attempt.model,
                &forward,
                &batches[..fitted],
                &outputs,
                tried.least(),
                judge,
            )?;
            steps = taken;
            if tried.add(Candidate::Tuned, &divergences, begun) {
                attempt.model = tuned;
            }
        }
        let judged: Vec<Tensor<2>> = setting
            .judges
            .clone()
            .map(|at| outputs[at].clone())
            .collect();
        let constant = candidates::of_the_mean(self.outputs, &judged)?.mean();
        let least = tried.least().mean();
        if !(least < constant) {
            tracing::warn!(
                divergence = least,
                constant,
                "the pruned network is no nearer to the dense one than one answer for every input: keep more \
                 weights, or train it"
            );
        }
        let report = LayerwiseReport {
            constant_divergence: constant,
            shares,
            chosen: tried.chosen(),
            can_tell: tried.can_tell(),
            candidates: tried.judged,
            calibration_examples: examples,
            held_out_examples: held_out,
            layers: attempt.layers,
            recalibrated: attempt.recalibrated,
            tuning_steps: steps,
            seconds: start.elapsed().as_secs_f64(),
        };
        Ok((attempt.model, masks, selection, report))
    }

    /// What is tried beside the first.
    fn beside(&self, first: Candidate) -> Vec<Candidate> {
        match (self.candidates, self.effort) {
            _ if first == Candidate::Magnitude => Vec::new(),
            (false, _) => Vec::new(),
            (true, Effort::Thorough) => vec![Candidate::MagnitudeFitted, Candidate::Magnitude],
            (true, _) => vec![Candidate::Magnitude],
        }
    }

    fn check(&self) -> Result<(), PruneError> {
        shares::check(&self.pattern, &self.budget, self.shares)?;
        checks::accept(self.examples > 0, "examples", self.examples, "at least 1")?;
        checks::accept(self.rows > 0, "rows", self.rows, "at least 1")?;
        let fits = self.ridge >= 0.0 && self.ridge.is_finite();
        checks::accept(fits, "ridge", self.ridge, "finite and at least 0")
    }

    /// The batches without autodiff on the model's device; how many of them are for fitting, with how
    /// many examples, and how many examples judge.
    #[allow(clippy::type_complexity)]
    fn split<I: Tensors>(
        &self,
        batches: impl IntoIterator<Item = I>,
        device: Option<&Device>,
    ) -> Result<(Vec<I>, usize, usize, usize), PruneError> {
        let mut taken = Vec::new();
        let (mut fitted, mut examples, mut held_out) = (0, 0, 0);
        for batch in batches {
            let count = count(&batch);
            if count == 0 {
                // There is nothing to sum up, to judge or to tune by.
                continue;
            }
            let batch = batch.map_tensors(&mut Plain(device));
            if examples < self.examples {
                examples += count;
                fitted += 1;
            } else if held_out < self.held_out {
                held_out += count;
            } else {
                break;
            }
            taken.push(batch);
        }
        // Where the batches end early, the last one judges.
        if held_out == 0 && fitted > 1 && self.held_out > 0 {
            fitted -= 1;
            held_out = count(&taken[fitted]);
            examples -= held_out;
        }
        match taken.is_empty() {
            true => Err(PruneError::NoSamples),
            false => Ok((taken, fitted, examples, held_out)),
        }
    }
}

/// Examples of a batch: what its first tensor has along the first axis.
fn count(batch: &impl Tensors) -> usize {
    let shapes = burn_lean_graph::shapes(batch);
    let shape = shapes.first().map_or(&[][..], Vec::as_slice);
    shape.first().copied().unwrap_or(1)
}

/// What a recording or a walk refuses.
pub(crate) fn failed(source: GraphError) -> PruneError {
    PruneError::NotRecorded { source }
}
