//! Writing.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use burn::backend::ExecutionError;
use burn::module::{Module, Param};
use burn::tensor::{Bool, FloatDType, Int, Tensor, TensorData};
use burn_lean_reparam::sealed::seal_head;
use burn_lean_reparam::{PathVisitor, Trail, each_float, settle, visit_with_path};
use safetensors::tensor::{Dtype, TensorView};

use super::activations::activations;
use super::{DTYPES, Entry, FILES, FORMAT, FileError, VERSION};
use crate::codes::weights::each_weight;
use crate::module::effective::FileNames;
use crate::module::walk::{Site, quantizers};
use crate::{QuantError, QuantizedTensor};

/// Writes a prepared or converted model; its quantized weights as packed codes. Returns the size
/// of the file in bytes.
///
/// # Errors
///
/// [`QuantError::File`] when it cannot be written, [`QuantError::Device`] when reading the model
/// fails, and what [`quantized_weights`](crate::quantized_weights) finds.
pub fn save_safetensors<M: Module>(model: &M, path: impl AsRef<Path>) -> Result<u64, QuantError> {
    settle(model);
    let path = path.as_ref();
    let file = FileError::new(path);
    let mut tensors: BTreeMap<String, Stored> = BTreeMap::new();
    let mut entries: BTreeMap<String, Entry> = BTreeMap::new();
    let dtypes = dtypes(model);
    each_weight(model, |name, weight, _| {
        store_weight(name, &weight, &mut tensors)?;
        let entry = Entry {
            shape: weight.shape().to_vec(),
            scheme: weight.scheme().clone(),
            dtype: dtypes.get(name).copied().unwrap_or(FloatDType::F32),
        };
        entries.insert(name.to_string(), entry);
        Ok(())
    })?;
    let activations = activations(model);
    let names = FileNames::of(model, |path| entries.contains_key(path));
    let mut collector = Collector {
        quantized: &entries,
        names: names.without_ranges(activations.keys().cloned()),
        tensors,
        error: None,
    };
    visit_with_path(model, &mut collector);
    if let Some(error) = collector.error {
        return Err(error);
    }
    let quantized = serde_json::to_string(&entries).map_err(|error| file.write(error))?;
    let named = activations.iter();
    let named = named.map(|(path, of)| (collector.names.name(path), of));
    let activations = serde_json::to_string(&named.collect::<BTreeMap<_, _>>());
    let activations = activations.map_err(|error| file.write(error))?;
    let metadata = HashMap::from([
        ("format".to_string(), FORMAT.to_string()),
        ("version".to_string(), VERSION.to_string()),
        ("quantized".to_string(), quantized),
        ("activations".to_string(), activations),
    ]);
    write(&collector.tensors, metadata, path)
}

/// Puts the packed codes, scales and zero points of a weight among the tensors of a file.
fn store_weight(
    name: &str,
    weight: &QuantizedTensor,
    tensors: &mut BTreeMap<String, Stored>,
) -> Result<(), QuantError> {
    let groups = weight.scheme().group_shape(weight.shape())?;
    let codes = weight.pack();
    tensors.insert(
        format!("{name}.codes"),
        Stored::new(Dtype::U8, vec![codes.len()], codes),
    );
    let floats = |values: &[f32]| {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes());
        Stored::new(Dtype::F32, groups.clone(), bytes.collect())
    };
    tensors.insert(format!("{name}.scale"), floats(weight.scale()));
    if !weight.scheme().mapping.is_symmetric() {
        tensors.insert(format!("{name}.zero_point"), floats(weight.zero_point()));
    }
    Ok(())
}

/// Writes a file, which is there only when it is complete; returns its bytes.
pub(crate) fn write(
    tensors: &BTreeMap<String, Stored>,
    metadata: HashMap<String, String>,
    path: &Path,
) -> Result<u64, QuantError> {
    let file = FileError::new(path);
    let mut views = tensors
        .iter()
        .map(|(name, stored)| Ok((name.clone(), stored.view()?)))
        .collect::<Result<Vec<_>, safetensors::SafeTensorError>>()
        .map_err(|error| file.write(error))?;
    let head = seal_head(&mut views, metadata).map_err(|error| file.write(error))?;
    // One after the other: all of them once more would take the memory of a second model.
    let parts = views.iter().map(|(_, view)| view.data());
    let parts = std::iter::once(head.as_slice()).chain(parts);
    let bytes = parts.clone().map(<[u8]>::len).sum::<usize>();
    FILES.write_parts(path, parts)?;
    Ok(bytes as u64)
}

/// The dtype of the values of each weight that carries a quantizer, by path.
fn dtypes<M: Module>(model: &M) -> HashMap<String, FloatDType> {
    let weights = quantizers(model)
        .into_iter()
        .filter(|located| located.site == Site::Weight);
    let converted =
        weights.filter_map(|located| Some((located.parameter?, located.quantizer.dtype())));
    let mut dtypes: HashMap<String, FloatDType> = converted.collect();
    each_float(model, |at, float| {
        let dtype = float.dtype();
        if let Some(known) = dtypes.get_mut(&at.path()).filter(|_| dtype.is_float()) {
            *known = FloatDType::from(dtype);
        }
    });
    dtypes
}

/// A tensor of the file to be.
pub(crate) struct Stored {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl Stored {
    pub(crate) fn new(dtype: Dtype, shape: Vec<usize>, bytes: Vec<u8>) -> Self {
        Self {
            dtype,
            shape,
            bytes,
        }
    }

    /// Bytes of its elements.
    pub(crate) fn len(&self) -> usize {
        self.bytes.len()
    }

    fn view(&self) -> Result<TensorView<'_>, safetensors::SafeTensorError> {
        TensorView::new(self.dtype, self.shape.clone(), &self.bytes)
    }
}

struct Collector<'a> {
    quantized: &'a BTreeMap<String, Entry>,
    names: FileNames,
    tensors: BTreeMap<String, Stored>,
    error: Option<QuantError>,
}

impl Collector<'_> {
    fn store(&mut self, path: &str, data: impl FnOnce() -> Result<TensorData, ExecutionError>) {
        let Some(path) = self.names.of_tensor(path) else {
            return;
        };
        let stored = match data() {
            Ok(data) => {
                let dtype = DTYPES.iter().find(|(dtype, _)| *dtype == data.dtype());
                match dtype {
                    Some((_, stored)) => {
                        let shape = data.shape().to_vec();
                        Ok(Stored::new(*stored, shape, data.as_bytes().to_vec()))
                    }
                    None => Err(QuantError::UnsupportedLayer {
                        path: path.clone(),
                        reason: format!("a file cannot hold {:?}", data.dtype()),
                    }),
                }
            }
            Err(error) => Err(QuantError::device(error)),
        };
        match stored {
            Ok(stored) => {
                self.tensors.insert(path, stored);
            }
            Err(error) => {
                self.error.get_or_insert(error);
            }
        }
    }
}

impl PathVisitor for Collector<'_> {
    fn float<const D: usize>(&mut self, at: &Trail, param: &Param<Tensor<D>>) {
        let path = at.path();
        if !self.quantized.contains_key(&path) {
            self.store(&path, || param.base().without_autodiff().try_into_data());
        }
    }

    fn int<const D: usize>(&mut self, at: &Trail, param: &Param<Tensor<D, Int>>) {
        self.store(&at.path(), || param.base().try_into_data());
    }

    fn bool<const D: usize>(&mut self, at: &Trail, param: &Param<Tensor<D, Bool>>) {
        // Bytes: a bool's own layout is the backend's.
        self.store(&at.path(), || param.base().int().try_into_data());
    }
}
