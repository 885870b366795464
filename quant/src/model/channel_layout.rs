//! Where output channels are in a weight.

use crate::QuantError;
use crate::model::float_parameters::FloatParameter;

/// Where the output channels of a weight are.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum ChannelLayout {
    /// `[input, output]`.
    Linear,
    /// `[output, input / groups, …]`.
    Conv,
    /// `[input, output / groups, …]`.
    ConvTranspose,
}

impl ChannelLayout {
    pub(crate) fn of(weight: &FloatParameter) -> Result<Self, QuantError> {
        match weight.container.as_str() {
            "Struct:Linear" => Ok(Self::Linear),
            "Struct:Conv1d" | "Struct:Conv2d" | "Struct:Conv3d" => Ok(Self::Conv),
            "Struct:ConvTranspose1d" | "Struct:ConvTranspose2d" | "Struct:ConvTranspose3d" => {
                Ok(Self::ConvTranspose)
            }
            other => Err(QuantError::UnsupportedLayer {
                path: weight.path.clone(),
                reason: format!(
                    "it belongs to a `{}`, not to a Linear, Conv1d/2d/3d or ConvTranspose1d/2d/3d",
                    other.trim_start_matches("Struct:")
                ),
            }),
        }
    }

    /// The output channel of row-major element `index`.
    pub(crate) fn channel_of(self, index: usize, shape: &[usize], channels: usize) -> usize {
        let inner: usize = shape[1..].iter().product();
        match self {
            Self::Linear => index % shape[1],
            Self::Conv => index / inner,
            Self::ConvTranspose => {
                let per_group = shape[1];
                let input = index / inner;
                let group = input / (shape[0] / (channels / per_group));
                let taps: usize = shape[2..].iter().product();
                group * per_group + index / taps % per_group
            }
        }
    }

    /// Whether a normalization of `channels` channels fits a weight of `shape`.
    pub(crate) fn fits(self, shape: &[usize], channels: usize) -> bool {
        match self {
            Self::Linear => shape[1] == channels,
            Self::Conv => shape[0] == channels,
            // Groups are not visible: any number of them that divides both sides will do.
            Self::ConvTranspose => {
                channels > 0
                    && channels.is_multiple_of(shape[1])
                    && shape[0].is_multiple_of(channels / shape[1])
            }
        }
    }

    /// Output channels of a weight of `shape` with one group.
    pub(crate) fn channels(self, shape: &[usize]) -> usize {
        match self {
            Self::Linear | Self::ConvTranspose => shape[1],
            Self::Conv => shape[0],
        }
    }
}
