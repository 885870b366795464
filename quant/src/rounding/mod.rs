//! Weight rounding better than nearest, and corrected biases, in a prepared model.

pub(crate) mod adaround;
pub(crate) mod gptq;
mod matrix_layout;
pub(crate) mod weight_grid;
mod weight_scales;

pub use adaround::{AdaRoundConfig, adaround};
pub use gptq::{GptqConfig, gptq};
pub use weight_grid::WeightGrid;
pub use weight_scales::{GroupParams, set_weight_qparams};

use matrix_layout::{MatrixLayout, grid, without_inputs};

use std::collections::{HashMap, HashSet};
use std::fmt;

use burn::config::Config;
use burn::module::Module;
use burn::tensor::TensorData;
use burn_lean_reparam::{Rejected, own_copy};
use faer::Mat;
use serde::{Deserialize, Serialize};

use crate::codes::weights::quantized_weights;
use crate::model::float_parameters::{self, FloatParameter};
use crate::module::effective::{Effective, HostTensor};
use crate::module::listen::layer_inputs::{LOOKED_UP, LayerInputs};
use crate::module::walk::{self, Site, quantizers};
use crate::table::table;
use crate::{Learned, QuantError, QuantParams, QuantizedTensor, Scheme, module::InputStatistics};

/// How weights are rounded to their codes.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Rounding {
    /// Integers of 4 bits and less by [`gptq`] with its defaults, others to the nearest code.
    #[default]
    Auto,
    /// To the nearest code.
    Nearest,
    /// By [`gptq`].
    Gptq(GptqConfig),
    /// By [`adaround`].
    AdaRound(AdaRoundConfig),
}

/// Rounds the weights of a prepared model with calibration data.
///
/// For 4 bits and below; at 8 bits nearest rounding is hardly worse. Quantize activations first:
/// the inputs that a layer is rounded for are then the ones it will see.
#[derive(Config, Debug, PartialEq)]
pub struct RoundingConfig {
    /// How. Default: integers of 4 bits and less by GPTQ with its defaults; others stay as they are, to be
    /// rounded to the nearest code.
    #[config(default = "Rounding::Auto")]
    pub rounding: Rounding,
    /// Whether the mean error that is left moves into the bias, where there is one. Default: yes.
    #[config(default = true)]
    pub bias_correction: bool,
}

impl Default for RoundingConfig {
    fn default() -> Self {
        Self::new()
    }
}

/// One weight in a [`RoundingReport`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RoundedWeight {
    /// Its path.
    pub path: String,
    /// Mean squared error of the layer's output with nearest rounding.
    pub nearest_error: f64,
    /// And with the codes chosen, before the bias is corrected.
    pub error: f64,
    /// Codes that differ from nearest rounding, as a fraction.
    pub changed: f64,
    /// Largest change of a bias; `None` where none was corrected.
    pub bias_correction: Option<f32>,
}

/// What [`RoundingConfig::apply`] did. Prints as a table.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct RoundingReport {
    /// The weights, in module order.
    pub weights: Vec<RoundedWeight>,
    /// Paths of the weights that were left to nearest rounding, and why: no inputs of them were collected, or
    /// they serve more than the products with these; or, with [`Rounding::Auto`], they are no matrix that
    /// [`gptq`] knows how to read, which other methods refuse. Empty with [`Rounding::Nearest`].
    pub nearest: Vec<(String, String)>,
}

