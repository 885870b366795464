//! Reading.

mod contents;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;

use burn::module::{Module, Param};
use burn::tensor::quantization::quantized_data_len;
use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use burn_lean_reparam::{
    FloatVisitor, PathMapper, Trail, map_kinds, map_with_path, unlink_before, visit_floats,
};
use safetensors::tensor::{Dtype, SafeTensors};

use super::activations::Activation;
use super::attach::attach_quantizers;
use super::config::LoadConfig;
use super::{DTYPES, Entry, FileError, fitting};
use crate::codes::product::{Factors, Kernel, Layer, Speeds, in_product};
use crate::codes::quantized_tensor::{qparams_on, unpack};
use crate::codes::stored::{NotStored, Stored};
use crate::deploy::conversion_report::{ConversionReport, ConvertedWeight, Outcome};
use crate::deploy::convert::OtherBytes;
use crate::fake::op::to_dtype;
use crate::model::record::check_schemes;
use crate::model::unobserved::rounding;
use crate::module::effective::{FileNames, chained};
use crate::module::walk::{Located, Site, map_quantizers, quantizers, weight_schemes};
use crate::range::observer::read;
use crate::{Dequantize, FakeQuantize, QuantError, QuantizedTensor, Scheme, WeightQuantizer};
use contents::Contents;

pub(super) fn try_load<M: Module>(
    model: &M,
    path: &Path,
    config: LoadConfig,
) -> Result<(M, ConversionReport), QuantError> {
    let file = FileError::new(path);
    let bytes = std::fs::read(path).map_err(|error| file.read(error))?;
    let Contents {
        tensors,
        entries,
        mut activations,
    } = Contents::of(&bytes, &file)?;
    let given = model;
    let attached;
    let model = match activations.is_empty() || !quantizers(given).is_empty() {
        true => given,
        false => {
            attached = attach_quantizers(given, &entries, &activations, &file)?;
            &attached
        }
    };
    let names: Vec<String> = entries.keys().cloned().collect();
    let schemes = weight_schemes(model);
    let is_prepared = !schemes.is_empty();
    let file_names = FileNames::of(model, |path| entries.contains_key(path));
    let mut of_activations = HashMap::new();
    for located in quantizers(model) {
        let name = file_names.name(&located.path);
        if located.site != Site::Weight
            && let Some(activation) = activations.remove(&name)
        {
            activation.check(&name, &located, &file)?;
            of_activations.insert(located.path, activation);
        }
    }
    let mut loader = Loader {
        tensors: &tensors,
        names: file_names.without_ranges(of_activations.keys().cloned()),
        entries,
        schemes,
        chained: chained(model),
        factors: Factors::of_all(&quantizers(model)),
        in_kernel: HashMap::new(),
        config,
        used: HashSet::new(),
        dequantized: HashMap::new(),
        weights: HashMap::new(),
        outcomes: Vec::new(),
        codes: Vec::new(),
        speeds: Speeds::of(model.num_params()),
        file: &file,
        error: None,
    };
    let loaded = map_with_path(model.valid(), &mut loader);
    if let Some(error) = loader.error.take() {
        return Err(error);
    }
    if let Some((name, _)) = activations.pop_first() {
        return Err(no_quantizer(&file, &name));
    }
    check_schemes(&loaded)?;
    let loaded = map_quantizers(loaded, |located| {
        match of_activations.remove(&located.path) {
            Some(activation) => with_range(located.quantizer, &activation),
            None => loader.quantizer(located),
        }
    });
    if is_prepared {
        loader.check_unchanged(&loaded)?;
    }
    loader.check_used(&names, is_prepared)?;
    // What acts on a weight before its quantizer is part of the codes.
    let loaded =
        unlink_before::<WeightQuantizer, _>(loaded, |path| names.iter().any(|name| name == path));
    let loaded = loader.look_again(loaded);
    let report = loader.report(&loaded);
    Ok((loaded, report))
}

/// The quantizer with the range that a file gives it, if that has one.
fn with_range(quantizer: FakeQuantize, activation: &Activation) -> FakeQuantize {
    let (_, device) = quantizer.groups();
    match activation.qparams(&device) {
        Some(qparams) => quantizer.with_qparams(qparams),
        None => quantizer,
    }
}

