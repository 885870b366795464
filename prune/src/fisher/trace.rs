//! One forward pass as a list of operations, recorded on Burn's capture device.

use std::collections::{BTreeMap, HashMap};

use burn::backend::Capture;
use burn::backend::ir::{OperationIr, TensorId};
use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor, TensorData};
use burn_lean_reparam::{FloatVisitor, catch_quietly, visit_plain_floats, with_capture_device};

use crate::Batch;

/// The operations of a loss, with what is known about the tensors in them.
pub(crate) struct Trace {
    pub(crate) operations: Vec<OperationIr>,
    /// Constants: parameters, the batch, whatever the model makes itself.
    pub(crate) values: BTreeMap<TensorId, TensorData>,
    /// The stored base of each parameter, by its tensor: its path.
    pub(crate) parameters: HashMap<TensorId, String>,
    /// The loss.
    pub(crate) output: TensorId,
}

impl Trace {
    /// Records `loss` of `model` in evaluation mode on `batch`; nothing is computed.
    ///
    /// Fails with the reason, where the closure looks at the value of a tensor: there is none.
    pub(crate) fn record<M: Module, B: Batch>(
        model: &M,
        loss: &dyn Fn(&M, &B) -> Tensor<1>,
        batch: &B,
    ) -> Result<Self, String> {
        with_capture_device(|capture| Self::record_on(capture, model, loss, batch))
    }

    fn record_on<M: Module, B: Batch>(
        capture: &Device,
        model: &M,
        loss: &dyn Fn(&M, &B) -> Tensor<1>,
        batch: &B,
    ) -> Result<Self, String> {
        let mut paths = ParameterIds::default();
        let mut recorded = Err("nothing was recorded".to_string());
        let captured = capture.capture_scope(|scope| {
            // `valid` copies running statistics: `to_device` would move the original's in place.
            let model = model.valid().to_device(capture);
            visit_plain_floats(&model, &mut paths);
            // Caught inside of the scope, which must be completed.
            let result = catch_quietly(|| loss(&model, &batch.clone().to_device(capture)));
            recorded = result.and_then(|loss| match loss.clone().try_into_primitive::<Capture>() {
                Ok(primitive) => Ok((primitive.id(), loss)),
                Err(_) => Err("the loss is not computed on the device of the model".into()),
            });
            match &recorded {
                Ok((id, _)) => scope.complete([], [*id]),
                Err(_) => scope.complete([], []),
            }
        });
        let (output, _) = recorded?;
        let captured = captured.map_err(|error| error.to_string())?;
        Ok(Self {
            operations: captured.graph.operations,
            // Burn may have given the output another name.
            output: captured.graph.outputs.first().copied().unwrap_or(output),
            values: captured.values,
            parameters: paths.ids,
        })
    }
}

#[derive(Default)]
struct ParameterIds {
    ids: HashMap<TensorId, String>,
}

impl FloatVisitor for ParameterIds {
    fn visit<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>) {
        if let Ok(primitive) = param.base().try_into_primitive::<Capture>() {
            self.ids.insert(primitive.id(), path.to_string());
        }
    }
}
