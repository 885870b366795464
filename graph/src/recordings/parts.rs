//! What tells a recording from one whose gradients were compared.

use std::hash::{Hash, Hasher};

use burn::backend::ir::{OperationIr, TensorId};
use rustc_hash::{FxHashMap, FxHasher};

use crate::Graph;

/// What a recording consists of, however often: operations of modules, with the order of magnitude of their
/// numbers, and what leads to them.
///
/// A loop over time is the same for every length. What leads there tells the weight of a term of the loss, in
/// an operation like many others, from these.
pub(super) fn parts(graph: &Graph) -> impl Iterator<Item = u64> + '_ {
    /// How far back.
    const STEPS: usize = 4;
    let hash = |part: &dyn Fn(&mut FxHasher)| {
        let mut hasher = FxHasher::default();
        part(&mut hasher);
        hasher.finish()
    };
    let made = graph.nodes().flat_map(|node| {
        let outputs: Vec<TensorId> = node.operation().outputs().map(|one| one.id).collect();
        outputs.into_iter().map(move |id| (id, node.index()))
    });
    let made_by: FxHashMap<TensorId, usize> = made.collect();
    let own = graph
        .nodes()
        .map(|node| hash(&|part| (node.name(), node.module()).hash(part)));
    let own: Vec<u64> = own.collect();
    let mut leads = own.clone();
    for _ in 0..STEPS {
        let further = graph.nodes().map(|node| {
            let makers = node.operands().map(|one| made_by.get(&one.id));
            let makers: Vec<u64> = makers.map(|at| at.map_or(0, |at| leads[*at])).collect();
            hash(&|part| (own[node.index()], &makers).hash(part))
        });
        leads = further.collect();
    }
    let magnitude = |number: f64| match number == 0.0 {
        true => i32::MIN,
        false => number.abs().log10().floor() as i32,
    };
    graph.nodes().map(move |node| {
        let numbers = match node.operation() {
            OperationIr::NumericFloat(..) => node.scalars(),
            _ => Vec::new(),
        };
        let numbers: Vec<i32> = numbers.into_iter().map(magnitude).collect();
        hash(&|part| (leads[node.index()], &numbers).hash(part))
    })
}
