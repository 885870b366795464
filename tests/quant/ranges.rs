//! Ranges of whole tensors: of any length, of views, and where not all numbers are finite.

use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_lean::quant::{NumberFormat, Scheme, fake::Range};

use crate::support::{each_device, numbers, on_each, values};

/// The lowest and the highest number, or NaN where one is.
fn bounds(numbers: &[f32]) -> [f32; 2] {
    let bound = |of: fn(f32, f32) -> f32| numbers.iter().copied().reduce(of).unwrap();
    match numbers.iter().any(|x| x.is_nan()) {
        true => [f32::NAN; 2],
        false => [bound(f32::min), bound(f32::max)],
    }
}

/// All NaNs are alike.
fn bits(numbers: [f32; 2]) -> [u32; 2] {
    numbers.map(|x| match x.is_nan() {
        true => u32::MAX,
        false => x.to_bits(),
    })
}

fn range<const D: usize>(x: &Tensor<D>) -> [f32; 2] {
    let range = Range::of(x, &Scheme::affine(NumberFormat::uint8())).unwrap();
    [values(range.min)[0], values(range.max)[0]]
}

fn on_device(x: &[f32], device: &Device) -> Tensor<1> {
    let data = TensorData::new(x.to_vec(), [x.len()]);
    Tensor::from_data(data, (device, DType::F32))
}

#[test]
fn every_number_counts_whatever_the_length() {
    each_device(|target| {
        for count in [1, 2, 31, 16_384, 16_385, 1_000_003] {
            let plain = numbers(3, count);
            let last = |value: f32| {
                let mut x = plain.clone();
                x[count - 1] = value;
                x
            };
            let negative = plain.iter().map(|x| -x.abs() - 0.5).collect();
            for x in [
                last(7.0),
                last(-7.0),
                last(f32::NAN),
                last(-f32::NAN),
                last(f32::INFINITY),
                last(f32::NEG_INFINITY),
                vec![0.75; count],
                negative,
            ] {
                let found = range(&on_device(&x, &target.device));
                let expected = bounds(&x);
                assert_eq!(bits(found), bits(expected), "{} {count}", target.name);
            }
        }
    });
}

#[test]
fn a_view_has_the_range_of_what_it_shows() {
    on_each(|device| {
        // The ends of the whole are beyond those of the views.
        let mut all = numbers(5, 60 * 70);
        all[0] = 9.0;
        all[60 * 70 - 1] = -9.0;
        let x = on_device(&all, device).reshape([60, 70]);
        assert_eq!(range(&x.clone().transpose()), [-9.0, 9.0]);
        for view in [
            x.clone().slice([1..59, 0..70]),
            x.clone().slice([1..60, 3..60]),
            x.clone().slice([2..3, 0..70]).expand([60, 70]),
            x.transpose().slice([3..60, 1..60]),
        ] {
            let shown = bounds(&values(view.clone()));
            assert!(shown[0] > -9.0 && shown[1] < 9.0);
            assert_eq!(range(&view), shown);
        }
    });
}
