//! Which units can go, and how parameters get smaller.

use burn::module::{Param, ParamId};
use burn::tensor::{Tensor, TensorData};

use crate::PruneError;
use crate::host::{read, select};

/// What is known about the units between two layers.
pub(super) struct Units {
    /// The unit's own weights are all zero: it is constant.
    pub(super) silent: Vec<bool>,
    /// Its weights in the following layer are all zero.
    pub(super) unread: Vec<bool>,
    /// What each unit puts out if it is constant, `[units]`.
    pub(super) constants: Tensor<1>,
    /// Whether the following layer's bias can take the place of a constant input.
    pub(super) moves_into_bias: bool,
    /// Units that go together or not at all: the features of a head.
    pub(super) group: usize,
}

/// Which units stay, and what the others leave behind.
pub(super) struct Plan {
    /// Indices of the units that stay, ascending.
    pub(super) kept: Vec<usize>,
    /// The constants that go, zero for all other units, `[1, units]`; `None` if all are zero.
    pub(super) moved: Option<Tensor<2>>,
}

impl Units {
    pub(super) fn plan(self) -> Result<Plan, PruneError> {
        let constants = read(self.constants.clone())?;
        let count = constants.len();
        let goes = |unit: usize| {
            let constant = constants[unit];
            let moves = constant == 0.0 || self.moves_into_bias && constant.is_finite();
            self.unread[unit] || self.silent[unit] && moves
        };
        let group_stays = |first: usize| !(first..first + self.group).all(goes);
        let mut stays: Vec<bool> = (0..count)
            .map(|unit| group_stays(unit - unit % self.group))
            .collect();
        if !stays.contains(&true) {
            // No tensor without elements: many kernels cannot compute with one.
            stays
                .iter_mut()
                .take(self.group)
                .for_each(|stays| *stays = true);
        }
        let constant = |unit: usize| match stays[unit] || self.unread[unit] {
            true => 0.0,
            false => constants[unit],
        };
        let moved: Vec<f32> = (0..count).map(constant).collect();
        let kept = (0..count).filter(|unit| stays[*unit]).collect();
        let moved = moved.iter().any(|constant| *constant != 0.0).then(|| {
            let device = self.constants.device();
            let data = TensorData::new(moved, [1, count]);
            Tensor::from_data(data, (&device, self.constants.dtype()))
        });
        Ok(Plan { kept, moved })
    }
}

/// For each index along `axis` whether all elements there are zero.
pub(super) fn zero_slices<const D: usize>(
    weight: Tensor<D>,
    axis: usize,
) -> Result<Vec<bool>, PruneError> {
    let dims = weight.dims();
    let stride: usize = dims[axis + 1..].iter().product();
    let mut zero = vec![true; dims[axis]];
    for (at, value) in read(weight)?.into_iter().enumerate() {
        // A NaN is no zero either.
        if value != 0.0 {
            zero[at / stride % dims[axis]] = false;
        }
    }
    Ok(zero)
}

/// The parameter at some indices of `axis`: a new one, because an optimizer's state for the old one
/// would not fit.
pub(super) fn keep<const D: usize>(
    param: Param<Tensor<D>>,
    axis: usize,
    kept: &[usize],
) -> Param<Tensor<D>> {
    let (_, value, mapper) = param.consume();
    let trains = value.is_require_grad();
    let value = select(value, axis, kept.iter().copied())
        .detach()
        .set_require_grad(trains);
    Param::from_mapped_value(ParamId::new(), value, mapper)
}

/// The bias plus what `weight`, `[units, outputs]`, makes of constant inputs, `[1, units]`. A new
/// one trains if `trains`.
pub(super) fn add_to_bias(
    bias: Option<Param<Tensor<1>>>,
    constants: &Tensor<2>,
    weight: Tensor<2>,
    trains: bool,
) -> Param<Tensor<1>> {
    let added = constants.clone().matmul(weight).squeeze_dim::<1>(0);
    // A parameter is a leaf of the graph.
    match bias {
        Some(bias) => bias.map(|bias| {
            let trains = bias.is_require_grad();
            (bias + added).detach().set_require_grad(trains)
        }),
        None => Param::from_tensor(added.detach()).set_require_grad(trains),
    }
}
