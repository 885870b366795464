//! Preparing a model for quantization-aware training or calibration.

use std::collections::HashMap;

use burn::config::Config;
use burn::module::{Module, ParamGroup};
use burn::tensor::Device;
use burn_lean_graph::{Role, Tensors, record};
use burn_lean_reparam::{Rejected, attach_if_any};

use crate::model::batch_norm::apply_schedule;
use crate::model::called::uncalled;
use crate::model::layers::{Layers, Weight};
use crate::model::unobserved::{Unobserved, without_range};
use crate::module::sites;
use crate::module::weight_config::Channels;
use crate::qat::attach::AttachQuantizers;
use crate::qat::choices::Choices;
use crate::qat::found_sites::FoundSites;
use crate::qat::overrides::Override;
use crate::{FakeQuantize, FakeQuantizeConfig, NumberFormat, QuantError, Schedule};
use crate::{
    Scheme, WeightConfig, WeightQuantizer,
    module::{SiteQuantizers, map_quantizers},
    quantizers,
};

/// Quantization-aware training of a model, or its calibration.
///
/// By default: weights of linear layers, convolutions, transposed convolutions and embeddings in
/// INT8 per output channel, and the inputs of these layers in UINT8 with a moving average of their
/// range. Biases and norms stay in F32.
///
/// ```
/// use burn::module::Module;
/// use burn::nn::LinearConfig;
/// use burn::tensor::{Device, Tensor};
/// use burn_lean_quant::{QatConfig, QuantizedForward, WeightConfig};
///
/// let device = Device::flex().autodiff();
/// let model = LinearConfig::new(4, 2).init(&device);
/// let config = QatConfig::new().with_weight(WeightConfig::int(4));
/// let model = config.prepare(model)?;
///
/// // The training loop: the forward pass is run with the quantizers.
/// let x = Tensor::<2>::ones([3, 4], &device);
/// let loss = QuantizedForward::new().run(&model, x, |model, x| model.forward(x).sum())?;
/// assert!(model.weight.base().grad(&loss.backward()).is_some());
/// # Ok::<(), burn_lean_quant::QuantError>(())
/// ```
///
/// Burn's `LBFGS` panics at a prepared model: it counts all float tensors as parameters with a gradient, ranges
/// that were observed, too, and these have none.
///
/// It is a [`Config`]: it can be saved, loaded and printed as JSON.
#[derive(Config, Debug)]
pub struct QatConfig {
    /// How weights are quantized. Default: INT8, symmetric, per output channel.
    #[config(default = "WeightConfig::new()")]
    pub weight: WeightConfig,
    /// How the inputs of layers are quantized, and what else is a site for activations. `None` for
    /// weights only. Default: UINT8, affine, moving averages.
    #[config(default = "Some(FakeQuantizeConfig::new(Scheme::affine(NumberFormat::uint8())))")]
    pub activation: Option<FakeQuantizeConfig>,
    /// Whether the outputs of layers are quantized too. Default: no.
    #[config(default = false)]
    pub outputs: bool,
    /// Whether the operands of both products of an attention (queries, keys, values and attention
    /// weights) are quantized. Default: yes, where activations are.
    #[config(default = true)]
    pub attention: bool,
    /// Whether the branches of sums, as in residual connections, and the parts of concatenations
    /// are quantized, which a forward pass shows: [`prepare_for`](Self::prepare_for), refused without. Default:
    /// no.
    #[config(default = false)]
    pub sums: bool,
    /// The places that only a forward pass shows, as [`with_sites_of`](Self::with_sites_of) finds them.
    /// Default: none.
    #[config(default = "None")]
    pub sites: Option<FoundSites>,
    /// The weights to prepare. Default: all that can be.
    #[config(default = "None")]
    pub group: Option<ParamGroup>,
    /// What differs for some layers; of several that match, the last that says something about a
    /// choice decides it. Default: nothing.
    #[config(default = "Vec::new()")]
    pub overrides: Vec<Override>,
    /// When quantizers observe and quantize. Default: both from the first step on, without end.
    #[config(default = "Schedule::new()")]
    pub schedule: Schedule,
}

