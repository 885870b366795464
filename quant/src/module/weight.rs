//! What a prepared weight carries: its own quantizer, and those of the layer around it.

use burn::module::{Module, Param, Reparameterization};
use burn::tensor::Tensor;
use burn_lean_reparam::find;

use crate::FakeQuantize;
use crate::module::sites::SiteQuantizers;

/// The quantizers of a layer, carried by its weight.
///
/// [`Param::val`] gives the fake-quantized weight; of a [converted](crate::ConvertConfig) one, the
/// values that its codes stand for, in the dtype that it had before. [`QuantizedForward::run`](crate::QuantizedForward::run)
/// finds the other quantizers here, and so does [`forward_q`](crate::ForwardQ::forward_q) in a forward pass
/// of your own: the layer's own type, and with it the model's, does not change.
///
/// Its state is visited under `weight.quant.weight…`, `weight.quant.input…` and so on.
#[derive(Module, Debug)]
pub struct WeightQuantizer {
    /// Of the weight. Switched off where only activations are quantized.
    pub weight: FakeQuantize,
    /// Of the layer's input.
    pub input: Option<FakeQuantize>,
    /// Of the layer's output.
    pub output: Option<FakeQuantize>,
    /// Of the attention weights, if this is the query projection of an attention.
    pub attention: Option<FakeQuantize>,
    /// Of the operations without a weight that follow the layer.
    pub sites: SiteQuantizers,
}

impl WeightQuantizer {
    /// The quantizers that a parameter carries, also inside of a
    /// [`Chain`](burn_lean_reparam::Chain).
    pub fn of<const D: usize>(parameter: &Param<Tensor<D>>) -> Option<&Self> {
        find(parameter)
    }

    /// The layer's input, observed and quantized where there is a quantizer for it. In training,
    /// `x` must be on the autodiff device to be observed.
    pub fn quantize_input<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        optional(self.input.as_ref(), x)
    }

    /// The layer's output, observed and quantized where there is a quantizer for it.
    pub fn quantize_output<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        optional(self.output.as_ref(), x)
    }
}

pub(crate) fn optional<const D: usize>(
    quantizer: Option<&FakeQuantize>,
    x: Tensor<D>,
) -> Tensor<D> {
    match quantizer {
        Some(quantizer) => quantizer.forward(x),
        None => x,
    }
}

impl Reparameterization for WeightQuantizer {
    const NAME: &'static str = "quant";

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        match self.weight.weight_stand_in(&base) {
            Some(stand_in) => stand_in,
            None => self.weight.weight_values(base),
        }
    }
}
