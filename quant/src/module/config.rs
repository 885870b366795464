//! How a tensor is observed and fake-quantized.

use burn::config::Config;
use burn::module::ParamGroup;
use burn::tensor::Device;
use serde::{Deserialize, Serialize};

use crate::fake::compiled;
use crate::format::ScaleFormat;
use crate::range::observer::ObserverConfig;
use crate::{FakeQuantize, Granularity, Mapping, QuantError, Scheme};

/// Whether scale and zero point are trained.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Learned {
    /// They follow from the observed range.
    #[default]
    None,
    /// The scale is a parameter:
    /// [Learned Step Size Quantization, Esser et al., 2020](https://arxiv.org/abs/1902.08153).
    ///
    /// It starts from the first batch that is quantized and has no infinities or NaN, or from a
    /// [`calibrate`](crate::calibrate) before: from the whole range that this observed. With 3 bits and less that
    /// is a step that rounds most values to zero: there calibrate with the observer
    /// [`ObserverConfig::histogram`] of [`RangeMethod::Search`](crate::RangeMethod::Search), or, on one device, not
    /// at all. Layers that are called several times in a forward pass (a hidden state, a shared head) start from
    /// the first call; calibrate where later ones see larger values.
    ///
    /// Its gradient is divided by √(N · quant_max), where N counts what shares the scale in a batch, as in
    /// PyTorch; the paper counts the activations of one example. Plain SGD moves scales of activations √batch
    /// times less for it; adaptive optimizers do not see it.
    Lsq,
    /// Scale and zero point are parameters:
    /// [LSQ+, Bhalgat et al., 2020](https://arxiv.org/abs/2004.09576).
    ///
    /// Zero points are numbers like 128 whose gradients are in proportion to the scale: an
    /// optimizer without momentum or adaptive rates hardly moves them.
    LsqPlus,
}

/// How a tensor is observed and fake-quantized.
///
/// ```
/// use burn_lean_quant::{FakeQuantizeConfig, NumberFormat, ObserverConfig, Scheme};
///
/// let config = FakeQuantizeConfig::new(Scheme::affine(NumberFormat::uint8()));
/// assert_eq!(config.observer, ObserverConfig::moving_average());
/// ```
#[derive(Config, Debug, PartialEq)]
pub struct FakeQuantizeConfig {
    /// The numbers and their mapping.
    pub scheme: Scheme,
    /// What the range is made of. Default: moving averages with the constant 0.01.
    #[config(default = "ObserverConfig::moving_average()")]
    pub observer: ObserverConfig,
    /// Whether scale and zero point are trained. Default: no.
    #[config(default = "Learned::None")]
    pub learned: Learned,
}

impl FakeQuantizeConfig {
    /// A quantizer that can stand anywhere in a model.
    ///
    /// # Errors
    ///
    /// [`QuantError`] if choices contradict each other; in particular if ranges are to be
    /// remembered for each channel, block or token, whose number only a shape tells: see
    /// [`init_for`](Self::init_for).
    pub fn init(&self, device: &Device) -> Result<FakeQuantize, QuantError> {
        self.validate()?;
        compiled::check(device)?;
        let remembers = self.observer.has_memory() || self.learned != Learned::None;
        if remembers && self.scheme.granularity != Granularity::PerTensor {
            return Err(QuantError::UnsupportedScheme {
                scheme: self.scheme.to_string(),
                reason: "how many ranges are to be remembered only a shape tells; use `init_for`",
            });
        }
        Ok(FakeQuantize::new(self.clone(), 1, device))
    }

    /// A quantizer for tensors of one shape, or at least of one number of groups.
    ///
    /// # Errors
    ///
    /// [`QuantError`] if choices contradict each other or the scheme cannot quantize the shape.
    pub fn init_for(&self, shape: &[usize], device: &Device) -> Result<FakeQuantize, QuantError> {
        self.validate()?;
        compiled::check(device)?;
        let groups = self.scheme.group_count(shape)?;
        Ok(FakeQuantize::new(self.clone(), groups, device))
    }

    /// # Errors
    ///
    /// [`QuantError`] if choices contradict each other.
    pub fn validate(&self) -> Result<(), QuantError> {
        self.scheme.validate_choices()?;
        self.observer.validate()?;
        let unsupported = |reason| {
            Err(QuantError::UnsupportedScheme {
                scheme: self.scheme.to_string(),
                reason,
            })
        };
        let per_tensor = self.scheme.granularity == Granularity::PerTensor;
        if matches!(self.observer, ObserverConfig::Histogram { .. }) && !per_tensor {
            return unsupported("a histogram is of the whole tensor; use another observer");
        }
        let per_token = self.scheme.granularity == Granularity::PerToken;
        if per_token && self.observer.has_memory() {
            return unsupported("tokens have no range to remember; use the memoryless observer");
        }
        if per_token && self.learned != Learned::None {
            return unsupported("tokens have no scale to learn; use `Learned::None`");
        }
        if self.learned != Learned::None && !self.scheme.format.is_int() {
            return unsupported("scales are learned for integers only");
        }
        if self.learned != Learned::None && self.scheme.scale_format != ScaleFormat::F32 {
            return unsupported(
                "scales are learned as F32, not in the format that they are stored in; use F32 \
                 scales, or `Learned::None`",
            );
        }
        let affine = self.scheme.mapping == Mapping::Affine;
        if self.learned == Learned::Lsq && affine && !self.observer.has_memory() {
            return unsupported(
                "LSQ keeps the zero point of the observed range; use an observer with a memory, \
                 a symmetric mapping, or LSQ+",
            );
        }
        if self.learned == Learned::LsqPlus && !affine {
            return unsupported("LSQ+ learns a zero point; use the affine mapping, or LSQ");
        }
        Ok(())
    }
}

/// The learned scales and zero points of a model that is prepared with [`Learned`] quantizers.
///
/// They want no weight decay, and often a learning rate of their own:
///
/// ```
/// use burn::optim::{AdamWConfig, ModuleOptimizer};
/// use burn_lean_quant::module::learned_parameters;
///
/// let optimizer: ModuleOptimizer = AdamWConfig::new().with_weight_decay(0.01).init();
/// let scales = AdamWConfig::new().with_weight_decay(0.0).build();
/// let optimizer = optimizer.with_group(learned_parameters(), scales, None);
/// # let _ = optimizer;
/// ```
///
/// Of several groups that match a parameter Burn takes the last: add this one last, since a group of weights
/// (`ParamGroup::from_predicate("weight")`) matches `fc.weight.quant.weight.learned_scale`, too, and an optimizer
/// of matrices (Muon) panics at a vector.
///
/// An optimizer reaches them as a mapper over the model, and so does a mapper of yours: one that clips
/// weights leaves out what this group [`matches`](ParamGroup::matches) by id and path.
pub fn learned_parameters() -> ParamGroup {
    ParamGroup::from_any_predicates(vec!["learned_scale", "learned_zero_point"])
}
