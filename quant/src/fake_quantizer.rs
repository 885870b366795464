//! The module that observes and fake-quantizes what passes through it.

use std::sync::{Mutex, MutexGuard, PoisonError};

use burn::config::Config;
use burn::module::{Content, Devices, Flag, Module, ModuleDisplay, ModuleDisplayDefault};
use burn::module::{ModuleMapper, ModuleVisitor, Param, ParamGroup};
use burn::tensor::{Device, Tensor};
use serde::{Deserialize, Serialize};

use crate::control::{Control, Mode};
use crate::observer::{Observer, ObserverConfig, read};
use crate::schedule::{Phase, Schedule};
use crate::{Clip, Granularity, LearnedGradient, Mapping, QuantError, QuantParams, Range, Scheme};
use crate::{fake_quantize, fake_quantize_learned, tap, to_codes, walk};

/// Whether scale and zero point are trained.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Learned {
    /// They follow from the observed range.
    #[default]
    None,
    /// The scale is a parameter:
    /// [Learned Step Size Quantization, Esser et al., 2020](https://arxiv.org/abs/1902.08153).
    Lsq,
    /// Scale and zero point are parameters:
    /// [LSQ+, Bhalgat et al., 2020](https://arxiv.org/abs/2004.09576).
    LsqPlus,
}

/// How a tensor is observed and fake-quantized.
///
/// ```
/// use burn_lean_quant::{FakeQuantizeConfig, NumberFormat, ObserverConfig, Scheme};
///
/// let config = FakeQuantizeConfig::new(Scheme::affine(NumberFormat::uint8()));
/// assert_eq!(config.observer, ObserverConfig::moving_average());
/// ```
#[derive(Config, Debug, PartialEq)]
pub struct FakeQuantizeConfig {
    /// The numbers and their mapping.
    pub scheme: Scheme,
    /// What the range is made of. Default: moving averages with the constant 0.01.
    #[config(default = "ObserverConfig::moving_average()")]
    pub observer: ObserverConfig,
    /// Whether scale and zero point are trained. Default: no.
    #[config(default = "Learned::None")]
    pub learned: Learned,
    /// When a value counts as clipped in the gradient of a learned scale. Default: PyTorch's rule.
    #[config(default = "Clip::AfterRounding")]
    pub clip: Clip,
}

impl FakeQuantizeConfig {
    /// A quantizer that can stand anywhere in a model.
    ///
    /// # Errors
    ///
    /// [`QuantError`] if choices contradict each other; in particular if ranges are to be
    /// remembered for each channel, block or token, whose number only a shape tells: see
    /// [`init_for`](Self::init_for).
    pub fn init(&self, device: &Device) -> Result<FakeQuantize, QuantError> {
        self.validate()?;
        let remembers = self.observer.has_memory() || self.learned != Learned::None;
        if remembers && self.scheme.granularity != Granularity::PerTensor {
            return Err(QuantError::UnsupportedScheme {
                scheme: self.scheme.to_string(),
                reason: "how many ranges are to be remembered only a shape tells; use `init_for`",
            });
        }
        Ok(FakeQuantize::new(self.clone(), 1, device))
    }

    /// A quantizer for tensors of one shape, or at least of one number of groups.
    ///
    /// # Errors
    ///
    /// [`QuantError`] if choices contradict each other or the scheme cannot quantize the shape.
    pub fn init_for(&self, shape: &[usize], device: &Device) -> Result<FakeQuantize, QuantError> {
        self.validate()?;
        let groups = self.scheme.group_count(shape)?;
        Ok(FakeQuantize::new(self.clone(), groups, device))
    }

    /// # Errors
    ///
    /// [`QuantError`] if choices contradict each other.
    pub fn validate(&self) -> Result<(), QuantError> {
        self.scheme.validate_choices()?;
        self.observer.validate()?;
        let unsupported = |reason| {
            Err(QuantError::UnsupportedScheme {
                scheme: self.scheme.to_string(),
                reason,
            })
        };
        let per_tensor = self.scheme.granularity == Granularity::PerTensor;
        if matches!(self.observer, ObserverConfig::Histogram { .. }) && !per_tensor {
            return unsupported("a histogram is of the whole tensor; use another observer");
        }
        let per_token = self.scheme.granularity == Granularity::PerToken;
        let remembers = self.observer.has_memory() || self.learned != Learned::None;
        if per_token && remembers {
            return unsupported("tokens have no range to remember; use the memoryless observer");
        }
        if self.learned != Learned::None && !self.scheme.format.is_int() {
            return unsupported("scales are learned for integers only");
        }
        if self.learned == Learned::LsqPlus && self.scheme.mapping != Mapping::Affine {
            return unsupported("LSQ+ learns a zero point; use the affine mapping, or LSQ");
        }
        Ok(())
    }
}

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

