//! Tensors on the host, as ONNX stores them.

use std::borrow::Cow;

use burn::backend::ir::TensorIr;
use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::{DType, TensorData};
use burn_lean_graph::host;

use crate::{DeployError, ElementType};

/// A tensor whose values are read at every use: of weights that are written as codes, never.
#[derive(Debug, Clone)]
pub(crate) struct HostTensor {
    pub(crate) shape: Vec<usize>,
    pub(crate) dtype: DType,
    values: Values,
}

#[derive(Debug, Clone)]
enum Values {
    Host(TensorData),
    Device(Box<DispatchTensor>),
}

impl HostTensor {
    pub(crate) fn from_data(data: TensorData) -> Self {
        Self {
            shape: data.shape().to_vec(),
            dtype: data.dtype(),
            values: Values::Host(data),
        }
    }

    pub(crate) fn of(tensor: DispatchTensor) -> Self {
        Self {
            shape: tensor.shape().to_vec(),
            dtype: tensor.dtype(),
            values: Values::Device(Box::new(tensor)),
        }
    }

    fn read(&self) -> Result<Cow<'_, TensorData>, DeployError> {
        match &self.values {
            Values::Host(data) => Ok(Cow::Borrowed(data)),
            Values::Device(tensor) => match host(tensor.as_ref().clone()) {
                Ok(data) => Ok(Cow::Owned(data)),
                Err(error) => Err(DeployError::Run {
                    reason: format!("a constant could not be read from its device: {error}"),
                }),
            },
        }
    }

    pub(crate) fn floats(&self) -> Result<Vec<f32>, DeployError> {
        Ok(self.read()?.iter::<f32>().collect())
    }

    /// Its bytes as ONNX has them.
    pub(crate) fn encode(&self, element: ElementType) -> Result<Vec<u8>, DeployError> {
        Ok(encode(&*self.read()?, element))
    }
}

fn encode(data: &TensorData, element: ElementType) -> Vec<u8> {
    match element {
        ElementType::Bool => data.iter::<bool>().map(u8::from).collect(),
        ElementType::F32 if data.dtype() != DType::F32 => {
            data.iter::<f32>().flat_map(f32::to_le_bytes).collect()
        }
        ElementType::I32 if data.dtype() != DType::I32 => {
            data.iter::<i32>().flat_map(i32::to_le_bytes).collect()
        }
        _ if cfg!(target_endian = "little") => data.as_bytes().to_vec(),
        _ => {
            let words = data.as_bytes().chunks(data.dtype().size());
            words.flat_map(|word| word.iter().rev().copied()).collect()
        }
    }
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
