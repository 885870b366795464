//! What [`quantize_calls`](crate::quantize_calls) turns calls of `forward` into.

use std::ops::Deref;

use burn::nn::attention::MultiHeadAttention;
use burn::nn::conv::{Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d};
use burn::nn::gru::{BiGru, Gru};
use burn::nn::transformer::{
    PositionWiseFeedForward, TransformerDecoder, TransformerDecoderLayer, TransformerEncoder,
    TransformerEncoderLayer,
};
use burn::nn::{BiLstm, BiRnn, Embedding, Linear, Lstm, LstmState, Rnn, RnnState};
use burn::tensor::{Bool, Tensor};

use crate::ForwardQ;

/// Makes a [`Probe`] of anything, or of what a reference refers to.
pub trait IntoProbe {
    /// The probe.
    fn __quantize_probe(&self) -> Probe<'_, Self>;
}

impl<T: ?Sized> IntoProbe for T {
    fn __quantize_probe(&self) -> Probe<'_, Self> {
        Probe(self)
    }
}

/// A layer whose `forward` is `forward_q` if it has one, and its own otherwise.
///
/// A method of the probe itself comes before those of what it dereferences to, and there is one
/// for layers with quantizers only.
#[derive(Debug)]
pub struct Probe<'a, T: ?Sized>(&'a T);

impl<T: ?Sized> Deref for Probe<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0
    }
}

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
    TransformerEncoder,
    TransformerDecoder,
    TransformerDecoderLayer,
);

impl<T: OfOneInput> Probe<'_, T> {
    /// [`ForwardQ::forward_q`].
    pub fn forward<I>(&self, input: I) -> T::Output
    where
        T: ForwardQ<I>,
    {
        self.0.forward_q(input)
    }
}

impl Probe<'_, TransformerEncoderLayer> {
    /// [`ForwardQ::forward_q`].
    pub fn forward(
        &self,
        input: Tensor<3>,
        mask_pad: Option<Tensor<2, Bool>>,
        mask_attn: Option<Tensor<3, Bool>>,
    ) -> Tensor<3> {
        self.0.forward_q((input, mask_pad, mask_attn))
    }
}

macro_rules! of_a_sequence {
    ($($layer:ty: $state:ty => $output:ty;)*) => {$(
        impl Probe<'_, $layer> {
            /// [`ForwardQ::forward_q`].
            pub fn forward(&self, sequence: Tensor<3>, state: Option<$state>) -> $output {
                self.0.forward_q((sequence, state))
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
