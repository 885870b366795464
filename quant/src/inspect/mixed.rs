//! As few bits as a bound on the accuracy allows.

use std::cmp::Ordering;
use std::fmt;

use burn::config::Config;
use burn::module::Module;
use burn_lean_reparam::Rejected;
use serde::{Deserialize, Serialize};

use crate::inspect::sensitivity::{Sensitivity, sensitivity};
use crate::table::table;
use crate::{FakeQuantizeConfig, Override, QatConfig, QuantError, WeightConfig, module::Located};
use crate::{
    calibrate,
    module::{RunOutcome, TensorOutcome, map_quantizers},
    quantizers,
};

/// What the more sensitive layers are kept at.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Precision {
    /// They are not quantized at all.
    Float,
    /// They are quantized like this.
    Quantized {
        /// Their weights.
        weight: WeightConfig,
        /// Their activations; `None` leaves them in float.
        activation: Option<FakeQuantizeConfig>,
    },
}

/// Chooses the layers that stay at a higher precision.
///
/// ```text
/// rank the layers by what quantizing each of them alone costs
/// keep the k most sensitive ones at the higher precision, with the smallest k
///     for which  float − quantized ≤ max_drop
/// ```
///
/// k is found by bisection, so that n layers take about log₂ n evaluations besides those of the
/// ranking. Where keeping more layers does not always help, it is a k that meets the bound, not
/// surely the smallest.
#[derive(Config, Debug)]
pub struct MixedPrecisionConfig {
    /// How layers are quantized unless they are kept.
    pub quantize: QatConfig,
    /// What the others are kept at. Default: INT8 weights and UINT8 activations.
    #[config(default = "Precision::int8()")]
    pub keep_at: Precision,
    /// How much of the figure of merit may be lost, in its own unit. Default: 1, which is one
    /// point of an accuracy in percent.
    #[config(default = 1.0)]
    pub max_drop: f64,
}

/// What [`MixedPrecisionConfig::allocate`] chose.
#[derive(Debug, Clone)]
pub struct Allocation<M> {
    /// The model, prepared with [`config`](Self::config), with its ranges: its records and files
    /// load into another one that `config` prepares.
    pub model: M,
    /// What prepares a model like it. If all layers are kept in float, there is nothing to prepare:
    /// `model` is the float model, and [`QatConfig::prepare`] says
    /// [`NothingToQuantize`](QuantError::NothingToQuantize).
    pub config: QatConfig,
    /// What it is made of.
    pub report: AllocationReport,
}

/// Which layers were kept, and why.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AllocationReport {
    /// The layers that are kept at the higher precision, the most sensitive first.
    pub kept: Vec<String>,
    /// What was lost: figure of merit of the float model less that of the result.
    #[serde(with = "crate::table::float")]
    pub drop: f64,
    /// Whether that is within the bound. If not, all layers were kept and still too much is lost.
    pub within_bound: bool,
    /// Number of kept layers and figure of merit of each trial, in order.
    #[serde(with = "crate::table::float_pairs")]
    pub trials: Vec<(usize, f64)>,
    /// What quantizing each layer alone costs, at the lower precision.
    pub sensitivity: Sensitivity,
}

impl Precision {
    /// INT8 weights per channel, UINT8 activations with moving averages of their range.
    pub fn int8() -> Self {
        let config = QatConfig::new();
        Self::Quantized {
            weight: config.weight,
            activation: config.activation,
        }
    }
}

impl MixedPrecisionConfig {
    /// Prepares `model`, calibrates it, and keeps layers until the bound is met.
    ///
    /// `model` is a trained float model. `run` shows it calibration data; `output` and `evaluate`
    /// are those of [`sensitivity`]. All run it by
    /// [`QuantizedForward::run`](crate::QuantizedForward::run), or by a forward pass that calls its layers
    /// with `forward_q`. Quantizers of the model's own stay as they are.
    ///
    /// # Errors
    ///
    /// Those of [`QatConfig::prepare`] and [`calibrate`], with the model as it was;
    /// [`QuantError::InvalidConfig`] for a bound that is negative or no number, and for a schedule
    /// that does not quantize from step 0 on.
    pub fn allocate<M: Module, R: RunOutcome, T: TensorOutcome<D>, const D: usize>(
        &self,
        model: M,
        run: impl Fn(&M) -> R,
        output: impl Fn(&M) -> T,
        evaluate: impl Fn(&M) -> f64,
    ) -> Result<Allocation<M>, Rejected<M, QuantError>> {
        self.try_allocate(&model, run, output, evaluate)
            .map_err(|error| Rejected::new(model, error))
    }

