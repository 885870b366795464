//! Reductions of whole tensors in several steps.
//!
//! A device may give a whole axis to one of its units, and a driver may bound its loops: Mesa's software Vulkan
//! leaves one after 65,535 rounds without a word, so that the maximum of more numbers is that of the first ones.
//! In steps no axis is that long, and a GPU has more to do at once.

use burn::tensor::{Bool, Tensor};

/// Elements of an axis that is reduced, at most.
pub const AXIS: usize = 1 << 14;

/// In two steps and more; `$along` reduces the second axis.
macro_rules! in_steps {
    ($x:expr, $along:expr) => {{
        let x = $x;
        let mut count = x.shape().num_elements();
        let mut x = x.reshape([count]);
        while count > AXIS {
            let rows = count / AXIS;
            let whole = rows * AXIS;
            let first = x.clone().slice([0..whole]).reshape([rows, AXIS]);
            let mut parts = vec![$along(first).reshape([rows])];
            if whole < count {
                let rest = x.slice([whole..count]).reshape([1, count - whole]);
                parts.push($along(rest).reshape([1]));
            }
            count = rows + parts.len() - 1;
            x = Tensor::cat(parts, 0);
        }
        $along(x.reshape([1, count])).reshape([1])
    }};
}

/// The largest number of a tensor that has one, `[1]`.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_lean_reparam::reductions;
///
/// let x = Tensor::<1>::zeros([100_003], &Device::flex());
/// let x = x.slice_assign([100_002..100_003], Tensor::full([1], 3.0, &Device::flex()));
/// assert_eq!(reductions::max(x).into_scalar::<f32>(), 3.0);
/// ```
pub fn max<const D: usize>(x: Tensor<D>) -> Tensor<1> {
    match x.shape().num_elements() {
        0 => x.max(),
        _ => in_steps!(x, |x: Tensor<2>| x.max_dim(1)),
    }
}

/// Whether all are true, `[1]`; so it is of none.
pub fn all<const D: usize>(x: Tensor<D, Bool>) -> Tensor<1, Bool> {
    match x.shape().num_elements() {
        0 => x.all(),
        _ => in_steps!(x, |x: Tensor<2, Bool>| x.all_dim(1)),
    }
}

/// Whether any is true, `[1]`.
pub fn any<const D: usize>(x: Tensor<D, Bool>) -> Tensor<1, Bool> {
    match x.shape().num_elements() {
        0 => x.any(),
        _ => in_steps!(x, |x: Tensor<2, Bool>| x.any_dim(1)),
    }
}

/// The sums along an axis, which has the extent 1 then.
pub fn sum_dim<const D: usize>(x: Tensor<D>, dim: usize) -> Tensor<D> {
    in_parts(x, dim, |x| x.sum_dim(dim))
}

/// The sums of rows, `[rows]`, in another order than [`sum_dim`] and by a few kernels however long they are.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_lean_reparam::reductions;
///
/// let x = Tensor::<2>::ones([2, 100_003], &Device::flex());
/// let sums = reductions::row_sums(x).into_data();
/// assert_eq!(sums.try_to_vec::<f32>().unwrap(), [100_003.0; 2]);
/// ```
pub fn row_sums(x: Tensor<2>) -> Tensor<1> {
    let [rows, columns] = x.dims();
    if columns <= 2 * AXIS {
        return x.sum_dim(1).reshape([rows]);
    }
    let steps = columns / AXIS;
    let in_steps = |x: Tensor<2>| {
        let sums = x.reshape([rows * steps, AXIS]).sum_dim(1);
        row_sums(sums.reshape([rows, steps]))
    };
    let whole = steps * AXIS;
    if whole == columns {
        return in_steps(x);
    }
    let rest = x.clone().slice([0..rows, whole..columns]);
    in_steps(x.slice([0..rows, 0..whole])) + row_sums(rest)
}

/// The means along an axis, likewise.
pub fn mean_dim<const D: usize>(x: Tensor<D>, dim: usize) -> Tensor<D> {
    let count = x.dims()[dim];
    sum_dim(x, dim) / count as f32
}

/// The largest numbers along an axis, likewise.
pub fn max_dim<const D: usize>(x: Tensor<D>, dim: usize) -> Tensor<D> {
    in_parts(x, dim, |x| x.max_dim(dim))
}

fn in_parts<const D: usize>(
    mut x: Tensor<D>,
    dim: usize,
    reduced: impl Fn(Tensor<D>) -> Tensor<D>,
) -> Tensor<D> {
    // As few parts as can be: each is a kernel of its own.
    let most = 2 * AXIS;
    while x.dims()[dim] > most {
        let parts = x.split(most, dim).into_iter();
        x = Tensor::cat(parts.map(&reduced).collect(), dim);
    }
    reduced(x)
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, Tensor};

    use super::*;

    #[test]
    fn every_place_counts_whatever_is_left_over() {
        let device = Device::flex();
        for count in [1, AXIS - 1, AXIS, AXIS + 1, 3 * AXIS + 5, 70_000] {
            for at in [0, count / 2, count - 1] {
                let one = Tensor::<1>::full([1], 3.0, &device);
                let x = Tensor::<1>::zeros([count], &device).slice_assign([at..at + 1], one);
                let x = x.reshape([1, count]);
                assert_eq!(max(x.clone()).into_scalar::<f32>(), 3.0);
                let is_large = x.clone().greater_elem(1.0);
                assert!(any(is_large.clone()).into_scalar::<bool>());
                assert!(!all(is_large.bool_not()).into_scalar::<bool>());
                assert!(all(x.clone().lower_elem(4.0)).into_scalar::<bool>());
                assert!(!any(x.clone().greater_elem(4.0)).into_scalar::<bool>());
                assert_eq!(sum_dim(x.clone(), 1).into_scalar::<f32>(), 3.0);
                assert_eq!(max_dim(x, 1).into_scalar::<f32>(), 3.0);
            }
        }
    }

    #[test]
    fn each_row_has_the_sum_of_all_its_numbers() {
        let device = Device::flex();
        for count in [1, 2 * AXIS, 2 * AXIS + 1, 3 * AXIS, 5 * AXIS + 7] {
            for at in [0, count / 2, count - 1] {
                let number = Tensor::<2>::full([1, 1], 3.0, &device);
                let x = Tensor::<2>::zeros([3, count], &device);
                let x = x.slice_assign([1..2, at..at + 1], number);
                let sums = row_sums(x).into_data();
                assert_eq!(sums.try_to_vec::<f32>().unwrap(), [0.0, 3.0, 0.0]);
            }
        }
    }
}
