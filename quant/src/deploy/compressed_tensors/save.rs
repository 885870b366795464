//! Writing.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use burn::backend::ExecutionError;
use burn::module::{Module, Param};
use burn::tensor::{Bool, Int, Tensor, TensorData};
use burn_lean_reparam::{PathVisitor, Trail, settle, visit_with_path};
use safetensors::tensor::Dtype;
use serde::{Deserialize, Serialize};

use super::codes::{Codes, Input};
use super::config::{Arguments, Group, INT, KEY, PACKED, QuantizationConfig};
use super::layout::{Names, Place, pack, turn, turn_bytes, words};
use crate::codes::weights::seen_weights;
use crate::deploy::safetensors_file::{DTYPES, FileError, Stored, write};
use crate::module::walk::{Located, Site, quantizers};
use crate::{QuantError, QuantizedTensor};

/// What a file in the layout of compressed-tensors holds, and what it does not.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub struct CompressedReport {
    /// Bytes of the file, or of all files of weights in a folder.
    pub bytes: u64,
    /// `int-quantized`, `pack-quantized`, `mixed-precision` for both, or `dense` where nothing is
    /// quantized.
    pub format: String,
    /// Names, without `_packed`, of the weights that are stored as codes.
    pub quantized: Vec<String>,
    /// Paths in the model of what the layout has no place for, and why: quantized weights, which are stored as floats of the
    /// values of their codes, and quantizers of activations, which are not stored.
    pub left_out: Vec<(String, String)>,
}

/// Writes a prepared or converted model in the layout of
/// [compressed-tensors](https://github.com/vllm-project/compressed-tensors); see the [module](super).
///
/// Matrices with one scale for the tensor, an output or a group of inputs become codes: bytes where the input
/// of the layer is rounded too, words (`pack-quantized`) where weights alone are. Kernels of convolutions, number formats that are no integers, and other groups stay floats. Which is which, the
/// report says. Programs that look for a folder with `config.json` read that of a
/// [`PretrainedFolder`](super::PretrainedFolder).
///
/// # Errors
///
/// [`QuantError::File`] when it cannot be written, [`QuantError::Device`] when reading the model fails,
/// and what [`seen_weights`] finds.
pub fn save_compressed_tensors<M: Module>(
    model: &M,
    path: impl AsRef<Path>,
) -> Result<CompressedReport, QuantError> {
    let file = FileError::new(path.as_ref());
    let written = Written::of(model, &str::to_string, &file)?;
    let Written {
        tensors,
        groups,
        floats,
        mut report,
    } = written;
    let config = QuantizationConfig::of(groups, floats);
    report.format.clone_from(&config.format);
    let config = serde_json::to_string(&config).map_err(|error| file.write(error))?;
    let metadata = HashMap::from([
        ("format".to_string(), "pt".to_string()),
        (KEY.to_string(), config),
    ]);
    report.bytes = write(&tensors, metadata, path.as_ref())?;
    Ok(report)
}

/// What a model becomes in files of the layout.
pub(super) struct Written {
    pub(super) tensors: BTreeMap<String, Stored>,
    pub(super) groups: Vec<Group>,
    /// Linear layers whose weights are floats.
    pub(super) floats: Vec<String>,
    /// Without bytes and format.
    pub(super) report: CompressedReport,
}

