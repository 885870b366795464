//! One pass over the recorded operations, in order.

use std::collections::HashMap;

use burn::backend::ir::{ActivationOperationIr, BaseOperationIr, ModuleOperationIr, OperationIr};
use burn::backend::ir::{TensorId, TensorIr};

use super::log::Log;
use super::operation::{Product, element_wise, is_zeros, keeps_grid, moved, name, product};
use super::{AuditedLayer, Cause, Coverage, FunctionalSite, SiteKind, Trace};

/// What is known after all operations.
#[derive(Default)]
pub(super) struct Graph {
    pub(super) layers: Vec<AuditedLayer>,
    pub(super) sites: Vec<FunctionalSite>,
    /// Tensors that are computed from parameters alone, with the first of them.
    pub(super) derived: HashMap<TensorId, Option<String>>,
    /// What is known about the quantization of a tensor.
    coverage: HashMap<TensorId, Coverage>,
    /// The layer that a computed tensor comes from, by the path of its weight.
    source: HashMap<TensorId, String>,
    /// The softmax output that a tensor is, moved or quantized at most.
    softmax: HashMap<TensorId, usize>,
    /// The functional product that a tensor comes from without another product in between.
    product: HashMap<TensorId, usize>,
    /// The tensor that a computed one was computed from without a product and without another one:
    /// an input, the output of a product, or where two of them meet.
    root: HashMap<TensorId, TensorId>,
}

impl Graph {
    pub(super) fn read(trace: &Trace) -> Self {
        let mut graph = Self {
            derived: trace.parameters.paths.clone(),
            ..Self::default()
        };
        for id in &trace.log.zeros {
            graph.coverage.insert(*id, Coverage::Zero);
        }
        for (id, path) in &trace.parameters.paths {
            if let Some(path) = path
                && let Some(scheme) = trace.parameters.stored.get(path)
            {
                let stored = Coverage::Stored(scheme.clone());
                graph.coverage.insert(*id, stored);
            }
        }
        for operation in &trace.operations {
            if matches!(operation, OperationIr::Drop(_) | OperationIr::Init(_)) {
                continue;
            }
            graph.derive(operation);
            graph.cover(operation, &trace.log);
            graph.trace_source(operation);
            graph.list(operation, trace);
            graph.trace_root(operation);
        }
        graph.layers = merged(graph.layers, |layer| &mut layer.uses);
        graph.sites = merged(graph.sites, |site| &mut site.uses);
        graph
    }

    fn is_derived(&self, tensor: &TensorIr) -> bool {
        self.derived.contains_key(&tensor.id)
    }

    /// Follows what is computed from parameters alone: casts, masks, low-rank adapters.
    fn derive(&mut self, operation: &OperationIr) {
        let mut inputs = operation.inputs().peekable();
        if inputs.peek().is_none() {
            return;
        }
        let origins: Option<Vec<_>> = inputs.map(|input| self.derived.get(&input.id)).collect();
        let Some(origins) = origins else { return };
        let path = origins.into_iter().flatten().next().cloned();
        for output in operation.outputs() {
            self.derived.insert(output.id, path.clone());
        }
    }

    /// Follows what is quantized.
    fn cover(&mut self, operation: &OperationIr, log: &Log) {
        let covered_as_zeros =
            |input: &TensorIr| matches!(self.coverage.get(&input.id), Some(Coverage::Zero));
        if is_zeros(operation, covered_as_zeros) {
            for output in operation.outputs() {
                self.coverage.insert(output.id, Coverage::Zero);
            }
            return;
        }
        for output in operation.outputs() {
            if let Some(entry) = log.entry(output.id) {
                let quantizer = entry.quantizer.clone();
                let phase = entry.phase;
                let mut inputs = operation.inputs();
                let before = inputs.find_map(|input| self.coverage.get(&input.id));
                let coverage = match (phase.quantizes(), before) {
                    (true, _) => Coverage::FakeQuantized {
                        quantizer,
                        scheme: entry.scheme.clone(),
                    },
                    // What it lets pass may be quantized already.
                    (false, Some(before)) if before.is_quantized() => before.clone(),
                    (false, _) => Coverage::Float(Cause::NotQuantizing { quantizer, phase }),
                };
                self.coverage.insert(output.id, coverage);
                return;
            }
        }
        if let Some((input, output)) = keeps_grid(operation) {
            if let Some(coverage) = self.coverage.get(&input.id).cloned() {
                self.coverage.insert(output.id, coverage);
            }
            return;
        }
        // Of a weight, everything else that happens to it after its quantizer is of interest.
        let quantizer = operation
            .inputs()
            .find_map(|input| match self.coverage.get(&input.id) {
                Some(Coverage::FakeQuantized { quantizer, .. }) => Some(quantizer.clone()),
                Some(Coverage::Stored(scheme)) => Some(scheme.clone()),
                _ => None,
            });
        for output in operation.outputs() {
            if let (true, Some(quantizer)) = (self.is_derived(output), &quantizer) {
                let changed = Cause::Changed {
                    quantizer: quantizer.clone(),
                    operation: name(operation),
                };
                self.coverage.insert(output.id, Coverage::Float(changed));
            }
        }
    }

