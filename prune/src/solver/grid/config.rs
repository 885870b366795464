//! On which grid weights are to lie, and how their codes are found.

use burn::config::Config;
use serde::{Deserialize, Serialize};

/// Weights that are to be whole multiples of a scale, as symmetric quantization stores them.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_lean_prune::{
///     Budget, GradientMatrix, GridConfig, Layout, Problem, SolverConfig, solve,
///     solver::LayerGrid,
/// };
///
/// let device = Device::flex();
/// // The loss sees the sum of the two weights alone, 0.8.
/// let gradients = Tensor::from_floats([[1., 1.]], &device);
/// let dense = Tensor::from_floats([0.4, 0.4], &device);
/// let gradients = GradientMatrix::from_tensor(gradients)?;
/// let problem = Problem::new(gradients, dense, Layout::anonymous(2))?;
/// // Multiples of 1 from −1 to 1: the nearest ones are 0 and 0.
/// let layer = LayerGrid::new("weights", vec![1], (-1, 1)).with_scales(vec![1.0]);
/// let grid = GridConfig::new(vec![layer]).with_fit_scales(false);
/// let config = SolverConfig::new(Budget::All).with_grid(Some(grid));
/// let rounded = solve(&problem, &config)?.rounded.unwrap();
/// assert_eq!(rounded.layers[0].codes.iter().sum::<i32>(), 1);
/// assert!(rounded.nearest > 0.3);
/// # Ok::<(), burn_lean_prune::PruneError>(())
/// ```
#[derive(Config, Debug, PartialEq)]
pub struct GridConfig {
    /// The layers that are rounded; weights of others stay real numbers, and make up for the rounding
    /// of these.
    pub layers: Vec<LayerGrid>,
    /// How the first codes are found. Default: one after the other, with compensation.
    #[config(default = "FirstCodes::Compensated")]
    pub first: FirstCodes,
    /// Largest number of sweeps of coordinate descent over all codes, each followed by new scales
    /// where they are fitted; 0 leaves the codes as they are found. Default 50.
    #[config(default = 50)]
    pub sweeps: usize,
    /// Whether scales are fitted to the codes. Default: yes.
    #[config(default = true)]
    pub fit_scales: bool,
    /// A sweep that lowers the objective by less than this fraction of what it is without
    /// its linear term is the last one. Default 1e-5.
    #[config(default = 1e-5)]
    pub tolerance: f64,
}

impl GridConfig {
    /// To the nearest code of the best real values, and no further: what to compare with.
    pub fn nearest(layers: Vec<LayerGrid>) -> Self {
        Self {
            first: FirstCodes::Nearest,
            ..Self::compensated(layers)
        }
    }

    /// One after the other with compensation, and no further: prune, then round.
    pub fn compensated(layers: Vec<LayerGrid>) -> Self {
        Self::new(layers).with_sweeps(0).with_fit_scales(false)
    }
}

/// How the first codes are found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum FirstCodes {
    /// The nearest ones of the best real values on the support.
    Nearest,
    /// One after the other, those still to come at their best values each time, as in
    /// [GPTQ, Frantar et al., 2023](https://arxiv.org/abs/2210.17323) but with the Fisher of the whole
    /// network; those of [`Nearest`](Self::Nearest) where their objective is lower.
    Compensated,
}

/// The grid of one parameter: which of its weights share a scale, and which codes there are.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerGrid {
    /// Path of the parameter, for example `fc1.weight`.
    pub path: String,
    /// Groups with a scale of their own along each axis of the parameter: 1 for one in all, the length
    /// of the axis for one at each index, a divisor of it for blocks. `[1, 10]` gives each output of a
    /// linear layer `[d_input, 10]` one.
    pub groups: Vec<usize>,
    /// Smallest and largest code; 0 is between them.
    pub levels: (i32, i32),
    /// The first scale of each group, row-major. Default: for each group the one with the least
    /// squared error of the nearest codes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scales: Option<Vec<f32>>,
}

impl LayerGrid {
    /// With scales that are chosen.
    pub fn new(path: impl Into<String>, groups: Vec<usize>, levels: (i32, i32)) -> Self {
        Self {
            path: path.into(),
            groups,
            levels,
            scales: None,
        }
    }

    /// Begins with these scales, above 0.
    pub fn with_scales(mut self, scales: Vec<f32>) -> Self {
        self.scales = Some(scales);
        self
    }
}
