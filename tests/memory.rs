//! What a look at a model costs in memory, in a process of its own.

#![cfg(target_os = "linux")]

use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, FloatDType, Tensor};
use burn_lean::{amp, quant};

/// The most memory that this process has had [bytes].
fn peak() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:"));
    let kib = line.and_then(|line| line.split_whitespace().nth(1));
    1024 * kib.unwrap().parse::<usize>().unwrap()
}

/// 64 MiB of weights; the activations of one example are some KiB.
#[test]
fn audits_copy_no_weights() {
    const WIDTH: usize = 2048;
    const BYTES: usize = 4 * 4 * WIDTH * WIDTH;
    let device = Device::flex().autodiff();
    let layer = |_| LinearConfig::new(WIDTH, WIDTH).init(&device);
    let model: Vec<Linear> = (0..4).map(layer).collect();
    let forward = |model: &Vec<Linear>, x: Tensor<2>| {
        let mut layers = model.iter();
        layers.by_ref().fold(x, |x, layer| layer.forward(x))
    };
    let x = Tensor::<2>::ones([1, WIDTH], &device);
    // Weights are there, and what the first call needs.
    let small = vec![LinearConfig::new(4, 4).init(&device)];
    for (model, x, is_counted) in [
        (small, Tensor::<2>::ones([1, 4], &device), false),
        (model, x, true),
    ] {
        let config = amp::AutocastConfig::new(FloatDType::F16);
        let (model, autocast) = config.prepare(model).unwrap();
        let _ = forward(&model, x.clone());
        // The peak from here on.
        let _ = std::fs::write("/proc/self/clear_refs", "5");
        let before = peak();
        let found = amp::audit(&model, &autocast, x.clone(), |model, autocast, x| {
            autocast.forward(x, |x| forward(model, x))
        });
        found.unwrap().check().unwrap();
        let layers = quant::audit(&model, x, forward).unwrap().layers;
        assert_eq!(layers.len(), model.len());
        let grown = peak() - before;
        assert!(!is_counted || grown < BYTES / 4, "{grown} of {BYTES}");
    }
}
