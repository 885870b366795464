//! The bytes around encoded tensors.
//!
//! ```text
//! "BLSPARSE"  version u32  length u64  header length u64  header  tensors …  crc32 u32
//! ```
//! Integers are little-endian. The length is that of everything; the checksum covers everything
//! before it. The header is a JSON list with one entry per tensor, in the order of their bytes.

use super::RecordFault;

const MAGIC: &[u8; 8] = b"BLSPARSE";
/// The version that this release writes; it reads those before, too. From 2 on quantized tensors are
/// stored without their zeros.
const VERSION: u32 = 2;
const HEADER_AT: usize = 8 + 4 + 8 + 8;
const CHECKSUM: usize = 4;

/// Bytes that a file has besides its tensors.
pub(crate) fn overhead(header: &[u8]) -> usize {
    HEADER_AT + header.len() + CHECKSUM
}

/// Puts header and tensors together.
pub(crate) fn pack<'a>(header: &[u8], tensors: impl Iterator<Item = &'a [u8]>) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend(MAGIC);
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend([0; 8]);
    bytes.extend((header.len() as u64).to_le_bytes());
    bytes.extend(header);
    tensors.for_each(|tensor| bytes.extend(tensor));
    let length = (bytes.len() + CHECKSUM) as u64;
    bytes[12..20].copy_from_slice(&length.to_le_bytes());
    let checksum = crc32fast::hash(&bytes);
    bytes.extend(checksum.to_le_bytes());
    bytes
}

/// Header and tensors of intact bytes.
pub(crate) fn unpack(bytes: &[u8]) -> Result<(&[u8], &[u8]), RecordFault> {
    let found = bytes.len() as u64;
    if !bytes.starts_with(MAGIC) {
        return Err(RecordFault::NotARecord);
    }
    let cut = |expected: usize| RecordFault::Length {
        expected: expected as u64,
        found,
    };
    let version = u32::from_le_bytes(*at(bytes, 8).ok_or(cut(12))?);
    if !(1..=VERSION).contains(&version) {
        return Err(RecordFault::Version {
            found: version,
            supported: VERSION,
        });
    }
    let expected = u64::from_le_bytes(*at(bytes, 12).ok_or(cut(20))?);
    let content = bytes.len().checked_sub(CHECKSUM);
    let (Some(content), true) = (content, found == expected) else {
        return Err(RecordFault::Length { expected, found });
    };
    let checksum = u32::from_le_bytes(*at(bytes, content).ok_or(cut(HEADER_AT))?);
    let actual = crc32fast::hash(&bytes[..content]);
    if checksum != actual {
        return Err(RecordFault::Checksum {
            expected: checksum,
            found: actual,
        });
    }
    let header = u64::from_le_bytes(*at(bytes, 20).ok_or(cut(HEADER_AT))?);
    usize::try_from(header)
        .ok()
        .and_then(|header| bytes.get(HEADER_AT..content)?.split_at_checked(header))
        .ok_or_else(|| RecordFault::Header {
            reason: format!("it is said to have {header} bytes"),
        })
}

fn at<const N: usize>(bytes: &[u8], start: usize) -> Option<&[u8; N]> {
    bytes.get(start..)?.first_chunk()
}
