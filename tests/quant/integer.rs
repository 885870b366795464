//! Integer arithmetic against the fake-quantized forward pass.

use burn::module::{Module, Param};
use burn::nn::PaddingConfig2d;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor};
use burn_lean::quant::{
    ConvertConfig, FakeQuantize, ForwardQ, NumberFormat, QatConfig, QuantError, QuantizedTensor,
    Scheme, Unsupported, WeightConfig, WeightQuantizer,
    fake::to_codes,
    integer::{ConvGeometry, Grid, IntegerConv2d, IntegerLinear, Multiplier, Requantization},
    quantized_weights,
};

use crate::support::{each_device, tensor, values};

#[derive(Module, Debug)]
struct Net {
    conv: Conv2d,
    fc: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        let mut conv = Conv2dConfig::new([2, 4], [3, 3])
            .with_stride([2, 1])
            .with_padding(PaddingConfig2d::Explicit(1, 1, 1, 1))
            .with_groups(2)
            .init(device);
        conv.weight = Param::from_tensor(tensor(1, [4, 1, 3, 3], device));
        conv.bias = Some(Param::from_tensor(tensor(2, [4], device)));
        let mut fc = LinearConfig::new(4 * 3 * 6, 8).init(device);
        fc.weight = Param::from_tensor(tensor(3, [72, 8], device));
        fc.bias = Some(Param::from_tensor(tensor(4, [8], device)));
        Self { conv, fc }
    }

    fn hidden(&self, x: Tensor<4>) -> Tensor<4> {
        self.conv.forward_q(x)
    }

    fn head(&self, hidden: Tensor<4>) -> Tensor<2> {
        self.fc.forward_q(relu(hidden).flatten(1, 3))
    }
}

fn codes<const D: usize>(x: Tensor<D>, quantizer: &FakeQuantize) -> Vec<i32> {
    let qparams = quantizer.qparams().unwrap();
    to_codes(x, &qparams, quantizer.scheme())
        .into_data()
        .iter::<i32>()
        .collect()
}

/// How many codes are one step apart; none may be more.
fn off_by_one(fake: &[i32], integer: &[i32]) -> usize {
    assert_eq!(fake.len(), integer.len());
    let apart = fake.iter().zip(integer).map(|(a, b)| a.abs_diff(*b));
    apart
        .inspect(|steps| assert!(*steps <= 1))
        .filter(|steps| *steps == 1)
        .count()
}

#[test]
fn a_converted_model_in_integers_is_within_one_step_of_the_fake_quantized_one() {
    each_device(|target| {
        for (bits, mode) in [
            (8, Requantization::Float),
            (8, Requantization::FixedPoint),
            (4, Requantization::Float),
            (4, Requantization::FixedPoint),
        ] {
            let training = target.device.clone().autodiff();
            let config = QatConfig::new()
                .with_weight(WeightConfig::int(bits))
                .with_outputs(true);
            let net = config.prepare(Net::new(&training)).unwrap();
            for seed in 0..4 {
                net.head(net.hidden(tensor(seed, [3, 2, 6, 6], &training)));
            }
            let net = net.valid();
            // On wgpu no 32-bit word fits a kernel of 3; the codes are the same ones.
            let config = ConvertConfig::new().with_unsupported(Unsupported::KeepFakeQuantized);
            let (converted, _) = config.convert(net.clone()).unwrap();
            let weights = quantized_weights(&converted).unwrap();
            let of_conv = WeightQuantizer::of(&net.conv.weight).unwrap();
            let of_fc = WeightQuantizer::of(&net.fc.weight).unwrap();
            let quantizer = |quantizer: &Option<FakeQuantize>| quantizer.clone().unwrap();
            let grid =
                |quantizer: &Option<FakeQuantize>| Grid::of(quantizer.as_ref().unwrap()).unwrap();
            let bias = |param: &Option<Param<Tensor<1>>>| values(param.as_ref().unwrap().val());

            let geometry = ConvGeometry {
                stride: [2, 1],
                padding: [1, 1],
                dilation: [1, 1],
                groups: 2,
            };
            let x = tensor::<4>(9, [3, 2, 6, 6], &target.device);
            let layer = IntegerConv2d::of(
                &weights[0].1,
                Some(&bias(&net.conv.bias)),
                grid(&of_conv.input),
                geometry,
            )
            .unwrap();
            let input = codes(x.clone(), &quantizer(&of_conv.input));
            let (accumulators, shape) = layer.accumulate(&input, [3, 2, 6, 6]).unwrap();
            assert_eq!(shape, [3, 4, 3, 6]);
            let output = grid(&of_conv.output);
            let integer = layer
                .requantize(&accumulators, shape, output, mode)
                .unwrap();
            let hidden = net.hidden(x);
            let fake = codes(hidden.clone(), &quantizer(&of_conv.output));
            let off = off_by_one(&fake, &integer);
            // The bias is rounded to steps of s_in · s_w, and a tie falls either way.
            assert!(off * 20 <= fake.len(), "{off} of {}", fake.len());

            let layer =
                IntegerLinear::of(&weights[1].1, Some(&bias(&net.fc.bias)), grid(&of_fc.input))
                    .unwrap();
            let flat = relu(hidden.clone()).flatten::<2>(1, 3);
            let input = codes(flat, &quantizer(&of_fc.input));
            let accumulators = layer.accumulate(&input).unwrap();
            let output = grid(&of_fc.output);
            let integer = layer.requantize(&accumulators, output, mode).unwrap();
            let fake = codes(net.head(hidden), &quantizer(&of_fc.output));
            off_by_one(&fake, &integer);
        }
    });
}

