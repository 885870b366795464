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
    /// Those of one output channel; of an embedding, those of one row.
    #[default]
    PerChannel,
    /// Those of one output channel and `size` neighbouring input channels; of an embedding, `size`
    /// neighbours in a row.
    PerBlock {
        /// Input channels in a block; the last has what is left.
        size: usize,
    },
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

    /// For a weight of this shape whose output channels are along `axis`, input channels along
    /// `input`.
    pub(crate) fn quantizer(
        &self,
        shape: &[usize],
        axis: usize,
        input: usize,
    ) -> FakeQuantizeConfig {
        let granularity = match self.granularity {
            WeightGranularity::PerTensor => Granularity::PerTensor,
            WeightGranularity::PerChannel => Granularity::PerChannel { axis },
            WeightGranularity::PerBlock { size } => {
                let mut extents = shape.to_vec();
                extents[axis] = 1;
                extents[input] = size;
                Granularity::PerBlock { extents }
            }
        };
        let scheme = Scheme::symmetric(self.format)
            .with_mapping(self.mapping)
            .with_granularity(granularity);
        FakeQuantizeConfig::new(scheme)
            .with_observer(self.observer)
            .with_learned(self.learned)
    }
}
