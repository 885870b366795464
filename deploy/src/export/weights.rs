//! The codes of quantized weights, as the operations read them: through reshapes and swaps.

use std::collections::{HashMap, HashSet};

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
    /// Of at most 8 bits, signed or not.
    pub(crate) codes: Vec<i16>,
    pub(crate) scale: Spread,
    /// Zero points in the layout of the scales; all 0 for symmetric weights.
    pub(crate) zero_point: Vec<i16>,
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
    /// Of a matrix: one for each block of so many columns of a row, row-major `[rows, blocks]`.
    Within(usize, Vec<f32>),
}

impl Spread {
    /// The scales, one after the other.
    pub(crate) fn scales(&self) -> &[f32] {
        match self {
            Self::Tensor(scale) => std::slice::from_ref(scale),
            Self::Axis(_, scales) | Self::Blocks(_, scales) | Self::Within(_, scales) => scales,
        }
    }
}

impl Codes {
    /// Which scale and zero point an element has.
    pub(crate) fn group(&self, index: usize) -> usize {
        let columns = self.shape.last().copied().unwrap_or(1);
        match &self.scale {
            Spread::Tensor(_) => 0,
            Spread::Axis(axis, _) => {
                let inner: usize = self.shape[axis + 1..].iter().product();
                index / inner % self.shape[*axis]
            }
            Spread::Blocks(block, _) => index / columns / block * columns + index % columns,
            Spread::Within(block, _) => index / block,
        }
    }

    pub(crate) fn is_symmetric(&self) -> bool {
        self.zero_point.iter().all(|zero| *zero == 0)
    }

    pub(crate) fn is_in_blocks(&self) -> bool {
        matches!(self.scale, Spread::Blocks(..))
    }

    /// Largest distance of a code from 0.
    pub(crate) fn largest(&self) -> i16 {
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
    /// Quantized ones whose codes ONNX cannot say: path, and why. Their constants are what the codes
    /// stand for.
    left_float: HashMap<TensorId, (String, String)>,
    /// The values of what does not depend on an input, nor on an open size.
    pub(crate) constants: HashMap<TensorId, HostTensor>,
}

impl Weights {
    pub(crate) fn of(
        graph: &Graph,
        parameters: &[DispatchTensor],
        quantization: &Quantization,
        constants: HashMap<TensorId, HostTensor>,
    ) -> Result<Self, DeployError> {
        let mut origins = origins(graph);
        origins.retain(|id, _| constants.contains_key(id));
        let mut found = Self {
            codes: HashMap::new(),
            left_float: HashMap::new(),
            constants,
        };
        if quantization.weights.is_empty() || parameters.is_empty() {
            return Ok(found);
        }
        let mut views = Vec::new();
        for (id, position) in origins {
            let parameter = &graph.parameters()[position];
            let Some(weight) = quantization.weights.get(&parameter.path) else {
                continue;
            };
            views.push(View {
                position,
                id,
                weight,
            });
        }
        views.sort_unstable_by_key(|view| (view.position, view.id.value()));
        let ids: HashSet<TensorId> = views.iter().map(|view| view.id).collect();
        for part in in_parts(&views) {
            let mut positions: Vec<usize> = part.iter().map(|view| view.position).collect();
            positions.dedup();
            // The same reshapes and swaps, of codes, scales and zero points.
            let seen = |what: &dyn Fn(&QuantizedTensor) -> Vec<f32>| {
                let mut values = parameters.to_vec();
                for views in part.chunk_by(View::is_of_same) {
                    let weight = views[0].weight;
                    let data = TensorData::new(what(weight), weight.shape().to_vec());
                    let value = &mut values[views[0].position];
                    *value = Dispatch::float_from_data(data, &value.device());
                }
                graph.values_of_parameters(&values, &positions, |id| ids.contains(&id))
            };
            let seen = [
                seen(&|weight| weight.codes().iter().map(|code| *code as f32).collect())?,
                seen(&|weight| weight.of_elements(weight.scale()))?,
                seen(&|weight| weight.of_elements(weight.zero_point()))?,
            ];
            for view in part {
                let path = &graph.parameters()[view.position].path;
                found.add(view, path, &parameters[view.position], &seen)?;
            }
        }
        Ok(found)
    }

    /// A weight as one tensor sees it, of which all tensors' codes, scales and zero points are `seen`.
    fn add(
        &mut self,
        view: &View<'_>,
        path: &str,
        value: &DispatchTensor,
        seen: &[HashMap<TensorId, DispatchTensor>; 3],
    ) -> Result<(), DeployError> {
        let View { id, weight, .. } = *view;
        let mut leave = |reason: String| {
            let path = path.to_string();
            // Codes that were given by hand are not what the parameter holds.
            if is_rounded(value, weight)? {
                self.left_float.insert(id, (path, reason));
                return Ok(());
            }
            Err(DeployError::Weight { path, reason })
        };
        let format = weight.scheme().format;
        if !format.is_int() {
            return leave(format!("{} is no integer format", weight.scheme()));
        }
        let of = |values: &HashMap<TensorId, DispatchTensor>| {
            let value = values.get(&id).cloned();
            value.map(HostTensor::of)
        };
        let [Some(codes), Some(scales), Some(zeros)] = seen.each_ref().map(of) else {
            return Ok(());
        };
        let Some((scale, zero_point)) = spread(&codes.shape, &scales.floats()?, &zeros.floats()?)
        else {
            return leave(format!(
                "the scales of {} lie neither along an axis nor in blocks of rows",
                weight.scheme()
            ));
        };
        // As ragged blocks of many sizes come out.
        let is_scattered = matches!(scale, Spread::Blocks(1, _));
        if is_scattered && is_rounded(value, weight)? {
            let reason = format!("{} would have a scale for each weight", weight.scheme());
            let path = path.to_string();
            self.left_float.insert(id, (path, reason));
            return Ok(());
        }
        self.codes.insert(
            id,
            Codes {
                path: path.to_string(),
                codes: codes
                    .floats()?
                    .into_iter()
                    .map(|code| code as i16)
                    .collect(),
                shape: codes.shape,
                scale,
                zero_point,
                bits: format.bits(),
                signed: weight.scheme().quant_min() < 0.0,
            },
        );
        Ok(())
    }

