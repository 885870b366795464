//! Quantizers that stand alone in a model, for sums and products that no layer's weight carries.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use burn_lean::quant::{
    ConvertConfig, FakeQuantize, FakeQuantizeConfig, ForwardQ, MixedPrecisionConfig, NumberFormat,
    ObserverConfig, PtqConfig, QatConfig, QuantizedForward, Schedule, Scheme, WeightConfig,
    calibrate, compare, inspect::Precision, qat::set_schedule, quantizers,
};

use crate::support::{each_device, tensor, values, with_numbers};

/// A residual connection whose sum is quantized.
#[derive(Module, Debug)]
struct Residual {
    first: Linear,
    second: Linear,
    sum: FakeQuantize,
}

impl Residual {
    fn new(observer: ObserverConfig, device: &Device) -> Self {
        let linear = || LinearConfig::new(8, 8).init(device);
        let config = FakeQuantizeConfig::new(Scheme::affine(NumberFormat::uint8()));
        let net = Self {
            first: linear(),
            second: linear(),
            sum: config.with_observer(observer).init(device).unwrap(),
        };
        with_numbers(net, 3)
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let y = self.first.forward_q(x.clone());
        self.second.forward_q(self.sum.forward(x + y))
    }
}

#[test]
fn mixed_precision_leaves_it_alone() {
    let device = Device::flex();
    let x = tensor::<2>(5, [16, 8], &device);
    let weights = QatConfig::new()
        .with_weight(WeightConfig::int(2))
        .with_activation(None);
    for (keep_at, layers_left) in [(Precision::int8(), true), (Precision::Float, false)] {
        let allocation = MixedPrecisionConfig::new(weights.clone())
            .with_keep_at(keep_at)
            .with_max_drop(0.0)
            .allocate(
                Residual::new(ObserverConfig::MinMax, &device),
                |net| {
                    net.forward(x.clone());
                },
                |net| net.forward(x.clone()),
                // Never good enough, so that everything is kept.
                |net| match quantizers(net).iter().any(|q| q.quantizer.is_enabled()) {
                    true => 0.0,
                    false => 100.0,
                },
            )
            .unwrap();
        let mut kept = allocation.report.kept;
        kept.sort();
        assert_eq!(kept, ["first.weight", "second.weight"]);
        assert!(allocation.model.sum.is_enabled());
        let fresh = Residual::new(ObserverConfig::MinMax, &device);
        assert_eq!(allocation.config.prepare(fresh).is_ok(), layers_left);
    }
}

#[test]
fn post_training_quantization_takes_one_without_memory() {
    each_device(|target| {
        let x = tensor::<2>(5, [16, 8], &target.device);
        let (net, report) = PtqConfig::new()
            .with_progress(false)
            .quantize(
                Residual::new(ObserverConfig::Memoryless, &target.device),
                || [x.clone()],
                |net, x| {
                    net.forward(x);
                },
            )
            .unwrap();
        assert_eq!(net.sum.config().observer, ObserverConfig::Memoryless);
        let paths: Vec<&str> = report.activations.iter().map(|a| a.path.as_str()).collect();
        assert_eq!(
            paths,
            ["first.weight.quant.input", "second.weight.quant.input"]
        );
    });
}

#[test]
fn post_training_quantization_reports_the_observer_that_it_has() {
    let device = Device::flex();
    let x = tensor::<2>(5, [16, 8], &device);
    let own = ObserverConfig::moving_average();
    let quantized = PtqConfig::new().with_progress(false).quantize(
        Residual::new(own, &device),
        || [x.clone()],
        |net, x| {
            net.forward(x);
        },
    );
    let (_, report) = quantized.unwrap();
    let of_sum = report.activations.iter().find(|a| a.path == "sum").unwrap();
    assert_eq!(of_sum.observer, own);
}

