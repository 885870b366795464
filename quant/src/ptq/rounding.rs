//! Rounding the weights of a model with calibration data, and correcting its biases.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;

use burn::module::Module;
use burn::tensor::{Tensor, TensorData, Transaction};

use super::{Data, RoundedWeight, WeightRounding};
use crate::watch::watch_weights;
use crate::{InputStatistics, QuantError, Site, WeightGrid, adaround, gptq};
use crate::{float_parameters, layer_rows, layers::Layers, map_quantizers};

/// What the inputs of each layer look like, by path of the weight's quantizer.
///
/// Weights are float meanwhile, so that a layer's statistics do not depend on how those before it
/// are rounded; activations are quantized.
pub(super) fn inputs<M: Module>(
    model: &M,
    data: &impl Data<M>,
) -> Result<BTreeMap<String, InputStatistics>, QuantError> {
    let model = map_quantizers(model.valid(), |located| match located.site {
        Site::Weight => located.quantizer.with_enabled(false),
        _ => located.quantizer,
    });
    let found = Rc::new(RefCell::new((BTreeMap::new(), None)));
    let watched = found.clone();
    data.run("statistics of inputs", |run| {
        let watcher = move |path: &str, rows: Tensor<2>| {
            let (inputs, failed) = &mut *watched.borrow_mut();
            let [_, features] = rows.dims();
            let inputs = inputs
                .entry(path.to_string())
                .or_insert_with(|| InputStatistics::new(features));
            if let Err(error) = inputs.observe(rows) {
                failed.get_or_insert(error.at(path));
            }
        };
        layer_rows::watch(watcher, || run(&model));
    })?;
    match found.take() {
        (_, Some(error)) => Err(error),
        (inputs, None) => Ok(inputs),
    }
}

/// Rounds the weights whose inputs are known, and corrects their biases.
pub(super) fn round<M: Module>(
    model: M,
    inputs: &BTreeMap<String, InputStatistics>,
    rounding: &WeightRounding,
    bias_correction: bool,
) -> Result<(M, Vec<RoundedWeight>), QuantError> {
    let mut values: HashMap<String, TensorData> = HashMap::new();
    let mut report = Vec::new();
    for weight in weights(&model)? {
        let Some(inputs) = inputs.get(&weight.quantizer) else {
            continue;
        };
        let (grid, layout) = weight.grid().map_err(|error| error.at(&weight.path))?;
        let nearest = grid.nearest();
        let codes = match rounding {
            WeightRounding::Nearest => Ok(nearest.clone()),
            WeightRounding::Gptq(config) => gptq(&grid, inputs, config),
            WeightRounding::AdaRound(config) => adaround(&grid, inputs, config),
        };
        let codes = codes.map_err(|error| error.at(&weight.path))?;
        let rounded = grid.values(&codes);
        let mut rounded_weight = RoundedWeight {
            path: weight.path.clone(),
            nearest_error: grid.output_error(&nearest, inputs)?,
            rounded_error: grid.output_error(&codes, inputs)?,
            bias_correction: None,
        };
        if bias_correction && let Some(bias) = bias_of(&model, &weight.path)? {
            let corrected = corrected(&bias.1, &grid, &rounded, &inputs.mean());
            let changes = corrected.iter().zip(&bias.1).map(|(a, b)| (a - b).abs());
            rounded_weight.bias_correction = Some(changes.fold(0.0, f32::max));
            let len = corrected.len();
            values.insert(bias.0, TensorData::new(corrected, [len]));
        }
        if *rounding != WeightRounding::Nearest {
            let rounded = layout.restore(rounded, grid.shape());
            values.insert(weight.path, TensorData::new(rounded, weight.shape));
        }
        report.push(rounded_weight);
    }
    Ok((float_parameters::replace(model, values), report))
}

/// The bias with the mean of the output's error taken out: b − (W̃ − W) · E\[x\].
fn corrected(bias: &[f32], grid: &WeightGrid, rounded: &[f32], mean: &[f32]) -> Vec<f32> {
    let features = grid.shape()[1];
    let error = |output: usize| -> f64 {
        let terms = (0..features).map(|input| {
            let index = output * features + input;
            (f64::from(rounded[index]) - grid.weight(index)) * f64::from(mean[input])
        });
        terms.sum()
    };
    let corrected = bias.iter().enumerate();
    corrected
        .map(|(output, bias)| (f64::from(*bias) - error(output)) as f32)
        .collect()
}

