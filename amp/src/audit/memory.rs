//! What the backward pass keeps in memory.

use std::collections::{HashMap, HashSet};

use burn::backend::ir::{TensorId, TensorIr};
use serde::{Deserialize, Serialize};

use super::operation::{Saved, is_alias, is_cast, saved};
use super::pass::Pass;

/// Bytes held between forward and backward pass.
///
/// Activations are counted by what Burn's autodiff keeps for each kind of operation; views share
/// their bytes. An estimate: kernels that fuse or copy differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    /// Master weights: all float parameters, F32.
    pub master_weights: usize,
    /// Half-precision copies of the weights, kept for the backward pass.
    pub cast_weights: usize,
    /// Other tensors kept for the backward pass, under autocast.
    pub activations: usize,
    /// Tensors kept for the backward pass without autocast.
    pub activations_f32: usize,
}

impl Memory {
    /// Weights and saved activations under autocast.
    pub fn total(&self) -> usize {
        self.master_weights + self.cast_weights + self.activations
    }

    /// Weights and saved activations without autocast.
    pub fn total_f32(&self) -> usize {
        self.master_weights + self.activations_f32
    }

    /// [`total`](Self::total) over [`total_f32`](Self::total_f32).
    pub fn ratio(&self) -> f64 {
        self.total() as f64 / self.total_f32().max(1) as f64
    }
}

/// Bytes of tensors kept for the backward pass: copies of weights, and everything else.
pub(super) fn saved_bytes(pass: &Pass<'_>) -> (usize, usize) {
    let parameters: HashSet<TensorId> = pass
        .graph
        .parameters()
        .iter()
        .map(|parameter| parameter.tensor)
        .collect();
    let mut root: HashMap<TensorId, TensorId> = HashMap::new();
    let mut weights = parameters.clone();
    let mut kept: HashSet<TensorId> = HashSet::new();
    // A view may be larger than what it looks at.
    let mut sizes: HashMap<TensorId, usize> = HashMap::new();
    for node in pass.graph.nodes() {
        let operation = node.operation();
        for tensor in node.operands().chain(operation.outputs()) {
            sizes.entry(tensor.id).or_insert_with(|| pass.bytes(tensor));
        }
        let root_of = |root: &HashMap<_, _>, tensor: &TensorIr| {
            root.get(&tensor.id).copied().unwrap_or(tensor.id)
        };
        if let Some(first) = node.operands().next() {
            let first = root_of(&root, first);
            for output in operation.outputs() {
                if is_alias(operation) {
                    root.insert(output.id, first);
                } else if (is_cast(operation) || node.noted_cast().is_some())
                    && weights.contains(&first)
                {
                    weights.insert(output.id);
                }
            }
        }
        let saved: Vec<&TensorIr> = match saved(operation) {
            _ if node.noted_cast().is_some() => Vec::new(),
            Saved::Nothing => Vec::new(),
            Saved::Inputs => node.operands().collect(),
            Saved::Outputs => operation.outputs().collect(),
        };
        for tensor in saved.into_iter().filter(|tensor| tensor.dtype.is_float()) {
            kept.insert(root_of(&root, tensor));
        }
    }
    let mut copies = 0;
    let mut activations = 0;
    for id in kept {
        let bytes = sizes.get(&id).copied().unwrap_or(0);
        match (parameters.contains(&id), weights.contains(&id)) {
            (true, _) => {}
            (false, true) => copies += bytes,
            (false, false) => activations += bytes,
        }
    }
    (copies, activations)
}