impl RoundingConfig {
    /// Rounds the weight of every layer that `inputs` knows, and keeps its scales from now on. Others stay as
    /// they are, and the report says so: tables whose rows are looked up, and weights that are multiplied both
    /// as they are and transposed, are among them. With [`Rounding::Auto`] weights of more than 4 bits stay,
    /// too, and are not in the report; so do, with a word in it, those that are no matrix of a known layout.
    ///
    /// The stored weight becomes the rounded one, of which fake quantization gives exactly the same
    /// values; so convert, or go on training. A weight quantizer keeps today's scales from now on, in
    /// records too, so that they do not follow the rounded weight (with an observer that has a memory until a
    /// [`calibrate`](crate::calibrate)); a learned scale starts from the one that the weight was rounded with.
    ///
    /// # Errors
    ///
    /// Each with the model inside, as it was: [`QuantError::UnknownParameter`] when `inputs` names a
    /// weight that the model lacks; [`QuantError::UnsupportedLayer`] for one that is not fake-quantized or
    /// already converted and, with GPTQ or AdaRound asked for, for one that is no matrix of a known layout;
    /// [`QuantError::UnsupportedScheme`] for float formats; and those of
    /// [`gptq`] and [`adaround`], of the parameter at fault.
    pub fn apply<M: Module>(
        &self,
        model: M,
        inputs: &LayerInputs,
    ) -> Result<(M, RoundingReport), Rejected<M, QuantError>> {
        match self.plan(&model, inputs) {
            Ok(plan) => {
                let report = RoundingReport {
                    weights: plan.report,
                    nearest: plan.nearest,
                };
                let model = walk::replace(model, plan.quantizers);
                Ok((
                    float_parameters::replace(own_copy(&model), plan.values),
                    report,
                ))
            }
            Err(error) => Err(Rejected::new(model, error)),
        }
    }

    /// Checks every number.
    pub(crate) fn validate(&self) -> Result<(), QuantError> {
        match &self.rounding {
            Rounding::Auto | Rounding::Nearest => Ok(()),
            Rounding::Gptq(config) => config.validate(),
            Rounding::AdaRound(config) => config.validate(),
        }
    }

    fn plan<M: Module>(&self, model: &M, inputs: &LayerInputs) -> Result<Plan, QuantError> {
        let parameters = float_parameters::list(model);
        let weights: HashMap<String, QuantizedTensor> =
            quantized_weights(model)?.into_iter().collect();
        for path in inputs.paths() {
            float_parameters::find(&parameters, path)?;
            if !weights.contains_key(path) {
                return Err(QuantError::UnsupportedLayer {
                    path: path.to_string(),
                    reason: "it is not fake-quantized".into(),
                });
            }
        }
        let effective = Effective::of(model);
        // Read at once: a walk through the model for each of its layers takes time of their number squared.
        let paths: HashSet<&str> = parameters.iter().map(|one| one.path.as_str()).collect();
        let mut wanted = Vec::new();
        for path in inputs.paths().filter(|path| paths.contains(*path)) {
            wanted.push(path.to_string());
            let bias = bias_of(path).filter(|bias| paths.contains(bias.as_str()));
            wanted.extend(bias);
        }
        let mut stored = float_parameters::read(model, &wanted)?;
        let mut plan = Plan::default();
        for parameter in &parameters {
            let path = &parameter.path;
            let Some(weight) = weights.get(path) else {
                continue;
            };
            if self.rounding == Rounding::Auto && !weight.scheme().format.has_few_integers() {
                continue;
            }
            let groups = match (inputs.refusal(path), inputs.of(path)) {
                (Some(reason), _) => Err(reason),
                (None, Some(_)) if parameter.container == "Struct:Embedding" => Err(LOOKED_UP),
                (None, Some(groups)) => Ok(groups),
                (None, None) => Err(without_inputs(parameter)),
            };
            let groups = match groups {
                Ok(groups) => groups,
                Err(reason) => {
                    if self.rounding != Rounding::Nearest {
                        plan.nearest.push((path.clone(), reason.to_string()));
                    }
                    continue;
                }
            };
            let state = (&effective, &mut stored);
            match self.round(state, parameter, weight, groups, &mut plan) {
                Ok(()) => {}
                Err(QuantError::UnsupportedLayer { path, reason })
                    if self.rounding == Rounding::Auto =>
                {
                    plan.nearest.push((path, reason));
                }
                Err(
                    located @ (QuantError::Parameter { .. } | QuantError::UnsupportedLayer { .. }),
                ) => return Err(located),
                Err(error) => return Err(error.at(&parameter.path)),
            }
        }
        plan.quantizers = kept_grids(model, &plan.values)?;
        Ok(plan)
    }

