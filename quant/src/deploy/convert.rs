//! From fake-quantized weights to quantized ones.

mod other_bytes;

use std::collections::{HashMap, HashSet};

use burn::config::Config;
use burn::module::{Module, Param};
use burn::tensor::quantization::quantized_data_len;
use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_lean_reparam::{PathMapper, Rejected, Trail, map_with_path, unlink_before};
use serde::{Deserialize, Serialize};

pub(crate) use other_bytes::OtherBytes;

use crate::codes::product::{Factors, Layer, Speeds, in_product};
use crate::codes::stored::{NotStored, Stored};
use crate::codes::weights::QuantizedWeight;
use crate::deploy::conversion_report::{ConversionReport, ConvertedWeight, Outcome};
use crate::fake::op::to_dtype;
use crate::model::called::uncalled;
use crate::model::unobserved::{Activations, Unobserved, leave_float, rounding, without_range};
use crate::module::effective::Effective;
use crate::module::walk::{map_quantizers, quantizers};
use crate::{Dequantize, QuantError, QuantParams, QuantizedTensor, Site, WeightQuantizer};

/// What to do with a weight that Burn, or the device, cannot hold quantized.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Unsupported {
    /// [`QuantError::UnsupportedStorage`].
    #[default]
    Refuse,
    /// It stays a float weight, of the values that fake quantization gave it. A
    /// [file](crate::save_safetensors) holds its codes all the same.
    KeepFakeQuantized,
}

/// How [`convert`](ConvertConfig::convert) converts.
///
/// ```
/// use burn_lean_quant::{ConvertConfig, Dequantize};
///
/// let config = ConvertConfig::new();
/// assert_eq!(config.dequantize, Dequantize::Once);
/// ```
#[derive(Config, Debug, PartialEq)]
pub struct ConvertConfig {
    /// What to do with weights that cannot be converted. Default: refuse.
    #[config(default = "Unsupported::Refuse")]
    pub unsupported: Unsupported,
    /// When the float values of a converted weight are computed: once, which is as fast as the float
    /// model and keeps them beside the codes; at every use, which keeps the codes alone; or not at all
    /// where the product of the device reads codes. Default: once.
    #[config(default = "Dequantize::Once")]
    pub dequantize: Dequantize,
    /// What to do with activations that were never observed. Default: refuse.
    #[config(default = "Unobserved::Refuse")]
    pub unobserved: Unobserved,
    /// Whether activations are rounded in every call of the converted model in Burn, which takes time,
    /// or stay float. Default: rounded, as in training.
    #[config(default = "Activations::Rounded")]
    pub activations: Activations,
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
    /// - Activation quantizers stay where they are, with their ranges. One that no value ever came
    ///   by is refused, or switched off and reported: see [`unobserved`](Self::unobserved). Whether
    ///   the forward pass of the deployed model comes by, only
    ///   [`convert_with`](Self::convert_with) sees.
    /// - Weights keep the dtype of their values: an F16 model stays one.
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
    /// [`QuantError::NotQuantizing`] for a quantizer whose schedule does not
    /// quantize yet; [`QuantError::UnsupportedLayer`] for a weight that would no longer be the one
    /// of the forward pass, for what acts on it after its quantizer; and, of the parameter at
    /// fault, [`QuantError::NeverObserved`], [`QuantError::NeverCalled`] and their kind (of several
    /// activations as [`QuantError::Several`]), and [`QuantError::UnsupportedStorage`].
    /// To recover from activations that were never observed without training again, call their
    /// layers with `forward_q` and give them their ranges by
    /// [`calibrate_unobserved`](crate::qat::calibrate_unobserved): what was trained stays as it is.
    ///
    /// On wgpu that is common: four codes in a word must share a scale there, so that a kernel of
    /// three input channels and 3 x 3 positions, quantized per channel, stays fake-quantized or is
    /// refused.
    ///
    /// Codes that a GPU packs along another axis than the last (of linear layers, for example) Burn's flex does not hold:
    /// move a model there before it is converted, or by a [file](crate::save_safetensors); `to_device` and Burn's
    /// record of the converted one panic in Burn.
    pub fn convert<M: Module>(
        &self,
        model: M,
    ) -> Result<(M, ConversionReport), Rejected<M, QuantError>> {
        self.try_convert(&model, None)
            .map_err(|error| Rejected::new(model, error))
    }

