//! Files that are complete or not there.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use crate::PruneError;

/// Reads a whole file.
pub(crate) fn read(path: &Path) -> Result<Vec<u8>, PruneError> {
    fs::read(path).map_err(|error| io_error("cannot read", path, &error))
}

/// Writes a file so that `path` always holds a complete one, the old or the new.
pub(crate) fn write(path: &Path, bytes: &[u8]) -> Result<(), PruneError> {
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    // Of this process only: two that write one file must not mix their bytes.
    name.push(format!(".{}.partial", std::process::id()));
    let partial = path.with_file_name(name);
    let written = File::create(&partial)
        .and_then(|mut file| {
            file.write_all(bytes)?;
            file.sync_all()
        })
        .and_then(|()| fs::rename(&partial, path));
    if let Err(error) = written {
        // What could not be written is of no use; that it cannot be removed either is no news.
        let _ = fs::remove_file(&partial);
        return Err(io_error("cannot write", path, &error));
    }
    match path.parent() {
        Some(folder) if folder.as_os_str().is_empty() => flush(Path::new(".")),
        Some(folder) => flush(folder),
        None => Ok(()),
    }
}

/// Makes what was renamed in a folder durable, where the system can.
pub(crate) fn flush(folder: &Path) -> Result<(), PruneError> {
    // Windows opens no folder as a file, and has its names on disk after a rename.
    if cfg!(unix) {
        let flushed = File::open(folder).and_then(|folder| folder.sync_all());
        flushed.map_err(|error| io_error("cannot flush", folder, &error))?;
    }
    Ok(())
}

/// [`PruneError::Io`].
pub(crate) fn io_error(action: &'static str, path: &Path, error: &io::Error) -> PruneError {
    PruneError::Io {
        action,
        path: path.display().to_string(),
        reason: error.to_string(),
    }
}
