//! The record of a whole model without the zeros of its pruned parameters.

use std::collections::HashMap;
use std::path::Path;

use burn::backend::ExecutionError;
use burn::module::{Module, ParamId};
use burn::tensor::{DType, Shape, TensorData};
use burn_lean_reparam::{
    PathVisitor, Rejected, Trail, Training, catch_quietly, map_with_path, settle, visit_with_path,
};
use serde::{Deserialize, Serialize};

use super::codes::{self, Codes};
use super::encoding::{self, Encoding, Layout, Width};
use super::loader::{Kind, Loader, Place, Places, can_hold};
use super::{RecordFault, RecordSizes, TensorSize, file};
use crate::PruneError;
use crate::host::files::FILES;

/// A model's record in few bytes: each tensor is stored dense, with a bitmask, or with the gaps
/// between its nonzero elements, whichever is smallest.
///
/// Of quantized tensors the codes are stored without their zeros, those of less than a byte packed, and
/// the scales as they are: one file for a model that is pruned and quantized.
///
/// Holds what Burn's own record holds (every parameter, running statistics, the state of
/// reparameterizations, identities) in the dtypes that the model has, and loads back bit by bit.
/// For shipping, fold masks in first with [`Module::materialize`]; with masks attached the record
/// also holds the bases and the masks, so that training can go on.
///
/// ```
/// use burn::module::Param;
/// use burn::nn::LinearConfig;
/// use burn::tensor::{Device, Tensor, TensorData};
/// use burn_lean_prune::{SparseRecord, sparse::Encoding};
///
/// // Keeps every 20th of 4000 weights.
/// let device = Device::flex();
/// let weights: Vec<f32> = (0..4000).map(|at| if at % 20 == 0 { 1.0 + at as f32 } else { 0.0 }).collect();
/// let mut linear = LinearConfig::new(100, 40).with_bias(false).init(&device);
/// linear.weight = Param::from_data(TensorData::new(weights, [100, 40]), &device);
///
/// let record = SparseRecord::from_module(&linear)?;
/// let size = &record.sizes()?.tensors[0];
/// assert_eq!((size.dense_bytes, size.encoding), (16000, Encoding::Gaps));
/// // 200 nonzeros of 4 bytes with a gap of 1 byte each.
/// assert_eq!(size.sparse_bytes, 1000);
///
/// let loaded = LinearConfig::new(100, 40).with_bias(false).init(&device);
/// let loaded = SparseRecord::from_bytes(&record.to_bytes()?)?.load_into(loaded)?;
/// assert_eq!(loaded.weight.val().into_data(), linear.weight.val().into_data());
/// # Ok::<(), burn_lean_prune::PruneError>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct SparseRecord {
    tensors: Vec<Stored>,
}

#[derive(Debug, Clone, PartialEq)]
struct Stored {
    entry: Entry,
    bytes: Vec<u8>,
}

/// A tensor in the header of the file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Entry {
    path: String,
    id: u64,
    dtype: DType,
    shape: Vec<usize>,
    #[serde(flatten)]
    layout: Layout,
    /// Of a quantized tensor: how its bytes are split.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    codes: Option<Codes>,
    bytes: usize,
}

impl SparseRecord {
    /// Takes the record of a model. One read from the device for each tensor.
    ///
    /// # Errors
    ///
    /// [`PruneError::Device`] if reading failed.
    pub fn from_module<M: Module>(model: &M) -> Result<Self, PruneError> {
        settle(model);
        let mut collector = Collector(Ok(Vec::new()));
        visit_with_path(model, &mut collector);
        Ok(Self {
            tensors: collector.0?,
        })
    }

    /// Loads the record into a model of the same parameters, in the dtypes of the record.
    ///
    /// Reparameterizations that were recorded must be attached before, as for Burn's records.
    ///
    /// # Errors
    ///
    /// The model comes back in the error, unchanged.
    /// - [`PruneError::RecordOfAnotherModel`]: a parameter is missing here or there, or has
    ///   another shape.
    /// - [`PruneError::RecordKind`]: a parameter holds numbers of another kind.
    /// - [`PruneError::RecordDtype`]: the device cannot hold a dtype of the record.
    /// - [`PruneError::SparseRecord`]: the bytes of a tensor are damaged.
    pub fn load_into<M: Module>(&self, model: M) -> Result<M, Rejected<M, PruneError>> {
        match self.decode_for(&model) {
            // Into a copy: clones share running statistics, which are replaced in place.
            Ok(tensors) => {
                let loaded = map_with_path(model.valid(), &mut Loader(tensors));
                Ok(Training::of(&model).restore(loaded))
            }
            Err(error) => Err(Rejected::new(model, error)),
        }
    }