    fn round(
        &self,
        (effective, stored): (&Effective, &mut HashMap<String, HostTensor>),
        parameter: &FloatParameter,
        weight: &QuantizedTensor,
        groups: &[InputStatistics],
        plan: &mut Plan,
    ) -> Result<(), QuantError> {
        let path = &parameter.path;
        if !weight.scheme().format.is_int() {
            return Err(QuantError::UnsupportedScheme {
                scheme: weight.scheme().to_string(),
                reason: "only integers are rounded; leave this weight out",
            });
        }
        let bias_path =
            bias_of(path).filter(|bias| self.bias_correction && stored.contains_key(bias));
        if let Some(stored) = stored.get_mut(path) {
            effective.replace_masked(path, stored)?;
        }
        let layout = MatrixLayout::new(parameter, groups, weight.scheme())?;
        let values = &stored[path].values;
        let mut rounded = values.clone();
        let mut correction = Vec::new();
        let mut report = RoundedWeight {
            path: path.clone(),
            nearest_error: 0.0,
            error: 0.0,
            changed: 0.0,
            bias_correction: None,
        };
        for (group, inputs) in groups.iter().enumerate() {
            let indices = layout.indices(group);
            let grid = grid(values, weight, &indices, layout.rows, layout.columns)?;
            let nearest = grid.nearest();
            let codes = match &self.rounding {
                Rounding::Nearest => nearest.clone(),
                Rounding::Auto => gptq(&grid, inputs, &GptqConfig::new())?,
                Rounding::Gptq(config) => gptq(&grid, inputs, config)?,
                Rounding::AdaRound(config) => adaround(&grid, inputs, config)?,
            };
            let share = 1.0 / groups.len() as f64;
            report.nearest_error += share * grid.output_error(&nearest, inputs)?;
            report.error += share * grid.output_error(&codes, inputs)?;
            let changed = codes.iter().zip(&nearest).filter(|(a, b)| a != b).count();
            report.changed += changed as f64 / values.len().max(1) as f64;
            let new = grid.values(&codes);
            correction.extend(bias_correction(&grid, &codes, inputs)?);
            for (index, value) in indices.iter().zip(new) {
                rounded[*index] = value;
            }
        }
        if let Some(bias_path) = bias_path {
            let bias = &stored[&bias_path].values;
            if bias.len() == correction.len() {
                let corrected: Vec<f32> =
                    bias.iter().zip(&correction).map(|(b, c)| b + c).collect();
                let largest = correction
                    .iter()
                    .fold(0.0_f32, |largest, c| largest.max(c.abs()));
                report.bias_correction = Some(largest);
                let shape = stored[&bias_path].shape.clone();
                plan.values
                    .insert(bias_path, TensorData::new(corrected, shape));
            }
        }
        let shape = stored[path].shape.clone();
        plan.values
            .insert(path.clone(), TensorData::new(rounded, shape));
        plan.report.push(report);
        Ok(())
    }
}

