//! Operations on computed tensors alone: products of attentions, sums, gates, concatenations.

use burn::backend::ir::{
    ActivationOperationIr, BaseOperationIr, FloatOperationIr, ModuleOperationIr,
    NumericOperationIr, OperationIr, TensorIr,
};

use super::product::Product;
use super::trace::Trace;
use super::{Place, SiteUse};
use crate::{Node, Role, Site};

impl<'a> Trace<'a> {
    /// A product of two computed tensors; whether it is of an attention is not known yet.
    pub(super) fn functional_product(
        &mut self,
        node: Node<'a>,
        [left, right]: [(usize, &TensorIr); 2],
        product: &Product<'_>,
    ) {
        let is_weighted = self.softmax.contains(&left.1.id);
        let roles = match is_weighted {
            true => [Role::Probabilities, Role::Value],
            false => [Role::Left, Role::Right],
        };
        let first = match is_weighted {
            // The site is where the softmax is.
            true => usize::MAX,
            false => self.functional_operand(node, roles[0], left),
        };
        let second = self.functional_operand(node, roles[1], right);
        self.functional.insert(node.index(), [first, second]);
        self.scores.insert(product.output.id, node.index());
    }

    /// The operand of an operation without a weight: the output of a layer as it is, or what was
    /// made of it.
    fn functional_operand(
        &mut self,
        node: Node<'a>,
        role: Role,
        (position, tensor): (usize, &TensorIr),
    ) -> usize {
        let layer = self.output_of.get(&tensor.id);
        let output = layer.and_then(|(layer, _)| self.layers.get(layer));
        let site = match (output, self.anchor_of(&[tensor])) {
            (Some(layer), _) => layer.output_site(),
            (None, Some(anchor)) => self.functional_site(anchor, role),
            (None, None) => return usize::MAX,
        };
        self.operand(node, site, position, tensor.id)
    }

    fn functional_site(&mut self, anchor: usize, role: Role) -> Site {
        let next = self.ordinals.entry((anchor, role)).or_default();
        let ordinal = *next;
        *next += 1;
        let path = self.layers.get(&anchor).map(|layer| layer.path.clone());
        Site {
            path: path.unwrap_or_default(),
            role,
            ordinal,
        }
    }

    pub(super) fn other(&mut self, node: Node<'a>) {
        match node.operation() {
            OperationIr::Activation(ActivationOperationIr::Softmax(op)) => {
                if let Some(scores) = self.scores.get(&op.input.id).copied() {
                    self.attention(node, scores, &op.out);
                }
            }
            OperationIr::Float(_, FloatOperationIr::Exp(op)) => {
                if let Some(scores) = self.scores.get(&op.input.id).copied() {
                    self.exponential.insert(op.out.id, scores);
                }
            }
            // A softmax that is written out.
            OperationIr::NumericFloat(_, NumericOperationIr::Div(op)) => {
                if let Some(scores) = self.exponential.get(&op.lhs.id).copied() {
                    self.attention(node, scores, &op.out);
                }
            }
            OperationIr::NumericFloat(_, NumericOperationIr::Add(op)) => {
                self.sum(node, [&op.lhs, &op.rhs], &op.out);
            }
            OperationIr::NumericFloat(_, NumericOperationIr::Sub(op)) => {
                let roles = [Role::DifferenceLeft, Role::DifferenceRight];
                self.branches(node, roles, [&op.lhs, &op.rhs], &op.out);
            }
            OperationIr::NumericFloat(_, NumericOperationIr::Mul(op)) => {
                let roles = [Role::FactorLeft, Role::FactorRight];
                self.branches(node, roles, [&op.lhs, &op.rhs], &op.out);
            }
            OperationIr::BaseFloat(BaseOperationIr::Cat(op)) => {
                let parts: Vec<&TensorIr> = op.tensors.iter().collect();
                if let Some(anchor) = self.anchor_of(&parts) {
                    let site = self.functional_site(anchor, Role::Concatenation);
                    for (position, part) in parts.into_iter().enumerate() {
                        if !self.is_derived(part) {
                            self.operand(node, site.clone(), position, part.id);
                        }
                    }
                }
            }
            OperationIr::Module(ModuleOperationIr::Attention(op)) => {
                let operands = [
                    (Role::Query, &op.query),
                    (Role::Key, &op.key),
                    (Role::Value, &op.value),
                ];
                for (position, (role, tensor)) in operands.into_iter().enumerate() {
                    self.functional_operand(node, role, (position, tensor));
                }
            }
            _ => {}
        }
    }

