//! What quantizing each layer alone costs.

use std::collections::BTreeMap;
use std::fmt;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{FloatDType, Tensor, Transaction};
use burn_lean_graph::model_device;
use burn_lean_reparam::{FloatVisitor, evaluated_with_gradients, visit_floats};
use serde::{Deserialize, Serialize};

use crate::health;
use crate::module::listen::watch::{WeightVisitor, visit_weights};
use crate::table::{decibels, table};
use crate::{
    FakeQuantize, QuantError, Site,
    module::{Located, TensorOutcome, map_quantizers},
    quantizers,
};

/// What [`sensitivity`] found.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Sensitivity {
    /// What `evaluate` gave with all quantizers off.
    #[serde(with = "crate::table::float")]
    pub float: f64,
    /// What `evaluate` gave with all quantizers on.
    #[serde(with = "crate::table::float")]
    pub quantized: f64,
    /// The layers, in module order.
    pub layers: Vec<LayerSensitivity>,
}

/// What quantizing one layer, its weight and its activations, costs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LayerSensitivity {
    /// Path of its weight; of a quantizer that stands alone, its own.
    pub layer: String,
    /// Schemes of its quantizers, as they print.
    pub schemes: Vec<(Site, String)>,
    /// Signal to quantization noise ratio of each quantizer, in dB.
    #[serde(with = "crate::table::float_pairs")]
    pub sqnr: Vec<(Site, f64)>,
    /// Signal to noise ratio of the model's output when only this layer is quantized, in dB.
    #[serde(with = "crate::table::float")]
    pub output_sqnr: f64,
    /// What `evaluate` gave when only this layer is quantized.
    #[serde(with = "crate::table::float")]
    pub quantized_alone: f64,
    /// Σ (w̃ − w) · g: the change of the loss that the gradient g foretells, if asked for.
    #[serde(with = "crate::table::optional_float", default)]
    pub first_order: Option<f64>,
    /// ½ Σ ((w̃ − w) · g)²: its second-order part with the squared gradient as curvature.
    #[serde(with = "crate::table::optional_float", default)]
    pub second_order: Option<f64>,
}

/// Quantizes one layer at a time.
///
/// `model` is prepared and has its ranges. `output` gives the model's output on sample data, in the
/// same order each time; `evaluate` a figure of merit, the higher the better, such as the accuracy
/// on a validation set in percent. Both are called once for each layer, and twice more.
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::tensor::{Device, Tensor};
/// use burn_lean_quant::{QatConfig, QuantizedForward, WeightConfig, sensitivity};
///
/// let device = Device::flex();
/// let config = QatConfig::new().with_weight(WeightConfig::int(2)).with_activation(None);
/// let model = config.prepare(LinearConfig::new(8, 4).init(&device))?;
/// let x = Tensor::<2>::ones([2, 8], &device);
/// let quantized = QuantizedForward::new();
/// let output = |model: &burn::nn::Linear| {
///     quantized.run(model, x.clone(), |model, x| model.forward(x))
/// };
/// let sensitivity = sensitivity(&model, output, |_| 90.0)?;
/// // Two bits are coarse: the noise is less than 30 dB below the signal.
/// assert!(sensitivity.layers[0].output_sqnr < 30.0);
/// println!("{sensitivity}");
/// # Ok::<(), burn_lean_quant::QuantError>(())
/// ```
///
/// # Errors
///
/// [`QuantError::NotPrepared`] if the model has no quantizer that is switched on,
/// [`QuantError::Device`].
pub fn sensitivity<M: Module, R: TensorOutcome<D>, const D: usize>(
    model: &M,
    output: impl Fn(&M) -> R,
    evaluate: impl Fn(&M) -> f64,
) -> Result<Sensitivity, QuantError> {
    let model = model.valid();
    let layers = layers(&model);
    if layers.is_empty() {
        return Err(QuantError::NotPrepared);
    }
    let float_model = quantized_only(&model, |_| false);
    let reference = output(&float_model).tensor()?;
    let mut sqnr: BTreeMap<String, Vec<(Site, f64)>> = BTreeMap::new();
    let report = health(&model, |model| output(model).tensor())?;
    for quantizer in &report.quantizers {
        let of_layer = sqnr.entry(quantizer.layer.clone()).or_default();
        of_layer.push((quantizer.site, quantizer.sqnr));
    }
    let mut found = Vec::with_capacity(layers.len());
    for (layer, schemes) in layers {
        let alone = quantized_only(&model, |located| owner(located) == layer);
        found.push(LayerSensitivity {
            schemes,
            sqnr: sqnr.remove(&layer).unwrap_or_default(),
            output_sqnr: signal_to_noise(&reference, output(&alone).tensor()?)?,
            quantized_alone: evaluate(&alone),
            first_order: None,
            second_order: None,
            layer,
        });
    }
    Ok(Sensitivity {
        float: evaluate(&float_model),
        quantized: evaluate(&model),
        layers: found,
    })
}

