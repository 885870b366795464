//! Finished blocks in a folder.

use std::borrow::Cow;
use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

use burn::module::Module;
use burn::tensor::TensorData;
use burn_lean_graph::{Graph, TensorMapper, Tensors};
use burn_lean_reparam::sealed::seal_head;
use burn_lean_reparam::{Files, each_float};
use safetensors::tensor::{Dtype, View};
use serde::{Deserialize, Serialize};

use crate::sealed::Sealed;
use crate::{BlockReport, CompressedWeight, Grid, LayerReport, OneShotError, Preset};

/// What a block has become.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Finished {
    pub(crate) block: BlockReport,
    pub(crate) layers: Vec<LayerReport>,
    pub(crate) weights: Vec<CompressedWeight>,
    /// Parameters of one dimension that were rescaled.
    pub(crate) vectors: Vec<(String, Vec<f32>)>,
}

impl Finished {
    pub(crate) fn new(path: &str) -> Self {
        Self {
            block: BlockReport {
                path: path.into(),
                seconds: 0.0,
                activation_bytes: 0,
                gram_bytes: 0,
                resumed: false,
            },
            layers: Vec::new(),
            weights: Vec::new(),
            vectors: Vec::new(),
        }
    }
}

/// A folder with a manifest and a file for each finished block.
#[derive(Debug)]
pub(crate) struct State {
    folder: PathBuf,
    /// CRC-32 of the manifest and of what blocks have become.
    noted: u32,
}

/// Of which model, data and preset a folder is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Manifest {
    format: u32,
    preset: Preset,
    /// The blocks that are taken of those that are found; `None` for all.
    #[serde(default)]
    only: Option<BTreeSet<String>>,
    /// CRC-32 of parameters, of batches, and of operations with the numbers in them. Of a part behind another one
    /// the batches are what that one's state is of, and what it has become.
    model: u32,
    batches: u32,
    #[serde(default)]
    operations: u32,
}

