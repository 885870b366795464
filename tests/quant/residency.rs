//! The float values of converted weights: computed once, or at every use, by choice; reported; and
//! never those of another weight.

use burn::backend::Flex;
use burn::module::{Module, ModuleMapper, Param};
use burn::nn::{Linear, LinearConfig};
use burn::store::ModuleRecord;
use burn::tensor::{DType, Device, Tensor};
use burn_lean::quant::{
    Activations, ConversionReport, ConvertConfig, Dequantize, ForwardQ, LoadConfig, Mapping,
    NumberFormat, QatConfig, Unsupported, WeightConfig, WeightGranularity, calibrate,
    deploy::Outcome, load_record, save_safetensors,
};
use rayon::ThreadPoolBuilder;
use rayon::prelude::*;

use crate::support::{each_device, on_each, scratch, tensor, values, with_numbers};

fn prepared(seed: u64, config: &QatConfig, device: &Device) -> Linear {
    let layer = with_numbers(LinearConfig::new(64, 32).init(device), seed);
    let layer = config.prepare(layer).unwrap();
    let x = tensor::<2>(9, [4, 64], device);
    calibrate(layer, |layer| drop(layer.forward_q(x))).unwrap()
}

fn converted(dequantize: Dequantize, device: &Device) -> (Linear, ConversionReport) {
    let config = ConvertConfig::new()
        .with_unsupported(Unsupported::KeepFakeQuantized)
        .with_dequantize(dequantize);
    config
        .convert(prepared(1, &QatConfig::new(), device))
        .unwrap()
}

/// Whether two uses of a weight give the very same tensor in the host's memory.
fn is_resident(layer: &Linear) -> bool {
    let primitive = || {
        let value = layer.weight.val().try_into_primitive::<Flex>();
        value.expect("it is on flex")
    };
    // Both are alive: another tensor has another place.
    let (first, second) = (primitive(), primitive());
    first.bytes().as_ptr() == second.bytes().as_ptr()
}

#[test]
fn a_converted_weight_is_dequantized_once_unless_its_codes_alone_are_to_stay() {
    each_device(|target| {
        let (once, report) = converted(Dequantize::Once, &target.device);
        let (every_use, lean) = converted(Dequantize::EveryUse, &target.device);
        let x = || tensor::<2>(2, [3, 64], &target.device);
        let expected = values(every_use.forward_q(x()));
        for _ in 0..2 {
            assert_eq!(values(once.forward_q(x())), expected);
        }
        let [weight] = &report.weights[..] else {
            panic!("{report}");
        };
        let [lean_weight] = &lean.weights[..] else {
            panic!("{lean}");
        };
        assert_matches!(weight.outcome, Outcome::Converted { .. });
        assert_eq!(weight.bytes, lean_weight.bytes);
        assert_eq!(weight.resident_bytes, weight.bytes + 4 * 64 * 32);
        assert_eq!(lean_weight.resident_bytes, lean_weight.bytes);
        assert!(report.to_string().contains("dequantized once"));
        assert!(lean.to_string().contains("dequantized at every use"));
        assert_eq!(
            report.resident_bytes() - report.bytes(),
            lean.resident_bytes() - lean.bytes() + 4 * 64 * 32
        );
    });
}

#[test]
fn on_the_host_two_uses_share_one_copy_of_the_values() {
    let device = Device::flex();
    let (once, _) = converted(Dequantize::Once, &device);
    let (every_use, _) = converted(Dequantize::EveryUse, &device);
    assert!(is_resident(&once));
    assert!(!is_resident(&every_use));
    // A copy for inference shares it, too.
    assert!(is_resident(&once.valid()));
    // The choice is part of the record.
    for (layer, resident) in [(once, true), (every_use, false)] {
        let bytes = layer.into_record().into_bytes().unwrap();
        let record = ModuleRecord::from_bytes(bytes).unwrap();
        let fresh = prepared(5, &QatConfig::new(), &device);
        let loaded = load_record(fresh, record).unwrap();
        assert_eq!(is_resident(&loaded), resident);
    }
}

