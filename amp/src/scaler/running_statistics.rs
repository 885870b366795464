//! BatchNorm's running statistics across a skipped step.

use std::any::Any;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::{Bool, DType, Tensor};
use burn_lean_graph::{ReplacedState, replaced_states};
use burn_lean_reparam::{PathMapper, PathVisitor, Trail, map_with_path, visit_with_path};

use crate::autocast::precision::BurnStructs;
use crate::gradients::{Reads, same_device};

/// The running statistics of a model's BatchNorms, by identity: handles, of which none is read.
///
/// The forward pass updates them, long before it is known whether its step is taken. After one with
/// an infinity or NaN they are NaN for ever: training does not use them and looks fine, validation
/// and checkpoints do. So a skipped step puts back what is not finite; what is stays as the forward
/// pass left it, as in PyTorch. Where no value from before is known, the mean goes back to 0 and the
/// variance to 1, with which a new BatchNorm starts. Where a step was skipped since they were last kept, and
/// once in [`UNSEEN`] steps, one that is taken does so, too: the pass of another model's step may have gone
/// through this one.
#[derive(Debug, Clone, Default)]
pub(crate) struct RunningStatistics {
    values: HashMap<ParamId, Known>,
}

/// After so many steps that are taken values are looked at, though no step was skipped: a training may leave
/// out a batch by itself.
const UNSEEN: u32 = 32;

/// How many steps this process has skipped, of whichever model.
static SKIPPED: AtomicU64 = AtomicU64::new(0);

#[derive(Debug, Clone)]
struct Known {
    statistic: Statistic,
    value: Tensor<1>,
    /// What was mended last: finite. A pass may have broken `value` whose step is skipped only later.
    mended: Tensor<1>,
    /// The steps that were taken since.
    unseen: u32,
    /// [`SKIPPED`] when `value` was kept; `None` for what is to be mended in the next step.
    skipped: Option<u64>,
}

/// What is known of a model's statistics when its step is decided on.
#[derive(Debug)]
pub(crate) struct Before {
    /// Those of before the last forward pass: Burn keeps its update apart until the next.
    shown: RunningStatistics,
    /// What `Autocast::run` has replaced at once.
    replaced: HashMap<ParamId, Vec<ReplacedState>>,
}

impl RunningStatistics {
    pub(crate) fn before_forward<M: Module>(model: &M) -> Before {
        let shown = Self::of(model);
        let replaced = replaced_states(|id| shown.values.contains_key(id));
        Before { shown, replaced }
    }

    /// The statistics that a model shows.
    pub(crate) fn of<M: Module>(model: &M) -> Self {
        let mut named = Named::default();
        visit_with_path(model, &mut named);
        if named.0.is_empty() {
            return Self::default();
        }
        let structs = BurnStructs::of(model);
        let named = named.0.into_iter();
        let of_burn = named.filter(|(module, ..)| structs.is_batch_norm(module));
        let known = of_burn.map(|(_, id, (statistic, value))| {
            let known = Known {
                statistic,
                mended: value.clone(),
                value,
                unseen: 0,
                skipped: None,
            };
            (id, known)
        });
        Self {
            values: known.collect(),
        }
    }

    /// With the numbers of a new BatchNorm where they are not finite.
    pub(crate) fn sound(mut self) -> Self {
        for known in self.values.values_mut() {
            let (value, initial) = (known.value.clone(), known.statistic.initial());
            let broken = not_finite(&value);
            known.value = value.mask_fill(broken, initial);
            known.mended = known.value.clone();
        }
        self
    }

    /// Remembers the statistics that a sound step left.
    pub(crate) fn keep(&mut self, left: Self) {
        self.values.extend(left.values);
    }

    /// For a step that is skipped: puts back the elements that are not finite now. They are those of before
    /// the last forward pass, or, where an earlier one of an accumulated step was broken, those that were
    /// kept, or those of a new BatchNorm.
    pub(crate) fn mend<M: Module>(&self, before: &Before, model: M) -> M {
        // Also for a model without norms, whose pass went through another.
        let skipped = SKIPPED.fetch_add(1, Ordering::Relaxed);
        self.put_back(before, model, (false, skipped)).0
    }

    /// For a step that is taken: the model, and what its statistics are now, for [`keep`](Self::keep). Reads
    /// nothing, and seldom computes anything.
    pub(crate) fn mend_taken<M: Module>(&self, before: &Before, model: M) -> (M, Self) {
        // Before the look at the model: what is skipped meanwhile counts for the next step.
        let skipped = SKIPPED.load(Ordering::Relaxed);
        let is_sound = |id: &ParamId| {
            let known = self.values.get(id);
            known.is_some_and(|known| known.skipped == Some(skipped) && known.unseen < UNSEEN)
        };
        let shown = &before.shown;
        if shown.values.is_empty() || !shown.values.keys().all(is_sound) {
            return self.put_back(before, model, (true, skipped));
        }
        let _ = model.valid();
        let mut now = Now {
            kept: self,
            skipped,
            left: Self::default(),
        };
        model.visit(&mut now);
        (model, now.left)
    }

