//! What a recorded forward pass says about layers: blocks, what reads the same inputs, residual
//! sums, where factors can move between layers.

use std::collections::{HashMap, HashSet};

use burn::backend::ir::TensorId;
use burn_lean_graph::{Graph, Node, Product, Tensors, Walk};

use crate::{OneShotError, Preset};

/// A weight that is compressed.
#[derive(Debug, Clone)]
pub(crate) struct Layer {
    pub(crate) product: Product,
    /// The other summand of a sum with a residual that follows.
    pub(crate) residual: Option<TensorId>,
}

impl Layer {
    pub(crate) fn path(&self) -> &str {
        &self.product.parameter.path
    }
}

/// Layers that read the same tensor, in order.
#[derive(Debug, Clone)]
pub(crate) struct Group {
    pub(crate) layers: Vec<Layer>,
    /// Where its input is produced, if factors can move there.
    pub(crate) producer: Option<Producer>,
}

/// What divides the features that a group reads: parameters with one number for each of them, and
/// rows of a matrix.
#[derive(Debug, Clone)]
pub(crate) struct Producer {
    pub(crate) vectors: Vec<String>,
    pub(crate) matrix: Option<Box<Product>>,
    /// The first operation that reads one of them.
    pub(crate) first: usize,
}

/// Layers under one path.
#[derive(Debug, Clone)]
pub(crate) struct Block {
    pub(crate) path: String,
    pub(crate) groups: Vec<Group>,
    /// The first operation that reads a parameter of it.
    pub(crate) first: usize,
}

impl Block {
    pub(crate) fn layers(&self) -> impl Iterator<Item = &Layer> {
        self.groups.iter().flat_map(|group| &group.layers)
    }
}

/// The blocks, in order.
pub(crate) fn blocks<O: Tensors>(
    walk: &Walk<O>,
    preset: &Preset,
) -> Result<Vec<Block>, OneShotError> {
    let products = walk.products();
    let embedded: HashSet<_> = products
        .iter()
        .filter(|product| product.is_embedding())
        .map(|product| product.parameter.id)
        .collect();
    let is_compressed = |product: &&Product| {
        let path = &product.parameter.path;
        !embedded.contains(&product.parameter.id)
            && !preset.skip.iter().any(|skipped| is_under(path, skipped))
    };
    let chosen: Vec<&Product> = products.iter().filter(is_compressed).collect();
    for (path, nodes) in walk.shared_weights() {
        let own: Vec<_> = chosen
            .iter()
            .filter(|one| nodes.contains(&one.node))
            .collect();
        if own.len() > 1 {
            let mut names: Vec<String> = own
                .iter()
                .filter_map(|one| block_of(&one.parameter.path, preset))
                .collect();
            names.dedup();
            return Err(OneShotError::SharedWeight {
                path,
                products: own.len(),
                blocks: names.join(", "),
            });
        }
    }
    let graph = walk.graph();
    let structure = Structure::new(graph, &products);
    let mut blocks: Vec<Block> = Vec::new();
    for product in chosen {
        let Some(path) = block_of(&product.parameter.path, preset) else {
            continue;
        };
        // What reads the same is solved together.
        let last = blocks
            .last()
            .and_then(|block| Some((&block.path, block.groups.last()?)));
        let path = match last {
            Some((path, group))
                if preset.blocks.is_none()
                    && group.layers[0].product.input_id() == product.input_id() =>
            {
                path.clone()
            }
            _ => path,
        };
        if blocks.last().is_none_or(|block| block.path != path) {
            let first = graph.nodes().find(|node| {
                node.index() == product.node
                    || node.parameters().any(|one| is_under(&one.path, &path))
            });
            blocks.push(Block {
                first: first.map_or(product.node, |node| node.index()),
                path,
                groups: Vec::new(),
            });
        }
        let layer = Layer {
            residual: structure.residual(product),
            product: product.clone(),
        };
        let last = blocks.len() - 1;
        let groups = &mut blocks[last].groups;
        match groups.last_mut() {
            Some(group) if group.layers[0].product.input_id() == product.input_id() => {
                group.layers.push(layer);
            }
            _ => groups.push(Group {
                layers: vec![layer],
                producer: None,
            }),
        }
    }
    let mut before = None;
    for block in &mut blocks {
        let own: HashSet<usize> = block.layers().map(|layer| layer.product.node).collect();
        for group in &mut block.groups {
            // What was compressed with an earlier block stays as it is.
            group.producer = structure.producer(group).filter(|producer| {
                let matrix = producer.matrix.as_ref();
                matrix.is_none_or(|product| own.contains(&product.node))
                    && before.is_none_or(|before| producer.first > before)
            });
            let first = group.producer.as_ref().map(|producer| producer.first);
            block.first = block.first.min(first.unwrap_or(block.first));
        }
        before = own.into_iter().max();
    }
    for named in preset.blocks.iter().flatten() {
        if !blocks.iter().any(|block| block.path == *named) {
            return Err(OneShotError::NeverCalled {
                path: named.clone(),
            });
        }
    }
    for skipped in &preset.skip {
        if !graph
            .parameters()
            .iter()
            .any(|one| is_under(&one.path, skipped))
        {
            return Err(OneShotError::NeverCalled {
                path: skipped.clone(),
            });
        }
    }
    match blocks.is_empty() {
        true => Err(OneShotError::NothingToCompress),
        false => Ok(blocks),
    }
}

