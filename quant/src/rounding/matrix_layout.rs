//! Where the matrices of a layer are in its weight.

use crate::codes::quantized_tensor::code_range;
use crate::model::channel_layout::ChannelLayout;
use crate::model::float_parameters::FloatParameter;
use crate::{
    Granularity, QuantError, QuantizedTensor, Scheme, module::InputStatistics, rounding::WeightGrid,
};

/// The grid of some elements of a weight, as a matrix of their order.
pub(super) fn grid(
    values: &[f32],
    weight: &QuantizedTensor,
    indices: &[usize],
    rows: usize,
    columns: usize,
) -> Result<WeightGrid, QuantError> {
    let groups = weight.groups()?;
    let group = |index: &usize| groups.of_element(*index);
    WeightGrid::new(
        [rows, columns],
        indices.iter().map(|index| values[*index]).collect(),
        indices.iter().map(|i| weight.scale()[group(i)]).collect(),
        indices
            .iter()
            .map(|i| weight.zero_point()[group(i)])
            .collect(),
        code_range(weight.scheme()),
    )
}

const TRANSPOSED: &str = "transposed convolutions are rounded to nearest";

/// Why there are no inputs of a weight.
pub(super) fn without_inputs(parameter: &FloatParameter) -> &'static str {
    match parameter.container.as_str() {
        "Struct:ConvTranspose1d" | "Struct:ConvTranspose2d" | "Struct:ConvTranspose3d" => {
            TRANSPOSED
        }
        "Struct:Conv3d" => "inputs of convolutions along three axes are not collected",
        "Struct:DeformConv2d" => "inputs of deformable convolutions are not collected",
        "Struct:Embedding" => "its rows are looked up",
        "Struct:Linear" | "Struct:Conv1d" | "Struct:Conv2d" => {
            "it has not shown its inputs, as it does when it is called with `forward_q`, or by \
             `QuantizedForward::run` and `PtqConfig::quantize_for`"
        }
        _ => "no inputs of it were collected",
    }
}

/// Where the elements of a layer's matrices are in its weight.
pub(super) struct MatrixLayout {
    layout: ChannelLayout,
    shape: Vec<usize>,
    /// Outputs of a group.
    pub(super) rows: usize,
    /// Inputs of a group.
    pub(super) columns: usize,
}

impl MatrixLayout {
    /// `groups` are the inputs of each group of the layer.
    pub(super) fn new(
        parameter: &FloatParameter,
        groups: &[InputStatistics],
        scheme: &Scheme,
    ) -> Result<Self, QuantError> {
        let layout = match groups {
            [inputs] => ChannelLayout::of(parameter)
                .or_else(|error| of_matrix(parameter, scheme, inputs.features()).ok_or(error))?,
            _ => ChannelLayout::of(parameter)?,
        };
        let groups = groups.len();
        let shape = parameter.shape.clone();
        let unsupported = |reason: &str| QuantError::UnsupportedLayer {
            path: parameter.path.clone(),
            reason: reason.to_string(),
        };
        let (rows, columns) = match layout {
            ChannelLayout::Linear if groups == 1 => (shape[1], shape[0]),
            ChannelLayout::Conv if groups > 0 && shape[0].is_multiple_of(groups) => {
                (shape[0] / groups, shape[1..].iter().product())
            }
            ChannelLayout::ConvTranspose => return Err(unsupported(TRANSPOSED)),
            _ => return Err(unsupported("its inputs are of another number of groups")),
        };
        Ok(Self {
            layout,
            shape,
            rows,
            columns,
        })
    }

    /// Row-major elements of the matrix `[outputs, inputs]` of a group.
    pub(super) fn indices(&self, group: usize) -> Vec<usize> {
        let place = |element: usize| match self.layout {
            ChannelLayout::Linear => {
                element % self.columns * self.shape[1] + element / self.columns
            }
            _ => group * self.rows * self.columns + element,
        };
        (0..self.rows * self.columns).map(place).collect()
    }
}

/// The layout of a matrix outside of Burn's layers, from the axis of its scales, or from how many
/// features it is multiplied with; `None` where neither tells.
fn of_matrix(
    parameter: &FloatParameter,
    scheme: &Scheme,
    features: usize,
) -> Option<ChannelLayout> {
    let [rows, columns] = parameter.shape[..] else {
        return None;
    };
    match scheme.granularity {
        Granularity::PerChannel { axis: 0 } if columns == features => Some(ChannelLayout::Conv),
        Granularity::PerChannel { axis: 1 } if rows == features => Some(ChannelLayout::Linear),
        _ if columns == features && rows != features => Some(ChannelLayout::Conv),
        _ if rows == features && columns != features => Some(ChannelLayout::Linear),
        _ => None,
    }
}
