//! Figures of another implementation of a model.

use std::collections::BTreeMap;
use std::path::PathBuf;

use burn::tensor::{Device, Tensor, TensorData};
use burn_lean::quant::KvFormat;
use serde::Deserialize;

use crate::checkpoint::{Checkpoint, Windows};
use crate::evaluate::{batches, likelihoods, speak};
use crate::support::values;

/// By how much a logit may be off: sums of a few hundred F32 products in another order, through
/// some layers, with logits of up to 30.
const LOGIT: f32 = 1e-4;
/// By how much the mean of a window's log-likelihoods may be off.
const LIKELIHOOD: f64 = 1e-5;

/// What another implementation of a model gives for the windows of `eval`; the file may say more.
#[derive(Debug, Deserialize)]
struct Expected {
    /// Of the first window, by position: a number for each token of the vocabulary.
    logits: BTreeMap<usize, Vec<f32>>,
    /// Negative log-likelihoods.
    mean_nll_per_eval_window: Vec<f64>,
    /// The likeliest continuation of token 1, with it.
    greedy_from_bos_100: Vec<i64>,
}

/// `LEAN_LLAMA` names a folder with a checkpoint, `tokens.safetensors` and `expected.json` of another
/// implementation; without it there is nothing to compare.
#[test]
fn a_checkpoint_from_outside_gives_what_it_gives_elsewhere() {
    let Some(folder) = std::env::var_os("LEAN_LLAMA").map(PathBuf::from) else {
        eprintln!("LEAN_LLAMA is not set: no checkpoint is compared");
        return;
    };
    let device = Device::flex();
    let entries = std::fs::read_dir(&folder).unwrap();
    let file = entries.map(|entry| entry.unwrap().path()).find(|path| {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        name.ends_with(".safetensors") && name != "tokens.safetensors"
    });
    let eval = Windows::load(&folder.join("tokens.safetensors"), "eval").unwrap();
    let expected = std::fs::read(folder.join("expected.json")).unwrap();
    let expected: Expected = serde_json::from_slice(&expected).unwrap();
    let positions = eval.length.max(expected.greedy_from_bos_100.len());
    let checkpoint = Checkpoint::open(&file.unwrap(), None, positions).unwrap();
    let model = checkpoint.load(&device).unwrap();

    let length = eval.length - 1;
    let first = TensorData::new(eval.tokens[..length].to_vec(), [1, length]);
    let logits = model.forward(Tensor::from_data(first, &device));
    let [_, _, vocabulary] = logits.dims();
    let logits = values(logits);
    for (position, expected) in &expected.logits {
        let found = logits.chunks(vocabulary).nth(*position).unwrap_or(&[]);
        assert_eq!(found.len(), expected.len(), "position {position}");
        for (token, (found, expected)) in found.iter().zip(expected).enumerate() {
            let near = (found - expected).abs() <= LOGIT;
            assert!(
                near,
                "token {token} at position {position}: {found} and {expected}"
            );
        }
    }

    let parts = batches(&eval, eval.count(), 8, &device).into_iter();
    let parts = parts.flat_map(|(inputs, targets)| likelihoods(model.forward(inputs), targets));
    let found = parts.map(|(sum, count)| sum / count as f64);
    assert_near!(found, &expected.mean_nll_per_eval_window, LIKELIHOOD);

    let count = expected.greedy_from_bos_100.len() - 1;
    let said = speak(&model, count, KvFormat::Float, &device);
    assert_eq!(said.tokens, expected.greedy_from_bos_100);
}
