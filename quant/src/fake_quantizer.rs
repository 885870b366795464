//! The module that observes and fake-quantizes what passes through it.

mod module;
mod qparams;

use std::sync::{Mutex, MutexGuard, PoisonError};

use burn::module::{Flag, Module, Param};
use burn::tensor::{Device, Tensor};

use crate::control::{Control, Mode};
use crate::observer::{Observer, ObserverConfig};
use crate::schedule::{Phase, Schedule};
use crate::{FakeQuantizeConfig, Learned, LearnedGradient, QuantError, QuantParams, Range, Scheme};
use crate::{audit, fake_quantize, fake_quantize_learned, tap, to_codes, watch};

/// Observes the values that pass through it, and fake-quantizes them.
///
/// - It observes in training: on an autodiff device, in a model that is neither
///   [`valid`](Module::valid) nor frozen. And in a [`calibrate`](crate::calibrate) on any device.
/// - What it does in which step is its [`Schedule`]'s business; see [`phase`](Self::phase).
/// - As long as it has no range it passes values through. A training step that quantizes takes
///   the first batch as the range.
/// - Statistics and scales are F32; F16 and BF16 values come back in their dtype. Training reads
///   nothing from the device.
/// - Its state is recorded, and a clone has its own.
///
/// ```
/// use burn::module::Module;
/// use burn::tensor::{Device, Tensor};
/// use burn_lean_quant::{FakeQuantizeConfig, NumberFormat, Scheme};
///
/// let device = Device::flex();
/// let config = FakeQuantizeConfig::new(Scheme::affine(NumberFormat::uint(2)));
/// let quantizer = config.init(&device)?;
///
/// // The first batch in training sets the range: 0 to 3 has the scale 1.
/// let x = Tensor::<1>::from_floats([0.0, 0.6, 3.0], &device.clone().autodiff());
/// let y = quantizer.forward(x);
/// assert_eq!(y.into_data().to_vec::<f32>().unwrap(), [0.0, 1.0, 3.0]);
/// assert_eq!(quantizer.qparams()?.scale.into_scalar::<f32>(), 1.0);
///
/// // Later the range is only used.
/// let y = quantizer.valid().forward(Tensor::<1>::from_floats([1.4, 9.0], &device));
/// assert_eq!(y.into_data().to_vec::<f32>().unwrap(), [1.0, 3.0]);
/// # Ok::<(), burn_lean_quant::QuantError>(())
/// ```
pub struct FakeQuantize {
    config: FakeQuantizeConfig,
    /// Path in the model, for messages; empty before `prepare`.
    path: String,
    training: Param<Flag>,
    state: Mutex<State>,
}

/// Everything that changes.
#[derive(Module, Debug)]
struct State {
    control: Control,
    observer: Observer,
    learned_scale: Option<Param<Tensor<1>>>,
    learned_zero_point: Option<Param<Tensor<1>>>,
}

