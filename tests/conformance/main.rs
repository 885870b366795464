//! Our rules against reference vectors that we did not compute.
//!
//! Every file in `tests/vectors/` and, if set, in the folder named by `LEAN_VECTORS`.

#[path = "../support/mod.rs"]
mod support;

mod amp;
mod quant_calibrators;
mod quant_fake_quantize;
mod quant_formats;
mod quant_learned;
mod quant_observers;
mod quant_qat_reference;
mod quant_qat_trajectory;
mod quant_weight;

use std::path::PathBuf;

use burn::tensor::{Device, Tensor, TensorData};
use serde_json::Value;

/// The cases of `name` in every folder of vectors, where a case needs nothing that stands beside
/// it.
pub(crate) fn cases(name: &str) -> Vec<Value> {
    let files = files(name);
    files.iter().flat_map(cases_of).cloned().collect()
}

/// The cases of one file; at least one.
pub(crate) fn cases_of(file: &Value) -> &[Value] {
    let cases = file["cases"].as_array().expect("a list of cases");
    assert!(!cases.is_empty(), "a file without cases");
    cases
}

/// The file `name` of every folder of vectors; the project's own must be there.
pub(crate) fn files(name: &str) -> Vec<Value> {
    let own = support::checkout().join("tests/vectors");
    let mut folders = vec![own];
    if let Some(folder) = std::env::var_os("LEAN_VECTORS") {
        let folder = PathBuf::from(folder);
        assert!(
            folder.is_dir(),
            "LEAN_VECTORS names {}, which is no folder",
            folder.display()
        );
        folders.push(folder.join("amp"));
        folders.push(folder.join("quant"));
        folders.push(folder);
    }
    let mut files = Vec::new();
    for (index, folder) in folders.iter().enumerate() {
        let path = folder.join(name);
        if index > 0 && !path.exists() {
            continue;
        }
        let text = std::fs::read_to_string(&path)
            .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let file: Value = serde_json::from_str(&text)
            .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        println!("{} (seed {})", path.display(), file["meta"]["seed"]);
        files.push(file);
    }
    files
}

/// A number, or a (nested) list of numbers, as F32.
pub(crate) fn floats(value: &Value) -> Vec<f32> {
    match value {
        Value::Array(list) => list.iter().flat_map(floats).collect(),
        Value::String(text) => vec![match text.as_str() {
            "NaN" => f32::NAN,
            "Infinity" => f32::INFINITY,
            "-Infinity" => f32::NEG_INFINITY,
            other => panic!("no number: {other}"),
        }],
        number => vec![number.as_f64().expect("a number") as f32],
    }
}

/// The length of each level of nested lists: `[rows, columns]` of a list of rows.
pub(crate) fn nesting(value: &Value) -> Vec<usize> {
    let mut lengths = Vec::new();
    let mut level = value;
    while let Value::Array(list) = level {
        lengths.push(list.len());
        level = list.first().unwrap_or(&Value::Null);
    }
    lengths
}

/// A list of rows.
pub(crate) fn matrix(value: &Value, device: &Device) -> Tensor<2> {
    Tensor::from_data(TensorData::new(floats(value), nesting(value)), device)
}

/// A list of numbers.
pub(crate) fn vector(value: &Value, device: &Device) -> Tensor<1> {
    Tensor::from_data(TensorData::new(floats(value), nesting(value)), device)
}

pub(crate) fn float(value: &Value) -> f32 {
    floats(value)[0]
}

pub(crate) fn flags(value: &Value) -> Vec<bool> {
    let list = value.as_array().expect("a list");
    list.iter().map(|flag| flag.as_bool().unwrap()).collect()
}

/// Whether `found` is within `relative` of `expected`.
pub(crate) fn near(found: f32, expected: f32, relative: f32) -> bool {
    found == expected || (found - expected).abs() <= relative * expected.abs()
}

/// Equal bits, or both NaN.
pub(crate) fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
}
