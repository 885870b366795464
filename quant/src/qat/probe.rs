//! What [`quantize_calls`](crate::quantize_calls) turns calls of `forward` into.
//!
//! The attribute writes `(&&layer).forward(x)` for `layer.forward(x)`. Method lookup takes one
//! reference after the other off, so it comes by `&&Layer` before it comes to the layer's own
//! method, however many references `layer` is behind. There it finds the methods below, if the layer
//! is one that has quantizers; of anything else it goes on to the method that was meant.

use burn::nn::attention::MultiHeadAttention;
use burn::nn::conv::{Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d};
use burn::nn::gru::{BiGru, Gru};
use burn::nn::transformer::{
    PositionWiseFeedForward, TransformerDecoder, TransformerDecoderLayer, TransformerEncoder,
    TransformerEncoderLayer,
};
use burn::nn::{BiLstm, BiRnn, Embedding, Linear, Lstm, LstmState, Rnn, RnnState, SwiGlu};
use burn::tensor::{Bool, Tensor};

use crate::ForwardQ;

/// Layers whose `forward` takes one argument.
pub trait OfOneInput {}

macro_rules! of_one_input {
    ($($layer:ty),* $(,)?) => {$(impl OfOneInput for $layer {})*};
}

of_one_input!(
    Linear,
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTranspose1d,
    ConvTranspose2d,
    ConvTranspose3d,
    Embedding,
    MultiHeadAttention,
    PositionWiseFeedForward,
    SwiGlu,
    TransformerEncoder,
    TransformerDecoder,
    TransformerDecoderLayer,
);

/// `forward` of a layer with one argument.
pub trait ForwardOfOneInput<I> {
    /// What the layer gives.
    type Output;

    /// [`ForwardQ::forward_q`].
    fn forward(&self, input: I) -> Self::Output;
}

impl<I, L: OfOneInput + ForwardQ<I>> ForwardOfOneInput<I> for &L {
    type Output = L::Output;

    fn forward(&self, input: I) -> L::Output {
        (**self).forward_q(input)
    }
}

/// `forward` of a layer of a transformer encoder.
pub trait ForwardOfEncoderLayer {
    /// [`ForwardQ::forward_q`].
    fn forward(
        &self,
        input: Tensor<3>,
        mask_pad: Option<Tensor<2, Bool>>,
        mask_attn: Option<Tensor<3, Bool>>,
    ) -> Tensor<3>;
}

impl ForwardOfEncoderLayer for &TransformerEncoderLayer {
    fn forward(
        &self,
        input: Tensor<3>,
        mask_pad: Option<Tensor<2, Bool>>,
        mask_attn: Option<Tensor<3, Bool>>,
    ) -> Tensor<3> {
        (**self).forward_q((input, mask_pad, mask_attn))
    }
}

/// `forward` of a recurrent layer.
pub trait ForwardOfSequence {
    /// The state to start from.
    type State;
    /// What the layer gives.
    type Output;

    /// [`ForwardQ::forward_q`].
    fn forward(&self, sequence: Tensor<3>, state: Option<Self::State>) -> Self::Output;
}

macro_rules! of_a_sequence {
    ($($layer:ty: $state:ty => $output:ty;)*) => {$(
        impl ForwardOfSequence for &$layer {
            type State = $state;
            type Output = $output;

            fn forward(&self, sequence: Tensor<3>, state: Option<$state>) -> $output {
                (**self).forward_q((sequence, state))
            }
        }
    )*};
}

of_a_sequence! {
    Rnn: RnnState<2> => (Tensor<3>, RnnState<2>);
    BiRnn: RnnState<3> => (Tensor<3>, RnnState<3>);
    Lstm: LstmState<2> => (Tensor<3>, LstmState<2>);
    BiLstm: LstmState<3> => (Tensor<3>, LstmState<3>);
    Gru: Tensor<2> => Tensor<3>;
    BiGru: Tensor<3> => (Tensor<3>, Tensor<3>);
}
