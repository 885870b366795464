//! Post-training quantization: calibration, ranges, rounding, biases.

use burn::module::{Module, Param};
use burn::nn::conv::{Conv2d, Conv2dConfig, ConvTranspose2d, ConvTranspose2dConfig};
use burn::nn::{Linear, LinearConfig, PaddingConfig2d};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor};
use burn_lean::quant::{
    ForwardQ, GptqConfig, NumberFormat, ObserverConfig, Override, PtqConfig, PtqMode, QatConfig,
    QuantError, RangeMethod, Rounding, RoundingConfig, Schedule, WeightConfig, WeightRange, health,
    quantized_weights, quantizers, rounding::AdaRoundConfig,
};

use crate::support::{each_device, on_each, tensor, values, with_numbers};

/// A convolution of odd geometry and a linear layer.
#[derive(Module, Debug)]
struct Net {
    conv: Conv2d,
    head: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        let net = Self {
            conv: Conv2dConfig::new([2, 4], [3, 2])
                .with_stride([2, 1])
                .with_padding(PaddingConfig2d::Explicit(1, 0, 2, 1))
                .init(device),
            head: LinearConfig::new(4 * 4 * 6, 3).init(device),
        };
        with_numbers(net, 11)
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<2> {
        let x: Tensor<2> = relu(self.conv.forward_q(x)).flatten(1, 3);
        self.head.forward_q(x)
    }
}

fn batches(device: &Device) -> Vec<Tensor<4>> {
    (0..3)
        .map(|seed| tensor(seed, [8, 2, 6, 6], device))
        .collect()
}

/// With nothing chosen.
fn default_of(bits: u8) -> PtqConfig {
    let quantize = QatConfig::new().with_weight(WeightConfig::int(bits));
    PtqConfig::new()
        .with_quantize(quantize)
        .with_mode(PtqMode::WeightOnly)
        .with_progress(false)
}

/// With full ranges, rounded to nearest.
fn weights_only(bits: u8) -> PtqConfig {
    default_of(bits)
        .with_weight_range(WeightRange::MinMax)
        .with_rounding(of(Rounding::Nearest))
}

/// Without bias correction.
fn of(rounding: Rounding) -> RoundingConfig {
    RoundingConfig::new()
        .with_rounding(rounding)
        .with_bias_correction(false)
}

fn quantize(config: &PtqConfig, device: &Device) -> (Net, burn_lean::quant::ptq::PtqReport) {
    let data = batches(device);
    let quantized = config.quantize(
        Net::new(device),
        || data.clone(),
        |net, x| {
            net.forward(x);
        },
    );
    quantized.unwrap()
}

/// Mean squared difference of the outputs to those of the float model.
fn error(net: &Net, device: &Device) -> f64 {
    let float = Net::new(device);
    let squares = batches(device).into_iter().map(|x| {
        let difference = float.forward(x.clone()) - net.forward(x);
        f64::from(values(difference.square().mean())[0])
    });
    squares.sum()
}

#[test]
fn each_mode_quantizes_what_it_says() {
    let device = Device::flex();
    let of = |mode| {
        let config = PtqConfig::new().with_mode(mode).with_progress(false);
        let (net, report) = quantize(&config, &device);
        let observers = quantizers(&net).into_iter();
        let observers = observers.map(|located| located.quantizer.config().observer);
        (
            observers.collect::<Vec<_>>(),
            report.batches,
            report.activations.len(),
        )
    };
    let memoryless = ObserverConfig::Memoryless;
    assert_eq!(of(PtqMode::WeightOnly), (vec![memoryless; 2], 0, 0));
    assert_eq!(of(PtqMode::Dynamic), (vec![memoryless; 4], 0, 0));
    let (observers, batches, activations) = of(PtqMode::Static);
    assert_eq!((batches, activations), (3, 2));
    assert!(observers.iter().any(|observer| observer.has_memory()));
}

