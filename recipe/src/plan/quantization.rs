//! A stage that quantizes.

use std::fmt;

use burn::module::Module;
use burn_lean_prune::{
    Budget, DeadColumns, FisherConfig, Method, PruneError, PrunerConfig, Selection, SolverConfig,
};
use burn_lean_quant::{
    FakeQuantizeConfig, GptqConfig, NumberFormat, ObserverConfig, Override, PtqConfig, QatConfig,
    QuantError, Rounding, RoundingConfig, Scheme, WeightConfig, WeightGranularity, WeightRange,
    rounding::AdaRoundConfig,
};
use burn_lean_reparam::{AttachError, attach_if_any};
use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer};
use serde::de::{MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use super::numbers::Numbers;
use super::training::TrainStage;
use crate::check::{Check, anywhere};
use crate::{Joint, RecipeError};

/// How weights are rounded without training.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum RoundingMethod {
    /// [`Gptq`](Self::Gptq) for integers of 4 bits and less, where the nearest codes cost much;
    /// [`Nearest`](Self::Nearest) for all else.
    #[default]
    Auto,
    /// To the nearest code.
    Nearest,
    /// With second-order information of calibration data, and corrected biases.
    Gptq,
    /// Up or down as calibration data learn, and corrected biases.
    Adaround,
    /// With the Fisher of the whole network, as [`Joint`] does: gradients of the loss decide about
    /// codes and scales of the weights that are not 0; zeros stay.
    Fisher,
}

/// Quantization: with training (QAT) where [`train`](Self::train) is given, without (PTQ) elsewhere.
///
/// Weights that Burn cannot hold as codes, floats of 8 bits or some [`block`](Self::block)s among them, are
/// floats of rounded values in the record, which is no smaller for them, and a warning says so; a
/// `safetensors` of [`export`](crate::Recipe::export) has their codes.
///
/// ```
/// use burn_lean_recipe::{QuantizeStage, TrainStage};
///
/// let int4 = QuantizeStage::new("int4".parse()?, "uint8".parse()?)
///     .with_train(TrainStage::new(5, 1e-4));
/// assert_eq!(int4.name(), "W4A8");
/// # Ok::<(), burn_lean_recipe::RecipeError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QuantizeStage {
    /// Numbers of the weights: signed integers or floats. Default: `int8`.
    #[serde(default = "int8")]
    pub weights: Numbers,
    /// Numbers of the inputs of layers; unsigned ones get a zero point. Default: `uint8`.
    #[serde(default = "uint8")]
    pub activations: Numbers,
    /// Neighbouring input channels that share a scale; the last has what is left, and
    /// `rounding = "fisher"` needs a divisor of their number. Default: all those
    /// of an output channel.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub block: Option<usize>,
    /// How weights are rounded, without training. Default: as their bits want it.
    #[serde(default)]
    pub rounding: RoundingMethod,
    /// Fisher samples of the rounding `fisher`, at least 1. Default: 500.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub samples: Option<usize>,
    /// Batches that ranges are calibrated on, or weights rounded by, without training; at least 1.
    /// Default: 16.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub calibration: Option<usize>,
    /// Whether batch normalizations are folded into the layers before them first. Default: yes.
    #[serde(default = "yes")]
    pub fold: bool,
    /// Layers stay float where the path of the weight contains one of these; each is in the path of a
    /// weight. `*` stands for any characters but dots, `**` for any. Default: none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub exclude: Vec<String>,
    /// Training with fake quantization, the zeros of a pruned model held. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub train: Option<TrainStage>,
}

fn int8() -> Numbers {
    Numbers::new(NumberFormat::int8())
}

fn uint8() -> Numbers {
    Numbers::new(NumberFormat::uint8())
}

fn yes() -> bool {
    true
}

impl QuantizeStage {
    /// With the defaults: without training.
    pub fn new(weights: Numbers, activations: Numbers) -> Self {
        Self {
            weights,
            activations,
            block: None,
            rounding: RoundingMethod::Auto,
            samples: None,
            calibration: None,
            fold: true,
            exclude: Vec::new(),
            train: None,
        }
    }

    /// With training.
    pub fn with_train(mut self, train: TrainStage) -> Self {
        self.train = Some(train);
        self
    }

    /// With a scale for so many neighbouring input channels.
    pub fn with_block(mut self, block: usize) -> Self {
        self.block = Some(block);
        self
    }

    /// With weights rounded in another way.
    pub fn with_rounding(mut self, rounding: RoundingMethod) -> Self {
        self.rounding = rounding;
        self
    }

    /// With so many Fisher samples, for the rounding `fisher`.
    pub fn with_samples(mut self, samples: usize) -> Self {
        self.samples = Some(samples);
        self
    }

    /// As tables call it: `W4A8`, `W8`, `WE4M3A8`.
    pub fn name(&self) -> String {
        format!("{}{}", self.weights.short('W'), self.activations.short('A'))
    }

