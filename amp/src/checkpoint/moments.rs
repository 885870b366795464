//! Moments of Adam and AdamW in the dtype that they were saved in.

use std::any::{Any, TypeId};

use burn::optim::{
    Adam, AdamState, AdamW, AdamWState, AdaptiveMomentumState, LearningRate, Optimizer,
    RecordState, StateSink, StateSource, join_path,
};
use burn::tensor::{DType, Device, Tensor};

/// An optimizer of Burn whose state loads in the dtype of its record if it is that of [`Adam`] or [`AdamW`], and is then
/// cast to that of the gradients if the optimizer is one of them. Others decide themselves what their moments are in.
///
/// Burn loads a state in the default dtype of the device, and most states do not show their tensors.
#[derive(Debug, Clone)]
pub(super) struct KeepsMoments<O>(pub(super) O);

impl<O: Optimizer> Optimizer for KeepsMoments<O> {
    type State<const D: usize> = Kept<O::State<D>, D>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        tensor: Tensor<D>,
        grad: Tensor<D>,
        state: Option<Self::State<D>>,
    ) -> (Tensor<D>, Option<Self::State<D>>) {
        let own = TypeId::of::<O>();
        let follows = own == TypeId::of::<Adam>() || own == TypeId::of::<AdamW>();
        let state = state.map(|kept| match follows {
            true => kept.cast(grad.dtype()).0,
            false => kept.0,
        });
        let (tensor, state) = self.0.step::<D>(lr, tensor, grad, state);
        (tensor, state.map(Kept))
    }

    fn to_device<const D: usize>(state: Self::State<D>, device: &Device) -> Self::State<D> {
        Kept(O::to_device::<D>(state.0, device))
    }
}

/// The state of an optimizer; its record is that of `S`.
#[derive(Clone)]
pub(super) struct Kept<S, const D: usize>(S);

impl<S: 'static, const D: usize> Kept<S, D> {
    /// With moments in `dtype`: those of F64 parameters, say, whose record was loaded into F32 ones.
    fn cast(mut self, dtype: DType) -> Self {
        let state: &mut dyn Any = &mut self.0;
        let moments = match state.downcast_mut::<AdamState<D>>() {
            Some(state) => Some(&mut state.momentum),
            None => state
                .downcast_mut::<AdamWState<D>>()
                .map(|state| &mut state.momentum),
        };
        if let Some(moments) = moments {
            let both = [&mut moments.moment_1, &mut moments.moment_2];
            for moment in both.into_iter().chain(&mut moments.max_moment_2) {
                if moment.dtype() != dtype {
                    *moment = moment.clone().cast(dtype);
                }
            }
        }
        self
    }
}

impl<S: RecordState, const D: usize> RecordState for Kept<S, D> {
    fn state_flatten(&self, prefix: &str, out: &mut StateSink) {
        self.0.state_flatten(prefix, out);
    }

    fn state_unflatten(prefix: &str, source: &mut StateSource, device: &Device) -> Option<Self> {
        let own = TypeId::of::<S>();
        let state: Box<dyn Any> = if own == TypeId::of::<AdamState<D>>() {
            let momentum = moments::<D>(prefix, source, device)?;
            Box::new(AdamState { momentum })
        } else if own == TypeId::of::<AdamWState<D>>() {
            let momentum = moments::<D>(prefix, source, device)?;
            Box::new(AdamWState { momentum })
        } else {
            return S::state_unflatten(prefix, source, device).map(Kept);
        };
        state.downcast::<S>().ok().map(|state| Kept(*state))
    }
}

/// Moments as they are in the record, where the device has their dtype.
fn moments<const D: usize>(
    prefix: &str,
    source: &mut StateSource,
    device: &Device,
) -> Option<AdaptiveMomentumState<D>> {
    let prefix = join_path(prefix, "momentum");
    let mut tensor = |leaf: &str| {
        let data = source.take_tensor(&prefix, leaf)?;
        let dtype = match device.supports_dtype(data.dtype()) {
            true => data.dtype(),
            false => device.settings().float_dtype.into(),
        };
        Some(Tensor::<D>::from_data(data, (device, dtype)))
    };
    let moment_1 = tensor("moment_1")?;
    let moment_2 = tensor("moment_2")?;
    let max_moment_2 = tensor("max_moment_2");
    let time = source.take_scalar(&prefix, "time")?;
    Some(AdaptiveMomentumState {
        time: usize::try_from(time).ok()?,
        moment_1,
        moment_2,
        max_moment_2,
    })
}
