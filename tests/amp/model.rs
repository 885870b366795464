//! A small network and the steps that the tests take with it.

#![allow(unreachable_pub)]

use burn::module::{Module, Param};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::activation::relu;
use burn::tensor::{Device, FloatDType, Tensor, TensorData};
use burn_lean::amp::{AmpError, Autocast, AutocastConfig, Fallback, GradScaler, full_precision};
use burn_lean::reparam::each_float;

use crate::support::tensor;

#[derive(Module, Debug)]
pub struct Mlp {
    pub first: Linear,
    pub second: Linear,
}

impl Mlp {
    /// Weights from `seed`, the same on every device.
    pub fn new(seed: u64, device: &Device) -> Self {
        let linear = |seed, rows, columns| {
            let mut linear = LinearConfig::new(rows, columns).init(device);
            linear.weight = Param::from_tensor(tensor(seed, [rows, columns], device) * 0.5);
            linear.bias = Some(Param::from_tensor(
                tensor(seed + 1, [columns], device) * 0.1,
            ));
            linear
        };
        Self {
            first: linear(seed, 6, 8),
            second: linear(seed + 2, 8, 3),
        }
    }

    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.second.forward(relu(self.first.forward(x)))
    }
}

/// A prepared network; emulated where the device has no such dtype.
pub fn prepared(seed: u64, dtype: FloatDType, device: &Device) -> (Mlp, Autocast) {
    AutocastConfig::new(dtype)
        .with_fallback(Fallback::Emulate)
        .prepare(Mlp::new(seed, &device.clone().autodiff()))
        .unwrap()
}

/// Mean squared distance to a fixed target; `factor` scales the input.
pub fn loss(model: &Mlp, autocast: &Autocast, step: u64, factor: f32) -> Tensor<1> {
    let device = model.first.weight.base().device();
    let x = tensor::<2>(100 + step, [5, 6], &device).mul_scalar(factor);
    let y = tensor::<2>(200 + step, [5, 3], &device);
    let output = autocast.forward(x, |x| model.forward(x));
    (output - y).square().mean()
}

/// Scaled gradients of one batch.
pub fn gradients(
    model: &Mlp,
    autocast: &Autocast,
    scaler: &mut GradScaler,
    step: u64,
    factor: f32,
) -> Result<GradientsParams, AmpError> {
    let loss = scaler.scale(loss(model, autocast, step, factor))?;
    Ok(GradientsParams::from_grads(loss.backward(), model))
}

/// Gradients of one value for all elements of the first weight; zeros elsewhere.
pub fn one_gradient(model: &Mlp, values: &[f32]) -> GradientsParams {
    let mut grads = GradientsParams::new();
    let device = model.first.weight.base().device().inner();
    let mut data = vec![0.0; 48];
    data[..values.len()].copy_from_slice(values);
    let weight = Tensor::<2>::from_data(TensorData::new(data, [6, 8]), &device);
    grads.register::<2>(model.first.weight.id, weight);
    let bias = Tensor::<1>::zeros([3], &device);
    grads.register::<1>(model.second.bias.as_ref().unwrap().id, bias);
    grads
}

/// A linear layer and a BatchNorm.
#[derive(Module, Debug)]
pub struct Normalized {
    linear: Linear,
    pub norm: BatchNorm,
}

impl Normalized {
    /// The same on every device.
    pub fn new(device: &Device) -> Self {
        let mut linear = LinearConfig::new(6, 4).init(device);
        linear.weight = Param::from_tensor(tensor(7, [6, 4], device));
        linear.bias = None;
        Self {
            linear,
            norm: BatchNormConfig::new(4).init(device),
        }
    }

    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        full_precision(self.linear.forward(x), |x| self.norm.forward(x))
    }
}

/// Bits of all float parameters, in module order.
pub fn bits<M: Module>(model: &M) -> Vec<u32> {
    let mut found = Vec::new();
    each_float(model, |_, float| {
        found.extend(float.data().iter::<f32>().map(f32::to_bits));
    });
    found
}
