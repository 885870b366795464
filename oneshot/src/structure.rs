//! What a recorded forward pass says of layers: which read the same, residual sums, and where factors
//! can move between layers.

use std::collections::{HashMap, HashSet};

use burn::backend::ir::{FloatOperationIr, ModuleOperationIr, OperationIr, TensorId, TensorIr};
use burn_lean_graph::{Graph, Node, Product};

/// What divides the features that a group reads: parameters with one number for each of them, and
/// rows of a matrix.
#[derive(Debug, Clone)]
pub(crate) struct Producer {
    pub(crate) vectors: Vec<String>,
    pub(crate) matrix: Option<Box<Product>>,
    /// The first operation that reads one of them.
    pub(crate) first: usize,
}

/// Who makes and who reads each tensor.
pub(crate) struct Structure<'a> {
    graph: &'a Graph,
    makers: HashMap<TensorId, usize>,
    /// Parameters and views of them, by the path of the parameter.
    weights: HashMap<TensorId, &'a str>,
    products: HashMap<usize, &'a Product>,
}

impl<'a> Structure<'a> {
    pub(crate) fn new(graph: &'a Graph, products: &'a [Product]) -> Self {
        let mut weights: HashMap<TensorId, &str> = graph
            .parameters()
            .iter()
            .map(|one| (one.tensor, one.path.as_str()))
            .collect();
        let mut makers = HashMap::new();
        for node in graph.nodes() {
            for output in node.operation().outputs() {
                makers.insert(output.id, node.index());
                if let (true, Some(input)) = (node.is_view(), node.operation().inputs().next())
                    && let Some(path) = weights.get(&input.id)
                {
                    weights.insert(output.id, path);
                }
            }
        }
        Self {
            graph,
            makers,
            weights,
            products: products.iter().map(|one| (one.node, one)).collect(),
        }
    }

