//! Which operands are what a hook made.

use burn::backend::ir::{OperationIr, TensorId, TensorIr};
use rustc_hash::FxHashMap as HashMap;

use crate::graph::views::{keeps_all, keeps_rows, moved};
use crate::{Graph, HookInfo, Node};

/// Which views of what a [`Hook`](crate::hooks::Hook) made are what it would have made of the views.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Views {
    /// All, parts too: each number is by itself.
    OfNumbers,
    /// Those of rows along the last axis, each with all of its numbers.
    OfRows,
    /// Those of all numbers.
    OfAll,
}

impl Views {
    /// What an operation is such a view of.
    fn viewed(self, operation: &OperationIr) -> Option<&TensorIr> {
        match self {
            Self::OfNumbers => moved(operation),
            Self::OfRows => keeps_rows(operation),
            Self::OfAll => keeps_all(operation),
        }
    }
}

impl Graph {
    /// The operands that are the result of a [`Hook`](crate::hooks::Hook), through such views of it at
    /// most: position of the node, of the operand, and of the hook in [`hooks`](Self::hooks).
    ///
    /// These views and hooks themselves are left out: for an export, these are the edges of the
    /// operations that compute.
    pub fn hooked_operands(
        &self,
        views: impl Fn(&HookInfo) -> Views,
    ) -> Vec<(usize, usize, usize)> {
        let made = self.made_by_hooks(&views);
        // What a hook made is its own, or a view that goes on.
        let computes = |node: &Node<'_>| {
            let mut outputs = node.operation().outputs();
            outputs.all(|out| !made.contains_key(&out.id))
        };
        let operands = self.nodes().filter(computes).flat_map(|node| {
            let operands = node.operation().inputs().enumerate();
            let hooked = operands.filter_map(|(operand, tensor)| {
                let hook = made.get(&tensor.id)?;
                Some((node.index(), operand, *hook))
            });
            hooked.collect::<Vec<_>>()
        });
        operands.collect()
    }

    /// The [results](Self::outputs) that are those of a [`Hook`](crate::hooks::Hook), through such views
    /// at most: position of the result, and of the hook in [`hooks`](Self::hooks).
    pub fn hooked_results(&self, views: impl Fn(&HookInfo) -> Views) -> Vec<(usize, usize)> {
        let made = self.made_by_hooks(&views);
        let results = self.outputs().iter().enumerate();
        results
            .filter_map(|(position, id)| Some((position, *made.get(id)?)))
            .collect()
    }

    /// The hooks whose result another one reads, through views at most: positions in
    /// [`hooks`](Self::hooks).
    pub fn hooked_hooks(&self) -> Vec<usize> {
        let made = self.made_by_hooks(&|_| Views::OfNumbers);
        let hooks = self.nodes().filter(|node| node.hook().is_some());
        let read = hooks.flat_map(|node| node.operation().inputs());
        read.filter_map(|tensor| made.get(&tensor.id).copied())
            .collect()
    }

    /// The hook that made a tensor, by such views of it, too.
    fn made_by_hooks(&self, views: &impl Fn(&HookInfo) -> Views) -> HashMap<TensorId, usize> {
        let mut made = HashMap::default();
        for node in self.nodes() {
            let operation = node.operation();
            let of_view = || {
                let hook = *made.get(&moved(operation)?.id)?;
                views(&self.hooks()[hook]).viewed(operation)?;
                Some(hook)
            };
            if let Some(hook) = self.hook_of(operation).or_else(of_view) {
                made.extend(operation.outputs().map(|output| (output.id, hook)));
            }
        }
        made
    }
}
