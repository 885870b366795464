//! Ranges of values.

// Burn marks its ndarray backend as deprecated; this project still serves its users.
#![allow(deprecated)]

use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, AutodiffBackend, Backend, Dispatch, backend_extension};
use burn::tensor::{FloatDType, Tensor};

use crate::fake::compiled;
use crate::fake::kernel::Kernel;
use crate::fake::op::fake_quantize;
use crate::format::groups::{Groups, Padding};
use crate::{QuantError, QuantParams, Scheme};

/// The lowest and the highest value of each group.
///
/// Both F32, `[groups]`, in row-major order of [`Scheme::group_shape`].
#[derive(Debug, Clone)]
pub struct Range {
    /// Lowest values.
    pub min: Tensor<1>,
    /// Highest values.
    pub max: Tensor<1>,
}

impl Range {
    /// The range of each group of `x`, without gradient; F32 whatever the dtype of `x`.
    ///
    /// A NaN makes the range of its group NaN; where there are several groups, other devices than CPUs may
    /// leave it out.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_lean_quant::{Granularity, NumberFormat, Scheme, fake::Range};
    ///
    /// let x = Tensor::<2>::from_floats([[1.0, -2.0], [3.0, 4.0]], &Device::flex());
    /// let scheme = Scheme::symmetric(NumberFormat::int8())
    ///     .with_granularity(Granularity::PerChannel { axis: 0 });
    /// let range = Range::of(&x, &scheme)?;
    /// assert_eq!(range.min.into_data().to_vec::<f32>().unwrap(), [-2.0, 3.0]);
    /// assert_eq!(range.max.into_data().to_vec::<f32>().unwrap(), [1.0, 4.0]);
    /// # Ok::<(), burn_lean_quant::QuantError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// If the scheme cannot quantize the shape of `x`; [`QuantError::MissingFeature`].
    pub fn of<const D: usize>(x: &Tensor<D>, scheme: &Scheme) -> Result<Self, QuantError> {
        scheme.validate_choices()?;
        compiled::check(&x.device())?;
        let groups = Groups::new(&scheme.granularity, &x.dims())?;
        let x = x.clone().detach().cast(FloatDType::F32);
        let x = groups.pad(x.into_dispatch(), Padding::Edge);
        let (min, max) = Dispatch::group_range(x, groups);
        Ok(Self {
            min: Tensor::from_dispatch(min),
            max: Tensor::from_dispatch(max),
        })
    }

    /// For each group the share of this range with the least Σ (x − x̃)²; `x` is F32, without gradient.
    pub(crate) fn least_squares<const D: usize>(
        self,
        x: &Tensor<D>,
        groups: &Groups,
        scheme: &Scheme,
        shares: impl Iterator<Item = f32>,
    ) -> Self {
        let mut best: Option<(Tensor<1>, Self)> = None;
        for share in shares {
            let range = Self {
                min: self.min.clone() * share,
                max: self.max.clone() * share,
            };
            let qparams = QuantParams::from_range(range.clone(), scheme);
            let rounded = fake_quantize(x.clone(), &qparams, scheme);
            let error = groups.mean((x.clone() - rounded).square());
            best = Some(match best {
                None => (error, range),
                Some((least, chosen)) => {
                    let better = error.clone().lower(least.clone());
                    let chosen = Self {
                        min: chosen.min.mask_where(better.clone(), range.min),
                        max: chosen.max.mask_where(better.clone(), range.max),
                    };
                    (least.mask_where(better, error), chosen)
                }
            });
        }
        best.map_or(self, |(_, range)| range)
    }
}

/// The range of groups as a backend operation.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cube"),
    Capture,
    Autodiff
)]
pub(crate) trait GroupRange: Backend {
    /// The lowest and the highest value of each group of an F32 tensor, `[groups]`; no gradient.
    fn group_range(x: FloatTensor<Self>, groups: Groups) -> (FloatTensor<Self>, FloatTensor<Self>);
}

impl<B: Kernel> GroupRange for B {
    fn group_range(x: FloatTensor<Self>, groups: Groups) -> (FloatTensor<Self>, FloatTensor<Self>) {
        B::range(x, &groups)
    }
}

impl<B: Kernel, C: CheckpointStrategy> GroupRange for Autodiff<B, C> {
    fn group_range(x: FloatTensor<Self>, groups: Groups) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let (min, max) = B::range(x.into_parts().0, &groups);
        (Self::from_inner(min), Self::from_inner(max))
    }
}
