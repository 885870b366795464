//! A forward pass over several batches in lockstep: operation by operation, all batches at each.

mod align;
mod collect;
mod lane;
mod operation;
mod parameters;
mod places;
mod product;
mod residual;
mod results;
mod rows;
mod sample;
mod script;
mod step;
mod users;

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use burn::backend::ir::TensorId;
use burn::backend::{DispatchDevice, DispatchTensor};
use burn::module::Module;

use crate::execute::{fill, store};
use crate::graph::describe::operands;
use crate::{Graph, GraphError, Node, Recording, Tensors, record};
use lane::{Lane, Spill};
use operation::compute_one;
use places::Places;
use script::{Script, Weights};

pub use lane::host;
pub use product::{Kernel, Product};
pub use residual::{Residual, ResidualNorm};
pub use results::Results;
pub use step::{Mark, Step};

/// Which values of the parameters: where only one is carried, both are that one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Pass {
    /// Those of the model.
    Original,
    /// Those that [`Step::replace`] has put in their place.
    Replaced,
}

/// One forward pass over several batches, all of them at the same operation.
///
/// Layer-wise methods look at what arrives at a layer over all batches, give it other weights, and
/// go on with what it then returns. [`advance`](Self::advance) computes up to the next operation
/// that is asked for; the [`Step`] that it returns shows the operands of all batches and replaces
/// parameters for the rest of the walk. Parameters, and what is computed from them alone, are held
/// once; of each batch, what later operations read.
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::tensor::{Device, Tensor};
/// use burn_lean_graph::{Pass, Walk};
///
/// let device = Device::flex();
/// let model = LinearConfig::new(2, 2).with_bias(false).init(&device);
/// let batches = [[[1.0, 2.0]], [[3.0, 4.0]]].map(|x| Tensor::<2>::from_data(x, &device));
/// let mut walk = Walk::record(&model, batches, |model, x| model.forward(x))?.with_original();
///
/// // The Gram matrix of what arrives at the only product, over both batches.
/// let mut step = walk.next_product()?.expect("a linear layer");
/// let product = step.product().expect("it is one");
/// assert_eq!(product.parameter.path, "weight");
/// let mut gram = Tensor::<2>::zeros([2, 2], &device);
/// for batch in 0..step.batches() {
///     step.rows(&product, batch, Pass::Replaced, 0, 1024, |x| {
///         gram = gram.clone() + x.clone().transpose().matmul(x);
///     })?;
/// }
/// assert_eq!(gram.to_data(), Tensor::<2>::from_data([[10.0, 14.0], [14.0, 20.0]], &device).to_data());
///
/// // Other weights from here on: `outputs × inputs`.
/// step.replace_weight(&product, Tensor::from_data([[1.0, 0.0], [0.0, 2.0]], &device))?;
/// walk.finish()?;
/// let second = walk.result(1, Pass::Replaced)?;
/// assert_eq!(second.to_data(), Tensor::<2>::from_data([[3.0, 8.0]], &device).to_data());
/// let model = walk.into_model(model);
/// # Ok::<(), burn_lean_graph::GraphError>(())
/// ```
#[derive(Debug)]
pub struct Walk<O> {
    scripts: Vec<Script>,
    lanes: Vec<(usize, Lane)>,
    forms: Vec<O>,
    weights: Weights,
    device: DispatchDevice,
    /// Carries original values beside replaced ones.
    forks: bool,
    /// Tensors whose values differ in the two passes.
    differing: HashSet<TensorId>,
    /// Where those have other things at a place, for each batch.
    places: Vec<Places>,
    /// Which parameters were replaced.
    touched: HashSet<usize>,
    /// The next operation to be computed.
    position: usize,
    /// It was shown in a step.
    shown: bool,
    folder: Option<PathBuf>,
}

impl<O: Tensors> Walk<O> {
    /// Records `forward` for each batch.
    ///
    /// # Errors
    ///
    /// Those of [`record`] and [`new`](Self::new).
    pub fn record<M: Module, I: Tensors>(
        model: &M,
        batches: impl IntoIterator<Item = I>,
        forward: impl Fn(&M, I) -> O,
    ) -> Result<Self, GraphError> {
        let recorded = batches.into_iter().map(|batch| {
            let recording = record(model, &batch, |model, batch| forward(model, batch))?;
            Ok((recording, batch, None))
        });
        Self::collect(model, recorded, 0, None, &[])
    }

