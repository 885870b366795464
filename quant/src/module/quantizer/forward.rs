//! What happens to a tensor that passes through a quantizer.

use std::sync::Arc;

use burn::tensor::{DType, FloatDType, Tensor};
use burn_lean_reparam::reductions;

use super::{FakeQuantize, State};
use crate::fake::learned::fake_quantize_learned_as;
use crate::fake::op::fake_quantize_as;
use crate::fake::to_codes;
use crate::format::groups::Groups;
use crate::module::control::Mode;
use crate::module::listen::listener::Listener;
use crate::module::listen::tap;
use crate::module::listen::watch::{self, Watcher};
use crate::module::schedule::Phase;
use crate::range::observer::read;
use crate::{
    Learned, ObserverConfig, QuantError, QuantParams,
    fake::{LearnedGradient, Range},
};

/// Shares of the range that the first step of a learned affine scale may take: powers of this, down to 0.04.
const FIRST_STEP: f32 = 0.9;
const FIRST_SHARES: i32 = 30;

/// How a tensor is quantized.
enum Chosen {
    /// Not at all.
    Nothing,
    /// With these.
    Fixed(QuantParams),
    /// With these, which are learned.
    Learned(QuantParams, LearnedGradient),
}

impl FakeQuantize {
    /// Observes `x` if it is time to, and quantizes it if it is time to.
    ///
    /// # Panics
    ///
    /// If the scheme cannot quantize the shape of `x`, or its groups are not as many as the
    /// quantizer was made for.
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        if let Some(stand_in) = self.stand_in(&x) {
            return stand_in;
        }
        self.try_forward(x)
            .unwrap_or_else(|error| panic!("{error}"))
    }

    /// # Errors
    ///
    /// Where [`forward`](Self::forward) panics.
    pub(crate) fn try_forward<const D: usize>(
        &self,
        x: Tensor<D>,
    ) -> Result<Tensor<D>, QuantError> {
        if x.dims().contains(&0) {
            return Ok(x);
        }
        self.tap(&x);
        let training = self.training.is_enabled() && x.is_autodiff();
        let state = self.lock();
        self.check_record(&state)
            .map_err(|error| error.at(&self.path))?;
        let phase = state.control.phase();
        if phase == Phase::Off {
            return Ok(x);
        }
        state.control.call();
        let is_calibrating = state.control.mode == Mode::Calibrating;
        let passes = !(phase.quantizes() || is_calibrating || self.observes(&state, training));
        drop(state);
        if passes {
            return Ok(x);
        }
        // Half values are cast once, for all that looks at them. Otherwise nobody keeps `x` alive where nobody
        // watches, so that it can be quantized in place.
        let dtype = x.dtype();
        let watcher = self.watcher();
        let given = (dtype != DType::F32 || watcher.is_some()).then(|| x.clone());
        let x = x.cast(FloatDType::F32);
        let observed = self.observe(&x, training);
        let chosen = observed.and_then(|()| match phase.quantizes() {
            true => self.choose(&x, training),
            false => Ok(Chosen::Nothing),
        });
        let scheme = &self.config.scheme;
        let (y, qparams) = match chosen.map_err(|error| error.at(&self.path))? {
            Chosen::Nothing => return Ok(given.unwrap_or(x)),
            Chosen::Fixed(qparams) => (fake_quantize_as(dtype, x, &qparams, scheme), qparams),
            Chosen::Learned(qparams, gradient) => {
                let y = fake_quantize_learned_as(dtype, x, &qparams, scheme, gradient);
                let qparams = match watcher.is_some() {
                    true => qparams.usable(scheme),
                    false => qparams,
                };
                (y, qparams)
            }
        };
        if let (Some(watcher), Some(x)) = (watcher, given) {
            watch::show(watcher, (&self.path, scheme), (&x, &y), &qparams);
        }
        Ok(y)
    }

    /// Scale and zero point that `x`, which is not trained through, is rounded with now, where that is all that
    /// happens to it: nobody listens and nothing is observed. Whoever rounds so says [`called`](Self::called).
    #[cfg(feature = "kernels")]
    pub(crate) fn rounds_with<const D: usize>(&self, x: &Tensor<D>) -> Option<QuantParams> {
        let state = self.lock();
        let rounds = state.control.phase().quantizes() && !self.observes(&state, false);
        let is_all = rounds && self.listener.is_none() && self.check_record(&state).is_ok();
        drop(state);
        match is_all.then(|| self.choose(x, false))?.ok()? {
            Chosen::Nothing => None,
            Chosen::Fixed(qparams) => Some(qparams),
            // As what learned ones stand for.
            Chosen::Learned(..) => self.qparams().ok(),
        }
    }

    /// A value came by that was rounded with what [`rounds_with`](Self::rounds_with) gave.
    #[cfg(feature = "kernels")]
    pub(crate) fn called(&self) {
        self.lock().control.call();
    }

    /// Who is shown what becomes of `x`.
    fn watcher(&self) -> Option<&Watcher> {
        match &self.listener {
            Some(Listener::Watcher(watcher)) => Some(watcher.as_ref()),
            _ => None,
        }
    }

    /// Tells the codes of `x` to whoever listens.
    fn tap<const D: usize>(&self, x: &Tensor<D>) {
        if let Some(Listener::Tap(tap)) = &self.listener
            && self.phase().quantizes()
            && let Ok(qparams) = self.qparams_for(x)
        {
            let x = x.clone().without_autodiff();
            let codes = to_codes(x, &qparams, &self.config.scheme);
            tap::record(tap, &self.path, codes);
        }
    }

    /// Whether values are taken into the range, as things are.
    fn observes(&self, state: &State, training: bool) -> bool {
        let control = &state.control;
        // A weight that was given its scales has them whatever it becomes.
        let is_given = control.exact && self.is_of_weight();
        let observes = !is_given && (control.phase().observes() || !control.observed);
        // A range that a calibration chose from a histogram stays whatever comes by.
        let is_settled = control.observed && state.observer.is_settled();
        let wanted = training && !control.initialized && observes && !is_settled;
        self.config.observer.has_memory() && (control.mode == Mode::Calibrating || wanted)
    }

    /// Takes `x` into the range if it is time to.
    ///
    /// Under the lock only the bounds of the groups are computed with, element by element; see
    /// [`snapshot`](Self::snapshot).
    fn observe<const D: usize>(&self, x: &Tensor<D>, training: bool) -> Result<(), QuantError> {
        let state = self.lock();
        let calibrating = state.control.mode == Mode::Calibrating;
        let observes = self.observes(&state, training);
        drop(state);
        if calibrating && !self.config.observer.has_memory() && self.config.learned != Learned::None
        {
            let first = self.first_scale(x)?;
            let begins = is_a_beginning(&first)?;
            let mut state = self.lock();
            match begins {
                true => state.start_learning(first),
                false => state.control.non_finite = true,
            }
        }
        if !observes {
            return Ok(());
        }
        let x = x.clone().without_autodiff();
        // Minima and maxima do not tell on every backend.
        let finite = !calibrating || reductions::all(x.clone().is_finite()).into_scalar::<bool>();
        let counted =
            calibrating && matches!(self.config.observer, ObserverConfig::Histogram { .. });
        let values = counted.then(|| read(x.clone())).transpose()?;
        let range = Range::of(&x, &self.config.scheme)?;
        let mut state = self.lock();
        // Another call may have been the first meanwhile.
        if !self.observes(&state, training) {
            return Ok(());
        }
        let observed = state.control.observed;
        state.of_range = Arc::default();
        state.loosen(&self.config.scheme);
        state.control.non_finite |= !finite;
        match values {
            Some(values) => {
                state.observer.calibrate(&values, !observed)?;
                state.observer.widen(range, observed);
            }
            None => state.observe(range),
        }
        state.control.observed = true;
        Ok(())
    }

    /// Scale and zero point for `x`, and how it is quantized with them.
    fn choose<const D: usize>(&self, x: &Tensor<D>, training: bool) -> Result<Chosen, QuantError> {
        let scheme = &self.config.scheme;
        if training
            && self.config.learned != Learned::None
            && !self.is_learning()
            && !self.begin(x)?
        {
            return Ok(Chosen::Nothing);
        }
        if let Some(known) = self.known_qparams() {
            return Ok(Chosen::Fixed(known));
        }
        let state = self.snapshot();
        if state.control.initialized
            && let Some(scale) = &state.learned_scale
        {
            let qparams = QuantParams {
                scale: in_f32(scale.val()),
                zero_point: self.zero_point(&state),
            };
            let gradient = LearnedGradient::lsq(scheme, &x.dims())?;
            return Ok(Chosen::Learned(qparams, gradient));
        }
        if !state.control.observed {
            if self.config.observer.has_memory() {
                return Ok(Chosen::Nothing);
            }
            let x = x.clone().without_autodiff();
            return Ok(Chosen::Fixed(QuantParams::of(&x, scheme)?));
        }
        Ok(Chosen::Fixed(state.known_observed_qparams(scheme)))
    }

    /// Learns from the first scale for `x` on, unless it learns already. Whether it does: a step whose values are
    /// infinite or NaN is skipped, and what began with them would stay.
    pub(crate) fn begin<const D: usize>(&self, x: &Tensor<D>) -> Result<bool, QuantError> {
        let first = self.first_scale(x)?;
        let begins = is_a_beginning(&first)?;
        let mut state = self.lock();
        if begins && !state.control.initialized {
            state.start_learning(first);
        }
        Ok(begins)
    }

    /// Scale and zero point of the observed range, if they are in use and computed already.
    fn known_qparams(&self) -> Option<QuantParams> {
        let state = self.lock();
        let is_learned = state.control.initialized && state.learned_scale.is_some();
        match state.control.observed && !is_learned {
            true => state.of_range.get().cloned(),
            false => None,
        }
    }

    /// The first learned scale and zero point.
    ///
    /// Symmetric, those of LSQ for the values at hand; affine, of the range so far the share with the least
    /// squared error for them: with few levels a step of the whole range rounds most values to zero, and
    /// training gets over that slowly.
    fn first_scale<const D: usize>(&self, x: &Tensor<D>) -> Result<QuantParams, QuantError> {
        let scheme = &self.config.scheme;
        let state = self.snapshot();
        let x = x.clone().without_autodiff().cast(FloatDType::F32);
        if scheme.mapping.is_symmetric() {
            return QuantParams::lsq(&x, scheme);
        }
        let range = match state.control.observed {
            true => state.observed_range(scheme),
            false => Range::of(&x, scheme)?,
        };
        let groups = Groups::new(&scheme.granularity, &x.dims())?;
        let shares = (0..=FIRST_SHARES).map(|step| FIRST_STEP.powi(step));
        let range = range.least_squares(&x, &groups, scheme, shares);
        Ok(QuantParams::from_range(range, scheme))
    }

    /// Of a learned scale: learned too, or that of the mapping, or of the range that was observed.
    pub(super) fn zero_point(&self, state: &State) -> Tensor<1> {
        let scheme = &self.config.scheme;
        match &state.learned_zero_point {
            Some(zero_point) => in_f32(zero_point.val()),
            None if scheme.mapping.is_symmetric() => {
                let like = state.observer.range().min;
                like.full_like(scheme.symmetric_zero_point())
            }
            None => state.known_observed_qparams(scheme).zero_point,
        }
    }
}

