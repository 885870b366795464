//! New running statistics for the BatchNorm layers of a model whose weights have changed.

use std::collections::{HashMap, HashSet};

use burn::module::{Flag, Module, ModuleVisitor, Param, ParamId};
use burn::tensor::{DType, Tensor, TensorData};
use burn_lean_graph::hooks;
use burn_lean_reparam::{
    FloatVisitor, PathMapper, PathVisitor, Rejected, Trail, Training, catch_quietly, each_float,
    map_with_path, visit_floats, visit_with_path,
};

use crate::host::read;
use crate::{Batch, PruneError};

/// How a walk calls the layer.
const BATCH_NORM: &str = "Struct:BatchNorm";

/// Sets the running statistics of all BatchNorm layers to their averages over `batches`; each
/// batch counts by its examples.
///
/// Worth doing before pruning, when a checkpoint's statistics are stale, and after it, since
/// pruned weights give other activations. The weights stay as they are and no gradient is
/// computed: the layers only look. They do so in training mode, with the statistics of the batch,
/// while dropout stays off. `forward` is whatever runs the model, its loss for example. A model
/// without BatchNorm comes back as it was, and so does a layer with momentum 0. A BatchNorm that is
/// the very first layer trains only on batches that were made on the autodiff device. One that was folded
/// into the layer before it does no more than shift, and stays as it is.
///
/// Burn moves a running statistic s to (1 − μ)·s + μ·b for a batch with statistic b, and does not
/// show the momentum μ. From s = 0 that is μ·b, from s = c it is c·(1 − μ) more: two passes over two
/// examples find μ, and the average is exact where an exponential one would forget. So they do for each
/// batch: a layer that runs several times, or not in every batch, has the average over those it looked at.
///
/// ```
/// use burn::nn::BatchNormConfig;
/// use burn::tensor::{Device, Tensor};
/// use burn_lean_prune::recompute_batch_norm;
///
/// let device = Device::flex();
/// let norm = BatchNormConfig::new(1).init(&device);
/// let batches = [1.0, 3.0].map(|mean| {
///     Tensor::<2>::from_floats([[mean - 1.0], [mean + 1.0]], &device.clone().autodiff())
/// });
/// let norm = recompute_batch_norm(norm, |norm, x| norm.forward(x.clone()), batches)?;
/// let mean = norm.running_mean.value().into_scalar::<f32>();
/// assert!((mean - 2.0).abs() < 1e-5);
/// # Ok::<(), burn_lean_prune::PruneError>(())
/// ```
///
/// # Errors
///
/// The model comes back in the error, unchanged: [`PruneError::NoSamples`] without any batch,
/// [`PruneError::Mismatch`] where the parts of one have other numbers of examples,
/// [`PruneError::NonFiniteStatistics`] where the new ones are not finite in the model's dtype, [`PruneError::Panics`],
/// [`PruneError::Device`] where reading fails. A batch without an example is left out.
pub fn recompute_batch_norm<M: Module, B: Batch, O>(
    model: M,
    forward: impl Fn(&M, &B) -> O,
    batches: impl IntoIterator<Item = B>,
) -> Result<M, Rejected<M, PruneError>> {
    let averages = match averages(&model, forward, batches) {
        Ok(Some(averages)) => averages,
        Ok(None) => return Ok(model),
        Err(error) => return Err(Rejected::new(model, error)),
    };
    // Burn maps running statistics in place, also those of the caller's clones: map a copy.
    let mut set = SetRunning::to(averages);
    let measured = map_with_path(model.valid(), &mut set);
    match set.beyond {
        None => Ok(Training::of(&model).restore(measured)),
        Some(path) => Err(Rejected::new(
            model,
            PruneError::NonFiniteStatistics { path },
        )),
    }
}

/// Paths of the BatchNorm layers that do no more than shift: gain 1, mean 0 and one variance below 1, which
/// with epsilon is 1. Folding into the layer before leaves them so, and what it left is no statistic.
pub(crate) fn folded<M: Module>(model: &M) -> Result<HashSet<String>, PruneError> {
    let mut norms = Norms::default();
    visit_floats(model, &mut norms);
    if let Some(error) = norms.error {
        return Err(error);
    }
    let of = |norm: &str, field: &str| norms.found.get(&format!("{norm}.{field}"));
    let shifts = |norm: &&String| {
        let all = |field: &str, value: f32| {
            of(norm, field).is_some_and(|v| v.iter().all(|x| *x == value))
        };
        let variance = of(norm, "running_var").and_then(|values| values.first().copied());
        let neutral = |v: f32| v < 1.0 && v > 0.0 && all("running_var", v);
        all("gamma", 1.0) && all("running_mean", 0.0) && variance.is_some_and(neutral)
    };
    Ok(norms.norms.iter().filter(shifts).cloned().collect())
}

