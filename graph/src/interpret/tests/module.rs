//! Operations of layers, with options that differ by dimension, so that none can change places.

use burn::backend::ops::{
    AttentionModuleOptions, ConvOptions, ConvTransposeOptions, DeformConvOptions, InterpolateMode,
    InterpolateOptions, ModuleOps, UnfoldOptions,
};
use burn::backend::{Dispatch, DispatchTensor};
#[cfg(feature = "wgpu")]
use burn::tensor::Device;
use burn::tensor::{IntDType, TensorData};

#[cfg(feature = "wgpu")]
use super::{CAPTURE, Map, Recording, read, upload};
use super::{bools, check, floats, floats_in, indices};

#[test]
fn norms() {
    let of_channels = || [floats([2, 3, 4]), floats([3]), floats([3])];
    let [x, gamma, beta] = of_channels();
    let inputs = [
        x,
        gamma,
        beta,
        floats_in([3], -0.3, 0.3),
        floats_in([3], 0.5, 2.0),
    ];
    check!("module batch_norm", inputs => |[x, gamma, beta, mean, variance]| {
        Dispatch::batch_norm(x, gamma, beta, mean, variance, 0.01)
    });
    let of_rows = || [floats([2, 3, 4]), floats([4]), floats_in([4], -1.0, 1.0)];
    check!("module layer_norm", of_rows() => |[x, gamma, beta]| {
        Dispatch::layer_norm(x, gamma, Some(beta), 0.01)
    });
    check!("module layer_norm", of_rows() => |[x, gamma, _]| {
        Dispatch::layer_norm(x, gamma, None, 0.01)
    });
}

#[test]
fn embeddings() {
    check!("module embedding", [floats([7, 3]), indices([2, 4], 7)] => |[weights, indices]| {
        Dispatch::embedding(weights, indices)
    });
}

#[test]
fn convolutions() {
    let options = ConvOptions::new_with_padding([2], [(1, 2)], [2], 2);
    let inputs = || [floats([2, 4, 9]), floats([6, 2, 3]), floats([6])];
    check!("module conv1d", inputs() => |[x, weight, bias]| {
        Dispatch::conv1d(x, weight, Some(bias), options.clone())
    });
    check!("module conv1d", inputs() => |[x, weight, _]| {
        Dispatch::conv1d(x, weight, None, options.clone())
    });
    let options = ConvOptions::new_with_padding([2, 1], [(1, 2), (0, 1)], [1, 2], 2);
    let inputs = || [floats([2, 4, 9, 8]), floats([6, 2, 3, 2]), floats([6])];
    check!("module conv2d", inputs() => |[x, weight, bias]| {
        Dispatch::conv2d(x, weight, Some(bias), options.clone())
    });
    let options = ConvOptions::new([2, 1, 1], [1, 0, 2], [1, 2, 1], 2);
    let inputs = || {
        [
            floats([1, 4, 5, 6, 4]),
            floats([2, 2, 3, 2, 2]),
            floats([2]),
        ]
    };
    check!("module conv3d", inputs() => |[x, weight, bias]| {
        Dispatch::conv3d(x, weight, Some(bias), options.clone())
    });
}

#[test]
fn transposed_convolutions() {
    let options = ConvTransposeOptions::new([2], [1], [1], [2], 2);
    let inputs = || [floats([2, 4, 5]), floats([4, 3, 3]), floats([6])];
    check!("module conv_transpose1d", inputs() => |[x, weight, bias]| {
        Dispatch::conv_transpose1d(x, weight, Some(bias), options.clone())
    });
    let options = ConvTransposeOptions::new([2, 3], [1, 0], [1, 2], [1, 2], 2);
    let inputs = || [floats([2, 4, 5, 3]), floats([4, 3, 3, 2]), floats([6])];
    check!("module conv_transpose2d", inputs() => |[x, weight, bias]| {
        Dispatch::conv_transpose2d(x, weight, Some(bias), options.clone())
    });
    let options = ConvTransposeOptions::new([2, 1, 2], [1, 0, 1], [1, 0, 0], [1, 2, 1], 1);
    let inputs = || {
        [
            floats([1, 2, 3, 2, 3]),
            floats([2, 2, 3, 2, 2]),
            floats([2]),
        ]
    };
    check!("module conv_transpose3d", inputs() => |[x, weight, _]| {
        Dispatch::conv_transpose3d(x, weight, None, options.clone())
    });
}

#[test]
fn deformable_convolutions() {
    let options = DeformConvOptions::new([1, 2], [1, 0], [1, 1], 1, 1);
    let inputs = || {
        let (offset, mask) = (floats([1, 12, 4, 2]), floats_in([1, 6, 4, 2], 0.0, 1.0));
        [
            floats([1, 2, 4, 5]),
            offset,
            floats([4, 2, 3, 2]),
            mask,
            floats([4]),
        ]
    };
    check!("module deform_conv2d", inputs() => |[x, offset, weight, mask, bias]| {
        Dispatch::deform_conv2d(x, offset, weight, Some(mask), Some(bias), options.clone())
    });
    check!("module deform_conv2d", inputs() => |[x, offset, weight, _, bias]| {
        Dispatch::deform_conv2d(x, offset, weight, None, Some(bias), options.clone())
    });
}

