//! The weights of a model that can be quantized, and what kind of layer they belong to.

use burn::module::{Module, Param, ParamId};
use burn::tensor::{Device, Tensor};
use burn_lean_reparam::{PathVisitor, Trail, visit_with_path};

/// A parameter of at least two dimensions.
#[derive(Debug, Clone)]
pub(crate) struct Weight {
    pub(crate) path: String,
    pub(crate) id: ParamId,
    pub(crate) shape: Vec<usize>,
    pub(crate) device: Device,
    /// Axis of the output channels, in the layers that we know.
    pub(crate) axis: Option<usize>,
    /// Whether the layer's input is a float tensor that a `forward_q` can quantize.
    pub(crate) float_input: bool,
    /// Whether the layer's output is an operand of one of an attention's products.
    pub(crate) attention_operand: bool,
    /// Whether it is the query projection of an attention.
    pub(crate) attention_query: bool,
    /// Whether it is of a gate of a recurrent layer.
    pub(crate) recurrent: bool,
}

/// The weights of a model, in module order.
#[derive(Default)]
pub(crate) struct Layers {
    pub(crate) weights: Vec<Weight>,
}

impl Layers {
    pub(crate) fn of<M: Module>(model: &M) -> Self {
        let mut layers = Self::default();
        visit_with_path(model, &mut layers);
        layers
    }

    /// Paths of those that are quantized by default.
    pub(crate) fn paths(&self) -> Vec<String> {
        let known = self.weights.iter().filter(|weight| weight.axis.is_some());
        known.map(|weight| weight.path.clone()).collect()
    }

    /// Whether there is a linear layer or a convolution that its inputs can round.
    pub(crate) fn are_rounded_by_inputs(&self) -> bool {
        self.weights.iter().any(|weight| {
            let kind = (weight.axis, weight.shape.len());
            weight.float_input && matches!(kind, (Some(1), 2) | (Some(0), 3 | 4))
        })
    }
}

/// Axis of the output channels by container and rank: Burn's layouts of weights.
fn output_axis(container: &str, rank: usize) -> Option<usize> {
    match (container, rank) {
        // [in, out]
        ("Struct:Linear", 2) => Some(1),
        // [out, in / groups, ..]
        ("Struct:Conv1d", 3) => Some(0),
        ("Struct:Conv2d" | "Struct:DeformConv2d", 4) => Some(0),
        ("Struct:Conv3d", 5) => Some(0),
        // [in, out / groups, ..]
        ("Struct:ConvTranspose1d", 3) => Some(1),
        ("Struct:ConvTranspose2d", 4) => Some(1),
        ("Struct:ConvTranspose3d", 5) => Some(1),
        // [rows, width]
        ("Struct:Embedding", 2) => Some(0),
        _ => None,
    }
}

impl PathVisitor for Layers {
    fn float<const D: usize>(&mut self, at: &Trail, param: &Param<Tensor<D>>) {
        if D < 2 || at.is_attached() {
            return;
        }
        let container = at.container();
        let axis = match at.name() {
            "weight" => output_axis(container, D),
            _ => None,
        };
        let above = at.names().iter().zip(at.containers()).rev().nth(1);
        let projection = match above {
            Some((name, parent)) if parent == "Struct:MultiHeadAttention" => name,
            _ => "",
        };
        let recurrent = above.is_some_and(|(_, parent)| parent == "Struct:GateController");
        let shape = param.base().shape().to_vec();
        self.weights.push(Weight {
            path: at.path(),
            id: param.id,
            shape,
            device: param.lazy_device(),
            axis,
            // Indices, and a call with offsets that no `forward_q` makes.
            float_input: !matches!(container, "Struct:Embedding" | "Struct:DeformConv2d"),
            attention_operand: matches!(projection, "query" | "key" | "value"),
            attention_query: projection == "query",
            recurrent,
        });
    }
}
