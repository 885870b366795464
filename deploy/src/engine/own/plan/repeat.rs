//! The step of a loop, as a model of its own.

use std::collections::{BTreeSet, HashSet};

use super::super::repeat::Repeat;
use super::{Keep, Operation, Planner, Program, plan};
use crate::engine::own::attributes::int;
use crate::engine::pools::Pools;
use crate::onnx::Body;
use crate::{DeployError, Dimension, ElementType, Initializer, OnnxModel, OnnxNode, ValueInfo};

impl<'a> Planner<'a> {
    /// Plans a loop.
    pub(super) fn repeat(&mut self, node: &'a OnnxNode, body: &'a Body) -> Result<(), DeployError> {
        // What follows from constants alone belongs to the products that it is for.
        let (mut fixed, mut initializers) = (BTreeSet::new(), Vec::new());
        let (mut captured, mut seen) = (Vec::new(), HashSet::new());
        let mut names = body.captured();
        while let Some(name) = names.pop() {
            if !seen.insert(name) {
                continue;
            }
            let maker = self.makers.get(name).filter(|_| self.kinds.is_fixed(name));
            match (self.constants.get(name), maker) {
                (Some(constant), _) => initializers.push(constant.clone()),
                (None, Some(maker)) => {
                    fixed.insert(*maker);
                    names.extend(self.model.nodes[*maker].reads());
                }
                (None, None) if name.is_empty() => {}
                (None, None) => captured.push(name),
            }
        }
        let fixed = fixed.into_iter().map(|at| &self.model.nodes[at]);
        let mut nodes: Vec<OnnxNode> = fixed.chain(&body.nodes).cloned().collect();
        let infos = captured.iter().map(|name| ValueInfo {
            name: (*name).into(),
            element: match self.kinds.is_integer(name) {
                true => ElementType::I64,
                false => ElementType::F32,
            },
            shape: Vec::new(),
        });
        let inputs: Vec<ValueInfo> = body.inputs.iter().cloned().chain(infos).collect();
        let made: HashSet<String> = (inputs.iter().map(|info| info.name.clone()))
            .chain(nodes.iter().flat_map(|node| node.outputs.clone()))
            .collect();
        // The results themselves, instead of the copies that have their names; each step is followed by another.
        let mut outputs: Vec<ValueInfo> = body.outputs[1..].to_vec();
        for info in &mut outputs {
            let copies =
                |node: &OnnxNode| node.operator == "Identity" && node.outputs[0] == info.name;
            let copy = nodes.iter().position(copies);
            if let Some(copy) = copy.filter(|at| made.contains(&nodes[*at].inputs[0])) {
                info.name = nodes.remove(copy).inputs.remove(0);
            }
        }
        let mut step = OnnxModel {
            nodes,
            initializers,
            inputs,
            outputs,
        };
        step.tidy();
        let keep = Keep {
            sparse: false,
            ..self.keep
        };
        let step = plan(&step, keep, self.pools)?;
        self.resident_bytes += step.resident_bytes;
        self.has_many_rows |= step.has_many_rows;
        self.dense_zeros.extend(step.dense_zeros.iter().cloned());
        let states = body.inputs[2..].iter().map(|info| info.shape.clone());
        let states: Vec<Vec<Dimension>> = states.collect();
        let parts = body.outputs[1 + states.len()..].iter();
        let parts = parts
            .map(|info| (info.element, info.shape.clone()))
            .collect();
        let repeat = Operation::Repeat(Box::new(Repeat {
            step,
            states,
            parts,
        }));
        // Whether there is a first step is not asked.
        let given = node
            .inputs
            .iter()
            .enumerate()
            .filter(|(place, _)| *place != 1);
        let given = given.map(|(_, name)| name.as_str()).chain(captured);
        let given: Vec<&str> = given.collect();
        for name in &given {
            if let Some(constant) = self.constants.get(name) {
                self.resident_bytes += constant.bytes.len();
                let program = value(constant, self.pools)?;
                let slot = self.slot(name);
                self.push(
                    Operation::Foreign(Box::new(program)),
                    Vec::new(),
                    vec![slot],
                );
            }
        }
        let inputs = given.into_iter().map(|name| self.slot(name)).collect();
        let outputs = node.outputs.iter().map(|name| self.slot(name)).collect();
        self.push(repeat, inputs, outputs);
        Ok(())
    }

    /// What loops need besides: a slice of floats along one axis whose bounds are computed, or that goes back along
    /// the first axis, floats in a shape that is computed, and numbers that follow from that of a step; and what it
    /// reads.
    pub(super) fn part(&self, node: &'a OnnxNode) -> Option<(Operation, Vec<&'a str>)> {
        let is_computed = |name: &str| self.constants.get(name).is_none();
        if let [x, other] = &node.inputs[..]
            && is_computed(x)
        {
            let number = || self.constants.list_of_one(other);
            // Of the number of the step, whose results are lists of one.
            let is_step = self.kinds.is_step_number(x);
            let operation = match node.operator {
                "Reshape"
                    if is_computed(other) && !self.kinds.is_integer(x) && !self.is_of_codes(x) =>
                {
                    Operation::Reshaped(int(node, "allowzero") == Some(1))
                }
                "Reshape" if is_step && number() == Some(1) => {
                    return Some((Operation::Whole(1, 0), vec![&**x]));
                }
                "Mul" if is_step => return Some((Operation::Whole(number()?, 0), vec![&**x])),
                "Add" if is_step => return Some((Operation::Whole(1, number()?), vec![&**x])),
                _ => return None,
            };
            return Some((operation, vec![&**x, &**other]));
        }
        let [x, start, end, axes, steps @ ..] = &node.inputs[..] else {
            return None;
        };
        if node.operator != "Slice" || !is_computed(x) || self.kinds.is_integer(x) {
            return None;
        }
        let [axis] = self.constants.ints(axes)?[..] else {
            return None;
        };
        if let [steps] = steps {
            let of = |name: &str| self.constants.ints(name);
            let goes_back = of(start)? == [-1] && of(end)? == [i64::MIN + 1] && of(steps)? == [-1];
            return (axis == 0 && goes_back).then(|| (Operation::Reversed, vec![&**x]));
        }
        let axis = usize::try_from(axis).ok()?;
        (is_computed(start) && is_computed(end))
            .then(|| (Operation::Part(axis), vec![&**x, &**start, &**end]))
    }

    fn is_of_codes(&self, name: &str) -> bool {
        let maker = self.maker(name);
        maker.is_some_and(|node| node.operator.contains("Quantize"))
    }

    fn maker(&self, name: &str) -> Option<&'a OnnxNode> {
        self.makers.get(name).map(|at| &self.model.nodes[*at])
    }
}

/// What gives a constant.
fn value(constant: &Initializer, pools: &Pools) -> Result<Program, DeployError> {
    let copy = "copy";
    let node = OnnxNode {
        name: copy.into(),
        operator: "Identity",
        domain: "",
        inputs: vec![constant.name.clone()],
        outputs: vec![copy.into()],
        attributes: Vec::new(),
    };
    let constants = std::slice::from_ref(constant);
    Program::part(&[node], constants, &[], &[copy], pools.rten())
}
