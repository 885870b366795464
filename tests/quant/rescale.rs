//! Equalization factors between a layer and the one before it.

use burn::module::{Module, Param};
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor};
use burn_lean::quant::{
    Granularity, NumberFormat, QatConfig, QuantError, Scheme,
    module::InputStatistics,
    ptq::{Rescale, awq, rescale},
};

use crate::support::{each_device, tensor, values};

#[derive(Module, Debug)]
struct Block {
    norm: LayerNorm,
    fc1: Linear,
    fc2: Linear,
}

impl Block {
    fn new(device: &Device) -> Self {
        let mut block = Self {
            norm: LayerNormConfig::new(6).init(device),
            fc1: LinearConfig::new(6, 4).init(device),
            fc2: LinearConfig::new(4, 3).init(device),
        };
        block.fc1.weight = Param::from_tensor(tensor(1, [6, 4], device));
        block.fc2.weight = Param::from_tensor(tensor(2, [4, 3], device));
        block
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.fc2
            .forward(relu(self.fc1.forward(self.norm.forward(x))))
    }
}

fn factors(producer: &str, consumers: &[&str], factors: &[f32]) -> Rescale {
    Rescale {
        producer: producer.into(),
        consumers: consumers.iter().map(|path| path.to_string()).collect(),
        factors: factors.to_vec(),
    }
}

#[test]
fn rescaled_models_compute_the_same() {
    each_device(|target| {
        let device = &target.device;
        let block = Block::new(device);
        let x = tensor::<2>(9, [5, 6], device);
        let expected = values(block.forward(x.clone()));
        let of_norm = factors("norm", &["fc1"], &[2.0, 0.5, 3.0, 0.1, 7.0, 1.0]);
        let of_layer = factors("fc1", &["fc2"], &[0.3, 5.0, 1.5, 0.9]);
        let rescaled = rescale(rescale(block, &of_norm).unwrap(), &of_layer).unwrap();
        // Two layers of six and four products below 4.
        for (a, b) in values(rescaled.forward(x)).iter().zip(&expected) {
            assert!((a - b).abs() < 1e-5, "{a} {b}");
        }
        let gamma = values(rescaled.norm.gamma.val());
        assert_eq!(gamma[..2], [0.5, 2.0]);
    });
}

#[test]
fn factors_that_do_not_fit_are_refused() {
    let device = Device::flex();
    let refuse = |rescaling: Rescale| {
        let rejected = rescale(Block::new(&device), &rescaling).unwrap_err();
        rejected.into_error()
    };
    let six = [1.0; 6];
    assert!(matches!(
        refuse(factors("nrm", &["fc1"], &six)),
        QuantError::UnknownParameter { .. }
    ));
    assert!(matches!(
        refuse(factors("norm", &["fc3"], &six)),
        QuantError::UnknownParameter { .. }
    ));
    assert!(matches!(
        refuse(factors("norm", &["fc2"], &six)),
        QuantError::LengthMismatch { .. }
    ));
    assert!(matches!(
        refuse(factors("norm", &[], &six)),
        QuantError::InvalidConfig { .. }
    ));
    assert!(matches!(
        refuse(factors("norm", &["fc1"], &[0.0; 6])),
        QuantError::InvalidScale { .. }
    ));
    let prepared = QatConfig::new().prepare(Block::new(&device)).unwrap();
    let rejected = rescale(prepared, &factors("norm", &["fc1"], &six)).unwrap_err();
    let error = rejected.into_error();
    assert!(
        matches!(&error, QuantError::UnsupportedLayer { path, .. } if path == "fc1.weight"),
        "{error}"
    );
    let twice = factors("norm", &["fc1", "fc1"], &six);
    assert!(matches!(refuse(twice), QuantError::InvalidConfig { .. }));
}

#[test]
fn awq_is_no_worse_than_no_factors() {
    each_device(|target| {
        let device = &target.device;
        let mut inputs = InputStatistics::new(8);
        // One feature is far larger than the others.
        let spread = Tensor::<2>::from_data([[8.0, 1.0, 1.0, 0.5, 1.0, 1.0, 0.2, 1.0]], device);
        inputs
            .observe(tensor::<2>(1, [64, 8], device) * spread)
            .unwrap();
        let weight = tensor::<2>(2, [8, 4], device);
        let scheme = Scheme::symmetric(NumberFormat::int(3).narrow())
            .with_granularity(Granularity::PerChannel { axis: 1 });
        let search = awq(&weight, &inputs, &scheme).unwrap();
        let best = search
            .output_errors
            .iter()
            .copied()
            .fold(f64::INFINITY, f64::min);
        // The exponent 0 means no factors.
        assert!(search.ratio > 0.0 && best < 0.8 * search.output_errors[0]);
        assert_eq!(search.output_errors.len(), 20);
    });
}
