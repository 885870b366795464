//! What was done to a model.

use serde::{Deserialize, Serialize};

/// What was done to a model, layer by layer.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Report {
    /// In the order of the forward pass.
    pub layers: Vec<LayerReport>,
    /// In the order of the forward pass.
    pub blocks: Vec<BlockReport>,
    /// Calibration rows of the first layer: tokens, or positions.
    pub rows: usize,
    /// Paths of weights that products read and that stay as they are without being asked to: several
    /// matrices in one parameter, a part of a matrix, a matrix computed from parameters, kernels of
    /// transposed convolutions.
    #[serde(default)]
    pub left: Vec<String>,
}

/// What was done to a weight.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LayerReport {
    /// Path of the parameter.
    pub path: String,
    /// Calibration rows; 0 where nothing is asked of them.
    pub rows: usize,
    /// Inputs that are zero in every row, where inputs are rounded after that: their weights cost nothing. They
    /// are the first to be removed; those that stay are what they were, at their nearest codes (with `exchange_zeros` at
    /// codes of 0).
    pub dead_inputs: usize,
    /// Calibration batches in which rows are not those that the original model has there, because their order, or
    /// which of them take part, follows from the data and came out otherwise. Their target is that of
    /// [`OwnInputs`](crate::Target::OwnInputs), whatever [`Preset::target`](crate::Preset::target) says.
    #[serde(default)]
    pub own_targets: usize,
    /// λ, the damping: what [`Preset::ridge`](crate::Preset::ridge) came to on the diagonal of XᵀX/n, of a
    /// convolution with groups the largest; 0 where nothing is asked of calibration data.
    #[serde(default)]
    pub ridge: f64,
    /// Squared error of the outputs against the target, as a fraction of the target's squares. Where inputs
    /// are rounded, what rounding them costs is in it with the target `Original`, and not with `OwnInputs`,
    /// which is of rounded ones, too. Where nothing
    /// is asked of calibration data ([`w8a16`](crate::Preset::w8a16)), and where nothing arrives
    /// ([`unseen`](Self::unseen)), it is that of the weights themselves.
    #[serde(with = "burn_lean_reparam::json::float")]
    pub relative_error: f64,
    /// Weights that are zero.
    pub zeros: usize,
    /// Weights.
    pub weights: usize,
    /// Bytes to be stored.
    pub bytes: usize,
    /// The preset asks for factors between layers, but there is no place for them in what this layer
    /// reads: something else reads it, too, it is no norm, product or gate, or it is a product of another block
    /// (without a number in its path each weight is a block by itself: name one that has both in
    /// [`blocks`](crate::Preset::blocks)). It is rounded as it is.
    #[serde(default)]
    pub unscaled: bool,
    /// All inputs are zero in every row, of a convolution with groups those of one group at least: an expert
    /// that no calibration token was sent to. Nothing says what its weights are for, so that none is removed,
    /// and each is at its nearest code: calibrate with data that reach it, or name it in
    /// [`skip`](crate::Preset::skip).
    #[serde(default)]
    pub unseen: bool,
}

/// What a block took.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BlockReport {
    /// Its path.
    pub path: String,
    /// Wall-clock time.
    pub seconds: f64,
    /// The most bytes of activations in memory between its layers.
    pub activation_bytes: usize,
    /// Bytes of XᵀX and XᵀY of the layers that are solved together, at most.
    pub gram_bytes: usize,
    /// It was taken from the state folder.
    pub resumed: bool,
}

impl Report {
    /// Zeros among the weights that were compressed, as a fraction.
    pub fn sparsity(&self) -> f64 {
        let sum = |of: fn(&LayerReport) -> usize| self.layers.iter().map(of).sum::<usize>();
        sum(|layer| layer.zeros) as f64 / sum(|layer| layer.weights).max(1) as f64
    }

    /// Takes on what was done to a block of this name.
    pub(crate) fn add(&mut self, block: &Report, name: &str) {
        self.layers
            .extend(block.layers.iter().map(|layer| LayerReport {
                path: format!("{name}.{}", layer.path),
                ..layer.clone()
            }));
        self.blocks.extend(block.blocks.iter().cloned());
        self.left
            .extend(block.left.iter().map(|path| format!("{name}.{path}")));
        if self.rows == 0 {
            self.rows = block.rows;
        }
    }

    /// Bytes of the weights that were compressed.
    pub fn bytes(&self) -> usize {
        self.layers.iter().map(|layer| layer.bytes).sum()
    }
}
