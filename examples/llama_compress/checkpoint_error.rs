//! What is wrong with a checkpoint of several files.

use std::fmt;
use std::path::PathBuf;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum CheckpointError {
    /// A file is not there, cut or damaged.
    Unreadable { file: PathBuf, reason: String },
    /// There are no weights in a folder.
    NoWeights { folder: PathBuf },
    /// An index names a file that is not in its folder.
    Outside { index: PathBuf, shard: String },
    /// An index names a file that is not there.
    MissingShard { index: PathBuf, shard: String },
    /// Two files have a tensor of the same name.
    Twice { tensor: String, files: [PathBuf; 2] },
    /// A tensor is not in the file that an index names for it.
    Misplaced {
        index: PathBuf,
        tensor: String,
        shard: String,
    },
    /// The network does not do what a configuration asks for.
    Unsupported {
        file: PathBuf,
        key: &'static str,
        said: String,
        taken: &'static str,
    },
    /// A configuration does not agree with an option, or with the weights.
    Contradiction {
        file: PathBuf,
        key: &'static str,
        said: String,
        other: String,
    },
}

impl fmt::Display for CheckpointError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreadable { file, reason } => write!(
                f,
                "cannot read {}: {reason}; where it was downloaded, download it again",
                file.display()
            ),
            Self::NoWeights { folder } => write!(
                f,
                "{} has neither model.safetensors nor model.safetensors.index.json: `--checkpoint` \
                 is a folder with one of them and config.json, or a safetensors file",
                folder.display()
            ),
            Self::Outside { index, shard } => write!(
                f,
                "{} names the shard `{shard}`, which is not the name of a file beside it: shards \
                 are read from the folder of their index only",
                index.display()
            ),
            Self::MissingShard { index, shard } => write!(
                f,
                "{} names the shard `{shard}`, which is not there: put it beside the index",
                index.display()
            ),
            Self::Twice {
                tensor,
                files: [one, other],
            } => write!(
                f,
                "both {} and {} have `{tensor}`: remove it from one of them, or download them again",
                one.display(),
                other.display()
            ),
            Self::Misplaced {
                index,
                tensor,
                shard,
            } => write!(
                f,
                "{} says that `{tensor}` is in `{shard}`, where it is not: index and shards are of \
                 different checkpoints, download them together",
                index.display()
            ),
            Self::Unsupported {
                file,
                key,
                said,
                taken,
            } => write!(
                f,
                "{}: `{key}` is {said}, which the network does not compute: {taken}",
                file.display()
            ),
            Self::Contradiction {
                file,
                key,
                said,
                other,
            } => write!(f, "{}: `{key}` is {said}, but {other}", file.display()),
        }
    }
}

impl std::error::Error for CheckpointError {}
