//! Autocast with Burn's gradient checkpointing.

use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::activation::gelu;
use burn::tensor::{Device, FloatDType, Tensor};
use burn_lean::amp::{Autocast, AutocastConfig, Fallback, GradScalerConfig};
use burn_lean::prune::{Budget, FisherConfig, Pruner, PrunerConfig, SolverConfig};
use burn_lean::quant::QuantizedForward;
use burn_lean::reparam::own_copy;

use crate::model::{Mlp, Normalized, bits};
use crate::support::{each_device, tensor, values, with_numbers};

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
            assert_eq!(trained(&device, dtype), plain, "{dtype:?}");
        }
    });
}

/// Recorded, with a look at the gradients, and after a pass through inference and back.
#[test]
fn recorded_steps_run_with_checkpointing_as_without() {
    each_device(|target| {
        let plain = target.device.clone().autodiff();
        let losses = |device: &Device| {
            let mut model = with_numbers(LinearConfig::new(6, 6).init(device), 1);
            let mut optim = AdamWConfig::new().init();
            let forward = |model: &Linear, x: Tensor<2>| {
                let y = gelu(model.forward(x));
                (y.clone() * y.tanh()).exp().mean()
            };
            let mut losses = Vec::new();
            for cached in [false, true] {
                let mut autocast = Autocast::new(FloatDType::BF16).with_fallback(Fallback::Emulate);
                let mut quantized = QuantizedForward::new();
                if cached {
                    (autocast, quantized) = (autocast.cached(), quantized.cached());
                }
                for step in 0..2 {
                    let x: Tensor<2> = tensor(step, [5, 6], device);
                    let loss = autocast.run(&model, x.clone(), forward).unwrap();
                    losses.extend(values(loss.clone()));
                    let grads = GradientsParams::from_grads(loss.backward(), &model);
                    model = optim.step(0.01, model, grads);
                    let loss = quantized.run(&model, x.clone(), forward).unwrap();
                    losses.extend(values(loss.clone()));
                    let grads = GradientsParams::from_grads(loss.backward(), &model);
                    model = optim.step(0.01, model, grads);
                }
                model = own_copy(&model);
                let loss = forward(&model, tensor(7, [5, 6], device));
                losses.extend(values(loss));
            }
            losses
        };
        let checkpointing = losses(&plain.clone().gradient_checkpointing());
        // Gradients in BF16, whose backward pass is another.
        for (found, expected) in checkpointing.iter().zip(losses(&plain)) {
            let off = (found - expected).abs();
            assert!(off < 1e-3 * expected, "{found} {expected}");
        }
    });
}

#[test]
fn a_pruned_model_trains_on_with_checkpointing() {
    let device = Device::flex().autodiff().gradient_checkpointing();
    let model: Linear = with_numbers(LinearConfig::new(6, 6).init(&device), 1);
    let x: Tensor<2> = tensor(1, [16, 6], &device);
    let pruned = Pruner::new(Budget::Sparsity(0.5))
        .prune(
            model.clone(),
            |model, x| model.forward(x),
            [x.clone(), x.clone()],
        )
        .unwrap();
    let loss = gelu(pruned.model.forward(x.clone())).square().mean();
    let grads = GradientsParams::from_grads(loss.backward(), &pruned.model);
    assert_eq!(grads.len(), 2);
    let config = PrunerConfig::new(
        SolverConfig::new(Budget::Sparsity(0.5)),
        FisherConfig::new(8).with_progress(false),
    );
    let loss = |model: &Linear, x: &Tensor<2>| gelu(model.forward(x.clone())).square().mean();
    let pruned = config
        .prune(model, loss, |_| [x.clone(), x.clone()])
        .unwrap();
    let grads = GradientsParams::from_grads(loss(&pruned.model, &x).backward(), &pruned.model);
    assert_eq!(grads.len(), 2);
}
