//! Finds the uses of prunable weights in a recorded loss.

use std::collections::HashMap;

use burn::backend::ir::{
    BaseOperationIr, FloatOperationIr, ModuleOperationIr, OperationIr, TensorId, TensorIr,
};
use burn::backend::ops::UnfoldOptions;
use burn_lean_graph::{Graph, Node};

use crate::Selection;
use crate::fisher::uses::{Kind, Use};
use crate::fisher::view::View;

/// The uses of prunable weights, by the position of the operation in the graph; fails with the reason
/// where what rows are made from is not known of a use, or where what a weight meets does not begin
/// with that many examples.
pub(crate) fn uses(
    graph: &Graph,
    selection: &Selection,
    examples: usize,
) -> Result<HashMap<usize, Use>, String> {
    let layers = selection.layers_by_path();
    let weights = graph.parameters().iter().filter_map(|parameter| {
        let position = *layers.get(parameter.path.as_str())?;
        Some((parameter.tensor, (position, View::default())))
    });
    let mut finder = Finder {
        weights: weights.collect(),
        examples,
    };
    let mut found = HashMap::new();
    for node in graph.nodes() {
        if let Some(of_weight) = finder.find(node)? {
            found.insert(node.index(), of_weight);
        }
    }
    Ok(found)
}

/// Follows weights through a graph.
struct Finder {
    /// Weights and views of them, by their tensors: position in the layout.
    weights: HashMap<TensorId, (usize, View)>,
    examples: usize,
}

impl Finder {
    /// The use that an operation makes of a weight, if it makes one.
    fn find(&mut self, node: Node<'_>) -> Result<Option<Use>, String> {
        let mut read = node.operation().inputs().filter(|input| self.is(input));
        let Some(weight) = read.next() else {
            return Ok(None);
        };
        let unknown = || {
            let paths: Vec<&str> = node.parameters().map(|one| one.path.as_str()).collect();
            format!(
                "a weight is used by {}, of which gradients of single examples are not known: `{}`",
                node.name(),
                paths.join("`, `")
            )
        };
        if read.next().is_some() {
            return Err(unknown());
        }
        let (layer, view) = self.weights[&weight.id].clone();
        let (operand, kind) = match node.operation() {
            OperationIr::BaseFloat(operation) => {
                if let Some(operand) = lookup(operation, weight) {
                    operand
                } else {
                    let view = view.then(operation).ok_or_else(unknown)?;
                    for output in node.operation().outputs() {
                        self.weights.insert(output.id, (layer, view.clone()));
                    }
                    return Ok(None);
                }
            }
            OperationIr::Float(_, FloatOperationIr::Matmul(op)) => {
                let columns = op.lhs.id == weight.id;
                let operand = match columns {
                    true => &op.rhs,
                    false => &op.lhs,
                };
                (operand, matrix(weight, columns).ok_or_else(unknown)?)
            }
            OperationIr::Module(operation) => module(operation, weight).ok_or_else(unknown)?,
            _ => return Err(unknown()),
        };
        self.batch_first(operand)?;
        let mut found = Use {
            layer,
            view,
            operand: operand.id,
            kind,
        };
        found.turn();
        Ok(Some(found))
    }

    fn is(&self, tensor: &TensorIr) -> bool {
        self.weights.contains_key(&tensor.id)
    }

    /// The first axis that is longer than 1 counts examples, or examples times positions.
    fn batch_first(&self, x: &TensorIr) -> Result<(), String> {
        let first = x.shape.iter().copied().find(|length| *length != 1);
        match first.unwrap_or(1) % self.examples {
            0 => Ok(()),
            _ => Err(format!(
                "the input of a layer has the shape {:?}, which does not begin with {} examples",
                x.shape.to_vec(),
                self.examples
            )),
        }
    }
}

/// Lines of a table that are chosen by their numbers.
fn lookup<'a>(operation: &'a BaseOperationIr, weight: &TensorIr) -> Option<(&'a TensorIr, Kind)> {
    match operation {
        BaseOperationIr::Select(op) if op.dim == 0 && op.tensor.id == weight.id => {
            Some((&op.indices, table(weight)))
        }
        _ => None,
    }
}

fn table(weight: &TensorIr) -> Kind {
    let length = weight.shape[0];
    Kind::Lookup {
        length,
        width: weight.shape.num_elements() / length,
    }
}

/// A product with a weight, unless that is a batch of matrices; as the first factor it meets columns.
fn matrix(weight: &TensorIr, columns: bool) -> Option<Kind> {
    let rank = weight.shape.num_dims();
    let (high, wide) = (weight.shape[rank - 2], weight.shape[rank - 1]);
    if high * wide != weight.shape.num_elements() {
        return None;
    }
    let (input, output) = match columns {
        false => (high, wide),
        true => (wide, high),
    };
    Some(Kind::Product {
        input,
        output,
        transposed: columns,
        columns,
    })
}

/// What a layer does with its weight; `None` where that is not known.
fn module<'a>(operation: &'a ModuleOperationIr, weight: &TensorIr) -> Option<(&'a TensorIr, Kind)> {
    use ModuleOperationIr::*;
    let is = |tensor: &TensorIr| tensor.id == weight.id;
    Some(match operation {
        Linear(op) if is(&op.weight) => (&op.x, matrix(weight, false)?),
        Embedding(op) if is(&op.weights) => (&op.indices, table(weight)),
        Conv2d(op) if is(&op.weight) => {
            let o = &op.options;
            let padding = o.padding.map(|(before, _)| before);
            let options = UnfoldOptions::new(o.stride, padding, o.dilation);
            (&op.x, kernel(weight, options, o.groups, false))
        }
        Conv1d(op) if is(&op.weight) => {
            let o = &op.options;
            let padding = o.padding.map(|(before, _)| before);
            let options = over_width(o.stride, padding, o.dilation);
            (&op.x, kernel(weight, options, o.groups, false))
        }
        ConvTranspose2d(op) if is(&op.weight) => {
            let o = &op.options;
            let options = UnfoldOptions::new(o.stride, o.padding, o.dilation);
            (&op.x, kernel(weight, options, o.groups, true))
        }
        ConvTranspose1d(op) if is(&op.weight) => {
            let o = &op.options;
            let options = over_width(o.stride, o.padding, o.dilation);
            (&op.x, kernel(weight, options, o.groups, true))
        }
        _ => return None,
    })
}

/// A window that moves along one axis.
fn over_width(
    [stride]: [usize; 1],
    [padding]: [usize; 1],
    [dilation]: [usize; 1],
) -> UnfoldOptions {
    UnfoldOptions::new([1, stride], [0, padding], [1, dilation])
}

fn kernel(weight: &TensorIr, options: UnfoldOptions, groups: usize, transposed: bool) -> Kind {
    // Of 1-d tensors the height is left out.
    let rank = weight.shape.num_dims();
    let height = match rank {
        3 => 1,
        _ => weight.shape[2],
    };
    Kind::Kernel {
        kernel: [height, weight.shape[rank - 1]],
        options,
        groups,
        transposed,
    }
}
