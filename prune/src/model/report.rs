//! What is left of each layer, as a table for people and as data for programs.

use std::fmt;

use burn::module::Module;
use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, Table};
use serde::{Deserialize, Serialize};

use crate::host::read;
use crate::model::selection::own;
use crate::{LayerKind, PruneError, Selection, model::SelectedParameter};

/// Weights, zeros and operations of a pruned model.
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::module::Param;
/// use burn::tensor::Device;
/// use burn_lean_prune::{PruneReport, Selection};
///
/// let device = Device::flex();
/// let mut model = LinearConfig::new(2, 2).init(&device);
/// model.weight = Param::from_data([[0.5, 0.0], [0.0, 0.0]], &device);
/// let report = PruneReport::new(&model, &Selection::of(&model, None)?)?;
/// assert_eq!((report.nonzeros, report.weights), (1, 4));
/// assert_eq!(report.layers[0].flops, 2.0);
/// println!("{report}");
/// # Ok::<(), burn_lean_prune::PruneError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PruneReport {
    /// The prunable parameters.
    pub layers: Vec<LayerReport>,
    /// The other parameters, with the reasons.
    pub excluded: Vec<SelectedParameter>,
    /// Prunable weights.
    pub weights: usize,
    /// Those of them that are not zero.
    pub nonzeros: usize,
    /// All floating-point parameters of the model; tied ones once.
    pub parameters: usize,
    /// Operations of the prunable weights per example, before.
    pub dense_flops: f64,
    /// Operations of the nonzeros per example.
    pub flops: f64,
}

/// One prunable parameter.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LayerReport {
    /// Its path.
    pub path: String,
    /// Its kind.
    pub kind: LayerKind,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Its weights that are not zero.
    pub nonzeros: usize,
    /// Fraction of zeros.
    pub sparsity: f64,
    /// Operations per example, before.
    pub dense_flops: f64,
    /// Operations of the nonzeros per example.
    pub flops: f64,
}

impl PruneReport {
    /// Counts the zeros in the effective weights of `model`: masks count. One read from the
    /// device.
    ///
    /// Operations are those of [`Selection::with_flops`], or 2 per weight without.
    ///
    /// # Errors
    ///
    /// [`PruneError::OtherModel`], [`PruneError::Device`].
    pub fn new<M: Module>(model: &M, selection: &Selection) -> Result<Self, PruneError> {
        let weights = read(selection.flatten(&model.valid().materialize())?)?;
        let layers: Vec<LayerReport> = selection
            .layout()
            .layers()
            .iter()
            .map(|layer| {
                let own = &weights[layer.range()];
                let nonzeros = own.iter().filter(|weight| **weight != 0.0).count();
                LayerReport {
                    path: layer.path.clone(),
                    kind: layer.kind,
                    shape: layer.shape.clone(),
                    nonzeros,
                    sparsity: 1.0 - nonzeros as f64 / own.len() as f64,
                    dense_flops: own.len() as f64 * layer.flops_per_weight,
                    flops: nonzeros as f64 * layer.flops_per_weight,
                }
            })
            .collect();
        let excluded = selection
            .parameters()
            .iter()
            .filter(|other| other.excluded.is_some());
        let parameters = own(selection.parameters()).map(SelectedParameter::elements);
        Ok(Self {
            weights: weights.len(),
            nonzeros: layers.iter().map(|layer| layer.nonzeros).sum(),
            parameters: parameters.sum(),
            dense_flops: layers.iter().map(|layer| layer.dense_flops).sum(),
            flops: layers.iter().map(|layer| layer.flops).sum(),
            excluded: excluded.cloned().collect(),
            layers,
        })
    }

    /// Fraction of the prunable weights that is zero.
    pub fn sparsity(&self) -> f64 {
        1.0 - self.nonzeros as f64 / self.weights.max(1) as f64
    }

    /// Fraction of all parameters that pruning set to zero.
    fn model_sparsity(&self) -> f64 {
        (self.weights - self.nonzeros) as f64 / self.parameters.max(1) as f64
    }
}

impl fmt::Display for PruneReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::new();
        table.load_style(NOTHING).set_header([
            "layer",
            "shape",
            "weights",
            "nonzeros",
            "sparsity",
            "FLOPs before",
            "FLOPs after",
        ]);
        let row = |path: &str, shape: String, weights: usize, nonzeros: usize, flops: [f64; 2]| {
            [
                path.to_string(),
                shape,
                weights.to_string(),
                nonzeros.to_string(),
                format!("{:.4}", 1.0 - nonzeros as f64 / weights.max(1) as f64),
                format!("{:.0}", flops[0]),
                format!("{:.0}", flops[1]),
            ]
        };
        for layer in &self.layers {
            let shape: Vec<String> = layer.shape.iter().map(usize::to_string).collect();
            table.add_row(row(
                &layer.path,
                shape.join("x"),
                layer.shape.iter().product(),
                layer.nonzeros,
                [layer.dense_flops, layer.flops],
            ));
        }
        let flops = [self.dense_flops, self.flops];
        table.add_row(row(
            "total",
            String::new(),
            self.weights,
            self.nonzeros,
            flops,
        ));
        for column in table.column_iter_mut().skip(2) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        writeln!(f, "{table}")?;
        let excluded: usize = own(&self.excluded).map(SelectedParameter::elements).sum();
        write!(
            f,
            "{excluded} of {} parameters are not pruned ({} tensors); {:.4} of all are zeros by \
             pruning",
            self.parameters,
            own(&self.excluded).count(),
            self.model_sparsity(),
        )
    }
}