/// The learned scales and zero points of a model that is prepared with [`Learned`] quantizers.
///
/// They want no weight decay, and often a learning rate of their own:
///
/// ```
/// use burn::optim::{AdamWConfig, ModuleOptimizer};
/// use burn_lean_quant::learned_parameters;
///
/// let optimizer: ModuleOptimizer = AdamWConfig::new().with_weight_decay(0.01).init();
/// let scales = AdamWConfig::new().with_weight_decay(0.0).build();
/// let optimizer = optimizer.with_group(learned_parameters(), scales, None);
/// # let _ = optimizer;
/// ```
pub fn learned_parameters() -> ParamGroup {
    ParamGroup::from_any_predicates(vec!["learned_scale", "learned_zero_point"])
}

impl FakeQuantize {
    fn new(config: FakeQuantizeConfig, groups: usize, device: &Device) -> Self {
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

    /// Whether the scale has become a parameter: after the first training step that quantizes.
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

    /// With this range, as if it had been observed.
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
        self.edit(|state| {
            if state.control.mode == Mode::Scheduled {
                state.control.mode = Mode::Calibrating;
                state.control.observed = false;
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
        if phase == Phase::Off {
            return x;
        }
        let training = self.training.is_enabled() && x.is_autodiff();
        let outcome = self.observe(&mut state, &x, training);
        let quantized = outcome.and_then(|()| match phase.quantizes() {
            true => self.quantize(&mut state, x, training),
            false => Ok(x),
        });
        // The guard is released first, so that a panic does not poison the state.
        drop(state);
        quantized.unwrap_or_else(|error| panic!("{}", error.at(&self.path)))
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

    fn quantize<const D: usize>(
        &self,
        state: &mut State,
        x: Tensor<D>,
        training: bool,
    ) -> Result<Tensor<D>, QuantError> {
        let scheme = &self.config.scheme;
        if training && !state.control.initialized && self.config.learned != Learned::None {
            let first = self.first_scale(state, &x)?;
            state.learned_scale = state.learned_scale.take().map(|old| set(old, first.scale));
            let zero_point = first.zero_point;
            state.learned_zero_point = state
                .learned_zero_point
                .take()
                .map(|old| set(old, zero_point));
            state.control.initialized = true;
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
            return Ok(fake_quantize_learned(x, &qparams, scheme, gradient));
        }
        if !self.config.observer.has_memory() {
            let qparams = QuantParams::of(&x.clone().without_autodiff(), scheme)?;
            return Ok(fake_quantize(x, &qparams, scheme));
        }
        if !state.control.observed {
            return Ok(x);
        }
        let qparams = QuantParams::from_range(state.observer.range(), scheme);
        Ok(fake_quantize(x, &qparams, scheme))
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

    /// The range that was observed.
    ///
    /// # Errors
    ///
    /// [`QuantError::NeverObserved`]; [`QuantError::NoStaticRange`] for the memoryless observer.
    pub fn range(&self) -> Result<Range, QuantError> {
        let state = self.lock();
        self.observed_range(&state)
            .map_err(|error| error.at(&self.path))
    }

    fn observed_range(&self, state: &State) -> Result<Range, QuantError> {
        if !self.config.observer.has_memory() {
            return Err(QuantError::NoStaticRange);
        }
        if !state.control.observed {
            return Err(QuantError::NeverObserved);
        }
        Ok(state.observer.range())
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
        let state = self.lock();
        self.check_record(&state)?;
        if state.control.initialized
            && let Some(scale) = &state.learned_scale
        {
            let scheme = &self.config.scheme;
            let scale = scale.val().without_autodiff();
            if !read(scale.clone())?.iter().all(|scale| scale.is_finite()) {
                return Err(QuantError::NonFinite { what: "scale" });
            }
            let zero_point = self.zero_point(&state).without_autodiff().round();
            return Ok(QuantParams {
                scale: scale.clamp_min(QuantParams::EPSILON),
                zero_point: zero_point.clamp(scheme.quant_min(), scheme.quant_max()),
            });
        }
        let range = self.observed_range(&state)?;
        let (min, max) = (read(range.min.clone())?, read(range.max.clone())?);
        let span = |(min, max): (&f32, &f32)| (max - min).is_finite();
        if state.control.non_finite || !min.iter().zip(&max).all(span) {
            return Err(QuantError::NonFinite { what: "range" });
        }
        if min == max {
            return Err(QuantError::ConstantRange { value: min[0] });
        }
        Ok(QuantParams::from_range(range, &self.config.scheme))
    }

    /// [`qparams`](Self::qparams), or for the memoryless observer those of `x`: what
    /// [`forward`](Self::forward) uses for `x` once training is over.
    ///
    /// # Errors
    ///
    /// As [`qparams`](Self::qparams), and if the scheme cannot quantize the shape of `x`, or its
    /// values are not finite.
    pub fn qparams_for<const D: usize>(&self, x: &Tensor<D>) -> Result<QuantParams, QuantError> {
        if self.config.observer.has_memory() || self.is_learning() {
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

    fn check_record(&self, state: &State) -> Result<(), QuantError> {
        match state.control.foreign {
            None => Ok(()),
            Some(_) => Err(QuantError::ForeignScheme {
                expected: self.config.scheme.to_string(),
            }),
        }
    }

    fn edit(self, change: impl FnOnce(&mut State)) -> Self {
        change(&mut self.lock());
        self
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn map_state(self, map: impl FnOnce(State) -> State) -> Self {
        let state = self.state.into_inner();
        Self {
            state: Mutex::new(map(state.unwrap_or_else(PoisonError::into_inner))),
            ..self
        }
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

impl Clone for FakeQuantize {
    fn clone(&self) -> Self {
        Self {
            config: self.config.clone(),
            path: self.path.clone(),
            training: self.training.clone(),
            state: Mutex::new(self.lock().clone()),
        }
    }
}

impl std::fmt::Debug for FakeQuantize {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FakeQuantize")
            .field("path", &self.path)
            .field("scheme", &self.config.scheme)
            .field("phase", &self.phase())
            .finish_non_exhaustive()
    }
}

impl std::fmt::Display for FakeQuantize {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}, {}", self.config.scheme, self.phase())
    }
}

const CONTAINER: &str = "Struct:FakeQuantize";

impl Module for FakeQuantize {
    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        walk::visited(self);
        if walk::is_hidden() {
            return;
        }
        visitor.enter_module("training", CONTAINER);
        self.training.visit(visitor);
        visitor.exit_module("training", CONTAINER);
        // A copy: the visitor may look at this very quantizer.
        let state = self.lock().clone();
        state.visit(visitor);
    }

    fn map<M: ModuleMapper>(self, mapper: &mut M) -> Self {
        if let Some(replacement) = walk::replacement() {
            return replacement;
        }
        if walk::is_hidden() {
            return self;
        }
        mapper.enter_module("training", CONTAINER);
        let training = Module::map(self.training.clone(), mapper);
        mapper.exit_module("training", CONTAINER);
        Self {
            training,
            ..self.map_state(|state| state.map(mapper))
        }
    }

    fn to_device(self, device: &Device) -> Self {
        self.map_state(|state| state.to_device(device))
    }

    fn fork(self, device: &Device) -> Self {
        self.map_state(|state| state.fork(device))
    }

    fn collect_devices(&self, devices: Devices) -> Devices {
        self.lock().collect_devices(devices)
    }

    fn valid(&self) -> Self {
        Self {
            training: self.training.valid(),
            ..self.clone().map_state(|state| state.valid())
        }
    }

    fn train(self) -> Self {
        Self {
            training: self.training.clone().train(),
            ..self.map_state(State::train)
        }
    }

    fn materialize(self) -> Self {
        self.map_state(State::materialize)
    }
}

impl ModuleDisplayDefault for FakeQuantize {
    fn content(&self, content: Content) -> Option<Content> {
        content.add_formatted(&self.to_string()).optional()
    }
}

impl ModuleDisplay for FakeQuantize {}
