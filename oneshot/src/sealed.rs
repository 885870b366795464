//! Safetensors files with a checksum, in the metadata: CRC-32 of the file with zeros in its place.

use std::collections::HashMap;

use safetensors::tensor::{Dtype, SafeTensors};

use crate::state::Raw;

/// What the checksum of eight hexadecimal digits follows in a header; the quotes in metadata are
/// escaped, so that it is there once.
const PLACE: &[u8] = b"\"crc32\":\"";
const DIGITS: usize = 8;

/// The bytes of a file.
pub(crate) fn seal(
    tensors: Vec<(String, Raw)>,
    mut metadata: HashMap<String, String>,
) -> Result<Vec<u8>, String> {
    metadata.insert("crc32".into(), "0".repeat(DIGITS));
    let bytes = safetensors::serialize(tensors, Some(metadata));
    let mut bytes = bytes.map_err(|error| error.to_string())?;
    let at = place(&bytes).ok_or("its header has no place for a checksum")?;
    let checksum = format!("{:08x}", crc32fast::hash(&bytes));
    bytes[at..at + DIGITS].copy_from_slice(checksum.as_bytes());
    Ok(bytes)
}

/// Where the checksum is.
fn place(bytes: &[u8]) -> Option<usize> {
    let (length, rest) = bytes.split_first_chunk::<8>()?;
    let header = rest.get(..usize::try_from(u64::from_le_bytes(*length)).ok()?)?;
    let found = header.windows(PLACE.len()).position(|part| part == PLACE)?;
    let at = found + PLACE.len();
    header.get(at..at + DIGITS).map(|_| length.len() + at)
}

/// A file that is as it was written.
pub(crate) struct Sealed<'a> {
    tensors: SafeTensors<'a>,
    metadata: HashMap<String, String>,
}

impl<'a> Sealed<'a> {
    pub(crate) fn open(bytes: &'a [u8]) -> Result<Self, String> {
        let (_, header) = SafeTensors::read_metadata(bytes).map_err(|error| error.to_string())?;
        let at = place(bytes).ok_or("it has no checksum: it is not a file of this version")?;
        let mut hasher = crc32fast::Hasher::new();
        hasher.update(&bytes[..at]);
        hasher.update(&[b'0'; DIGITS]);
        hasher.update(&bytes[at + DIGITS..]);
        let found = format!("{:08x}", hasher.finalize());
        if bytes[at..at + DIGITS] != *found.as_bytes() {
            return Err("its checksum is wrong: it is damaged".into());
        }
        let tensors = SafeTensors::deserialize(bytes).map_err(|error| error.to_string())?;
        Ok(Self {
            tensors,
            metadata: header.metadata().clone().unwrap_or_default(),
        })
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

    fn of(&self, name: &str, dtype: Dtype) -> Result<&'a [u8], String> {
        let tensor = self.tensors.tensor(name);
        let tensor = tensor.map_err(|error| format!("`{name}`: {error}"))?;
        match tensor.dtype() == dtype {
            true => Ok(tensor.data()),
            false => Err(format!("`{name}` is {:?}, not {dtype:?}", tensor.dtype())),
        }
    }
}
