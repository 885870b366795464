//! BatchNorm's running statistics across a skipped step.

use std::any::Any;
use std::collections::HashMap;

use burn::module::{Module, Param, ParamId};
use burn::tensor::{DType, Tensor};
use burn_lean_graph::take_replaced_states;
use burn_lean_reparam::{PathMapper, PathVisitor, Trail, map_with_path, visit_with_path};

use crate::gradients::{Reads, same_device};

/// The running statistics of a model's BatchNorms, by identity: handles, of which none is read.
///
/// The forward pass updates them, long before it is known whether its step is taken. After one with
/// an infinity or NaN they are NaN for ever: training does not use them and looks fine, validation
/// and checkpoints do. So a skipped step puts back what is not finite; what is stays as the forward
/// pass left it, as in PyTorch. Where no value from before is known, the mean goes back to 0 and the
/// variance to 1, with which a new BatchNorm starts.
#[derive(Debug, Clone, Default)]
pub(crate) struct RunningStatistics {
    values: HashMap<ParamId, Tensor<1>>,
}

impl RunningStatistics {
    /// The statistics of before the last forward pass: Burn keeps its update apart until the next, and
    /// what `Autocast::run` has replaced is kept apart, too.
    pub(crate) fn before_forward<M: Module>(model: &M) -> Self {
        let mut found = Self::of(model);
        let replaced = take_replaced_states(|id| found.values.contains_key(id));
        for (id, value) in replaced {
            found.values.insert(id, Tensor::from_dispatch(value));
        }
        found
    }

    /// The statistics that the forward passes so far have left, the last one's among them, which Burn
    /// keeps apart until it is asked; `before` are those of [`before_forward`](Self::before_forward).
    pub(crate) fn after_forward<M: Module>(before: &Self, model: &M) -> Self {
        if before.values.is_empty() {
            return Self::default();
        }
        let _ = model.valid();
        Self::of(model)
    }

    /// The statistics that a model shows.
    pub(crate) fn of<M: Module>(model: &M) -> Self {
        let mut collected = Self::default();
        visit_with_path(model, &mut collected);
        collected
    }

    /// Remembers the statistics that a sound step left.
    pub(crate) fn keep(&mut self, left: Self) {
        self.values.extend(left.values);
    }

    /// Puts back the elements that are not finite now: those of before the last forward pass, or,
    /// where an earlier one of an accumulated step was broken, those that were kept, or those of a
    /// new BatchNorm.
    pub(crate) fn mend<M: Module>(&self, before: &Self, model: M) -> M {
        if before.values.is_empty() {
            return model;
        }
        // Takes the updates in, so that none comes after the repair.
        let _ = model.valid();
        let mut mend = Mend {
            before,
            kept: self,
            lost: Vec::new(),
        };
        let model = map_with_path(model, &mut mend);
        warn_of(mend.lost);
        model
    }
}

/// Says which statistics start anew; reads the device, where nothing was kept.
fn warn_of(lost: Vec<(String, Tensor<1>)>) {
    let mut reads = Reads::default();
    let mut paths = Vec::with_capacity(lost.len());
    for (path, broken) in lost {
        reads.register(broken);
        paths.push(path);
    }
    // Without an answer there is nothing to say; the step itself was decided on before.
    let Ok(counts) = reads.wait() else { return };
    for (path, count) in paths.iter().zip(&counts) {
        if count.iter::<f32>().any(|count| count > 0.0) {
            tracing::warn!(
                statistics = path,
                "not finite, and no earlier value is known: starts anew"
            );
        }
    }
}

/// A running statistic, by the value that it has in a new BatchNorm.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Statistic {
    Mean,
    Variance,
}

impl Statistic {
    /// What a parameter is: Burn has no type for running statistics that a walk could see. One that is
    /// trained is none of Burn's.
    fn of<const D: usize>(at: &Trail, param: &Param<Tensor<D>>) -> Option<Self> {
        match (at.name(), at.container()) {
            _ if param.is_require_grad() => None,
            ("running_mean", "Struct:BatchNorm") => Some(Self::Mean),
            ("running_var", "Struct:BatchNorm") => Some(Self::Variance),
            _ => None,
        }
    }

    fn initial(self) -> f32 {
        match self {
            Self::Mean => 0.0,
            Self::Variance => 1.0,
        }
    }
}

impl PathVisitor for RunningStatistics {
    fn float<const D: usize>(&mut self, at: &Trail, param: &Param<Tensor<D>>) {
        if Statistic::of(at, param).is_some()
            && let Some(value) = (&param.base() as &dyn Any).downcast_ref::<Tensor<1>>()
        {
            self.values.insert(param.id, value.clone());
        }
    }
}

struct Mend<'a> {
    before: &'a RunningStatistics,
    kept: &'a RunningStatistics,
    /// Where nothing was kept: path, and how many elements no known value could mend.
    lost: Vec<(String, Tensor<1>)>,
}

impl PathMapper for Mend<'_> {
    fn float<const D: usize>(&mut self, at: &Trail, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(statistic) = Statistic::of(at, &param) else {
            return param;
        };
        let id = param.id;
        let kept = self.kept.values.get(&id);
        let sound = [self.before.values.get(&id), kept];
        let is_known = kept.is_some();
        let mut broken = None;
        let param = param.map(|value| {
            let value = sound
                .into_iter()
                .flatten()
                .cloned()
                .fold(value, where_finite);
            let not_finite = value.clone().is_finite().bool_not();
            if !is_known {
                broken = Some(not_finite.clone().float().sum().cast(DType::F32));
            }
            value.mask_fill(not_finite, statistic.initial())
        });
        self.lost.extend(broken.map(|broken| (at.path(), broken)));
        param
    }
}

/// `value` where it is finite, `other` elsewhere.
fn where_finite<const D: usize>(value: Tensor<D>, other: Tensor<1>) -> Tensor<D> {
    let other = same_device(other, &value.device()).reshape(value.shape());
    let broken = value.clone().is_finite().bool_not();
    value.mask_where(broken, other)
}
