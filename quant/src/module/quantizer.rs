//! The module that observes and fake-quantizes what passes through it.

mod converted;
mod forward;
mod module;
mod qparams;
mod step;

use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use burn::module::{Flag, Module, Param};
use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_lean_graph::{Role, hooks::ForwardPass};
use burn_lean_reparam::map_leaf;

use crate::module::control::{Control, Mode};
use crate::module::listen::listener::{Listener, lock};
use crate::module::resident::Resident;
use crate::module::schedule::{Phase, Schedule};
use crate::range::observer::Observer;
use crate::{FakeQuantizeConfig, Learned, Mapping, QuantError, QuantParams, Scheme, fake::Range};

/// Observes the values that pass through it, and fake-quantizes them.
///
/// - It observes in training: on an autodiff device (that of the values, or of the layer whose input
///   they are), in a model that is neither [`valid`](Module::valid) nor frozen. And in a
///   [`calibrate`](crate::calibrate) on any device.
/// - What it does in which step is its [`Schedule`]'s business; see [`phase`](Self::phase).
/// - As long as it has no range it passes values through. A training step that quantizes takes
///   the first batch as the range.
/// - Statistics and scales are F32; F16 and BF16 values come back in their dtype. Training reads
///   nothing from the device.
/// - Its state is recorded, and a clone has its own; during a [`calibrate`](crate::calibrate) clones
///   share theirs.
/// - No mapper of the user's that changes floats (a clip of weights, for example) reaches the
///   observed range. Learned scales are parameters, and are reached: leave
///   [`learned_parameters`](crate::module::learned_parameters) out.
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
    /// Its own, except in a calibration.
    state: Arc<Mutex<State>>,
    /// The values of the converted weight that carries it.
    resident: Resident,
    listener: Option<Listener>,
    /// What it quantizes, at the weight that carries it, and which of several.
    role: Option<(Role, usize)>,
}

/// Everything that changes.
#[derive(Module, Debug)]
struct State {
    control: Control,
    observer: Observer,
    learned_scale: Option<Param<Tensor<1>>>,
    learned_zero_point: Option<Param<Tensor<1>>>,
    /// Scale and zero point of the range, once they are computed; another cell when the range, or where it
    /// is, changes.
    #[module(skip)]
    of_range: Arc<OnceLock<QuantParams>>,
    /// What was observed in the latest forward pass.
    #[module(skip)]
    in_pass: Option<InPass>,
}

/// What one forward pass has shown, and what was known before.
#[derive(Debug, Clone)]
struct InPass {
    /// [`ForwardPass::current`].
    pass: u64,
    seen: Range,
    before: Range,
    observed: bool,
}

impl State {
    /// Takes values of this range in. Those of one forward pass, a recurrence for example, count as one
    /// batch.
    fn observe(&mut self, range: Range) {
        let observed = self.control.observed;
        let Some(pass) = ForwardPass::current() else {
            return self.observer.observe(range, observed);
        };
        let earlier = self.in_pass.take().filter(|earlier| earlier.pass == pass);
        let now = match earlier {
            Some(earlier) => InPass {
                seen: earlier.seen.joined(range),
                ..earlier
            },
            None => InPass {
                pass,
                seen: range,
                before: self.observer.range(),
                observed,
            },
        };
        self.observer.set_range(now.before.clone());
        self.observer.observe(now.seen.clone(), now.observed);
        self.in_pass = Some(now);
    }

    /// Scale and zero point of what was observed.
    fn observed_qparams(&self, scheme: &Scheme) -> QuantParams {
        let Range { min, max } = self.observer.range();
        match self.control.exact {
            true => QuantParams {
                scale: min,
                zero_point: max,
            },
            false => QuantParams::from_range(Range { min, max }, scheme),
        }
    }

    /// The same, computed once.
    fn known_observed_qparams(&self, scheme: &Scheme) -> QuantParams {
        if let Some(known) = self.of_range.get() {
            return known.clone();
        }
        // Not `get_or_init`, which locks while it computes.
        let qparams = self.observed_qparams(scheme);
        let _ = self.of_range.set(qparams.clone());
        qparams
    }

