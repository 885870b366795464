//! A compressed model in a safetensors file, without the zeros and with packed codes.

use std::collections::HashMap;
use std::path::Path;

use burn::module::{Module, Param};
use burn::tensor::{Tensor, TensorData};
use burn_lean_reparam::bits::{pack, unpack};
use burn_lean_reparam::{
    FloatVisitor, PathMapper, Rejected, Trail, Training, each_float, map_with_path, visit_floats,
};
use serde::{Deserialize, Serialize};

use crate::collect::floats;
use crate::sealed::Sealed;
use crate::state::{Raw, failed, write};
use crate::{Compressed, CompressedWeight, Grid, OneShotError, Report};

/// What a file says that it is.
const FORMAT: &str = "burn-lean-oneshot 2";

/// Of a weight, what its tensors do not say.
#[derive(Debug, Serialize, Deserialize)]
struct Header {
    path: String,
    outputs: usize,
    inputs: usize,
    transposed: bool,
    /// Zeros are left out; a bit says where they are.
    sparse: bool,
    grid: Option<GridHeader>,
}

#[derive(Debug, Serialize, Deserialize)]
struct GridHeader {
    bits: u8,
    group: usize,
    symmetric: bool,
}

impl<M: Module> Compressed<M> {
    /// Writes all float parameters: compressed weights as packed codes and scales, without zeros
    /// where that is smaller, others in F32, those of adapters among them. The file is complete, or is
    /// not there.
    ///
    /// # Errors
    ///
    /// [`OneShotError::File`]; [`OneShotError::Changed`] for a weight of the model that is not the one that was
    /// compressed.
    pub fn save(&self, file: impl AsRef<Path>) -> Result<(), OneShotError> {
        let file = file.as_ref();
        self.check_unchanged()?;
        let mut plain = Plain {
            compressed: self.weights.iter().map(|one| one.path.as_str()).collect(),
            tensors: Vec::new(),
        };
        visit_floats(&self.model, &mut plain);
        let mut tensors = plain.tensors;
        let mut headers = Vec::new();
        for weight in &self.weights {
            let (header, own) = packed(weight);
            let named = own.into_iter();
            tensors.extend(named.map(|(what, raw)| (format!("{}.{what}", weight.path), raw)));
            headers.push(header);
        }
        let headers = serde_json::to_string(&headers).map_err(|error| failed(file, error))?;
        let report = serde_json::to_string(&self.report).map_err(|error| failed(file, error))?;
        let metadata = HashMap::from([
            ("format".to_string(), FORMAT.to_string()),
            ("weights".to_string(), headers),
            ("report".to_string(), report),
        ]);
        write(file, tensors, metadata)
    }

    /// Refuses a model whose weights were trained, or folded with an adapter, since.
    pub(crate) fn check_unchanged(&self) -> Result<(), OneShotError> {
        let weights = self.weights.iter();
        let mut changed = Changed {
            weights: weights.map(|one| (one.path.as_str(), one)).collect(),
            found: None,
        };
        visit_floats(&self.model, &mut changed);
        match changed.found {
            Some(path) => Err(OneShotError::Changed { path }),
            None => Ok(()),
        }
    }
}

/// A weight that is not the compressed one any more.
struct Changed<'a> {
    weights: HashMap<&'a str, &'a CompressedWeight>,
    found: Option<String>,
}

impl FloatVisitor for Changed<'_> {
    fn visit<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>) {
        let Some(weight) = self.weights.get(path).filter(|_| self.found.is_none()) else {
            return;
        };
        let value = param.base();
        // As they are kept in half precision.
        let kept = TensorData::new(weight.stored(), value.shape());
        let kept = Tensor::<D>::from_data(kept, (&value.device(), value.dtype()));
        if floats(kept) != floats(value) {
            self.found = Some(path.into());
        }
    }
}

/// What [`Compressed::save`] wrote: `model` with the parameters of the file, zeros and grid points as
/// values; codes, scales and the report.
///
/// # Errors
///
/// With the model inside: [`OneShotError::File`] for a file that is none of these, is damaged, or is
/// of a model with other parameters.
pub fn load_compressed<M: Module>(
    model: M,
    file: impl AsRef<Path>,
) -> Result<Compressed<M>, Rejected<M, OneShotError>> {
    let file = file.as_ref();
    match read(&model, file) {
        // Into a copy: clones share running statistics, which are replaced in place.
        Ok((values, weights, report)) => {
            let loaded = map_with_path(model.valid(), &mut Put(values));
            Ok(Compressed {
                model: Training::of(&model).restore(loaded),
                report,
                weights,
            })
        }
        Err(reason) => Err(Rejected::new(model, failed(file, reason))),
    }
}

