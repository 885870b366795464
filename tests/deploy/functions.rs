//! Element-wise functions, comparisons, reductions, orders.

use burn::tensor::activation::{
    gelu, hard_sigmoid, leaky_relu, log_sigmoid, log_softmax, mish, quiet_softmax, relu, sigmoid,
    silu, softmax, softmin, softplus, tanh,
};
use burn::tensor::kind::Basic;
use burn::tensor::module::{adaptive_avg_pool1d, conv2d, interpolate};
use burn::tensor::ops::{ConvOptions, InterpolateMode, InterpolateOptions};
use burn::tensor::{Device, FloatDType, Int, Tensor, TensorData};
use burn_lean::deploy::{Backend, EngineConfig, Export, Form};

use crate::judge::{Nothing, operators, same};
use crate::open_axes::sequence;
use crate::support::{each_device, numbers, on_each, tensor, values};

#[test]
fn arithmetic_of_two_tensors_and_of_numbers() {
    each_device(|target| {
        let x = tensor::<3>(1, [2, 3, 4], &target.device);
        let y = tensor::<3>(2, [2, 1, 4], &target.device) + 3.0;
        same(&Nothing {}, (x, y), |_, (x, y)| {
            let sum = x.clone() + y.clone() * 2.0 - x.clone() / y.clone() + 0.5;
            let other = (sum.clone() - 1.0) / 3.0 + x.clone().neg() * y.clone().recip();
            sum * other + (x * 5.0).remainder(y.clone()) + y.remainder_scalar(0.75)
        });
    });
}

#[test]
fn stacks_of_matrices_stand_for_several() {
    each_device(|target| {
        // Three queries of each of two heads share the keys of their head, and a mix of all pairs.
        let x = tensor::<5>(5, [2, 2, 3, 4, 5], &target.device);
        let keys = tensor::<5>(6, [2, 2, 1, 5, 4], &target.device);
        same(&Nothing {}, (x.clone(), keys), |_, (x, keys)| {
            x.matmul(keys)
        });
        let others = tensor::<5>(7, [2, 1, 3, 5, 2], &target.device);
        same(&Nothing {}, (x, others), |_, (x, others)| {
            x.clone().slice([0..2, 0..2, 0..1]).matmul(others)
        });
    });
}

#[test]
fn functions_of_one_number() {
    each_device(|target| {
        let x = tensor::<2>(3, [3, 5], &target.device);
        same(&Nothing {}, x, |_, x| {
            let positive = x.clone().abs() + 0.25;
            let a = x.clone().exp() + positive.clone().log() + positive.clone().log1p();
            let b = positive.clone().sqrt() + x.clone().sin() + x.clone().cos() + x.clone().tanh();
            let c =
                (x.clone() * 3.0).floor() + (x.clone() * 3.0).ceil() + (x.clone() * 3.0).round();
            let d = (x.clone() * 3.0).trunc() + x.clone().sign() + x.clone().erf();
            let e = positive.clone().powf_scalar(1.5) + x.clone().powi_scalar(3);
            let f =
                positive.powf(x.clone()) + x.clone().clamp(-0.5, 0.25) + x.clone().clamp_min(0.1);
            a + b + c + d + e + f + x.clamp_max(-0.1)
        });
    });
}

#[test]
fn activation_functions() {
    each_device(|target| {
        let x = tensor::<3>(4, [2, 3, 4], &target.device) * 4.0;
        same(&Nothing {}, x.clone(), |_, x| {
            relu(x.clone()) + gelu(x.clone()) + sigmoid(x.clone()) + tanh(x.clone()) + silu(x)
        });
        same(&Nothing {}, x.clone(), |_, x| {
            leaky_relu(x.clone(), 0.1)
                + log_sigmoid(x.clone())
                + hard_sigmoid(x.clone(), 0.2, 0.5)
                + softplus(x.clone(), 1.0)
                + mish(x)
        });
        same(&Nothing {}, x, |_, x| {
            softmax(x.clone(), 2)
                + log_softmax(x.clone(), 1)
                + softmin(x.clone(), 2)
                + quiet_softmax(x, 2)
        });
    });
}

