//! Reading and replacing the float tensors of a model by their paths.

use std::collections::HashMap;

use burn::module::{Module, Param};
use burn::tensor::{DType, Element, Tensor, TensorData, Transaction};
use burn_lean_reparam::{FloatVisitor, PathMapper, Trail, each_float, map_with_path, visit_floats};

use crate::module::effective::{Effective, HostTensor};
use crate::module::walk::{Site, quantizers};
use crate::{FakeQuantize, QuantError, Scheme, fake::Range};

/// Where a float tensor of a model is, and what it belongs to.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct FloatParameter {
    /// Its path, for example `encoder.0.weight`.
    pub(crate) path: String,
    pub(crate) shape: Vec<usize>,
    /// Type of the module it is a field of, for example `Struct:Linear`.
    pub(crate) container: String,
    /// Whether it is state of a reparameterization, not a tensor of the model itself.
    pub(crate) nested: bool,
}

/// The float tensors of `model`, in module order: parameters, running statistics, and state of
/// reparameterizations.
pub(crate) fn list<M: Module>(model: &M) -> Vec<FloatParameter> {
    let mut found = Vec::new();
    each_float(model, |at, float| {
        found.push(FloatParameter {
            path: at.path(),
            shape: float.shape(),
            container: at.container().to_string(),
            nested: at.is_attached(),
        });
    });
    found
}

/// Reads the stored (base) values at `paths`, as F32 or F64, in one go.
///
/// # Errors
///
/// [`QuantError::UnknownParameter`], [`QuantError::Device`].
pub(crate) fn read<M: Module, E: Element>(
    model: &M,
    paths: &[String],
) -> Result<HashMap<String, HostTensor<E>>, QuantError> {
    let parameters = list(model);
    let by_path: HashMap<&str, &FloatParameter> = parameters
        .iter()
        .rev()
        .map(|parameter| (parameter.path.as_str(), parameter))
        .collect();
    let shapes = paths
        .iter()
        .map(|path| match by_path.get(path.as_str()) {
            Some(parameter) => Ok(parameter.shape.clone()),
            None => Ok(find(&parameters, path)?.shape.clone()),
        })
        .collect::<Result<Vec<_>, QuantError>>()?;
    let weights = quantizers(model)
        .into_iter()
        .filter(|located| located.site == Site::Weight);
    let weights = weights.filter_map(|located| Some((located.parameter?, located.quantizer)));
    let mut reader = Reader {
        wanted: paths
            .iter()
            .enumerate()
            .map(|(index, path)| (path.as_str(), index))
            .collect(),
        quantizers: weights.collect(),
        found: Vec::new(),
        transaction: Some(Transaction::default()),
    };
    visit_floats(model, &mut reader);
    let transaction = reader.transaction.take().unwrap_or_default();
    let data = transaction.try_execute().map_err(QuantError::device)?;
    let mut tensors = HashMap::new();
    for (index, data) in reader.found.into_iter().zip(data) {
        let tensor = HostTensor {
            values: data.iter::<E>().collect(),
            shape: shapes[index].clone(),
        };
        tensors.insert(paths[index].clone(), tensor);
    }
    Ok(tensors)
}

/// The parameter at `path`.
pub(crate) fn find<'a>(
    parameters: &'a [FloatParameter],
    path: &str,
) -> Result<&'a FloatParameter, QuantError> {
    parameters
        .iter()
        .find(|parameter| parameter.path == path)
        .ok_or_else(|| QuantError::UnknownParameter {
            path: path.to_string(),
            similar: similar(parameters, path),
        })
}

/// Paths that the author of `path` may have meant: fields of that module, or that field of others.
fn similar(parameters: &[FloatParameter], path: &str) -> Vec<String> {
    let (module, field) = path.rsplit_once('.').unwrap_or(("", path));
    let resembles = |candidate: &FloatParameter| {
        let (of, name) = candidate
            .path
            .rsplit_once('.')
            .unwrap_or(("", &candidate.path));
        !candidate.nested && (of == module || name == field)
    };
    let resembling = parameters.iter().filter(|candidate| resembles(candidate));
    resembling.map(|found| found.path.clone()).take(3).collect()
}

/// The ranges of what the quantizers of the weights at some paths are given.
///
/// # Errors
///
/// If a scheme does not fit its tensor.
pub(crate) fn ranges<M: Module>(
    model: &M,
    schemes: &HashMap<String, Scheme>,
) -> Result<HashMap<String, Range>, QuantError> {
    let mut ranger = Ranger {
        effective: Effective::of(model),
        schemes,
        found: Ok(HashMap::new()),
    };
    visit_floats(model, &mut ranger);
    ranger.found
}

/// Replaces the stored values at the given paths; everything else about them stays.
pub(crate) fn replace<M: Module>(model: M, values: HashMap<String, TensorData>) -> M {
    map_with_path(model, &mut Replacer(values))
}

struct Reader<'a> {
    /// Where the values of a path go; without those that were found.
    wanted: HashMap<&'a str, usize>,
    /// Those of weights, by the path of the weight.
    quantizers: HashMap<String, FakeQuantize>,
    found: Vec<usize>,
    transaction: Option<Transaction>,
}

impl FloatVisitor for Reader<'_> {
    fn visit<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>) {
        let Some(index) = self.wanted.remove(path) else {
            return;
        };
        let value = param.base().without_autodiff();
        let value = match (value.dtype(), self.quantizers.get(path)) {
            (DType::QFloat(_), Some(quantizer)) => quantizer.stored_values(value),
            (DType::QFloat(_), None) => value.dequantize(),
            _ => value,
        };
        self.found.push(index);
        self.transaction = self.transaction.take().map(|all| all.register(value));
    }
}

struct Ranger<'a> {
    effective: Effective,
    schemes: &'a HashMap<String, Scheme>,
    found: Result<HashMap<String, Range>, QuantError>,
}

impl FloatVisitor for Ranger<'_> {
    fn visit<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>) {
        let Some(scheme) = self.schemes.get(path) else {
            return;
        };
        if let Ok(found) = &mut self.found {
            let base = param.base().without_autodiff();
            match Range::of(&self.effective.given(path, base), scheme) {
                Ok(range) => {
                    found.insert(path.to_string(), range);
                }
                Err(error) => self.found = Err(error.at(path)),
            }
        }
    }
}

struct Replacer(HashMap<String, TensorData>);

impl PathMapper for Replacer {
    fn float<const D: usize>(&mut self, at: &Trail, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(data) = self.0.remove(&at.path()) else {
            return param;
        };
        param.map(|old| {
            let dtype = match (data.dtype(), old.dtype()) {
                (quantized @ DType::QFloat(_), _) => quantized,
                (float, DType::QFloat(_)) => float,
                (_, stored) => stored,
            };
            Tensor::from_data(data, (&old.device(), dtype)).set_require_grad(old.is_require_grad())
        })
    }
}
