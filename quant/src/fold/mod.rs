//! Batch normalization folded into the layer before it.
//!
//! In inference a batch normalization is a multiplication and an addition per channel, so that a
//! layer and its normalization deploy as one layer
//!
//! ```text
//! W' = W · γ / √(σ² + ε)          per output channel
//! b' = (b − µ) · γ / √(σ² + ε) + β
//! ```
//!
//! Quantizing `W` instead of `W'` would quantize a weight that no device ever sees. [`fold`] writes
//! `W'` and `b'` into the unchanged structs of the model and leaves the normalization as the exact
//! identity (or, after a layer without bias, as the addition of `b'`), frozen.
//!
//! [Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference,
//! Jacob et al., 2018](https://arxiv.org/abs/1712.05877), section 3.2.

pub(crate) mod norm_pair;

pub use norm_pair::{NormPair, NotFoldable};

use std::collections::{HashMap, HashSet};

use burn::module::{Flag, Module, Param};
use burn::tensor::{DType, Tensor, TensorData};
use burn_lean_graph::{Tensors, evaluated, record};
use burn_lean_reparam::{
    Attached, PathMapper, PathVisitor, Rejected, Trail, attached, each_float, map_with_path,
    own_copy, settle, visit_kinds, visit_with_path,
};
use serde::{Deserialize, Serialize};

use crate::QuantError;
use crate::model::channel_layout::ChannelLayout;
use crate::model::float_parameters::{self, FloatParameter};
use crate::module::effective::HostTensor;

/// A layer and the batch normalization that directly follows it, by their paths in the model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FoldPair {
    /// Path of the linear, convolution or transposed convolution, for example `block.0.conv`.
    pub layer: String,
    /// Path of the batch normalization, for example `block.0.norm`.
    pub batch_norm: String,
    /// The normalization's ε, as its config has it (`BatchNorm::epsilon`). A module visitor cannot see
    /// it, and a wrong one is off without a word: there is no default.
    pub epsilon: f64,
}

impl FoldPair {
    /// A layer, and the normalization that follows it with its ε.
    pub fn new(layer: impl Into<String>, batch_norm: impl Into<String>, epsilon: f64) -> Self {
        Self {
            layer: layer.into(),
            batch_norm: batch_norm.into(),
            epsilon,
        }
    }
}

/// Folds every batch normalization into the layer that it directly follows in `forward`, where that
/// can be done.
///
/// The pairs are those of [`Audit::norm_pairs`](crate::inspect::Audit::norm_pairs), which says why one stays:
/// its layer is used without it, for example. The forward pass is recorded as an evaluation, and
/// nothing is computed by it. What folding does, see [`fold`].
///
/// ```
/// use burn::module::Module;
/// use burn::nn::conv::{Conv1d, Conv1dConfig};
/// use burn::nn::{BatchNorm, BatchNormConfig};
/// use burn::tensor::{Device, Tensor};
/// use burn_lean_quant::fold_for;
///
/// #[derive(Module, Debug)]
/// struct Block {
///     conv: Conv1d,
///     norm: BatchNorm,
/// }
///
/// let device = Device::flex();
/// let block = Block {
///     conv: Conv1dConfig::new(1, 2, 1).init(&device),
///     norm: BatchNormConfig::new(2).with_epsilon(1e-3).init(&device),
/// };
/// let x = Tensor::<3>::from_data([[[1.0, -2.0]]], &device);
/// let forward = |block: &Block, x| block.norm.forward(block.conv.forward(x));
/// let before = forward(&block, x.clone());
/// let block = fold_for(block, x.clone(), forward)?;
/// let after = block.conv.forward(x);
/// assert!((after - before).abs().max().into_scalar::<f32>() < 1e-6);
/// # Ok::<(), burn_lean_quant::QuantError>(())
/// ```
///
/// # Errors
///
/// As [`fold`]; [`QuantError::Graph`] where the forward pass cannot be recorded.
pub fn fold_for<M: Module, I: Tensors, O: Tensors>(
    model: M,
    input: I,
    forward: impl FnOnce(&M, I) -> O,
) -> Result<M, Rejected<M, QuantError>> {
    let pairs = record(&model.valid(), &evaluated(&input), forward)
        .map(|recording| norm_pair::foldable(&norm_pair::find(recording.graph(), &model)));
    match pairs {
        Ok(pairs) => fold(model, &pairs),
        Err(error) => Err(Rejected::new(model, error.into())),
    }
}

