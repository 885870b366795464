//! From a model's nodes to steps: what follows a product becomes part of it, weights are packed.

mod codes;
mod float_operation;
mod kinds;
mod products;
mod repeat;
mod tail;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use burn_lean_kernels::KernelError;

use super::attributes::Constants;
use super::convolution::Kernel;
use super::float_operation::FloatOperation;
use super::linear::{Ends, Matrix};
use super::ranging::Ranging;
use super::{Keep, Operation, Program, Runner, Step};
use crate::engine::division;
use crate::engine::pools::Pools;
use crate::engine::report::SparseLayer;
use crate::onnx::ENGINE;
use crate::{DeployError, Initializer, OnnxModel, OnnxNode};
use codes::{is_product_of_codes, on_the_fly};
use kinds::Kinds;

pub(super) fn plan(model: &OnnxModel, keep: Keep, pools: &Pools) -> Result<Runner, DeployError> {
    let constants = Constants::of(model);
    let mut planner = Planner {
        model,
        keep,
        kinds: Kinds::of(model, &constants),
        constants,
        readers: HashMap::new(),
        makers: HashMap::new(),
        slots: HashMap::new(),
        steps: Vec::new(),
        used: HashSet::new(),
        packed: HashMap::new(),
        kernels: HashMap::new(),
        ends: Shared::default(),
        float_operations: Shared::default(),
        others: Vec::new(),
        pools,
        resident_bytes: 0,
        has_many_rows: false,
        dense_zeros: Vec::new(),
    };
    for (index, node) in model.nodes.iter().enumerate() {
        let made = node.outputs.iter().map(|name| (name.as_str(), index));
        planner.makers.extend(made);
        for input in node.reads() {
            let readers: &mut Vec<usize> = planner.readers.entry(input).or_default();
            if readers.last() != Some(&index) {
                readers.push(index);
            }
        }
    }
    planner.plan()
}

struct Planner<'a> {
    model: &'a OnnxModel,
    keep: Keep,
    constants: Constants<'a>,
    kinds: Kinds<'a>,
    readers: HashMap<&'a str, Vec<usize>>,
    makers: HashMap<&'a str, usize>,
    slots: HashMap<&'a str, usize>,
    steps: Vec<Step>,
    /// Nodes that are part of a step already.
    used: HashSet<usize>,
    /// Weights that several nodes read.
    packed: HashMap<String, Matrix>,
    kernels: HashMap<String, Arc<Kernel>>,
    /// By the weight that they follow.
    ends: Shared<Ends>,
    /// By operator and operands.
    float_operations: Shared<FloatOperation>,
    /// Nodes for rten, not yet a step.
    others: Vec<usize>,
    pools: &'a Pools,
    resident_bytes: usize,
    has_many_rows: bool,
    dense_zeros: Vec<SparseLayer>,
}

/// What steps have in common is held once: those of a recurrence above all.
struct Shared<T>(HashMap<String, Vec<Arc<T>>>);

impl<T> Default for Shared<T> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<T: PartialEq> Shared<T> {
    /// What was made, or what is equal to it under the same key; and whether it is new.
    fn once(&mut self, key: &str, made: T) -> (Arc<T>, bool) {
        let known = self.0.entry(key.into()).or_default();
        if let Some(same) = known.iter().find(|same| ***same == made) {
            return (same.clone(), false);
        }
        let made = Arc::new(made);
        known.push(made.clone());
        (made, true)
    }
}

/// Of a weight that cannot be packed.
fn refused(weight: &Initializer) -> impl Fn(KernelError) -> DeployError {
    move |error| {
        let by = match error {
            KernelError::Overflow { .. } => " (`Arithmetic::Float`)",
            _ => "",
        };
        DeployError::Load {
            reason: format!("`{}`: {error}{by}", weight.path),
        }
    }
}

