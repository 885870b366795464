//! Pruning layer by layer: each layer's weights are fitted to what the dense layer returns.

mod attempt;
mod calibration;
mod candidates;
mod contest;
mod divergences;
mod division;
mod effort;
mod given;
pub(crate) mod inputs;
mod norm;
mod report;
mod residual;
mod rows;
mod settle;
mod shares;
pub(crate) mod stops;
mod support;
mod ties;
mod tuning;

pub use candidates::{Candidate, JudgedCandidate};
pub use divergences::Outputs;
pub use effort::Effort;
pub use report::{LayerwiseLayer, LayerwisePruned, LayerwiseReport, Refitted};
pub use shares::Shares;
pub use support::SupportMethod;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use burn::module::{Module, ParamGroup};
use burn_lean_graph::{GraphError, Tensors};
use burn_lean_reparam::{Rejected, Training, attached};
use serde::{Deserialize, Serialize};

use crate::layerwise::calibration::Calibration;
use crate::layerwise::contest::Contest;
use crate::masks::magnitude::largest;
use crate::model::checks;
use crate::statistics::batch_norm;
use crate::{Budget, Masks, PruneError, Selection, SparsityPattern};

/// Prunes a network from inputs alone: no labels, no loss.
///
/// The network is walked through once, all calibration examples at each layer. A layer gets the
/// weights that best reproduce the dense layer's outputs from the inputs that the layers before it,
/// pruned already, give: the support by best-subset search on XᵀX, its values by least squares. Biases
/// follow, and the running statistics of BatchNorm behind them are measured anew on the way. The last layer
/// before a residual sum also makes up for what pruning changed in the other summand, where a BatchNorm is
/// between them. How many weights a layer keeps is what magnitude over the whole network would leave it, or
/// [layer-adaptive magnitude](Shares::Lamp) where that changes the outputs less.
///
/// At the end, where the [`Effort`] affords it, the values of all layers are tuned together towards the
/// dense network's outputs. Magnitude is a candidate, too. Held-out examples judge: who diverges least
/// from the dense network's outputs is taken; the first is one of logits, unless [`outputs`](Self::outputs)
/// says otherwise, and of several [all count](Outputs).
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
/// Every model that can be recorded ([`Walk`](burn_lean_graph::Walk)) will do. [`PrunerConfig`](crate::PrunerConfig) prunes
/// the others, from the gradients of a loss (CHITA); it also knows groups and budgets of operations.
///
/// Where the order of rows follows from the data (`argsort` or `topk`, then `select` or `gather`), the pruned network may
/// take other rows than the dense one, and the outputs of one are no targets for the other: in batches in which
/// it does, a layer behind that is fitted to what its dense weights give for its own inputs
/// ([`own_targets`](LayerwiseLayer::own_targets)), up to where rows are written back to their places by the same
/// indices. What a product with a mask of zeros and ones moves is not noticed. If outputs come in such an order, they judge nothing
/// and nothing is tuned: let `forward` bring them back into the order of the inputs.
///
/// A weight that is kept may be zero, where it reads a feature that is dead in all examples: the masks have
/// the number that the budget says, the model may have fewer nonzeros.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pruner {
    /// How many weights remain.
    pub budget: Budget,
    /// The shape of the zeros: single weights (the default), or N:M with [`Budget::Pattern`].
    pub pattern: SparsityPattern,
    /// How supports are chosen. Default, `None`: optimal brain surgeon with [`Effort::Quick`] in layers for
    /// which it takes up to 10¹¹ operations, o·d³/3 for o outputs of d inputs each, else best-subset search.
    pub support: Option<SupportMethod>,
    /// Whether values are fitted. Default: yes.
    pub refit: bool,
    /// Whether running statistics of a BatchNorm are measured anew where pruned weights come before it. Where
    /// none do they stay: what is behind was trained with them. So do those of a BatchNorm that is called
    /// several times, since none are those of every call, and of one that was folded into the layer before it.
    /// Default: yes.
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
    /// A folder for activations between layers, see [`spilling_to`](Self::spilling_to). Default: none, they stay
    /// on the device.
    #[serde(skip)]
    pub spill: Option<PathBuf>,
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
            support: None,
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
            spill: None,
        }
    }

    /// With another effort.
    pub fn with_effort(mut self, effort: Effort) -> Self {
        self.effort = effort;
        self
    }

    /// With outputs that are no logits of classes along their last axis.
    pub fn with_outputs(mut self, outputs: Outputs) -> Self {
        self.outputs = outputs;
        self
    }

    /// Keeps activations between layers, of the dense network and the pruned one, in files in `folder`, which is
    /// made where there is none: those of one batch at a time are on the device. Inputs stay there; what comes out
    /// is the same, and the files go with each walk through the network.
    pub fn spilling_to(mut self, folder: impl Into<PathBuf>) -> Self {
        self.spill = Some(folder.into());
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
    ///   name the way that is left; the latter also for a forward pass that draws random numbers, which
    ///   candidates would differ by.
    /// - [`PruneError::Graph`] where it is recorded and cannot be executed: it panics at a batch, or does something
    ///   else for another one.
    /// - [`PruneError::LayerSystem`] with the path of a layer whose inputs are not finite, or the same in all
    ///   examples, or whose system is singular; [`PruneError::CarriesReparameterization`].
    /// - [`PruneError::NaNOutputs`] where the dense network gives NaN for inputs that judge.
    /// - [`PruneError::Io`] where activations cannot be kept in the folder of [`spilling_to`](Self::spilling_to).
    /// - [`PruneError::NoSamples`] without an example, [`PruneError::InvalidConfig`], and what
    ///   [`Selection::of`] and the budget refuse.
    pub fn prune<M: Module, I: Tensors, O: Tensors>(
        &self,
        model: M,
        forward: impl Fn(&M, I) -> O,
        batches: impl IntoIterator<Item = I>,
    ) -> Result<LayerwisePruned<M>, Rejected<M, PruneError>> {
        let selection = match self.selection(&model) {
            Ok(selection) => selection,
            Err(error) => return Err(Rejected::new(model, error)),
        };
        selection.warn_of_excluded();
        self.prune_as(Candidate::Configured, selection, model, forward, batches)
    }

    /// [`prune`](Self::prune), or magnitude with new statistics and nothing else, of what
    /// [`selection`](Self::selection) gives for the model.
    pub(crate) fn prune_as<M: Module, I: Tensors, O: Tensors>(
        &self,
        first: Candidate,
        selection: Selection,
        model: M,
        forward: impl Fn(&M, I) -> O,
        batches: impl IntoIterator<Item = I>,
    ) -> Result<LayerwisePruned<M>, Rejected<M, PruneError>> {
        match self.pruned(first, &selection, &model, forward, batches) {
            Ok((pruned, masks, report)) => Ok(LayerwisePruned {
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
        selection: &Selection,
        model: &M,
        forward: impl Fn(&M, I) -> O,
        batches: impl IntoIterator<Item = I>,
    ) -> Result<(M, Masks, LayerwiseReport), PruneError> {
        let start = Instant::now();
        let (layout, weights) = (selection.layout(), selection.finite_weights(model)?);
        let mut magnitude = vec![false; weights.len()];
        for index in largest(&weights, &self.pattern, &self.budget, layout)? {
            magnitude[index] = true;
        }
        // A copy, of running statistics, too.
        let dense = model.valid();
        let folded = batch_norm::folded(&dense)?;
        // By magnitude alone nothing is fitted, nor chosen.
        let is_judged = self.held_out > 0 && first != Candidate::Magnitude;
        let calibration = Calibration::new(self, dense, &forward, batches, is_judged)?;
        let contest = Contest {
            pruner: self,
            selection,
            folded: &folded,
            calibration: &calibration,
            // A time that no clock reaches is none.
            deadline: self.time.and_then(|time| start.checked_add(time)),
        };
        let shared = contest.shared(first, &weights, magnitude)?;
        let mut best = contest.best(first, &shared)?;
        let kept = &best.attempt.kept;
        let support: Vec<usize> = (0..layout.len()).filter(|at| kept[*at]).collect();
        let masks = Masks::from_support(layout, &support)?;
        let unpaired = best.attempt.unpaired;
        let passes = match first {
            Candidate::Magnitude => 0,
            _ if unpaired > 0 => 0,
            _ => self.tuning.unwrap_or_else(|| {
                self.effort
                    .passes(best.multiplications, calibration.examples)
            }),
        };
        let tuning_steps = contest.tune(&mut best, &masks, &shared, passes)?;
        let constant = contest.of_one_answer(&best.outputs, &calibration.all())?;
        let least = best.tried.least().mean();
        if unpaired > 0 {
            tracing::warn!(
                batches = unpaired,
                "the order of the outputs, or which they are, follows from the data, and is another one in the pruned \
                 network: it is neither judged nor tuned; let `forward` give outputs in the order of the inputs"
            );
        } else if !(least < constant) {
            tracing::warn!(
                divergence = least,
                constant,
                "the pruned network is no nearer to the dense one than one answer for every input: keep more \
                 weights, or train it"
            );
        }
        let report = LayerwiseReport {
            constant_divergence: constant,
            shares: shared.shares,
            chosen: best.tried.chosen(),
            can_tell: best.tried.can_tell(),
            candidates: best.tried.judged,
            calibration_examples: calibration.examples,
            held_out_examples: calibration.held_out,
            layers: best.attempt.layers,
            recalibrated: best.attempt.recalibrated,
            unpaired,
            tuning_steps,
            seconds: start.elapsed().as_secs_f64(),
        };
        Ok((best.attempt.model, masks, report))
    }

    /// The method of [`support`](Self::support), or the effort's for a layer of that size.
    fn support_method(&self, outputs: usize, inputs: usize) -> SupportMethod {
        self.support.unwrap_or(match self.effort {
            Effort::Quick if support::is_searched(outputs, inputs) => SupportMethod::Obs,
            // Of larger layers this is the splitting, which is hours faster there.
            _ => SupportMethod::BestSubset,
        })
    }

    /// The parameters to prune, none of which has a reparameterization; refuses a config that no network can be
    /// pruned by.
    pub(crate) fn selection<M: Module>(&self, model: &M) -> Result<Selection, PruneError> {
        self.check()?;
        let selection = Selection::for_pattern(model, self.group.as_ref(), &self.pattern)?;
        for carrier in attached(model) {
            if selection.ids().contains(&carrier.id) {
                return Err(PruneError::CarriesReparameterization {
                    path: carrier.path,
                    name: carrier.name,
                });
            }
        }
        Ok(selection)
    }

    fn check(&self) -> Result<(), PruneError> {
        shares::check(&self.pattern, &self.budget, self.shares)?;
        checks::accept(self.examples > 0, "examples", self.examples, "at least 1")?;
        checks::accept(self.rows > 0, "rows", self.rows, "at least 1")?;
        let fits = self.ridge >= 0.0 && self.ridge.is_finite();
        checks::accept(fits, "ridge", self.ridge, "finite and at least 0")
    }
}

/// Of a recording or a walk that failed.
pub(crate) fn failed(source: GraphError) -> PruneError {
    PruneError::of_graph(source, |source| PruneError::NotRecorded { source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_support_method_that_was_chosen_stays_with_another_effort() {
        let mut pruner = Pruner::new(Budget::Sparsity(0.5));
        assert_eq!(pruner.support_method(64, 576), SupportMethod::BestSubset);
        pruner.effort = Effort::Quick;
        assert_eq!(pruner.support_method(64, 576), SupportMethod::Obs);
        pruner.support = Some(SupportMethod::Wanda);
        let pruner = pruner.with_effort(Effort::Thorough);
        assert_eq!(pruner.support_method(64, 576), SupportMethod::Wanda);
    }

    #[test]
    fn quick_pruning_takes_one_weight_after_the_other_in_small_layers_alone() {
        let mut pruner = Pruner::new(Budget::Sparsity(0.5)).with_effort(Effort::Quick);
        // The largest convolution of a ResNet20, and of a ResNet18.
        assert_eq!(pruner.support_method(64, 576), SupportMethod::Obs);
        assert_eq!(pruner.support_method(512, 4608), SupportMethod::BestSubset);
        pruner.support = Some(SupportMethod::Obs);
        assert_eq!(pruner.support_method(512, 4608), SupportMethod::Obs);
    }
}
