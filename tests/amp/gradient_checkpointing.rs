//! Autocast with Burn's gradient checkpointing.

use burn::optim::AdamWConfig;
use burn::tensor::activation::gelu;
use burn::tensor::{Device, FloatDType, Tensor};
use burn_lean::amp::{AutocastConfig, Fallback, GradScalerConfig};

use crate::model::{Mlp, Normalized, bits};
use crate::support::{each_device, tensor};

/// Trains the network, and a BatchNorm behind it, for some steps; one of them overflows.
fn trained(device: &Device, dtype: FloatDType) -> Vec<u32> {
    let model = (Mlp::new(1, device), Normalized::new(device));
    let (mut model, autocast) = AutocastConfig::new(dtype)
        .with_fallback(Fallback::Emulate)
        .prepare(model)
        .unwrap();
    let mut scaler = GradScalerConfig::for_dtype(dtype)
        .with_max_norm(Some(0.5))
        .init()
        .unwrap();
    let mut optim = AdamWConfig::new().init();
    for step in 0..4 {
        let factor = match (step, dtype) {
            (2, FloatDType::F16) => f32::INFINITY,
            _ => 1.0,
        };
        let x: Tensor<2> = tensor(step, [5, 6], device);
        let loss = autocast.forward(x, |x| {
            // Operations that checkpointing computes again in the backward pass.
            let h = gelu(x.clone()).tanh() + model.1.forward(x.clone()).mean_dim(1);
            model.0.forward(h.exp() * 0.1)
        });
        let loss = (loss * factor).square().mean();
        let grads = scaler.scale(loss).unwrap().backward();
        let grads = burn::optim::GradientsParams::from_grads(grads, &model);
        model = scaler.step(&mut optim, 0.01, model, grads).unwrap();
    }
    assert_eq!(
        scaler.state().skipped_steps,
        u64::from(dtype == FloatDType::F16)
    );
    bits(&model)
}

#[test]
fn checkpointing_changes_no_bit_of_a_training() {
    each_device(|target| {
        for dtype in [FloatDType::F16, FloatDType::BF16] {
            let plain = trained(&target.device.clone().autodiff(), dtype);
            let device = target.device.clone().autodiff().gradient_checkpointing();
            assert!(device.gradient_checkpointing_strategy().is_some());
            assert_eq!(
                trained(&device, dtype),
                plain,
                "{dtype:?} on {}",
                target.name
            );
        }
    });
}