impl Sensitivity {
    /// Adds what the gradient of one batch foretells, from one backward pass.
    ///
    /// `loss` gets a copy of `model` on its autodiff device, as it is after training and with all quantizers
    /// off; `model` is not touched, its running statistics neither. Of a model that is trained to a minimum the first-order score is close to zero; the second-order one is not.
    ///
    /// # Errors
    ///
    /// [`QuantError::NoGradients`] if the model is not on an autodiff device or its loss does not
    /// depend on a quantized weight; [`QuantError::Device`].
    pub fn with_gradient_scores<M: Module>(
        mut self,
        model: &M,
        loss: impl FnOnce(&M) -> Tensor<1>,
    ) -> Result<Self, QuantError> {
        if !model_device(model).is_some_and(|device| device.is_autodiff()) {
            return Err(QuantError::NoGradients);
        }
        let float_model = quantized_only(model, |_| false);
        let float_model = evaluated_with_gradients(&float_model).map(&mut AllGradients);
        let loss = loss(&float_model);
        if !loss.is_autodiff() {
            return Err(QuantError::NoGradients);
        }
        // By path: copies of one parameter have gradients of their own.
        let mut scores = Scores {
            grads: Gradients::of(&float_model, &loss.backward()),
            found: BTreeMap::new(),
        };
        visit_weights(model, &mut scores);
        if scores.found.is_empty() {
            return Err(QuantError::NoGradients);
        }
        let mut transaction = Transaction::default();
        for score in scores.found.values() {
            transaction = transaction.register(score.clone());
        }
        let data = transaction.try_execute().map_err(QuantError::device)?;
        for (path, data) in scores.found.keys().zip(data) {
            let score: Vec<f32> = data.iter::<f32>().collect();
            if let Some(layer) = self.layers.iter_mut().find(|layer| layer.layer == *path) {
                layer.first_order = Some(f64::from(score[0]));
                layer.second_order = Some(f64::from(score[1]));
            }
        }
        Ok(self)
    }
}

/// Gradients of all weights, of frozen ones, too.
struct AllGradients;

impl ModuleMapper for AllGradients {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.set_require_grad(true)
    }
}

/// The layers that have a quantizer which is switched on, in module order, with their schemes.
pub(crate) fn layers<M: Module>(model: &M) -> Vec<(String, Vec<(Site, String)>)> {
    let mut layers: Vec<(String, Vec<(Site, String)>)> = Vec::new();
    for located in quantizers(model) {
        if !located.quantizer.is_enabled() {
            continue;
        }
        let scheme = (located.site, located.quantizer.scheme().to_string());
        let layer = owner(&located).to_string();
        match layers.iter_mut().find(|(known, _)| *known == layer) {
            Some((_, schemes)) => schemes.push(scheme),
            None => layers.push((layer, vec![scheme])),
        }
    }
    layers
}

/// The layer that a quantizer belongs to: the path of the weight, or its own.
fn owner(located: &Located) -> &str {
    located.parameter.as_deref().unwrap_or(&located.path)
}