    fn node(&self, index: usize) -> Node<'a> {
        self.graph
            .nodes()
            .nth(index)
            .expect("makers are operations")
    }

    /// The only operation that reads the results of another one, if it is no output.
    fn only_reader(&self, node: Node<'a>) -> Option<Node<'a>> {
        let mut readers = node.readers();
        let first = readers.next()?;
        let is_output = node
            .operation()
            .outputs()
            .any(|one| self.graph.outputs().contains(&one.id));
        (readers.next().is_none() && !is_output).then_some(first)
    }

    /// Whether two products read the same rows: features of the same tensor, or the same patches of it.
    pub(crate) fn reads_same_rows(&self, one: &Product, other: &Product) -> bool {
        let same_rows = match one.is_convolution() || other.is_convolution() {
            true => same_patches(self.node(one.node), self.node(other.node)),
            false => self.reads_last_axis(one) == self.reads_last_axis(other),
        };
        same_rows && one.inputs == other.inputs && self.source(one) == self.source(other)
    }

    /// Whether the features that a product reads are the last axis of its operand.
    fn reads_last_axis(&self, product: &Product) -> bool {
        match self.node(product.node).operation() {
            OperationIr::Float(_, FloatOperationIr::Matmul(o)) => o.lhs.id == product.input_id(),
            OperationIr::Module(ModuleOperationIr::Linear(_)) => true,
            _ => false,
        }
    }

    /// The tensor that a product reads. Burn's linear layers give that of several sequences the shape
    /// of rows, each for itself: where features stay the last axis, the one before that.
    fn source(&self, product: &Product) -> TensorId {
        let mut id = product.input_id();
        if self.reads_last_axis(product) {
            let maker = |id: TensorId| self.makers.get(&id).map(|maker| self.node(*maker));
            while let Some(rows) = maker(id).and_then(same_features) {
                id = rows;
            }
        }
        id
    }

    /// Where the input of products that read the same comes from, if nothing else reads it, the parameters that make it or the
    /// weights of these, and features are only rescaled or rectified on the way.
    pub(crate) fn producer(&self, group: &[&Product]) -> Option<Producer> {
        self.origin(group).filter(|producer| {
            let matrix = producer.matrix.iter().map(|one| &one.parameter.path);
            let weights = group.iter().map(|one| &one.parameter.path);
            let mut paths = producer.vectors.iter().chain(matrix).chain(weights);
            paths.all(|path| self.is_read_once(path))
        })
    }

    fn origin(&self, group: &[&Product]) -> Option<Producer> {
        let product = group[0];
        let features = product.inputs;
        if !self.reads_last_axis(product) {
            return None;
        }
        let nodes: HashSet<usize> = group.iter().map(|one| one.node).collect();
        let mut at = self.node(*self.makers.get(&self.source(product))?);
        // All that read it, through views, are of the group.
        let mut open: Vec<Node<'a>> = vec![at];
        while let Some(node) = open.pop() {
            if node
                .operation()
                .outputs()
                .any(|one| self.graph.outputs().contains(&one.id))
            {
                return None;
            }
            for reader in node.readers() {
                if reader.name() == "reshape" {
                    open.push(reader);
                } else if !nodes.contains(&reader.index()) {
                    return None;
                }
            }
        }
        let mut vectors: Vec<String> = Vec::new();
        loop {
            // Elsewhere a factor for each feature would be one for each place.
            if !has_features_last(at.operation().outputs().next()?, features) {
                return None;
            }
            if let Some(product) = self.products.get(&at.index()) {
                let usable = self.reads_last_axis(product) && product.outputs == features;
                return usable.then(|| Producer {
                    vectors,
                    first: at.index(),
                    matrix: Some(Box::new((*product).clone())),
                });
            }
            let mut inputs = at.operation().inputs();
            let first = inputs.next()?.id;
            let next = match at.name() {
                "reshape" | "relu" => first,
                "layer_norm" => {
                    // Rows may have been put together since.
                    vectors.extend(
                        inputs
                            .map(|one| self.vector(one, features))
                            .collect::<Option<Vec<_>>>()?,
                    );
                    return Some(Producer {
                        vectors,
                        matrix: None,
                        first: at.index(),
                    });
                }
                "mul" | "add" => {
                    let (first, second) = (at.operation().inputs().next()?, inputs.next()?);
                    let is_weight = |one: &TensorIr| self.weights.contains_key(&one.id);
                    let (weight, other) = match (is_weight(first), is_weight(second)) {
                        (true, false) => (Some(first), second.id),
                        (false, true) => (Some(second), first.id),
                        _ => (None, first.id),
                    };
                    match weight {
                        Some(weight) => {
                            vectors.push(self.vector(weight, features)?);
                            if at.name() == "mul" {
                                return Some(Producer {
                                    vectors,
                                    matrix: None,
                                    first: at.index(),
                                });
                            }
                            other
                        }
                        // A gate: one of the factors comes straight from a product.
                        None if at.name() == "mul" => {
                            let mut straight = [second, first].into_iter();
                            let fits = |one: &&TensorIr| {
                                has_features_last(one, features) && self.is_straight(one.id)
                            };
                            straight.find(fits)?.id
                        }
                        None => return None,
                    }
                }
                _ => return None,
            };
            at = self.node(*self.makers.get(&next)?);
            // What is between is read by nothing else.
            self.only_reader(at)?;
        }
    }

    /// Whether a tensor is what a product gives, with a bias at most.
    fn is_straight(&self, id: TensorId) -> bool {
        let Some(maker) = self.makers.get(&id) else {
            return false;
        };
        if self.products.contains_key(maker) {
            return true;
        }
        let node = self.node(*maker);
        let mut inputs = node.operation().inputs();
        match (node.name(), inputs.next(), inputs.next()) {
            ("reshape", Some(input), None) => self.is_straight(input.id),
            ("add", Some(a), Some(b)) => match self.weights.contains_key(&b.id) {
                true => self.is_straight(a.id),
                false => self.weights.contains_key(&a.id) && self.is_straight(b.id),
            },
            _ => false,
        }
    }

    /// Whether one operation alone reads a parameter, under whatever path.
    fn is_read_once(&self, path: &str) -> bool {
        let mut parameters = self.graph.parameters().iter();
        let Some(own) = parameters.find(|one| one.path == path) else {
            return false;
        };
        self.graph.users(own.id).count() == 1
    }

    /// The path of the parameter that an operand is, if that is a vector with one number for each of so
    /// many features, along the last axis and in their order: a gain for each place of a sequence may be as
    /// long.
    fn vector(&self, operand: &TensorIr, features: usize) -> Option<String> {
        let path = *self.weights.get(&operand.id)?;
        let mut parameters = self.graph.parameters().iter();
        let parameter = parameters.find(|one| one.path == path)?;
        let mut id = operand.id;
        while let Some(maker) = self.makers.get(&id) {
            let node = self.node(*maker);
            if node.name() != "reshape" {
                return None;
            }
            id = node.operation().inputs().next()?.id;
        }
        let is_along_features =
            operand.shape.last() == Some(&features) && operand.shape.num_elements() == features;
        (parameter.shape.len() == 1 && is_along_features).then(|| path.to_string())
    }
}

fn has_features_last(tensor: &TensorIr, features: usize) -> bool {
    tensor.shape.last() == Some(&features)
}

/// The operand of an operation that gives it another shape, with features as the last axis as before.
fn same_features(node: Node<'_>) -> Option<TensorId> {
    let (mut inputs, mut outputs) = (node.operation().inputs(), node.operation().outputs());
    let (input, output) = (inputs.next()?, outputs.next()?);
    (node.name() == "reshape" && input.shape.last() == output.shape.last()).then_some(input.id)
}

/// Whether two convolutions see the same patches of what they read.
fn same_patches(one: Node<'_>, other: Node<'_>) -> bool {
    use ModuleOperationIr::{Conv1d, Conv2d, Conv3d};
    let (OperationIr::Module(one), OperationIr::Module(other)) =
        (one.operation(), other.operation())
    else {
        return false;
    };
    macro_rules! same {
        ($a:ident, $b:ident) => {
            $a.options == $b.options && $a.weight.shape[1..] == $b.weight.shape[1..]
        };
    }
    match (one, other) {
        (Conv1d(a), Conv1d(b)) => same!(a, b),
        (Conv2d(a), Conv2d(b)) => same!(a, b),
        (Conv3d(a), Conv3d(b)) => same!(a, b),
        _ => false,
    }
}
