//! Files and folders that are complete or not there.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// Reads and writes files with errors of type `E`, which are made of what was tried (`cannot write`),
/// where, and the system's reason.
#[derive(Debug)]
pub struct Files<E>(pub fn(&'static str, &Path, &io::Error) -> E);

/// Keeps others out for as long as it is there; the system gives it up when a process ends.
#[derive(Debug)]
pub struct Lock(File);

impl Drop for Lock {
    fn drop(&mut self) {
        // A process that is being started has a copy of the open file for a moment: to close it would not do.
        let _ = self.0.unlock();
    }
}

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
        self.write_parts(path, [bytes])
    }

    /// As [`write`](Self::write), of bytes that are in several places.
    pub fn write_parts<B: AsRef<[u8]>>(
        &self,
        path: &Path,
        parts: impl IntoIterator<Item = B>,
    ) -> Result<(), E> {
        let failed = self.failed("cannot write", path);
        self.replace(path, |partial| {
            let written = File::create(partial).and_then(|mut file| {
                let mut parts = parts.into_iter();
                parts.try_for_each(|part| file.write_all(part.as_ref()))
            });
            written.map_err(failed)
        })
    }

    /// As [`write`](Self::write), of a file that `write` writes at the path that it is given.
    ///
    /// What a killed process left of the same file is removed before.
    fn replace(&self, path: &Path, write: impl FnOnce(&Path) -> Result<(), E>) -> Result<(), E> {
        let failed = self.failed("cannot write", path);
        // What a link leads to is written, and the link stays.
        let target = fs::canonicalize(path).ok().filter(|_| path.is_symlink());
        let path = target.as_deref().unwrap_or(path);
        clear(path);
        // Held until the file is in its place.
        let (partial, _file) = beside(path).map_err(&failed)?;
        let written = write(&partial).and_then(|()| {
            let file = File::options().write(true).open(&partial);
            file.and_then(|file| file.sync_all()).map_err(&failed)?;
            // Who may read the old one may read the new one, and nobody else.
            if let Ok(old) = fs::symlink_metadata(path)
                && old.is_file()
            {
                fs::set_permissions(&partial, old.permissions()).map_err(&failed)?;
            }
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

    /// Makes a folder where there is none, and makes sure that it takes files: that it takes none is found
    /// out before the work whose results go there.
    pub fn create_folder(&self, folder: &Path) -> Result<(), E> {
        fs::create_dir_all(folder).map_err(self.failed("cannot make the folder", folder))?;
        let probe = folder.join("probe");
        clear(&probe);
        // A name of its own, which is locked: others may begin here at the same moment.
        let taken = beside(&probe).and_then(|(path, mut file)| {
            let written = file.write_all(b"0");
            written.and(fs::remove_file(path))
        });
        taken.map_err(self.failed("cannot write into the folder", folder))
    }

    /// Locks the file at `path`, which is made where there is none and stays; `in_use` where another process, or
    /// another thread, holds it. A file system without locks keeps nobody out.
    pub fn lock(&self, path: &Path, in_use: impl FnOnce() -> E) -> Result<Lock, E> {
        let file = File::create(path).map_err(self.failed("cannot write", path))?;
        match file.try_lock() {
            Err(TryLockError::WouldBlock) => Err(in_use()),
            Ok(()) | Err(TryLockError::Error(_)) => Ok(Lock(file)),
        }
    }

    /// Names in a folder, which need not be there.
    pub fn names(&self, folder: &Path) -> Result<Vec<String>, E> {
        let entries = match fs::read_dir(folder) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(self.failed("cannot read", folder)(error)),
        };
        let name = |entry: io::Result<fs::DirEntry>| entry.ok()?.file_name().into_string().ok();
        Ok(entries.filter_map(name).collect())
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

/// A new file in the same folder, which nobody else writes; locked, where the system has such locks.
fn beside(path: &Path) -> io::Result<(PathBuf, File)> {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    loop {
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let mut name = OsString::from(format!("{PARTIAL}{}-{number}-", std::process::id()));
        name.push(path.file_name().unwrap_or_default());
        let partial = path.with_file_name(name);
        let file = match File::create_new(&partial) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
            created => created?,
        };
        // Whoever clears up may have been between the two.
        let is_taken = LOCKS
            && (matches!(file.try_lock(), Err(TryLockError::WouldBlock)) || !partial.exists());
        if !is_taken {
            return Ok((partial, file));
        }
    }
}

/// Before the number of the process and one of its own.
const PARTIAL: &str = "partial-";

/// Whether a file that is locked can still be written by its path; Windows refuses that.
const LOCKS: bool = cfg!(unix);

/// Removes what killed processes left of this file: what is written is locked, and a lock ends with its
/// process. What cannot be removed stays; it is in nobody's way.
fn clear(path: &Path) {
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let (true, Ok(entries)) = (LOCKS, fs::read_dir(folder)) else {
        return;
    };
    for entry in entries.flatten() {
        if is_partial(&entry.file_name(), path)
            && let Ok(file) = File::open(entry.path())
            && file.try_lock().is_ok()
        {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// Whether a file of this name is one that [`beside`] made for `path`.
fn is_partial(name: &OsStr, path: &Path) -> bool {
    let name = name.as_encoded_bytes();
    let mut rest = name.strip_prefix(PARTIAL.as_bytes()).unwrap_or_default();
    for _ in 0..2 {
        let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
        match rest[digits..].strip_prefix(b"-") {
            Some(after) if digits > 0 => rest = after,
            _ => return false,
        }
    }
    path.file_name()
        .is_some_and(|of| of.as_encoded_bytes() == rest)
}

#[cfg(all(test, unix))]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    const FILES: Files<String> = Files(|action, path, error| format!("{action} {path:?}: {error}"));

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> = names.collect();
        names.sort();
        names
    }

    #[test]
    fn what_killed_processes_left_of_a_file_goes_with_the_next_write_of_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state-1.bin");
        let left = [
            "partial-4000000-0-state-1.bin",
            "partial-1-12-state-1.bin",
            "partial-1-0-1.bin",
            "partial-1-0-other.bin",
            "partial-state-1.bin",
            "partial--3-state-1.bin",
        ];
        for name in left {
            fs::write(folder.path().join(name), "half").unwrap();
        }
        FILES.write(&path, b"whole").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"whole");
        let mut expected: Vec<&str> = left[2..].to_vec();
        expected.push("state-1.bin");
        expected.sort();
        assert_eq!(names(folder.path()), expected);
    }

    #[test]
    fn a_new_file_may_be_read_by_whom_the_old_one_could_be() {
        use std::os::unix::fs::PermissionsExt;

        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.bin");
        FILES.write(&path, b"old").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        FILES.write(&path, b"new").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    /// A checkpoint on another disk, say.
    #[test]
    fn a_write_through_a_link_is_one_of_the_file_that_it_leads_to() {
        let folder = tempfile::tempdir().unwrap();
        let real = folder.path().join("disk");
        fs::create_dir(&real).unwrap();
        fs::write(real.join("real.bin"), "old").unwrap();
        let link = folder.path().join("model.bin");
        std::os::unix::fs::symlink(real.join("real.bin"), &link).unwrap();
        FILES.write(&link, b"new").unwrap();
        assert_eq!(fs::read(real.join("real.bin")).unwrap(), b"new");
        assert!(link.is_symlink());
        assert_eq!(names(&real), ["real.bin"]);
        assert_eq!(names(folder.path()), ["disk", "model.bin"]);
    }

    #[test]
    fn a_write_leaves_what_others_are_writing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state.bin");
        FILES
            .replace(&path, |partial| {
                fs::write(partial, "first").unwrap();
                // Another thread or process writes the same file meanwhile.
                FILES.write(&path, b"second").unwrap();
                assert_eq!(fs::read(partial).unwrap(), b"first");
                Ok(())
            })
            .unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"first");
        assert_eq!(names(folder.path()), ["state.bin"]);
    }

    #[test]
    fn a_folder_takes_files_of_all_who_begin_there_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run/state");
        let begin = std::sync::Barrier::new(8);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    let taken = (0..20).map(|_| {
                        begin.wait();
                        FILES.create_folder(&path)
                    });
                    // Who fails has the others wait no longer.
                    let taken: Vec<_> = taken.collect();
                    assert!(taken.iter().all(Result::is_ok), "{taken:?}");
                });
            }
        });
        assert!(names(&path).is_empty());
    }

    /// A disk that is gone, say.
    #[test]
    fn a_link_that_leads_nowhere_is_no_folder() {
        let folder = tempfile::tempdir().unwrap();
        let link = folder.path().join("state");
        std::os::unix::fs::symlink(folder.path().join("gone/state"), &link).unwrap();
        let error = FILES.create_folder(&link).unwrap_err();
        assert!(error.starts_with("cannot make the folder"), "{error}");
    }

    /// The half of [`a_process_that_is_killed_holds_no_lock`] that is killed.
    #[test]
    fn as_a_process_that_is_killed() {
        if let Some(path) = std::env::var_os("LEAN_KILLED_WRITER") {
            let written = FILES.replace(Path::new(&path), |_| -> Result<(), String> {
                std::process::abort();
            });
            written.unwrap();
        }
    }

    #[test]
    fn a_process_that_is_killed_holds_no_lock() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state.bin");
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "files::tests::as_a_process_that_is_killed"]);
        child.env("LEAN_KILLED_WRITER", &path);
        let status = child.stdout(Stdio::null()).stderr(Stdio::null()).status();
        assert!(!status.unwrap().success());
        assert_eq!(names(folder.path()).len(), 1);
        FILES.write(&path, b"whole").unwrap();
        assert_eq!(names(folder.path()), ["state.bin"]);
    }
}
