//! What every integration test needs: the devices to run on, and numbers that do not depend on
//! the device.

// Each test binary uses a part of this.
#![allow(dead_code, unreachable_pub)]

pub mod lifecycle;

use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use burn::backend::AutoGraphicsApi;
use burn::backend::wgpu::{RuntimeOptions, WgpuDevice, try_init_setup};
use burn::tensor::{Device, DeviceKind, Shape, Tensor, TensorData};

/// A device of the test matrix.
#[derive(Debug, Clone)]
pub struct Target {
    /// `flex`, `ndarray` or `wgpu`.
    pub name: &'static str,
    /// The device, without autodiff.
    pub device: Device,
}

/// The devices to test: flex, ndarray, and wgpu where there is an adapter.
///
/// `BURN_DEVICE` restricts the list to one of them. With `REQUIRE_WGPU=1` a missing adapter is a
/// failure instead of a line `skipped: no adapter`.
#[allow(deprecated)] // `Device::ndarray`: Burn deprecates its ndarray backend; we still test it.
pub fn devices() -> Vec<Target> {
    const NAMES: [&str; 3] = ["flex", "ndarray", "wgpu"];
    let chosen = std::env::var("BURN_DEVICE").ok();
    if let Some(chosen) = &chosen {
        assert!(
            NAMES.contains(&chosen.as_str()),
            "BURN_DEVICE is `{chosen}`, but these tests run on one of {NAMES:?}"
        );
    }
    NAMES
        .into_iter()
        .filter(|name| chosen.as_deref().is_none_or(|chosen| chosen == *name))
        .filter_map(|name| {
            let device = match name {
                "flex" => Device::flex(),
                "ndarray" => Device::ndarray(),
                _ => wgpu_or_skip()?,
            };
            Some(Target { name, device })
        })
        .collect()
}

/// Runs `test` on every device of the matrix.
pub fn each_device(mut test: impl FnMut(&Target)) {
    for target in devices() {
        // Captured, and printed when the test fails.
        println!("device: {}", target.name);
        test(&target);
    }
}

fn wgpu_or_skip() -> Option<Device> {
    match wgpu() {
        Ok(device) => Some(device),
        Err(error) if std::env::var("REQUIRE_WGPU").is_ok_and(|value| value == "1") => {
            panic!("REQUIRE_WGPU=1, but wgpu has no adapter: {error}")
        }
        Err(error) => {
            println!("skipped: no adapter ({error})");
            None
        }
    }
}

/// The default wgpu device, or why there is none.
fn wgpu() -> Result<Device, String> {
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
pub fn numbers(seed: u64, count: usize) -> Vec<f32> {
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
pub fn tensor<const D: usize>(seed: u64, shape: [usize; D], device: &Device) -> Tensor<D> {
    let count = Shape::from(shape).num_elements();
    Tensor::from_data(TensorData::new(numbers(seed, count), shape), device)
}

/// The values of a tensor on the host, in F32.
pub fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().iter::<f32>().collect()
}

/// Seeds the device and keeps other tests from drawing random numbers until it is dropped: the
/// generators of Burn's backends are shared by the threads of a process.
pub fn seeded(device: &Device, seed: u64) -> MutexGuard<'static, ()> {
    static RANDOM: Mutex<()> = Mutex::new(());
    let guard = RANDOM.lock().unwrap_or_else(PoisonError::into_inner);
    device.seed(seed);
    guard
}