#[test]
fn comparisons_and_masks() {
    each_device(|target| {
        let x = tensor::<2>(5, [3, 4], &target.device);
        let y = tensor::<2>(6, [3, 4], &target.device);
        same(&Nothing {}, (x, y), |_, (x, y)| {
            let mask = x
                .clone()
                .greater(y.clone())
                .bool_or(x.clone().lower_elem(-0.5));
            let other = x
                .clone()
                .lower_equal(y.clone())
                .bool_and(y.clone().greater_equal_elem(0.0));
            let filled = x.clone().mask_fill(mask.clone(), 7.0);
            let chosen = x.mask_where(other.clone().bool_not(), y);
            let equal = filled.clone().equal_elem(7.0).float();
            filled + chosen + mask.bool_xor(other).float() * 2.0 + equal
        });
    });
}

#[test]
fn reductions_and_orders() {
    each_device(|target| {
        let x = tensor::<3>(7, [2, 3, 5], &target.device);
        same(&Nothing {}, x.clone(), |_, x| {
            let a = x.clone().sum_dim(2) + x.clone().mean_dim(2) + x.clone().max_dim(2);
            let b = x.clone().min_dim(2) + x.clone().prod_dim(2) + x.clone().var(2);
            let whole = x.clone().sum() + x.clone().mean() * 2.0 + x.clone().max() - x.min();
            a + b + whole.reshape([1, 1, 1])
        });
        same(&Nothing {}, x.clone(), |_, x| {
            let order = x.clone().argmax(2).float() + x.clone().argmin(2).float();
            let (sorted, indices) = x.clone().sort_with_indices(2);
            let top = x.clone().topk(2, 2).sum_dim(2);
            sorted + indices.float() * 2.0 + order + top + x.cumsum(1)
        });
        same(&Nothing {}, x, |_, x| {
            let any = x.clone().greater_elem(0.9).any_dim(2).float();
            let all = x.clone().greater_elem(-0.9).all_dim(2).float();
            let (max, at) = x.max_dim_with_indices(2);
            any * 2.0 + all * 4.0 + max + at.float()
        });
    });
}

/// 1 for rows and 4 for a tensor of which any number counts, 2 and 8 where all do.
fn any_and_all<K: Basic + Clone>(_: &Nothing, x: Tensor<2, K>) -> Tensor<2> {
    let whole = x.clone().any().float() * 4.0 + x.clone().all().float() * 8.0;
    let rows = x.clone().any_dim(1).float() + x.all_dim(1).float() * 2.0;
    rows + whole.reshape([1, 1])
}

/// Also what is no whole number, what is below 0, and NaN.
#[test]
fn any_and_all_count_whatever_is_not_0() {
    let rows = [
        [0.0, 0.5, -0.0],
        [0.0, 0.0, -0.0],
        [0.25, -0.5, f32::NAN],
        [-1.0, 0.0, 0.0],
        [1.0, -1.0, 2.0],
    ];
    on_each(|device| {
        let x = Tensor::<2>::from_floats(rows, device);
        let n = Tensor::<2, Int>::from_ints([[0, -1, 0], [2, -3, 1], [0, 0, 0]], device);
        for backend in [Backend::Own, Backend::Rten] {
            let config = EngineConfig::new().with_backend(Some(backend));
            let export = Export::record(&Nothing {}, &x, any_and_all).unwrap();
            let found = config.compile(export).unwrap().run(&x).unwrap();
            assert_eq!(values(found), [5.0, 4.0, 7.0, 5.0, 7.0]);
            let export = Export::record(&Nothing {}, &n, any_and_all).unwrap();
            let found = config.compile(export).unwrap().run(&n).unwrap();
            assert_eq!(values(found), [5.0, 7.0, 4.0]);
        }
    });
}

