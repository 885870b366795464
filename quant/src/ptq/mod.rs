//! Quantizing a trained model without training it.

use std::collections::{HashMap, HashSet};

use burn::config::Config;
use burn::module::Module;
use burn_lean_graph::Tensors;
use burn_lean_reparam::Rejected;
use serde::{Deserialize, Serialize};

use crate::inspect::health::{QuantizerHealth, health};
use crate::model::layers::Layers;
use crate::model::unobserved::{LeftFloat, Unobserved, leave_float, without_range};
use crate::qat::training::{WeightRanges, calibrated};
use crate::range::observer::ObserverConfig;
use crate::{
    FakeQuantize, Learned, NumberFormat, QatConfig, QuantError, QuantParams, QuantizedForward,
    RangeMethod, Rounding, RoundingConfig,
    fake::Range,
    module::{LayerInputs, RunOutcome},
};
use crate::{Site, WeightConfig, module::map_quantizers, quantizers, rounding::RoundingReport};

mod pass;
mod report;
mod weight_range;

use pass::{Data, Pass};
pub use report::{ActivationRange, PtqReport};

/// Which numbers are quantized.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub enum PtqMode {
    /// Weights. Needs calibration data for better rounding only.
    WeightOnly,
    /// Weights, and activations with the range of the values at hand. Likewise; where there is data,
    /// its first batch tells whether the forward pass comes by every quantizer.
    Dynamic,
    /// Weights, and activations with ranges from calibration data.
    #[default]
    Static,
}

/// How the range of a weight is chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub enum WeightRange {
    /// [`LeastSquares`](Self::LeastSquares) for integers of 4 bits and less, [`MinMax`](Self::MinMax)
    /// for others.
    #[default]
    Auto,
    /// From the lowest to the highest value: nothing is clipped.
    MinMax,
    /// A share of that, for each group the one with the least squared error.
    LeastSquares,
}

/// Post-training quantization: calibration, the choice of ranges, rounding, bias correction.
///
/// ```
/// use burn::module::Module;
/// use burn::nn::LinearConfig;
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_lean_quant::{PtqConfig, PtqMode};
///
/// let device = Device::flex();
/// let model = LinearConfig::new(8, 4).init(&device);
/// let data = Tensor::<2>::random([32, 8], Distribution::Default, &device);
///
/// let config = PtqConfig::new().with_mode(PtqMode::Static);
/// let batches = || data.clone().chunk(4, 0);
/// let (model, report) = config.quantize_for(model, batches, |model, batch| model.forward(batch))?;
/// assert_eq!(report.batches, 4);
/// // Eight bits: about 40 dB and more.
/// assert!(report.activations[0].sqnr > 35.0);
/// # let _ = model;
/// # Ok::<(), burn_lean_quant::QuantError>(())
/// ```
#[derive(Config, Debug)]
pub struct PtqConfig {
    /// What is quantized, and how. The mode decides about the observers of activations; the
    /// schedule must quantize from step 0 on, and in static mode freezes observers there unless it
    /// names a step. Default: that of [`QatConfig`].
    #[config(default = "QatConfig::new()")]
    pub quantize: QatConfig,
    /// Which numbers are quantized. Default: weights, and activations with static ranges.
    #[config(default = "PtqMode::Static")]
    pub mode: PtqMode,
    /// Ways to choose the range of an activation, in static mode; of several, each quantizer takes
    /// the one with the least squared error. Default: the lowest to the highest value, or what a
    /// histogram says is best.
    #[config(
        default = "vec![ObserverConfig::MinMax, ObserverConfig::histogram(RangeMethod::Search)]"
    )]
    pub observers: Vec<ObserverConfig>,
    /// How the ranges of weights are chosen. Default: with the least squared error for integers of 4
    /// bits and less, from the lowest to the highest value for others.
    #[config(default = "WeightRange::Auto")]
    pub weight_range: WeightRange,
    /// How weights are rounded, and whether biases make up for what is left. Default: integers of 4 bits
    /// and less by GPTQ and yes, where there is calibration data and it comes by a linear layer or a
    /// convolution that shows its inputs ([`LayerInputs::collect`]); to the nearest code and no for others.
    #[config(default = "RoundingConfig::new()")]
    pub rounding: RoundingConfig,
    /// What to do with an activation that has no useful range: no batch came by its quantizer, or
    /// only one value did (all zeros, for example). Default: refuse.
    #[config(default = "Unobserved::Refuse")]
    pub unobserved: Unobserved,
    /// Whether a progress bar is shown, on a terminal. Default: yes.
    #[config(default = true)]
    pub progress: bool,
}

