//! Physically smaller layers from whole units that pruning left without weights.
//!
//! A hidden unit (a feature between two linear layers, a channel between two convolutions, an
//! attention head) can go in two cases:
//!
//! - nothing reads it: its weights in the following layer are all zero;
//! - it is constant: its weights in its own layer are all zero, so that it puts out the same
//!   number c whatever comes in. What the following layer makes of c moves into that layer's bias.
//!
//! Everything else keeps its value and its order. [`shrink`] does it to a whole network, whose recorded
//! forward pass shows which units go together; the other functions to a pair of layers.

mod attention;
mod groups;
mod network;
mod units;

use burn::module::{Module, Param, RunningState};
use burn::nn::conv::Conv2d;
use burn::nn::{BatchNorm, Linear, PaddingConfig2d};
use burn::tensor::Tensor;
use burn_lean_reparam::Rejected;

pub use attention::{PrunedAttention, shrink_heads};
pub use network::{ShrinkReport, UnitGroup, shrink};
use units::{Units, add_to_bias, keep, zero_slices};

use crate::PruneError;

/// Removes the hidden features between two linear layers that pruning left without weights.
///
/// `activation` is what the model computes between them; it must act on each element by itself
/// and be the identity where there is none. Masks are folded in, the new parameters have new
/// identities. At least one feature stays. Values are those of the given layers, exactly where
/// nothing moves into a bias, otherwise up to the rounding of one addition more.
///
/// ```
/// use burn::module::Param;
/// use burn::nn::LinearConfig;
/// use burn::tensor::{Device, activation::relu};
/// use burn_lean_prune::shrink_linear;
///
/// let device = Device::flex();
/// let mut first = LinearConfig::new(2, 3).init(&device);
/// first.weight = Param::from_data([[1.0, 0.0, 2.0], [3.0, 0.0, 4.0]], &device);
/// first.bias = Some(Param::from_data([0.5, 2.0, 0.0], &device));
/// let mut second = LinearConfig::new(3, 1).init(&device);
/// second.weight = Param::from_data([[1.0], [10.0], [0.0]], &device);
/// second.bias = Some(Param::from_data([1.0], &device));
///
/// // The second feature is always relu(2), the third is never read.
/// let (first, second) = shrink_linear(first, second, relu)?;
/// assert_eq!((first.weight.dims(), second.weight.dims()), ([2, 1], [1, 1]));
/// assert_eq!(second.bias.unwrap().val().into_scalar::<f32>(), 21.0);
/// # Ok::<(), burn_lean_prune::PruneError>(())
/// ```
///
/// # Errors
///
/// The layers come back in the error.
/// - [`PruneError::CannotShrink`]: the second layer does not take what the first puts out.
/// - [`PruneError::Device`]: reading from the device failed.
pub fn shrink_linear(
    first: Linear,
    second: Linear,
    activation: impl Fn(Tensor<1>) -> Tensor<1>,
) -> Result<(Linear, Linear), Rejected<(Linear, Linear), PruneError>> {
    let shrunk = || {
        let (first, second) = (first.clone().materialize(), second.clone().materialize());
        let units = first.weight.dims()[1];
        matching(units, second.weight.dims()[0])?;
        let units = Units {
            silent: zero_slices(first.weight.val(), 1)?,
            unread: zero_slices(second.weight.val(), 0)?,
            constants: activation(bias_or_zeros(&first.bias, &first.weight.val(), units)),
            moves_into_bias: true,
            group: 1,
        };
        let plan = units.plan()?;
        let first = Linear {
            weight: keep(first.weight, 1, &plan.kept),
            bias: first.bias.map(|bias| keep(bias, 0, &plan.kept)),
        };
        Ok((first, shrink_inputs(second, &plan, 1)))
    };
    shrunk().map_err(|error| Rejected::new((first.clone(), second.clone()), error))
}

/// A convolution and what normalizes its channels.
pub type NormalizedConv2d = (Conv2d, Option<BatchNorm>);

/// Removes the channels between two convolutions that pruning left without weights.
///
/// Like [`shrink_linear`], with the running statistics of a BatchNorm between the first
/// convolution and the activation. Pooling without padding may follow the activation. A constant
/// channel moves into the bias of the second convolution if that does not pad its input;
/// otherwise it goes only if the constant is zero, because the padding is not constant.
///
/// # Errors
///
/// The layers come back in the error.
/// - [`PruneError::CannotShrink`]: a convolution has groups, or the layers do not fit together.
/// - [`PruneError::Device`]: reading from the device failed.
pub fn shrink_conv(
    first: NormalizedConv2d,
    second: Conv2d,
    activation: impl Fn(Tensor<1>) -> Tensor<1>,
) -> Result<(NormalizedConv2d, Conv2d), Rejected<(NormalizedConv2d, Conv2d), PruneError>> {
    let shrunk = || {
        let second = second.clone().materialize();
        without_groups(&second)?;
        matching(first.0.weight.dims()[0], second.weight.dims()[1])?;
        let pads = match &second.padding {
            PaddingConfig2d::Valid => false,
            PaddingConfig2d::Explicit(top, left, bottom, right) => {
                [top, left, bottom, right].iter().any(|side| **side > 0)
            }
            PaddingConfig2d::Same => second.kernel_size != [1, 1] || second.stride != [1, 1],
        };
        let unread = zero_slices(second.weight.val(), 1)?;
        let (first, plan) = shrink_channels(first.clone(), unread, activation, !pads)?;
        let mut second = second;
        if let Some(constants) = &plan.moved {
            let [outputs, channels, ..] = second.weight.dims();
            let weight = second.weight.val().sum_dim(3).sum_dim(2);
            let weight = weight.reshape([outputs, channels]).transpose();
            let trains = second.weight.is_require_grad();
            second.bias = Some(add_to_bias(second.bias, constants, weight, trains));
        }
        second.weight = keep(second.weight, 1, &plan.kept);
        Ok((first, second))
    };
    shrunk().map_err(|error| Rejected::new((first.clone(), second.clone()), error))
}

