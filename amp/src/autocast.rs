//! Autocast: half-precision compute over FP32 master weights.
//!
//! PyTorch's autocast picks a dtype per operation. A Burn extension cannot see operations, but it
//! can say what a weight is worth in the forward pass: inside an autocast region each prepared
//! parameter hands out a half-precision copy of itself (a tracked cast, so that the gradient
//! arrives at the FP32 master weight in FP32), and the region casts its inputs and outputs.
//! Outside a region nothing is cast and the model is the FP32 model it was.

use std::cell::Cell;
use std::collections::HashMap;

use burn::config::Config;
use burn::module::{
    Module, ModuleVisitor, Param, ParamGroup, ParamId, Reparameterization, Reparameterizer,
};
use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_lean_reparam::{AttachError, ChainReparameterizer, Rejected, attach, attached};
use serde::{Deserialize, Serialize};

use crate::device::{Fallback, self_test_compute, unsupported};
use crate::{AmpError, FloatTensors, emulation};

/// How a model computes in half precision.
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::tensor::{DType, Device, FloatDType, Tensor};
/// use burn_lean_amp::AutocastConfig;
///
/// let device = Device::flex().autodiff();
/// let model = LinearConfig::new(4, 2).init(&device);
/// let (model, autocast) = AutocastConfig::new(FloatDType::F16).prepare(model)?;
///
/// let x = Tensor::<2>::ones([3, 4], &device);
/// let inside = autocast.forward(x.clone(), |x| {
///     assert_eq!(x.dtype(), DType::F16);
///     assert_eq!(model.weight.val().dtype(), DType::F16);
///     model.forward(x)
/// });
/// assert_eq!(inside.dtype(), DType::F32);
/// // The master weights are F32, and so are their gradients.
/// let grads = inside.mean().backward();
/// assert_eq!(model.weight.base().grad(&grads).unwrap().dtype(), DType::F32);
/// // Outside of a region nothing is cast.
/// assert_eq!(model.weight.val().dtype(), DType::F32);
/// # Ok::<(), burn_lean_amp::AmpError>(())
/// ```
#[derive(Config, Debug)]
pub struct AutocastConfig {
    /// The compute dtype: F16, BF16, or F32 for no cast at all.
    pub dtype: FloatDType,
    /// Parameters that stay in F32 although Burn could run them in half. The modules they belong
    /// to must be called in a [`full_precision`] region.
    #[config(default = "None")]
    pub full_precision: Option<ParamGroup>,
    /// Dtype of what [`Autocast::forward`] returns. Default F32, which the loss needs.
    #[config(default = "FloatDType::F32")]
    pub output_dtype: FloatDType,
    /// What to do where the device cannot compute in `dtype`. Default: an error.
    #[config(default = "Fallback::Error")]
    pub fallback: Fallback,
}

impl AutocastConfig {
    /// Attaches the casts to the parameters of `model` and returns the region that switches them
    /// on.
    ///
    /// Every floating-point parameter becomes a [`MasterWeight`], except those in
    /// [`full_precision`](Self::full_precision) and those that Burn cannot run in half: the
    /// parameters of BatchNorm and of recurrent cells. The stored parameters, their identities
    /// and the record layout stay as they are: plain checkpoints load into the prepared model and
    /// back.
    ///
    /// # Errors
    ///
    /// The model comes back in the error.
    /// - [`AmpError::NotAComputeDtype`], [`AmpError::UnsupportedDtype`], [`AmpError::SelfTest`]:
    ///   the device cannot do it; checked before anything is attached.
    /// - [`AmpError::Attach`]: a parameter already carries a reparameterization, or there is none.
    /// - [`AmpError::ParameterDtype`]: a parameter is not F32.
    pub fn prepare<M: Module>(&self, model: M) -> Result<(M, Autocast), Rejected<M, AmpError>> {
        self.prepare_impl(model, |model, master| attach(model, master))
    }