impl PtqConfig {
    /// Quantizes a trained float model, without an edit of it.
    ///
    /// `forward` is recorded as in [`QuantizedForward::run`], which is how the result is then
    /// run, too; the quantizers are those of [`QatConfig::prepare_for`] for the first batch, unless
    /// [`quantize`](Self::quantize) holds the [sites](QatConfig::with_sites_of) of a forward pass
    /// already. Data, result and errors are those of [`quantize`](Self::quantize());
    /// [`QuantError::Graph`] where the forward pass cannot be recorded.
    ///
    /// # Errors
    ///
    /// As [`quantize`](Self::quantize()).
    pub fn quantize_for<M, I, O>(
        &self,
        model: M,
        batches: impl Fn() -> I,
        forward: impl Fn(&M, I::Item) -> O,
    ) -> Result<(M, PtqReport), Rejected<M, QuantError>>
    where
        M: Module,
        I: IntoIterator,
        I::Item: Tensors,
        O: Tensors + Send + Sync + 'static,
    {
        if let Err(error) = self.validate() {
            return Err(Rejected::new(model, error));
        }
        let mut config = self.clone();
        if config.quantize.sites.is_none()
            && let Some(first) = batches().into_iter().next()
        {
            config.quantize = match config.quantize.with_sites_of(&model, first, &forward) {
                Ok(quantize) => quantize,
                Err(error) => return Err(Rejected::new(model, error)),
            };
        }
        let quantized = QuantizedForward::new();
        config.quantize(model, batches, |model, batch| {
            quantized.run(model, batch, &forward)
        })
    }

    /// Quantizes a trained float model whose code calls its quantizers.
    ///
    /// `batches` gives the calibration data, from the start each time it is called: a few hundred
    /// samples are enough. With a data loader of Burn's, whose items are results, it is
    /// `|| loader.iter().map(|batch| batch.expect("the data can be read"))`. `forward` runs a batch through the model, with `forward_q` or by [`QuantizedForward::run`].
    ///
    /// Fold the masks of a pruned model in first ([`Module::materialize`]): its zeros stay exactly
    /// zero, whatever the rounding.
    ///
    /// The result is a prepared model with its ranges, ready for
    /// [`convert`](crate::ConvertConfig::convert). Weights that were rounded other than to nearest
    /// lie on their grid already.
    ///
    /// It can be trained on, and what was chosen stays: ranges of weights for good (full ones of a model without
    /// weights of 4 bits and less, rounded to nearest, follow the weights, as their observers say), those of activations until a
    /// [`calibrate`](crate::calibrate) or a [schedule](crate::qat::set_schedule) under which observers are not
    /// frozen. Learned scales start from them; a `calibrate` starts these anew.
    ///
    /// # Errors
    ///
    /// Each with the model inside, as it was: [`QuantError::NoData`] where calibration data is
    /// needed and `batches` gives none; [`QuantError::NoLayerInputs`] where a [`rounding`](Self::rounding) by inputs is
    /// asked for and `forward` calls all layers so that they show none; those of [`QatConfig::prepare`], [`calibrate`](crate::calibrate) and
    /// [`RoundingConfig::apply`];
    /// [`QuantError::InvalidConfig`], before any data is run, for numbers out of their range; in static mode
    /// without observers or with the memoryless one, for a
    /// rounding by inputs where no layer can be rounded so, and for a schedule that does not quantize from step 0 on. In dynamic mode, where there is data,
    /// [`QuantError::NeverCalled`] for an activation that the first batch did not come by.
    pub fn quantize<M: Module, I: IntoIterator, R: RunOutcome>(
        &self,
        model: M,
        batches: impl Fn() -> I,
        forward: impl Fn(&M, I::Item) -> R,
    ) -> Result<(M, PtqReport), Rejected<M, QuantError>> {
        let pass = Pass::new(batches, forward, self.progress);
        self.try_quantize(&model, &pass)
            .map_err(|error| Rejected::new(model, error))
    }

