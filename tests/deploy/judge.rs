//! An exported model, run by the engine, against Burn's own forward pass.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{LazyLock, Mutex};

use burn::module::Module;
use burn::tensor::{DType, Tensor, TensorData};
use burn_lean::deploy::{Backend, EngineConfig, Export, Exported, Form};
use burn_lean::graph::{TensorMapper, Tensors};

use crate::support::values;

/// A model without parameters.
#[derive(Module, Debug, Default)]
pub(crate) struct Nothing {}

/// The largest difference that two F32 implementations may have: their sums of up to some hundred
/// terms are rounded in different orders.
const TOLERANCE: f32 = 2e-5;

/// Exports, runs, compares; returns what was exported.
pub(crate) fn same<const D: usize, M: Module, I: Tensors + Clone>(
    model: &M,
    inputs: I,
    forward: impl Fn(&M, I) -> Tensor<D>,
) -> Exported {
    let expected = forward(model, inputs.clone());
    let export = Export::record(model, &inputs, &forward).unwrap();
    let exported = export.to_onnx(Form::Qdq).unwrap();
    for_the_judge(&exported, &inputs, &expected, None);
    let mut exports = vec![export];
    exports.push(Export::record(model, &inputs, &forward).unwrap());
    for (export, backend) in exports.into_iter().zip([Backend::Own, Backend::Rten]) {
        let config = EngineConfig::new().with_backend(Some(backend));
        let engine = config.compile(export).unwrap();
        assert_eq!(engine.report().backend, backend);
        let found = engine.run(&inputs).unwrap();
        close(found, expected.clone());
    }
    exported
}

/// Whether two tensors agree up to rounding, relative to the largest number.
pub(crate) fn close<const D: usize>(found: Tensor<D>, expected: Tensor<D>) {
    assert_eq!(found.dims(), expected.dims());
    let (found, expected) = (values(found), values(expected));
    let finite = expected.iter().filter(|x| x.is_finite());
    let largest = finite.fold(1.0f32, |most, x| most.max(x.abs()));
    for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
        let both = (found.is_nan() && expected.is_nan()) || found == expected;
        assert!(
            both || (found - expected).abs() <= TOLERANCE * largest,
            "element {index}: {found}, but Burn has {expected}"
        );
    }
}

/// The operators of an exported model, in order.
pub(crate) fn operators(exported: &Exported) -> Vec<&str> {
    exported
        .model
        .nodes()
        .iter()
        .map(|node| node.operator())
        .collect()
}

/// One of 255 steps from the lowest to the highest output: that of an output of 8 bits.
pub(crate) fn output_step(outputs: &[f32]) -> f32 {
    let finite = || outputs.iter().copied().filter(|x| x.is_finite());
    let highest = finite().fold(0.0, f32::max);
    let lowest = finite().fold(0.0, f32::min);
    (highest - lowest) / 255.0
}

/// Whether what was computed of codes is within one output step of the fake-quantized model. Sums of
/// codes are exact; but biases are codes of 32 bits, steps are rounded, and a value so near to the border
/// of two codes may fall to the other one, which what follows weighs.
pub(crate) fn within_a_step<const D: usize>(found: Tensor<D>, fake: Tensor<D>) {
    within_steps(found, fake, 1.0);
}

/// As [`within_a_step`], within as many steps: of recurrences and attention, where such a code is weighed
/// again and again.
pub(crate) fn within_steps<const D: usize>(found: Tensor<D>, fake: Tensor<D>, steps: f32) {
    assert_eq!(found.dims(), fake.dims());
    let (found, fake) = (values(found), values(fake));
    assert_eq!(found.len(), fake.len());
    let step = output_step(&fake);
    for (index, (found, fake)) in found.iter().zip(&fake).enumerate() {
        let both = (found.is_nan() && fake.is_nan()) || found == fake;
        assert!(
            both || (found - fake).abs() <= steps * step,
            "element {index}: {found} is more than {steps} output steps of {step} from {fake}"
        );
    }
}

/// With `LEAN_ONNX=DIR`: the file, its inputs and what comes out, for `tools/judge_onnx.py --folder DIR`.
/// `step`: of a quantized model, how far apart outputs may be.
pub(crate) fn for_the_judge<const D: usize>(
    exported: &Exported,
    inputs: &impl Tensors,
    expected: &Tensor<D>,
    step: Option<f32>,
) {
    let Some(folder) = std::env::var_os("LEAN_ONNX").map(PathBuf::from) else {
        return;
    };
    static COUNTS: LazyLock<Mutex<HashMap<String, usize>>> = LazyLock::new(Mutex::default);
    let test = std::thread::current().name().unwrap_or("main").to_string();
    let name = {
        let mut counts = COUNTS.lock().unwrap();
        let count = counts.entry(test.clone()).or_default();
        *count += 1;
        format!("{}-{count}", test.replace("::", "-"))
    };
    exported
        .model
        .save(folder.join(format!("{name}.onnx")))
        .unwrap();
    let mut read = Read(Vec::new());
    inputs.map_tensors(&mut read);
    let names: Vec<&str> = exported.model.inputs().iter().map(|i| &*i.name).collect();
    assert_eq!(names.len(), read.0.len());
    for (index, data) in read.0.into_iter().enumerate() {
        std::fs::write(folder.join(format!("{name}.input{index}.npy")), npy(data)).unwrap();
    }
    let largest = values(expected.clone());
    let largest = largest.iter().filter(|x| x.is_finite());
    let largest = largest.fold(1.0f32, |most, x| most.max(x.abs()));
    let expected = npy(expected.clone().into_data());
    std::fs::write(folder.join(format!("{name}.expected.npy")), expected).unwrap();
    let about = serde_json::json!({
        "inputs": names,
        "quantized": step.is_some(),
        "within": step.unwrap_or(TOLERANCE * largest),
    });
    std::fs::write(folder.join(format!("{name}.json")), about.to_string()).unwrap();
}

/// Tensors as they come by.
struct Read(Vec<TensorData>);

impl TensorMapper for Read {
    burn_lean::graph::every_kind!(|self, tensor| {
        self.0.push(tensor.clone().into_data());
        tensor.clone()
    });
}

/// The file format of NumPy, version 1.0.
fn npy(data: TensorData) -> Vec<u8> {
    let (element, bytes) = match data.dtype() {
        DType::F32 => ("<f4", data.as_bytes().to_vec()),
        DType::I64 => ("<i8", data.as_bytes().to_vec()),
        DType::I32 => ("<i4", data.as_bytes().to_vec()),
        DType::I16 => ("<i2", data.as_bytes().to_vec()),
        DType::I8 => ("|i1", data.as_bytes().to_vec()),
        DType::U8 => ("|u1", data.as_bytes().to_vec()),
        DType::Bool(_) => ("|b1", data.iter::<bool>().map(u8::from).collect()),
        other => panic!("{other:?} has no letter here"),
    };
    let sizes: String = data.shape().iter().map(|size| format!("{size},")).collect();
    let mut header =
        format!("{{'descr': '{element}', 'fortran_order': False, 'shape': ({sizes}), }}");
    let length = (10 + header.len() + 1).next_multiple_of(64) - 10;
    header = format!("{header:<width$}\n", width = length - 1);
    let mut file = b"\x93NUMPY\x01\x00".to_vec();
    file.extend((length as u16).to_le_bytes());
    file.extend(header.as_bytes());
    file.extend(bytes);
    file
}
