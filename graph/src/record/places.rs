//! Which tensors of a model a walk has met.

use burn_lean_reparam::Trail;
use rustc_hash::FxHashMap as HashMap;

use crate::graph::ParamPlace;

/// Counts the tensors at each path. Walks that meet all tensors of a model in its order agree.
#[derive(Debug, Default)]
pub(crate) struct Places(HashMap<String, usize>);

impl Places {
    /// The place of the tensor that the walk has met; to be asked for each one once.
    pub(crate) fn meet(&mut self, at: &Trail) -> ParamPlace {
        let path = at.path();
        let met = self.0.entry(path.clone()).or_default();
        let place = (path, *met);
        *met += 1;
        place
    }
}