/// Gains and running statistics by path.
#[derive(Default)]
struct Norms {
    norms: Vec<String>,
    found: HashMap<String, Vec<f32>>,
    error: Option<PruneError>,
}

impl FloatVisitor for Norms {
    fn visit<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>) {
        let Some((norm, field)) = path.rsplit_once('.') else {
            return;
        };
        if D != 1 || !matches!(field, "gamma" | "running_mean" | "running_var") {
            return;
        }
        if field == "running_var" {
            self.norms.push(norm.to_string());
        }
        match read(param.base().without_autodiff()) {
            Ok(values) => {
                self.found.insert(path.to_string(), values);
            }
            Err(error) => {
                self.error.get_or_insert(error);
            }
        }
    }
}

/// Whether the model has a BatchNorm layer.
pub(crate) fn has_batch_norm<M: Module>(model: &M) -> bool {
    #[derive(Default)]
    struct Find(bool);
    impl ModuleVisitor for Find {
        fn enter_module(&mut self, _name: &str, container_type: &str) {
            self.0 |= container_type == BATCH_NORM;
        }
    }
    let mut find = Find::default();
    model.visit(&mut find);
    find.0
}

/// The statistics over all batches; none where no layer has any.
fn averages<M: Module, B: Batch, O>(
    model: &M,
    forward: impl Fn(&M, &B) -> O,
    batches: impl IntoIterator<Item = B>,
) -> Result<Option<Statistics>, PruneError> {
    // Burn takes the statistics of the batch where the device has autodiff and the layer's flag is
    // set, whether or not there are gradients.
    let folded = folded(model)?;
    let mut trains = OnlyBatchNormTrains {
        except: folded.clone(),
        none: false,
    };
    let observer = map_with_path(model.valid(), &mut trains);
    let device = model
        .devices()
        .into_iter()
        .next()
        .map(|device| device.inner());
    let look = |batch: &B, from: f32| -> Result<Statistics, PruneError> {
        // `valid` copies running statistics, which clones of a model share.
        let mut set = SetRunning::all(from, folded.clone());
        let model = map_with_path(observer.valid(), &mut set).train().no_grad();
        let batch = match &device {
            Some(device) => batch.clone().to_device(device),
            None => batch.clone(),
        };
        catch_quietly(|| hooks::without_freezing(|| drop(forward(&model, &batch))))
            .map_err(PruneError::panics("forward pass"))?;
        Statistics::of(&model.valid(), &folded)
    };
    let mut most = f32::MAX / 8.0;
    each_float(model, |_, float| {
        if float.dtype() == DType::F16 {
            most = 16_384.0;
        }
    });
    // What a layer keeps of an old statistic: (1 − μ)ⁿ where it runs n times, 1 where it does not look.
    let kept_by =
        |batch: &B, from_zero: &Statistics, whole: &Statistics| -> Result<Statistics, PruneError> {
            // From so far that the batch's own statistics, which differ where a forward pass draws numbers, are
            // nothing beside it; those of two examples may be small by chance.
            let largest = from_zero.largest().max(whole.largest()).max(1.0);
            let far = (4096.0 * largest).min(most).max(largest);
            let share = |from_far: f64, zero| (from_far - zero) / f64::from(far);
            Ok(look(batch, far)?.with(from_zero, share))
        };
    let mut averages = Averages::default();
    let mut two_tell = None;
    for batch in batches {
        batch.check()?;
        if batch.examples() == 0 {
            continue;
        }
        let from_zero = look(&batch, 0.0)?;
        if from_zero.0.is_empty() {
            return Ok(None);
        }
        // How often a layer runs depends on what examples are like, hardly on how many there are. Where the
        // first batch says otherwise, all of each is looked at again.
        let two = batch.slice(0..batch.examples().min(2));
        let of_two = match two_tell {
            Some(false) => None,
            _ => look(&two, 0.0)
                .and_then(|zero| kept_by(&two, &zero, &from_zero))
                .ok(),
        };
        let of_two = of_two.filter(|kept| kept.explains(&from_zero));
        let kept = match (of_two, two_tell) {
            (Some(kept), Some(true)) => kept,
            (of_two, _) => {
                let kept = kept_by(&batch, &from_zero, &from_zero)?;
                two_tell.get_or_insert(of_two.is_some_and(|two| two.agrees(&kept)));
                kept
            }
        };
        averages.add(batch.examples() as f64, &from_zero, &kept);
    }
    if averages.examples.is_empty() {
        return Err(PruneError::NoSamples);
    }
    let averages = averages.finish();
    if averages.0.is_empty() {
        tracing::warn!(
            "no BatchNorm of the model looked at a batch: the statistics stay as they are"
        );
    }
    match averages.broken() {
        None => Ok(Some(averages)),
        Some(id) => Err(PruneError::NonFiniteStatistics {
            path: path_of(model, id),
        }),
    }
}

