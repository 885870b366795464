//! Which numbers of a model are quantized when it runs, and which are not, and why.
//!
//! Burn records operations on its capture device instead of running them. The graph names every
//! matrix product and convolution, also those inside of Burn's own modules and those without a
//! weight, so that nothing has to be said about the model and none of its code changes.

use std::any::Any;
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::backend::Capture;
use burn::backend::ir::{OperationIr, TensorId};
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Bool, DType, Device, FloatDType, Int, Tensor};
use burn_lean_reparam::with_capture_device;
use serde::{Deserialize, Serialize};

use crate::{FoldPair, Phase, QuantError, Scheme, Site, map_quantizers, quantizers};

mod display;
mod graph;
mod log;
mod norm_pair;
mod operation;

pub(crate) use log::{is_recording, stand_in, zeros};
pub use norm_pair::{NormPair, NotFoldable};

use graph::Graph;
use log::Log;

/// What [`audit`] found.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Audit {
    /// Products with a weight, in order of their first use.
    pub layers: Vec<AuditedLayer>,
    /// Places without a weight whose operands can be quantized, in order of their first use.
    pub sites: Vec<FunctionalSite>,
    /// Batch norms that directly follow a layer.
    pub norm_pairs: Vec<NormPair>,
    /// Quantizers of the model that the forward pass never came by.
    pub unused: Vec<String>,
}

/// A matrix product, a convolution or an embedding with a weight of the model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AuditedLayer {
    /// Its name in Burn's operation graph, for example `Conv2d` or `Linear`.
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

/// An operation on computed tensors alone.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FunctionalSite {
    /// What it is.
    pub kind: SiteKind,
    /// Its operands: the weight of the layer that each comes from, if any, and how it is quantized.
    pub operands: Vec<(Option<String>, Coverage)>,
    /// Shape of its output.
    pub shape: Vec<usize>,
    /// How often there is one like it in one forward pass.
    pub uses: usize,
}

/// What a functional site computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum SiteKind {
    /// Query times key, which a softmax follows.
    AttentionScores,
    /// Softmax output times value.
    AttentionValues,
    /// Attention as one operation; the softmax inside of it stays in float.
    FusedAttention,
    /// Any other product of two computed tensors.
    Matmul,
    /// The sum of two computed tensors, as in a residual connection.
    ///
    /// Of two shapes only where both come from layers: not a mask that is added.
    Add,
    /// The difference of two computed tensors; of two shapes as for [`Add`](Self::Add).
    Sub,
    /// The element-wise product of two computed tensors, as in a gate, a squeeze-and-excite block or
    /// an outer product.
    ///
    /// Not the product, sum or difference of a tensor and a smaller one that was computed from it
    /// without any layer, as in a normalization.
    Mul,
    /// A concatenation; integer arithmetic needs one scale for all of its parts.
    Concat,
    /// The operand is what a softmax put out.
    SoftmaxOutput,
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
    /// The layer has a quantizer for its input, but the call says `forward`, not `forward_q`.
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
    /// Nothing quantizes it: put a `FakeQuantize` there, or call the composite layer's `forward_q`.
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
        let mut coverages = self.operands.iter().map(|(_, coverage)| coverage);
        coverages.all(Coverage::is_quantized)
    }
}

/// Records `forward` and reports what is quantized in it.
///
/// `forward` gets the model and the device to create its inputs on. Nothing is computed, so its
/// tensors have no values to look at. The model itself is not touched. Dropout is off and batch
/// norms use their running statistics, as in [`Module::valid`].
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::tensor::{Device, Tensor};
/// use burn_lean_quant::{Cause, Coverage, audit};
///
/// let model = LinearConfig::new(16, 4).init(&Device::flex());
/// let audit = audit(&model, |model, device| {
///     model.forward(Tensor::<2>::ones([8, 16], device))
/// })?;
/// assert_eq!(audit.layers[0].weight_path, "weight");
/// assert_eq!(audit.layers[0].weight, Coverage::Float(Cause::WeightNotPrepared));
/// assert!(!audit.is_covered());
/// println!("{audit}");
/// # Ok::<(), burn_lean_quant::QuantError>(())
/// ```
///
/// # Errors
///
/// [`QuantError::Audit`] when the forward pass panics, with Burn's message.
pub fn audit<M: Module, O: Any>(
    model: &M,
    forward: impl Fn(&M, &Device) -> O,
) -> Result<Audit, QuantError> {
    let trace = Trace::record(model, forward)?;
    let graph = Graph::read(&trace);
    Ok(Audit {
        norm_pairs: norm_pair::find(&trace.operations, &graph),
        layers: graph.layers,
        sites: graph.sites,
        unused: trace.unused(),
    })
}

impl Audit {
    /// Whether every weight and every layer input is quantized.
    ///
    /// Functional sites do not count: which of them have to be quantized depends on the hardware.
    pub fn is_covered(&self) -> bool {
        self.layers.iter().all(AuditedLayer::is_quantized)
    }

    /// The batch norms that can be folded into the layer before them, for [`fold`](crate::fold).
    pub fn fold_pairs(&self) -> Vec<FoldPair> {
        let foldable = self
            .norm_pairs
            .iter()
            .filter(|pair| pair.not_foldable.is_none());
        let pairs = foldable.map(|pair| FoldPair::new(&pair.layer, &pair.norm, pair.epsilon));
        pairs.collect()
    }
}

