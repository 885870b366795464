//! Convolutions, and the batch normalizations that follow them.

use burn::backend::ir::{
    BatchNormOpIr, Conv1dOpIr, Conv2dOpIr, Conv3dOpIr, ConvTranspose1dOpIr, ConvTranspose2dOpIr,
    ConvTranspose3dOpIr, ModuleOperationIr, OperationIr, TensorIr,
};
use burn_lean_graph::Node;

use super::{Unwritten, Written, to_ints};
use crate::Edge;
use crate::export::Writer;
use crate::export::data::{HostTensor, is_f32};
use crate::export::products::{Execution, LayerReport, Product};
use crate::onnx::Attribute;

macro_rules! conv_transpose {
    ($name:ident, $operation:ty) => {
        pub(super) fn $name(&mut self, node: Node<'a>, o: &'a $operation) -> Written {
            let p = &o.options;
            let pads = [p.padding, p.padding].concat();
            let mut at = attributes(&p.stride, &p.dilation, &pads, p.groups);
            at.push(Attribute::Ints("output_padding", to_ints(&p.padding_out)));
            self.with_shift(Product {
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
        self.with_shift(Product {
            node,
            x,
            weight,
            bias,
            out,
            convolution: Some(attributes),
            is_transposed: false,
        })
    }

    /// A convolution, with the β that a folded normalization leaves behind one without bias.
    fn with_shift(&mut self, mut product: Product<'a>) -> Written {
        let norm = match product.bias {
            None => self.norm_behind(product.node, product.out),
            Some(_) => None,
        };
        // It adds β and does no more.
        let norm = norm.filter(|norm| self.is_shift(norm));
        product.bias = product.bias.or(norm.map(|norm| &norm.beta));
        self.product(&product)?;
        if let Some(norm) = norm {
            let name = self.operand(product.out)?;
            self.set(&norm.out, name);
            self.folded.insert(norm.out.id);
        }
        Ok(())
    }

    /// The batch normalization that alone reads a convolution, which is neither a result nor quantized.
    fn norm_behind(&self, node: Node<'a>, out: &TensorIr) -> Option<&'a BatchNormOpIr> {
        let mut readers = node.readers();
        let (reader, none) = (readers.next()?, readers.next());
        let between = Edge {
            node: reader.index(),
            operand: 0,
        };
        if none.is_some()
            || self.graph.outputs().contains(&out.id)
            || self.quantization.activation(between, None).is_some()
        {
            return None;
        }
        match reader.operation() {
            OperationIr::Module(ModuleOperationIr::BatchNorm(norm)) if norm.x.id == out.id => {
                Some(norm)
            }
            _ => None,
        }
    }

    /// Whether γ / √(σ² + ε) is 1 and µ is 0, in every channel: what `fold_for` leaves of a normalization.
    fn is_shift(&self, norm: &BatchNormOpIr) -> bool {
        let epsilon: f32 = norm.epsilon.elem();
        let all = |tensor: &TensorIr, is: &dyn Fn(f32) -> bool| {
            let values = self.constant(tensor).filter(|_| is_f32(tensor));
            let values = values.and_then(|values| values.floats().ok());
            values.is_some_and(|values| values.into_iter().all(is))
        };
        is_f32(&norm.x)
            && self.is_foldable(&norm.beta)
            && all(&norm.gamma, &|gamma| gamma == 1.0)
            && all(&norm.variance, &|variance| variance + epsilon == 1.0)
            && all(&norm.mean, &|mean| mean == 0.0)
    }

    /// What is folded is written in F32.
    fn is_foldable(&self, tensor: &TensorIr) -> bool {
        self.constant(tensor).is_some() && is_f32(tensor)
    }

    /// The batch normalization that alone reads a convolution of floats.
    fn foldable(
        &self,
        node: Node<'a>,
        weight: &TensorIr,
        bias: Option<&TensorIr>,
        out: &TensorIr,
    ) -> Option<&'a BatchNormOpIr> {
        let is_foldable = |tensor: &TensorIr| self.is_foldable(tensor);
        let edge = Edge {
            node: node.index(),
            operand: 0,
        };
        let path = node.parameters().next().map(|one| one.path.as_str());
        let quantized = self.weights.get(weight.id).is_some()
            || self.weights.left_float(weight.id).is_some()
            || self.quantization.activation(edge, path).is_some();
        let is_float = is_foldable(weight) && bias.is_none_or(is_foldable) && !quantized;
        if !is_float || !is_f32(out) {
            return None;
        }
        let norm = self.norm_behind(node, out)?;
        let constants = [&norm.gamma, &norm.beta, &norm.mean, &norm.variance];
        constants.into_iter().all(is_foldable).then_some(norm)
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
        let floats = |tensor: &TensorIr| -> Result<Vec<f32>, Unwritten> {
            let values = self.constant(tensor);
            let values = values.ok_or("a constant of its batch normalization is missing")?;
            Ok(values.floats()?)
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
        // Folded into the layer before it. A node that does nothing keeps runtimes from fusing their own.
        let is_zero = |beta: &HostTensor| {
            beta.floats()
                .is_ok_and(|beta| beta.into_iter().all(|beta| beta == 0.0))
        };
        if self.is_shift(o) && self.constant(&o.beta).is_some_and(is_zero) {
            let name = self.operand(&o.x)?;
            self.set(&o.out, name);
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
