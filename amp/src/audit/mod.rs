//! A look at every operation of a forward pass, before any number is computed.
//!
//! Burn records operations on its capture device instead of running them. That shows in which
//! dtype each of them would run, where dtypes mix (which some devices compute wrongly without a
//! word), what is risky in half precision, and what the backward pass will keep in memory.

use std::any::Any;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;

use burn::backend::Capture;
use burn::backend::ir::{IrError, OperationIr, TensorId, TensorIr};
use burn::module::{Module, Param};
use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_lean_graph::{operation_name, scalars};
use burn_lean_reparam::{FloatVisitor, catch_quietly, visit_floats, with_capture_device};
use serde::{Deserialize, Serialize};

use crate::device::device_name;
use crate::{AmpError, Autocast, ParameterPrecision, parameter_precision};

mod operation;

use operation::{Saved, is_alias, is_cast, risks, saved};

/// What [`audit`] found.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Audit {
    /// The device that the model is on, as Burn prints it.
    pub device: String,
    /// The compute dtype of the region.
    pub dtype: FloatDType,
    /// Every operation on float tensors, in order.
    pub operations: Vec<AuditedOperation>,
    /// Every parameter, and whether it is cast.
    pub parameters: Vec<ParameterPrecision>,
    /// Bytes in F32 and under autocast.
    pub memory: Memory,
    /// The forward pass stopped here; Burn refused the next operation for this reason.
    pub stopped: Option<String>,
}

/// One operation of the forward pass.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AuditedOperation {
    /// What it computes: `matmul`, `conv2d`, `softmax`…
    pub name: String,
    /// Dtypes of its float inputs, without repetition.
    pub inputs: Vec<DType>,
    /// Dtypes of its outputs.
    pub outputs: Vec<DType>,
    /// Shape of its first output.
    pub shape: Vec<usize>,
    /// Paths of the parameters among its inputs, seen through casts and views.
    pub parameters: Vec<String>,
    /// What is wrong or risky about it.
    pub findings: Vec<Finding>,
}

/// Something to know about an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Finding {
    /// Its float inputs have different dtypes: an error. Depending on device and features Burn
    /// panics there, or computes wrong numbers without a word.
    MixedDtypes,
    /// The device cannot compute in the dtype: an error.
    UnsupportedDtype,
    /// It runs in F16 and can leave its range (sum, product, power, exponential…).
    MayOverflow,
    /// It runs in F16 with a number that F16 does not have: `mask_fill(-1e9)` fills with an
    /// infinity, `+ 1e-8` adds nothing.
    ConstantOutOfRange,
    /// It runs in half precision and loses accuracy there (softmax, normalization, logarithm…).
    LosesPrecision,
}

impl Finding {
    /// Whether training with it is unsound.
    pub fn is_error(self) -> bool {
        matches!(self, Self::MixedDtypes | Self::UnsupportedDtype)
    }
}

/// Bytes held between forward and backward pass.
///
/// Activations are counted by what Burn's autodiff keeps for each kind of operation; views share
/// their bytes. An estimate: kernels that fuse or copy differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    /// Master weights: all float parameters, F32.
    pub master_weights: usize,
    /// Half-precision copies of the weights, kept for the backward pass.
    pub cast_weights: usize,
    /// Other tensors kept for the backward pass, under autocast.
    pub activations: usize,
    /// Tensors kept for the backward pass without autocast.
    pub activations_f32: usize,
}

impl Memory {
    /// Weights and saved activations under autocast.
    pub fn total(&self) -> usize {
        self.master_weights + self.cast_weights + self.activations
    }

    /// Weights and saved activations without autocast.
    pub fn total_f32(&self) -> usize {
        self.master_weights + self.activations_f32
    }

    /// [`total`](Self::total) over [`total_f32`](Self::total_f32).
    pub fn ratio(&self) -> f64 {
        self.total() as f64 / self.total_f32().max(1) as f64
    }
}

