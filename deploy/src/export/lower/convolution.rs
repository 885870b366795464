//! Convolutions, and the batch normalizations that follow them.

use burn::backend::ir::{
    BatchNormOpIr, Conv1dOpIr, Conv2dOpIr, Conv3dOpIr, ConvTranspose1dOpIr, ConvTranspose2dOpIr,
    ConvTranspose3dOpIr, ModuleOperationIr, OperationIr, TensorIr,
};
use burn_lean_graph::Node;

use super::{Written, to_ints};
use crate::Edge;
use crate::export::Writer;
use crate::export::data::is_f32;
use crate::export::products::{Execution, LayerReport, Product};
use crate::onnx::Attribute;

macro_rules! conv_transpose {
    ($name:ident, $operation:ty) => {
        pub(super) fn $name(&mut self, node: Node<'a>, o: &'a $operation) -> Written {
            let p = &o.options;
            let pads = [p.padding, p.padding].concat();
            let mut at = attributes(&p.stride, &p.dilation, &pads, p.groups);
            at.push(Attribute::Ints("output_padding", to_ints(&p.padding_out)));
            self.product(&Product {
                node,
                x: &o.x,
                weight: &o.weight,
                bias: o.bias.as_ref(),
                out: &o.out,
                convolution: Some(at),
                is_transposed: true,
            })
        }
    };
}

impl<'a> Writer<'a> {
    pub(super) fn conv1d(&mut self, node: Node<'a>, o: &'a Conv1dOpIr) -> Written {
        let options = &o.options;
        let (before, after) = options.padding[0];
        let pads = vec![before, after];
        let at = attributes(&options.stride, &options.dilation, &pads, options.groups);
        self.convolve(node, &o.x, &o.weight, o.bias.as_ref(), &o.out, at)
    }

    pub(super) fn conv2d(&mut self, node: Node<'a>, o: &'a Conv2dOpIr) -> Written {
        let options = &o.options;
        let [(top, bottom), (left, right)] = options.padding;
        let pads = vec![top, left, bottom, right];
        let at = attributes(&options.stride, &options.dilation, &pads, options.groups);
        self.convolve(node, &o.x, &o.weight, o.bias.as_ref(), &o.out, at)
    }

    pub(super) fn conv3d(&mut self, node: Node<'a>, o: &'a Conv3dOpIr) -> Written {
        let options = &o.options;
        let pads = [options.padding, options.padding].concat();
        let at = attributes(&options.stride, &options.dilation, &pads, options.groups);
        self.convolve(node, &o.x, &o.weight, o.bias.as_ref(), &o.out, at)
    }

    fn convolve(
        &mut self,
        node: Node<'a>,
        x: &'a TensorIr,
        weight: &'a TensorIr,
        bias: Option<&'a TensorIr>,
        out: &'a TensorIr,
        attributes: Vec<Attribute>,
    ) -> Written {
        if let Some(norm) = self.foldable(node, weight, bias, out) {
            return self.folded(node, x, weight, bias, norm, attributes);
        }
        let product = Product {
            node,
            x,
            weight,
            bias,
            out,
            convolution: Some(attributes),
            is_transposed: false,
        };
        self.product(&product)
    }

