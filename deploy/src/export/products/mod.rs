//! Matrix products and convolutions, with what is quantized of them.

mod activation;
mod blocks;
mod codes;
mod integer;
mod on_the_fly;
mod qdq;
mod report;

use burn::backend::ir::TensorIr;
use burn_lean_graph::Node;

use super::data::check_scaled;
use super::lower::Written;
use super::{Form, Writer};
use crate::onnx::Attribute;
use crate::{DeployError, Edge};
use codes::dequantized;
pub use report::{Execution, LayerReport};

/// The name of a product of codes and how it is computed, or why it is not.
type OrWhyNot = Result<Result<(String, Execution), &'static str>, DeployError>;

/// A product that is to be written.
pub(crate) struct Product<'a> {
    pub(crate) node: Node<'a>,
    pub(crate) x: &'a TensorIr,
    pub(crate) weight: &'a TensorIr,
    pub(crate) bias: Option<&'a TensorIr>,
    pub(crate) out: &'a TensorIr,
    /// `None` for a matrix product.
    pub(crate) convolution: Option<Vec<Attribute>>,
    /// Of a convolution: whether it is a transposed one.
    pub(crate) is_transposed: bool,
}

impl Product<'_> {
    /// The axis of the weight along which its output channels are.
    fn channel_axis(&self) -> usize {
        match self.convolution {
            Some(_) => usize::from(self.is_transposed),
            None => self.weight.shape.num_dims() - 1,
        }
    }

    /// Sizes of axes that come after that of the channels in the result.
    fn axes_behind(&self) -> usize {
        match self.convolution {
            Some(_) => self.out.shape.num_dims() - 2,
            None => 0,
        }
    }
}

impl<'a> Writer<'a> {
    /// `x · weight + bias`.
    pub(crate) fn linear(
        &mut self,
        node: Node<'a>,
        x: &'a TensorIr,
        weight: &'a TensorIr,
        bias: Option<&'a TensorIr>,
        out: &'a TensorIr,
    ) -> Written {
        let product = Product {
            node,
            x,
            weight,
            bias,
            out,
            convolution: None,
            is_transposed: false,
        };
        self.product(&product)
    }

    pub(crate) fn product(&mut self, product: &Product<'a>) -> Written {
        let node = product.node;
        let codes = self.weights.get(product.weight.id);
        let left_float = self.weights.left_float(product.weight.id);
        let known = codes.map(|codes| &codes.path);
        let known = known.or(left_float.map(|(path, _)| path)).cloned();
        let path = known.or_else(|| {
            self.constant(product.weight)?;
            node.parameters().next().map(|p| p.path.clone())
        });
        let why_float = left_float.map(|(_, why)| why.clone());
        let as_floats = match why_float {
            Some(_) => Execution::DequantizedOnce,
            None => Execution::Float,
        };
        let edge = |operand| Edge {
            node: node.index(),
            operand,
        };
        let activation = self.quantization.activation(edge(0), path.as_deref());
        let other = self.quantization.activation(edge(1), None);
        let unrounded = match activation {
            None => path
                .as_deref()
                .and_then(|path| self.quantization.unrounded_input(path)),
            Some(_) => None,
        };
        let form = self.form;
        let qdq = matches!(form, Form::Qdq | Form::QdqSigned);
        let rounds = qdq && (activation.is_some() || other.is_some());
        if codes.is_some() || rounds {
            check_scaled(product.x, path.as_deref().unwrap_or(node.name()))?;
        }
        let (written, execution, reason) = match (form, codes) {
            (_, None) if activation.is_none() && other.is_none() => {
                (self.plain(product)?, as_floats, why_float)
            }
            (Form::Float, None) => (self.plain(product)?, as_floats, why_float),
            (Form::Float, Some(_)) => (self.plain(product)?, Execution::DequantizedOnce, None),
            (Form::Qdq | Form::QdqSigned, _) => {
                let name = self.with_qdq(product, codes, activation, other)?;
                (name, Execution::Qdq, why_float.or(unrounded))
            }
            (Form::Integer, None) => {
                let why =
                    why_float.unwrap_or_else(|| match self.constant(product.weight).is_some() {
                        true => "its weight is not quantized".into(),
                        false => "a product of two activations stays float".into(),
                    });
                (self.plain(product)?, as_floats, Some(why))
            }
            (Form::Integer, Some(codes)) => match self.integer(product, codes, activation)? {
                Ok((name, execution)) if execution == Execution::Integer => {
                    (name, execution, unrounded)
                }
                Ok((name, execution)) => {
                    let in_floats = "its weight has a scale for each block of its inputs, so that \
                                     floats are multiplied: its input is not rounded";
                    let in_floats = activation.map(|_| in_floats.to_string());
                    (name, execution, unrounded.or(in_floats))
                }
                Err(reason) => (
                    self.plain(product)?,
                    Execution::DequantizedOnce,
                    Some(unrounded.unwrap_or_else(|| reason.into())),
                ),
            },
        };
        self.set(product.out, written);
        let elements = product.weight.shape.num_elements();
        let weight_bytes = match (execution, codes) {
            (Execution::Integer | Execution::WeightsInteger | Execution::Qdq, Some(codes)) => {
                let in_bytes =
                    codes.bits > 4 || execution == Execution::Integer && !codes.is_in_blocks();
                elements * if in_bytes { 8 } else { 4 } / 8
            }
            _ => elements * product.weight.dtype.size(),
        };
        self.layers.push(LayerReport {
            node: node.index(),
            path: path.unwrap_or_else(|| "?".into()),
            operation: node.name(),
            execution,
            reason,
            weight_bytes,
        });
        Ok(())
    }

