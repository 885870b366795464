//! From a recorded forward pass to ONNX.

mod data;
#[cfg(feature = "engine")]
pub(crate) mod handles;
mod lower;
mod open;
mod products;
mod quantizers;
mod rolled;
mod weights;
mod writer;

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};

use burn::backend::DispatchTensor;
use burn::backend::ir::TensorId;
use burn::module::Module;
use burn::tensor::DType;
use burn_lean_graph::{Graph, LoopPart, Recording, Rolled, Tensors, evaluated, record, signature};

use crate::{DeployError, ElementType, OnnxModel, Quantization, ValueInfo};
use data::HostTensor;
pub use open::OpenAxis;
use open::{Open, Size};
pub use products::{Execution, LayerReport};
pub(crate) use weights::Weights;
use writer::Writer;

/// How quantized layers are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Form {
    /// As a float model: quantized weights are floats of the values that their codes stand for,
    /// activations stay as they are.
    Float,
    /// Codes with `DequantizeLinear`, and `QuantizeLinear` and `DequantizeLinear` where an
    /// activation is quantized. Runtimes fuse them into integer kernels.
    ///
    /// Codes of 8 bits are UINT8, of symmetric weights around 128: signed ones onnxruntime adds in pairs of
    /// 16 bits on x86 CPUs without VNNI, where they saturate. In blocks, which it multiplies in floats, they
    /// are INT8.
    ///
    /// Weights of 4 bits, and of layers without a bias those of 8 bits, whose input has no `QuantizeLinear`, as
    /// one that is not rounded or has a scale for each row, onnxruntime multiplies by inputs that it rounds to 8
    /// bits itself, unless its session has the option `session.qdq_matmulnbits_accuracy_level` at `1`.
    #[default]
    Qdq,
    /// As [`Qdq`](Self::Qdq), where symmetric codes of 8 bits are INT8 with zero points of 0, and biases are
    /// floats: what TensorRT's documentation asks for. Quantize activations symmetrically for it, too:
    /// `Scheme::symmetric(NumberFormat::int8())`.
    QdqSigned,
    /// Operators that compute in integers: `MatMulInteger`, `ConvInteger`, of INT8 weights. For runtimes
    /// whose sums are exact, as the engine's are; onnxruntime's saturate on x86 CPUs without VNNI. A number that
    /// is not finite has some code there, where floats and the engine give NaN.
    Integer,
}

/// What a runtime's integer kernels cannot do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Limits {
    /// They add pairs of products of codes in 16 bits.
    pub(crate) narrow_products: bool,
    /// Their convolutions are wrong.
    pub(crate) no_convolutions: bool,
    /// Their convolutions are along one or two axes.
    pub(crate) no_volumes: bool,
    /// They multiply floats by codes of 4 bits in blocks of 16 to 128 alone; otherwise also by codes of
    /// 8 bits, in blocks of any size.
    pub(crate) narrow_blocks: bool,
    /// Blocks of codes that they multiply floats by have no zero points.
    pub(crate) no_zero_points: bool,
    /// They quantize activations with a range of the values at hand, as any [`DynamicGrid`](crate::DynamicGrid) says.
    pub(crate) engine_operators: bool,
    /// They compute integers of 8 and 16 bits in 32.
    pub(crate) wide_integers: bool,
}

impl Limits {
    /// Those of ONNX Runtime and others.
    pub(crate) fn of_files() -> Self {
        Self {
            narrow_blocks: true,
            ..Self::default()
        }
    }
}

/// A recorded model, ready to be written as ONNX in several forms.
///
/// An index below 0 (of a `select`, a `gather`, a `scatter`, an embedding) counts from the end of its axis in a file;
/// Burn does not say what it means, and its CPU devices refuse it.
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::tensor::{Device, Tensor};
/// use burn_lean_deploy::{Dimension, Export, Form};
///
/// let device = Device::flex();
/// let model = LinearConfig::new(4, 2).init(&device);
/// let x = Tensor::<2>::ones([3, 4], &device);
/// let export = Export::record(&model, &x, |model, x| model.forward(x))?;
/// let onnx = export.to_onnx(Form::Float)?.model;
/// let operators: Vec<_> = onnx.nodes().iter().map(|node| node.operator()).collect();
/// assert_eq!(operators, ["MatMul", "Add"]);
/// // The batch was 3, and may be any other.
/// assert_eq!(onnx.outputs()[0].shape, [Dimension::Open("batch".into()), Dimension::Fixed(2)]);
/// assert!(onnx.to_bytes()?.len() > 40);
/// # Ok::<(), burn_lean_deploy::DeployError>(())
/// ```
#[derive(Debug)]
pub struct Export<O> {
    pub(crate) recording: Recording<O>,
    pub(crate) inputs: Vec<(Vec<usize>, DType)>,
    /// What the inputs are besides tensors: their numbers, which of several variants.
    #[cfg(feature = "engine")]
    pub(crate) described: (u64, u64),
    /// Values of the parameters, in the graph's order.
    pub(crate) parameters: Vec<DispatchTensor>,
    /// That of the parameters, or else of the inputs.
    #[cfg(feature = "engine")]
    pub(crate) device: Option<burn::backend::DispatchDevice>,
    /// Where loops over an open axis may have any number of steps.
    rolled: Option<Rolled>,
    open: Open,
    quantization: Quantization,
}

