//! Factors between a layer and those that follow it, written into a model.

use std::collections::HashMap;

use burn::module::Module;
use burn::tensor::TensorData;
use burn_lean_reparam::Rejected;
use serde::{Deserialize, Serialize};

use crate::QuantError;
use crate::fake::qparams::is_scale;
use crate::fold::refuse_reparameterized;
use crate::model::channel_layout::ChannelLayout;
use crate::model::float_parameters::{self, FloatParameter};

/// Factors for the features that flow from one module to others.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Rescale {
    /// Path of the module whose output features are divided: a normalization, or a linear or
    /// convolution layer. Between it and the consumers only functions with `f(c · x) = c · f(x)` for
    /// `c > 0` may stand, such as ReLU.
    pub producer: String,
    /// Paths of *all* linear and convolution layers that read them; their weights are multiplied.
    pub consumers: Vec<String>,
    /// One positive factor for each feature.
    pub factors: Vec<f32>,
}

/// Divides features by factors where they are produced and multiplies by them where they are
/// consumed: the model computes the same, up to F32 rounding, and quantizes better.
///
/// The factors come from [`smooth_quant`](crate::ptq::smooth_quant) or [`awq`](crate::ptq::awq). Rescale
/// *before* [`prepare`](crate::QatConfig::prepare).
///
/// # Errors
///
/// Each with the model inside: [`QuantError::UnknownParameter`], [`QuantError::UnsupportedLayer`] for a
/// consumer or producer of another kind or one that carries a reparameterization, [`QuantError::LengthMismatch`] when the factors are not as
/// many as the features, [`QuantError::InvalidScale`] for a factor that is not positive and finite,
/// [`QuantError::InvalidConfig`] without consumers.
///
/// ```
/// use burn::module::Module;
/// use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
/// use burn::tensor::{Device, Tensor};
/// use burn_lean_quant::ptq::{Rescale, rescale};
///
/// #[derive(Module, Debug)]
/// struct Block {
///     norm: LayerNorm,
///     linear: Linear,
/// }
///
/// let device = Device::flex();
/// let block = Block {
///     norm: LayerNormConfig::new(2).init(&device),
///     linear: LinearConfig::new(2, 3).init(&device),
/// };
/// let x = Tensor::<2>::from_data([[1.0, 3.0]], &device);
/// let before = block.linear.forward(block.norm.forward(x.clone()));
/// let factors = Rescale {
///     producer: "norm".into(),
///     consumers: vec!["linear".into()],
///     factors: vec![4.0, 0.5],
/// };
/// let block = rescale(block, &factors).unwrap();
/// let normed = block.norm.forward(x);
/// let after = block.linear.forward(normed.clone());
/// assert!((after - before).abs().max().into_scalar::<f32>() < 1e-6);
/// assert!((normed.into_data().to_vec::<f32>().unwrap()[0] + 0.25).abs() < 1e-4);
/// ```
pub fn rescale<M: Module>(model: M, rescale: &Rescale) -> Result<M, Rejected<M, QuantError>> {
    match plan(&model, rescale) {
        Ok(values) => Ok(float_parameters::replace(
            float_parameters::isolate(model),
            values,
        )),
        Err(error) => Err(Rejected::new(model, error)),
    }
}

fn plan<M: Module>(
    model: &M,
    rescale: &Rescale,
) -> Result<HashMap<String, TensorData>, QuantError> {
    if let Some(bad) = rescale.factors.iter().find(|f| !is_scale(**f)) {
        return Err(QuantError::InvalidScale {
            what: format!("the features of `{}`", rescale.producer),
            value: *bad,
        });
    }
    if rescale.consumers.is_empty() {
        return Err(QuantError::InvalidConfig {
            field: "consumers",
            value: "empty".into(),
            expected: "all layers that read the features",
        });
    }
    let parameters = float_parameters::list(model);
    let inverse: Vec<f32> = rescale.factors.iter().map(|factor| 1.0 / factor).collect();
    let mut scaled = Vec::new();
    for (path, axis) in produced(&parameters, &rescale.producer)? {
        refuse_reparameterized(&parameters, &path)?;
        scaled.push((path, axis, &inverse));
    }
    for consumer in &rescale.consumers {
        let weight = float_parameters::find(&parameters, &format!("{consumer}.weight"))?;
        refuse_reparameterized(&parameters, &weight.path)?;
        let axis = match ChannelLayout::of(weight)? {
            ChannelLayout::Linear | ChannelLayout::ConvTranspose => 0,
            ChannelLayout::Conv => 1,
        };
        scaled.push((weight.path.clone(), axis, &rescale.factors));
    }
    let paths: Vec<String> = scaled.iter().map(|(path, ..)| path.clone()).collect();
    let mut values = float_parameters::read(model, &paths)?;
    let mut replaced = HashMap::new();
    for (path, axis, factors) in scaled {
        let Some(tensor) = values.remove(&path) else {
            return Err(QuantError::InvalidConfig {
                field: "consumers",
                value: path,
                expected: "each layer once",
            });
        };
        if tensor.shape[axis] != factors.len() {
            return Err(QuantError::LengthMismatch {
                what: format!("factors for axis {axis} of `{path}`"),
                expected: tensor.shape[axis],
                found: factors.len(),
            });
        }
        let run: usize = tensor.shape[axis + 1..].iter().product();
        let by_factor =
            |(index, value): (usize, &f32)| value * factors[index / run % factors.len()];
        let new: Vec<f32> = tensor.values.iter().enumerate().map(by_factor).collect();
        replaced.insert(path, TensorData::new(new, tensor.shape));
    }
    Ok(replaced)
}

/// Parameters whose product with the inverse factors divides the output, and the axis of features.
fn produced(
    parameters: &[FloatParameter],
    producer: &str,
) -> Result<Vec<(String, usize)>, QuantError> {
    let path = |field: &str| format!("{producer}.{field}");
    let has = |field: &str| parameters.iter().any(|p| p.path == path(field));
    let mut produced = Vec::new();
    if has("gamma") {
        produced.push((path("gamma"), 0));
        produced.extend(has("beta").then(|| (path("beta"), 0)));
        return Ok(produced);
    }
    let weight = float_parameters::find(parameters, &path("weight"))?;
    let axis = match ChannelLayout::of(weight)? {
        ChannelLayout::Linear => 1,
        ChannelLayout::Conv => 0,
        ChannelLayout::ConvTranspose => {
            return Err(QuantError::UnsupportedLayer {
                path: weight.path.clone(),
                reason: "a transposed convolution is not rescaled".into(),
            });
        }
    };
    produced.push((weight.path.clone(), axis));
    produced.extend(has("bias").then(|| (path("bias"), 0)));
    Ok(produced)
}
