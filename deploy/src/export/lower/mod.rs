//! Operations of Burn as operators of ONNX: one file per family.

mod activation;
mod attention;
mod base;
mod convolution;
mod float;
mod integer;
mod loops;
mod numeric;
mod pool;
mod resize;

use burn::backend::ir::{
    BaseOperationIr, FloatOperationIr, ModuleOperationIr, NumericOperationIr, OperationIr,
    ScalarIr, TensorIr,
};
use burn_lean_graph::{Graph, LoopPart, Node};

use super::Writer;
use crate::onnx::Attribute;
use crate::{DeployError, Edge};
pub(crate) use resize::is_exact;

/// Why an operation has no operator.
pub(crate) enum Unwritten {
    /// In words.
    Operator(String),
    /// Something else failed.
    Error(DeployError),
}

impl From<DeployError> for Unwritten {
    fn from(error: DeployError) -> Self {
        Self::Error(error)
    }
}

impl From<&str> for Unwritten {
    fn from(why: &str) -> Self {
        Self::Operator(why.into())
    }
}

pub(crate) type Written = Result<(), Unwritten>;

impl<'a> Writer<'a> {
    /// Writes an operation, unless its results are constants.
    pub(crate) fn lower(&mut self, node: Node<'a>) -> Result<(), DeployError> {
        let operation = node.operation();
        if operation.outputs().all(|out| self.constant(out).is_some()) {
            return Ok(());
        }
        let plain = match rounds_operands(operation) {
            true => Ok(Vec::new()),
            false => self.round_operands(node),
        };
        let written = plain.and_then(|plain| {
            let written = self.operation(node);
            for (tensor, name) in plain {
                self.set(&tensor, name);
            }
            written
        });
        written.map_err(|error| match error {
            Unwritten::Error(error) => error,
            Unwritten::Operator(why) => DeployError::Operator {
                operation: node.name(),
                module: module_of(self.graph, node),
                why,
            },
        })
    }

    fn operation(&mut self, node: Node<'a>) -> Written {
        match node.operation() {
            OperationIr::BaseFloat(op) | OperationIr::BaseInt(op) | OperationIr::BaseBool(op) => {
                self.base(op, node)
            }
            OperationIr::NumericFloat(_, op) => self.numeric(op, node),
            OperationIr::NumericInt(_, op) => self.numeric_int(op, node),
            OperationIr::Float(_, op) => self.float(op, node),
            OperationIr::Int(op) => self.int(op),
            OperationIr::Bool(op) => self.boolean(op),
            OperationIr::Activation(op) => self.activation(op),
            OperationIr::Module(op) => self.module(op, node),
            OperationIr::Init(_) | OperationIr::Drop(_) => Ok(()),
            operation @ OperationIr::Custom(_) => match LoopPart::of(operation) {
                Some(part) => self.looped(part, node),
                None => Err("it belongs to a backend".into()),
            },
            OperationIr::Distributed(_) => Err("it belongs to a backend".into()),
        }
    }

    /// Rounds what an operation reads as its quantizers do; the tensors that have other names until it
    /// is written, with their own.
    fn round_operands(&mut self, node: Node<'a>) -> Result<Vec<(TensorIr, String)>, Unwritten> {
        let mut plain = Vec::new();
        for (operand, tensor) in node.operation().inputs().enumerate() {
            let edge = Edge {
                node: node.index(),
                operand,
            };
            let is_rounded = |(other, _): &(TensorIr, String)| other.id == tensor.id;
            if self.quantization.activation(edge, None).is_none() || plain.iter().any(is_rounded) {
                continue;
            }
            let name = self.operand(tensor)?;
            let rounded = self.activation_operand(node, operand, tensor)?;
            self.set(tensor, rounded);
            plain.push((tensor.clone(), name));
        }
        Ok(plain)
    }

