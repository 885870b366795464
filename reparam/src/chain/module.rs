//! A chain as a module: as Burn would derive it, except that a walk can take its first link off.

use std::fmt;

use burn::module::{
    Content, Devices, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper, ModuleVisitor,
    Reparameterization,
};
use burn::tensor::Device;

use super::Chain;
use crate::unlink;

const CONTAINER: &str = "Struct:Chain";

impl<A, B> Module for Chain<A, B>
where
    A: Reparameterization + ModuleDisplay,
    B: Reparameterization + ModuleDisplay,
{
    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        visitor.enter_module("first", CONTAINER);
        self.first.visit(visitor);
        visitor.exit_module("first", CONTAINER);
        visitor.enter_module("second", CONTAINER);
        self.second.visit(visitor);
        visitor.exit_module("second", CONTAINER);
    }

    fn map<M: ModuleMapper>(self, mapper: &mut M) -> Self {
        let first = match unlink::takes_off_first(&self) {
            true => None,
            false => self.first,
        };
        mapper.enter_module("first", CONTAINER);
        let first = Module::map(first, mapper);
        mapper.exit_module("first", CONTAINER);
        mapper.enter_module("second", CONTAINER);
        let second = Module::map(self.second, mapper);
        mapper.exit_module("second", CONTAINER);
        Self { first, second }
    }

    fn to_device(self, device: &Device) -> Self {
        Self {
            first: self.first.to_device(device),
            second: self.second.to_device(device),
        }
    }

    fn fork(self, device: &Device) -> Self {
        Self {
            first: self.first.fork(device),
            second: self.second.fork(device),
        }
    }

    fn collect_devices(&self, devices: Devices) -> Devices {
        self.second
            .collect_devices(self.first.collect_devices(devices))
    }

    fn valid(&self) -> Self {
        Self {
            first: self.first.valid(),
            second: self.second.valid(),
        }
    }

    fn train(self) -> Self {
        Self {
            first: self.first.train(),
            second: self.second.train(),
        }
    }

    fn materialize(self) -> Self {
        Self {
            first: self.first.materialize(),
            second: self.second.materialize(),
        }
    }
}

impl<A, B> ModuleDisplayDefault for Chain<A, B>
where
    A: Reparameterization + ModuleDisplay,
    B: Reparameterization + ModuleDisplay,
{
    fn content(&self, content: Content) -> Option<Content> {
        content
            .set_top_level_type("Chain")
            .add("first", &self.first)
            .add("second", &self.second)
            .optional()
    }
}

impl<A, B> ModuleDisplay for Chain<A, B>
where
    A: Reparameterization + ModuleDisplay,
    B: Reparameterization + ModuleDisplay,
{
}

impl<A, B> fmt::Display for Chain<A, B>
where
    A: Reparameterization + ModuleDisplay,
    B: Reparameterization + ModuleDisplay,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&ModuleDisplay::format(self, Default::default()))
    }
}