impl<'a> Planner<'a> {
    fn plan(mut self) -> Result<Runner, DeployError> {
        let model = self.model;
        let inputs = model.inputs.iter();
        let inputs: Vec<usize> = inputs.map(|info| self.slot(&info.name)).collect();
        for index in 0..model.nodes.len() {
            if self.used.contains(&index) {
                continue;
            }
            let node = &model.nodes[index];
            if let Some(body) = node.body() {
                self.flush()?;
                self.repeat(node, body)?;
                continue;
            }
            if let Some((operation, operands)) = self.part(node) {
                self.flush()?;
                let inputs = operands.into_iter().map(|name| self.slot(name)).collect();
                let outputs = vec![self.slot(&node.outputs[0])];
                self.push(operation, inputs, outputs);
                continue;
            }
            match self.own(index, node)? {
                Some((operation, operands, output)) => {
                    self.flush()?;
                    let inputs = operands.into_iter().map(|name| self.slot(name)).collect();
                    let outputs = vec![self.slot(output)];
                    self.push(operation, inputs, outputs);
                }
                None if self.used.contains(&index) => {}
                None => self.others.push(index),
            }
        }
        self.flush()?;
        let outputs: Vec<usize> = model
            .outputs
            .iter()
            .map(|info| self.slot(&info.name))
            .collect();
        self.free(&outputs);
        Ok(Runner {
            slots: self.slots.len(),
            steps: self.steps,
            inputs,
            outputs,
            resident_bytes: self.resident_bytes,
            has_many_rows: self.has_many_rows,
            dense_zeros: self.dense_zeros,
            pool: None,
        })
    }

    fn slot(&mut self, name: &'a str) -> usize {
        let next = self.slots.len();
        *self.slots.entry(name).or_insert(next)
    }

    fn push(&mut self, operation: Operation, inputs: Vec<usize>, outputs: Vec<usize>) {
        self.steps.push(Step {
            operation,
            inputs,
            outputs,
            freed: Vec::new(),
        });
    }

    /// Says after which step nothing reads a slot.
    fn free(&mut self, outputs: &[usize]) {
        let mut read: HashSet<usize> = outputs.iter().copied().collect();
        for step in self.steps.iter_mut().rev() {
            for slot in step.inputs.iter().chain(&step.outputs) {
                if read.insert(*slot) {
                    step.freed.push(*slot);
                }
            }
        }
    }

    /// What is left to rten becomes a model of its own.
    fn flush(&mut self) -> Result<(), DeployError> {
        let others = std::mem::take(&mut self.others);
        if others.is_empty() {
            return Ok(());
        }
        let model = self.model;
        let nodes = others.iter().map(|at| model.nodes[*at].clone());
        let mut nodes: Vec<OnnxNode> = nodes.collect();
        let made: HashSet<&str> = nodes
            .iter()
            .flat_map(|node| node.outputs.iter().map(String::as_str))
            .collect();
        let (mut inputs, mut initializers, mut seen) = (Vec::new(), Vec::new(), HashSet::new());
        let all = others.iter().flat_map(|at| &model.nodes[*at].inputs);
        for name in all.filter(|name| !name.is_empty() && !made.contains(name.as_str())) {
            if !seen.insert(name.as_str()) {
                continue;
            }
            match self.constants.get(name) {
                Some(constant) => {
                    self.resident_bytes += constant.bytes.len();
                    initializers.push(constant.clone());
                }
                None => inputs.push(name.as_str()),
            }
        }
        let results: HashSet<&str> = model.outputs.iter().map(|o| o.name.as_str()).collect();
        let mut outputs = Vec::new();
        for name in others.iter().flat_map(|at| &model.nodes[*at].outputs) {
            let readers = self.readers.get(name.as_str());
            let outside = readers.is_some_and(|all| all.iter().any(|at| !others.contains(at)));
            if outside || results.contains(name.as_str()) {
                outputs.push(name.as_str());
            }
        }
        division::write_out(&mut nodes, &mut initializers, &outputs);
        let program = Program::part(&nodes, &initializers, &inputs, &outputs, self.pools.rten())?;
        let inputs = inputs.into_iter().map(|name| self.slot(name)).collect();
        let outputs = outputs.into_iter().map(|name| self.slot(name)).collect();
        self.push(Operation::Foreign(Box::new(program)), inputs, outputs);
        Ok(())
    }

