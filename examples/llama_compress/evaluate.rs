//! How good a model is, and how fast.

use std::time::Instant;

use burn::tensor::activation::log_softmax;
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_lean::quant::KvFormat;

use super::checkpoint::Windows;
use super::llama::{Cache, Llama};

/// The largest size of batches up to `most` of which `count` windows make whole ones: an engine takes one size, and
/// a walk is over batches of the same operations, of which Burn has others for a batch of one.
pub(crate) fn even(count: usize, most: usize) -> usize {
    let size = (1..=most.min(count))
        .rev()
        .find(|size| count.is_multiple_of(*size));
    size.unwrap_or(1)
}

/// Inputs and targets `[windows, tokens − 1]` in batches of `size`, the last one of what is left.
pub(crate) fn batches(
    windows: &Windows,
    count: usize,
    size: usize,
    device: &Device,
) -> Vec<(Tensor<2, Int>, Tensor<2, Int>)> {
    let length = windows.length;
    let parts = windows.tokens[..count * length].chunks(size * length);
    parts
        .map(|part| {
            let rows = part.len() / length;
            let part = TensorData::new(part.to_vec(), [rows, length]);
            let part = Tensor::<2, Int>::from_data(part, device);
            (
                part.clone().slice([0..rows, 0..length - 1]),
                part.slice([0..rows, 1..length]),
            )
        })
        .collect()
}

/// Sum of the negative log-likelihoods of `targets`, and how many there are; for each window.
pub(crate) fn likelihoods(logits: Tensor<3>, targets: Tensor<2, Int>) -> Vec<(f64, usize)> {
    let [_, length] = targets.dims();
    let scores = log_softmax(logits, 2).gather(2, targets.unsqueeze_dim(2));
    let scores: Vec<f32> = scores.into_data().iter::<f32>().collect();
    let windows = scores.chunks(length);
    windows
        .map(|window| {
            (
                -window.iter().map(|one| f64::from(*one)).sum::<f64>(),
                length,
            )
        })
        .collect()
}

/// exp of the mean of likelihoods.
pub(crate) fn perplexity_of(parts: &[(f64, usize)]) -> f64 {
    let sum: f64 = parts.iter().map(|part| part.0).sum();
    let count: usize = parts.iter().map(|part| part.1).sum();
    (sum / count.max(1) as f64).exp()
}

/// exp of the mean negative log-likelihood over all windows, with keys and values in `format`.
pub(crate) fn perplexity(
    model: &Llama,
    windows: &Windows,
    size: usize,
    format: KvFormat,
    device: &Device,
) -> f64 {
    let parts = batches(windows, windows.count(), size, device);
    let parts = parts.into_iter().flat_map(|(inputs, targets)| {
        let logits = model.forward_cache(inputs, &mut Cache::new(format));
        likelihoods(logits, targets)
    });
    perplexity_of(&parts.collect::<Vec<_>>())
}

/// What a model says by itself.
pub(crate) struct Said {
    pub(crate) tokens: Vec<i64>,
    pub(crate) per_second: f64,
    /// Of keys and values at the end.
    pub(crate) cache_bytes: usize,
}

/// The likeliest continuation of token 1 by so many, one after the other.
pub(crate) fn speak(model: &Llama, count: usize, format: KvFormat, device: &Device) -> Said {
    let speak = |count: usize| {
        let (mut cache, mut tokens) = (Cache::new(format), vec![1]);
        for at in 0..count {
            let input = Tensor::<1, Int>::from_data([tokens[at]], device).reshape([1, 1]);
            let logits = model.forward_cache(input, &mut cache);
            tokens.push(logits.argmax(2).into_scalar::<i64>());
        }
        (tokens, cache.bytes())
    };
    // The first tokens of a process find nothing warm.
    let _ = speak(count.min(8));
    let start = Instant::now();
    let (tokens, cache_bytes) = speak(count);
    Said {
        tokens,
        per_second: count as f64 / start.elapsed().as_secs_f64(),
        cache_bytes,
    }
}
