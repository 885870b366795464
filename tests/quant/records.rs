//! What a record or a file of a quantized model brings back, and which ones are refused.

use burn::module::{Module, ModuleMapper, Param};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::SgdConfig;
use burn::tensor::{Device, FloatDType, Int, Tensor};
use burn_lean::amp::{AmpError, Autocast, Checkpoints, GradScalerConfig, LossScale};
use burn_lean::quant::{
    FakeQuantize, FakeQuantizeConfig, ForwardQ, GptqConfig, Granularity, NumberFormat,
    ObserverConfig, Override, QatConfig, QuantError, QuantizedForward, Rounding, RoundingConfig,
    Scheme, WeightConfig, calibrate, format::ScaleRounding, load_record, load_safetensors,
    module::LayerInputs, module::quantizers, quantized_weights, save_safetensors,
};

use crate::support::{on_each, on_tracked, scratch, tensor, values, with_numbers};

fn linear(device: &Device) -> Linear {
    with_numbers(LinearConfig::new(8, 4).init(device), 3)
}

/// Cuts every number off at a half.
struct Clamp;

impl ModuleMapper for Clamp {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match D {
            2 => param.map(|weight| weight.clamp(-0.5, 0.5)),
            _ => param,
        }
    }
}

#[test]
fn a_rounded_model_keeps_its_scales_in_a_record() {
    on_each(|device| {
        let config = QatConfig::new()
            .with_weight(WeightConfig::int(3))
            .with_activation(None);
        let prepared = config.prepare(linear(device)).unwrap();
        let x = tensor::<2>(5, [32, 8], device);
        let inputs = LayerInputs::collect(&prepared, |prepared| {
            prepared.forward_q(x.clone());
        })
        .unwrap();
        let gptq = RoundingConfig::new().with_rounding(Rounding::Gptq(GptqConfig::new()));
        let (rounded, _) = gptq.apply(prepared, &inputs).unwrap();
        // All numbers are smaller than what they were rounded from: the largest code is not there.
        let rounded = rounded.map(&mut Clamp);
        let expected = quantized_weights(&rounded).unwrap();

        let fresh = config.prepare(linear(device)).unwrap();
        let loaded = load_record(fresh, rounded.clone().into_record()).unwrap();
        assert_eq!(quantized_weights(&loaded).unwrap(), expected);
        let on_grid = expected[0].1.dequantize::<2>(device).unwrap();
        assert_eq!(values(loaded.weight.val()), values(on_grid));
        // A calibration is of activations: it leaves the range that was given.
        let calibrated = calibrate(loaded, |_| {}).unwrap();
        assert_eq!(quantized_weights(&calibrated).unwrap(), expected);
    });
}

#[derive(Module, Debug)]
struct Normed {
    norm: BatchNorm,
    linear: Linear,
}

impl Normed {
    fn new(device: &Device) -> Self {
        Self {
            norm: BatchNormConfig::new(8).init(device),
            linear: linear(device),
        }
    }
}

#[test]
fn a_record_of_another_scheme_leaves_the_running_statistics_as_they_are() {
    let device = Device::flex().autodiff();
    let prepare = |bits| {
        let config = QatConfig::new().with_weight(WeightConfig::int(bits));
        config.prepare(Normed::new(&device)).unwrap()
    };
    let other = prepare(8);
    other.norm.forward(tensor::<2>(1, [16, 8], &device) + 3.0);
    let other = other.valid().train();

    let rejected = load_record(prepare(4), other.into_record()).unwrap_err();
    assert_says!(
        rejected.error(),
        "linear.weight.quant.weight",
        "INT4 narrow"
    );
    let mean = rejected.into_value().norm.running_mean.value();
    assert_eq!(values(mean), [0.0; 8]);
}

/// Burn asks for no scheme, nor does a checkpoint's record: whoever loads or uses the model says it.
#[test]
fn a_checkpoint_of_another_scheme_is_refused_and_a_model_with_one_does_not_run() {
    let device = Device::flex().autodiff();
    let prepare = |bits| {
        let config = QatConfig::new().with_weight(WeightConfig::int(bits));
        config.prepare(Normed::new(&device)).unwrap()
    };
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::new(folder.path());
    let scaler = GradScalerConfig::new(LossScale::None).init().unwrap();
    let optim = || SgdConfig::new().init();
    let x = tensor::<2>(2, [4, 8], &device);
    let forward = |model: &Normed, x| model.linear.forward(model.norm.forward(x));
    let saved = prepare(8);
    QuantizedForward::new()
        .run(&saved, x.clone(), forward)
        .unwrap();
    checkpoints.save(3, &saved, &optim(), &scaler).unwrap();
    let rejected = checkpoints
        .load(3, prepare(4), optim())
        .map(|_| ())
        .unwrap_err();
    assert_matches!(rejected.error(), AmpError::Record { .. });
    assert_says!(rejected.error(), "linear.weight", "INT4 narrow");
    // It came back as it was, and nobody has called its quantizers.
    let back = rejected.into_value();
    let called = |model: &Normed| {
        quantizers(model)
            .iter()
            .any(|one| one.quantizer.was_called())
    };
    assert!(!called(&back));
    assert!(checkpoints.load(3, prepare(8), optim()).is_ok());

    let loaded = prepare(4).load_record(saved.into_record());
    let error = QuantizedForward::new().run(&loaded, x.clone(), forward);
    assert_says!(error.unwrap_err(), "is INT8 narrow", "not INT4 narrow");
    let error = Autocast::new(FloatDType::BF16).run(&loaded, x, forward);
    assert_says!(error.unwrap_err(), "is INT8 narrow", "not INT4 narrow");
}

