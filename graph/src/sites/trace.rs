//! One pass over the operations, in order, that finds the sites.

use burn::backend::ir::{BaseOperationIr, NumericOperationIr, OperationIr, TensorId, TensorIr};
use rustc_hash::{FxHashMap as HashMap, FxHashSet as HashSet};

use super::product::{Product, product};
use super::weighting::is_weighting;
use super::{Place, SiteUse};
use crate::graph::describe::operands;
use crate::graph::scalars;
use crate::graph::views::{keeps_all, moved};
use crate::{Graph, Node, Role, Site};

pub(super) fn sites(graph: &Graph) -> Vec<SiteUse> {
    let mut trace = Trace::new(graph);
    for node in graph.nodes() {
        trace.follow(node);
    }
    trace.finish()
}

/// The product of a layer.
pub(super) struct Layer {
    /// Path of the weight.
    pub(super) path: String,
    /// 1 if the weight was first read in another way: as a table for this matrix, or the reverse.
    ordinal: usize,
    /// The operation whose result is its output: the product, or the sum with its bias.
    pub(super) output: usize,
}

impl Layer {
    pub(super) fn output_site(&self) -> Site {
        Site {
            path: self.path.clone(),
            role: Role::Output,
            ordinal: self.ordinal,
        }
    }
}

/// What is known of tensors.
pub(super) struct Trace<'a> {
    pub(super) graph: &'a Graph,
    pub(super) uses: Vec<SiteUse>,
    pub(super) layers: HashMap<usize, Layer>,
    /// Of the path of each weight, whether it was first read as a table.
    tables: HashMap<String, bool>,
    /// Computed from parameters and numbers of the forward pass alone; the first parameter.
    derived: HashMap<TensorId, Option<usize>>,
    zeros: HashSet<TensorId>,
    /// The layer that ran last of those before.
    anchor: HashMap<TensorId, usize>,
    /// The layer whose output it is, through views that keep all numbers; and whether its bias was
    /// added.
    pub(super) output_of: HashMap<TensorId, (usize, bool)>,
    /// What it was computed from without a product, and without another tensor that was computed.
    root: HashMap<TensorId, TensorId>,
    /// The product of two computed tensors that it comes from without another one in between.
    pub(super) scores: HashMap<TensorId, usize>,
    /// An exponential of such a product.
    pub(super) exponential: HashMap<TensorId, usize>,
    /// The softmax of such a product, through views, masks and scalars.
    pub(super) softmax: HashSet<TensorId>,
    /// For a product of two computed tensors, where its operands are among the uses.
    pub(super) functional: HashMap<usize, [usize; 2]>,
    /// How many sites of a role there are after a layer.
    pub(super) ordinals: HashMap<(usize, Role), usize>,
    /// The hook whose result it is, through views.
    hook: HashMap<TensorId, usize>,
}

impl<'a> Trace<'a> {
    fn new(graph: &'a Graph) -> Self {
        let parameters = graph.parameters.iter().enumerate();
        let derived = parameters
            .map(|(index, parameter)| (parameter.tensor, Some(index)))
            .chain(graph.constants.keys().map(|id| (*id, None)));
        Self {
            derived: derived.collect(),
            graph,
            uses: Vec::new(),
            layers: HashMap::default(),
            tables: HashMap::default(),
            zeros: HashSet::default(),
            anchor: HashMap::default(),
            output_of: HashMap::default(),
            root: HashMap::default(),
            scores: HashMap::default(),
            exponential: HashMap::default(),
            softmax: HashSet::default(),
            functional: HashMap::default(),
            ordinals: HashMap::default(),
            hook: HashMap::default(),
        }
    }

    fn follow(&mut self, node: Node<'a>) {
        let operation = node.operation();
        self.derive(operation);
        self.find_zeros(operation);
        match product(operation) {
            Some(product) => self.product(node, &product),
            None => self.other(node),
        }
        self.trace_history(node);
    }

    pub(super) fn is_derived(&self, tensor: &TensorIr) -> bool {
        self.derived.contains_key(&tensor.id)
    }

