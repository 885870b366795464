//! Which numbers of a model are quantized when it runs, and which are not, and why.
//!
//! A recorded forward pass names every matrix product and convolution, also those inside of Burn's
//! own modules and those without a weight, with the quantizers that act there: nothing has to be
//! said about the model, and none of its code changes.

use std::collections::HashSet;

use burn::module::Module;
use burn_lean_graph::{Role, Tensors, evaluated, record};
use serde::{Deserialize, Serialize};

use crate::fold::norm_pair::find;
use crate::{QuantError, Scheme, fold::NormPair, module::Phase, quantizers};

mod coverage;
mod display;
mod list;

use coverage::Coverages;

/// What [`audit`] found.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Audit {
    /// Products with a weight, in order of their first use.
    pub layers: Vec<AuditedLayer>,
    /// Operations without a weight whose operands can be quantized, in order of their first use.
    pub sites: Vec<FunctionalSite>,
    /// Batch norms that directly follow a layer.
    pub norm_pairs: Vec<NormPair>,
    /// Quantizers that act in a recorded forward pass and that the forward pass does not call by
    /// itself: without [`QuantizedForward`](crate::QuantizedForward) their operands stay float.
    pub uncalled: Vec<String>,
    /// Quantizers of the model that act nowhere in the forward pass.
    pub unused: Vec<String>,
}

/// A matrix product, a convolution or an embedding with a weight of the model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AuditedLayer {
    /// What it computes: `matmul`, `linear`, `conv2d`, `embedding`…
    pub operation: String,
    /// Path of the weight.
    pub weight_path: String,
    /// How the weight is quantized.
    pub weight: Coverage,
    /// How the input is quantized; an embedding's are indices, and have no coverage.
    pub input: Option<Coverage>,
    /// Shape of its first output.
    pub shape: Vec<usize>,
    /// How often it runs like this in one forward pass.
    pub uses: usize,
}

/// An operation on computed tensors alone: a product of an attention or any other of two computed
/// tensors, its softmax, a residual sum or difference, a gate, a concatenation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FunctionalSite {
    /// What it computes: `matmul`, `softmax`, `add`, `mul`, `cat`…
    pub operation: String,
    /// Its operands; of a softmax, its result.
    pub operands: Vec<AuditedOperand>,
    /// Shape of its output.
    pub shape: Vec<usize>,
    /// How often there is one like it in one forward pass.
    pub uses: usize,
}

/// An operand of an operation without a weight.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AuditedOperand {
    /// Path of the weight of the layer whose output it is, or of the layer that ran last before the
    /// operation.
    pub layer: String,
    /// What it is to the operation.
    pub role: Role,
    /// How it is quantized.
    pub coverage: Coverage,
}

/// Whether, and by what, an operand is quantized.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Coverage {
    /// A quantizer of this crate acts on it.
    FakeQuantized {
        /// Path of the quantizer.
        quantizer: String,
        /// Its scheme.
        scheme: Scheme,
    },
    /// It is stored as integers with Burn's scheme.
    Stored(String),
    /// It is nothing but zeros, which are on every grid: the state that a recurrent layer starts
    /// from.
    Zero,
    /// It is float.
    Float(Cause),
}

/// Why an operand is float.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Cause {
    /// The weight has no quantizer: the model is not prepared, or the group or an override leaves
    /// this weight out.
    WeightNotPrepared,
    /// No quantizer for inputs belongs to this layer.
    InputNotPrepared,
    /// The layer has a quantizer for its input, which the forward pass calls by itself, but not here:
    /// the call says `forward`, not `forward_q`.
    PlainForward {
        /// Path of the quantizer.
        quantizer: String,
    },
    /// Its quantizer is switched off, or only observes so far.
    NotQuantizing {
        /// Path of the quantizer.
        quantizer: String,
        /// What it does instead.
        phase: Phase,
    },
    /// Between its quantizer and the use another operation changes the numbers.
    Changed {
        /// Path of the quantizer.
        quantizer: String,
        /// The operation.
        operation: String,
    },
    /// Nothing quantizes it: [`QatConfig::prepare_for`](crate::QatConfig::prepare_for) finds its
    /// place, or put a [`FakeQuantize`](crate::FakeQuantize) there.
    NoQuantizer,
}

impl Coverage {
    /// Whether it is quantized.
    pub fn is_quantized(&self) -> bool {
        !matches!(self, Self::Float(_))
    }
}

impl AuditedLayer {
    /// Whether the weight and the input, if it is float data, are quantized.
    pub fn is_quantized(&self) -> bool {
        self.weight.is_quantized() && self.input.as_ref().is_none_or(Coverage::is_quantized)
    }
}

impl FunctionalSite {
    /// Whether all operands are quantized.
    pub fn is_quantized(&self) -> bool {
        let mut operands = self.operands.iter();
        operands.all(|operand| operand.coverage.is_quantized())
    }
}

/// Records `forward` and reports what is quantized in it.
///
/// It is the forward pass as [`QuantizedForward::run`](crate::QuantizedForward::run) runs it: the
/// quantizers that weights carry act at their places, whether the model's code calls them or not.
/// [`Audit::uncalled`] names those that it does not call. Nothing is computed, and no weight is
/// copied. Dropout is off and batch norms use their running statistics, as in [`Module::valid`].
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::tensor::{Device, Tensor};
/// use burn_lean_quant::{QatConfig, audit, inspect::{Cause, Coverage}};
///
/// let device = Device::flex();
/// let model = LinearConfig::new(16, 4).init(&device);
/// let x = Tensor::<2>::ones([8, 16], &device);
/// let found = audit(&model, x.clone(), |model, x| model.forward(x))?;
/// assert_eq!(found.layers[0].weight_path, "weight");
/// assert_eq!(found.layers[0].weight, Coverage::Float(Cause::WeightNotPrepared));
/// assert!(!found.is_covered());
///
/// let model = QatConfig::new().prepare(model)?;
/// let found = audit(&model, x, |model, x| model.forward(x))?;
/// assert!(found.is_covered());
/// println!("{found}");
/// # Ok::<(), burn_lean_quant::QuantError>(())
/// ```
///
/// # Errors
///
/// [`QuantError::Graph`] when the forward pass cannot be recorded.
pub fn audit<M: Module, I: Tensors, O: Tensors>(
    model: &M,
    input: I,
    forward: impl FnOnce(&M, I) -> O,
) -> Result<Audit, QuantError> {
    let model = model.valid();
    let recording = record(&model, &evaluated(&input), forward)?;
    let graph = recording.graph();
    let coverages = Coverages::of(graph, &model);
    let (layers, sites) = list::of(graph, &coverages);
    let acting: HashSet<&str> = graph
        .nodes()
        .filter_map(|node| Some(node.hook()?.path.as_str()))
        .collect();
    let is_called = |path: &str| {
        let mut hooks = graph.hooks().iter();
        hooks.any(|hook| hook.is_called && hook.path == path)
    };
    let (mut uncalled, mut unused) = (Vec::new(), Vec::new());
    for located in quantizers(&model) {
        match (is_called(&located.path), acting.contains(&*located.path)) {
            (true, _) => {}
            (false, true) => uncalled.push(located.path),
            (false, false) => unused.push(located.path),
        }
    }
    Ok(Audit {
        norm_pairs: find(graph, &model),
        layers,
        sites,
        uncalled,
        unused,
    })
}

impl Audit {
    /// Whether every weight and every layer input is quantized.
    ///
    /// Functional sites do not count: which of them have to be quantized depends on the hardware.
    pub fn is_covered(&self) -> bool {
        self.layers.iter().all(AuditedLayer::is_quantized)
    }
}
