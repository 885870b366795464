//! The IDX format of MNIST: big-endian magic, dimensions, bytes.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use flate2::read::GzDecoder;
use thiserror::Error;

/// Magic of a file of bytes with three dimensions: images.
const IMAGES: u32 = 0x0803;
/// Magic of a file of bytes with one dimension: labels.
const LABELS: u32 = 0x0801;

/// Reads `<name>` or `<name>.gz` from `dir`: images `[n, height, width]` and their size.
pub(crate) fn read_images(dir: &Path, name: &str) -> Result<(Vec<u8>, [usize; 3]), IdxError> {
    let (path, bytes) = read(dir, name)?;
    let (dims, data) = parse::<3>(&path, &bytes, IMAGES)?;
    Ok((data.to_vec(), dims))
}

/// Reads `<name>` or `<name>.gz` from `dir`: labels `[n]`, each below 10.
pub(crate) fn read_labels(dir: &Path, name: &str) -> Result<Vec<u8>, IdxError> {
    let (path, bytes) = read(dir, name)?;
    let (_, data) = parse::<1>(&path, &bytes, LABELS)?;
    match data.iter().position(|label| *label > 9) {
        None => Ok(data.to_vec()),
        Some(index) => Err(IdxError::Label {
            path,
            index,
            label: data[index],
        }),
    }
}

fn read(dir: &Path, name: &str) -> Result<(PathBuf, Vec<u8>), IdxError> {
    let plain = dir.join(name);
    let gz = dir.join(format!("{name}.gz"));
    let (path, is_gz) = match (plain.is_file(), gz.is_file()) {
        (true, _) => (plain, false),
        (_, true) => (gz, true),
        _ => return Err(IdxError::Missing { path: plain }),
    };
    let mut bytes = Vec::new();
    let done = File::open(&path).and_then(|mut file| match is_gz {
        true => GzDecoder::new(file).read_to_end(&mut bytes),
        false => file.read_to_end(&mut bytes),
    });
    match done {
        Ok(_) => Ok((path, bytes)),
        Err(error) => Err(IdxError::Unreadable {
            path,
            reason: error.to_string(),
        }),
    }
}

fn parse<'a, const D: usize>(
    path: &Path,
    bytes: &'a [u8],
    magic: u32,
) -> Result<([usize; D], &'a [u8]), IdxError> {
    let header = 4 * (1 + D);
    let size = |expected| IdxError::Size {
        path: path.to_path_buf(),
        expected,
        found: bytes.len(),
    };
    if bytes.len() < header {
        return Err(size(header));
    }
    let number = |index: usize| {
        let at = 4 * index;
        u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
    };
    if number(0) != magic {
        return Err(IdxError::Magic {
            path: path.to_path_buf(),
            expected: magic,
            found: number(0),
        });
    }
    let dims: [usize; D] = std::array::from_fn(|index| number(index + 1) as usize);
    let expected = dims
        .iter()
        .try_fold(1_usize, |product, dim| product.checked_mul(*dim))
        .and_then(|elements| elements.checked_add(header))
        .unwrap_or(usize::MAX);
    match bytes.len() == expected {
        true => Ok((dims, &bytes[header..])),
        false => Err(size(expected)),
    }
}

/// What is wrong with a folder of IDX files.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub(crate) enum IdxError {
    /// Neither the file nor its gzip is there.
    #[error(
        "{file} is missing, and so is {file}.gz: `--data` is the folder with the four MNIST files \
         train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and \
         t10k-labels-idx1-ubyte, each plain or as .gz",
        file = .path.display()
    )]
    Missing { path: PathBuf },
    /// The system or gzip refuses to read it.
    #[error("cannot read {}: {reason}", .path.display())]
    Unreadable { path: PathBuf, reason: String },
    /// It is another kind of file.
    #[error(
        "{} is no such IDX file: it begins with {found:#010x}, not {expected:#010x}",
        .path.display()
    )]
    Magic {
        path: PathBuf,
        expected: u32,
        found: u32,
    },
    /// It is shorter or longer than its header says [bytes, unpacked].
    #[error(
        "{} is damaged: {found} bytes unpacked, where its header needs {expected}",
        .path.display()
    )]
    Size {
        path: PathBuf,
        expected: usize,
        found: usize,
    },
    /// A label that is no digit.
    #[error("label {index} of {} is {label}, no digit", .path.display())]
    Label {
        path: PathBuf,
        index: usize,
        label: u8,
    },
    /// As many labels as images are needed, at least one.
    #[error("{} has {images} images for {labels} labels", .dir.display())]
    Counts {
        dir: PathBuf,
        images: usize,
        labels: usize,
    },
    /// The networks of the examples need square images with a side that 4 divides.
    #[error(
        "{} has {height}×{width} images; square ones with a side that 4 divides are needed",
        .dir.display()
    )]
    Shape {
        dir: PathBuf,
        height: usize,
        width: usize,
    },
    /// A network for one does not take the other.
    #[error(
        "the training images of {} are {train} pixels wide, and the test images {test}",
        .dir.display()
    )]
    Sides {
        dir: PathBuf,
        train: usize,
        test: usize,
    },
}
