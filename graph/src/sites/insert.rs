//! Hooks that act at a site become nodes of the graph.

#[cfg(test)]
mod tests;

use burn::backend::ir::{
    BaseOperationIr, IrVisitorMut, NumericOperationIr, OperationIr, ScalarIr, ScalarOpIr, TensorId,
    TensorIr, TensorStatus,
};
use rustc_hash::{FxHashMap as HashMap, FxHashSet as HashSet};

use super::{Place, SiteUse};
use crate::Graph;
use crate::graph::views::keeps_all;

/// Puts a node for each hook that acts at a site, and that the forward pass does not call by
/// itself, between the site's tensors and what reads them there.
///
/// A tensor of which a recurrence reads a part in each of its steps is passed through the hook as a
/// whole, once, unless the hook takes parts.
pub(crate) fn insert(graph: &mut Graph) {
    let mut hooks: HashMap<_, Vec<usize>> = HashMap::default();
    for (index, hook) in graph.hooks.iter().enumerate() {
        if let (false, Some(site)) = (hook.is_called, &hook.site) {
            hooks.entry(site.clone()).or_default().push(index);
        }
    }
    if hooks.is_empty() {
        return;
    }
    let mut at: Vec<Vec<SiteUse>> = vec![Vec::new(); graph.hooks.len()];
    for one in graph.sites() {
        for index in hooks.get(&one.site).into_iter().flatten() {
            at[*index].push(one.clone());
        }
    }
    let mut insertion = Insertion::new(graph);
    let (mut of_operands, mut of_results) = (Vec::new(), Vec::new());
    for (hook, uses) in at.into_iter().enumerate() {
        let (results, operands): (Vec<_>, Vec<_>) =
            uses.into_iter().partition(|one| one.place == Place::Result);
        match results.is_empty() {
            true => of_operands.push((hook, operands)),
            false => of_results.push((hook, results)),
        }
    }
    // Of several at a site, the one that is offered last acts first.
    for (hook, results) in of_results.into_iter().rev() {
        results
            .iter()
            .for_each(|one| insertion.after_result(hook, one.node));
    }
    for (hook, mut operands) in of_operands.into_iter().rev() {
        let takes_zeros = insertion.graph.hooks[hook].takes_zeros;
        operands.retain(|one| takes_zeros || !one.is_zero);
        insertion.before_operands(hook, &operands);
    }
    insertion.finish();
}

struct Insertion<'a> {
    graph: &'a mut Graph,
    /// For each tensor, the operation that makes it.
    makers: HashMap<TensorId, usize>,
    /// For each tensor, the operations that read it.
    readers: HashMap<TensorId, Vec<usize>>,
    /// What hooks have made of the result of an operation so far.
    made: HashMap<usize, TensorIr>,
    before: Vec<Vec<OperationIr>>,
    after: Vec<Vec<OperationIr>>,
    next: u64,
}

impl<'a> Insertion<'a> {
    fn new(graph: &'a mut Graph) -> Self {
        let mut makers = HashMap::default();
        let mut readers: HashMap<TensorId, Vec<usize>> = HashMap::default();
        for (index, operation) in graph.operations.iter().enumerate() {
            makers.extend(operation.outputs().map(|output| (output.id, index)));
            for input in operation.inputs() {
                let readers = readers.entry(input.id).or_default();
                if readers.last() != Some(&index) {
                    readers.push(index);
                }
            }
        }
        let next = graph.unused_id();
        let count = graph.operations.len();
        Self {
            graph,
            makers,
            readers,
            made: HashMap::default(),
            before: vec![Vec::new(); count],
            after: vec![Vec::new(); count],
            next,
        }
    }

    /// A tensor like another one.
    fn tensor(&mut self, like: &TensorIr) -> TensorIr {
        let id = TensorId::new(self.next);
        self.next += 1;
        TensorIr {
            id,
            status: TensorStatus::ReadOnly,
            ..like.clone()
        }
    }

