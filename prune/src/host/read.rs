//! Numbers of tensors on the host.

use burn::tensor::{FloatDType, Int, Tensor};

use crate::PruneError;

/// The values of a tensor on the host, in F32.
pub(crate) fn read<const D: usize>(tensor: Tensor<D>) -> Result<Vec<f32>, PruneError> {
    let failed = |reason: String| PruneError::Device { reason };
    let data = tensor
        .cast(FloatDType::F32)
        .try_into_data()
        .map_err(|error| failed(error.to_string()))?;
    // CubeCL casts nothing of Flex32, which it stores as F32 under its own name.
    data.try_into_vec_as::<f32>()
        .map_err(|error| failed(format!("{error:?}")))
}

/// The slices of a tensor along `dim` at these positions.
pub(crate) fn select<const D: usize>(
    tensor: Tensor<D>,
    dim: usize,
    positions: impl IntoIterator<Item = usize>,
) -> Tensor<D> {
    let positions: Vec<i64> = positions.into_iter().map(|at| at as i64).collect();
    let positions = Tensor::<1, Int>::from_data(&positions[..], &tensor.device());
    tensor.select(dim, positions)
}

/// Fails where two sizes that belong together differ.
pub(crate) fn mismatch(
    what: &'static str,
    expected: usize,
    found: usize,
) -> Result<(), PruneError> {
    match expected == found {
        true => Ok(()),
        false => Err(PruneError::Mismatch {
            what,
            expected,
            found,
        }),
    }
}
