//! Numbers in a file without a name, for what does not fit into memory.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use burn::tensor::FloatDType;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::bytes_of;
use crate::PruneError;
use crate::host::files::io_error;

/// Numbers that are converted at once: what a cache holds.
const PIECE: usize = 1 << 18;

/// Numbers in F32 or half, in the byte order of the machine; on the host they are F32.
///
/// The file has no name (on Windows it is removed when it is closed): however the process ends, nothing
/// is left of it. A file as long as the numbers may have holes: a full disk shows when they are written.
#[derive(Debug)]
pub(crate) struct NumberFile {
    file: Mutex<File>,
    folder: PathBuf,
    dtype: FloatDType,
}

/// A part of a matrix that lies in a file, row by row.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rows {
    /// Number of the file that the matrix begins with.
    pub(crate) at: u64,
    /// Columns of the matrix.
    pub(crate) width: usize,
}

impl NumberFile {
    /// A file of `numbers` zeros in `folder`.
    pub(crate) fn create(
        folder: &Path,
        dtype: FloatDType,
        numbers: u64,
    ) -> Result<Self, PruneError> {
        let made = tempfile::tempfile_in(folder).and_then(|file| {
            file.set_len(numbers.saturating_mul(bytes_of(dtype) as u64))?;
            Ok(file)
        });
        let file = made.map_err(|error| io_error("cannot create a file in", folder, &error))?;
        Ok(Self {
            file: Mutex::new(file),
            folder: folder.to_path_buf(),
            dtype,
        })
    }

    /// Where the file is.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Writes `numbers` to these rows and columns of a matrix.
    pub(crate) fn write(
        &self,
        matrix: Rows,
        rows: Range<usize>,
        columns: Range<usize>,
        numbers: &[f32],
    ) -> Result<(), PruneError> {
        let mut file = self.lock();
        let mut bytes = Vec::new();
        let runs = self.runs(matrix, rows, columns);
        let written = runs.scan(0, |first, (at, length)| {
            let run = &numbers[*first..*first + length];
            *first += length;
            Some((at, run))
        });
        for (at, run) in written {
            let put = file.seek(SeekFrom::Start(at)).and_then(|_| {
                run.chunks(PIECE).try_for_each(|piece| {
                    to_bytes(piece, self.dtype, &mut bytes);
                    file.write_all(&bytes)
                })
            });
            put.map_err(|error| self.failed("cannot write gradients to a file in", &error))?;
        }
        Ok(())
    }

    /// Reads these rows and columns of a matrix.
    pub(crate) fn read(
        &self,
        matrix: Rows,
        rows: Range<usize>,
        columns: Range<usize>,
    ) -> Result<Vec<f32>, PruneError> {
        let mut file = self.lock();
        let mut numbers = Vec::with_capacity(rows.len() * columns.len());
        let mut bytes = vec![0; PIECE.min(numbers.capacity()) * bytes_of(self.dtype)];
        for (at, length) in self.runs(matrix, rows, columns) {
            let got = file.seek(SeekFrom::Start(at)).and_then(|_| {
                (0..length).step_by(PIECE).try_for_each(|first| {
                    let count = PIECE.min(length - first);
                    let bytes = &mut bytes[..count * bytes_of(self.dtype)];
                    file.read_exact(bytes)?;
                    from_bytes(bytes, self.dtype, &mut numbers);
                    Ok(())
                })
            });
            got.map_err(|error| self.failed("cannot read gradients from a file in", &error))?;
        }
        Ok(numbers)
    }

    /// The byte that each run of consecutive numbers begins with, and its length in numbers.
    fn runs(
        &self,
        matrix: Rows,
        rows: Range<usize>,
        columns: Range<usize>,
    ) -> impl Iterator<Item = (u64, usize)> + use<> {
        let whole = columns.len() == matrix.width;
        let (count, length) = match whole {
            true => (usize::from(!rows.is_empty()), rows.len() * matrix.width),
            false => (rows.len(), columns.len()),
        };
        let bytes = bytes_of(self.dtype) as u64;
        (0..count).map(move |row| {
            let before = (rows.start + row) as u64 * matrix.width as u64;
            ((matrix.at + before + columns.start as u64) * bytes, length)
        })
    }

    fn lock(&self) -> MutexGuard<'_, File> {
        // A panic leaves the cursor anywhere; every access sets it.
        self.file.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn failed(&self, action: &'static str, error: &io::Error) -> PruneError {
        io_error(action, &self.folder, error)
    }
}

