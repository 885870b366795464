//! An optimizer whose state loads on a device of one's own choice, and keeps its dtype.

use burn::module::ParamGroup;
use burn::optim::{
    DynOptimizer, DynState, LearningRate, ModuleOptimizer, Optimizer, StateSink, StateSource,
};
use burn::tensor::Device;
use burn::tensor::kind::BridgeTensor;

use super::moments::KeepsMoments;

/// An optimizer of Burn that loads its state on a given device, instead of on Burn's default one.
///
/// `ModuleOptimizer::load_record` makes the tensors of the state on `Device::default()`, which is a
/// GPU wherever a GPU backend is compiled in, and panics where there is none, although the model
/// trains on the CPU. [`Checkpoints::load`](crate::Checkpoints::load) and Burn's Learner call it.
/// With this the state goes to the device of the model at once. The records are Burn's: a plain
/// optimizer of the same kind reads them, and the other way round.
///
/// Burn also makes them in the default dtype of that device. The moments of [`Adam`](burn::optim::Adam) and
/// [`AdamW`](burn::optim::AdamW) keep that of the record here, F64 or F32 on a device whose default is half, and take
/// that of the gradients where it is another one. For other optimizers the default has to be that of all parameters:
/// [`Checkpoints::load`](crate::Checkpoints::load) refuses what is not; Burn's Learner does not look.
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::optim::AdamWConfig;
/// use burn::tensor::Device;
/// use burn_lean_amp::{Checkpoints, GradScalerConfig, LossScale, ResumableOptimizer};
///
/// let device = Device::flex().autodiff();
/// let optim = || ResumableOptimizer::new(AdamWConfig::new().build(), &device).init();
/// let model = LinearConfig::new(2, 2).init(&device);
/// let scaler = GradScalerConfig::new(LossScale::None).init()?;
///
/// let folder = tempfile::tempdir()?;
/// let checkpoints = Checkpoints::new(folder.path());
/// checkpoints.save(1, &model, &optim(), &scaler)?;
/// let (model, optim, scaler) = checkpoints.load(1, model, optim())?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// With parameter groups, give one to each: it is what `ModuleOptimizer::with_group` takes. Let groups name
/// paths: a record brings identities of its own, also in Burn's Learner, and those of `ParamGroup::from_ids`
/// then match nothing, without a word.
#[derive(Debug, Clone)]
pub struct ResumableOptimizer<O> {
    optim: KeepsMoments<O>,
    device: Device,
}

impl<O: Optimizer> ResumableOptimizer<O> {
    /// Wraps an optimizer, as the `build` of Burn's configs returns it; `device` is that of the
    /// model.
    pub fn new(optim: O, device: &Device) -> Self {
        Self {
            optim: KeepsMoments(optim),
            device: device.clone().without_autodiff(),
        }
    }

    /// The optimizer of a whole model.
    ///
    /// `ModuleOptimizer::with_grad_clipping` does not reach it, nor does the clipping of
    /// `AdamWConfig::with_grad_clipping`, which `build` leaves out: clip by
    /// [`GradScalerConfig::max_norm`](crate::GradScalerConfig::max_norm).
    pub fn init(self) -> ModuleOptimizer {
        // The first group must be a bare optimizer, and the last that matches serves a parameter.
        let fallback = ModuleOptimizer::from(self.optim.0.clone());
        fallback.with_group(ParamGroup::all(), self, None)
    }
}

impl<O: Optimizer> DynOptimizer for ResumableOptimizer<O> {
    fn step_dyn(
        &self,
        rank: usize,
        lr: LearningRate,
        tensor: BridgeTensor,
        grad: BridgeTensor,
        state: Option<DynState>,
    ) -> (BridgeTensor, Option<DynState>) {
        self.optim.step_dyn(rank, lr, tensor, grad, state)
    }

    fn to_device_dyn(&self, state: DynState, device: &Device) -> DynState {
        self.optim.to_device_dyn(state, device)
    }

    fn state_flatten(&self, prefix: &str, state: &DynState, out: &mut StateSink) {
        self.optim.state_flatten(prefix, state, out);
    }

    fn state_unflatten(
        &self,
        rank: usize,
        prefix: &str,
        source: &mut StateSource,
        _default: &Device,
    ) -> Option<DynState> {
        self.optim
            .state_unflatten(rank, prefix, source, &self.device)
    }
}
