//! Running statistics, from an execution back into the model.

use std::collections::HashMap;

use burn::backend::DispatchTensor;
use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{FloatDType, Tensor};

use super::tensors::Alive;
use crate::Parameter;

/// Stores the next values of running statistics.
///
/// Clones of a model share its statistics, so they are reached through one. Two threads that train
/// the same model each store theirs, and the last one stays; Burn's own pass averages them.
pub(crate) fn write_back<M: Module>(model: &M, parameters: &[Parameter], alive: &mut Alive<'_>) {
    let updates: HashMap<(String, usize), DispatchTensor> = parameters
        .iter()
        .filter_map(|parameter| {
            let value = alive.remove(parameter.update?)?;
            Some(((parameter.path.clone(), parameter.occurrence), value))
        })
        .collect();
    if !updates.is_empty() {
        let _ = model.clone().map(&mut WriteBack::new(updates));
    }
}

/// The model with these values of parameters; the rest of it stays.
pub(crate) fn store<'a, M: Module>(
    model: M,
    values: impl IntoIterator<Item = (&'a Parameter, DispatchTensor)>,
) -> M {
    let updates = values
        .into_iter()
        .map(|(parameter, value)| ((parameter.path.clone(), parameter.occurrence), value))
        .collect();
    model.map(&mut WriteBack::new(updates))
}

struct WriteBack {
    path: Vec<String>,
    occurrences: HashMap<String, usize>,
    updates: HashMap<(String, usize), DispatchTensor>,
}

impl WriteBack {
    fn new(updates: HashMap<(String, usize), DispatchTensor>) -> Self {
        Self {
            path: Vec::new(),
            occurrences: HashMap::new(),
            updates,
        }
    }
}

impl ModuleMapper for WriteBack {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let path = self.path.join(".");
        let count = self.occurrences.entry(path.clone()).or_default();
        let update = self.updates.remove(&(path, *count));
        *count += 1;
        let Some(value) = update else {
            return param;
        };
        let (id, old, mapper) = param.consume();
        let value = Tensor::<D>::from_dispatch(value);
        let value = match value.dtype() == old.dtype() {
            true => value.detach(),
            false => value.cast(FloatDType::from(old.dtype())).detach(),
        };
        let value = match old.is_autodiff() && !value.is_autodiff() {
            true => Tensor::from_inner(value),
            false => value,
        };
        let value = value.set_require_grad(old.is_require_grad());
        Param::from_mapped_value(id, value, mapper)
    }
}
