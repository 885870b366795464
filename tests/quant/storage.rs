//! Quantized tensors of Burn made from our codes and scales.

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::tensor::quantization::{QuantStore, QuantValue};
use burn::tensor::{DType, Device, Tensor};
use burn_lean::quant::{
    ConvertConfig, ForwardQ, Granularity, Mapping, NumberFormat, QatConfig, QuantError,
    QuantParams, QuantizedTensor, Scheme, Unsupported, calibrate, fake_quantize, load_safetensors,
    save_safetensors,
};

use crate::support::{each_device, scratch, tensor, values, with_numbers};

fn quantized<const D: usize>(x: &Tensor<D>, scheme: &Scheme) -> (QuantizedTensor, Vec<f32>) {
    let qparams = QuantParams::of(x, scheme).unwrap();
    let fake = fake_quantize(x.clone(), &qparams, scheme);
    (
        QuantizedTensor::quantize(x, &qparams, scheme).unwrap(),
        values(fake),
    )
}

fn check<const D: usize>(shape: [usize; D], scheme: &Scheme, device: &Device) -> DType {
    let x = tensor::<D>(7, shape, device);
    let (quantized, fake) = quantized(&x, scheme);
    let burn = quantized
        .to_burn::<D>(device)
        .unwrap_or_else(|error| panic!("{scheme} {shape:?}: {error}"));
    let dtype = burn.dtype();
    assert_matches!(dtype, DType::QFloat(_));
    // With debug assertions, Burn panics on reading some lengths of bytes from a GPU.
    if device.settings().quantization.scheme.store == QuantStore::Native {
        assert_eq!(
            QuantizedTensor::from_burn(burn.clone(), scheme).unwrap(),
            quantized
        );
        let other = Scheme::symmetric(NumberFormat::int(2).narrow()).with_granularity(
            Granularity::PerBlock {
                extents: vec![1; D],
            },
        );
        let foreign = QuantizedTensor::from_burn(burn.clone(), &other);
        let error = foreign.unwrap_err();
        assert_matches!(error, QuantError::ForeignScheme { .. });
        assert_says!(
            error,
            "is a quantized tensor of ",
            "scales, not INT2 narrow"
        );
    }
    assert_eq!(values(burn.dequantize()), fake, "{scheme} {shape:?}");
    dtype
}

fn per_channel(axis: usize) -> Granularity {
    Granularity::PerChannel { axis }
}

#[test]
fn parts_that_contradict_each_other_are_no_quantized_tensor() {
    let scheme = Scheme::symmetric(NumberFormat::int(4).narrow()).with_granularity(per_channel(0));
    let new = |codes: &[i32], shape: &[usize], scale: &[f32], zero_point: &[f32]| {
        QuantizedTensor::new(
            codes.to_vec(),
            shape.to_vec(),
            scale.to_vec(),
            zero_point.to_vec(),
            scheme.clone(),
        )
    };
    let (codes, scale, zeros) = ([7, -7, 0, 3], [0.5, 1.0], [0.0; 2]);
    let whole = new(&codes, &[2, 2], &scale, &zeros).unwrap();
    let rank = whole.dequantize::<3>(&Device::flex()).unwrap_err();
    assert_matches!(rank, QuantError::UnsupportedRank { rank: 2, .. });

    for (refused, message) in [
        (
            new(&[7, -7, 0], &[2, 2], &scale, &zeros),
            "expected 4 numbers, found 3",
        ),
        (
            new(&[7, -8, 0, 3], &[2, 2], &scale, &zeros),
            "-8, outside of [-7, 7]",
        ),
        (
            new(&codes, &[2, usize::MAX], &scale, &zeros),
            "shape is [2, ",
        ),
        (new(&codes, &[2, 0], &scale, &zeros), "no elements"),
        (
            new(&codes, &[2, 2], &[0.5], &zeros),
            "expected 2 numbers, found 1",
        ),
        (
            new(&codes, &[2, 2], &[0.5, 0.0], &zeros),
            "the scale of the tensor is 0",
        ),
        // It has no inverse: steps would be infinite, and zeros NaN.
        (
            new(&codes, &[2, 2], &[0.5, 2.9e-39], &zeros),
            "the scale of the tensor is 0.00",
        ),
        (
            new(&codes, &[2, 2], &scale, &[0.0]),
            "expected 2 numbers, found 1",
        ),
        (
            new(&codes, &[2, 2], &scale, &[0.0, 8.0]),
            "8, outside of [-7, 7]",
        ),
    ] {
        assert_says!(refused.unwrap_err(), message);
    }
}

