//! Layers that round what they are given.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use burn_lean::oneshot::{Activations, Compressed, OneShot, Preset, Target};
use burn_lean::quant::KvFormat;
use burn_lean::quant::QuantizedForward;

use crate::checkpoints::near;
use crate::llama::{Cache, Llama};
use crate::support::{on_each, parameters, tensor, values, with_numbers};
use crate::{logit_error, small_llama, tokens};

/// Each row at the nearest of 2·most + 1 multiples of its scale.
fn rounded(x: &[f32], row: usize, most: f32) -> Vec<f32> {
    let round = |row: &[f32]| {
        let scale = row.iter().fold(0.0f32, |all, x| all.max(x.abs())) / most;
        let round = move |x: &f32| (x / scale).round() * scale;
        row.iter().map(round).collect::<Vec<f32>>()
    };
    x.chunks(row).flat_map(round).collect()
}

#[test]
fn weights_are_solved_for_the_inputs_that_they_will_get() {
    let device = Device::flex();
    let model: Linear = with_numbers(LinearConfig::new(8, 6).with_bias(false).init(&device), 3);
    let x = tensor::<2>(1, [200, 8], &device);
    let coarse = rounded(&values(x.clone()), 8, 3.0);
    let coarse = Tensor::<1>::from_floats(&coarse[..], &device).reshape([200, 8]);
    let error = |activations: Option<Activations>| {
        let preset = Preset::w4a16().with_group(8).with_activations(activations);
        assert_eq!(preset.target, Target::Original);
        let done = OneShot::new(preset)
            .compress(model.clone(), [x.clone()], |model, x| model.forward(x))
            .unwrap();
        let off = done.model.forward(coarse.clone()) - model.forward(x.clone());
        let relative = off.square().sum() / model.forward(x.clone()).square().sum();
        (
            relative.into_scalar::<f64>(),
            done.report.layers[0].relative_error,
        )
    };
    let (aware, reported) = error(Some(Activations::new(3)));
    let (unaware, _) = error(None);
    assert!(aware < 0.95 * unaware, "{aware} {unaware}");
    // The report is of the layer in use.
    assert!(
        (aware - reported).abs() < 0.05 * aware,
        "{aware} {reported}"
    );
}

/// A small Llama in W8A8, and prepared to round what its layers are given.
fn prepared(device: &Device) -> (Compressed<Llama>, Llama) {
    let done = OneShot::new(Preset::w8a8())
        .compress(small_llama(device), tokens(device), |model, x| {
            model.forward(x)
        })
        .unwrap();
    let prepared = done.clone().prepare(Some(&Activations::new(8)));
    let model = prepared.unwrap().model;
    (done, model)
}

#[test]
fn a_prepared_llama_rounds_inputs_of_its_compressed_layers_alone() {
    on_each(|device| {
        let (done, model) = prepared(device);
        // The grid of the weights gives back what is on it.
        let weights = parameters(&model.clone().materialize());
        for (kept, original) in weights.iter().zip(parameters(&done.model)) {
            near(&original.values, &kept.values);
        }
        let batch = tokens(device).remove(1);
        let whole = values(model.forward(batch.clone()));
        let float = values(done.model.forward(batch.clone()));
        assert!(whole.iter().zip(&float).any(|(a, b)| (a - b).abs() > 1e-5));
        let size = (float.iter().map(|x| x * x).sum::<f32>() / float.len() as f32).sqrt();
        let error = logit_error(&model, &done.model, device);
        assert!(error < 0.02 * size, "{error} of {size}");
        // A scale for each token: one by one they are rounded as all at once.
        let mut cache = Cache::default();
        let parts = [0..5, 5..6, 6..7, 7..16]
            .map(|range| model.forward_cache(batch.clone().slice([0..2, range]), &mut cache));
        near(&whole, &values(Tensor::cat(parts.to_vec(), 1)));
    });
}

/// The cache goes in with the tokens and comes back with the logits, keys and values in 8 bits.
#[test]
fn a_recorded_pass_generates_with_a_cache() {
    on_each(|device| {
        let (_, model) = prepared(device);
        let batch = tokens(device).remove(1);
        for format in [KvFormat::Float, KvFormat::Int8] {
            let quantized = QuantizedForward::new().cached();
            let (mut recorded, mut plain) = (Cache::new(format), Cache::new(format));
            for range in [0..5, 5..6, 6..7, 7..16] {
                let part = batch.clone().slice([0..2, range]);
                let expected = model.forward_cache(part.clone(), &mut plain);
                let step = quantized.run(&model, (part, recorded), |model, (part, mut cache)| {
                    (model.forward_cache(part, &mut cache), cache)
                });
                let (logits, cache) = step.unwrap();
                recorded = cache;
                near(&values(expected), &values(logits));
            }
            assert_eq!(recorded.bytes(), plain.bytes());
        }
    });
}

/// A summand of -∞ rules out an output, of the original and of the compressed model.
#[test]
fn what_a_mask_rules_out_behind_a_layer_has_no_part_in_its_targets() {
    let device = Device::flex();
    let model: Vec<Linear> = with_numbers(
        vec![
            LinearConfig::new(8, 8).init(&device),
            LinearConfig::new(8, 4).init(&device),
        ],
        3,
    );
    let forward = |model: &Vec<Linear>, x: Tensor<2>| {
        let hidden = model[0].forward(x);
        // It depends on what is compressed.
        let mask = hidden.clone().narrow(1, 0, 4) * 0.0;
        let ruled_out =
            Tensor::<2>::from_floats([[0.0, f32::NEG_INFINITY, 0.0, 0.0]], &mask.device());
        model[1].forward(hidden) + (mask + ruled_out)
    };
    let x = tensor::<2>(1, [200, 8], &device);
    let done = OneShot::new(Preset::w4a16().with_group(8)).compress(model, [x.clone()], forward);
    let done = done.unwrap();
    assert!(done.report.layers[1].relative_error < 0.1);
    let outputs = values(forward(&done.model, x));
    assert!(outputs.iter().all(|y| !y.is_nan()));
}
