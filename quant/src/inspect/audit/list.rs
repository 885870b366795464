//! The layers and the operations without a weight of a forward pass, with what quantizes them.

use std::collections::BTreeMap;

use burn::backend::ir::{NumericOperationIr, OperationIr, TensorIr};
use burn_lean_graph::{Graph, Node, Place, Role, SiteUse};

use super::coverage::Coverages;
use super::{AuditedLayer, AuditedOperand, Cause, Coverage, FunctionalSite};

pub(super) fn of(graph: &Graph, coverages: &Coverages) -> (Vec<AuditedLayer>, Vec<FunctionalSite>) {
    let mut by_node: BTreeMap<usize, Vec<SiteUse>> = BTreeMap::new();
    for one in graph.sites() {
        by_node.entry(one.node).or_default().push(one);
    }
    let (mut layers, mut sites) = (Vec::new(), Vec::new());
    for node in graph.nodes() {
        let Some(uses) = by_node.get(&node.index()) else {
            continue;
        };
        let at = At { node, coverages };
        match uses.iter().find(|one| one.site.role == Role::Weight) {
            Some(weight) => layers.push(at.layer(weight, uses)),
            None => sites.extend(at.site(uses)),
        }
    }
    let layers = merged(layers, |layer| &mut layer.uses);
    (layers, merged(sites, |site| &mut site.uses))
}

/// One operation.
struct At<'a> {
    node: Node<'a>,
    coverages: &'a Coverages,
}

impl At<'_> {
    fn layer(&self, weight: &SiteUse, uses: &[SiteUse]) -> AuditedLayer {
        let path = &weight.site.path;
        let input = uses.iter().find(|one| one.site.role == Role::Input);
        let without = || match self.coverages.input_quantizer(path) {
            Some(quantizer) => Cause::PlainForward {
                quantizer: quantizer.to_string(),
            },
            None => Cause::InputNotPrepared,
        };
        AuditedLayer {
            operation: self.node.name().to_string(),
            weight_path: path.clone(),
            weight: self.coverage(weight, || Cause::WeightNotPrepared),
            input: input.map(|input| self.coverage(input, without)),
            shape: self.shape(),
            uses: 1,
        }
    }

    fn site(&self, uses: &[SiteUse]) -> Option<FunctionalSite> {
        let operands: Vec<AuditedOperand> = uses
            .iter()
            // A layer's output as such is no operand.
            .filter(|one| one.place != Place::Result || one.site.role == Role::Probabilities)
            .map(|one| AuditedOperand {
                layer: one.site.path.clone(),
                role: one.site.role,
                coverage: self.coverage(one, || Cause::NoQuantizer),
            })
            .collect();
        (!operands.is_empty()).then(|| FunctionalSite {
            operation: self.node.name().to_string(),
            operands,
            shape: self.shape(),
            uses: 1,
        })
    }

    fn coverage(&self, one: &SiteUse, without: impl FnOnce() -> Cause) -> Coverage {
        if one.is_zero {
            return Coverage::Zero;
        }
        let operation = self.node.operation();
        let known = match one.place {
            Place::Operand(position) => {
                let operand = operation.inputs().nth(position);
                operand.and_then(|operand| self.coverages.get(operand.id).cloned())
            }
            Place::Result => self.after(self.node),
        };
        known.unwrap_or_else(|| Coverage::Float(without()))
    }

    /// How a result is quantized before it is used: through views, scales and a dropout.
    fn after(&self, node: Node<'_>) -> Option<Coverage> {
        node.readers().find_map(|reader| {
            let output = reader.operation().outputs().next()?;
            match self.coverages.get(output.id) {
                Some(coverage) => Some(coverage.clone()),
                None if reader.moved().is_some() || is_scaled(&reader) => self.after(reader),
                None => None,
            }
        })
    }

    fn shape(&self) -> Vec<usize> {
        let output: Option<&TensorIr> = self.node.operation().outputs().next();
        output
            .map(|output| output.shape.to_vec())
            .unwrap_or_default()
    }
}

/// What a dropout does to attention weights, among others.
fn is_scaled(node: &Node<'_>) -> bool {
    use NumericOperationIr as Op;
    matches!(
        node.operation(),
        OperationIr::NumericFloat(_, Op::Mul(_) | Op::MulScalar(_) | Op::DivScalar(_))
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
