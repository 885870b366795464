//! Single quantizers: what they observe, learn, copy, merge and refuse.

use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{DType, Device, Tensor};
use burn_lean::quant::{
    FakeQuantize, FakeQuantizeConfig, Granularity, Learned, NumberFormat, ObserverConfig, Override,
    QatConfig, QuantError, QuantizedForward, RangeMethod, Schedule, Scheme, Site, advance,
    calibrate,
    format::{ScaleFormat, ScaleRounding},
    module::{InputStatistics, Phase},
    qat::{merge_observers, set_schedule},
    quantizers,
    range::{Histogram, entropy, mse},
};

use crate::support::{each_device, on_tracked, tensor, values};

pub(crate) fn uint8() -> FakeQuantizeConfig {
    FakeQuantizeConfig::new(Scheme::affine(NumberFormat::uint8()))
}

fn batch(values: &[f32], device: &Device) -> Tensor<1> {
    Tensor::from_floats(values, device)
}

pub(crate) fn range(quantizer: &FakeQuantize) -> (f32, f32) {
    let range = quantizer.range().unwrap();
    (values(range.min)[0], values(range.max)[0])
}

/// The error inside of one with a path.
fn inner(error: QuantError) -> QuantError {
    match error {
        QuantError::Parameter { error, .. } => *error,
        other => other,
    }
}

#[test]
fn a_frozen_quantizer_does_not_observe() {
    on_tracked(|device| {
        let quantizer = uint8().init(&device).unwrap();
        quantizer.forward(batch(&[-1.0, 1.0], &device));
        let frozen = quantizer.freeze();
        frozen.forward(batch(&[-5.0, 5.0], &device));
        assert_eq!(range(&frozen), (-1.0, 1.0));
    });
}

#[test]
fn inference_passes_values_through_as_long_as_there_is_no_range() {
    each_device(|target| {
        let quantizer = uint8().init(&target.device).unwrap();
        let x = batch(&[0.1, 0.77], &target.device);
        assert_eq!(values(quantizer.forward(x)), [0.1, 0.77]);
        assert_eq!(
            inner(quantizer.qparams().unwrap_err()),
            QuantError::NeverObserved
        );
    });
}

#[test]
fn half_values_are_quantized_in_f32_and_come_back_in_half() {
    each_device(|target| {
        for dtype in [DType::F16, DType::BF16] {
            if !target.device.supports_dtype(dtype) {
                continue;
            }
            let device = target.device.clone().autodiff();
            let quantizer = uint8().init(&device).unwrap();
            let x = batch(&[0.0, 0.1, 1.0], &device).cast(dtype);
            let y = quantizer.forward(x.clone());
            assert_eq!(y.dtype(), dtype);
            assert_eq!(quantizer.range().unwrap().max.dtype(), DType::F32);
            let expected = uint8().init(&device).unwrap().forward(x.cast(DType::F32));
            assert_eq!(values(y), values(expected.cast(dtype)));
        }
    });
}

#[test]
fn empty_tensors_pass_and_do_not_count() {
    on_tracked(|device| {
        let quantizer = uint8().init(&device).unwrap();
        let empty = quantizer.forward(Tensor::<2>::zeros([0, 3], &device));
        assert_eq!(empty.dims(), [0, 3]);
        assert!(!quantizer.is_observed());
    });
}

#[test]
fn what_gives_no_useful_range_is_an_error_of_its_own() {
    each_device(|target| {
        let calibrated = |numbers: &[f32]| {
            let quantizer = uint8().init(&target.device).unwrap();
            let x = batch(numbers, &target.device);
            let outcome = calibrate(quantizer, |quantizer| {
                quantizer.forward(x);
            });
            outcome.map_err(|rejected| inner(rejected.into_error()))
        };
        let not_finite = QuantError::NonFinite { what: "range" };
        assert_eq!(calibrated(&[1.0, f32::NAN]).unwrap_err(), not_finite);
        assert_eq!(calibrated(&[1.0, f32::INFINITY]).unwrap_err(), not_finite);
        let constant = QuantError::ConstantRange { value: 0.5 };
        assert_eq!(calibrated(&[0.5, 0.5]).unwrap_err(), constant);
        assert!(calibrated(&[0.5, 0.6]).is_ok());

        let quantizer = uint8().init(&target.device).unwrap();
        let rejected = calibrate(quantizer, |_| {}).unwrap_err();
        assert_eq!(inner(rejected.into_error()), QuantError::NeverObserved);
    });
}