/// The model with the quantizers off that `on` does not choose; what is off stays off.
pub(crate) fn quantized_only<M: Module>(model: &M, on: impl Fn(&Located) -> bool) -> M {
    map_quantizers(model.clone(), |located| {
        let on = located.quantizer.is_enabled() && on(&located);
        match on {
            true => located.quantizer,
            false => located.quantizer.with_enabled(false),
        }
    })
}

/// 10 · log₁₀(Σ reference² / Σ (reference − other)²), in dB.
fn signal_to_noise<const D: usize>(
    reference: &Tensor<D>,
    other: Tensor<D>,
) -> Result<f64, QuantError> {
    // Half precision holds neither the squares nor their sum.
    let reference = reference.clone().cast(FloatDType::F32);
    let signal = reference.clone().square().sum();
    let noise = (reference - other.cast(FloatDType::F32)).square().sum();
    let data = Tensor::cat(vec![signal, noise], 0)
        .try_into_data()
        .map_err(QuantError::device)?;
    let sums: Vec<f32> = data.iter::<f32>().collect();
    Ok(decibels(f64::from(sums[0]), f64::from(sums[1])))
}

/// Gradients by path, flat.
struct Gradients<'a> {
    all: &'a burn::tensor::Gradients,
    found: BTreeMap<String, Tensor<1>>,
}

impl Gradients<'_> {
    fn of<M: Module>(model: &M, all: &burn::tensor::Gradients) -> BTreeMap<String, Tensor<1>> {
        let mut gradients = Gradients {
            all,
            found: BTreeMap::new(),
        };
        visit_floats(model, &mut gradients);
        gradients.found
    }
}

impl FloatVisitor for Gradients<'_> {
    fn visit<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>) {
        if let Some(gradient) = param.base().grad(self.all) {
            let flat = gradient.flatten(0, D - 1);
            self.found.insert(path.to_string(), flat);
        }
    }
}

/// First- and second-order score of each quantized weight, by its path.
struct Scores {
    grads: BTreeMap<String, Tensor<1>>,
    found: BTreeMap<String, Tensor<1>>,
}

impl WeightVisitor for Scores {
    fn visit<const D: usize>(&mut self, path: &str, quantizer: &FakeQuantize, weight: Tensor<D>) {
        let Some(gradient) = self.grads.remove(path) else {
            return;
        };
        let gradient = gradient.reshape(weight.dims());
        let quantized = quantizer.forward(weight.clone());
        // Half precision has no squares of small numbers.
        let gradient = gradient.without_autodiff().cast(FloatDType::F32);
        // Of a learned scale with autodiff, of a fixed range without: they are read together.
        let change = (quantized - weight).without_autodiff();
        let change = change.cast(FloatDType::F32) * gradient;
        let scores = vec![change.clone().sum(), change.square().sum().mul_scalar(0.5)];
        self.found.insert(path.to_string(), Tensor::cat(scores, 0));
    }
}

impl fmt::Display for Sensitivity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scores = self.layers.iter().any(|layer| layer.second_order.is_some());
        let mut header = vec![
            "layer",
            "quantized",
            "SQNR [dB]",
            "output SQNR [dB]",
            "alone",
            "drop",
        ];
        if scores {
            header.extend(["first order", "second order"]);
        }
        let mut table = table(&header);
        for layer in &self.layers {
            let sites: Vec<&str> = layer.schemes.iter().map(|(site, _)| site.name()).collect();
            let sqnr = layer.sqnr.iter();
            let sqnr: Vec<String> = sqnr
                .map(|(site, sqnr)| format!("{} {sqnr:.1}", site.name()))
                .collect();
            let mut row = vec![
                layer.layer.clone(),
                sites.join(", "),
                sqnr.join(", "),
                format!("{:.1}", layer.output_sqnr),
                format!("{:.2}", layer.quantized_alone),
                format!("{:.2}", self.float - layer.quantized_alone),
            ];
            if scores {
                for score in [layer.first_order, layer.second_order] {
                    row.push(score.map_or("-".into(), |score| format!("{score:.3e}")));
                }
            }
            table.add_row(row);
        }
        write!(
            f,
            "{table}\nfloat {:.2}, all quantized {:.2}",
            self.float, self.quantized
        )
    }
}