#[test]
fn a_record_of_other_scales_is_refused() {
    let device = Device::flex();
    let quantizer = |scheme: Scheme| -> FakeQuantize {
        let config = FakeQuantizeConfig::new(scheme);
        let config = config.with_observer(ObserverConfig::Memoryless);
        config.init(&device).unwrap()
    };
    let [up, standard] = [ScaleRounding::Up, ScaleRounding::Standard].map(Scheme::mxfp4);
    let record = quantizer(up.clone()).into_record();
    assert!(load_record(quantizer(up), record.clone()).is_ok());
    let error = load_record(quantizer(standard), record).unwrap_err();
    let QuantError::Parameter { error, .. } = error.into_error() else {
        panic!("no path")
    };
    assert!(
        matches!(*error, QuantError::ForeignScheme { .. }),
        "{error}"
    );
}

#[test]
fn a_refused_record_says_what_it_is_of() {
    let device = Device::flex();
    let per_block = |extents: [usize; 2]| Granularity::PerBlock {
        extents: extents.into(),
    };
    let [by_row, by_column] = [0, 1].map(|axis| Granularity::PerChannel { axis });
    let int4 = Scheme::symmetric(NumberFormat::int(4));
    let of = |granularity: Granularity| int4.clone().with_granularity(granularity);
    for (saved, own, said) in [
        (
            Scheme::affine(NumberFormat::uint8()),
            int4.clone(),
            "is UINT8, affine, per tensor, not INT4, symmetric, per tensor",
        ),
        (
            Scheme::symmetric(NumberFormat::int(3).narrow()),
            Scheme::symmetric(NumberFormat::E4M3),
            "is INT3 narrow, symmetric, per tensor, not E4M3",
        ),
        (
            of(by_row),
            of(by_column),
            "axis 0), not INT4, symmetric, per channel (axis 1)",
        ),
        (
            of(per_block([2, 1])),
            of(per_block([1, 2])),
            "per block of other extents, not INT4, symmetric, per block [1, 2]",
        ),
        (
            Scheme::mxfp4(ScaleRounding::Up),
            Scheme::mxfp4(ScaleRounding::Standard),
            "power-of-two scales, not E2M1, symmetric, per block [32], power-of-two scales as published",
        ),
    ] {
        let quantizer = |scheme: Scheme| {
            let config = FakeQuantizeConfig::new(scheme);
            config.init_for(&[8, 8], &device).unwrap()
        };
        let record = quantizer(saved).into_record();
        let error = load_record(quantizer(own), record).unwrap_err();
        assert_says!(error, said);
    }
}

#[test]
fn a_record_that_fits_makes_up_for_one_of_another_scheme() {
    /// Looks at every integer, and changes none.
    struct Look;
    impl ModuleMapper for Look {
        fn map_int<const D: usize>(
            &mut self,
            param: Param<Tensor<D, Int>>,
        ) -> Param<Tensor<D, Int>> {
            param.map(|integers| integers)
        }
    }
    let device = Device::flex();
    let calibrated = |bits, numbers: [f32; 2]| -> FakeQuantize {
        let config = FakeQuantizeConfig::new(Scheme::affine(NumberFormat::uint(bits)));
        let x = Tensor::<1>::from_floats(numbers, &device);
        let run = |quantizer: &FakeQuantize| drop(quantizer.forward(x));
        calibrate(config.init(&device).unwrap(), run).unwrap()
    };
    let is_foreign = |quantizer: &FakeQuantize| {
        let error = quantizer.qparams().err();
        let inner = error.map(|error| match error {
            QuantError::Parameter { error, .. } => *error,
            error => error,
        });
        matches!(inner, Some(QuantError::ForeignScheme { .. }))
    };
    let own = calibrated(8, [-1.0, 2.0]);
    let other = calibrated(4, [-5.0, 5.0]).into_record();
    // By Burn, which does not ask for the scheme.
    let loaded = own.clone().load_record(other);
    assert!(is_foreign(&loaded));
    assert!(is_foreign(&loaded.clone().map(&mut Look)));
    // Nor does a record of it pass for one of its own scheme.
    let fresh = calibrated(8, [-3.0, 3.0]);
    assert!(load_record(fresh, loaded.clone().into_record()).is_err());
    let loaded = loaded.load_record(own.clone().into_record());
    assert!(!is_foreign(&loaded));
    let [found, expected] = [&loaded, &own].map(|quantizer| {
        let range = quantizer.range().unwrap();
        [values(range.min), values(range.max)]
    });
    assert_eq!(found, expected);
}

