//! Which parts of a model train.

use std::collections::HashMap;

use burn::module::{Flag, Module, ModuleMapper, Param};
use burn::tensor::{DType, Device, GradientCheckpointingStrategy, Tensor};

use crate::{PathMapper, PathVisitor, Trail, map_with_path, visit_with_path};

/// Which tensors of a model are on a device with autodiff, and which of its flags are on: what
/// [`Module::valid`] takes from all of its parts. With the strategy of gradient checkpointing, which
/// [`Module::train`] does not give back.
///
/// A model may have parts for evaluation beside others that train, a teacher beside its student.
/// [`Module::train`] sets them all to training.
///
/// ```
/// use burn::module::Module;
/// use burn::nn::LinearConfig;
/// use burn::tensor::Device;
/// use burn_lean_reparam::Training;
///
/// let student = LinearConfig::new(2, 2).init(&Device::flex().autodiff());
/// let pair = (student.valid(), student);
/// let training = Training::of(&pair);
/// let (teacher, student) = training.restore(pair.valid());
/// assert!(!teacher.weight.val().is_autodiff());
/// assert!(student.weight.val().is_require_grad());
/// ```
#[derive(Debug, Clone, Default)]
pub struct Training {
    /// For each tensor on a device with autodiff its strategy, `None` for others; by path.
    tensors: HashMap<String, Option<GradientCheckpointingStrategy>>,
    /// Of the parameters on such a device that have a value: whether they train, by path.
    trained: HashMap<String, bool>,
    /// Whether each flag is on, by path.
    flags: HashMap<String, bool>,
}

impl Training {
    /// What trains in `model`.
    pub fn of<M: Module>(model: &M) -> Self {
        let mut training = Self::default();
        visit_with_path(model, &mut training);
        training
    }

    /// Sets the parts of a model in evaluation mode, with the same paths, back to what they were.
    ///
    /// Parameters are trained again if they were before [`Module::valid`]; what an operation made of one
    /// ([`Param::map`], as initializations are scaled) trains if [`Module::train`] says so. A part that was not
    /// there, and tensors that Burn shows to no walk, train if anything does.
    pub fn restore<M: Module>(&self, model: M) -> M {
        let disabled = GradientCheckpointingStrategy::Disabled;
        let mut strategies = self.tensors.values().flatten();
        // `train` gives plain tensors, which no walk comes by, another strategy than these, and Burn refuses
        // both in one operation: then they stay constants.
        let one_by_one = strategies.any(|strategy| *strategy != disabled);
        let model = match self.tensors.values().any(Option::is_some) && !one_by_one {
            true => model.train(),
            false => model,
        };
        let mut restore = Restore {
            training: self,
            one_by_one,
        };
        map_with_path(model, &mut restore)
    }

    fn add(&mut self, at: &Trail, device: &Device) {
        let strategy = device.gradient_checkpointing_strategy();
        self.tensors.insert(at.path(), strategy);
    }

    fn strategy(&self, at: &Trail) -> Option<GradientCheckpointingStrategy> {
        self.tensors.get(&at.path()).copied().flatten()
    }
}

/// A copy with running statistics of its own, which Burn's copies share.
pub fn own_copy<M: Module>(model: &M) -> M {
    Training::of(model).restore(model.valid())
}

/// The model with gradients as it is after training: on an autodiff device, with no flag set by which layers
/// know that they train. Running statistics are a copy.
pub fn evaluated_with_gradients<M: Module>(model: &M) -> M {
    struct NoFlags;
    impl ModuleMapper for NoFlags {
        fn map_flag(&mut self, flag: Param<Flag>) -> Param<Flag> {
            flag.with_value(false)
        }
    }
    // `train` sets what the flags allow.
    let evaluated = model.valid().map(&mut NoFlags).train();
    map_with_path(evaluated, &mut Strategies(&Training::of(model)))
}

impl PathVisitor for Training {
    fn float<const D: usize>(&mut self, at: &Trail, param: &Param<Tensor<D>>) {
        let device = param.lazy_device();
        self.add(at, &device);
        // What has no value yet gets gradients as it says.
        if device.is_autodiff() && param.is_initialized() {
            self.trained.insert(at.path(), is_trained(param));
        }
    }

    crate::visit_kinds!(int, bool: |self, at, param| self.add(at, &param.lazy_device()));

    fn flag(&mut self, at: &Trail, flag: &Param<Flag>) {
        self.flags.insert(at.path(), flag.is_enabled());
    }
}

