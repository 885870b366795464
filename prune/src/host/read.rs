//! Numbers of tensors on the host.

use burn::tensor::{FloatDType, Int, Tensor, TensorData, Transaction};

use crate::PruneError;

/// The values of a tensor on the host, in F32.
pub(crate) fn read<const D: usize>(tensor: Tensor<D>) -> Result<Vec<f32>, PruneError> {
    let data = tensor.cast(FloatDType::F32).try_into_data();
    numbers(data.map_err(|error| PruneError::Device {
        reason: error.to_string(),
    })?)
}

/// [`read`] of several tensors on one device, which is waited for once.
pub(crate) fn read_all<const D: usize>(
    tensors: Vec<Tensor<D>>,
) -> Result<Vec<Vec<f32>>, PruneError> {
    let add = |all: Transaction, tensor: Tensor<D>| all.register(tensor.cast(FloatDType::F32));
    let data = tensors.into_iter().fold(Transaction::default(), add);
    let data = data.try_execute().map_err(|error| PruneError::Device {
        reason: error.to_string(),
    })?;
    data.into_iter().map(numbers).collect()
}

fn numbers(data: TensorData) -> Result<Vec<f32>, PruneError> {
    // CubeCL casts nothing of Flex32, which it stores as F32 under its own name.
    data.try_into_vec_as::<f32>()
        .map_err(|error| PruneError::Device {
            reason: format!("{error:?}"),
        })
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