    /// Adds the operation to the layers or the functional sites.
    fn list(&mut self, operation: &OperationIr, trace: &Trace) {
        if let Some(product) = product(operation) {
            self.list_product(&product, trace);
        } else if let Some((kind, operands, output)) = element_wise(operation) {
            if self.is_site(kind, operands) {
                self.push_site(kind, &operands, output);
            }
        } else {
            match operation {
                OperationIr::BaseFloat(BaseOperationIr::Cat(op))
                    if op.tensors.iter().any(|tensor| !self.is_derived(tensor)) =>
                {
                    let operands: Vec<&TensorIr> = op.tensors.iter().collect();
                    self.push_site(SiteKind::Concat, &operands, &op.out);
                }
                OperationIr::Module(ModuleOperationIr::Attention(op)) => {
                    let operands = [&op.query, &op.key, &op.value];
                    self.push_site(SiteKind::FusedAttention, &operands, &op.out);
                }
                OperationIr::Activation(ActivationOperationIr::Softmax(op)) => {
                    self.softmax.insert(op.out.id, self.sites.len());
                    self.push_site(SiteKind::SoftmaxOutput, &[&op.out], &op.out);
                    if let Some(scores) = self.product.get(&op.input.id) {
                        self.sites[*scores].kind = SiteKind::AttentionScores;
                    }
                }
                _ => {}
            }
        }
    }

    /// Whether a sum, difference or product is one of two computed tensors.
    fn is_site(&self, kind: SiteKind, [a, b]: [&TensorIr; 2]) -> bool {
        // Twice the same is a square; with what comes from a parameter it is a bias or a scale.
        if self.is_derived(a) || self.is_derived(b) || a.id == b.id {
            return false;
        }
        // What is computed from a tensor alone, and smaller, is a statistic that normalizes it.
        let is_other = self.root_of(a) != self.root_of(b);
        let has_source = |operand: &TensorIr| self.source.contains_key(&operand.id);
        match kind {
            _ if a.shape == b.shape => true,
            SiteKind::Mul => is_other,
            _ => is_other && has_source(a) && has_source(b),
        }
    }

    fn root_of(&self, tensor: &TensorIr) -> TensorId {
        self.root.get(&tensor.id).copied().unwrap_or(tensor.id)
    }

    /// Follows what a tensor is computed from.
    fn trace_root(&mut self, operation: &OperationIr) {
        let is_product = product(operation).is_some();
        let computed = operation
            .inputs()
            .filter(|input| !self.is_derived(input) && !is_product);
        let mut roots: Vec<TensorId> = computed.map(|input| self.root_of(input)).collect();
        roots.dedup();
        if let [root] = roots[..] {
            for output in operation.outputs() {
                self.root.insert(output.id, root);
            }
        }
    }

