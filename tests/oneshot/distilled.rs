//! Fine-tuning a pruned model towards the original.

use burn::tensor::{Device, Tensor};
use burn_lean::oneshot::{Compressed, OneShot, load_compressed};

use crate::checkpoint::Windows;
use crate::finetune::{Finetuning, divergence, finetune};
use crate::llama::Llama;
use crate::support::{each_device, parameters, values};
use crate::{logit_error, parameter, small_llama, tokens};

#[test]
fn the_divergence_and_its_gradient_are_those_of_the_formula() {
    each_device(|target| {
        for size in [1.0, 300.0, 3e4] {
            let device = target.device.clone().autodiff();
            let student = Tensor::<3>::from_floats([[[1.0, 0.0, -1.0], [0.0, 0.5, 1.0]]], &device);
            let teacher = Tensor::<3>::from_floats([[[0.0, 0.5, 0.0], [0.0, 0.5, 1.0]]], &device);
            let student = (student * size).require_grad();
            let teacher = teacher * size;
            let loss = divergence(student.clone(), teacher.clone());
            let softmax = |row: [f64; 3]| {
                let most = row.iter().fold(f64::MIN, |all, x| all.max(*x));
                let parts = row.map(|x| (x - most).exp());
                let sum: f64 = parts.iter().sum();
                (parts.map(|x| x / sum), row.map(|x| x - most - sum.ln()))
            };
            let (s, log_s) = softmax([size, 0.0, -size]);
            let (t, log_t) = softmax([0.0, 0.5 * size, 0.0]);
            let terms = (0..3).map(|at| match t[at] > 0.0 {
                true => t[at] * (log_t[at] - log_s[at]),
                false => 0.0,
            });
            // Of two positions the second is right already.
            let expected = terms.sum::<f64>() / 2.0;
            let found = loss.clone().into_scalar::<f64>();
            assert!(
                (found - expected).abs() <= 1e-5 * expected,
                "{found} {expected}"
            );
            let grads = loss.backward();
            let gradient = values(student.grad(&grads).unwrap());
            for (at, found) in gradient.iter().enumerate() {
                let expected = match at < 3 {
                    true => (s[at] - t[at]) / 2.0,
                    false => 0.0,
                };
                assert!(
                    (f64::from(*found) - expected).abs() < 1e-6,
                    "{found} {expected}"
                );
            }
        }
    });
}

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
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.safetensors");
    tuned.save(&file).unwrap();
    let loaded = load_compressed(small_llama(&device), &file).unwrap();
    assert_eq!(parameters(&loaded.model), parameters(&tuned.model));
}