/// Sums over batches, each statistic over those that its layer looked at.
#[derive(Default)]
struct Averages {
    sums: Statistics,
    examples: HashMap<ParamId, f64>,
}

impl Averages {
    fn add(&mut self, count: f64, from_zero: &Statistics, kept: &Statistics) {
        let of_batch = from_zero.with(kept, |value, kept| count * value / (1.0 - kept));
        for (id, values) in of_batch.0 {
            let looked = kept.0[&id].iter().any(|kept| *kept != 1.0);
            let examples = self.examples.entry(id).or_default();
            if !looked {
                continue;
            }
            *examples += count;
            let sums = self.sums.0.entry(id);
            let sums = sums.or_insert_with(|| vec![0.0; values.len()]);
            sums.iter_mut()
                .zip(values)
                .for_each(|(sum, value)| *sum += value);
        }
    }

    /// Of the layers that looked.
    fn finish(mut self) -> Statistics {
        for (id, sums) in &mut self.sums.0 {
            let examples = self.examples[id];
            sums.iter_mut().for_each(|sum| *sum /= examples);
        }
        self.sums
    }
}

/// The running statistics of BatchNorm layers.
#[derive(Debug, Default)]
struct Statistics(HashMap<ParamId, Vec<f64>>);

impl Statistics {
    fn of<M: Module>(model: &M, folded: &HashSet<String>) -> Result<Self, PruneError> {
        let mut find = FindRunning {
            except: folded,
            found: Ok(Self::default()),
        };
        visit_with_path(model, &mut find);
        find.found
    }

    /// The largest finite one by magnitude.
    fn largest(&self) -> f32 {
        let values = self.0.values().flatten().map(|value| value.abs() as f32);
        values.filter(|value| value.is_finite()).fold(0.0, f32::max)
    }

    /// One that is not finite.
    fn broken(&self) -> Option<ParamId> {
        let mut found = self.0.iter();
        let broken = found.find(|(_, values)| !values.iter().all(|value| value.is_finite()));
        broken.map(|(id, _)| *id)
    }

    /// Whether these shares are others', but for roundings.
    fn agrees(&self, others: &Self) -> bool {
        let near = |(one, other): (&f64, &f64)| (one - other).abs() < 1e-3;
        self.0
            .iter()
            .all(|(id, own)| own.iter().zip(&others.0[id]).all(near))
    }

    /// Whether these shares, of some examples, can be those of a batch with these statistics from zero: as
    /// many layers looked.
    fn explains(&self, from_zero: &Self) -> bool {
        self.0.iter().all(|(id, kept)| {
            let stayed = kept.iter().all(|kept| *kept == 1.0);
            let nothing = from_zero.0[id].iter().all(|value| *value == 0.0);
            kept.iter().all(|kept| kept.is_finite()) && (!stayed || nothing)
        })
    }

    fn with(&self, other: &Self, combine: impl Fn(f64, f64) -> f64) -> Self {
        let combined = self.0.iter().map(|(id, values)| {
            let others = other.0.get(id).map_or(&[][..], |others| others);
            let values = values
                .iter()
                .zip(others)
                .map(|(one, two)| combine(*one, *two));
            (*id, values.collect())
        });
        Self(combined.collect())
    }
}