/// An [`OnnxModel`], and what became of each layer in it.
#[derive(Debug, Clone)]
pub struct Exported {
    /// The model.
    pub model: OnnxModel,
    /// Each matrix product, convolution and quantized embedding, in order.
    pub layers: Vec<LayerReport>,
    /// Why the batch axis has a fixed size; `None` where it has any.
    pub fixed_batch: Option<String>,
}

#[cfg(feature = "engine")]
impl Exported {
    /// What is said of the model, without its operations and constants.
    pub(crate) fn without_constants(&self) -> Self {
        Self {
            model: OnnxModel {
                nodes: Vec::new(),
                initializers: Vec::new(),
                inputs: self.model.inputs.clone(),
                outputs: self.model.outputs.clone(),
            },
            layers: self.layers.clone(),
            fixed_batch: self.fixed_batch.clone(),
        }
    }
}

impl<O: Tensors> Export<O> {
    /// Records what `forward` does with `model` and `inputs`, for inference.
    ///
    /// The model is recorded in evaluation mode, with what its
    /// [reparameterizations](burn::module::Reparameterization) make of its weights: masks, adapters
    /// and fake quantization are folded in. Its quantizers, wherever the recording shows them, become
    /// the [`Quantization`] of the export.
    ///
    /// `forward` runs four times, once more for a quantized model, with four sizes of the first axis of all inputs, from one to twice
    /// the given one and 3, to see what depends on it: what does not compute with it is exported for any
    /// batch. A size that `forward` refuses is left out. [`record_open`](Self::record_open) opens other axes.
    ///
    /// # Errors
    ///
    /// [`DeployError::Graph`] where the forward pass cannot be recorded, [`DeployError::Quant`] for
    /// quantizers without a range, [`DeployError::Dtype`].
    pub fn record<M: Module, I: Tensors>(
        model: &M,
        inputs: &I,
        forward: impl Fn(&M, I) -> O,
    ) -> Result<Self, DeployError> {
        Self::record_open(model, inputs, &[], forward)
    }

