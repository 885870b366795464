//! Autocast: half-precision compute over FP32 master weights.
//!
//! PyTorch's autocast picks a dtype per operation. A Burn extension cannot see operations, but it
//! can say what a weight is worth in the forward pass: inside an autocast region each prepared
//! parameter hands out a half-precision copy of itself (a tracked cast, so that the gradient
//! arrives at the FP32 master weight in FP32), and the region casts its inputs and outputs.
//! Outside a region nothing is cast and the model is the FP32 model it was.

use std::collections::HashMap;
use std::sync::Arc;

use burn::config::Config;
use burn::module::{Module, ModuleMapper, Param, ParamGroup, Reparameterization, Reparameterizer};
use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_lean_graph::{BackendKind, GraphError};
use burn_lean_reparam::column_layout::loadable;
use burn_lean_reparam::{
    AttachError, ChainReparameterizer, PathMapper, Rejected, Trail, attach_if_any, each_float,
    map_with_path,
};

use crate::autocast::precision::KeptParameters;
use crate::autocast::run::Resolved;
use crate::autocast::{region, weight_cast};
use crate::device::compute::Compute;
use crate::device::emulation;
use crate::device::{Fallback, unsupported};
use crate::self_test::{SelfTest, self_test_compute};
use crate::{AmpError, Autocast, Precision, autocast::KeptBecause};

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
    /// Parameters that stay in F32 although Burn could run them in half. In a region the modules they
    /// belong to must be called in [`full_precision`](crate::full_precision()); [`Autocast::run`] runs
    /// the operations that read them in F32. One config per model: [`prepare`](Self::prepare) refuses a
    /// group that no parameter is in. Default: none.
    #[config(default = "None")]
    pub full_precision: Option<ParamGroup>,
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
    /// parameters of BatchNorm and of recurrent cells. F64 parameters stay F64. The stored parameters, their identities
    /// and the record layout stay as they are: plain checkpoints load into the prepared model and
    /// back. Records in half precision and in F64 load as F32 master weights; F64 parameters take the dtype of a
    /// record, as in Burn.
    ///
    /// # Errors
    ///
    /// The model comes back in the error.
    /// - [`AmpError::NotAComputeDtype`], [`AmpError::UnsupportedDtype`], [`AmpError::SelfTest`],
    ///   [`AmpError::MissingFeature`], [`GraphError::UnsupportedBackend`]: the device cannot do it, or
    ///   not in this build; checked before anything is attached.
    /// - [`AmpError::Device`]: reading from the device failed.
    /// - [`AmpError::Attach`]: a parameter already carries a reparameterization, or there is none.
    /// - [`AmpError::ParameterDtype`]: a parameter is in half precision.
    /// - [`AmpError::InvalidConfig`]: no parameter is in [`full_precision`](Self::full_precision).
    pub fn prepare<M: Module>(&self, model: M) -> Result<(M, Autocast), Rejected<M, AmpError>> {
        // All may stay in full precision: the region casts what goes in alone.
        self.prepare_impl(model, |model, master| attach_if_any(model, master))
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
    /// use burn_lean_amp::{AutocastConfig, autocast::MasterWeight};
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
            attach_if_any(model, ChainReparameterizer::new(first, master))
        })
    }

    /// Mixed precision for [`Autocast::run`] on `device`: no model is prepared.
    ///
    /// Operations that read a parameter of [`full_precision`](Self::full_precision) run in F32.
    ///
    /// # Errors
    ///
    /// As [`check`](Self::check).
    pub fn init(&self, device: &Device) -> Result<Autocast, AmpError> {
        let devices = vec![device.clone()];
        let compute = resolve(self.dtype, self.fallback, &devices)?;
        Ok(self.autocast(compute, devices))
    }

    /// Mixed precision on devices where the dtype came to `compute`: what
    /// [`full_precision`](Self::full_precision) names is an exception of [`Autocast::run`].
    pub(crate) fn autocast(&self, compute: Compute, devices: Vec<Device>) -> Autocast {
        let autocast = Autocast {
            compute,
            fallback: self.fallback,
            devices: Arc::new(Resolved::known(self.fallback, devices, compute)),
            ..Autocast::new(self.dtype)
        };
        match &self.full_precision {
            Some(group) => autocast.with_module(group.clone(), Precision::Full),
            None => autocast,
        }
    }

    /// Says whether [`prepare`](Self::prepare) would find the device able, without a model.
    ///
    /// For programs that want to end before they load data and build a model.
    ///
    /// # Errors
    ///
    /// [`AmpError::NotAComputeDtype`], [`AmpError::UnsupportedDtype`], [`AmpError::SelfTest`],
    /// [`AmpError::MissingFeature`], [`GraphError::UnsupportedBackend`], or [`AmpError::Device`] where reading from
    /// the device failed.
    pub fn check(&self, device: &Device) -> Result<(), AmpError> {
        resolve(self.dtype, self.fallback, std::slice::from_ref(device)).map(|_| ())
    }

    fn prepare_impl<M: Module>(
        &self,
        model: M,
        attach: impl FnOnce(M, AttachMasterWeight) -> Result<M, Rejected<M, AttachError>>,
    ) -> Result<(M, Autocast), Rejected<M, AmpError>> {
        let devices = model.devices();
        let compute = match resolve(self.dtype, self.fallback, &devices) {
            Ok(compute) => compute,
            Err(error) => return Err(Rejected::new(model, error)),
        };
        let kept = KeptParameters::of(&model, self.full_precision.clone());
        let refused = kept
            .refuse_unknown()
            .and_then(|()| kept.refuse_halves(None));
        if let Err(error) = refused {
            return Err(Rejected::new(model, error));
        }
        warn_of_convolutions(&model, &devices, compute);
        let autocast = self.autocast(compute, devices);
        let master = AttachMasterWeight { kept: kept.kept };
        match attach(model, master) {
            Ok(model) => Ok((map_with_path(model, &mut KeepParts), autocast)),
            Err(rejected) => Err(rejected.map_error(AmpError::from)),
        }
    }
}

