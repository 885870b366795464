//! Calling a layer so that the quantizers of its activations take part.

mod attention;
mod bidirectional;
mod decoder;
mod gate;
mod rnn;
mod transformer;

use burn::module::Param;
use burn::nn::conv::{Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d};
use burn::nn::{Embedding, Linear, SwiGlu};
use burn::tensor::activation::silu;
use burn::tensor::{Int, Tensor};
use burn_lean_graph::hooks::is_active;

use crate::WeightQuantizer;
use crate::module::listen::layer_inputs;
use crate::module::on_tape::on_tape;

pub use attention::MhaInput;
pub use decoder::{DecoderCache, TransformerDecoderInput};
pub use transformer::TransformerEncoderInput;

/// The forward pass of a layer with its quantizers.
///
/// The quantizers of a layer's input and output are carried by its weight, where
/// [`QatConfig::prepare`](crate::QatConfig::prepare) put them. In a model that is not prepared it
/// is the plain forward pass.
///
/// | layer | input | |
/// |---|---|---|
/// | [`Linear`] | `Tensor<D>` | |
/// | [`Conv1d`], [`ConvTranspose1d`] | `Tensor<3>` | |
/// | [`Conv2d`], [`ConvTranspose2d`] | `Tensor<4>` | |
/// | [`Conv3d`], [`ConvTranspose3d`] | `Tensor<5>` | |
/// | [`Embedding`] | `Tensor<2, Int>` | |
/// | [`SwiGlu`] | `Tensor<D>` | both of its linear layers |
/// | `MultiHeadAttention` | [`MhaInput`] | projections, q·kᵀ and attention·v |
/// | `PositionWiseFeedForward` | `Tensor<D>` | |
/// | `TransformerEncoderLayer` | `(Tensor<3>, pad mask, attention mask)` | |
/// | `TransformerEncoder` | [`TransformerEncoderInput`] | |
/// | `TransformerDecoderLayer`, `TransformerDecoder` | [`TransformerDecoderInput`] | also the attention to the memory |
/// | `GateController` | `(input, hidden)` | |
/// | `Rnn`, `Lstm`, `Gru` | `(Tensor<3>, state)` | |
/// | `BiRnn`, `BiLstm`, `BiGru` | `(Tensor<3>, state)` | both directions |
///
/// Not here: Burn's `CrossAttention`. Its layers, its number of heads, its scale and its masking
/// value are all private, so that its forward pass cannot be written outside of Burn. Its weights
/// are quantized all the same, wherever it is called; its inputs and products are not. Write it as
/// a `MultiHeadAttention` with [`MhaInput::new`], whose queries, keys and values may differ, with
/// a `Linear` before it where the context has another width; or leave its activations out with an
/// [`Override`](crate::Override) that has `skip_activation`, without which
/// [`convert`](crate::ConvertConfig::convert) reports that they were never observed.
///
/// Position by position, with keys and values in a [`KvCache`](crate::KvCache), in floats or in 8 bits:
/// `MultiHeadAttention`, `TransformerEncoderLayer` and `TransformerDecoderLayer` take
/// `(input, &mut cache)`, `TransformerEncoder` and `TransformerDecoder` `(input, &mut caches[..])` with
/// one for each layer ([`DecoderCache`] in a decoder). It stands for `forward_cache` and
/// `forward_autoregressive_inference`, whose caches are private to Burn: these run with quantized
/// weights only. In [`QuantizedForward::run`](crate::QuantizedForward::run) caches go in with the inputs
/// and come back with the results.
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::tensor::{Device, Tensor};
/// use burn_lean_quant::ForwardQ;
///
/// let device = Device::flex();
/// let layer = LinearConfig::new(3, 2).init(&device);
/// let x = Tensor::<2>::ones([1, 3], &device);
/// // Not prepared: the same numbers.
/// let plain = layer.forward(x.clone()).into_data();
/// assert_eq!(layer.forward_q(x).into_data(), plain);
/// ```
pub trait ForwardQ<Input> {
    /// What the layer gives.
    type Output;