#[test]
fn a_comparison_counts_its_codes_too() {
    each_device(|target| {
        let x = tensor::<2>(5, [16, 8], &target.device);
        let net = QatConfig::new()
            .prepare(Residual::new(ObserverConfig::MinMax, &target.device))
            .unwrap();
        assert_eq!(net.sum.path(), "sum");
        let net = calibrate(net, |net| {
            net.forward(x.clone());
        })
        .unwrap();
        let (converted, mut report) = ConvertConfig::new().convert(net.clone()).unwrap();
        compare(&mut report, &net, &converted, [x.clone()], |net, x| {
            net.forward(x.clone())
        })
        .unwrap();
        assert_eq!(report.activations.len(), 1);
        assert_eq!(report.activations[0].path, "sum");

        let mut off = converted.clone();
        // A bias that is not the prepared model's: its sum has other codes.
        off.first.bias = off.first.bias.map(|bias| bias.map(|bias| bias + 0.5));
        compare(&mut report, &net, &off, [x], |net, x| {
            net.forward(x.clone())
        })
        .unwrap();
        let codes = report.activations[0].codes;
        assert!(codes > 10, "{codes}");
        assert!(report.activations[0].differing > 0.5);
        assert!(report.largest_mismatch().unwrap() >= codes);
        assert!(
            report
                .to_string()
                .contains("`sum`: activation codes off by")
        );
    });
}

#[test]
fn a_comparison_sees_an_output_that_is_no_number() {
    let device = Device::flex();
    let x = tensor::<2>(5, [16, 8], &device);
    let net = QatConfig::new()
        .with_activation(None)
        .prepare(Residual::new(ObserverConfig::Memoryless, &device))
        .unwrap();
    let (converted, mut report) = ConvertConfig::new().convert(net.clone()).unwrap();
    let mut broken = converted.clone();
    broken.second.bias = broken
        .second
        .bias
        .map(|bias| bias.map(|bias| bias * f32::NAN));
    let mut difference = |a: &Residual, b: &Residual| {
        compare(&mut report, a, b, [x.clone()], |net, x| {
            net.forward(x.clone())
        })
        .unwrap();
        let json = serde_json::to_string(&report).unwrap();
        let back: burn_lean::quant::ConversionReport = serde_json::from_str(&json).unwrap();
        assert_eq!(back, report);
        report.output_difference
    };
    assert_eq!(difference(&net, &broken), Some(f32::INFINITY));
    assert_eq!(difference(&broken, &broken), Some(0.0));
}

#[test]
fn one_that_is_the_first_field_follows_the_schedule_as_the_last_does() {
    #[derive(Module, Debug)]
    struct First {
        quantize: FakeQuantize,
        fc: Linear,
    }
    #[derive(Module, Debug)]
    struct Last {
        fc: Linear,
        quantize: FakeQuantize,
    }
    /// Its losses in three steps; in the first it observes.
    fn losses<M: Module>(model: M, loss: impl Fn(&M, Tensor<2>) -> Tensor<1>) -> Vec<f32> {
        let schedule = Schedule::new().with_quantize_from(1);
        let model = set_schedule(model, schedule).unwrap();
        assert!(model.devices().iter().all(Device::is_autodiff));
        let quantized = QuantizedForward::new();
        let x = tensor::<2>(5, [4, 8], &Device::flex().autodiff());
        let step = |step| {
            assert_eq!(quantizers(&model)[0].quantizer.step(), step);
            let loss = quantized.run(&model, x.clone(), |model, x| loss(model, x));
            values(loss.unwrap())[0]
        };
        (0..3).map(step).collect()
    }
    let device = Device::flex().autodiff();
    let quantize = FakeQuantizeConfig::new(Scheme::affine(NumberFormat::uint(2)));
    let quantize = || quantize.init(&device).unwrap();
    let fc = with_numbers(LinearConfig::new(8, 8).init(&device), 3);
    let first = First {
        quantize: quantize(),
        fc: fc.clone(),
    };
    let last = Last {
        fc,
        quantize: quantize(),
    };
    let found = losses(first, |model, x| {
        model.fc.forward(model.quantize.forward(x)).square().mean()
    });
    assert_ne!(found[0], found[1]);
    assert_eq!(found[1], found[2]);
    let expected = losses(last, |model, x| {
        model.fc.forward(model.quantize.forward(x)).square().mean()
    });
    assert_eq!(found, expected);
}