#[test]
fn each_activation_takes_the_range_with_the_least_noise() {
    each_device(|target| {
        let percentile = ObserverConfig::histogram(RangeMethod::Percentile { percent: 60.0 });
        let config = |observers: Vec<ObserverConfig>| {
            let config = PtqConfig::new().with_observers(observers);
            quantize(&config.with_progress(false), &target.device).1
        };
        let narrow = config(vec![percentile]);
        let full = config(vec![ObserverConfig::MinMax]);
        let both = config(vec![percentile, ObserverConfig::MinMax]);
        for index in 0..2 {
            assert!(narrow.activations[index].clipped > 0.1);
            assert!(narrow.activations[index].sqnr < full.activations[index].sqnr);
            assert_eq!(both.activations[index], full.activations[index]);
        }
    });
}

#[test]
fn ranges_of_least_squares_have_less_noise_than_full_ones_at_two_bits() {
    each_device(|target| {
        let sqnr = |config: PtqConfig| -> Vec<f64> {
            let (net, _) = quantize(&config, &target.device);
            let health = health(&net, |net| {
                net.forward(tensor(0, [2, 2, 6, 6], &target.device));
            });
            health
                .unwrap()
                .quantizers
                .iter()
                .map(|quantizer| quantizer.sqnr)
                .collect()
        };
        let full = sqnr(weights_only(2));
        let best = sqnr(weights_only(2).with_weight_range(WeightRange::LeastSquares));
        assert!(
            full.iter().zip(&best).all(|(full, best)| best > full),
            "{full:?} {best:?}"
        );
    });
}

#[test]
fn ranges_of_least_squares_lower_the_error_of_small_floats_too() {
    each_device(|target| {
        // One weight of each output is four times as large as the others may be.
        let outliers = Tensor::<2>::full([1, 3], 4.0, &target.device);
        let others = tensor::<2>(3, [255, 3], &target.device);
        let weight = Tensor::cat(vec![outliers, others], 0);
        let minifloat = WeightConfig::new().with_format(NumberFormat::E2M1);
        let config = weights_only(4).with_quantize(QatConfig::new().with_weight(minifloat));
        let error = |range: WeightRange| -> f32 {
            let linear = LinearConfig::new(256, 3).with_bias(false);
            let mut linear: Linear = linear.init(&target.device);
            linear.weight = Param::from_tensor(weight.clone());
            let quantized = config.clone().with_weight_range(range).quantize(
                linear,
                || [tensor::<2>(4, [2, 256], &target.device)],
                |linear, x| drop(linear.forward_q(x)),
            );
            let (quantized, _) = quantized.unwrap();
            let off = quantized.weight.val() - weight.clone();
            values(off.square().sum())[0]
        };
        let (least, full) = (error(WeightRange::LeastSquares), error(WeightRange::MinMax));
        assert!(least < full, "{least} {full}");
    });
}

#[test]
fn few_bits_are_rounded_by_data_with_nothing_chosen() {
    each_device(|target| {
        let run = |config: PtqConfig| quantize(&config, &target.device);
        for bits in [2, 4] {
            let (net, report) = run(default_of(bits));
            assert_eq!(report.rounding.weights.len(), 2, "{report}");
            let corrected = |bias: Option<f32>| bias.is_some_and(|moved| moved > 0.0);
            let mut weights = report.rounding.weights.iter();
            assert!(
                weights.all(|weight| corrected(weight.bias_correction)),
                "{report}"
            );
            let gptq = Rounding::Gptq(GptqConfig::new());
            let explicit = weights_only(bits)
                .with_weight_range(WeightRange::LeastSquares)
                .with_rounding(RoundingConfig::new().with_rounding(gptq));
            let x = tensor(0, [2, 2, 6, 6], &target.device);
            let same = values(run(explicit).0.forward(x.clone()));
            assert_eq!(values(net.forward(x)), same);
            let chosen = error(&net, &target.device);
            let nearest = error(&run(weights_only(bits)).0, &target.device);
            assert!(chosen < nearest, "{bits} bits: {chosen}, nearest {nearest}");
        }
        // More bits lose nothing worth a pass over the data.
        let (net, report) = run(default_of(5));
        assert!(report.rounding.weights.is_empty() && report.batches == 0);
        let x = tensor(0, [2, 2, 6, 6], &target.device);
        let nearest = run(weights_only(5)).0.forward(x.clone());
        assert_eq!(values(net.forward(x)), values(nearest));
    });
}