    /// A product of two computed tensors was of queries and keys, and this is its softmax.
    fn attention(&mut self, node: Node<'a>, scores: usize, output: &TensorIr) {
        self.softmax.insert(output.id);
        let Some([left, right]) = self.functional.get(&scores).copied() else {
            return;
        };
        for (index, role) in [(left, Role::Query), (right, Role::Key)] {
            if let Some(operand) = self.uses.get_mut(index)
                && matches!(operand.site.role, Role::Left | Role::Right)
            {
                operand.site.role = role;
            }
        }
        if let Some(query) = self.uses.get(left) {
            let site = Site {
                path: query.site.path.clone(),
                role: Role::Probabilities,
                ordinal: query.site.ordinal,
            };
            self.uses.push(SiteUse {
                site,
                node: node.index(),
                place: Place::Result,
                is_zero: false,
                hook: None,
            });
        }
    }

    fn sum(&mut self, node: Node<'a>, [a, b]: [&TensorIr; 2], output: &TensorIr) {
        match (self.is_derived(a), self.is_derived(b)) {
            (false, false) => {
                self.branches(node, [Role::SumLeft, Role::SumRight], [a, b], output);
            }
            (false, true) => self.bias(node, a, b, output),
            (true, false) => self.bias(node, b, a, output),
            (true, true) => {}
        }
    }

    /// Two computed tensors that meet element by element.
    fn branches(
        &mut self,
        node: Node<'a>,
        roles: [Role; 2],
        operands: [&TensorIr; 2],
        output: &TensorIr,
    ) {
        if operands.iter().any(|operand| self.is_derived(operand)) {
            return;
        }
        let [a, b] = operands;
        let anchors = operands.map(|operand| self.anchor_of(&[operand]));
        // Parts of one tensor, as in a rotation, are no branches; neither is what is computed from
        // a tensor alone to normalize it.
        let is_other = self.root_of(a) != self.root_of(b);
        // A mask that is added to scores comes from no layer.
        let is_sum = roles[0] == Role::SumLeft;
        let of_layers = match anchors {
            [Some(_), Some(_)] => true,
            [Some(_), None] => is_sum && self.is_input_branch(b, a),
            [None, Some(_)] => is_sum && self.is_input_branch(a, b),
            [None, None] => false,
        };
        // Losses that are added up are no activations.
        let is_branch = is_other && of_layers && output.shape.num_dims() > 1;
        if let (true, Some(anchor)) = (is_branch, anchors.into_iter().flatten().max()) {
            for (position, (role, tensor)) in roles.into_iter().zip(operands).enumerate() {
                let site = self.functional_site(anchor, role);
                self.operand(node, site, position, tensor.id);
            }
        }
    }

    /// Whether an input of the model, as it came, meets what its layers made.
    fn is_input_branch(&self, input: &TensorIr, made: &TensorIr) -> bool {
        self.graph.inputs.contains(&self.root_of(input))
            && input.shape == made.shape
            && !self.scores.contains_key(&made.id)
    }

    /// The sum of a layer's product and its bias is its output.
    fn bias(&mut self, node: Node<'a>, product: &TensorIr, bias: &TensorIr, output: &TensorIr) {
        let bias = self.path(bias).map(parent);
        if let (Some((layer, false)), Some(bias)) = (self.output_of.get(&product.id).copied(), bias)
            && let Some(of) = self.layers.get_mut(&layer)
            && parent(&of.path) == bias
        {
            of.output = node.index();
            self.output_of.insert(output.id, (layer, true));
        }
    }
}

/// The module that a parameter belongs to.
fn parent(path: &str) -> &str {
    path.rsplit_once('.').map_or("", |(module, _)| module)
}