    /// [`record`](Self::record) for inputs of any size along these axes, too: the length of a sequence, the
    /// height and width of an image. It is the `dynamic_axes` of PyTorch's exporter.
    ///
    /// `forward` runs up to ten times more for each of them, with sizes from one to twice the recorded one and
    /// 3, and up to four times with all of them changed. Whatever follows from the sizes is computed in the
    /// file: shapes, the ends of slices (of a table of positions, say), counts
    /// ([`Tensor::arange`](burn::tensor::Tensor::arange)) and masks that compare them. A size that `forward`
    /// refuses is left out, and the file fails with it: more positions than a table has. An axis named `batch`
    /// has to stay open; without that name the first axes do where they can.
    ///
    /// A loop over such an axis, as a recurrent layer has it or a `for` loop over its steps, is in the file as one
    /// step and a `Loop` ([`Graph::rolled`] says what is one). Record it with six steps or more.
    ///
    /// ```
    /// use burn::module::Module;
    /// use burn::nn::{Embedding, EmbeddingConfig, PositionalEncoding, PositionalEncodingConfig};
    /// use burn::tensor::{Device, Int, Tensor};
    /// use burn_lean_deploy::{Dimension, Export, Form, OpenAxis};
    ///
    /// #[derive(Module, Debug)]
    /// struct Encoder {
    ///     words: Embedding,
    ///     places: PositionalEncoding,
    /// }
    ///
    /// let device = Device::flex();
    /// let encoder = Encoder {
    ///     words: EmbeddingConfig::new(100, 8).init(&device),
    ///     places: PositionalEncodingConfig::new(8).with_max_sequence_size(64).init(&device),
    /// };
    /// let ids = Tensor::<2, Int>::zeros([2, 16], &device);
    /// let sequence = OpenAxis::new("sequence", [(0, 1)]);
    /// let export = Export::record_open(&encoder, &ids, &[sequence], |encoder: &Encoder, ids| {
    ///     encoder.places.forward(encoder.words.forward(ids))
    /// })?;
    /// let onnx = export.to_onnx(Form::Float)?.model;
    /// let [batch, sequence] = ["batch", "sequence"].map(|name| Dimension::Open(name.into()));
    /// assert_eq!(onnx.outputs()[0].shape, [batch, sequence, Dimension::Fixed(8)]);
    /// # Ok::<(), burn_lean_deploy::DeployError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`record`](Self::record); [`DeployError::OpenAxis`] for an axis whose size the forward pass computes
    /// with: numbers that the host makes of it, a loop over it whose steps differ, parts of it that are
    /// neither a multiple nor a sum; [`DeployError::InvalidConfig`] for axes that the inputs do not have, and
    /// names that are empty or given twice.
    pub fn record_open<M: Module, I: Tensors>(
        model: &M,
        inputs: &I,
        open_axes: &[OpenAxis],
        forward: impl Fn(&M, I) -> O,
    ) -> Result<Self, DeployError> {
        let model = model.valid();
        let given = evaluated(inputs);
        // On this copy alone: what hangs on the weights is folded into them.
        let plain = model.clone().materialize();
        let recording = record(&plain, &given, &forward)?.fold_rows();
        let quantization = quantizers::quantization(&model, &given, &forward, recording.graph())?;
        let find = |rolled| {
            let graph = recording.graph();
            Open::find(&plain, inputs, open_axes, &forward, graph, rolled)
        };
        let mut rolled = None;
        let mut open = find(None);
        if let Err(DeployError::OpenAxis { name, .. }) = &open {
            rolled = recording.graph().rolled();
            if let Some(rolled) = &rolled {
                let name = name.clone();
                open = find(Some(rolled));
                let same = rolled::quantization(recording.graph(), rolled, &quantization);
                same.map_err(|reason| DeployError::OpenAxis { name, reason })?;
            }
        }
        let open = open?;
        let parameters = recording.graph().parameter_values(&plain)?;
        Ok(Self {
            #[cfg(feature = "engine")]
            device: (parameters.iter().chain(&handles::handles(&given)).next())
                .map(burn::backend::TensorMetadata::device),
            inputs: signature(inputs),
            #[cfg(feature = "engine")]
            described: burn_lean_graph::description(inputs),
            recording,
            parameters,
            rolled,
            open,
            quantization,
        })
    }

    /// With other quantized edges and weights than the model's own quantizers say.
    pub fn with_quantization(mut self, quantization: Quantization) -> Self {
        self.quantization = quantization;
        self
    }

    /// Which of its weights and edges are quantized.
    pub fn quantization(&self) -> &Quantization {
        &self.quantization
    }

    /// The operations.
    pub fn graph(&self) -> &Graph {
        self.recording.graph()
    }

    /// As ONNX.
    ///
    /// Batch normalizations that follow a float convolution are folded into it. Constants are
    /// named by the paths of their parameters.
    ///
    /// # Errors
    ///
    /// [`DeployError::Operator`] for an operation without an operator, [`DeployError::Dtype`],
    /// [`DeployError::Weight`].
    pub fn to_onnx(&self, form: Form) -> Result<Exported, DeployError> {
        let weights = self.weights()?;
        self.write(&weights, form, Limits::of_files())
    }

    /// The constants, and the codes of the quantized weights, as the operations read them.
    pub(crate) fn weights(&self) -> Result<Weights, DeployError> {
        let graph = self.written();
        // What is computed from a quantized weight is computed from what its codes stand for, as Burn does.
        let rounded = weights::rounded(self.graph(), &self.parameters, &self.quantization)?;
        let constants = constants(self.graph(), graph, &rounded, &self.open)?;
        Weights::of(graph, &self.parameters, &self.quantization, constants)
    }

    /// The operations as they are written: of loops over an open axis, one step.
    fn written(&self) -> &Graph {
        self.rolled
            .as_ref()
            .map_or(self.graph(), |rolled| &rolled.graph)
    }