impl QatConfig {
    /// The model with quantizers attached to its weights.
    ///
    /// Parameters, their identities and the float behaviour of the model stay. Quantizers that the
    /// model has as modules of its own get the schedule too.
    ///
    /// # Errors
    ///
    /// The model comes back in the error: choices that contradict each other or do not fit a
    /// weight's shape, a group or an override that matches nothing, a weight that already carries a
    /// reparameterization (a second `prepare`, for example).
    pub fn prepare<M: Module>(&self, model: M) -> Result<M, Rejected<M, QuantError>> {
        let quantizers = match self.reparameterizer(&model) {
            Ok(quantizers) => quantizers,
            Err(error) => return Err(Rejected::new(model, error)),
        };
        // Quantizers of activations may be all there is.
        match attach_if_any(model, quantizers) {
            Ok(model) => Ok(apply_schedule(map_quantizers(model, |located| {
                let quantizer = located.quantizer.with_schedule(self.schedule);
                quantizer.with_path(located.path)
            }))),
            Err(rejected) => Err(rejected.map_error(QuantError::from)),
        }
    }

    /// As [`prepare`](Self::prepare), and with quantizers for what only the forward pass shows.
    ///
    /// These are weights that are multiplied outside of Burn's layers, products of two computed
    /// tensors outside of its attention (queries and keys after a rotation, say), and, if
    /// [`sums`](Self::sums) is set, sums and concatenations. `forward` is recorded as in
    /// [`QuantizedForward::run`](crate::QuantizedForward::run), which is how all of these
    /// quantizers act; nothing is computed. Inputs of layers that it does not call, or calls with parameters
    /// alone, get no quantizer, with a warning of [`tracing`]: no value would ever come by.
    ///
    /// ```
    /// use burn::module::{Module, Param};
    /// use burn::tensor::{Device, Distribution, Tensor};
    /// use burn_lean_quant::{QatConfig, QuantizedForward, quantizers};
    ///
    /// /// Not a layer of Burn's.
    /// #[derive(Module, Debug)]
    /// struct Own {
    ///     matrix: Param<Tensor<2>>,
    /// }
    ///
    /// let device = Device::flex().autodiff();
    /// let matrix = Tensor::random([4, 2], Distribution::Default, &device);
    /// let model = Own { matrix: Param::from_tensor(matrix) };
    /// let x = Tensor::<2>::random([3, 4], Distribution::Default, &device);
    /// let forward = |model: &Own, x: Tensor<2>| x.matmul(model.matrix.val());
    ///
    /// let model = QatConfig::new().prepare_for(model, x.clone(), forward)?;
    /// QuantizedForward::new().run(&model, x, forward)?;
    /// let names: Vec<_> = quantizers(&model).iter().map(|located| located.name()).collect();
    /// assert_eq!(names, ["matrix", "input of `matrix`"]);
    /// assert!(quantizers(&model)[1].quantizer.is_observed());
    /// # Ok::<(), burn_lean_quant::QuantError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`prepare`](Self::prepare); [`QuantError::Graph`] where the forward pass cannot be
    /// recorded.
    pub fn prepare_for<M: Module, I: Tensors, O: Tensors>(
        &self,
        model: M,
        input: I,
        forward: impl FnOnce(&M, I) -> O,
    ) -> Result<M, Rejected<M, QuantError>> {
        match self.with_sites_of(&model, input, forward) {
            Ok(config) => config.prepare(model),
            Err(error) => Err(Rejected::new(model, error)),
        }
    }

    /// The config with the places that only the forward pass shows, for all that prepares a model:
    /// [`PtqConfig`](crate::PtqConfig), [`MixedPrecisionConfig`](crate::MixedPrecisionConfig),
    /// [`reparameterizer`](Self::reparameterizer), a new model that a record is loaded into.
    ///
    /// `forward` is recorded; nothing is computed. Of a place, the path of a weight and a role are
    /// kept: they are those of any model of the same architecture.
    ///
    /// # Errors
    ///
    /// [`QuantError::Graph`] where the forward pass cannot be recorded.
    pub fn with_sites_of<M: Module, I: Tensors, O: Tensors>(
        &self,
        model: &M,
        input: I,
        forward: impl FnOnce(&M, I) -> O,
    ) -> Result<Self, QuantError> {
        let recording = record(model, &input, forward)?;
        let sites = FoundSites::of(model, recording.graph());
        Ok(self.clone().with_sites(Some(sites)))
    }