/// Records `forward` twice, in F32 and under `autocast`, and reports on every operation.
///
/// `forward` gets the model, the region and the device to create its inputs on; write in it what
/// the training step does, up to the loss. Nothing is computed, so its tensors have no values to
/// look at. The model itself is not touched.
///
/// ```
/// use burn::nn::{LinearConfig, Relu};
/// use burn::tensor::{Device, FloatDType, Tensor};
/// use burn_lean_amp::{AutocastConfig, audit};
///
/// let device = Device::flex().autodiff();
/// let model = LinearConfig::new(16, 16).init(&device);
/// let (model, autocast) = AutocastConfig::new(FloatDType::F16).prepare(model)?;
/// let audit = audit(&model, &autocast, |model, autocast, device| {
///     let x = Tensor::<2>::ones([256, 16], device);
///     autocast.forward(x, |x| Relu::new().forward(model.forward(x))).mean()
/// })?;
/// audit.check()?;
/// // The input (256 · 16) and the output of the ReLU, which autodiff keeps, are halved.
/// assert_eq!(audit.memory.activations_f32, 2 * 256 * 16 * 4);
/// assert_eq!(audit.memory.activations, 2 * 256 * 16 * 2);
/// println!("{audit}");
/// # Ok::<(), burn_lean_amp::AmpError>(())
/// ```
///
/// # Errors
///
/// [`AmpError::Audit`] when the forward pass panics for a reason other than mixed dtypes, which
/// are a [finding](Audit::check), not an error of the audit.
pub fn audit<M: Module, O: Any>(
    model: &M,
    autocast: &Autocast,
    forward: impl Fn(&M, &Autocast, &Device) -> O,
) -> Result<Audit, AmpError> {
    let target = model
        .devices()
        .into_iter()
        .next()
        .ok_or(burn_lean_reparam::AttachError::NoParameters)?;
    let full = Trace::record(model, &autocast.in_full_precision(), &forward);
    let half = Trace::record(model, autocast, &forward);
    if let (Some(reason), false) = (&half.stopped, half.stopped_by_dtypes()) {
        return Err(AmpError::Audit {
            reason: reason.clone(),
            last_operation: half.operations.last().map_or("none", operation_name).into(),
        });
    }
    let master_weights = half
        .parameters
        .values()
        .map(|(_, bytes)| *bytes)
        .sum::<usize>();
    let (cast_weights, activations) = half.saved_bytes();
    let (_, activations_f32) = full.saved_bytes();
    Ok(Audit {
        device: device_name(&target),
        dtype: autocast.dtype(),
        operations: half.audited(&target),
        parameters: parameter_precision(model),
        memory: Memory {
            master_weights,
            cast_weights,
            activations,
            activations_f32,
        },
        stopped: half.stopped,
    })
}

impl Audit {
    /// Fails when an operation mixes dtypes or has one that the device cannot compute in.
    ///
    /// # Errors
    ///
    /// [`AmpError::UnsoundOperation`] with the first such operation.
    pub fn check(&self) -> Result<(), AmpError> {
        let unsound = self.operations.iter().enumerate().find_map(|(index, op)| {
            let finding = op.findings.iter().find(|finding| finding.is_error())?;
            Some((index, op, *finding))
        });
        match unsound {
            None => Ok(()),
            Some((index, operation, finding)) => Err(AmpError::UnsoundOperation {
                index,
                operation: operation.to_string(),
                finding,
            }),
        }
    }
}

impl fmt::Display for AuditedOperation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} of {:?} to {:?}",
            self.name, self.inputs, self.outputs
        )?;
        if !self.parameters.is_empty() {
            write!(f, " with {}", self.parameters.join(", "))?;
        }
        Ok(())
    }
}