/// Path and values of the bias beside a weight.
fn bias_of<M: Module>(model: &M, weight: &str) -> Result<Option<(String, Vec<f32>)>, QuantError> {
    let layer = weight.strip_suffix("weight").unwrap_or_default();
    let path = format!("{layer}bias");
    match float_parameters::read(model, std::slice::from_ref(&path)) {
        Ok(mut read) => Ok(read.remove(&path).map(|bias| (path, bias.values))),
        Err(QuantError::UnknownParameter { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// How the elements of a weight are ordered.
enum Layout {
    /// `[outputs, inputs..]`
    OutputFirst,
    /// `[inputs, outputs]`
    InputFirst,
}

impl Layout {
    /// `[outputs, inputs]` of a weight.
    fn matrix(&self, values: &[f32], [outputs, inputs]: [usize; 2]) -> Vec<f32> {
        match self {
            Self::OutputFirst => values.to_vec(),
            Self::InputFirst => transposed(values, inputs, outputs),
        }
    }

    /// A weight of `[outputs, inputs]`.
    fn restore(&self, values: Vec<f32>, [outputs, inputs]: [usize; 2]) -> Vec<f32> {
        match self {
            Self::OutputFirst => values,
            Self::InputFirst => transposed(&values, outputs, inputs),
        }
    }
}

/// `[rows, columns]` to `[columns, rows]`.
fn transposed(values: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    let columns_first = (0..columns).flat_map(|column| (0..rows).map(move |row| (row, column)));
    columns_first
        .map(|(row, column)| values[row * columns + column])
        .collect()
}

/// A weight of the model with its grid, on the host.
struct HostWeight {
    path: String,
    quantizer: String,
    shape: Vec<usize>,
    /// Axis of the output channels.
    axis: usize,
    values: Vec<f32>,
    scale: Vec<f32>,
    zero_point: Vec<f32>,
    bounds: (i32, i32),
}

impl HostWeight {
    fn grid(&self) -> Result<(WeightGrid, Layout), QuantError> {
        let outputs = self.shape[self.axis];
        let shape = [outputs, self.values.len() / outputs];
        let layout = match self.axis {
            0 => Layout::OutputFirst,
            _ => Layout::InputFirst,
        };
        let matrix = |values: &[f32]| layout.matrix(values, shape);
        let (scale, zero_point) = (matrix(&self.scale), matrix(&self.zero_point));
        let grid = WeightGrid::new(shape, matrix(&self.values), scale, zero_point, self.bounds)?;
        Ok((grid, layout))
    }
}

/// The weights with integer grids of linear layers and convolutions.
fn weights<M: Module>(model: &M) -> Result<Vec<HostWeight>, QuantError> {
    let seen = Rc::new(RefCell::new(Vec::new()));
    let watched = seen.clone();
    watch_weights(model, move |seen| {
        let format = seen.scheme.format;
        if format.is_int() {
            let bounds = (format.quant_min() as i32, format.quant_max() as i32);
            let tensors = [&seen.x, &seen.scale, &seen.zero_point].map(Tensor::clone);
            watched
                .borrow_mut()
                .push((seen.path.to_string(), bounds, tensors));
        }
    });
    let seen = seen.take();
    let mut transaction = Transaction::default();
    for (_, _, tensors) in &seen {
        for tensor in tensors {
            transaction = transaction.register(tensor.clone());
        }
    }
    let data = transaction
        .try_execute()
        .map_err(|error| QuantError::Device {
            reason: error.to_string(),
        })?;
    let mut numbers = data
        .iter()
        .map(|data| data.iter::<f32>().collect::<Vec<_>>());
    let layers = Layers::of(model).weights;
    let paths: HashMap<String, String> = crate::quantizers(model)
        .into_iter()
        .filter_map(|located| Some((located.quantizer.path().to_string(), located.parameter?)))
        .collect();
    let mut weights = Vec::new();
    for (quantizer, bounds, _) in seen {
        let mut next = || numbers.next().unwrap_or_default();
        let (values, scale, zero_point) = (next(), next(), next());
        let layer = paths.get(&quantizer).and_then(|path| {
            let mut layers = layers.iter();
            layers.find(|layer| layer.path == *path)
        });
        // Transposed convolutions and embeddings are no plain products of rows.
        if let Some(layer) = layer
            && let (Some(axis), true) = (layer.axis, layer.float_input)
            && (layer.shape.len() == 2 || axis == 0)
        {
            weights.push(HostWeight {
                path: layer.path.clone(),
                quantizer,
                shape: layer.shape.clone(),
                axis,
                values,
                scale,
                zero_point,
                bounds,
            });
        }
    }
    Ok(weights)
}
