//! The quantizers that a file names, for a model that has none.

use std::collections::{BTreeMap, HashMap};

use burn::module::Module;
use burn::tensor::Device;
use burn_lean_graph::Role;
use burn_lean_reparam::{attach_if_any, each_float};

use super::activations::Activation;
use super::{Entry, FileError};
use crate::module::sites::{self, SiteQuantizers};
use crate::qat::AttachQuantizers;
use crate::range::observer::ObserverConfig;
use crate::{FakeQuantize, FakeQuantizeConfig, QuantError, WeightQuantizer};

/// Roles of operands that no layer owns.
const OF_SITES: [Role; 14] = [
    Role::Output,
    Role::Query,
    Role::Key,
    Role::Value,
    Role::Probabilities,
    Role::Left,
    Role::Right,
    Role::SumLeft,
    Role::SumRight,
    Role::DifferenceLeft,
    Role::DifferenceRight,
    Role::FactorLeft,
    Role::FactorRight,
    Role::Concatenation,
];

/// `model`, with the quantizers of weights and activations that a file has entries of. Of one that says of
/// no activation, and of a layer whose weight stays float, none: the loader finds what is missing.
pub(super) fn attach_quantizers<M: Module>(
    model: &M,
    entries: &BTreeMap<String, Entry>,
    activations: &BTreeMap<String, Activation>,
    file: &FileError<'_>,
) -> Result<M, QuantError> {
    let mut devices = HashMap::new();
    each_float(model, |at, float| {
        devices.insert(at.path(), (float.device(), float.shape()));
    });
    let mut quantizers = HashMap::new();
    for (path, entry) in entries {
        let Some((device, shape)) = devices.get(path) else {
            continue;
        };
        // Of another shape the loader says so; nothing is made of what a file alone says.
        if *shape != entry.shape {
            continue;
        }
        let of_path = of_weight(path, entry, activations, device);
        let quantizer = of_path.map_err(|error| file.read(format!("`{path}`: {error}")))?;
        quantizers.insert(path.clone(), quantizer);
    }
    let attached = attach_if_any(model.clone(), AttachQuantizers { quantizers });
    attached.map_err(|rejected| file.read(rejected.error()))
}

fn of_weight(
    path: &str,
    entry: &Entry,
    activations: &BTreeMap<String, Activation>,
    device: &Device,
) -> Result<WeightQuantizer, QuantError> {
    let named = |quantizer: FakeQuantize, site: &str, role: Role, ordinal: usize| {
        let path = format!("{path}.quant.{site}");
        quantizer.with_path(path).with_role(role, ordinal)
    };
    let activation = |site: &str, role: Role, ordinal: usize| {
        let of_site = activations.get(&format!("{path}.quant.{site}"));
        let quantizer = of_site
            .map(|of_site| of_site.quantizer(device))
            .transpose()?;
        Ok::<_, QuantError>(quantizer.map(|one| named(one, site, role, ordinal)))
    };
    let mut others = SiteQuantizers::default();
    for role in OF_SITES {
        for ordinal in 0.. {
            let site = format!("sites.{}", sites::name(role, ordinal));
            match activation(&site, role, ordinal)? {
                Some(one) => others.push(one),
                // The first output of a layer is a field of its own.
                None if ordinal == 0 => {}
                None => break,
            }
        }
    }
    let weight = FakeQuantizeConfig::new(entry.scheme.clone())
        .with_observer(ObserverConfig::MinMax)
        .init_for(&entry.shape, device)?;
    Ok(WeightQuantizer {
        weight: named(weight, "weight", Role::Weight, 0),
        input: activation("input", Role::Input, 0)?,
        output: activation("output", Role::Output, 0)?,
        attention: activation("attention", Role::Probabilities, 0)?,
        sites: others,
    })
}
