//! The rows of a layer's matrix product, for those who want to know what its inputs look like.

use std::cell::RefCell;

use burn::nn::PaddingConfig2d;
use burn::nn::conv::Conv2d;
use burn::tensor::Tensor;
use burn::tensor::module::unfold4d;
use burn::tensor::ops::{PadMode, UnfoldOptions};

type Watcher = Box<dyn FnMut(&str, Tensor<2>)>;

thread_local! {
    static WATCHER: RefCell<Option<Watcher>> = const { RefCell::new(None) };
}

/// Runs `model_code` and shows `watcher` the rows of every layer that is called with `forward_q` on
/// this thread, with the path of the weight's quantizer: what goes into the product, quantized if
/// it is.
pub(crate) fn watch<O>(
    watcher: impl FnMut(&str, Tensor<2>) + 'static,
    model_code: impl FnOnce() -> O,
) -> O {
    /// Puts the outer watcher back, also after a panic of the model's.
    struct Scope(Option<Watcher>);
    impl Drop for Scope {
        fn drop(&mut self) {
            WATCHER.set(self.0.take());
        }
    }
    let _scope = Scope(WATCHER.replace(Some(Box::new(watcher))));
    model_code()
}

/// Called by a layer; `rows` is evaluated if someone watches.
pub(crate) fn seen(quantizer: &str, rows: impl FnOnce() -> Option<Tensor<2>>) {
    let Some(mut watcher) = WATCHER.take() else {
        return;
    };
    if let Some(rows) = rows() {
        watcher(quantizer, rows.without_autodiff());
    }
    WATCHER.set(Some(watcher));
}

/// Of a linear layer: `[.., d_input]` to `[rows, d_input]`.
pub(crate) fn of_linear<const D: usize>(x: &Tensor<D>) -> Option<Tensor<2>> {
    let features = x.dims()[D - 1];
    Some(
        x.clone()
            .reshape([x.shape().num_elements() / features, features]),
    )
}

/// Of a convolution: `[batch, channels, height, width]` to `[patches, channels · kernel]`, in the
/// order of the weight's elements. None of a grouped one, which is several products.
pub(crate) fn of_conv2d(layer: &Conv2d, x: &Tensor<4>) -> Option<Tensor<2>> {
    if layer.groups != 1 {
        return None;
    }
    let [_, channels, height, width] = x.dims();
    let same = |axis: usize, len: usize| {
        // As Burn does: the kernel counts without its dilation, and the odd zero is at the end.
        let needed = (len.div_ceil(layer.stride[axis]).max(1) - 1) * layer.stride[axis];
        let total = (needed + layer.kernel_size[axis]).saturating_sub(len);
        (total / 2, total - total / 2)
    };
    let ((top, bottom), (left, right)) = match layer.padding {
        PaddingConfig2d::Valid => ((0, 0), (0, 0)),
        PaddingConfig2d::Same => (same(0, height), same(1, width)),
        PaddingConfig2d::Explicit(top, left, bottom, right) => ((top, bottom), (left, right)),
    };
    let padded = x
        .clone()
        .pad((left, right, top, bottom), PadMode::Constant(0.0));
    let options = UnfoldOptions::new(layer.stride, [0, 0], layer.dilation);
    // [batch, channels · kernel, positions]
    let patches = unfold4d(padded, layer.kernel_size, options);
    let features = channels * layer.kernel_size[0] * layer.kernel_size[1];
    let rows = patches.shape().num_elements() / features;
    Some(patches.swap_dims(1, 2).reshape([rows, features]))
}
