//! Safetensors files with a checksum, in the metadata: CRC-32 of the file with zeros in its place.

use std::collections::HashMap;

use safetensors::tensor::{SafeTensors, View};

/// Its key in the metadata.
pub const CHECKSUM: &str = "crc32";
/// What the checksum of eight hexadecimal digits follows in a header; the quotes in metadata are
/// escaped, so that it is there once.
const PLACE: &[u8] = b"\"crc32\":\"";
const DIGITS: usize = 8;

/// The bytes of a file.
///
/// # Errors
///
/// What the format does not know.
pub fn seal<V: View>(
    tensors: Vec<(String, V)>,
    mut metadata: HashMap<String, String>,
) -> Result<Vec<u8>, String> {
    metadata.insert(CHECKSUM.into(), "0".repeat(DIGITS));
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

/// The tensors and the metadata of a file that is as it was written.
///
/// # Errors
///
/// It is no such file, has no checksum, or another one.
pub fn unseal(bytes: &[u8]) -> Result<(SafeTensors<'_>, HashMap<String, String>), String> {
    let (_, header) = SafeTensors::read_metadata(bytes).map_err(|error| error.to_string())?;
    let at = place(bytes).ok_or("it has no checksum: it is not a file of this version")?;
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&bytes[..at]);
    hasher.update(&[b'0'; DIGITS]);
    hasher.update(&bytes[at + DIGITS..]);
    let found = format!("{:08x}", hasher.finalize());
    if bytes[at..at + DIGITS] != *found.as_bytes() {
        return Err(
            "its checksum is wrong: it is damaged, or another program wrote it anew".into(),
        );
    }
    let tensors = SafeTensors::deserialize(bytes).map_err(|error| error.to_string())?;
    Ok((tensors, header.metadata().clone().unwrap_or_default()))
}
