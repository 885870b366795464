//! Gradients of a convolution's kernel, one per group of examples, without patches.
//!
//! The gradient of kernel element (k, l) is a product of output gradients and an input that is
//! shifted by (k, l). In a padded image that is read as one line, a shift is an offset, if output
//! gradients lie in lines of the same length:
//!
//! ```text
//! row[o, c, k, l] = Σ_t δ[o, t] · x[c, t + k·width + l]
//! ```
//!
//! The places that padding adds to δ are zero. So k·l matrix products of views are enough, where
//! patches would copy the input k·l times. With stride s, the input is taken apart into s × s
//! images of every s-th pixel first.

use burn::tensor::Tensor;
use burn::tensor::ops::{PadMode, UnfoldOptions};

/// How examples, channels and kernel of a convolution are split.
#[derive(Debug, Clone)]
pub(crate) struct KernelShape {
    pub(crate) kernel: [usize; 2],
    pub(crate) options: UnfoldOptions,
    /// Groups of channels.
    pub(crate) split: usize,
    /// Examples in each group of them.
    pub(crate) size: usize,
}

/// Σ over the examples of each group, `[groups, outputs · channels / split · kernel]`, of `input`
/// `[examples, channels, height, width]` and `delta` `[examples, outputs, height, width]`.
pub(crate) fn kernel_rows(input: Tensor<4>, delta: Tensor<4>, shape: &KernelShape) -> Tensor<2> {
    let [_, channels, ..] = input.dims();
    let [examples, outputs, high, wide] = delta.dims();
    let groups = examples / shape.size;
    let [stride_y, stride_x] = shape.options.stride;
    let (phases, [lines, line]) = phases(input, [high, wide], shape);
    // What lies behind the last gradient of the last image is not read.
    let length = ((shape.size - 1) * lines + high - 1) * line + wide;
    let delta = delta.pad(
        [(0, lines - high), (0, line - wide)],
        PadMode::Constant(0.0),
    );
    let delta = join(delta, shape).slice([
        0..groups,
        0..shape.split,
        0..outputs / shape.split,
        0..length,
    ]);
    let [kernel_y, kernel_x] = shape.kernel;
    let mut products = Vec::with_capacity(kernel_y * kernel_x);
    for y in (0..kernel_y).map(|y| y * shape.options.dilation[0]) {
        for x in (0..kernel_x).map(|x| x * shape.options.dilation[1]) {
            let phase = &phases[(y % stride_y) * stride_x + x % stride_x];
            let offset = (y / stride_y) * line + x / stride_x;
            let shifted = phase.clone().slice([
                0..groups,
                0..shape.split,
                0..channels / shape.split,
                offset..offset + length,
            ]);
            let product = delta.clone().matmul(shifted.swap_dims(2, 3));
            products.push(product.flatten::<1>(0, 3).unsqueeze::<2>());
        }
    }
    let weights = outputs * channels / shape.split * kernel_y * kernel_x;
    let products = Tensor::cat(products, 0);
    products.swap_dims(0, 1).reshape([groups, weights])
}

/// The padded input, each pixel of a stride in an image of its own, as lines `[groups, split,
/// channels, size · pixels]`; and height and width of those images.
fn phases(
    input: Tensor<4>,
    [high, wide]: [usize; 2],
    shape: &KernelShape,
) -> (Vec<Tensor<4>>, [usize; 2]) {
    let [examples, channels, height, width] = input.dims();
    let UnfoldOptions {
        stride: [stride_y, stride_x],
        padding: [pad_y, pad_x],
        dilation,
    } = shape.options.clone();
    let reach = |outputs: usize, kernel: usize, dilation: usize, stride: usize| {
        (outputs - 1) + (kernel - 1) * dilation / stride + 1
    };
    // Rows and columns that are read, of each phase; those of the image that are not are cut off.
    let lines = reach(high, shape.kernel[0], dilation[0], stride_y);
    let line = reach(wide, shape.kernel[1], dilation[1], stride_x);
    let below = (lines * stride_y).saturating_sub(height + pad_y);
    let right = (line * stride_x).saturating_sub(width + pad_x);
    let padded = match (pad_y, below, pad_x, right) {
        (0, 0, 0, 0) => input,
        _ => input.pad([(pad_y, below), (pad_x, right)], PadMode::Constant(0.0)),
    };
    let [.., full_height, full_width] = padded.dims();
    let (used_y, used_x) = (lines * stride_y, line * stride_x);
    let padded = match (used_y, used_x) == (full_height, full_width) {
        true => padded,
        false => padded.slice([0..examples, 0..channels, 0..used_y, 0..used_x]),
    };
    if (stride_y, stride_x) == (1, 1) {
        return (vec![join(padded, shape)], [lines, line]);
    }
    let padded = padded.reshape([examples, channels, lines, stride_y, line, stride_x]);
    let padded: Tensor<6> = padded.permute([3, 5, 0, 1, 2, 4]);
    let phases = padded.reshape([stride_y * stride_x, examples, channels, lines, line]);
    let phases = phases
        .split(1, 0)
        .into_iter()
        .map(|phase| join(phase.squeeze_dim::<4>(0), shape));
    (phases.collect(), [lines, line])
}

/// `[examples, channels, height, width]` as `[groups, split, channels / split, size · pixels]`.
fn join(images: Tensor<4>, shape: &KernelShape) -> Tensor<4> {
    let [examples, channels, height, width] = images.dims();
    let KernelShape { split, size, .. } = *shape;
    let groups = examples / size;
    let pixels = height * width;
    let joined = match size {
        1 => images.reshape([groups, channels, pixels]),
        _ => images
            .reshape([groups, size, channels, pixels])
            .swap_dims(1, 2)
            .reshape([groups, channels, size * pixels]),
    };
    joined.reshape([groups, split, channels / split, size * pixels])
}
