//! Half precision on a backend that has none: values and gradients rounded to the half grid.

use burn::backend::Dispatch;
use burn::tensor::{Device, FloatDType, Tensor};
use burn_lean_graph::{BackendKind, HalfStorage};

/// Rounds a tensor of any shape to the grid of `dtype`; the gradient is rounded on its way back.
///
/// The result keeps the dtype of `x`: it is an F32 tensor whose values are halves.
pub(crate) fn round<const D: usize>(x: Tensor<D>, dtype: FloatDType) -> Tensor<D> {
    let bfloat = dtype == FloatDType::BF16;
    Tensor::from_dispatch(Dispatch::round(x.into_dispatch(), bfloat, false))
}

/// Whether this build can emulate on `device`.
pub(crate) fn is_available(device: &Device) -> bool {
    is_compiled_for(BackendKind::of(device))
}

/// The operation is compiled for the backends whose feature this crate was built with.
fn is_compiled_for(backend: BackendKind) -> bool {
    match backend {
        BackendKind::Flex => cfg!(feature = "flex"),
        BackendKind::NdArray => cfg!(feature = "ndarray"),
        BackendKind::Cube => cfg!(feature = "cube"),
        BackendKind::Capture => true,
        BackendKind::Other => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_emulated_on_backends_that_have_no_operation_for_it() {
        let is_compiled = |name| is_compiled_for(BackendKind::named(name));
        for name in ["libtorch<cuda>", "libtorch<metal>", "router<remote-0>"] {
            assert!(!is_compiled(name), "{name}");
        }
        let has_cube = cfg!(feature = "cube");
        assert_eq!(is_compiled("fusion<cubecl<wgpu<wgsl>>>"), has_cube);
        assert!(is_compiled("router<capture>"));
    }
}