    /// Writes the record to a file, which is complete at any moment: a crash leaves the old one.
    ///
    /// # Errors
    ///
    /// [`PruneError::Io`].
    pub fn save(&self, path: impl AsRef<Path>) -> Result<(), PruneError> {
        FILES.write(path.as_ref(), &self.to_bytes()?)
    }

    /// Reads a record from a file.
    ///
    /// # Errors
    ///
    /// [`PruneError::Io`] if the file cannot be read, [`PruneError::SparseRecord`] if it is not an
    /// intact record.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, PruneError> {
        let path = path.as_ref();
        let bytes = FILES.read(path)?;
        Self::parse(&bytes).map_err(|fault| PruneError::SparseRecord {
            what: path.display().to_string(),
            fault,
        })
    }

    /// The bytes of the file.
    ///
    /// # Errors
    ///
    /// [`PruneError::SparseRecord`] if the list of tensors cannot be written as JSON.
    pub fn to_bytes(&self) -> Result<Vec<u8>, PruneError> {
        let tensors = self.tensors.iter().map(|tensor| &*tensor.bytes);
        Ok(file::pack(&self.header()?, tensors))
    }

    /// The record in the bytes of a file.
    ///
    /// # Errors
    ///
    /// [`PruneError::SparseRecord`] if they are not those of an intact record.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, PruneError> {
        Self::parse(bytes).map_err(in_memory)
    }

    /// How many bytes each tensor takes.
    ///
    /// # Errors
    ///
    /// As [`to_bytes`](Self::to_bytes).
    pub fn sizes(&self) -> Result<RecordSizes, PruneError> {
        let sizes = self.tensors.iter().map(|Stored { entry, bytes }| {
            let elements: usize = entry.shape.iter().product();
            TensorSize {
                path: entry.path.clone(),
                dtype: entry.dtype,
                shape: entry.shape.clone(),
                nonzeros: entry.layout.nonzeros,
                encoding: entry.layout.encoding,
                dense_bytes: match (&entry.codes, entry.dtype) {
                    (Some(codes), _) => codes.bytes(),
                    (None, DType::QFloat(_)) => bytes.len(),
                    (None, dtype) => elements * dtype.size(),
                },
                sparse_bytes: bytes.len(),
            }
        });
        let tensors: Vec<TensorSize> = sizes.collect();
        let in_tensors: usize = tensors.iter().map(|tensor| tensor.sparse_bytes).sum();
        Ok(RecordSizes {
            dense_bytes: tensors.iter().map(|tensor| tensor.dense_bytes).sum(),
            file_bytes: file::overhead(&self.header()?) + in_tensors,
            tensors,
        })
    }

    fn header(&self) -> Result<Vec<u8>, PruneError> {
        let entries: Vec<&Entry> = self.tensors.iter().map(|tensor| &tensor.entry).collect();
        serde_json::to_vec(&entries).map_err(|error| in_memory(unreadable(error)))
    }

    fn parse(bytes: &[u8]) -> Result<Self, RecordFault> {
        let (header, mut rest) = file::unpack(bytes)?;
        let entries: Vec<Entry> = serde_json::from_slice(&header).map_err(unreadable)?;
        let mut tensors = Vec::with_capacity(entries.len());
        for entry in entries {
            let Some((bytes, after)) = rest.split_at_checked(entry.bytes) else {
                return Err(entry.fault(format!("it has {} of {} bytes", rest.len(), entry.bytes)));
            };
            rest = after;
            let size = entry
                .shape
                .iter()
                .try_fold(entry.dtype.size(), |size, axis| size.checked_mul(*axis));
            if size.is_none() {
                return Err(entry.fault("it has more bytes than can be addressed"));
            }
            let bytes = bytes.to_vec();
            tensors.push(Stored { entry, bytes });
        }
        match rest {
            [] => Ok(Self { tensors }),
            _ => Err(unreadable(format!(
                "{} bytes belong to no tensor",
                rest.len()
            ))),
        }
    }

    /// Every tensor of the record by its path, if they are those of `model`.
    fn decode_for<M: Module>(
        &self,
        model: &M,
    ) -> Result<HashMap<String, (ParamId, TensorData)>, PruneError> {
        let mut places = Places::default();
        visit_with_path(model, &mut places);
        let mut decoded = HashMap::new();
        for Stored { entry, bytes } in &self.tensors {
            let place = places.remaining.remove(&entry.path);
            let place = place.filter(|place| place.shape == entry.shape);
            let Some(Place { device, kind, .. }) = place else {
                return Err(PruneError::RecordOfAnotherModel {
                    path: entry.path.clone(),
                    record: Some(entry.shape.clone()),
                    model: places.shapes.get(&entry.path).cloned(),
                });
            };
            if Kind::of(entry.dtype) != kind {
                return Err(PruneError::RecordKind {
                    path: entry.path.clone(),
                    dtype: entry.dtype,
                    model: kind.to_string(),
                });
            }
            let data = entry.decode(bytes).map_err(in_memory)?;
            if !can_hold(&device, &data) {
                return Err(PruneError::RecordDtype {
                    path: entry.path.clone(),
                    dtype: entry.dtype,
                    device: format!("{device:?}"),
                });
            }
            decoded.insert(entry.path.clone(), (ParamId::from(entry.id), data));
        }
        // The first in the order of paths, so that the message is the same every time.
        match places.remaining.into_iter().min_by(|a, b| a.0.cmp(&b.0)) {
            Some((path, place)) => Err(PruneError::RecordOfAnotherModel {
                path,
                record: None,
                model: Some(place.shape),
            }),
            None => Ok(decoded),
        }
    }
}

