//! The stage that prunes.

use std::collections::HashSet;
use std::path::PathBuf;

use burn::module::{Module, ParamGroup};
use burn_lean_prune::{
    Budget, FisherConfig, GradualConfig, PruneError, Pruner, PrunerConfig, Selection, SolverConfig,
    SparsityPattern, SparsitySchedule,
    layerwise::Outputs,
    model::{ExcludedBecause, Layer},
};
use burn_lean_reparam::Attached;
use serde::{Deserialize, Serialize};

use super::sparsity::Sparsity;
use super::training::{RateSchedule, TrainStage};
use crate::RecipeError;
use crate::check::{Check, contains};

/// How weights are removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum PruneMethod {
    /// Layer by layer, from inputs alone ([`Pruner`]).
    #[default]
    Layerwise,
    /// From the gradients of the loss, in one stage or several ([`PrunerConfig`]). Where they take more
    /// than 8 GiB they lie in a file without a name: in the state folder, or else in the system's folder
    /// for temporary files, which may be in memory.
    Chita,
    /// As `chita`, with training between the stages ([`GradualConfig`]).
    Gradual,
}

/// Pruning, and fine-tuning with the zeros held.
///
/// ```
/// use burn_lean_recipe::{PruneMethod, PruneStage, Sparsity, TrainStage};
///
/// let prune = PruneStage::new(0.9)
///     .with_method(PruneMethod::Chita)
///     .with_tune(TrainStage::new(5, 1e-3));
/// assert_eq!(prune.sparsity, Sparsity::Fraction(0.9));
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PruneStage {
    /// What becomes zero: a fraction of the prunable weights, above 0 and below 1, or `"2:4"`, which
    /// `gradual` and several stages do not know.
    pub sparsity: Sparsity,
    /// How weights are removed. Default: layer by layer.
    #[serde(default)]
    pub method: PruneMethod,
    /// What the outputs stand for, by which `layerwise` chooses among its candidates: `"logits"` or
    /// `"values"`, those of a regression, say. Default: logits; where the task
    /// [has them](crate::Task::with_logits) these alone count.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outputs: Option<Outputs>,
    /// Stages of `chita` and `gradual`, at least 1. Default: 1 and 5.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stages: Option<usize>,
    /// Sparsity of the first of several stages. Default: 0.1 of `chita`, half of the target of
    /// `gradual`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<f64>,
    /// Gradients that a stage of `chita` and `gradual` collects, at least 1. Default: 500.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub samples: Option<usize>,
    /// Examples that are averaged into each of them, at least 1, at most those of a batch. Default: 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub batch_size: Option<usize>,
    /// Epochs between the stages of `gradual`, at least 1; left out with a single stage, after which `tune`
    /// trains. Default: 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stage_epochs: Option<usize>,
    /// Parameters whose path contains one of these are left dense; each is in a path. `*` stands for any
    /// characters but dots, `**` for any. Weights without gradients (`no_grad`), which no training moves, are pruned
    /// and fitted like others unless they are named here. Default: none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub exclude: Vec<String>,
    /// Training with the zeros held; `gradual` needs it, and trains so after its last stage.
    /// Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tune: Option<TrainStage>,
}

impl PruneStage {
    /// With the defaults.
    pub fn new(sparsity: impl Into<Sparsity>) -> Self {
        Self {
            sparsity: sparsity.into(),
            method: PruneMethod::Layerwise,
            outputs: None,
            stages: None,
            base: None,
            samples: None,
            batch_size: None,
            stage_epochs: None,
            exclude: Vec::new(),
            tune: None,
        }
    }

    /// With another method.
    pub fn with_method(mut self, method: PruneMethod) -> Self {
        self.method = method;
        self
    }

    /// With outputs of another meaning.
    pub fn with_outputs(mut self, outputs: Outputs) -> Self {
        self.outputs = Some(outputs);
        self
    }

    /// With so many stages.
    pub fn with_stages(mut self, stages: usize) -> Self {
        self.stages = Some(stages);
        self
    }

    /// With so many gradients in a stage.
    pub fn with_samples(mut self, samples: usize) -> Self {
        self.samples = Some(samples);
        self
    }

    /// Leaves parameters dense whose path contains this.
    pub fn with_exclude(mut self, text: impl Into<String>) -> Self {
        self.exclude.push(text.into());
        self
    }

    /// With training after it, the zeros held.
    pub fn with_tune(mut self, tune: TrainStage) -> Self {
        self.tune = Some(tune);
        self
    }

    /// As a row is named.
    pub(crate) fn name(&self) -> String {
        format!("pruned {}", self.sparsity.name())
    }