    pub(crate) fn get(&self, id: TensorId) -> Option<&Codes> {
        self.codes.get(&id)
    }

    /// Whether a tensor is a quantized weight, as codes or left float.
    pub(crate) fn is_quantized(&self, id: TensorId) -> bool {
        self.codes.contains_key(&id) || self.left_float.contains_key(&id)
    }

    /// Path of a quantized weight that is floats in every form, and why.
    pub(crate) fn left_float(&self, id: TensorId) -> Option<&(String, String)> {
        self.left_float.get(&id)
    }
}

/// The parameters of a graph, of which quantized ones have the values that their codes stand for. Refuses codes of
/// another shape.
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
        // Those of a model's own quantizers are so already, and not held twice.
        if !is_rounded(value, weight)? {
            let data = TensorData::new(values_of(weight), weight.shape().to_vec());
            let data = data.convert_dtype(value.dtype());
            *value = Dispatch::float_from_data(data, &value.device());
        }
    }
    Ok(values)
}

/// Whether a parameter has the values that the codes stand for.
fn is_rounded(parameter: &DispatchTensor, weight: &QuantizedTensor) -> Result<bool, DeployError> {
    Ok(HostTensor::of(parameter.clone()).floats()? == values_of(weight))
}

/// What the codes stand for.
fn values_of(weight: &QuantizedTensor) -> Vec<f32> {
    let scales = weight.of_elements(weight.scale());
    let zeros = weight.of_elements(weight.zero_point());
    let format = weight.scheme().format;
    let number = |code: i16| match format.is_int() {
        true => f32::from(code),
        false => format.from_bits(code as u8),
    };
    let steps = weight.codes().iter().zip(zeros);
    let steps = steps.map(|(code, zero)| number(*code) - zero);
    steps.zip(scales).map(|(steps, s)| steps * s).collect()
}

/// A tensor that is a quantized weight, looked at in its way.
struct View<'a> {
    position: usize,
    id: TensorId,
    weight: &'a QuantizedTensor,
}

impl View<'_> {
    fn is_of_same(&self, other: &Self) -> bool {
        self.position == other.position
    }
}

/// The views of so many weights at a time that their codes, scales and zero points as floats are small beside
/// the model: 16 MiB each, or one weight. A weight's views are in one part.
fn in_parts<'a, 'b>(views: &'a [View<'b>]) -> Vec<&'a [View<'b>]> {
    const ELEMENTS: usize = 1 << 22;
    let (mut parts, mut start, mut end, mut elements) = (Vec::new(), 0, 0, 0);
    for of_weight in views.chunk_by(View::is_of_same) {
        end += of_weight.len();
        elements += of_weight[0].weight.codes().len();
        if elements >= ELEMENTS || end == views.len() {
            parts.push(&views[start..end]);
            (start, elements) = (end, 0);
        }
    }
    parts
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
fn spread(shape: &[usize], scales: &[f32], zeros: &[f32]) -> Option<(Spread, Vec<i16>)> {
    let first = *scales.first()?;
    let pairs = || scales.iter().zip(zeros);
    if pairs().all(|(scale, zero)| *scale == first && *zero == zeros[0]) {
        return Some((Spread::Tensor(first), vec![zeros[0] as i16]));
    }
    for (axis, size) in shape.iter().enumerate() {
        let inner: usize = shape[axis + 1..].iter().product();
        let channel = |index: usize| index / inner % size;
        let at = |channel: usize| channel * inner;
        let mut all = pairs().enumerate();
        if all.all(|(i, (s, z))| *s == scales[at(channel(i))] && *z == zeros[at(channel(i))]) {
            let of = (0..*size).map(|channel| scales[at(channel)]).collect();
            let zero_points = (0..*size)
                .map(|channel| zeros[at(channel)] as i16)
                .collect();
            return Some((Spread::Axis(axis, of), zero_points));
        }
    }
    let (rows, columns) = match shape {
        [ones @ .., rows, columns] if ones.iter().all(|one| *one == 1) => (*rows, *columns),
        _ => return None,
    };
    // The most neighbours of an axis that share a scale: `first` is that of the first one of an element's block.
    let largest = |size: usize, first: &dyn Fn(usize, usize) -> usize| {
        let mut divisors = (1..=size).rev().filter(|block| size.is_multiple_of(*block));
        divisors.find(|block| {
            let same = |i: usize| {
                let start = first(i, *block);
                scales[i] == scales[start] && zeros[i] == zeros[start]
            };
            (0..rows * columns).all(same)
        })
    };
    let above = largest(rows, &|i, block| {
        i / columns / block * block * columns + i % columns
    })?;
    let beside = largest(columns, &|i, block| i / block * block)?;
    let starts: Vec<usize> = match beside > above {
        true => (0..rows * columns).step_by(beside).collect(),
        false => {
            let rows = (0..rows).step_by(above);
            rows.flat_map(|row| (0..columns).map(move |c| row * columns + c))
                .collect()
        }
    };
    let of = starts.iter().map(|i| scales[*i]).collect();
    let zero_points = starts.iter().map(|i| zeros[*i] as i16).collect();
    let spread = match beside > above {
        true => Spread::Within(beside, of),
        false => Spread::Blocks(above, of),
    };
    Some((spread, zero_points))
}