#[test]
fn integers_in_their_order_are_integers() {
    on_each(|device| {
        let n = [[5, -2, 9, 0], [7, 3, -8, 1], [-4, 6, 2, 11]];
        let n = Tensor::<2, Int>::from_ints(n, device);
        same(&Nothing {}, n, |_, n| {
            let (sorted, places) = n.clone().sort_with_indices(1);
            let part = sorted.clone().slice([0..3, 1..3]).float();
            let places = places.slice([0..3, 2..4]).float() * 100.0;
            let most = n.topk(2, 1).reshape([2, 3]).swap_dims(0, 1).float();
            let turned = sorted.reshape([2, 6]).slice([0..2, 0..3]).swap_dims(0, 1);
            part + places + most * 10_000.0 + turned.float() * 1_000.0
        });
    });
}

#[test]
fn what_follows_from_constants_alone_is_computed() {
    on_each(|device| {
        let x = tensor::<2>(4, [2, 2], device);
        same(&Nothing {}, x, |_, x: Tensor<2>| {
            let device = x.device();
            let a = Tensor::<2>::from_floats([[1.0, -2.0], [0.5, 3.0]], &device);
            let b = Tensor::<2>::from_floats([[0.25, 1.0], [-1.5, 2.0]], &device);
            let [image, kernel] = [&a, &b].map(|side| side.clone().reshape([1, 1, 2, 2]));
            let options = ConvOptions::new([1, 1], [1, 1], [1, 1], 1);
            let pixels = conv2d(image, kernel, None, options).slice([0..1, 0..1, 0..2, 0..2]);
            let products = a.clone().matmul(b.clone()) + a.clone() * b.clone() + a / b / 3.0;
            x * products + pixels.reshape([2, 2])
        });
    });
}

/// A product with the inverse is rounded twice, and infinite where the inverse is.
#[test]
fn quotients_by_a_number_are_rounded_once() {
    on_each(|device| {
        for (shape, by) in [
            ([3, 50], 3.0_f32),
            ([3, 50], -0.7),
            ([3, 50], 1e-40),
            ([3, 50], 0.25),
            ([1, 1], 3.0),
        ] {
            // So small that the largest quotient is finite.
            let x = numbers(2, shape[0] * shape[1]).into_iter();
            let x: Vec<f32> = x.map(|x| x * 1e-3).collect();
            let expected: Vec<f32> = x.iter().map(|x| x / by).collect();
            let x = Tensor::<2>::from_data(TensorData::new(x, shape), device);
            for backend in [Backend::Own, Backend::Rten] {
                let forward = move |_: &Nothing, x: Tensor<2>| x / by;
                let export = Export::record(&Nothing {}, &x, forward).unwrap();
                let config = EngineConfig::new().with_backend(Some(backend));
                let found = config.compile(export).unwrap().run(&x).unwrap();
                assert_eq!(values(found), expected, "{by} {backend}");
            }
        }
    });
}

#[test]
fn quotients_by_an_open_length_are_rounded_once() {
    let device = Device::flex();
    let forward = |_: &Nothing, x: Tensor<2>| {
        let [_, length] = x.dims();
        x / length as f32
    };
    let inputs = [[2, 5], [1, 7], [3, 11], [1, 1]].map(|shape| tensor::<2>(3, shape, &device));
    for backend in [Backend::Own, Backend::Rten] {
        let export = Export::record_open(&Nothing {}, &inputs[0], &[sequence()], forward);
        let config = EngineConfig::new().with_backend(Some(backend));
        let engine = config.compile(export.unwrap()).unwrap();
        for x in &inputs {
            let length = x.dims()[1] as f32;
            let expected = values(x.clone()).into_iter().map(|x| x / length);
            let found = values(engine.run(x).unwrap());
            assert_eq!(found, expected.collect::<Vec<f32>>(), "{backend}");
        }
    }
}

/// rten knows it by the √2, and by other numbers around it not.
#[test]
fn a_gelu_by_hand_is_a_gelu() {
    on_each(|device| {
        let x = tensor::<2>(5, [3, 40], device) * 5.0;
        same(&Nothing {}, x.clone(), |_, x| {
            let erf = (x.clone() / std::f32::consts::SQRT_2).erf();
            x * (erf + 1.0) * 0.5
        });
        same(&Nothing {}, x, |_, x| {
            let erf = (x.clone() / std::f32::consts::SQRT_2).erf();
            x * (erf + 1.5) * 0.5
        });
    });
}

