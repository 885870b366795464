//! An exported model, run by the engine, against Burn's own forward pass.

use burn::module::Module;
use burn::tensor::Tensor;
use burn_lean::deploy::{Backend, EngineConfig, Export, Exported, Form};
use burn_lean::graph::Tensors;

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
    let largest = expected.iter().fold(1.0f32, |most, x| most.max(x.abs()));
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
