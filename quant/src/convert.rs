//! From fake-quantized weights to quantized ones.

mod weights;

use std::collections::HashMap;

use burn::config::Config;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::quantization::quantized_data_len;
use burn::tensor::{DType, Int, Tensor};
use burn_lean_reparam::{Rejected, unlink_before};
use serde::{Deserialize, Serialize};

use weights::QuantizedWeight;
pub use weights::quantized_weights;

use crate::conversion_report::{ConversionReport, ConvertedWeight, Outcome};
use crate::effective::Effective;
use crate::float_parameters;
use crate::walk::{Located, Site, quantizers};
use crate::{QuantError, Storage, WeightQuantizer};

/// What to do with a weight that Burn, or the device, cannot hold quantized.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub enum Unsupported {
    /// [`QuantError::UnsupportedStorage`].
    #[default]
    Refuse,
    /// It stays an F32 weight that is fake-quantized in every forward pass.
    KeepFakeQuantized,
}

/// How [`convert`](ConvertConfig::convert) converts.
///
/// ```
/// use burn_lean_quant::{ConvertConfig, Storage};
///
/// let config = ConvertConfig::new();
/// assert_eq!(config.storage, Storage::Auto);
/// assert_eq!(config.parameters, None);
/// ```
#[derive(Config, Debug, PartialEq)]
pub struct ConvertConfig {
    /// Where the codes are kept. Default: what the device prefers.
    #[config(default = "Storage::Auto")]
    pub storage: Storage,
    /// What to do with weights that cannot be converted. Default: refuse.
    #[config(default = "Unsupported::Refuse")]
    pub unsupported: Unsupported,
    /// Paths of the weights to convert; the others stay fake-quantized. Default: all that carry a
    /// weight quantizer.
    #[config(default = "None")]
    pub parameters: Option<Vec<String>>,
}

impl Default for ConvertConfig {
    fn default() -> Self {
        Self::new()
    }
}

impl ConvertConfig {
    /// Replaces the fake-quantized weights of `model` by quantized tensors of Burn.
    ///
    /// - Scales are the trained ones, to the bit: nothing is calibrated again. A converted weight
    ///   dequantizes to exactly the values that fake quantization gave it, which is checked on the
    ///   device.
    /// - Activation quantizers stay where they are, with their ranges.
    /// - Only weights that carry a quantizer are converted: never biases, norms or running
    ///   statistics.
    /// - In a [`Chain`](burn_lean_reparam::Chain), what acts before the quantizer becomes part of
    ///   the codes and is taken off: of a weight with a pruning mask before its quantizer, the
    ///   codes of the pruned elements stand for exactly 0, and the mask is gone. What acts after
    ///   the quantizer stays; what a mask hides there becomes 0 in the codes, too.
    /// - The model that comes back is for inference ([`valid`](Module::valid)). Its record loads
    ///   into a model prepared the same way; where masks were taken off, into a chain of no masks
    ///   and the same quantizers. [Files](crate::save_safetensors) load into either.
    ///
    /// # Errors
    ///
    /// Each with the model inside, as it was: [`QuantError::NothingToConvert`];
    /// [`QuantError::UnknownParameter`] for a name in [`parameters`](Self::parameters) that is no
    /// quantized weight; [`QuantError::NotQuantizing`] for a quantizer whose schedule does not
    /// quantize yet; [`QuantError::UnsupportedLayer`] for a weight that would no longer be the one
    /// of the forward pass, for what acts on it after its quantizer; and, of the parameter at
    /// fault, [`QuantError::NeverObserved`] and its kind, and [`QuantError::UnsupportedStorage`].
    /// On wgpu that is common: four codes in a word must share a scale there, so that a kernel of
    /// three input channels and 3 x 3 positions, quantized per channel, stays fake-quantized or is
    /// refused.
    pub fn convert<M: Module>(
        &self,
        model: M,
    ) -> Result<(M, ConversionReport), Rejected<M, QuantError>> {
        match self.try_convert(&model) {
            Ok(converted) => Ok(converted),
            Err(error) => Err(Rejected::new(model, error)),
        }
    }

    fn try_convert<M: Module>(&self, model: &M) -> Result<(M, ConversionReport), QuantError> {
        let all = quantizers(model);
        check_activations(&all)?;
        let mut chosen = self.choose(model, &all)?;
        let model = model.valid();
        for weight in &mut chosen {
            weight.check()?;
        }
        let effective = Effective::of(&model);
        let mut converter = Converter {
            path: Vec::new(),
            config: self,
            effective: &effective,
            chosen: chosen
                .into_iter()
                .map(|weight| (weight.path.clone(), weight))
                .collect(),
            outcomes: Vec::new(),
            error: None,
        };
        let model = model.map(&mut converter);
        if let Some(error) = converter.error {
            return Err(error);
        }
        let outcomes = converter.outcomes;
        let model = unlink_before::<WeightQuantizer, _>(model, |path| {
            let weight = outcomes.iter().find(|weight| weight.path == path);
            weight.is_some_and(|weight| matches!(weight.outcome, Outcome::Converted { .. }))
        });
        if let Some(path) = effective.first_difference(&Effective::of(&model))? {
            return Err(QuantError::UnsupportedLayer {
                path: path.to_string(),
                reason: "what acts on it after its quantizer gives other values for the converted \
                         weight; fold that into the weight first"
                    .into(),
            });
        }
        let mut others = OtherBytes {
            path: Vec::new(),
            weights: &outcomes,
            bytes: 0,
        };
        model.visit(&mut others);
        let other_bytes = others.bytes;
        Ok((model, ConversionReport::new(outcomes, other_bytes)))
    }

