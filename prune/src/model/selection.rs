//! Which parameters of a model are pruned.

use std::collections::HashMap;
use std::fmt;

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::module::{Module, Param, ParamGroup, ParamId};
use burn::tensor::{DType, Device, Tensor};
use burn_lean_reparam::{PathVisitor, Trail, visit_with_path};
use serde::{Deserialize, Serialize};

use crate::host::read;
use crate::{LayerKind, Layout, PruneError};

/// The prunable parameters of a model, and the reason for each that is not.
///
/// ```
/// use burn::module::ParamGroup;
/// use burn::nn::LinearConfig;
/// use burn::tensor::Device;
/// use burn_lean_prune::{Selection, model::ExcludedBecause};
///
/// let model = LinearConfig::new(4, 3).init(&Device::flex());
/// let selection = Selection::of(&model, None)?;
/// assert_eq!(selection.layout().len(), 12);
/// assert_eq!(selection.parameters()[1].path, "bias");
/// assert_eq!(selection.parameters()[1].excluded, Some(ExcludedBecause::NoLayerWeight));
/// // A group replaces the default.
/// let bias = Selection::of(&model, Some(&ParamGroup::from_path("bias")))?;
/// assert_eq!(bias.layout().len(), 3);
/// # Ok::<(), burn_lean_prune::PruneError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Selection {
    pub(crate) layout: Layout,
    pub(crate) ids: Vec<ParamId>,
    pub(crate) parameters: Vec<SelectedParameter>,
    device: Device,
}

/// One floating-point parameter of the model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SelectedParameter {
    /// Its path, for example `encoder.0.weight`.
    pub path: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// `None` if it is pruned; otherwise why not.
    pub excluded: Option<ExcludedBecause>,
}