impl State {
    /// Gives the learned scale and zero point, if there are any, their first values.
    fn start_learning(&mut self, first: QuantParams) {
        let start = |old: Option<_>, value| old.map(|old| set(old, value));
        self.learned_scale = start(self.learned_scale.take(), first.scale);
        self.learned_zero_point = start(self.learned_zero_point.take(), first.zero_point);
        self.control.initialized = self.learned_scale.is_some();
    }
}

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
    pub(crate) fn new(config: FakeQuantizeConfig, groups: usize, device: &Device) -> Self {
        let parameter = |wanted: bool, value: f32| {
            wanted.then(|| Param::from_tensor(Tensor::full([groups], value, device)))
        };
        Self {
            path: String::new(),
            training: Param::from_bool(true),
            state: Mutex::new(State {
                control: Control::new(&config.scheme, Schedule::new(), device),
                observer: Observer::new(config.observer, groups, device),
                learned_scale: parameter(config.learned != Learned::None, 1.0),
                learned_zero_point: parameter(config.learned == Learned::LsqPlus, 0.0),
            }),
            config,
        }
    }

    /// How it was configured.
    pub fn config(&self) -> &FakeQuantizeConfig {
        &self.config
    }

    /// The numbers and their mapping.
    pub fn scheme(&self) -> &Scheme {
        &self.config.scheme
    }

    /// Its path in the model, as messages name it; empty unless prepared.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// When it observes and quantizes.
    pub fn schedule(&self) -> Schedule {
        self.lock().control.schedule
    }

    /// The training step it is in, from 0.
    pub fn step(&self) -> u64 {
        self.lock().control.step
    }

    /// What it does in this step.
    pub fn phase(&self) -> Phase {
        self.lock().control.phase()
    }

    /// Whether it has a range, of observed values or because it needs none.
    pub fn is_observed(&self) -> bool {
        !self.config.observer.has_memory() || self.lock().control.observed
    }

    /// Whether its range is one that it keeps, not that of the values at hand: one that it observed
    /// or is to observe, or that the memoryless observer was given.
    pub(crate) fn has_static_range(&self) -> bool {
        self.config.observer.has_memory() || self.lock().control.observed
    }

    /// Whether the scale has become a parameter: after a calibration, or after the first training
    /// step that quantizes.
    pub fn is_learning(&self) -> bool {
        self.lock().control.initialized
    }

    /// Whether it is switched on; see [`with_enabled`](Self::with_enabled).
    pub fn is_enabled(&self) -> bool {
        self.lock().control.mode != Mode::Off
    }

    /// Switched on or off. Off, values pass through and nothing is observed. The switch is
    /// recorded.
    #[must_use]
    pub fn with_enabled(self, enabled: bool) -> Self {
        self.edit(|state| {
            state.control.mode = match enabled {
                true => Mode::Scheduled,
                false => Mode::Off,
            }
        })
    }

    /// With another schedule, in step 0. Without one it observes and quantizes from the first step
    /// on.
    #[must_use]
    pub fn with_schedule(self, schedule: Schedule) -> Self {
        self.edit(|state| {
            state.control.schedule = schedule;
            state.control.step = 0;
        })
    }

    /// With this range, as if it had been observed. The memoryless observer keeps it too, instead
    /// of taking that of the values at hand.
    #[must_use]
    pub fn with_range(self, range: Range) -> Self {
        self.edit(|state| {
            state.observer.set_range(range);
            state.control.observed = true;
            state.control.non_finite = false;
        })
    }

    pub(crate) fn with_path(mut self, path: String) -> Self {
        self.path = path;
        self
    }

    pub(crate) fn advanced(self) -> Self {
        self.edit(|state| state.control.step = state.control.step.saturating_add(1))
    }

    /// Ready for a calibration, without what was observed so far.
    pub(crate) fn calibrating(self) -> Self {
        let has_memory = self.config.observer.has_memory();
        self.edit(|state| {
            if state.control.mode == Mode::Scheduled {
                state.control.mode = Mode::Calibrating;
                // The memoryless observer was given its range, if it has one.
                state.control.observed &= !has_memory;
                state.control.non_finite = false;
                state.control.initialized = false;
            }
        })
    }

    /// Back from a calibration; chooses the range of a histogram.
    pub(crate) fn calibrated(self) -> Result<Self, QuantError> {
        let mut state = self.lock();
        if state.control.mode == Mode::Calibrating {
            state.control.mode = Mode::Scheduled;
            if state.control.observed {
                state.observer.choose_range(&self.config.scheme)?;
            }
        }
        drop(state);
        Ok(self)
    }

    /// With these as the first of what is learned.
    pub(crate) fn started(self, first: QuantParams) -> Self {
        self.edit(|state| state.start_learning(first))
    }

    /// With the ranges of replicas that saw other data; those without a range do not count.
    pub(crate) fn merged(self, replicas: &[Self]) -> Result<Self, QuantError> {
        let states: Vec<State> = replicas.iter().map(|other| other.lock().clone()).collect();
        let observed: Vec<&Observer> = states
            .iter()
            .filter(|state| state.control.observed)
            .map(|state| &state.observer)
            .collect();
        if !observed.is_empty() {
            let mut state = self.lock();
            state.observer.merge(&observed)?;
            state.control.observed = true;
            state.control.non_finite |= states.iter().any(|state| state.control.non_finite);
        }
        Ok(self)
    }

    /// Observes `x` if it is time to, and quantizes it if it is time to.
    ///
    /// # Panics
    ///
    /// If the scheme cannot quantize the shape of `x`, or its groups are not as many as the
    /// quantizer was made for.
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        if x.dims().contains(&0) {
            return x;
        }
        self.tap(&x);
        let mut state = self.lock();
        let phase = state.control.phase();
        if let Some(stand_in) = audit::stand_in(&x, &self.path, &self.config.scheme, phase) {
            return stand_in;
        }
        if phase == Phase::Off {
            return x;
        }
        let training = self.training.is_enabled() && x.is_autodiff();
        let observed = self.observe(&mut state, &x, training);
        let chosen = observed.and_then(|()| match phase.quantizes() {
            true => self.choose(&mut state, &x, training),
            false => Ok(Chosen::Nothing),
        });
        drop(state);
        let scheme = &self.config.scheme;
        match chosen.unwrap_or_else(|error| panic!("{}", error.at(&self.path))) {
            Chosen::Nothing => x,
            Chosen::Fixed(qparams) => watch::seen(&self.path, x, &qparams, scheme, |x| {
                fake_quantize(x, &qparams, scheme)
            }),
            Chosen::Learned(qparams, gradient) => {
                watch::seen(&self.path, x, &qparams, scheme, |x| {
                    fake_quantize_learned(x, &qparams, scheme, gradient)
                })
            }
        }
    }

    /// Tells the codes of `x` to whoever listens.
    fn tap<const D: usize>(&self, x: &Tensor<D>) {
        if tap::is_open()
            && self.phase().quantizes()
            && let Ok(qparams) = self.qparams_for(x)
        {
            let x = x.clone().without_autodiff();
            tap::record(&self.path, to_codes(x, &qparams, &self.config.scheme));
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
        let range = state.observer.range();
        Ok(Chosen::Fixed(QuantParams::from_range(range, scheme)))
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
            false if state.control.observed => {
                Ok(QuantParams::from_range(state.observer.range(), scheme))
            }
            false => QuantParams::of(&x, scheme),
        }
    }

    /// Of a learned scale: learned too, or that of the mapping, or of the range that was observed.
    fn zero_point(&self, state: &State) -> Tensor<1> {
        let scheme = &self.config.scheme;
        match &state.learned_zero_point {
            Some(zero_point) => zero_point.val(),
            None if scheme.mapping.is_symmetric() => {
                let like = state.observer.range().min;
                like.full_like(scheme.symmetric_zero_point())
            }
            None => QuantParams::from_range(state.observer.range(), scheme).zero_point,
        }
    }

    fn edit(self, change: impl FnOnce(&mut State)) -> Self {
        change(&mut self.lock());
        self
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The parameter with another value, and the same identity and training state.
fn set(parameter: Param<Tensor<1>>, value: Tensor<1>) -> Param<Tensor<1>> {
    parameter.map(|old| match old.is_autodiff() {
        true => {
            let requires_grad = old.is_require_grad();
            value
                .without_autodiff()
                .autodiff()
                .set_require_grad(requires_grad)
        }
        false => value.without_autodiff(),
    })
}