fn byte_grid() -> Grid {
    Grid {
        scale: 0.5,
        zero_point: 10,
        quant_min: 0,
        quant_max: 255,
    }
}

#[test]
fn a_convolution_in_integers_is_the_sum_over_its_taps() {
    // One channel, kernel 2 × 1, stride 2, dilation 2, padding 1: positions −1 and 1, 1 and 3.
    let geometry = ConvGeometry {
        stride: [2, 1],
        padding: [1, 0],
        dilation: [2, 1],
        groups: 1,
    };
    let layer = IntegerConv2d::new(
        vec![3, -2],
        [1, 1, 2, 1],
        &[1.0],
        None,
        byte_grid(),
        geometry,
    )
    .unwrap();
    let (accumulators, shape) = layer.accumulate(&[11, 12, 13], [1, 1, 3, 1]).unwrap();
    assert_eq!(shape, [1, 1, 2, 1]);
    // (padding · 3 − 2 · 2), (2 · 3 − 2 · padding)
    assert_eq!(accumulators, [-4, 6]);
}

#[test]
fn a_grid_that_does_not_hold_its_zero_point_is_refused() {
    let empty = Grid {
        quant_min: 10,
        quant_max: 0,
        zero_point: 5,
        ..byte_grid()
    };
    let outside = Grid {
        zero_point: i32::MIN,
        ..byte_grid()
    };
    let layer = |grid| IntegerLinear::new(vec![1, 2], [2, 1], &[1.0], None, grid);
    let good = layer(byte_grid()).unwrap();
    for grid in [empty, outside] {
        let refused = |error: QuantError| match error {
            QuantError::InvalidConfig { field, .. } => assert_eq!(field, "zero_point"),
            other => panic!("{other}"),
        };
        refused(grid.quantize(1.0).unwrap_err());
        refused(layer(grid).unwrap_err());
        let mode = Requantization::FixedPoint;
        refused(good.requantize(&[3], grid, mode).unwrap_err());
    }
    // Far apart, as no code is: saturated arithmetic has no place here.
    assert_eq!(outside.dequantize(i32::MAX), outside.scale * 2f32.powi(32));
}