#[test]
fn what_was_computed_is_forgotten_when_the_weight_changes() {
    struct Negate;
    impl ModuleMapper for Negate {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            param.map(|value| match value.dtype() {
                DType::QFloat(_) => value.dequantize().neg(),
                _ => value,
            })
        }
    }
    each_device(|target| {
        let device = &target.device;
        let (layer, _) = converted(Dequantize::Once, device);
        let first = values(layer.weight.val());
        // Another record.
        let other = ConvertConfig::new().with_unsupported(Unsupported::KeepFakeQuantized);
        let (other, _) = other
            .convert(prepared(5, &QatConfig::new(), device))
            .unwrap();
        let expected = values(other.weight.val());
        assert_ne!(first, expected);
        let bytes = other.into_record().into_bytes().unwrap();
        let record = ModuleRecord::from_bytes(bytes).unwrap();
        let loaded = load_record(layer.clone(), record).unwrap();
        assert_eq!(values(loaded.weight.val()), expected);
        assert_eq!(values(layer.weight.val()), first);
        // A mapper.
        let negated = layer.clone().map(&mut Negate);
        let found: Vec<f32> = values(negated.weight.val()).iter().map(|w| -w).collect();
        assert_eq!(found, first);
        assert_eq!(values(layer.weight.val()), first);
        // A move; Burn does not move packed words to a device that has none.
        if target.is_gpu() {
            return;
        }
        let moved = layer.clone().to_device(&Device::flex());
        assert_eq!(moved.weight.val().device(), Device::flex());
        assert_eq!(values(moved.weight.val()), first);
    });
}

#[test]
fn a_loaded_weight_is_dequantized_once_in_prepared_and_in_plain_models() {
    let (_folder, path) = scratch("model.safetensors");
    let config = QatConfig::new().with_activation(None);
    on_each(|device| {
        let layer = config
            .prepare(with_numbers(LinearConfig::new(64, 32).init(device), 1))
            .unwrap();
        save_safetensors(&layer, &path).unwrap();
        let expected = values(layer.weight.val());
        let plain = || with_numbers(LinearConfig::new(64, 32).init(device), 8);

        let (loaded, report) = LoadConfig::new().load(plain(), &path).unwrap();
        assert_eq!(loaded.weight.base().dtype(), DType::F32);
        assert_eq!(values(loaded.weight.val()), expected);
        assert_eq!(report.weights[0].outcome, Outcome::Dequantized);
        assert_eq!(report.weights[0].resident_bytes, 4 * 64 * 32);

        let lean = LoadConfig::new().with_dequantize(Dequantize::EveryUse);
        let (loaded, report) = lean.load(plain(), &path).unwrap();
        assert_matches!(loaded.weight.base().dtype(), DType::QFloat(_));
        assert_eq!(values(loaded.weight.base().dequantize()), expected);
        assert_eq!(report.weights[0].resident_bytes, report.weights[0].bytes);

        for (load, copies) in [(LoadConfig::new(), 1), (lean, 0)] {
            let prepared = config.prepare(plain()).unwrap();
            let (loaded, report) = load.load(prepared, &path).unwrap();
            assert_matches!(loaded.weight.base().dtype(), DType::QFloat(_));
            assert_eq!(values(loaded.weight.val()), expected);
            let weight = &report.weights[0];
            assert_eq!(weight.resident_bytes, weight.bytes + copies * 4 * 64 * 32);
        }
    });
}

#[test]
fn a_weight_that_burn_cannot_hold_is_float_without_a_second_copy() {
    let device = Device::flex();
    let weight = WeightConfig::new()
        .with_format(NumberFormat::uint(4))
        .with_mapping(Mapping::Affine);
    let layer = prepared(1, &QatConfig::new().with_weight(weight), &device);
    let expected = values(layer.weight.val());
    let config = ConvertConfig::new().with_unsupported(Unsupported::KeepFakeQuantized);
    let (converted, report) = config.convert(layer).unwrap();
    assert_eq!(values(converted.weight.base()), expected);
    assert_eq!(values(converted.weight.val()), expected);
    assert!(is_resident(&converted));
    assert_eq!(report.weights[0].resident_bytes, 4 * 64 * 32);
    assert!(report.weights[0].packed_bytes < 64 * 32);
}

