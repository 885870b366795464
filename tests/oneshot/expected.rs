//! Figures of another implementation of a model.

use std::path::{Path, PathBuf};

use burn::tensor::{Device, Int, Tensor, TensorData};
use serde_json::{Value, json};

use crate::check::Expected;
use crate::checkpoint::{Checkpoint, Windows};
use crate::small_llama;
use crate::support::{scratch, values};

/// Two windows of ten tokens.
fn windows() -> Windows {
    Windows {
        length: 10,
        tokens: (0..20).map(|at| at * at * 7 % 23).collect(),
    }
}

/// What the small model gives, computed in another way: without a cache, in F64 where it is summed.
fn figures(device: &Device) -> Value {
    let model = small_llama(device);
    let windows = windows();
    let logits = |tokens: &[i32]| {
        let tokens = TensorData::new(tokens.to_vec(), [1, tokens.len()]);
        let logits = values(model.forward(Tensor::<2, Int>::from_data(tokens, device)));
        logits.chunks(24).map(<[f32]>::to_vec).collect::<Vec<_>>()
    };
    let likelihood = |window: &[i32]| {
        let rows = logits(&window[..9]);
        let parts = rows.iter().zip(&window[1..]).map(|(row, target)| {
            let sum: f64 = row.iter().map(|x| f64::from(*x).exp()).sum();
            sum.ln() - f64::from(row[*target as usize])
        });
        parts.sum::<f64>() / 9.0
    };
    let mut said = vec![1i32];
    for _ in 0..8 {
        let rows = logits(&said);
        let last = rows.last().unwrap();
        let best = (0..24)
            .max_by(|a, b| last[*a].total_cmp(&last[*b]))
            .unwrap();
        said.push(best as i32);
    }
    let first = logits(&windows.tokens[..9]);
    json!({
        "positions": [0, 7],
        "logits": { "0": first[0], "7": first[7] },
        "mean_nll_per_eval_window": [likelihood(&windows.tokens[..10]), likelihood(&windows.tokens[10..])],
        "greedy_from_bos_100": said,
    })
}

fn checked(figures: &Value, device: &Device) -> Result<(), String> {
    let (_folder, file) = scratch("expected.json");
    std::fs::write(&file, figures.to_string()).unwrap();
    let found = Expected::load(&file)?.check(&small_llama(device), &windows(), 2, device)?;
    assert_eq!(found.tokens, 8);
    Ok(())
}

#[test]
fn a_model_that_computes_the_same_passes() {
    let device = Device::flex();
    checked(&figures(&device), &device).unwrap();
}

#[test]
fn what_is_off_is_named() {
    let device = Device::flex();
    let right = figures(&device);
    let wrong = |change: &dyn Fn(&mut Value)| {
        let mut figures = right.clone();
        change(&mut figures);
        checked(&figures, &device).unwrap_err()
    };
    let more = |value: &mut Value, by: f64| *value = json!(value.as_f64().unwrap() + by);
    let error = wrong(&|all| more(&mut all["logits"]["7"][3], 2e-3));
    assert_says!(error, "token 3 at position 7");
    let error = wrong(&|all| more(&mut all["mean_nll_per_eval_window"][1], 2e-4));
    assert_says!(error, "window 1");
    let error = wrong(&|all| {
        let old = all["greedy_from_bos_100"][5].as_i64().unwrap();
        all["greedy_from_bos_100"][5] = json!((old + 1) % 24);
    });
    assert_says!(error, "generated token 5");
    let error = wrong(&|all| all["mean_nll_per_eval_window"] = json!([1.0]));
    assert_says!(error, "2 windows, expected 1");
    let error = wrong(&|all| all["logits"]["12"] = json!([0.0]));
    assert_says!(error, "position 12");
    assert!(Expected::load(Path::new("no such file")).is_err());
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
    let expected = Expected::load(&folder.join("expected.json")).unwrap();
    let positions = eval.length.max(expected.positions());
    let checkpoint = Checkpoint::open(&file.unwrap(), None, positions).unwrap();
    let model = checkpoint.load(&device).unwrap();
    expected.check(&model, &eval, 8, &device).unwrap();
}
