//! What happens to a tensor that passes through a quantizer.

use burn::tensor::Tensor;

use super::{FakeQuantize, State};
use crate::fake_quantize;
use crate::module::control::Mode;
use crate::module::listen::listener::{Listener, lock};
use crate::module::listen::tap;
use crate::module::listen::watch;
use crate::module::schedule::Phase;
use crate::{Learned, LearnedGradient, ObserverConfig, QuantError, QuantParams, Range};
use crate::{fake_quantize_learned, to_codes};

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
        let mut state = self.lock();
        let phase = state.control.phase();
        if phase == Phase::Off {
            return Ok(x);
        }
        state.control.call();
        let training = self.training.is_enabled() && x.is_autodiff();
        let observed = self.observe(&mut state, &x, training);
        let chosen = observed.and_then(|()| match phase.quantizes() {
            true => self.choose(&mut state, &x, training),
            false => Ok(Chosen::Nothing),
        });
        drop(state);
        let scheme = &self.config.scheme;
        Ok(match chosen.map_err(|error| error.at(&self.path))? {
            Chosen::Nothing => x,
            Chosen::Fixed(qparams) => {
                self.shown(x, &qparams, |x| fake_quantize(x, &qparams, scheme))
            }
            Chosen::Learned(qparams, gradient) => self.shown(x, &qparams, |x| {
                fake_quantize_learned(x, &qparams, scheme, gradient)
            }),
        })
    }

    /// Quantizes `x`, and shows whoever watches what came of it.
    fn shown<const D: usize>(
        &self,
        x: Tensor<D>,
        qparams: &QuantParams,
        quantize: impl FnOnce(Tensor<D>) -> Tensor<D>,
    ) -> Tensor<D> {
        // Nobody keeps `x` alive where nobody watches, so that it can be quantized in place.
        let Some(Listener::Watcher(watcher)) = &self.listener else {
            return quantize(x);
        };
        let y = quantize(x.clone());
        watch::show(
            watcher,
            (&self.path, &self.config.scheme),
            (&x, &y),
            qparams,
        );
        y
    }

    /// Tells the codes of `x` to whoever listens.
    fn tap<const D: usize>(&self, x: &Tensor<D>) {
        if let Some(Listener::Tap(tap)) = &self.listener
            && self.phase().quantizes()
            && let Ok(qparams) = self.qparams_for(x)
        {
            let x = x.clone().without_autodiff();
            let codes = to_codes(x, &qparams, &self.config.scheme);
            tap::record(&mut lock(tap), &self.path, codes);
        }
    }

    fn observe<const D: usize>(
        &self,
        state: &mut State,
        x: &Tensor<D>,
        training: bool,
    ) -> Result<(), QuantError> {
        let calibrating = state.control.mode == Mode::Calibrating;
        let observed = state.control.observed;
        if calibrating && !self.config.observer.has_memory() && self.config.learned != Learned::None
        {
            let first = self.first_scale(state, x)?;
            state.start_learning(first);
        }
        let wanted = training
            && !(state.control.initialized)
            && (state.control.phase().observes() || !observed);
        if !self.config.observer.has_memory() || !(calibrating || wanted) {
            return Ok(());
        }
        state.of_range = None;
        state.loosen(&self.config.scheme);
        let x = x.clone().without_autodiff();
        if calibrating {
            // Minima and maxima do not tell on every backend.
            let finite = x.clone().is_finite().all().into_scalar::<bool>();
            state.control.non_finite |= !finite;
            state.observer.calibrate(&x, !observed)?;
        }
        let range = Range::of(&x, &self.config.scheme)?;
        if calibrating && matches!(self.config.observer, ObserverConfig::Histogram { .. }) {
            state.observer.widen(range, observed);
        } else {
            state.observer.observe(range, observed);
        }
        state.control.observed = true;
        Ok(())
    }

    /// Scale and zero point for `x`, and how it is quantized with them.
    fn choose<const D: usize>(
        &self,
        state: &mut State,
        x: &Tensor<D>,
        training: bool,
    ) -> Result<Chosen, QuantError> {
        let scheme = &self.config.scheme;
        if training && !state.control.initialized && self.config.learned != Learned::None {
            let first = self.first_scale(state, x)?;
            state.start_learning(first);
        }
        if state.control.initialized
            && let Some(scale) = &state.learned_scale
        {
            let qparams = QuantParams {
                scale: scale.val(),
                zero_point: self.zero_point(state),
            };
            let gradient = LearnedGradient {
                clip: self.config.clip,
                ..LearnedGradient::lsq(scheme, &x.dims())?
            };
            return Ok(Chosen::Learned(qparams, gradient));
        }
        if !state.control.observed {
            if self.config.observer.has_memory() {
                return Ok(Chosen::Nothing);
            }
            let x = x.clone().without_autodiff();
            return Ok(Chosen::Fixed(QuantParams::of(&x, scheme)?));
        }
        let known = state.of_range.take();
        let qparams = known.unwrap_or_else(|| state.observed_qparams(scheme));
        state.of_range = Some(qparams.clone());
        Ok(Chosen::Fixed(qparams))
    }

    /// The first learned scale and zero point, from the values at hand or the range so far.
    fn first_scale<const D: usize>(
        &self,
        state: &State,
        x: &Tensor<D>,
    ) -> Result<QuantParams, QuantError> {
        let scheme = &self.config.scheme;
        let x = x.clone().without_autodiff();
        match scheme.mapping.is_symmetric() {
            true => QuantParams::lsq(&x, scheme),
            false if state.control.observed => Ok(state.observed_qparams(scheme)),
            false => QuantParams::of(&x, scheme),
        }
    }

    /// Of a learned scale: learned too, or that of the mapping, or of the range that was observed.
    pub(super) fn zero_point(&self, state: &State) -> Tensor<1> {
        let scheme = &self.config.scheme;
        match &state.learned_zero_point {
            Some(zero_point) => zero_point.val(),
            None if scheme.mapping.is_symmetric() => {
                let like = state.observer.range().min;
                like.full_like(scheme.symmetric_zero_point())
            }
            None => state.observed_qparams(scheme).zero_point,
        }
    }
}