impl Written {
    /// With these names.
    pub(super) fn of<M: Module>(
        model: &M,
        names: Names<'_>,
        file: &FileError<'_>,
    ) -> Result<Self, QuantError> {
        settle(model);
        let mut inputs: HashMap<String, Located> = HashMap::new();
        let mut report = CompressedReport::default();
        for located in quantizers(model) {
            let quantizes = located.quantizer.is_enabled() && located.quantizer.phase().quantizes();
            match (located.site, &located.parameter) {
                _ if !quantizes => {}
                (Site::Weight, _) => {}
                (Site::Input, Some(parameter)) => {
                    inputs.insert(parameter.clone(), located);
                }
                _ => report.left_out.push((
                    located.name(),
                    "the layout has quantizers at inputs of layers alone".into(),
                )),
            }
        }
        let mut weights = HashMap::new();
        for (path, codes, is_seen) in seen_weights(model)? {
            match is_seen {
                true => drop(weights.insert(path, codes)),
                false => {
                    let reason = "what acts behind its quantizer is not in its codes".to_string();
                    report.left_out.push((path, reason));
                }
            }
        }
        let mut writer = Writer {
            names,
            file,
            weights,
            inputs,
            written: Self {
                tensors: BTreeMap::new(),
                groups: Vec::new(),
                floats: Vec::new(),
                report,
            },
            error: None,
        };
        // As the deployed model computes: masks and adapters are in the values.
        visit_with_path(&model.valid().materialize(), &mut writer);
        if let Some(error) = writer.error {
            return Err(error);
        }
        let mut written = writer.written;
        for located in writer.inputs.into_values() {
            let reason = "its weight is not quantized to codes".to_string();
            written.report.left_out.push((located.name(), reason));
        }
        written.report.left_out.sort();
        Ok(written)
    }
}

struct Writer<'a> {
    names: Names<'a>,
    file: &'a FileError<'a>,
    weights: HashMap<String, QuantizedTensor>,
    inputs: HashMap<String, Located>,
    written: Written,
    error: Option<QuantError>,
}

fn floats(values: &[f32], shape: Vec<usize>) -> Stored {
    let bytes = values.iter().flat_map(|value| value.to_le_bytes());
    Stored::new(Dtype::F32, shape, bytes.collect())
}

fn integers(values: &[i32], shape: Vec<usize>) -> Stored {
    let bytes = values.iter().flat_map(|value| value.to_le_bytes());
    Stored::new(Dtype::I32, shape, bytes.collect())
}

fn bytes(values: &[i32], shape: Vec<usize>) -> Stored {
    let bytes = values.iter().map(|value| *value as i8 as u8).collect();
    Stored::new(Dtype::I8, shape, bytes)
}

fn sizes(values: &[usize], shape: Vec<usize>) -> Stored {
    let bytes = values
        .iter()
        .flat_map(|value| (*value as i64).to_le_bytes());
    Stored::new(Dtype::I64, shape, bytes.collect())
}

