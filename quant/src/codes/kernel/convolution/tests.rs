use std::sync::{Arc, Mutex};

use burn::module::Module;
use burn::nn::conv::{Conv1dConfig, Conv2dConfig};
use burn::nn::{PaddingConfig1d, PaddingConfig2d};
use burn::tensor::Device;

use super::*;
use crate::codes::kernel::numbers;
use crate::module::listen::listener::{Listener, listening};
use crate::module::listen::tap::Tap;
use crate::module::map_quantizers;
use crate::module::walk::Site;
use crate::range::observer::read;
use crate::{
    ConvertConfig, Dequantize, FakeQuantizeConfig, ForwardQ, Granularity, NumberFormat, QatConfig,
    QuantParams, QuantizedForward, Scheme, WeightConfig, WeightQuantizer, calibrate,
};

fn quantized(scheme: Scheme, shape: [usize; 4]) -> QuantizedTensor {
    let count = shape.iter().product();
    let data = TensorData::new(numbers(count, 5), shape);
    let x = Tensor::<4>::from_data(data, &Device::flex()) + 0.3;
    let qparams = QuantParams::of(&x, &scheme).unwrap();
    QuantizedTensor::quantize(&x, &qparams, &scheme).unwrap()
}

fn values_of(quantized: &QuantizedTensor) -> Vec<f32> {
    read(quantized.dequantize::<4>(&Device::flex()).unwrap()).unwrap()
}

fn in_f64<T: Copy + Into<f64>>(numbers: &[T]) -> Vec<f64> {
    numbers.iter().map(|number| (*number).into()).collect()
}

/// The sums of a convolution, as its definition says; exact, where they are of integers.
fn sums(x: &[f64], kernel: &[f64], packed: &PackedConvolution, scene: Scene) -> Vec<f64> {
    let [batch, height, width, channels] = scene.images;
    let [outputs, per_group, down, across] = packed.shape;
    let Geometry {
        stride,
        padding,
        dilation,
        ..
    } = scene.geometry;
    let [rows, columns] = scene.geometry.output([height, width]).unwrap();
    let mut all = Vec::new();
    for index in 0..batch * outputs * rows * columns {
        let (image, output) = (
            index / columns / rows / outputs,
            index / columns / rows % outputs,
        );
        let (row, column) = (index / columns % rows, index % columns);
        let mut sum = 0.0;
        for term in 0..per_group * down * across {
            let (channel, tap) = (term / (down * across), term % (down * across));
            let channel = output / (outputs / packed.groups) * per_group + channel;
            let y = row * stride[0] + tap / across * dilation[0];
            let x_ = column * stride[1] + tap % across * dilation[1];
            let inside = (padding[0][0]..height + padding[0][0]).contains(&y)
                && (padding[0][1]..width + padding[0][1]).contains(&x_);
            if inside {
                let (y, x_) = (y - padding[0][0], x_ - padding[0][1]);
                let at = ((image * channels + channel) * height + y) * width + x_;
                sum += x[at] * kernel[output * per_group * down * across + term];
            }
        }
        all.push(sum);
    }
    all
}

/// Compares outputs with those of the values, in F64, and those of integers around 0 with exact sums.
fn check(packed: &PackedConvolution, quantized: &QuantizedTensor, scene: Scene, magnitude: f32) {
    let [outputs, per_group, down, across] = packed.shape;
    let terms = per_group * down * across;
    let x = numbers(scene.images.iter().product(), 7);
    let x: Vec<f32> = x.into_iter().map(|x| x * magnitude).collect();
    let grid = CodeGrid {
        scale: magnitude / 127.0,
        low: -128,
        high: 127,
    };
    let steps = codes(&x, 1, &[grid]).unwrap();
    let rounded: Vec<f32> = steps
        .iter()
        .map(|code| f32::from(*code) * grid.scale)
        .collect();
    let bias = numbers(outputs, 9);
    let mut ends = packed.epilogues(Some(&bias));
    let (given, found) = match packed.factors {
        Factors::Floats => (&x, packed.of_floats(&x, scene, &ends)),
        _ => (&rounded, packed.of_integers(&x, scene, grid, &mut ends)),
    };
    let found = found.unwrap();
    let values = values_of(quantized);
    let largest = values.iter().fold(0f32, |most, w| most.max(w.abs()));
    let pixels: usize = scene
        .geometry
        .output([scene.images[1], scene.images[2]])
        .unwrap()
        .iter()
        .product();
    let output = |index: usize| index / pixels % outputs;
    let expected = sums(&in_f64(given), &in_f64(&values), packed, scene);
    assert_eq!(found.len(), expected.len());
    // Each addition rounds once, and codes of one sign are summed apart from their offset, at most twice the
    // largest value; scales and bias round some more.
    let all = terms as f32 * magnitude * 3.0 * largest + 1.0;
    let allowed = f64::from(2.0 * (terms + 8) as f32 * f32::EPSILON * all);
    for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
        let off = (f64::from(*found) - expected - f64::from(bias[output(index)])).abs();
        assert!(
            off <= allowed,
            "{} {:?} {scene:?}: {off}",
            quantized.scheme(),
            packed.shape
        );
    }
    let is_signed = matches!(
        quantized.scheme().format,
        NumberFormat::Int { signed: true, .. }
    );
    let is_plain = is_signed && quantized.zero_point().iter().all(|zero| *zero == 0.0);
    if packed.factors == Factors::Integers && is_plain {
        let sums = sums(&in_f64(&steps), &in_f64(quantized.codes()), packed, scene);
        let scales = quantized.of_elements(quantized.scale());
        for (index, (found, sum)) in found.iter().zip(&sums).enumerate() {
            let output = output(index);
            let scaled = *sum as f32 * grid.scale * scales[output * terms];
            assert_eq!(
                *found,
                scaled + bias[output],
                "{} {:?}",
                quantized.scheme(),
                packed.shape
            );
        }
    }
}

