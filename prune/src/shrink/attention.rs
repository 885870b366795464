//! Multi-head attention with fewer heads.

use burn::module::{Module, Param};
use burn::nn::attention::MultiHeadAttention;
use burn::nn::{Dropout, Linear};
use burn::tensor::activation::{quiet_softmax, softmax};
use burn::tensor::{Bool, Tensor};
use burn_lean_reparam::Rejected;

use super::units::{Units, add_to_bias, keep, zero_slices};
use crate::PruneError;

/// Multi-head attention whose heads together are narrower than the model: what is left of Burn's
/// [`MultiHeadAttention`] when whole heads are gone. That one cannot hold it, because it takes the
/// heads to fill `d_model`.
#[derive(Module, Debug)]
pub struct PrunedAttention {
    /// Projection of the query, `[d_model, n_heads · d_k]`.
    pub query: Linear,
    /// Projection of the key, `[d_model, n_heads · d_k]`.
    pub key: Linear,
    /// Projection of the value, `[d_model, n_heads · d_k]`.
    pub value: Linear,
    /// Projection of what the heads found, `[n_heads · d_k, d_model]`.
    pub output: Linear,
    /// Dropout on the attention weights.
    pub dropout: Dropout,
    /// Heads that are left.
    pub n_heads: usize,
    /// Features of each head.
    pub d_k: usize,
    /// Score of what is masked.
    pub min_float: f64,
    /// Whether the weights of a head may sum to less than one.
    pub quiet_softmax: bool,
}

impl PrunedAttention {
    /// Attends from `query` to `key` and `value`.
    ///
    /// # Shapes
    ///
    /// - query: `[batch, length_1, d_model]`; key, value: `[batch, length_2, d_model]`
    /// - mask_pad: `[batch, length_2]`; mask_attn: `[batch, length_1, length_2]`; true = masked
    /// - output: `[batch, length_1, d_model]`
    pub fn forward(
        &self,
        query: Tensor<3>,
        key: Tensor<3>,
        value: Tensor<3>,
        mask_pad: Option<Tensor<2, Bool>>,
        mask_attn: Option<Tensor<3, Bool>>,
    ) -> Tensor<3> {
        let heads = |x: Tensor<3>, projection: &Linear| -> Tensor<4> {
            let [batch, length, _] = x.dims();
            let x = projection.forward(x);
            x.reshape([batch, length, self.n_heads, self.d_k])
                .swap_dims(1, 2)
        };
        let [batch, length, _] = query.dims();
        let query = heads(query, &self.query);
        let key = heads(key, &self.key);
        let value = heads(value, &self.value);
        let mut scores = query.matmul(key.transpose()) / (self.d_k as f32).sqrt();
        if let Some(mask) = mask_pad {
            let [batch, length] = mask.dims();
            let mask = mask.reshape([batch, 1, 1, length]);
            scores = scores.mask_fill(mask, self.min_float);
        }
        if let Some(mask) = mask_attn {
            let [batch, length_1, length_2] = mask.dims();
            let mask = mask.reshape([batch, 1, length_1, length_2]);
            scores = scores.mask_fill(mask, self.min_float);
        }
        let weights = match self.quiet_softmax {
            true => quiet_softmax(scores, 3),
            false => softmax(scores, 3),
        };
        let context = self.dropout.forward(weights).matmul(value);
        let context = context.swap_dims(1, 2);
        let context = context.reshape([batch, length, self.n_heads * self.d_k]);
        self.output.forward(context)
    }
}

/// Removes the heads that pruning left without weights: those that the output projection does not
/// read, and those whose value projection is zero, which put out their value's bias.
///
/// Masks are folded in, the new parameters have new identities, at least one head stays. For
/// inference: a constant head's share is exact only without dropout.
///
/// ```
/// use burn::module::Param;
/// use burn::nn::attention::{MhaInput, MultiHeadAttentionConfig};
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_lean_prune::shrink::shrink_heads;
///
/// let device = Device::flex();
/// let mut attention = MultiHeadAttentionConfig::new(4, 2).with_dropout(0.0).init(&device);
/// // The output projection reads only the first head, features 0 and 1.
/// let head = Tensor::<2>::ones([2, 4], &device);
/// let none = Tensor::<2>::zeros([2, 4], &device);
/// attention.output.weight = Param::from_tensor(Tensor::cat(vec![head, none], 0));
///
/// let x = Tensor::<3>::random([1, 3, 4], Distribution::Default, &device);
/// let dense = attention.forward(MhaInput::self_attn(x.clone())).context;
/// let pruned = shrink_heads(attention)?;
/// assert_eq!((pruned.n_heads, pruned.query.weight.dims()), (1, [4, 2]));
/// let difference = pruned.forward(x.clone(), x.clone(), x, None, None) - dense;
/// assert!(difference.abs().max().into_scalar::<f32>() < 1e-5);
/// # Ok::<(), burn_lean_prune::PruneError>(())
/// ```
///
/// # Errors
///
/// The module comes back in the error.
/// - [`PruneError::CannotShrink`]: the projections do not have `n_heads · d_k` features.
/// - [`PruneError::Device`]: reading from the device failed.
pub fn shrink_heads(
    attention: MultiHeadAttention,
) -> Result<PrunedAttention, Rejected<MultiHeadAttention, PruneError>> {
    shrunk(attention.clone().materialize()).map_err(|error| Rejected::new(attention, error))
}

fn shrunk(attention: MultiHeadAttention) -> Result<PrunedAttention, PruneError> {
    let MultiHeadAttention {
        query,
        key,
        value,
        output,
        ..
    } = attention;
    let (n_heads, d_k) = (attention.n_heads, attention.d_k);
    let width = n_heads * d_k;
    if width == 0 {
        return Err(PruneError::CannotShrink {
            reason: format!("{n_heads} heads of {d_k} features"),
        });
    }
    for projection in [&query, &key, &value] {
        matching(projection.weight.dims()[1], width)?;
    }
    matching(width, output.weight.dims()[0])?;
    let units = Units {
        silent: zero_slices(value.weight.val(), 1)?,
        unread: zero_slices(output.weight.val(), 0)?,
        constants: bias_or_zeros(&value.bias, &value.weight.val(), width),
        // The weights of a head sum to one, unless they are quiet.
        moves_into_bias: !attention.quiet_softmax,
        group: d_k,
    };
    let plan = units.plan()?;
    let mut output = output;
    if let Some(constants) = &plan.moved {
        let weight = output.weight.val();
        let trains = weight.is_require_grad();
        output.bias = Some(add_to_bias(output.bias, constants, weight, trains));
    }
    output.weight = keep(output.weight, 0, &plan.kept);
    let narrow = |projection: Linear| Linear {
        weight: keep(projection.weight, 1, &plan.kept),
        bias: projection.bias.map(|bias| keep(bias, 0, &plan.kept)),
    };
    Ok(PrunedAttention {
        query: narrow(query),
        key: narrow(key),
        value: narrow(value),
        output,
        dropout: attention.dropout,
        n_heads: plan.kept.len() / d_k,
        d_k,
        min_float: attention.min_float,
        quiet_softmax: attention.quiet_softmax,
    })
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
            reason: format!("the heads put out {units}, what follows takes {inputs}"),
        }),
    }
}