    fn module(&mut self, op: &'a ModuleOperationIr, node: Node<'a>) -> Written {
        use ModuleOperationIr::*;
        match op {
            Linear(o) => self.linear(node, &o.x, &o.weight, o.bias.as_ref(), &o.out),
            Conv1d(o) => self.conv1d(node, o),
            Conv2d(o) => self.conv2d(node, o),
            Conv3d(o) => self.conv3d(node, o),
            ConvTranspose1d(o) => self.conv_transpose1d(node, o),
            ConvTranspose2d(o) => self.conv_transpose2d(node, o),
            ConvTranspose3d(o) => self.conv_transpose3d(node, o),
            BatchNorm(o) => self.batch_norm(o),
            LayerNorm(o) => {
                let mut inputs = vec![self.operand(&o.input)?, self.operand(&o.gamma)?];
                if let Some(beta) = &o.beta {
                    inputs.push(self.operand(beta)?);
                }
                let attributes = vec![
                    Attribute::Int("axis", -1),
                    Attribute::Float("epsilon", o.epsilon.elem()),
                ];
                self.put("LayerNormalization", inputs, &o.out, attributes);
                Ok(())
            }
            Embedding(o) => {
                let indices = self.indices(&o.indices)?;
                let name = self.table(node, &o.weights, indices, &o.out)?;
                self.set(&o.out, name);
                Ok(())
            }
            Attention(o) => self.attention(o, node),
            AvgPool1d(_) | AvgPool2d(_) | MaxPool1d(_) | MaxPool2d(_) | AdaptiveAvgPool1d(_)
            | AdaptiveAvgPool2d(_) | AdaptiveAvgPool3d(_) => self.pool(op),
            Interpolate(o) => self.interpolate(o),
            _ => Err("ONNX has no operator for it, or this crate does not write it".into()),
        }
    }

    /// A node that computes `out`.
    fn put(
        &mut self,
        operator: &'static str,
        inputs: Vec<String>,
        out: &TensorIr,
        attributes: Vec<Attribute>,
    ) {
        let name = self.emit(operator, inputs, operator, attributes);
        self.set(out, name);
    }

    fn unary(&mut self, operator: &'static str, x: &TensorIr, out: &TensorIr) -> Written {
        let x = self.operand(x)?;
        self.put(operator, vec![x], out, vec![]);
        Ok(())
    }

    fn binary(
        &mut self,
        operator: &'static str,
        lhs: &TensorIr,
        rhs: &TensorIr,
        out: &TensorIr,
    ) -> Written {
        let inputs = vec![self.operand(lhs)?, self.operand(rhs)?];
        self.put(operator, inputs, out, vec![]);
        Ok(())
    }

    fn with_scalar(
        &mut self,
        operator: &'static str,
        lhs: &TensorIr,
        rhs: ScalarIr,
        out: &TensorIr,
    ) -> Written {
        let inputs = vec![self.operand(lhs)?, self.scalar_for(out, rhs, lhs.dtype)?];
        self.put(operator, inputs, out, vec![]);
        Ok(())
    }
}

/// The module of an operation; of one that reads no parameter, what it comes after.
pub(crate) fn module_of(graph: &Graph, node: Node<'_>) -> String {
    let named = |node: Node<'_>| match node.module() {
        "?" => None,
        "" => Some("the model".to_string()),
        module => Some(format!("`{module}`")),
    };
    let before = || graph.nodes().take(node.index()).filter_map(named).last();
    named(node)
        .or_else(|| Some(format!("what follows {}", before()?)))
        .unwrap_or_else(|| "a module that is not known".into())
}

/// Whether an operation is written with each operand as its quantizer has it; other operations have
/// rounded operands.
pub(crate) fn rounds_operands(operation: &OperationIr) -> bool {
    match operation {
        // What frames the step of a loop.
        OperationIr::Custom(_) => true,
        OperationIr::Float(_, float) => matches!(float, FloatOperationIr::Matmul(_)),
        OperationIr::NumericFloat(_, numeric) => matches!(numeric, NumericOperationIr::Add(_)),
        OperationIr::BaseFloat(base) => matches!(base, BaseOperationIr::Cat(_)),
        OperationIr::Module(module) => matches!(
            module,
            ModuleOperationIr::Linear(_)
                | ModuleOperationIr::Conv1d(_)
                | ModuleOperationIr::Conv2d(_)
                | ModuleOperationIr::Conv3d(_)
                | ModuleOperationIr::ConvTranspose1d(_)
                | ModuleOperationIr::ConvTranspose2d(_)
                | ModuleOperationIr::ConvTranspose3d(_)
                | ModuleOperationIr::Embedding(_)
                | ModuleOperationIr::Attention(_)
        ),
        _ => false,
    }
}

fn to_ints(values: &[usize]) -> Vec<i64> {
    values.iter().map(|value| *value as i64).collect()
}