#[test]
fn convolutions_of_codes_are_those_of_their_values() {
    let geometry = |kernel, stride, padding, dilation| Geometry {
        kernel,
        stride,
        padding,
        dilation,
    };
    let geometries = [
        geometry([3, 3], [1, 1], [[0; 2]; 2], [1, 1]),
        geometry([3, 3], [2, 1], [[1; 2]; 2], [1, 1]),
        geometry([2, 3], [1, 2], [[1, 0], [2, 1]], [2, 1]),
        geometry([1, 1], [1, 1], [[0; 2]; 2], [1, 1]),
        geometry([1, 2], [1, 1], [[0, 3], [0, 0]], [1, 3]),
        geometry([5, 4], [1, 1], [[0; 2]; 2], [1, 1]),
    ];
    let outputs = || Granularity::PerChannel { axis: 0 };
    let schemes = [
        Scheme::symmetric(NumberFormat::int8().narrow()),
        Scheme::symmetric(NumberFormat::int(4)).with_granularity(outputs()),
        Scheme::affine(NumberFormat::int8()).with_granularity(outputs()),
        Scheme::affine(NumberFormat::uint(4)).with_granularity(outputs()),
    ];
    for geometry in geometries {
        for [channels, outputs, groups] in [[3, 5, 1], [8, 6, 2], [6, 6, 6], [2, 4, 2], [1, 5, 1]] {
            let shape = [
                outputs,
                channels / groups,
                geometry.kernel[0],
                geometry.kernel[1],
            ];
            for scheme in &schemes {
                let quantized = quantized(scheme.clone(), shape);
                for factors in [Factors::Floats, Factors::Integers] {
                    let packed = match PackedConvolution::new(&quantized, factors, groups) {
                        Ok(packed) => packed,
                        Err(reason) => {
                            assert!(groups == 6 && reason.contains("it may be depthwise"));
                            continue;
                        }
                    };
                    for (batch, magnitude) in [(1, 1.0), (3, 300.0), (1, 30_000.0)] {
                        let images = [batch, 5, 4, channels];
                        check(&packed, &quantized, Scene { images, geometry }, magnitude);
                    }
                }
            }
        }
    }
}

/// Along the inputs; of fewer than eight numbers that lie beside each other in a window, not.
#[test]
fn blocks_of_inputs_have_scales_of_their_own() {
    let geometry = Geometry {
        kernel: [2, 2],
        stride: [1; 2],
        padding: [[1; 2]; 2],
        dilation: [1; 2],
    };
    let blocks = |size: usize| {
        let extents = vec![1, size, 2, 2];
        let granularity = Granularity::PerBlock { extents };
        let scheme = Scheme::affine(NumberFormat::int8()).with_granularity(granularity);
        quantized(scheme, [5, 32, 2, 2])
    };
    let images = [1, 3, 3, 32];
    for factors in [Factors::Floats, Factors::Integers] {
        let quantized = blocks(16);
        let packed = PackedConvolution::new(&quantized, factors, 1).unwrap();
        check(&packed, &quantized, Scene { images, geometry }, 1.0);
        let reason = PackedConvolution::new(&blocks(4), factors, 1).unwrap_err();
        assert!(
            reason.contains("4 numbers in a row share a scale"),
            "{reason}"
        );
    }
}