#[test]
fn only_the_layers_of_few_bits_are_rounded_by_data() {
    let device = Device::flex();
    let head = Override::new("head".into()).with_weight_bits(Some(3));
    let spared = QatConfig::new().with_overrides(vec![head]);
    let config = default_of(8).with_quantize(spared);
    let (net, report) = quantize(&config, &device);
    let paths: Vec<&str> = report
        .rounding
        .weights
        .iter()
        .map(|w| w.path.as_str())
        .collect();
    assert_eq!(paths, ["head.weight"]);
    let full = quantize(&weights_only(8), &device).0;
    let both = |net: &Net| [net.conv.weight.val(), net.conv.weight.base()].map(values);
    assert_eq!(both(&net), both(&full));
}

#[test]
fn the_error_that_rounding_foretells_is_that_of_the_layer() {
    // One layer, so that its output is the model's.
    each_device(|target| {
        let data = tensor(4, [64, 5], &target.device);
        let layer = with_numbers(LinearConfig::new(5, 3).init(&target.device), 2);
        let float = layer.forward(data.clone());
        let config = weights_only(3).with_rounding(of(Rounding::Gptq(GptqConfig::new())));
        let (layer, report) = config
            .quantize(
                layer,
                || [data.clone()],
                |layer, x| {
                    layer.forward_q(x);
                },
            )
            .unwrap();
        let difference = (layer.forward_q(data.clone()) - float).square().mean();
        let found = f64::from(values(difference)[0]);
        let foretold = report.rounding.weights[0].error;
        // Sums of 192 squares in F32.
        assert!(
            (found - foretold).abs() < 1e-5 * foretold,
            "{found} {foretold}"
        );
    });
}

#[test]
fn no_calibration_data_is_an_error_with_the_model() {
    let device = Device::flex();
    let none = Vec::<Tensor<4>>::new;
    for config in [
        PtqConfig::new(),
        weights_only(4).with_rounding(of(Rounding::Gptq(GptqConfig::new()))),
    ] {
        let rejected = config
            .with_progress(false)
            .quantize(Net::new(&device), none, |net, x| {
                net.forward(x);
            })
            .unwrap_err();
        assert_matches!(rejected.error(), QuantError::NoData { .. });
        assert!(quantizers(rejected.value()).is_empty());
    }
    // Without anything that asks for data, none is needed.
    for config in [weights_only(4), default_of(4)] {
        let quantized = config.quantize(Net::new(&device), none, |net, x| {
            net.forward(x);
        });
        assert_eq!(quantized.unwrap().1.batches, 0);
    }
}

#[test]
fn a_model_without_a_layer_that_is_rounded_by_data_is_rounded_to_nearest() {
    each_device(|target| {
        let layer = ConvTranspose2dConfig::new([2, 4], [3, 2]).init(&target.device);
        let layer = with_numbers(layer, 2);
        let data = batches(&target.device);
        let quantize = |rounding: RoundingConfig| {
            let config = default_of(4).with_mode(PtqMode::Static);
            let config = config.with_rounding(rounding);
            config.quantize(
                layer.clone(),
                || data.clone(),
                |layer: &ConvTranspose2d, x| {
                    layer.forward_q(x);
                },
            )
        };
        let chosen = RoundingConfig::new().with_rounding(Rounding::Auto);
        let (found, report) = quantize(chosen).unwrap();
        assert!(report.rounding.weights.is_empty(), "{report}");
        assert_eq!(report.rounding.nearest[0].0, "weight");
        let found = values(found.weight.val());
        assert_ne!(found, values(layer.weight.val()));
        let (nearest, _) = quantize(of(Rounding::Nearest)).unwrap();
        assert_eq!(found, values(nearest.weight.val()));
        for rounding in [
            Rounding::Gptq(GptqConfig::new()),
            Rounding::AdaRound(AdaRoundConfig::new()),
        ] {
            let error = quantize(of(rounding)).unwrap_err().into_error();
            assert_says!(error, "no linear layer");
        }
    });
}

#[test]
fn a_model_that_is_not_called_with_its_quantizers_names_the_first() {
    let device = Device::flex();
    let layer = LinearConfig::new(2, 2).init(&device);
    let x = tensor::<2>(1, [4, 2], &device);
    let rejected = PtqConfig::new()
        .with_progress(false)
        .quantize(
            layer,
            || [x.clone()],
            |layer, x| {
                layer.forward(x);
            },
        )
        .unwrap_err();
    assert_says!(rejected, "weight.quant.input", "forward_q");
}

