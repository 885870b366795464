//! Reading.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;

use burn::module::{Module, Param};
use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use burn_lean_reparam::sealed::{CHECKSUM, unseal};
use burn_lean_reparam::{PathMapper, Rejected, Trail, map_kinds, map_with_path, unlink_before};
use safetensors::tensor::{Dtype, SafeTensors};

use super::config::{KEY, METHOD, QuantizationConfig};
use super::contents::{Contents, Tensors, data, plain_dtype};
use super::layout::{Names, Place, turn, turn_bytes};
use super::pretrained::opened;
use super::sparse::decompress;
use super::targets::Targets;
use crate::deploy::safetensors_file::{FileError, fitting};
use crate::fake::op::to_dtype;
use crate::module::walk::{Site, map_quantizers, weight_schemes};
use crate::{QuantError, QuantizedTensor, Scheme, WeightQuantizer};

/// Loads a file in the layout of [compressed-tensors](https://github.com/vllm-project/compressed-tensors)
/// into `model`, for inference; see the [module](super).
///
/// Codes become floats of the values that they stand for, in the dtype of the floats beside them in the file or,
/// where there are none, of the model. Where `model` is prepared with the same
/// number format and groups, its weights and the inputs of its layers are quantized with the scales and
/// zero points of the file: a [conversion](crate::ConvertConfig::convert) has its codes again. Weights that the
/// file has as floats beside codes stay what they are there: their quantizers are switched off, unless they have a
/// range already.
/// Inputs that the file does not round keep the quantizers that the model is prepared with. Other programs use the
/// lowest integer, too: prepare with [`NumberFormat::int8`](crate::NumberFormat::int8) for their files, not with the
/// [narrow](crate::NumberFormat::narrow) default. Files of
/// `int-quantized` and `pack-quantized` weights, per tensor, per channel and in groups, of
/// `sparse-24-bitmask` and of floats are read; the names are those of the model's fields. Floats of half
/// precision are F32 on a device that has none.
///
/// # Errors
///
/// Each with the model inside: [`QuantError::File`] when the file cannot be read, is truncated, was changed
/// after [`save_compressed_tensors`](super::save_compressed_tensors) wrote it (its metadata has a checksum;
/// that of other programs' files has none), is of something else, needs what is not read here (an order of
/// activations, floats of 8 bits), or does not fit the model; [`QuantError::ForeignScheme`] for a weight or
/// an input that the model quantizes in another way, or not at all though its weight is quantized;
/// [`QuantError::ForeignRange`] for an input whose range is that of the values at hand on one side alone.
pub fn load_compressed_tensors<M: Module>(
    model: M,
    path: impl AsRef<Path>,
) -> Result<M, Rejected<M, QuantError>> {
    let path = path.as_ref();
    try_load(&model, path).map_err(|error| Rejected::new(model, error))
}

/// Loads a folder as Transformers has them, of a [`PretrainedFolder`](super::PretrainedFolder) or of another
/// program, into `model`, for inference: `config.json`, and `model.safetensors` or, where there is none, what
/// its index names.
///
/// As [`load_compressed_tensors`], but that `names` gives what the network there calls a tensor, from its
/// path here; norms come with `weight` and `bias`. A configuration without `quantization_config` is one of
/// floats.
///
/// # Errors
///
/// As [`load_compressed_tensors`]; [`QuantError::File`], too, when two of several files have a tensor of the same
/// name, or a tensor is not in the file that the index names for it.
pub fn load_pretrained<M: Module>(
    model: M,
    folder: impl AsRef<Path>,
    names: impl Fn(&str) -> String,
) -> Result<M, Rejected<M, QuantError>> {
    let file = FileError::new(folder.as_ref());
    let load = || {
        let (config, files) = opened(folder.as_ref())?;
        load_files(&model, &files, config, &names, &file)
    };
    load().map_err(|error| Rejected::new(model, error))
}

fn try_load<M: Module>(model: &M, path: &Path) -> Result<M, QuantError> {
    let file = FileError::new(path);
    let bytes = std::fs::read(path).map_err(|error| file.read(error))?;
    let (_, header) = SafeTensors::read_metadata(&bytes).map_err(|error| file.read(error))?;
    let metadata = header.metadata().clone().unwrap_or_default();
    let config = metadata.get(KEY).ok_or_else(|| {
        file.read(format!(
            "its metadata has no `{KEY}`; a folder with `config.json` is for `load_pretrained`"
        ))
    })?;
    let config: QuantizationConfig =
        serde_json::from_str(config).map_err(|error| file.read(format!("`{KEY}`: {error}")))?;
    load_files(model, &[bytes], config, &str::to_string, &file)
}