impl SelectedParameter {
    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

impl fmt::Display for SelectedParameter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` {:?}", self.path, self.shape)?;
        match &self.excluded {
            Some(why) => write!(f, " ({why})"),
            None => Ok(()),
        }
    }
}

/// The largest of these parameters, and how many more there are.
pub(crate) fn largest(parameters: &[SelectedParameter]) -> String {
    const SHOWN: usize = 3;
    let mut sorted: Vec<_> = parameters.iter().collect();
    sorted.sort_by_key(|parameter| std::cmp::Reverse(parameter.elements()));
    let more = sorted.len().saturating_sub(SHOWN);
    let shown = sorted.iter().take(SHOWN).map(ToString::to_string);
    let more = (more > 0).then(|| format!("{more} more"));
    shown.chain(more).collect::<Vec<_>>().join(", ")
}

/// Why a parameter is not pruned.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum ExcludedBecause {
    /// It is no weight of a linear, convolution or embedding layer: a bias, the gain of a norm, or
    /// a parameter of a module of the user's own. A [`ParamGroup`] can name it nevertheless.
    NoLayerWeight,
    /// The [`ParamGroup`] does not name it.
    NotInGroup,
    /// It is a running statistic, which no gradient trains.
    RunningStatistic,
    /// It belongs to the reparameterization of a weight (the factors of an adapter, a scale).
    InsideReparameterization,
    /// It is the same parameter as the one under this path: pruned with it, or not pruned either.
    TiedTo(String),
    /// An N:M pattern counts along an axis of it that is no multiple of M, such as the three channels
    /// of an image.
    PatternDoesNotDivide {
        /// The pattern, for example `2:4`.
        pattern: String,
        /// The axis.
        axis: usize,
        /// Its length.
        length: usize,
    },
    /// It is quantized.
    NotFloat,
    /// It has no elements.
    Empty,
}

impl fmt::Display for ExcludedBecause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoLayerWeight => f.write_str("no weight of a linear, conv or embedding layer"),
            Self::NotInGroup => f.write_str("not in the parameter group"),
            Self::RunningStatistic => f.write_str("a running statistic"),
            Self::InsideReparameterization => f.write_str("part of a reparameterization"),
            Self::TiedTo(path) => write!(f, "the same parameter as {path}"),
            Self::PatternDoesNotDivide {
                pattern,
                axis,
                length,
            } => write!(f, "{pattern} does not divide the {length} of axis {axis}"),
            Self::NotFloat => f.write_str("quantized"),
            Self::Empty => f.write_str("no elements"),
        }
    }
}

impl Selection {
    /// Selects the parameters that `group` names; by default the weights of all linear,
    /// convolution, transposed convolution and embedding layers, recurrent gates included.
    ///
    /// A parameter that carries a reparameterization is pruned in its base, which needs that a
    /// zero in the base is a zero in the effective value: true for masks, casts and symmetric fake
    /// quantization, not for adapters.
    ///
    /// # Errors
    ///
    /// [`PruneError::NoPrunableParameter`], [`PruneError::AllExcluded`],
    /// [`PruneError::Reparameterized`] where zeros in a base do not reach the effective value,
    /// [`PruneError::CopiesDiffer`] where a parameter is there twice with other values, and
    /// [`PruneError::Device`] where reading fails.
    pub fn of<M: Module>(model: &M, group: Option<&ParamGroup>) -> Result<Self, PruneError> {
        let mut choose = Choose {
            group,
            visited: Vec::new(),
            firsts: HashMap::new(),
            differ: None,
            selection: Self {
                layout: Layout::new(),
                ids: Vec::new(),
                parameters: Vec::new(),
                device: Device::default(),
            },
        };
        visit_with_path(model, &mut choose);
        if let Some(error) = choose.differ {
            return Err(error);
        }
        let selection = choose.with_ties();
        if selection.ids.is_empty() {
            let parameters = selection.parameters;
            let codes = |p: &&SelectedParameter| p.excluded == Some(ExcludedBecause::NotFloat);
            return Err(match parameters.iter().find(codes) {
                Some(SelectedParameter { path, .. }) => {
                    PruneError::Quantized { path: path.clone() }
                }
                None if parameters.is_empty() => PruneError::NoPrunableParameter,
                None => PruneError::AllExcluded { parameters },
            });
        }
        selection.check_reparameterizations(model)?;
        Ok(selection)
    }

    /// Which slice of the flat vector is which parameter.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Warns of what a user may expect to be pruned: weights that a pattern does not divide, and matrices of
    /// modules of the user's own. One warning for all of either; whoever prunes in stages calls it once.
    pub(crate) fn warn_of_excluded(&self) {
        let list = |is_meant: fn(&SelectedParameter) -> bool| {
            let meant = self.parameters.iter().filter(|one| is_meant(one));
            meant.map(ToString::to_string).collect::<Vec<_>>()
        };
        let undivided = list(|one: &SelectedParameter| {
            let reason = &one.excluded;
            matches!(reason, Some(ExcludedBecause::PatternDoesNotDivide { .. }))
        });
        if !undivided.is_empty() {
            tracing::warn!("not pruned: {}", undivided.join(", "));
        }
        let own = list(|one: &SelectedParameter| {
            let is_matrix = one.shape.iter().filter(|size| **size > 1).count() > 1;
            is_matrix && one.excluded == Some(ExcludedBecause::NoLayerWeight)
        });
        if !own.is_empty() {
            tracing::warn!(
                "not pruned, unless a parameter group names them: {}",
                own.join(", ")
            );
        }
    }

    /// Every floating-point parameter of the model, pruned or not, in module order.
    pub fn parameters(&self) -> &[SelectedParameter] {
        &self.parameters
    }

    /// The device of the first prunable parameter, without autodiff.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// With the floating-point operations that [`flops`](crate::flops()) counted, for budgets
    /// and reports; those of tied parameters add up.
    pub fn with_flops(mut self, flops_per_weight: &HashMap<String, f64>) -> Self {
        let mut counted = vec![None; self.layout.layers().len()];
        {
            let layers = self.layers_by_path();
            for (path, flops) in flops_per_weight {
                if let Some(layer) = layers.get(path.as_str()) {
                    *counted[*layer].get_or_insert(0.0) += flops;
                }
            }
        }
        let mut layout = Layout::new();
        for (layer, counted) in self.layout.layers().iter().zip(counted) {
            let flops = counted.unwrap_or(layer.flops_per_weight);
            layout.push(layer.path.clone(), layer.shape.clone(), layer.kind, flops);
        }
        self.layout = layout;
        self
    }

    /// Positions among the layers of the layout by path, also by the paths that are tied to a layer.
    pub(crate) fn layers_by_path(&self) -> HashMap<&str, usize> {
        let layers = self.layout.layers().iter().zip(0..);
        let firsts: HashMap<&str, usize> = layers
            .map(|(layer, at)| (layer.path.as_str(), at))
            .collect();
        let mut all = HashMap::with_capacity(self.parameters.len());
        for parameter in &self.parameters {
            let path = match &parameter.excluded {
                Some(ExcludedBecause::TiedTo(first)) => first,
                _ => &parameter.path,
            };
            if let Some(at) = firsts.get(path.as_str()) {
                all.entry(parameter.path.as_str()).or_insert(*at);
            }
        }
        all
    }

    /// Positions of the parameters among the layers of the layout.
    pub(crate) fn positions(&self) -> HashMap<ParamId, usize> {
        self.ids.iter().copied().zip(0..).collect()
    }

    pub(crate) fn ids(&self) -> &[ParamId] {
        &self.ids
    }

    /// Zeroes every second weight of each base, and looks for them in the effective values.
    fn check_reparameterizations<M: Module>(&self, model: &M) -> Result<(), PruneError> {
        let attached = burn_lean_reparam::attached(model);
        if !attached
            .iter()
            .any(|attached| self.ids.contains(&attached.id))
        {
            return Ok(());
        }
        let model = model.valid();
        // A weight that is no number is not the reparameterization's fault: it goes, too.
        let mut half = read(self.flatten(&model)?)?;
        for (index, weight) in half.iter_mut().enumerate() {
            if index % 2 == 0 || !weight.is_finite() {
                *weight = 0.0;
            }
        }
        let zeroed = Tensor::from_data(&half[..], (&self.device, DType::F32));
        let effective = read(self.flatten(&self.unflatten(model, zeroed)?.materialize())?)?;
        // Where the weight itself is tiny the device may flush it: only the zeros count.
        let mut pairs = half.iter().zip(&effective);
        let leaked = pairs.position(|(base, value)| *base == 0.0 && *value != 0.0);
        let Some(index) = leaked else { return Ok(()) };
        let path = self
            .layout
            .layer_at(index)
            .map(|layer| layer.path.clone())
            .unwrap_or_default();
        let name = attached
            .iter()
            .find(|attached| attached.path == path)
            .map(|attached| attached.name.clone())
            .unwrap_or_default();
        Err(PruneError::Reparameterized { path, name })
    }
}

impl fmt::Display for Selection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for parameter in &self.parameters {
            match &parameter.excluded {
                None => writeln!(f, "{} {:?}: pruned", parameter.path, parameter.shape)?,
                Some(reason) => writeln!(f, "{} {:?}: {reason}", parameter.path, parameter.shape)?,
            }
        }
        let all: usize = own(&self.parameters).map(SelectedParameter::elements).sum();
        write!(f, "{} of {all} weights are prunable", self.layout.len())
    }
}

/// Those that are not another one under a second path.
pub(crate) fn own(parameters: &[SelectedParameter]) -> impl Iterator<Item = &SelectedParameter> {
    parameters
        .iter()
        .filter(|parameter| !matches!(parameter.excluded, Some(ExcludedBecause::TiedTo(_))))
}

/// What the default selection knows about a parameter: its kind, if it is a layer's weight.
fn kind(at: &Trail) -> LayerKind {
    match at.container().strip_prefix("Struct:").unwrap_or("") {
        _ if at.name() != "weight" => LayerKind::Other,
        "Linear" if at.is_inside("Struct:GateController") => LayerKind::Recurrent,
        "Linear" => LayerKind::Linear,
        "Conv1d" | "Conv2d" | "Conv3d" | "DeformConv2d" => LayerKind::Conv,
        "ConvTranspose1d" | "ConvTranspose2d" | "ConvTranspose3d" => LayerKind::ConvTranspose,
        "Embedding" => LayerKind::Embedding,
        _ => LayerKind::Other,
    }
}

struct Choose<'a> {
    group: Option<&'a ParamGroup>,
    /// Of `selection.parameters`.
    visited: Vec<ParamId>,
    /// Where each parameter was first, and its values there.
    firsts: HashMap<ParamId, (String, DispatchTensor)>,
    /// One that was met again with other values, or could not be read.
    differ: Option<PruneError>,
    selection: Selection,
}

impl Choose<'_> {
    /// Whoever changes a parameter changes it everywhere, so that a clone which was given other values,
    /// or was trained alone, would lose them.
    fn compare<const D: usize>(
        &mut self,
        path: &str,
        param: &Param<Tensor<D>>,
    ) -> Result<(), PruneError> {
        let base = param.base().without_autodiff();
        let Some((first_path, first)) = self.firsts.get(&param.id) else {
            let first = (path.to_string(), base.into_dispatch());
            self.firsts.insert(param.id, first);
            return Ok(());
        };
        // Of another rank it is no copy, and no selection takes it for one.
        if first.shape() != base.shape() {
            return Ok(());
        }
        let first = Tensor::<D>::from_dispatch(first.clone());
        let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits);
        match bits(read(first)?).eq(bits(read(base)?)) {
            true => Ok(()),
            false => Err(PruneError::CopiesDiffer {
                path: path.to_string(),
                first: first_path.clone(),
            }),
        }
    }

    /// The selection, with every parameter that is another one under a second path marked.
    fn with_ties(self) -> Selection {
        let mut selection = self.selection;
        let layers = selection.layout.layers().iter();
        // Where each parameter is selected; where it was first, if it is not.
        let mut paths: HashMap<ParamId, String> = selection
            .ids
            .iter()
            .copied()
            .zip(layers.map(|layer| layer.path.clone()))
            .collect();
        for (id, parameter) in self.visited.into_iter().zip(&mut selection.parameters) {
            let path = paths.entry(id).or_insert_with(|| parameter.path.clone());
            if *path != parameter.path {
                parameter.excluded = Some(ExcludedBecause::TiedTo(path.clone()));
            }
        }
        selection
    }

    fn excluded(
        &self,
        at: &Trail,
        id: &ParamId,
        dtype: DType,
        elements: usize,
    ) -> Option<ExcludedBecause> {
        if at.is_attached() {
            return Some(ExcludedBecause::InsideReparameterization);
        }
        if at.is_inside("Struct:BatchNorm") && at.name().starts_with("running_") {
            return Some(ExcludedBecause::RunningStatistic);
        }
        match self.group {
            Some(group) if !group.matches(id, Some(&at.path())) => {
                return Some(ExcludedBecause::NotInGroup);
            }
            None if kind(at) == LayerKind::Other => return Some(ExcludedBecause::NoLayerWeight),
            _ => {}
        }
        if !dtype.is_float() {
            return Some(ExcludedBecause::NotFloat);
        }
        (elements == 0).then_some(ExcludedBecause::Empty)
    }
}

impl PathVisitor for Choose<'_> {
    fn float<const D: usize>(&mut self, at: &Trail, param: &Param<Tensor<D>>) {
        let path = at.path();
        let base = param.base();
        let shape = base.shape();
        let elements = shape.num_elements();
        let excluded = self.excluded(at, &param.id, base.dtype(), elements);
        let is_state = at.is_attached() || excluded == Some(ExcludedBecause::RunningStatistic);
        if !is_state && base.dtype().is_float() && self.differ.is_none() {
            self.differ = self.compare(&path, param).err();
        }
        self.visited.push(param.id);
        if excluded.is_none() && !self.selection.ids.contains(&param.id) {
            if self.selection.ids.is_empty() {
                self.selection.device = param.lazy_device().inner();
            }
            self.selection.ids.push(param.id);
            self.selection
                .layout
                .push(path.clone(), shape.to_vec(), kind(at), 2.0);
        }
        self.selection.parameters.push(SelectedParameter {
            path,
            shape: shape.to_vec(),
            excluded,
        });
    }
}