    /// The batch normalization that alone reads a convolution of floats.
    fn foldable(
        &self,
        node: Node<'a>,
        weight: &TensorIr,
        bias: Option<&TensorIr>,
        out: &TensorIr,
    ) -> Option<&'a BatchNormOpIr> {
        // What is folded is written in F32.
        let is_foldable = |tensor: &TensorIr| self.constant(tensor).is_some() && is_f32(tensor);
        let edge = Edge {
            node: node.index(),
            operand: 0,
        };
        let path = node.parameters().next().map(|one| one.path.as_str());
        let quantized = self.weights.get(weight.id).is_some()
            || self.weights.left_float(weight.id).is_some()
            || self.quantization.activation(edge, path).is_some();
        let is_float = is_foldable(weight) && bias.is_none_or(is_foldable) && !quantized;
        if !is_float || !is_f32(out) || self.graph.outputs().contains(&out.id) {
            return None;
        }
        let mut readers = node.readers();
        let (reader, none) = (readers.next()?, readers.next());
        let between = Edge {
            node: reader.index(),
            operand: 0,
        };
        if self.quantization.activation(between, None).is_some() {
            return None;
        }
        match (reader.operation(), none) {
            (OperationIr::Module(ModuleOperationIr::BatchNorm(norm)), None)
                if norm.x.id == out.id
                    && [&norm.gamma, &norm.beta, &norm.mean, &norm.variance]
                        .into_iter()
                        .all(is_foldable) =>
            {
                Some(norm)
            }
            _ => None,
        }
    }

    /// W' = W · γ / √(σ² + ε) and b' = (b − µ) · γ / √(σ² + ε) + β.
    fn folded(
        &mut self,
        node: Node<'a>,
        x: &TensorIr,
        weight: &TensorIr,
        bias: Option<&TensorIr>,
        norm: &BatchNormOpIr,
        attributes: Vec<Attribute>,
    ) -> Written {
        let floats = |tensor: &TensorIr| {
            let values = self.constant(tensor).map(|constant| constant.floats());
            values.ok_or("a constant of its batch normalization is missing")
        };
        let (gamma, beta) = (floats(&norm.gamma)?, floats(&norm.beta)?);
        let (mean, variance) = (floats(&norm.mean)?, floats(&norm.variance)?);
        let epsilon: f32 = norm.epsilon.elem();
        let factors: Vec<f32> = gamma
            .iter()
            .zip(&variance)
            .map(|(gamma, variance)| gamma / (variance + epsilon).sqrt())
            .collect();
        let mut values = floats(weight)?;
        let per_channel = values.len() / factors.len();
        for (index, value) in values.iter_mut().enumerate() {
            *value *= factors[index / per_channel];
        }
        let bias = match bias {
            Some(bias) => floats(bias)?,
            None => vec![0.0; factors.len()],
        };
        let bias: Vec<f32> = (0..factors.len())
            .map(|c| (bias[c] - mean[c]) * factors[c] + beta[c])
            .collect();
        let path = self.constant_name(weight.id);
        let x = self.operand(x)?;
        let weight_bytes = 4 * values.len();
        let values = self.floats(&path, &weight.shape.to_vec(), &values);
        let of = path.strip_suffix("weight").unwrap_or("folded.").to_string();
        let bias = self.floats(&format!("{of}bias"), &[bias.len()], &bias);
        let name = self.emit("Conv", vec![x, values, bias], "Conv", attributes);
        // The convolution alone has the same shape, for what computes with it.
        for out in node.operation().outputs().chain([&norm.out]) {
            self.set(out, name.clone());
        }
        self.folded.insert(norm.out.id);
        self.layers.push(LayerReport {
            node: node.index(),
            path,
            operation: node.name(),
            execution: Execution::Float,
            reason: None,
            weight_bytes,
        });
        Ok(())
    }

    pub(super) fn batch_norm(&mut self, o: &BatchNormOpIr) -> Written {
        if self.folded.contains(&o.out.id) {
            return Ok(());
        }
        let tensors = [&o.x, &o.gamma, &o.beta, &o.mean, &o.variance];
        let inputs = self.operands(&tensors)?;
        let epsilon = vec![Attribute::Float("epsilon", o.epsilon.elem())];
        self.put("BatchNormalization", inputs, &o.out, epsilon);
        Ok(())
    }

    conv_transpose!(conv_transpose1d, ConvTranspose1dOpIr);
    conv_transpose!(conv_transpose2d, ConvTranspose2dOpIr);
    conv_transpose!(conv_transpose3d, ConvTranspose3dOpIr);
}

/// `pads`: all that come before, then all that come after.
fn attributes(
    strides: &[usize],
    dilations: &[usize],
    pads: &[usize],
    groups: usize,
) -> Vec<Attribute> {
    vec![
        Attribute::Ints("strides", to_ints(strides)),
        Attribute::Ints("dilations", to_ints(dilations)),
        Attribute::Ints("pads", to_ints(pads)),
        Attribute::Int("group", groups as i64),
    ]
}
