//! The model of the example: names of checkpoints, and generation with a cache.

use std::collections::HashMap;
use std::path::Path;

use burn::tensor::{Device, Tensor};
use burn_lean::oneshot::{OneShot, Preset};
use safetensors::Dtype;
use safetensors::tensor::TensorView;

use crate::checkpoint;
use crate::llama::{Cache, Llama};
use crate::support::{each_device, parameters, tensor, values};
use crate::{small_llama, tokens};

pub(crate) fn near(expected: &[f32], found: &[f32]) {
    assert_eq!(expected.len(), found.len());
    for (expected, found) in expected.iter().zip(found) {
        assert!(
            (expected - found).abs() < 1e-4,
            "{found} instead of {expected}"
        );
    }
}

/// Writes the small model with `[outputs, inputs]` matrices under other names.
pub(crate) fn write(model: &Llama, file: &Path, hugging_face: bool) {
    let names = [
        ("tok_embeddings.", "model.embed_tokens."),
        ("attention_norm.", "input_layernorm."),
        ("ffn_norm.", "post_attention_layernorm."),
        ("attention.wq.", "self_attn.q_proj."),
        ("attention.wk.", "self_attn.k_proj."),
        ("attention.wv.", "self_attn.v_proj."),
        ("attention.wo.", "self_attn.o_proj."),
        ("feed_forward.w1.", "mlp.gate_proj."),
        ("feed_forward.w2.", "mlp.down_proj."),
        ("feed_forward.w3.", "mlp.up_proj."),
    ];
    let mut stored: Vec<(String, Vec<usize>, Vec<u8>)> = Vec::new();
    for parameter in parameters(model) {
        let mut name = parameter.path.replace("gamma", "weight");
        let mut numbers = parameter.values;
        let mut shape = vec![numbers.len()];
        if name.starts_with("tok_embeddings") {
            shape = vec![24, 16];
        } else if !name.contains("norm") {
            let inputs = if name.contains("w2") { 20 } else { 16 };
            let outputs = numbers.len() / inputs;
            let at = |row: usize, column: usize| numbers[column * outputs + row];
            // Of the 4 features of a head, Hugging Face has the even ones first.
            let rotated = hugging_face && (name.contains("wq") || name.contains("wk"));
            let source = |row: usize| match rotated {
                true => row / 4 * 4 + [0, 2, 1, 3][row % 4],
                false => row,
            };
            let by_rows =
                (0..outputs * inputs).map(|index| at(source(index / inputs), index % inputs));
            numbers = by_rows.collect();
            shape = vec![outputs, inputs];
        }
        if hugging_face {
            names
                .iter()
                .for_each(|(ours, theirs)| name = name.replace(ours, theirs));
            if !name.starts_with("model.") {
                name = format!("model.{name}");
            }
        }
        stored.push((
            name,
            shape,
            numbers.iter().flat_map(|x| x.to_le_bytes()).collect(),
        ));
    }
    let views = stored.iter().map(|(name, shape, bytes)| {
        (
            name.clone(),
            TensorView::new(Dtype::F32, shape.clone(), bytes).unwrap(),
        )
    });
    let heads = HashMap::from([("n_heads".to_string(), "4".to_string())]);
    let metadata = (!hugging_face).then_some(heads);
    safetensors::serialize_to_file(views, metadata, file).unwrap();
}

#[test]
fn names_of_meta_and_of_hugging_face_give_the_same_logits() {
    let device = Device::flex();
    let folder = tempfile::tempdir().unwrap();
    let model = small_llama(&device);
    for hugging_face in [false, true] {
        let file = folder.path().join("model.safetensors");
        write(&model, &file, hugging_face);
        // Only one of the two files says how many heads there are.
        let heads = hugging_face.then_some(4);
        let loaded = checkpoint::load(&file, heads, 16, &device).unwrap();
        for batch in tokens(&device) {
            near(
                &values(model.forward(batch.clone())),
                &values(loaded.forward(batch)),
            );
        }
        if hugging_face {
            let error = checkpoint::load(&file, None, 16, &device).unwrap_err();
            assert!(error.to_string().contains("--heads"), "{error}");
        }
    }
}

#[test]
fn token_by_token_with_a_cache_is_the_whole_sequence_at_once() {
    each_device(|target| {
        let device = &target.device;
        let done = OneShot::new(Preset::w4a16(8))
            .compress(small_llama(device), tokens(device), |model, x| {
                model.forward(x)
            })
            .unwrap();
        let batch = tokens(device).remove(1);
        let whole = done.model.forward(batch.clone());
        let mut cache = Cache::default();
        let parts = [0..5, 5..6, 6..7, 7..16].map(|range| {
            done.model
                .forward_cache(batch.clone().slice([0..2, range]), &mut cache)
        });
        near(&values(whole), &values(Tensor::cat(parts.to_vec(), 1)));
    });
}

#[test]
fn windows_of_tokens_are_i32() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tokens.safetensors");
    let bytes: Vec<u8> = (0..6i32).flat_map(|token| token.to_le_bytes()).collect();
    let view = TensorView::new(Dtype::I32, vec![2, 3], &bytes).unwrap();
    let wrong = tensor::<1>(1, [6], &Device::flex()).into_data();
    let wrong = TensorView::new(Dtype::F32, vec![2, 3], wrong.as_bytes()).unwrap();
    let named = [("eval", view), ("calibration", wrong)];
    safetensors::serialize_to_file(named, None, &file).unwrap();
    let windows = checkpoint::Windows::load(&file, "eval").unwrap();
    assert_eq!((windows.count(), windows.length), (2, 3));
    assert_eq!(windows.tokens, [0, 1, 2, 3, 4, 5]);
    let Err(error) = checkpoint::Windows::load(&file, "calibration") else {
        panic!("F32 are no tokens");
    };
    assert!(error.to_string().contains("I32"), "{error}");
}
