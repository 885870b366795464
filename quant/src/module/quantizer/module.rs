//! The quantizer as a module whose copies share nothing.

use std::sync::{Arc, Mutex, PoisonError};

use burn::module::{Content, Devices, Module, ModuleDisplay, ModuleDisplayDefault, Param};
use burn::module::{ModuleMapper, ModuleVisitor};
use burn::tensor::{DType, Device, Tensor};
use burn_lean_graph::hooks;

use super::{FakeQuantize, State};
use crate::module::control::Mode;
use crate::module::resident::Resident;
use crate::module::walk;

impl Clone for FakeQuantize {
    fn clone(&self) -> Self {
        let state = self.lock();
        let copy = self.handle();
        // What a copy observes in a calibration (the model's `valid`, for example) counts, and in a
        // recording, which is one of this very model.
        match state.control.mode == Mode::Calibrating || hooks::is_active() {
            true => copy,
            false => Self {
                state: Arc::new(Mutex::new(state.clone())),
                ..copy
            },
        }
    }
}

impl FakeQuantize {
    /// With another state; what was computed from the old one, or from the weight, is gone.
    fn map_state(self, map: impl FnOnce(State) -> State) -> Self {
        self.keep_state(|state| {
            map(State {
                of_range: Arc::default(),
                ..state
            })
        })
    }

    /// The same, but what was computed from the old state goes along with it.
    fn keep_state(self, map: impl FnOnce(State) -> State) -> Self {
        let state = match Arc::try_unwrap(self.state) {
            Ok(own) => own.into_inner().unwrap_or_else(PoisonError::into_inner),
            Err(shared) => {
                let shared = shared.lock().unwrap_or_else(PoisonError::into_inner);
                shared.clone()
            }
        };
        Self {
            state: Arc::new(Mutex::new(map(state))),
            resident: Resident::default(),
            ..self
        }
    }
}

/// The state after a mapper. One that does not load a record has no business with what was observed:
/// to it, the observed range looks like any other parameter.
fn mapped<M: ModuleMapper>(state: State, mapper: &mut M) -> State {
    let observer = state.observer.clone();
    let learned = [
        state.learned_scale.clone(),
        state.learned_zero_point.clone(),
    ];
    let mut state = state.map(mapper);
    // In a model that is cast or quantized as a whole scales stay numbers of F32.
    let own = [&mut state.learned_scale, &mut state.learned_zero_point];
    for (own, before) in own.into_iter().zip(learned) {
        let stays = |scale: &Param<Tensor<1>>| scale.val().dtype() == DType::F32;
        if !own.as_ref().is_none_or(stays) {
            *own = before;
        }
    }
    if state.control.was_loaded {
        state.observer.unsettle();
        return State {
            of_range: Arc::default(),
            ..state
        };
    }
    // It may have moved the model.
    let device = state.observer.range().min.device();
    if device != observer.range().min.device() {
        state.of_range = Arc::default();
    }
    State {
        observer: observer.to_device(&device),
        ..state
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
        if walk::is_hidden() || self.offer() {
            return;
        }
        visitor.enter_module("training", CONTAINER);
        self.training.visit(visitor);
        visitor.exit_module("training", CONTAINER);
        // A copy: the visitor may look at this very quantizer.
        self.snapshot().visit(visitor);
    }

    fn map<M: ModuleMapper>(self, mapper: &mut M) -> Self {
        if let Some(replacement) = walk::replacement() {
            return replacement;
        }
        if hooks::is_active() {
            return self;
        }
        if walk::is_hidden() {
            return self.keep_state(|state| state);
        }
        mapper.enter_module("training", CONTAINER);
        let training = Module::map(self.training.clone(), mapper);
        mapper.exit_module("training", CONTAINER);
        Self {
            training,
            ..self.keep_state(|state| mapped(state, mapper))
        }
    }

    fn to_device(self, device: &Device) -> Self {
        if hooks::is_active() {
            return self;
        }
        self.map_state(|state| state.to_device(device))
    }

    fn fork(self, device: &Device) -> Self {
        if hooks::is_active() {
            return self;
        }
        self.map_state(|state| state.fork(device))
    }

    fn collect_devices(&self, devices: Devices) -> Devices {
        // In a recording its state stays where it is.
        if hooks::is_active() {
            return devices;
        }
        // Of what is trained alone: what it observed is on no tape, and since Burn's list takes a device
        // once, with or without autodiff, it would hide that the rest of the model trains.
        let state = self.lock();
        let devices = state.learned_scale.collect_devices(devices);
        state.learned_zero_point.collect_devices(devices)
    }

    fn valid(&self) -> Self {
        let copy = self.clone();
        if hooks::is_active() {
            return copy;
        }
        let training = self.training.valid();
        match Arc::ptr_eq(&copy.state, &self.state) {
            true => Self { training, ..copy },
            false => Self {
                training,
                resident: copy.resident.clone(),
                ..copy.map_state(|state| state.valid())
            },
        }
    }

    fn train(self) -> Self {
        if hooks::is_active() {
            return self;
        }
        Self {
            training: self.training.clone().train(),
            ..self.map_state(State::train)
        }
    }

    fn materialize(self) -> Self {
        if hooks::is_active() {
            return self;
        }
        self.map_state(State::materialize)
    }
}

impl ModuleDisplayDefault for FakeQuantize {
    fn content(&self, content: Content) -> Option<Content> {
        content.add_formatted(&self.to_string()).optional()
    }
}

impl ModuleDisplay for FakeQuantize {}