    /// Stages, where the method has some.
    pub(crate) fn stage_count(&self) -> usize {
        let default = match self.method {
            PruneMethod::Gradual => 5,
            _ => 1,
        };
        self.stages.unwrap_or(default)
    }

    pub(crate) fn validate(&self) -> Result<(), RecipeError> {
        let check = Check("prune");
        self.sparsity.validate(&check)?;
        let in_stages = self.method == PruneMethod::Gradual || self.stage_count() > 1;
        check.accept(
            !(in_stages && matches!(self.sparsity, Sparsity::NOfM { .. })),
            "sparsity",
            self.sparsity,
            "a fraction where there are several stages: a pattern is reached in one",
        )?;
        if let Some(outputs) = self.outputs {
            let fits = self.method == PruneMethod::Layerwise;
            let expected = "left out: it belongs to the method `layerwise`";
            check.accept(fits, "outputs", format!("{outputs:?}"), expected)?;
        }
        let of_gradients = "left out: it belongs to the methods `chita` and `gradual`";
        let given = [
            ("stages", self.stages),
            ("samples", self.samples),
            ("batch_size", self.batch_size),
        ];
        for (field, value) in given {
            let Some(value) = value else { continue };
            let fits = self.method != PruneMethod::Layerwise;
            check.accept(fits, field, value, of_gradients)?;
            check.accept(value >= 1, field, value, "at least 1")?;
        }
        if let Some(base) = self.base {
            let fits = self.method != PruneMethod::Layerwise;
            check.accept(fits, "base", base, of_gradients)?;
            check.accept(
                base > 0.0 && base <= self.sparsity.fraction(),
                "base",
                base,
                "above 0 and at most `sparsity`",
            )?;
            check.accept(
                self.stage_count() > 1,
                "base",
                base,
                "left out with a single stage",
            )?;
        }
        let is_gradual = self.method == PruneMethod::Gradual;
        if let Some(epochs) = self.stage_epochs {
            let expected = "left out: it belongs to the method `gradual`";
            check.accept(is_gradual, "stage_epochs", epochs, expected)?;
            check.accept(epochs >= 1, "stage_epochs", epochs, "at least 1")?;
            check.accept(
                self.stage_count() > 1,
                "stage_epochs",
                epochs,
                "left out with a single stage: `tune.epochs` are those after it",
            )?;
        }
        check.excluded(&self.exclude)?;
        match &self.tune {
            None => check.accept(
                !is_gradual,
                "tune",
                "missing",
                "given: the method `gradual` trains",
            ),
            Some(tune) => {
                tune.validate("prune.tune", true)?;
                check.accept(
                    !is_gradual || (tune.schedule == RateSchedule::Cosine && tune.warmup == 0.0),
                    "tune",
                    "of another schedule",
                    "of the schedule `cosine` without warmup with the method `gradual`, which \
                     restarts it after every stage",
                )
            }
        }
    }

    /// Refuses a model in which nothing can be pruned, or nothing but what is excluded.
    pub(crate) fn check<M: Module>(
        &self,
        model: &M,
        pattern: &SparsityPattern,
    ) -> Result<(), RecipeError> {
        let selection = Self::selection(model, pattern);
        let selection = selection.map_err(|error| RecipeError::from(error).at("prune"))?;
        let check = Check("prune");
        let weights = self.kept(&selection).map(Layer::len).sum();
        let expected = "fewer parts of paths: no weight is left to prune";
        check.accept(weights > 0, "exclude", self.exclude.join(", "), expected)?;
        let Sparsity::Fraction(sparsity) = self.sparsity else {
            return Ok(());
        };
        let keeps = Budget::kept_count(sparsity, weights).is_ok_and(|k| 0 < k && k < weights);
        let expected =
            format!("a share that leaves at least one of {weights} weights, and takes one");
        check.accept(keeps, "sparsity", sparsity, expected)
    }

    /// Refuses weights to prune that carry something already, `carried` by the model: they would get masks, too.
    pub(crate) fn check_carried<M: Module>(
        &self,
        model: &M,
        carried: &[Attached],
    ) -> Result<(), RecipeError> {
        let selection = Self::selection(model, &self.sparsity.pattern());
        let selection = selection.map_err(|error| RecipeError::from(error).at("prune"))?;
        let pruned: HashSet<&String> = self.kept(&selection).map(|layer| &layer.path).collect();
        let refused = match self.method {
            // Each of its stages would fold in whatever is carried, with its masks.
            PruneMethod::Gradual => carried.first(),
            _ => carried.iter().find(|one| pruned.contains(&one.path)),
        };
        match refused {
            None => Ok(()),
            Some(Attached { path, name, .. }) => Err(RecipeError::Reparameterized {
                stage: "prune".into(),
                path: path.clone(),
                name: name.clone(),
            }),
        }
    }

