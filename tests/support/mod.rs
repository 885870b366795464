//! What every integration test needs: the devices to run on, and numbers that do not depend on
//! the device.

// Each test binary uses a part of this.
#![allow(dead_code, unused_imports)]

#[macro_use]
mod asserts;
pub(crate) mod cases;
pub(crate) mod killed;
pub(crate) mod lifecycle;
mod perceptron;
pub(crate) mod row_order;
mod warnings;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, FloatDType, Shape, Tensor, TensorData};
use burn_lean::reparam::{FloatVisitor, visit_floats};

pub(crate) use perceptron::Perceptron;
pub(crate) use warnings::warnings;

/// A device of the test matrix.
#[derive(Debug, Clone)]
pub(crate) struct Target {
    /// `flex`, `ndarray`, `wgpu`, `vulkan` or `cuda`.
    pub(crate) name: &'static str,
    /// The device, without autodiff.
    pub(crate) device: Device,
}

impl Target {
    /// One of Burn's backends for GPUs: packed words for codes, kernels that are compiled when they are used.
    pub(crate) fn is_gpu(&self) -> bool {
        matches!(self.name, "wgpu" | "vulkan" | "cuda")
    }
}

/// The devices to test: flex, with the feature `ndarray`, ndarray, and, with the feature `wgpu`, wgpu where
/// there is an adapter.
///
/// `BURN_DEVICE` restricts the list to one of them, or to `vulkan` or `cuda` in a build with that feature, and
/// fails where that is not there. With `REQUIRE_WGPU=1` a missing adapter is a failure instead of a line `skipped: no adapter`.
#[allow(deprecated)] // `Device::ndarray`: Burn deprecates its ndarray backend; we still test it.
pub(crate) fn devices() -> Vec<Target> {
    const NAMES: [&str; 3] = ["flex", "ndarray", "wgpu"];
    const MORE: [&str; 2] = ["vulkan", "cuda"];
    let chosen = std::env::var("BURN_DEVICE").ok();
    if let Some(chosen) = &chosen {
        assert!(
            NAMES.iter().chain(&MORE).any(|name| name == chosen),
            "BURN_DEVICE is `{chosen}`, but these tests run on one of {NAMES:?} or {MORE:?}"
        );
    }
    let more = MORE.into_iter().filter(|_| chosen.is_some());
    NAMES
        .into_iter()
        .chain(more)
        .filter(|name| chosen.as_deref().is_none_or(|chosen| chosen == *name))
        .filter_map(|name| {
            let device = match name {
                "flex" => Device::flex(),
                #[cfg(feature = "ndarray")]
                "ndarray" => Device::ndarray(),
                #[cfg(not(feature = "ndarray"))]
                "ndarray" if chosen.is_none() => return None,
                #[cfg(not(feature = "ndarray"))]
                "ndarray" => {
                    panic!("built without ndarray: add `--workspace` or `--features ndarray`")
                }
                #[cfg(feature = "vulkan")]
                "vulkan" => Device::vulkan(Default::default()),
                #[cfg(feature = "cuda")]
                "cuda" => Device::cuda(0),
                "wgpu" => wgpu_or_skip(chosen.is_some())?,
                other => panic!("built without {other}: add `--features {other}`"),
            };
            Some(Target { name, device })
        })
        .collect()
}

/// The folder of the checkout whose tests run. Asked for when they run: a test binary in a target
/// folder that several checkouts share may have been built for another one.
pub(crate) fn checkout() -> PathBuf {
    let folder = std::env::var_os("CARGO_MANIFEST_DIR");
    folder.map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from)
}

/// Runs `test` on every device of the matrix.
pub(crate) fn each_device(mut test: impl FnMut(&Target)) {
    for target in devices() {
        // Captured, and printed when the test fails.
        println!("device: {}", target.name);
        test(&target);
    }
}

/// [`each_device`], for tests that do not ask for its name.
pub(crate) fn on_each(mut test: impl FnMut(&Device)) {
    each_device(|target| test(&target.device));
}

/// [`on_each`], with autodiff.
pub(crate) fn on_tracked(mut test: impl FnMut(Device)) {
    on_each(|device| test(device.clone().autodiff()));
}

/// `chosen`: it is the only device asked for.
fn wgpu_or_skip(chosen: bool) -> Option<Device> {
    match wgpu() {
        Ok(device) => Some(device),
        Err(error) if chosen => panic!("BURN_DEVICE is `wgpu`, but: {error}"),
        Err(error) if std::env::var("REQUIRE_WGPU").is_ok_and(|value| value == "1") => {
            panic!("REQUIRE_WGPU=1, but there is no wgpu adapter: {error}")
        }
        Err(error) => {
            println!("skipped: no adapter ({error})");
            None
        }
    }
}

#[cfg(not(feature = "wgpu"))]
fn wgpu() -> Result<Device, String> {
    Err("these tests were built without it: run cargo with `--features wgpu`".into())
}

/// The default wgpu device, or why there is none.
#[cfg(feature = "wgpu")]
fn wgpu() -> Result<Device, String> {
    use burn::backend::AutoGraphicsApi;
    use burn::backend::wgpu::{RuntimeOptions, WgpuDevice, try_init_setup};
    use burn::tensor::DeviceKind;
    use std::sync::OnceLock;

    // A selector can be set up once in a process.
    static SETUP: OnceLock<Result<(), String>> = OnceLock::new();
    SETUP
        .get_or_init(|| {
            let device = WgpuDevice::default();
            try_init_setup::<AutoGraphicsApi>(&device, RuntimeOptions::default())
                .map(|_| ())
                .map_err(|error| error.to_string())
        })
        .clone()
        .map(|()| Device::wgpu(DeviceKind::DefaultDevice))
}