    /// In floats, whatever was quantized.
    fn plain(&mut self, product: &Product<'_>) -> Result<String, DeployError> {
        let x = self.operand(product.x)?;
        let weight = self.weight(product.weight)?;
        let bias = product.bias.map(|bias| self.operand(bias)).transpose()?;
        Ok(self.multiply(product, x, weight, bias))
    }

    /// The float values of a weight; of a quantized one, those that its codes stand for.
    pub(crate) fn weight(&mut self, tensor: &TensorIr) -> Result<String, DeployError> {
        let Some(codes) = self.weights.get(tensor.id) else {
            return self.operand(tensor);
        };
        check_scaled(tensor, &codes.path)?;
        let key = format!("dequantized {}", tensor.id);
        Ok(self.written_once(key, |writer| {
            let values = dequantized(codes);
            writer.floats(&codes.path, &codes.shape, &values)
        }))
    }

    /// Rows of a table; a quantized one has a line in the report.
    pub(crate) fn table(
        &mut self,
        node: Node<'_>,
        table: &TensorIr,
        indices: String,
        out: &TensorIr,
    ) -> Result<String, DeployError> {
        let Some(codes) = self.weights.get(table.id) else {
            let floats = self.operand(table)?;
            if let Some((path, why)) = self.weights.left_float(table.id) {
                self.layers.push(LayerReport {
                    node: node.index(),
                    path: path.clone(),
                    operation: node.name(),
                    execution: Execution::DequantizedOnce,
                    reason: Some(why.clone()),
                    weight_bytes: table.shape.num_elements() * table.dtype.size(),
                });
            }
            return Ok(self.rows(floats, indices));
        };
        check_scaled(table, &codes.path)?;
        let elements = table.shape.num_elements();
        let (name, execution, reason, weight_bytes) = match self.form {
            Form::Qdq | Form::QdqSigned => {
                let name = self.quantized_rows(table, codes, indices, out);
                let bits = if codes.bits <= 4 { 4 } else { 8 };
                (name, Execution::Qdq, None, elements * bits / 8)
            }
            Form::Float | Form::Integer => {
                let floats = self.weight(table)?;
                let reason = Some("rows are taken of floats".into());
                let bytes = elements * table.dtype.size();
                let name = self.rows(floats, indices);
                (name, Execution::DequantizedOnce, reason, bytes)
            }
        };
        self.layers.push(LayerReport {
            node: node.index(),
            path: codes.path.clone(),
            operation: node.name(),
            execution,
            reason,
            weight_bytes,
        });
        Ok(name)
    }

    /// Elements of a tensor along its first axis, by their numbers.
    fn rows(&mut self, of: String, indices: String) -> String {
        let axis = vec![Attribute::Int("axis", 0)];
        self.emit("Gather", vec![of, indices], "Gather", axis)
    }

    fn multiply(
        &mut self,
        product: &Product<'_>,
        x: String,
        weight: String,
        bias: Option<String>,
    ) -> String {
        match &product.convolution {
            Some(attributes) => {
                let inputs = [x, weight].into_iter().chain(bias).collect();
                let operator = match product.is_transposed {
                    true => "ConvTranspose",
                    false => "Conv",
                };
                self.emit(operator, inputs, operator, attributes.clone())
            }
            None => {
                let name = self.emit("MatMul", vec![x, weight], "MatMul", vec![]);
                match bias {
                    Some(bias) => self.emit("Add", vec![name, bias], "Add", vec![]),
                    None => name,
                }
            }
        }
    }
}