#[test]
fn values_that_are_not_finite_give_no_scale_in_any_format_of_scales() {
    let device = Device::flex();
    let rounded = [ScaleRounding::Up, ScaleRounding::Standard];
    let block_scaled = rounded.map(Scheme::mxfp4).into_iter();
    let block_scaled = block_scaled.chain(rounded.map(Scheme::nvfp4));
    let schemes = block_scaled.chain([Scheme::symmetric(NumberFormat::int8())]);
    for scheme in schemes {
        let config = FakeQuantizeConfig::new(scheme.clone());
        let quantizer = config.with_observer(ObserverConfig::Memoryless);
        let quantizer = quantizer.init(&device).unwrap();
        for bad in [f32::NAN, f32::INFINITY] {
            let mut numbers = [1.0; 32];
            assert!(quantizer.qparams_for(&batch(&numbers, &device)).is_ok());
            numbers[3] = bad;
            let found = quantizer.qparams_for(&batch(&numbers, &device));
            let expected = QuantError::NonFinite { what: "tensor" };
            assert_eq!(inner(found.unwrap_err()), expected, "{scheme} {bad}");
        }
    }
}

#[test]
fn a_model_without_quantizers_cannot_be_calibrated_or_scheduled() {
    let linear = || LinearConfig::new(2, 2).init(&Device::flex());
    let rejected = calibrate(linear(), |_| {}).unwrap_err();
    assert_eq!(*rejected.error(), QuantError::NotPrepared);
    let rejected = set_schedule(linear(), Schedule::new()).unwrap_err();
    assert_eq!(*rejected.error(), QuantError::NotPrepared);
}

#[test]
fn a_calibration_forgets_what_was_observed_and_gives_back_the_model_if_it_fails() {
    each_device(|target| {
        let device = target.device.clone().autodiff();
        let quantizer = uint8().init(&device).unwrap();
        quantizer.forward(batch(&[-5.0, 5.0], &device));
        let failed = calibrate(quantizer, |_| {}).unwrap_err().into_value();
        assert_eq!(range(&failed), (-5.0, 5.0));
        // On a plain device too.
        let again = calibrate(failed, |quantizer| {
            quantizer.forward(batch(&[-1.0, 1.0], &target.device));
        });
        assert_eq!(range(&again.unwrap()), (-1.0, 1.0));
    });
}

#[test]
fn histograms_clip_what_the_method_says() {
    each_device(|target| {
        // 999 values up to 1, and one of 100.
        let mut numbers: Vec<f32> = (0..999).map(|index| index as f32 / 999.0).collect();
        numbers.push(100.0);
        let highest = |method| {
            let config = uint8().with_observer(ObserverConfig::histogram(method));
            let quantizer = calibrate(config.init(&target.device).unwrap(), |quantizer| {
                quantizer.forward(batch(&numbers[..400], &target.device));
                quantizer.forward(batch(&numbers[400..], &target.device));
            });
            let (lowest, highest) = range(&quantizer.unwrap());
            assert_eq!(lowest, 0.0);
            highest
        };
        let bin = 100.0 / 2048.0;
        let most = highest(RangeMethod::Percentile { percent: 99.0 });
        assert!((most - 0.99).abs() < 2.0 * bin, "{most}");
        assert_eq!(highest(RangeMethod::Percentile { percent: 100.0 }), 100.0);
        // The outlier costs more than the steps it makes wide.
        assert!(highest(RangeMethod::Mse) > 90.0);
        // What lies alone cannot be moved to where nothing lies.
        assert_eq!(highest(RangeMethod::Entropy), 100.0);
        assert!(highest(RangeMethod::Search) > 90.0);
    });
}

