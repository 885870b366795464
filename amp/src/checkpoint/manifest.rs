//! What a checkpoint consists of.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::files::io_error;
use crate::AmpError;

#[derive(Serialize, Deserialize)]
pub(super) struct Manifest {
    pub(super) version: u32,
    pub(super) step: u64,
    pub(super) files: Vec<ManifestFile>,
}

#[derive(Serialize, Deserialize)]
pub(super) struct ManifestFile {
    pub(super) name: String,
    pub(super) bytes: usize,
    pub(super) crc32: u32,
}

impl ManifestFile {
    /// Reads the file once, in pieces.
    pub(super) fn of(folder: &Path, name: &str) -> Result<Self, AmpError> {
        let path = folder.join(name);
        let listed = File::open(&path).and_then(|file| {
            let mut reader = BufReader::with_capacity(1 << 20, file);
            let mut hasher = crc32fast::Hasher::new();
            let mut bytes = 0;
            loop {
                let piece = reader.fill_buf()?;
                if piece.is_empty() {
                    break;
                }
                hasher.update(piece);
                let read = piece.len();
                bytes += read;
                reader.consume(read);
            }
            Ok(Self {
                name: name.into(),
                bytes,
                crc32: hasher.finalize(),
            })
        });
        listed.map_err(|error| io_error("cannot read back", &path, &error))
    }
}