    /// As [`prepare`](Self::prepare), and checks that the model's forward pass calls every quantizer
    /// of an activation by itself: for a model that is trained without
    /// [`QuantizedForward`](crate::QuantizedForward).
    ///
    /// `forward` gets the model and the device to create its inputs on; nothing is computed. A layer that is called past its quantizer is found before the training, instead
    /// of at the [conversion](crate::ConvertConfig).
    ///
    /// # Errors
    ///
    /// As [`prepare`](Self::prepare); [`QuantError::NeverCalled`] of each activation whose quantizer
    /// the forward pass does not come by, of several as [`QuantError::Several`];
    /// [`QuantError::Graph`].
    pub fn prepare_with<M: Module, O>(
        &self,
        model: M,
        forward: impl FnOnce(&M, &Device) -> O,
    ) -> Result<M, Rejected<M, QuantError>> {
        let prepared = self.prepare(model.clone())?;
        let checked = uncalled(&prepared, forward).and_then(|uncalled| {
            let mut found = without_range(&quantizers(&prepared), Some(&uncalled));
            found.retain(|(located, _)| uncalled.contains(&located.path));
            Unobserved::Refuse.judge(found)
        });
        match checked {
            Ok(_) => Ok(prepared),
            Err(error) => Err(Rejected::new(model, error)),
        }
    }

    /// The quantizers for the weights of `model`, to be attached together with something else.
    ///
    /// In a [`ChainReparameterizer`](burn_lean_reparam::ChainReparameterizer), after a pruning
    /// mask; or in `AutocastConfig::prepare_with`, before the cast.
    ///
    /// ```
    /// use burn::module::Lora;
    /// use burn::nn::LinearConfig;
    /// use burn::tensor::Device;
    /// use burn_lean_quant::{QatConfig, WeightQuantizer};
    /// use burn_lean_reparam::{ChainReparameterizer, attach};
    ///
    /// let model = LinearConfig::new(4, 2).init(&Device::flex());
    /// let quantizers = QatConfig::new().reparameterizer(&model)?;
    /// let model = attach(model, ChainReparameterizer::new(Lora::new(1, 1.0), quantizers)).unwrap();
    /// assert!(WeightQuantizer::of(&model.weight).is_some());
    /// # Ok::<(), burn_lean_quant::QuantError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`prepare`](Self::prepare), except for what is attached already.
    pub fn reparameterizer<M: Module>(&self, model: &M) -> Result<AttachQuantizers, QuantError> {
        self.validate()?;
        let rounds = |choice: &Override| choice.activation.is_some();
        let rounds = self.activation.is_some() || self.overrides.iter().any(rounds);
        if self.sums && rounds && self.sites.is_none() {
            return Err(QuantError::InvalidConfig {
                field: "sums",
                value: "true, while no forward pass was looked at".into(),
                expected: "false, or a model prepared by `prepare_for` or with `with_sites_of`",
            });
        }
        let mut layers = Layers::of(model);
        for weight in &mut layers.weights {
            let found = self.sites.as_ref();
            weight.axis = weight
                .axis
                .or(found.and_then(|found| found.axis(&weight.path)));
        }
        for choice in &self.overrides {
            let weights = || layers.weights.iter().map(|weight| &weight.path);
            let mut matching = weights().filter(|path| choice.matches(path)).peekable();
            if matching.peek().is_none() {
                return Err(QuantError::UnknownPath {
                    pattern: choice.pattern.clone(),
                    known: layers.paths(),
                });
            }
            if choice.wants_activations() && !matching.any(|path| self.has_activation(path)) {
                return Err(no_activation(choice.wish()));
            }
        }
        let mut quantizers = HashMap::new();
        let mut in_group = false;
        for weight in &layers.weights {
            let group = self.group.as_ref();
            if group.is_some_and(|group| !group.matches(&weight.id, Some(&weight.path))) {
                continue;
            }
            in_group = true;
            let quantizer = self.quantizer(weight);
            if let Some(quantizer) = quantizer.map_err(|error| error.at(&weight.path))? {
                quantizers.insert(weight.path.clone(), quantizer);
            }
        }
        match (in_group, quantizers.is_empty()) {
            (false, _) if self.group.is_some() => Err(QuantError::NothingInGroup {
                known: layers.paths(),
            }),
            (_, true) => Err(QuantError::NothingToQuantize),
            (_, false) => Ok(AttachQuantizers { quantizers }),
        }
    }

    /// # Errors
    ///
    /// [`QuantError`] if choices contradict each other.
    pub fn validate(&self) -> Result<(), QuantError> {
        self.schedule.validate()?;
        let channels = Channels {
            output: 1,
            input: 0,
            is_stack: false,
        };
        let weight = |weight: &WeightConfig| weight.quantizer(&[1, 1], channels).validate();
        weight(&self.weight)?;
        self.activation
            .iter()
            .try_for_each(FakeQuantizeConfig::validate)?;
        for choice in &self.overrides {
            choice.validate()?;
            choice.weight.iter().try_for_each(weight)?;
            choice
                .activation
                .iter()
                .try_for_each(FakeQuantizeConfig::validate)?;
        }
        let overrides = || self.overrides.iter();
        let any =
            self.activation.is_some() || overrides().any(|choice| choice.activation.is_some());
        let wanted = match () {
            _ if any => None,
            _ if self.outputs => Some("outputs are quantized".to_string()),
            _ => overrides()
                .find(|choice| choice.wants_activations())
                .map(Override::wish),
        };
        match wanted {
            None => Ok(()),
            Some(wanted) => Err(no_activation(wanted)),
        }
    }