/// The tensors of a weight, behind its path.
const PARTS: [&str; 5] = ["mask", "codes", "scales", "zero_points", "values"];

/// The values of each parameter.
type Values = HashMap<String, Vec<f32>>;

fn read<M: Module>(
    model: &M,
    file: &Path,
) -> Result<(Values, Vec<CompressedWeight>, Report), String> {
    let bytes = std::fs::read(file).map_err(|error| error.to_string())?;
    let sealed = Sealed::open(&bytes)?;
    match sealed.said("format") {
        Some(FORMAT) => {}
        Some(other) => {
            return Err(format!(
                "its format is `{other}`; this version reads `{FORMAT}`"
            ));
        }
        None => return Err("it is not a file of a compressed model".into()),
    }
    let headers = sealed
        .said("weights")
        .ok_or("it says nothing of its weights")?;
    let headers: Vec<Header> = serde_json::from_str(headers).map_err(|error| error.to_string())?;
    let report = sealed.said("report").map(serde_json::from_str);
    let report = report.transpose().map_err(|error| error.to_string())?;
    let mut expected: Vec<(String, Vec<usize>)> = Vec::new();
    each_float(model, |at, float| {
        expected.push((at.path(), float.shape()));
    });
    let mut values: Values = HashMap::new();
    let mut weights = Vec::with_capacity(headers.len());
    for header in &headers {
        // Before anything of that size is made.
        let path = &header.path;
        let fits = |(name, shape): &(String, Vec<usize>)| name == path && header.fits(shape);
        if !expected.iter().any(fits) {
            return Err(format!(
                "the model has no `{path}` of {} outputs and {} inputs",
                header.outputs, header.inputs
            ));
        }
        let weight = unpacked(header, &sealed)?;
        values.insert(path.clone(), weight.stored());
        weights.push(weight);
    }
    for name in sealed.names() {
        // Others below a weight are those of an adapter.
        let is_part = name.rsplit_once('.').is_some_and(|(path, what)| {
            PARTS.contains(&what) && headers.iter().any(|header| header.path == path)
        });
        if !is_part {
            values.insert(name.to_string(), sealed.floats(name)?);
        }
    }
    for (path, shape) in &expected {
        if !values.contains_key(path) {
            return Err(format!("it has no `{path}`"));
        }
        // Of a compressed weight there is no tensor of that name.
        if let Some(found) = sealed.shape(path)
            && found != *shape
        {
            return Err(format!(
                "`{path}` is of shape {found:?}, that of the model of {shape:?}"
            ));
        }
    }
    match values.len() == expected.len() {
        true => Ok((values, weights, report.unwrap_or_default())),
        false => Err("it has parameters that the model has not".into()),
    }
}

impl Header {
    /// Whether a parameter of this shape is such a weight. A kernel has its outputs first; axes of a single
    /// element say nothing of the order.
    fn fits(&self, shape: &[usize]) -> bool {
        let mut sizes = shape.iter().filter(|size| **size != 1);
        let of_outputs = match self.transposed {
            true => sizes.next_back(),
            false => sizes.next(),
        };
        self.outputs.checked_mul(self.inputs) == Some(shape.iter().product::<usize>())
            && (self.outputs == 1 || of_outputs == Some(&self.outputs))
    }
}

