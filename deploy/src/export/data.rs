//! Tensors on the host, as ONNX stores them.

use burn::backend::ir::TensorIr;
use burn::backend::{DispatchTensor, ExecutionError, TensorMetadata};
use burn::tensor::{Bool, DType, Int, Tensor, TensorData};

use super::element;
use crate::{DeployError, ElementType};

/// A tensor on the host.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct HostTensor {
    pub(crate) shape: Vec<usize>,
    pub(crate) dtype: DType,
    data: TensorData,
}

impl HostTensor {
    pub(crate) fn from_data(data: TensorData) -> Self {
        Self {
            shape: data.shape().to_vec(),
            dtype: data.dtype(),
            data,
        }
    }

    /// Reads from the device.
    pub(crate) fn read(tensor: DispatchTensor) -> Result<Self, DeployError> {
        let data = read(tensor);
        let data = data.map_err(|error| DeployError::Run {
            reason: format!("a constant could not be read from its device: {error}"),
        })?;
        Ok(Self::from_data(data))
    }

    pub(crate) fn floats(&self) -> Vec<f32> {
        self.data.iter::<f32>().collect()
    }

    /// Type and bytes as ONNX has them.
    pub(crate) fn encode(&self, what: &str) -> Result<(ElementType, Vec<u8>), DeployError> {
        let element = element(self.dtype, what)?;
        Ok((element, self.encode_as(element)))
    }

    fn encode_as(&self, element: ElementType) -> Vec<u8> {
        match element {
            ElementType::Bool => self.data.iter::<bool>().map(u8::from).collect(),
            ElementType::F32 => collect(self.data.iter::<f32>().map(f32::to_le_bytes)),
            ElementType::I64 => collect(self.data.iter::<i64>().map(i64::to_le_bytes)),
            ElementType::I32 => collect(self.data.iter::<i32>().map(i32::to_le_bytes)),
            _ if cfg!(target_endian = "little") => self.data.as_bytes().to_vec(),
            _ => {
                let width = self.dtype.size();
                let words = self.data.as_bytes().chunks(width);
                words.flat_map(|word| word.iter().rev().copied()).collect()
            }
        }
    }
}

fn collect<const N: usize>(bytes: impl Iterator<Item = [u8; N]>) -> Vec<u8> {
    bytes.flatten().collect()
}

/// Whether ONNX has a tensor as F32.
pub(crate) fn is_f32(tensor: &TensorIr) -> bool {
    matches!(tensor.dtype, DType::F32 | DType::Flex32)
}

/// The scales of codes are F32, and so is what they are multiplied with: an error for another dtype.
pub(crate) fn check_scaled(tensor: &TensorIr, what: &str) -> Result<(), DeployError> {
    match is_f32(tensor) {
        true => Ok(()),
        false => Err(DeployError::Dtype {
            what: format!("quantized {what}"),
            dtype: format!("{:?}", tensor.dtype),
        }),
    }
}

/// A tensor of any dtype and rank, read to the host.
pub(crate) fn read(tensor: DispatchTensor) -> Result<TensorData, ExecutionError> {
    let dtype = tensor.dtype();
    // A dispatch tensor knows its shape; the rank of the wrapper is of no interest.
    if dtype.is_bool() {
        Tensor::<1, Bool>::from_dispatch(tensor).try_into_data()
    } else if dtype.is_float() {
        Tensor::<1>::from_dispatch(tensor).try_into_data()
    } else {
        Tensor::<1, Int>::from_dispatch(tensor).try_into_data()
    }
}
