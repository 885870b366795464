//! Operations of one's own under Burn's kernel fusion: each is queued as one, and runs the kernel of the
//! backend that is fused.

use burn::backend::Backend;
use burn::backend::tensor::{BoolTensor, FloatTensor};
use burn_fusion::custom::{
    CustomOpIr, HandleContainer, OperationFn, OperationIr, StreamId, TensorIr, TensorSpec,
};
use burn_fusion::{Fusion, FusionBackend, FusionTensor};

/// What an operation gives.
#[derive(Debug)]
pub enum Output<B: Backend> {
    Float(FloatTensor<B>),
    Bool(BoolTensor<B>),
}

/// Queues an operation on float tensors; returns the tensors that will be its results.
pub fn queue<B: FusionBackend, const INPUTS: usize, const OUTPUTS: usize>(
    name: &str,
    inputs: [FloatTensor<Fusion<B>>; INPUTS],
    outputs: [TensorSpec; OUTPUTS],
    operation: impl Fn([FloatTensor<B>; INPUTS]) -> [Output<B>; OUTPUTS] + Send + Sync + 'static,
) -> [FusionTensor<B::FusionRuntime>; OUTPUTS] {
    let client = inputs[0].client.clone();
    let inputs = inputs.map(FusionTensor::into_ir);
    let outputs = outputs.map(|TensorSpec { shape, dtype }| {
        TensorIr::uninit(client.create_empty_handle(), shape, dtype)
    });
    let description = CustomOpIr {
        id: name.into(),
        inputs: inputs.to_vec(),
        outputs: outputs.to_vec(),
        scalars: Vec::new(),
    };
    let run = OperationFn(move |handles: &mut HandleContainer<_>| {
        let results = operation(
            inputs
                .each_ref()
                .map(|input| handles.get_float_tensor::<B>(input)),
        );
        for (result, output) in results.into_iter().zip(&outputs) {
            match result {
                Output::Float(tensor) => handles.register_float_tensor::<B>(&output.id, tensor),
                Output::Bool(tensor) => handles.register_bool_tensor::<B>(&output.id, tensor),
            }
        }
        Ok(())
    });
    let queued = client.register(StreamId::current(), OperationIr::Custom(description), run);
    match queued.try_into() {
        Ok(outputs) => outputs,
        Err(_) => unreachable!("as many as were described"),
    }
}