/// One after the other a million additions are off by a percent.
#[test]
fn means_of_a_million_numbers_keep_their_digits() {
    const MILLION: usize = 1_000_000;
    type Mean = fn(&Nothing, Tensor<3>) -> Tensor<3>;
    let of_rows: Mean = |_, x| x.mean_dim(2);
    let of_columns: Mean = |_, x| x.mean_dim(1);
    let of_channels: Mean = |_, x| adaptive_avg_pool1d(x, 1);
    on_each(|device| {
        for (shape, mean) in [
            ([1, 2, MILLION], of_rows),
            ([1, MILLION, 2], of_columns),
            ([1, 2, MILLION], of_channels),
        ] {
            let x = Tensor::<3>::full(shape, 0.1, device);
            let export = Export::record(&Nothing {}, &x, mean).unwrap();
            let config = EngineConfig::new().with_backend(Some(Backend::Own));
            let found = config.compile(export).unwrap().run(&x).unwrap();
            assert_near!(values(found).into_iter(), [0.1_f32; 2], 1e-5);
        }
    });
}

#[test]
fn a_sum_along_no_axes_is_what_it_was() {
    let device = Device::flex();
    let x = tensor::<2>(8, [3, 4], &device);
    same(&Nothing {}, x, |_, x: Tensor<2>| {
        let none: [usize; 0] = [];
        x.sum_dims(&none) * 2.0
    });
}

#[test]
fn integers_and_casts() {
    each_device(|target| {
        let x = tensor::<2>(8, [3, 4], &target.device) * 9.0;
        same(&Nothing {}, x, |_, x: Tensor<2>| {
            let n = x.clone().int();
            let r = n.clone().remainder_scalar(4) + n.clone() * 3 - 2;
            let even = n.equal_elem(2).int() + r.clone().abs().clamp(0, 11);
            (r + even).float().cast(FloatDType::F32) + x
        });
    });
}

#[test]
fn means_of_integers_are_quotients() {
    each_device(|target| {
        let x = tensor::<2>(8, [3, 4], &target.device) * 9.0;
        same(&Nothing {}, x, |_, x: Tensor<2>| {
            let n = x.int();
            let rows = n.clone().mean_dim(1);
            (rows + n.mean_dim(0)).float().cast(FloatDType::F32)
        });
    });
}

#[test]
fn unsigned_numbers_are_written_whole() {
    let device = Device::flex();
    let bytes = |data: TensorData, number: u64| {
        let dtype = data.dtype();
        let x = Tensor::<1, Int>::from_data(data, (&device, dtype));
        let forward = |_: &Nothing, x: Tensor<1, Int>| x + number;
        let export = Export::record(&Nothing {}, &x, forward).unwrap();
        let onnx = export.to_onnx(Form::Float).unwrap().model;
        onnx.initializers()[0].bytes().to_vec()
    };
    let large = u64::MAX - 1;
    assert_eq!(bytes(TensorData::from([1_u8, 2]), 200), [200]);
    assert_eq!(
        bytes(TensorData::from([1_u16, 2]), 40_000),
        40_000_u16.to_le_bytes()
    );
    assert_eq!(
        bytes(TensorData::from([1_u32, 2]), 3 << 30),
        (3_u32 << 30).to_le_bytes()
    );
    assert_eq!(
        bytes(TensorData::from([1_u64, 2]), large),
        large.to_le_bytes()
    );
    assert_eq!(bytes(TensorData::from([1_i8, 2]), 100), [100]);
}