#[test]
fn what_no_kernel_convolves_says_why() {
    let shape = [4, 2, 3, 3];
    let why = |scheme: Scheme, factors, groups| {
        PackedConvolution::new(&quantized(scheme, shape), factors, groups).unwrap_err()
    };
    let int8 = || Scheme::symmetric(NumberFormat::int8());
    let floats = why(Scheme::symmetric(NumberFormat::E4M3), Factors::Integers, 1);
    assert_eq!(floats, "kernels multiply integers, not E4M3");
    let rows = why(int8(), Factors::IntegersOfRows, 1);
    assert!(rows.contains("a scale for each row"), "{rows}");
    assert!(why(int8(), Factors::Integers, 3).contains("3 groups do not divide"));
    assert!(why(int8(), Factors::Integers, 0).contains("0 groups do not divide"));
}

/// Many images, which several threads turn, and tiles that are cut off.
#[test]
fn codes_of_images_are_those_of_their_numbers_in_another_order() {
    let grid = CodeGrid {
        scale: 1.0 / 100.0,
        low: -90,
        high: 90,
    };
    for [batch, channels, pixels] in [[3, 5, 7], [2, 3, 100], [4, 64, 1000], [2, 1, 9], [2, 9, 1]] {
        let mut x = numbers(batch * channels * pixels, 3);
        let found = codes_last(&x, [channels, pixels], grid).unwrap();
        let ordered = codes(&x, 1, &[grid]).unwrap();
        for (index, code) in found.iter().enumerate() {
            let (channel, pixel) = (index % channels, index / channels % pixels);
            let image = index / channels / pixels;
            assert_eq!(
                *code,
                ordered[(image * channels + channel) * pixels + pixel]
            );
        }
        let last = x.len() - 1;
        for broken in [f32::NAN, f32::INFINITY] {
            x[last] = broken;
            assert_eq!(codes_last(&x, [channels, pixels], grid), None);
            assert!(!are_finite(&x));
        }
        assert!(are_finite(&x[..last]));
    }
}

/// Convolves by its codes whenever it can, whatever the speed of that.
fn in_product<M: Module>(layer: M) -> M {
    let (layer, _) = ConvertConfig::new().convert(layer).unwrap();
    map_quantizers(layer, |located| match located.site {
        Site::Weight => located.quantizer.with_dequantize(Dequantize::InProduct),
        _ => located.quantizer,
    })
}

fn prepared<M: Module>(
    layer: M,
    bits: u8,
    activation: Option<FakeQuantizeConfig>,
    call: impl Fn(&M),
) -> M {
    let config = QatConfig::new()
        .with_weight(WeightConfig::int(bits))
        .with_activation(activation);
    let layer: M = config.prepare(layer).unwrap();
    in_product(match config.activation {
        Some(_) => calibrate(layer, call).unwrap(),
        None => layer,
    })
}

fn images<const D: usize>(shape: [usize; D], seed: u32) -> Tensor<D> {
    let data = TensorData::new(numbers(shape.iter().product(), seed), shape);
    Tensor::from_data(data, &Device::flex())
}

/// Sums of up to 144 products of numbers up to 1 and 1/8.
fn assert_close<const D: usize>(found: Tensor<D>, expected: Tensor<D>) {
    assert_eq!(found.dims(), expected.dims());
    let pairs = read(found)
        .unwrap()
        .into_iter()
        .zip(read(expected).unwrap());
    for (found, expected) in pairs {
        let allowed = 144.0 * 144.0 / 8.0 * f32::EPSILON;
        assert!((found - expected).abs() <= allowed, "{found} {expected}");
    }
}

fn of_values<const W: usize, const D: usize>(
    weight: &Param<Tensor<W>>,
    x: Tensor<D>,
    forward: impl FnOnce(Tensor<D>) -> Tensor<D>,
) -> Tensor<D> {
    let quantizers = WeightQuantizer::of(weight).unwrap();
    quantizers.quantize_output(forward(quantizers.quantize_input(x)))
}

