//! Ratios and numbers that runtimes take otherwise, constants with axes of one.

use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::tensor::module::interpolate;
use burn::tensor::ops::{InterpolateMode, InterpolateOptions};
use burn::tensor::{Device, IndexingUpdateOp, Int, Tensor};

use crate::judge::{Nothing, operators, same};
use crate::open_axes::{runs, sequence};
use crate::support::{on_each, tensor, with_numbers};

/// Runtimes divide by F32's 1/7, which gives pixel 6 for 7.
#[test]
fn nearest_pixels_of_ratios_that_are_no_powers_of_two_are_listed() {
    let device = Device::flex();
    for (from, to, resizes) in [(14, 2, false), (224, 32, false), (8, 2, true)] {
        let x = tensor::<4>(1, [1, 1, from, 2], &device);
        let exported = same(&Nothing {}, x, move |_, x| {
            let options = InterpolateOptions::new(InterpolateMode::Nearest);
            interpolate(x, options.with_output_size([to, 2]))
        });
        let found = operators(&exported).contains(&"Resize");
        assert_eq!(found, resizes, "{from} to {to}");
    }
}

/// As numbers they would add up.
#[test]
fn bools_that_are_put_into_one_place_are_true_once() {
    let device = Device::flex();
    let x = Tensor::<1>::from_floats([-2.0, 1.0, -0.5], &device);
    let at = Tensor::<1, Int>::from_ints([1, 1, 2], &device);
    same(&Nothing {}, (x.clone(), at.clone()), |_, (x, at)| {
        let (seen, new) = (x.clone().greater_elem(0.0), x.greater_elem(-1.0));
        seen.select_assign(0, at, new, IndexingUpdateOp::Add)
            .float()
    });
    same(&Nothing {}, (x, at), |_, (x, at)| {
        let (seen, new) = (x.clone().greater_elem(0.0), x.lower_elem(2.0));
        seen.scatter(0, at, new, IndexingUpdateOp::Add).float()
    });
}

/// On `flex`. In a row that is longer than a vector rten's extremes may be without its NaN.
#[test]
fn the_place_of_an_extreme_is_that_of_the_first_nan() {
    let device = Device::flex();
    let rows = |length: usize, nans: [Option<usize>; 3]| -> Tensor<2> {
        let x = tensor::<2>(1, [3, length], &device);
        let mut data = x.into_data().try_to_vec::<f32>().unwrap();
        for (row, at) in nans.into_iter().enumerate() {
            if let Some(at) = at {
                data[row * length + at] = f32::NAN;
                data[row * length + length - 2] = f32::NAN;
            }
            data[row * length + length - 1] = if row == 0 { 9.0 } else { -9.0 };
        }
        Tensor::<1>::from_floats(&data[..], &device).reshape([3, length])
    };
    let inputs = [
        rows(40, [Some(3), None, Some(0)]),
        rows(6, [Some(2), Some(1), None]),
    ];
    let forward = |_: &Nothing, x: Tensor<2>| {
        let (_, largest) = x.clone().max_dim_with_indices(1);
        let (_, smallest) = x.clone().min_dim_with_indices(1);
        Tensor::cat(vec![x.clone().argmax(1), x.argmin(1), largest, smallest], 1).float()
    };
    for x in &inputs {
        same(&Nothing {}, x.clone(), forward);
    }
    runs(&Nothing {}, &[sequence()], &inputs, forward);
}

#[test]
fn constants_with_axes_of_one_stand_for_all_examples() {
    on_each(|device| {
        for batch in [1, 3] {
            let x = tensor::<3>(1, [batch, 3, 4], device);
            same(&Nothing {}, x, |_, x| {
                let of = |seed, shape| tensor::<3>(seed, shape, &x.device()) + 3.0;
                let (width, places, channels) =
                    (of(2, [1, 1, 4]), of(3, [1, 3, 4]), of(4, [1, 3, 1]));
                let scaled = width.clone() * x.clone() + places.clone();
                let moved = places - x.clone() * channels.clone() / width.clone();
                (scaled * moved - width) / channels.clone() + (channels + x)
            });
            // Its channels lie last.
            let conv: Conv2d = Conv2dConfig::new([2, 3], [2, 2]).init(device);
            let image = tensor::<4>(6, [batch, 2, 5, 6], device);
            same(&with_numbers(conv, 5), image, |conv, x| {
                let x = conv.forward(x);
                let of = |seed, shape| tensor::<4>(seed, shape, &x.device());
                let (channels, pixels) = (of(7, [1, 3, 1, 1]), of(8, [1, 1, 4, 5]));
                let whole = x.clone().mean_dim(2).mean_dim(3);
                (channels.clone() * x - channels.clone()) * whole * channels + pixels
            });
        }
    });
}
