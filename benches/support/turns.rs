//! Several benchmarks at once, of which one at a time takes samples.

use std::error::Error;
use std::fs::File;
use std::path::Path;

/// A benchmark that prepares itself: it holds a lock that others do too.
pub(crate) struct Turns(File);

impl Turns {
    pub(crate) fn at(path: &Path) -> Result<Self, Box<dyn Error>> {
        let file = File::create(path).map_err(|why| format!("{}: {why}", path.display()))?;
        file.lock_shared()?;
        Ok(Self(file))
    }

    /// Waits until no other benchmark prepares itself or takes samples, and keeps all from it until the result
    /// is dropped.
    pub(crate) fn wait(self) -> Result<File, Box<dyn Error>> {
        self.0.unlock()?;
        self.0.lock()?;
        Ok(self.0)
    }
}