    fn try_quantize<M: Module>(
        &self,
        model: &M,
        data: &impl Data<M>,
    ) -> Result<(M, PtqReport), QuantError> {
        self.validate()?;
        let (mut prepared, activations, mut left_float) = match self.mode {
            PtqMode::Static => self.with_static_ranges(model, data)?,
            PtqMode::WeightOnly => (
                self.qat_config().prepare(model.clone())?,
                Vec::new(),
                Vec::new(),
            ),
            PtqMode::Dynamic => {
                let prepared = self.qat_config().prepare(model.clone())?;
                let left = match data.run_first(&prepared.valid())? {
                    // What a model calls past its quantizers would stay float without a word.
                    true => self
                        .unobserved
                        .judge(without_range(&quantizers(&prepared), None))?,
                    false => Vec::new(),
                };
                (leave_float(prepared, &left), Vec::new(), left)
            }
        };
        if self.has_static_weights() {
            prepared = weight_range::choose(prepared, self.weight_range)?;
        } else {
            let left;
            (prepared, left) = weight_range::observe(prepared, self.unobserved)?;
            left_float.extend(left);
        }
        let mut rounding = RoundingReport::default();
        if self.rounds() {
            // Weights are float meanwhile, so that a layer's inputs do not depend on how those
            // before it are rounded.
            let float_weights = map_quantizers(prepared.valid(), |located| match located.site {
                Site::Weight => located.quantizer.with_enabled(false),
                _ => located.quantizer,
            });
            let inputs = data.run("inputs of layers", |run| {
                LayerInputs::collect(&float_weights, |model| run(model))
            });
            let asked = self.rounding.rounding != Rounding::Auto;
            (prepared, rounding) = match inputs {
                Ok(Ok(mut inputs)) => {
                    // An override leaves the others float.
                    let weights: HashSet<String> = quantizers(&prepared)
                        .into_iter()
                        .filter(|one| one.site == Site::Weight && one.quantizer.is_enabled())
                        .filter_map(|one| one.parameter)
                        .collect();
                    inputs.retain(|path| weights.contains(path));
                    self.rounding.apply(prepared, &inputs)?
                }
                // Nobody asked for it: there is no data, or no layer that shows its inputs. The report says why
                // none is rounded by them.
                Err(QuantError::NoData { .. }) if !asked => (prepared, rounding),
                Ok(Err(QuantError::NoLayerInputs)) if !asked => {
                    self.rounding.apply(prepared, &LayerInputs::default())?
                }
                Ok(Err(QuantError::NoLayerInputs))
                    if !Layers::of(model).are_rounded_by_inputs() =>
                {
                    return Err(QuantError::InvalidConfig {
                        field: "rounding",
                        value: format!("{:?}", self.rounding.rounding),
                        expected: "`Rounding::Nearest`: the model has no linear layer and no \
                                   convolution along one or two axes, which alone are rounded \
                                   by their inputs",
                    });
                }
                Ok(Err(error)) | Err(error) => return Err(error),
            };
        }
        let report = PtqReport {
            batches: data.count(),
            activations,
            left_float,
            rounding,
        };
        Ok((prepared, report))
    }

    /// What is wrong is told before the data is run, which may take hours.
    fn validate(&self) -> Result<(), QuantError> {
        self.quantize.schedule.refuse_delay()?;
        self.qat_config().validate()?;
        self.rounding.validate()?;
        if self.mode != PtqMode::Static {
            return Ok(());
        }
        if self.observers.is_empty() {
            return Err(QuantError::InvalidConfig {
                field: "observers",
                value: "empty".into(),
                expected: "at least one way to choose a range",
            });
        }
        if !self.observers.iter().all(ObserverConfig::has_memory) {
            return Err(QuantError::InvalidConfig {
                field: "observers",
                value: format!("{:?}", self.observers),
                expected: "ones that keep a range; for that of the values at hand choose the mode \
                           `PtqMode::Dynamic` instead of `Static`",
            });
        }
        self.observers.iter().try_for_each(|observer| {
            observer.validate()?;
            self.config(Some(*observer)).validate()
        })
    }

    /// What prepares a model like the ones that [`quantize`](Self::quantize) returns: for those who
    /// load a saved one.
    pub fn qat_config(&self) -> QatConfig {
        let mut config = self.config(match self.mode {
            PtqMode::WeightOnly => None,
            PtqMode::Dynamic => Some(ObserverConfig::Memoryless),
            PtqMode::Static => Some(ObserverConfig::MinMax),
        });
        if self.mode == PtqMode::Static {
            // The first batch of a training would widen the ranges that were chosen.
            let schedule = config.schedule;
            let frozen = schedule
                .freeze_observers_at
                .or(Some(schedule.quantize_from));
            config.schedule.freeze_observers_at = frozen;
        }
        config
    }

    /// Whether weights keep the range that is chosen here, instead of that of their values: after
    /// rounding, the largest value need not be there any more.
    fn has_static_weights(&self) -> bool {
        let chosen = match self.weight_range {
            WeightRange::Auto => self.has_few_codes(),
            WeightRange::MinMax => false,
            WeightRange::LeastSquares => true,
        };
        chosen || self.rounds_by_data()
    }

    /// Whether the inputs of layers are looked at, to round weights or to correct biases.
    fn rounds(&self) -> bool {
        let corrects = self.rounding.rounding == Rounding::Nearest && self.rounding.bias_correction;
        corrects || self.rounds_by_data()
    }

