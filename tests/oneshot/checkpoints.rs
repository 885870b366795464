//! The model of the example: names of checkpoints, and generation with a cache.

use std::collections::HashMap;
use std::path::Path;

use burn::tensor::{DType, Device, Tensor};
use burn_lean::oneshot::{OneShot, Preset};
use burn_lean::quant::KvFormat;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

use crate::checkpoint::{Checkpoint, Windows};
use crate::evaluate::{batches, even, perplexity};
use crate::llama::{Cache, Llama};
use crate::support::{on_each, parameters, scratch, tensor, values};
use crate::{small_llama, tokens};

pub(crate) fn near(expected: &[f32], found: &[f32]) {
    assert_eq!(expected.len(), found.len());
    assert_near!(expected.iter(), found, 1e-4);
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
        ("output.", "lm_head."),
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
            // Of the 4 features of a head, Meta has those that are rotated with each other side by side.
            let rotated = !hugging_face && (name.contains("wq") || name.contains("wk"));
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
            if !name.starts_with("model.") && !name.starts_with("lm_head.") {
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
        let loaded = Checkpoint::open(&file, heads, 16).unwrap();
        let loaded = loaded.load(&device).unwrap();
        for batch in tokens(&device) {
            near(
                &values(model.forward(batch.clone())),
                &values(loaded.forward(batch)),
            );
        }
        if hugging_face {
            let Err(error) = Checkpoint::open(&file, None, 16) else {
                panic!("nothing says how many heads there are");
            };
            assert_says!(error, "--heads");
        }
    }
}

#[test]
fn blocks_by_themselves_are_the_model_under_either_names() {
    let device = Device::flex();
    let folder = tempfile::tempdir().unwrap();
    let model = small_llama(&device);
    for hugging_face in [false, true] {
        let file = folder.path().join("model.safetensors");
        write(&model, &file, hugging_face);
        let checkpoint = Checkpoint::open(&file, Some(4), 16).unwrap();
        let ends = checkpoint.ends(&device).unwrap();
        for batch in tokens(&device) {
            let mut x = ends.embed(batch.clone());
            for number in 0..2 {
                x = checkpoint.block(number, &device).unwrap().forward(x);
            }
            near(&values(model.forward(batch)), &values(ends.head(x)));
        }
    }
}

/// A copy of a checkpoint of F32 in BF16, with a further tensor where one is named.
fn copy_in_half(from: &Path, to: &Path, more: Option<&str>) {
    let bytes = std::fs::read(from).unwrap();
    let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
    let metadata = header.metadata().clone();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tensors = file.tensors().into_iter();
    let mut stored: Vec<(String, Vec<usize>, Vec<u8>)> = tensors
        .map(|(name, view)| {
            let numbers = view.data().chunks_exact(4);
            let numbers = numbers.map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
            let bytes = numbers.flat_map(|number| half::bf16::from_f32(number).to_le_bytes());
            (name, view.shape().to_vec(), bytes.collect::<Vec<u8>>())
        })
        .collect();
    let more = more.map(|name| (name.to_string(), vec![2], vec![0; 4]));
    stored.extend(more);
    let views = stored.iter().map(|(name, shape, bytes)| {
        let view = TensorView::new(Dtype::BF16, shape.clone(), bytes);
        (name.clone(), view.unwrap())
    });
    safetensors::serialize_to_file(views, metadata, to).unwrap();
}

#[test]
fn checkpoints_in_half_precision_become_f32() {
    let device = Device::flex();
    let folder = tempfile::tempdir().unwrap();
    let [file, small] = ["whole", "half"].map(|name| folder.path().join(name));
    let model = small_llama(&device);
    write(&model, &file, false);
    copy_in_half(&file, &small, None);
    let loaded = Checkpoint::open(&small, None, 16).unwrap();
    let loaded = loaded.load(&device).unwrap();
    for (whole, loaded) in parameters(&model).iter().zip(parameters(&loaded)) {
        let rounded = whole
            .values
            .iter()
            .map(|value| half::bf16::from_f32(*value).to_f32());
        assert_eq!(loaded.values, rounded.collect::<Vec<_>>(), "{}", whole.path);
    }
    let logits = loaded.forward(tokens(&device).remove(0));
    assert_eq!(logits.dtype(), DType::F32);
    assert!(values(logits).iter().all(|logit| logit.is_finite()));
}

