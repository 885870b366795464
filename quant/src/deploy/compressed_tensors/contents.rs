//! What is in a file.

use std::collections::HashSet;

use burn::tensor::{DType, Device, Tensor, TensorData};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};

use super::codes::{Codes, shift};
use super::config::{DYNAMIC, QuantizationConfig};
use super::layout::{Packing, Place, turn};
use super::targets::Targets;
use crate::deploy::safetensors_file::{DTYPES, FileError};
use crate::fake::qparams::is_scale;
use crate::{FakeQuantize, Granularity, ObserverConfig, QuantError, QuantParams};

/// A file that was read.
pub(super) struct Contents<'a> {
    /// See [`plain_dtype`].
    pub(super) plain: Option<DType>,
    pub(super) tensors: Tensors<'a>,
    pub(super) config: QuantizationConfig,
    pub(super) targets: Targets,
    pub(super) file: &'a FileError<'a>,
}

/// The tensors of one file or of several.
pub(super) struct Tensors<'a>(pub(super) Vec<SafeTensors<'a>>);

impl Tensors<'_> {
    pub(super) fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        self.0.iter().find_map(|file| file.tensor(name).ok())
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().flat_map(SafeTensors::names)
    }
}

impl Contents<'_> {
    pub(super) fn find(&self, name: &str) -> Result<TensorView<'_>, QuantError> {
        let found = self.tensors.tensor(name);
        found.ok_or_else(|| self.file.read(format!("`{name}` is missing")))
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.tensors.tensor(name).is_some()
    }

    /// As F32, from any of the float types.
    pub(super) fn floats(&self, name: &str) -> Result<(Vec<f32>, Vec<usize>), QuantError> {
        let view = self.find(name)?;
        match view.dtype() {
            Dtype::F32 | Dtype::F16 | Dtype::BF16 | Dtype::F64 => Ok((
                data(&view, self.file)?.iter().collect(),
                view.shape().to_vec(),
            )),
            other => Err(self
                .file
                .read(format!("`{name}` is {other:?}, not of floats"))),
        }
    }

    pub(super) fn integers(
        &self,
        name: &str,
        dtypes: &[Dtype],
    ) -> Result<(Vec<i32>, Vec<usize>), QuantError> {
        let view = self.find(name)?;
        if !dtypes.contains(&view.dtype()) {
            let found = view.dtype();
            return Err(self
                .file
                .read(format!("`{name}` is {found:?}, not {dtypes:?}")));
        }
        let found = data(&view, self.file)?;
        let integers = found.iter::<i64>().map(|integer| {
            i32::try_from(integer).map_err(|_| {
                self.file
                    .read(format!("`{name}` holds {integer}, beyond 32 bits"))
            })
        });
        let integers = integers.collect::<Result<Vec<i32>, QuantError>>()?;
        Ok((integers, view.shape().to_vec()))
    }

    /// The codes of the weight at a place; `None` where it is of floats.
    pub(super) fn codes(
        &self,
        place: &Place,
        used: &mut HashSet<String>,
    ) -> Result<Option<Codes>, QuantError> {
        let (scale_name, packed_name) = (place.with("_scale"), place.with("_packed"));
        if !self.has(&scale_name) {
            return Ok(None);
        }
        let wrong = |reason: String| self.file.read(format!("`{}`: {reason}", place.with("")));
        if self.has(&place.with("_g_idx")) {
            return Err(wrong("an order of activations is not read here".into()));
        }
        let arguments = self.targets.weights(place).cloned();
        let arguments =
            arguments.ok_or_else(|| wrong("no group of the configuration has its layer".into()))?;
        let bits = arguments.num_bits;
        if arguments.kind != "int" || !(2..=8).contains(&bits) {
            let kind = &arguments.kind;
            return Err(wrong(format!("{kind} of {bits} bits is not read here")));
        }
        let (codes, shape) = if self.has(&packed_name) {
            let (sizes, _) = self.integers(&place.with("_shape"), &[Dtype::I64, Dtype::I32])?;
            let (packed, found) = self.integers(&packed_name, &[Dtype::I32])?;
            let sizes: Vec<usize> = sizes
                .iter()
                .map(|size| usize::try_from(*size).unwrap_or(0))
                .collect();
            let &[rows, columns] = &sizes[..] else {
                return Err(wrong("its shape is not that of a matrix".into()));
            };
            let packing = match found[..] {
                [of, words] if of == rows => {
                    Packing::of(words, columns, bits, self.config.is_dense())
                }
                _ => None,
            };
            let Some(packing) = packing else {
                return Err(wrong(format!(
                    "{found:?} words of {bits} bits are no [{rows}, {columns}]"
                )));
            };
            used.extend([packed_name, place.with("_shape")]);
            (packing.unpack(&packed, columns, bits), [rows, columns])
        } else {
            let (codes, shape) = self.integers(&place.with(""), &[Dtype::I8])?;
            let [rows, columns] = shape[..] else {
                return Err(wrong("it is no matrix".into()));
            };
            used.insert(place.with(""));
            (codes, [rows, columns])
        };
        let (scale, found) = self.floats(&scale_name)?;
        used.insert(scale_name);
        let groups = match found[..] {
            [] | [1] | [1, 1] => [1, 1],
            [rows] if rows == shape[0] => [rows, 1],
            [rows, groups] => [rows, groups],
            _ => return Err(wrong(format!("scales of the shape {found:?}"))),
        };
        let divides = |axis: usize| groups[axis] > 0 && shape[axis].is_multiple_of(groups[axis]);
        if !divides(0) || !divides(1) {
            return Err(wrong(format!("{groups:?} groups do not divide {shape:?}")));
        }
        let size = arguments
            .group_size
            .and_then(|size| usize::try_from(size).ok());
        let of_size = size.filter(|_| arguments.strategy.as_deref() == Some("group"));
        if let Some(size) = of_size
            && groups[1].checked_mul(size) != Some(shape[1])
        {
            return Err(wrong(format!(
                "{} scales of an output are not those of groups of {size} in {}",
                groups[1], shape[1]
            )));
        }
        let zero_name = place.with("_zero_point");
        let zero_point = match self.has(&zero_name) {
            false => vec![0; scale.len()],
            true => {
                used.insert(zero_name.clone());
                let dtypes = [Dtype::I8, Dtype::I32];
                let (zeros, found) = self.integers(&zero_name, &dtypes)?;
                let packed = self.find(&zero_name)?.dtype() == Dtype::I32;
                let packing = match found[..] {
                    [words, of] if of == groups[1] => {
                        Packing::of(words, groups[0], bits, self.config.is_dense())
                    }
                    _ => None,
                };
                let zeros = match (packed, packing) {
                    (false, _) => zeros,
                    (true, Some(packing)) => {
                        let turned = turn(&zeros, found[0], groups[1]);
                        let by_group = packing.unpack(&turned, groups[0], bits);
                        turn(&by_group, groups[1], groups[0])
                    }
                    (true, None) => return Err(wrong(format!("{found:?} words of zero points"))),
                };
                if zeros.len() != scale.len() {
                    let (zeros, scales) = (zeros.len(), scale.len());
                    return Err(wrong(format!("{zeros} zero points for {scales} scales")));
                }
                zeros
            }
        };
        Ok(Some(Codes {
            shape,
            codes,
            groups,
            scale,
            zero_point,
            arguments,
        }))
    }

    /// The dtype in which the file has the floats beside the codes of a weight: the bias of the layer, or
    /// most of what is not quantized, or the scales where they are half, as those of other programs. F32 scales
    /// are those of a model in any dtype.
    pub(super) fn dtype_beside(&self, place: &Place) -> Option<DType> {
        let of_scales = || {
            let found = float(&self.tensors, &place.with("_scale"));
            found.filter(|dtype| matches!(dtype, DType::F16 | DType::BF16))
        };
        float(&self.tensors, &place.in_layer("bias"))
            .or(self.plain)
            .or_else(of_scales)
    }

    /// Scale and zero point of the input of a layer; `None` where it has none of its own.
    pub(super) fn input(
        &self,
        place: &Place,
        quantizer: &FakeQuantize,
        device: &Device,
        used: &mut HashSet<String>,
    ) -> Result<Option<QuantParams>, QuantError> {
        let scheme = quantizer.scheme();
        let Some(arguments) = self.targets.inputs(place) else {
            return Ok(None);
        };
        let is_dynamic = quantizer.config().observer == ObserverConfig::Memoryless;
        let foreign = || {
            let how = if is_dynamic { DYNAMIC } else { "" };
            let error = QuantError::ForeignScheme {
                expected: format!("{scheme}{how}"),
                found: arguments.to_string(),
            };
            error.at(place.with(""))
        };
        let of_all = match scheme.granularity {
            Granularity::PerTensor => true,
            Granularity::PerToken => false,
            _ => return Err(foreign()),
        };
        let strategy = arguments.strategy.as_deref();
        let fits = strategy.is_none_or(|strategy| (strategy == "tensor") == of_all)
            && arguments.kind == "int"
            && arguments.num_bits == scheme.format.bits()
            && arguments.symmetric == scheme.mapping.is_symmetric()
            && scheme.format.is_int();
        if !fits {
            return Err(foreign());
        }
        if arguments.is_dynamic() != is_dynamic {
            let error = QuantError::ForeignRange {
                is_dynamic: arguments.is_dynamic(),
            };
            return Err(error.at(place.with("")));
        }
        if is_dynamic {
            return Ok(None);
        }
        let name = place.in_layer("input_scale");
        let (scale, _) = self.floats(&name)?;
        used.insert(name.clone());
        let zero_name = place.in_layer("input_zero_point");
        let zero = match self.has(&zero_name) {
            true => self.integers(&zero_name, &[Dtype::I8, Dtype::I32])?.0,
            false => vec![0],
        };
        used.insert(zero_name);
        let ([scale], [zero]) = (&scale[..], &zero[..]) else {
            return Err(self.file.read(format!("`{name}` is not one number")));
        };
        if !is_scale(*scale) {
            return Err(self.file.read(format!("`{name}` is {scale}")));
        }
        let codes = scheme.quant_min()..=scheme.quant_max();
        let code = zero.checked_add(shift(scheme)).map(|code| code as f32);
        let Some(code) = code.filter(|code| codes.contains(code)) else {
            return Err(self
                .file
                .read(format!("the zero point of `{name}` is {zero}")));
        };
        Ok(Some(QuantParams {
            scale: Tensor::from_data(TensorData::from([*scale]), (device, DType::F32)),
            zero_point: Tensor::from_data(TensorData::from([code]), (device, DType::F32)),
        }))
    }
}