    /// The node of a hook, and what it makes of `input`.
    fn node(&mut self, hook: usize, input: &TensorIr) -> (OperationIr, TensorIr) {
        let output = self.tensor(input);
        self.graph.hooked.insert(output.id, hook);
        let operation = ScalarOpIr {
            lhs: TensorIr {
                status: TensorStatus::ReadOnly,
                ..input.clone()
            },
            rhs: ScalarIr::Float(0.0),
            out: output.clone(),
        };
        let operation = NumericOperationIr::AddScalar(operation);
        (OperationIr::NumericFloat(input.dtype, operation), output)
    }

    /// All that read the result of an operation read what the hook makes of it.
    fn after_result(&mut self, hook: usize, index: usize) {
        let made = self.made.get(&index);
        let first = || self.graph.operations[index].outputs().next();
        let Some(result) = made.or_else(first).cloned() else {
            return;
        };
        let (operation, output) = self.node(hook, &result);
        self.made.insert(index, output.clone());
        self.after[index].push(operation);
        let readers = self.readers.remove(&result.id).unwrap_or_default();
        for at in &readers {
            look();
            let reader = &mut self.graph.operations[*at];
            let count = reader
                .inputs()
                .filter(|input| input.id == result.id)
                .count();
            for _ in 0..count {
                reader.visit_mut(&mut Replace::new(result.id, output.id, 0));
            }
        }
        self.readers.insert(output.id, readers);
    }

    /// The operands are what the hook makes of them.
    fn before_operands(&mut self, hook: usize, uses: &[SiteUse]) {
        let goes_whole = !self.graph.hooks[hook].takes_parts;
        if let Some(root) = goes_whole.then(|| self.root_of_parts(uses)).flatten() {
            self.at_root(hook, uses, &root);
            return;
        }
        let mut known: HashMap<TensorId, TensorId> = HashMap::default();
        for one in uses {
            let Some(operand) = self.operand(one) else {
                continue;
            };
            let replacement = match known.get(&operand.id) {
                Some(known) => *known,
                None => {
                    let (operation, output) = self.node(hook, &operand);
                    self.before[one.node].push(operation);
                    known.insert(operand.id, output.id);
                    output.id
                }
            };
            self.replace(one, operand.id, replacement);
        }
    }

    fn operand(&self, one: &SiteUse) -> Option<TensorIr> {
        let Place::Operand(position) = one.place else {
            return None;
        };
        self.graph.operations[one.node]
            .inputs()
            .nth(position)
            .cloned()
    }

    fn replace(&mut self, one: &SiteUse, from: TensorId, to: TensorId) {
        let Place::Operand(position) = one.place else {
            return;
        };
        let operation = &mut self.graph.operations[one.node];
        // Which of the operands with this tensor.
        let skip = operation
            .inputs()
            .take(position)
            .filter(|input| input.id == from)
            .count();
        operation.visit_mut(&mut Replace::new(from, to, skip));
    }

    /// The views from a slice of a tensor to an operand, from the operand on; and the tensor.
    fn way_to_slice(&self, operand: TensorId) -> Option<(Vec<usize>, TensorIr)> {
        let mut way = Vec::new();
        let mut id = operand;
        loop {
            let index = *self.makers.get(&id)?;
            let operation = &self.graph.operations[index];
            way.push(index);
            if let OperationIr::BaseFloat(BaseOperationIr::Slice(op)) = operation {
                return Some((way, op.tensor.clone()));
            }
            id = keeps_all(operation)?.id;
        }
    }

