//! Models whose parameters are F16 or BF16, from preparation to a file and back.

use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::store::ModuleRecord;
use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_lean::quant::{
    ConvertConfig, Dequantize, ForwardQ, Learned, LoadConfig, Mapping, NumberFormat, PtqConfig,
    PtqMode, QatConfig, QuantizedForward, Unsupported, WeightConfig, audit, load_record,
    load_safetensors, quantized_weights, quantizers, save_safetensors, sensitivity,
};

use crate::support::{Perceptron, cast, each_device, on_tracked, tensor, values, with_numbers};

fn perceptron(dtype: FloatDType, device: &Device) -> Perceptron {
    cast(Perceptron::new([16, 12, 4], 7, device), dtype)
}

/// Both, on each device that computes in them: ndarray in none, wgpu in F16.
fn each_half(test: impl Fn(FloatDType, &Device)) {
    each_device(|target| {
        for dtype in [FloatDType::F16, FloatDType::BF16] {
            if target.device.supports_dtype(dtype) {
                test(dtype, &target.device);
            }
        }
    });
}

fn input(dtype: FloatDType, device: &Device) -> Tensor<2> {
    tensor::<2>(3, [5, 16], device).cast(dtype)
}

/// Quantized, with ranges.
fn quantized(dtype: FloatDType, weight: WeightConfig, device: &Device) -> Perceptron {
    let config = PtqConfig::new()
        .with_quantize(QatConfig::new().with_weight(weight))
        .with_progress(false);
    let data = input(dtype, device);
    let run = |net: &Perceptron, x: Tensor<2>| drop(net.forward_q(x));
    config
        .quantize(perceptron(dtype, device), || [data.clone()], run)
        .unwrap()
        .0
}

#[test]
fn a_converted_half_model_runs_in_its_dtype_with_the_same_outputs() {
    each_half(|dtype, device| {
        for dequantize in [Dequantize::Once, Dequantize::EveryUse] {
            for bits in [8, 4] {
                let net = quantized(dtype, WeightConfig::int(bits), device);
                let expected = net.forward_q(input(dtype, device));
                assert_eq!(expected.dtype(), DType::from(dtype));
                let weight = values(net.first.weight.val());
                let config = ConvertConfig::new().with_dequantize(dequantize);
                let (converted, _) = config.convert(net).unwrap();
                assert_matches!(converted.first.weight.base().dtype(), DType::QFloat(_));
                assert_eq!(converted.first.weight.val().dtype(), DType::from(dtype));
                assert_eq!(values(converted.first.weight.val()), weight);
                for _ in 0..2 {
                    let found = converted.forward_q(input(dtype, device));
                    assert_eq!(found.dtype(), DType::from(dtype));
                    assert_eq!(values(found), values(expected.clone()));
                }
                // So does the audit, which records it.
                let audit = audit(&converted, input(dtype, device), |net, x| net.forward_q(x));
                assert!(audit.unwrap().is_covered());
                let run = QuantizedForward::new();
                let found = run.run(&converted, input(dtype, device), |net, x| net.forward_q(x));
                assert_eq!(values(found.unwrap()), values(expected.clone()));
            }
        }
    });
}

#[test]
fn a_half_model_loads_from_its_record_and_from_its_file() {
    let folder = tempfile::tempdir().unwrap();
    each_half(|dtype, device| {
        let path = folder.path().join(format!("{dtype:?}.safetensors"));
        let prepared = quantized(dtype, WeightConfig::int(8), device);
        let expected = values(prepared.forward_q(input(dtype, device)));
        let (converted, _) = ConvertConfig::new().convert(prepared).unwrap();
        save_safetensors(&converted, &path).unwrap();
        let fresh = |dtype| {
            let config = PtqConfig::new().qat_config();
            config.prepare(perceptron(dtype, device)).unwrap().valid()
        };
        // Also into a model that was made in F32: the file has the dtype.
        for of_model in [dtype, FloatDType::F32] {
            let loaded = load_safetensors(fresh(of_model), &path).unwrap();
            assert_eq!(values(loaded.forward_q(input(dtype, device))), expected);
            let bytes = converted.clone().into_record().into_bytes().unwrap();
            let record = ModuleRecord::from_bytes(bytes).unwrap();
            let loaded = load_record(fresh(of_model), record).unwrap();
            assert_eq!(values(loaded.forward_q(input(dtype, device))), expected);
        }
    });
}

