//! BatchNorm's running statistics across a skipped step.

use std::any::Any;
use std::collections::HashMap;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::Tensor;

use crate::gradients::same_device;

/// The running statistics of a model's BatchNorms, by identity: handles, of which none is read.
///
/// The forward pass updates them, long before it is known whether its step is taken. After one with
/// an infinity or NaN they are NaN for ever: training does not use them and looks fine, validation
/// and checkpoints do. So a skipped step puts back what is not finite; what is stays as the forward
/// pass left it, as in PyTorch.
#[derive(Debug, Clone, Default)]
pub(crate) struct RunningStatistics {
    values: HashMap<ParamId, Tensor<1>>,
}

impl RunningStatistics {
    /// The statistics of before the last forward pass: Burn keeps its update apart until the next.
    pub(crate) fn before_forward<M: Module>(model: &M) -> Self {
        let mut collect = Collect::default();
        model.visit(&mut collect);
        Self {
            values: collect.values,
        }
    }

    /// Remembers the statistics of before a step that was sound.
    pub(crate) fn keep(&mut self, before: Self) {
        self.values.extend(before.values);
    }

    /// Puts back the elements that are not finite now: those of before the last forward pass, or,
    /// where an earlier one of an accumulated step was broken, those that were kept.
    pub(crate) fn mend<M: Module>(&self, before: Self, model: M) -> M {
        if before.values.is_empty() {
            return model;
        }
        // Takes the updates in, so that none comes after the repair.
        let _ = model.valid();
        model.map(&mut Mend {
            place: Place::default(),
            before,
            kept: self,
        })
    }
}

/// Where a walk is. Burn has no type for running statistics that a walk could see.
#[derive(Default)]
struct Place(Vec<bool>);

impl Place {
    fn enter(&mut self, name: &str, container_type: &str) {
        let statistics = matches!(name, "running_mean" | "running_var");
        self.0
            .push(statistics && container_type == "Struct:BatchNorm");
    }

    fn is_statistics(&self) -> bool {
        self.0.last() == Some(&true)
    }
}

#[derive(Default)]
struct Collect {
    place: Place,
    values: HashMap<ParamId, Tensor<1>>,
}

impl ModuleVisitor for Collect {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.place.enter(name, container_type);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.place.0.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.place.is_statistics()
            && let Some(value) = (&param.base() as &dyn Any).downcast_ref::<Tensor<1>>()
        {
            self.values.insert(param.id, value.clone());
        }
    }
}

struct Mend<'a> {
    place: Place,
    before: RunningStatistics,
    kept: &'a RunningStatistics,
}

impl ModuleMapper for Mend<'_> {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.place.enter(name, container_type);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.place.0.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if !self.place.is_statistics() {
            return param;
        }
        let id = param.id;
        let sound = [&self.before, self.kept].map(|from| from.values.get(&id).cloned());
        param.map(|value| sound.into_iter().flatten().fold(value, where_finite))
    }
}

/// `value` where it is finite, `other` elsewhere.
fn where_finite<const D: usize>(value: Tensor<D>, other: Tensor<1>) -> Tensor<D> {
    let other = same_device(other, &value.device()).reshape(value.shape());
    let broken = value.clone().is_finite().bool_not();
    value.mask_where(broken, other)
}
