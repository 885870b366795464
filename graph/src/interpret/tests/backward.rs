//! Backward operations: they are in recordings of a forward and a backward pass.

use burn::backend::ops::{
    ActivationOps, ConvOptions, ConvTransposeOptions, DeformConvOptions, InterpolateMode,
    InterpolateOptions, ModuleOps,
};
use burn::backend::{Dispatch, DispatchTensor};
use burn::tensor::IntDType;

use super::{check, floats, floats_in, indices};

#[test]
fn of_activations() {
    type Binary = fn(DispatchTensor, DispatchTensor) -> DispatchTensor;
    let functions: [(&str, Binary); 4] = [
        ("relu_backward", Dispatch::relu_backward),
        ("gelu_backward", Dispatch::gelu_backward),
        ("sigmoid_backward", Dispatch::sigmoid_backward),
        ("log_sigmoid_backward", Dispatch::log_sigmoid_backward),
    ];
    for (name, function) in functions {
        let inputs = [floats_in([4, 3], 0.1, 0.9), floats([4, 3])];
        check(&format!("activation {name}"), inputs, |[x, grad]| {
            function(x, grad)
        });
    }
}

#[test]
fn of_embeddings() {
    let inputs = [floats([7, 3]), floats([2, 4, 3]), indices([2, 4], 7)];
    check!("module embedding_backward", inputs => |[weights, grad, indices]| {
        Dispatch::embedding_backward(weights, grad, indices)
    });
}

#[test]
fn of_convolutions() {
    let options = ConvOptions::new([2], [1], [2], 2);
    let inputs = || [floats([2, 4, 9]), floats([6, 2, 3]), floats([2, 6, 4])];
    check!("module conv1d_x_backward", inputs() => |[x, weight, grad]| {
        Dispatch::conv1d_x_backward(x, weight, grad, options.clone())
    });
    check!("module conv1d_weight_backward", inputs() => |[x, weight, grad]| {
        Dispatch::conv1d_weight_backward(x, weight, grad, options.clone())
    });
    let inputs = [floats([2, 4, 9]), floats([6]), floats([2, 6, 4])];
    check!("module conv1d_bias_backward", inputs => |[x, bias, grad]| {
        Dispatch::conv1d_bias_backward(x, bias, grad)
    });
    let options = ConvOptions::new([2, 1], [1, 0], [1, 2], 2);
    let inputs = || {
        [
            floats([2, 4, 9, 8]),
            floats([6, 2, 3, 2]),
            floats([2, 6, 5, 6]),
        ]
    };
    check!("module conv2d_x_backward", inputs() => |[x, weight, grad]| {
        Dispatch::conv2d_x_backward(x, weight, grad, options.clone())
    });
    check!("module conv2d_weight_backward", inputs() => |[x, weight, grad]| {
        Dispatch::conv2d_weight_backward(x, weight, grad, options.clone())
    });
    let inputs = [floats([2, 4, 9, 8]), floats([6]), floats([2, 6, 5, 6])];
    check!("module conv2d_bias_backward", inputs => |[x, bias, grad]| {
        Dispatch::conv2d_bias_backward(x, bias, grad)
    });
    let options = ConvOptions::new([2, 1, 1], [1, 0, 2], [1, 2, 1], 2);
    let inputs = || {
        [
            floats([1, 4, 5, 6, 4]),
            floats([2, 2, 3, 2, 2]),
            floats([1, 2, 3, 4, 7]),
        ]
    };
    check!("module conv3d_x_backward", inputs() => |[x, weight, grad]| {
        Dispatch::conv3d_x_backward(x, weight, grad, options.clone())
    });
    check!("module conv3d_weight_backward", inputs() => |[x, weight, grad]| {
        Dispatch::conv3d_weight_backward(x, weight, grad, options.clone())
    });
    let inputs = [
        floats([1, 4, 5, 6, 4]),
        floats([2]),
        floats([1, 2, 3, 4, 7]),
    ];
    check!("module conv3d_bias_backward", inputs => |[x, bias, grad]| {
        Dispatch::conv3d_bias_backward(x, bias, grad)
    });
}

#[test]
fn of_transposed_convolutions() {
    let options = ConvTransposeOptions::new([2], [1], [1], [2], 2);
    let inputs = [floats([2, 4, 5]), floats([4, 3, 3]), floats([2, 6, 12])];
    check!("module conv_transpose1d_weight_backward", inputs => |[x, weight, grad]| {
        Dispatch::conv_transpose1d_weight_backward(x, weight, grad, options.clone())
    });
    let inputs = [floats([2, 4, 5]), floats([6]), floats([2, 6, 12])];
    check!("module conv_transpose1d_bias_backward", inputs => |[x, bias, grad]| {
        Dispatch::conv_transpose1d_bias_backward(x, bias, grad)
    });
    let options = ConvTransposeOptions::new([2, 3], [1, 0], [1, 2], [1, 2], 2);
    let inputs = [
        floats([2, 4, 5, 3]),
        floats([4, 3, 3, 2]),
        floats([2, 6, 10, 11]),
    ];
    check!("module conv_transpose2d_weight_backward", inputs => |[x, weight, grad]| {
        Dispatch::conv_transpose2d_weight_backward(x, weight, grad, options.clone())
    });
    let inputs = [floats([2, 4, 5, 3]), floats([6]), floats([2, 6, 10, 11])];
    check!("module conv_transpose2d_bias_backward", inputs => |[x, bias, grad]| {
        Dispatch::conv_transpose2d_bias_backward(x, bias, grad)
    });
    let options = ConvTransposeOptions::new([2, 1, 2], [1, 0, 1], [1, 0, 0], [1, 1, 1], 1);
    let inputs = [
        floats([1, 2, 3, 2, 3]),
        floats([2, 2, 3, 2, 2]),
        floats([1, 2, 6, 3, 4]),
    ];
    check!("module conv_transpose3d_weight_backward", inputs => |[x, weight, grad]| {
        Dispatch::conv_transpose3d_weight_backward(x, weight, grad, options.clone())
    });
    let inputs = [
        floats([1, 2, 3, 2, 3]),
        floats([2]),
        floats([1, 2, 6, 3, 4]),
    ];
    check!("module conv_transpose3d_bias_backward", inputs => |[x, bias, grad]| {
        Dispatch::conv_transpose3d_bias_backward(x, bias, grad)
    });
}

