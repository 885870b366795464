//! Which edges of a graph are quantized, and how.

use std::collections::{BTreeMap, HashMap};

use burn::module::Module;
use burn_lean_quant::{
    FakeQuantize, Granularity, Mapping, NumberFormat, ObserverConfig, QuantError, QuantizedTensor,
    Site, integer::Grid, quantizers, seen_weights,
};

/// An operand of an operation of a [`Graph`](burn_lean_graph::Graph).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Edge {
    /// Position of the operation ([`Node::index`](burn_lean_graph::Node::index)).
    pub(crate) node: usize,
    /// Position among its tensors, from 0: of a product the left side and the right side, of a
    /// convolution the input and the weight, of an attention query, key and value.
    pub(crate) operand: usize,
}

/// How an activation becomes integers, one grid for the tensor.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum ActivationQuantization {
    /// With a scale and zero point that are known.
    Static(Grid),
    /// With those of the values at hand: from min(x, 0) to max(x, 0) in 256 steps.
    Dynamic,
}

impl ActivationQuantization {
    /// What a quantizer does, or why ONNX cannot say it.
    pub(crate) fn of(quantizer: &FakeQuantize) -> Result<Result<Self, &'static str>, QuantError> {
        let scheme = quantizer.scheme();
        if scheme.granularity != Granularity::PerTensor || !scheme.format.is_int() {
            return Ok(Err("ONNX's activations are integers with one scale"));
        }
        // The range is that of the values at hand.
        let is_dynamic = quantizer.config().observer == ObserverConfig::Memoryless
            && quantizer.qparams().is_err();
        let is_uint8 = scheme.format == NumberFormat::uint8();
        Ok(match is_dynamic {
            false => Ok(Self::Static(Grid::of(quantizer)?)),
            true if is_uint8 && scheme.mapping == Mapping::Affine => Ok(Self::Dynamic),
            true => Err("ONNX takes dynamic ranges for affine u8 alone"),
        })
    }
}

/// Which weights and activations of a model are quantized.
///
/// [`of`](Self::of) reads it from the quantizers that a model carries; weights and inputs of layers can
/// be added by hand.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Quantization {
    pub(crate) weights: BTreeMap<String, QuantizedTensor>,
    pub(crate) inputs: HashMap<String, ActivationQuantization>,
    /// Of any operand; before what is said of the layer's input.
    pub(crate) edges: HashMap<Edge, ActivationQuantization>,
    /// Of what the forward pass gives, by its position.
    pub(crate) results: HashMap<usize, ActivationQuantization>,
    /// Path and reason.
    pub(crate) left_float: Vec<(String, String)>,
}

impl Quantization {
    /// Nothing quantized.
    pub fn none() -> Self {
        Self::default()
    }

    /// What the quantizers of a [prepared](burn_lean_quant::QatConfig) or
    /// [converted](burn_lean_quant::ConvertConfig) model say: of its weights, and of the inputs of the
    /// layers that have one. [`Export::record`](crate::Export::record) adds the other edges that it
    /// sees; until then they are in [`left_float`](Self::left_float).
    ///
    /// # Errors
    ///
    /// Those of [`seen_weights`], and of an input quantizer that has no range.
    pub fn of<M: Module>(model: &M) -> Result<Self, QuantError> {
        let mut found = Self::none();
        let all = quantizers(model);
        if all.is_empty() {
            return Ok(found);
        }
        for (path, codes, is_seen) in seen_weights(model)? {
            match is_seen {
                true => drop(found.weights.insert(path, codes)),
                false => {
                    let why = "what acts behind its quantizer is not in its codes";
                    found
                        .left_float
                        .push((path.clone(), format!("`{path}`: {why}")));
                }
            }
        }
        for located in all {
            let quantizer = &located.quantizer;
            if located.site == Site::Weight || !quantizer.is_enabled() {
                continue;
            }
            if !quantizer.phase().quantizes() {
                let why = format!(
                    "{}: in step {} it does not quantize yet",
                    located.name(),
                    quantizer.step()
                );
                found.left_float.push((located.path, why));
                continue;
            }
            let Some(path) = located
                .parameter
                .clone()
                .filter(|_| located.site == Site::Input)
            else {
                let why = "the recording does not show it, or not as one grid of integers";
                let why = format!("{}: {why}", located.name());
                found.left_float.push((located.path, why));
                continue;
            };
            match ActivationQuantization::of(quantizer)? {
                Ok(how) => {
                    found.inputs.insert(path, how);
                }
                Err(why) => {
                    let why = format!("{}: {why}", located.name());
                    found.left_float.push((located.path, why));
                }
            }
        }
        found.left_float.sort();
        Ok(found)
    }

    /// With codes for the weight at a path.
    pub fn with_weight(mut self, path: impl Into<String>, codes: QuantizedTensor) -> Self {
        self.weights.insert(path.into(), codes);
        self
    }

    /// With the input of the layer of the weight at a path quantized.
    pub fn with_input(mut self, path: impl Into<String>, how: ActivationQuantization) -> Self {
        self.inputs.insert(path.into(), how);
        self
    }

    /// The codes of the quantized weights, by path.
    pub fn weights(&self) -> impl Iterator<Item = (&str, &QuantizedTensor)> {
        self.weights
            .iter()
            .map(|(path, codes)| (path.as_str(), codes))
    }

    /// Why the quantizer of a layer's input is not written, if it has one that is not.
    pub(crate) fn unrounded_input(&self, path: &str) -> Option<String> {
        let of_input = |at: &str| at.strip_prefix(path) == Some(".quant.input");
        let found = self.left_float.iter().find(|(at, _)| of_input(at));
        found.map(|(_, why)| why.clone())
    }

    /// Quantizers of the model that an export leaves out, each with the reason.
    pub fn left_float(&self) -> impl Iterator<Item = &str> {
        self.left_float.iter().map(|(_, why)| why.as_str())
    }

    /// Refuses grids that ONNX's bytes do not hold.
    pub(crate) fn check(&self) -> Result<(), QuantError> {
        let fits = |grid: &Grid| {
            let ends = [grid.quant_min, grid.quant_max];
            [-128..=127, 0..=255]
                .iter()
                .any(|byte| ends.iter().all(|end| byte.contains(end)))
        };
        for (path, how) in &self.inputs {
            let ActivationQuantization::Static(grid) = how else {
                continue;
            };
            grid.validate()?;
            if !fits(grid) {
                return Err(QuantError::InvalidConfig {
                    field: "quant_max",
                    value: format!(
                        "{} to {} for the input of `{path}`",
                        grid.quant_min, grid.quant_max
                    ),
                    expected: "codes of a signed or an unsigned byte",
                });
            }
        }
        Ok(())
    }

    /// Whether nothing is quantized.
    pub fn is_empty(&self) -> bool {
        let activations = self.inputs.len() + self.edges.len() + self.results.len();
        self.weights.is_empty() && activations == 0
    }

    pub(crate) fn activation(
        &self,
        edge: Edge,
        weight: Option<&str>,
    ) -> Option<ActivationQuantization> {
        let of_edge = self.edges.get(&edge);
        of_edge
            .or_else(|| self.inputs.get(weight?).filter(|_| edge.operand == 0))
            .copied()
    }
}
