//! Files and folders that are complete or not there.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// Reads and writes files with errors of type `E`, which are made of what was tried (`cannot write`),
/// where, and the system's reason.
#[derive(Debug)]
pub struct Files<E>(pub fn(&'static str, &Path, &io::Error) -> E);

impl<E> Files<E> {
    fn failed(&self, action: &'static str, path: &Path) -> impl Fn(io::Error) -> E {
        move |error| (self.0)(action, path, &error)
    }

    /// Reads a whole file.
    pub fn read(&self, path: &Path) -> Result<Vec<u8>, E> {
        fs::read(path).map_err(self.failed("cannot read", path))
    }

    /// Writes a file so that `path` always holds a complete one, the old or the new.
    pub fn write(&self, path: &Path, bytes: &[u8]) -> Result<(), E> {
        let failed = self.failed("cannot write", path);
        self.replace(path, |partial| fs::write(partial, bytes).map_err(failed))
    }

    /// As [`write`](Self::write), of a file that `write` writes at the path that it is given.
    pub fn replace<F>(
        &self,
        path: &Path,
        write: impl FnOnce(&Path) -> Result<(), F>,
    ) -> Result<(), E>
    where
        E: From<F>,
    {
        let failed = self.failed("cannot write", path);
        let partial = beside(path).map_err(&failed)?;
        let written = write(&partial).map_err(E::from).and_then(|()| {
            let file = File::options().write(true).open(&partial);
            file.and_then(|file| file.sync_all()).map_err(&failed)?;
            fs::rename(&partial, path).map_err(&failed)
        });
        if written.is_err() {
            // What could not be written is of no use; that it cannot be removed either is no news.
            let _ = fs::remove_file(&partial);
        }
        written?;
        self.flush(path.parent().unwrap_or(Path::new(".")))
    }

    /// Writes a file and flushes it, in a folder that is not in its place yet.
    pub fn write_plain(&self, path: &Path, bytes: &[u8]) -> Result<(), E> {
        let written = File::create(path).and_then(|mut file| {
            file.write_all(bytes)?;
            file.sync_all()
        });
        written.map_err(self.failed("cannot write", path))
    }

    /// Renames a file or folder, for good.
    pub fn rename(&self, from: &Path, to: &Path) -> Result<(), E> {
        fs::rename(from, to).map_err(self.failed("cannot rename", from))?;
        self.flush(to.parent().unwrap_or(Path::new(".")))
    }

    /// Removes a folder that need not be there.
    pub fn remove_folder(&self, path: &Path) -> Result<(), E> {
        match fs::remove_dir_all(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(self.failed("cannot remove", path)(error))
            }
            _ => Ok(()),
        }
    }

    /// Makes what was renamed in a folder durable, where the system can.
    pub fn flush(&self, folder: &Path) -> Result<(), E> {
        let folder = match folder.as_os_str().is_empty() {
            true => Path::new("."),
            false => folder,
        };
        // Windows opens no folder as a file, and has its names on disk after a rename.
        if cfg!(unix) {
            let flushed = File::open(folder).and_then(|folder| folder.sync_all());
            flushed.map_err(self.failed("cannot flush", folder))?;
        }
        Ok(())
    }
}

/// A new file in the same folder, which nobody else writes.
fn beside(path: &Path) -> io::Result<PathBuf> {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    loop {
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let mut name = OsString::from(format!("partial-{}-{number}-", std::process::id()));
        name.push(path.file_name().unwrap_or_default());
        let partial = path.with_file_name(name);
        match File::create_new(&partial) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            created => return created.map(|_| partial),
        }
    }
}