#[test]
fn static_ranges_without_an_observer_are_refused() {
    let device = Device::flex();
    let data = batches(&device);
    let error = PtqConfig::new()
        .with_observers(Vec::new())
        .quantize(
            Net::new(&device),
            || data.clone(),
            |net, x| {
                net.forward(x);
            },
        )
        .unwrap_err()
        .into_error();
    assert_matches!(
        error,
        QuantError::InvalidConfig {
            field: "observers",
            ..
        }
    );
}

/// What is refused before anything is run or recorded, with the model.
fn refused(config: &PtqConfig) -> (&'static str, String) {
    let data = || -> Vec<Tensor<4>> { panic!("no data is needed to refuse it") };
    let net = || Net::new(&Device::flex());
    let called = config.quantize(net(), data, |_, _| ());
    let recorded = config.quantize_for(net(), data, |net, x| net.forward(x));
    let [called, recorded] = [called, recorded].map(|quantized| {
        let rejected = quantized.unwrap_err();
        assert!(quantizers(rejected.value()).is_empty());
        let text = rejected.to_string();
        match rejected.into_error() {
            QuantError::InvalidConfig { field, .. } => (field, text),
            error => panic!("{error}"),
        }
    });
    assert_eq!(recorded, called);
    called
}

#[test]
fn static_ranges_of_an_observer_without_memory_are_refused() {
    let memoryless = ObserverConfig::Memoryless;
    for observers in [vec![memoryless], vec![ObserverConfig::MinMax, memoryless]] {
        let config = PtqConfig::new().with_observers(observers);
        let (field, text) = refused(&config);
        assert_eq!(field, "observers");
        assert_says!(text, "PtqMode::Dynamic");
        // Only the static mode has a use for them.
        let config = config.with_mode(PtqMode::Dynamic).with_progress(false);
        quantize(&config, &Device::flex());
    }
}

#[test]
fn numbers_out_of_their_range_are_refused_before_any_data() {
    let one_bin = ObserverConfig::Histogram {
        bins: 1,
        range: RangeMethod::Search,
    };
    let observers = vec![ObserverConfig::MinMax, one_bin];
    let gptq = GptqConfig::new().with_ridge(-1.0);
    let adaround = AdaRoundConfig::new().with_learning_rate(f64::NAN);
    for (config, field) in [
        (PtqConfig::new().with_observers(observers), "bins"),
        (
            PtqConfig::new().with_rounding(of(Rounding::Gptq(gptq))),
            "ridge",
        ),
        (
            PtqConfig::new().with_rounding(of(Rounding::AdaRound(adaround))),
            "learning_rate",
        ),
    ] {
        assert_eq!(refused(&config).0, field);
    }
}

#[test]
fn a_schedule_that_does_not_quantize_from_the_start_is_refused() {
    let schedule = Schedule::new().with_quantize_from(10);
    for mode in [PtqMode::WeightOnly, PtqMode::Dynamic, PtqMode::Static] {
        let quantize = QatConfig::new().with_schedule(schedule);
        let config = PtqConfig::new().with_quantize(quantize).with_mode(mode);
        let (field, text) = refused(&config);
        assert_eq!(field, "quantize_from");
        assert_says!(text, "set_schedule");
    }
    // What comes after the start is kept.
    let later = Schedule::new().with_freeze_observers_at(Some(10));
    let config = PtqConfig::new()
        .with_quantize(QatConfig::new().with_schedule(later))
        .with_progress(false);
    let (net, _) = quantize(&config, &Device::flex());
    assert!(
        quantizers(&net)
            .iter()
            .all(|at| at.quantizer.schedule() == later)
    );
}

#[test]
fn a_config_reads_back_from_json() {
    use burn::config::Config;
    let config = weights_only(4)
        .with_rounding(of(Rounding::Gptq(GptqConfig::new().with_ridge(0.05))))
        .with_quantize(
            QatConfig::new()
                .with_weight(WeightConfig::new().with_format(NumberFormat::int(5).narrow())),
        );
    let json = config.to_string();
    let file = tempfile::NamedTempFile::new().unwrap();
    config.save(file.path()).unwrap();
    assert_eq!(PtqConfig::load(file.path()).unwrap().to_string(), json);
}

