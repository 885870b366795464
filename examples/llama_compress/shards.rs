//! The files of a checkpoint, and which of them has which tensor.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::error::Error;
use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use safetensors::tensor::Metadata;
use serde::Deserialize;

use super::checkpoint_error::CheckpointError;

/// One safetensors file or several, of which only the headers are read.
pub(crate) struct Shards {
    tensors: BTreeMap<String, Stored>,
    metadata: HashMap<String, String>,
}

/// Where a tensor is, and of which shape.
struct Stored {
    file: PathBuf,
    shape: Vec<usize>,
}

/// `model.safetensors.index.json`: the file of each tensor.
#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Shards {
    /// The weights of a folder, in one file or in those of an index.
    pub(crate) fn in_folder(folder: &Path) -> Result<Self, CheckpointError> {
        let whole = folder.join("model.safetensors");
        if whole.is_file() {
            return Self::of_files([whole]);
        }
        let index = folder.join("model.safetensors.index.json");
        if !index.is_file() {
            let folder = folder.into();
            return Err(CheckpointError::NoWeights { folder });
        }
        let Index { weight_map } = read_json::<Index>(&index)?;
        let names: BTreeSet<&String> = weight_map.values().collect();
        for shard in &names {
            let (index, shard) = (index.clone(), shard.to_string());
            // A name alone; it may be a link, as in the cache of Hugging Face.
            if Path::new(&shard).file_name() != Some(OsStr::new(&shard)) {
                return Err(CheckpointError::Outside { index, shard });
            }
            if !folder.join(&shard).is_file() {
                return Err(CheckpointError::MissingShard { index, shard });
            }
        }
        let shards = Self::of_files(names.iter().map(|name| folder.join(name)))?;
        for (tensor, shard) in &weight_map {
            let stored = shards.tensors.get(tensor);
            if stored.is_none_or(|stored| stored.file != folder.join(shard)) {
                return Err(CheckpointError::Misplaced {
                    index,
                    tensor: tensor.clone(),
                    shard: shard.clone(),
                });
            }
        }
        Ok(shards)
    }

    /// The tensors of files that have none in common.
    pub(crate) fn of_files(
        files: impl IntoIterator<Item = PathBuf>,
    ) -> Result<Self, CheckpointError> {
        let mut shards = Self {
            tensors: BTreeMap::new(),
            metadata: HashMap::new(),
        };
        for file in files {
            let header = header(&file).map_err(|error| CheckpointError::Unreadable {
                file: file.clone(),
                reason: error.to_string(),
            })?;
            shards
                .metadata
                .extend(header.metadata().clone().unwrap_or_default());
            for (tensor, info) in header.tensors() {
                let stored = Stored {
                    file: file.clone(),
                    shape: info.shape.clone(),
                };
                if let Some(other) = shards.tensors.insert(tensor.clone(), stored) {
                    let files = [other.file, file];
                    return Err(CheckpointError::Twice { tensor, files });
                }
            }
        }
        Ok(shards)
    }

    /// Names of all tensors, in order.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Shape of the first tensor of which the name ends so.
    pub(crate) fn shape(&self, ends: [&str; 2]) -> Option<&[usize]> {
        let mut tensors = self.tensors.iter();
        let found = tensors.find(|(name, _)| ends.iter().any(|end| name.ends_with(end)));
        found.map(|(_, stored)| &stored.shape[..])
    }

    /// A number of the metadata.
    pub(crate) fn number(&self, name: &str) -> Option<usize> {
        self.metadata.get(name)?.parse().ok()
    }

    /// The files that have tensors of such names.
    pub(crate) fn files(&self, is_wanted: impl Fn(&str) -> bool) -> BTreeSet<&Path> {
        let wanted = self.tensors.iter().filter(|(name, _)| is_wanted(name));
        wanted.map(|(_, stored)| stored.file.as_path()).collect()
    }
}

/// What a JSON file says.
pub(crate) fn read_json<T: for<'de> Deserialize<'de>>(file: &Path) -> Result<T, CheckpointError> {
    let unreadable = |reason: String| CheckpointError::Unreadable {
        file: file.into(),
        reason,
    };
    let text = std::fs::read(file).map_err(|error| unreadable(error.to_string()))?;
    serde_json::from_slice(&text).map_err(|error| unreadable(error.to_string()))
}

/// What a safetensors file says of its tensors.
fn header(path: &Path) -> Result<Metadata, Box<dyn Error>> {
    let mut file = File::open(path)?;
    let mut size = [0; 8];
    file.read_exact(&mut size)?;
    let size = u64::from_le_bytes(size);
    let rest = file.metadata()?.len().saturating_sub(8);
    if size > rest {
        return Err("it is no safetensors file".into());
    }
    let mut bytes = Vec::new();
    file.take(size).read_to_end(&mut bytes)?;
    let header: Metadata = serde_json::from_slice(&bytes)?;
    // Said now, not when the last block is reached.
    let (expected, found) = (header.data_len() as u64, rest - size);
    match expected == found {
        true => Ok(header),
        false => Err(format!("its tensors take {expected} bytes, of which it has {found}").into()),
    }
}
