//! Which operands are what a hook made.

use burn::backend::ir::TensorId;
use rustc_hash::FxHashMap as HashMap;

use crate::graph::views::moved;
use crate::{Graph, Node};

impl Graph {
    /// The operands that are the result of a [`Hook`](crate::hooks::Hook), through views at most:
    /// position of the node, of the operand, and of the hook in [`hooks`](Self::hooks).
    ///
    /// Views and hooks themselves are left out: for an export, these are the edges of the
    /// operations that compute.
    pub fn hooked_operands(&self) -> Vec<(usize, usize, usize)> {
        let made = self.made_by_hooks();
        let computes = |node: &Node<'_>| {
            self.hook_of(node.operation()).is_none() && moved(node.operation()).is_none()
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

    /// The [results](Self::outputs) that are those of a [`Hook`](crate::hooks::Hook), through views at
    /// most: position of the result, and of the hook in [`hooks`](Self::hooks).
    pub fn hooked_results(&self) -> Vec<(usize, usize)> {
        let made = self.made_by_hooks();
        let results = self.outputs().iter().enumerate();
        results
            .filter_map(|(position, id)| Some((position, *made.get(id)?)))
            .collect()
    }

    /// The hooks whose result another one reads, through views at most: positions in
    /// [`hooks`](Self::hooks).
    pub fn hooked_hooks(&self) -> Vec<usize> {
        let made = self.made_by_hooks();
        let hooks = self.nodes().filter(|node| node.hook().is_some());
        let read = hooks.flat_map(|node| node.operation().inputs());
        read.filter_map(|tensor| made.get(&tensor.id).copied())
            .collect()
    }

    /// The hook that made a tensor, by views of it, too.
    fn made_by_hooks(&self) -> HashMap<TensorId, usize> {
        let mut made = HashMap::default();
        for node in self.nodes() {
            let operation = node.operation();
            let hook = self.hook_of(operation);
            let hook = hook.or_else(|| made.get(&moved(operation)?.id).copied());
            if let Some(hook) = hook {
                made.extend(operation.outputs().map(|output| (output.id, hook)));
            }
        }
        made
    }
}