    /// The path of the parameter that a tensor is computed from.
    pub(super) fn path(&self, tensor: &TensorIr) -> Option<&'a str> {
        let parameter = (*self.derived.get(&tensor.id)?)?;
        Some(&self.graph.parameters[parameter].path)
    }

    fn derive(&mut self, operation: &OperationIr) {
        let origins: Option<Vec<_>> = operands(self.graph, operation)
            .iter()
            .map(|id| self.derived.get(id).copied())
            .collect();
        if let Some(origins) = origins {
            let parameter = origins.into_iter().flatten().next();
            for output in operation.outputs() {
                self.derived.insert(output.id, parameter);
            }
        }
    }

    fn find_zeros(&mut self, operation: &OperationIr) {
        use NumericOperationIr as Numeric;
        let is_zero = |tensor: &TensorIr| self.zeros.contains(&tensor.id);
        let zero = match operation {
            OperationIr::BaseFloat(BaseOperationIr::Zeros(_)) => true,
            OperationIr::NumericFloat(_, numeric) => match numeric {
                Numeric::Full(_) => scalars(operation) == [0.0],
                Numeric::Mul(op) => is_zero(&op.lhs) || is_zero(&op.rhs),
                Numeric::MulScalar(op) => is_zero(&op.lhs),
                Numeric::AddScalar(op) => is_zero(&op.lhs) && scalars(operation) == [0.0],
                _ => false,
            },
            _ => moved(operation).is_some_and(is_zero),
        };
        if zero {
            self.zeros
                .extend(operation.outputs().map(|output| output.id));
        }
    }

    fn product(&mut self, node: Node<'a>, product: &Product<'_>) {
        let (position, weight) = product.weight;
        let Some(input) = product.input else {
            if let Some(path) = self.path(weight) {
                self.layer(node, path, None, position, product.output);
            }
            return;
        };
        match (self.path(input.1), self.path(weight)) {
            // Arithmetic among parameters, like that of a low-rank adapter, is no layer.
            (Some(_), Some(_)) => {}
            (None, Some(path)) => {
                self.layer(node, path, Some(input), position, product.output);
                if product.bias.is_some() {
                    self.output_of
                        .insert(product.output.id, (node.index(), true));
                }
            }
            (Some(path), None) => {
                self.layer(node, path, Some(product.weight), input.0, product.output);
            }
            (None, None) => {
                if !self.is_derived(input.1) && !self.is_derived(weight) {
                    self.functional_product(node, [input, product.weight], product);
                }
            }
        }
    }

    fn layer(
        &mut self,
        node: Node<'a>,
        path: &str,
        input: Option<(usize, &TensorIr)>,
        weight: usize,
        output: &TensorIr,
    ) {
        if let Some((position, tensor)) = input {
            self.operand(node, Site::new(path, Role::Input), position, tensor.id);
        }
        let weights = node.operation().inputs().nth(weight);
        if let Some(tensor) = weights {
            self.operand(node, Site::new(path, Role::Weight), weight, tensor.id);
        }
        // Of a state that the forward pass makes, too.
        self.derived.remove(&output.id);
        self.output_of.insert(output.id, (node.index(), false));
        // Rows of a table are other numbers than products with it.
        let is_table = input.is_none();
        let first = *self.tables.entry(path.to_string()).or_insert(is_table);
        let layer = Layer {
            path: path.to_string(),
            ordinal: usize::from(first != is_table),
            output: node.index(),
        };
        self.layers.insert(node.index(), layer);
    }

    pub(super) fn operand(
        &mut self,
        node: Node<'a>,
        site: Site,
        operand: usize,
        tensor: TensorId,
    ) -> usize {
        self.uses.push(SiteUse {
            site,
            node: node.index(),
            place: Place::Operand(operand),
            is_zero: self.zeros.contains(&tensor),
            hook: self.hook.get(&tensor).copied(),
        });
        self.uses.len() - 1
    }

    pub(super) fn anchor_of(&self, tensors: &[&TensorIr]) -> Option<usize> {
        let anchors = tensors
            .iter()
            .filter_map(|tensor| self.anchor.get(&tensor.id));
        anchors.max().copied()
    }

    pub(super) fn root_of(&self, tensor: &TensorIr) -> TensorId {
        self.root.get(&tensor.id).copied().unwrap_or(tensor.id)
    }

    /// What is known of the results from the operands.
    fn trace_history(&mut self, node: Node<'a>) {
        let operation = node.operation();
        let is_product = product(operation).is_some();
        let reads = operands(self.graph, operation);
        let computed: Vec<&TensorIr> = operation
            .inputs()
            .filter(|tensor| reads.contains(&tensor.id) && !self.is_derived(tensor))
            .collect();
        let anchor = match self.layers.contains_key(&node.index()) {
            true => Some(node.index()),
            false => self.anchor_of(&computed),
        };
        let mut roots: Vec<TensorId> = computed.iter().map(|input| self.root_of(input)).collect();
        roots.dedup();
        let hook = self.graph.hook_of(operation);
        let view = keeps_all(operation).or(match (operation, hook) {
            (OperationIr::NumericFloat(_, NumericOperationIr::AddScalar(op)), Some(_)) => {
                Some(&op.lhs)
            }
            _ => None,
        });
        for output in operation.outputs() {
            if let Some(anchor) = anchor {
                self.anchor.insert(output.id, anchor);
            }
            if let ([root], false) = (&roots[..], is_product) {
                self.root.insert(output.id, *root);
            }
            if let Some(layer) = view.and_then(|input| self.output_of.get(&input.id).copied()) {
                self.output_of.insert(output.id, layer);
            }
            if let Some(hook) = hook.or_else(|| {
                let view = moved(operation)?;
                self.hook.get(&view.id).copied()
            }) {
                self.hook.insert(output.id, hook);
            }
            if is_product || self.softmax.contains(&output.id) {
                continue;
            }
            if let [only] = computed[..] {
                if let Some(scores) = self.scores.get(&only.id).copied() {
                    self.scores.entry(output.id).or_insert(scores);
                }
                if self.softmax.contains(&only.id) && is_weighting(operation) {
                    self.softmax.insert(output.id);
                }
            } else if let Some(scores) = computed
                .iter()
                .find_map(|tensor| self.scores.get(&tensor.id).copied())
            {
                self.scores.entry(output.id).or_insert(scores);
            }
        }
    }

    fn finish(mut self) -> Vec<SiteUse> {
        for layer in self.layers.values() {
            self.uses.push(SiteUse {
                site: layer.output_site(),
                node: layer.output,
                place: Place::Result,
                is_zero: false,
                hook: None,
            });
        }
        for one in self
            .uses
            .iter_mut()
            .filter(|one| one.place == Place::Result)
        {
            // Of a result, the hook is the only one that reads it.
            let node = self.graph.node(one.node);
            let mut readers = node.readers();
            one.hook = match (readers.next(), readers.next()) {
                (Some(reader), None) => self.graph.hook_of(reader.operation()),
                _ => None,
            };
        }
        self.uses
            .sort_by_key(|one| (one.node, one.place == Place::Result, one.place));
        self.uses
    }
}
