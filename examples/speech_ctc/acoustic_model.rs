//! The network: convolutions that shorten time, attention over the whole utterance.

use burn::module::Module;
use burn::nn::conv::{Conv1d, Conv1dConfig};
use burn::nn::loss::{CTCLossConfig, Reduction};
use burn::nn::transformer::{TransformerEncoder, TransformerEncoderConfig};
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig, PaddingConfig1d};
use burn::tensor::activation::{log_softmax, relu};
use burn::tensor::{Device, Int, Tensor};
use burn_lean::quant::{qat::TransformerEncoderInput, quantize_calls};

use crate::batches::{BLANK, Batch};
use crate::corpus::SYMBOLS;
use crate::log_mel::BANDS;

/// The blank, and one for each symbol.
pub(crate) const CLASSES: usize = 1 + SYMBOLS;
/// Frames of the input per step of the output: 80 ms.
pub(crate) const FRAMES_PER_STEP: usize = 8;
/// Features of a step.
const WIDTH: usize = 96;

/// An ordinary Burn model: nothing in it knows about mixed precision, pruning or CTC.
#[derive(Module, Debug)]
pub(crate) struct AcousticModel {
    conv1: Conv1d,
    conv2: Conv1d,
    conv3: Conv1d,
    conv4: Conv1d,
    encoder: TransformerEncoder,
    norm: LayerNorm,
    head: Linear,
}

// The attribute lets the layers called below quantize what they are given. In a model that is not
// prepared for that, it changes nothing.
#[quantize_calls(crate = burn_lean::quant)]
impl AcousticModel {
    pub(crate) fn new(device: &Device) -> Self {
        let conv = |channels, stride| {
            Conv1dConfig::new(channels, WIDTH, 5)
                .with_stride(stride)
                .with_padding(PaddingConfig1d::Explicit(2, 2))
                .init(device)
        };
        Self {
            conv1: conv(BANDS, 2),
            conv2: conv(WIDTH, 2),
            conv3: conv(WIDTH, 2),
            conv4: conv(WIDTH, 1),
            encoder: TransformerEncoderConfig::new(WIDTH, 2 * WIDTH, 4, 1)
                .with_norm_first(true)
                .with_dropout(0.0)
                .init(device),
            norm: LayerNormConfig::new(WIDTH).init(device),
            head: LinearConfig::new(WIDTH, CLASSES).init(device),
        }
    }

    /// Spectra `[batch, bands, frames]` to logits `[batch, frames / 8, classes]`.
    ///
    /// The steps have no positions: what comes after what the convolutions see, which together cover
    /// the 0.6 s in which a digit is spoken, and which symbol is the third nobody has to know.
    pub(crate) fn forward(&self, spectra: Tensor<3>) -> Tensor<3> {
        let x = relu(self.conv1.forward(spectra));
        let x = relu(self.conv2.forward(x));
        let x = relu(self.conv3.forward(x));
        let x = relu(self.conv4.forward(x)).swap_dims(1, 2);
        let x = self.encoder.forward(TransformerEncoderInput::new(x));
        self.head.forward(self.norm.forward(x))
    }
}

/// Mean over the batch of the CTC loss per symbol.
///
/// Logits `[batch, steps, classes]`, labels `[batch, longest]`, their numbers `[batch]`. The loss is
/// −ln of the probability of the labels, the sum over all alignments of them: over all sequences of
/// a class per step that [`collapse`](crate::decoding::collapse) to them (Graves et al. 2006).
pub(crate) fn ctc_loss(
    logits: Tensor<3>,
    labels: Tensor<2, Int>,
    lengths: Tensor<1, Int>,
) -> Tensor<1> {
    let [batch, steps, _] = logits.dims();
    let log_probabilities = log_softmax(logits, 2).swap_dims(0, 1);
    let all_steps = Tensor::full([batch], steps as i64, &lengths.device());
    CTCLossConfig::new()
        .with_blank(BLANK)
        .init()
        .forward_with_reduction(
            log_probabilities,
            labels,
            all_steps,
            lengths,
            Reduction::Mean,
        )
}

/// The loss of a batch in the precision of the model.
pub(crate) fn loss(model: &AcousticModel, (spectra, labels, lengths): Batch) -> Tensor<1> {
    ctc_loss(model.forward(spectra), labels, lengths)
}