/// Numbers as they are stored.
fn to_bytes(numbers: &[f32], dtype: FloatDType, bytes: &mut Vec<u8>) {
    bytes.resize(numbers.len() * bytes_of(dtype), 0);
    match dtype {
        FloatDType::F16 => {
            let mut halves = vec![f16::ZERO; numbers.len()];
            halves.convert_from_f32_slice(numbers);
            let pairs = bytes.as_chunks_mut::<2>().0.iter_mut().zip(halves);
            pairs.for_each(|(bytes, number)| *bytes = number.to_ne_bytes());
        }
        FloatDType::BF16 => {
            let mut halves = vec![bf16::ZERO; numbers.len()];
            halves.convert_from_f32_slice(numbers);
            let pairs = bytes.as_chunks_mut::<2>().0.iter_mut().zip(halves);
            pairs.for_each(|(bytes, number)| *bytes = number.to_ne_bytes());
        }
        _ => {
            let pairs = bytes.as_chunks_mut::<4>().0.iter_mut().zip(numbers);
            pairs.for_each(|(bytes, number)| *bytes = number.to_ne_bytes());
        }
    }
}

/// Appends numbers that were stored.
fn from_bytes(bytes: &[u8], dtype: FloatDType, numbers: &mut Vec<f32>) {
    let first = numbers.len();
    match dtype {
        FloatDType::F16 => {
            let halves = bytes.as_chunks::<2>().0.iter();
            let halves: Vec<f16> = halves.map(|bytes| f16::from_ne_bytes(*bytes)).collect();
            numbers.resize(first + halves.len(), 0.0);
            halves.convert_to_f32_slice(&mut numbers[first..]);
        }
        FloatDType::BF16 => {
            let halves = bytes.as_chunks::<2>().0.iter();
            let halves: Vec<bf16> = halves.map(|bytes| bf16::from_ne_bytes(*bytes)).collect();
            numbers.resize(first + halves.len(), 0.0);
            halves.convert_to_f32_slice(&mut numbers[first..]);
        }
        _ => {
            let all = bytes.as_chunks::<4>().0.iter();
            numbers.extend(all.map(|bytes| f32::from_ne_bytes(*bytes)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_come_back_as_the_dtype_rounds_them_and_the_rest_is_zero() {
        let folder = tempfile::tempdir().unwrap();
        for (dtype, third) in [
            (FloatDType::F32, 1.0 / 3.0),
            (FloatDType::F16, f16::from_f32(1.0 / 3.0).to_f32()),
            (FloatDType::BF16, bf16::from_f32(1.0 / 3.0).to_f32()),
        ] {
            let file = NumberFile::create(folder.path(), dtype, 2 + 3 * 4).unwrap();
            // Behind two numbers of something else.
            let matrix = Rows { at: 2, width: 4 };
            let numbers = [1.0, 1.0 / 3.0, -2.0, 0.5];
            file.write(matrix, 1..3, 1..3, &numbers).unwrap();
            let all = file.read(matrix, 0..3, 0..4).unwrap();
            let expected = [0., 0., 0., 0., 0., 1., third, 0., 0., -2., 0.5, 0.];
            assert_eq!(all, expected);
            assert_eq!(file.read(matrix, 1..3, 2..4).unwrap(), [third, 0., 0.5, 0.]);
            assert!(file.read(matrix, 0..0, 0..4).unwrap().is_empty());
        }
        // Nobody sees a file.
        assert_eq!(folder.path().read_dir().unwrap().count(), 0);
    }

    #[test]
    fn a_file_that_ends_early_is_an_error_with_its_folder() {
        let folder = tempfile::tempdir().unwrap();
        let file = NumberFile::create(folder.path(), FloatDType::F32, 3).unwrap();
        let matrix = Rows { at: 0, width: 2 };
        let Err(PruneError::Io { action, path, .. }) = file.read(matrix, 0..2, 0..2) else {
            panic!("four numbers of three");
        };
        assert_eq!(action, "cannot read gradients from a file in");
        assert_eq!(path, folder.path().display().to_string());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_full_disk_is_an_error_with_its_folder() {
        let file = NumberFile {
            file: Mutex::new(File::options().write(true).open("/dev/full").unwrap()),
            folder: "/dev".into(),
            dtype: FloatDType::F32,
        };
        let matrix = Rows { at: 0, width: 1 };
        let error = file.write(matrix, 0..1, 0..1, &[1.0]).unwrap_err();
        let expected = "cannot write gradients to a file in /dev: No space left on device";
        assert!(error.to_string().starts_with(expected), "{error}");
    }
}