/// Removes the channels between a convolution and a linear layer that pruning left without
/// weights.
///
/// Like [`shrink_conv`]; the output `[batch, channels, height, width]` is flattened to
/// `[batch, channels · height · width]` in front of the linear layer. After global pooling height
/// and width are 1.
///
/// # Errors
///
/// As [`shrink_conv`].
pub fn shrink_conv_linear(
    first: NormalizedConv2d,
    second: Linear,
    activation: impl Fn(Tensor<1>) -> Tensor<1>,
) -> Result<(NormalizedConv2d, Linear), Rejected<(NormalizedConv2d, Linear), PruneError>> {
    let shrunk = || {
        let second = second.clone().materialize();
        let [channels, inputs] = [first.0.weight.dims()[0], second.weight.dims()[0]];
        if channels == 0 || !inputs.is_multiple_of(channels) {
            return Err(PruneError::CannotShrink {
                reason: format!("{inputs} inputs are no multiple of {channels} channels"),
            });
        }
        let positions = inputs / channels;
        let unread = zero_slices(second.weight.val(), 0)?;
        let unread = unread
            .chunks(positions)
            .map(|zero| zero.iter().all(|zero| *zero));
        let (first, plan) = shrink_channels(first.clone(), unread.collect(), activation, true)?;
        Ok((first, shrink_inputs(second, &plan, positions)))
    };
    shrunk().map_err(|error| Rejected::new((first.clone(), second.clone()), error))
}

/// The output channels that are needed, and the plan for who reads them.
fn shrink_channels(
    (conv, norm): NormalizedConv2d,
    unread: Vec<bool>,
    activation: impl Fn(Tensor<1>) -> Tensor<1>,
    moves_into_bias: bool,
) -> Result<(NormalizedConv2d, units::Plan), PruneError> {
    let (conv, norm) = (conv.materialize(), norm.materialize());
    without_groups(&conv)?;
    let [channels, ..] = conv.weight.dims();
    let weight = conv.weight.val().flatten::<2>(1, 3).transpose();
    let mut constants = bias_or_zeros(&conv.bias, &weight, channels);
    if let Some(norm) = &norm {
        matching(channels, norm.gamma.dims()[0])?;
        let deviation = (norm.running_var.value_sync() + norm.epsilon).sqrt();
        let normalized = (constants - norm.running_mean.value_sync()) / deviation;
        constants = normalized * norm.gamma.val() + norm.beta.val();
    }
    let units = Units {
        silent: zero_slices(weight, 1)?,
        unread,
        constants: activation(constants),
        moves_into_bias,
        group: 1,
    };
    let plan = units.plan()?;
    let norm = norm.map(|norm| BatchNorm {
        gamma: keep(norm.gamma, 0, &plan.kept),
        beta: keep(norm.beta, 0, &plan.kept),
        running_mean: keep_state(&norm.running_mean, &plan.kept),
        running_var: keep_state(&norm.running_var, &plan.kept),
        ..norm
    });
    let conv = Conv2d {
        weight: keep(conv.weight, 0, &plan.kept),
        bias: conv.bias.map(|bias| keep(bias, 0, &plan.kept)),
        ..conv
    };
    Ok(((conv, norm), plan))
}

/// The linear layer on the units that are left, `positions` inputs each.
fn shrink_inputs(linear: Linear, plan: &units::Plan, positions: usize) -> Linear {
    let mut linear = linear;
    if let Some(constants) = &plan.moved {
        let [inputs, outputs] = linear.weight.dims();
        let weight = linear.weight.val();
        let weight = weight.reshape([inputs / positions, positions, outputs]);
        let weight = weight.sum_dim(1).reshape([inputs / positions, outputs]);
        let trains = linear.weight.is_require_grad();
        linear.bias = Some(add_to_bias(linear.bias, constants, weight, trains));
    }
    let of_unit = |unit: &usize| unit * positions..(unit + 1) * positions;
    let inputs: Vec<usize> = plan.kept.iter().flat_map(of_unit).collect();
    linear.weight = keep(linear.weight, 0, &inputs);
    linear
}

fn keep_state(state: &RunningState<Tensor<1>>, kept: &[usize]) -> RunningState<Tensor<1>> {
    let value = state.value_sync();
    RunningState::new(units::select(value, 0, kept))
}

fn bias_or_zeros(bias: &Option<Param<Tensor<1>>>, weight: &Tensor<2>, units: usize) -> Tensor<1> {
    match bias {
        Some(bias) => bias.val().detach(),
        None => Tensor::zeros([units], (&weight.device(), weight.dtype())),
    }
}

fn matching(units: usize, inputs: usize) -> Result<(), PruneError> {
    match units == inputs {
        true => Ok(()),
        false => Err(PruneError::CannotShrink {
            reason: format!("the first layer puts out {units}, the second takes {inputs}"),
        }),
    }
}

fn without_groups(conv: &Conv2d) -> Result<(), PruneError> {
    match conv.groups {
        1 => Ok(()),
        groups => Err(PruneError::CannotShrink {
            reason: format!("a convolution has {groups} groups, which tie its channels together"),
        }),
    }
}