    fn list_product(&mut self, product: &Product<'_>, trace: &Trace) {
        let Some(input) = product.input else {
            if let Some(Some(path)) = self.derived.get(&product.weight.id) {
                self.layers.push(AuditedLayer {
                    operation: product.name.to_string(),
                    weight_path: path.clone(),
                    weight: self.weight_coverage(product.weight),
                    input: None,
                    shape: product.output.shape.to_vec(),
                    uses: 1,
                });
            }
            return;
        };
        let (input, weight) = match (self.is_derived(input), self.is_derived(product.weight)) {
            // Arithmetic among parameters, like that of a low-rank adapter, is no layer.
            (true, true) => return,
            (false, false) => {
                let kind = match self.softmax.contains_key(&input.id) {
                    true => SiteKind::AttentionValues,
                    false => SiteKind::Matmul,
                };
                self.product.insert(product.output.id, self.sites.len());
                self.push_site(kind, &[input, product.weight], product.output);
                return;
            }
            (false, true) => (input, product.weight),
            (true, false) => (product.weight, input),
        };
        let path = self.derived.get(&weight.id).cloned().flatten();
        let path = path.unwrap_or_default();
        let input = self.coverage.get(&input.id).cloned().unwrap_or_else(|| {
            Coverage::Float(match trace.parameters.input_quantizers.get(&path) {
                Some(quantizer) if !trace.log.was_used(quantizer) => Cause::PlainForward {
                    quantizer: quantizer.clone(),
                },
                _ => Cause::InputNotPrepared,
            })
        });
        self.layers.push(AuditedLayer {
            operation: product.name.to_string(),
            weight: self.weight_coverage(weight),
            weight_path: path,
            input: Some(input),
            shape: product.output.shape.to_vec(),
            uses: 1,
        });
    }

    fn weight_coverage(&self, weight: &TensorIr) -> Coverage {
        let coverage = self.coverage.get(&weight.id).cloned();
        coverage.unwrap_or(Coverage::Float(Cause::WeightNotPrepared))
    }

    fn push_site(&mut self, kind: SiteKind, operands: &[&TensorIr], output: &TensorIr) {
        let operands = operands.iter().map(|operand| {
            let coverage = self.coverage.get(&operand.id).cloned();
            let coverage = coverage.unwrap_or(Coverage::Float(Cause::NoQuantizer));
            (self.source.get(&operand.id).cloned(), coverage)
        });
        self.sites.push(FunctionalSite {
            kind,
            operands: operands.collect(),
            shape: output.shape.to_vec(),
            uses: 1,
        });
    }

    /// Follows the layer, the softmax and the product that a tensor comes from.
    fn trace_source(&mut self, operation: &OperationIr) {
        let layer = product(operation)
            .and_then(|product| {
                let operands = [Some(product.weight), product.input];
                let mut operands = operands.into_iter().flatten();
                operands.find_map(|operand| self.derived.get(&operand.id).cloned())
            })
            .flatten();
        let source = layer.or_else(|| {
            let mut inputs = operation.inputs();
            inputs.find_map(|input| self.source.get(&input.id).cloned())
        });
        let product = match product(operation) {
            Some(_) => None,
            None => operation
                .inputs()
                .find_map(|input| self.product.get(&input.id).copied()),
        };
        let is_moved = moved(operation).is_some() || is_scaled(operation);
        let softmax = operation
            .inputs()
            .find_map(|input| self.softmax.get(&input.id).copied())
            .filter(|_| is_moved);
        for output in operation.outputs() {
            if let Some(source) = &source {
                self.source.insert(output.id, source.clone());
            }
            if let Some(product) = product {
                self.product.insert(output.id, product);
            }
            if let Some(site) = softmax {
                self.softmax.insert(output.id, site);
                if let Some(coverage) = self.coverage.get(&output.id) {
                    self.sites[site].operands[0].1 = coverage.clone();
                }
            }
        }
    }
}

/// Scalars: the stand-in of a quantizer, among others.
fn is_scaled(operation: &OperationIr) -> bool {
    use burn::backend::ir::NumericOperationIr as Op;
    let OperationIr::NumericFloat(_, operation) = operation else {
        return false;
    };
    matches!(
        operation,
        Op::AddScalar(_) | Op::MulScalar(_) | Op::DivScalar(_)
    )
}

/// Joins equal items, and counts them.
fn merged<T: PartialEq>(items: Vec<T>, uses: impl Fn(&mut T) -> &mut usize) -> Vec<T> {
    let mut merged: Vec<(T, usize)> = Vec::new();
    for item in items {
        match merged.iter_mut().find(|(known, _)| *known == item) {
            Some((_, count)) => *count += 1,
            None => merged.push((item, 1)),
        }
    }
    let counted = merged.into_iter().map(|(mut item, count)| {
        *uses(&mut item) = count;
        item
    });
    counted.collect()
}