    /// A walk over recordings of the evaluation of `model`, each with its inputs.
    ///
    /// Batches may differ in shape, not in their operations. A running state that the forward pass updates,
    /// a counter say, stays as it is in the model, for every batch.
    ///
    /// # Errors
    ///
    /// [`GraphError::NoBatch`] without a recording, [`GraphError::Training`] for one of a training
    /// pass, [`GraphError::Differs`] where operations are not those of the first batch, and
    /// [`GraphError::Mismatch`] where model or inputs are not the recorded ones.
    pub fn new<M: Module, I: Tensors>(
        model: &M,
        recordings: impl IntoIterator<Item = (Recording<O>, I)>,
    ) -> Result<Self, GraphError> {
        let recorded = recordings.into_iter();
        let recorded = recorded.map(|(recording, inputs)| Ok((recording, inputs, None)));
        Self::collect(model, recorded, 0, None, &[])
    }

    /// Carries the original values beside the replaced ones, for [`Pass::Original`]: what depends
    /// on a replaced parameter is computed twice from then on.
    pub fn with_original(mut self) -> Self {
        self.forks = true;
        self
    }

    /// Between two steps, keeps what is alive of each batch in files in `folder`, which is made where
    /// there is none: only one batch is in memory at a time. There are few files, however many batches, and they
    /// have no names on Unix: a process that is killed leaves none behind.
    ///
    /// # Errors
    ///
    /// [`GraphError::Spill`] where the folder cannot be written.
    pub fn spilling_to(mut self, folder: impl AsRef<Path>) -> Result<Self, GraphError> {
        let folder = folder.as_ref();
        std::fs::create_dir_all(folder)
            .and_then(|()| tempfile::tempfile_in(folder))
            .map_err(|error| lane::failed(folder, error))?;
        self.folder = Some(folder.into());
        Ok(self)
    }

    /// The operations, those of the first batch.
    pub fn graph(&self) -> &Graph {
        &self.scripts[0].graph
    }

    /// The number of batches.
    pub fn batches(&self) -> usize {
        self.lanes.len()
    }

    /// All products with a weight, in order.
    pub fn products(&self) -> Vec<Product> {
        let script = &self.scripts[0];
        let nodes = 0..script.graph.operations.len();
        nodes
            .filter_map(|node| product::product(script, node))
            .collect()
    }

    /// Bytes of activations that are in memory now, over all batches.
    pub fn live_bytes(&self) -> usize {
        self.lanes.iter().map(|(_, lane)| lane.bytes()).sum()
    }

    /// Computes up to the next operation of which `stop` says so; that one is computed by the next
    /// call. `None` after the last operation.
    ///
    /// # Errors
    ///
    /// [`GraphError::Operation`] for an operation that cannot be executed, [`GraphError::Spill`]
    /// for files that cannot be written or read, [`GraphError::Device`] where what goes into them cannot be read.
    pub fn advance(
        &mut self,
        stop: impl Fn(&Node<'_>) -> bool,
    ) -> Result<Option<Step<'_, O>>, GraphError> {
        let first = self.position + usize::from(self.shown);
        let graph = &self.scripts[0].graph;
        let count = graph.operations.len();
        let target = (first..count).find(|index| stop(&graph.node(*index)));
        self.compute_until(target.unwrap_or(count))?;
        self.shown = target.is_some();
        Ok(target.map(|node| Step { walk: self, node }))
    }

