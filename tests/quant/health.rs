//! Reports on quantizers that work, and on those that do not.

use burn::module::{Module, ModuleMapper, Param};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use burn_lean::quant::{
    FakeQuantizeConfig, ForwardQ, Granularity, Learned, NumberFormat, ObserverConfig, QatConfig,
    QuantError, Scheme, Site, WeightConfig, calibrate, fake::Range, health, inspect::Health,
};

use crate::support::{each_device, on_tracked, tensor, values};

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

/// Half a step beyond the last number rounds to it or away from it, to even, as if the format went on.
#[test]
fn clipped_is_what_rounds_to_a_number_beyond_the_format() {
    // With the half of a range that gives the scale 1, numbers that are not clipped, and some that are.
    let cases = [
        (
            NumberFormat::int(2),
            1.5_f32,
            [-2.5_f32, 1.25],
            [1.5, -2.75],
        ),
        (
            NumberFormat::int(4).narrow(),
            7.0,
            [-7.25, 7.25],
            [7.5, -7.5],
        ),
        (NumberFormat::uint(4), 7.5, [-8.5, 7.25], [7.5, -8.75]),
        (NumberFormat::E4M3, 448.0, [464.0, -455.0], [465.0, -500.0]),
        (
            NumberFormat::E5M2,
            57344.0,
            [61439.0, -57344.0],
            [61440.0, -1e6],
        ),
        (NumberFormat::E2M1, 6.0, [6.9, -6.5], [7.0, -8.0]),
    ];
    each_device(|target| {
        for (format, half, inside, beyond) in cases {
            let range = Range {
                min: Tensor::from_floats([-half], &target.device),
                max: Tensor::from_floats([half], &target.device),
            };
            let config = FakeQuantizeConfig::new(Scheme::symmetric(format));
            let quantizer = config.init(&target.device).unwrap().with_range(range);
            for (numbers, expected) in [(inside, 0.0), (beyond, 1.0)] {
                let found = health(&quantizer, |quantizer| {
                    quantizer.forward(Tensor::<1>::from_floats(numbers, &target.device));
                });
                let found = found.unwrap().quantizers[0].clipped;
                assert_eq!(found, expected, "{} {format}: {numbers:?}", target.name);
            }
        }
    });
}

#[test]
fn each_block_clips_by_its_own_scale() {
    each_device(|target| {
        let scheme = Scheme::symmetric(NumberFormat::int(4).narrow());
        let blocks = vec![2, 3];
        let scheme = scheme.with_granularity(Granularity::PerBlock { extents: blocks });
        // The scales 1, 2, 4 and ½.
        let largest = Tensor::<1>::from_floats([7.0, 14.0, 28.0, 3.5], &target.device);
        let range = Range {
            min: largest.clone().neg(),
            max: largest,
        };
        let config = FakeQuantizeConfig::new(scheme).with_observer(ObserverConfig::MinMax);
        let quantizer = config.init_for(&[3, 5], &target.device).unwrap();
        let found = health(&quantizer.with_range(range), |quantizer| {
            quantizer.forward(Tensor::<2>::full([3, 5], 8.0, &target.device));
        });
        // Six in the first block, and two in the last one, which is smaller.
        assert_eq!(found.unwrap().quantizers[0].clipped, 8.0 / 15.0);
    });
}

#[test]
fn a_learned_zero_point_clips_as_the_integer_that_it_stands_for() {
    /// A step of an optimizer.
    struct Shift;

    impl ModuleMapper for Shift {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            let requires_grad = param.is_require_grad();
            param.map(|value| {
                (value.detach() + 0.4)
                    .detach()
                    .set_require_grad(requires_grad)
            })
        }
    }

    on_tracked(|device| {
        let config = FakeQuantizeConfig::new(Scheme::affine(NumberFormat::uint(4)))
            .with_learned(Learned::LsqPlus);
        let quantizer = calibrate(config.init(&device).unwrap(), |quantizer| {
            quantizer.forward(tensor::<1>(1, [32], &device));
        });
        let quantizer = quantizer.unwrap().map(&mut Shift);
        assert!(quantizer.is_learning());
        let qparams = quantizer.qparams().unwrap();
        let (scale, zero) = (values(qparams.scale)[0], values(qparams.zero_point)[0]);
        let inside = [15.3, -0.3].map(|number: f32| (number - zero) * scale);
        let found = health(&quantizer, |quantizer| {
            let device = device.clone().inner();
            quantizer.forward(Tensor::<1>::from_floats(inside, &device));
        });
        assert_eq!(found.unwrap().quantizers[0].clipped, 0.0);
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
