//! Safetensors files with a checksum, in the metadata: CRC-32 of the file with zeros in its place.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};

use safetensors::tensor::{Dtype, SafeTensors, View};

/// Its key in the metadata.
pub const CHECKSUM: &str = "crc32";
/// What the checksum of eight hexadecimal digits follows in a header; the quotes in metadata are
/// escaped, so that it is there once.
const PLACE: &[u8] = b"\"crc32\":\"";
const DIGITS: usize = 8;
/// What a header begins with, after its length, where there are metadata.
const METADATA: &[u8] = b"{\"__metadata__\":";
/// Bytes of that length.
const LENGTH: usize = 8;

/// What a file begins with: the bytes of the tensors follow, in the order that they are put into. The same
/// tensors and metadata make the same file.
///
/// # Errors
///
/// What the format does not know.
pub fn seal_head<V: View>(
    tensors: &mut [(String, V)],
    mut metadata: HashMap<String, String>,
) -> Result<Vec<u8>, String> {
    metadata.insert(CHECKSUM.into(), "0".repeat(DIGITS));
    let sorted = serde_json::to_string(&metadata.iter().collect::<BTreeMap<_, _>>());
    let sorted = sorted.map_err(|error| error.to_string())?;
    // As the format's own writer does.
    tensors.sort_by(|(left, one), (right, other)| {
        let by_dtype = other.dtype().cmp(&one.dtype());
        by_dtype.then_with(|| left.cmp(right))
    });
    let described = tensors.iter();
    let described = described.map(|(name, tensor)| (name.as_str(), Described(tensor)));
    let head = safetensors::serialize(described, Some(metadata));
    let mut head = head.map_err(|error| error.to_string())?;
    // It has room for the tensors.
    head.shrink_to_fit();
    // The format's writer has metadata in the order of the hash map, which is another one each time.
    let begins = head.get(LENGTH..).unwrap_or_default();
    let is_there = begins.starts_with(METADATA);
    let at = LENGTH + METADATA.len();
    match head.get_mut(at..at + sorted.len()) {
        Some(unsorted) if is_there => unsorted.copy_from_slice(sorted.as_bytes()),
        _ => return Err("its header does not begin with the metadata".into()),
    }
    let at = place(&head).ok_or("its header has no place for a checksum")?;
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&head);
    for (_, tensor) in tensors.iter() {
        hasher.update(&tensor.data());
    }
    let checksum = format!("{:08x}", hasher.finalize());
    head[at..at + DIGITS].copy_from_slice(checksum.as_bytes());
    Ok(head)
}

/// A tensor as the header has it, without its bytes.
struct Described<'a, V>(&'a V);

impl<V: View> View for Described<'_, V> {
    fn dtype(&self) -> Dtype {
        self.0.dtype()
    }

    fn shape(&self) -> &[usize] {
        self.0.shape()
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&[])
    }

    fn data_len(&self) -> usize {
        self.0.data_len()
    }
}

/// Where the checksum is.
fn place(bytes: &[u8]) -> Option<usize> {
    let (length, rest) = bytes.split_first_chunk::<LENGTH>()?;
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

#[cfg(test)]
mod tests {
    use safetensors::tensor::TensorView;

    use super::*;

    /// Caches and comparisons of files go by their bytes.
    #[test]
    fn the_same_metadata_make_the_same_head_each_time() {
        let metadata = || -> HashMap<String, String> {
            let entries = (0..9).map(|number| (format!("key {number}"), "\"\n".repeat(number)));
            entries.collect()
        };
        let head = || seal_head::<TensorView<'_>>(&mut [], metadata()).unwrap();
        let first = head();
        for _ in 0..4 {
            assert_eq!(head(), first);
        }
        let (_, mut found) = unseal(&first).unwrap();
        assert!(found.remove(CHECKSUM).is_some());
        assert_eq!(found, metadata());
    }

    #[test]
    fn a_head_and_the_tensors_after_it_are_a_file_of_the_format() {
        let stored = [
            ("b", Dtype::U8, vec![1u8, 2, 3]),
            ("c", Dtype::F32, vec![4; 4]),
            ("a", Dtype::F16, vec![5; 6]),
            ("e", Dtype::F32, vec![6; 8]),
            ("d", Dtype::U8, vec![7]),
        ];
        let views = stored.iter().map(|(name, dtype, bytes)| {
            let shape = vec![8 * bytes.len() / dtype.bitsize()];
            let view = TensorView::new(*dtype, shape, bytes).unwrap();
            (name.to_string(), view)
        });
        let mut views: Vec<(String, TensorView<'_>)> = views.collect();

        let mut bytes = seal_head(&mut views, HashMap::new()).unwrap();
        for (_, view) in &views {
            bytes.extend_from_slice(view.data());
        }
        let (found, _) = unseal(&bytes).unwrap();
        for (name, dtype, bytes) in &stored {
            let tensor = found.tensor(name).unwrap();
            assert_eq!((tensor.dtype(), tensor.data()), (*dtype, &bytes[..]));
        }
    }
}
