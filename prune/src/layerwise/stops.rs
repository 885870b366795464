//! Where a walk stops, and what is known there.

use std::collections::{HashMap, HashSet};

use burn::backend::ir::{
    FloatOperationIr, ModuleOperationIr, NumericOperationIr, OperationIr, TensorIr,
};
use burn_lean_graph::{Graph, Node, Parameter, Product, Residual, Tensors, Walk};

use crate::layerwise::norm;
use crate::{LayerKind, Selection};

/// An operation to look at.
#[derive(Debug)]
pub(crate) enum Stop {
    /// The first product with a weight that is pruned.
    Product(Box<Site>),
    /// A BatchNorm whose running statistics are measured anew, with their paths.
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
    /// A BatchNorm whose statistics are measured anew follows, and nothing else reads the outputs.
    pub(crate) is_normalized: bool,
    /// Several operations read the weight, a lookup among them say.
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
/// BatchNorm layers at the paths of `still` keep their statistics: they are no stops.
pub(crate) fn stops<O: Tensors>(
    walk: &Walk<O>,
    selection: &Selection,
    still: &HashSet<String>,
) -> HashMap<usize, Stop> {
    let graph = walk.graph();
    let nodes: Vec<Node<'_>> = graph.nodes().collect();
    let mut stops = HashMap::new();
    for node in &nodes {
        if let Some(paths) = norm::statistics(graph, node)
            && !still.contains(norm::layer(&paths))
        {
            stops.insert(node.index(), Stop::Norm(paths));
        }
    }
    let layers = selection.layers_by_path();
    let mut seen = HashSet::new();
    for product in walk.products() {
        let Some(layer) = layers.get(product.parameter.path.as_str()).copied() else {
            continue;
        };
        // At the first of several products, the weight is replaced for all.
        if !seen.insert(layer) {
            continue;
        }
        let node = &nodes[product.node];
        let readers: Vec<Node<'_>> = node.readers().collect();
        let is_normalized = matches!(&readers[..], [one] if stops.contains_key(&one.index()));
        let is_shared = graph.users(product.parameter.id).count() > 1;
        let site = Site {
            bias: bias(graph, &product),
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

/// The bias of a product: its own operand, or what its only reader adds, one number to each output.
pub(crate) fn bias(graph: &Graph, product: &Product) -> Option<String> {
    use ModuleOperationIr::{Conv1d, Conv2d, Conv3d, Linear};
    let node = graph.node(product.node);
    let own = |bias: &Option<TensorIr>| bias.as_ref().map(|bias| bias.id);
    let id = match node.operation() {
        OperationIr::Module(Linear(o)) => own(&o.bias),
        OperationIr::Module(Conv1d(o)) => own(&o.bias),
        OperationIr::Module(Conv2d(o)) => own(&o.bias),
        OperationIr::Module(Conv3d(o)) => own(&o.bias),
        _ => None,
    };
    let is_bias =
        |one: &Parameter| one.shape == [product.outputs] && one.path != product.parameter.path;
    let parameter = match id {
        Some(id) => graph.parameters().iter().find(|one| one.tensor == id),
        None => {
            let readers: Vec<Node<'_>> = node.readers().collect();
            let [only] = readers[..] else {
                return None;
            };
            if !adds_to_each_output(&node, &only, product) {
                return None;
            }
            only.parameters().find(|one| is_bias(one))
        }
    }?;
    let is_read_once = graph.users(parameter.id).count() == 1;
    (is_bias(parameter) && is_read_once).then(|| parameter.path.clone())
}

/// Whether `reader` adds a tensor to the outputs of a product at `node` that has as many numbers as there are
/// outputs, along their axis: positions may be as many.
fn adds_to_each_output(node: &Node<'_>, reader: &Node<'_>, product: &Product) -> bool {
    let OperationIr::NumericFloat(_, NumericOperationIr::Add(sum)) = reader.operation() else {
        return false;
    };
    let mut made = node.operation().outputs();
    let added = match made.any(|out| out.id == sum.lhs.id) {
        true => &sum.rhs.shape,
        false => &sum.lhs.shape,
    };
    let rank = added.num_dims();
    let axis = match node.operation() {
        _ if product.is_convolution() => Some(1),
        // With the weight on the left.
        OperationIr::Float(_, FloatOperationIr::Matmul(o)) if o.rhs.id == product.input_id() => {
            rank.checked_sub(2)
        }
        _ => rank.checked_sub(1),
    };
    let expected = |at: usize| if Some(at) == axis { product.outputs } else { 1 };
    axis.is_some_and(|axis| axis < rank) && (0..rank).all(|at| added[at] == expected(at))
}
