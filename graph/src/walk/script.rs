//! One distinct recording of a walk: its operations, and what follows from parameters alone.

use std::collections::{BTreeSet, HashMap, HashSet};

use burn::backend::ir::{BaseOperationIr, OperationIr, TensorId, TensorIr};
use burn::backend::{DispatchDevice, DispatchTensor};

use super::Pass;
use crate::execute::{compute, upload};
use crate::graph::describe::operands;
use crate::interpret::Operands;
use crate::{Graph, GraphError};

/// The values of the parameters, in the order of the graph.
#[derive(Debug, Clone)]
pub(super) struct Weights {
    pub(super) original: Vec<DispatchTensor>,
    /// Those that were replaced, where the walk also carries the original ones.
    pub(super) replaced: HashMap<usize, DispatchTensor>,
}

/// The operations, with tensors that depend on no input kept apart: they are computed when they
/// are asked for, once for all batches.
#[derive(Debug, Clone)]
pub(super) struct Script {
    pub(super) graph: Graph,
    /// The parameters that each tensor without an input depends on.
    sources: HashMap<TensorId, BTreeSet<usize>>,
    made_by: HashMap<TensorId, usize>,
    last_read: HashMap<TensorId, usize>,
    views: HashMap<TensorId, View>,
    cache: HashMap<(TensorId, Pass), DispatchTensor>,
}

/// A tensor with the numbers of a parameter.
#[derive(Debug, Clone)]
pub(super) struct View {
    pub(super) parameter: usize,
    /// For each dimension the dimension of the parameter; `None` for one of size 1 or repeated.
    pub(super) axes: Vec<Option<usize>>,
}

impl Script {
    pub(super) fn new(graph: Graph) -> Self {
        let mut sources: HashMap<TensorId, BTreeSet<usize>> = HashMap::new();
        let mut views = HashMap::new();
        for (index, parameter) in graph.parameters.iter().enumerate() {
            sources.insert(parameter.tensor, BTreeSet::from([index]));
            let axes = (0..parameter.shape.len()).map(Some).collect();
            views.insert(
                parameter.tensor,
                View {
                    parameter: index,
                    axes,
                },
            );
        }
        for id in graph.constants.keys() {
            sources.insert(*id, BTreeSet::new());
        }
        let mut made_by = HashMap::new();
        let mut last_read = HashMap::new();
        for (index, operation) in graph.operations.iter().enumerate() {
            let ids = operands(&graph, operation);
            last_read.extend(ids.iter().map(|id| (*id, index)));
            if !graph.node(index).is_random() && ids.iter().all(|id| sources.contains_key(id)) {
                let from: BTreeSet<usize> = ids.iter().flat_map(|id| sources[id].clone()).collect();
                for output in operation.outputs() {
                    sources.insert(output.id, from.clone());
                    made_by.insert(output.id, index);
                }
            }
            if let Some((output, view)) = view_of(operation, &views) {
                views.insert(output, view);
            }
        }
        Self {
            graph,
            sources,
            made_by,
            last_read,
            views,
            cache: HashMap::new(),
        }
    }

    /// Whether a tensor depends on no input.
    pub(super) fn is_fixed(&self, id: TensorId) -> bool {
        self.sources.contains_key(&id)
    }

    pub(super) fn view(&self, id: TensorId) -> Option<&View> {
        self.views.get(&id)
    }

    /// Whether a tensor that depends on no input has another value for replaced parameters.
    pub(super) fn is_replaced(&self, id: TensorId, weights: &Weights) -> bool {
        let sources = self.sources.get(&id);
        sources.is_some_and(|from| from.iter().any(|one| weights.replaced.contains_key(one)))
    }

