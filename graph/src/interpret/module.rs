//! Operations of layers, and their backward operations.

use burn::backend::Dispatch;
use burn::backend::ir::ModuleOperationIr;
use burn::backend::ops::{IntTensorOps, ModuleOps, UnfoldOptions};
use burn::tensor::{DType, IntDType};

use super::shapes::Fetch;
use super::{Done, Operands};

/// A convolution: input, weight and, perhaps, bias.
macro_rules! convolution {
    ($operands:ident, $o:ident, $compute:expr) => {{
        let options = $o.options.clone().into();
        let convolve = |x, weight, bias| $compute(x, weight, bias, options);
        apply!($operands, $o, convolve, float x, float weight, optional bias)
    }};
}

/// The gradient of a convolution's input or weight.
macro_rules! convolution_backward {
    ($operands:ident, $o:ident, $compute:expr) => {{
        let options = $o.options.clone().into();
        let convolve = |x, weight, grad| $compute(x, weight, grad, options);
        apply!($operands, $o, convolve, float x, float weight, float output_grad)
    }};
}

/// The gradient of a convolution's bias.
macro_rules! bias_backward {
    ($operands:ident, $o:ident, $compute:expr) => {
        apply!($operands, $o, $compute, float x, float bias, float output_grad)
    };
}

macro_rules! avg_pool {
    ($operands:ident, $o:ident, $compute:expr) => {{
        let (size, stride, padding) = ($o.kernel_size, $o.stride, $o.padding);
        let (count, ceil) = ($o.count_include_pad, $o.ceil_mode);
        apply!($operands, $o, |x| $compute(x, size, stride, padding, count, ceil), float x)
    }};
}

macro_rules! avg_pool_backward {
    ($operands:ident, $o:ident, $compute:expr) => {{
        let (size, stride, padding) = ($o.kernel_size, $o.stride, $o.padding);
        let (count, ceil) = ($o.count_include_pad, $o.ceil_mode);
        let pool = |x, grad| $compute(x, grad, size, stride, padding, count, ceil);
        apply!($operands, $o, pool, float x, float grad)
    }};
}

macro_rules! max_pool {
    ($operands:ident, $o:ident, $compute:expr) => {{
        let (size, stride, padding) = ($o.kernel_size, $o.stride, $o.padding);
        let (dilation, ceil) = ($o.dilation, $o.ceil_mode);
        apply!($operands, $o, |x| $compute(x, size, stride, padding, dilation, ceil), float x)
    }};
}

/// Indices go through I32, which holds them: CubeCL writes that, whatever it is asked for.
macro_rules! max_pool_with_indices {
    ($operands:ident, $o:ident, $compute:expr) => {{
        let (size, stride, padding) = ($o.kernel_size, $o.stride, $o.padding);
        let (dilation, ceil) = ($o.dilation, $o.ceil_mode);
        let pool = |x| {
            let pooled = $compute(x, size, stride, padding, dilation, ceil, IntDType::I32);
            let indices = match $o.out_indices.dtype {
                DType::I32 => pooled.indices,
                other => Dispatch::int_cast(pooled.indices, other.into()),
            };
            (pooled.output, indices)
        };
        apply_with_indices!($operands, $o, pool, float x)
    }};
}

macro_rules! max_pool_backward {
    ($operands:ident, $o:ident, $compute:expr) => {{
        let (size, stride, padding) = ($o.kernel_size, $o.stride, $o.padding);
        let (dilation, ceil) = ($o.dilation, $o.ceil_mode);
        let pool = |x, indices, grad| {
            $compute(x, size, stride, padding, dilation, ceil, grad, indices).x_grad
        };
        apply!($operands, $o, pool, float x, int indices, float grad)
    }};
}