#[test]
fn converted_convolutions_give_by_their_codes_what_their_values_give() {
    let activation = || QatConfig::new().activation;
    let paddings = [
        PaddingConfig2d::Valid,
        PaddingConfig2d::Same,
        PaddingConfig2d::Explicit(1, 0, 2, 1),
    ];
    for padding in paddings {
        for groups in [1, 2, 16] {
            let layer = Conv2dConfig::new([16, 16], [3, 2])
                .with_padding(padding.clone())
                .with_stride([2, 1])
                .with_groups(groups)
                .init(&Device::flex());
            for (bits, activation) in [(8, None), (4, None), (8, activation())] {
                let is_float = activation.is_none();
                let call = |layer: &Conv2d| drop(layer.forward_q(images([3, 16, 5, 6], 2)));
                let layer = prepared(layer.clone(), bits, activation, call);
                for batch in [1, 3] {
                    let x = images([batch, 16, 5, 6], 4);
                    let found = conv2d(&layer, &x);
                    // That of floats is none.
                    if is_float && groups == 16 {
                        assert!(found.is_none());
                        continue;
                    }
                    let found = found.expect("a kernel convolves");
                    let expected = of_values(&layer.weight, x.clone(), |x| layer.forward(x));
                    assert_close(found.clone(), expected);
                    let called = layer.forward_q(x);
                    assert_eq!(read(called).unwrap(), read(found).unwrap());
                }
            }
        }
    }
    for padding in [
        PaddingConfig1d::Valid,
        PaddingConfig1d::Same,
        PaddingConfig1d::Explicit(2, 0),
    ] {
        let layer = Conv1dConfig::new(16, 12, 4)
            .with_padding(padding)
            .with_dilation(2)
            .init(&Device::flex());
        for activation in [None, activation()] {
            let call = |layer: &Conv1d| drop(layer.forward_q(images([3, 16, 11], 2)));
            let layer = prepared(layer.clone(), 8, activation, call);
            let x = images([2, 16, 11], 4);
            let found = conv1d(&layer, &x).expect("a kernel convolves");
            let expected = of_values(&layer.weight, x.clone(), |x| layer.forward(x));
            assert_close(found.clone(), expected);
            assert_eq!(read(layer.forward_q(x)).unwrap(), read(found).unwrap());
        }
    }
}

fn layer(activation: Option<FakeQuantizeConfig>) -> Conv2d {
    let layer = Conv2dConfig::new([8, 16], [3, 3]).init(&Device::flex());
    let call = |layer: &Conv2d| drop(layer.forward_q(images([3, 8, 5, 5], 2)));
    prepared(layer, 8, activation, call)
}

#[test]
fn what_a_kernel_does_not_convolve_is_left_to_burn() {
    let layer = layer(QatConfig::new().activation);
    let x = images([2, 8, 5, 5], 1);
    assert!(conv2d(&layer, &x).is_some());
    let wide = Tensor::<4>::zeros([2, 9, 5, 5], &Device::flex());
    let none = Tensor::<4>::zeros([0, 8, 5, 5], &Device::flex());
    let small = Tensor::<4>::zeros([2, 8, 2, 5], &Device::flex());
    let nan = x.clone().mask_fill(x.clone().greater_elem(0.9), f32::NAN);
    for x in [wide, none, small, nan, x.clone().autodiff()] {
        assert!(conv2d(&layer, &x).is_none());
    }
    let tap = Listener::Tap(Arc::new(Mutex::new(Tap::default())));
    assert!(conv2d(&listening(&layer, &tap), &x).is_none());
    let run = QuantizedForward::new();
    let of_run = run.run(&layer, x.clone(), |layer, x| layer.forward_q(x));
    assert_close(of_run.unwrap(), conv2d(&layer, &x).unwrap());
    assert!(conv2d(&layer.valid(), &x).is_some());
    // A bias that trains has a gradient.
    let training = layer.train();
    assert!(conv2d(&training, &x).is_none());
    let bias = training.bias.as_ref().unwrap().val();
    let grads = training.forward_q(x).sum().backward();
    assert_eq!(read(bias.grad(&grads).unwrap()).unwrap(), [18.0; 16]);
}

/// Sums with infinities would be NaN where codes have an offset.
#[test]
fn numbers_that_are_not_finite_give_what_they_give_in_burn() {
    let layer = layer(None);
    let x = images([1, 8, 5, 5], 1);
    assert_close(conv2d(&layer, &x).unwrap(), layer.forward(x.clone()));
    for broken in [f32::NAN, f32::INFINITY] {
        let x = x.clone().mask_fill(x.clone().greater_elem(0.95), broken);
        let found = read(conv2d(&layer, &x).unwrap()).unwrap();
        let expected = read(layer.forward(x)).unwrap();
        assert!(found.iter().any(|y| !y.is_finite()));
        for (found, expected) in found.iter().zip(&expected) {
            assert_eq!(found.to_bits(), expected.to_bits());
        }
    }
}