fn no_quantizer(file: &FileError<'_>, name: &str) -> QuantError {
    file.read(format!(
        "the model has no quantizer for its `{name}`: load into one that is prepared as the saved one was"
    ))
}

/// What an activation without a range has in a file is the state of its quantizer.
fn no_range(file: &FileError<'_>, name: &str) -> QuantError {
    file.read(format!(
        "the model has no quantizer for its `{name}`, of an activation that has no range: load into one that is \
         prepared as the saved one was, or save one whose activations all have a range"
    ))
}

fn no_parameter(file: &FileError<'_>, name: &str) -> QuantError {
    file.read(format!("the model has no parameter for its `{name}`"))
}

fn read_weight(
    tensors: &SafeTensors<'_>,
    name: &str,
    entry: Entry,
    file: &FileError<'_>,
) -> Result<QuantizedTensor, QuantError> {
    let find = |what: &str, dtype: Dtype| {
        let full = format!("{name}.{what}");
        let view = tensors
            .tensor(&full)
            .map_err(|_| file.read(format!("`{full}` is missing")))?;
        match view.dtype() == dtype {
            true => Ok(view.data()),
            false => Err(file.read(format!("`{full}` is {:?}, not {dtype:?}", view.dtype()))),
        }
    };
    let floats = |bytes: &[u8]| -> Vec<f32> {
        let words = bytes.as_chunks::<4>().0.iter();
        words.map(|word| f32::from_le_bytes(*word)).collect()
    };
    let Entry { shape, scheme, .. } = entry;
    let damaged = |error: QuantError| file.read(format!("`{name}`: {error}"));
    let mut sizes = shape.iter();
    let elements = sizes.try_fold(1_usize, |product, len| product.checked_mul(*len));
    let elements = elements.ok_or_else(|| {
        file.read(format!(
            "`{name}` has the shape {shape:?}, of more elements than can be counted"
        ))
    })?;
    scheme.validate(&shape).map_err(damaged)?;
    let scale = floats(find("scale", Dtype::F32)?);
    let zero_point = match scheme.mapping.is_symmetric() {
        true => vec![scheme.symmetric_zero_point(); scale.len()],
        false => floats(find("zero_point", Dtype::F32)?),
    };
    let signed = scheme.quant_min() < 0.0 && scheme.format.is_int();
    let codes = find("codes", Dtype::U8)?;
    let codes = unpack(codes, scheme.format.bits(), signed, elements)
        .ok_or_else(|| file.read(format!("`{name}.codes` has another length than its shape")))?;
    QuantizedTensor::new(codes, shape, scale, zero_point, scheme).map_err(damaged)
}

struct Loader<'a> {
    tensors: &'a SafeTensors<'a>,
    names: FileNames,
    /// The quantized weights, whose codes are read one weight at a time: they take several times the bytes
    /// of the file.
    entries: BTreeMap<String, Entry>,
    schemes: HashMap<String, Scheme>,
    /// Paths of weights on which something else than a quantizer acts.
    chained: HashSet<String>,
    /// Of the weights that carry a quantizer.
    factors: HashMap<String, Factors>,
    /// Those that a kernel multiplies by, and the bytes of their values.
    in_kernel: HashMap<String, usize>,
    config: LoadConfig,
    /// Names of those tensors that the model needs.
    used: HashSet<String>,
    /// Weights that are not held quantized, with their values and why.
    dequantized: HashMap<String, (Vec<f32>, QuantError)>,
    /// Those that were loaded.
    weights: HashMap<String, LoadedWeight>,
    outcomes: Vec<ConvertedWeight>,
    /// Paths of those that are stored as codes.
    codes: Vec<String>,
    speeds: Speeds,
    file: &'a FileError<'a>,
    error: Option<QuantError>,
}

/// What the quantizer of a weight that was loaded is told.
struct LoadedWeight {
    scale: Vec<f32>,
    zero_point: Vec<f32>,
    /// That of its values.
    dtype: FloatDType,
    device: Device,
    /// When its values are computed.
    dequantize: Dequantize,
}