/// `count` numbers between -1 and 1, the same on every device: a linear congruential generator.
pub(crate) fn numbers(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2).wrapping_add(1);
    (0..count)
        .map(|_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            ((state >> 40) as f32 / (1 << 23) as f32) - 1.0
        })
        .collect()
}

/// [`numbers`] as a tensor.
pub(crate) fn tensor<const D: usize>(seed: u64, shape: [usize; D], device: &Device) -> Tensor<D> {
    let count = Shape::from(shape).num_elements();
    Tensor::from_data(TensorData::new(numbers(seed, count), shape), device)
}

/// The values of a tensor on the host, in F32.
pub(crate) fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().iter::<f32>().collect()
}

/// How far apart numbers are at most, one by one; NaN where one of the differences is.
pub(crate) fn farthest(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    let pairs = found.iter().zip(expected);
    largest(pairs.map(|(a, b)| f64::from((a - b).abs()))) as f32
}

/// The largest of magnitudes; NaN, which is larger than nothing, where one of them is.
pub(crate) fn largest(magnitudes: impl Iterator<Item = f64>) -> f64 {
    magnitudes.fold(0.0, |most: f64, one| match most.is_nan() || one <= most {
        true => most,
        false => one,
    })
}

/// The nearest number of F16 or BF16, by the `half` crate.
pub(crate) fn nearest(dtype: FloatDType, x: f32) -> f32 {
    match dtype {
        FloatDType::F16 => half::f16::from_f32(x).to_f32(),
        FloatDType::BF16 => half::bf16::from_f32(x).to_f32(),
        other => panic!("{other:?} is no half dtype"),
    }
}

/// A path in a folder of its own, which is there until it is dropped.
pub(crate) fn scratch(name: &str) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    (folder, path)
}

/// Seeds the device, and keeps other tests from doing so until it is dropped: the generators of
/// Burn's backends are shared by the threads of a process.
pub(crate) fn seeded(device: &Device, seed: u64) -> MutexGuard<'static, ()> {
    static RANDOM: Mutex<()> = Mutex::new(());
    let guard = RANDOM.lock().unwrap_or_else(PoisonError::into_inner);
    device.seed(seed);
    guard
}

/// Sets the parameters of `model` by formula instead of by a device's random numbers, so that every
/// device has the same model: matrices and kernels keep the variance of their input, vectors come
/// near the constant that they are initialized with. What is frozen stays frozen, and copies of a parameter
/// are the same.
pub(crate) fn with_numbers<M: Module>(model: M, seed: u64) -> M {
    struct ByFormula {
        seed: u64,
        seeds: HashMap<ParamId, u64>,
    }
    impl ModuleMapper for ByFormula {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            self.seed += 1;
            let seed = *self.seeds.entry(param.id).or_insert(self.seed);
            param.map(|initial| {
                let requires_grad = initial.is_require_grad();
                let shape = initial.shape();
                let numbers = numbers(seed, shape.num_elements());
                let numbers = TensorData::new(numbers, shape.clone());
                let numbers = Tensor::<D>::from_data(numbers, &initial.device());
                let value = match D {
                    1 => numbers * 0.2 + constant(&initial),
                    _ => {
                        let fan_in = shape.num_elements() / shape[0];
                        numbers * (3.0 / fan_in as f32).sqrt()
                    }
                };
                // A parameter is a leaf of the graph.
                value.detach().set_require_grad(requires_grad)
            })
        }
    }
    /// 1 for the gain of a norm, 0 for a bias, also for one that was drawn.
    fn constant<const D: usize>(initial: &Tensor<D>) -> f32 {
        let values = values(initial.clone());
        match values[..] {
            // One number alone is always constant; a drawn one is no multiple of a quarter.
            [drawn] if (4.0 * drawn).fract() != 0.0 => 0.0,
            [first, ..] if values.iter().all(|value| *value == first) => first,
            _ => 0.0,
        }
    }
    model.map(&mut ByFormula {
        seed: seed * 1000,
        seeds: HashMap::new(),
    })
}

/// `model` with every floating-point parameter in `dtype`.
pub(crate) fn cast<M: Module>(model: M, dtype: FloatDType) -> M {
    struct Cast(FloatDType);
    impl ModuleMapper for Cast {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            param.map(|value| value.cast(self.0))
        }
    }
    model.map(&mut Cast(dtype))
}

/// One floating-point parameter of a model, as [`parameters`] lists it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Parameter {
    pub(crate) path: String,
    pub(crate) values: Vec<f32>,
    pub(crate) trains: bool,
}

/// The floating-point parameters of a model, in module order.
pub(crate) fn parameters<M: Module>(model: &M) -> Vec<Parameter> {
    let mut walk = Walk::default();
    visit_floats(model, &mut walk);
    walk.parameters
}

/// Path, dtype and values of each gradient, in module order.
pub(crate) fn gradients<M: Module>(
    model: &M,
    grads: GradientsParams,
) -> Vec<(String, DType, Vec<f32>)> {
    let mut walk = Walk {
        grads: Some(grads),
        ..Walk::default()
    };
    visit_floats(model, &mut walk);
    walk.gradients
}

#[derive(Default)]
struct Walk {
    grads: Option<GradientsParams>,
    parameters: Vec<Parameter>,
    gradients: Vec<(String, DType, Vec<f32>)>,
}

impl FloatVisitor for Walk {
    fn visit<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>) {
        let path = path.to_string();
        match &self.grads {
            Some(grads) => {
                if let Some(grad) = grads.get::<D>(param.id) {
                    self.gradients.push((path, grad.dtype(), values(grad)));
                }
            }
            None => self.parameters.push(Parameter {
                path,
                values: values(param.base()),
                trains: param.base().is_require_grad(),
            }),
        }
    }
}
