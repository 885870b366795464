//! Gradients through an execution, against those through the same calls on an autodiff device.

use burn::backend::ops::{
    ActivationOps, AttentionModuleOptions, ConvOptions, FloatTensorOps, ModuleOps,
};
use burn::backend::{AutodiffBackend, Dispatch, DispatchTensor, Shape, Slice, TensorMetadata};
use burn::tensor::{Device, IndexingUpdateOp, TensorData};

use super::{CAPTURE, Map, Recording, bools, floats, floats_in, indices, read, upload};

fn leaf(data: &TensorData, device: &Device) -> DispatchTensor {
    let tensor = upload(data.clone(), device);
    match data.dtype().is_float() {
        true => Dispatch::float_set_require_grad(tensor, true),
        false => tensor,
    }
}

/// The gradients of a weighted sum of the output's squares, for each float leaf.
fn gradients(output: DispatchTensor, leaves: &[DispatchTensor]) -> Vec<TensorData> {
    let device = output.device();
    let count = output.shape().num_elements();
    let weights = Dispatch::float_from_data(floats_in([count], 0.5, 1.5), &device);
    let weights = Dispatch::float_reshape(weights, output.shape());
    let squares = Dispatch::float_mul(output.clone(), output);
    let grads = Dispatch::backward(Dispatch::float_sum(Dispatch::float_mul(squares, weights)));
    let floats = leaves.iter().filter(|leaf| leaf.dtype().is_float());
    floats
        .map(|leaf| read(Dispatch::grad(leaf, &grads).expect("a gradient")))
        .collect()
}

#[track_caller]
fn check<const N: usize>(
    expected: &str,
    inputs: [TensorData; N],
    compute: impl Fn([DispatchTensor; N]) -> DispatchTensor,
) {
    let recording = CAPTURE.with(|capture| Recording::new(capture, &inputs, &compute));
    let names = recording.names();
    assert!(
        names.contains(expected),
        "{expected} is not among {names:?}"
    );
    let autodiff = Device::flex().autodiff();
    let leaves = inputs.each_ref().map(|data| leaf(data, &autodiff));
    let got = recording
        .execute(&mut Map::new(&autodiff), leaves.to_vec())
        .remove(0);
    let got = gradients(got, &leaves);
    let leaves = inputs.each_ref().map(|data| leaf(data, &autodiff));
    let want = gradients(compute(leaves.clone()), &leaves);
    assert_eq!(got, want, "{expected}");
    for gradient in got {
        let any = gradient.iter::<f32>().any(|value| value != 0.0);
        assert!(any, "a gradient through {expected} is zero");
    }
}

#[test]
fn through_arithmetic() {
    let pair = || [floats([4, 3]), floats_in([4, 3], 0.3, 1.7)];
    check!("float add", pair() => |[x, y]| Dispatch::float_add(x, y));
    check!("float mul", pair() => |[x, y]| Dispatch::float_mul(x, y));
    check!("float div", pair() => |[x, y]| Dispatch::float_div(x, y));
    check!("float powf", pair() => |[x, y]| Dispatch::float_powf(y, x));
    check!("float mul_scalar", [floats([4, 3])] => |[x]| {
        Dispatch::float_mul_scalar(x, 0.3f64.into())
    });
    check!("float clamp", [floats([4, 3])] => |[x]| {
        Dispatch::float_clamp(x, (-0.7f64).into(), 0.7f64.into())
    });
}

#[test]
fn through_a_tensor_that_is_read_twice() {
    check!("float matmul", [floats([3, 3])] => |[x]| {
        let y = Dispatch::float_mul(x.clone(), x.clone());
        Dispatch::float_matmul(y.clone(), Dispatch::float_add(y, x))
    });
}

#[test]
fn through_functions() {
    check!("float exp", [floats([4, 3])] => |[x]| Dispatch::float_exp(x));
    check!("float log", [floats_in([4, 3], 0.3, 3.0)] => |[x]| Dispatch::float_log(x));
    check!("float tanh", [floats([4, 3])] => |[x]| Dispatch::float_tanh(x));
    check!("activation gelu", [floats([4, 3])] => |[x]| Dispatch::gelu(x));
    check!("activation softmax", [floats([4, 3])] => |[x]| Dispatch::softmax(x, 1));
    check!("activation log_softmax", [floats([4, 3])] => |[x]| Dispatch::log_softmax(x, 0));
}

#[test]
fn through_reductions() {
    check!("float sum_dim", [floats([4, 3])] => |[x]| Dispatch::float_sum_dim(x, 1));
    check!("float mean_dim", [floats([4, 3])] => |[x]| Dispatch::float_mean_dim(x, 0));
    check!("float max_dim", [floats([4, 3])] => |[x]| Dispatch::float_max_dim(x, 1));
    check!("float cumsum", [floats([4, 3])] => |[x]| Dispatch::float_cumsum(x, 1));
}

#[test]
fn through_moves() {
    check!("float reshape", [floats([4, 3])] => |[x]| {
        Dispatch::float_reshape(x, Shape::new([6, 2]))
    });
    check!("float expand", [floats([1, 3])] => |[x]| Dispatch::float_expand(x, Shape::new([4, 3])));
    check!("float slice", [floats([4, 3])] => |[x]| {
        Dispatch::float_slice(x, &[Slice::new(0, None, 2), Slice::new(1, None, 1)])
    });
    check!("float cat", [floats([4, 3]), floats([2, 3])] => |[x, y]| {
        Dispatch::float_cat(vec![x, y], 0)
    });
    check!("float gather", [floats([4, 3]), indices([4, 2], 3)] => |[x, i]| {
        Dispatch::float_gather(1, x, i)
    });
    check(
        "float scatter",
        [floats([4, 3]), indices([2, 3], 4), floats([2, 3])],
        |[x, i, value]| Dispatch::float_scatter(0, x, i, value, IndexingUpdateOp::Add),
    );
    check!("float mask_fill", [floats([4, 3]), bools([4, 3])] => |[x, mask]| {
        Dispatch::float_mask_fill(x, mask, 0.3f64.into())
    });
    check!("float mask_where", [floats([4, 3]), bools([4, 3]), floats([4, 3])] => |[x, mask, y]| {
        Dispatch::float_mask_where(x, mask, y)
    });
}

#[test]
fn through_layers() {
    let options = ConvOptions::new([2, 1], [1, 0], [1, 2], 2);
    let inputs = [floats([2, 4, 9, 8]), floats([6, 2, 3, 2]), floats([6])];
    check!("module conv2d", inputs => |[x, weight, bias]| {
        Dispatch::conv2d(x, weight, Some(bias), options.clone())
    });
    let inputs = [floats([2, 3, 4]), floats([4]), floats_in([4], -1.0, 1.0)];
    check!("module layer_norm", inputs => |[x, gamma, beta]| {
        Dispatch::layer_norm(x, gamma, Some(beta), 0.01)
    });
    check!("module embedding", [floats([5, 3]), indices([2, 4], 5)] => |[weights, indices]| {
        Dispatch::embedding(weights, indices)
    });
    check!("module max_pool2d", [floats([2, 3, 6, 7])] => |[x]| {
        Dispatch::max_pool2d(x, [3, 2], [2, 1], [1, 0], [1, 2], false)
    });
    let [query, key, value] = [[2, 2, 4, 3], [2, 2, 5, 3], [2, 2, 5, 2]].map(floats);
    check!("module attention", [query, key, value] => |[query, key, value]| {
        let options = AttentionModuleOptions {
            scale: Some(0.3),
            softcap: None,
            is_causal: true,
        };
        Dispatch::attention(query, key, value, None, None, options)
    });
}
