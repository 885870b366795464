//! What every reparameterization must survive, whatever it does to a weight.

use burn::module::{Module, Param};
use burn::optim::GradientsParams;
use burn::store::ModuleRecord;
use burn::tensor::{DType, Device, Tensor};
use burn_lean::reparam::{Attached, attached};

use super::{Parameter, Target, gradients, parameters, tensor, values};

/// A model with a reparameterization attached to it, and how to look at one of its weights.
pub(crate) struct Lifecycle<'a, M> {
    /// The model on an autodiff device, attached; another seed gives other parameters and state.
    pub(crate) build: &'a dyn Fn(u64, &Device) -> M,
    /// The weight under test.
    pub(crate) weight: fn(&M) -> &Param<Tensor<2>>,
    /// What its effective value is, computed on the host from [`parameters`].
    pub(crate) expected: &'a dyn Fn(&[Parameter]) -> Vec<f32>,
    /// Largest difference from `expected`: 0 for exact.
    pub(crate) tolerance: f32,
    /// Runs where the reparameterization acts: an autocast region, say.
    pub(crate) inside: &'a dyn Fn(&mut dyn FnMut()),
    /// Paths of the parameters that get a gradient through the weight.
    pub(crate) trained: &'a [&'a str],
}

impl<M: Module> Lifecycle<'_, M> {
    /// Asserts the whole lifecycle on one device.
    pub(crate) fn assert(&self, target: &Target) {
        let device = target.device.clone().autodiff();
        let model = (self.build)(1, &device);
        assert!(!attached(&model).is_empty(), "nothing is attached");

        self.value_is_expected(&model);
        self.gradients_arrive_in_f32(&model);
        self.freezes(&model);
        self.record_round_trip_is_exact(&model, &device);
        self.validates_and_trains_on(&model);
        self.forks(&model, &device);
        self.forks(&model, &Device::flex().autodiff());
        self.materializes(&model);
    }

    fn value(&self, model: &M) -> Vec<f32> {
        let mut value = Vec::new();
        (self.inside)(&mut || value = values((self.weight)(model).val()));
        value
    }

    fn value_is_expected(&self, model: &M) {
        let (found, expected) = (self.value(model), (self.expected)(&parameters(model)));
        assert_eq!(found.len(), expected.len(), "size of the value");
        assert_near!(found.iter(), &expected, self.tolerance);
    }

    fn gradients_arrive_in_f32(&self, model: &M) {
        let mut found = Vec::new();
        (self.inside)(&mut || {
            let value = (self.weight)(model).val().cast(DType::F32);
            // Another number for each element, so that no gradient cancels.
            let factor = tensor(9, value.dims(), &value.device());
            let grads = (value * factor).sum().backward();
            found = gradients(model, GradientsParams::from_grads(grads, model));
        });
        let paths: Vec<_> = found.iter().map(|(path, ..)| path.as_str()).collect();
        assert_eq!(paths, self.trained, "parameters with a gradient");
        for (path, dtype, grad) in &found {
            assert_eq!(*dtype, DType::F32, "gradient of {path}");
            assert!(
                grad.iter().all(|value| value.is_finite()),
                "gradient of {path}"
            );
            assert!(grad.iter().any(|value| *value != 0.0), "gradient of {path}");
        }
    }

    fn freezes(&self, model: &M) {
        let frozen = model.clone().freeze();
        assert!(
            parameters(&frozen)
                .iter()
                .all(|parameter| !parameter.trains),
            "a frozen model trains"
        );
        self.same(model, &frozen, "freeze");
    }

    fn record_round_trip_is_exact(&self, model: &M, device: &Device) {
        let bytes = model.clone().into_record().into_bytes().unwrap();
        let other = (self.build)(2, device);
        assert_ne!(
            self.value(&other),
            self.value(model),
            "seeds give the same model"
        );
        let loaded = other
            .try_load_record(ModuleRecord::from_bytes(bytes).unwrap())
            .unwrap();
        self.same(model, &loaded, "record");
    }

    fn validates_and_trains_on(&self, model: &M) {
        let valid = model.valid();
        assert!(
            parameters(&valid).iter().all(|parameter| !parameter.trains),
            "a model in validation trains"
        );
        self.same(model, &valid, "valid");
        let train = valid.train();
        assert_eq!(parameters(&train), parameters(model), "train");
        self.same(model, &train, "train");
        self.gradients_arrive_in_f32(&train);
    }

    fn forks(&self, model: &M, device: &Device) {
        let fork = model.clone().fork(device);
        assert_eq!((self.weight)(&fork).val().device(), *device, "fork");
        assert_eq!(parameters(&fork), parameters(model), "fork");
        self.same(model, &fork, "fork");
        self.gradients_arrive_in_f32(&fork);
    }

    fn materializes(&self, model: &M) {
        // Outside, so that what depends on a region does not become permanent.
        let expected = values((self.weight)(model).val());
        let plain = model.clone().materialize();
        assert_eq!(attached(&plain), [], "materialize");
        assert_eq!(
            values((self.weight)(&plain).base()),
            expected,
            "materialize"
        );
        assert_eq!(
            (self.weight)(&plain).base().dtype(),
            DType::F32,
            "materialize"
        );
    }

    /// Same values, bit by bit, and the same reparameterizations on the same paths.
    fn same(&self, a: &M, b: &M, after: &str) {
        let bits = |model| -> Vec<(String, Vec<u32>)> {
            let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect();
            parameters(model)
                .into_iter()
                .map(|parameter| (parameter.path, bits(parameter.values)))
                .collect()
        };
        let names = |model| -> Vec<(String, String)> {
            attached(model)
                .into_iter()
                .map(|Attached { path, name, .. }| (path, name))
                .collect()
        };
        assert_eq!(bits(a), bits(b), "parameters after {after}");
        assert_eq!(names(a), names(b), "attached after {after}");
        assert_eq!(self.value(a), self.value(b), "value after {after}");
    }
}

/// The values of the parameter at `path`.
pub(crate) fn parameter<'a>(parameters: &'a [Parameter], path: &str) -> &'a [f32] {
    let found = parameters.iter().find(|parameter| parameter.path == path);
    match found {
        Some(parameter) => &parameter.values,
        None => panic!(
            "no parameter `{path}` among {:?}",
            parameters
                .iter()
                .map(|parameter| &parameter.path)
                .collect::<Vec<_>>()
        ),
    }
}
