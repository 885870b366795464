//! Utterances as tensors, those of about the same length together.

use burn::tensor::{Device, Int, Tensor, TensorData};
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;

use crate::log_mel::{BANDS, LogMel, frames, samples};
use crate::utterance::Utterance;

/// Log-mel spectra `[batch, bands, frames]`, labels `[batch, longest]` filled up with blanks, and
/// how many of them count `[batch]`.
///
/// Spectra are those of a whole utterance, so there is no length to say: the shorter ones of a batch
/// go on with silence.
pub(crate) type Batch = (Tensor<3>, Tensor<2, Int>, Tensor<1, Int>);

/// Utterances in a batch.
pub(crate) const BATCH_SIZE: usize = 16;
/// Batches have a multiple of so many frames: few different shapes.
const FRAMES: usize = 32;

/// The class of the blank; that of a symbol is one higher than its number.
pub(crate) const BLANK: usize = 0;

/// The utterances by length, in batches; the last may be smaller.
pub(crate) fn by_length(utterances: &[Utterance]) -> Vec<Vec<&Utterance>> {
    let mut sorted: Vec<&Utterance> = utterances.iter().collect();
    sorted.sort_by_key(|utterance| utterance.samples.len());
    sorted.chunks(BATCH_SIZE).map(<[_]>::to_vec).collect()
}

/// Batches by length, in an order that the seed determines.
pub(crate) fn shuffled<'a>(
    utterances: &'a [Utterance],
    seed: u64,
    log_mel: &'a LogMel,
    device: &'a Device,
) -> impl Iterator<Item = Batch> + 'a {
    let mut groups = by_length(utterances);
    groups.shuffle(&mut StdRng::seed_from_u64(seed));
    groups
        .into_iter()
        .map(move |group| batch(&group, log_mel, device))
}

/// One batch; `utterances` must not be empty.
pub(crate) fn batch(utterances: &[&Utterance], log_mel: &LogMel, device: &Device) -> Batch {
    let most = |of: fn(&Utterance) -> usize| utterances.iter().map(|one| of(one)).max();
    let longest = most(|one| frames(one.samples.len())).unwrap_or(1);
    let padded = longest.next_multiple_of(FRAMES);
    let labels = most(|one| one.symbols.len()).unwrap_or(0);
    let features: Vec<f32> = utterances
        .iter()
        .flat_map(|one| log_mel.features(&one.padded(samples(padded))))
        .collect();
    let targets: Vec<i64> = utterances
        .iter()
        .flat_map(|one| {
            let classes = one.symbols.iter().map(|symbol| 1 + *symbol as i64);
            classes.chain(std::iter::repeat(BLANK as i64)).take(labels)
        })
        .collect();
    let lengths: Vec<i64> = utterances
        .iter()
        .map(|one| one.symbols.len() as i64)
        .collect();
    let count = utterances.len();
    (
        Tensor::from_data(TensorData::new(features, [count, BANDS, padded]), device),
        Tensor::from_data(TensorData::new(targets, [count, labels]), device),
        Tensor::from_data(TensorData::new(lengths, [count]), device),
    )
}
