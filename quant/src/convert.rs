//! From fake-quantized weights to quantized ones.

use std::collections::HashMap;

use burn::config::Config;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::quantization::quantized_data_len;
use burn::tensor::{DType, Tensor};
use burn_lean_reparam::Rejected;
use serde::{Deserialize, Serialize};

use crate::conversion_report::{ConversionReport, ConvertedWeight, Outcome};
use crate::float_parameters;
use crate::walk::{Located, Site, quantizers};
use crate::{QuantError, QuantizedTensor, Storage};

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
    /// - The model that comes back is for inference ([`valid`](Module::valid)). Its record loads
    ///   into a model prepared the same way.
    ///
    /// # Errors
    ///
    /// Each with the model inside, as it was: [`QuantError::NothingToConvert`];
    /// [`QuantError::UnknownParameter`] for a name in [`parameters`](Self::parameters) that is no
    /// quantized weight; [`QuantError::NotQuantizing`] for a quantizer whose schedule does not
    /// quantize yet; [`QuantError::UnsupportedLayer`] for a weight that something else transforms
    /// before its quantizer does; and, of the parameter at fault, [`QuantError::NeverObserved`] and
    /// its kind, and [`QuantError::UnsupportedStorage`].
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
        let mut converter = Converter {
            path: Vec::new(),
            config: self,
            chosen: chosen
                .into_iter()
                .map(|weight| (weight.path.clone(), weight))
                .collect(),
            outcomes: Vec::new(),
            other_bytes: 0,
            error: None,
        };
        let model = model.map(&mut converter);
        match converter.error {
            Some(error) => Err(error),
            None => Ok((
                model,
                ConversionReport::new(converter.outcomes, converter.other_bytes),
            )),
        }
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

/// A weight and its quantizer.
struct QuantizedWeight {
    path: String,
    located: Located,
}

impl QuantizedWeight {
    fn new(located: &Located) -> Option<Self> {
        let is_weight = located.site == Site::Weight && located.quantizer.is_enabled();
        let path = located.parameter.clone().filter(|_| is_weight)?;
        let quantizer = located.quantizer.clone().with_path(path.clone());
        Some(Self {
            located: Located {
                quantizer,
                ..located.clone()
            },
            path,
        })
    }

    fn check(&self) -> Result<(), QuantError> {
        // Inside of a chain, only the first link sees the base.
        let behind = self.located.path[self.path.len()..].contains(".second.");
        if behind {
            return Err(QuantError::UnsupportedLayer {
                path: self.path.clone(),
                reason: "another reparameterization acts on it before its quantizer does; fold \
                         that one into the weight first"
                    .into(),
            });
        }
        let phase = self.located.quantizer.phase();
        match phase.quantizes() {
            true => Ok(()),
            false => Err(QuantError::NotQuantizing {
                phase: phase.to_string(),
            }
            .at(&self.path)),
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
    chosen: HashMap<String, QuantizedWeight>,
    outcomes: Vec<ConvertedWeight>,
    /// Bytes of everything that is not converted.
    other_bytes: usize,
    error: Option<QuantError>,
}

impl Converter<'_> {
    fn convert<const D: usize>(
        &mut self,
        weight: &QuantizedWeight,
        base: Tensor<D>,
    ) -> Result<Tensor<D>, QuantError> {
        let quantizer = &weight.located.quantizer;
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
        let qparams = quantizer.qparams_for(&base)?;
        let quantized = QuantizedTensor::quantize(&base, &qparams, quantizer.scheme())?;
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
            let dtype = param.base().dtype();
            self.other_bytes += match dtype {
                DType::QFloat(scheme) => quantized_data_len(&scheme, &param.shape()),
                _ => param.shape().num_elements() * dtype.size(),
            };
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

    fn map_int<const D: usize>(
        &mut self,
        param: Param<Tensor<D, burn::tensor::Int>>,
    ) -> Param<Tensor<D, burn::tensor::Int>> {
        self.other_bytes += param.lazy_shape().num_elements() * 4;
        param
    }
}

/// The quantized weights of a prepared or converted model, with their paths.
///
/// # Errors
///
/// As [`ConvertConfig::convert`], without the storage.
pub fn quantized_weights<M: Module>(
    model: &M,
) -> Result<Vec<(String, QuantizedTensor)>, QuantError> {
    let weights: Vec<QuantizedWeight> = quantizers(model)
        .iter()
        .filter_map(QuantizedWeight::new)
        .collect();
    for weight in &weights {
        weight.check()?;
    }
    let mut reader = Reader {
        path: Vec::new(),
        weights: weights
            .into_iter()
            .map(|weight| (weight.path.clone(), weight))
            .collect(),
        found: Vec::new(),
    };
    model.visit(&mut reader);
    reader
        .found
        .into_iter()
        .map(|(path, tensor)| match tensor {
            Ok(tensor) => Ok((path, tensor)),
            Err(located @ QuantError::Parameter { .. }) => Err(located),
            Err(error) => Err(error.at(path)),
        })
        .collect()
}

struct Reader {
    path: Vec<String>,
    weights: HashMap<String, QuantizedWeight>,
    found: Vec<(String, Result<QuantizedTensor, QuantError>)>,
}

impl ModuleVisitor for Reader {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let path = self.path.join(".");
        let Some(weight) = self.weights.remove(&path) else {
            return;
        };
        let quantizer = &weight.located.quantizer;
        let base = param.base().without_autodiff();
        let quantized = match base.dtype() {
            DType::QFloat(_) => QuantizedTensor::from_burn(base, quantizer.scheme()),
            _ => quantizer
                .qparams_for(&base)
                .and_then(|qparams| QuantizedTensor::quantize(&base, &qparams, quantizer.scheme())),
        };
        self.found.push((path, quantized));
    }
}
