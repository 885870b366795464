//! The places in a model that findings are about.

use std::collections::HashMap;
use std::fmt;

use burn::backend::ir::TensorId;
use burn_lean_graph::{Graph, Node};
use serde::{Deserialize, Serialize};

use super::{AuditedOperation, Finding};
use crate::autocast::{KeptBecause, ParameterPrecision};

/// A place in a model with something to know about it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CallSite {
    /// Path of the module; empty for the whole model, `None` for what comes before all modules.
    pub module: Option<String>,
    /// Whether it is about operations after that module, which read no parameter.
    pub is_after: bool,
    /// What was found.
    pub finding: Finding,
    /// Names of the operations, without repetition.
    pub operations: Vec<String>,
    /// How many operations.
    pub count: usize,
    /// The least magnitude of operands from which one of them leaves the range of F16, itself or in
    /// its gradient, as far as it is known.
    pub overflows_from: Option<f64>,
    /// Paths of the parameters whose gradients are summed in half precision, where that is what loses it.
    pub summed_in_half: Vec<String>,
}

impl fmt::Display for CallSite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.module, self.is_after) {
            (None, _) => f.write_str("before all modules")?,
            (Some(module), true) if module.is_empty() => f.write_str("in the model")?,
            (Some(module), false) if module.is_empty() => f.write_str("the model")?,
            (Some(module), true) => write!(f, "after `{module}`")?,
            (Some(module), false) => write!(f, "`{module}`")?,
        }
        let what = match self.finding {
            Finding::MixedDtypes => "mixes float dtypes",
            Finding::UnsupportedDtype => "has a dtype that the device cannot compute in",
            Finding::MayOverflow => "may leave the range of F16",
            Finding::ConstantOutOfRange => "has a number that F16 does not have",
            Finding::LosesPrecision => "loses precision",
        };
        write!(f, " {what} ({}", self.operations.join(", "))?;
        match self.overflows_from {
            Some(bound) if self.finding == Finding::MayOverflow => {
                write!(f, "; from magnitude {bound:.0} on)")?;
            }
            _ => f.write_str(")")?,
        }
        match &self.summed_in_half[..] {
            [] => Ok(()),
            paths => write!(
                f,
                ": the gradients of `{}` are summed in half precision; call it in `full_precision`, or use \
                 `Autocast::run`",
                paths.join("`, `")
            ),
        }
    }
}

pub(super) fn of(operations: &[AuditedOperation]) -> Vec<CallSite> {
    let mut sites: Vec<CallSite> = Vec::new();
    for operation in operations {
        for finding in &operation.findings {
            let same = |site: &&mut CallSite| {
                site.finding == *finding
                    && site.module == operation.module
                    && site.is_after == operation.is_after
            };
            let bound = operation.overflows_from;
            let sums = operation.adds_gradients && *finding == Finding::LosesPrecision;
            let summed: &[String] = match sums {
                true => &operation.parameters[..],
                false => &[],
            };
            match sites.iter_mut().find(same) {
                Some(site) => {
                    site.count += 1;
                    if !site.operations.contains(&operation.name) {
                        site.operations.push(operation.name.clone());
                    }
                    site.overflows_from = match (site.overflows_from, bound) {
                        (Some(a), Some(b)) => Some(a.min(b)),
                        (a, b) => a.or(b),
                    };
                    for path in summed {
                        if !site.summed_in_half.contains(path) {
                            site.summed_in_half.push(path.clone());
                        }
                    }
                }
                None => sites.push(CallSite {
                    module: operation.module.clone(),
                    is_after: operation.is_after,
                    finding: *finding,
                    operations: vec![operation.name.clone()],
                    count: 1,
                    overflows_from: bound,
                    summed_in_half: summed.to_vec(),
                }),
            }
        }
    }
    sites
}

/// Which module each operation belongs to, or comes after.
pub(super) struct Modules<'a> {
    kept: HashMap<&'a str, KeptBecause>,
    graph: &'a Graph,
    /// The operation with parameters that ran last of those that a tensor comes from.
    last: HashMap<TensorId, usize>,
}

impl<'a> Modules<'a> {
    pub(super) fn of(graph: &'a Graph, parameters: &'a [ParameterPrecision]) -> Self {
        let mut last: HashMap<TensorId, usize> = HashMap::new();
        for node in graph.nodes() {
            let before = node.operands().filter_map(|one| last.get(&one.id)).max();
            let own = node.parameters().next().map(|_| node.index());
            if let Some(index) = own.or(before.copied()) {
                let outputs = node.operation().outputs();
                last.extend(outputs.map(|output| (output.id, index)));
            }
        }
        let kept = parameters.iter();
        Self {
            kept: kept
                .filter_map(|parameter| Some((parameter.path.as_str(), parameter.kept?)))
                .collect(),
            graph,
            last,
        }
    }

    /// The module, and whether the operation comes after it.
    pub(super) fn at(&self, node: &Node<'a>) -> (Option<String>, bool) {
        if let Some(path) = path(node) {
            return (Some(self.module(path)), false);
        }
        let mut operands = node.operands();
        let before = operands.by_ref().filter_map(|one| self.last.get(&one.id));
        let Some(index) = before.max() else {
            return (None, true);
        };
        let Some(path) = path(&self.graph.node(*index)) else {
            return (None, true);
        };
        // Sums and products of a recurrent layer are a part of it.
        let is_recurrent = self.kept.get(path) == Some(&KeptBecause::Recurrent);
        (Some(self.module(path)), !is_recurrent)
    }

    /// The module to call in another region, of a parameter.
    fn module(&self, parameter: &str) -> String {
        let depth = match self.kept.get(parameter) {
            // `lstm.input_gate.input_transform.weight`.
            Some(KeptBecause::Recurrent) => 3,
            _ => 1,
        };
        let mut module = parameter;
        for _ in 0..depth {
            module = module.rsplit_once('.').map_or("", |(module, _)| module);
        }
        module.to_string()
    }
}

fn path<'a>(node: &Node<'a>) -> Option<&'a str> {
    Some(node.parameters().next()?.path.as_str())
}