fn load_files<M: Module>(
    model: &M,
    files: &[Vec<u8>],
    config: QuantizationConfig,
    names: Names<'_>,
    file: &FileError<'_>,
) -> Result<M, QuantError> {
    if config.quant_method != METHOD {
        return Err(file.read(format!(
            "it is of the method `{}`, not `{METHOD}`",
            config.quant_method
        )));
    }
    let mut tensors = Vec::new();
    for bytes in files {
        let (_, header) = SafeTensors::read_metadata(bytes).map_err(|error| file.read(error))?;
        // Files of other programs have none.
        let is_sealed = header.metadata().as_ref();
        if is_sealed.is_some_and(|metadata| metadata.contains_key(CHECKSUM)) {
            unseal(bytes).map_err(|error| file.read(error))?;
        }
        tensors.push(SafeTensors::deserialize(bytes).map_err(|error| file.read(error))?);
    }
    let tensors = Tensors(tensors);
    let contents = Contents {
        plain: plain_dtype(&tensors),
        tensors,
        targets: Targets::of(&config).map_err(|reason| file.read(reason))?,
        config,
        file,
    };
    let mut loader = Loader {
        contents: &contents,
        names,
        schemes: weight_schemes(model),
        weights: BTreeMap::new(),
        spared: HashSet::new(),
        used: HashSet::new(),
        error: None,
    };
    let loaded = map_with_path(model.valid(), &mut loader);
    if let Some(error) = loader.error {
        return Err(error);
    }
    let Loader {
        schemes,
        weights,
        spared,
        mut used,
        ..
    } = loader;
    let mut error = None;
    let mut with_input = HashSet::new();
    let loaded = map_quantizers(loaded, |located| {
        let quantizer = located.quantizer;
        let Some((weight, place, device, dtype)) = located
            .parameter
            .as_ref()
            .and_then(|path| weights.get(path))
        else {
            // What came as floats stays as it is: a range it has not seen is none to round by, and what the file
            // left out of the rounding is not rounded here.
            let path = located.parameter.as_ref();
            let spared = path.is_some_and(|path| spared.contains(path)) && !weights.is_empty();
            let left_out = quantizer.keeps_range() || spared;
            let stays = located.site == Site::Weight && !quantizer.has_range() && left_out;
            return match stays {
                true => quantizer.with_enabled(false),
                false => quantizer,
            };
        };
        match located.site {
            Site::Weight => quantizer
                .with_dtype(*dtype)
                .with_qparams(weight.qparams(device)),
            Site::Input => {
                with_input.insert(place.layer.clone());
                match contents.input(place, &quantizer, device, &mut used) {
                    Ok(Some(qparams)) => quantizer.with_qparams(qparams),
                    Ok(None) => quantizer,
                    Err(found) => {
                        error.get_or_insert(found);
                        quantizer
                    }
                }
            }
            _ => quantizer,
        }
    });
    if let Some(error) = error {
        return Err(error);
    }
    // What a model without quantizers has no place for.
    for (path, (_, place, ..)) in &weights {
        let is_rounded = contents.targets.inputs(place).is_some();
        if is_rounded && schemes.contains_key(path) && !with_input.contains(&place.layer) {
            return Err(file.read(format!(
                "the input of `{}` is rounded there, and the model rounds none: prepare it \
                 `with_activation`, or load into a model without quantizers for floats",
                place.layer
            )));
        }
        used.insert(place.in_layer("input_scale"));
        used.insert(place.in_layer("input_zero_point"));
    }
    let mut stored = contents.tensors.names();
    if let Some(name) = stored.find(|name| !used.contains(*name)) {
        return Err(file.read(format!("the model has no parameter for its `{name}`")));
    }
    // What acts on a weight before its quantizer is part of the codes.
    Ok(unlink_before::<WeightQuantizer, _>(loaded, |path| {
        weights.contains_key(path)
    }))
}

struct Loader<'a> {
    contents: &'a Contents<'a>,
    names: Names<'a>,
    /// Of the weights that the model quantizes.
    schemes: HashMap<String, Scheme>,
    weights: BTreeMap<String, (QuantizedTensor, Place, Device, FloatDType)>,
    /// Floats where the layout has a place for the codes that the model has.
    spared: HashSet<String>,
    used: HashSet<String>,
    error: Option<QuantError>,
}