/// What a file says besides tensors.
#[derive(Debug, Serialize, Deserialize)]
struct Header {
    block: BlockReport,
    layers: Vec<LayerReport>,
    weights: Vec<Shape>,
    vectors: Vec<String>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Shape {
    path: String,
    outputs: usize,
    inputs: usize,
    transposed: bool,
    /// Bits, group, symmetric.
    grid: Option<(u8, usize, bool)>,
}

/// CRC-32 of calibration batches.
pub(crate) fn checksum<I: Tensors>(batches: &[I]) -> u32 {
    let mut checksum = Checksum::default();
    for batch in batches {
        let _ = batch.map_tensors(&mut checksum);
    }
    checksum.0.finalize()
}

pub(crate) fn fingerprint<M: Module>(
    model: &M,
    graph: &Graph,
    batches: u32,
    preset: &Preset,
    only: Option<&BTreeSet<String>>,
) -> Manifest {
    let mut of_model = Checksum::default();
    each_float(model, |_, float| of_model.add(&float.data()));
    // A table of rotations and the epsilon of a norm are no parameters.
    let mut of_operations = Checksum::default();
    for node in graph.nodes() {
        let operation = format!("{:?}", node.operation());
        of_operations.0.update(operation.as_bytes());
    }
    let mut constants: Vec<_> = graph.constants().collect();
    constants.sort_by_key(|(id, _)| *id);
    constants
        .into_iter()
        .for_each(|(_, data)| of_operations.add(data));
    Manifest {
        format: 5,
        preset: preset.clone(),
        only: only.cloned(),
        model: of_model.0.finalize(),
        batches,
        operations: of_operations.0.finalize(),
    }
}

#[derive(Default)]
struct Checksum(crc32fast::Hasher);

impl Checksum {
    fn add(&mut self, data: &TensorData) {
        for size in data.shape().to_vec() {
            self.0.update(&(size as u64).to_le_bytes());
        }
        self.0.update(data.as_bytes());
    }
}

impl TensorMapper for Checksum {
    burn_lean_graph::every_kind!(|self, tensor| {
        self.add(&tensor.to_data());
        tensor.clone()
    });
}

pub(crate) fn failed(file: &Path, reason: impl ToString) -> OneShotError {
    OneShotError::File {
        file: file.display().to_string(),
        reason: reason.to_string(),
    }
}

/// Fails with [`OneShotError::File`].
const FILES: Files<OneShotError> = Files(|_, path, error| failed(path, error));

/// Writes a file of tensors, which is there only when it is complete.
pub(crate) fn write(
    file: &Path,
    mut tensors: Vec<(String, Raw)>,
    metadata: HashMap<String, String>,
) -> Result<(), OneShotError> {
    let head = seal_head(&mut tensors, metadata).map_err(|error| failed(file, error))?;
    // One after the other: all of them once more would take the memory of a second model.
    let parts = tensors.iter().map(|(_, tensor)| tensor.data.as_slice());
    FILES.write_parts(file, std::iter::once(head.as_slice()).chain(parts))
}

impl State {
    pub(crate) fn open(folder: &Path, manifest: Manifest) -> Result<Self, OneShotError> {
        fs::create_dir_all(folder).map_err(|error| failed(folder, error))?;
        let file = folder.join("manifest.json");
        let own = serde_json::to_vec_pretty(&manifest).map_err(|error| failed(&file, error))?;
        // A decimal number may be read back one bit off: what is compared was read back, both.
        let manifest: Manifest =
            serde_json::from_slice(&own).map_err(|error| failed(&file, error))?;
        let found = match fs::read(&file) {
            Ok(bytes) => Some(bytes),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
            Err(error) => return Err(failed(&file, error)),
        };
        let entries = fs::read_dir(folder).map_err(|error| failed(folder, error))?;
        let mut names = entries.flatten().map(|entry| entry.file_name());
        let block = names.find(|name| name.to_string_lossy().starts_with("block-"));
        let state = Self {
            folder: folder.into(),
            noted: crc32fast::hash(&own),
        };
        let bytes = match (found, block) {
            // Whatever run began here, it finished nothing.
            (_, None) => {
                FILES.write(&file, &own)?;
                return Ok(state);
            }
            // Nothing says of which model and preset it is.
            (None, Some(name)) => {
                return Err(failed(
                    &folder.join(name),
                    "this block is of a run whose manifest.json is gone: choose another folder, \
                     or remove all of this one",
                ));
            }
            (Some(bytes), Some(_)) => bytes,
        };
        let found: Manifest =
            serde_json::from_slice(&bytes).map_err(|error| failed(&file, error))?;
        let what = match () {
            () if found.format != manifest.format => "another version of this crate",
            () if found.preset != manifest.preset => "another preset",
            () if found.only != manifest.only => "other blocks",
            () if found.model != manifest.model => "other parameters of the model",
            () if found.batches != manifest.batches => {
                "other calibration batches, or of other blocks before it"
            }
            () if found.operations != manifest.operations => {
                "other operations of the model, or other numbers in them"
            }
            () => return Ok(state),
        };
        Err(failed(
            &file,
            format!(
                "this state is of {what}: choose another folder, or remove all of {}",
                folder.display()
            ),
        ))
    }

    /// Takes note of what a block has become.
    pub(crate) fn note(&mut self, done: &Finished) {
        let mut checksum = crc32fast::Hasher::new_with_initial(self.noted);
        let weights = done.weights.iter().map(|weight| &weight.values);
        let vectors = done.vectors.iter().map(|(_, values)| values);
        for part in weights
            .chain(vectors)
            .flat_map(|values| values.chunks(4096))
        {
            let bytes: Vec<u8> = part.iter().flat_map(|value| value.to_le_bytes()).collect();
            checksum.update(&bytes);
        }
        self.noted = checksum.finalize();
    }

    /// CRC-32 of what it is of, and of what its blocks have become.
    pub(crate) fn checksum(self) -> u32 {
        self.noted
    }

    fn file(&self, number: usize) -> PathBuf {
        self.folder.join(format!("block-{number:04}.safetensors"))
    }

    pub(crate) fn store(&self, number: usize, done: &Finished) -> Result<(), OneShotError> {
        let file = self.file(number);
        let header = Header {
            block: done.block.clone(),
            layers: done.layers.clone(),
            weights: done.weights.iter().map(Shape::of).collect(),
            vectors: done.vectors.iter().map(|(path, _)| path.clone()).collect(),
        };
        let mut tensors: Vec<(String, Raw)> = Vec::new();
        for weight in &done.weights {
            let named = |what: &str| format!("{}.{what}", weight.path);
            match &weight.grid {
                // The values follow from it.
                Some(grid) => {
                    tensors.push((named("codes"), Raw::bytes(grid.codes.clone())));
                    tensors.push((named("scales"), Raw::floats(&grid.scales)));
                    tensors.push((named("zero_points"), Raw::bytes(grid.zero_points.clone())));
                }
                None => tensors.push((named("values"), Raw::floats(&weight.values))),
            }
        }
        for (path, values) in &done.vectors {
            tensors.push((path.clone(), Raw::floats(values)));
        }
        let header = serde_json::to_string(&header).map_err(|error| failed(&file, error))?;
        let metadata = HashMap::from([("block".to_string(), header)]);
        write(&file, tensors, metadata)
    }

