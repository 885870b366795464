//! How weights are quantized.

use burn::config::Config;

use crate::range::observer::ObserverConfig;
use crate::{FakeQuantizeConfig, Granularity, Learned, Mapping, NumberFormat, Scheme};

/// Which weights of a layer share a scale; axes follow from the kind of layer.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, Default, serde::Serialize, serde::Deserialize,
)]
#[non_exhaustive]
pub enum WeightGranularity {
    /// All.
    PerTensor,
    /// Those of one output channel; of an embedding, those of one row. Of a stack of matrices, one for each
    /// expert or head, those of the same column in all of them. Of a transposed convolution in groups, those of
    /// the same channel in all groups, which lie along one axis.
    #[default]
    PerChannel,
    /// Those of one output channel and `size` neighbouring input channels; of an embedding, `size`
    /// neighbours in a row. Each matrix of a stack has blocks of its own. Where nothing tells more of a stack than
    /// the axis of its output channels ([`Override::axis`](crate::Override::axis)), the axis before it is that of
    /// the input channels.
    PerBlock {
        /// Input channels in a block; the last has what is left.
        size: usize,
    },
}

/// Where the channels of a weight are.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Channels {
    /// Axis of the output channels.
    pub(crate) output: usize,
    /// Axis of the input channels.
    pub(crate) input: usize,
    /// Whether the other axes count matrices, instead of places in a kernel.
    pub(crate) is_stack: bool,
}

/// How weights are quantized.
#[derive(Config, Debug, PartialEq)]
pub struct WeightConfig {
    /// The numbers. Default: INT8 from −127 to 127, which a second rounding leaves as they are.
    #[config(default = "NumberFormat::int8().narrow()")]
    pub format: NumberFormat,
    /// How real numbers are mapped to them. Default: symmetric.
    #[config(default = "Mapping::Symmetric")]
    pub mapping: Mapping,
    /// Which weights share a scale. Default: those of one output channel.
    #[config(default = "WeightGranularity::PerChannel")]
    pub granularity: WeightGranularity,
    /// What the range is made of. Default: the weights as they are, each time.
    #[config(default = "ObserverConfig::Memoryless")]
    pub observer: ObserverConfig,
    /// Whether scales are trained. Default: no.
    #[config(default = "Learned::None")]
    pub learned: Learned,
}

impl WeightConfig {
    /// Signed integers of 2 to 8 bits without the lowest.
    pub fn int(bits: u8) -> Self {
        Self::new().with_format(NumberFormat::int(bits).narrow())
    }

    /// For a weight of this shape with such channels.
    pub(crate) fn quantizer(&self, shape: &[usize], channels: Channels) -> FakeQuantizeConfig {
        let Channels {
            output,
            input,
            is_stack,
        } = channels;
        let blocks = |size: usize| {
            let mut extents = match is_stack {
                true => vec![1; shape.len()],
                false => shape.to_vec(),
            };
            extents[output] = 1;
            extents[input] = size;
            Granularity::PerBlock { extents }
        };
        let granularity = match self.granularity {
            WeightGranularity::PerTensor => Granularity::PerTensor,
            WeightGranularity::PerChannel => Granularity::PerChannel { axis: output },
            WeightGranularity::PerBlock { size } => blocks(size),
        };
        let scheme = Scheme::symmetric(self.format)
            .with_mapping(self.mapping)
            .with_granularity(granularity);
        FakeQuantizeConfig::new(scheme)
            .with_observer(self.observer)
            .with_learned(self.learned)
    }
}