    /// The tensor that several operands are parts of, if together they are all of it.
    fn root_of_parts(&self, uses: &[SiteUse]) -> Option<TensorIr> {
        if uses.len() < 2 {
            return None;
        }
        let mut root: Option<TensorIr> = None;
        let mut parts = HashSet::default();
        let mut elements = 0;
        for one in uses {
            look();
            let operand = self.operand(one)?;
            let (way, tensor) = self.way_to_slice(operand.id)?;
            if root.as_ref().is_some_and(|root| root.id != tensor.id) {
                return None;
            }
            root = Some(tensor);
            let slice = &self.graph.operations[*way.last()?];
            let OperationIr::BaseFloat(BaseOperationIr::Slice(slice)) = slice else {
                return None;
            };
            // The same part twice is one part.
            if parts.insert(&slice.ranges) {
                elements += operand.shape.num_elements();
            }
        }
        root.filter(|root| root.shape.num_elements() == elements)
    }

    /// Passes the tensor through the hook, and views the result as the operands are viewed.
    fn at_root(&mut self, hook: usize, uses: &[SiteUse], root: &TensorIr) {
        let (operation, output) = self.node(hook, root);
        let ways: Vec<_> = uses
            .iter()
            .filter_map(|one| {
                let operand = self.operand(one)?;
                let (way, _) = self.way_to_slice(operand.id)?;
                Some((one, operand, way))
            })
            .collect();
        let first = ways.iter().filter_map(|(.., way)| way.last()).min();
        let Some(first) = first else { return };
        self.before[*first].push(operation);
        let mut views: HashMap<TensorId, TensorId> = HashMap::from_iter([(root.id, output.id)]);
        for (one, operand, way) in ways {
            for index in way.into_iter().rev() {
                let mut view = self.graph.operations[index].clone();
                let (Some(from), Some(to)) = (
                    view.inputs().next().map(|input| input.id),
                    view.outputs().next().cloned(),
                ) else {
                    continue;
                };
                if views.contains_key(&to.id) {
                    continue;
                }
                let Some(of_view) = views.get(&from).copied() else {
                    continue;
                };
                let new = self.tensor(&to);
                self.graph.hooked_views.insert(new.id);
                view.visit_mut(&mut Replace::new(from, of_view, 0));
                view.visit_mut(&mut Replace::new(to.id, new.id, 0));
                views.insert(to.id, new.id);
                self.before[index + 1].push(view);
            }
            if let Some(replacement) = views.get(&operand.id).copied() {
                self.replace(one, operand.id, replacement);
            }
        }
    }

    fn finish(self) {
        // What was a result of the forward pass is what the hooks made of it.
        let made = self.made.iter().filter_map(|(index, last)| {
            let first = self.graph.operations[*index].outputs().next()?;
            Some((first.id, last.id))
        });
        let made: HashMap<TensorId, TensorId> = made.collect();
        let updates = self.graph.parameters.iter_mut();
        let updates = updates.filter_map(|one| one.update.as_mut());
        for id in self.graph.outputs.iter_mut().chain(updates) {
            if let Some(last) = made.get(id) {
                *id = *last;
            }
        }
        let mut operations = Vec::new();
        let old = std::mem::take(&mut self.graph.operations);
        for ((operation, before), after) in old.into_iter().zip(self.before).zip(self.after) {
            operations.extend(before);
            operations.push(operation);
            operations.extend(after);
        }
        self.graph.operations = operations;
    }
}

#[cfg(test)]
thread_local! {
    static LOOKS: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// Counts, for tests, the operations that are looked at for another one.
fn look() {
    #[cfg(test)]
    LOOKS.set(LOOKS.get() + 1);
}

/// Puts another tensor in the place of one occurrence of a tensor.
struct Replace {
    from: TensorId,
    to: TensorId,
    skip: usize,
    done: bool,
}

impl Replace {
    fn new(from: TensorId, to: TensorId, skip: usize) -> Self {
        Self {
            from,
            to,
            skip,
            done: false,
        }
    }
}

impl IrVisitorMut for Replace {
    fn visit_tensor_mut(&mut self, tensor: &mut TensorIr) {
        if self.done || tensor.id != self.from {
            return;
        }
        if self.skip > 0 {
            self.skip -= 1;
            return;
        }
        tensor.id = self.to;
        self.done = true;
    }
}
