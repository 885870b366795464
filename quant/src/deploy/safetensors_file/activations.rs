//! What a file says of activations.

use std::collections::BTreeMap;

use burn::module::Module;
use burn::tensor::{DType, Device, Tensor, TensorData};
use serde::{Deserialize, Serialize};

use super::FileError;
use crate::module::walk::{Located, Site, quantizers};
use crate::range::observer::{ObserverConfig, read};
use crate::{FakeQuantize, FakeQuantizeConfig, Granularity, QuantError, QuantParams, Scheme};

/// What the metadata says about the quantizer of an activation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Activation {
    scheme: Scheme,
    /// One for each group of the scheme, F32 as JSON holds it exactly; none where it is that of the values
    /// at hand.
    scale: Vec<f64>,
    zero_point: Vec<f64>,
}

/// Of the activations of `model` whose scale and zero point are known or of the values at hand, by path of
/// the quantizer. Others have what they observed in the file.
pub(crate) fn activations<M: Module>(model: &M) -> BTreeMap<String, Activation> {
    let of = |located: Located| -> Option<(String, Activation)> {
        let quantizer = &located.quantizer;
        let mut found = Activation {
            scheme: quantizer.scheme().clone(),
            scale: Vec::new(),
            zero_point: Vec::new(),
        };
        if quantizer.keeps_range() || quantizer.has_range() {
            let QuantParams { scale, zero_point } = quantizer.qparams().ok()?;
            let numbers = |of: Tensor<1>| -> Option<Vec<f64>> {
                Some(read(of).ok()?.into_iter().map(f64::from).collect())
            };
            (found.scale, found.zero_point) = (numbers(scale)?, numbers(zero_point)?);
        }
        Some((located.path, found))
    };
    let all = quantizers(model).into_iter();
    all.filter(|located| located.site != Site::Weight)
        .filter_map(of)
        .collect()
}

impl Activation {
    /// What has this scheme, and keeps a range where the file has one.
    pub(super) fn quantizer(&self, device: &Device) -> Result<FakeQuantize, QuantError> {
        let observer = match self.scale.is_empty() {
            true => ObserverConfig::Memoryless,
            false => ObserverConfig::MinMax,
        };
        let config = FakeQuantizeConfig::new(self.scheme.clone()).with_observer(observer);
        config.validate()?;
        if self.scheme.granularity == Granularity::PerTensor && self.scale.len() > 1 {
            return Err(QuantError::InvalidConfig {
                field: "scale",
                value: format!("{:?}", self.scale),
                expected: "one number for a tensor",
            });
        }
        Ok(FakeQuantize::new(config, self.scale.len().max(1), device))
    }

    /// Whether it may be what the quantizer at `located` has.
    pub(super) fn check(
        &self,
        name: &str,
        located: &Located,
        file: &FileError<'_>,
    ) -> Result<(), QuantError> {
        let scheme = located.quantizer.scheme();
        if self.scheme != *scheme {
            let error = QuantError::ForeignScheme {
                expected: scheme.to_string(),
                found: self.scheme.to_string(),
            };
            return Err(error.at(name));
        }
        let Self {
            scale, zero_point, ..
        } = self;
        let (groups, _) = located.quantizer.groups();
        let is_dynamic = scale.is_empty() && !located.quantizer.keeps_range();
        let is_whole = scale.len() == zero_point.len() && (is_dynamic || scale.len() == groups);
        let is_step = |scale: &f64| (*scale as f32) > 0.0 && (*scale as f32).is_finite();
        let (low, high) = (scheme.quant_min(), scheme.quant_max());
        let is_code = |code: &f64| code.fract() == 0.0 && (low..=high).contains(&(*code as f32));
        match is_whole && scale.iter().all(is_step) && zero_point.iter().all(is_code) {
            true => Ok(()),
            false => Err(file.read(format!(
                "`{name}` has scales {scale:?} and zero points {zero_point:?}, not {groups} of {scheme}"
            ))),
        }
    }

    /// Scale and zero point; `None` where they are those of the values at hand.
    pub(super) fn qparams(&self, device: &Device) -> Option<QuantParams> {
        let tensor = |of: &[f64]| {
            let numbers: Vec<f32> = of.iter().map(|number| *number as f32).collect();
            let count = numbers.len();
            Tensor::from_data(TensorData::new(numbers, [count]), (device, DType::F32))
        };
        (!self.scale.is_empty()).then(|| QuantParams {
            scale: tensor(&self.scale),
            zero_point: tensor(&self.zero_point),
        })
    }
}
