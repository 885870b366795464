//! Which parts of a model train.

use std::collections::HashMap;

use burn::module::{Flag, Module, Param};
use burn::tensor::{Bool, Int, Tensor};

use crate::{PathMapper, PathVisitor, Trail, map_with_path, visit_with_path};

/// Which tensors of a model are on a device with autodiff, and which of its flags are on: what
/// [`Module::valid`] takes from all of its parts.
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
    /// Whether each tensor is on a device with autodiff, by path.
    tensors: HashMap<String, bool>,
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
    /// Parameters are trained again if they were before [`Module::valid`]. A part that was not there
    /// trains if any other does.
    pub fn restore<M: Module>(&self, model: M) -> M {
        let all = |states: &HashMap<String, bool>| states.values().all(|trains| *trains);
        if all(&self.tensors) && all(&self.flags) {
            return model.train();
        }
        // Burn maps running statistics in place: those of a copy.
        map_with_path(model.valid(), &mut Restore(self))
    }

    fn trains(&self, at: &Trail) -> bool {
        let known = self.tensors.get(&at.path()).copied();
        known.unwrap_or_else(|| self.tensors.values().any(|trains| *trains))
    }
}

impl PathVisitor for Training {
    fn float<const D: usize>(&mut self, at: &Trail, param: &Param<Tensor<D>>) {
        let trains = param.lazy_device().is_autodiff();
        self.tensors.insert(at.path(), trains);
    }

    fn int<const D: usize>(&mut self, at: &Trail, param: &Param<Tensor<D, Int>>) {
        let trains = param.lazy_device().is_autodiff();
        self.tensors.insert(at.path(), trains);
    }

    fn bool<const D: usize>(&mut self, at: &Trail, param: &Param<Tensor<D, Bool>>) {
        let trains = param.lazy_device().is_autodiff();
        self.tensors.insert(at.path(), trains);
    }

    fn flag(&mut self, at: &Trail, flag: &Param<Flag>) {
        self.flags.insert(at.path(), flag.is_enabled());
    }
}

struct Restore<'a>(&'a Training);

impl PathMapper for Restore<'_> {
    fn float<const D: usize>(&mut self, at: &Trail, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match self.0.trains(at) {
            true => param.train(),
            false => param,
        }
    }

    fn int<const D: usize>(
        &mut self,
        at: &Trail,
        param: Param<Tensor<D, Int>>,
    ) -> Param<Tensor<D, Int>> {
        match self.0.trains(at) {
            true => param.train(),
            false => param,
        }
    }

    fn bool<const D: usize>(
        &mut self,
        at: &Trail,
        param: Param<Tensor<D, Bool>>,
    ) -> Param<Tensor<D, Bool>> {
        match self.0.trains(at) {
            true => param.train(),
            false => param,
        }
    }

    fn flag(&mut self, at: &Trail, flag: Param<Flag>) -> Param<Flag> {
        let was_on = self.0.flags.get(&at.path()).copied();
        match was_on.unwrap_or(flag.is_enabled()) {
            on if on == flag.is_enabled() => flag,
            // What `train` restores stays.
            on => flag.map(|flag| flag.with(on)),
        }
    }
}
