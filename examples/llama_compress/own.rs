//! A small model of characters, trained here, for runs without a checkpoint.

use std::error::Error;

use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, Int, Tensor, TensorData};

use super::checkpoint::Windows;
use super::llama::{Llama, NORM_EPSILON, ROPE_THETA, Sizes};
use super::support::progress;

/// Lewis Carroll, Alice's Adventures in Wonderland, 1865: in the public domain.
const TEXT: &str = include_str!("alice.txt");
const LENGTH: usize = 64;
/// Windows at the end of the text that models are evaluated on.
const EVALUATED: usize = 12;
const BATCH: usize = 8;

/// The characters of the text, in order.
pub(crate) fn alphabet() -> Vec<char> {
    let mut letters: Vec<char> = TEXT.chars().collect();
    letters.sort();
    letters.dedup();
    letters
}

/// Windows for calibration, and those behind them for evaluation. The text is too short to keep some of
/// it from the model: it is trained on all of it.
pub(crate) fn windows() -> (Windows, Windows) {
    let mut calibration = text();
    let evaluated = EVALUATED * LENGTH;
    let first = calibration.tokens.len().saturating_sub(evaluated);
    let tokens = calibration.tokens.split_off(first);
    let eval = Windows {
        length: LENGTH,
        tokens,
    };
    (calibration, eval)
}

/// The whole text.
fn text() -> Windows {
    let letters = alphabet();
    let tokens = TEXT
        .chars()
        .map(|letter| letters.binary_search(&letter).unwrap_or(0) as i32);
    let mut tokens: Vec<i32> = tokens.collect();
    tokens.truncate(tokens.len() / LENGTH * LENGTH);
    Windows {
        length: LENGTH,
        tokens,
    }
}

/// Of a model that can generate so many tokens.
pub(crate) fn sizes(generate: usize) -> Sizes {
    Sizes {
        vocabulary: alphabet().len(),
        width: 64,
        hidden: 160,
        layers: 2,
        heads: 4,
        kv_heads: 2,
        positions: LENGTH.max(generate),
        own_head: false,
        rope_theta: ROPE_THETA,
        rope_scaling: None,
        norm_epsilon: NORM_EPSILON,
    }
}

/// Trains for some steps.
pub(crate) fn train(
    sizes: &Sizes,
    steps: usize,
    seed: u64,
    device: &Device,
) -> Result<Llama, Box<dyn Error>> {
    device.seed(seed);
    let training = device.clone().autodiff();
    let mut model = sizes.init(&training);
    let windows = text();
    let mut optimizer = AdamWConfig::new().init();
    let bar = progress(steps, "training");
    for step in 0..steps {
        let tokens: Vec<i32> = (0..BATCH)
            .flat_map(|at| {
                // Beginnings that are spread over the text, others in each step.
                let last = windows.tokens.len() - LENGTH - 1;
                let start = (step * BATCH + at) * 7919 % last;
                windows.tokens[start..start + LENGTH + 1].to_vec()
            })
            .collect();
        let tokens = TensorData::new(tokens, [BATCH, LENGTH + 1]);
        let tokens = Tensor::<2, Int>::from_data(tokens, &training);
        let logits = model.forward(tokens.clone().slice([0..BATCH, 0..LENGTH]));
        let [_, _, vocabulary] = logits.dims();
        let targets = tokens
            .slice([0..BATCH, 1..LENGTH + 1])
            .reshape([BATCH * LENGTH]);
        let loss = CrossEntropyLossConfig::new()
            .init(&training)
            .forward(logits.reshape([BATCH * LENGTH, vocabulary]), targets);
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        let rate = 4e-3 * (1.0 - step as f64 / steps as f64);
        model = optimizer.step(rate, model, grads);
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(model.valid())
}