    /// A block that was finished before; `None` where there is none.
    pub(crate) fn load(&self, number: usize, path: &str) -> Result<Option<Finished>, OneShotError> {
        let file = self.file(number);
        let bytes = match fs::read(&file) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failed(&file, error)),
        };
        let damaged =
            |why: String| failed(&file, format!("{why}. Remove it to do its block again"));
        let read = || -> Result<Finished, String> {
            let sealed = Sealed::open(&bytes)?;
            let header = sealed.said("block").ok_or("no header")?;
            let header: Header = serde_json::from_str(header).map_err(|error| error.to_string())?;
            let mut weights = Vec::new();
            for shape in header.weights {
                let named = |what: &str| format!("{}.{what}", shape.path);
                let mut weight = CompressedWeight {
                    path: shape.path.clone(),
                    outputs: shape.outputs,
                    inputs: shape.inputs,
                    transposed: shape.transposed,
                    values: Vec::new(),
                    grid: None,
                };
                match shape.grid {
                    Some((bits, group, symmetric)) => {
                        let grid = Grid {
                            bits,
                            group,
                            symmetric,
                            codes: sealed.bytes(&named("codes"))?.to_vec(),
                            scales: sealed.floats(&named("scales"))?,
                            zero_points: sealed.bytes(&named("zero_points"))?.to_vec(),
                        };
                        if !grid.fits(weight.outputs, weight.inputs) {
                            return Err(format!("the grid of `{}` has another size", weight.path));
                        }
                        weight.values = grid.values(weight.inputs);
                        weight.grid = Some(grid);
                    }
                    None => weight.values = sealed.floats(&named("values"))?,
                }
                if weight.outputs.checked_mul(weight.inputs) != Some(weight.values.len()) {
                    return Err(format!("`{}` has another size", weight.path));
                }
                weights.push(weight);
            }
            let mut vectors = Vec::new();
            for path in header.vectors {
                let values = sealed.floats(&path)?;
                vectors.push((path, values));
            }
            Ok(Finished {
                block: BlockReport {
                    resumed: true,
                    ..header.block
                },
                layers: header.layers,
                weights,
                vectors,
            })
        };
        let done = read().map_err(damaged)?;
        match done.block.path == path {
            true => Ok(Some(done)),
            false => Err(failed(
                &file,
                format!("is of block `{}`, not `{path}`", done.block.path),
            )),
        }
    }
}

impl Shape {
    fn of(weight: &CompressedWeight) -> Self {
        Self {
            path: weight.path.clone(),
            outputs: weight.outputs,
            inputs: weight.inputs,
            transposed: weight.transposed,
            grid: weight
                .grid
                .as_ref()
                .map(|one| (one.bits, one.group, one.symmetric)),
        }
    }
}

/// Numbers of a safetensors file, in one dimension.
pub(crate) struct Raw {
    dtype: Dtype,
    shape: Vec<usize>,
    data: Vec<u8>,
}

impl Raw {
    pub(crate) fn bytes(data: Vec<u8>) -> Self {
        Self {
            dtype: Dtype::U8,
            shape: vec![data.len()],
            data,
        }
    }

    pub(crate) fn floats(values: &[f32]) -> Self {
        Self::shaped(values, vec![values.len()])
    }

    pub(crate) fn shaped(values: &[f32], shape: Vec<usize>) -> Self {
        // A collected iterator of bytes would take up to twice the memory.
        let mut data = Vec::with_capacity(size_of_val(values));
        data.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        Self {
            dtype: Dtype::F32,
            shape,
            data,
        }
    }
}

impl View for Raw {
    fn dtype(&self) -> Dtype {
        self.dtype
    }
    fn shape(&self) -> &[usize] {
        &self.shape
    }
    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.data)
    }
    fn data_len(&self) -> usize {
        self.data.len()
    }
}