pub(super) fn run(op: &ModuleOperationIr, operands: &mut impl Operands) -> Done {
    use ModuleOperationIr::*;
    match op {
        BatchNorm(o) => {
            let norm = |x, gamma, beta, mean, variance| {
                Dispatch::batch_norm(x, gamma, beta, mean, variance, o.epsilon.elem())
            };
            apply!(operands, o, norm, float x, float gamma, float beta, float mean, float variance)
        }
        LayerNorm(o) => {
            let norm = |x, gamma, beta| Dispatch::layer_norm(x, gamma, beta, o.epsilon.elem());
            apply!(operands, o, norm, float input, float gamma, optional beta)
        }
        Embedding(o) => apply!(operands, o, Dispatch::embedding, float weights, int indices),
        EmbeddingBackward(o) => {
            let embed = Dispatch::embedding_backward;
            apply!(operands, o, embed, float weights, float out_grad, int indices)
        }
        Linear(o) => apply!(operands, o, Dispatch::linear, float x, float weight, optional bias),
        LinearXBackward(o) => {
            apply!(operands, o, Dispatch::linear_x_backward, float weight, float output_grad)
        }
        LinearWeightBackward(o) => {
            apply!(operands, o, Dispatch::linear_weight_backward, float x, float output_grad)
        }
        LinearBiasBackward(o) => {
            apply!(operands, o, Dispatch::linear_bias_backward, float output_grad)
        }
        Conv1d(o) => convolution!(operands, o, Dispatch::conv1d),
        Conv1dXBackward(o) => convolution_backward!(operands, o, Dispatch::conv1d_x_backward),
        Conv1dWeightBackward(o) => {
            convolution_backward!(operands, o, Dispatch::conv1d_weight_backward)
        }
        Conv1dBiasBackward(o) => bias_backward!(operands, o, Dispatch::conv1d_bias_backward),
        Conv2d(o) => convolution!(operands, o, Dispatch::conv2d),
        Conv2dXBackward(o) => convolution_backward!(operands, o, Dispatch::conv2d_x_backward),
        Conv2dWeightBackward(o) => {
            convolution_backward!(operands, o, Dispatch::conv2d_weight_backward)
        }
        Conv2dBiasBackward(o) => bias_backward!(operands, o, Dispatch::conv2d_bias_backward),
        Conv3d(o) => convolution!(operands, o, Dispatch::conv3d),
        Conv3dXBackward(o) => convolution_backward!(operands, o, Dispatch::conv3d_x_backward),
        Conv3dWeightBackward(o) => {
            convolution_backward!(operands, o, Dispatch::conv3d_weight_backward)
        }
        Conv3dBiasBackward(o) => bias_backward!(operands, o, Dispatch::conv3d_bias_backward),
        ConvTranspose1d(o) => convolution!(operands, o, Dispatch::conv_transpose1d),
        ConvTranspose1dWeightBackward(o) => {
            convolution_backward!(operands, o, Dispatch::conv_transpose1d_weight_backward)
        }
        ConvTranspose1dBiasBackward(o) => {
            bias_backward!(operands, o, Dispatch::conv_transpose1d_bias_backward)
        }
        ConvTranspose2d(o) => convolution!(operands, o, Dispatch::conv_transpose2d),
        ConvTranspose2dWeightBackward(o) => {
            convolution_backward!(operands, o, Dispatch::conv_transpose2d_weight_backward)
        }
        ConvTranspose2dBiasBackward(o) => {
            bias_backward!(operands, o, Dispatch::conv_transpose2d_bias_backward)
        }
        ConvTranspose3d(o) => convolution!(operands, o, Dispatch::conv_transpose3d),
        ConvTranspose3dWeightBackward(o) => {
            convolution_backward!(operands, o, Dispatch::conv_transpose3d_weight_backward)
        }
        ConvTranspose3dBiasBackward(o) => {
            bias_backward!(operands, o, Dispatch::conv_transpose3d_bias_backward)
        }
        DeformableConv2d(o) => {
            let options = o.options.clone().into();
            let convolve = |x, offset, weight, mask, bias| {
                Dispatch::deform_conv2d(x, offset, weight, mask, bias, options)
            };
            apply!(operands, o, convolve, float x, float offset, float weight, optional mask,
                optional bias)
        }
        DeformableConv2dBackward(o) => {
            let [x, offset, weight, grad] =
                [&o.x, &o.offset, &o.weight, &o.out_grad].map(|tensor| operands.float(tensor));
            let [mask, bias] = [&o.mask, &o.bias].map(|tensor| operands.optional(tensor));
            let options = o.options.clone().into();
            let grads =
                Dispatch::deform_conv2d_backward(x, offset, weight, mask, bias, grad, options);
            operands.set(&o.input_grad, grads.x_grad);
            operands.set(&o.offset_grad, grads.offset_grad);
            operands.set(&o.weight_grad, grads.weight_grad);
            for (out, grad) in [
                (&o.mask_grad, grads.mask_grad),
                (&o.bias_grad, grads.bias_grad),
            ] {
                if let (Some(out), Some(grad)) = (out, grad) {
                    operands.set(out, grad);
                }
            }
        }
        Unfold4d(o) => {
            let (stride, padding) = (o.options.stride, o.options.padding);
            let unfold = |x| {
                let options = UnfoldOptions::new(stride, padding, o.options.dilation);
                Dispatch::unfold4d(x, o.kernel_size, options)
            };
            apply!(operands, o, unfold, float x)
        }
        AvgPool1d(o) => avg_pool!(operands, o, Dispatch::avg_pool1d),
        AvgPool1dBackward(o) => avg_pool_backward!(operands, o, Dispatch::avg_pool1d_backward),
        AvgPool2d(o) => avg_pool!(operands, o, Dispatch::avg_pool2d),
        AvgPool2dBackward(o) => avg_pool_backward!(operands, o, Dispatch::avg_pool2d_backward),
        AdaptiveAvgPool1d(o) => {
            apply!(operands, o, |x| Dispatch::adaptive_avg_pool1d(x, o.output_size), float x)
        }
        AdaptiveAvgPool1dBackward(o) => {
            apply!(operands, o, Dispatch::adaptive_avg_pool1d_backward, float x, float grad)
        }
        AdaptiveAvgPool2d(o) => {
            apply!(operands, o, |x| Dispatch::adaptive_avg_pool2d(x, o.output_size), float x)
        }
        AdaptiveAvgPool2dBackward(o) => {
            apply!(operands, o, Dispatch::adaptive_avg_pool2d_backward, float x, float grad)
        }
        AdaptiveAvgPool3d(o) => {
            apply!(operands, o, |x| Dispatch::adaptive_avg_pool3d(x, o.output_size), float x)
        }
        AdaptiveAvgPool3dBackward(o) => {
            apply!(operands, o, Dispatch::adaptive_avg_pool3d_backward, float x, float grad)
        }
        MaxPool1d(o) => max_pool!(operands, o, Dispatch::max_pool1d),
        MaxPool1dWithIndices(o) => {
            max_pool_with_indices!(operands, o, Dispatch::max_pool1d_with_indices)
        }
        MaxPool1dWithIndicesBackward(o) => {
            max_pool_backward!(operands, o, Dispatch::max_pool1d_with_indices_backward)
        }
        MaxPool2d(o) => max_pool!(operands, o, Dispatch::max_pool2d),
        MaxPool2dWithIndices(o) => {
            max_pool_with_indices!(operands, o, Dispatch::max_pool2d_with_indices)
        }
        MaxPool2dWithIndicesBackward(o) => {
            max_pool_backward!(operands, o, Dispatch::max_pool2d_with_indices_backward)
        }
        Interpolate(o) => {
            let options = o.options.clone().into();
            apply!(operands, o, |x| Dispatch::interpolate(x, o.output_size, options), float x)
        }
        InterpolateBackward(o) => {
            let options = o.options.clone().into();
            let interpolate =
                |x, grad| Dispatch::interpolate_backward(x, grad, o.output_size, options);
            apply!(operands, o, interpolate, float x, float grad)
        }
        Attention(o) => {
            let [query, key, value] =
                [&o.query, &o.key, &o.value].map(|tensor| operands.float(tensor));
            let mask = o.mask.as_ref().map(|mask| operands.bool(mask));
            let bias = o.attn_bias.as_ref().map(|bias| operands.bias(bias));
            let options = o.options.clone().into();
            let out = Dispatch::attention(query, key, value, mask, bias, options);
            operands.set(&o.out, out)
        }
        CtcLoss(o) => {
            let loss = |log_probs, targets, inputs, lengths| {
                Dispatch::ctc_loss(log_probs, targets, inputs, lengths, o.blank)
            };
            apply!(operands, o, loss, float log_probs, int targets, int input_lengths,
                int target_lengths)
        }
        CtcLossBackward(_) => {
            return Err("Burn differentiates the loss itself, and few backends have its gradient");
        }
    }
    Ok(())
}