/// A learned number of a model that was cast to half as a whole.
pub(super) fn in_f32(learned: Tensor<1>) -> Tensor<1> {
    match learned.dtype() {
        DType::F32 => learned,
        _ => learned.cast(FloatDType::F32),
    }
}

/// Whether a scale can be learned from here: not one of values of which some are infinite or NaN.
fn is_a_beginning(first: &QuantParams) -> Result<bool, QuantError> {
    let (scales, zero_points) = (read(first.scale.clone())?, read(first.zero_point.clone())?);
    // The mean of infinite ones is cut off at the largest number.
    let is_known = |scale: &f32| scale.is_finite() && *scale < f32::MAX / 2.0;
    Ok(scales.iter().all(is_known) && zero_points.iter().all(|zero| zero.is_finite()))
}

#[cfg(test)]
mod tests {
    use burn::backend::Flex;
    use burn::backend::ir::{BaseOperationIr, OperationIr};
    use burn::module::{Module, ModuleMapper};
    use burn::tensor::Device;

    use super::*;
    use crate::{
        FakeQuantizeConfig, NumberFormat, RangeMethod, Scheme, calibrate, module::Schedule,
    };

    /// An optimizer whose learning rate is 0.
    struct DoesNothing;

    impl ModuleMapper for DoesNothing {}

