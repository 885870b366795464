//! What a recorded forward pass shows of places for quantizers.

use std::collections::HashMap;

use burn_lean_graph::{Graph, Place, Role};

/// Weights outside of Burn's layers, and operations without a weight; by the paths of weights.
#[derive(Debug, Default)]
pub(crate) struct Found {
    /// Axis of the output channels.
    axes: HashMap<String, usize>,
    /// What is to be quantized after a layer, besides its input.
    sites: HashMap<String, Vec<(Role, usize)>>,
}

impl Found {
    pub(crate) fn of(graph: &Graph, attention: bool, sums: bool) -> Self {
        let mut found = Self::default();
        for one in graph.sites() {
            let wanted = match (one.site.role, one.place) {
                (Role::Weight, _) => {
                    if let Some(axis) = graph.output_channels(&one) {
                        found.axes.insert(one.site.path, axis);
                    }
                    continue;
                }
                // As an operand of a product of two computed tensors.
                (Role::Output, Place::Operand(_)) => attention,
                (
                    Role::Query
                    | Role::Key
                    | Role::Value
                    | Role::Probabilities
                    | Role::Left
                    | Role::Right,
                    _,
                ) => attention,
                (Role::SumLeft | Role::SumRight | Role::Concatenation, _) => sums,
                _ => false,
            };
            let of_path = found.sites.entry(one.site.path).or_default();
            let site = (one.site.role, one.site.ordinal);
            if wanted && !of_path.contains(&site) {
                of_path.push(site);
            }
        }
        found
    }

    pub(crate) fn axis(&self, weight: &str) -> Option<usize> {
        self.axes.get(weight).copied()
    }

    pub(crate) fn sites(&self, weight: &str) -> &[(Role, usize)] {
        self.sites.get(weight).map_or(&[], Vec::as_slice)
    }
}
