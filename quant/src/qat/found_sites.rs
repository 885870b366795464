//! What a recorded forward pass shows of places for quantizers.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use burn::backend::ir::{FloatOperationIr, ModuleOperationIr, OperationIr};
use burn::module::Module;
use burn_lean_graph::{Graph, Place, Role, SiteUse};
use serde::{Deserialize, Serialize};

use crate::model::layers::Layers;

/// The places for quantizers that only a forward pass shows: weights outside of Burn's layers, and
/// operations without a weight. Of a [`QatConfig`](crate::QatConfig), by
/// [`with_sites_of`](crate::QatConfig::with_sites_of).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FoundSites {
    /// Axis of the output channels, by the path of the weight.
    axes: BTreeMap<String, usize>,
    /// Axis over which a product of matrices adds up, where the weight is read so, by its path.
    #[serde(default)]
    summed: BTreeMap<String, usize>,
    /// What can be quantized after a layer, besides its input, by the path of its weight; and which
    /// of several.
    sites: BTreeMap<String, Vec<(Role, usize)>>,
    /// Weights of layers that are not called, or with parameters alone (the queries of a decoder that learns
    /// them), by path.
    #[serde(default)]
    uncalled: BTreeSet<String>,
    /// Weights that numbers are multiplied with, by path: of a table, too, that is also the head of a
    /// language model.
    #[serde(default)]
    multiplied: BTreeSet<String>,
}

impl FoundSites {
    pub(crate) fn of<M: Module>(model: &M, graph: &Graph) -> Self {
        let sites = graph.sites();
        let used = sites.iter().filter(|one| one.site.role == Role::Weight);
        let used: HashSet<&str> = used.map(|one| one.site.path.as_str()).collect();
        let parameters = graph.parameters().iter();
        let called = parameters.filter(|parameter| used.contains(parameter.path.as_str()));
        let called: HashSet<_> = called.map(|parameter| parameter.id).collect();
        let weights = Layers::of(model).weights.into_iter();
        let uncalled = weights.filter(|weight| !called.contains(&weight.id));
        let mut found = Self {
            uncalled: uncalled.map(|weight| weight.path).collect(),
            ..Self::default()
        };
        for one in sites {
            match (one.site.role, one.place) {
                (Role::Weight, _) => {
                    if let Some(axis) = graph.output_channels(&one) {
                        found.read(graph, &one, axis);
                    }
                }
                (Role::Input, _) => {
                    found.multiplied.insert(one.site.path);
                }
                // The output of a layer as such needs no recording.
                (Role::Output, Place::Result) => {}
                // The state that a recurrence starts from has no range.
                _ if one.is_zero => {}
                (role, _) => {
                    let of_path = found.sites.entry(one.site.path).or_default();
                    let site = (role, one.site.ordinal);
                    if !of_path.contains(&site) {
                        of_path.push(site);
                    }
                }
            }
        }
        found
    }

    /// Takes in how the forward pass reads a weight whose output channels are along `axis`; of several ways
    /// the last.
    fn read(&mut self, graph: &Graph, weight: &SiteUse, axis: usize) {
        let path = &weight.site.path;
        self.axes.insert(path.clone(), axis);
        self.summed.remove(path);
        if let Some(summed) = summed_axis(graph, weight).filter(|summed| *summed != axis) {
            self.summed.insert(path.clone(), summed);
        }
    }

    /// Whether the forward pass does not come by the layer of this weight.
    pub(crate) fn is_uncalled(&self, weight: &str) -> bool {
        self.uncalled.contains(weight)
    }

    /// Whether the forward pass multiplies numbers with this weight.
    pub(crate) fn is_multiplied(&self, weight: &str) -> bool {
        self.multiplied.contains(weight)
    }

    pub(crate) fn axis(&self, weight: &str) -> Option<usize> {
        self.axes.get(weight).copied()
    }

    /// The axis over which products with this weight add up, if its output channels are along `axis`.
    pub(crate) fn summed_axis(&self, weight: &str, axis: usize) -> Option<usize> {
        let is_read_so = self.axis(weight) == Some(axis);
        self.summed.get(weight).copied().filter(|_| is_read_so)
    }

    /// The sites after a layer: operands of attentions and other products of two computed tensors,
    /// branches of sums and parts of concatenations.
    pub(crate) fn sites(&self, weight: &str, attention: bool, sums: bool) -> Vec<(Role, usize)> {
        let all = self.sites.get(weight).into_iter().flatten();
        all.copied()
            .filter(|(role, _)| match role {
                // As an operand of a product of two computed tensors.
                Role::Output
                | Role::Query
                | Role::Key
                | Role::Value
                | Role::Probabilities
                | Role::Left
                | Role::Right => attention,
                Role::SumLeft | Role::SumRight | Role::Concatenation => sums,
                _ => false,
            })
            .collect()
    }
}

/// The axis of a weight, as it lies in its parameter, over which a product of matrices adds up; `None` for other
/// operations, and where something else than views is between them.
fn summed_axis(graph: &Graph, weight: &SiteUse) -> Option<usize> {
    let Place::Operand(position) = weight.place else {
        return None;
    };
    let node = graph.node(weight.node);
    let operation = node.operation();
    let rank = operation.inputs().nth(position)?.shape.num_dims();
    let axis = match operation {
        OperationIr::Float(_, FloatOperationIr::Matmul(_)) if position == 0 => {
            rank.checked_sub(1)?
        }
        OperationIr::Float(_, FloatOperationIr::Matmul(_)) => rank.checked_sub(2)?,
        OperationIr::Module(ModuleOperationIr::Linear(_)) => 0,
        _ => return None,
    };
    node.viewed(position, axis).map(|(_, axis)| axis)
}
