//! What is wrong with a checkpoint of several files.

use std::path::PathBuf;

use thiserror::Error;

#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub(crate) enum CheckpointError {
    /// A file is not there, cut or damaged.
    #[error(
        "cannot read {}: {reason}; where it was downloaded, download it again",
        .file.display()
    )]
    Unreadable { file: PathBuf, reason: String },
    /// There are no weights in a folder.
    #[error(
        "{} has neither model.safetensors nor model.safetensors.index.json: `--checkpoint` \
         is a folder with one of them and config.json, or a safetensors file",
        .folder.display()
    )]
    NoWeights { folder: PathBuf },
    /// An index names a file that is not in its folder.
    #[error(
        "{} names the shard `{shard}`, which is not the name of a file beside it: shards \
         are read from the folder of their index only",
        .index.display()
    )]
    Outside { index: PathBuf, shard: String },
    /// An index names a file that is not there.
    #[error(
        "{} names the shard `{shard}`, which is not there: put it beside the index",
        .index.display()
    )]
    MissingShard { index: PathBuf, shard: String },
    /// Two files have a tensor of the same name.
    #[error(
        "both {} and {} have `{tensor}`: remove it from one of them, or download them again",
        .files[0].display(),
        .files[1].display()
    )]
    Twice { tensor: String, files: [PathBuf; 2] },
    /// A tensor is not in the file that an index names for it.
    #[error(
        "{} says that `{tensor}` is in `{shard}`, where it is not: index and shards are of \
         different checkpoints, download them together",
        .index.display()
    )]
    Misplaced {
        index: PathBuf,
        tensor: String,
        shard: String,
    },
    /// The network does not do what a configuration asks for.
    #[error(
        "{}: `{key}` is {said}, which the network does not compute: {taken}",
        .file.display()
    )]
    Unsupported {
        file: PathBuf,
        key: &'static str,
        said: String,
        taken: &'static str,
    },
    /// A configuration does not agree with an option, or with the weights.
    #[error("{}: `{key}` is {said}, but {other}", .file.display())]
    Contradiction {
        file: PathBuf,
        key: &'static str,
        said: String,
        other: String,
    },
}
