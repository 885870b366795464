//! Activations that stay float: those that have quantizers, but no range, or all.

use std::collections::HashSet;
use std::fmt;

use burn::module::Module;
use serde::{Deserialize, Serialize};

use crate::QuantError;
use crate::module::walk::{Located, Site, map_quantizers, quantizers};

/// What to do with an activation whose quantizer has no range: no value ever came by, or one value
/// only (all zeros, for example).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub enum Unobserved {
    /// An error that names all of them.
    #[default]
    Refuse,
    /// Its quantizer is switched off, and the report names it.
    LeaveFloat,
}

/// What the quantizers of activations do in a converted model that runs in Burn.
///
/// Burn multiplies floats: rounding activations on the way costs time that no integers win back. Where
/// integers compute (`Engine` of `burn-lean-deploy`, an ONNX file), they need the ranges.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Activations {
    /// They round in every call, as in training: the outputs are those of integers, and a forward pass
    /// takes longer than that of the float model.
    #[default]
    Rounded,
    /// They are switched off, and the report names them: the outputs are those of quantized weights and
    /// float activations, and a forward pass takes as long as that of the float model.
    Float,
}

/// An activation that stays float.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftFloat {
    /// Path of the quantizer that was switched off.
    pub path: String,
    /// What it was to quantize, for example ``input of `fc1` ``.
    pub name: String,
    /// Why.
    pub reason: String,
}

impl fmt::Display for LeftFloat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} stays float: {}", self.name, self.reason)
    }
}

impl Unobserved {
    /// What is left float of `found`, the quantizers without a range and why.
    ///
    /// # Errors
    ///
    /// Those of `found` that are refused; others than a missing range always are.
    pub(crate) fn judge(
        self,
        found: Vec<(Located, QuantError)>,
    ) -> Result<Vec<LeftFloat>, QuantError> {
        let mut left = Vec::new();
        let mut refused = Vec::new();
        for (located, error) in found {
            match self == Self::LeaveFloat && is_without_range(&error) {
                true => left.push(LeftFloat {
                    name: located.name(),
                    reason: innermost(&error).to_string(),
                    path: located.path,
                }),
                false => refused.push(match error {
                    error @ QuantError::Parameter { .. } => error,
                    error => error.at(located.name()),
                }),
            }
        }
        match refused.len() {
            0 => Ok(left),
            1 => Err(refused.remove(0)),
            _ => Err(QuantError::Several { errors: refused }),
        }
    }
}

impl Activations {
    /// What is left float of all quantizers of activations.
    pub(crate) fn left(all: &[Located]) -> Vec<LeftFloat> {
        let activations = all
            .iter()
            .filter(|located| located.site != Site::Weight && located.quantizer.is_enabled());
        let left = activations.map(|located| LeftFloat {
            path: located.path.clone(),
            name: located.name(),
            reason: "the conversion was told to leave activations float".into(),
        });
        left.collect()
    }
}

/// Paths of the weights of layers that round their inputs or outputs in every call.
pub(crate) fn rounding<M: Module>(model: &M) -> HashSet<String> {
    let rounding = quantizers(model).into_iter().filter(|located| {
        located.site != Site::Weight
            && located.quantizer.is_enabled()
            && located.quantizer.phase().quantizes()
    });
    rounding.filter_map(|located| located.parameter).collect()
}

fn innermost(error: &QuantError) -> &QuantError {
    match error {
        QuantError::Parameter { error, .. } => innermost(error),
        error => error,
    }
}

fn is_without_range(error: &QuantError) -> bool {
    matches!(
        innermost(error),
        QuantError::NeverObserved | QuantError::NeverCalled | QuantError::ConstantRange { .. }
    )
}

/// The activation quantizers of `all` that are switched on and have no useful range, with the
/// reason; by their names.
///
/// `unused` are the paths of those that the forward pass does not come by, if it is known. Where it
/// is not, a quantizer without a range of its own must have been called.
pub(crate) fn without_range(
    all: &[Located],
    unused: Option<&[String]>,
) -> Vec<(Located, QuantError)> {
    let activations = all
        .iter()
        .filter(|located| located.site != Site::Weight && located.quantizer.is_enabled());
    let judged = activations.filter_map(|located| {
        let quantizer = located.quantizer.clone().with_path(located.name());
        let is_unused = match unused {
            Some(unused) => unused.contains(&located.path),
            // One that stands alone is called by the model's own code or not at all.
            None => {
                located.site != Site::Standalone
                    && !quantizer.has_static_range()
                    && !quantizer.was_called()
            }
        };
        let error = match is_unused {
            true => QuantError::NeverCalled.at(located.name()),
            false if quantizer.has_static_range() => quantizer.qparams().err()?,
            false => return None,
        };
        Some((located.clone(), error))
    });
    judged.collect()
}

/// The model with the quantizers of what is left float switched off.
pub(crate) fn leave_float<M: Module>(model: M, left: &[LeftFloat]) -> M {
    let paths: HashSet<&str> = left.iter().map(|left| left.path.as_str()).collect();
    if paths.is_empty() {
        return model;
    }
    map_quantizers(model, |located| {
        match paths.contains(located.path.as_str()) {
            true => located.quantizer.with_enabled(false),
            false => located.quantizer,
        }
    })
}
