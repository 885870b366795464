//! The codes of quantized weights, as the operations read them: through reshapes and swaps.

use std::collections::HashMap;

use burn::backend::ir::{BaseOperationIr, OperationIr, TensorId};
use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchTensor, TensorMetadata};
use burn::tensor::TensorData;
use burn_lean_graph::Graph;
use burn_lean_quant::QuantizedTensor;

use super::data::HostTensor;
use crate::{DeployError, Quantization};

/// A quantized weight in the layout in which an operation reads it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Codes {
    pub(crate) path: String,
    pub(crate) shape: Vec<usize>,
    pub(crate) codes: Vec<i32>,
    pub(crate) scale: Spread,
    /// Zero points in the layout of the scales; all 0 for symmetric weights.
    pub(crate) zero_point: Vec<i32>,
    pub(crate) bits: u8,
    pub(crate) signed: bool,
}

/// Scales, and which elements share one.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Spread {
    Tensor(f32),
    /// One for each index along an axis.
    Axis(usize, Vec<f32>),
    /// Of a matrix: one for each block of so many rows of a column, row-major `[blocks, columns]`.
    Blocks(usize, Vec<f32>),
}

impl Codes {
    pub(crate) fn is_symmetric(&self) -> bool {
        self.zero_point.iter().all(|zero| *zero == 0)
    }

    /// Largest distance of a code from 0.
    pub(crate) fn largest(&self) -> i32 {
        self.codes.iter().map(|code| code.abs()).max().unwrap_or(0)
    }

    /// Whether each code is one of −128 to 127.
    pub(crate) fn fit_signed_bytes(&self) -> bool {
        self.codes.iter().all(|code| i8::try_from(*code).is_ok())
    }

    /// One scale for each index along `axis`.
    pub(crate) fn scales_along(&self, axis: usize) -> Option<Vec<f32>> {
        match &self.scale {
            Spread::Tensor(scale) => Some(vec![*scale; self.shape[axis]]),
            Spread::Axis(of, scales) if *of == axis => Some(scales.clone()),
            _ => None,
        }
    }
}

/// The weights of a graph, by the tensors that operations read.
#[derive(Debug)]
pub(crate) struct Weights {
    /// Of quantized ones.
    codes: HashMap<TensorId, Codes>,
    /// The values of what does not depend on an input, nor on the size of the batch.
    pub(crate) constants: HashMap<TensorId, HostTensor>,
}

impl Weights {
    pub(crate) fn of(
        graph: &Graph,
        parameters: &[DispatchTensor],
        quantization: &Quantization,
        constants: HashMap<TensorId, HostTensor>,
    ) -> Result<Self, DeployError> {
        let origins = origins(graph);
        let mut found = HashMap::new();
        if quantization.weights.is_empty() || parameters.is_empty() {
            return Ok(Self {
                codes: found,
                constants,
            });
        }
        // The same reshapes and swaps, of codes, scales and zero points.
        let seen = |what: &dyn Fn(&QuantizedTensor) -> Result<Vec<f32>, DeployError>| {
            let mut values = parameters.to_vec();
            for (value, parameter) in values.iter_mut().zip(graph.parameters()) {
                if let Some(weight) = quantization.weights.get(&parameter.path) {
                    let data = TensorData::new(what(weight)?, weight.shape().to_vec());
                    *value = Dispatch::float_from_data(data, &value.device());
                }
            }
            Ok::<_, DeployError>(graph.constant_values(&values)?)
        };
        let codes = seen(&|weight| Ok(weight.codes().iter().map(|code| *code as f32).collect()))?;
        let scales = seen(&|weight| per_element(weight, weight.scale()))?;
        let zero_points = seen(&|weight| per_element(weight, weight.zero_point()))?;
        for (id, parameter) in origins {
            let parameter = &graph.parameters()[parameter];
            let Some(weight) = quantization.weights.get(&parameter.path) else {
                continue;
            };
            if weight.shape() != parameter.shape {
                return Err(DeployError::Weight {
                    path: parameter.path.clone(),
                    reason: format!(
                        "its codes have the shape {:?}, the parameter {:?}",
                        weight.shape(),
                        parameter.shape
                    ),
                });
            }
            let format = weight.scheme().format;
            if !format.is_int() {
                return Err(DeployError::Weight {
                    path: parameter.path.clone(),
                    reason: format!("{} is no integer format", weight.scheme()),
                });
            }
            let read = |values: &HashMap<TensorId, DispatchTensor>| {
                let value = values.get(&id).cloned();
                value.map(HostTensor::read).transpose()
            };
            let (Some(codes), Some(scales), Some(zeros)) =
                (read(&codes)?, read(&scales)?, read(&zero_points)?)
            else {
                continue;
            };
            let (scale, zero_point) = spread(&codes.shape, &scales.floats(), &zeros.floats())
                .ok_or_else(|| DeployError::Weight {
                    path: parameter.path.clone(),
                    reason: format!(
                        "the scales of {} lie neither along an axis nor in blocks of rows",
                        weight.scheme()
                    ),
                })?;
            found.insert(
                id,
                Codes {
                    path: parameter.path.clone(),
                    codes: codes.floats().into_iter().map(|code| code as i32).collect(),
                    shape: codes.shape,
                    scale,
                    zero_point,
                    bits: format.bits(),
                    signed: weight.scheme().quant_min() < 0.0,
                },
            );
        }
        Ok(Self {
            codes: found,
            constants,
        })
    }