/// Of rten's own operators for these, one gives 1 for the sign of 0, one the last of equal numbers, one -∞.
#[test]
fn signs_of_zero_first_places_of_equal_numbers_and_far_ends() {
    on_each(|device| {
        let x = [
            [1.0, 1.0, 0.0, 1.0],
            [0.0, -0.0, 0.0, 0.0],
            [2.0, 2.0, -3.0, -3.0],
        ];
        let x = Tensor::<2>::from_floats(x, device);
        same(&Nothing {}, x.clone(), |_, x| x.sign());
        same(&Nothing {}, x.clone(), |_, x| {
            let far = (x.clone() * 1000.0).trunc() + log_sigmoid(x * -1000.0);
            far / 1000.0
        });
        for dim in 0..2 {
            same(&Nothing {}, x.clone(), move |_, x| {
                let (largest, at) = x.clone().max_dim_with_indices(dim);
                let (smallest, from) = x.clone().min_dim_with_indices(dim);
                let places = x.clone().argmax(dim) * 10 + x.argmin(dim);
                largest + smallest + (at * 100 + from * 1000 + places).float()
            });
        }
        let whole = Tensor::<2, Int>::from_ints([[3, -2, 3], [0, 0, 0]], device);
        same(&Nothing {}, whole, |_, x| {
            x.clone().sign().float() + x.argmax(1).float()
        });
    });
}

/// Of quotients that rounding makes whole numbers, too.
#[test]
fn remainders() {
    each_device(|target| {
        let of = |numbers: [f32; 8]| Tensor::<1>::from_floats(numbers, &target.device);
        let x = of([1.0, 1e8, -1.0, 7.5, -7.5, 0.0, -4.0, 3.0]);
        let y = of([0.1, 3.0, 0.1, -2.0, 2.0, 5.0, 2.0, -4.0]);
        let remainder = |_: &Nothing, (x, y): (Tensor<1>, Tensor<1>)| x.remainder(y);
        if target.name == "flex" {
            // Exactly. Other backends of Burn divide first.
            same(&Nothing {}, (x.clone(), y), remainder);
        }
        same(&Nothing {}, x, |_, x| x.remainder_scalar(2.5));
    });
}

/// Where ln(1 + x) would be 0, and where it is infinite.
#[test]
fn logarithms_near_1_and_lengths_of_all_sizes() {
    let device = Device::flex();
    let x = Tensor::<1>::from_floats([-18.0, -30.0, 1.0, 60.0], &device);
    same(&Nothing {}, x, |_, x| softplus(x, 1.0).log());
    let x = [
        -1.0,
        -0.5,
        -1e-9,
        0.0,
        3e-8,
        1e-3,
        2.0,
        1e9,
        f32::INFINITY,
        f32::NAN,
    ];
    let x = Tensor::<1>::from_floats(x, &device);
    same(&Nothing {}, x, |_, x| x.log1p() * 1e6);
    // By themselves: beside large ones any small number is close.
    let x = Tensor::<1>::from_floats([-1e-9, 0.0, 3e-8], &device);
    same(&Nothing {}, x, |_, x| x.log1p() * 1e9);
    let x = [3.0, 3e19, 3e-30, 0.0, f32::INFINITY, f32::NEG_INFINITY, 5.0];
    let y = [4.0, -4e19, 4e-30, 0.0, 1.0, f32::INFINITY, -0.0];
    let both = [x, y].map(|side| Tensor::<1>::from_floats(side, &device));
    let [x, y] = both.clone();
    same(&Nothing {}, (x, y), |_, (x, y)| x.hypot(y).log());
}

#[test]
fn interpolation() {
    let device = Device::flex();
    let x = tensor::<4>(1, [2, 2, 14, 8], &device);
    let nearest = |size: [usize; 2]| {
        same(&Nothing {}, x.clone(), move |_, x| {
            interpolate(
                x,
                InterpolateOptions::new(InterpolateMode::Nearest).with_output_size(size),
            )
        })
    };
    // Sizes whose places F32 gets right, and others.
    for (size, resizes) in [
        ([28, 16], true),
        ([7, 4], true),
        ([46, 94], false),
        ([46, 8], false),
        ([42, 24], false),
    ] {
        let exported = nearest(size);
        assert_eq!(
            operators(&exported).contains(&"Resize"),
            resizes,
            "{size:?}"
        );
    }
    for align in [false, true] {
        same(&Nothing {}, x.clone(), move |_, x| {
            let options = InterpolateOptions::new(InterpolateMode::Bilinear);
            interpolate(
                x,
                options.with_align_corners(align).with_output_size([21, 5]),
            )
        });
    }
}