#[test]
fn numbers_that_do_not_fit_are_refused() {
    let grid = byte_grid();
    let linear = |codes: Vec<i8>, scale: &[f32], bias: Option<&[f32]>, grid: Grid| {
        IntegerLinear::new(codes, [2, 1], scale, bias, grid)
    };
    let error = |codes: Vec<i8>, scale: &[f32], bias: Option<&[f32]>, grid: Grid| {
        linear(codes, scale, bias, grid).unwrap_err()
    };
    assert_matches!(
        error(vec![1], &[1.0], None, grid),
        QuantError::LengthMismatch { .. }
    );
    assert_matches!(
        error(vec![1, 2], &[1.0; 3], None, grid),
        QuantError::LengthMismatch { .. }
    );
    assert_matches!(
        error(vec![1, 2], &[0.0], None, grid),
        QuantError::InvalidScale { .. }
    );
    let bad = Grid {
        scale: f32::NAN,
        ..grid
    };
    assert_matches!(
        error(vec![1, 2], &[1.0], None, bad),
        QuantError::InvalidScale { .. }
    );
    let bias = error(vec![1, 2], &[1e-6], Some(&[2e3]), grid);
    assert_matches!(bias, QuantError::BiasOverflow { channel: 0, .. });

    let layer = linear(vec![127, 127], &[1.0], None, grid).unwrap();
    assert_matches!(
        layer.accumulate(&[1]),
        Err(QuantError::LengthMismatch { .. })
    );
    assert_matches!(
        layer.accumulate(&[1, 256]),
        Err(QuantError::CodeOutOfRange { code: 256, .. })
    );
    let fine = Grid {
        scale: 1e-12,
        ..grid
    };
    let requantized = layer.requantize(&[1], fine, Requantization::FixedPoint);
    assert_matches!(requantized, Err(QuantError::InvalidMultiplier { .. }));

    // A bias of 2³¹ − 128 steps, the largest that F32 holds, leaves room for no product.
    let full = linear(vec![127, 127], &[1.0], Some(&[1_073_741_760.0]), grid).unwrap();
    assert!(full.accumulate(&[10, 10]).is_ok());
    assert_matches!(
        full.accumulate(&[255, 255]),
        Err(QuantError::AccumulatorOverflow { .. })
    );

    let conv =
        |geometry| IntegerConv2d::new(vec![1; 4], [1, 1, 2, 2], &[1.0], None, grid, geometry);
    let zero_stride = ConvGeometry {
        stride: [0, 1],
        ..ConvGeometry::default()
    };
    assert_matches!(
        conv(zero_stride),
        Err(QuantError::InvalidConfig {
            field: "geometry",
            ..
        })
    );
    let small = conv(ConvGeometry::default())
        .unwrap()
        .accumulate(&[10], [1, 1, 1, 1]);
    assert_matches!(small, Err(QuantError::InvalidConfig { field: "input", .. }));

    assert_matches!(grid.quantize(f32::NAN), Err(QuantError::NonFinite { .. }));
    assert_eq!(grid.quantize(f32::INFINITY).unwrap(), 255);
    assert_eq!(grid.quantize(f32::NEG_INFINITY).unwrap(), 0);
    // The inverse of its scale is infinite.
    let subnormal = Grid {
        scale: 1e-40,
        ..grid
    };
    for (steps, code) in [(0.0, 10), (3.0, 13), (-4.0, 6), (1e6, 255)] {
        assert_eq!(subnormal.quantize(steps * 1e-40).unwrap(), code);
    }
    // Half a step is a tie: to even, before the zero point.
    assert_eq!(grid.quantize(0.25).unwrap(), 10);
    assert_eq!(grid.quantize(0.75).unwrap(), 12);
}

/// A quotient would be another number than the product with the inverse, and another code at a tie.
#[test]
fn codes_do_not_depend_on_where_in_f32_a_grid_lies() {
    let grid = |scale| Grid {
        scale,
        ..byte_grid()
    };
    for step in 1..300 {
        for value in 0..20 * step {
            // Multiples of the smallest number.
            let [smallest_step, smallest_value] = [step, value].map(f32::from_bits);
            assert_eq!(
                grid(smallest_step).quantize(smallest_value).unwrap(),
                grid(step as f32).quantize(value as f32).unwrap(),
                "{value} in steps of {step}"
            );
        }
    }
}

#[test]
fn only_symmetric_weights_of_signed_integers_are_multiplied() {
    let affine = Scheme::affine(NumberFormat::uint8());
    let weight =
        QuantizedTensor::new(vec![1, 2], vec![2, 1], vec![1.0], vec![5.0], affine).unwrap();
    let error = IntegerLinear::of(&weight, None, byte_grid()).unwrap_err();
    assert_matches!(error, QuantError::UnsupportedScheme { .. });
    let vector = Scheme::symmetric(NumberFormat::int8());
    let weight = QuantizedTensor::new(vec![1, 2], vec![2], vec![1.0], vec![0.0], vector).unwrap();
    let error = IntegerLinear::of(&weight, None, byte_grid()).unwrap_err();
    assert_matches!(error, QuantError::LengthMismatch { .. });
}

#[test]
fn the_smallest_and_the_largest_number_have_multipliers() {
    let smallest = Multiplier::new(f64::from_bits(1)).unwrap();
    assert_eq!((smallest.mantissa(), smallest.exponent()), (1 << 30, -1073));
    assert_eq!(smallest.apply(i32::MAX), 0);
    // The nearest is 2³⁰ itself.
    let largest = Multiplier::new(1_073_741_824_f64.next_down()).unwrap();
    assert_eq!((largest.mantissa(), largest.exponent()), (1 << 30, 31));
    assert_eq!(largest.apply(i32::MIN), i32::MIN);
}
