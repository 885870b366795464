//! The tensors of one batch between two operations, in memory or in a file.

use std::collections::HashMap;
use std::fmt::Display;
use std::fs::File;
use std::io::{BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use burn::backend::ir::TensorId;
use burn::backend::{DispatchDevice, DispatchTensor, ExecutionError, TensorMetadata};
use burn::tensor::{Bool, DType, Int, Tensor, TensorData};

use super::Pass;
use crate::GraphError;
use crate::execute::upload;

/// Tensors by name and pass: of the replaced pass those alone that differ from the original one.
pub(super) type Live = HashMap<(TensorId, Pass), DispatchTensor>;

/// What is alive of a batch.
#[derive(Debug, Clone)]
pub(super) enum Lane {
    Memory(Live),
    Disk(Arc<Spilled>),
}

/// In how many files the lanes of a walk are: a process may have few open, on a Mac 256. With one file, what lanes
/// were before they move on would stay on the disk until the last of them has moved.
pub(super) const FILES: usize = 8;

/// Tensors in a part of a file.
#[derive(Debug)]
pub(super) struct Spilled {
    file: Arc<Unnamed>,
    entries: HashMap<(TensorId, Pass), Entry>,
}

/// A file without a name, which goes with the last lane in it, or with the process, however that ends.
#[derive(Debug)]
struct Unnamed {
    file: File,
    /// Where the file is, for messages.
    folder: PathBuf,
}

/// Writes lanes into one file, one after the other.
#[derive(Debug)]
pub(super) struct Spill {
    file: Arc<Unnamed>,
    /// Where the next lane begins.
    offset: u64,
}

#[derive(Debug)]
struct Entry {
    offset: u64,
    bytes: usize,
    shape: Vec<usize>,
    dtype: DType,
}

impl Lane {
    /// All tensors, in memory.
    pub(super) fn load(&self, device: &DispatchDevice) -> Result<Live, GraphError> {
        match self {
            Self::Memory(live) => Ok(live.clone()),
            Self::Disk(spilled) => {
                let entries = spilled.entries.iter();
                entries
                    .map(|(key, entry)| Ok((*key, spilled.read(entry, device)?)))
                    .collect()
            }
        }
    }

    /// Takes the tensors out, where they are in memory.
    pub(super) fn take(&mut self, device: &DispatchDevice) -> Result<Live, GraphError> {
        match self {
            Self::Memory(live) => Ok(std::mem::take(live)),
            Self::Disk(_) => self.load(device),
        }
    }

    pub(super) fn get(
        &self,
        id: TensorId,
        pass: Pass,
        device: &DispatchDevice,
    ) -> Result<Option<DispatchTensor>, GraphError> {
        match self {
            Self::Memory(live) => Ok(live.get(&(id, pass)).cloned()),
            Self::Disk(spilled) => match spilled.entries.get(&(id, pass)) {
                Some(entry) => spilled.read(entry, device).map(Some),
                None => Ok(None),
            },
        }
    }

    /// Bytes of the tensors that it holds in memory.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Memory(live) => live.values().map(bytes_of).sum(),
            Self::Disk(_) => 0,
        }
    }
}

impl Spill {
    pub(super) fn new(folder: &Path) -> Result<Self, GraphError> {
        let file = tempfile::tempfile_in(folder).map_err(|error| failed(folder, error))?;
        let folder = folder.into();
        Ok(Self {
            file: Arc::new(Unnamed { file, folder }),
            offset: 0,
        })
    }

    pub(super) fn write(&mut self, live: Live) -> Result<Lane, GraphError> {
        let shared = self.file.clone();
        let failed = |error| failed(&shared.folder, error);
        let mut entries = HashMap::new();
        let mut writer = BufWriter::new(&shared.file);
        for (key, tensor) in live {
            let data = host(tensor).map_err(unread)?;
            writer.write_all(data.as_bytes()).map_err(failed)?;
            let entry = Entry {
                offset: self.offset,
                bytes: data.as_bytes().len(),
                shape: data.shape().to_vec(),
                dtype: data.dtype(),
            };
            self.offset += entry.bytes as u64;
            entries.insert(key, entry);
        }
        writer.flush().map_err(failed)?;
        drop(writer);
        Ok(Lane::Disk(Arc::new(Spilled {
            file: shared,
            entries,
        })))
    }
}

impl Spilled {
    fn read(&self, entry: &Entry, device: &DispatchDevice) -> Result<DispatchTensor, GraphError> {
        let failed = |error| failed(&self.file.folder, error);
        let mut file = &self.file.file;
        file.seek(SeekFrom::Start(entry.offset)).map_err(failed)?;
        let mut bytes = vec![0; entry.bytes];
        file.read_exact(&mut bytes).map_err(failed)?;
        let data = TensorData::from_bytes_vec(bytes, entry.shape.clone(), entry.dtype);
        Ok(upload(data, device))
    }
}

pub(super) fn bytes_of(tensor: &DispatchTensor) -> usize {
    tensor.shape().num_elements() * tensor.dtype().size()
}

/// The values of a tensor of any kind; a dispatch tensor knows its shape.
pub fn host(tensor: DispatchTensor) -> Result<TensorData, ExecutionError> {
    let dtype = tensor.dtype();
    if dtype.is_bool() {
        Tensor::<1, Bool>::from_dispatch(tensor).try_into_data()
    } else if dtype.is_int() || dtype.is_uint() {
        Tensor::<1, Int>::from_dispatch(tensor).try_into_data()
    } else {
        Tensor::<1>::from_dispatch(tensor).try_into_data()
    }
}

/// Of numbers that could not be read back.
pub(super) fn unread(error: impl Display) -> GraphError {
    GraphError::Device {
        reason: error.to_string(),
    }
}

pub(super) fn failed(folder: &Path, error: std::io::Error) -> GraphError {
    GraphError::Spill {
        folder: folder.into(),
        reason: error.to_string(),
    }
}
