//! A look at every operation of a forward pass, before any number is computed.
//!
//! A recorded forward pass shows in which dtype each operation would run, where dtypes mix (which
//! some devices compute wrongly without a word), what is risky in half precision, and what the
//! backward pass will keep in memory. Where dtypes mix, Burn refuses to record on; then the pass is
//! recorded in F32, with the casts of the region noted, and the dtypes follow from them: so that all
//! such places are found at once.

use burn::backend::ir::IrError;
use burn::module::Module;
use burn::tensor::{DType, FloatDType};
use burn_lean_graph::hooks::noting_casts;
use burn_lean_graph::{GraphError, Tensors, record};
use burn_lean_reparam::each_float;
use serde::{Deserialize, Serialize};

use crate::device::device_name;
use crate::{AmpError, Autocast, autocast::ParameterPrecision, parameter_precision};

mod call_site;
mod display;
mod memory;
mod operation;
mod pass;

pub use call_site::CallSite;
pub use memory::Memory;

use pass::Pass;

/// What [`audit`] found.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Audit {
    /// The device that the model is on, as Burn prints it.
    pub device: String,
    /// The compute dtype of the region.
    pub dtype: FloatDType,
    /// Every operation on float tensors that the result needs, in order.
    pub operations: Vec<AuditedOperation>,
    /// Every parameter, and whether it is cast.
    pub parameters: Vec<ParameterPrecision>,
    /// Bytes in F32 and under autocast.
    pub memory: Memory,
    /// Where dtypes mix, what Burn said of the first such operation; the dtypes of all operations
    /// are then those that the casts of the region come to.
    pub stopped: Option<String>,
}

/// One operation of the forward pass.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AuditedOperation {
    /// What it computes: `matmul`, `conv2d`, `softmax`…
    pub name: String,
    /// Path of the module to call in a region of another precision: that of its parameters, and of a
    /// recurrent cell the whole layer. Of an operation that reads none, that of the last such module
    /// before it; `None` before the first.
    pub module: Option<String>,
    /// Whether it comes after that module, instead of being a part of it.
    pub is_after: bool,
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
    /// Whether the gradients of its parameter are summed in half precision, one by one: an embedding, or
    /// another lookup by index.
    pub adds_gradients: bool,
    /// Of one that runs in F16, the magnitude of its operands from which its result or its gradient
    /// leaves the range, of a sum of powers that of what was raised; `None` where there is none, or where it
    /// is not known.
    pub overflows_from: Option<f64>,
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
    /// It runs in half precision and loses accuracy there (softmax, normalization, logarithm, scatters, which
    /// add up one by one; rounding to whole numbers of what was rounded), or its gradients do (lookups of
    /// places that come many times: embeddings, `select`, `gather`; running maxima).
    LosesPrecision,
}

impl Finding {
    /// Whether training with it is unsound.
    pub fn is_error(self) -> bool {
        matches!(self, Self::MixedDtypes | Self::UnsupportedDtype)
    }
}

/// Records `forward` in F32 and under `autocast`, and reports on every operation.
///
/// `forward` gets the model, the region and the input; write in it what the training step does, up
/// to the loss. On an autodiff device it is recorded as in training. Nothing is computed, and no
/// weight is copied; the model itself is not touched. Where half precision is emulated, the audit is
/// of a device that has it.
///
/// ```
/// use burn::nn::{LinearConfig, Relu};
/// use burn::tensor::{Device, FloatDType, Tensor};
/// use burn_lean_amp::{AutocastConfig, audit};
///
/// let device = Device::flex().autodiff();
/// let model = LinearConfig::new(16, 16).init(&device);
/// let (model, autocast) = AutocastConfig::new(FloatDType::F16).prepare(model)?;
/// let x = Tensor::<2>::ones([256, 16], &device);
/// let audit = audit(&model, &autocast, x, |model, autocast, x| {
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
/// [`AmpError::Audit`] when the forward pass cannot be recorded for a reason other than mixed
/// dtypes, which are a [finding](Audit::check), not an error of the audit; those of
/// [`parameter_precision`].
pub fn audit<M: Module, I: Tensors, O: Tensors>(
    model: &M,
    autocast: &Autocast,
    input: I,
    forward: impl Fn(&M, &Autocast, I) -> O,
) -> Result<Audit, AmpError> {
    let target = model
        .devices()
        .into_iter()
        .next()
        .ok_or(burn_lean_reparam::AttachError::NoParameters)?;
    let failed = |error: GraphError| AmpError::Audit {
        reason: error.to_string(),
    };
    let under =
        |region: &Autocast| record(model, &input, |model, input| forward(model, region, input));
    let parameters = parameter_precision(model)?;
    let full = under(&autocast.in_full_precision()).map_err(failed)?;
    let native = autocast.native();
    let (half, stopped) = match under(&native) {
        Ok(half) => (half, None),
        Err(GraphError::Forward { reason, .. }) if is_mismatch(&reason) => {
            let noted = noting_casts(|| under(&native)).map_err(failed)?;
            (noted, Some(reason))
        }
        Err(error) => return Err(failed(error)),
    };
    let half = match stopped {
        None => Pass::recorded(half.graph()),
        Some(_) => Pass::of_noted_casts(half.graph(), autocast.dtype()),
    };
    let (cast_weights, activations) = memory::saved_bytes(&half);
    let (_, activations_f32) = memory::saved_bytes(&Pass::recorded(full.graph()));
    let is_lacking = |dtype: DType| !autocast.is_emulated() && !target.supports_dtype(dtype);
    Ok(Audit {
        device: device_name(&target),
        dtype: autocast.dtype(),
        operations: half.audited(&parameters, is_lacking),
        memory: Memory {
            master_weights: float_bytes(model),
            cast_weights,
            activations,
            activations_f32,
        },
        parameters,
        stopped,
    })
}

/// Whether a panic is that of Burn's intermediate representation about dtypes that mix.
fn is_mismatch(reason: &str) -> bool {
    reason.contains(&format!("{:?}", IrError::DTypeMismatch))
}

impl Audit {
    /// Fails when operations mix dtypes or have one that the device cannot compute in.
    ///
    /// # Errors
    ///
    /// [`AmpError::UnsoundOperations`] with all places where that is so.
    pub fn check(&self) -> Result<(), AmpError> {
        let mut sites = self.call_sites();
        sites.retain(|site| site.finding.is_error());
        match sites.is_empty() {
            true => Ok(()),
            false => Err(AmpError::UnsoundOperations { sites }),
        }
    }

    /// What was found, by the places in the model, in their order.
    pub fn call_sites(&self) -> Vec<CallSite> {
        call_site::of(&self.operations)
    }
}

/// Bytes of all float tensors of a model.
fn float_bytes<M: Module>(model: &M) -> usize {
    let mut bytes = 0;
    each_float(model, |_, float| {
        bytes += float.shape().iter().product::<usize>() * float.dtype().size();
    });
    bytes
}