    /// The operation of a node, what it reads and what it makes; `None` for rten.
    #[allow(clippy::type_complexity)]
    fn own(
        &mut self,
        index: usize,
        node: &'a OnnxNode,
    ) -> Result<Option<(Operation, Vec<&'a str>, &'a str)>, DeployError> {
        let (Some(x), Some(out)) = (node.inputs.first(), node.outputs.first()) else {
            return Ok(None);
        };
        let (x, out) = (x.as_str(), out.as_str());
        let of_codes = is_product_of_codes(node);
        if !of_codes && self.kinds.is_integer(x) {
            return Ok(None);
        }
        // What follows from constants alone rten computes once, when it loads the model.
        let is_constant = self.constants.get(x).is_some();
        let product = match node.operator {
            _ if is_constant => None,
            "MatMulInteger" | "MatMulIntegerBlocks" | "MatMul" | "MatMulNBits" => {
                self.linear(node, out)?
            }
            "ConvInteger" | "Conv" => self.convolution(node, out)?,
            _ => None,
        };
        if let Some((operation, tail)) = product {
            self.used.extend(tail.nodes.iter().copied());
            return Ok(Some((operation, vec![x], tail.output)));
        }
        if of_codes || node.operator == "MatMulNBits" {
            return Err(DeployError::Load {
                reason: format!("`{}` is not written as a product of codes", node.name),
            });
        }
        if let Some(ranging) = self.ranging(node) {
            let mut readers = self.readers.get(out).into_iter().flatten();
            let last = readers.all(|at| self.model.nodes[*at].operator == "ConvInteger");
            return Ok(Some((Operation::Quantize { ranging, last }, vec![x], out)));
        }
        // Not in two steps by rten, which has a code for what is no number.
        if let Some((ranging, back, rounded)) = self.rounding(node) {
            self.used.insert(back);
            return Ok(Some((Operation::Round(ranging), vec![x], rounded)));
        }
        if node.domain == ENGINE {
            return match on_the_fly(node) {
                Some(grid) if node.operator == "RoundActivation" => Ok(Some((
                    Operation::Round(Ranging::OnTheFly(grid)),
                    vec![x],
                    out,
                ))),
                _ => Err(DeployError::Load {
                    reason: format!(
                        "the codes of `{}` are read by more than products",
                        node.name
                    ),
                }),
            };
        }
        // The product of two scales is part of the products that it is for.
        if node.operator == "Mul" && self.is_step(node) {
            self.used.insert(index);
            return Ok(None);
        }
        if is_constant && !matches!(node.operator, "Add" | "Sub" | "Mul" | "Div") {
            return Ok(None);
        }
        let Some((operation, operands)) = self.float_operation(node) else {
            return Ok(None);
        };
        let bytes = operation.bytes();
        let constants = node.inputs.iter();
        let constants = constants.filter(|name| self.constants.get(name).is_some());
        let constants: Vec<&str> = constants.map(String::as_str).collect();
        let key = format!("{} {}", node.operator, constants.join(" "));
        let (operation, is_new) = self.float_operations.once(&key, operation);
        if is_new {
            self.resident_bytes += bytes;
        }
        Ok(Some((Operation::Float(operation), operands, out)))
    }

    /// The one node that reads a value, which is no result.
    fn sole(&self, name: &str) -> Option<(usize, &'a OnnxNode)> {
        let is_result = self.model.outputs.iter().any(|info| info.name == name);
        match self.readers.get(name).map(Vec::as_slice) {
            Some([reader]) if !is_result => Some((*reader, &self.model.nodes[*reader])),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ElementType;

    #[test]
    fn a_weight_that_cannot_be_packed_is_named_with_what_helps() {
        let weight = Initializer {
            name: "layer.weight.1".into(),
            path: "layer.weight".into(),
            element: ElementType::I8,
            shape: vec![0, 0],
            bytes: Vec::new(),
        };
        let refused = refused(&weight);
        let sum = 1 << 40;
        let overflow = refused(KernelError::Overflow { column: 17, sum }).to_string();
        assert!(overflow.contains("`layer.weight`: the sums of column 17"));
        assert!(overflow.ends_with("multiply in floats (`Arithmetic::Float`)"));
        let bits = refused(KernelError::Bits { bits: 5 }).to_string();
        assert!(bits.contains("`layer.weight`") && !bits.contains("Arithmetic"));
    }
}