    /// Like [`prepare`](Self::prepare), with another reparameterization on the same weights.
    ///
    /// `first` acts on the master weight in F32, the cast comes last: LoRA adapters, pruning
    /// masks and fake quantization all compute in F32. The two are a
    /// [`Chain`](burn_lean_reparam::Chain).
    ///
    /// ```
    /// use burn::module::{Lora, LoraAdapter, Module};
    /// use burn::nn::LinearConfig;
    /// use burn::tensor::{Device, FloatDType, Tensor};
    /// use burn_lean_amp::{AutocastConfig, MasterWeight};
    /// use burn_lean_reparam::Chain;
    ///
    /// let device = Device::flex().autodiff();
    /// let model = LinearConfig::new(4, 2).init(&device);
    /// let (model, autocast) =
    ///     AutocastConfig::new(FloatDType::BF16).prepare_with(model, Lora::new(2, 2.0))?;
    /// let adapter = &model.weight.reparameterization::<Chain<LoraAdapter, MasterWeight>>();
    /// let adapter = adapter.unwrap().first.as_ref().unwrap();
    ///
    /// let y = autocast.forward(Tensor::<2>::ones([1, 4], &device), |x| model.forward(x));
    /// let grads = y.sum().backward();
    /// assert!(adapter.a.val().grad(&grads).is_some());
    /// # Ok::<(), burn_lean_amp::AmpError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`prepare`](Self::prepare).
    pub fn prepare_with<M: Module, R>(
        &self,
        model: M,
        first: R,
    ) -> Result<(M, Autocast), Rejected<M, AmpError>>
    where
        R: Reparameterizer,
        R::Reparam: burn::module::ModuleDisplay,
    {
        self.prepare_impl(model, |model, master| {
            attach(model, ChainReparameterizer::new(first, master))
        })
    }

    /// Says whether [`prepare`](Self::prepare) would find the device able, without a model.
    ///
    /// For programs that want to end before they load data and build a model.
    ///
    /// # Errors
    ///
    /// [`AmpError::NotAComputeDtype`], [`AmpError::UnsupportedDtype`] or [`AmpError::SelfTest`].
    pub fn check(&self, device: &Device) -> Result<(), AmpError> {
        self.resolve(std::slice::from_ref(device)).map(|_| ())
    }

    fn prepare_impl<M: Module>(
        &self,
        model: M,
        attach: impl FnOnce(M, AttachMasterWeight) -> Result<M, Rejected<M, AttachError>>,
    ) -> Result<(M, Autocast), Rejected<M, AmpError>> {
        let compute = match self.resolve(&model.devices()) {
            Ok(compute) => compute,
            Err(error) => return Err(Rejected::new(model, error)),
        };
        let mut kept = KeptParameters::new(self.full_precision.clone());
        model.visit(&mut kept);
        if let Some(error) = kept.error {
            return Err(Rejected::new(model, error));
        }
        let autocast = Autocast {
            compute,
            output_dtype: self.output_dtype,
        };
        let master = AttachMasterWeight { kept: kept.kept };
        match attach(model, master) {
            Ok(model) => Ok((model, autocast)),
            Err(rejected) => {
                let (model, error) = rejected.into_parts();
                Err(Rejected::new(model, error.into()))
            }
        }
    }

