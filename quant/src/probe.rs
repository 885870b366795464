//! What [`quantize_calls`](crate::quantize_calls) turns calls of `forward` into.

use std::ops::Deref;

use burn::nn::attention::MultiHeadAttention;
use burn::nn::conv::{Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d};
use burn::nn::gru::Gru;
use burn::nn::transformer::{PositionWiseFeedForward, TransformerEncoder, TransformerEncoderLayer};
use burn::nn::{Embedding, Linear, Lstm, LstmState};
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

impl Probe<'_, Lstm> {
    /// [`ForwardQ::forward_q`].
    pub fn forward(
        &self,
        sequence: Tensor<3>,
        state: Option<LstmState<2>>,
    ) -> (Tensor<3>, LstmState<2>) {
        self.0.forward_q((sequence, state))
    }
}

impl Probe<'_, Gru> {
    /// [`ForwardQ::forward_q`].
    pub fn forward(&self, sequence: Tensor<3>, state: Option<Tensor<2>>) -> Tensor<3> {
        self.0.forward_q((sequence, state))
    }
}
