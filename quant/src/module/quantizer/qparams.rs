//! What a quantizer came to: its range, scale and zero point, checked.

use burn::tensor::Tensor;

use super::forward::in_f32;
use super::{FakeQuantize, State};
use crate::module::control::described;
use crate::range::observer::read;
use crate::{
    Granularity, QuantError, QuantParams,
    fake::{Range, qparams::is_scale},
};

impl FakeQuantize {
    /// The range that was observed.
    ///
    /// # Errors
    ///
    /// [`QuantError::NeverObserved`]; [`QuantError::NoStaticRange`] for the memoryless observer,
    /// unless it was given a range.
    pub fn range(&self) -> Result<Range, QuantError> {
        let state = self.snapshot();
        self.observed_range(&state)
            .map_err(|error| error.at(&self.path))
    }

    fn observed_range(&self, state: &State) -> Result<Range, QuantError> {
        match state.control.observed {
            true => Ok(state.observed_range(&self.config.scheme)),
            false if self.config.observer.has_memory() => Err(QuantError::NeverObserved),
            false => Err(QuantError::NoStaticRange),
        }
    }

    /// Scale and zero point as they are now: learned, or of the range that was observed.
    ///
    /// Reads from the device, to check them.
    ///
    /// # Errors
    ///
    /// [`QuantError`] if it never observed anything or keeps no range; if the range is not finite,
    /// or of one value only; if a record of another scheme was loaded.
    pub fn qparams(&self) -> Result<QuantParams, QuantError> {
        self.static_qparams().map_err(|error| error.at(&self.path))
    }

    fn static_qparams(&self) -> Result<QuantParams, QuantError> {
        let state = self.snapshot();
        self.check_record(&state)?;
        if state.control.initialized
            && let Some(scale) = &state.learned_scale
        {
            let scheme = &self.config.scheme;
            let scale = in_f32(scale.val()).without_autodiff();
            if !read(scale.clone())?.iter().all(|scale| scale.is_finite()) {
                return Err(QuantError::NonFinite { what: "scale" });
            }
            let zero_point = self.zero_point(&state).without_autodiff();
            return Ok(QuantParams { scale, zero_point }.usable(scheme));
        }
        if state.control.observed && state.control.exact {
            return self.exact_qparams(&state);
        }
        let range = self.observed_range(&state)?;
        let (min, max) = (read(range.min.clone())?, read(range.max.clone())?);
        let span = |(min, max): (&f32, &f32)| (max - min).is_finite();
        if state.control.non_finite || !min.iter().zip(&max).all(span) {
            return Err(QuantError::NonFinite { what: "range" });
        }
        // One value in each group is all there can be where a group has one element.
        if min == max && self.config.scheme.granularity == Granularity::PerTensor {
            // Not −0.
            let value = min[0] + 0.0;
            return Err(QuantError::ConstantRange { value });
        }
        Ok(QuantParams::from_range(range, &self.config.scheme))
    }

    /// Whether a calibration showed it finite values only.
    ///
    /// # Errors
    ///
    /// [`QuantError::NonFinite`] if not.
    pub(crate) fn check_finite(&self) -> Result<(), QuantError> {
        let error = QuantError::NonFinite { what: "scale" };
        match self.lock().control.non_finite {
            true => Err(error.at(&self.path)),
            false => Ok(()),
        }
    }

    fn exact_qparams(&self, state: &State) -> Result<QuantParams, QuantError> {
        let qparams = state.observed_qparams(&self.config.scheme);
        let scale = read(qparams.scale.clone())?;
        match scale.iter().all(|scale| is_scale(*scale)) {
            true => Ok(qparams),
            false => Err(QuantError::NonFinite { what: "scale" }),
        }
    }

    /// [`qparams`](Self::qparams), or for the memoryless observer without a range those of `x`: what
    /// [`forward`](Self::forward) uses for `x` once training is over.
    ///
    /// # Errors
    ///
    /// As [`qparams`](Self::qparams), and if the scheme cannot quantize the shape of `x`, or its
    /// values are not finite.
    pub fn qparams_for<const D: usize>(&self, x: &Tensor<D>) -> Result<QuantParams, QuantError> {
        if self.has_static_range() || self.is_learning() {
            return self.qparams();
        }
        let of = || {
            self.check_record(&self.lock())?;
            let qparams = QuantParams::of(&x.clone().without_autodiff(), &self.config.scheme)?;
            let scale = read(qparams.scale.clone())?;
            match scale.iter().all(|scale| scale.is_finite()) {
                true => Ok(qparams),
                false => Err(QuantError::NonFinite { what: "tensor" }),
            }
        };
        of().map_err(|error| error.at(&self.path))
    }

    /// # Errors
    ///
    /// [`QuantError::ForeignScheme`] if a record of another scheme was loaded.
    pub(crate) fn check(&self) -> Result<(), QuantError> {
        self.check_record(&self.lock())
            .map_err(|error| error.at(&self.path))
    }

    pub(super) fn check_record(&self, state: &State) -> Result<(), QuantError> {
        match state.control.foreign {
            None => Ok(()),
            Some(found) => Err(QuantError::ForeignScheme {
                expected: self.config.scheme.to_string(),
                found: described(found, &self.config.scheme),
            }),
        }
    }
}
