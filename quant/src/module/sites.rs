//! The quantizers of operations without a weight, carried by the weight of the layer before.

use burn::module::{Content, Devices, Module, ModuleDisplay, ModuleDisplayDefault};
use burn::module::{ModuleMapper, ModuleVisitor};
use burn::tensor::Device;
use burn_lean_graph::Role;

use crate::FakeQuantize;

/// Quantizers of operands that no layer owns: queries and keys after a rotation, the branches of a
/// residual sum, the parts of a concatenation.
///
/// Each belongs to the layer that runs last before the operation, under the path
/// `weight.quant.sites.query`, for example; a second operation of a kind after the same layer under
/// `sites.query_1`. They act where a forward pass is recorded and executed:
/// [`QuantizedForward`](crate::QuantizedForward).
#[derive(Debug, Clone, Default)]
pub struct SiteQuantizers(Vec<FakeQuantize>);

const CONTAINER: &str = "Struct:SiteQuantizers";

impl SiteQuantizers {
    pub(crate) fn push(&mut self, quantizer: FakeQuantize) {
        self.0.push(quantizer);
    }

    /// What each is for, with the quantizer.
    pub fn iter(&self) -> impl Iterator<Item = (Role, usize, &FakeQuantize)> {
        self.0.iter().filter_map(|quantizer| {
            let (role, ordinal) = quantizer.role()?;
            Some((role, ordinal, quantizer))
        })
    }

    fn mapped(self, mut map: impl FnMut(FakeQuantize) -> FakeQuantize) -> Self {
        Self(self.0.into_iter().map(&mut map).collect())
    }
}

/// The name of a site in paths.
pub(crate) fn name(role: Role, ordinal: usize) -> String {
    match ordinal {
        0 => role.name().to_string(),
        _ => format!("{}_{ordinal}", role.name()),
    }
}

fn name_of(quantizer: &FakeQuantize) -> String {
    let (role, ordinal) = quantizer.role().unwrap_or((Role::Left, 0));
    name(role, ordinal)
}

impl Module for SiteQuantizers {
    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        for quantizer in &self.0 {
            let name = name_of(quantizer);
            visitor.enter_module(&name, CONTAINER);
            quantizer.visit(visitor);
            visitor.exit_module(&name, CONTAINER);
        }
    }

    fn map<M: ModuleMapper>(self, mapper: &mut M) -> Self {
        self.mapped(|quantizer| {
            let name = name_of(&quantizer);
            mapper.enter_module(&name, CONTAINER);
            let mapped = Module::map(quantizer, mapper);
            mapper.exit_module(&name, CONTAINER);
            mapped
        })
    }

    fn to_device(self, device: &Device) -> Self {
        self.mapped(|quantizer| quantizer.to_device(device))
    }

    fn fork(self, device: &Device) -> Self {
        self.mapped(|quantizer| quantizer.fork(device))
    }

    fn collect_devices(&self, devices: Devices) -> Devices {
        let collect = |devices, quantizer: &FakeQuantize| quantizer.collect_devices(devices);
        self.0.iter().fold(devices, collect)
    }

    fn valid(&self) -> Self {
        Self(self.0.iter().map(Module::valid).collect())
    }

    fn train(self) -> Self {
        self.mapped(Module::train)
    }

    fn materialize(self) -> Self {
        self.mapped(Module::materialize)
    }
}

impl ModuleDisplayDefault for SiteQuantizers {
    fn content(&self, content: Content) -> Option<Content> {
        let names: Vec<String> = self.0.iter().map(name_of).collect();
        content.add_formatted(&names.join(", ")).optional()
    }
}

impl ModuleDisplay for SiteQuantizers {}