    fn put_back<M: Module>(
        &self,
        before: &Before,
        model: M,
        (is_taken, skipped): (bool, u64),
    ) -> (M, Self) {
        if before.shown.values.is_empty() {
            return (model, Self::default());
        }
        // Takes the updates in, so that none comes after the repair.
        let _ = model.valid();
        let mut mend = Mend {
            before,
            kept: self,
            is_taken,
            skipped,
            left: Self::default(),
            lost: Vec::new(),
        };
        let model = map_with_path(model, &mut mend);
        warn_of(mend.lost);
        (model, mend.left)
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

/// What may be running statistics by their names, with the path of the struct that they are in.
#[derive(Default)]
struct Named(Vec<(String, ParamId, (Statistic, Tensor<1>))>);

impl PathVisitor for Named {
    fn float<const D: usize>(&mut self, at: &Trail, param: &Param<Tensor<D>>) {
        if let Some(statistic) = Statistic::of(at, param)
            && let Some(value) = (&param.base() as &dyn Any).downcast_ref::<Tensor<1>>()
            && let Some((_, module)) = at.names().split_last()
        {
            let value = (statistic, value.clone());
            self.0.push((module.join("."), param.id, value));
        }
    }
}

/// The statistics of known identities as they are now: handles, too.
struct Now<'a> {
    kept: &'a RunningStatistics,
    skipped: u64,
    left: RunningStatistics,
}

impl ModuleVisitor for Now<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(known) = self.kept.values.get(&param.id)
            && !param.is_require_grad()
            && let Some(value) = (&param.base() as &dyn Any).downcast_ref::<Tensor<1>>()
        {
            let now = Known {
                value: value.clone(),
                unseen: known.unseen + 1,
                skipped: Some(self.skipped),
                ..known.clone()
            };
            self.left.values.insert(param.id, now);
        }
    }
}

struct Mend<'a> {
    before: &'a Before,
    kept: &'a RunningStatistics,
    is_taken: bool,
    skipped: u64,
    /// What is there now, if the step is taken.
    left: RunningStatistics,
    /// Where nothing was kept: path, and how many elements no known value could mend.
    lost: Vec<(String, Tensor<1>)>,
}

impl PathMapper for Mend<'_> {
    fn float<const D: usize>(&mut self, at: &Trail, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, is_taken) = (param.id, self.is_taken);
        let (before, known) = (self.before, self.kept);
        if Statistic::of(at, &param).is_none() {
            return param;
        }
        let Some(shown) = before.shown.values.get(&id) else {
            return param;
        };
        let (statistic, shown) = (shown.statistic, &shown.value);
        // A layer that was made smaller keeps its identities.
        let fits = |other: &Tensor<1>| other.dims() == shown.dims();
        let known = known.values.get(&id).into_iter();
        let kept: Vec<&Tensor<1>> = known
            .flat_map(|known| [&known.value, &known.mended])
            .filter(|kept| fits(kept) && (!is_taken || kept.device() == shown.device()))
            .collect();
        // No look at the rest.
        let is_kept = is_taken && !kept.is_empty();
        let states = before.replaced.get(&id).filter(|_| !is_kept);
        let replaced: Vec<Replaced> = states
            .into_iter()
            .flatten()
            .map(Replaced::of)
            .filter(|state| fits(&state.before) && fits(&state.written))
            .collect();
        let mut broken = None;
        let mut left = None;
        let param = param.map(|value| {
            let value = match is_kept {
                true => value,
                false => where_replaced(where_finite(value, shown), &replaced),
            };
            let last = replaced.last().map(|state| &state.before);
            let known = kept.iter().copied().chain(last);
            let value = known.fold(value, where_finite);
            let not_finite = not_finite(&value);
            if kept.is_empty() && !is_taken {
                broken = Some(not_finite.clone().float().sum().cast(DType::F32));
            }
            let value = value.mask_fill(not_finite, statistic.initial()).detach();
            left = (&value as &dyn Any).downcast_ref::<Tensor<1>>().cloned();
            value
        });
        if is_taken && let Some(value) = left {
            let now = Known {
                statistic,
                mended: value.clone(),
                value,
                unseen: 0,
                skipped: Some(self.skipped),
            };
            self.left.values.insert(id, now);
        }
        self.lost.extend(broken.map(|broken| (at.path(), broken)));
        param
    }
}

/// A [`ReplacedState`] of a BatchNorm.
struct Replaced {
    before: Tensor<1>,
    written: Tensor<1>,
}

impl Replaced {
    fn of(state: &ReplacedState) -> Self {
        Self {
            before: Tensor::from_dispatch(state.before.clone()),
            written: Tensor::from_dispatch(state.written.clone()),
        }
    }
}

fn not_finite<const D: usize>(value: &Tensor<D>) -> Tensor<D, Bool> {
    value.clone().is_finite().bool_not()
}

/// A known value as one that is to be mended.
fn like<const D: usize>(other: &Tensor<1>, value: &Tensor<D>) -> Tensor<D> {
    same_device(other.clone(), &value.device()).reshape(value.shape())
}

/// `value` where it is finite, `other` elsewhere.
fn where_finite<const D: usize>(value: Tensor<D>, other: &Tensor<1>) -> Tensor<D> {
    let other = like(other, &value);
    let broken = not_finite(&value);
    value.mask_where(broken, other)
}

/// `value` where it is finite; elsewhere what an execution replaced by what is not, if it was one alone: a copy
/// of the model has its identities, and its executions are told apart by what they wrote.
fn where_replaced<const D: usize>(mut value: Tensor<D>, replaced: &[Replaced]) -> Tensor<D> {
    for (index, state) in replaced.iter().enumerate() {
        let written = like(&state.written, &value);
        let mut broken = not_finite(&value).bool_and(not_finite(&written));
        for (other, state) in replaced.iter().enumerate() {
            if other != index {
                broken = broken.bool_and(like(&state.written, &value).is_finite());
            }
        }
        let before = like(&state.before, &value);
        value = value.mask_where(broken, before);
    }
    value
}