/// The parameter with the strategy that it had.
macro_rules! with_strategy {
    ($training:expr, $at:ident, $param:ident) => {{
        let now = $param.lazy_device().gradient_checkpointing_strategy();
        match $training.strategy($at) {
            Some(strategy) if now.is_some_and(|now| now != strategy) => {
                $param.map(|tensor| tensor.with_gradient_checkpointing_strategy(strategy))
            }
            _ => $param,
        }
    }};
}

/// Gives tensors that are on an autodiff device the strategies that they had.
struct Strategies<'a>(&'a Training);

impl PathMapper for Strategies<'_> {
    crate::map_kinds!(float, int, bool: |self, at, param| with_strategy!(self.0, at, param));
}

/// The parameter on the device that it was on: what `train` left where it is stays as it is.
macro_rules! restored {
    ($restore:expr, $at:ident, $param:ident) => {{
        let is_autodiff = $param.lazy_device().is_autodiff();
        match $restore.training.tensors.get(&$at.path()) {
            Some(None) if is_autodiff => $param.valid(),
            Some(Some(_)) if $restore.one_by_one && !is_autodiff => {
                let param = $param.train();
                with_strategy!($restore.training, $at, param)
            }
            _ => with_strategy!($restore.training, $at, $param),
        }
    }};
}

struct Restore<'a> {
    training: &'a Training,
    /// Whether tensors go back to training by themselves.
    one_by_one: bool,
}

impl PathMapper for Restore<'_> {
    fn float<const D: usize>(&mut self, at: &Trail, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let param = restored!(self, at, param);
        match self.training.trained.get(&at.path()) {
            Some(trains) if *trains != param.base().is_tracked() => {
                param.map(|tensor| tensor.set_require_grad(*trains))
            }
            _ => param,
        }
    }

    crate::map_kinds!(int, bool: |self, at, param| restored!(self, at, param));

    fn flag(&mut self, at: &Trail, flag: Param<Flag>) -> Param<Flag> {
        let was_on = self.training.flags.get(&at.path()).copied();
        match was_on.unwrap_or(flag.is_enabled()) {
            on if on == flag.is_enabled() => flag,
            // What `train` restores stays.
            on => flag.map(|flag| flag.with(on)),
        }
    }
}

/// Whether a parameter on an autodiff device trains.
///
/// A leaf says so itself. The result of an operation never has gradients of its own, whatever it was made
/// of: [`Module::train`] knows whether the parameter is to have them.
fn is_trained<const D: usize>(param: &Param<Tensor<D>>) -> bool {
    let base = param.base();
    match base.is_require_grad() || !base.is_tracked() {
        true => base.is_require_grad(),
        false => param.valid().train().base().is_require_grad(),
    }
}

/// The parameter with the value that `change` makes of its base: a leaf again, which trains if it did before.
///
/// What an operation makes has neither gradients of its own nor the mark by which Burn's distributed training
/// reduces them; [`Tensor::detach`] keeps neither of what the operation was given. In a mapper: what the
/// parameter carries is taken off, as by [`Param::map`].
///
/// ```
/// use burn::module::{Module, ModuleMapper, Param};
/// use burn::nn::LinearConfig;
/// use burn::tensor::{Device, Tensor};
/// use burn_lean_reparam::map_leaf;
///
/// struct Clip;
///
/// impl ModuleMapper for Clip {
///     fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
///         map_leaf(param, |value| value.clamp(-0.1, 0.1))
///     }
/// }
///
/// let device = Device::flex().autodiff();
/// let model = LinearConfig::new(2, 1).init(&device).map(&mut Clip);
/// assert!(model.weight.is_require_grad());
/// ```
pub fn map_leaf<const D: usize>(
    param: Param<Tensor<D>>,
    change: impl FnOnce(Tensor<D>) -> Tensor<D>,
) -> Param<Tensor<D>> {
    let id = param.id;
    let trains = is_trained(&param);
    param.map(|old| {
        let Some(strategy) = old.gradient_checkpointing_strategy() else {
            return change(old).without_autodiff();
        };
        // Burn has no answer for a quantized one.
        let is_quantized = matches!(old.dtype(), DType::QFloat(_));
        let is_distributed = !is_quantized && old.is_distributed();
        let leaf = change(old)
            .without_autodiff()
            .autodiff()
            .with_gradient_checkpointing_strategy(strategy)
            .set_require_grad(trains);
        match is_distributed {
            true => leaf.set_distributed(id),
            false => leaf,
        }
    })
}

