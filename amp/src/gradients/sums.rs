//! Sums of many elements.

use burn::tensor::Tensor;

use crate::device::is_cpu_backend;

/// Elements that one part of a GPU's kernel adds up.
const ROW: usize = 1024;

/// The sum of all elements, `[1]`.
///
/// Where Burn does not tune its kernels it adds up a whole tensor on four of a GPU's processors, however large
/// it is: there it is done in rows first.
pub(super) fn sum<const D: usize>(x: Tensor<D>) -> Tensor<1> {
    let elements = x.shape().num_elements();
    let rows = elements / ROW;
    if rows < ROW / 16 || is_cpu_backend(&x.device()) {
        return x.sum();
    }
    let x = x.reshape([elements]);
    let whole = x.clone().narrow(0, 0, rows * ROW).reshape([rows, ROW]);
    let whole = whole.sum_dim(1).sum();
    match elements - rows * ROW {
        0 => whole,
        rest => whole + x.narrow(0, rows * ROW, rest).sum(),
    }
}