impl Stored {
    fn new(path: String, id: ParamId, data: TensorData) -> Self {
        let (bytes, shape, dtype) = data.into_parts();
        let (codes, layout, bytes) = match dtype {
            DType::QFloat(scheme) => match codes::encode(&scheme, &shape, &bytes) {
                Some((codes, layout, bytes)) => (Some(codes), layout, bytes),
                None => {
                    let layout = Layout {
                        encoding: Encoding::Dense,
                        nonzeros: shape.num_elements(),
                        uniform: false,
                    };
                    (None, layout, bytes.to_vec())
                }
            },
            _ => {
                let (layout, bytes) = encoding::encode(&bytes, Width::Bytes(dtype.size()));
                (None, layout, bytes)
            }
        };
        let entry = Entry {
            path,
            id: id.val(),
            dtype,
            shape: shape.to_vec(),
            layout,
            codes,
            bytes: bytes.len(),
        };
        Self { entry, bytes }
    }
}

impl Entry {
    fn fault(&self, reason: impl Into<String>) -> RecordFault {
        RecordFault::Tensor {
            path: self.path.clone(),
            reason: reason.into(),
        }
    }

    fn decode(&self, bytes: &[u8]) -> Result<TensorData, RecordFault> {
        let decoded = match (&self.codes, self.dtype) {
            (Some(codes), DType::QFloat(scheme)) => {
                let shape = Shape::from(self.shape.clone());
                codes::decode(codes, &self.layout, bytes, &scheme, &shape)
            }
            (Some(_), _) => Err("it has codes, but is not quantized".into()),
            (None, DType::QFloat(scheme)) => {
                let shape = Shape::from(self.shape.clone());
                codes::check_length(&scheme, &shape, bytes.len()).and_then(|()| {
                    encoding::decode(&self.layout, bytes, bytes.len(), Width::Bytes(1))
                })
            }
            (None, dtype) => {
                let elements = self.shape.iter().product();
                encoding::decode(&self.layout, bytes, elements, Width::Bytes(dtype.size()))
            }
        };
        let bytes = decoded.map_err(|reason| self.fault(reason))?;
        Ok(TensorData::from_bytes_vec(
            bytes,
            self.shape.clone(),
            self.dtype,
        ))
    }
}

fn unreadable(error: impl ToString) -> RecordFault {
    RecordFault::Header {
        reason: error.to_string(),
    }
}

fn in_memory(fault: RecordFault) -> PruneError {
    PruneError::SparseRecord {
        what: "the sparse record".into(),
        fault,
    }
}

struct Collector(Result<Vec<Stored>, PruneError>);

impl Collector {
    fn push(
        &mut self,
        at: &Trail,
        id: ParamId,
        read: impl FnOnce() -> Result<TensorData, ExecutionError>,
    ) {
        let Ok(tensors) = &mut self.0 else {
            return;
        };
        // Burn panics in a debug build where some numbers of bytes come back from a GPU.
        let data = catch_quietly(read).and_then(|data| data.map_err(|error| error.to_string()));
        match data {
            Ok(data) => tensors.push(Stored::new(at.path(), id, data)),
            Err(reason) => self.0 = Err(PruneError::Device { reason }),
        }
    }
}

impl PathVisitor for Collector {
    burn_lean_reparam::visit_kinds!(float, int, bool: |self, at, param| {
        let value = param.transform_for_save().val();
        self.push(at, param.id, || value.try_into_data());
    });
}
