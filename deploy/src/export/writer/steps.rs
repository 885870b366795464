//! The step of a loop, which becomes a graph of its own.

use std::collections::HashSet;

use super::Writer;
use crate::onnx::{Attribute, Body};
use crate::{ElementType, OnnxNode, ValueInfo};

/// What surrounds a loop's step.
pub(super) struct Around {
    nodes: Vec<OnnxNode>,
    /// How many steps there are, as a list of one number.
    count: String,
    /// What the states are before the first step.
    initial: Vec<String>,
    /// The number of the step, whether there is one, and what the states are in it.
    given: Vec<ValueInfo>,
}

impl Writer<'_> {
    /// What follows is the step of a loop, with these states.
    pub(crate) fn begin_step(
        &mut self,
        count: String,
        initial: Vec<String>,
        states: Vec<ValueInfo>,
    ) {
        let step = [("step", ElementType::I64), ("goes_on", ElementType::Bool)];
        let given = step.map(|(name, element)| ValueInfo {
            name: self.unique(name),
            element,
            shape: Vec::new(),
        });
        self.around = Some(Around {
            nodes: std::mem::take(&mut self.nodes),
            count,
            initial,
            given: given.into_iter().chain(states).collect(),
        });
    }

    /// The number of the step that is being written, from 0, without axes.
    pub(crate) fn step(&self) -> Option<String> {
        Some(self.around.as_ref()?.given[0].name.clone())
    }

    /// Ends the step, with what the states are in the next one and what is collected. Returns what the states
    /// are after the last step, and all that was collected, along an axis before the others.
    pub(crate) fn end_step(&mut self, made: Vec<ValueInfo>) -> Option<Vec<String>> {
        let Around {
            mut nodes,
            count,
            initial,
            given,
        } = self.around.take()?;
        // What is the same in each step is computed once, before; what follows from constants alone stays where
        // it is read, since runtimes join it to a product.
        let mut own: HashSet<String> = given.iter().map(|info| info.name.clone()).collect();
        let step = std::mem::take(&mut self.nodes);
        let initializers = self.initializers.iter().map(|one| one.name.as_str());
        let mut fixed: HashSet<&str> = initializers.chain([""]).collect();
        let mut is_own = vec![false; step.len()];
        let mut is_fixed = vec![false; step.len()];
        for (at, node) in step.iter().enumerate() {
            let reads = node.reads();
            is_own[at] = reads.iter().any(|name| own.contains(*name));
            is_fixed[at] = reads.iter().all(|name| fixed.contains(name));
            if is_own[at] {
                own.extend(node.outputs.iter().cloned());
            }
            if is_fixed[at] {
                fixed.extend(node.outputs.iter().map(String::as_str));
            }
        }
        // What is read by what is computed before.
        let mut before: HashSet<String> = HashSet::new();
        for (at, node) in step.iter().enumerate().rev() {
            let is_read = || node.outputs.iter().any(|name| before.contains(name));
            if !is_own[at] && (!is_fixed[at] || is_read()) {
                before.extend(node.reads().into_iter().map(String::from));
            } else if !is_own[at] {
                is_own[at] = true;
                own.extend(node.outputs.iter().cloned());
            }
        }
        let mut body = Vec::new();
        for (node, is_own) in step.into_iter().zip(is_own) {
            match is_own {
                false => nodes.push(node),
                true => body.push(node),
            }
        }
        self.computed
            .retain(|_, names| !names.iter().any(|name| own.contains(name)));
        self.once.retain(|_, name| !own.contains(name));
        self.of.retain(|_, name| !own.contains(name));
        self.nodes = body;
        let goes_on = given[1].clone();
        let outputs = std::iter::once(goes_on).chain(made).map(|info| {
            // A name of its own, that a node makes.
            let name = self.unique("next");
            self.push("", "Identity", vec![info.name], vec![name.clone()], vec![]);
            ValueInfo { name, ..info }
        });
        let outputs: Vec<ValueInfo> = outputs.collect();
        let body = Body {
            nodes: std::mem::replace(&mut self.nodes, nodes),
            inputs: given,
            outputs,
        };
        let count = self.emit("Squeeze", vec![count], "steps", vec![]);
        let goes_on = self.initializer("goes_on", ElementType::Bool, &[], vec![1]);
        let made = body.outputs.len() - 1;
        let names: Vec<String> = (0..made).map(|_| self.unique("Loop")).collect();
        let inputs = [count, goes_on].into_iter().chain(initial).collect();
        let body = vec![Attribute::Body("body", Box::new(body))];
        self.push("", "Loop", inputs, names.clone(), body);
        Some(names)
    }
}