impl fmt::Display for Audit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "Forward pass in {:?} on {}", self.dtype, self.device)?;
        writeln!(
            f,
            "{:<24} {:<14} {:>6}  findings",
            "operation", "dtype", "count"
        )?;
        let mut rows: BTreeMap<(String, String), (usize, Vec<Finding>)> = BTreeMap::new();
        for operation in &self.operations {
            let dtypes = match operation.inputs.is_empty() {
                true => &operation.outputs,
                false => &operation.inputs,
            };
            let dtypes: Vec<String> = dtypes.iter().map(|dtype| format!("{dtype:?}")).collect();
            let row = rows
                .entry((operation.name.clone(), dtypes.join("+")))
                .or_default();
            row.0 += 1;
            row.1.extend(&operation.findings);
            row.1.sort_unstable();
            row.1.dedup();
        }
        for ((name, dtype), (count, findings)) in &rows {
            let findings: Vec<String> = findings.iter().map(|found| format!("{found:?}")).collect();
            writeln!(
                f,
                "{name:<24} {dtype:<14} {count:>6}  {}",
                findings.join(", ")
            )?;
        }
        if let Some(reason) = &self.stopped {
            writeln!(f, "stopped: {reason}")?;
        }
        let kept: Vec<String> = self
            .parameters
            .iter()
            .filter_map(|parameter| {
                let kept = parameter.kept?;
                Some(format!("{} ({kept:?})", parameter.path))
            })
            .collect();
        writeln!(
            f,
            "parameters: {} cast, {} kept in F32{}{}",
            self.parameters.len() - kept.len(),
            kept.len(),
            if kept.is_empty() { "" } else { ": " },
            kept.join(", ")
        )?;
        let memory = &self.memory;
        write!(
            f,
            "bytes: {} master weights + {} cast weights + {} activations = {} ({:.2} of {} in F32)",
            memory.master_weights,
            memory.cast_weights,
            memory.activations,
            memory.total(),
            memory.ratio(),
            memory.total_f32()
        )
    }
}

/// One recorded forward pass.
struct Trace {
    operations: Vec<OperationIr>,
    /// Parameters by the tensor that holds them: path and bytes.
    parameters: HashMap<TensorId, (String, usize)>,
    stopped: Option<String>,
}

impl Trace {
    fn record<M: Module, O: Any>(
        model: &M,
        autocast: &Autocast,
        forward: &impl Fn(&M, &Autocast, &Device) -> O,
    ) -> Self {
        with_capture_device(|capture| Self::record_on(capture, model, autocast, forward))
    }

    fn record_on<M: Module, O: Any>(
        capture: &Device,
        model: &M,
        autocast: &Autocast,
        forward: &impl Fn(&M, &Autocast, &Device) -> O,
    ) -> Self {
        let mut parameters = ParameterIds::default();
        let mut stopped = None;
        let captured = capture.capture_scope(|scope| {
            // `valid` copies running statistics: `to_device` would move the original's in place.
            let model = model.valid().to_device(capture);
            visit_floats(&model, &mut parameters);
            // Caught inside of the scope, so that what was recorded until then is not lost.
            match catch_quietly(|| forward(&model, autocast, capture)) {
                Ok(output) => {
                    let completed = scope.complete([], []);
                    drop(output);
                    completed
                }
                Err(reason) => {
                    stopped = Some(reason);
                    scope.complete([], [])
                }
            }
        });
        let operations = match captured {
            Ok(captured) => captured.graph.operations,
            Err(error) => {
                stopped.get_or_insert(error.to_string());
                Vec::new()
            }
        };
        Self {
            operations,
            parameters: parameters.ids,
            stopped,
        }
    }

    fn stopped_by_dtypes(&self) -> bool {
        // The error of Burn's intermediate representation, as its panic shows it.
        let mismatch = format!("{:?}", IrError::DTypeMismatch);
        let stopped = self.stopped.as_ref();
        stopped.is_some_and(|reason| reason.contains(&mismatch))
    }

    fn audited(&self, target: &Device) -> Vec<AuditedOperation> {
        let mut origin: HashMap<TensorId, String> = self
            .parameters
            .iter()
            .map(|(id, (path, _))| (*id, path.clone()))
            .collect();
        let mut audited = Vec::new();
        for operation in &self.operations {
            let mut parameters: Vec<String> = operation
                .inputs()
                .filter_map(|input| origin.get(&input.id).cloned())
                .collect();
            parameters.sort_unstable();
            parameters.dedup();
            if let ([path], true) = (&parameters[..], is_alias(operation) || is_cast(operation)) {
                for output in operation.outputs() {
                    origin.insert(output.id, path.clone());
                }
            }
            if let Some(operation) = audited_operation(operation, parameters, target) {
                audited.push(operation);
            }
        }
        if self.stopped_by_dtypes()
            && let Some(last) = audited.last_mut()
        {
            // Burn refused the operation after this one, before recording it.
            last.findings.push(Finding::MixedDtypes);
        }
        audited
    }

