//! Channels that Burn's blocks cannot hold: of a prime length above 255, or of one weight.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig, LinearLayout};
use burn::store::ModuleRecord;
use burn::tensor::{DType, Device};
use burn_lean::quant::{
    ConvertConfig, Dequantize, ForwardQ, Learned, QatConfig, WeightConfig, calibrate,
    deploy::Outcome, load_record, load_safetensors, quantized_weights, save_safetensors,
};

use crate::support::{each_device, scratch, tensor, values, with_numbers};

fn prepared(seed: u64, shape: [usize; 2], weight: &WeightConfig, device: &Device) -> Linear {
    let layer = LinearConfig::new(shape[0], shape[1]).init(device);
    let config = QatConfig::new().with_weight(weight.clone());
    let layer = config.prepare(with_numbers(layer, seed)).unwrap();
    let x = tensor::<2>(9, [4, shape[0]], device);
    calibrate(layer, |layer| drop(layer.forward_q(x))).unwrap()
}

#[test]
fn channels_of_a_prime_length_are_converted_to_the_bit() {
    let (_folder, path) = scratch("prime.safetensors");
    each_device(|target| {
        let device = &target.device;
        for learned in [Learned::None, Learned::Lsq] {
            for bits in [8, 4] {
                for dequantize in [Dequantize::Once, Dequantize::EveryUse] {
                    let weight = WeightConfig::int(bits).with_learned(learned);
                    let layer = prepared(1, [257, 12], &weight, device);
                    let x = || tensor::<2>(3, [2, 257], device);
                    let expected = values(layer.forward_q(x()));
                    let codes = quantized_weights(&layer).unwrap();
                    let config = ConvertConfig::new().with_dequantize(dequantize);
                    let (converted, report) = config.convert(layer).unwrap();
                    let report_of = &report.weights[0];
                    assert_matches!(report_of.outcome, Outcome::Converted { .. });
                    assert!(2 * report_of.bytes < report_of.float_bytes());
                    let same = |found: &Linear| {
                        assert_matches!(found.weight.base().dtype(), DType::QFloat(_));
                        assert_eq!(values(found.forward_q(x())), expected);
                        assert_eq!(quantized_weights(found).unwrap(), codes);
                    };
                    same(&converted);
                    // Converted once more, it is the same.
                    let (again, report) = config.convert(converted.clone()).unwrap();
                    same(&again);
                    assert_eq!(report.weights[0].outcome, Outcome::AlreadyConverted);

                    let fresh = || prepared(2, [257, 12], &weight, device);
                    // In a debug build Burn cannot read such a tensor back from a GPU.
                    if !target.is_gpu() {
                        let bytes = converted.clone().into_record().into_bytes().unwrap();
                        let record = ModuleRecord::from_bytes(bytes).unwrap();
                        same(&load_record(fresh(), record).unwrap());
                    }
                    save_safetensors(&converted, &path).unwrap();
                    same(&load_safetensors(fresh(), &path).unwrap());
                }
            }
        }
    });
}

#[test]
fn a_channel_of_a_prime_length_loads_into_a_plain_model_and_in_column_layout() {
    let (_folder, path) = scratch("prime.safetensors");
    let device = Device::flex();
    let config = QatConfig::new().with_activation(None);
    let new = |seed, layout| {
        let layer = LinearConfig::new(257, 12).with_layout(layout).init(&device);
        // Touched: a layer that is in use.
        let layer = with_numbers(layer, seed);
        config.prepare(layer).unwrap()
    };
    let layer = new(1, LinearLayout::Row);
    let expected = values(layer.weight.val());
    let (converted, _) = ConvertConfig::new().convert(layer).unwrap();
    save_safetensors(&converted, &path).unwrap();
    let plain = LinearConfig::new(257, 12).init(&device);
    let plain = load_safetensors(plain, &path).unwrap();
    assert_eq!(values(plain.weight.val()), expected);

    let layer = new(1, LinearLayout::Col);
    let expected = values(layer.weight.val());
    let (converted, _) = ConvertConfig::new().convert(layer).unwrap();
    let bytes = converted.into_record().into_bytes().unwrap();
    let record = ModuleRecord::from_bytes(bytes).unwrap();
    let loaded = load_record(new(2, LinearLayout::Col), record).unwrap();
    assert_matches!(loaded.weight.base().dtype(), DType::QFloat(_));
    assert_eq!(values(loaded.weight.val()), expected);
}

#[test]
fn a_weight_that_would_be_no_smaller_stays_float_and_is_reported() {
    each_device(|target| {
        let weight = WeightConfig::int(8);
        // Each weight is a channel of its own.
        let layer = prepared(1, [1, 9], &weight, &target.device);
        let x = tensor::<2>(3, [2, 1], &target.device);
        let expected = values(layer.forward_q(x.clone()));
        let codes = quantized_weights(&layer).unwrap();
        let (converted, report) = ConvertConfig::new().convert(layer).unwrap();
        let Outcome::KeptFakeQuantized { reason } = &report.weights[0].outcome else {
            panic!("{report}");
        };
        assert_says!(reason, "no smaller than in F32");
        assert_eq!(values(converted.forward_q(x)), expected);
        assert_eq!(quantized_weights(&converted).unwrap(), codes);
    });
}
