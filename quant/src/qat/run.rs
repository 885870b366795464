//! Forward passes with the quantizers of a model, without editing the model.

use std::panic::Location;

use burn::module::Module;
use burn_lean_graph::{
    AsRecorded, GraphError, Recordings, Tensors, hooks, is_recorded, model_device,
};
use burn_lean_reparam::Rejected;

use crate::QuantError;
use crate::module::walk::own_quantizers;
use crate::qat::training::calibrate;

/// Runs forward passes with the quantizers of a prepared model, without an edit of the model: the
/// counterpart of `Autocast::run` for quantization.
///
/// The forward pass is recorded, and the quantizers that the weights carry act where the recording
/// shows their places: the inputs of linear layers, convolutions and recurrent gates, wherever they
/// are called, also in private fields of other people's modules; queries, keys, values and
/// attention weights; and what [`QatConfig::prepare_for`](crate::QatConfig::prepare_for) found. A
/// place is a weight and a role, not a tensor: all steps of a recurrence share a quantizer. A layer
/// that the forward pass itself calls with its quantizers
/// ([`forward_q`](crate::ForwardQ::forward_q), [`quantize_calls`](crate::quantize_calls)) is left
/// to it; both ways use the same quantizers, records and numbers.
///
/// Gradients arrive at the parameters of the model. `Autocast::run` records too, so it runs a
/// prepared model with all of its quantizers in half precision; the steps that `GradScaler` or `Amp` takes then move
/// the schedules on, and [`advance`](crate::advance) does after those of an optimizer alone.
///
/// ```
/// use burn::module::Module;
/// use burn::nn::{Linear, LinearConfig};
/// use burn::optim::{AdamWConfig, GradientsParams};
/// use burn::tensor::{Device, Distribution, Tensor, activation::relu};
/// use burn_lean_quant::{QatConfig, QuantizedForward, WeightConfig, quantizers};
///
/// #[derive(Module, Debug)]
/// struct Net {
///     body: Linear,
///     head: Linear,
/// }
///
/// impl Net {
///     fn forward(&self, x: Tensor<2>) -> Tensor<2> {
///         self.head.forward(relu(self.body.forward(x)))
///     }
/// }
///
/// let device = Device::flex().autodiff();
/// let layer = LinearConfig::new(4, 4);
/// let net = Net { body: layer.init(&device), head: layer.init(&device) };
/// let mut net = QatConfig::new().with_weight(WeightConfig::int(4)).prepare(net)?;
/// let quantized = QuantizedForward::new();
/// let mut optim = AdamWConfig::new().init();
/// for _ in 0..2 {
///     let x = Tensor::<2>::random([8, 4], Distribution::Default, &device);
///     let loss = quantized.run(&net, x, |net, x| net.forward(x).square().mean())?;
///     let grads = GradientsParams::from_grads(loss.backward(), &net);
///     net = optim.step(1e-3, net, grads);
/// }
/// assert!(quantizers(&net).iter().all(|located| located.quantizer.is_observed()));
/// assert!(quantizers(&net).iter().all(|located| located.quantizer.step() == 2));
/// # Ok::<(), burn_lean_quant::QuantError>(())
/// ```
///
/// # What a recording cannot follow
///
/// Reading a value, `detach`, a backward pass inside: see [`QuantError::Graph`], which says where.
/// There, [`forward_q`](crate::ForwardQ::forward_q) does without a recording.
#[derive(Debug, Clone)]
pub struct QuantizedForward {
    recordings: Recordings,
    advances: bool,
}

impl Default for QuantizedForward {
    fn default() -> Self {
        Self::new()
    }
}

impl QuantizedForward {
    /// Records in every step, compares gradients at the first one, the 8th, the 16th and so on, and
    /// moves the schedules on.
    pub fn new() -> Self {
        Self {
            recordings: Recordings::default(),
            advances: true,
        }
    }

    /// Records each forward pass once for the shapes of its inputs, not in every step.
    ///
    /// Numbers that the forward pass makes on the host, and plain tensors of the model, stay as they were recorded; where
    /// they are others at the 2nd use, the 4th and so on, a warning says so and it is recorded in every step from
    /// then on. The 64 recordings that
    /// were used last are kept. Functions behind a pointer (`fn`, `dyn Fn`) are recorded in every step.
    pub fn cached(mut self) -> Self {
        self.recordings.caches = true;
        self
    }

