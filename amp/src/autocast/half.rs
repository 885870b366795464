//! Weights that are stored in half precision, for inference.

use std::collections::HashMap;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{DType, FloatDType, Tensor};
use burn_lean_reparam::{
    FloatVisitor, PathMapper, Rejected, Trail, map_with_path, reductions, visit_floats,
};

use crate::autocast::config::{KeepDtype, resolve};
use crate::autocast::precision::KeptParameters;
use crate::device::compute::Compute;
use crate::{AmpError, Autocast, AutocastConfig, autocast::KeptBecause};

/// From here on a number becomes infinite in F16: half a step above its largest, 65,504.
const F16_OVERFLOW: f32 = 65520.0;

/// The model with its weights stored in `dtype`, F16 or BF16, for inference: half the bytes, and no
/// cast of a weight in a call.
///
/// Casting the weights is most of the work of a forward pass over few examples. The parameters of
/// BatchNorm and of recurrent cells stay F32, as in [training](AutocastConfig::prepare); of a
/// prepared model, and of one with adapters, masks or fake quantization, what hangs on the weights is
/// folded in first, in F32, so that each number is rounded once.
///
/// It is called in the region that comes with it, [`Autocast::forward`], as a prepared model is; or
/// unedited with [`Autocast::run`], with inputs in F32 or in half. On flex, whose half numbers are a
/// form of storage, `run` widens them in each call. What the model calls in
/// [`full_precision`](crate::full_precision()) belongs into
/// [`AutocastConfig::full_precision`], so that its weights stay F32: in a region they would meet F32 in half, which
/// is a panic on a CPU, and wrong numbers without a word on GPUs. `run` needs no such choice.
///
/// `save_safetensors` of `burn-lean-quant`, or Burn's record, writes it as it is, in half the bytes.
/// To load the record, bring a new model here and load it there; `load_safetensors` takes the new
/// model as it is. [`AutocastConfig::materialize_half`] has the settings.
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::tensor::{DType, Device, FloatDType, Tensor, Tolerance};
/// use burn_lean_amp::materialize_half;
///
/// let device = Device::flex();
/// let model = LinearConfig::new(4, 2).init(&device);
/// let x = Tensor::<2>::ones([1, 4], &device);
/// let expected = model.forward(x.clone());
///
/// let (half, autocast) = materialize_half(model, FloatDType::F16)?;
/// assert_eq!(half.weight.val().dtype(), DType::F16);
/// let y = autocast.forward(x, |x| half.forward(x));
/// assert_eq!(y.dtype(), DType::F32);
/// // Four products of numbers below 1/2, and a sum, each rounded to 11 bits.
/// y.into_data().assert_approx_eq::<f32>(&expected.into_data(), Tolerance::absolute(5e-3));
/// # Ok::<(), burn_lean_amp::AmpError>(())
/// ```
///
/// # Errors
///
/// As [`AutocastConfig::materialize_half`].
pub fn materialize_half<M: Module>(
    model: M,
    dtype: FloatDType,
) -> Result<(M, Autocast), Rejected<M, AmpError>> {
    AutocastConfig::new(dtype).materialize_half(model)
}

impl AutocastConfig {
    /// [`materialize_half`](crate::materialize_half()) with these settings: parameters of
    /// [`full_precision`](Self::full_precision) stay F32, too.
    ///
    /// # Errors
    ///
    /// The model comes back in the error.
    /// - [`AmpError::NotAComputeDtype`], [`AmpError::UnsupportedDtype`], [`AmpError::SelfTest`],
    ///   [`AmpError::MissingFeature`], [`GraphError::UnsupportedBackend`](crate::GraphError::UnsupportedBackend):
    ///   the device cannot do it, or not in this build.
    /// - [`AmpError::ParameterDtype`]: a parameter is in the other half precision.
    /// - [`AmpError::InvalidConfig`]: no parameter is in [`full_precision`](Self::full_precision).
    /// - [`AmpError::HalfRange`]: a number would become infinite in F16.
    /// - [`AmpError::Device`]: reading from the device failed.
    pub fn materialize_half<M: Module>(
        &self,
        model: M,
    ) -> Result<(M, Autocast), Rejected<M, AmpError>> {
        self.try_materialize_half(&model)
            .map_err(|error| Rejected::new(model, error))
    }

    fn try_materialize_half<M: Module>(&self, model: &M) -> Result<(M, Autocast), AmpError> {
        let devices = model.devices();
        let compute = resolve(self.dtype, self.fallback, &devices)?;
        let plain = model.valid().materialize();
        let kept = KeptParameters::of(&plain, self.full_precision.clone());
        kept.refuse_unknown()?;
        kept.refuse_halves(Some(compute.dtype.into()))?;
        let mut cast = ToHalf {
            compute,
            kept: kept.kept,
            error: None,
        };
        visit_floats(&plain, &mut cast);
        if let Some(error) = cast.error {
            return Err(error);
        }
        let autocast = self.autocast(compute, devices);
        Ok((map_with_path(plain, &mut cast), autocast))
    }
}

/// Casts what is not kept.
struct ToHalf {
    compute: Compute,
    kept: HashMap<String, KeptBecause>,
    error: Option<AmpError>,
}

impl FloatVisitor for ToHalf {
    /// Looks for numbers that F16 does not have.
    fn visit<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>) {
        let casts = self.compute.dtype == FloatDType::F16 && !self.kept.contains_key(path);
        let weight = param.base().without_autodiff();
        if self.error.is_some()
            || !casts
            || weight.dtype() != DType::F32
            || weight.shape().num_elements() == 0
        {
            return;
        }
        match reductions::max(weight.abs()).try_into_scalar::<f32>() {
            Ok(largest) if largest.is_finite() && largest >= F16_OVERFLOW => {
                self.error = Some(AmpError::HalfRange {
                    path: path.to_string(),
                    largest,
                });
            }
            Ok(_) => {}
            Err(error) => {
                self.error = Some(AmpError::Device {
                    reason: error.to_string(),
                });
            }
        }
    }
}

impl PathMapper for ToHalf {
    fn float<const D: usize>(&mut self, at: &Trail, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let param = match self.kept.contains_key(&at.path()) {
            true => param,
            false => param.map(|weight| self.compute.cast(weight)),
        };
        KeepDtype.map_float(param)
    }
}
