//! From a model's nodes to steps: what follows a product becomes part of it, weights are packed.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use burn_lean_kernels::{
    CodeGrid, Epilogue, FloatMatrix, IntegerMatrix, KernelError, SparseMatrix,
};
use rten::ThreadPool;

use super::attributes::{Constants, float, int, ints, sizes};
use super::between::{Arithmetic, Between, Pool, Side};
use super::convolution::{Convolution, Kernel};
use super::linear::{Ends, Linear, Matrix};
use super::value::Floats;
use super::{Keep, Operation, Program, Runner, Step};
use crate::onnx::Attribute;
use crate::{DeployError, OnnxModel, OnnxNode};

pub(super) fn plan(
    model: &OnnxModel,
    keep: Keep,
    foreign: &Arc<ThreadPool>,
) -> Result<Runner, DeployError> {
    let mut planner = Planner {
        model,
        keep,
        constants: Constants::of(model),
        readers: HashMap::new(),
        makers: HashMap::new(),
        slots: HashMap::new(),
        steps: Vec::new(),
        used: HashSet::new(),
        packed: HashMap::new(),
        others: Vec::new(),
        foreign,
        resident_bytes: 0,
        is_sparse: false,
    };
    for (index, node) in model.nodes.iter().enumerate() {
        let made = node.outputs.iter().map(|name| (name.as_str(), index));
        planner.makers.extend(made);
        for input in &node.inputs {
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
    readers: HashMap<&'a str, Vec<usize>>,
    makers: HashMap<&'a str, usize>,
    slots: HashMap<&'a str, usize>,
    steps: Vec<Step>,
    /// Nodes that are part of a step already.
    used: HashSet<usize>,
    /// Weights that several nodes read.
    packed: HashMap<String, Matrix>,
    /// Nodes for rten, not yet a step.
    others: Vec<usize>,
    foreign: &'a Arc<ThreadPool>,
    resident_bytes: usize,
    is_sparse: bool,
}

/// What follows the sums of a product.
#[derive(Default)]
struct Tail<'a> {
    /// Known, or of the weight alone.
    scale: Option<Vec<f32>>,
    is_dynamic: bool,
    bias: Option<Vec<f32>>,
    gain: Option<[Vec<f32>; 2]>,
    clamp: Option<(f32, f32)>,
    nodes: Vec<usize>,
    output: &'a str,
}

fn refused(error: KernelError) -> DeployError {
    DeployError::Load {
        reason: error.to_string(),
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
            is_sparse: self.is_sparse,
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
        let nodes: Vec<OnnxNode> = others.iter().map(|at| model.nodes[*at].clone()).collect();
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
        let program = Program::part(
            &nodes,
            &initializers,
            &inputs,
            &outputs,
            self.foreign.clone(),
        )?;
        let inputs = inputs.into_iter().map(|name| self.slot(name)).collect();
        let outputs = outputs.into_iter().map(|name| self.slot(name)).collect();
        self.push(Operation::Foreign(Box::new(program)), inputs, outputs);
        Ok(())
    }

    /// The one node that reads a value, which is no result.
    fn sole(&self, name: &str) -> Option<(usize, &'a OnnxNode)> {
        let is_result = self.model.outputs.iter().any(|info| info.name == name);
        match self.readers.get(name).map(Vec::as_slice) {
            Some([reader]) if !is_result => Some((*reader, &self.model.nodes[*reader])),
            _ => None,
        }
    }

    /// The operand of a node that is not this one.
    fn other(node: &'a OnnxNode, name: &str) -> Option<&'a str> {
        match &node.inputs[..] {
            [a, b] if a == name => Some(b),
            [a, b] if b == name => Some(a),
            _ => None,
        }
    }

    /// What follows sums of `channels`, if the model says it in the way that products are written.
    fn tail(&self, sums: &'a str, channels: usize, of_codes: bool) -> Option<Tail<'a>> {
        let mut tail = Tail {
            output: sums,
            ..Tail::default()
        };
        if of_codes {
            let (cast, node) = self
                .sole(sums)
                .filter(|(_, node)| node.operator == "Cast")?;
            let made = node.outputs.first()?;
            let (at, node) = self.sole(made).filter(|(_, node)| node.operator == "Mul")?;
            let step = Self::other(node, made)?;
            match self.per_channel(step, channels) {
                Some(scale) => tail.scale = Some(scale),
                None => {
                    // The scale of the values at hand, times those of the weight.
                    let product = &self.model.nodes[*self.makers.get(step)?];
                    let scales = (product.operator == "Mul").then(|| {
                        let mut all = product.inputs.iter();
                        all.find_map(|name| self.per_channel(name, channels))
                    });
                    tail.scale = Some(scales??);
                    tail.is_dynamic = true;
                }
            }
            tail.nodes.extend([cast, at]);
            tail.output = node.outputs.first()?;
        }
        while let Some((at, node)) = self.sole(tail.output) {
            let untouched = tail.clamp.is_none() && tail.gain.is_none();
            match node.operator {
                "Add" if untouched && tail.bias.is_none() => {
                    let bias = Self::other(node, tail.output);
                    let Some(bias) = bias.and_then(|bias| self.per_channel(bias, channels)) else {
                        break;
                    };
                    tail.bias = Some(bias);
                }
                "BatchNormalization" if untouched => match self.affine(node) {
                    Some(gain) if gain[0].len() == channels => tail.gain = Some(gain),
                    _ => break,
                },
                "Relu" | "Clip" => match self.limits(node) {
                    Some((low, high)) => {
                        let (before, after) =
                            tail.clamp.unwrap_or((f32::NEG_INFINITY, f32::INFINITY));
                        if before > high || after < low {
                            break;
                        }
                        tail.clamp = Some((before.max(low), after.min(high)));
                    }
                    None => break,
                },
                _ => break,
            }
            tail.nodes.push(at);
            tail.output = node.outputs.first()?;
        }
        Some(tail)
    }

    /// One number for each channel: also one for all.
    fn per_channel(&self, name: &str, channels: usize) -> Option<Vec<f32>> {
        let values = self.constants.floats(name)?;
        let shape = &self.constants.get(name)?.shape;
        let axes = shape.iter().filter(|size| **size != 1).count();
        match values[..] {
            [value] => Some(vec![value; channels]),
            _ if values.len() == channels && axes <= 1 => Some(values),
            _ => None,
        }
    }

    /// γ / √(σ² + ε), and what is added.
    fn affine(&self, node: &OnnxNode) -> Option<[Vec<f32>; 2]> {
        let mut parts = node.inputs.iter().skip(1);
        let mut next = || self.constants.floats(parts.next()?);
        let (gamma, beta, mean, variance) = (next()?, next()?, next()?, next()?);
        let epsilon = float(node, "epsilon")?;
        let gain: Vec<f32> = gamma
            .iter()
            .zip(&variance)
            .map(|(gamma, variance)| gamma / (variance + epsilon).sqrt())
            .collect();
        let shift = (0..gain.len()).map(|c| beta[c] - mean[c] * gain[c]);
        let shift = shift.collect();
        Some([gain, shift])
    }

    fn limits(&self, node: &OnnxNode) -> Option<(f32, f32)> {
        if node.operator == "Relu" {
            return Some((0.0, f32::INFINITY));
        }
        let limit = |at: usize, none: f32| match node.inputs.get(at).map(String::as_str) {
            None | Some("") => Some(none),
            Some(name) => self.constants.number(name),
        };
        Some((limit(1, f32::NEG_INFINITY)?, limit(2, f32::INFINITY)?))
    }

    /// What happens to the sums of channels from `first` on.
    fn ends(&self, tail: &Tail<'_>, first: usize, count: usize) -> Ends {
        let part = |values: &[f32]| values[first..first + count].to_vec();
        let mut epilogue = Epilogue::new(count);
        let scale = tail.scale.as_deref().map(part);
        let bias = tail.bias.as_deref().map(part);
        let codes = match (&scale, &bias) {
            (Some(scale), Some(bias)) if !tail.is_dynamic => bias_codes(bias, scale),
            _ => None,
        };
        match (codes, bias) {
            (Some(codes), _) => epilogue = epilogue.with_code_bias(&codes),
            (None, Some(bias)) => epilogue = epilogue.with_bias(&bias),
            (None, None) => {}
        }
        if let Some([gain, shift]) = &tail.gain {
            epilogue = epilogue.with_gain(&part(gain), &part(shift));
        }
        if let Some((low, high)) = tail.clamp {
            epilogue = epilogue.with_clamp(low, high);
        }
        match (scale, tail.is_dynamic) {
            (Some(scale), false) => epilogue = epilogue.with_scale(&scale),
            (scale, _) => {
                return Ends {
                    epilogue,
                    dynamic: scale,
                };
            }
        }
        Ends {
            epilogue,
            dynamic: None,
        }
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
        let of_codes = matches!(node.operator, "MatMulInteger" | "ConvInteger");
        if !of_codes && self.is_integer(x) {
            return Ok(None);
        }
        let product = match node.operator {
            "MatMulInteger" | "MatMul" | "MatMulNBits" => self.linear(node, out)?,
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
        if let Some(grid) = self.grid(node) {
            let mut readers = self.readers.get(out).into_iter().flatten();
            let last = readers.all(|at| self.model.nodes[*at].operator == "ConvInteger");
            return Ok(Some((Operation::Quantize { grid, last }, vec![x], out)));
        }
        // The product of two scales is part of the products that it is for.
        if node.operator == "Mul" && self.is_step(node) {
            self.used.insert(index);
            return Ok(None);
        }
        if self.constants.get(x).is_some()
            && !matches!(node.operator, "Add" | "Sub" | "Mul" | "Div")
        {
            return Ok(None);
        }
        let Some((between, operands)) = self.between(node) else {
            return Ok(None);
        };
        Ok(Some((Operation::Between(between), operands, out)))
    }

    /// The grid of a node that makes codes: `None` inside for that of the values at hand.
    fn grid(&self, node: &OnnxNode) -> Option<Option<CodeGrid>> {
        let out = node.outputs.first()?;
        let readers = self.readers.get(out.as_str())?;
        let products = |at: &usize| {
            let node = &self.model.nodes[*at];
            matches!(node.operator, "MatMulInteger" | "ConvInteger") && node.inputs[0] == *out
        };
        let one_kind = |operator: &str| {
            let mut all = readers.iter().map(|at| self.model.nodes[*at].operator);
            all.all(|other| other == operator)
        };
        if !readers.iter().all(products) || !(one_kind("ConvInteger") || one_kind("MatMulInteger"))
        {
            return None;
        }
        match node.operator {
            "DynamicQuantizeLinear" => Some(None),
            "QuantizeLinear" => {
                let scale = self.constants.number(&node.inputs[1])?;
                let zero_point = self.constants.get(&node.inputs[2])?;
                let [zero_point] = zero_point.bytes[..] else {
                    return None;
                };
                let zero_point = i16::from(zero_point);
                Some(Some(CodeGrid {
                    scale,
                    low: -zero_point,
                    high: 255 - zero_point,
                }))
            }
            _ => None,
        }
    }

    /// Whether a node multiplies the scale of values at hand by those of a weight.
    fn is_step(&self, node: &OnnxNode) -> bool {
        let dynamic = |name: &String| {
            let maker = self.makers.get(name.as_str());
            maker.is_some_and(|at| {
                let before = &self.model.nodes[*at];
                before.operator == "DynamicQuantizeLinear" && before.outputs.get(1) == Some(name)
            })
        };
        node.inputs.iter().any(dynamic)
    }

    fn between(&self, node: &'a OnnxNode) -> Option<(Between, Vec<&'a str>)> {
        let x = node.inputs.first()?.as_str();
        let one = |between| Some((between, vec![x]));
        match node.operator {
            "Relu" | "Clip" => self
                .limits(node)
                .and_then(|(low, high)| one(Between::Clamp(low, high))),
            "Sigmoid" => one(Between::Sigmoid),
            "Tanh" => one(Between::Tanh),
            "Gelu" if node.attributes.is_empty() => one(Between::Gelu),
            "Add" => self.arithmetic(node, Arithmetic::Add),
            "Sub" => self.arithmetic(node, Arithmetic::Subtract),
            "Mul" => self.arithmetic(node, Arithmetic::Multiply),
            "Div" => self.arithmetic(node, Arithmetic::Divide),
            "BatchNormalization" => {
                let [gain, shift] = self.affine(node)?;
                one(Between::Affine(gain, shift))
            }
            "Reshape" => one(Between::Reshape(self.constants.ints(node.inputs.get(1)?)?)),
            "Transpose" => one(Between::Transpose(sizes(node, "perm")?)),
            "MatMul" => {
                let other = node.inputs.get(1)?.as_str();
                let constant = self.constants.get(other).is_some();
                (!constant).then(|| (Between::MatMul, vec![x, other]))
            }
            "Softmax" if int(node, "axis")? == -1 => one(Between::Softmax),
            "LayerNormalization" if int(node, "axis")? == -1 => {
                let gain = self.constants.floats(node.inputs.get(1)?)?;
                let shift = match node.inputs.get(2) {
                    Some(shift) => Some(self.constants.floats(shift)?),
                    None => None,
                };
                one(Between::LayerNorm(gain, shift, float(node, "epsilon")?))
            }
            "MaxPool" if int(node, "ceil_mode").unwrap_or(0) == 0 => one(Between::MaxPool(Pool(
                geometry(node, &sizes(node, "kernel_shape")?)?,
            ))),
            "ReduceMean" => {
                let [axis] = self.constants.ints(node.inputs.get(1)?)?[..] else {
                    return None;
                };
                let axis = usize::try_from(axis).ok()?;
                one(Between::Mean(axis, int(node, "keepdims").unwrap_or(1) == 1))
            }
            "Slice" => {
                let bound = |at: usize| match self.constants.ints(node.inputs.get(at)?)?[..] {
                    [bound] => Some(bound),
                    _ => None,
                };
                let (start, end, axis, step) = (bound(1)?, bound(2)?, bound(3)?, bound(4)?);
                let axis = usize::try_from(axis).ok()?;
                (step == 1).then_some((Between::Slice(axis, start, end), vec![x]))
            }
            _ => None,
        }
    }

    fn arithmetic(&self, node: &'a OnnxNode, kind: Arithmetic) -> Option<(Between, Vec<&'a str>)> {
        let [a, b] = &node.inputs[..] else {
            return None;
        };
        let constant = |name: &str| {
            let shape = self.constants.get(name)?.shape.clone();
            let data = self.constants.floats(name)?;
            Some(Arc::new(Floats {
                shape,
                data,
                last: false,
            }))
        };
        let is_constant = |name: &str| self.constants.get(name).is_some();
        match (is_constant(a), is_constant(b)) {
            (false, false) => Some((Between::Arithmetic(kind, Side::Neither), vec![a, b])),
            (true, false) => {
                let side = Side::Left(constant(a)?);
                Some((Between::Arithmetic(kind, side), vec![b]))
            }
            (false, true) => {
                let side = Side::Right(constant(b)?);
                Some((Between::Arithmetic(kind, side), vec![a]))
            }
            _ => None,
        }
    }

    /// Whether a value is known not to be of floats: it is left to rten.
    fn is_integer(&self, name: &str) -> bool {
        use crate::ElementType::F32;
        if let Some(constant) = self.constants.get(name) {
            return constant.element != F32;
        }
        if let Some(info) = self.model.inputs.iter().find(|info| info.name == name) {
            return info.element != F32;
        }
        let Some(node) = self.makers.get(name).map(|at| &self.model.nodes[*at]) else {
            return false;
        };
        match node.operator {
            "Shape" | "ArgMax" | "ArgMin" | "Equal" | "Greater" | "GreaterOrEqual" | "Less"
            | "LessOrEqual" | "And" | "Or" | "Xor" | "Not" | "IsNaN" | "IsInf" => true,
            "Cast" => int(node, "to") != Some(F32 as i64),
            "TopK" => node.outputs.get(1).is_some_and(|indices| indices == name),
            "ConstantOfShape" => node
                .attributes
                .iter()
                .any(|attribute| matches!(attribute, Attribute::Element(_, of, _) if *of != F32)),
            "Where" => node.inputs.get(1).is_some_and(|x| self.is_integer(x)),
            _ => node.inputs.first().is_some_and(|x| self.is_integer(x)),
        }
    }

    fn linear(
        &mut self,
        node: &'a OnnxNode,
        out: &'a str,
    ) -> Result<Option<(Operation, Tail<'a>)>, DeployError> {
        let Some(weight) = node.inputs.get(1).and_then(|name| self.constants.get(name)) else {
            return Ok(None);
        };
        let shape = match node.operator {
            "MatMulNBits" => match (int(node, "K"), int(node, "N")) {
                (Some(rows), Some(columns)) => vec![rows as usize, columns as usize],
                _ => return Ok(None),
            },
            _ => weight.shape.clone(),
        };
        let [ones @ .., rows, columns] = &shape[..] else {
            return Ok(None);
        };
        let (rows, columns) = (*rows, *columns);
        let of_codes = node.operator == "MatMulInteger";
        let axes = ones.len() + 2;
        if ones.iter().any(|one| *one != 1) || rows == 0 || columns == 0 {
            return Ok(None);
        }
        let Some(tail) = self.tail(out, columns, of_codes) else {
            return Ok(None);
        };
        let key = format!("{} {}", node.operator, weight.name);
        let matrix = match self.packed.get(&key) {
            Some(known) => known.clone(),
            None => {
                let matrix = match node.operator {
                    "MatMulInteger" => {
                        let Some(codes) = self.constants.bytes(&weight.name) else {
                            return Ok(None);
                        };
                        let matrix = IntegerMatrix::new(&codes, rows, columns, width(&codes));
                        Matrix::Codes(Arc::new(matrix.map_err(refused)?))
                    }
                    "MatMulNBits" => match self.blocks(node, rows, columns)? {
                        Some(matrix) => Matrix::Floats(Arc::new(matrix)),
                        None => return Ok(None),
                    },
                    _ => {
                        let Some(values) = self.constants.floats(&weight.name) else {
                            return Ok(None);
                        };
                        let zeros = values.iter().filter(|value| **value == 0.0).count();
                        if self.keep.sparse && 2 * zeros >= values.len() {
                            self.is_sparse = true;
                            let matrix = SparseMatrix::new(&values, rows, columns);
                            Matrix::Sparse(Arc::new(matrix.map_err(refused)?))
                        } else {
                            let matrix = FloatMatrix::new(&values, rows, columns, self.keep.floats);
                            Matrix::Floats(Arc::new(matrix.map_err(refused)?))
                        }
                    }
                };
                self.resident_bytes += matrix.bytes();
                self.packed.insert(key, matrix.clone());
                matrix
            }
        };
        self.resident_bytes += 4 * columns;
        let linear = Linear {
            weight: matrix,
            ends: self.ends(&tail, 0, columns),
            rank: axes,
        };
        Ok(Some((Operation::Linear(linear), tail)))
    }

    /// Codes of 4 or 8 bits, column by column, in blocks.
    fn blocks(
        &self,
        node: &OnnxNode,
        rows: usize,
        columns: usize,
    ) -> Result<Option<FloatMatrix>, DeployError> {
        let (Some(bits), Some(block)) = (int(node, "bits"), int(node, "block_size")) else {
            return Ok(None);
        };
        let (block, bits) = (block as usize, bits as u8);
        let (Some(stored), Some(of_blocks)) = (
            self.constants.get(&node.inputs[1]),
            self.constants.floats(&node.inputs[2]),
        ) else {
            return Ok(None);
        };
        let blocks = rows / block.max(1);
        let mut codes = vec![0_i8; rows * columns];
        for column in 0..columns {
            for row in 0..rows {
                let at = column * rows + row;
                codes[row * columns + column] = match bits {
                    4 => ((stored.bytes[at / 2] >> (at % 2 * 4)) & 15) as i8 - 8,
                    _ => stored.bytes[at].wrapping_sub(128) as i8,
                };
            }
        }
        let mut scales = vec![0.0; blocks * columns];
        for (index, scale) in of_blocks.iter().enumerate() {
            scales[index % blocks * columns + index / blocks] = *scale;
        }
        let matrix = FloatMatrix::of_codes(&codes, [rows, columns], bits, block, &scales);
        matrix.map(Some).map_err(refused)
    }

    fn convolution(
        &mut self,
        node: &'a OnnxNode,
        out: &'a str,
    ) -> Result<Option<(Operation, Tail<'a>)>, DeployError> {
        let of_codes = node.operator == "ConvInteger";
        let constants = &self.constants;
        let Some(weight) = node.inputs.get(1).and_then(|name| constants.get(name)) else {
            return Ok(None);
        };
        let (Some(groups), [to, per_group, taps @ ..]) = (int(node, "group"), &weight.shape[..])
        else {
            return Ok(None);
        };
        let (groups, to, per_group) = (groups as usize, *to, *per_group);
        let Some(geometry) = geometry(node, taps) else {
            return Ok(None);
        };
        let Some(mut tail) = self.tail(out, to, of_codes) else {
            return Ok(None);
        };
        if let (false, Some(name)) = (of_codes, node.inputs.get(2)) {
            // The operator's own, before what follows.
            let Some(bias) = constants.floats(name) else {
                return Ok(None);
            };
            tail.bias = Some(match tail.bias.take() {
                None => bias,
                Some(more) => bias.iter().zip(more).map(|(a, b)| a + b).collect(),
            });
        }
        let taps: usize = taps.iter().product();
        let depthwise = groups == to && per_group == 1;
        let (outputs, terms) = (to / groups.max(1), taps * per_group);
        // From [outputs, channels, taps] to [taps · channels, outputs].
        let kernel = if of_codes {
            let Some(codes) = constants.bytes(&weight.name) else {
                return Ok(None);
            };
            let groups = turned(&codes, [groups, outputs, per_group, taps]);
            match depthwise {
                true => {
                    let all = by_tap(&codes, to, taps);
                    Kernel::DepthwiseCodes(depthwise_of(&all, taps, to)?)
                }
                false => {
                    let pack =
                        |codes: &Vec<i8>| IntegerMatrix::new(codes, terms, outputs, width(codes));
                    let packed = groups.iter().map(pack).collect::<Result<_, _>>();
                    Kernel::Codes(packed.map_err(refused)?)
                }
            }
        } else {
            let Some(values) = constants.floats(&weight.name) else {
                return Ok(None);
            };
            let groups = turned(&values, [groups, outputs, per_group, taps]);
            match depthwise {
                true => {
                    let all = by_tap(&values, to, taps);
                    Kernel::DepthwiseFloats(depthwise_of(&all, taps, to)?)
                }
                false => {
                    let keep = self.keep.floats;
                    let pack = |values: &Vec<f32>| FloatMatrix::new(values, terms, outputs, keep);
                    let packed = groups.iter().map(pack).collect::<Result<_, _>>();
                    Kernel::Floats(packed.map_err(refused)?)
                }
            }
        };
        let ends = match depthwise {
            true => vec![self.ends(&tail, 0, to)],
            false => (0..groups)
                .map(|group| self.ends(&tail, group * outputs, outputs))
                .collect(),
        };
        self.resident_bytes += kernel.bytes() + 4 * to;
        let convolution = Convolution {
            kernel,
            geometry,
            channels: [per_group * groups, to],
            ends,
        };
        Ok(Some((Operation::Convolution(convolution), tail)))
    }
}

fn depthwise_of<T: Copy + Default>(
    values: &[T],
    taps: usize,
    channels: usize,
) -> Result<burn_lean_kernels::Depthwise<T>, DeployError> {
    burn_lean_kernels::Depthwise::new(values, taps, channels).map_err(refused)
}

/// Bits that codes are packed in.
fn width(codes: &[i8]) -> u8 {
    match codes.iter().all(|code| (-8..8).contains(code)) {
        true => 4,
        false => 8,
    }
}

/// Biases as multiples of the scales; `None` where one does not fit 32 bits.
fn bias_codes(bias: &[f32], scale: &[f32]) -> Option<Vec<i32>> {
    let code = |(bias, scale): (&f32, &f32)| {
        let steps = (bias / scale).round_ties_even();
        // Far from where sums of codes are, so that adding one stays in 32 bits.
        (steps.abs() < f32::powi(2.0, 29)).then_some(steps as i32)
    };
    bias.iter().zip(scale).map(code).collect()
}

/// For each group, from `[outputs, channels, taps]` to `[taps, channels, outputs]`.
fn turned<T: Copy>(values: &[T], [groups, outputs, channels, taps]: [usize; 4]) -> Vec<Vec<T>> {
    let group = |group: usize| {
        let first = group * outputs * channels * taps;
        let mut all = Vec::with_capacity(outputs * channels * taps);
        for tap in 0..taps {
            for channel in 0..channels {
                for output in 0..outputs {
                    all.push(values[first + (output * channels + channel) * taps + tap]);
                }
            }
        }
        all
    };
    (0..groups).map(group).collect()
}

/// From `[channels, taps]` to `[taps, channels]`.
fn by_tap<T: Copy>(values: &[T], channels: usize, taps: usize) -> Vec<T> {
    let at = |index: usize| values[index % channels * taps + index / channels];
    (0..channels * taps).map(at).collect()
}

/// Of two axes; one alone is the second.
fn geometry(node: &OnnxNode, kernel: &[usize]) -> Option<burn_lean_kernels::Geometry> {
    let two = |values: &[usize], none: usize| match *values {
        [width] => Some([none, width]),
        [height, width] => Some([height, width]),
        _ => None,
    };
    let or_ones = |name: &str| match ints(node, name) {
        Some(_) => sizes(node, name),
        None => Some(vec![1; kernel.len()]),
    };
    let pads = match ints(node, "pads") {
        Some(_) => sizes(node, "pads")?,
        None => vec![0; 2 * kernel.len()],
    };
    let (before, after) = pads.split_at_checked(kernel.len())?;
    Some(burn_lean_kernels::Geometry {
        kernel: two(kernel, 1)?,
        stride: two(&or_ones("strides")?, 1)?,
        padding: [two(before, 0)?, two(after, 0)?],
        dilation: two(&or_ones("dilations")?, 1)?,
    })
}
