//! Files of compressed models, read.

use std::collections::HashMap;

use burn_lean_reparam::sealed::unseal;
use safetensors::tensor::{Dtype, SafeTensors};

/// A file that is as it was written.
pub(crate) struct Sealed<'a> {
    tensors: SafeTensors<'a>,
    metadata: HashMap<String, String>,
}

impl<'a> Sealed<'a> {
    pub(crate) fn open(bytes: &'a [u8]) -> Result<Self, String> {
        let (tensors, metadata) = unseal(bytes)?;
        Ok(Self { tensors, metadata })
    }

    /// What the metadata say of `key`.
    pub(crate) fn said(&self, key: &str) -> Option<&str> {
        self.metadata.get(key).map(String::as_str)
    }

    pub(crate) fn names(&self) -> Vec<&str> {
        self.tensors.names()
    }

    pub(crate) fn bytes(&self, name: &str) -> Result<&'a [u8], String> {
        self.of(name, Dtype::U8)
    }

    pub(crate) fn floats(&self, name: &str) -> Result<Vec<f32>, String> {
        let words = self.of(name, Dtype::F32)?.as_chunks::<4>().0.iter();
        Ok(words.map(|word| f32::from_le_bytes(*word)).collect())
    }

    /// The sizes of a tensor that is there.
    pub(crate) fn shape(&self, name: &str) -> Option<Vec<usize>> {
        let tensor = self.tensors.tensor(name).ok()?;
        Some(tensor.shape().to_vec())
    }

    fn of(&self, name: &str, dtype: Dtype) -> Result<&'a [u8], String> {
        let tensor = self.tensors.tensor(name);
        let tensor = tensor.map_err(|error| format!("`{name}`: {error}"))?;
        match tensor.dtype() == dtype {
            true => Ok(tensor.data()),
            false => Err(format!("`{name}` is {:?}, not {dtype:?}", tensor.dtype())),
        }
    }
}