#[test]
fn checkpoints_of_other_networks_are_refused() {
    let device = Device::flex();
    let folder = tempfile::tempdir().unwrap();
    let [file, other] = ["file", "other"].map(|name| folder.path().join(name));
    write(&small_llama(&device), &file, true);
    let refused = |file: &Path, heads: usize| match Checkpoint::open(file, Some(heads), 16) {
        Ok(_) => panic!("{heads} heads"),
        Err(error) => error.to_string(),
    };
    for name in [
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.1.self_attn.q_norm.weight",
        "score.weight",
    ] {
        copy_in_half(&file, &other, Some(name));
        assert_says!(refused(&other, 4), name);
    }
    // The frequencies of the rotations are known without it.
    copy_in_half(
        &file,
        &other,
        Some("model.layers.0.self_attn.rotary_emb.inv_freq"),
    );
    Checkpoint::open(&other, Some(4), 16).unwrap();
    // Heads of 1 and 16 features, and a number that does not divide.
    for heads in [0, 1, 3, 16] {
        assert_says!(refused(&file, heads), &format!("{heads} heads"));
    }
}

#[test]
fn rotations_and_norms_are_those_that_are_said() {
    let device = Device::flex();
    let (_folder, file) = scratch("model.safetensors");
    write(&small_llama(&device), &file, false);
    let logits = |theta: f32, epsilon: f64| {
        let mut checkpoint = Checkpoint::open(&file, None, 16).unwrap();
        checkpoint.sizes.rope_theta = theta;
        checkpoint.sizes.norm_epsilon = epsilon;
        let model = checkpoint.load(&device).unwrap();
        values(model.forward(tokens(&device).remove(0)))
    };
    let usual = logits(1e4, 1e-5);
    near(
        &values(small_llama(&device).forward(tokens(&device).remove(0))),
        &usual,
    );
    assert_ne!(logits(5e5, 1e-5), usual);
    assert_ne!(logits(1e4, 1e-2), usual);
}

#[test]
fn token_by_token_with_a_cache_is_the_whole_sequence_at_once() {
    on_each(|device| {
        let done = OneShot::new(Preset::w4a16().with_group(8))
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
    let (_folder, file) = scratch("tokens.safetensors");
    let bytes: Vec<u8> = (0..6i32).flat_map(|token| token.to_le_bytes()).collect();
    let view = TensorView::new(Dtype::I32, vec![2, 3], &bytes).unwrap();
    let wrong = tensor::<1>(1, [6], &Device::flex()).into_data();
    let wrong = TensorView::new(Dtype::F32, vec![2, 3], wrong.as_bytes()).unwrap();
    let named = [("eval", view), ("calibration", wrong)];
    safetensors::serialize_to_file(named, None, &file).unwrap();
    let windows = Windows::load(&file, "eval").unwrap();
    assert_eq!((windows.count(), windows.length), (2, 3));
    assert_eq!(windows.tokens, [0, 1, 2, 3, 4, 5]);
    // As many as there are, where more are asked for.
    for (asked, found) in [(1, 1), (2, 2), (usize::MAX, 2)] {
        let first = Windows::load(&file, "eval").unwrap().first(asked);
        assert_eq!((first.count(), first.tokens.len()), (found, 3 * found));
    }
    let Err(error) = Windows::load(&file, "calibration") else {
        panic!("F32 are no tokens");
    };
    assert_says!(error, "I32");

    assert_eq!(windows.check("eval", 6), Ok(()));
    assert_says!(windows.check("eval", 5).unwrap_err(), "token 5");
    let below = Windows {
        length: 2,
        tokens: vec![3, -1],
    };
    assert!(below.check("eval", 6).unwrap_err().contains("token -1"));
}

#[test]
fn windows_are_evaluated_in_full_batches_whatever_their_number_is() {
    let device = Device::flex();
    let windows = Windows {
        length: 16,
        tokens: (0..7 * 16).map(|at| at * at % 23).collect(),
    };
    let sizes = |size| -> Vec<usize> {
        let batches = batches(&windows, 7, size, &device).into_iter();
        batches.map(|(inputs, _)| inputs.dims()[0]).collect()
    };
    assert_eq!(sizes(3), [3, 3, 1]);
    assert_eq!(sizes(8), [7]);
    let model = small_llama(&device);
    let of = |size| perplexity(&model, &windows, size, KvFormat::Float, &device);
    assert!((of(3) / of(7) - 1.0).abs() < 1e-5, "{} {}", of(3), of(7));
    // What takes batches of one size gets the largest that there is.
    for (count, most, expected) in [(7, 3, 1), (8, 3, 2), (6, 8, 6), (126, 8, 7)] {
        assert_eq!(even(count, most), expected, "{count} {most}");
    }
}

#[test]
fn windows_without_a_token_to_predict_are_refused() {
    let (_folder, file) = scratch("tokens.safetensors");
    for shape in [[0, 4], [3, 1], [2, 0]] {
        let bytes = vec![0u8; 4 * shape[0] * shape[1]];
        let view = TensorView::new(Dtype::I32, shape.to_vec(), &bytes).unwrap();
        safetensors::serialize_to_file([("eval", view)], None, &file).unwrap();
        let Err(error) = Windows::load(&file, "eval") else {
            panic!("{shape:?} was taken");
        };
        assert_says!(error, &format!("{shape:?}"));
    }
}
