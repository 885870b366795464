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
mod quant_qat_trajectory;
mod quant_weight;

use std::path::PathBuf;

use serde_json::Value;

/// The cases of `name` in every folder of vectors; the project's own must be there.
pub(crate) fn cases(name: &str) -> Vec<Value> {
    let cases = files(name).into_iter().map(|mut file| file["cases"].take());
    cases
        .flat_map(|cases| match cases {
            Value::Array(cases) => cases,
            other => panic!("{name}: cases are {other}"),
        })
        .collect()
}

/// The file `name` of every folder of vectors, for what stands beside the cases.
pub(crate) fn files(name: &str) -> Vec<Value> {
    let own = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/vectors");
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

pub(crate) fn float(value: &Value) -> f32 {
    floats(value)[0]
}

pub(crate) fn flags(value: &Value) -> Vec<bool> {
    let list = value.as_array().expect("a list");
    list.iter().map(|flag| flag.as_bool().unwrap()).collect()
}

/// Equal bits, or both NaN.
pub(crate) fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
}