    /// The value of a tensor that depends on no input.
    pub(super) fn fixed(
        &mut self,
        id: TensorId,
        pass: Pass,
        weights: &Weights,
        device: &DispatchDevice,
    ) -> Result<DispatchTensor, GraphError> {
        let pass = match self.is_replaced(id, weights) {
            true => pass,
            false => Pass::Original,
        };
        if let Some(value) = self.cache.get(&(id, pass)) {
            return Ok(value.clone());
        }
        if let Some(index) = self
            .graph
            .parameters
            .iter()
            .position(|one| one.tensor == id)
        {
            let replaced = weights.replaced.get(&index);
            let replaced = replaced.filter(|_| pass == Pass::Replaced);
            return Ok(replaced.unwrap_or(&weights.original[index]).clone());
        }
        if let Some(data) = self.graph.constants.get(&id) {
            let value = upload(data.clone(), device);
            self.cache.insert((id, pass), value.clone());
            return Ok(value);
        }
        let operation = self.graph.operations[self.made_by[&id]].clone();
        let mut values = HashMap::new();
        for operand in operation.inputs() {
            let value = self.fixed(operand.id, pass, weights, device)?;
            values.insert(operand.id, value);
        }
        let mut operands = Given {
            values,
            made: Vec::new(),
            device,
        };
        compute(self.graph.node(self.made_by[&id]), &mut operands)?;
        for (id, value) in operands.made {
            self.cache.insert((id, pass), value);
        }
        Ok(self.cache[&(id, pass)].clone())
    }

    /// Forgets what no operation from `position` on reads.
    pub(super) fn forget_before(&mut self, position: usize) {
        let (last, outputs) = (&self.last_read, &self.graph.outputs);
        self.cache.retain(|(id, _), _| {
            outputs.contains(id) || last.get(id).is_some_and(|index| *index >= position)
        });
    }

    /// Forgets what was computed from these parameters.
    pub(super) fn forget(&mut self, parameters: &HashSet<usize>) {
        let sources = &self.sources;
        self.cache
            .retain(|(id, _), _| sources[id].iter().all(|one| !parameters.contains(one)));
    }
}

/// Operands that were collected beforehand.
struct Given<'a> {
    values: HashMap<TensorId, DispatchTensor>,
    made: Vec<(TensorId, DispatchTensor)>,
    device: &'a DispatchDevice,
}

impl Operands for Given<'_> {
    fn float(&mut self, tensor: &TensorIr) -> DispatchTensor {
        self.values[&tensor.id].clone()
    }
    fn set(&mut self, tensor: &TensorIr, value: DispatchTensor) {
        self.made.push((tensor.id, value));
    }
    fn device(&self) -> DispatchDevice {
        self.device.clone()
    }
}

/// The result of an operation that shows a parameter in another way.
fn view_of(operation: &OperationIr, views: &HashMap<TensorId, View>) -> Option<(TensorId, View)> {
    let OperationIr::BaseFloat(base) = operation else {
        return None;
    };
    let (input, output) = match base {
        BaseOperationIr::SwapDims(o) => (&o.input, &o.out),
        BaseOperationIr::Permute(o) => (&o.input, &o.out),
        BaseOperationIr::Reshape(o) | BaseOperationIr::Expand(o) => (&o.input, &o.out),
        BaseOperationIr::Cast(o) => (&o.input, &o.out),
        _ => return None,
    };
    let View { parameter, axes } = views.get(&input.id)?;
    let axes = match base {
        BaseOperationIr::SwapDims(o) => {
            let mut axes = axes.clone();
            axes.swap(o.dim1, o.dim2);
            axes
        }
        BaseOperationIr::Permute(o) => o.axes.iter().map(|axis| axes[*axis]).collect(),
        BaseOperationIr::Expand(_) => {
            let added = output.shape.num_dims() - axes.len();
            let (old, new) = (input.shape.to_vec(), output.shape.to_vec());
            let kept = (0..axes.len()).map(|d| axes[d].filter(|_| old[d] == new[d + added]));
            (0..added).map(|_| None).chain(kept).collect()
        }
        BaseOperationIr::Reshape(_) => {
            reshaped(&input.shape.to_vec(), axes, &output.shape.to_vec())?
        }
        _ => axes.clone(),
    };
    let view = View {
        parameter: *parameter,
        axes,
    };
    Some((output.id, view))
}

/// The axes after a reshape that only adds or removes dimensions of size 1.
fn reshaped(old: &[usize], axes: &[Option<usize>], new: &[usize]) -> Option<Vec<Option<usize>>> {
    let mut sizes = old.iter().zip(axes).filter(|(size, _)| **size != 1);
    let mut result = Vec::with_capacity(new.len());
    for size in new {
        result.push(match size {
            1 => None,
            _ => {
                let (old, axis) = sizes.next()?;
                if old != size {
                    return None;
                }
                *axis
            }
        });
    }
    sizes.next().is_none().then_some(result)
}