fn path_of<M: Module>(model: &M, id: ParamId) -> String {
    let mut path = String::new();
    each_float(model, |at, float| {
        if float.id() == id && path.is_empty() {
            path = at.path();
        }
    });
    path
}

/// Whether a walk is in a BatchNorm, other than those at the paths of `except`.
fn is_batch_norm(at: &Trail, except: &HashSet<String>) -> bool {
    let mut containers = at.containers().iter();
    let depth = containers.position(|container| container == BATCH_NORM);
    depth.is_some_and(|depth| !except.contains(&at.names()[..depth].join(".")))
}

fn is_running(at: &Trail, except: &HashSet<String>) -> bool {
    is_batch_norm(at, except) && at.name().starts_with("running_")
}

/// Training flags of BatchNorm layers on, those of all other modules off.
pub(crate) struct OnlyBatchNormTrains {
    /// Paths of BatchNorm layers that count as none.
    pub(crate) except: HashSet<String>,
    /// Whether those of BatchNorm layers are off, too.
    pub(crate) none: bool,
}

impl PathMapper for OnlyBatchNormTrains {
    fn flag(&mut self, at: &Trail, flag: Param<Flag>) -> Param<Flag> {
        let trains = is_batch_norm(at, &self.except) && !self.none;
        flag.with_value(trains)
    }
}

struct FindRunning<'a> {
    except: &'a HashSet<String>,
    found: Result<Statistics, PruneError>,
}

impl PathVisitor for FindRunning<'_> {
    fn float<const D: usize>(&mut self, at: &Trail, param: &Param<Tensor<D>>) {
        let Ok(found) = &mut self.found else { return };
        if is_running(at, self.except) {
            match read(param.base()) {
                Ok(values) => {
                    found
                        .0
                        .insert(param.id, values.into_iter().map(f64::from).collect());
                }
                Err(error) => self.found = Err(error),
            }
        }
    }
}

/// Sets running statistics; one that is to become NaN stays, since its layer did not look.
struct SetRunning {
    except: HashSet<String>,
    all: Option<f32>,
    values: Statistics,
    /// Path of a statistic whose values are finite, but not in its dtype.
    beyond: Option<String>,
}

impl SetRunning {
    fn all(value: f32, folded: HashSet<String>) -> Self {
        Self {
            except: folded,
            all: Some(value),
            values: Statistics::default(),
            beyond: None,
        }
    }

    fn to(values: Statistics) -> Self {
        Self {
            except: HashSet::new(),
            all: None,
            values,
            beyond: None,
        }
    }
}

impl PathMapper for SetRunning {
    fn float<const D: usize>(&mut self, at: &Trail, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if !is_running(at, &self.except) {
            return param;
        }
        if let Some(value) = self.all {
            return param.map(|old| old.full_like(value));
        }
        match self.values.0.get(&param.id) {
            Some(values) if values.iter().all(|value| value.is_finite()) => {
                param.map(|old| {
                    let data = TensorData::new(values.clone(), old.shape());
                    // Not through the default of the device, which may be half.
                    let data = data.convert_dtype(old.dtype());
                    if !data.iter::<f64>().all(f64::is_finite) {
                        self.beyond.get_or_insert_with(|| at.path());
                    }
                    Tensor::<D>::from_data(data, (&old.device(), old.dtype()))
                })
            }
            _ => param,
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::module::RunningState;
    use burn::nn::BatchNormConfig;
    use burn::tensor::Device;

    use super::*;

    /// Recovered from numbers of F16, a variance near its largest one can come out beyond it.
    #[test]
    fn a_statistic_that_its_dtype_does_not_hold_is_named() {
        let device = Device::flex();
        let mut norm = BatchNormConfig::new(2).init(&device);
        let half = Tensor::<1>::ones([2], (&device, DType::F16));
        norm.running_var = RunningState::new(half);
        for (largest, beyond) in [(65_504.0, None), (65_536.0, Some("running_var"))] {
            let old = Statistics::of(&norm, &HashSet::new()).unwrap();
            let new = old.0.into_keys().map(|id| (id, vec![1.0, largest]));
            let mut set = SetRunning::to(Statistics(new.collect()));
            let written = map_with_path(norm.valid(), &mut set);
            assert_eq!(set.beyond.as_deref(), beyond);
            assert_eq!(written.running_var.value_sync().dtype(), DType::F16);
        }
    }
}