impl Writer<'_> {
    fn put(&mut self, name: String, stored: Stored) {
        if self.written.tensors.contains_key(&name) {
            let twice = format!("two tensors of the model are named `{name}` in it");
            self.error.get_or_insert(self.file.write(twice));
        }
        self.written.tensors.insert(name, stored);
    }

    /// How the input of the layer of the weight at `path` is rounded, of which the layout has a place for
    /// some kinds.
    fn input(&mut self, place: &Place, path: &str) -> Option<Arguments> {
        let located = self.inputs.remove(path)?;
        match Input::of(&located) {
            Ok(Ok(Input { arguments, range })) => {
                if let Some((scale, zero)) = range {
                    self.put(place.in_layer("input_scale"), floats(&[scale], vec![1]));
                    if !arguments.symmetric {
                        let name = place.in_layer("input_zero_point");
                        self.put(name, bytes(&[zero], vec![1]));
                    }
                }
                return Some(arguments);
            }
            Ok(Err(reason)) => self.written.report.left_out.push((located.name(), reason)),
            Err(error) => {
                self.error.get_or_insert(error);
            }
        }
        None
    }

    /// Writes the codes of a weight, if the layout has a place for them.
    fn quantized(&mut self, place: &Place, path: &str, weight: &QuantizedTensor) -> bool {
        let named = (place.name == "weight").then(|| Codes::of(weight, place.turned));
        let not_named = || Err("the layout has codes of tensors named `weight` alone".into());
        let codes = match named.unwrap_or_else(not_named) {
            Ok(codes) => codes,
            Err(reason) => {
                let left_out = &mut self.written.report.left_out;
                left_out.push((path.to_string(), reason));
                return false;
            }
        };
        let input_activations = self.input(place, path);
        // Products of codes take bytes; words are for weights that are spread out to floats.
        let format = match input_activations {
            Some(_) => INT,
            None => PACKED,
        };
        let [rows, columns] = codes.shape;
        let bits = codes.arguments.num_bits;
        if format == PACKED {
            let packed = pack(&codes.codes, columns, bits);
            let shape = vec![rows, words(columns, bits)];
            self.put(place.with("_packed"), integers(&packed, shape));
            self.put(place.with("_shape"), sizes(&[rows, columns], vec![2]));
        } else {
            self.put(place.with(""), bytes(&codes.codes, vec![rows, columns]));
        }
        self.put(
            place.with("_scale"),
            floats(&codes.scale, codes.scale_shape()),
        );
        if !codes.arguments.symmetric {
            let stored = match (format, codes.groups) {
                // One of a tensor is not packed, whatever the number of its outputs.
                (PACKED, [outputs, groups]) if outputs * groups > 1 => {
                    // Along the outputs.
                    let by_group = turn(&codes.zero_point, outputs, groups);
                    let packed = pack(&by_group, outputs, bits);
                    let packed = turn(&packed, groups, words(outputs, bits));
                    integers(&packed, vec![words(outputs, bits), groups])
                }
                _ => bytes(&codes.zero_point, codes.scale_shape()),
            };
            self.put(place.with("_zero_point"), stored);
        }
        let group = Group {
            targets: Vec::new(),
            weights: Some(codes.arguments),
            input_activations,
            format: Some(format.into()),
        };
        self.written.report.quantized.push(place.with(""));
        group.joins(&mut self.written.groups, [place.layer.clone()]);
        true
    }

    fn store(&mut self, at: &Trail, rank: usize, data: Result<TensorData, ExecutionError>) {
        let place = Place::at(at, rank, self.names);
        let path = at.path();
        let data = match data {
            Ok(data) => data,
            Err(error) => {
                self.error.get_or_insert(QuantError::device(error));
                return;
            }
        };
        let shape = data.shape().to_vec();
        let Some((_, dtype)) = DTYPES.iter().find(|(dtype, _)| *dtype == data.dtype()) else {
            self.error.get_or_insert(QuantError::UnsupportedLayer {
                path,
                reason: format!("a file cannot hold {:?}", data.dtype()),
            });
            return;
        };
        let [rows, columns] = match (place.turned, &shape[..]) {
            (true, [rows, columns]) => [*rows, *columns],
            _ => {
                let stored = Stored::new(*dtype, shape, data.as_bytes().to_vec());
                return self.put(place.with(""), stored);
            }
        };
        self.written.floats.push(place.layer.clone());
        let turned = turn_bytes(data.as_bytes(), data.dtype().size(), rows, columns);
        self.put(
            place.with(""),
            Stored::new(*dtype, vec![columns, rows], turned),
        );
    }
}

impl PathVisitor for Writer<'_> {
    fn float<const D: usize>(&mut self, at: &Trail, param: &Param<Tensor<D>>) {
        if at.is_attached() || self.error.is_some() {
            return;
        }
        let path = at.path();
        if let Some(weight) = self.weights.remove(&path)
            && self.quantized(&Place::at(at, D, self.names), &path, &weight)
        {
            return;
        }
        self.store(at, D, param.base().try_into_data());
    }

    fn int<const D: usize>(&mut self, at: &Trail, param: &Param<Tensor<D, Int>>) {
        if !at.is_attached() {
            self.store(at, D, param.base().try_into_data());
        }
    }

    fn bool<const D: usize>(&mut self, at: &Trail, param: &Param<Tensor<D, Bool>>) {
        if !at.is_attached() {
            // Bytes: a bool's own layout is the backend's.
            self.store(at, D, param.base().int().try_into_data());
        }
    }
}