    /// Where the scale is that a forward pass used, in the host's memory, if it is kept.
    fn scale(quantizer: &FakeQuantize) -> Option<(Tensor<1>, *const u8)> {
        let scale = quantizer.lock().of_range.get()?.scale.clone();
        let primitive = scale.clone().try_into_primitive::<Flex>();
        let place = primitive.expect("it is on flex").bytes().as_ptr();
        // Alive, so that another tensor has another place.
        Some((scale, place))
    }

    #[test]
    fn a_symmetric_scale_that_was_given_is_one_to_observe_on_from() {
        let device = Device::flex();
        let scheme = Scheme::symmetric(NumberFormat::int(4));
        let config = FakeQuantizeConfig::new(scheme.clone());
        let config = config.with_observer(ObserverConfig::MinMax);
        let given = QuantParams::symmetric(Tensor::from_floats([0.1], &device), &scheme);
        let quantizer = config.init(&device).unwrap().with_qparams(given);
        // Within the range, which so stays.
        let x = Tensor::<1>::from_floats([-0.7, 0.7], &device.autodiff());
        quantizer.forward(x);
        let found = quantizer.qparams().unwrap().scale.into_scalar::<f32>();
        assert!((found - 0.1).abs() < 1e-7, "{found}");
    }

    #[test]
    fn two_forward_passes_in_evaluation_share_one_scale_and_training_makes_it_anew() {
        let device = Device::flex();
        let config = FakeQuantizeConfig::new(Scheme::affine(NumberFormat::uint8()));
        let quantizer = config.init(&device).unwrap();
        let x = Tensor::<1>::from_floats([0.0, 0.6, 3.0], &device);
        let training = x.clone().autodiff();
        quantizer.forward(training.clone());

        let valid = quantizer.valid();
        assert!(scale(&valid).is_none());
        valid.forward(x.clone());
        let first = scale(&valid).unwrap();
        valid.forward(x.clone() * 0.5);
        // A copy for inference, too.
        valid.clone().forward(x);
        assert_eq!(scale(&valid).unwrap().1, first.1);

        let trained = scale(&quantizer).unwrap();
        quantizer.forward(training * 2.0);
        assert_ne!(scale(&quantizer).unwrap().1, trained.1);
    }