#[test]
fn a_half_model_with_quantized_weights_alone_loads_into_a_plain_one() {
    let folder = tempfile::tempdir().unwrap();
    each_half(|dtype, device| {
        let path = folder.path().join(format!("{dtype:?}.safetensors"));
        let config = PtqConfig::new()
            .with_mode(PtqMode::WeightOnly)
            .with_progress(false);
        let none = || Vec::<Tensor<2>>::new();
        let (net, _) = config
            .quantize(perceptron(dtype, device), none, |_, _| {})
            .unwrap();
        let expected = values(net.forward_q(input(dtype, device)));
        let (converted, _) = ConvertConfig::new().convert(net).unwrap();
        save_safetensors(&converted, &path).unwrap();
        for dequantize in [Dequantize::Once, Dequantize::EveryUse] {
            let config = LoadConfig::new().with_dequantize(dequantize);
            let (plain, _) = config.load(perceptron(dtype, device), &path).unwrap();
            assert_eq!(
                plain.first.forward(input(dtype, device)).dtype(),
                dtype.into()
            );
            assert_eq!(values(plain.forward_q(input(dtype, device))), expected);
        }
    });
}

#[test]
fn what_burn_cannot_hold_stays_half_with_the_same_codes() {
    each_half(|dtype, device| {
        let weight = WeightConfig::new()
            .with_format(NumberFormat::uint(4))
            .with_mapping(Mapping::Affine);
        let net = quantized(dtype, weight, device);
        let expected = values(net.forward_q(input(dtype, device)));
        let codes = quantized_weights(&net).unwrap();
        let config = ConvertConfig::new().with_unsupported(Unsupported::KeepFakeQuantized);
        let (converted, _) = config.convert(net).unwrap();
        assert_eq!(values(converted.forward_q(input(dtype, device))), expected);
        assert_eq!(quantized_weights(&converted).unwrap(), codes);
    });
}

/// The lowest code times its scale is beyond F16.
#[test]
fn finite_weights_of_a_half_model_stay_finite_when_it_is_converted() {
    let folder = tempfile::tempdir().unwrap();
    each_half(|dtype, device| {
        let path = folder.path().join(format!("{dtype:?}.safetensors"));
        let config = QatConfig::new()
            .with_weight(WeightConfig::new().with_format(NumberFormat::int8()))
            .with_activation(None);
        let prepared = || {
            let mut linear: Linear = LinearConfig::new(2, 1).init(device);
            let weight = Tensor::<2>::from_floats([[-65504.0], [1.0]], device);
            linear.weight = Param::from_tensor(weight);
            config.prepare(cast(linear, dtype)).unwrap().valid()
        };
        let expected = values(prepared().weight.val());
        assert!(expected.iter().all(|x| x.is_finite()), "{expected:?}");
        for dequantize in [Dequantize::Once, Dequantize::EveryUse] {
            let config = ConvertConfig::new()
                .with_dequantize(dequantize)
                .with_unsupported(Unsupported::KeepFakeQuantized);
            let (converted, _) = config.convert(prepared()).unwrap();
            assert_eq!(values(converted.weight.val()), expected);
            save_safetensors(&converted, &path).unwrap();
            let loaded = load_safetensors(prepared(), &path).unwrap();
            assert_eq!(values(loaded.weight.val()), expected);
        }
    });
}