    fn try_allocate<M: Module, R: RunOutcome, T: TensorOutcome<D>, const D: usize>(
        &self,
        model: &M,
        run: impl Fn(&M) -> R,
        output: impl Fn(&M) -> T,
        evaluate: impl Fn(&M) -> f64,
    ) -> Result<Allocation<M>, QuantError> {
        if !(self.max_drop >= 0.0) {
            return Err(QuantError::InvalidConfig {
                field: "max_drop",
                value: self.max_drop.to_string(),
                expected: "at least 0",
            });
        }
        self.quantize.schedule.refuse_delay()?;
        if let Precision::Quantized { weight, activation } = &self.keep_at {
            let kept = QatConfig::new().with_weight(weight.clone());
            kept.with_activation(activation.clone()).validate()?;
        }
        let low = calibrate(self.quantize.prepare(model.clone())?, &run)?;
        // A quantizer that stands alone in the model is no layer: no config decides about it.
        let layers: Vec<String> = quantizers(&low)
            .into_iter()
            .filter_map(|located| located.parameter)
            .collect();
        let high = match &self.keep_at {
            Precision::Float => None,
            Precision::Quantized { .. } => {
                let config = self.config(&layers);
                Some(calibrate(config.prepare(model.clone())?, &run)?)
            }
        };
        let sensitivity = sensitivity(&low, output, &evaluate)?;
        let mut ranked = self.ranked(&sensitivity);
        ranked.retain(|layer| layers.contains(layer));

        let calibrated: Vec<Located> = [Some(&low), high.as_ref()]
            .into_iter()
            .flatten()
            .flat_map(quantizers)
            .collect();
        let mixture = |kept: &[String]| -> Result<M, QuantError> {
            let prepared = match self.config(kept).prepare(model.clone()) {
                Ok(prepared) => prepared,
                Err(rejected) => match rejected.into_parts() {
                    // Every layer is kept in float: no quantizers but the model's own.
                    (model, QuantError::NothingToQuantize) => model,
                    (_, error) => return Err(error),
                },
            };
            // Ranges are observed in float, so a quantizer has the same in every mixture.
            Ok(map_quantizers(prepared, |located| {
                let mut calibrated = calibrated.iter();
                match calibrated.find(|other| is_same(other, &located)) {
                    Some(other) => other.quantizer.clone(),
                    None => located.quantizer,
                }
            }))
        };
        let mut trials = Vec::new();
        let mut meets = |kept: usize| {
            let value = match kept {
                0 => sensitivity.quantized,
                _ => evaluate(&mixture(&ranked[..kept])?.valid()),
            };
            trials.push((kept, value));
            Ok::<_, QuantError>(sensitivity.float - value <= self.max_drop)
        };
        let (mut least, mut most) = (0, ranked.len());
        if meets(0)? {
            most = 0;
        } else {
            while least + 1 < most {
                let middle = least.midpoint(most);
                match meets(middle)? {
                    true => most = middle,
                    false => least = middle,
                }
            }
            if !trials_contain(&trials, most) {
                let value = evaluate(&mixture(&ranked[..most])?.valid());
                trials.push((most, value));
            }
        }
        let kept = ranked[..most].to_vec();
        let value = trials.iter().find(|(count, _)| *count == most);
        let drop = sensitivity.float - value.map_or(sensitivity.quantized, |(_, value)| *value);
        Ok(Allocation {
            model: mixture(&kept)?,
            config: self.config(&kept),
            report: AllocationReport {
                within_bound: drop <= self.max_drop,
                drop,
                kept,
                trials,
                sensitivity,
            },
        })
    }

    /// The config with an override for each layer that is kept.
    fn config(&self, kept: &[String]) -> QatConfig {
        let mut config = self.quantize.clone();
        let mut done: Vec<&String> = Vec::new();
        for layer in kept {
            if done.contains(&layer) {
                continue;
            }
            done.push(layer);
            let choice = Override::new(layer.clone());
            config.overrides.push(match &self.keep_at {
                Precision::Float => choice.with_skip(Some(true)),
                Precision::Quantized { weight, activation } => choice
                    .with_weight(Some(weight.clone()))
                    .with_activation(activation.clone())
                    .with_skip_activation(activation.is_none().then_some(true)),
            });
        }
        config
    }

    /// The layers, the most sensitive first.
    fn ranked(&self, sensitivity: &Sensitivity) -> Vec<String> {
        let mut layers: Vec<_> = sensitivity.layers.iter().collect();
        layers.sort_by(|a, b| {
            // Of equals the output error decides.
            lower_first(a.quantized_alone, b.quantized_alone)
                .then(lower_first(a.output_sqnr, b.output_sqnr))
        });
        layers
            .into_iter()
            .map(|layer| layer.layer.clone())
            .collect()
    }
}

/// The lower of two figures first, and before all others what is no number: an evaluation that failed.
fn lower_first(a: f64, b: f64) -> Ordering {
    let failed = b.is_nan().cmp(&a.is_nan());
    failed.then(a.partial_cmp(&b).unwrap_or(Ordering::Equal))
}

/// Whether two quantizers of the same place do the same.
fn is_same(a: &Located, b: &Located) -> bool {
    a.path == b.path
        && a.quantizer.config() == b.quantizer.config()
        && a.quantizer.is_enabled() == b.quantizer.is_enabled()
}

fn trials_contain(trials: &[(usize, f64)], kept: usize) -> bool {
    trials.iter().any(|(count, _)| *count == kept)
}

impl fmt::Display for AllocationReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = table(&["layers kept", "figure of merit", "drop"]);
        for (kept, value) in &self.trials {
            table.add_row([
                kept.to_string(),
                format!("{value:.2}"),
                format!("{:.2}", self.sensitivity.float - value),
            ]);
        }
        let kept = match self.kept.is_empty() {
            true => "none".to_string(),
            false => self.kept.join(", "),
        };
        let bound = if self.within_bound {
            "within"
        } else {
            "beyond"
        };
        write!(
            f,
            "{}\n{table}\nkept: {kept}; {:.2} lost, {bound} the bound",
            self.sensitivity, self.drop
        )
    }
}
