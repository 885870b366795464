//! What is beside the operations of a step: unscaling many gradients, casting a weight that is used many
//! times, the audit of a large model.

use std::error::Error;
use std::time::Instant;

use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{Device, Distribution, FloatDType, Tensor};
use burn_lean::amp::{AutocastConfig, Fallback, GradScalerConfig, audit, supported_dtypes};

use crate::HEAP;
use crate::harness::{Variant, interleave};
use crate::support::{self, Cell, Table};

#[derive(Module, Debug)]
struct Vectors {
    values: Vec<Param<Tensor<1>>>,
}

/// Parameters of the model whose gradients are unscaled, and their length.
const PARAMETERS: (usize, usize) = (400, 1000);
/// Uses of the layer of 1024² weights, in a batch of 32.
const USES: usize = 64;
/// Side of the four layers that are audited: 256 MB of weights.
const SIDE: usize = 4096;

pub(crate) fn overheads(device: &Device, samples: usize) -> Result<Table, Box<dyn Error>> {
    let header = ["what", "variant", "ms", "of the first", "MB"];
    let mut table = Table::new(format!("beside the operations, on {device:?}"), &header);
    unscaling(device, samples, &mut table)?;
    many_uses(device, samples, &mut table)?;
    audited(device, samples, &mut table)?;
    Ok(table)
}

fn unscaling(device: &Device, samples: usize, table: &mut Table) -> Result<(), Box<dyn Error>> {
    let (count, length) = PARAMETERS;
    let random = || Tensor::<1>::random([length], Distribution::Default, device);
    let model = Vectors {
        values: (0..count).map(|_| Param::from_tensor(random())).collect(),
    };
    let gradients: Vec<Tensor<1>> = (0..count).map(|_| random().inner()).collect();
    let registered = move |model: &Vectors| {
        let mut grads = GradientsParams::new();
        for (value, gradient) in model.values.iter().zip(&gradients) {
            grads.register::<1>(value.id, gradient.clone());
        }
        grads
    };
    let scaler = |max_norm| {
        let config = GradScalerConfig::for_dtype(FloatDType::F16);
        config.with_max_norm(max_norm).init()
    };
    let alone = {
        let (model, scaler, registered) = (model.clone(), scaler(None)?, registered.clone());
        Variant::new(move || {
            drop(scaler.unscale(&model, registered(&model))?);
            Ok(())
        })
    };
    let mut variants = vec![alone];
    for max_norm in [None, Some(1.0)] {
        let (mut scaler, registered) = (scaler(max_norm)?, registered.clone());
        let (mut optim, mut model) = (SgdConfig::new().init(), Some(model.clone()));
        variants.push(Variant::new(move || {
            let current = model.take().expect("the model is put back after each step");
            let grads = registered(&current);
            model = Some(scaler.step(&mut optim, 1e-4, current, grads)?);
            Ok(())
        }));
    }
    let bar = support::progress((samples + 1) * variants.len(), "unscaling");
    interleave(&mut variants, samples, 10, device, &bar)?;
    let what = format!("{count} gradients");
    let names = ["unscale", "step of SGD", "step of SGD with clip"];
    for (name, variant) in names.iter().zip(&variants) {
        table.push([
            what.as_str().into(),
            (*name).into(),
            Cell::optional(variant.median(), 2),
            Cell::optional(variant.compared(&variants[0], |a, b| a / b), 2),
            Cell::Empty,
        ]);
    }
    Ok(())
}

fn many_uses(device: &Device, samples: usize, table: &mut Table) -> Result<(), Box<dyn Error>> {
    let layer = LinearConfig::new(1024, 1024).with_bias(false).init(device);
    let x = Tensor::<2>::random([32, 1024], Distribution::Default, device) * 0.01;
    let (mut variants, mut rows) = (Vec::new(), Vec::new());
    for uses in [1, USES] {
        for dtype in [FloatDType::F32, FloatDType::F16] {
            let config = AutocastConfig::new(dtype).with_fallback(Fallback::Emulate);
            let (layer, autocast) = config.prepare(layer.clone())?;
            let (x, name) = (x.clone(), support::dtype_name(&autocast));
            let loss = move || {
                let forward = |x: Tensor<2>| (0..uses).fold(x, |x, _| layer.forward(x));
                autocast.forward(x.clone(), forward).mean()
            };
            drop(loss());
            let before = HEAP.current_usage();
            let held = loss();
            let bytes = HEAP.current_usage().saturating_sub(before);
            drop(held);
            rows.push((uses, name, bytes));
            variants.push(Variant::new(move || {
                drop(loss().backward());
                Ok(())
            }));
        }
    }
    let bar = support::progress((samples + 1) * variants.len(), "uses");
    interleave(&mut variants, samples, 1, device, &bar)?;
    for (index, (uses, dtype, bytes)) in rows.into_iter().enumerate() {
        let first = &variants[index / 2 * 2];
        table.push([
            format!("1024² weights, {uses} times").as_str().into(),
            dtype.as_str().into(),
            Cell::optional(variants[index].median(), 2),
            Cell::optional(variants[index].compared(first, |a, b| a / b), 2),
            Cell::Number(bytes as f64 / 1e6, 1),
        ]);
    }
    Ok(())
}

#[derive(Module, Debug)]
struct Large {
    layers: Vec<Linear>,
}

fn audited(device: &Device, samples: usize, table: &mut Table) -> Result<(), Box<dyn Error>> {
    let layer = LinearConfig::new(SIDE, SIDE).with_bias(false);
    let model = Large {
        layers: (0..4).map(|_| layer.init(device)).collect(),
    };
    // Made where it is first used.
    for layer in &model.layers {
        drop(layer.weight.val());
    }
    let dtype = match supported_dtypes(&device.clone().inner()).contains(&FloatDType::F16) {
        true => FloatDType::F16,
        false => FloatDType::F32,
    };
    let (model, autocast) = AutocastConfig::new(dtype).prepare(model)?;
    let x = Tensor::<2>::zeros([8, SIDE], device);
    let (mut least, mut peak) = (f64::INFINITY, 0);
    for _ in 0..samples {
        HEAP.reset_peak_usage();
        let before = HEAP.current_usage();
        let start = Instant::now();
        let found = audit(&model, &autocast, x.clone(), |model, autocast, x| {
            let forward = |x: Tensor<2>| model.layers.iter().fold(x, |x, layer| layer.forward(x));
            autocast.forward(x, forward).mean()
        })?;
        least = least.min(start.elapsed().as_secs_f64() * 1e3);
        peak = HEAP.peak_usage().saturating_sub(before);
        found.check()?;
    }
    table.push([
        "audit, 268 MB of weights".into(),
        support::dtype_name(&autocast).as_str().into(),
        Cell::Number(least, 2),
        Cell::Empty,
        Cell::Number(peak as f64 / 1e6, 1),
    ]);
    Ok(())
}
