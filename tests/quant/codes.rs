//! Every code of every number format.

use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_lean::quant::{
    Granularity, Mapping, NumberFormat, QuantParams, Scheme,
    fake::{from_codes, to_codes},
    fake_quantize,
};

use crate::support::{each_device, values};

const FLOATS: [NumberFormat; 3] = [NumberFormat::E4M3, NumberFormat::E5M2, NumberFormat::E2M1];

fn integers() -> impl Iterator<Item = NumberFormat> {
    (2..=8).flat_map(|bits| {
        [
            NumberFormat::int(bits),
            NumberFormat::int(bits).narrow(),
            NumberFormat::uint(bits),
        ]
    })
}

/// The bit patterns of a float format that stand for finite numbers.
fn patterns(format: NumberFormat) -> Vec<u8> {
    let all = 0..=(u8::MAX >> (8 - format.bits()));
    all.filter(|bits| format.from_bits(*bits).is_finite())
        .collect()
}

fn bits(values: Vec<f32>) -> Vec<u32> {
    values.into_iter().map(f32::to_bits).collect()
}

/// Scales that are powers of two, awkward, tiny and huge.
const SCALES: [f32; 5] = [1.0, 0.3, 0.0123, 1.2e-7, 1e30];

/// Asserts that all codes, with each of the scales and zero points, return to themselves.
fn return_to_themselves(format: NumberFormat, codes: &[i32], zeros: &[f32], device: &Device) {
    let scheme = Scheme {
        mapping: match format.is_int() {
            true => Mapping::Affine,
            false => Mapping::Symmetric,
        },
        ..Scheme::symmetric(format).with_granularity(Granularity::PerChannel { axis: 0 })
    };
    let groups = SCALES.len() * zeros.len();
    let qparams = |value: &dyn Fn(usize) -> f32| {
        let values: Vec<f32> = (0..groups).map(value).collect();
        Tensor::<1>::from_data(TensorData::new(values, [groups]), device)
    };
    let qparams = QuantParams {
        scale: qparams(&|group| SCALES[group % SCALES.len()]),
        zero_point: qparams(&|group| zeros[group / SCALES.len()]),
    };
    let all = TensorData::new(codes.repeat(groups), [groups, codes.len()]);
    let all = Tensor::<2, Int>::from_data(all, device);

    let x = from_codes(all, &qparams, &scheme);
    let found = to_codes(x.clone(), &qparams, &scheme).into_data();
    let found: Vec<i32> = found.iter::<i32>().collect();
    assert_eq!(found, codes.repeat(groups), "{format} on {device:?}");
    let y = fake_quantize(x.clone(), &qparams, &scheme);
    assert_eq!(bits(values(y)), bits(values(x)), "{format} on {device:?}");
}

#[test]
fn every_integer_code_returns_to_itself() {
    each_device(|target| {
        for format in integers() {
            let (min, max) = (format.quant_min(), format.quant_max());
            let codes: Vec<i32> = (min as i32..=max as i32).collect();
            let middle = ((min + max) / 2.0).floor();
            return_to_themselves(format, &codes, &[min, middle, 0.0, max], &target.device);
        }
    });
}

#[test]
fn every_float_code_returns_to_itself() {
    each_device(|target| {
        for format in FLOATS {
            let codes = patterns(format).into_iter().map(i32::from);
            let codes: Vec<i32> = codes.collect();
            return_to_themselves(format, &codes, &[0.0], &target.device);
        }
    });
}

#[test]
fn bit_patterns_of_all_formats_return_to_themselves() {
    for format in FLOATS {
        for pattern in patterns(format) {
            let number = format.from_bits(pattern);
            assert_eq!(format.to_bits(number), pattern, "{format} {number}");
            assert_eq!(format.round(number).to_bits(), number.to_bits(), "{format}");
        }
    }
    for format in integers() {
        for number in format.quant_min() as i32..=format.quant_max() as i32 {
            let number = number as f32;
            assert_eq!(format.from_bits(format.to_bits(number)), number, "{format}");
            assert_eq!(format.round(number), number, "{format}");
        }
    }
}

/// The published tables: the largest numbers, the smallest ones, how many there are.
#[test]
fn float_formats_have_the_published_numbers() {
    assert_eq!(NumberFormat::E4M3.from_bits(0x7e), 448.0);
    assert_eq!(NumberFormat::E4M3.from_bits(0x08), 2f32.powi(-6));
    assert_eq!(NumberFormat::E4M3.from_bits(0x01), 2f32.powi(-9));
    assert!(NumberFormat::E4M3.from_bits(0x7f).is_nan());
    assert_eq!(NumberFormat::E5M2.from_bits(0x7b), 57344.0);
    assert_eq!(NumberFormat::E5M2.from_bits(0x04), 2f32.powi(-14));
    assert_eq!(NumberFormat::E5M2.from_bits(0x01), 2f32.powi(-16));
    assert_eq!(NumberFormat::E5M2.from_bits(0xfc), f32::NEG_INFINITY);
    assert!(NumberFormat::E5M2.from_bits(0x7d).is_nan());
    let e2m1 = (0..16).map(|bits| NumberFormat::E2M1.from_bits(bits));
    let positive = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let expected: Vec<f32> = [positive, positive.map(|x| -x)].concat();
    assert_eq!(e2m1.collect::<Vec<f32>>(), expected);
    assert_eq!(patterns(NumberFormat::E4M3).len(), 254);
    assert_eq!(patterns(NumberFormat::E5M2).len(), 248);
}

/// Between two neighbours: the nearer one, and at the middle the one with an even code.
#[test]
fn numbers_between_two_codes_round_to_the_nearer_and_ties_to_even() {
    for format in FLOATS {
        // Positive ones, in order.
        let mut patterns = patterns(format);
        patterns.retain(|bits| bits >> (format.bits() - 1) == 0);
        for pair in patterns.windows(2) {
            let [low, high] = [pair[0], pair[1]].map(|bits| format.from_bits(bits));
            let even = if pair[0] % 2 == 0 { low } else { high };
            let middle = (low + high) / 2.0;
            for sign in [1.0, -1.0] {
                assert_eq!(
                    format.round(sign * middle),
                    sign * even,
                    "{format} {middle}"
                );
                let below = sign * middle.next_down();
                assert_eq!(format.round(below), sign * low, "{format} {middle}");
                let above = sign * middle.next_up();
                assert_eq!(format.round(above), sign * high, "{format} {middle}");
            }
        }
    }
}

#[test]
fn nan_has_the_code_of_zero() {
    each_device(|target| {
        let x = || Tensor::<1>::from_floats([f32::NAN, 1.0], &target.device);
        for (scheme, zero, expected) in [
            (Scheme::affine(NumberFormat::uint8()), 7.0, [7, 8]),
            (Scheme::symmetric(NumberFormat::E4M3), 0.0, [0, 0x38]),
        ] {
            let qparams = QuantParams {
                scale: Tensor::from_floats([1.0], &target.device),
                zero_point: Tensor::from_floats([zero], &target.device),
            };
            let codes = to_codes(x(), &qparams, &scheme).into_data();
            assert_eq!(codes.iter::<i32>().collect::<Vec<_>>(), expected);
        }
    });
}
