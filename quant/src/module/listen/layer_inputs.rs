//! The inputs of a model's layers, collected while it runs.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use burn::module::{Module, Param};
use burn::nn::conv::{Conv1d, Conv2d};
use burn::nn::{PaddingConfig1d, PaddingConfig2d};
use burn::tensor::Tensor;
use burn_lean_graph::{Kernel, hooks};

use crate::module::listen::input_statistics::Samples;
use crate::module::listen::listener::{Listener, collecting, lock};
use crate::{
    QuantError, WeightQuantizer,
    module::{InputStatistics, RunOutcome},
};

/// [`InputStatistics`] of the layers of a model, by the paths of their weights.
///
/// A linear layer has one; a convolution one for each group of channels, over its patches. They
/// are taken behind the layer's input quantizer: what the quantized layer will see.
///
/// Where a recorded forward pass multiplies by a weight and by its transpose, looks rows of it up, or reads it in a
/// product of another kind, too, they are not all that it serves: it has none.
#[derive(Debug, Clone, Default)]
pub struct LayerInputs {
    layers: BTreeMap<String, Inputs>,
    /// Weights that have none although products read them, and why.
    refused: BTreeMap<String, &'static str>,
    /// Weights of products whose inputs are not collected, while it is being collected.
    read_otherwise: BTreeSet<String>,
    error: Option<QuantError>,
}

/// Why the inputs of products with a table do not count.
pub(crate) const LOOKED_UP: &str = "its rows are looked up, too";

const READ_OTHERWISE: &str = "a product whose inputs are not collected reads it, too";

/// The inputs of a weight.
#[derive(Debug, Clone)]
struct Inputs {
    /// Of each group.
    groups: Vec<InputStatistics>,
    /// The axis of the weight over which products with it add up, where that is known.
    axis: Option<usize>,
}

impl Inputs {
    /// Why both are not the inputs of one matrix.
    fn apart_from(&self, other: &Self) -> Option<&'static str> {
        if let (Some(axis), Some(other)) = (self.axis, other.axis)
            && axis != other
        {
            return Some("it is multiplied both as it is and transposed");
        }
        let mut pairs = self.groups.iter().zip(&other.groups);
        pairs
            .any(|(one, other)| one.features() != other.features())
            .then_some("its products have different numbers of inputs")
    }

    fn merge(&mut self, other: &Self) -> Result<(), QuantError> {
        self.axis = self.axis.or(other.axis);
        let mut pairs = self.groups.iter_mut().zip(&other.groups);
        pairs.try_for_each(|(one, other)| one.merge(other))
    }
}

impl LayerInputs {
    /// The inputs of every prepared [`Linear`](burn::nn::Linear), [`Conv1d`] and [`Conv2d`] of
    /// `model` that `run` calls: by [`QuantizedForward::run`](crate::QuantizedForward::run), or with
    /// [`forward_q`](crate::ForwardQ::forward_q) in a forward pass of its own. Those of attentions,
    /// transformers and recurrent layers are among them. Reads each from the device.
    ///
    /// `run` gets a copy of the model as it is after training ([`valid`](Module::valid)), and may
    /// call it, or clones of it, on any thread.
    ///
    /// # Errors
    ///
    /// [`QuantError::NonFinite`] of the layer whose input is not finite, [`QuantError::Device`],
    /// [`QuantError::NoLayerInputs`] when no such layer was called so.
    ///
    /// ```
    /// use burn::nn::LinearConfig;
    /// use burn::tensor::{Device, Tensor};
    /// use burn_lean_quant::{QatConfig, QuantizedForward, module::LayerInputs};
    ///
    /// let device = Device::flex();
    /// let model = LinearConfig::new(2, 3).init(&device);
    /// let model = QatConfig::new().with_activation(None).prepare(model)?;
    /// let x = Tensor::<2>::from_data([[1.0, -3.0], [3.0, 1.0]], &device);
    /// let quantized = QuantizedForward::new();
    /// let inputs = LayerInputs::collect(&model, |model| {
    ///     quantized.run(model, x, |model, x| model.forward(x))
    /// })?;
    /// assert_eq!(inputs.of("weight").unwrap()[0].mean(), [2.0, -1.0]);
    /// # Ok::<(), burn_lean_quant::QuantError>(())
    /// ```
    pub fn collect<M: Module, R: RunOutcome>(
        model: &M,
        run: impl FnOnce(&M) -> R,
    ) -> Result<Self, QuantError> {
        let collected = Arc::new(Mutex::new(Self::default()));
        run(&collecting(model, &collected)).outcome()?;
        let mut collected = std::mem::take(&mut *lock(&collected));
        collected.refuse_read_otherwise();
        match collected.error {
            Some(error) => Err(error),
            None if collected.layers.is_empty() && collected.refused.is_empty() => {
                Err(QuantError::NoLayerInputs)
            }
            None => Ok(collected),
        }
    }