impl Loader<'_> {
    /// `at` is where the weight is in the model, `shape` that of the model's.
    fn weight<const D: usize>(
        &mut self,
        path: &str,
        entry: Entry,
        shape: &[usize],
        device: &Device,
        at: &Trail,
    ) -> Result<Tensor<D>, QuantError> {
        let dtype = entry.dtype;
        let weight = read_weight(self.tensors, path, entry, self.file)?;
        if weight.shape() != shape {
            return Err(self.file.read(format!(
                "`{path}` has the shape {:?}, but the model's has {shape:?}",
                weight.shape()
            )));
        }
        for part in ["codes", "scale", "zero_point"] {
            self.used.insert(format!("{path}.{part}"));
        }
        let prepared = self.schemes.get(path);
        if let Some(scheme) = prepared
            && scheme != weight.scheme()
        {
            return Err(QuantError::ForeignScheme {
                expected: scheme.to_string(),
                found: weight.scheme().to_string(),
            });
        }
        let is_prepared = prepared.is_some();
        let dtype = self.dtype_on(device, dtype, path)?;
        let asked = self.config.dequantize;
        // Burn's layers dequantize to the device's own dtype.
        let held = is_prepared || (asked != Dequantize::Once && dtype == FloatDType::F32);
        let held = held.then(|| weight.store::<D>(device));
        let looked_at = match asked {
            Dequantize::InProduct if self.chained.contains(path) => {
                Err("it is in a chain of reparameterizations".into())
            }
            // Its quantizer gives the layer values.
            Dequantize::EveryUse if is_prepared => Ok(Kernel::default()),
            _ => {
                let stored = held.as_ref().and_then(|held| held.as_ref().ok());
                let layer = Layer::at(at, dtype, self.factors.get(path).copied());
                in_product(stored, &weight, layer, asked, &mut self.speeds)
            }
        };
        // Without a quantizer nothing dequantizes what no product takes.
        let held = held.filter(|held| is_prepared || looked_at.is_ok() || held.is_err());
        let (tensor, outcome) = self.tensor(path, &weight, held, is_prepared, || {
            let values = weight.dequantize::<D>(device);
            values.map(|values| to_dtype(values, dtype))
        })?;
        let values = weight.codes().len() * DType::from(dtype).size();
        let mut report =
            ConvertedWeight::new(path, weight.scheme(), weight.shape(), outcome, asked);
        report.bytes = match tensor.dtype() {
            DType::QFloat(scheme) => quantized_data_len(&scheme, &tensor.shape()),
            _ => values,
        };
        report.packed_bytes = weight.packed_bytes();
        let kernel = report.take(looked_at);
        let dequantize = report.dequantize;
        match &report.outcome {
            Outcome::Converted { .. } if is_prepared => report.hold_values(values),
            _ => report.resident_bytes = report.bytes,
        }
        report.resident_bytes += kernel;
        if kernel > 0 {
            self.in_kernel.insert(path.to_string(), values);
        }
        self.outcomes.push(report);
        let loaded = LoadedWeight {
            scale: weight.scale().to_vec(),
            zero_point: weight.zero_point().to_vec(),
            dtype,
            device: device.clone(),
            dequantize,
        };
        self.weights.insert(path.to_string(), loaded);
        Ok(tensor)
    }

    /// The dtype of a weight's values where the device may not have that of the file.
    fn dtype_on(
        &self,
        device: &Device,
        dtype: FloatDType,
        path: &str,
    ) -> Result<FloatDType, QuantError> {
        match dtype {
            dtype if device.supports_dtype(dtype) => Ok(dtype),
            FloatDType::F16 | FloatDType::BF16 | FloatDType::Flex32 => Ok(FloatDType::F32),
            dtype => {
                let reason = format!("`{path}` is {dtype:?}, which the device does not have");
                Err(self.file.read(reason))
            }
        }
    }

    /// What the parameter gets: quantized numbers where they are held, or values.
    fn tensor<const D: usize>(
        &mut self,
        path: &str,
        weight: &QuantizedTensor,
        held: Option<Result<Stored<D>, NotStored>>,
        is_prepared: bool,
        values: impl Fn() -> Result<Tensor<D>, QuantError>,
    ) -> Result<(Tensor<D>, Outcome), QuantError> {
        Ok(match held {
            Some(Ok(Stored::Values(tensor))) => {
                let outcome = Outcome::of(&tensor);
                (tensor, outcome)
            }
            Some(Ok(Stored::Codes(codes))) if is_prepared => {
                self.codes.push(path.to_string());
                let outcome = Outcome::of(&codes);
                (codes, outcome)
            }
            None | Some(Ok(Stored::Codes(_))) => (values()?, Outcome::Dequantized),
            Some(Err(not_stored)) => {
                let reason = match not_stored {
                    NotStored::NoSmaller(reason)
                    | NotStored::Error(QuantError::UnsupportedStorage { reason, .. }) => reason,
                    NotStored::Error(error) => return Err(error),
                };
                let values = values()?;
                let error = QuantError::UnsupportedStorage {
                    scheme: weight.scheme().to_string(),
                    shape: weight.shape().to_vec(),
                    reason: reason.clone(),
                };
                let of_weight = (read(values.clone())?, error.at(path));
                self.dequantized.insert(path.to_string(), of_weight);
                (values, Outcome::KeptFakeQuantized { reason })
            }
        })
    }

    /// The quantizer of a weight that was loaded, with what it needs; others as they are.
    fn quantizer(&mut self, located: Located) -> FakeQuantize {
        let weight = located.parameter.filter(|_| located.site == Site::Weight);
        let weights = &mut self.weights;
        let Some((loaded, path)) = weight.and_then(|path| Some((weights.remove(&path)?, path)))
        else {
            return located.quantizer;
        };
        let quantizer = located.quantizer.with_dtype(loaded.dtype);
        let quantizer = quantizer.with_dequantize(loaded.dequantize);
        let qparams = || qparams_on(&loaded.device, &loaded.scale, &loaded.zero_point);
        if self.codes.contains(&path) {
            return quantizer.with_codes(qparams());
        }
        // What a file leaves out of its state; of floats, what keeps them as they are.
        match quantizer.has_range() || self.dequantized.contains_key(&path) {
            true => quantizer.with_qparams(qparams()),
            false => quantizer,
        }
    }

    /// Refuses weights that are not held quantized and that their quantizers would change.
    fn check_unchanged<M: Module>(&mut self, loaded: &M) -> Result<(), QuantError> {
        if self.dequantized.is_empty() {
            return Ok(());
        }
        let mut check = Unchanged {
            expected: std::mem::take(&mut self.dequantized),
            error: None,
        };
        visit_floats(&loaded.clone().materialize(), &mut check);
        check.error.map_or(Ok(()), Err)
    }

    /// Refuses what the file has and the model has no place for; `weights` names the quantized ones.
    fn check_used(&self, weights: &[String], is_prepared: bool) -> Result<(), QuantError> {
        // Of a quantized weight, the codes and scales are all that a model without quantizers needs.
        let of_weights: Vec<String> = weights
            .iter()
            .map(|name| format!("{name}.quant.weight."))
            .collect();
        let left_over = self.tensors.names().into_iter().filter(|name| {
            let not_needed = || {
                let mut of_weights = of_weights.iter();
                !is_prepared && of_weights.any(|prefix| name.starts_with(prefix))
            };
            !self.used.contains(*name) && !not_needed()
        });
        // The state of a quantizer, of one of the file's tensors.
        let is_state_of = |name: &str, quantizer: &str| {
            name.rsplit_once(".quant.").is_some_and(|(path, state)| {
                let is_there = || self.tensors.tensor(path).is_ok();
                let is_weight = weights.iter().any(|weight| weight == path) || is_there();
                is_weight && state.starts_with(quantizer)
            })
        };
        // They come in the order of a hash map.
        match left_over.min() {
            Some(name) if is_state_of(name, "weight.") => Err(no_quantizer(self.file, name)),
            Some(name) if is_state_of(name, "") => Err(no_range(self.file, name)),
            Some(name) => Err(no_parameter(self.file, name)),
            // Without tensors.
            None => match self.entries.keys().next() {
                Some(name) => Err(no_parameter(self.file, name)),
                None => Ok(()),
            },
        }
    }

    /// Of weights whose inputs the file rounds otherwise than the model did, another product was looked at.
    fn look_again<M: Module>(&mut self, loaded: M) -> M {
        let now = Factors::of_all(&quantizers(&loaded));
        let other = &mut self.in_kernel;
        other.retain(|path, _| now.get(path) != self.factors.get(path));
        if other.is_empty() {
            return loaded;
        }
        for weight in &mut self.outcomes {
            if let Some(values) = other.get(&weight.path) {
                weight.take(Err(
                    "the file rounds its input otherwise than the model did: load it into the loaded model"
                        .into(),
                ));
                weight.multiplies_integers = false;
                weight.hold_values(*values);
            }
        }
        map_quantizers(loaded, |located| match (&located.parameter, located.site) {
            (Some(path), Site::Weight) if other.contains_key(path) => {
                located.quantizer.with_dequantize(Dequantize::Once)
            }
            _ => located.quantizer,
        })
    }

    fn report<M: Module>(mut self, loaded: &M) -> ConversionReport {
        let rounding = rounding(loaded);
        for weight in &mut self.outcomes {
            weight.rounds_activations = rounding.contains(&weight.path);
        }
        let others = OtherBytes::of(loaded, &self.outcomes);
        ConversionReport::new(self.outcomes, others, Vec::new())
    }

    /// The tensor of this name, of this shape, for a parameter of dtype `held`.
    fn data(
        &mut self,
        path: &str,
        shape: &[usize],
        held: DType,
        device: &Device,
    ) -> Result<TensorData, QuantError> {
        let view = self
            .tensors
            .tensor(path)
            .map_err(|_| self.file.read(format!("`{path}` is missing")))?;
        if view.shape() != shape {
            return Err(self.file.read(format!(
                "`{path}` has the shape {:?}, but the model's has {shape:?}",
                view.shape()
            )));
        }
        let dtype = DTYPES.iter().find(|(_, stored)| *stored == view.dtype());
        let Some((dtype, _)) = dtype else {
            return Err(self.file.read(format!("`{path}` is {:?}", view.dtype())));
        };
        self.used.insert(path.to_string());
        let data = TensorData::from_bytes_vec(view.data().to_vec(), shape.to_vec(), *dtype);
        fitting(data, path, held, device, self.file)
    }

    /// The name in the file of what is to be loaded there, as long as nothing has failed.
    fn wanted(&self, at: &Trail) -> Option<String> {
        match self.error {
            Some(_) => None,
            None => self.names.of_tensor(&at.path()),
        }
    }

    fn fail(&mut self, path: &str, error: QuantError) {
        self.error = Some(match error {
            QuantError::File { .. } | QuantError::Parameter { .. } => error,
            error => error.at(path),
        });
    }
}