/// A matrix for each of several heads, and a transposed convolution.
#[derive(Module, Debug)]
struct Unusual {
    up: ConvTranspose2d,
    heads: Param<Tensor<3>>,
    head: Linear,
}

impl Unusual {
    fn forward(&self, x: Tensor<4>) -> Tensor<2> {
        let batch = x.dims()[0];
        let x: Tensor<2> = relu(self.up.forward(x)).flatten(1, 3);
        let x = x.reshape([1, batch, 16]).matmul(self.heads.val());
        self.head.forward(x.reshape([batch, 12]))
    }
}

#[test]
fn few_bits_leave_to_nearest_what_is_no_matrix_of_a_layer_and_say_so() {
    on_each(|device| {
        let net = Unusual {
            up: ConvTranspose2dConfig::new([2, 4], [2, 2]).init(device),
            heads: Param::from_tensor(tensor(5, [1, 16, 12], device)),
            head: LinearConfig::new(12, 3).init(device),
        };
        let net = with_numbers(net, 17);
        let inputs = || vec![tensor::<4>(8, [6, 2, 1, 1], device)];
        let config = PtqConfig::new()
            .with_quantize(QatConfig::new().with_weight(WeightConfig::int(4)))
            .with_progress(false);
        let (net, report) = config
            .quantize_for(net, inputs, |net, x| net.forward(x))
            .unwrap();
        let rounding = &report.rounding;
        let rounded: Vec<_> = rounding.weights.iter().map(|w| w.path.as_str()).collect();
        assert_eq!(rounded, ["head.weight"]);
        let nearest: Vec<_> = rounding
            .nearest
            .iter()
            .map(|(path, _)| path.as_str())
            .collect();
        assert_eq!(nearest, ["up.weight", "heads"], "{rounding}");
        assert_says!(report, "heads is rounded to nearest");
        let quantized = quantized_weights(&net).unwrap();
        let quantized: Vec<_> = quantized.iter().map(|(path, _)| path.as_str()).collect();
        assert_eq!(quantized, ["up.weight", "heads", "head.weight"]);
    });
}

#[test]
fn a_layer_without_inputs_is_named_whatever_the_rounding() {
    on_each(|device| {
        let conv = Conv2dConfig::new([2, 3], [2, 2]).init(device);
        let up = ConvTranspose2dConfig::new([3, 2], [2, 2]).init(device);
        let net: (Conv2d, ConvTranspose2d) = with_numbers((conv, up), 5);
        for rounding in [Rounding::Auto, Rounding::Gptq(GptqConfig::new())] {
            let config = default_of(4).with_rounding(of(rounding));
            let (_, report) = config
                .quantize(
                    net.clone(),
                    || batches(device),
                    |net: &(Conv2d, ConvTranspose2d), x| {
                        net.1.forward_q(net.0.forward_q(x));
                    },
                )
                .unwrap();
            let rounding = &report.rounding;
            assert_eq!(rounding.weights.len(), 1, "{rounding}");
            assert_eq!(rounding.weights[0].path, "0.weight");
            assert_eq!(rounding.nearest.len(), 1, "{rounding}");
            assert_eq!(rounding.nearest[0].0, "1.weight");
            assert_says!(report, "transposed convolutions");
        }
    });
}

#[test]
fn layers_that_an_override_leaves_float_are_not_rounded() {
    let device = Device::flex();
    let left = Override::new("conv".into()).with_skip_weight(Some(true));
    for (bits, rounding) in [(4, RoundingConfig::new()), (8, RoundingConfig::new())] {
        let weight = WeightConfig::int(bits);
        let quantize_as = QatConfig::new()
            .with_weight(weight)
            .with_overrides(vec![left.clone()]);
        let config = default_of(bits)
            .with_quantize(quantize_as)
            .with_rounding(rounding);
        let (net, report) = quantize(&config, &device);
        let weights = quantized_weights(&net).unwrap();
        assert_eq!(weights.len(), 1, "{bits}");
        assert_eq!(weights[0].0, "head.weight");
        let rounded = report.rounding.weights.iter();
        assert!(
            rounded
                .map(|one| &one.path)
                .all(|path| path == "head.weight")
        );
        let dense = Net::new(&device);
        assert_eq!(
            values(net.conv.weight.val()),
            values(dense.conv.weight.val())
        );
    }
}
