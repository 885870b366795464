//! What a finished walk gives, and the walk on from there.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use burn::backend::ir::TensorId;
use burn::backend::{DispatchDevice, DispatchTensor};
use burn::module::Module;

use super::lane::{Lane, failed};
use super::places::{Known, Places};
use super::{Pass, Walk};
use crate::execute::fill;
use crate::{GraphError, Tensors, record};

/// What a finished [`Walk`] gives for each batch, where the walk had it: in memory, or in files.
///
/// It holds neither the recordings nor the parameters.
#[derive(Debug)]
pub struct Results<O> {
    lanes: Vec<Lane>,
    forms: Vec<O>,
    outputs: Vec<TensorId>,
    /// Those that depend on no input, of each batch.
    fixed: Vec<HashMap<(TensorId, Pass), DispatchTensor>>,
    differing: HashSet<TensorId>,
    /// Whether each output has other values in the two passes.
    differs: Vec<bool>,
    /// Where the things at the places of each output are others then, for each batch.
    known: Vec<Vec<Known>>,
    /// Both passes were carried.
    forks: bool,
    device: DispatchDevice,
}

impl<O: Tensors> Results<O> {
    /// The number of batches.
    pub fn batches(&self) -> usize {
        self.lanes.len()
    }

    /// The result for a batch, counted from 0.
    ///
    /// # Errors
    ///
    /// [`GraphError::Spill`] for a file that cannot be read.
    ///
    /// # Panics
    ///
    /// If there are fewer batches.
    pub fn get(&self, batch: usize, pass: Pass) -> Result<O, GraphError> {
        let tensors = self.outputs.iter().map(|id| {
            if let Some(value) = self.fixed[batch].get(&(*id, pass)) {
                return Ok(value.clone());
            }
            let pass = match self.differing.contains(id) {
                true => pass,
                false => Pass::Original,
            };
            let value = self.lanes[batch].get(*id, pass, &self.device)?;
            Ok(value.expect("results are alive until the end"))
        });
        let tensors = tensors.collect::<Result<Vec<_>, GraphError>>()?;
        Ok(fill(&self.forms[batch], tensors))
    }
}

impl<O: Tensors> Walk<O> {
    /// A walk through the next part of a model: what arrives are the results of the part before it, of
    /// the [replaced](Pass::Replaced) pass and, where both were carried
    /// ([`with_original`](Self::with_original)), of the original one, both of which are carried on.
    ///
    /// With `folder`, batches are there from the start, as by [`spilling_to`](Self::spilling_to).
    ///
    /// # Errors
    ///
    /// Those of [`record`](Self::record) and [`spilling_to`](Self::spilling_to).
    pub fn record_after<M: Module, I: Tensors>(
        model: &M,
        before: &Results<I>,
        forward: impl Fn(&M, I) -> O,
        folder: Option<&Path>,
    ) -> Result<Self, GraphError> {
        let recorded = (0..before.batches()).map(|batch| {
            let arrives = before.get(batch, Pass::Replaced)?;
            let recording = record(model, &arrives, |model, x| forward(model, x))?;
            let original = match before.forks {
                true => Some(before.get(batch, Pass::Original)?),
                false => None,
            };
            Ok((recording, arrives, original))
        });
        if let Some(folder) = folder {
            std::fs::create_dir_all(folder).map_err(|error| failed(folder, error))?;
        }
        let mut walk = Self::collect(model, recorded, before.batches(), folder, &before.differs)?;
        let inputs = walk.graph().inputs.clone();
        for (places, known) in walk.places.iter_mut().zip(&before.known) {
            let arrive = inputs.iter().zip(known);
            arrive.for_each(|(id, known)| places.arrive(*id, known));
        }
        Ok(walk)
    }

    /// `model` as by [`into_model`](Self::into_model), and what the walk gives.
    ///
    /// # Errors
    ///
    /// [`GraphError::Unfinished`] before the walk is finished, and those of [`result`](Self::result).
    pub fn into_results<M: Module>(mut self, model: M) -> Result<(M, Results<O>), GraphError> {
        if self.position < self.graph().operations.len() {
            return Err(GraphError::Unfinished);
        }
        let outputs = self.graph().outputs.clone();
        let mut fixed = Vec::with_capacity(self.lanes.len());
        for batch in 0..self.lanes.len() {
            let script = &self.scripts[self.lanes[batch].0];
            let ids = outputs.iter().copied().filter(|id| script.is_fixed(*id));
            let mut values = HashMap::new();
            for id in ids.collect::<Vec<_>>() {
                for pass in [Pass::Original, Pass::Replaced] {
                    values.insert((id, pass), self.value(batch, id, pass)?);
                }
            }
            fixed.push(values);
        }
        let of_outputs = |places: &Places| -> Vec<Known> {
            let known = outputs.iter().map(|id| places.known(*id));
            known.collect()
        };
        let known = self.places.iter().map(of_outputs).collect();
        let differs = outputs.iter().map(|id| {
            self.differing.contains(id) || self.scripts[0].is_replaced(*id, &self.weights)
        });
        let results = Results {
            differs: differs.collect(),
            known,
            lanes: std::mem::take(&mut self.lanes)
                .into_iter()
                .map(|(_, lane)| lane)
                .collect(),
            forms: std::mem::take(&mut self.forms),
            outputs,
            fixed,
            differing: std::mem::take(&mut self.differing),
            forks: self.forks,
            device: self.device.clone(),
        };
        Ok((self.into_model(model), results))
    }
}