/// 2048 bins over 4200: half of the values are in the first, nearly all others in the second.
#[test]
fn a_late_outlier_clips_no_more_than_the_percentage_says() {
    let mut numbers: Vec<f32> = (0..20_000).map(|index| index as f32 / 5000.0).collect();
    numbers.push(4200.0);
    let config = uint8().with_observer(ObserverConfig::histogram(RangeMethod::percentile()));
    let device = Device::flex();
    let quantizer = calibrate(config.init(&device).unwrap(), |quantizer| {
        quantizer.forward(batch(&numbers[..10_000], &device));
        quantizer.forward(batch(&numbers[10_000..], &device));
    });
    let (_, highest) = range(&quantizer.unwrap());
    let clipped = numbers.iter().filter(|x| **x > highest).count();
    assert!(clipped <= 2 && highest < 5.0, "{clipped} beyond {highest}");
}

#[test]
fn the_least_squared_error_of_many_bins_is_that_of_few() {
    let bins = 1 << 16;
    let mut counts = vec![0.0; bins];
    let filled = counts.iter_mut().step_by(512).zip((0..128_i32).rev());
    filled.for_each(|(count, many)| *count = f64::from(many * many));
    let few: Vec<f64> = counts.chunks(32).map(|bins| bins.iter().sum()).collect();
    let least = |counts| {
        let histogram = Histogram::from_counts(0.0, 1.0, counts);
        mse(&histogram, NumberFormat::int(4), 7.0, 0)
    };
    let (found, expected) = (least(counts), least(few));
    assert!((found - expected).abs() < 0.01, "{found} {expected}");
}

#[test]
fn a_percentile_of_zeros_is_a_range_still() {
    // 99 % of the values are 0: the percentile is, too.
    let mut numbers = vec![0.0; 990];
    numbers.extend([1.0; 10]);
    let method = RangeMethod::Percentile { percent: 90.0 };
    let config = uint8().with_observer(ObserverConfig::histogram(method));
    let device = Device::flex();
    let quantizer = calibrate(config.init(&device).unwrap(), |quantizer| {
        quantizer.forward(batch(&numbers, &device));
    });
    assert_eq!(range(&quantizer.unwrap()), (0.0, 1.0 / 2048.0));
}

#[test]
fn histograms_and_statistics_of_nothing_are_refused_at_the_door() {
    let panics = |work: fn()| std::panic::catch_unwind(work).is_err();
    assert!(panics(|| drop(Histogram::new(0))));
    assert!(panics(|| drop(Histogram::from_counts(0.0, 1.0, vec![]))));
    assert!(panics(|| {
        entropy(&Histogram::new(4), 0, 1);
    }));
    assert!(panics(|| drop(InputStatistics::new(0))));
}

/// A recurrence, or a layer that is shared, is one batch in a step.
#[test]
fn calls_of_one_forward_pass_are_one_batch_of_a_moving_average() {
    on_tracked(|device| {
        let tenth = ObserverConfig::MovingAverage {
            averaging_constant: 0.1,
        };
        let observer = uint8().with_observer(tenth);
        let config = QatConfig::new().with_activation(Some(observer));
        let model: Linear = LinearConfig::new(2, 2).init(&device);
        let model = config.prepare(model).unwrap();
        let forward =
            |model: &Linear, x: Tensor<2>| model.forward(x.clone() * 4.0) + model.forward(x);
        let run = QuantizedForward::new();
        for (x, lowest, highest) in [(1.0, 1.0, 4.0), (2.0, 1.1, 4.4)] {
            let x = Tensor::<2>::full([1, 2], x, &device);
            drop(run.run(&model, x, forward).unwrap());
            let all = quantizers(&model);
            let input = all.iter().find(|one| one.site == Site::Input).unwrap();
            let (low, high) = range(&input.quantizer);
            assert!((low - lowest).abs() < 1e-6, "{low}");
            assert!((high - highest).abs() < 1e-6, "{high}");
        }
        // Each call for itself, where there is no forward pass.
        let alone = uint8().with_observer(tenth).init(&device).unwrap();
        for value in [4.0, 1.0] {
            drop(alone.forward(batch(&[0.0, value], &device)));
        }
        let (_, high) = range(&alone);
        assert!((high - 3.7).abs() < 1e-6, "{high}");
    });
}

