//! What a file holds.

use std::collections::BTreeMap;

use burn_lean_reparam::sealed::unseal;
use safetensors::tensor::SafeTensors;

use crate::QuantError;
use crate::deploy::safetensors_file::activations::Activation;
use crate::deploy::safetensors_file::{Entry, FORMAT, FileError, VERSION};

/// Its tensors, and what its metadata says of them.
pub(super) struct Contents<'a> {
    pub(super) tensors: SafeTensors<'a>,
    /// The quantized weights.
    pub(super) entries: BTreeMap<String, Entry>,
    pub(super) activations: BTreeMap<String, Activation>,
}

impl<'a> Contents<'a> {
    pub(super) fn of(bytes: &'a [u8], file: &FileError<'_>) -> Result<Self, QuantError> {
        let (_, header) = SafeTensors::read_metadata(bytes).map_err(|error| file.read(error))?;
        let metadata = header.metadata().clone().unwrap_or_default();
        let of = |key: &str| metadata.get(key).map(String::as_str).unwrap_or_default();
        if of("format") != FORMAT {
            return Err(file.read("it is no file of a quantized model"));
        }
        let version = of("version");
        if version != VERSION {
            return Err(file.read(format!(
                "it is of version {version}, but this version reads version {VERSION}"
            )));
        }
        let (tensors, _) = unseal(bytes).map_err(|error| file.read(error))?;
        let activations =
            serde_json::from_str(of("activations")).map_err(|error| file.read(error))?;
        let entries = serde_json::from_str(of("quantized")).map_err(|error| file.read(error))?;
        Ok(Self {
            tensors,
            entries,
            activations,
        })
    }
}