/// Checks that quantizers do not change the weights that are no quantized tensors.
struct Unchanged {
    expected: HashMap<String, (Vec<f32>, QuantError)>,
    error: Option<QuantError>,
}

impl FloatVisitor for Unchanged {
    fn visit<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>) {
        let Some((expected, why)) = self.expected.remove(path) else {
            return;
        };
        let error = match read(param.val()) {
            Ok(found) if found == expected => return,
            Ok(_) => why,
            Err(error) => error.at(path),
        };
        self.error.get_or_insert(error);
    }
}

impl PathMapper for Loader<'_> {
    fn float<const D: usize>(&mut self, at: &Trail, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(path) = self.wanted(at) else {
            return param;
        };
        let device = param.lazy_device();
        let base = param.base();
        let shape = base.shape();
        let loaded = match self.entries.remove(&path) {
            Some(entry) => self.weight(&path, entry, &shape, &device, at),
            None => {
                let data = self.data(&path, &shape, base.dtype(), &device);
                data.map(|data| {
                    let dtype = data.dtype();
                    Tensor::from_data(data, (&device, dtype))
                })
            }
        };
        match loaded {
            // The file has what the model holds, not what a layer's own save mapper makes of it.
            Ok(tensor) => param.map(|_| tensor),
            Err(error) => {
                self.fail(&path, error);
                param
            }
        }
    }

    map_kinds!(int, bool: |self, at, param| {
        let Some(path) = self.wanted(at) else {
            return param;
        };
        let device = param.lazy_device();
        let base = param.base();
        match self.data(&path, &base.shape(), base.dtype(), &device) {
            Ok(data) => {
                let (dtype, id) = (data.dtype(), param.id);
                param.transform_for_load(Tensor::from_data(data, (&device, dtype)), id)
            }
            Err(error) => {
                self.fail(&path, error);
                param
            }
        }
    });
}
