//! The weights that carry a quantizer, and their codes.

use std::collections::HashMap;

use burn::module::{Module, Param};
use burn::tensor::{DType, Tensor};
use burn_lean_reparam::{FloatVisitor, visit_floats};

use crate::module::effective::Effective;
use crate::module::walk::{Located, Site, quantizers};
use crate::{FakeQuantize, QuantError, QuantizedTensor};

/// A weight and its quantizer.
pub(crate) struct QuantizedWeight {
    pub(crate) path: String,
    pub(crate) quantizer: FakeQuantize,
}

impl QuantizedWeight {
    pub(crate) fn new(located: &Located) -> Option<Self> {
        let is_weight = located.site == Site::Weight && located.quantizer.is_enabled();
        let path = located.parameter.clone().filter(|_| is_weight)?;
        let quantizer = located.quantizer.clone().with_path(path.clone());
        Some(Self { path, quantizer })
    }

    pub(crate) fn check(&self) -> Result<(), QuantError> {
        let phase = self.quantizer.phase();
        match phase.quantizes() {
            true => Ok(()),
            false => Err(QuantError::NotQuantizing {
                phase: phase.to_string(),
            }
            .at(&self.path)),
        }
    }

    /// The codes of the weight that is stored as `base`.
    pub(crate) fn quantize<const D: usize>(
        &self,
        base: Tensor<D>,
        effective: &Effective,
    ) -> Result<QuantizedTensor, QuantError> {
        Ok(self.quantize_seen(base, effective)?.0)
    }

    /// The codes, and whether the forward pass sees the values of these codes.
    fn quantize_seen<const D: usize>(
        &self,
        base: Tensor<D>,
        effective: &Effective,
    ) -> Result<Seen, QuantError> {
        let given = effective.given(&self.path, base);
        let qparams = self.quantizer.qparams_for(&given)?;
        let scheme = self.quantizer.scheme();
        let quantized = QuantizedTensor::quantize(&given, &qparams, scheme)?;
        let Some(seen) = effective.value(&self.path)? else {
            return Ok((quantized, true));
        };
        let values = quantized.dequantize::<D>(&given.device())?.try_into_data();
        let values = values.map_err(QuantError::device)?;
        let values: Vec<f32> = values.iter::<f32>().collect();
        // What a mask behind the quantizer hides becomes a code of zero. Anything else that acts
        // there goes on acting on the values.
        let is_mask = |(value, seen): (&f32, &f32)| *seen == 0.0 || value == seen;
        match values.iter().zip(&seen).all(is_mask) {
            true => Ok((
                quantized.with_zeros(seen.iter().map(|seen| *seen == 0.0))?,
                true,
            )),
            false => Ok((quantized, false)),
        }
    }
}

/// The quantized weights of a prepared or converted model, with their paths.
///
/// Where something acts behind a quantizer, a low-rank adapter say, it is not in the codes:
/// [`seen_weights`] says of which that is so.
///
/// # Errors
///
/// As [`ConvertConfig::convert`](crate::ConvertConfig::convert), without the storage.
pub fn quantized_weights<M: Module>(
    model: &M,
) -> Result<Vec<(String, QuantizedTensor)>, QuantError> {
    let mut found = Vec::new();
    each_weight(model, |path, codes, _| {
        found.push((path.to_string(), codes));
        Ok(())
    })?;
    Ok(found)
}

/// [`quantized_weights`], and of each whether the forward pass sees the values of its codes: it does not
/// where something other than a mask acts behind the quantizer.
///
/// # Errors
///
/// As [`quantized_weights`].
pub fn seen_weights<M: Module>(
    model: &M,
) -> Result<Vec<(String, QuantizedTensor, bool)>, QuantError> {
    let mut found = Vec::new();
    each_weight(model, |path, codes, is_seen| {
        found.push((path.to_string(), codes, is_seen));
        Ok(())
    })?;
    Ok(found)
}

/// Calls `each` with what [`seen_weights`] has of each weight, one after the other: codes take several
/// times the bytes that they are packed to.
///
/// # Errors
///
/// As [`quantized_weights`], and those of `each`.
pub(crate) fn each_weight<M: Module>(
    model: &M,
    each: impl FnMut(&str, QuantizedTensor, bool) -> Result<(), QuantError>,
) -> Result<(), QuantError> {
    let weights: Vec<QuantizedWeight> = quantizers(model)
        .iter()
        .filter_map(QuantizedWeight::new)
        .collect();
    for weight in &weights {
        weight.check()?;
    }
    let mut reader = Reader {
        effective: Effective::of(model),
        weights: weights
            .into_iter()
            .map(|weight| (weight.path.clone(), weight))
            .collect(),
        each,
        error: None,
    };
    visit_floats(model, &mut reader);
    reader.error.map_or(Ok(()), Err)
}

/// The codes of a weight, and whether the forward pass sees their values.
type Seen = (QuantizedTensor, bool);

struct Reader<F> {
    effective: Effective,
    weights: HashMap<String, QuantizedWeight>,
    each: F,
    error: Option<QuantError>,
}

impl<F: FnMut(&str, QuantizedTensor, bool) -> Result<(), QuantError>> FloatVisitor for Reader<F> {
    fn visit<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>) {
        if self.error.is_some() {
            return;
        }
        let Some(weight) = self.weights.remove(path) else {
            return;
        };
        let base = param.base().without_autodiff();
        let quantized = match base.dtype() {
            DType::QFloat(_) => {
                QuantizedTensor::from_stored(base, &weight.quantizer).map(|codes| (codes, true))
            }
            _ => weight.quantize_seen(base, &self.effective),
        };
        let done = quantized.and_then(|(codes, is_seen)| (self.each)(path, codes, is_seen));
        self.error = done.err().map(|error| match error {
            QuantError::Parameter { .. } => error,
            error => error.at(path),
        });
    }
}