#[test]
fn tasks_of_a_thread_pool_may_all_be_the_first_use_of_a_weight() {
    let device = Device::flex();
    let weight = WeightConfig::new()
        .with_format(NumberFormat::uint(4))
        .with_mapping(Mapping::Affine)
        .with_granularity(WeightGranularity::PerTensor);
    let config = QatConfig::new().with_weight(weight).with_activation(None);
    // So large that rounding it is shared out in the same pool.
    let layer = with_numbers(LinearConfig::new(256, 256).init(&device), 1);
    let prepared = config.prepare(layer).unwrap();
    let convert = ConvertConfig::new().with_unsupported(Unsupported::KeepFakeQuantized);
    let converted = || {
        let (layer, report) = convert.convert(prepared.clone()).unwrap();
        let outcome = &report.weights[0].outcome;
        assert_matches!(outcome, Outcome::KeptFakeQuantized { .. });
        layer
    };
    let samples: Vec<Tensor<2>> = (0..64)
        .map(|seed| tensor(seed, [1, 256], &device))
        .collect();
    let one_by_one = converted();
    let outputs = |layer: &Linear, x: &Tensor<2>| values(layer.forward(x.clone()));
    let expected: Vec<Vec<f32>> = samples.iter().map(|x| outputs(&one_by_one, x)).collect();
    let pool = ThreadPoolBuilder::new().num_threads(8).build().unwrap();
    for _ in 0..8 {
        let layer = converted();
        let found: Vec<Vec<f32>> =
            pool.install(|| samples.par_iter().map(|x| outputs(&layer, x)).collect());
        assert_eq!(found, expected);
    }
}

#[test]
fn the_report_says_who_rounds_activations_and_a_conversion_may_leave_them_float() {
    each_device(|target| {
        let (rounded, report) = converted(Dequantize::Once, &target.device);
        assert!(report.weights[0].rounds_activations);
        assert!(
            report
                .to_string()
                .contains("activations rounded at every use")
        );

        let config = ConvertConfig::new()
            .with_unsupported(Unsupported::KeepFakeQuantized)
            .with_activations(Activations::Float);
        let model = prepared(1, &QatConfig::new(), &target.device);
        let (float, report) = config.convert(model).unwrap();
        assert!(!report.weights[0].rounds_activations);
        assert_eq!(report.left_float.len(), 1, "{report}");
        assert_eq!(report.left_float[0].name, "input of `weight`");
        let x = tensor::<2>(2, [3, 64], &target.device);
        // The weights are the same; nothing acts in a call besides Burn's own layer.
        assert_eq!(values(float.weight.val()), values(rounded.weight.val()));
        let plain = values(float.forward(x.clone()));
        assert_eq!(values(float.forward_q(x.clone())), plain);
        assert_ne!(values(rounded.forward_q(x)), plain);

        // What was never observed is no matter then.
        let unobserved = QatConfig::new();
        let layer = with_numbers(LinearConfig::new(64, 32).init(&target.device), 1);
        let layer: Linear = unobserved.prepare(layer).unwrap();
        assert!(config.convert(layer).is_ok());
    });
}

#[test]
fn a_loaded_model_says_who_rounds_activations() {
    let device = Device::flex();
    let (layer, _) = converted(Dequantize::Once, &device);
    let (_folder, path) = scratch("model.safetensors");
    save_safetensors(&layer, &path).unwrap();
    let fresh = prepared(2, &QatConfig::new(), &device);
    let (_, report) = LoadConfig::new().load(fresh, &path).unwrap();
    assert!(report.weights[0].rounds_activations);
}