    /// [`advance`](Self::advance) to the next product with a weight.
    ///
    /// # Errors
    ///
    /// As [`advance`](Self::advance).
    pub fn next_product(&mut self) -> Result<Option<Step<'_, O>>, GraphError> {
        let nodes: HashSet<usize> = self.products().iter().map(|one| one.node).collect();
        self.advance(|node| nodes.contains(&node.index()))
    }

    /// Computes what is left.
    ///
    /// # Errors
    ///
    /// As [`advance`](Self::advance).
    pub fn finish(&mut self) -> Result<(), GraphError> {
        self.advance(|_| false).map(|_| ())
    }

    /// The result for a batch, once the walk is finished.
    ///
    /// # Errors
    ///
    /// [`GraphError::Unfinished`] before that.
    pub fn result(&mut self, batch: usize, pass: Pass) -> Result<O, GraphError> {
        if self.position < self.graph().operations.len() {
            return Err(GraphError::Unfinished);
        }
        let outputs = self.graph().outputs.clone();
        let tensors = outputs.iter().map(|id| self.value(batch, *id, pass));
        let tensors = tensors.collect::<Result<Vec<_>, _>>()?;
        Ok(fill(&self.forms[batch], tensors))
    }

    /// Whether each row of the float results so far, along their last axis, is that of the same thing in both passes, in
    /// a batch; see [`Step::rows_correspond`].
    pub fn results_correspond(&self, batch: usize) -> bool {
        let graph = self.graph();
        let made = graph.operations.iter().flat_map(|one| one.outputs());
        let mut results =
            made.filter(|one| one.dtype.is_float() && graph.outputs.contains(&one.id));
        results.all(|one| {
            let ranked = self.places[batch].of(one.id);
            let rows = ranked.len().saturating_sub(1).max(ranked.len().min(1));
            !ranked[..rows].contains(&true)
        })
    }

    /// `model` with the parameters that were replaced. What was not keeps its value.
    pub fn into_model<M: Module>(self, model: M) -> M {
        let weights = &self.weights;
        let touched = self.touched.iter().map(|index| {
            let value = weights.replaced.get(index);
            let value = value.unwrap_or(&weights.original[*index]).clone();
            (&self.graph().parameters[*index], value)
        });
        store(model, touched)
    }

    /// A place to come back to.
    pub fn mark(&self) -> Mark {
        Mark {
            lanes: self.lanes.clone(),
            differing: self.differing.clone(),
            position: self.position,
        }
    }

    /// Goes back to `mark`, with the parameters as they are now: the operation that was shown
    /// when it was made is the next one.
    pub fn rewind(&mut self, mark: &Mark) {
        self.lanes = mark.lanes.clone();
        self.differing = mark.differing.clone();
        self.position = mark.position;
        self.shown = false;
    }

    /// A product as a batch has it: names are the same in all batches, shapes may differ, and with them the padding
    /// of a convolution.
    fn of_batch(&self, one: &Product, batch: usize) -> Product {
        let (script, _) = &self.lanes[batch];
        product::product(&self.scripts[*script], one.node).unwrap_or_else(|| one.clone())
    }

    /// The value of a tensor that is alive.
    fn value(
        &mut self,
        batch: usize,
        id: TensorId,
        pass: Pass,
    ) -> Result<DispatchTensor, GraphError> {
        let (script, lane) = &self.lanes[batch];
        let script = &mut self.scripts[*script];
        if script.is_fixed(id) {
            return script.fixed(id, pass, &self.weights, &self.device);
        }
        let pass = match self.differing.contains(&id) {
            true => pass,
            false => Pass::Original,
        };
        let value = lane.get(id, pass, &self.device)?;
        value.ok_or(GraphError::NotAlive {
            tensor: id,
            operation: self.position,
        })
    }

    fn compute_until(&mut self, end: usize) -> Result<(), GraphError> {
        if end <= self.position {
            return Ok(());
        }
        // Which operations have other results in the replaced pass: the same for all batches.
        let mut twice = HashSet::new();
        let script = &self.scripts[0];
        for index in self.position..end {
            let operation = &script.graph.operations[index];
            let differs = |id: &TensorId| {
                self.differing.contains(id) || script.is_replaced(*id, &self.weights)
            };
            let fixed = operation.outputs().all(|output| script.is_fixed(output.id));
            if !fixed && self.forks && operands(&script.graph, operation).iter().any(differs) {
                twice.insert(index);
                self.differing
                    .extend(operation.outputs().map(|output| output.id));
            }
        }
        let each = self.lanes.len().div_ceil(lane::FILES);
        let lanes = self.lanes.chunks_mut(each);
        for (lanes, places) in lanes.zip(self.places.chunks_mut(each)) {
            let mut spill = self.folder.as_deref().map(Spill::new).transpose()?;
            for ((script, lane), places) in lanes.iter_mut().zip(places) {
                let script = &mut self.scripts[*script];
                let mut live = lane.take(&self.device)?;
                for index in self.position..end {
                    compute_one(
                        script,
                        index,
                        &mut live,
                        &self.weights,
                        &self.device,
                        twice.contains(&index),
                    )?;
                    if twice.contains(&index) {
                        let (script, weights) = (&*script, &self.weights);
                        let differs = |id: TensorId| {
                            self.differing.contains(&id) || script.is_replaced(id, weights)
                        };
                        places.note(&script.graph, index, &differs, &live)?;
                    }
                }
                *lane = match &mut spill {
                    Some(spill) => spill.write(live)?,
                    None => Lane::Memory(live),
                };
            }
        }
        self.position = end;
        for script in &mut self.scripts {
            script.forget_before(end);
        }
        Ok(())
    }

    /// Gives parameters other values, in all their places.
    fn put(&mut self, index: usize, value: DispatchTensor) {
        let id = self.graph().parameters[index].id;
        let parameters = self.graph().parameters.iter().enumerate();
        let same: HashSet<usize> = parameters
            .filter(|(_, one)| one.id == id && product::fits(&value, one))
            .map(|(index, _)| index)
            .collect();
        for index in &same {
            if self.forks {
                self.weights.replaced.insert(*index, value.clone());
            } else {
                self.weights.original[*index] = value.clone();
            }
        }
        for script in &mut self.scripts {
            script.forget(&same);
        }
        self.touched.extend(same);
    }
}
