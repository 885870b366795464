//! Layers that the model calls on another thread are part of every look at it.

use std::thread;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use burn_lean::quant::{
    ConvertConfig, ForwardQ, PtqConfig, QatConfig, RoundingConfig, WeightConfig, calibrate,
    compare, health, module::LayerInputs,
};

use crate::support::{tensor, values, with_numbers};

/// Two branches, the second on a thread of its own.
#[derive(Module, Debug)]
struct Branches {
    here: Linear,
    there: Linear,
}

impl Branches {
    fn new(device: &Device) -> Self {
        let layer = || LinearConfig::new(6, 5).init(device);
        let model = Self {
            here: layer(),
            there: layer(),
        };
        with_numbers(model, 4)
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let there = thread::scope(|scope| {
            let other = x.clone();
            let branch = scope.spawn(move || self.there.forward_q(other));
            branch.join().unwrap()
        });
        self.here.forward_q(x) + there
    }
}

fn x() -> Tensor<2> {
    tensor::<2>(3, [16, 6], &Device::flex())
}

fn quantized(bits: u8) -> Branches {
    let config = QatConfig::new().with_weight(WeightConfig::int(bits));
    let model = config.prepare(Branches::new(&Device::flex())).unwrap();
    calibrate(model, |model| drop(model.forward(x()))).unwrap()
}

#[test]
fn health_sees_both_branches() {
    let health = health(&quantized(8), |model| drop(model.forward(x()))).unwrap();
    let paths: Vec<&str> = health.quantizers.iter().map(|q| q.path.as_str()).collect();
    assert_eq!(
        paths,
        [
            "here.weight.quant.weight",
            "here.weight.quant.input",
            "there.weight.quant.weight",
            "there.weight.quant.input",
        ]
    );
}

#[test]
fn rounding_takes_the_inputs_of_both_branches() {
    let model = quantized(3);
    let inputs = LayerInputs::collect(&model, |model| drop(model.forward(x()))).unwrap();
    let paths: Vec<&str> = inputs.paths().collect();
    assert_eq!(paths, ["here.weight", "there.weight"]);
    assert_eq!(inputs.of("there.weight").unwrap()[0].samples(), 16);
    let config = PtqConfig::new()
        .with_quantize(QatConfig::new().with_weight(WeightConfig::int(3)))
        .with_rounding(RoundingConfig::new())
        .with_progress(false);
    let float = Branches::new(&Device::flex());
    let (_, report) = config
        .quantize(float, || [x()], |model, x| drop(model.forward(x)))
        .unwrap();
    assert_eq!(report.rounding.weights.len(), 2);
    assert_eq!(report.activations.len(), 2);
}

#[test]
fn a_comparison_compares_the_codes_of_both_branches() {
    let model = quantized(8);
    let expected = values(model.forward(x()));
    let (converted, mut report) = ConvertConfig::new().convert(model.clone()).unwrap();
    let run = |model: &Branches, x: &Tensor<2>| model.forward(x.clone());
    compare(&mut report, &model, &converted, [x()], run).unwrap();
    assert_eq!(report.weights.len(), 2);
    for weight in &report.weights {
        let mismatch = weight.mismatch.unwrap();
        assert_eq!(mismatch.activation_codes, Some(0), "{report}");
    }
    assert_eq!(values(converted.forward(x())), expected);
}