/// Takes in the BatchNorm statistics of the last training step.
///
/// Burn keeps them apart until the next step: they would be missing in a record, and would replace
/// those of a record that is loaded.
pub fn settle<M: Module>(model: &M) {
    let _ = model.valid();
}

#[cfg(test)]
mod tests {
    use burn::nn::{Dropout, DropoutConfig};
    use burn::tensor::{Device, Tensor};

    use super::*;

    /// A table is no parameter, and no walk comes by.
    #[derive(Module, Debug)]
    struct Net {
        weight: Param<Tensor<1>>,
        table: Tensor<1>,
        dropout: Dropout,
    }

    /// In one operation Burn takes one strategy.
    #[test]
    fn tables_are_constants_beside_tensors_with_another_strategy() {
        let device = Device::flex().autodiff().gradient_checkpointing();
        let net = Net {
            weight: Param::from_data([2.0], &device),
            table: Tensor::ones([1], &device),
            dropout: DropoutConfig::new(0.5).init(),
        };
        let again = Training::of(&net).restore(net.valid());
        let strategy = again
            .weight
            .val()
            .device()
            .gradient_checkpointing_strategy();
        assert_eq!(strategy, Some(GradientCheckpointingStrategy::Balanced));
        assert!(again.dropout.training.is_enabled());
        let grads = (again.weight.val() * again.table * 3.0).sum().backward();
        let gradient = again.weight.val().grad(&grads).unwrap();
        assert_eq!(gradient.into_scalar::<f32>(), 3.0);
    }

    #[test]
    fn a_flag_that_was_off_is_and_tables_are_where_they_were() {
        let device = Device::flex().autodiff();
        let mut net = Net {
            weight: Param::from_data([1.0], &device),
            table: Tensor::ones([1], &device),
            dropout: DropoutConfig::new(0.5).init(),
        };
        net.dropout.training = net.dropout.training.with_value(false);
        for net in [net.clone(), net.valid()] {
            let again = Training::of(&net).restore(net.valid());
            let trains = net.weight.is_require_grad();
            assert_eq!(again.weight.is_require_grad(), trains);
            assert_eq!(again.table.is_autodiff(), trains);
            assert!(!again.dropout.training.is_enabled());
        }
    }

    #[test]
    fn a_tensor_without_gradients_stays_so() {
        let device = Device::flex().autodiff();
        let trains = |weight: &Param<Tensor<1>>| weight.is_require_grad();
        let weight = Param::<Tensor<1>>::from_data([1.0], &device);
        assert!(trains(&own_copy(&weight)));
        // Burn's `train` gives them back, since the parameter itself is not said to be frozen.
        let weight = weight.map(|weight| weight.set_require_grad(false));
        assert!(trains(&weight.valid().train()));
        assert!(!trains(&own_copy(&weight)));
        // And takes them from one that is, and was given some.
        let weight = weight.no_grad().map(|weight| weight.require_grad());
        assert!(!trains(&weight.valid().train()));
        assert!(trains(&own_copy(&weight)));
    }

    /// As an initialization is scaled: what an operation makes is no leaf.
    #[test]
    fn what_an_operation_made_of_a_weight_trains_if_that_did() {
        let plain = Device::flex().autodiff();
        for device in [plain.clone(), plain.gradient_checkpointing()] {
            let scaled = |weight: Param<Tensor<1>>| weight.map(|weight| weight * 0.5);
            let weight = Param::<Tensor<1>>::from_data([2.0], &device);
            let copy = own_copy(&scaled(weight.clone()));
            let mapped = map_leaf(scaled(weight.clone()), |weight| weight);
            for again in [copy, mapped] {
                assert_eq!(again.val().into_scalar::<f32>(), 1.0);
                let grads = (again.val() * 3.0).sum().backward();
                let gradient = again.val().grad(&grads).unwrap();
                assert_eq!(gradient.into_scalar::<f32>(), 3.0);
            }

            let frozen = scaled(weight.clone().no_grad());
            // Its graph is that of another tensor.
            let product = frozen.clone().map(|frozen| frozen * weight.val());
            assert!(product.val().is_tracked());
            for still in [frozen, product] {
                assert!(!own_copy(&still).is_require_grad());
                assert!(!map_leaf(still, |weight| weight).is_require_grad());
            }
        }
    }
}
