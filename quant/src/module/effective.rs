//! What the quantizer of a weight is given: the stored weight, or what the links of a
//! [`Chain`](burn_lean_reparam::Chain) before it make of it.
//!
//! Burn shows visitors the stored weight only. So the quantizers take part: while the model is
//! materialized here, each tells what it was given.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};

use burn::module::{Module, Param};
use burn::tensor::{DType, Tensor};
use burn_lean_reparam::{FloatVisitor, visit_floats};

use crate::QuantError;
use crate::module::walk::{Located, Site, map_quantizers, quantizers};
use crate::range::observer::read;

/// Stored values of a tensor, on the host.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct HostTensor<E = f32> {
    pub(crate) values: Vec<E>,
    pub(crate) shape: Vec<usize>,
}

thread_local! {
    /// What quantizers were given, flat, by their paths; `None` while nobody asks.
    static GIVEN: RefCell<Option<HashMap<String, Tensor<1>>>> = const { RefCell::new(None) };
}

/// Whether someone on this thread asks what quantizers are given.
pub(crate) fn is_asking() -> bool {
    GIVEN.with_borrow(Option::is_some)
}

/// Called by the quantizer of a weight with what it is given.
pub(crate) fn given<const D: usize>(quantizer: &str, x: &Tensor<D>) {
    GIVEN.with_borrow_mut(|given| {
        if let Some(given) = given {
            given.insert(quantizer.to_string(), flat(x.clone()));
        }
    });
}

/// The path of the link that is a weight's quantizer, for example `fc1.weight.chain.second`, if it
/// is one of a chain.
fn link(located: &Located) -> Option<(&str, &str)> {
    if located.site != Site::Weight {
        return None;
    }
    let parameter = located.parameter.as_deref()?;
    let link = located.path.strip_suffix(".weight")?;
    let chained = link.strip_prefix(parameter)?.starts_with(".chain.");
    chained.then_some((parameter, link))
}

/// Paths of the weights whose quantizer is one of a chain.
pub(crate) fn chained<M: Module>(model: &M) -> HashSet<String> {
    let located = quantizers(model);
    let of_chains = located.iter().filter_map(link);
    of_chains
        .map(|(parameter, _)| parameter.to_string())
        .collect()
}

/// What quantizers in chains are given, and what comes out of the chains.
#[derive(Debug, Default)]
pub(crate) struct Effective {
    /// By path of the weight; flat.
    given: HashMap<String, Tensor<1>>,
    /// What the forward pass sees; likewise.
    values: HashMap<String, Tensor<1>>,
}

impl Effective {
    /// Of the weights of `model` whose quantizer is switched on, as in inference. Computes nothing
    /// where no quantizer is in a chain.
    pub(crate) fn of<M: Module>(model: &M) -> Self {
        let mut chained = HashMap::new();
        for located in quantizers(model) {
            if let Some((parameter, _)) = link(&located)
                && located.quantizer.is_enabled()
            {
                chained.insert(parameter.to_string(), located.path);
            }
        }
        if chained.is_empty() {
            return Self::default();
        }
        let model = map_quantizers(model.valid(), |located| {
            located.quantizer.with_path(located.path)
        });
        let guard = Guard(GIVEN.replace(Some(HashMap::new())));
        let model = model.materialize();
        let mut told = GIVEN.take().unwrap_or_default();
        drop(guard);
        let mut values = Values {
            chained: &chained,
            found: HashMap::new(),
        };
        visit_floats(&model, &mut values);
        Self {
            values: values.found,
            given: chained
                .into_iter()
                .filter_map(|(parameter, quantizer)| Some((parameter, told.remove(&quantizer)?)))
                .collect(),
        }
    }

    /// What the quantizer of the weight at `path` is given; `base` is what is stored.
    pub(crate) fn given<const D: usize>(&self, path: &str, base: Tensor<D>) -> Tensor<D> {
        match self.given.get(path) {
            Some(given) => given.clone().reshape(base.shape()),
            None => base,
        }
    }

    /// What the forward pass sees, row-major, if the quantizer is in a chain.
    ///
    /// # Errors
    ///
    /// [`QuantError::Device`].
    pub(crate) fn value(&self, path: &str) -> Result<Option<Vec<f32>>, QuantError> {
        self.values.get(path).cloned().map(read).transpose()
    }

    /// Whether the quantizer of the weight at `path` is in a chain.
    pub(crate) fn is_chained(&self, path: &str) -> bool {
        self.values.contains_key(path)
    }