/// One recorded forward pass.
struct Trace {
    operations: Vec<OperationIr>,
    parameters: Parameters,
    log: Log,
}

impl Trace {
    fn record<M: Module, O: Any>(
        model: &M,
        forward: impl Fn(&M, &Device) -> O,
    ) -> Result<Self, QuantError> {
        with_capture_device(|capture| Self::record_on(capture, model, forward))
    }

    fn record_on<M: Module, O: Any>(
        capture: &Device,
        model: &M,
        forward: impl Fn(&M, &Device) -> O,
    ) -> Result<Self, QuantError> {
        let mut parameters = Parameters::of(model);
        let mut stopped = None;
        let mut log = Log::default();
        let captured = capture.capture_scope(|scope| {
            // `valid` copies running statistics: `to_device` would move the original's in place.
            // The capture device holds no quantized tensors.
            let weights = quantizers(model)
                .into_iter()
                .filter(|located| located.site == Site::Weight);
            let dtypes = weights
                .filter_map(|located| Some((located.parameter?, located.quantizer.dtype())))
                .collect();
            let model = model.valid().map(&mut Dequantize {
                path: Vec::new(),
                dtypes,
                stored: &mut parameters.stored,
            });
            // Those that stand alone in a model that is not prepared do not know their paths.
            let model = map_quantizers(model, |located| {
                // What is stored quantized is not quantized once more.
                let is_stored = match (&located.parameter, located.site) {
                    (Some(parameter), Site::Weight) => parameters.stored.contains_key(parameter),
                    _ => false,
                };
                match located.quantizer.with_path(located.path) {
                    quantizer if is_stored => quantizer.with_enabled(false),
                    quantizer => quantizer,
                }
            });
            let model = model.to_device(capture);
            model.visit(&mut parameters);
            // Caught inside of the scope, which panics if it is left without a completion.
            let (output, entries) =
                Log::during(|| catch_unwind(AssertUnwindSafe(|| forward(&model, capture))));
            log = entries;
            let completed = scope.complete([], []);
            if let Err(payload) = output {
                stopped = Some(panic_message(payload.as_ref()));
            }
            completed
        });
        let reason = match (stopped, captured) {
            (None, Ok(captured)) => {
                return Ok(Self {
                    operations: captured.graph.operations,
                    parameters,
                    log,
                });
            }
            (Some(reason), _) => reason,
            (None, Err(error)) => error.to_string(),
        };
        Err(QuantError::Audit { reason })
    }
}

impl Trace {
    fn unused(&self) -> Vec<String> {
        let quantizers = self.parameters.quantizers.iter();
        let unused = quantizers.filter(|quantizer| !self.log.was_used(quantizer));
        unused.cloned().collect()
    }
}

fn panic_message(payload: &(dyn Any + Send)) -> String {
    payload
        .downcast_ref::<String>()
        .cloned()
        .or_else(|| payload.downcast_ref::<&str>().map(|text| text.to_string()))
        .unwrap_or_else(|| "the forward pass panicked".into())
}

/// The tensors of a model on the capture device, and what they are.
#[derive(Default)]
struct Parameters {
    path: Vec<String>,
    /// Path of each float parameter; state of another kind has none.
    paths: HashMap<TensorId, Option<String>>,
    /// Burn's scheme of each parameter that is stored quantized, by path.
    stored: HashMap<String, String>,
    /// Paths of all quantizers.
    quantizers: Vec<String>,
    /// Path of the quantizer for the input of the layer with a weight.
    input_quantizers: HashMap<String, String>,
}

impl Parameters {
    /// Only the quantizers; the rest is there after a visit on the capture device.
    fn of<M: Module>(model: &M) -> Self {
        let mut parameters = Self::default();
        for located in quantizers(model) {
            if let (Site::Input, Some(weight)) = (located.site, located.parameter) {
                let path = located.path.clone();
                parameters.input_quantizers.insert(weight, path);
            }
            parameters.quantizers.push(located.path);
        }
        parameters
    }
}

impl ModuleVisitor for Parameters {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Ok(tensor) = param.base().try_into_primitive::<Capture>() {
            let path = Some(self.path.join("."));
            self.paths.entry(tensor.id()).or_insert(path);
        }
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        if let Ok(tensor) = param.val().try_into_primitive::<Capture>() {
            self.paths.insert(tensor.id(), None);
        }
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        if let Ok(tensor) = param.val().try_into_primitive::<Capture>() {
            self.paths.insert(tensor.id(), None);
        }
    }
}

/// Turns stored quantized parameters into float ones.
struct Dequantize<'a> {
    path: Vec<String>,
    /// The dtypes of the values of weights that carry quantizers.
    dtypes: HashMap<String, FloatDType>,
    stored: &'a mut HashMap<String, String>,
}

impl ModuleMapper for Dequantize<'_> {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|base| match base.dtype() {
            DType::QFloat(scheme) => {
                let path = self.path.join(".");
                let values = base.dequantize();
                let values = match self.dtypes.get(&path) {
                    Some(dtype) => values.cast(*dtype),
                    None => values,
                };
                self.stored.insert(path, format!("{scheme:?}"));
                values
            }
            _ => base,
        })
    }
}