    /// As [`convert`](Self::convert), for a model that is deployed with this forward pass, called as
    /// it is, without [`QuantizedForward`](crate::QuantizedForward).
    ///
    /// `forward` gets the model and the device to create its inputs on; nothing is computed.
    /// Activations whose quantizer it does not call, since a layer is called with
    /// its plain `forward`, count as never observed, whatever was observed in training. A quantizer
    /// that takes the range of the values at hand needs no other call.
    ///
    /// # Errors
    ///
    /// As [`convert`](Self::convert), and [`QuantError::Graph`].
    pub fn convert_with<M: Module, O>(
        &self,
        model: M,
        forward: impl FnOnce(&M, &Device) -> O,
    ) -> Result<(M, ConversionReport), Rejected<M, QuantError>> {
        let converted = uncalled(&model, forward)
            .and_then(|uncalled| self.try_convert(&model, Some(&uncalled)));
        converted.map_err(|error| Rejected::new(model, error))
    }

    /// `unused` are the paths of the quantizers that the forward pass does not come by, if it is
    /// known.
    fn try_convert<M: Module>(
        &self,
        model: &M,
        unused: Option<&[String]>,
    ) -> Result<(M, ConversionReport), QuantError> {
        let all = quantizers(model);
        let left_float = match self.activations {
            Activations::Rounded => self.unobserved.judge(without_range(&all, unused))?,
            Activations::Float => Activations::left(&all),
        };
        let mut chosen: Vec<QuantizedWeight> =
            all.iter().filter_map(QuantizedWeight::new).collect();
        if chosen.is_empty() {
            return Err(QuantError::NothingToConvert);
        }
        let model = leave_float(model.valid(), &left_float);
        for weight in &mut chosen {
            weight.check()?;
        }
        let effective = Effective::of(&model);
        let mut converter = Converter {
            config: self,
            effective: &effective,
            rounding: rounding(&model),
            factors: Factors::of_all(&quantizers(&model)),
            chosen: chosen
                .into_iter()
                .map(|weight| (weight.path.clone(), weight))
                .collect(),
            outcomes: Vec::new(),
            dtypes: HashMap::new(),
            exact: HashMap::new(),
            codes: HashMap::new(),
            held: HashSet::new(),
            speeds: Speeds::of(model.num_params()),
            error: None,
        };
        let model = map_with_path(model, &mut converter);
        if let Some(error) = converter.error {
            return Err(error);
        }
        let Converter {
            outcomes,
            mut dtypes,
            mut exact,
            mut codes,
            held,
            ..
        } = converter;
        let model = unlink_before::<WeightQuantizer, _>(model, |path| {
            let weight = outcomes.iter().find(|weight| weight.path == path);
            weight.is_some_and(|weight| matches!(weight.outcome, Outcome::Converted { .. }))
        });
        let model = map_quantizers(model, |located| {
            let parameter = located.parameter.filter(|_| located.site == Site::Weight);
            let dtype = parameter.as_ref().and_then(|path| dtypes.remove(path));
            let exact = parameter.as_ref().and_then(|path| exact.remove(path));
            let codes = parameter.as_ref().and_then(|path| codes.remove(path));
            let is_held = parameter.as_ref().is_some_and(|path| held.contains(path));
            let mut quantizer = located.quantizer;
            if let Some((dtype, dequantize)) = dtype {
                quantizer = quantizer.with_dtype(dtype).with_dequantize(dequantize);
            }
            match (exact, codes) {
                (_, Some(qparams)) => quantizer.with_codes(qparams),
                (Some(qparams), None) => quantizer.with_qparams(qparams),
                // Burn's tensor has the scales; in a record its range would take as much again.
                (None, None) if is_held => quantizer.without_range(),
                (None, None) => quantizer,
            }
        });
        if let Some(path) = effective.first_difference(&Effective::of(&model))? {
            return Err(QuantError::UnsupportedLayer {
                path: path.to_string(),
                reason: "what acts on it after its quantizer gives other values for the converted \
                         weight; fold that into the weight first"
                    .into(),
            });
        }
        let others = OtherBytes::of(&model, &outcomes);
        let report = ConversionReport::new(outcomes, others, left_float);
        Ok((model, report))
    }
}

struct Converter<'a> {
    config: &'a ConvertConfig,
    effective: &'a Effective,
    /// Weights of layers that round activations.
    rounding: HashSet<String>,
    /// By path of the weight.
    factors: HashMap<String, Factors>,
    chosen: HashMap<String, QuantizedWeight>,
    outcomes: Vec<ConvertedWeight>,
    /// Of the weights that were converted now, by path: the dtype of their values, and when those are
    /// computed.
    dtypes: HashMap<String, (FloatDType, Dequantize)>,
    /// Scales and zero points of those that are held as the floats of their codes.
    exact: HashMap<String, QuantParams>,
    /// Scales and zero points of those that are stored as codes.
    codes: HashMap<String, QuantParams>,
    /// Those that Burn's quantized tensors hold, scales and all.
    held: HashSet<String>,
    speeds: Speeds,
    error: Option<QuantError>,
}

