//! A model against figures of another implementation of it.

use std::collections::BTreeMap;
use std::path::Path;

use burn::tensor::{Device, Tensor, TensorData};
use burn_lean::oneshot::KvFormat;
use serde::Deserialize;

use super::checkpoint::Windows;
use super::evaluate::{batches, likelihoods, speak};
use super::llama::Llama;

/// By how much a logit may be off: sums of a few hundred F32 products in another order, through
/// some layers, with logits of up to 30.
const LOGIT: f32 = 1e-4;
/// By how much the mean of a window's log-likelihoods may be off.
const LIKELIHOOD: f64 = 1e-5;

/// What another implementation of a model gives for the windows of `eval`; the file may say more.
#[derive(Debug, Deserialize)]
pub(crate) struct Expected {
    /// Of the first window, by position: a number for each token of the vocabulary.
    logits: BTreeMap<usize, Vec<f32>>,
    /// Negative log-likelihoods.
    mean_nll_per_eval_window: Vec<f64>,
    /// The likeliest continuation of token 1, with it.
    greedy_from_bos_100: Vec<i64>,
}

/// The largest deviations that were found.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Deviations {
    pub(crate) logit: f32,
    pub(crate) likelihood: f64,
    /// Tokens that were generated.
    pub(crate) tokens: usize,
}

impl Expected {
    /// Tokens of the longest text that a model is to say.
    pub(crate) fn positions(&self) -> usize {
        self.greedy_from_bos_100.len()
    }

    pub(crate) fn load(file: &Path) -> Result<Self, String> {
        let text = std::fs::read(file).map_err(|error| format!("{}: {error}", file.display()))?;
        serde_json::from_slice(&text).map_err(|error| format!("{}: {error}", file.display()))
    }

    /// # Errors
    ///
    /// The first figure that is off by more than F32 explains.
    pub(crate) fn check(
        &self,
        model: &Llama,
        eval: &Windows,
        batch: usize,
        device: &Device,
    ) -> Result<Deviations, String> {
        let mut most = Deviations::default();
        let length = eval.length - 1;
        let first = TensorData::new(eval.tokens[..length].to_vec(), [1, length]);
        let logits = model.forward(Tensor::from_data(first, device));
        let [_, _, vocabulary] = logits.dims();
        let logits: Vec<f32> = logits.into_data().iter::<f32>().collect();
        for (position, expected) in &self.logits {
            let found = logits.chunks(vocabulary).nth(*position).unwrap_or(&[]);
            if found.len() != expected.len() {
                return Err(format!(
                    "position {position} has {} logits, expected {}",
                    found.len(),
                    expected.len()
                ));
            }
            for (token, (found, expected)) in found.iter().zip(expected).enumerate() {
                let off = (found - expected).abs();
                // `!(..)`, as NaN is wrong, too.
                if !(off <= LOGIT) {
                    return Err(format!(
                        "logit of token {token} at position {position} is {found}, expected {expected}"
                    ));
                }
                most.logit = most.logit.max(off);
            }
        }
        let parts = batches(eval, eval.count(), batch, device);
        let parts = parts
            .into_iter()
            .flat_map(|(inputs, targets)| likelihoods(model.forward(inputs), targets));
        let parts: Vec<(f64, usize)> = parts.collect();
        if parts.len() != self.mean_nll_per_eval_window.len() {
            return Err(format!(
                "there are {} windows, expected {}",
                parts.len(),
                self.mean_nll_per_eval_window.len()
            ));
        }
        for (window, ((sum, count), expected)) in
            parts.iter().zip(&self.mean_nll_per_eval_window).enumerate()
        {
            let found = sum / *count as f64;
            let off = (found - expected).abs();
            if !(off <= LIKELIHOOD) {
                return Err(format!(
                    "mean negative log-likelihood of window {window} is {found}, expected {expected}"
                ));
            }
            most.likelihood = most.likelihood.max(off);
        }
        let expected = &self.greedy_from_bos_100;
        let count = expected.len().saturating_sub(1);
        let said = speak(model, count, KvFormat::Float, device).tokens;
        match said.iter().zip(expected).position(|(a, b)| a != b) {
            Some(at) => Err(format!(
                "generated token {at} is {}, expected {}",
                said[at], expected[at]
            )),
            None => {
                most.tokens = count;
                Ok(most)
            }
        }
    }
}