/// A region cannot see a convolution: where those lose terms, who has some is told.
fn warn_of_convolutions<M: Module>(model: &M, devices: &[Device], compute: Compute) {
    let tested = |device| self_test_compute(device, compute).ok();
    let losing = || {
        devices
            .iter()
            .filter_map(tested)
            .find(SelfTest::loses_terms)
    };
    let mut kernel = None;
    each_float(model, |at, float| {
        if float.shape().len() > 2 {
            kernel.get_or_insert_with(|| at.path());
        }
    });
    if let (Some(path), true) = (kernel, compute.is_half())
        && let Some(test) = losing()
    {
        tracing::warn!(
            device = %test.device,
            dtype = ?test.dtype,
            parameter = path,
            convolution_of_4096_ones = test.convolution_of_4096_ones,
            "the device adds up convolutions in half precision: in a region they lose terms, the gradients of \
             weights above all. `Autocast::run` adds up in F32"
        );
    }
}

/// What `dtype` comes to on these devices.
pub(crate) fn resolve(
    dtype: FloatDType,
    fallback: Fallback,
    devices: &[Device],
) -> Result<Compute, AmpError> {
    if !matches!(dtype, FloatDType::F16 | FloatDType::BF16 | FloatDType::F32) {
        return Err(AmpError::NotAComputeDtype { dtype });
    }
    let is_half = dtype != FloatDType::F32;
    let is_unknown = |device: &&Device| BackendKind::of(device) == BackendKind::Other;
    if let Some(device) = devices.iter().find(is_unknown)
        && is_half
    {
        return Err(GraphError::UnsupportedBackend {
            backend: format!("{device:?}"),
        }
        .into());
    }
    let not_compiled = |device: &&Device| is_half && !emulation::is_available(device);
    if let Some(device) = devices.iter().find(not_compiled)
        && device.supports_dtype(dtype)
    {
        return Err(AmpError::MissingFeature {
            device: format!("{device:?}"),
        });
    }
    let Some(lacking) = devices.iter().find(|device| !device.supports_dtype(dtype)) else {
        return checked(Compute::native(dtype), devices);
    };
    match fallback {
        Fallback::Emulate if devices.iter().all(emulation::is_available) => {
            tracing::warn!(
                ?dtype,
                device = ?lacking,
                "the device lacks the dtype: emulating it with rounded F32"
            );
            checked(Compute::emulated(dtype), devices)
        }
        Fallback::F32 => {
            tracing::warn!(
                ?dtype,
                device = ?lacking,
                "the device lacks the dtype: computing in F32"
            );
            Ok(Compute::native(FloatDType::F32))
        }
        Fallback::Error | Fallback::Emulate => Err(unsupported(lacking, dtype)),
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
        match region::current() {
            Some(compute) => weight_cast::cast(base, compute),
            None => base,
        }
    }
}

struct AttachMasterWeight {
    kept: HashMap<String, KeptBecause>,
}

impl Reparameterizer for AttachMasterWeight {
    type Reparam = MasterWeight;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<MasterWeight>) {
        if let Some(reason) = self.kept.get(path) {
            tracing::debug!(parameter = path, ?reason, "kept in full precision");
            return (KeepDtype.map_float(param), None);
        }
        (KeepDtype.map_float(param), Some(MasterWeight {}))
    }
}

/// The same of what a reparameterization holds: the factors of an adapter, say.
struct KeepParts;

impl PathMapper for KeepParts {
    fn float<const D: usize>(&mut self, at: &Trail, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match at.is_attached() {
            true => KeepDtype.map_float(param),
            false => param,
        }
    }
}

/// Keeps F32 and half parameters in the dtype that they have when a record of another is loaded into them: Burn
/// takes the dtype of the record over. One that records hold transposed still loads.
///
/// Others follow the record: where the state of an optimizer was saved with F32 parameters, Burn loads it in F32, and F64
/// parameters could not take a step with it.
pub(crate) struct KeepDtype;

impl ModuleMapper for KeepDtype {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let dtype = param.base().dtype();
        if !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
            return param;
        }
        let (id, value, mapper) = param.consume();
        let loading = mapper.clone();
        let load = move |value| {
            let value: Tensor<D> = loading.on_load(value);
            match value.dtype() {
                recorded if recorded.is_float() && recorded != dtype => value.cast(dtype),
                _ => value,
            }
        };
        loadable(Param::from_mapped_value(id, value, mapper).load_mapper(load))
    }
}