#[test]
fn windows_are_unfolded() {
    let options = || UnfoldOptions::new([1, 2], [1, 0], [2, 1]);
    check!("module unfold4d", [floats([2, 3, 5, 6])] => |[x]| {
        Dispatch::unfold4d(x, [3, 2], options())
    });
}

#[test]
fn pools() {
    let line = || [floats([2, 3, 9])];
    let plane = || [floats([2, 3, 9, 8])];
    for (count, ceil) in [(true, false), (false, true)] {
        check!("module avg_pool1d", line() => |[x]| Dispatch::avg_pool1d(x, 4, 2, 1, count, ceil));
        check!("module avg_pool2d", plane() => |[x]| {
            Dispatch::avg_pool2d(x, [4, 3], [2, 1], [1, 0], count, ceil)
        });
        check!("module max_pool1d", line() => |[x]| Dispatch::max_pool1d(x, 3, 2, 1, 2, ceil));
        check!("module max_pool2d", plane() => |[x]| {
            Dispatch::max_pool2d(x, [3, 2], [2, 1], [1, 0], [1, 2], ceil)
        });
    }
    check!("module adaptive_avg_pool1d", line() => |[x]| Dispatch::adaptive_avg_pool1d(x, 4));
    check!("module adaptive_avg_pool2d", plane() => |[x]| Dispatch::adaptive_avg_pool2d(x, [4, 3]));
    check!("module adaptive_avg_pool3d", [floats([1, 2, 5, 6, 7])] => |[x]| {
        Dispatch::adaptive_avg_pool3d(x, [2, 3, 4])
    });
    for dtype in [IntDType::I32, IntDType::I64] {
        check!("module max_pool1d_with_indices", line() => |[x]| {
            let pooled = Dispatch::max_pool1d_with_indices(x, 3, 2, 1, 2, false, dtype);
            (pooled.output, pooled.indices)
        });
        check!("module max_pool2d_with_indices", plane() => |[x]| {
            let (size, stride, padding, dilation) = ([3, 2], [2, 1], [1, 0], [1, 2]);
            let pooled =
                Dispatch::max_pool2d_with_indices(x, size, stride, padding, dilation, true, dtype);
            (pooled.output, pooled.indices)
        });
    }
}

#[cfg(feature = "wgpu")]
#[test]
fn indices_of_pools_are_right_on_a_gpu_in_any_dtype() {
    let inputs = [TensorData::from([[[
        17f32, 78.0, 12.0, 73.0, 7.0, 68.0, 2.0, 63.0, 124.0,
    ]]])];
    for dtype in [IntDType::I32, IntDType::I64] {
        let recording = CAPTURE.with(|capture| {
            Recording::new(capture, &inputs, |[x]| {
                let pooled = Dispatch::max_pool1d_with_indices(x, 3, 2, 1, 2, false, dtype);
                (pooled.output, pooled.indices)
            })
        });
        let gpu = Device::wgpu(Default::default());
        let x = upload(inputs[0].clone(), &gpu);
        let indices = recording.execute(&mut Map::new(&gpu), vec![x]).remove(1);
        let indices: Vec<i64> = read(indices).iter().collect();
        assert_eq!(indices, [1, 1, 3, 5]);
    }
}

#[test]
fn interpolations() {
    use InterpolateMode::{Bicubic, Bilinear, Lanczos3, Nearest};
    for mode in [Nearest, Bilinear, Bicubic, Lanczos3] {
        for align in [true, false] {
            let options = InterpolateOptions::new(mode.clone()).with_align_corners(align);
            check!("module interpolate", [floats([1, 2, 4, 5])] => |[x]| {
                Dispatch::interpolate(x, [7, 3], options.clone())
            });
        }
    }
}

#[test]
fn attention_with_and_without_what_is_optional() {
    let inputs = || {
        let [query, key, value] = [[2, 2, 4, 3], [2, 2, 5, 3], [2, 2, 5, 2]].map(floats);
        [query, key, value, bools([2, 2, 4, 5]), floats([2, 2, 4, 5])]
    };
    let plain = || AttentionModuleOptions {
        scale: None,
        softcap: None,
        is_causal: false,
    };
    let all = || AttentionModuleOptions {
        scale: Some(0.3),
        softcap: Some(2.0),
        is_causal: false,
    };
    let causal = || AttentionModuleOptions {
        is_causal: true,
        ..plain()
    };
    type Options<'a> = &'a dyn Fn() -> AttentionModuleOptions;
    let variants: [(bool, bool, Options<'_>); 4] = [
        (false, false, &plain),
        (true, false, &all),
        (false, true, &plain),
        (true, true, &causal),
    ];
    for (masked, biased, options) in variants {
        check!("module attention", inputs() => |[query, key, value, mask, bias]| {
            let mask: Option<DispatchTensor> = masked.then_some(mask);
            Dispatch::attention(query, key, value, mask, biased.then_some(bias), options())
        });
    }
}

#[test]
fn ctc_is_decomposed_in_the_recording() {
    let lengths = || [TensorData::from([5i32, 4]), TensorData::from([2i32, 2])];
    let [inputs, targets] = lengths();
    let labels = TensorData::from([[1i32, 2], [3, 1]]);
    let log_probs = floats_in([5, 2, 4], -3.0, -0.5);
    check(
        "float cat",
        [log_probs, labels, inputs, targets],
        |[log_probs, labels, inputs, targets]| {
            Dispatch::ctc_loss(log_probs, labels, inputs, targets, 0)
        },
    );
}