    pub(crate) fn validate(&self, stage: &str) -> Result<(), RecipeError> {
        let check = Check(stage);
        let signed = match self.weights.format() {
            Some(NumberFormat::Int { signed, .. }) => signed,
            Some(_) => true,
            None => false,
        };
        check.accept(
            signed,
            "weights",
            self.weights,
            "signed integers (int2 to int8) or floats (e4m3, e5m2, e2m1)",
        )?;
        let block = self.block.unwrap_or(1);
        check.accept(block >= 1, "block", block, "at least 1")?;
        check.excluded(&self.exclude)?;
        match &self.train {
            Some(train) => {
                if let Some(batches) = self.calibration {
                    let expected = "left out: training sees all data";
                    check.refuse("calibration", batches, expected)?;
                }
                let nearest = [RoundingMethod::Auto, RoundingMethod::Nearest];
                check.accept(
                    nearest.contains(&self.rounding),
                    "rounding",
                    format!("{:?}", self.rounding).to_lowercase(),
                    "left out: training rounds to the nearest code",
                )?;
                train.validate(&format!("{stage}.train"), true)?;
            }
            None => {
                let batches = self.calibration_batches();
                check.accept(batches >= 1, "calibration", batches, "at least 1")?;
                let expected = "left out: no activations are quantized, and weights are not rounded by \
                                calibration data";
                let is_used = self.calibration.is_none() || self.ptq_uses_data();
                check.accept(is_used, "calibration", batches, expected)?;
                let of_integers = self.weights.format().is_some_and(NumberFormat::is_int);
                let nearest = [RoundingMethod::Auto, RoundingMethod::Nearest];
                check.accept(
                    of_integers || nearest.contains(&self.rounding),
                    "rounding",
                    format!("{:?}", self.rounding).to_lowercase(),
                    "`nearest` for weights that are no integers",
                )?;
            }
        }
        if let Some(samples) = self.samples {
            let is_fisher = self.rounding == RoundingMethod::Fisher;
            let expected = "left out: it belongs to the rounding `fisher`";
            check.accept(is_fisher, "samples", samples, expected)?;
            check.accept(samples >= 1, "samples", samples, "at least 1")?;
        }
        let config = self.qat().validate();
        config.map_err(|error| RecipeError::from(error).at(stage))
    }

    /// Refuses exclusions and blocks that do not fit the weights of a model.
    pub(crate) fn check<M: Module>(&self, stage: &str, model: &M) -> Result<(), RecipeError> {
        match self.config().reparameterizer(model) {
            Ok(_) if self.rounding == RoundingMethod::Fisher => {
                let grids = self.joint(model)?.layers(model);
                grids.map(drop).map_err(|error| error.at(stage))
            }
            Ok(_) => Ok(()),
            Err(QuantError::UnknownPath { pattern, known }) => {
                let given = self.exclude.iter().find(|text| anywhere(text) == pattern);
                let value = format!("`{}`", given.unwrap_or(&pattern));
                let known = known.join(", ");
                let expected = format!("part of the path of a weight that is quantized: {known}");
                Check(stage).refuse("exclude", value, expected)
            }
            Err(error) => Err(RecipeError::from(error).at(stage)),
        }
    }

    /// Refuses a weight to quantize that carries something already.
    pub(crate) fn check_carried<M: Module>(
        &self,
        stage: &str,
        model: &M,
    ) -> Result<(), RecipeError> {
        let quantizers = self.config().reparameterizer(model);
        let quantizers = quantizers.map_err(|error| RecipeError::from(error).at(stage))?;
        // A copy of handles, which is dropped.
        let Err(rejected) = attach_if_any(model.clone(), quantizers) else {
            return Ok(());
        };
        Err(match rejected.into_error() {
            AttachError::AlreadyAttached { path, existing } => RecipeError::Reparameterized {
                stage: stage.into(),
                path,
                name: existing,
            },
            error => RecipeError::from(error).at(stage),
        })
    }

    /// Refuses more samples of gradients than fit into memory.
    pub(crate) fn check_memory<M: Module>(
        &self,
        stage: &str,
        model: &M,
    ) -> Result<(), RecipeError> {
        if self.rounding != RoundingMethod::Fisher {
            return Ok(());
        }
        let fisher = self.fisher();
        let selection = Selection::of(model, None)?;
        let needed = fisher.bytes_needed(&selection);
        let most = fisher.samples as u128 * fisher.memory_bound as u128 / needed.max(1) as u128;
        let expected = format!(
            "at most {most}: the gradients of {} take {needed} bytes, and may take {}",
            fisher.samples, fisher.memory_bound
        );
        let fits = needed <= fisher.memory_bound;
        Check(stage).accept(fits, "samples", fisher.samples, &*expected)
    }

    fn fisher(&self) -> FisherConfig {
        FisherConfig::new(self.samples.unwrap_or(500)).with_progress(false)
    }

