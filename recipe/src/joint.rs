//! Zeros and codes of a model, chosen by one objective.

use std::collections::HashMap;

use burn::module::Module;
use burn::tensor::Tensor;
use burn_lean_prune::{
    Batch, GridConfig, PruneError, Pruned, PrunerConfig, Selection, problem::Rounded,
    solver::LayerGrid,
};
use burn_lean_quant::{
    Granularity, QatConfig, QuantError, Scheme, Site,
    format::ScaleFormat,
    quantizers,
    rounding::{GroupParams, set_weight_qparams},
};
use burn_lean_reparam::Rejected;

use crate::RecipeError;

/// Pruning and rounding with one objective: the weights that stay, their codes and their scales
/// minimise the same quadratic model of the loss, that of
/// [`Problem`](burn_lean_prune::Problem), with the Fisher of the whole network.
///
/// [`SolverConfig::grid`](burn_lean_prune::SolverConfig::grid) does it for a flat vector; this
/// takes the grids from the quantizers that a model gets, and gives the model back with them.
///
/// ```
/// use burn::module::Module;
/// use burn::nn::LinearConfig;
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_lean_prune::{Budget, FisherConfig, PrunerConfig, SolverConfig};
/// use burn_lean_quant::{ConvertConfig, QatConfig, WeightConfig, quantized_weights};
/// use burn_lean_recipe::Joint;
///
/// let device = Device::flex().autodiff();
/// let solver = SolverConfig::new(Budget::Sparsity(0.5));
/// let joint = Joint::new(
///     PrunerConfig::new(solver, FisherConfig::new(20)),
///     QatConfig::new().with_weight(WeightConfig::int(3)).with_activation(None),
/// );
/// let outcome = joint.compress(
///     LinearConfig::new(8, 4).init(&device),
///     |model, x: &Tensor<2>| model.forward(x.clone()).square().mean(),
///     |seed| {
///         device.seed(seed);
///         [Tensor::random([32, 8], Distribution::Normal(0.0, 1.0), &device)]
///     },
/// )?;
/// let codes = &outcome.rounded.layers[0].codes;
/// assert!(codes.iter().filter(|code| **code == 0).count() >= 16);
/// // The converted weight has these very codes.
/// let (converted, _) = ConvertConfig::new().convert(outcome.model)?;
/// let converted = quantized_weights(&converted)?;
/// let held = converted[0].1.codes().iter().map(|code| i32::from(*code));
/// assert!(held.eq(codes.iter().copied()));
/// # Ok::<(), burn_lean_recipe::RecipeError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Joint {
    /// How many weights remain, and how gradients and ridge are chosen; the ridges of a sweep are
    /// judged by the model with rounded weights. With several stages the last one rounds.
    pub pruner: PrunerConfig,
    /// Which numbers weights become: integers with symmetric mapping and F32 scales.
    pub quantize: QatConfig,
    /// How codes are found; its layers are those that [`quantize`](Self::quantize) quantizes among
    /// the prunable ones. Default: that of [`GridConfig`].
    pub grid: GridConfig,
}

/// A model that was pruned and rounded.
#[derive(Debug, Clone)]
pub struct JointOutcome<M> {
    /// The model with its quantizers: their scales are the chosen ones, and the stored weights are
    /// whole multiples of them. Activations are without ranges.
    pub model: M,
    /// The same weights without quantizers, the zeros and the report.
    pub pruned: Pruned<M>,
    /// Codes and scales.
    pub rounded: Rounded,
}

impl Joint {
    /// With the defaults of the search for codes.
    pub fn new(pruner: PrunerConfig, quantize: QatConfig) -> Self {
        Self {
            pruner,
            quantize,
            grid: GridConfig::new(Vec::new()),
        }
    }