impl Converter<'_> {
    fn convert<const D: usize>(
        &mut self,
        weight: &QuantizedWeight,
        base: Tensor<D>,
        at: &Trail,
    ) -> Result<Tensor<D>, QuantError> {
        let quantizer = &weight.quantizer;
        let mut report = ConvertedWeight::new(
            &weight.path,
            quantizer.scheme(),
            &base.dims(),
            Outcome::AlreadyConverted,
            self.config.dequantize,
        );
        report.rounds_activations = self.rounding.contains(&weight.path);
        let float_bytes =
            |dtype: FloatDType| base.shape().num_elements() * DType::from(dtype).size();
        if let DType::QFloat(scheme) = base.dtype() {
            let known = quantizer.dequantize();
            report.dequantize = known.unwrap_or_default();
            report.bytes = quantized_data_len(&scheme, &base.shape());
            let quantized = QuantizedTensor::from_stored(base.clone(), quantizer)?;
            report.packed_bytes = quantized.packed_bytes();
            let mut kernel = 0;
            if known == Some(Dequantize::InProduct) {
                let held = match quantizer.is_stored_as_codes() {
                    true => Stored::Codes(base.clone()),
                    false => Stored::Values(base.clone()),
                };
                let factors = self.factors.get(&weight.path).copied();
                let layer = Layer::at(at, quantizer.dtype(), factors);
                let asked = Dequantize::InProduct;
                let looked_at = in_product(Some(&held), &quantized, layer, asked, &mut self.speeds);
                kernel = report.take(looked_at);
                let known = (quantizer.dtype(), report.dequantize);
                self.dtypes.insert(weight.path.clone(), known);
            }
            report.hold_values(float_bytes(quantizer.dtype()));
            report.resident_bytes += kernel;
            self.outcomes.push(report);
            return Ok(base);
        }
        let dtype = FloatDType::from(base.dtype());
        let values_bytes = float_bytes(dtype);
        let quantized = weight.quantize(base.clone(), self.effective)?;
        report.packed_bytes = quantized.packed_bytes();
        let device = base.device();
        let stored = quantized.store::<D>(&device);
        let keep = self.config.unsupported == Unsupported::KeepFakeQuantized;
        let kept = match stored {
            Ok(stored) => Ok(stored),
            // Nothing would be gained, so that nothing is refused.
            Err(NotStored::NoSmaller(reason)) => Err(reason),
            Err(NotStored::Error(QuantError::UnsupportedStorage { reason, .. })) if keep => {
                Err(reason)
            }
            Err(NotStored::Error(error)) => return Err(error),
        };
        let mut kernel = 0;
        if report.dequantize == Dequantize::InProduct {
            let looked_at = match self.effective.is_chained(&weight.path) {
                true => Err("it is in a chain of reparameterizations".into()),
                false => {
                    let factors = self.factors.get(&weight.path).copied();
                    let layer = Layer::at(at, dtype, factors);
                    let (held, asked) = (kept.as_ref().ok(), report.dequantize);
                    in_product(held, &quantized, layer, asked, &mut self.speeds)
                }
            };
            kernel = report.take(looked_at);
        }
        let path = weight.path.clone();
        let (tensor, outcome) = match kept {
            Ok(stored) => {
                let tensor = match stored {
                    Stored::Values(values) => {
                        self.held.insert(path.clone());
                        values
                    }
                    Stored::Codes(codes) => {
                        self.codes.insert(path.clone(), quantized.qparams(&device));
                        codes
                    }
                };
                if let DType::QFloat(scheme) = tensor.dtype() {
                    report.bytes = quantized_data_len(&scheme, &tensor.shape());
                }
                let outcome = Outcome::of(&tensor);
                (tensor, outcome)
            }
            Err(reason) => {
                report.bytes = values_bytes;
                let outcome = Outcome::KeptFakeQuantized { reason };
                // What acts before the quantizer in a chain goes on acting.
                match self.effective.is_chained(&path) {
                    true => (base, outcome),
                    false => {
                        self.exact.insert(path, quantized.qparams(&device));
                        let values = quantized.dequantize::<D>(&device)?;
                        (to_dtype(values, dtype), outcome)
                    }
                }
            }
        };
        let known = (dtype, report.dequantize);
        self.dtypes.insert(weight.path.clone(), known);
        report.outcome = outcome;
        report.resident_bytes = report.bytes;
        // Floats that are on their grid are not kept twice.
        if !self.exact.contains_key(&weight.path) {
            report.hold_values(values_bytes);
        }
        report.resident_bytes += kernel;
        self.outcomes.push(report);
        Ok(tensor)
    }
}

impl PathMapper for Converter<'_> {
    fn float<const D: usize>(&mut self, at: &Trail, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if self.error.is_some() {
            return param;
        }
        let path = at.path();
        let Some(weight) = self.chosen.remove(&path) else {
            return param;
        };
        param.map(|base| match self.convert(&weight, base.clone(), at) {
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
