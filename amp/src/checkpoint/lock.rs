//! One writer at a time in a folder of checkpoints.

use std::fs::{self, File, TryLockError};
use std::path::Path;

use super::files::io_error;
use crate::AmpError;

/// The file that is locked; it stays.
const NAME: &str = "checkpoints.lock";

/// Keeps other writers out of a folder for as long as it is there; the system gives it up when a process ends.
#[derive(Debug)]
pub(super) struct Lock(File);

impl Lock {
    /// That of a folder, which is created where it is not there.
    ///
    /// # Errors
    ///
    /// [`AmpError::CheckpointsInUse`] where another process, or another thread, holds it; [`AmpError::Io`].
    pub(super) fn of(folder: &Path) -> Result<Self, AmpError> {
        fs::create_dir_all(folder).map_err(|error| io_error("cannot create", folder, &error))?;
        let path = folder.join(NAME);
        let file = File::create(&path).map_err(|error| io_error("cannot write", &path, &error))?;
        match file.try_lock() {
            Err(TryLockError::WouldBlock) => Err(AmpError::CheckpointsInUse {
                folder: folder.display().to_string(),
            }),
            // A file system without locks keeps nobody out.
            Ok(()) | Err(TryLockError::Error(_)) => Ok(Self(file)),
        }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // A process that is being started has a copy of the open file for a moment: to close it would not do.
        let _ = self.0.unlock();
    }
}
