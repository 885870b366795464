//! Which operands are what a hook made.

use std::collections::HashMap;

use burn::backend::ir::TensorId;

use crate::Graph;
use crate::graph::views::moved;

impl Graph {
    /// The operands that are the result of a [`Hook`](crate::hooks::Hook), through views at most:
    /// position of the node, of the operand, and of the hook in [`hooks`](Self::hooks).
    ///
    /// Views and hooks themselves are left out: for an export, these are the edges of the
    /// operations that compute.
    pub fn hooked_operands(&self) -> Vec<(usize, usize, usize)> {
        let mut made: HashMap<TensorId, usize> = HashMap::new();
        let mut edges = Vec::new();
        for node in self.nodes() {
            let operation = node.operation();
            let hook = match (self.hook_of(operation), moved(operation)) {
                (Some(hook), _) => Some(hook),
                (None, Some(view)) => match made.get(&view.id) {
                    Some(hook) => Some(*hook),
                    None => continue,
                },
                (None, None) => None,
            };
            match hook {
                Some(hook) => made.extend(operation.outputs().map(|output| (output.id, hook))),
                None => edges.extend(operation.inputs().enumerate().filter_map(
                    |(operand, tensor)| {
                        let hook = made.get(&tensor.id)?;
                        Some((node.index(), operand, *hook))
                    },
                )),
            }
        }
        edges
    }
}