    /// The range that was observed, or that scale and zero point stand for.
    fn observed_range(&self, scheme: &Scheme) -> Range {
        if !self.control.exact {
            return self.observer.range();
        }
        let QuantParams { scale, zero_point } = self.observed_qparams(scheme);
        // Of which the mapping makes this scale again: as wide on both sides of zero.
        if scheme.mapping == Mapping::Symmetric {
            let max = scale * ((scheme.quant_max() - scheme.quant_min()) / 2.0);
            return Range {
                min: max.clone().neg(),
                max,
            };
        }
        let bound = |number: f32| (zero_point.clone().neg() + number) * scale.clone();
        Range {
            min: bound(scheme.quant_min()),
            max: bound(scheme.quant_max()),
        }
    }

    /// What was given as scale and zero point as a range, which can be observed on.
    fn loosen(&mut self, scheme: &Scheme) {
        if self.control.exact {
            let range = self.observed_range(scheme);
            self.observer.set_range(range);
            self.control.exact = false;
        }
    }

    /// Gives the learned scale and zero point, if there are any, their first values.
    fn start_learning(&mut self, first: QuantParams) {
        let start = |old: Option<_>, value| old.map(|old| set(old, value));
        self.learned_scale = start(self.learned_scale.take(), first.scale);
        self.learned_zero_point = start(self.learned_zero_point.take(), first.zero_point);
        self.control.initialized = self.learned_scale.is_some();
    }
}

impl FakeQuantize {
    pub(crate) fn new(config: FakeQuantizeConfig, groups: usize, device: &Device) -> Self {
        let parameter = |wanted: bool, value: f32| {
            let options = (device, DType::F32);
            let of = || Param::from_tensor(Tensor::full([groups], value, options));
            // Also of a record in half.
            wanted.then(|| of().load_mapper(|value| value.cast(FloatDType::F32)))
        };
        Self {
            path: String::new(),
            training: Param::from_bool(true),
            resident: Resident::default(),
            listener: None,
            role: None,
            state: Arc::new(Mutex::new(State {
                control: Control::new(&config.scheme, Schedule::new(), device),
                observer: Observer::new(config.observer, groups, device),
                learned_scale: parameter(config.learned != Learned::None, 1.0),
                learned_zero_point: parameter(config.learned == Learned::LsqPlus, 0.0),
                of_range: Arc::default(),
                in_pass: None,
            })),
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

    /// Whether it is to keep a range or a scale from one batch to the next.
    pub(crate) fn keeps_range(&self) -> bool {
        self.config.observer.has_memory() || self.config.learned != Learned::None
    }

    /// Whether it was given or has observed a range.
    pub(crate) fn has_range(&self) -> bool {
        self.lock().control.observed || self.is_learning()
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
            state.control.exact = false;
            state.control.non_finite = false;
        })
    }

    /// As before it observed anything: of a weight that holds scale and zero point itself.
    pub(crate) fn without_range(self) -> Self {
        self.edit(|state| {
            let Range { min, max } = state.observer.range();
            let [min, max] = [min, max].map(|of| of.zeros_like());
            state.observer.set_range(Range { min, max });
            state.control.observed = false;
            state.control.exact = false;
            state.control.codes = false;
        })
    }

    pub(crate) fn with_listener(mut self, listener: Option<Listener>) -> Self {
        self.listener = listener;
        self
    }

    pub(crate) fn listener(&self) -> Option<&Listener> {
        self.listener.as_ref()
    }

    /// Whether a value ever came by, in this model or a copy of it, while it was switched on.
    pub fn was_called(&self) -> bool {
        self.lock().control.was_called()
    }

    pub(crate) fn with_path(mut self, path: String) -> Self {
        self.path = path;
        self
    }

    /// As what it acts in a recorded forward pass.
    pub(crate) fn with_role(mut self, role: Role, ordinal: usize) -> Self {
        self.role = Some((role, ordinal));
        self
    }

    pub(crate) fn role(&self) -> Option<(Role, usize)> {
        self.role
    }

    /// Whether it is that of a weight of a prepared model.
    pub(crate) fn is_of_weight(&self) -> bool {
        self.role.is_some_and(|(role, _)| role == Role::Weight)
    }

