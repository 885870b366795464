//! Numbers on a grid of their own for each token. For the crates of this project.

use burn::tensor::{DType, Tensor};

/// Codes of `x`, whole numbers of `bits` bits from −(2ᵇ⁻¹ − 1) on, and the scale of each row along
/// the last axis, `max|x| / (2ᵇ⁻¹ − 1)` in F32; 1 for a row of zeros, and of numbers so small that their scale
/// is no normal number.
pub fn codes<const D: usize>(x: Tensor<D>, bits: u8) -> (Tensor<D>, Tensor<D>) {
    let most = ((1u32 << (bits - 1)) - 1) as f32;
    let x = x.cast(DType::F32);
    let largest = x.clone().abs().max_dim(D - 1);
    let scales = largest / most;
    let nothing = scales.clone().lower_elem(f32::MIN_POSITIVE);
    let scales = scales.mask_fill(nothing, 1.0);
    ((x / scales.clone()).round(), scales)
}

/// `x` at the nearest points of its rows' grids, in its own dtype.
pub fn rounded<const D: usize>(x: Tensor<D>, bits: u8) -> Tensor<D> {
    let dtype = x.dtype();
    let (codes, scales) = codes(x, bits);
    (codes * scales).cast(dtype)
}
