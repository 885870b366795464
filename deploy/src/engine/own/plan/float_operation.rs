//! From ONNX nodes to [`FloatOperation`]s.

use std::sync::Arc;

use super::Planner;
use crate::OnnxNode;
use crate::engine::own::attributes::{float, geometry, int, sizes};
use crate::engine::own::float_operation::{Arithmetic, FloatOperation, Side};
use crate::engine::own::pool::Pool;
use crate::engine::own::value::Floats;

impl<'a> Planner<'a> {
    pub(super) fn float_operation(
        &self,
        node: &'a OnnxNode,
    ) -> Option<(FloatOperation, Vec<&'a str>)> {
        let x = node.inputs.first()?.as_str();
        let one = |operation| Some((operation, vec![x]));
        match node.operator {
            "Relu" | "Clip" => self
                .limits(node)
                .and_then(|(low, high)| one(FloatOperation::Clamp(low, high))),
            "Sigmoid" => one(FloatOperation::Sigmoid),
            "Tanh" => one(FloatOperation::Tanh),
            "Gelu" if node.attributes.is_empty() => one(FloatOperation::Gelu),
            "HardSigmoid" => one(FloatOperation::HardSigmoid(
                float(node, "alpha")?,
                float(node, "beta")?,
            )),
            "LeakyRelu" => one(FloatOperation::LeakyRelu(float(node, "alpha")?)),
            "GlobalAveragePool" => one(FloatOperation::GlobalMean),
            "Concat" => {
                let axis = usize::try_from(int(node, "axis")?).ok()?;
                let inputs: Vec<&str> = node.inputs.iter().map(String::as_str).collect();
                let are_computed = inputs.iter().all(|name| self.constants.get(name).is_none());
                are_computed.then_some((FloatOperation::Concat(axis), inputs))
            }
            "Add" => self.arithmetic(node, Arithmetic::Add),
            "Sub" => self.arithmetic(node, Arithmetic::Subtract),
            "Mul" => self.arithmetic(node, Arithmetic::Multiply),
            "Div" => self.arithmetic(node, Arithmetic::Divide),
            "BatchNormalization" => {
                let [gain, shift] = self.affine(node)?;
                one(FloatOperation::Affine(gain, shift))
            }
            "Reshape" if int(node, "allowzero").is_none() => one(FloatOperation::Reshape(
                self.constants.ints(node.inputs.get(1)?)?,
            )),
            "Transpose" => one(FloatOperation::Transpose(sizes(node, "perm")?)),
            "MatMul" => {
                let other = node.inputs.get(1)?.as_str();
                let constant = self.constants.get(other).is_some();
                (!constant).then(|| (FloatOperation::MatMul, vec![x, other]))
            }
            "Softmax" if int(node, "axis")? == -1 => one(FloatOperation::Softmax),
            "LayerNormalization" if int(node, "axis")? == -1 => {
                let gain = self.constants.floats(node.inputs.get(1)?)?;
                let shift = match node.inputs.get(2) {
                    Some(shift) => Some(self.constants.floats(shift)?),
                    None => None,
                };
                one(FloatOperation::LayerNorm(
                    gain,
                    shift,
                    float(node, "epsilon")?,
                ))
            }
            "MaxPool" => one(FloatOperation::MaxPool(Pool {
                geometry: geometry(node, &sizes(node, "kernel_shape")?)?,
                ceil: int(node, "ceil_mode") == Some(1),
            })),
            "ReduceMean" => {
                let [axis] = self.constants.ints(node.inputs.get(1)?)?[..] else {
                    return None;
                };
                let axis = usize::try_from(axis).ok()?;
                one(FloatOperation::Mean(
                    axis,
                    int(node, "keepdims").unwrap_or(1) == 1,
                ))
            }
            "Slice" => {
                let bound = |at: usize| match self.constants.ints(node.inputs.get(at)?)?[..] {
                    [bound] => Some(bound),
                    _ => None,
                };
                let (start, end, axis, step) = (bound(1)?, bound(2)?, bound(3)?, bound(4)?);
                let axis = usize::try_from(axis).ok()?;
                (step == 1).then_some((FloatOperation::Slice(axis, start, end), vec![x]))
            }
            _ => None,
        }
    }

    fn arithmetic(
        &self,
        node: &'a OnnxNode,
        kind: Arithmetic,
    ) -> Option<(FloatOperation, Vec<&'a str>)> {
        let [a, b] = &node.inputs[..] else {
            return None;
        };
        let constant = |name: &str| {
            let shape = self.constants.get(name)?.shape.clone();
            let data = self.constants.floats(name)?;
            Some(Arc::new(Floats::new(shape, data)))
        };
        let is_constant = |name: &str| self.constants.get(name).is_some();
        match (is_constant(a), is_constant(b)) {
            (false, false) => Some((FloatOperation::Arithmetic(kind, Side::Neither), vec![a, b])),
            (true, false) => {
                let side = Side::Left(constant(a)?);
                Some((FloatOperation::Arithmetic(kind, side), vec![b]))
            }
            (false, true) => {
                let side = Side::Right(constant(b)?);
                Some((FloatOperation::Arithmetic(kind, side), vec![a]))
            }
            _ => None,
        }
    }
}