    /// The forward pass, with the quantizers of the layer.
    ///
    /// # Panics
    ///
    /// As the plain one; and for a scheme that does not fit the shape of an activation: a channel
    /// axis that it lacks, blocks of more axes than it has or that do not divide it.
    /// [`prepare`](crate::QatConfig::prepare) refuses only what weights tell: blocks that do not
    /// divide the last axis of a linear layer's input or output.
    fn forward_q(&self, input: Input) -> Self::Output;
}

/// A layer's input on the autodiff device of its weight: a batch that was made without autodiff is a
/// constant in training, and observed like any other. In a recording nothing is observed, and there is
/// no tape.
fn input_of<const W: usize, const D: usize>(weight: &Param<Tensor<W>>, x: Tensor<D>) -> Tensor<D> {
    match weight.lazy_device().gradient_checkpointing_strategy() {
        Some(strategy) if !x.is_autodiff() && !is_active() => on_tape(x, strategy),
        _ => x,
    }
}

/// Input quantizer, forward pass, output quantizer.
fn around<const W: usize, const D: usize>(
    weight: &Param<Tensor<W>>,
    x: Tensor<D>,
    forward: impl FnOnce(Tensor<D>) -> Tensor<D>,
) -> Tensor<D> {
    match WeightQuantizer::of(weight) {
        Some(quantizers) => {
            let x = quantizers.quantize_input(input_of(weight, x));
            quantizers.quantize_output(forward(x))
        }
        None => forward(x),
    }
}

impl<const D: usize> ForwardQ<Tensor<D>> for Linear {
    type Output = Tensor<D>;

    fn forward_q(&self, input: Tensor<D>) -> Tensor<D> {
        #[cfg(feature = "kernels")]
        if let Some(output) = crate::codes::kernel::linear(self, &input) {
            return output;
        }
        around(&self.weight, input, |x| {
            layer_inputs::linear(&self.weight, &x);
            self.forward(x)
        })
    }
}

impl<const D: usize> ForwardQ<Tensor<D>> for SwiGlu {
    type Output = Tensor<D>;

    fn forward_q(&self, input: Tensor<D>) -> Tensor<D> {
        let gate = silu(self.linear_inner.forward_q(input.clone()));
        gate * self.linear_outer.forward_q(input)
    }
}

impl ForwardQ<Tensor<3>> for Conv1d {
    type Output = Tensor<3>;

    fn forward_q(&self, input: Tensor<3>) -> Tensor<3> {
        #[cfg(feature = "kernels")]
        if let Some(output) = crate::codes::kernel::conv1d(self, &input) {
            return output;
        }
        around(&self.weight, input, |x| {
            layer_inputs::conv1d(self, &x);
            self.forward(x)
        })
    }
}

impl ForwardQ<Tensor<4>> for Conv2d {
    type Output = Tensor<4>;

    fn forward_q(&self, input: Tensor<4>) -> Tensor<4> {
        #[cfg(feature = "kernels")]
        if let Some(output) = crate::codes::kernel::conv2d(self, &input) {
            return output;
        }
        around(&self.weight, input, |x| {
            layer_inputs::conv2d(self, &x);
            self.forward(x)
        })
    }
}

macro_rules! convolutions {
    ($($layer:ty, $rank:literal;)*) => {$(
        impl ForwardQ<Tensor<$rank>> for $layer {
            type Output = Tensor<$rank>;

            fn forward_q(&self, input: Tensor<$rank>) -> Tensor<$rank> {
                around(&self.weight, input, |x| self.forward(x))
            }
        }
    )*};
}

convolutions! {
    Conv3d, 5;
    ConvTranspose1d, 3;
    ConvTranspose2d, 4;
    ConvTranspose3d, 5;
}

impl ForwardQ<Tensor<2, Int>> for Embedding {
    type Output = Tensor<3>;

    fn forward_q(&self, input: Tensor<2, Int>) -> Tensor<3> {
        let output = self.forward(input);
        match WeightQuantizer::of(&self.weight) {
            Some(quantizers) => quantizers.quantize_output(output),
            None => output,
        }
    }
}
