//! Checkpoints that Burn's Learner has written.

use std::error::Error;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

/// What `SupervisedTraining::with_default_checkpointers` writes for each epoch that it keeps.
const PARTS: [&str; 3] = ["model", "optim", "scheduler"];

/// Says whether the training in `directory` can go on after `epoch`: Burn panics where it cannot.
pub(crate) fn check(directory: &Path, epoch: usize) -> Result<(), MissingCheckpoint> {
    let folder = directory.join("checkpoint");
    let file = |part: &str| folder.join(format!("{part}-{epoch}.bpk"));
    match PARTS.map(file).into_iter().find(|file| !file.is_file()) {
        None => Ok(()),
        Some(file) => Err(MissingCheckpoint {
            epoch,
            file,
            kept: kept(&folder),
        }),
    }
}

/// Epochs of the checkpoints in `folder`, ascending.
fn kept(folder: &Path) -> Vec<usize> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut epochs: Vec<usize> = entries
        .filter_map(|entry| {
            let name = entry.file_name();
            let epoch = name.to_str()?.strip_prefix("model-")?;
            epoch.strip_suffix(".bpk")?.parse().ok()
        })
        .collect();
    epochs.sort_unstable();
    epochs
}

/// There is no checkpoint of this epoch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MissingCheckpoint {
    pub(crate) epoch: usize,
    /// The first of its files that is missing.
    pub(crate) file: PathBuf,
    /// Epochs of the checkpoints that are there.
    pub(crate) kept: Vec<usize>,
}

impl fmt::Display for MissingCheckpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { epoch, file, kept } = self;
        write!(f, "no checkpoint of epoch {epoch}: ")?;
        write!(f, "{} is missing; ", file.display())?;
        match kept.is_empty() {
            true => f.write_str("there are none at all"),
            false => write!(f, "there are those of epochs {kept:?}"),
        }
    }
}

impl Error for MissingCheckpoint {}
