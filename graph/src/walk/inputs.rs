//! Inputs that differ between the two passes.

use super::lane::Lane;
use super::{Pass, Walk};
use crate::tensors::Given;
use crate::{GraphError, Tensors};

impl<O: Tensors> Walk<O> {
    /// Lets [`Pass::Original`] start from other inputs than those given before, which are
    /// [`Pass::Replaced`]'s from now on.
    ///
    /// For a part of a model whose predecessors are compressed already: the batches of
    /// [`record`](Self::record) are what the compressed ones give, these are what the original ones
    /// do. Both are carried, as by [`with_original`](Self::with_original).
    ///
    /// # Errors
    ///
    /// [`GraphError::Mismatch`] unless there is one for each batch, of the same shapes and dtypes;
    /// [`GraphError::Started`] once the walk has begun.
    pub fn with_original_inputs<I: Tensors>(
        mut self,
        inputs: impl IntoIterator<Item = I>,
    ) -> Result<Self, GraphError> {
        if self.position > 0 || self.shown {
            return Err(GraphError::Started);
        }
        let mut inputs = inputs.into_iter();
        for (batch, (script, lane)) in self.lanes.iter_mut().enumerate() {
            let ids = &self.scripts[*script].graph.inputs;
            let mut live = lane.take(&self.device)?;
            let mut given = Given::default();
            if let Some(inputs) = inputs.next() {
                let _ = inputs.map_tensors(&mut given);
            }
            let replaced = ids.iter().map(|id| &live[&(*id, Pass::Original)]);
            let expected: Vec<_> = replaced.map(crate::capture::signature).collect();
            if given.signature != expected {
                return Err(GraphError::Mismatch {
                    recorded: format!("inputs {expected:?}"),
                    found: format!("{:?} as originals of batch {batch}", given.signature),
                });
            }
            for (id, original) in ids.iter().zip(given.tensors) {
                if let Some(replaced) = live.insert((*id, Pass::Original), original) {
                    live.insert((*id, Pass::Replaced), replaced);
                }
                self.differing.insert(*id);
            }
            *lane = Lane::Memory(live);
        }
        if inputs.next().is_some() {
            return Err(GraphError::Mismatch {
                recorded: format!("{} batches", self.lanes.len()),
                found: "originals of more".into(),
            });
        }
        self.forks = true;
        Ok(self)
    }
}
