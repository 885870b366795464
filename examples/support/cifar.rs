//! CIFAR-10 in its binary layout: records of one label byte and 3 · 32 · 32 pixel bytes.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use flate2::read::GzDecoder;

use super::{ImageSet, Images};

const SIDE: usize = 32;
const PIXELS: usize = 3 * SIDE * SIDE;

/// Which files of a folder are the data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum CifarFiles {
    /// `data_batch_*.bin` and `test_batch.bin`: the standard files.
    Standard,
    /// `original_train_*.bin` and `original_test_*.bin`: a subset with the original pixels.
    Original,
}

/// Reads CIFAR-10 from `dir`; each file plain or as `.gz`.
pub(crate) fn read(dir: &Path, files: CifarFiles) -> Result<ImageSet, String> {
    let (train, test) = match files {
        CifarFiles::Standard => ("data_batch_", "test_batch"),
        CifarFiles::Original => ("original_train_", "original_test_"),
    };
    Ok(ImageSet {
        name: "CIFAR-10",
        train: images(dir, train)?,
        test: images(dir, test)?,
    })
}

/// The images of all files in `dir` whose name begins with `prefix`, in the order of their names.
pub(crate) fn read_part(dir: &Path, prefix: &str) -> Result<Images, String> {
    images(dir, prefix)
}

/// All files in `dir` whose name begins with `prefix`, in the order of their names.
fn images(dir: &Path, prefix: &str) -> Result<Images, String> {
    let failed = |what: &Path, error: std::io::Error| format!("{}: {error}", what.display());
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(|error| failed(dir, error))? {
        let path = entry.map_err(|error| failed(dir, error))?.path();
        let name = path
            .file_name()
            .and_then(|name| name.to_str())
            .unwrap_or("");
        if name.starts_with(prefix) && (name.ends_with(".bin") || name.ends_with(".bin.gz")) {
            paths.push(path);
        }
    }
    paths.sort();
    if paths.is_empty() {
        return Err(format!(
            "{} has no {prefix}*.bin (or .bin.gz): `--data` is the folder of CIFAR-10's binary \
             version",
            dir.display()
        ));
    }
    let mut pixels = Vec::new();
    let mut labels = Vec::new();
    for path in paths {
        let mut bytes = Vec::new();
        let mut file = File::open(&path).map_err(|error| failed(&path, error))?;
        match path.extension().is_some_and(|extension| extension == "gz") {
            true => GzDecoder::new(file).read_to_end(&mut bytes),
            false => file.read_to_end(&mut bytes),
        }
        .map_err(|error| failed(&path, error))?;
        let records = bytes.chunks_exact(1 + PIXELS);
        if bytes.is_empty() || !records.remainder().is_empty() {
            return Err(format!(
                "{} is damaged: {} bytes are no multiple of {}",
                path.display(),
                bytes.len(),
                1 + PIXELS
            ));
        }
        for record in records {
            if record[0] > 9 {
                return Err(format!(
                    "{} has the label {}, no class",
                    path.display(),
                    record[0]
                ));
            }
            labels.push(i64::from(record[0]));
            pixels.extend(record[1..].iter().map(|pixel| f32::from(*pixel) / 255.0));
        }
    }
    Ok(Images::new(pixels, labels, 3, SIDE))
}