    /// The same for copies that share its state, and for no other quantizer.
    pub(crate) fn identity(&self) -> usize {
        Arc::as_ptr(&self.state) as usize
    }

    /// This very quantizer: what it observes, the original has observed.
    pub(crate) fn handle(&self) -> Self {
        Self {
            config: self.config.clone(),
            path: self.path.clone(),
            training: self.training.clone(),
            state: self.state.clone(),
            resident: self.resident.clone(),
            listener: self.listener.clone(),
            role: self.role,
        }
    }

    /// Ready for a calibration, without what was observed so far.
    pub(crate) fn calibrating(self) -> Self {
        let has_memory = self.config.observer.has_memory();
        self.edit(|state| {
            if state.control.mode == Mode::Scheduled {
                state.control.mode = Mode::Calibrating;
                // The memoryless observer was given its range, if it has one.
                state.control.observed &= !has_memory;
                state.control.exact &= !has_memory;
                state.control.non_finite = false;
                state.control.initialized = false;
            }
        })
    }

    /// Back from a calibration; chooses the range of a histogram.
    pub(crate) fn calibrated(self) -> Result<Self, QuantError> {
        let mut state = self.changing();
        if state.control.mode == Mode::Calibrating {
            state.control.mode = Mode::Scheduled;
            if state.control.observed {
                state.observer.choose_range(&self.config.scheme)?;
            }
        }
        drop(state);
        Ok(self)
    }

    /// With what a copy of it observed and learned; trained as before.
    pub(crate) fn with_state_of(self, copy: &Self) -> Self {
        let of_copy = copy.lock().clone();
        self.edit(|state| {
            let learned = |old: Option<_>, new: Option<Param<Tensor<1>>>| {
                let value = new?.val();
                Some(set(old?, value))
            };
            *state = State {
                learned_scale: learned(state.learned_scale.take(), of_copy.learned_scale),
                learned_zero_point: learned(
                    state.learned_zero_point.take(),
                    of_copy.learned_zero_point,
                ),
                ..of_copy
            };
        })
    }

    /// After a calibration that has given it a finite range.
    pub(crate) fn settled(self) -> Self {
        self.edit(|state| state.observer.settle())
    }

    /// With these as the first of what is learned.
    pub(crate) fn started(self, first: QuantParams) -> Self {
        self.edit(|state| state.start_learning(first))
    }

    /// With the ranges of replicas that saw other data; those without a range do not count.
    pub(crate) fn merged(self, replicas: &[Self]) -> Result<Self, QuantError> {
        // A weight that was given its scales has them whatever it becomes.
        if self.is_of_weight() && self.lock().control.exact {
            return Ok(self);
        }
        let states: Vec<State> = replicas
            .iter()
            .map(|other| {
                let mut state = other.lock().clone();
                state.loosen(&other.config.scheme);
                state
            })
            .collect();
        let observed: Vec<&Observer> = states
            .iter()
            .filter(|state| state.control.observed)
            .map(|state| &state.observer)
            .collect();
        if !observed.is_empty() {
            let mut state = self.changing();
            state.observer.merge(&observed)?;
            state.control.observed = true;
            state.control.exact = false;
            state.control.non_finite |= states.iter().any(|state| state.control.non_finite);
        }
        Ok(self)
    }

    fn edit(mut self, change: impl FnOnce(&mut State)) -> Self {
        change(&mut self.changing());
        self.resident = Resident::default();
        self
    }

    /// The state, to be changed: what was computed from it is gone.
    fn changing(&self) -> MutexGuard<'_, State> {
        let mut state = self.lock();
        state.of_range = Arc::default();
        state
    }

    /// A copy of the state, to compute with.
    ///
    /// Nothing that rayon may share out is computed under the lock: a thread of its pool that waits for
    /// its share takes up another task, which may be a call of this very quantizer.
    fn snapshot(&self) -> State {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

/// The parameter with another value, and the same identity and training state.
fn set(parameter: Param<Tensor<1>>, value: Tensor<1>) -> Param<Tensor<1>> {
    map_leaf(parameter, |_| value)
}