impl Loader<'_> {
    /// The elements of a tensor that is not quantized, in the model's order, for a parameter of dtype
    /// `held`.
    fn plain(
        &mut self,
        place: &Place,
        shape: &[usize],
        held: DType,
        device: &Device,
    ) -> Result<TensorData, QuantError> {
        let file = self.contents.file;
        let expected: Vec<usize> = match place.turned {
            true => shape.iter().rev().copied().collect(),
            false => shape.to_vec(),
        };
        let fits = |name: &str, found: &[usize]| match found == expected {
            true => Ok(()),
            false => Err(file.read(format!(
                "`{name}` has the shape {found:?}, but the model's has {expected:?}"
            ))),
        };
        let name = place.with("");
        let kept = place.in_layer("compressed");
        if place.turned && !self.contents.has(&name) && self.contents.has(&kept) {
            let (sizes, _) = self
                .contents
                .integers(&place.in_layer("shape"), &[Dtype::I64, Dtype::I32])?;
            let found: Vec<usize> = sizes.iter().map(|size| *size as usize).collect();
            fits(&name, &found)?;
            let (values, _) = self.contents.floats(&kept)?;
            let bitmask = self.contents.find(&place.in_layer("bitmask"))?;
            let (rows, columns) = (expected[0], expected[1]);
            let values = decompress(&values, bitmask.data(), rows, columns)
                .map_err(|reason| file.read(format!("`{name}`: {reason}")))?;
            for part in ["compressed", "bitmask", "shape"] {
                self.used.insert(place.in_layer(part));
            }
            let turned = TensorData::new(turn(&values, rows, columns), shape.to_vec());
            return fitting(turned, &name, held, device, file);
        }
        let view = self.contents.find(&name)?;
        fits(&name, view.shape())?;
        let found = fitting(data(&view, file)?, &name, held, device, file)?;
        self.used.insert(name);
        if !place.turned {
            return Ok(found);
        }
        let (bytes, width) = (found.as_bytes(), found.dtype().size());
        let turned = turn_bytes(bytes, width, expected[0], expected[1]);
        Ok(TensorData::from_bytes_vec(
            turned,
            shape.to_vec(),
            found.dtype(),
        ))
    }

    fn stored<const D: usize>(
        &mut self,
        at: &Trail,
        shape: &[usize],
        held: DType,
        device: &Device,
    ) -> Result<Tensor<D>, QuantError> {
        let (place, path) = (Place::at(at, D, self.names), at.path());
        let Some(codes) = self.contents.codes(&place, &mut self.used)? else {
            let scheme = self.schemes.get(&path);
            if scheme.is_some_and(|scheme| scheme.format.is_int()) {
                self.spared.insert(path);
            }
            let data = self.plain(&place, shape, held, device)?;
            let dtype = data.dtype();
            return Ok(Tensor::from_data(data, (device, dtype)));
        };
        let weight = codes
            .quantized(place.turned, self.schemes.get(&path))
            .map_err(|error| match error {
                foreign @ QuantError::ForeignScheme { .. } => foreign.at(&path),
                error => self.contents.file.read(format!("`{path}`: {error}")),
            })?;
        if weight.shape() != shape {
            return Err(self.contents.file.read(format!(
                "`{path}` has the shape {:?}, but the model's has {shape:?}",
                weight.shape()
            )));
        }
        // A layer computes in one dtype.
        let dtype = match self.contents.dtype_beside(&place).unwrap_or(held) {
            DType::F16 if device.supports_dtype(DType::F16) => FloatDType::F16,
            DType::BF16 if device.supports_dtype(DType::BF16) => FloatDType::BF16,
            DType::F64 if device.supports_dtype(DType::F64) => FloatDType::F64,
            _ => FloatDType::F32,
        };
        let values = to_dtype(weight.dequantize::<D>(device)?, dtype);
        let loaded = (weight, place, device.clone(), dtype);
        self.weights.insert(path, loaded);
        Ok(values)
    }
}

impl PathMapper for Loader<'_> {
    fn float<const D: usize>(&mut self, at: &Trail, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if self.error.is_some() || at.is_attached() {
            return param;
        }
        let device = param.lazy_device();
        let base = param.base();
        match self.stored::<D>(at, &base.shape(), base.dtype(), &device) {
            Ok(tensor) => param.map(|_| tensor),
            Err(error) => {
                self.error = Some(error);
                param
            }
        }
    }

    map_kinds!(int, bool: |self, at, param| {
        if self.error.is_some() || at.is_attached() {
            return param;
        }
        let device = param.lazy_device();
        let place = Place::at(at, D, self.names);
        let base = param.base();
        match self.plain(&place, &base.shape(), base.dtype(), &device) {
            Ok(data) => {
                let (dtype, id) = (data.dtype(), param.id);
                param.transform_for_load(Tensor::from_data(data, (&device, dtype)), id)
            }
            Err(error) => {
                self.error = Some(error);
                param
            }
        }
    });
}