/// Folds each batch normalization of `pairs` into its layer.
///
/// The folded model computes what `model` computes in inference, up to the rounding of its dtype. Fold a trained
/// model *before* [`prepare`](crate::QatConfig::prepare), so that the observers see the weights
/// that will be deployed. The running statistics of clones of `model` stay as they are.
///
/// The layer is a `Linear`, `Conv1d/2d/3d` (grouped or not) or `ConvTranspose1d/2d/3d`. Where it
/// has a bias, the normalization becomes the identity and none of its parameters is trained any
/// more; where it has none, `b'` becomes the normalization's β, which stays trainable.
///
/// A `Linear`'s outputs must be the axis that is normalized, so its input must be of two axes,
/// `[batch, features]`; a path does not tell. [`fold_for`] looks at what the forward pass does and
/// takes only pairs that can be folded.
///
/// # Errors
///
/// Each with the model inside: [`QuantError::UnknownParameter`] when a path names no layer or no batch
/// normalization, [`QuantError::UnsupportedLayer`] for a layer of another kind or one that carries
/// a reparameterization other than the mask of a weight or the cast of a region, [`QuantError::ChannelMismatch`], [`QuantError::NonFinite`] when γ/√(σ²+ε)
/// or a folded number is not finite, [`QuantError::InvalidConfig`] for a bad epsilon or a
/// normalization that is named twice.
///
/// ```
/// use burn::module::Module;
/// use burn::nn::conv::{Conv1d, Conv1dConfig};
/// use burn::nn::{BatchNorm, BatchNormConfig};
/// use burn::tensor::{Device, Tensor};
/// use burn_lean_quant::{fold, fold::FoldPair};
///
/// #[derive(Module, Debug)]
/// struct Block {
///     conv: Conv1d,
///     norm: BatchNorm,
/// }
///
/// let device = Device::flex();
/// let block = Block {
///     conv: Conv1dConfig::new(1, 2, 1).init(&device),
///     norm: BatchNormConfig::new(2).init(&device),
/// };
/// let x = Tensor::<3>::from_data([[[1.0, -2.0]]], &device);
/// let before = block.norm.forward(block.conv.forward(x.clone()));
/// let block = fold(block.clone(), &[FoldPair::new("conv", "norm", block.norm.epsilon)]).unwrap();
/// let after = block.conv.forward(x);
/// assert!((after.clone() - before).abs().max().into_scalar::<f32>() < 1e-6);
/// // What is left of the normalization is the exact identity.
/// assert_eq!(block.norm.forward(after.clone()).into_data(), after.into_data());
/// ```
pub fn fold<M: Module>(model: M, pairs: &[FoldPair]) -> Result<M, Rejected<M, QuantError>> {
    settle(&model);
    let plan = match plan(&model, pairs) {
        Ok(plan) => plan,
        Err(error) => return Err(Rejected::new(model, error)),
    };
    let model = float_parameters::replace(own_copy(&model), plan.values);
    Ok(map_with_path(model, &mut Freezer(plan.frozen)))
}

/// `W'` and `b'` of one layer, on the host.
///
/// `weight` holds the layer's weight in row-major order; `channel_of` gives the output channel of
/// each of its elements. `bias` may be empty: no bias.
#[derive(Debug, Clone, PartialEq)]
struct Folded {
    weight: Vec<f64>,
    bias: Vec<f64>,
}

struct BatchNormValues<'a> {
    gamma: &'a [f64],
    beta: &'a [f64],
    mean: &'a [f64],
    variance: &'a [f64],
    epsilon: f64,
}

/// In F64 whatever the model is in: folding is done once, and its rounding would otherwise add to the
/// quantization's.
fn fold_values(
    weight: &[f64],
    channel_of: impl Fn(usize) -> usize,
    bias: Option<&[f64]>,
    norm: &BatchNormValues<'_>,
) -> Folded {
    let pairs = norm.gamma.iter().zip(norm.variance);
    let factor: Vec<f64> = pairs
        .map(|(gamma, variance)| gamma / (variance + norm.epsilon).sqrt())
        .collect();
    let weight = weight.iter().enumerate();
    let folded_weight = weight.map(|(index, w)| w * factor[channel_of(index)]);
    let folded_bias = (0..factor.len()).map(|channel| {
        let bias = bias.map_or(0.0, |bias| bias[channel]);
        (bias - norm.mean[channel]) * factor[channel] + norm.beta[channel]
    });
    Folded {
        weight: folded_weight.collect(),
        bias: folded_bias.collect(),
    }
}

struct Plan {
    values: HashMap<String, TensorData>,
    /// Parameters and flags to freeze, by path.
    frozen: Vec<String>,
}

