//! The quantizer as a module whose copies share nothing.

use std::sync::{Mutex, PoisonError};

use burn::module::{Content, Devices, Module, ModuleDisplay, ModuleDisplayDefault};
use burn::module::{ModuleMapper, ModuleVisitor};
use burn::tensor::Device;

use super::{FakeQuantize, State};
use crate::walk;

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

impl FakeQuantize {
    fn map_state(self, map: impl FnOnce(State) -> State) -> Self {
        let state = self.state.into_inner();
        Self {
            state: Mutex::new(map(state.unwrap_or_else(PoisonError::into_inner))),
            ..self
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
