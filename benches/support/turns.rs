//! Several benchmarks at once, of which one at a time takes samples.

use std::error::Error;
use std::fs::File;
use std::path::Path;

/// A benchmark that prepares itself: it holds a lock that others do too.
pub(crate) struct Turns(File);

/// One that takes samples: nobody else holds the lock.
pub(crate) struct Turn(#[expect(dead_code, reason = "held until it is dropped")] File);

impl Turns {
    pub(crate) fn at(path: &Path) -> Result<Self, Box<dyn Error>> {
        let file = File::create(path).map_err(|why| format!("{}: {why}", path.display()))?;
        file.lock_shared()?;
        Ok(Self(file))
    }

    /// Waits until no other benchmark prepares itself or takes samples.
    pub(crate) fn wait(self) -> Result<Turn, Box<dyn Error>> {
        self.0.unlock()?;
        self.0.lock()?;
        Ok(Turn(self.0))
    }
}