    /// What `dtype` comes to on these devices.
    fn resolve(&self, devices: &[Device]) -> Result<Compute, AmpError> {
        if !matches!(
            self.dtype,
            FloatDType::F16 | FloatDType::BF16 | FloatDType::F32
        ) {
            return Err(AmpError::NotAComputeDtype { dtype: self.dtype });
        }
        let Some(lacking) = devices
            .iter()
            .find(|device| !device.supports_dtype(self.dtype))
        else {
            return checked(Compute::native(self.dtype), devices);
        };
        match self.fallback {
            Fallback::Emulate if devices.iter().all(emulation::is_available) => {
                tracing::warn!(
                    dtype = ?self.dtype,
                    device = ?lacking,
                    "the device lacks the dtype: emulating it with rounded F32"
                );
                checked(Compute::emulated(self.dtype), devices)
            }
            Fallback::F32 => {
                tracing::warn!(
                    dtype = ?self.dtype,
                    device = ?lacking,
                    "the device lacks the dtype: computing in F32"
                );
                Ok(Compute::native(FloatDType::F32))
            }
            Fallback::Error | Fallback::Emulate => Err(unsupported(lacking, self.dtype)),
        }
    }
}

fn checked(compute: Compute, devices: &[Device]) -> Result<Compute, AmpError> {
    if compute.is_half() {
        for device in devices {
            if let Some(failure) = self_test_compute(device, compute)?.failure() {
                return Err(failure);
            }
        }
    }
    Ok(compute)
}

/// The dtype of an autocast region, and how it is reached on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Compute {
    pub(crate) dtype: FloatDType,
    /// F32 tensors holding half values, for devices without the dtype.
    pub(crate) emulated: bool,
}

impl Compute {
    pub(crate) fn native(dtype: FloatDType) -> Self {
        Self {
            dtype,
            emulated: false,
        }
    }

    pub(crate) fn emulated(dtype: FloatDType) -> Self {
        Self {
            dtype,
            emulated: true,
        }
    }

    pub(crate) fn is_half(self) -> bool {
        matches!(self.dtype, FloatDType::F16 | FloatDType::BF16)
    }

    /// Casts F32 and half tensors; F64 and quantized tensors are left alone.
    pub(crate) fn cast<const D: usize>(self, x: Tensor<D>) -> Tensor<D> {
        if !is_castable(x.dtype()) {
            return x;
        }
        if self.emulated {
            return emulation::round(cast_to(x, FloatDType::F32), self.dtype);
        }
        cast_to(x, self.dtype)
    }
}

fn is_castable(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::Flex32 | DType::F16 | DType::BF16)
}

/// A cast that is recorded only where it changes something.
pub(crate) fn cast_to<const D: usize>(x: Tensor<D>, dtype: FloatDType) -> Tensor<D> {
    match !is_castable(x.dtype()) || x.dtype() == dtype.into() {
        true => x,
        false => x.cast(dtype),
    }
}

thread_local! {
    /// The region this thread is in. A spawned thread starts outside, as with PyTorch.
    static REGION: Cell<Option<Compute>> = const { Cell::new(None) };
}

/// Restores the surrounding region, also when the forward pass panics.
struct Entered {
    previous: Option<Compute>,
}

impl Entered {
    fn enter(compute: Option<Compute>) -> Self {
        Self {
            previous: REGION.replace(compute),
        }
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        REGION.set(self.previous);
    }
}

/// An autocast region for a [prepared](AutocastConfig::prepare) model: a small copyable value.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Autocast {
    compute: Compute,
    output_dtype: FloatDType,
}

impl Autocast {
    /// Runs `forward` in half precision: casts the input, switches the casts of the weights on,
    /// and casts the output.
    ///
    /// `input` and the result are tensors, or anything made of them ([`FloatTensors`]); integer
    /// and boolean tensors pass unchanged, as do F64 tensors. Compute the loss outside, in F32.
    /// The region is of this thread only: a thread that `forward` spawns is outside of it.
    pub fn forward<I: FloatTensors, O: FloatTensors>(
        &self,
        input: I,
        forward: impl FnOnce(I) -> O,
    ) -> O {
        let input = input.map_floats(&Caster(Edge::In(self.compute)));
        let output = {
            let _region = Entered::enter(Some(self.compute));
            forward(input)
        };
        output.map_floats(&Caster(Edge::Out(self.compute, self.output_dtype)))
    }

