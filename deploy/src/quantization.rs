//! Which edges of a graph are quantized, and how.

use std::collections::{BTreeMap, HashMap};

use burn::module::Module;
use burn_lean_quant::{
    FakeQuantize, Granularity, Mapping, NumberFormat, ObserverConfig, QuantError, QuantParams,
    QuantizedTensor, Scheme, Site, format::ScaleFormat, integer::Grid, quantizers, seen_weights,
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

/// How an activation becomes integers.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum ActivationQuantization {
    /// With a scale and zero point that are known.
    Static(Grid),
    /// With those of the values at hand.
    Dynamic(DynamicGrid),
}

/// Integers whose scale and zero point are those of the values at hand
/// ([`QuantParams::from_range`](burn_lean_quant::QuantParams::from_range)).
///
/// No scale is below 2⁻²³, in the model and in the engine's own products (`Backend::Own`). ONNX's
/// `DynamicQuantizeLinear`, which files have for [`uint8`](Self::uint8) and rten computes, knows no smallest scale: on a
/// range below 255 · 2⁻²³ ≈ 3·10⁻⁵ its codes are others.
///
/// ```
/// use burn_lean_deploy::DynamicGrid;
/// use burn_lean_quant::{Mapping, NumberFormat};
///
/// // As activations of language models are quantized: each row has a scale of its own.
/// let grid = DynamicGrid {
///     format: NumberFormat::int8(),
///     mapping: Mapping::Symmetric,
///     per_token: true,
/// };
/// assert_ne!(grid, DynamicGrid::uint8());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DynamicGrid {
    /// The codes: integers.
    pub format: NumberFormat,
    /// How real numbers are mapped to them.
    pub mapping: Mapping,
    /// One scale for each row along the last axis, instead of one for the tensor. Rows of a convolution's input
    /// are not told apart: there it stays in floats.
    pub per_token: bool,
}

/// The smallest scale that a range gives.
pub(crate) const SMALLEST_SCALE: f32 = QuantParams::EPSILON;

impl DynamicGrid {
    /// 256 codes from min(x, 0) to max(x, 0) of the tensor: ONNX's `DynamicQuantizeLinear`.
    pub const fn uint8() -> Self {
        Self {
            format: NumberFormat::uint8(),
            mapping: Mapping::Affine,
            per_token: false,
        }
    }

    pub(crate) fn is_of_onnx(self) -> bool {
        self == Self::uint8()
    }

    fn of(scheme: &Scheme) -> Option<Self> {
        let per_token = match scheme.granularity {
            Granularity::PerTensor => false,
            Granularity::PerToken => true,
            _ => return None,
        };
        let grid = Self {
            format: scheme.format,
            mapping: scheme.mapping,
            per_token,
        };
        (scheme.scale_format == ScaleFormat::F32 && grid.validate().is_ok()).then_some(grid)
    }

    fn scheme(self) -> Scheme {
        Scheme::symmetric(self.format).with_mapping(self.mapping)
    }

    /// Refuses what is not made of integers.
    fn validate(self) -> Result<(), QuantError> {
        self.scheme().validate_choices()?;
        match self.format.is_int() {
            true => Ok(()),
            false => Err(QuantError::InvalidConfig {
                field: "format",
                value: self.format.to_string(),
                expected: "integers",
            }),
        }
    }

    pub(crate) fn quant_min(self) -> i32 {
        self.format.quant_min() as i32
    }

    pub(crate) fn quant_max(self) -> i32 {
        self.format.quant_max() as i32
    }

    pub(crate) fn symmetric_zero_point(self) -> i32 {
        self.scheme().symmetric_zero_point() as i32
    }
}

impl ActivationQuantization {
    /// What a quantizer does, or why ONNX cannot say it.
    pub(crate) fn of(quantizer: &FakeQuantize) -> Result<Result<Self, &'static str>, QuantError> {
        let scheme = quantizer.scheme();
        // The range is that of the values at hand.
        let is_dynamic = quantizer.config().observer == ObserverConfig::Memoryless
            && quantizer.qparams().is_err();
        if is_dynamic {
            let no_grid = "dynamic ranges are of integers with F32 scales, one for the tensor or one for each row";
            return Ok(DynamicGrid::of(scheme).map(Self::Dynamic).ok_or(no_grid));
        }
        if scheme.granularity != Granularity::PerTensor || !scheme.format.is_int() {
            return Ok(Err("ONNX's activations are integers with one scale"));
        }
        Ok(Ok(Self::Static(Grid::of(quantizer)?)))
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

    /// With codes for the weight at a path. Also what is computed from the weight before a product reads it is
    /// computed from what they stand for.
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
            let grid = match how {
                ActivationQuantization::Static(grid) => grid,
                ActivationQuantization::Dynamic(grid) => {
                    grid.validate()?;
                    continue;
                }
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