    /// Whether weights are rounded other than to nearest.
    fn rounds_by_data(&self) -> bool {
        match self.rounding.rounding {
            Rounding::Auto => self.has_few_codes(),
            Rounding::Nearest => false,
            _ => true,
        }
    }

    /// Whether some weights may have 4 bits or less.
    fn has_few_codes(&self) -> bool {
        let QatConfig {
            weight, overrides, ..
        } = &self.quantize;
        let formats = overrides.iter().filter_map(|choice| choice.weight.as_ref());
        let mut formats = std::iter::once(weight).chain(formats);
        formats.any(|weight| weight.format.has_few_integers())
            || overrides
                .iter()
                .filter_map(|choice| choice.weight_bits)
                .any(|bits| NumberFormat::int(bits).has_few_integers())
    }

    /// The config with this observer for all activations; `None` for weights only.
    fn config(&self, observer: Option<ObserverConfig>) -> QatConfig {
        let mut config = self.quantize.clone();
        let weights = |weight: &mut WeightConfig| {
            if self.has_static_weights() {
                // Without a memory it keeps the range that it is given. A learned scale is not
                // observed, but may need the zero point of a range that was.
                weight.observer = match weight.learned {
                    Learned::None => ObserverConfig::Memoryless,
                    _ => ObserverConfig::MinMax,
                };
            }
        };
        weights(&mut config.weight);
        match (observer, &mut config.activation) {
            (Some(observer), Some(activation)) => activation.observer = observer,
            (None, activation) => {
                *activation = None;
                config.outputs = false;
                config.sums = false;
            }
            (Some(_), None) => {}
        }
        for choice in &mut config.overrides {
            choice.weight.iter_mut().for_each(weights);
            match (observer, &mut choice.activation) {
                (Some(observer), Some(activation)) => activation.observer = observer,
                (None, activation) => {
                    *activation = None;
                    choice.activation_bits = None;
                    choice.outputs = None;
                }
                (Some(_), None) => {}
            }
        }
        config
    }

    /// Prepared and calibrated, each activation with the best of the observers.
    fn with_static_ranges<M: Module>(
        &self,
        model: &M,
        data: &impl Data<M>,
    ) -> Result<(M, Vec<ActivationRange>, Vec<LeftFloat>), QuantError> {
        let mut best: HashMap<String, (ActivationRange, Range)> = HashMap::new();
        let mut left: Vec<LeftFloat> = Vec::new();
        for observer in &self.observers {
            let prepared = self.config(Some(*observer)).prepare(model.clone())?;
            let weights = WeightRanges::OfValues;
            let (calibrated, without_range) = data.run("calibration", |run| {
                calibrated(&prepared, |_| true, self.unobserved, weights, run)
            })??;
            left.extend(without_range);
            let health = data.run("comparing ranges", |run| health(&calibrated, run))??;
            let found = health.quantizers.into_iter();
            let mut found: HashMap<String, QuantizerHealth> = found
                .map(|quantizer| (quantizer.path.clone(), quantizer))
                .collect();
            for located in quantizers(&calibrated) {
                let Some(found) = found.remove(&located.path) else {
                    continue;
                };
                // Of the model's own, one may take the range of the values at hand.
                let has_range = located.quantizer.has_static_range();
                if located.site == Site::Weight || !has_range {
                    continue;
                }
                let is_better = best
                    .get(&located.path)
                    .is_none_or(|(range, _)| found.sqnr > range.sqnr);
                if is_better {
                    let range = ActivationRange {
                        path: located.path.clone(),
                        scheme: located.quantizer.scheme().to_string(),
                        observer: located.quantizer.config().observer,
                        sqnr: found.sqnr,
                        clipped: found.clipped,
                    };
                    best.insert(located.path, (range, located.quantizer.range()?));
                }
            }
        }
        // Another observer may have found a range.
        left.retain(|left| !best.contains_key(&left.path));
        let mut seen = HashSet::new();
        left.retain(|left| seen.insert(left.path.clone()));
        let mut ranges = Vec::new();
        let prepared = self.qat_config().prepare(model.clone())?;
        let model = map_quantizers(prepared, |located| match best.remove(&located.path) {
            Some((report, range)) => {
                ranges.push(report);
                keeping(located.quantizer, range)
            }
            None => located.quantizer,
        });
        Ok((leave_float(model, &left), ranges, left))
    }
}

/// With this range from now on, from which a learned scale starts.
fn keeping(quantizer: FakeQuantize, range: Range) -> FakeQuantize {
    let first = QuantParams::from_range(range.clone(), quantizer.scheme());
    quantizer.with_range(range).started(first)
}