    /// The same region without any cast.
    pub(crate) fn in_full_precision(&self) -> Self {
        Self {
            compute: Compute::native(FloatDType::F32),
            output_dtype: FloatDType::F32,
        }
    }

    /// The dtype that the forward pass computes in (or emulates).
    pub fn dtype(&self) -> FloatDType {
        self.compute.dtype
    }

    /// Whether the dtype is emulated with rounded F32 tensors.
    pub fn is_emulated(&self) -> bool {
        self.compute.emulated
    }
}

/// Runs `body` in F32 inside an autocast region, and casts its result back.
///
/// For what must not run in half: modules that Burn cannot run in it (BatchNorm, recurrent cells,
/// positional encodings), or a sum that would overflow. `input` arrives in F32, weights are the
/// FP32 master weights, the result is cast to the dtype of the region. Outside of a region `body`
/// just runs, so a model that contains this call is unchanged without autocast.
///
/// ```
/// use burn::nn::{BatchNormConfig, LinearConfig};
/// use burn::tensor::{DType, Device, FloatDType, Tensor};
/// use burn_lean_amp::{AutocastConfig, full_precision};
///
/// let device = Device::flex();
/// let linear = LinearConfig::new(4, 2).init(&device);
/// let norm = BatchNormConfig::new(2).init(&device);
/// let (model, autocast) = AutocastConfig::new(FloatDType::BF16).prepare((linear, norm))?;
///
/// let y = autocast.forward(Tensor::<2>::ones([3, 4], &device), |x| {
///     let h = model.0.forward(x);
///     let h = full_precision(h.unsqueeze_dim::<3>(2), |h| {
///         assert_eq!(h.dtype(), DType::F32);
///         model.1.forward(h)
///     });
///     assert_eq!(h.dtype(), DType::BF16);
///     h
/// });
/// assert_eq!(y.dims(), [3, 2, 1]);
/// # Ok::<(), burn_lean_amp::AmpError>(())
/// ```
pub fn full_precision<I: FloatTensors, O: FloatTensors>(input: I, body: impl FnOnce(I) -> O) -> O {
    let Some(compute) = REGION.get() else {
        return body(input);
    };
    let input = input.map_floats(&Caster(Edge::Out(compute, FloatDType::F32)));
    let output = {
        let _region = Entered::enter(None);
        body(input)
    };
    output.map_floats(&Caster(Edge::In(compute)))
}

/// The cast at the edge of a region, handed to [`FloatTensors::map_floats`].
#[derive(Debug, Clone, Copy)]
pub struct Caster(Edge);

#[derive(Debug, Clone, Copy)]
enum Edge {
    /// Into a region.
    In(Compute),
    /// Out of a region, to this dtype.
    Out(Compute, FloatDType),
}

impl Caster {
    /// Casts one tensor of any rank; the cast is tracked by autodiff.
    pub fn cast<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        match self.0 {
            Edge::In(compute) => compute.cast(x),
            Edge::Out(compute, dtype) if compute.emulated => {
                // What leaves a half region is half, and so is the gradient that enters it.
                cast_to(compute.cast(x), dtype)
            }
            Edge::Out(_, dtype) => cast_to(x, dtype),
        }
    }
}

/// A parameter whose base is the FP32 master weight and whose effective value is half precision
/// inside an autocast region.
///
/// It has no state: which dtype, and whether at all, is the region's business. So it changes
/// neither the record nor [`Module::materialize`], which keeps the master weights in F32.
#[derive(Module, Debug)]
pub struct MasterWeight {}

impl Reparameterization for MasterWeight {
    const NAME: &'static str = "master_weight";

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        match REGION.get() {
            Some(compute) => compute.cast(base),
            None => base,
        }
    }
}