#[test]
fn replicas_are_merged_by_what_their_observer_means() {
    on_tracked(|device| {
        let observed = |observer, ranges: &[(f32, f32)]| {
            let model = uint8().with_observer(observer).init(&device).unwrap();
            let replicas: Vec<_> = ranges
                .iter()
                .map(|(low, high)| {
                    let replica = model.clone().fork(&device);
                    replica.forward(batch(&[*low, *high], &device));
                    replica
                })
                .collect();
            assert!(!model.is_observed(), "a replica changed the model");
            range(&merge_observers(model, &replicas).unwrap())
        };
        let ranges = [(-1.0, 2.0), (-3.0, 1.0)];
        assert_eq!(observed(ObserverConfig::MinMax, &ranges), (-3.0, 2.0));
        assert_eq!(
            observed(ObserverConfig::moving_average(), &ranges),
            (-2.0, 1.5)
        );
    });
}

#[test]
fn replicas_of_another_model_are_refused() {
    let device = Device::flex();
    let model = LinearConfig::new(2, 2).init(&device);
    let prepared = QatConfig::new().prepare(model.clone()).unwrap();
    let rejected = merge_observers(prepared, &[model]).unwrap_err();
    let path = "weight.quant.weight".to_string();
    assert_eq!(*rejected.error(), QuantError::OtherQuantizers { path });
}

#[test]
fn choices_that_contradict_each_other_are_refused() {
    let device = Device::flex();
    let per_channel = |observer| {
        let scheme = Scheme::symmetric(NumberFormat::int8())
            .with_granularity(Granularity::PerChannel { axis: 0 });
        FakeQuantizeConfig::new(scheme).with_observer(observer)
    };
    let unsupported = |config: FakeQuantizeConfig| {
        let error = config.init(&device).unwrap_err();
        assert_matches!(error, QuantError::UnsupportedScheme { .. });
    };
    unsupported(per_channel(ObserverConfig::MinMax));
    unsupported(per_channel(ObserverConfig::histogram(RangeMethod::Mse)));
    let symmetric = FakeQuantizeConfig::new(Scheme::symmetric(NumberFormat::int8()));
    unsupported(symmetric.clone().with_learned(Learned::LsqPlus));
    let minifloat = FakeQuantizeConfig::new(Scheme::symmetric(NumberFormat::E4M3));
    unsupported(minifloat.with_learned(Learned::Lsq));

    let invalid = |config: FakeQuantizeConfig, name: &str| match config.init(&device) {
        Err(QuantError::InvalidConfig { field, .. }) => assert_eq!(field, name),
        other => panic!("{name}: {other:?}"),
    };
    let average = |averaging_constant| ObserverConfig::MovingAverage { averaging_constant };
    for constant in [0.0, -0.1, 1.1, f64::NAN] {
        let config = symmetric.clone().with_observer(average(constant));
        invalid(config, "averaging_constant");
    }
    for bins in [1, (1 << 20) + 1, usize::MAX] {
        let range = RangeMethod::Search;
        let bins = ObserverConfig::Histogram { bins, range };
        invalid(symmetric.clone().with_observer(bins), "bins");
    }
    let percent = ObserverConfig::histogram(RangeMethod::Percentile { percent: 0.0 });
    invalid(symmetric.with_observer(percent), "percent");

    let backwards = Schedule::new()
        .with_quantize_from(5)
        .with_freeze_observers_at(Some(4));
    let config = QatConfig::new().with_schedule(backwards);
    let linear = LinearConfig::new(2, 2).init(&device);
    let error = config.prepare(linear).unwrap_err().into_error();
    let QuantError::InvalidConfig { field, .. } = error else {
        panic!("{error}")
    };
    assert_eq!(field, "freeze_observers_at");
}