    /// The statistics of the layer whose weight has this path, one for each group.
    pub fn of(&self, weight: &str) -> Option<&[InputStatistics]> {
        self.layers
            .get(weight)
            .map(|inputs| inputs.groups.as_slice())
    }

    /// Paths of the weights, in alphabetical order.
    pub fn paths(&self) -> impl Iterator<Item = &str> {
        self.layers.keys().map(String::as_str)
    }

    /// Adds statistics of a layer that was called otherwise.
    pub fn insert(&mut self, weight: impl Into<String>, statistics: Vec<InputStatistics>) {
        let weight = weight.into();
        self.refused.remove(&weight);
        let inputs = Inputs {
            groups: statistics,
            axis: None,
        };
        self.layers.insert(weight, inputs);
    }

    /// Why a weight has none although products read it.
    pub(crate) fn refusal(&self, weight: &str) -> Option<&'static str> {
        self.refused.get(weight).copied()
    }

    /// From now on, this weight has none.
    pub(crate) fn refuse(&mut self, weight: &str, reason: &'static str) {
        self.layers.remove(weight);
        self.refused.insert(weight.to_string(), reason);
    }

    /// Notes that a product whose inputs are not collected reads this weight. One that no other reads has no
    /// inputs anyway, so that it is not refused here.
    pub(crate) fn note_other_product(&mut self, weight: &str) {
        if !self.read_otherwise.contains(weight) {
            self.read_otherwise.insert(weight.to_string());
        }
    }

    fn refuse_read_otherwise(&mut self) {
        for weight in std::mem::take(&mut self.read_otherwise) {
            if self.layers.contains_key(&weight) {
                self.refuse(&weight, READ_OTHERWISE);
            }
        }
    }

    /// Forgets the layers of other weights.
    pub(crate) fn retain(&mut self, keeps: impl Fn(&str) -> bool) {
        self.layers.retain(|weight, _| keeps(weight));
        self.refused.retain(|weight, _| keeps(weight));
    }

    /// Takes the inputs of the layer with this weight, part by part: of each, a matrix of samples for each
    /// group. `axis` is that of the weight over which the product adds up, where that is known.
    pub(crate) fn observe(
        collected: &Mutex<Self>,
        weight: &str,
        axis: Option<usize>,
        parts: impl Iterator<Item = Vec<Tensor<2>>>,
    ) {
        if lock(collected).refusal(weight).is_some() {
            return;
        }
        // Read and multiplied before it locks.
        let seen = statistics(parts).map(|groups| Inputs { groups, axis });
        let mut collected = lock(collected);
        if collected.error.is_some() {
            return;
        }
        if let Err(error) = seen.and_then(|seen| collected.add(weight, seen)) {
            collected.error = Some(error.at(weight));
        }
    }

    fn add(&mut self, weight: &str, seen: Inputs) -> Result<(), QuantError> {
        match self.layers.get_mut(weight) {
            // A convolution has no group in a batch without examples.
            Some(before) if !before.groups.is_empty() => match before.apart_from(&seen) {
                Some(reason) => self.refuse(weight, reason),
                None => before.merge(&seen)?,
            },
            _ => drop(self.layers.insert(weight.to_string(), seen)),
        }
        Ok(())
    }
}

/// Of each group.
fn statistics(
    parts: impl Iterator<Item = Vec<Tensor<2>>>,
) -> Result<Vec<InputStatistics>, QuantError> {
    let mut seen: Vec<InputStatistics> = Vec::new();
    for groups in parts {
        for (group, samples) in groups.into_iter().enumerate() {
            let samples = Samples::read(samples)?;
            if seen.len() == group {
                seen.push(InputStatistics::new(samples.features()));
            }
            seen[group].add(&samples)?;
        }
    }
    Ok(seen)
}

/// Called by `forward_q` with what a linear layer multiplies.
pub(crate) fn linear<const D: usize>(weight: &Param<Tensor<2>>, x: &Tensor<D>) {
    offer(weight, 0, || {
        let features = x.dims()[D - 1];
        let rows = x.shape().num_elements() / features.max(1);
        let samples = x.clone().without_autodiff().reshape([rows, features]);
        std::iter::once(vec![samples])
    });
}

/// Called by `forward_q` with what a convolution slides over.
pub(crate) fn conv1d(layer: &Conv1d, x: &Tensor<3>) {
    offer(&layer.weight, 1, || {
        parts(x, layer.kernel_size).map(|x| patches_1d(layer, x))
    });
}

