//! Quantized models in files that other tools can read.
//!
//! Burn's own record stores a quantized tensor as the device holds it: on the CPU backends a byte
//! for each code, also for codes of 4 or 2 bits. The files here have as many bits as the codes
//! have. They are [safetensors](https://github.com/huggingface/safetensors) files:
//!
//! | name | dtype, shape | content |
//! |---|---|---|
//! | `<path>.codes` | U8, `[bytes]` | codes of a quantized weight, low bits first, two's complement |
//! | `<path>.scale` | F32, as [`Scheme::group_shape`](crate::Scheme::group_shape) | one for each group |
//! | `<path>.zero_point` | F32, as the scale | affine schemes only |
//! | `<path>` | its own | every other tensor of the model |
//!
//! Of a weight in a [`Chain`](burn_lean_reparam::Chain), what acts before its quantizer is part of
//! the codes, and the quantizer's own tensors are named as if it were alone: `<path>.quant.…`.
//!
//! Quantizers are there with their settings only: what that of a weight observed or learned is the scale
//! and the zero point, and of activations the metadata says them. An activation that has no range yet has
//! what it observed in the file.
//!
//! The metadata has the keys `format` (`burn-lean-quant`), `version` (`4`), `crc32`: eight
//! hexadecimal digits, the checksum of the file with zeros in their place, `quantized`: JSON
//! of the shape, the scheme and the dtype of the values of each quantized weight, and `activations`: JSON
//! of each quantizer of an activation, by path, with its scheme, and with one scale and one zero point for
//! each group of it, or none where they are those of the values at hand:
//!
//! ```json
//! {"fc1.weight.quant.input": {"scheme": {"format": …}, "scale": [0.0078125], "zero_point": [128.0]}}
//! ```

pub(crate) mod activations;
mod attach;
mod config;
mod load;
mod save;

use std::path::Path;

use burn::tensor::{DType, Device, FloatDType, TensorData};
use burn_lean_reparam::{Files, catch_quietly};
use safetensors::tensor::Dtype;
use serde::{Deserialize, Serialize};

use crate::{QuantError, Scheme};

pub use config::{LoadConfig, load_safetensors};
pub use save::save_safetensors;
pub(crate) use save::{Stored, write};

const FORMAT: &str = "burn-lean-quant";
const VERSION: &str = "4";

/// What the file's metadata says about a quantized weight.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Entry {
    shape: Vec<usize>,
    scheme: Scheme,
    dtype: FloatDType,
}

/// The dtypes that a model's tensors may have.
pub(crate) const DTYPES: [(DType, Dtype); 12] = [
    (DType::F64, Dtype::F64),
    (DType::F32, Dtype::F32),
    (DType::F16, Dtype::F16),
    (DType::BF16, Dtype::BF16),
    (DType::I64, Dtype::I64),
    (DType::I32, Dtype::I32),
    (DType::I16, Dtype::I16),
    (DType::I8, Dtype::I8),
    (DType::U64, Dtype::U64),
    (DType::U32, Dtype::U32),
    (DType::U16, Dtype::U16),
    (DType::U8, Dtype::U8),
];

/// Names the file in errors.
pub(crate) struct FileError<'a> {
    path: &'a Path,
}

impl<'a> FileError<'a> {
    pub(crate) fn new(path: &'a Path) -> Self {
        Self { path }
    }

    pub(crate) fn read(&self, reason: impl ToString) -> QuantError {
        self.error("cannot load", reason)
    }

    pub(crate) fn write(&self, reason: impl ToString) -> QuantError {
        self.error("cannot write", reason)
    }

    fn error(&self, action: &'static str, reason: impl ToString) -> QuantError {
        QuantError::File {
            action,
            path: self.path.display().to_string(),
            reason: reason.to_string(),
        }
    }
}

/// With what of this file's reading and writing failed.
pub(crate) const FILES: Files<QuantError> =
    Files(|action, path, error| FileError::new(path).error(action, error));

/// The elements of a file's tensor for a parameter of dtype `held` on `device`: as they are, or, where the
/// device does not have their dtype, in that of the parameter if it holds each of them.
pub(crate) fn fitting(
    data: TensorData,
    name: &str,
    held: DType,
    device: &Device,
    file: &FileError<'_>,
) -> Result<TensorData, QuantError> {
    let found = data.dtype();
    let is_integer = found.is_int() || found.is_uint();
    let is_of_kind = match held {
        DType::QFloat(_) => found.is_float(),
        held if held.is_float() => found.is_float(),
        // Bools are written as integers.
        _ => is_integer,
    };
    if !is_of_kind {
        return Err(file.read(format!(
            "`{name}` is {found:?}, but the model's is {held:?}"
        )));
    }
    if held.is_bool() || device.supports_dtype(found) {
        return Ok(data);
    }
    let is_half = matches!(found, DType::F16 | DType::BF16);
    let is_wider = is_integer || is_half && matches!(held, DType::F32 | DType::F64);
    // Burn panics at an integer that does not fit.
    let converted = is_wider.then(|| catch_quietly(|| data.convert_dtype(held)));
    converted.and_then(Result::ok).ok_or_else(|| {
        file.read(format!(
            "`{name}` is {found:?}, which the device does not have, and {held:?} does not hold it: load it \
             on another device"
        ))
    })
}