/// Whether a parameter is in a module, or is the one that is named.
fn is_under(path: &str, module: &str) -> bool {
    path.strip_prefix(module)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// The block of a parameter; `None` where blocks are named and it is in none.
fn block_of(path: &str, preset: &Preset) -> Option<String> {
    if let Some(named) = &preset.blocks {
        return named.iter().find(|one| is_under(path, one)).cloned();
    }
    let parts: Vec<&str> = path.split('.').collect();
    let number = parts.iter().position(|part| part.parse::<usize>().is_ok());
    let end = number.map_or(parts.len().saturating_sub(1).max(1), |at| at + 1);
    Some(parts[..end].join("."))
}

/// Who makes and who reads each tensor.
struct Structure<'a> {
    graph: &'a Graph,
    makers: HashMap<TensorId, usize>,
    /// Parameters and views of them, by the path of the parameter.
    weights: HashMap<TensorId, &'a str>,
    products: HashMap<usize, &'a Product>,
}

impl<'a> Structure<'a> {
    fn new(graph: &'a Graph, products: &'a [Product]) -> Self {
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

    /// The other summand, where the output of a product goes into nothing but a sum with what was
    /// computed before.
    fn residual(&self, product: &Product) -> Option<TensorId> {
        if product.is_convolution() || product.is_embedding() {
            return None;
        }
        let mut node = self.node(product.node);
        loop {
            let own: Vec<TensorId> = node.operation().outputs().map(|one| one.id).collect();
            // Rows stay rows.
            let shape = node.operation().outputs().next()?.shape.to_vec();
            if shape.last() != Some(&product.outputs) {
                return None;
            }
            node = self.only_reader(node)?;
            if node.name() == "reshape" {
                continue;
            }
            if node.name() != "add" {
                return None;
            }
            let mut inputs = node.operation().inputs();
            let (a, b) = (inputs.next()?, inputs.next()?);
            let other = if own.contains(&a.id) { b } else { a };
            if own.contains(&other.id) {
                return None;
            }
            if self.weights.contains_key(&other.id) {
                continue;
            }
            let earlier = self
                .makers
                .get(&other.id)
                .is_none_or(|maker| *maker < product.node);
            return (earlier && other.shape == a.shape && other.shape == b.shape)
                .then_some(other.id);
        }
    }

    /// Where the input of a group comes from, if nothing else reads it and features are only
    /// rescaled or rectified on the way.
    fn producer(&self, group: &Group) -> Option<Producer> {
        let features = group.layers[0].product.inputs;
        if group.layers.iter().any(|one| one.product.is_convolution()) {
            return None;
        }
        let nodes: HashSet<usize> = group.layers.iter().map(|one| one.product.node).collect();
        let mut at = self.node(*self.makers.get(&group.layers[0].product.input_id())?);
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
        let mut vectors = Vec::new();
        loop {
            if let Some(product) = self.products.get(&at.index()) {
                let usable = !product.is_embedding()
                    && !product.is_convolution()
                    && product.outputs == features
                    && !self.is_shared(product);
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
                    vectors.extend(
                        inputs
                            .map(|one| self.weights.get(&one.id).map(|p| p.to_string()))
                            .collect::<Option<Vec<_>>>()?,
                    );
                    return Some(Producer {
                        vectors,
                        matrix: None,
                        first: at.index(),
                    });
                }
                "mul" | "add" => {
                    let second = inputs.next()?.id;
                    let (weight, other) =
                        match (self.weights.get(&first), self.weights.get(&second)) {
                            (Some(path), None) => (Some(path), second),
                            (None, Some(path)) => (Some(path), first),
                            _ => (None, first),
                        };
                    match weight {
                        Some(path) => {
                            if self.size(path) != features {
                                return None;
                            }
                            vectors.push(path.to_string());
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
                            let straight =
                                [second, first].into_iter().find(|id| self.is_straight(*id));
                            straight?
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

    fn is_shared(&self, product: &Product) -> bool {
        let id = product.parameter.id;
        self.products
            .values()
            .filter(|one| one.parameter.id == id)
            .count()
            > 1
    }

    fn size(&self, path: &str) -> usize {
        let mut found = self
            .graph
            .parameters()
            .iter()
            .filter(|one| one.path == path);
        found.next().map_or(0, |one| one.shape.iter().product())
    }
}