/// Why a parameter of a prepared model stays in F32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum KeptBecause {
    /// It belongs to a BatchNorm, whose running statistics are F32 and do not mix with half.
    BatchNorm,
    /// It belongs to a recurrent cell, whose initial state is F32 and does not mix with half.
    Recurrent,
    /// [`AutocastConfig::full_precision`] names it.
    Requested,
    /// It was not prepared, or is neither F32 nor half.
    NotPrepared,
}

/// How one parameter takes part in autocast.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ParameterPrecision {
    /// Path of the parameter.
    pub path: String,
    /// Elements.
    pub elements: usize,
    /// `None` if the parameter is cast in a region; otherwise why it stays in F32.
    pub kept: Option<KeptBecause>,
}

/// Says for every floating-point parameter of a prepared model whether it is cast.
///
/// Parameters inside another reparameterization (LoRA factors) are listed as not prepared: they
/// compute in F32.
pub fn parameter_precision<M: Module>(model: &M) -> Vec<ParameterPrecision> {
    let prepared: Vec<ParamId> = attached(model)
        .into_iter()
        .map(|attached| attached.id)
        .collect();
    let mut kept = KeptParameters::new(None);
    model.visit(&mut kept);
    kept.all
        .into_iter()
        .map(|(id, mut parameter)| {
            if prepared.contains(&id) {
                parameter.kept = None;
            } else if parameter.kept.is_none() {
                parameter.kept = Some(KeptBecause::NotPrepared);
            }
            parameter
        })
        .collect()
}

struct AttachMasterWeight {
    kept: HashMap<ParamId, KeptBecause>,
}

impl Reparameterizer for AttachMasterWeight {
    type Reparam = MasterWeight;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<MasterWeight>) {
        if let Some(reason) = self.kept.get(&param.id) {
            tracing::debug!(parameter = path, ?reason, "kept in full precision");
            return (param, None);
        }
        (param, Some(MasterWeight {}))
    }
}

/// Finds what stays in F32 by the modules that surround a parameter.
struct KeptParameters {
    requested: Option<ParamGroup>,
    path: Vec<String>,
    containers: Vec<String>,
    kept: HashMap<ParamId, KeptBecause>,
    all: Vec<(ParamId, ParameterPrecision)>,
    error: Option<AmpError>,
}

impl KeptParameters {
    fn new(requested: Option<ParamGroup>) -> Self {
        Self {
            requested,
            path: Vec::new(),
            containers: Vec::new(),
            kept: HashMap::new(),
            all: Vec::new(),
            error: None,
        }
    }

    fn reason(&self, id: &ParamId, path: &str) -> Option<KeptBecause> {
        let inside = |name: &str| self.containers.iter().any(|container| container == name);
        // All of Burn's recurrent cells keep their weights in gate controllers, so a model's own
        // struct that happens to be called `Lstm` is not mistaken for one.
        if inside("Struct:GateController") {
            Some(KeptBecause::Recurrent)
        } else if inside("Struct:BatchNorm") {
            Some(KeptBecause::BatchNorm)
        } else if self
            .requested
            .as_ref()
            .is_some_and(|group| group.matches(id, Some(path)))
        {
            Some(KeptBecause::Requested)
        } else {
            None
        }
    }
}

impl ModuleVisitor for KeptParameters {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.path.push(name.to_string());
        self.containers.push(container_type.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
        self.containers.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let path = self.path.join(".");
        let dtype = param.base().dtype();
        let mut reason = self.reason(&param.id, &path);
        match dtype {
            DType::F32 => {}
            DType::F16 | DType::BF16 | DType::Flex32 if self.error.is_none() => {
                self.error = Some(AmpError::ParameterDtype {
                    path: path.clone(),
                    dtype,
                });
            }
            _ => reason = reason.or(Some(KeptBecause::NotPrepared)),
        }
        if let Some(reason) = reason {
            self.kept.insert(param.id, reason);
        }
        self.all.push((
            param.id,
            ParameterPrecision {
                path,
                elements: param.lazy_shape().num_elements(),
                kept: reason,
            },
        ));
    }
}