/// What to add to each bias, `[outputs]`, so that the mean output over `inputs` stays what it was
/// before the weight became `codes`: `−E[(W̃ − W) x]`.
///
/// [Data-Free Quantization Through Weight Equalization and Bias Correction, Nagel et al.,
/// 2019](https://arxiv.org/abs/1906.04721), with the mean input from data.
///
/// # Errors
///
/// [`QuantError::NoData`], [`QuantError::LengthMismatch`].
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_lean_quant::{module::InputStatistics, rounding::{WeightGrid, bias_correction}};
///
/// let mut inputs = InputStatistics::new(1);
/// inputs.observe(Tensor::from_data([[2.0], [4.0]], &Device::flex())).unwrap();
/// let grid = WeightGrid::new([1, 1], vec![0.75], vec![0.5], vec![0.0], (-7, 7)).unwrap();
/// // 1.0 instead of 0.75, over a mean input of 3
/// assert_eq!(bias_correction(&grid, &[2], &inputs).unwrap(), [-0.75]);
/// ```
pub fn bias_correction(
    grid: &WeightGrid,
    codes: &[i32],
    inputs: &InputStatistics,
) -> Result<Vec<f32>, QuantError> {
    grid.expect_inputs(inputs)?;
    let [outputs, features] = grid.shape();
    QuantError::expect_len("codes", outputs * features, codes.len())?;
    let error = Mat::from_fn(outputs, features, |row, column| {
        let index = row * features + column;
        grid.value(index, codes[index]) - grid.weight(index)
    });
    let mean = inputs.mean();
    let mean = Mat::from_fn(features, 1, |row, _| f64::from(mean[row]));
    let off = error * mean;
    Ok((0..outputs).map(|row| -off[(row, 0)] as f32).collect())
}

/// Where the bias of a weight would be.
fn bias_of(weight: &str) -> Option<String> {
    let module = weight.strip_suffix("weight")?;
    Some(format!("{module}bias"))
}

#[derive(Default)]
struct Plan {
    values: HashMap<String, TensorData>,
    quantizers: HashMap<String, crate::FakeQuantize>,
    report: Vec<RoundedWeight>,
    nearest: Vec<(String, String)>,
}

/// The quantizers of rounded weights that would leave the grid, made to stay on it: those that would
/// follow the rounded values, whose ends may lie off the range, and learned scales that would start from
/// others.
fn kept_grids<M: Module>(
    model: &M,
    rounded: &HashMap<String, TensorData>,
) -> Result<HashMap<String, crate::FakeQuantize>, QuantError> {
    let of_rounded = || {
        quantizers(model).into_iter().filter_map(|located| {
            let path = located.parameter.clone()?;
            let is_weight = located.site == Site::Weight && rounded.contains_key(&path);
            (is_weight && !located.quantizer.is_learning()).then_some((path, located))
        })
    };
    let schemes: HashMap<String, Scheme> = of_rounded()
        .filter(|(_, located)| !located.quantizer.has_static_range())
        .map(|(path, located)| (path, located.quantizer.scheme().clone()))
        .collect();
    let ranges = float_parameters::ranges(model, &schemes)?;
    let mut kept = HashMap::new();
    for (path, located) in of_rounded() {
        let quantizer = located.quantizer;
        let (quantizer, first) = match ranges.get(&path) {
            Some(range) => {
                let first = QuantParams::from_range(range.clone(), quantizer.scheme());
                (quantizer.with_range(range.clone()), first)
            }
            None if quantizer.config().learned == Learned::None => {
                if !quantizer.config().observer.has_memory() {
                    continue;
                }
                let given = quantizer.qparams()?;
                (quantizer.with_qparams(given.clone()), given)
            }
            None => {
                let first = quantizer.qparams()?;
                (quantizer, first)
            }
        };
        kept.insert(located.path, quantizer.started(first));
    }
    Ok(kept)
}

impl fmt::Display for RoundingReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = table(&[
            "weight",
            "nearest",
            "chosen",
            "ratio",
            "changed",
            "bias moved by",
        ]);
        for weight in &self.weights {
            table.add_row([
                weight.path.clone(),
                format!("{:.3e}", weight.nearest_error),
                format!("{:.3e}", weight.error),
                format!("{:.3}", weight.error / weight.nearest_error),
                format!("{:.1} %", 100.0 * weight.changed),
                weight
                    .bias_correction
                    .map_or("-".to_string(), |moved| format!("{moved:.3e}")),
            ]);
        }
        write!(f, "{table}")?;
        for (path, why) in &self.nearest {
            write!(f, "\n{path} is rounded to nearest: {why}")?;
        }
        Ok(())
    }
}
