//! Fine-tuning a pruned model towards the original.

use burn::tensor::Device;
use burn_lean::oneshot::{Compressed, OneShot, load_compressed};

use crate::checkpoint::Windows;
use crate::finetune::{Finetuning, finetune};
use crate::llama::Llama;
use crate::support::{parameters, scratch};
use crate::{logit_error, parameter, small_llama, tokens};

/// A small model, and what is left of it.
fn pruned(device: &Device) -> (Llama, Compressed<Llama>) {
    let original = small_llama(device);
    let done = OneShot::new("sparse-2:4".parse().unwrap());
    let done = done.compress(original.clone(), tokens(device), |model, x| {
        model.forward(x)
    });
    (original, done.unwrap())
}

#[test]
fn a_single_step_is_one() {
    let device = Device::flex();
    let (original, done) = pruned(&device);
    let windows = Windows {
        length: 16,
        tokens: (0..32).map(|at| at * 7 % 23).collect(),
    };
    let how = Finetuning { steps: 1, seed: 1 };
    let tuned = finetune(&done, &original, &windows, how, &device, |_| {}).unwrap();
    let weight = |model| parameter(model, "layers.0.attention.wq.weight").values;
    assert_ne!(weight(&done.model), weight(&tuned.model));
}

#[test]
fn the_model_comes_closer_to_the_original_and_its_zeros_stay() {
    let device = Device::flex();
    let (original, done) = pruned(&device);
    let numbers = tokens(&device).remove(0).into_data();
    let windows = Windows {
        length: 16,
        tokens: numbers.iter::<i64>().map(|token| token as i32).collect(),
    };
    let mut losses = Vec::new();
    let how = Finetuning { steps: 60, seed: 1 };
    let tuned = finetune(&done, &original, &windows, how, &device, |loss| {
        losses.push(loss.into_scalar::<f32>());
    })
    .unwrap();
    assert_eq!(losses.len(), 60);
    let mean = |part: &[f32]| part.iter().sum::<f32>() / part.len() as f32;
    assert!(
        mean(&losses[50..]) < 0.7 * mean(&losses[..10]),
        "{losses:?}"
    );
    let before = logit_error(&done.model, &original, &device);
    let after = logit_error(&tuned.model, &original, &device);
    assert!(after < before, "{after} {before}");
    for weight in &done.weights {
        let find = |model| parameter(model, &weight.path).values;
        let (pruned, tuned) = (find(&done.model), find(&tuned.model));
        assert_eq!(pruned.len(), 2 * weight.zeros());
        let held = pruned.iter().zip(&tuned);
        assert!(held.clone().all(|(old, new)| *old != 0.0 || *new == 0.0));
        assert!(held.clone().any(|(old, new)| old != new), "{}", weight.path);
    }
    // Its file has what was learnt.
    let (_folder, file) = scratch("model.safetensors");
    tuned.save(&file).unwrap();
    let loaded = load_compressed(small_llama(&device), &file).unwrap();
    assert_eq!(parameters(&loaded.model), parameters(&tuned.model));
}