    pub(crate) fn get(&self, id: TensorId) -> Option<&Codes> {
        self.codes.get(&id)
    }
}

/// The parameters of a graph, of which quantized ones have the values that their codes stand for.
#[cfg(feature = "engine")]
pub(super) fn rounded(
    graph: &Graph,
    parameters: &[DispatchTensor],
    quantization: &Quantization,
) -> Result<Vec<DispatchTensor>, DeployError> {
    let mut values = parameters.to_vec();
    for (value, parameter) in values.iter_mut().zip(graph.parameters()) {
        let Some(weight) = quantization.weights.get(&parameter.path) else {
            continue;
        };
        let scales = per_element(weight, weight.scale())?;
        let zeros = per_element(weight, weight.zero_point())?;
        let steps = weight.codes().iter().zip(zeros);
        let steps = steps.map(|(code, zero)| *code as f32 - zero);
        let rounded: Vec<f32> = steps.zip(scales).map(|(steps, s)| steps * s).collect();
        // Those of a model's own quantizers are so already, and not held twice.
        if HostTensor::read(value.clone())?.floats() != rounded {
            let data = TensorData::new(rounded, weight.shape().to_vec());
            *value = Dispatch::float_from_data(data, &value.device());
        }
    }
    Ok(values)
}

/// The value of each element's group.
fn per_element(weight: &QuantizedTensor, of_group: &[f32]) -> Result<Vec<f32>, DeployError> {
    let groups = weight.scheme().group_shape(weight.shape())?;
    let shape = weight.shape();
    let value = |mut index: usize| {
        let (mut group, mut stride) = (0, 1);
        for (size, count) in shape.iter().zip(&groups).rev() {
            group += index % size / (size / count) * stride;
            index /= size;
            stride *= count;
        }
        of_group[group]
    };
    Ok((0..weight.codes().len()).map(value).collect())
}

/// Tensors that are a parameter, looked at in another way.
fn origins(graph: &Graph) -> HashMap<TensorId, usize> {
    let parameters = graph.parameters().iter().enumerate();
    let mut origins: HashMap<TensorId, usize> = parameters
        .map(|(index, parameter)| (parameter.tensor, index))
        .collect();
    for node in graph.nodes() {
        let OperationIr::BaseFloat(
            BaseOperationIr::Reshape(_)
            | BaseOperationIr::SwapDims(_)
            | BaseOperationIr::Permute(_)
            | BaseOperationIr::Slice(_),
        ) = node.operation()
        else {
            continue;
        };
        let of = node
            .operation()
            .inputs()
            .next()
            .and_then(|x| origins.get(&x.id));
        if let (Some(parameter), Some(out)) = (of.copied(), node.operation().outputs().next()) {
            origins.insert(out.id, parameter);
        }
    }
    origins
}

/// The scales and zero points of all elements, in the fewest numbers.
fn spread(shape: &[usize], scales: &[f32], zeros: &[f32]) -> Option<(Spread, Vec<i32>)> {
    let first = *scales.first()?;
    let pairs = || scales.iter().zip(zeros);
    if pairs().all(|(scale, zero)| *scale == first && *zero == zeros[0]) {
        return Some((Spread::Tensor(first), vec![zeros[0] as i32]));
    }
    for (axis, size) in shape.iter().enumerate() {
        let inner: usize = shape[axis + 1..].iter().product();
        let channel = |index: usize| index / inner % size;
        let at = |channel: usize| channel * inner;
        let mut all = pairs().enumerate();
        if all.all(|(i, (s, z))| *s == scales[at(channel(i))] && *z == zeros[at(channel(i))]) {
            let of = (0..*size).map(|channel| scales[at(channel)]).collect();
            let zero_points = (0..*size)
                .map(|channel| zeros[at(channel)] as i32)
                .collect();
            return Some((Spread::Axis(axis, of), zero_points));
        }
    }
    let (rows, columns) = match shape {
        [ones @ .., rows, columns] if ones.iter().all(|one| *one == 1) => (*rows, *columns),
        _ => return None,
    };
    let block = (1..=rows)
        .rev()
        .filter(|block| rows.is_multiple_of(*block))
        .find(|block| {
            let same = |i: usize| {
                let (row, column) = (i / columns, i % columns);
                let start = row / block * block * columns + column;
                scales[i] == scales[start] && zeros[i] == zeros[start]
            };
            (0..rows * columns).all(same)
        })?;
    let starts = (0..rows)
        .step_by(block)
        .flat_map(|row| (0..columns).map(move |c| row * columns + c));
    let of = starts.clone().map(|i| scales[i]).collect();
    let zero_points = starts.map(|i| zeros[i] as i32).collect();
    Some((Spread::Blocks(block, of), zero_points))
}