    /// Whether something says how activations of the layer of this weight are quantized.
    fn has_activation(&self, path: &str) -> bool {
        let mut overrides = self.overrides.iter();
        self.activation.is_some()
            || overrides.any(|choice| choice.activation.is_some() && choice.matches(path))
    }

    /// The channels of a weight whose output channels are along `axis`.
    fn channels(&self, weight: &Weight, axis: usize) -> Channels {
        let found = self.sites.as_ref();
        let summed = found.and_then(|found| found.summed_axis(&weight.path, axis));
        let input = summed.unwrap_or(match axis {
            0 => 1.min(weight.shape.len() - 1),
            _ => axis - 1,
        });
        Channels {
            output: axis,
            input,
            // A kernel has its channels first.
            is_stack: summed.is_some() || axis > 1,
        }
    }

    /// The quantizers of one weight; none if it is left out.
    fn quantizer(&self, weight: &Weight) -> Result<Option<WeightQuantizer>, QuantError> {
        let mut choices = Choices::of(self, &weight.path);
        let found = self.sites.as_ref();
        if choices.activation.is_some() && found.is_some_and(|one| one.is_uncalled(&weight.path)) {
            tracing::warn!(
                path = weight.path,
                "the forward pass multiplies nothing that depends on its inputs with this weight: the input \
                 of the layer is not quantized"
            );
            choices.activation = None;
        }
        let Some(axis) = choices.axis.or(weight.axis) else {
            return Ok(None);
        };
        if choices.skip || (choices.skip_weight && choices.activation.is_none()) {
            return Ok(None);
        }
        if axis >= weight.shape.len() {
            return Err(QuantError::AxisOutOfRange {
                axis,
                shape: weight.shape.clone(),
            });
        }
        let named = |quantizer: FakeQuantize, site: &str, role: Role, ordinal: usize| {
            let path = format!("{}.quant.{site}", weight.path);
            let quantizer = quantizer.with_schedule(self.schedule).with_path(path);
            quantizer.with_role(role, ordinal)
        };
        let channels = self.channels(weight, axis);
        let of_weight = choices.weight.quantizer(&weight.shape, channels);
        let of_weight = of_weight.init_for(&weight.shape, &weight.device)?;
        let activation = |site: &str, wanted: bool, role, ordinal| match &choices.activation {
            Some(config) if wanted => {
                let quantizer = config.init(&weight.device)?;
                Ok(Some(named(quantizer, site, role, ordinal)))
            }
            _ => Ok::<_, QuantError>(None),
        };
        let found = match &self.sites {
            // The sums and products of a recurrent layer are those of its gates.
            Some(found) if !weight.recurrent => {
                found.sites(&weight.path, self.attention, self.sums)
            }
            _ => Vec::new(),
        };
        let has = |role| found.contains(&(role, 0));
        let attends = self.attention;
        let output = choices.outputs || (weight.attention_operand && attends) || has(Role::Output);
        let attention = (weight.attention_query && attends) || has(Role::Probabilities);
        let mut others = SiteQuantizers::default();
        for (role, ordinal) in found.iter().copied() {
            let is_field = matches!(role, Role::Output | Role::Probabilities);
            if !(is_field && ordinal == 0) {
                let site = format!("sites.{}", sites::name(role, ordinal));
                let quantizer = activation(&site, true, role, ordinal)?;
                quantizer.into_iter().for_each(|one| others.push(one));
            }
        }
        let of_weight = of_weight.with_enabled(!choices.skip_weight);
        let multiplied = self.sites.as_ref();
        let multiplied = multiplied.is_some_and(|found| found.is_multiplied(&weight.path));
        let input = weight.float_input || multiplied;
        Ok(Some(WeightQuantizer {
            weight: named(of_weight, "weight", Role::Weight, 0),
            input: activation("input", input, Role::Input, 0)?,
            output: activation("output", output, Role::Output, 0)?,
            attention: activation("attention", attention, Role::Probabilities, 0)?,
            sites: others,
        }))
    }
}

fn no_activation(wanted: String) -> QuantError {
    QuantError::InvalidConfig {
        field: "activation",
        value: format!("None, while {wanted}"),
        expected: "set, or no choices about activations made",
    }
}