    /// Leaves out the comparison of gradients at the first training step of each forward pass, and at the 8th,
    /// the 16th and so on.
    pub fn without_verification(mut self) -> Self {
        self.recordings.verifies = false;
        self
    }

    /// Leaves the [`Schedule`](crate::Schedule) to [`advance`](crate::advance): for a loop that
    /// accumulates the gradients of several runs, or runs the model several times, in one step.
    pub fn without_schedule(mut self) -> Self {
        self.advances = false;
        self
    }

    /// Runs `forward` with the quantizers of `model`.
    ///
    /// `forward` gets the model and the input, and returns the loss or whatever the step needs; it
    /// is recorded first and computes nothing by itself. On an autodiff device, quantizers observe
    /// as their schedule says, and the run counts as a step of it: [`advance`](crate::advance)
    /// need not be called, and does nothing more for this step where it is. A model that is
    /// [`valid`](Module::valid) is evaluated with the ranges that it has.
    ///
    /// A model without quantizers runs as it is. Inside of a forward pass that is recorded (an export, a
    /// calibration, `Autocast::run`) it is `forward` alone: that recording has the quantizers act.
    ///
    /// # Errors
    ///
    /// [`QuantError::Graph`]: the forward pass cannot be recorded (it reads a value, say), stops
    /// gradients, gives no tensor, or a quantizer cannot quantize what comes by.
    #[track_caller]
    pub fn run<M, I, O>(
        &self,
        model: &M,
        input: I,
        forward: impl FnOnce(&M, I) -> O,
    ) -> Result<O, QuantError>
    where
        M: Module,
        I: Tensors,
        O: Tensors + Send + Sync + 'static,
    {
        let caller = Location::caller();
        if is_recorded(model, &input) {
            return Ok(forward(model, input));
        }
        let trains = model_device(model).is_some_and(|device| device.is_autodiff());
        if trains && let Some(frozen) = hooks::frozen(model) {
            return self.run_recorded((model, &frozen), input, forward, caller, true);
        }
        self.run_recorded((model, model), input, forward, caller, false)
    }

    fn run_recorded<M, I, O>(
        &self,
        (own, model): (&M, &M),
        input: I,
        forward: impl FnOnce(&M, I) -> O,
        caller: &'static Location<'static>,
        is_frozen: bool,
    ) -> Result<O, QuantError>
    where
        M: Module,
        I: Tensors,
        O: Tensors + Send + Sync + 'static,
    {
        let variant = u64::from(is_frozen);
        let recording = self
            .recordings
            .recording(model, &input, forward, caller, variant)?;
        if recording.graph().outputs().is_empty() {
            return Err(GraphError::NoResult.into());
        }
        let result = recording.execute(model, &input, &AsRecorded)?;
        let device = model_device(own);
        let trains = device.is_some_and(|device| device.is_autodiff());
        if self.advances && trains {
            for quantizer in own_quantizers(own) {
                quantizer.advance_by_run();
            }
        }
        Ok(result)
    }

    /// The model with the ranges that its quantizers observe while `forward` runs on these batches,
    /// as [`calibrate`](crate::calibrate).
    ///
    /// # Errors
    ///
    /// As [`calibrate`](crate::calibrate) and [`run`](Self::run); the model comes back.
    #[track_caller]
    pub fn calibrate<M, I, O>(
        &self,
        model: M,
        batches: impl IntoIterator<Item = I>,
        forward: impl Fn(&M, I) -> O,
    ) -> Result<M, Rejected<M, QuantError>>
    where
        M: Module,
        I: Tensors,
        O: Tensors + Send + Sync + 'static,
    {
        let caller = Location::caller();
        let run = |model: &M| {
            batches.into_iter().try_for_each(|batch| {
                self.run_recorded((model, model), batch, &forward, caller, false)
                    .map(drop)
            })
        };
        calibrate(model, run)
    }
}

#[cfg(test)]
mod tests {
    use burn::nn::LinearConfig;
    use burn::tensor::{Device, Tensor};

    use super::*;
    use crate::quantizers;

    #[test]
    fn a_model_without_quantizers_runs_as_it_is() {
        let device = Device::flex();
        let model = LinearConfig::new(3, 2).init(&device);
        assert!(quantizers(&model).is_empty());
        let x = Tensor::<2>::ones([1, 3], &device);
        let y = QuantizedForward::new().run(&model, x.clone(), |model, x| model.forward(x));
        assert_eq!(y.unwrap().into_data(), model.forward(x).into_data());
    }
}
