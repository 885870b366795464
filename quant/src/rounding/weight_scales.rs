//! Scales that were chosen elsewhere.

use std::collections::HashMap;

use burn::module::Module;
use burn::tensor::{DType, Device, Tensor};
use burn_lean_reparam::Rejected;

use crate::fake::qparams::is_scale;
use crate::model::float_parameters;
use crate::module::walk::{self, Located, Site, quantizers};
use crate::{FakeQuantize, QuantError, QuantParams};

/// The prepared model with exactly these scales for some of its weights, by path; one for each group,
/// in row-major order of [`Scheme::group_shape`](crate::Scheme::group_shape).
///
/// They stay from now on, in records too: weights that are whole multiples of them pass through fake
/// quantization as they are, and convert to just those codes.
///
/// ```
/// use std::collections::HashMap;
/// use burn::module::{Module, Param};
/// use burn::nn::LinearConfig;
/// use burn::tensor::{Device, Tensor};
/// use burn_lean_quant::{
///     QatConfig, WeightConfig, quantized_weights, rounding::set_weight_scales,
/// };
///
/// let device = Device::flex();
/// let mut model = LinearConfig::new(2, 1).with_bias(false).init(&device);
/// model.weight = Param::from_data([[0.3], [-0.2]], &device);
/// let config = QatConfig::new().with_weight(WeightConfig::int(4)).with_activation(None);
/// let scales = HashMap::from([("weight".to_string(), vec![0.1])]);
/// let model = set_weight_scales(config.prepare(model)?, &scales)?;
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
/// [`QuantError::InvalidScale`] unless all scales are above 0 and finite, and
/// [`QuantError::UnsupportedScheme`] for an affine mapping, whose zero points are not known.
pub fn set_weight_scales<M: Module>(
    model: M,
    scales: &HashMap<String, Vec<f32>>,
) -> Result<M, Rejected<M, QuantError>> {
    match replacements(&model, scales) {
        Ok(replacements) => Ok(walk::replace(model, replacements)),
        Err(error) => Err(Rejected::new(model, error)),
    }
}

fn replacements<M: Module>(
    model: &M,
    scales: &HashMap<String, Vec<f32>>,
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
    for (path, scales) in scales {
        let parameter = float_parameters::find(&parameters, path)?;
        let located = quantizers
            .remove(path)
            .ok_or(QuantError::UnsupportedLayer {
                path: path.clone(),
                reason: "it is not fake-quantized".into(),
            })?;
        let replaced = replaced(located.quantizer, &parameter.shape, scales, &device);
        let replaced = replaced.map_err(|error| error.at(path))?;
        replacements.insert(located.path, replaced);
    }
    Ok(replacements)
}

fn replaced(
    quantizer: FakeQuantize,
    shape: &[usize],
    scales: &[f32],
    device: &Device,
) -> Result<FakeQuantize, QuantError> {
    let scheme = quantizer.scheme().clone();
    if !scheme.mapping.is_symmetric() {
        return Err(QuantError::UnsupportedScheme {
            scheme: scheme.to_string(),
            reason: "it has zero points, too; use a symmetric mapping",
        });
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
    let scale = Tensor::from_data(scales, (&device, DType::F32));
    Ok(quantizer.with_qparams(QuantParams::symmetric(scale, &scheme)))
}