fn plan<M: Module>(model: &M, pairs: &[FoldPair]) -> Result<Plan, QuantError> {
    let parameters = float_parameters::list(model);
    let carried = Carried::of(model);
    let stored = Stored::of(model);
    let mut plan = Plan {
        values: HashMap::new(),
        frozen: Vec::new(),
    };
    // Read at once: a walk through the model for each pair takes time of their number squared.
    let read = float_parameters::read(model, &named(&parameters, pairs))?;
    for pair in pairs {
        fold_pair((&parameters, &carried), (&stored, &read), pair, &mut plan)?;
    }
    Ok(plan)
}

/// The paths of what these pairs name, as far as the model has it.
fn named(parameters: &[FloatParameter], pairs: &[FoldPair]) -> Vec<String> {
    let of_pair = |pair: &FoldPair| {
        let layer = ["weight", "bias"].map(|field| format!("{}.{field}", pair.layer));
        let norm = ["gamma", "beta", "running_mean", "running_var"];
        let norm = norm.map(|field| format!("{}.{field}", pair.batch_norm));
        layer.into_iter().chain(norm)
    };
    let there: HashSet<&str> = parameters.iter().map(|one| one.path.as_str()).collect();
    let named = pairs.iter().flat_map(of_pair);
    named.filter(|path| there.contains(path.as_str())).collect()
}

fn fold_pair(
    (parameters, carried): (&[FloatParameter], &Carried),
    (stored, read): (&Stored, &HashMap<String, HostTensor<f64>>),
    pair: &FoldPair,
    plan: &mut Plan,
) -> Result<(), QuantError> {
    if !(pair.epsilon > 0.0 && pair.epsilon.is_finite()) {
        return Err(QuantError::InvalidConfig {
            field: "epsilon",
            value: pair.epsilon.to_string(),
            expected: "positive and finite",
        });
    }
    let of_norm = |field: &str| format!("{}.{field}", pair.batch_norm);
    let weight_path = format!("{}.weight", pair.layer);
    let bias_path = format!("{}.bias", pair.layer);
    let [gamma, beta, mean, variance] =
        ["gamma", "beta", "running_mean", "running_var"].map(of_norm);
    if plan.values.contains_key(&gamma) || plan.values.contains_key(&weight_path) {
        return Err(QuantError::InvalidConfig {
            field: "pairs",
            value: format!("`{}` and `{}`", pair.layer, pair.batch_norm),
            expected: "layers and normalizations that no other pair names",
        });
    }
    let weight_parameter = float_parameters::find(parameters, &weight_path)?.clone();
    let layout = ChannelLayout::of(&weight_parameter)?;
    for path in [&weight_path, &bias_path, &gamma, &beta] {
        refuse_reparameterized((parameters, carried), path, path == &weight_path)?;
    }
    let has_bias = parameters.iter().any(|p| p.path == bias_path);
    for path in [&gamma, &beta, &mean, &variance] {
        float_parameters::find(parameters, path)?;
    }
    let of = |path: &String| -> &HostTensor<f64> { &read[path] };

    let channels = of(&gamma).values.len();
    if !layout.fits(&weight_parameter.shape, channels) {
        return Err(QuantError::ChannelMismatch {
            path: weight_path,
            found: layout.channels(&weight_parameter.shape),
            other: gamma,
            expected: channels,
        });
    }
    let norm = BatchNormValues {
        gamma: &of(&gamma).values,
        beta: &of(&beta).values,
        mean: &of(&mean).values,
        variance: &of(&variance).values,
        epsilon: pair.epsilon,
    };
    for (path, values) in [(&gamma, norm.gamma), (&variance, norm.variance)] {
        if values.iter().any(|value| !value.is_finite()) {
            return Err(QuantError::NonFinite { what: "value" }.at(path));
        }
    }
    if norm.variance.iter().any(|v| v + pair.epsilon <= 0.0) {
        return Err(QuantError::NonFinite {
            what: "root of a negative variance",
        }
        .at(variance));
    }
    let shape = weight_parameter.shape.clone();
    let bias = has_bias.then(|| of(&bias_path).values.as_slice());
    let folded = fold_values(
        &of(&weight_path).values,
        |index| layout.channel_of(index, &shape, channels),
        bias,
        &norm,
    );
    let shift = match has_bias {
        true => &bias_path,
        // β is the layer's bias from now on, and goes on training as one.
        false => &beta,
    };
    for (path, values) in [(&weight_path, &folded.weight), (shift, &folded.bias)] {
        if !stored.is_finite(path, values) {
            return Err(QuantError::NonFinite {
                what: "folded value",
            }
            .at(path));
        }
    }
    let vector = |values: Vec<f64>| TensorData::new(values, [channels]);
    let zeros = || vector(vec![0.0; channels]);
    plan.values
        .insert(weight_path, TensorData::new(folded.weight, shape));
    plan.values
        .insert(gamma.clone(), vector(vec![1.0; channels]));
    plan.values.insert(mean, zeros());
    let neutral = neutral_variance(pair.epsilon, stored.is_f64(&variance));
    plan.values
        .insert(variance, vector(vec![neutral; channels]));
    plan.frozen.push(gamma);
    plan.frozen.push(of_norm("training"));
    plan.values.insert(shift.clone(), vector(folded.bias));
    if has_bias {
        plan.values.insert(beta.clone(), zeros());
        plan.frozen.push(beta);
    }
    Ok(())
}