#[test]
fn every_width_and_granularity_comes_back_exactly_as_fake_quantized() {
    each_device(|target| {
        for bits in 2..=8 {
            for format in [NumberFormat::int(bits), NumberFormat::int(bits).narrow()] {
                let scheme = Scheme::symmetric(format);
                check([16, 8], &scheme, &target.device);
                check([8], &scheme, &target.device);
                let columns = scheme.clone().with_granularity(per_channel(1));
                check([16, 8], &columns, &target.device);
                let rows = scheme.clone().with_granularity(per_channel(0));
                check([16, 8], &rows, &target.device);
            }
        }
    });
}

#[test]
fn channels_longer_than_a_block_repeat_their_scale() {
    each_device(|target| {
        let scheme =
            Scheme::symmetric(NumberFormat::int8().narrow()).with_granularity(per_channel(1));
        // 512 = 2 · 256: blocks of 128; 300 = 2 · 150
        for rows in [512, 300] {
            let dtype = check([rows, 8], &scheme, &target.device);
            let DType::QFloat(scheme) = dtype else {
                panic!("{dtype:?}")
            };
            let block = scheme.block_size().unwrap().to_dim_vec(2);
            assert!(rows.is_multiple_of(block[0] as usize) && block[0] > 1 && block[1] == 1);
        }
    });
}

#[test]
fn convolution_weights_are_exact_or_refused() {
    each_device(|target| {
        for bits in [8, 4, 2] {
            let scheme = Scheme::symmetric(NumberFormat::int(bits).narrow())
                .with_granularity(per_channel(0));
            if target.is_gpu() {
                for (shape, why) in [
                    // Only the output channels fit words, but each has its own scale.
                    ([16, 2, 3, 3], "along axis 0 would need several scales"),
                    (
                        [5, 2, 3, 3],
                        "no axis of [5, 2, 3, 3] is a multiple of the 4",
                    ),
                ] {
                    let x = tensor::<4>(7, shape, &target.device);
                    let (quantized, _) = quantized(&x, &scheme);
                    let error = quantized.to_burn::<4>(&target.device);
                    assert_says!(error.unwrap_err(), why);
                }
            } else {
                check([16, 2, 3, 3], &scheme, &target.device);
                check([16, 1, 3, 3, 3], &scheme, &target.device);
            }
            // Words along the input channels, which are four at least.
            check([16, 4, 3], &scheme, &target.device);
            check([6, 8, 3, 3], &scheme, &target.device);
            check([5, 16, 3, 5], &scheme, &target.device);
            check([3, 4, 1, 3, 3], &scheme, &target.device);
            check([16, 2, 3, 16], &scheme, &target.device);
            // With one scale for all, words along any axis.
            let whole = Scheme::symmetric(NumberFormat::int(bits).narrow());
            check([16, 2, 3, 3], &whole, &target.device);
            check([3, 16, 3, 5], &whole, &target.device);
        }
    });
}

#[test]
fn blocks_keep_their_own_scales() {
    each_device(|target| {
        for bits in [8, 4, 2] {
            for extents in [vec![4, 1], vec![2, 8], vec![8]] {
                let scheme = Scheme::symmetric(NumberFormat::int(bits).narrow())
                    .with_granularity(Granularity::PerBlock { extents });
                check([16, 16], &scheme, &target.device);
            }
            // The last ones have 16 rows: as blocks of 16, of which the others have two.
            let scheme = Scheme::symmetric(NumberFormat::int(bits).narrow()).with_granularity(
                Granularity::PerBlock {
                    extents: vec![32, 1],
                },
            );
            check([48, 16], &scheme, &target.device);
        }
    });
}

#[test]
fn the_device_holds_as_few_bits_as_it_can() {
    each_device(|target| {
        let scheme = |bits| Scheme::symmetric(NumberFormat::int(bits).narrow());
        let held = |bits| match check([16, 16], &scheme(bits), &target.device) {
            DType::QFloat(scheme) => (scheme.value, scheme.store),
            other => panic!("{other:?}"),
        };
        match target.name {
            "flex" => {
                assert_eq!(held(8), (QuantValue::Q8S, QuantStore::Native));
                assert_eq!(held(4), (QuantValue::Q4S, QuantStore::Native));
                assert_eq!(held(2), (QuantValue::Q2S, QuantStore::Native));
            }
            // It has nothing below a byte.
            "ndarray" => {
                assert_eq!(held(8), (QuantValue::Q8S, QuantStore::Native));
                assert_eq!(held(4), (QuantValue::Q8S, QuantStore::Native));
                assert_eq!(held(2), (QuantValue::Q8S, QuantStore::Native));
            }
            _ => {
                assert_eq!(held(8), (QuantValue::Q8S, QuantStore::PackedU32(0)));
                assert_eq!(held(4), (QuantValue::Q4S, QuantStore::PackedU32(0)));
                assert_eq!(held(2), (QuantValue::Q2S, QuantStore::PackedU32(0)));
            }
        }
    });
}