/// The tensors of a weight.
fn packed(weight: &CompressedWeight) -> (Header, Vec<(&'static str, Raw)>) {
    let sparse = weight.stores_sparsely();
    let mut tensors = Vec::new();
    if sparse {
        let kept = weight.values.iter().map(|value| u8::from(*value != 0.0));
        tensors.push(("mask", Raw::bytes(pack(kept, 1))));
    }
    let stored = |at: &usize| !sparse || weight.values[*at] != 0.0;
    let places = (0..weight.values.len()).filter(stored);
    match &weight.grid {
        Some(grid) => {
            let codes = places.map(|at| grid.codes[at]);
            tensors.push(("codes", Raw::bytes(pack(codes, grid.bits))));
            tensors.push(("scales", Raw::floats(&grid.scales)));
            if !grid.symmetric {
                let zero_points = grid.zero_points.iter().copied();
                tensors.push(("zero_points", Raw::bytes(pack(zero_points, grid.bits))));
            }
        }
        None => {
            let values: Vec<f32> = places.map(|at| weight.values[at]).collect();
            tensors.push(("values", Raw::floats(&values)));
        }
    }
    let header = Header {
        path: weight.path.clone(),
        outputs: weight.outputs,
        inputs: weight.inputs,
        transposed: weight.transposed,
        sparse,
        grid: weight.grid.as_ref().map(|grid| GridHeader {
            bits: grid.bits,
            group: grid.group,
            symmetric: grid.symmetric,
        }),
    };
    (header, tensors)
}

/// A weight from its tensors.
fn unpacked(header: &Header, sealed: &Sealed<'_>) -> Result<CompressedWeight, String> {
    let named = |what: &str| format!("{}.{what}", header.path);
    let bytes = |what: &str| sealed.bytes(&named(what));
    let floats = |what: &str| sealed.floats(&named(what));
    let damaged = || format!("`{}` is damaged", header.path);
    let count = header.outputs * header.inputs;
    let kept: Vec<bool> = match header.sparse {
        true => unpack(bytes("mask")?, 1, count)
            .ok_or_else(damaged)?
            .iter()
            .map(|bit| *bit == 1)
            .collect(),
        false => vec![true; count],
    };
    let places: Vec<usize> = (0..count).filter(|at| kept[*at]).collect();
    let mut values = vec![0.0; count];
    let grid = match &header.grid {
        None => {
            let stored = floats("values")?;
            if stored.len() != places.len() {
                return Err(damaged());
            }
            places
                .iter()
                .zip(stored)
                .for_each(|(at, value)| values[*at] = value);
            None
        }
        Some(of) => {
            if !(2..=8).contains(&of.bits) || of.group == 0 {
                return Err(damaged());
            }
            let groups = header.outputs * header.inputs.div_ceil(of.group);
            let zero_points = match of.symmetric {
                true => vec![1 << (of.bits - 1); groups],
                false => unpack(bytes("zero_points")?, of.bits, groups).ok_or_else(damaged)?,
            };
            let stored = unpack(bytes("codes")?, of.bits, places.len()).ok_or_else(damaged)?;
            // What is left out is zero.
            let zero = |at| zero_points[Grid::group_at(of.group, header.inputs, at)];
            let mut codes: Vec<u8> = (0..count).map(zero).collect();
            places
                .iter()
                .zip(stored)
                .for_each(|(at, code)| codes[*at] = code);
            let grid = Grid {
                bits: of.bits,
                group: of.group,
                symmetric: of.symmetric,
                codes,
                scales: floats("scales")?,
                zero_points,
            };
            if !grid.fits(header.outputs, header.inputs) {
                return Err(damaged());
            }
            let all = grid.values(header.inputs);
            places.iter().for_each(|at| values[*at] = all[*at]);
            Some(grid)
        }
    };
    Ok(CompressedWeight {
        path: header.path.clone(),
        outputs: header.outputs,
        inputs: header.inputs,
        transposed: header.transposed,
        values,
        grid,
    })
}

/// Parameters that are not compressed.
struct Plain<'a> {
    compressed: Vec<&'a str>,
    tensors: Vec<(String, Raw)>,
}

impl FloatVisitor for Plain<'_> {
    fn visit<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>) {
        if !self.compressed.contains(&path) {
            let value = param.base();
            let shape = value.dims().to_vec();
            self.tensors
                .push((path.into(), Raw::shaped(&floats(value), shape)));
        }
    }
}

struct Put(Values);

impl PathMapper for Put {
    fn float<const D: usize>(&mut self, at: &Trail, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(values) = self.0.remove(&at.path()) else {
            return param;
        };
        param.map(|old| {
            let data = TensorData::new(values, old.shape());
            // Not through the default of the device, which may be half.
            let new = Tensor::<D>::from_data(data, (&old.device(), old.dtype()));
            new.detach().set_require_grad(old.is_require_grad())
        })
    }
}