/// The float dtype of most tensors that are no part of a weight in codes or without zeros.
pub(super) fn plain_dtype(tensors: &Tensors<'_>) -> Option<DType> {
    let parts = ["_scale", "_zero_point", ".compressed"];
    let plain = tensors
        .names()
        .filter(|name| !parts.iter().any(|part| name.ends_with(part)));
    let mut counts: Vec<(DType, usize)> = Vec::new();
    for dtype in plain.filter_map(|name| float(tensors, name)) {
        match counts.iter_mut().find(|(known, _)| *known == dtype) {
            Some((_, count)) => *count += 1,
            None => counts.push((dtype, 1)),
        }
    }
    // Of as many the wider, since names come in any order.
    let most = counts.into_iter();
    let most = most.max_by_key(|(dtype, count)| (*count, dtype.size(), *dtype == DType::F16));
    most.map(|(dtype, _)| dtype)
}

/// The dtype of a tensor of floats.
fn float(tensors: &Tensors<'_>, name: &str) -> Option<DType> {
    let stored = tensors.tensor(name)?.dtype();
    let (dtype, _) = DTYPES.iter().find(|(_, known)| *known == stored)?;
    dtype.is_float().then_some(*dtype)
}

/// The elements of a tensor of the file.
pub(super) fn data(view: &TensorView<'_>, file: &FileError<'_>) -> Result<TensorData, QuantError> {
    let dtype = DTYPES.iter().find(|(_, stored)| *stored == view.dtype());
    let (dtype, _) = dtype.ok_or_else(|| file.read(format!("a tensor is {:?}", view.dtype())))?;
    let (bytes, shape) = (view.data().to_vec(), view.shape().to_vec());
    Ok(TensorData::from_bytes_vec(bytes, shape, *dtype))
}