#[test]
fn the_quantizer_at_a_float_layer_needs_a_prepared_model() {
    let device = Device::flex();
    let (_folder, path) = scratch("linear.safetensors");
    let x = tensor::<2>(5, [32, 8], &device);
    let model = || vec![linear(&device)];
    let left = Override::new("0".into()).with_skip_weight(Some(true));
    let config = QatConfig::new().with_overrides(vec![left]);
    let prepared = calibrate(config.prepare(model()).unwrap(), |model| {
        model[0].forward_q(x.clone());
    });
    save_safetensors(&prepared.unwrap(), &path).unwrap();
    let rejected = load_safetensors(model(), &path).unwrap_err();
    assert_says!(
        rejected.error(),
        "0.weight.quant.input",
        "prepared as the saved one was"
    );
    load_safetensors(config.prepare(model()).unwrap(), &path).unwrap();
}

#[test]
fn a_file_of_another_activation_scheme_is_refused_with_the_path() {
    on_each(|device| {
        let (_folder, path) = scratch("linear.safetensors");
        let x = tensor::<2>(5, [32, 8], device);
        let config = |bits| {
            let scheme = Scheme::affine(NumberFormat::uint(bits));
            QatConfig::new().with_activation(Some(FakeQuantizeConfig::new(scheme)))
        };
        let prepared = config(8).prepare(linear(device)).unwrap();
        let prepared = calibrate(prepared, |linear| {
            linear.forward_q(x.clone());
        })
        .unwrap();
        save_safetensors(&prepared, &path).unwrap();

        let other = config(4).prepare(linear(device)).unwrap();
        let before = values(other.weight.base());
        let rejected = load_safetensors(other, &path).unwrap_err();
        let QuantError::Parameter { path: at, error } = rejected.error() else {
            panic!("{}", rejected.error())
        };
        assert_eq!(at, "weight.quant.input");
        assert_matches!(**error, QuantError::ForeignScheme { .. });
        assert_eq!(values(rejected.value().weight.base()), before);

        let same = config(8).prepare(linear(device)).unwrap();
        let loaded = load_safetensors(same, &path).unwrap();
        assert_eq!(
            values(loaded.forward_q(x.clone())),
            values(prepared.valid().forward_q(x))
        );
    });
}

#[test]
fn the_last_training_step_is_part_of_a_file() {
    on_tracked(|device| {
        let (_folder, path) = scratch("normed.safetensors");
        let prepared = QatConfig::new().prepare(Normed::new(&device)).unwrap();
        let x = tensor::<2>(1, [16, 8], &device) + 3.0;
        prepared.linear.forward_q(prepared.norm.forward(x.clone()));
        // Before anything else takes the step in.
        save_safetensors(&prepared, &path).unwrap();
        let fresh = QatConfig::new().prepare(Normed::new(&device)).unwrap();
        let loaded = load_safetensors(fresh, &path).unwrap();
        let mean = values(loaded.norm.running_mean.value());
        assert_eq!(mean, values(prepared.valid().norm.running_mean.value()));
        // A tenth of the batch's.
        assert!(mean.iter().all(|mean| *mean > 0.2), "{mean:?}");
    });
}

#[test]
fn a_weight_with_one_element_per_channel_has_codes_and_is_rounded() {
    on_each(|device| {
        let narrow = || with_numbers(LinearConfig::new(1, 4).init(device), 3);
        let weight = WeightConfig::new()
            .with_format(NumberFormat::int(4).narrow())
            .with_observer(ObserverConfig::MinMax);
        let config = QatConfig::new().with_weight(weight).with_activation(None);
        let prepared = config.prepare(narrow()).unwrap();
        let x = tensor::<2>(5, [32, 1], device);
        let prepared = calibrate(prepared, |linear| {
            linear.forward_q(x.clone());
        })
        .unwrap();
        let inputs = LayerInputs::collect(&prepared, |prepared| {
            prepared.forward_q(x.clone());
        });
        let (rounded, _) = RoundingConfig::new()
            .apply(prepared, &inputs.unwrap())
            .unwrap();
        // Each is the largest of its channel.
        let float = values(narrow().weight.val());
        assert_near!(values(rounded.weight.val()).iter(), &float, 1e-6);
        let weights = quantized_weights(&rounded).unwrap();
        let expected = float.iter().map(|x| 7 * x.signum() as i16);
        assert_eq!(weights[0].1.codes(), expected.collect::<Vec<_>>());
    });
}

#[test]
fn one_value_in_a_whole_tensor_is_still_no_range() {
    let config = FakeQuantizeConfig::new(Scheme::affine(NumberFormat::uint8()));
    let quantizer = config.init(&Device::flex()).unwrap();
    let x = Tensor::<1>::full([4], 2.0, &Device::flex());
    let rejected = calibrate(quantizer, |quantizer| {
        quantizer.forward(x);
    });
    let error = rejected.unwrap_err().into_error();
    assert!(error.to_string().contains("all values observed are 2"));
}