/// The dtypes that the float tensors of a model are stored in, by path.
#[derive(Default)]
struct Stored(HashMap<String, DType>);

impl Stored {
    fn of<M: Module>(model: &M) -> Self {
        let mut stored = Self::default();
        each_float(model, |at, float| {
            stored.0.insert(at.path(), float.dtype());
        });
        stored
    }

    fn is_f64(&self, path: &str) -> bool {
        self.0.get(path) == Some(&DType::F64)
    }

    /// Whether numbers are finite where they will be stored: half precision may overflow.
    fn is_finite(&self, path: &str, values: &[f64]) -> bool {
        let values = TensorData::new(values.to_vec(), [values.len()]);
        let values = match self.0.get(path) {
            Some(dtype) if dtype.is_float() => values.convert_dtype(*dtype),
            _ => values,
        };
        values.iter::<f64>().all(f64::is_finite)
    }
}

/// The variance with `√(variance + ε) = 1` exactly in F64, or in F32, so that nothing is left of the division.
fn neutral_variance(epsilon: f64, is_f64: bool) -> f64 {
    let wide = 1.0 - epsilon;
    let narrow = wide as f32;
    let neighbours = match is_f64 {
        true => [wide, wide.next_up(), wide.next_down()],
        false => [narrow, narrow.next_up(), narrow.next_down()].map(f64::from),
    };
    let is_neutral = |v: &f64| match is_f64 {
        true => *v + epsilon == 1.0,
        false => *v as f32 + epsilon as f32 == 1.0,
    };
    // Only an epsilon far above 1 has no neutral variance next to 1 − ε; the nearest one is then
    // off by a rounding of the sum.
    let found = neighbours.into_iter().find(is_neutral);
    found.unwrap_or(neighbours[0])
}

/// What the parameters of a model carry.
struct Carried {
    attached: Vec<Attached>,
    /// Paths of the tensors of masks.
    flags: Vec<String>,
}

impl Carried {
    fn of<M: Module>(model: &M) -> Self {
        struct Flags(Vec<String>);
        impl PathVisitor for Flags {
            visit_kinds!(int, bool: |self, at, _param| {
                if at.is_attached() {
                    self.0.push(at.path());
                }
            });
        }
        let mut flags = Flags(Vec::new());
        visit_with_path(model, &mut flags);
        Self {
            attached: attached(model),
            flags: flags.0,
        }
    }
}

/// A factor for each channel passes through the mask of a weight, and through casts; an offset, or a number in
/// another's place, through casts alone.
fn refuse_reparameterized(
    (parameters, Carried { attached, flags }): (&[FloatParameter], &Carried),
    path: &str,
    is_weight: bool,
) -> Result<(), QuantError> {
    let prefix = format!("{path}.");
    let holds_floats = || {
        let mut parameters = parameters.iter();
        parameters.any(|one| one.nested && one.path.starts_with(&prefix))
    };
    let holds_flags = || flags.iter().any(|flags| flags.starts_with(&prefix));
    let passes = |one: &Attached| match one.name.as_str() {
        "master_weight" => true,
        "mask" => is_weight,
        // Of these two; adapters and quantizers have numbers of their own.
        "chain" => !holds_floats() && (is_weight || !holds_flags()),
        _ => false,
    };
    let mut attached = attached.iter().filter(|one| one.path == path);
    match attached.find(|one| !passes(one)) {
        None => Ok(()),
        Some(one) => Err(QuantError::UnsupportedLayer {
            path: path.to_string(),
            reason: format!(
                "it carries a reparameterization, `{}`; do this before `prepare`, or `materialize` \
                 first",
                one.name
            ),
        }),
    }
}

/// Turns gradients and training behaviour off, by path.
struct Freezer(Vec<String>);

impl PathMapper for Freezer {
    fn float<const D: usize>(&mut self, at: &Trail, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match self.0.contains(&at.path()) {
            true => param.set_require_grad(false),
            false => param,
        }
    }

    fn flag(&mut self, at: &Trail, flag: Param<Flag>) -> Param<Flag> {
        match self.0.contains(&at.path()) {
            true => flag.with_value(false),
            false => flag,
        }
    }
}