    /// Prunes and rounds `model`; `loss` and `loader` are those of [`PrunerConfig::prune`].
    ///
    /// # Errors
    ///
    /// The model comes back in the error, as [`PrunerConfig::prune`] says. Those of it and of
    /// [`QatConfig::prepare`]; [`QuantError::UnsupportedScheme`] for weights that are floats or have
    /// zero points, [`PruneError::InvalidConfig`] where no prunable weight is quantized.
    pub fn compress<M: Module, B: Batch, I: IntoIterator<Item = B>>(
        &self,
        model: M,
        loss: impl Fn(&M, &B) -> Tensor<1>,
        loader: impl FnMut(u64) -> I,
    ) -> Result<JointOutcome<M>, Rejected<M, RecipeError>> {
        let mut pruner = self.pruner.clone();
        pruner.solver.grid = match self.layers(&model) {
            Ok(layers) => Some(GridConfig {
                layers,
                ..self.grid.clone()
            }),
            Err(error) => return Err(Rejected::new(model, error)),
        };
        let mut pruned = pruner.prune(model, loss, loader).map_err(plain)?;
        let rounded = pruned
            .stages
            .last_mut()
            .and_then(|stage| stage.rounded.take());
        let Some(rounded) = rounded else {
            let error = PruneError::NoPrunableParameter;
            return Err(Rejected::new(pruned.model, error.into()));
        };
        let model = self.quantize.prepare(pruned.model.clone()).map_err(plain)?;
        let model = set_weight_qparams(model, &scales(&rounded)).map_err(plain)?;
        Ok(JointOutcome {
            model,
            pruned,
            rounded,
        })
    }

    /// The grid of each prunable weight that is quantized.
    pub(crate) fn layers<M: Module>(&self, model: &M) -> Result<Vec<LayerGrid>, RecipeError> {
        let (group, pattern) = (self.pruner.group.as_ref(), &self.pruner.solver.pattern);
        let selection = Selection::for_pattern(model, group, pattern)?;
        let prepared = self.quantize.prepare(model.clone())?;
        let mut layers = Vec::new();
        for located in quantizers(&prepared) {
            let path = located.parameter.unwrap_or_default();
            let is_weight = located.site == Site::Weight && located.quantizer.is_enabled();
            let Some(layer) = selection.layout().layer(&path).filter(|_| is_weight) else {
                continue;
            };
            let scheme = located.quantizer.scheme();
            let groups = check(scheme, &layer.shape);
            let groups = groups.and_then(|()| scheme.group_shape(&layer.shape));
            let groups = groups.map_err(|error| error.at(&path))?;
            let levels = (scheme.quant_min() as i32, scheme.quant_max() as i32);
            layers.push(LayerGrid::new(path, groups, levels));
        }
        Ok(layers)
    }
}

/// The scales of rounded weights, by path.
pub(crate) fn scales(rounded: &Rounded) -> HashMap<String, GroupParams> {
    let layers = rounded.layers.iter();
    layers
        .map(|layer| (layer.path.clone(), layer.scales.clone().into()))
        .collect()
}

/// Whether codes are whole numbers around 0 with scales of any size, and blocks are all of one size.
fn check(scheme: &Scheme, shape: &[usize]) -> Result<(), QuantError> {
    let unsupported = |reason| {
        Err(QuantError::UnsupportedScheme {
            scheme: scheme.to_string(),
            reason,
        })
    };
    let is_plain = scheme.format.is_int()
        && scheme.mapping.is_symmetric()
        && scheme.symmetric_zero_point() == 0.0
        && scheme.scale_format == ScaleFormat::F32;
    if !is_plain {
        return unsupported(
            "rounding with the Fisher needs signed integers, a symmetric mapping and F32 scales",
        );
    }
    if let Granularity::PerBlock { extents } = &scheme.granularity {
        let mut axes = shape.iter().rev().zip(extents.iter().rev());
        if axes.any(|(len, extent)| len % extent.min(len) != 0) {
            return unsupported("rounding with the Fisher needs blocks that divide the weight");
        }
    }
    Ok(())
}

fn plain<M, E: Into<RecipeError>>(rejected: Rejected<M, E>) -> Rejected<M, RecipeError> {
    rejected.map_error(Into::into)
}