/// Training moves a scale to any number: what is stored would be another one.
#[test]
fn a_learned_scale_of_powers_of_two_is_refused() {
    let rounding = ScaleRounding::Up;
    for format in [
        ScaleFormat::PowerOfTwo(rounding),
        ScaleFormat::E4M3(rounding),
    ] {
        let scheme = Scheme::symmetric(NumberFormat::int8()).with_scale_format(format);
        let config = FakeQuantizeConfig::new(scheme);
        config.validate().unwrap();
        let error = config.with_learned(Learned::Lsq).validate().unwrap_err();
        assert_matches!(error, QuantError::UnsupportedScheme { .. });
        assert_says!(error, "`Learned::None`");
    }
}

#[test]
fn dynamic_quantization_takes_each_token_by_itself() {
    each_device(|target| {
        let scheme = Scheme::symmetric(NumberFormat::int8().narrow())
            .with_granularity(Granularity::PerToken);
        let config = FakeQuantizeConfig::new(scheme).with_observer(ObserverConfig::Memoryless);
        let quantizer = config.init(&target.device).unwrap();
        let x = Tensor::<2>::from_floats([[127.0, 1.4], [1.27, 0.014]], &target.device);
        let y = values(quantizer.forward(x));
        let expected = [127.0, 1.0, 1.27, 0.01];
        for (found, expected) in y.iter().zip(expected) {
            assert!((found - expected).abs() <= 1e-6 * expected, "{y:?}");
        }
        assert_eq!(
            inner(quantizer.qparams().unwrap_err()),
            QuantError::NoStaticRange
        );
        // The memoryless observer is chosen already.
        let learned = config.with_learned(Learned::Lsq).validate().unwrap_err();
        assert_says!(learned, "`Learned::None`");
        let other = Tensor::<3>::from_floats([[[2.0]], [[-4.0]]], &target.device);
        assert_eq!(values(quantizer.forward(other)), [2.0, -4.0]);
    });
}

#[test]
fn weights_of_a_models_own_modules_are_quantized_once_their_axis_is_named() {
    #[derive(Module, Debug)]
    struct Bilinear {
        factor: Param<Tensor<2>>,
    }
    let device = Device::flex();
    let model = || Bilinear {
        factor: Param::from_tensor(tensor(1, [3, 4], &device)),
    };
    let error = QatConfig::new().prepare(model()).unwrap_err().into_error();
    assert_eq!(error, QuantError::NothingToQuantize);
    let named = Override::new("factor".into()).with_axis(Some(1));
    let config = QatConfig::new().with_overrides(vec![named]);
    let prepared = config.prepare(model()).unwrap();
    let scheme = quantizers(&prepared)[0].quantizer.scheme().clone();
    assert_eq!(scheme.granularity, Granularity::PerChannel { axis: 1 });
    assert_ne!(
        values(prepared.factor.val()),
        values(prepared.factor.base())
    );

    let beyond = Override::new("factor".into()).with_axis(Some(2));
    let config = QatConfig::new().with_overrides(vec![beyond]);
    let error = config.prepare(model()).unwrap_err().into_error();
    assert_says!(error, "`factor`: axis 2");
}

#[test]
fn a_clone_has_a_switch_and_a_step_of_its_own() {
    let quantizer = uint8().init(&Device::flex()).unwrap();
    let off = quantizer.clone().with_enabled(false);
    assert_eq!(off.phase(), Phase::Off);
    assert_eq!(quantizer.phase(), Phase::ObserveAndQuantize);
    let later = advance(quantizer.clone());
    assert_eq!((later.step(), quantizer.step()), (1, 0));
}
