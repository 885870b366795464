//! Scales and zero points that were chosen elsewhere.

use std::collections::HashMap;

use burn::module::Module;
use burn::tensor::{DType, Device, Tensor};
use burn_lean_reparam::Rejected;

use crate::fake::qparams::is_scale;
use crate::model::float_parameters;
use crate::module::walk::{self, Located, Site, quantizers};
use crate::{FakeQuantize, QuantError, QuantParams};

/// Scale and zero point of each group of a weight, in row-major order of
/// [`Scheme::group_shape`](crate::Scheme::group_shape).
#[derive(Debug, Clone, PartialEq, Default)]
pub struct GroupParams {
    /// Real values of one step, above 0.
    pub scales: Vec<f32>,
    /// Codes that stand for 0.0, as many; empty for a symmetric mapping.
    pub zero_points: Vec<f32>,
}

impl From<Vec<f32>> for GroupParams {
    /// Of scales alone, for a symmetric mapping.
    fn from(scales: Vec<f32>) -> Self {
        Self {
            scales,
            zero_points: Vec::new(),
        }
    }
}

/// The prepared model with exactly these scales and zero points for some of its weights, by path.
///
/// They stay from now on, in training and in records too, until a [`calibrate`](crate::calibrate) of weights whose
/// observer has a memory: weights that are whole multiples of them pass through fake
/// quantization as they are, and convert to just those codes.
///
/// ```
/// use std::collections::HashMap;
/// use burn::module::{Module, Param};
/// use burn::nn::LinearConfig;
/// use burn::tensor::{Device, Tensor};
/// use burn_lean_quant::{
///     QatConfig, WeightConfig, quantized_weights, rounding::set_weight_qparams,
/// };
///
/// let device = Device::flex();
/// let mut model = LinearConfig::new(2, 1).with_bias(false).init(&device);
/// model.weight = Param::from_data([[0.3], [-0.2]], &device);
/// let config = QatConfig::new().with_weight(WeightConfig::int(4)).with_activation(None);
/// let scales = HashMap::from([("weight".to_string(), vec![0.1_f32].into())]);
/// let model = set_weight_qparams(config.prepare(model)?, &scales)?;
/// // The range of the values would have given 7 and −5.
/// assert_eq!(quantized_weights(&model)?[0].1.codes(), [3, -2]);
/// # Ok::<(), burn_lean_quant::QuantError>(())
/// ```
///
/// # Errors
///
/// Each with the model inside, as it was: [`QuantError::UnknownParameter`] for a path that the model
/// lacks; of the parameter at fault [`QuantError::UnsupportedLayer`] for one that is not
/// fake-quantized, [`QuantError::LengthMismatch`] for another number of groups,
/// [`QuantError::InvalidScale`] unless all scales are above 0 and finite,
/// [`QuantError::UnsupportedScheme`] for an affine mapping without zero points and
/// a symmetric one with them, [`QuantError::InvalidConfig`] for a zero point that is no code.
pub fn set_weight_qparams<M: Module>(
    model: M,
    qparams: &HashMap<String, GroupParams>,
) -> Result<M, Rejected<M, QuantError>> {
    match replacements(&model, qparams) {
        Ok(replacements) => Ok(walk::replace(model, replacements)),
        Err(error) => Err(Rejected::new(model, error)),
    }
}

fn replacements<M: Module>(
    model: &M,
    qparams: &HashMap<String, GroupParams>,
) -> Result<HashMap<String, FakeQuantize>, QuantError> {
    let parameters = float_parameters::list(model);
    let devices = model.devices();
    let device = devices.first().cloned().unwrap_or_default();
    let mut quantizers: HashMap<String, Located> = quantizers(model)
        .into_iter()
        .filter(|located| located.site == Site::Weight && located.quantizer.is_enabled())
        .filter_map(|located| Some((located.parameter.clone()?, located)))
        .collect();
    let mut replacements = HashMap::new();
    for (path, qparams) in qparams {
        let parameter = float_parameters::find(&parameters, path)?;
        let located = quantizers
            .remove(path)
            .ok_or(QuantError::UnsupportedLayer {
                path: path.clone(),
                reason: "it is not fake-quantized".into(),
            })?;
        let replaced = replaced(located.quantizer, &parameter.shape, qparams, &device);
        let replaced = replaced.map_err(|error| error.at(path))?;
        replacements.insert(located.path, replaced);
    }
    Ok(replacements)
}

fn replaced(
    quantizer: FakeQuantize,
    shape: &[usize],
    qparams: &GroupParams,
    device: &Device,
) -> Result<FakeQuantize, QuantError> {
    let GroupParams {
        scales,
        zero_points,
    } = qparams;
    let scheme = quantizer.scheme().clone();
    let refused = |reason| QuantError::UnsupportedScheme {
        scheme: scheme.to_string(),
        reason,
    };
    match (scheme.mapping.is_symmetric(), zero_points.is_empty()) {
        (false, true) => return Err(refused("it has zero points, too; use a symmetric mapping")),
        (true, false) => return Err(refused("it has no zero points; use an affine mapping")),
        _ => {}
    }
    let groups = scheme.group_count(shape)?;
    QuantError::expect_len("scales", groups, scales.len())?;
    if let Some(bad) = scales.iter().find(|scale| !is_scale(**scale)) {
        return Err(QuantError::InvalidScale {
            what: "the weight".into(),
            value: *bad,
        });
    }
    let device = device.clone().without_autodiff();
    let tensor = |numbers: &[f32]| Tensor::from_data(numbers, (&device, DType::F32));
    let scale = tensor(scales);
    if zero_points.is_empty() {
        return Ok(quantizer.with_qparams(QuantParams::symmetric(scale, &scheme)));
    }
    QuantError::expect_len("zero points", groups, zero_points.len())?;
    let codes = scheme.quant_min()..=scheme.quant_max();
    let is_code = |zero: &&f32| codes.contains(*zero) && zero.fract() == 0.0;
    if let Some(bad) = zero_points.iter().find(|zero| !is_code(zero)) {
        return Err(QuantError::InvalidConfig {
            field: "zero_points",
            value: bad.to_string(),
            expected: "codes of the format",
        });
    }
    let zero_point = tensor(zero_points);
    Ok(quantizer.with_qparams(QuantParams { scale, zero_point }))
}