#[test]
fn of_deformable_convolutions() {
    let options = DeformConvOptions::new([1, 2], [1, 0], [1, 1], 1, 1);
    let inputs = || {
        let (offset, mask) = (floats([1, 12, 4, 2]), floats_in([1, 6, 4, 2], 0.0, 1.0));
        let (weight, grad) = (floats([4, 2, 3, 2]), floats([1, 4, 4, 2]));
        [
            floats([1, 2, 4, 5]),
            offset,
            weight,
            mask,
            floats([4]),
            grad,
        ]
    };
    for optional in [true, false] {
        check(
            "module deform_conv2d_backward",
            inputs(),
            |[x, offset, weight, mask, bias, grad]| {
                let (mask, bias) = (optional.then_some(mask), optional.then_some(bias));
                let options = options.clone();
                let grads =
                    Dispatch::deform_conv2d_backward(x, offset, weight, mask, bias, grad, options);
                let mut all = vec![grads.x_grad, grads.offset_grad, grads.weight_grad];
                all.extend(grads.mask_grad);
                all.extend(grads.bias_grad);
                all
            },
        );
    }
}

#[test]
fn of_pools() {
    for (count, ceil) in [(true, false), (false, true)] {
        let inputs = [floats([2, 3, 9]), floats([2, 3, 4 + usize::from(ceil)])];
        check!("module avg_pool1d_backward", inputs => |[x, grad]| {
            Dispatch::avg_pool1d_backward(x, grad, 4, 2, 1, count, ceil)
        });
    }
    let inputs = [floats([2, 3, 9, 8]), floats([2, 3, 4, 6])];
    check!("module avg_pool2d_backward", inputs => |[x, grad]| {
        Dispatch::avg_pool2d_backward(x, grad, [4, 3], [2, 1], [1, 0], false, false)
    });
    check(
        "module adaptive_avg_pool1d_backward",
        [floats([2, 3, 9]), floats([2, 3, 4])],
        |[x, g]| Dispatch::adaptive_avg_pool1d_backward(x, g),
    );
    let inputs = [floats([2, 3, 9, 8]), floats([2, 3, 4, 3])];
    check!("module adaptive_avg_pool2d_backward", inputs => |[x, grad]| {
        Dispatch::adaptive_avg_pool2d_backward(x, grad)
    });
    let inputs = [floats([1, 2, 5, 6, 7]), floats([1, 2, 2, 3, 4])];
    check!("module adaptive_avg_pool3d_backward", inputs => |[x, grad]| {
        Dispatch::adaptive_avg_pool3d_backward(x, grad)
    });
    let inputs = [floats([2, 3, 9]), floats([2, 3, 4])];
    check!("module max_pool1d_with_indices_backward", inputs => |[x, grad]| {
        let indices = IntDType::I32;
        let pooled = Dispatch::max_pool1d_with_indices(x.clone(), 3, 2, 1, 2, false, indices);
        let indices = pooled.indices;
        Dispatch::max_pool1d_with_indices_backward(x, 3, 2, 1, 2, false, grad, indices).x_grad
    });
    let inputs = [floats([2, 3, 9, 8]), floats([2, 3, 5, 6])];
    check!("module max_pool2d_with_indices_backward", inputs => |[x, grad]| {
        let (size, stride, padding, dilation) = ([3, 2], [2, 1], [1, 0], [1, 2]);
        let pooled = Dispatch::max_pool2d_with_indices(
            x.clone(),
            size,
            stride,
            padding,
            dilation,
            false,
            IntDType::I32,
        );
        let grads = Dispatch::max_pool2d_with_indices_backward(
            x,
            size,
            stride,
            padding,
            dilation,
            false,
            grad,
            pooled.indices,
        );
        grads.x_grad
    });
}

#[test]
fn of_interpolations() {
    let options = InterpolateOptions::new(InterpolateMode::Nearest).with_align_corners(false);
    let inputs = [floats([1, 2, 4, 5]), floats([1, 2, 7, 3])];
    check!("module interpolate_backward", inputs => |[x, grad]| {
        Dispatch::interpolate_backward(x, grad, [7, 3], options.clone())
    });
}
