//! The bytes around encoded tensors.
//!
//! ```text
//! "BLSPARSE"  version u32  length u64  header length u64  header  tensors …  crc32 u32
//! ```
//! Integers are little-endian. The length is that of everything; the checksum covers everything
//! before it. The header is a JSON list with one entry per tensor, in the order of their bytes,
//! compressed as a zlib stream: of a small model it would be most of the file.

use std::io::{Read, Write};

use flate2::Compression;
use flate2::read::ZlibDecoder;
use flate2::write::ZlibEncoder;

use super::RecordFault;

const MAGIC: &[u8; 8] = b"BLSPARSE";
/// The version that is written and read.
const VERSION: u32 = 3;
/// Bytes that a header may have: those of a model of a million tensors.
const LARGEST_HEADER: u64 = 1 << 28;
const HEADER_AT: usize = 8 + 4 + 8 + 8;
const CHECKSUM: usize = 4;

/// Bytes that a file has besides its tensors.
pub(crate) fn overhead(header: &[u8]) -> usize {
    HEADER_AT + compress(header).len() + CHECKSUM
}

fn compress(header: &[u8]) -> Vec<u8> {
    let mut encoder = ZlibEncoder::new(Vec::new(), Compression::best());
    let compressed = encoder.write_all(header).and_then(|()| encoder.finish());
    compressed.expect("writing to memory does not fail")
}

fn decompress(compressed: &[u8]) -> Result<Vec<u8>, RecordFault> {
    let mut header = Vec::new();
    let read = ZlibDecoder::new(compressed)
        .take(LARGEST_HEADER + 1)
        .read_to_end(&mut header);
    let reason = match read {
        Ok(_) if header.len() as u64 <= LARGEST_HEADER => return Ok(header),
        Ok(_) => format!("it has more than {LARGEST_HEADER} bytes"),
        Err(error) => error.to_string(),
    };
    Err(RecordFault::Header { reason })
}

/// Puts header and tensors together.
pub(crate) fn pack<'a>(header: &[u8], tensors: impl Iterator<Item = &'a [u8]>) -> Vec<u8> {
    let header = &compress(header);
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
pub(crate) fn unpack(bytes: &[u8]) -> Result<(Vec<u8>, &[u8]), RecordFault> {
    let found = bytes.len() as u64;
    if !bytes.starts_with(MAGIC) {
        return Err(RecordFault::NotARecord);
    }
    let cut = |expected: usize| RecordFault::Length {
        expected: expected as u64,
        found,
    };
    let version = u32::from_le_bytes(*at(bytes, 8).ok_or(cut(12))?);
    if version != VERSION {
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
    let (header, tensors) = usize::try_from(header)
        .ok()
        .and_then(|header| bytes.get(HEADER_AT..content)?.split_at_checked(header))
        .ok_or_else(|| RecordFault::Header {
            reason: format!("it is said to have {header} bytes"),
        })?;
    Ok((decompress(header)?, tensors))
}

fn at<const N: usize>(bytes: &[u8], start: usize) -> Option<&[u8; N]> {
    bytes.get(start..)?.first_chunk()
}
