//! One operation of a walk.

use std::collections::HashMap;

use burn::backend::ir::{TensorId, TensorIr};
use burn::backend::{DispatchDevice, DispatchTensor};

use super::lane::Live;
use super::script::{Script, Weights};
use crate::execute::compute;
use crate::interpret::Operands;
use crate::{GraphError, Pass};

/// One operation of a batch, in one pass or two.
pub(super) fn compute_one(
    script: &mut Script,
    index: usize,
    live: &mut Live,
    weights: &Weights,
    device: &DispatchDevice,
    twice: bool,
) -> Result<(), GraphError> {
    let operation = &script.graph.operations[index];
    // Computed when something asks for it, whatever the batch.
    if operation.outputs().all(|output| script.is_fixed(output.id)) {
        return Ok(());
    }
    let ids: Vec<TensorId> = operation.inputs().map(|operand| operand.id).collect();
    // The replaced pass first: the original one moves what nothing reads afterwards.
    let passes = [Pass::Replaced, Pass::Original];
    for pass in &passes[usize::from(!twice)..] {
        let mut fixed = HashMap::new();
        for id in &ids {
            if script.is_fixed(*id) {
                fixed.insert(*id, script.fixed(*id, *pass, weights, device)?);
            }
        }
        let node = script.graph.node(index);
        let lifetime = &script.graph.lifetimes[index];
        let moved = |id: &TensorId| lifetime.moved.contains(id);
        let mut operands = Present {
            fixed,
            live,
            pass: *pass,
            moved: &moved,
            device,
        };
        compute(node, &mut operands)?;
    }
    for id in &script.graph.lifetimes[index].freed {
        live.remove(&(*id, Pass::Original));
        live.remove(&(*id, Pass::Replaced));
    }
    Ok(())
}

/// The operands of an operation, out of what is alive.
struct Present<'a> {
    fixed: HashMap<TensorId, DispatchTensor>,
    live: &'a mut Live,
    pass: Pass,
    moved: &'a dyn Fn(&TensorId) -> bool,
    device: &'a DispatchDevice,
}

impl Present<'_> {
    fn take(&mut self, id: TensorId) -> DispatchTensor {
        if let Some(value) = self.fixed.get(&id) {
            return value.clone();
        }
        let own = (id, self.pass);
        let key = match self.live.contains_key(&own) {
            true => own,
            false => (id, Pass::Original),
        };
        let value = match (self.moved)(&id) && key == own {
            true => self.live.remove(&key),
            false => self.live.get(&key).cloned(),
        };
        value.unwrap_or_else(|| panic!("tensor {id} is not alive: a defect of the graph"))
    }
}

impl Operands for Present<'_> {
    fn float(&mut self, tensor: &TensorIr) -> DispatchTensor {
        self.take(tensor.id)
    }
    fn set(&mut self, tensor: &TensorIr, value: DispatchTensor) {
        self.live.insert((tensor.id, self.pass), value);
    }
    fn device(&self) -> DispatchDevice {
        self.device.clone()
    }
}