    /// Whether quantization without training looks at data: for ranges, or to round weights.
    fn ptq_uses_data(&self) -> bool {
        let few_bits = |format: NumberFormat| format.is_int() && format.bits() <= 4;
        let rounds_by_data = match self.rounding {
            RoundingMethod::Auto => self.weights.format().is_some_and(few_bits),
            RoundingMethod::Nearest | RoundingMethod::Fisher => false,
            RoundingMethod::Gptq | RoundingMethod::Adaround => true,
        };
        rounds_by_data || self.activations.format().is_some()
    }

    pub(crate) fn calibration_batches(&self) -> usize {
        self.calibration.unwrap_or(16)
    }

    /// Which quantizers a model gets.
    pub(crate) fn config(&self) -> QatConfig {
        match self.train {
            Some(_) => self.qat(),
            None => self.ptq().qat_config(),
        }
    }

    /// Which quantizers a model gets for training.
    pub(crate) fn qat(&self) -> QatConfig {
        let format = self.weights.format().unwrap_or_else(NumberFormat::int8);
        let mut weight = WeightConfig::new().with_format(match format.is_int() {
            true => format.narrow(),
            false => format,
        });
        if let Some(size) = self.block {
            weight = weight.with_granularity(WeightGranularity::PerBlock { size });
        }
        let activation = self.activations.format().map(|format| {
            FakeQuantizeConfig::new(match format {
                NumberFormat::Int { signed: false, .. } => Scheme::affine(format),
                _ => Scheme::symmetric(format),
            })
        });
        let exclude = self.exclude.iter();
        let skipped = exclude.map(|text| Override::new(anywhere(text)).with_skip(Some(true)));
        QatConfig::new()
            .with_weight(weight)
            .with_activation(activation)
            .with_overrides(skipped.collect())
    }

    /// How the weights of a model are rounded with the Fisher, its zeros where they are.
    pub(crate) fn joint<M: Module>(&self, model: &M) -> Result<Joint, RecipeError> {
        let weights = Selection::of(model, None)?.flatten(model)?.try_into_data();
        let weights = weights.map_err(|error| PruneError::Device {
            reason: error.to_string(),
        })?;
        let nonzeros = weights
            .iter::<f32>()
            .filter(|weight| *weight != 0.0)
            .count();
        let budget = match nonzeros == weights.num_elements() {
            true => Budget::All,
            false => Budget::Keep(nonzeros),
        };
        // The largest weights: all that are not 0, those too that no gradient reaches.
        let solver = SolverConfig::new(budget)
            .with_method(Method::BackSolve)
            .with_dead_columns(Some(DeadColumns::Priced));
        let pruner = PrunerConfig::new(solver, self.fisher());
        Ok(Joint::new(pruner, self.qat()))
    }

    /// How a model is quantized without training.
    pub(crate) fn ptq(&self) -> PtqConfig {
        let rounding = match self.rounding {
            RoundingMethod::Auto => Rounding::Auto,
            RoundingMethod::Nearest | RoundingMethod::Fisher => Rounding::Nearest,
            RoundingMethod::Gptq => Rounding::Gptq(GptqConfig::new()),
            RoundingMethod::Adaround => Rounding::AdaRound(AdaRoundConfig::new()),
        };
        let corrects = rounding != Rounding::Nearest;
        let rounding = RoundingConfig::new()
            .with_rounding(rounding)
            .with_bias_correction(corrects);
        let mut ptq = PtqConfig::new()
            .with_quantize(self.qat())
            .with_rounding(rounding)
            .with_progress(false);
        if self.rounding == RoundingMethod::Fisher {
            // The scales are the solver's.
            ptq = ptq.with_weight_range(WeightRange::MinMax);
        }
        if self.activations.format().is_none() {
            ptq = ptq.with_mode(burn_lean_quant::PtqMode::WeightOnly);
        } else if !self.activations.format().is_some_and(NumberFormat::is_int) {
            ptq = ptq.with_observers(vec![ObserverConfig::MinMax]);
        }
        ptq
    }
}

/// A table, or a list of them.
pub(super) fn one_or_several<'de, D: Deserializer<'de>>(
    file: D,
) -> Result<Vec<QuantizeStage>, D::Error> {
    struct OneOrSeveral;
    impl<'de> Visitor<'de> for OneOrSeveral {
        type Value = Vec<QuantizeStage>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a table, or several as `[[quantize]]`")
        }

        fn visit_map<A: MapAccess<'de>>(self, one: A) -> Result<Self::Value, A::Error> {
            QuantizeStage::deserialize(MapAccessDeserializer::new(one)).map(|one| vec![one])
        }

        fn visit_seq<A: SeqAccess<'de>>(self, several: A) -> Result<Self::Value, A::Error> {
            Vec::deserialize(SeqAccessDeserializer::new(several))
        }
    }
    file.deserialize_any(OneOrSeveral)
}