    /// Puts what the quantizer is given in the place of what is stored.
    ///
    /// # Errors
    ///
    /// [`QuantError::UnsupportedLayer`] if a link before the quantizer does something else to the
    /// stored weight than to set some of it to zero: whatever is stored, the quantizer would be
    /// given something else. [`QuantError::Device`].
    pub(crate) fn replace_masked(
        &self,
        path: &str,
        stored: &mut HostTensor,
    ) -> Result<(), QuantError> {
        let Some(given) = self.given.get(path) else {
            return Ok(());
        };
        let given = read(given.clone())?;
        let is_mask = |(stored, given): (&f32, &f32)| *given == 0.0 || stored == given;
        if !stored.values.iter().zip(&given).all(is_mask) {
            return Err(QuantError::UnsupportedLayer {
                path: path.to_string(),
                reason: "another reparameterization, which is no mask, acts on it before its \
                         quantizer does; fold that one into the weight first"
                    .into(),
            });
        }
        stored.values = given;
        Ok(())
    }

    /// The first weight for which this differs from `other` in what the forward pass sees.
    ///
    /// # Errors
    ///
    /// [`QuantError::Device`].
    pub(crate) fn first_difference(&self, other: &Self) -> Result<Option<&str>, QuantError> {
        let is_equal = |(a, b): (&f32, &f32)| a == b || (a.is_nan() && b.is_nan());
        for path in self.values.keys() {
            if let (Some(a), Some(b)) = (self.value(path)?, other.value(path)?)
                && !a.iter().zip(&b).all(is_equal)
            {
                return Ok(Some(path));
            }
        }
        Ok(None)
    }
}

/// How the tensors of a chained weight's reparameterizations are called in a file: as those of a
/// weight that carries its quantizer alone.
#[derive(Debug, Default)]
pub(crate) struct FileNames {
    /// Path of the link that is the quantizer, and its name alone.
    quantizers: Vec<(String, String)>,
    /// Paths of the links before a quantizer: their effect is part of the codes.
    folded: Vec<String>,
    /// Paths of the quantizers of quantized weights, and of activations that the metadata describes: scales
    /// and zero points are in the file already, so that neither ranges nor learned scales are.
    known: Vec<String>,
}

impl FileNames {
    /// For the weights of `model` that `quantized` names.
    pub(crate) fn of<M: Module>(model: &M, quantized: impl Fn(&str) -> bool) -> Self {
        let mut names = Self::default();
        for located in quantizers(model) {
            let parameter = located.parameter.as_deref().unwrap_or_default();
            if located.site == Site::Weight && quantized(parameter) {
                names.known.push(located.path.clone());
            }
            let Some((parameter, link)) = link(&located).filter(|(path, _)| quantized(path)) else {
                continue;
            };
            let alone = format!("{parameter}.quant.");
            names.quantizers.push((format!("{link}."), alone));
            let mut before = String::new();
            for name in link.split('.') {
                if name == "second" && before.len() > parameter.len() {
                    names.folded.push(format!("{before}.first."));
                }
                if !before.is_empty() {
                    before.push('.');
                }
                before.push_str(name);
            }
        }
        names
    }

    /// Without the ranges of these quantizers.
    pub(crate) fn without_ranges(mut self, paths: impl IntoIterator<Item = String>) -> Self {
        self.known.extend(paths);
        self
    }

    /// The name of what is at `path`, a quantizer or one of its tensors.
    pub(crate) fn name(&self, path: &str) -> String {
        let alone = self.quantizers.iter().find_map(|(link, alone)| {
            let rest = path.strip_prefix(link)?;
            Some(format!("{alone}{rest}"))
        });
        alone.unwrap_or_else(|| path.to_string())
    }

    /// The name of the tensor at `path`; `None` if it is not in the file.
    pub(crate) fn of_tensor(&self, path: &str) -> Option<String> {
        if self.folded.iter().any(|link| path.starts_with(link)) {
            return None;
        }
        let is_scale = |quantizer: &String| {
            let state = path.strip_prefix(quantizer.as_str());
            state.is_some_and(|state| {
                state.starts_with(".observer.") || state.starts_with(".learned_")
            })
        };
        match self.known.iter().any(is_scale) {
            true => None,
            false => Some(self.name(path)),
        }
    }
}

fn flat<const D: usize>(tensor: Tensor<D>) -> Tensor<1> {
    let elements = tensor.shape().num_elements();
    tensor.without_autodiff().reshape([elements])
}

struct Values<'a> {
    chained: &'a HashMap<String, String>,
    found: HashMap<String, Tensor<1>>,
}

impl FloatVisitor for Values<'_> {
    fn visit<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>) {
        if self.chained.contains_key(path) {
            let value = match param.base() {
                quantized if matches!(quantized.dtype(), DType::QFloat(_)) => {
                    quantized.dequantize()
                }
                float => float,
            };
            self.found.insert(path.to_string(), flat(value));
        }
    }
}

/// Stops asking, also when the model panics.
struct Guard(Option<HashMap<String, Tensor<1>>>);

impl Drop for Guard {
    fn drop(&mut self) {
        GIVEN.set(self.0.take());
    }
}