    #[test]
    fn a_frozen_range_has_one_scale_from_step_to_step_until_a_record_is_loaded() {
        let device = Device::flex();
        let config = FakeQuantizeConfig::new(Scheme::affine(NumberFormat::uint8()));
        let frozen = Schedule::new().with_freeze_observers_at(Some(0));
        let up_to = |max: f32| {
            let range = Range {
                min: Tensor::from_floats([0.0], &device),
                max: Tensor::from_floats([max], &device),
            };
            let quantizer = config.init(&device).unwrap().with_schedule(frozen);
            quantizer.with_range(range)
        };
        let x = Tensor::<1>::from_floats([0.0, 0.6, 3.0], &device.clone().autodiff());

        let quantizer = up_to(2.55);
        quantizer.forward(x.clone());
        let first = scale(&quantizer).unwrap();
        let quantizer = quantizer.map(&mut DoesNothing).advanced();
        assert_eq!(quantizer.step(), 1);
        quantizer.forward(x.clone());
        assert_eq!(scale(&quantizer).unwrap().1, first.1);

        let quantizer = quantizer.load_record(up_to(5.1).into_record());
        assert!(scale(&quantizer).is_none());
        quantizer.forward(x);
        let loaded = scale(&quantizer).unwrap().0.into_scalar::<f32>();
        assert!((loaded - 0.02).abs() < 1e-8, "{loaded}");
    }

    #[test]
    fn the_range_of_a_calibrated_histogram_has_one_scale_from_step_to_step() {
        let device = Device::flex();
        let config = FakeQuantizeConfig::new(Scheme::affine(NumberFormat::uint8()));
        let config = config.with_observer(ObserverConfig::histogram(RangeMethod::Search));
        let x = Tensor::<1>::from_floats([0.0, 0.6, 3.0], &device);
        let calibrated = calibrate(config.init(&device).unwrap(), |quantizer| {
            quantizer.forward(x.clone());
        });
        let quantizer = calibrated.unwrap().with_schedule(Schedule::new());
        let training = x.autodiff();
        quantizer.forward(training.clone());
        let first = scale(&quantizer).unwrap();
        quantizer.forward(training.clone() * 2.0);
        assert_eq!(scale(&quantizer).unwrap().1, first.1);

        // A range that nobody looked at still gives way to that of the next batch.
        let infinite = Range {
            min: Tensor::from_floats([0.0], &device),
            max: Tensor::from_floats([f32::INFINITY], &device),
        };
        let record = config.init(&device).unwrap().with_range(infinite);
        let quantizer = quantizer.load_record(record.into_record());
        quantizer.forward(training);
        let highest = quantizer.range().unwrap().max.into_scalar::<f32>();
        assert_eq!(highest, 3.0);
    }

    #[test]
    fn half_values_are_cast_once_to_be_looked_at_and_quantized() {
        let capture = Device::capture();
        let config = FakeQuantizeConfig::new(Scheme::affine(NumberFormat::uint8()));
        let config = config.with_observer(ObserverConfig::Memoryless);
        let captured = capture.capture_scope(|scope| {
            let quantizer = config.init(&capture).unwrap();
            let x = Tensor::<1>::ones([4], &capture).cast(DType::F16);
            assert_eq!(quantizer.forward(x).dtype(), DType::F16);
            scope.complete([], [])
        });
        let operations = captured.unwrap().graph.operations;
        let casts = operations.iter().filter(|operation| match operation {
            OperationIr::BaseFloat(BaseOperationIr::Cast(cast)) => cast.input.dtype == DType::F16,
            _ => false,
        });
        assert_eq!(casts.count(), 1);
    }
}