#[test]
fn what_burn_cannot_hold_is_refused_with_the_reason() {
    let device = Device::flex();
    let x = tensor::<2>(3, [16, 8], &device);
    let refuse = |x: &Tensor<2>, scheme: &Scheme, why: &str| {
        let (quantized, _) = quantized(x, scheme);
        let error = quantized.to_burn::<2>(&device).unwrap_err();
        assert_matches!(error, QuantError::UnsupportedStorage { .. });
        assert_says!(error, why);
    };
    refuse(&x, &Scheme::affine(NumberFormat::uint8()), "no zero point");
    refuse(&x, &Scheme::affine(NumberFormat::int8()), "no zero point");
    refuse(
        &x,
        &Scheme::symmetric(NumberFormat::uint8()),
        "no unsigned quantized integers",
    );
    // 257 is prime: every element would have its own scale.
    let long = tensor::<2>(3, [257, 2], &device);
    let scheme = Scheme::symmetric(NumberFormat::int8().narrow())
        .with_granularity(Granularity::PerChannel { axis: 1 });
    refuse(&long, &scheme, "no smaller than in F32");
}

#[test]
fn a_mapping_without_clipping_is_held_too() {
    each_device(|target| {
        let scheme =
            Scheme::symmetric(NumberFormat::int8()).with_mapping(Mapping::SymmetricNoClipping);
        check([16, 8], &scheme, &target.device);
    });
}

/// Flex would store an E4M3 as an integer, without a word.
#[test]
fn float_formats_are_exact_or_refused() {
    each_device(|target| {
        for format in [NumberFormat::E4M3, NumberFormat::E5M2, NumberFormat::E2M1] {
            let x = tensor::<2>(7, [16, 8], &target.device);
            let scheme = Scheme::symmetric(format).with_granularity(per_channel(0));
            let (quantized, fake) = quantized(&x, &scheme);
            let dequantized = quantized.dequantize::<2>(&target.device).unwrap();
            assert_eq!(values(dequantized), fake);
            match quantized.to_burn::<2>(&target.device) {
                Ok(tensor) => {
                    println!("{} holds {format}", target.name);
                    assert_ne!(target.name, "flex");
                    assert_eq!(values(tensor.clone().dequantize()), fake);
                    assert_eq!(
                        QuantizedTensor::from_burn(tensor, &scheme).unwrap(),
                        quantized
                    );
                }
                Err(error) => {
                    println!("{error}");
                    assert_matches!(error, QuantError::UnsupportedStorage { .. });
                }
            }
        }
    });
}

/// 27 codes share a scale, which fill no whole number of words.
#[test]
fn a_kernel_for_colour_images_is_converted_or_kept_on_every_device() {
    let (_folder, path) = scratch("kernel.safetensors");
    each_device(|target| {
        let fresh = || -> Conv2d {
            let layer = Conv2dConfig::new([3, 4], [3, 3]).init(&target.device);
            with_numbers(layer, 5)
        };
        let images: Tensor<4> = tensor(3, [2, 3, 6, 6], &target.device);
        let run = |layer: &Conv2d| values(layer.forward_q(images.clone()));
        let prepared = QatConfig::new().prepare(fresh()).unwrap();
        let prepared = calibrate(prepared, |layer| {
            run(layer);
        });
        let prepared = prepared.unwrap().valid();
        let expected = run(&prepared);
        match ConvertConfig::new().convert(prepared.clone()) {
            Ok((converted, _)) => assert_eq!(run(&converted), expected),
            Err(rejected) => {
                assert_says!(rejected.error(), "KeepFakeQuantized");
            }
        }
        let keep = ConvertConfig::new().with_unsupported(Unsupported::KeepFakeQuantized);
        let (kept, _) = keep.convert(prepared).unwrap();
        assert_eq!(run(&kept), expected);
        save_safetensors(&kept, &path).unwrap();
        let other = QatConfig::new().prepare(fresh()).unwrap();
        let loaded = load_safetensors(other, &path).unwrap();
        assert_eq!(run(&loaded), expected);
    });
}