/// As [`conv1d`].
pub(crate) fn conv2d(layer: &Conv2d, x: &Tensor<4>) {
    let kernel = layer.kernel_size.iter().product();
    offer(&layer.weight, 1, || {
        parts(x, kernel).map(|x| patches(layer, x))
    });
}

/// Numbers in the patches of a part of a batch, about.
const PART: usize = 1 << 22;

/// A batch in parts: its patches take as many times its memory as the kernel has elements.
pub(crate) fn parts<const D: usize>(
    x: &Tensor<D>,
    kernel: usize,
) -> impl Iterator<Item = Tensor<D>> + use<D> {
    let x = x.clone().without_autodiff();
    let examples = x.dims()[0];
    let each = x.shape().num_elements() / examples.max(1) * kernel;
    let step = (PART / each.max(1)).max(1);
    let starts = (0..examples).step_by(step);
    starts.map(move |start| x.clone().narrow(0, start, step.min(examples - start)))
}

/// `axis`: that of the weight over which its product adds up.
fn offer<const W: usize, P: Iterator<Item = Vec<Tensor<2>>>>(
    weight: &Param<Tensor<W>>,
    axis: usize,
    parts: impl FnOnce() -> P,
) {
    // In a recording there are no values; the execution shows them.
    if hooks::is_active() {
        return;
    }
    let quantizers = WeightQuantizer::of(weight);
    let listener = quantizers.and_then(|quantizers| quantizers.weight.listener());
    if let Some(Listener::Inputs { into, weight }) = listener {
        LayerInputs::observe(into, weight, Some(axis), parts());
    }
}

/// What each output position of a convolution sees: for each group of channels
/// `[batch · positions, channels_in / groups · height · width]`, in the order of the weight.
fn patches(layer: &Conv2d, x: Tensor<4>) -> Vec<Tensor<2>> {
    let [_, _, height, width] = x.dims();
    let kernel = Kernel {
        size: layer.kernel_size.to_vec(),
        stride: layer.stride.to_vec(),
        padding: padding(layer, [height, width]).to_vec(),
        dilation: layer.dilation.to_vec(),
    };
    of_groups(&kernel, layer.groups, x)
}

/// As [`patches`]: for each group of channels
/// `[batch · positions, channels_in / groups · length]`.
fn patches_1d(layer: &Conv1d, x: Tensor<3>) -> Vec<Tensor<2>> {
    let [_, _, length] = x.dims();
    let kernel = Kernel {
        size: vec![layer.kernel_size],
        stride: vec![layer.stride],
        padding: vec![padding_1d(layer, length)],
        dilation: vec![layer.dilation],
    };
    of_groups(&kernel, layer.groups, x)
}

/// What a kernel sees, as one matrix for each group of channels.
pub(crate) fn of_groups<const D: usize>(
    kernel: &Kernel,
    groups: usize,
    x: Tensor<D>,
) -> Vec<Tensor<2>> {
    let seen = kernel.patches(x.into_dispatch());
    let per_group = seen.dims()[1] / groups.max(1);
    let of_group = |group: usize| seen.clone().narrow(1, group * per_group, per_group);
    (0..groups).map(of_group).collect()
}

/// Zeros before and after each axis, as the layer itself counts them.
pub(crate) fn padding(layer: &Conv2d, [height, width]: [usize; 2]) -> [(usize, usize); 2] {
    let same = |axis: usize, len| same_padding(len, layer.kernel_size[axis], layer.stride[axis]);
    match layer.padding {
        PaddingConfig2d::Valid => [(0, 0); 2],
        PaddingConfig2d::Explicit(top, left, bottom, right) => [(top, bottom), (left, right)],
        PaddingConfig2d::Same => [same(0, height), same(1, width)],
    }
}

/// As [`padding`].
pub(crate) fn padding_1d(layer: &Conv1d, length: usize) -> (usize, usize) {
    match layer.padding {
        PaddingConfig1d::Valid => (0, 0),
        PaddingConfig1d::Explicit(left, right) => (left, right),
        PaddingConfig1d::Same => same_padding(length, layer.kernel_size, layer.stride),
    }
}

/// Zeros before and after an axis, as Burn counts them for `Same`, which does not look at the dilation.
fn same_padding(len: usize, kernel_size: usize, stride: usize) -> (usize, usize) {
    let needed = (len.div_ceil(stride).max(1) - 1) * stride + kernel_size;
    let total = needed.saturating_sub(len);
    (total / 2, total - total / 2)
}
