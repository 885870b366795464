//! Reports on quantizers that work, and on those that do not.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use burn_lean::quant::{
    ForwardQ, QatConfig, QuantError, Site, WeightConfig, calibrate, health, inspect::Health,
};

use crate::support::{each_device, tensor, values};

/// A layer whose second output has no weights.
fn half_dead(device: &Device) -> Linear {
    let layer = LinearConfig::new(2, 2).with_bias(false).init(device);
    let mut layer = layer;
    layer.weight = layer
        .weight
        .map(|old| Tensor::from_floats([[0.9, 0.0], [-0.5, 0.0]], &old.device()));
    layer
}

#[test]
fn noise_clipping_and_dead_channels_follow_from_the_numbers() {
    each_device(|target| {
        let config = QatConfig::new().with_weight(WeightConfig::int(2));
        let layer = config.prepare(half_dead(&target.device)).unwrap();
        // 0 to 2 in UINT8.
        let range = Tensor::<2>::from_floats([[0.0, 2.0]], &target.device);
        let layer = calibrate(layer, |layer| {
            layer.forward_q(range.clone());
        })
        .unwrap();
        let health = health(&layer, |layer| {
            // One value of four lies outside.
            let x = Tensor::<2>::from_floats([[0.0, 2.0], [2.0, 3.0]], &target.device);
            layer.forward_q(x);
        })
        .unwrap();

        let input = &health.quantizers[1];
        assert_eq!((input.site, input.values), (Site::Input, 4));
        assert_eq!(input.clipped, 0.25);
        assert_eq!(input.dead_channels, None);
        // Σx² = 4 + 4 + 9; the only error is that 3 became 2.
        assert!((input.sqnr - 10.0 * 17f64.log10()).abs() < 1e-4, "{health}");

        let weight = &health.quantizers[0];
        assert_eq!(
            (weight.site, weight.layer.as_str()),
            (Site::Weight, "weight")
        );
        assert_eq!(weight.dead_channels, Some(1));
        assert_eq!(weight.clipped, 0.0);
        // The grid of the first output is −0.9, 0, 0.9: −0.5 becomes −0.9.
        let expected = 10.0 * ((0.81 + 0.25) / 0.16f64).log10();
        assert!((weight.sqnr - expected).abs() < 1e-4, "{health}");
    });
}

#[test]
fn a_report_with_infinite_ratios_reads_back_from_json() {
    let device = Device::flex();
    let config = QatConfig::new().with_activation(None);
    let layer = config.prepare(half_dead(&device)).unwrap();
    let found = health(&layer, |layer| {
        layer.forward_q(Tensor::<2>::ones([1, 2], &device));
    })
    .unwrap();
    let exact = Health {
        quantizers: found
            .quantizers
            .into_iter()
            .map(|quantizer| burn_lean::quant::inspect::QuantizerHealth {
                sqnr: f64::INFINITY,
                ..quantizer
            })
            .collect(),
    };
    let json = serde_json::to_string(&exact).unwrap();
    assert_eq!(serde_json::from_str::<Health>(&json).unwrap(), exact);
}

#[test]
fn nothing_that_passes_through_a_quantizer_is_an_error() {
    let device = Device::flex();
    let error = health(&half_dead(&device), |layer| {
        layer.forward(Tensor::<2>::ones([1, 2], &device));
    })
    .unwrap_err();
    assert_matches!(error, QuantError::NoData { .. });
}

#[test]
fn looking_at_a_model_does_not_change_it() {
    let device = Device::flex();
    let layer = QatConfig::new().prepare(half_dead(&device)).unwrap();
    let x = tensor(1, [4, 2], &device);
    let layer = calibrate(layer, |layer| {
        layer.forward_q(x.clone());
    })
    .unwrap();
    let before = values(layer.forward_q(x.clone()));
    let wide = x.clone() * 100.0;
    health(&layer.clone().train(), |layer| {
        layer.forward_q(wide.clone());
    })
    .unwrap();
    assert_eq!(values(layer.forward_q(x)), before);
}