    /// What can be pruned, whatever else the model carries: what an adapter adds is nothing before a training.
    pub(crate) fn selection<M: Module>(
        model: &M,
        pattern: &SparsityPattern,
    ) -> Result<Selection, PruneError> {
        Selection::for_pattern(&model.valid().materialize(), None, pattern)
    }

    /// The pruner of the method `layerwise`.
    pub(crate) fn pruner(&self, selection: &Selection) -> Pruner {
        let mut pruner = Pruner::new(self.sparsity.budget());
        pruner.pattern = self.sparsity.pattern();
        pruner.group = self.group(selection);
        pruner.outputs = self.outputs.unwrap_or_default();
        pruner.progress = false;
        pruner
    }

    /// The pruner of the method `chita`; gradients beyond memory go to a file in `folder`.
    pub(crate) fn chita(&self, selection: &Selection, seed: u64, folder: PathBuf) -> PrunerConfig {
        let solver =
            SolverConfig::new(self.sparsity.budget()).with_pattern(self.sparsity.pattern());
        let fisher = FisherConfig::new(self.samples.unwrap_or(500))
            .with_batch_size(self.batch_size.unwrap_or(1))
            .with_on_disk(Some(folder))
            .with_progress(false);
        let schedule = match (self.method, self.base) {
            (PruneMethod::Gradual, base) => SparsitySchedule::Polynomial {
                base: base.unwrap_or(0.5 * self.sparsity.fraction()),
            },
            (_, base) => SparsitySchedule::Exponential {
                base: base.unwrap_or(0.1).min(self.sparsity.fraction()),
            },
        };
        PrunerConfig::new(solver, fisher)
            .with_stages(self.stage_count())
            .with_schedule(schedule)
            .with_group(self.group(selection))
            .with_seed(seed)
    }

    /// The pruner of the method `gradual`; gradients beyond memory go to a file in `folder`.
    pub(crate) fn gradual(
        &self,
        selection: &Selection,
        seed: u64,
        folder: PathBuf,
        tune: &TrainStage,
    ) -> GradualConfig {
        let between = self.stage_epochs.unwrap_or(1);
        GradualConfig::new(self.chita(selection, seed, folder), between, tune.epochs)
            .with_learning_rate(tune.learning_rate)
            .with_last_learning_rate(1e-3 * tune.learning_rate)
    }

    /// What is not excluded; `None` where nothing is.
    fn group(&self, selection: &Selection) -> Option<ParamGroup> {
        if self.exclude.is_empty() {
            return None;
        }
        let kept = self.kept(selection);
        let paths: Vec<String> = kept.map(|layer| layer.path.clone()).collect();
        Some(ParamGroup::from_paths(paths))
    }

    /// The layers of which no path, if they are tied, is excluded.
    fn kept<'l>(&'l self, selection: &'l Selection) -> impl Iterator<Item = &'l Layer> {
        let is_excluded = |path: &str| self.exclude.iter().any(|text| contains(path, text));
        let first_paths = selection
            .parameters()
            .iter()
            .map(|one| match &one.excluded {
                Some(ExcludedBecause::TiedTo(first)) => (&one.path, first),
                _ => (&one.path, &one.path),
            });
        let excluded: HashSet<&String> = first_paths
            .filter(|(path, _)| is_excluded(path))
            .map(|(_, first)| first)
            .collect();
        let layers = selection.layout().layers().iter();
        layers.filter(move |layer| !excluded.contains(&layer.path))
    }
}

#[cfg(test)]
mod tests {
    use burn::nn::{Linear, LinearConfig};
    use burn::tensor::Device;

    use super::*;

    #[test]
    fn a_tied_weight_is_excluded_by_either_path() {
        let device = Device::flex();
        let first: Linear = LinearConfig::new(4, 4).init(&device);
        let model = (first.clone(), LinearConfig::new(4, 2).init(&device), first);
        let selection = Selection::of::<(Linear, Linear, Linear)>(&model, None).unwrap();
        let kept = |text: &str| -> Vec<String> {
            let stage = PruneStage::new(0.5).with_exclude(text);
            stage
                .kept(&selection)
                .map(|layer| layer.path.clone())
                .collect()
        };
        assert_eq!(kept("0."), ["1.weight"]);
        assert_eq!(kept("2."), ["1.weight"]);
        assert_eq!(kept("1."), ["0.weight"]);
    }
}