    /// The weights to convert.
    fn choose<M: Module>(
        &self,
        model: &M,
        all: &[Located],
    ) -> Result<Vec<QuantizedWeight>, QuantError> {
        let weights: Vec<QuantizedWeight> = all.iter().filter_map(QuantizedWeight::new).collect();
        let chosen: Vec<QuantizedWeight> = match &self.parameters {
            None => weights,
            Some(names) => {
                for name in names {
                    if !weights.iter().any(|weight| weight.path == *name) {
                        // Known or not: what similar names are there?
                        float_parameters::find(&float_parameters::list(model), name)?;
                        return Err(QuantError::UnsupportedLayer {
                            path: name.clone(),
                            reason: "it carries no weight quantizer; prepare it first".into(),
                        });
                    }
                }
                let named = weights.into_iter();
                named
                    .filter(|weight| names.contains(&weight.path))
                    .collect()
            }
        };
        match chosen.is_empty() {
            true => Err(QuantError::NothingToConvert),
            false => Ok(chosen),
        }
    }
}

/// A range must be known wherever activations are quantized: without it, values pass through and
/// the converted model would not be the one that was trained.
fn check_activations(all: &[Located]) -> Result<(), QuantError> {
    let activations = all.iter().filter(|located| {
        located.site != Site::Weight
            && located.quantizer.is_enabled()
            && located.quantizer.has_static_range()
    });
    for located in activations {
        let quantizer = located.quantizer.clone().with_path(located.name());
        quantizer.qparams()?;
    }
    Ok(())
}

struct Converter<'a> {
    path: Vec<String>,
    config: &'a ConvertConfig,
    effective: &'a Effective,
    chosen: HashMap<String, QuantizedWeight>,
    outcomes: Vec<ConvertedWeight>,
    error: Option<QuantError>,
}

impl Converter<'_> {
    fn convert<const D: usize>(
        &mut self,
        weight: &QuantizedWeight,
        base: Tensor<D>,
    ) -> Result<Tensor<D>, QuantError> {
        let quantizer = &weight.quantizer;
        let mut report = ConvertedWeight {
            path: weight.path.clone(),
            scheme: quantizer.scheme().to_string(),
            shape: base.dims().to_vec(),
            outcome: Outcome::AlreadyConverted,
            bytes: 0,
            packed_bytes: 0,
            mismatch: None,
        };
        if let DType::QFloat(scheme) = base.dtype() {
            report.bytes = quantized_data_len(&scheme, &base.shape());
            report.packed_bytes = report.bytes;
            self.outcomes.push(report);
            return Ok(base);
        }
        let quantized = weight.quantize(base.clone(), self.effective)?;
        report.packed_bytes = quantized.packed_bytes();
        let (tensor, outcome) = match quantized.to_burn::<D>(&base.device(), self.config.storage) {
            Ok(tensor) => {
                let outcome = match tensor.dtype() {
                    DType::QFloat(scheme) => {
                        report.bytes = quantized_data_len(&scheme, &tensor.shape());
                        Outcome::Converted {
                            value: format!("{:?}", scheme.value),
                            store: format!("{:?}", scheme.store),
                        }
                    }
                    _ => Outcome::AlreadyConverted,
                };
                (tensor, outcome)
            }
            Err(QuantError::UnsupportedStorage { reason, .. })
                if self.config.unsupported == Unsupported::KeepFakeQuantized =>
            {
                report.bytes = base.shape().num_elements() * base.dtype().size();
                (base, Outcome::KeptFakeQuantized { reason })
            }
            Err(error) => return Err(error),
        };
        report.outcome = outcome;
        self.outcomes.push(report);
        Ok(tensor)
    }
}

impl ModuleMapper for Converter<'_> {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if self.error.is_some() {
            return param;
        }
        let path = self.path.join(".");
        let Some(weight) = self.chosen.remove(&path) else {
            return param;
        };
        param.map(|base| match self.convert(&weight, base.clone()) {
            Ok(tensor) => tensor,
            Err(error) => {
                self.error = Some(match error {
                    located @ QuantError::Parameter { .. } => located,
                    error => error.at(&path),
                });
                base
            }
        })
    }
}

/// Counts the bytes of everything that is not converted.
struct OtherBytes<'a> {
    path: Vec<String>,
    weights: &'a [ConvertedWeight],
    bytes: usize,
}

impl ModuleVisitor for OtherBytes<'_> {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let path = self.path.join(".");
        if self.weights.iter().any(|weight| weight.path == path) {
            return;
        }
        let dtype = param.base().dtype();
        self.bytes += match dtype {
            DType::QFloat(scheme) => quantized_data_len(&scheme, &param.shape()),
            _ => param.shape().num_elements() * dtype.size(),
        };
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.bytes += param.lazy_shape().num_elements() * 4;
    }
}
