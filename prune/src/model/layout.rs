//! Which slice of the flat weight vector is which parameter.

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// What a parameter does in its layer, as far as pruning cares: which axis is reduced over, what
/// a row and a channel are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum LayerKind {
    /// Weight of a linear layer, `[d_input, d_output]`.
    Linear,
    /// Kernel of a convolution, `[channels_out, channels_in / groups, kernel...]`.
    Conv,
    /// Kernel of a transposed convolution, `[channels_in, channels_out / groups, kernel...]`.
    ConvTranspose,
    /// Embedding table, `[n_embedding, d_model]`.
    Embedding,
    /// Weight of a gate of a recurrent cell, `[d_input, d_output]`.
    Recurrent,
    /// Anything else: no rows, no channels; its last axis is its reduction axis.
    Other,
}

/// One prunable parameter: a slice of the flat weight vector.
///
/// Elements are in row-major order of `shape`, as Burn stores them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Layer {
    /// Path of the parameter in its model, for example `fc1.weight`.
    pub path: String,
    /// Shape of the parameter.
    pub shape: Vec<usize>,
    /// Index of its first element in the flat vector.
    pub offset: usize,
    /// What kind of layer it belongs to.
    pub kind: LayerKind,
    /// Floating-point operations that one nonzero weight costs per example: 2 in a linear layer,
    /// 2 · output positions in a convolution.
    pub flops_per_weight: f64,
}

impl Layer {
    /// Number of weights.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether the parameter has no weights.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Its indices in the flat vector.
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.len()
    }

    /// The axis that the layer sums over, along which N:M patterns count: input features or input
    /// channels; the last axis of an embedding and of what is unknown. `None` for a scalar.
    pub(crate) fn reduction_axis(&self) -> Option<usize> {
        match (self.kind, self.shape.len()) {
            (_, 0) => None,
            (_, 1) => Some(0),
            (LayerKind::Linear | LayerKind::Recurrent | LayerKind::ConvTranspose, _) => Some(0),
            (LayerKind::Conv, _) => Some(1),
            (LayerKind::Embedding | LayerKind::Other, rank) => Some(rank - 1),
        }
    }

    /// The axis that counts what the layer puts out: output features or output channels. `None`
    /// where there is no such axis.
    pub fn output_axis(&self) -> Option<usize> {
        match (self.kind, self.shape.len()) {
            (_, 0 | 1) | (LayerKind::Other, _) => None,
            (LayerKind::Conv, _) => Some(0),
            (LayerKind::Linear | LayerKind::Recurrent | LayerKind::ConvTranspose, _)
            | (LayerKind::Embedding, _) => Some(1),
        }
    }

    /// The axis that counts what the layer takes in: input features, input channels, or the rows of
    /// an embedding. `None` where there is no such axis.
    pub(crate) fn input_axis(&self) -> Option<usize> {
        match (self.kind, self.shape.len()) {
            (_, 0 | 1) | (LayerKind::Other, _) => None,
            (LayerKind::Conv, _) => Some(1),
            (LayerKind::Linear | LayerKind::Recurrent | LayerKind::ConvTranspose, _)
            | (LayerKind::Embedding, _) => Some(0),
        }
    }

    /// The indices in the flat vector that lie at `positions` along `axis`, ascending.
    ///
    /// # Panics
    ///
    /// Unless the shape has that axis.
    pub fn slice(&self, axis: usize, positions: Range<usize>) -> Vec<usize> {
        let stride = self.stride(axis);
        let step = stride * self.shape[axis];
        let starts = self.range().step_by(step.max(1));
        starts
            .flat_map(|start| start + positions.start * stride..start + positions.end * stride)
            .collect()
    }

    /// Distance in the flat vector between neighbours along `axis`.
    ///
    /// # Panics
    ///
    /// Unless the shape has that axis.
    pub fn stride(&self, axis: usize) -> usize {
        self.shape[axis + 1..].iter().product()
    }
}

/// The prunable parameters of a model, one after the other in one flat vector of `len()` weights.
///
/// ```
/// use burn_lean_prune::{Layout, LayerKind};
///
/// let mut layout = Layout::new();
/// layout.push("fc1.weight", [784, 40], LayerKind::Linear, 2.0);
/// layout.push("fc2.weight", [40, 10], LayerKind::Linear, 2.0);
/// assert_eq!(layout.len(), 784 * 40 + 40 * 10);
/// assert_eq!(layout.layer_at(31_360).unwrap().path, "fc2.weight");
/// assert!(layout.layer_at(layout.len()).is_none());
/// ```
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(from = "Vec<Layer>", into = "Vec<Layer>")]
pub struct Layout {
    layers: Vec<Layer>,
}

impl Layout {
    /// A layout without any parameter.
    pub fn new() -> Self {
        Self::default()
    }

    /// One parameter of `parameters` weights that belongs to no model; its path is `weights`.
    pub fn anonymous(parameters: usize) -> Self {
        let mut layout = Self::new();
        layout.push("weights", [parameters], LayerKind::Other, 2.0);
        layout
    }

    /// Appends a parameter.
    pub fn push(
        &mut self,
        path: impl Into<String>,
        shape: impl Into<Vec<usize>>,
        kind: LayerKind,
        flops_per_weight: f64,
    ) {
        self.layers.push(Layer {
            path: path.into(),
            shape: shape.into(),
            offset: self.len(),
            kind,
            flops_per_weight,
        });
    }

    /// The parameters, in their order in the flat vector.
    pub fn layers(&self) -> &[Layer] {
        &self.layers
    }

    /// The length p of the flat vector.
    pub fn len(&self) -> usize {
        self.layers.last().map_or(0, |layer| layer.range().end)
    }

    /// Whether there is no weight at all.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The parameter that holds element `index` of the flat vector.
    pub fn layer_at(&self, index: usize) -> Option<&Layer> {
        let after = self.layers.partition_point(|layer| layer.offset <= index);
        self.layers[..after]
            .iter()
            .rev()
            .find(|layer| layer.range().contains(&index))
    }

    /// The parameter of that path.
    pub fn layer(&self, path: &str) -> Option<&Layer> {
        self.layers.iter().find(|layer| layer.path == path)
    }

    /// Floating-point operations per example with all weights in place.
    pub fn flops(&self) -> f64 {
        let flops = |layer: &Layer| layer.len() as f64 * layer.flops_per_weight;
        self.layers.iter().map(flops).sum()
    }
}

impl From<Vec<Layer>> for Layout {
    /// Offsets are counted anew.
    fn from(layers: Vec<Layer>) -> Self {
        let mut layout = Self::new();
        for layer in layers {
            layout.push(layer.path, layer.shape, layer.kind, layer.flops_per_weight);
        }
        layout
    }
}

impl From<Layout> for Vec<Layer> {
    fn from(layout: Layout) -> Self {
        layout.layers
    }
}
