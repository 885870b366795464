//! Where a walk stops, and what is known there.

use std::collections::{HashMap, HashSet};

use burn::backend::ir::{ModuleOperationIr, OperationIr, TensorIr};
use burn_lean_graph::{Graph, Node, Product, Residual, Tensors, Walk};

use crate::layerwise::norm;
use crate::{LayerKind, Selection};

/// An operation to look at.
#[derive(Debug)]
pub(crate) enum Stop {
    /// The first product with a weight that is pruned.
    Product(Box<Site>),
    /// A BatchNorm, with the paths of its running statistics.
    Norm([String; 2]),
}

/// A product with a weight that is pruned.
#[derive(Debug)]
pub(crate) struct Site {
    pub(crate) product: Product,
    /// Position among the layers of the layout.
    pub(crate) layer: usize,
    /// Path of a bias that is added to its outputs and to nothing else.
    pub(crate) bias: Option<String>,
    /// A BatchNorm with running statistics follows, and nothing else reads the outputs.
    pub(crate) is_normalized: bool,
    /// Several operations read the weight.
    pub(crate) is_shared: bool,
    /// What is added to its outputs.
    pub(crate) residual: Option<Residual>,
}

impl Site {
    /// Whether a pattern along the reduction axis counts what is summed over: not where a parameter of
    /// one's own, or a layer's, is multiplied from another side.
    pub(crate) fn is_along(&self, selection: &Selection) -> bool {
        let layer = &selection.layout().layers()[self.layer];
        let product = &self.product;
        match (layer.kind, layer.reduction_axis()) {
            (_, None) => false,
            (LayerKind::Conv, _) => {
                let inputs: usize = layer.shape.iter().skip(1).product();
                !product.is_transposed() && product.inputs == inputs
            }
            (_, Some(axis)) => {
                // From one input of an output to the next in the parameter.
                let stride = match product.is_transposed() {
                    true => product.outputs,
                    false => 1,
                };
                layer.stride(axis) == stride && product.inputs.is_multiple_of(layer.shape[axis])
            }
        }
    }

    /// The places of a row of W as a pattern along the reduction axis counts them; `None` where they
    /// are in that order.
    pub(crate) fn order(&self, selection: &Selection) -> Option<Vec<usize>> {
        let layer = &selection.layout().layers()[self.layer];
        let places: usize = layer.shape.iter().skip(2).product();
        if layer.kind != LayerKind::Conv || places == 1 {
            return None;
        }
        let channels = self.product.inputs / places;
        let by_place = (0..places).flat_map(|place| (0..channels).map(move |c| (c, place)));
        Some(by_place.map(|(c, place)| c * places + place).collect())
    }
}

/// The stops of a walk, by operation.
///
/// BatchNorm layers at the paths of `folded` do no more than shift: they are no stops.
pub(crate) fn stops<O: Tensors>(
    walk: &Walk<O>,
    selection: &Selection,
    folded: &HashSet<String>,
) -> HashMap<usize, Stop> {
    let graph = walk.graph();
    let nodes: Vec<Node<'_>> = graph.nodes().collect();
    let mut stops = HashMap::new();
    for node in &nodes {
        if let Some(paths) = norm::statistics(graph, node)
            && !folded.contains(paths[0].rsplit_once('.').map_or("", |(norm, _)| norm))
        {
            stops.insert(node.index(), Stop::Norm(paths));
        }
    }
    let shared = walk.shared_weights();
    let mut seen = Vec::new();
    for product in walk.products() {
        let path = &product.parameter.path;
        let Some(layer) = selection.layer_at(path) else {
            continue;
        };
        // At the first of several products, the weight is replaced for all.
        if seen.contains(&layer) {
            continue;
        }
        seen.push(layer);
        let node = &nodes[product.node];
        let readers: Vec<Node<'_>> = node.readers().collect();
        let is_normalized = matches!(&readers[..], [one] if stops.contains_key(&one.index()));
        let is_shared = shared
            .iter()
            .any(|(_, nodes)| nodes.contains(&product.node));
        let site = Site {
            bias: bias(graph, node, &readers, product.outputs, path),
            layer,
            is_normalized,
            is_shared,
            residual: walk.residual(&product, product.node),
            product,
        };
        stops.insert(site.product.node, Stop::Product(Box::new(site)));
    }
    stops
}

/// The bias of a product: its own operand, or what its only reader adds.
pub(crate) fn bias(
    graph: &Graph,
    node: &Node<'_>,
    readers: &[Node<'_>],
    outputs: usize,
    weight: &str,
) -> Option<String> {
    use ModuleOperationIr::{Conv1d, Conv2d, Conv3d, Linear};
    let own = |bias: &Option<TensorIr>| bias.as_ref().map(|bias| bias.id);
    let id = match node.operation() {
        OperationIr::Module(Linear(o)) => own(&o.bias),
        OperationIr::Module(Conv1d(o)) => own(&o.bias),
        OperationIr::Module(Conv2d(o)) => own(&o.bias),
        OperationIr::Module(Conv3d(o)) => own(&o.bias),
        _ => None,
    };
    let is_bias = |shape: &[usize], path: &str| *shape == [outputs] && path != weight;
    let parameter = match (id, readers) {
        (Some(id), _) => graph.parameters().iter().find(|one| one.tensor == id),
        (None, [one]) if one.name() == "add" => {
            one.parameters().find(|one| is_bias(&one.shape, &one.path))
        }
        _ => None,
    }?;
    let reads = graph.nodes().filter(|node| !node.is_view());
    let readers = reads.filter(|node| node.parameters().any(|one| one.id == parameter.id));
    (is_bias(&parameter.shape, &parameter.path) && readers.count() == 1)
        .then(|| parameter.path.clone())
}
