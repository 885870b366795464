//! The verbs of the extensions as methods of the model, as Burn has its own.

use burn::module::Module;

use crate::graph::Tensors;
use crate::prune::layerwise::LayerwisePruned;
use crate::prune::{Budget, Masks, PruneError, Pruner};
use crate::quant::deploy::ConversionReport;
use crate::quant::ptq::PtqReport;
use crate::quant::{ConvertConfig, PtqConfig, QatConfig, QuantError};
use crate::reparam::Rejected;

/// The verbs of the extensions, as Burn's `apply_lora` and `quantize_weights` are methods.
///
/// Each is a method of a configuration, with the model in front, then what is chosen, data and forward pass; what
/// comes out, and what can go wrong, is described there. The model comes back in every error.
///
/// ```
/// use burn::module::Module;
/// use burn::nn::{Initializer, LinearConfig};
/// use burn::tensor::{Device, Tensor};
/// use burn_lean::prelude::*;
///
/// let device = Device::flex().autodiff();
/// let ones = LinearConfig::new(8, 4).with_initializer(Initializer::Ones);
/// let model = ones.init(&device);
/// // One input is as large as the others together: its weights are those that stay.
/// let x = Tensor::<2>::eye(8, &device).slice_fill([0..1, 0..1], 7.0);
///
/// let pruned = model.prune(Budget::Sparsity(0.75), [x.clone()], |model, x| model.forward(x))?;
/// let model = pruned.model.attach_masks(&pruned.masks)?;
/// // … fine-tune …
/// let (model, _) = model
///     .valid()
///     .materialize()
///     .quantize(&PtqConfig::new(), || [x.clone().inner()], |model, x| model.forward(x))?;
/// let (model, _) = model.convert(&ConvertConfig::new())?;
/// let zeros = model.weight.val().equal_elem(0.0).int().sum().into_scalar::<i64>();
/// assert_eq!(zeros, 24);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait LeanModule: Module {
    /// Quantizers on weights and activations, for training: [`QatConfig::prepare`].
    fn prepare_qat(self, config: &QatConfig) -> Result<Self, Rejected<Self, QuantError>> {
        config.prepare(self)
    }

    /// Quantized without training, with ranges from `batches`: [`PtqConfig::quantize_for`].
    fn quantize<I, O>(
        self,
        config: &PtqConfig,
        batches: impl Fn() -> I,
        forward: impl Fn(&Self, I::Item) -> O,
    ) -> Result<(Self, PtqReport), Rejected<Self, QuantError>>
    where
        I: IntoIterator,
        I::Item: Tensors,
        O: Tensors + Send + Sync + 'static,
    {
        config.quantize_for(self, batches, forward)
    }

    /// The weights of a prepared model as quantized tensors: [`ConvertConfig::convert`].
    fn convert(
        self,
        config: &ConvertConfig,
    ) -> Result<(Self, ConversionReport), Rejected<Self, QuantError>> {
        config.convert(self)
    }

    /// Pruned from inputs alone, with nothing else chosen: [`Pruner::prune`].
    fn prune<I: Tensors, O: Tensors>(
        self,
        budget: Budget,
        batches: impl IntoIterator<Item = I>,
        forward: impl Fn(&Self, I) -> O,
    ) -> Result<LayerwisePruned<Self>, Rejected<Self, PruneError>> {
        Pruner::new(budget).prune(self, forward, batches)
    }

    /// With zeros that hold under any optimizer: [`Masks::attach`].
    fn attach_masks(self, masks: &Masks) -> Result<Self, Rejected<Self, PruneError>> {
        masks.attach(self)
    }
}

impl<M: Module> LeanModule for M {}