/// A scale is a number of the format, not of the model.
#[test]
fn learned_scales_stay_in_f32_in_a_model_that_is_cast_and_in_its_records() {
    on_tracked(|device| {
        if !device.supports_dtype(DType::F16) {
            return;
        }
        let weight = WeightConfig::new().with_learned(Learned::Lsq);
        let config = QatConfig::new().with_activation(None).with_weight(weight);
        let prepared = |seed| {
            let model = Perceptron::new([16, 12, 4], seed, &device);
            config.prepare(model).unwrap()
        };
        let model = prepared(7);
        let x = tensor::<2>(3, [5, 16], &device);
        // The first training step gives the scales.
        model.forward_q(x.clone());
        let expected = values(model.valid().forward_q(x.clone().inner()));
        let half = cast(model.valid(), FloatDType::F16);
        let scales = |model: &Perceptron| -> Vec<Vec<f32>> {
            let all = quantizers(model).into_iter();
            all.map(|one| values(one.quantizer.qparams().unwrap().scale))
                .collect()
        };
        let of_model = scales(&model.valid());
        assert_eq!(of_model.len(), 2);
        assert_eq!(scales(&half), of_model);
        let loaded = prepared(8)
            .try_load_record(half.clone().into_record())
            .unwrap();
        assert_eq!(scales(&loaded.valid()), of_model);
        let loaded = cast(loaded, FloatDType::F32).valid();
        let found = values(loaded.forward_q(x.clone().inner()));
        let largest = expected
            .iter()
            .fold(0.0_f32, |most, value| most.max(value.abs()));
        for (found, expected) in found.iter().zip(&expected) {
            assert!(
                (found - expected).abs() < 0.05 * largest,
                "{found} {expected}"
            );
        }
        let qparams = quantizers(&half)[0].quantizer.qparams().unwrap();
        assert_eq!(qparams.scale.dtype(), DType::F32);
    });
}

#[test]
fn the_sensitivity_of_a_half_model_has_sums_in_f32() {
    each_half(|dtype, device| {
        // The squares of the outputs are beyond F16.
        let x = input(dtype, device) * 1000.0;
        let config = QatConfig::new()
            .with_weight(WeightConfig::int(4))
            .with_activation(None);
        let prepared = config.prepare(perceptron(dtype, device)).unwrap();
        let found = sensitivity(&prepared, |net| net.forward_q(x.clone()), |_| 0.0).unwrap();
        let mut only_last = prepared.clone();
        only_last.first = perceptron(dtype, device).first;
        let exact = values(perceptron(dtype, device).forward_q(x.clone()));
        let off = values(only_last.forward_q(x.clone()));
        let squares = |numbers: &mut dyn Iterator<Item = f32>| -> f64 {
            numbers.map(|number| f64::from(number).powi(2)).sum()
        };
        let signal = squares(&mut exact.iter().copied());
        assert!(signal > 65504.0);
        let noise = squares(&mut exact.iter().zip(&off).map(|(a, b)| a - b));
        let expected = 10.0 * (signal / noise).log10();
        let sqnr = found.layers[1].output_sqnr;
        assert!((sqnr - expected).abs() < 1e-3, "{sqnr} {expected}");
    });
}

#[test]
fn the_gradient_scores_of_a_half_model_are_those_of_the_same_numbers_in_f32() {
    // The same layer, with numbers of F16 in both dtypes.
    let second_order = |dtype: FloatDType| {
        let layer = with_numbers(LinearConfig::new(16, 4).init(&Device::flex()), 7);
        let layer = cast(cast(layer, FloatDType::F16), dtype);
        let config = QatConfig::new()
            .with_weight(WeightConfig::int(4))
            .with_activation(None);
        let prepared = config.prepare(layer.train()).unwrap();
        let x = input(FloatDType::F16, &Device::flex()).cast(dtype);
        let tracked = Tensor::from_inner(x.clone());
        let found = sensitivity(&prepared, |layer| layer.forward_q(x.clone()), |_| 0.0)
            .unwrap()
            .with_gradient_scores(&prepared, |layer| {
                layer.forward_q(tracked).square().mean().mul_scalar(0.001)
            })
            .unwrap();
        found.layers[0].second_order.unwrap()
    };
    let (half, full) = (second_order(FloatDType::F16), second_order(FloatDType::F32));
    // Below 3e-8 a number is nothing in F16, as each of these squares is.
    assert!(full > 0.0 && full < 1e-7, "{full}");
    assert!((half / full - 1.0).abs() < 0.1, "{half} {full}");
}