    /// What is said of these.
    fn quantized(&self) -> Result<Cow<'_, Quantization>, DeployError> {
        let Some(rolled) = &self.rolled else {
            return Ok(Cow::Borrowed(&self.quantization));
        };
        let found = rolled::quantization(self.graph(), rolled, &self.quantization);
        found
            .map(Cow::Owned)
            .map_err(|reason| DeployError::OpenAxis {
                name: "of a loop".into(),
                reason,
            })
    }

    /// The parameters, of which quantized ones have the values that their codes stand for.
    #[cfg(feature = "engine")]
    pub(crate) fn rounded_parameters(&self) -> Result<Vec<DispatchTensor>, DeployError> {
        weights::rounded(self.graph(), &self.parameters, &self.quantization)
    }

    /// Lets go of everything but the recording.
    #[cfg(feature = "engine")]
    pub(crate) fn forget_parameters(&mut self) {
        self.parameters = Vec::new();
        self.quantization = Quantization::none();
    }

    pub(crate) fn write(
        &self,
        weights: &Weights,
        form: Form,
        limits: Limits,
    ) -> Result<Exported, DeployError> {
        self.quantization.check()?;
        let quantization = self.quantized()?;
        let graph = self.written();
        let mut writer = Writer::new(graph, &self.open, &quantization, weights, form);
        writer.limits = limits;
        for (id, (shape, dtype)) in graph.inputs().iter().zip(&self.inputs) {
            let name = writer.name_input(*id);
            let sizes = self.open.sizes(*id, shape);
            writer.inputs.push(ValueInfo {
                element: writer.element(*dtype, &name)?,
                name,
                shape: self.open.dimensions(&sizes),
            });
        }
        for node in graph.nodes() {
            writer.lower(node)?;
        }
        let mut exported = writer.finish(graph.outputs(), &self.inputs)?;
        if let Some(rolled) = &self.rolled {
            for layer in &mut exported.layers {
                layer.node = rolled.origins[layer.node].unwrap_or(layer.node);
            }
        }
        Ok(exported)
    }
}

/// The values of what does not depend on an input, nor on an open size or the step of a loop.
fn constants(
    evaluated: &Graph,
    graph: &Graph,
    parameters: &[DispatchTensor],
    open: &Open,
) -> Result<HashMap<TensorId, HostTensor>, DeployError> {
    if parameters.is_empty() {
        let constants = graph.constants().filter(|(id, _)| !open.depends(*id));
        return Ok(constants
            .map(|(id, data)| (id, HostTensor::from_data(data.clone())))
            .collect());
    }
    let values = evaluated.constant_values(parameters)?;
    let read = read_by_others(graph, &values);
    let ids = graph.constants().map(|(id, _)| id);
    let mut dependent: HashSet<TensorId> = ids.filter(|id| open.depends(*id)).collect();
    // Also what was added up over an open axis, or taken at its end, whose shape does not show it.
    for node in graph.nodes() {
        let operation = node.operation();
        let mut inputs = operation.inputs();
        let reads = inputs.any(|one| dependent.contains(&one.id))
            || open.numbers(node.index()).iter().any(Size::is_open)
            // Other ones in each step of a loop.
            || LoopPart::of(operation).is_some();
        let outputs = operation.outputs().map(|one| one.id);
        dependent.extend(outputs.filter(|id| reads || open.depends(*id)));
    }
    let mut found = HashMap::new();
    for (id, value) in values {
        if !read.contains(&id) || dependent.contains(&id) {
            continue;
        }
        found.insert(id, HostTensor::of(value));
    }
    Ok(found)
}

/// Constants that something reads which is none, or that are results.
fn read_by_others(graph: &Graph, values: &HashMap<TensorId, DispatchTensor>) -> HashSet<TensorId> {
    let mut read: HashSet<TensorId> = graph.outputs().iter().copied().collect();
    // Everything: what depends on an open size reads constants, too, and is computed in the file.
    for node in graph.nodes() {
        read.extend(node.operation().inputs().map(|input| input.id));
    }
    read.retain(|id| values.contains_key(id));
    read
}

/// ONNX's type of a dtype of Burn.
pub(crate) fn element(dtype: DType, what: &str) -> Result<ElementType, DeployError> {
    Ok(match dtype {
        DType::F64 => ElementType::F64,
        DType::F32 | DType::Flex32 => ElementType::F32,
        DType::F16 => ElementType::F16,
        DType::BF16 => ElementType::BF16,
        DType::I64 => ElementType::I64,
        DType::I32 => ElementType::I32,
        DType::I16 => ElementType::I16,
        DType::I8 => ElementType::I8,
        DType::U64 => ElementType::U64,
        DType::U32 => ElementType::U32,
        DType::U16 => ElementType::U16,
        DType::U8 => ElementType::U8,
        DType::Bool(_) => ElementType::Bool,
        DType::QFloat(_) => {
            return Err(DeployError::Dtype {
                what: what.into(),
                dtype: format!("{dtype:?}"),
            });
        }
    })
}