    /// Bytes of tensors kept for the backward pass: copies of weights, and everything else.
    fn saved_bytes(&self) -> (usize, usize) {
        let mut root: HashMap<TensorId, TensorId> = HashMap::new();
        let mut weights: HashSet<TensorId> = self.parameters.keys().copied().collect();
        let mut kept: HashMap<TensorId, usize> = HashMap::new();
        for operation in &self.operations {
            let root_of = |root: &HashMap<_, _>, tensor: &TensorIr| {
                root.get(&tensor.id).copied().unwrap_or(tensor.id)
            };
            if let Some(first) = operation.inputs().next() {
                let first = root_of(&root, first);
                for output in operation.outputs() {
                    if is_alias(operation) {
                        root.insert(output.id, first);
                    } else if is_cast(operation) && weights.contains(&first) {
                        weights.insert(output.id);
                    }
                }
            }
            let saved: Vec<&TensorIr> = match saved(operation) {
                Saved::Nothing => Vec::new(),
                Saved::Inputs => operation.inputs().collect(),
                Saved::Outputs => operation.outputs().collect(),
            };
            for tensor in saved.into_iter().filter(|tensor| tensor.dtype.is_float()) {
                kept.insert(root_of(&root, tensor), bytes(tensor));
            }
        }
        let mut copies = 0;
        let mut activations = 0;
        for (id, bytes) in kept {
            match (self.parameters.contains_key(&id), weights.contains(&id)) {
                (true, _) => {}
                (false, true) => copies += bytes,
                (false, false) => activations += bytes,
            }
        }
        (copies, activations)
    }
}

fn audited_operation(
    operation: &OperationIr,
    parameters: Vec<String>,
    target: &Device,
) -> Option<AuditedOperation> {
    if matches!(operation, OperationIr::Drop(_) | OperationIr::Init(_)) {
        return None;
    }
    let floats = |tensors: &mut dyn Iterator<Item = &TensorIr>| {
        let mut dtypes: Vec<DType> = Vec::new();
        for tensor in tensors {
            if tensor.dtype.is_float() && !dtypes.contains(&tensor.dtype) {
                dtypes.push(tensor.dtype);
            }
        }
        dtypes
    };
    let inputs = floats(&mut operation.inputs());
    let outputs = floats(&mut operation.outputs());
    if inputs.is_empty() && outputs.is_empty() {
        return None;
    }
    let mut findings = Vec::new();
    if inputs.len() > 1 {
        findings.push(Finding::MixedDtypes);
    }
    if outputs.iter().any(|dtype| !target.supports_dtype(*dtype)) {
        findings.push(Finding::UnsupportedDtype);
    }
    let scalars = scalars(operation);
    for dtype in &inputs {
        findings.extend(risks(operation, &scalars, *dtype));
    }
    Some(AuditedOperation {
        shape: operation
            .outputs()
            .next()
            .map(|output| output.shape.to_vec())
            .unwrap_or_default(),
        name: operation_name(operation).into(),
        inputs,
        outputs,
        parameters,
        findings,
    })
}

fn bytes(tensor: &TensorIr) -> usize {
    tensor.shape.num_elements() * tensor.dtype.size()
}

#[derive(Default)]
struct ParameterIds {
    ids: HashMap<TensorId, (String, usize)>,
}

impl FloatVisitor for ParameterIds {
    fn visit<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>) {
        let base = param.base();
        let bytes = base.shape().num_elements() * base.dtype().size();
        if let Ok(primitive) = base.try_into_primitive::<Capture>() {
            self.ids.insert(primitive.id(), (path.to_string(), bytes));
        }
    }
}
