//! Mixed precision operation by operation, without editing the model.

use std::panic::Location;
use std::sync::{Arc, Mutex, PoisonError};

use burn::module::{Module, ParamGroup};
use burn::tensor::{DType, Device, FloatDType};
use burn_lean_graph::hooks::{acts_in_recordings, frozen};
use burn_lean_graph::{
    Arithmetic, AsRecorded, BackendKind, GraphError, Halves, Precision, Tensors, input_device,
    is_recorded, model_device, record_halves,
};

use crate::autocast::config::resolve;
use crate::autocast::lists::{Except, OnDevice};
use crate::autocast::region::Entered;
use crate::device::compute::Compute;
use crate::{AmpError, Autocast, Fallback};

/// What an [`Autocast`] and its clones know of devices.
#[derive(Debug, Default)]
pub(crate) struct Resolved {
    /// What the dtype came to on which devices: a device is looked at once.
    devices: Mutex<Vec<(Fallback, Vec<Device>, Compute)>>,
}

/// What [`Autocast::run`] does with one operation.
#[derive(Debug, Clone, PartialEq)]
pub struct AssignedOperation {
    /// What it computes: `matmul`, `conv2d`, `softmax`…
    pub name: &'static str,
    /// Paths of the parameters that it reads.
    pub parameters: Vec<String>,
    /// The rule of the lists.
    pub precision: Precision,
    /// What its float operands are cast to; `None` leaves them as they come.
    pub operands: Option<FloatDType>,
    /// Dtype of its float results, if it has any. Where half is emulated they are F32 tensors.
    pub result: Option<DType>,
    /// A convolution, average or interpolation that the device would add up in half, and lose by it: it runs in F32,
    /// on operands in half.
    pub widened: bool,
}

impl Autocast {
    /// Mixed precision in `dtype`, F16 or BF16, for [`run`](Self::run): no model is prepared.
    ///
    /// F32 computes as without autocast. Whether the device computes in the dtype is found out
    /// when it is used.
    pub fn new(dtype: FloatDType) -> Self {
        Self::unresolved(dtype)
    }

    /// What to do where a device cannot compute in the dtype. Default: [`Fallback::Error`].
    pub fn with_fallback(mut self, fallback: Fallback) -> Self {
        self.fallback = fallback;
        self
    }

    /// Runs the operations of this name in another precision than the [lists](crate::modules) say:
    /// `matmul`, `conv2d`, `softmax`, `gelu`, `div`… as [`Autocast::explain`] lists them; `softmax` and `layer_norm`
    /// are all operations that Burn composes them of for training. A name that the forward pass does not have
    /// changes nothing: `explain` shows what took effect.
    ///
    /// ```
    /// use burn::tensor::FloatDType;
    /// use burn_lean_amp::{Autocast, Precision};
    ///
    /// let autocast = Autocast::new(FloatDType::BF16).with_operation("gelu", Precision::Widest);
    /// ```
    pub fn with_operation(self, name: impl Into<String>, precision: Precision) -> Self {
        self.with_exception(Except::Operation(name.into()), precision)
    }

    /// Runs the operations that read a parameter of this group in another precision than the
    /// lists say. A group that matches no parameter changes nothing.
    pub fn with_module(self, group: ParamGroup, precision: Precision) -> Self {
        self.with_exception(Except::Module(group), precision)
    }

    fn with_exception(mut self, except: Except, precision: Precision) -> Self {
        let mut lists = (*self.lists).clone();
        lists.exceptions.push((except, precision));
        self.lists = Arc::new(lists);
        self
    }

    /// Records each forward pass once for the shapes of its inputs, not in every step.
    ///
    /// Saves the time of recording, 0.5 to 5 ms a step. Numbers that the forward pass makes on the host, and
    /// plain tensors of the model, stay as they were recorded: [`Recordings`](burn_lean_graph::Recordings) says
    /// what a recording is kept for, and when it is made once more.
    pub fn cached(mut self) -> Self {
        self.recordings.caches = true;
        self
    }

    /// Leaves out the comparison of gradients at the first training step of each forward pass, and at the 8th,
    /// the 16th, the 32nd and so on.
    ///
    /// It refuses models that stop gradients inside (`detach`), whose gradients would be wrong without a word.
    /// [`Recording::verify_gradients`](burn_lean_graph::Recording::verify_gradients) says what it takes: where that
    /// is too much, begin with a smaller batch: all sizes are one forward pass, and what is larger than what was
    /// compared is not compared again, unless it has operations, or numbers of another order of magnitude (a loss that
    /// is divided by the number of examples), that are new.
    pub fn without_verification(mut self) -> Self {
        self.recordings.verifies = false;
        self
    }

    /// Runs `forward` in mixed precision, operation by operation, as `torch.autocast` does: no
    /// edit of the model, no casts in it, no region.
    ///
    /// `forward` gets the model and the input, and returns the loss or whatever the step needs; it
    /// is recorded first and computes nothing by itself. Then its operations run on the device of
    /// `model`: products (linear layers, convolutions, attention, matrix products) in half
    /// precision; norms, the softmax family, exponentials, powers, divisions, sums, the losses of `burn-nn` and
    /// what rounds to whole numbers in F32; the rest in the widest dtype of its operands; scalars that F16 does
    /// not have keep their operation in F32, and so do bounds, of comparisons, fills and clamps, that are another
    /// number in half (0.9999, which is 1 there). Each weight is cast once, and the gradients of all its uses are
    /// summed in F32; on GPUs in half where several products read what is repeated of it (`expand`). Float results
    /// are F32.
    ///
    /// It is recorded in F32, so that a cast to F32 in `forward` (`.cast(DType::F32)`, PyTorch's `.float()`)
    /// changes nothing there and is not seen: what follows it runs as the lists say, in half perhaps.
    /// [`full_precision`](crate::full_precision) keeps it in F32; also what Burn composes of matrix products, which
    /// the lists do not tell from others: `burn::linalg::qr`, `Tensor::cov` and the `GramMatrixLoss` of
    /// `burn-vision`. The latter two divide after the product: of n terms with a variance of σ² it is infinite in
    /// F16 from n·σ² > 65,504.
    ///
    /// Gradients arrive at the FP32 parameters of `model`, so optimizers, schedulers, adapters,
    /// the [`GradScaler`](crate::GradScaler) and checkpoints stay as they are. `model` may be a
    /// plain model, on an autodiff device or not, with weights that are [stored in
    /// half](crate::materialize_half()) or not; running states are updated as always, and results
    /// that `forward` detaches have no gradient. What it detaches is found at its first training step, and
    /// at the first for each value of a `bool` and each variant in `input`; where it depends on numbers, or on what the
    /// closure captures, at the 8th, the 16th, the 32nd and so on, if it does so then, as where it depends on a field
    /// of the model that no visitor sees (a `bool` that is skipped) and that changes while the model trains. The
    /// quantizers of a model that is prepared for quantization act where they do in a run of its own, before the casts.
    ///
    /// Inside of a region it computes as outside of it, in F32, too, where inputs in half do not fit to weights in
    /// F32: call it in [`full_precision`](crate::full_precision()) there. Inside of a forward pass that is recorded (an export,
    /// another run) it is `forward` alone: that recording says what runs in which precision. On a thread that `forward`
    /// starts, [`full_precision`](crate::full_precision()) and `stop_gradient` are not seen.
    ///
    /// What a device would add up in half runs in F32, on operands in half: averages and interpolations on GPUs, and
    /// convolutions there that lose terms, which is tried out before their first step
    /// ([`AssignedOperation::widened`]).
    ///
    /// What is held for the backward pass: operands of products in half, each weight once; of a
    /// softmax that products read its rounded results alone; of a norm its F32 input, from which its
    /// result is computed again; masks of dropouts in half; operands of `tanh`, `sigmoid`,
    /// `log_sigmoid`, `gelu` and `erf` that nothing else reads in half, too, although they run in F32. Not where
    /// [`full_precision`](crate::full_precision) or an exception asks for F32 for them, or for all that they are
    /// computed from: there gradients are those of F32, also of small differences of two values. What Burn
    /// keeps of other operations, it keeps here.
    ///
    /// Plain tensors in modules, the tables of a `RotaryEncoding` or `PositionalEncoding` say, are read to
    /// the host in each recording, which waits for the device, and uploaded in each step:
    /// [`cached`](Self::cached) reads them once.
    ///
    /// [`forward`](Self::forward) is the other way: a region for a prepared model, for what cannot be
    /// recorded.
    ///
    /// ```
    /// use burn::module::{Initializer, Module};
    /// use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
    /// use burn::optim::{AdamWConfig, GradientsParams};
    /// use burn::tensor::{DType, Device, FloatDType, Tensor};
    /// use burn_lean_amp::{Autocast, GradScalerConfig};
    ///
    /// #[derive(Module, Debug)]
    /// struct Net {
    ///     linear: Linear,
    ///     norm: BatchNorm,
    /// }
    ///
    /// impl Net {
    ///     fn forward(&self, x: Tensor<2>) -> Tensor<2> {
    ///         self.norm.forward(self.linear.forward(x))
    ///     }
    /// }
    ///
    /// let device = Device::flex().autodiff();
    /// let half = Initializer::Constant { value: 0.5 };
    /// let mut model = Net {
    ///     linear: LinearConfig::new(4, 2).with_initializer(half).init(&device),
    ///     norm: BatchNormConfig::new(2).init(&device),
    /// };
    /// let autocast = Autocast::new(FloatDType::BF16);
    /// let mut scaler = GradScalerConfig::for_dtype(FloatDType::BF16).init()?;
    /// let mut optim = AdamWConfig::new().init();
    /// let x = Tensor::<2>::from_floats([[1., 2., 3., 4.], [4., 3., 1., 0.]], &device);
    ///
    /// let loss = autocast.run(&model, x, |model, x| model.forward(x).abs().mean())?;
    /// assert_eq!(loss.dtype(), DType::F32);
    /// assert!((loss.clone().into_scalar::<f32>() - 1.0).abs() < 1e-2);
    /// let grads = GradientsParams::from_grads(scaler.scale(loss)?.backward(), &model);
    /// model = scaler.step(&mut optim, 0.1, model, grads)?;
    /// # Ok::<(), burn_lean_amp::AmpError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// - [`AmpError::Graph`]: the forward pass cannot be recorded (it reads a value, say) or stops
    ///   gradients; use [`forward`](Self::forward) there.
    /// - [`AmpError::NotAComputeDtype`], [`AmpError::UnsupportedDtype`], [`AmpError::SelfTest`]:
    ///   the device cannot do it.
    #[track_caller]
    pub fn run<M, I, O>(
        &self,
        model: &M,
        input: I,
        forward: impl FnOnce(&M, I) -> O,
    ) -> Result<O, AmpError>
    where
        M: Module,
        I: Tensors,
        O: Tensors + Send + Sync + 'static,
    {
        if is_recorded(model, &input) {
            return Ok(forward(model, input));
        }
        let devices = devices_of(model, &input);
        let device = device_of(model, &input)?;
        let compute = self.compute_on(&devices)?;
        // The region around it is left: rules say what runs in half, of the weights as they are stored.
        let _outside = Entered::enter(None);
        let trains = model_device(model).is_some_and(|device| device.is_autodiff());
        let frozen = trains.then(|| frozen(model)).flatten();
        let variant = u64::from(frozen.is_some());
        let model = frozen.as_ref().unwrap_or(model);
        if !compute.is_half() && !acts_in_recordings(model) {
            return Ok(forward(model, input));
        }
        let mut recordings = self.recordings.clone();
        recordings.halves = halves(compute);
        let recording =
            recordings.recording(model, &input, forward, Location::caller(), variant)?;
        Ok(match compute.is_half() {
            true => recording.execute(model, &input, &self.rules(compute, &device))?,
            false => recording.execute(model, &input, &AsRecorded)?,
        })
    }

    /// Says in which precision [`run`](Self::run) would run each operation of `forward`, without
    /// running it. On a GPU each kind of convolution is tried out, as by the first `run`.
    ///
    /// ```
    /// use burn::nn::LinearConfig;
    /// use burn::tensor::activation::softmax;
    /// use burn::tensor::{DType, Device, FloatDType, Tensor};
    /// use burn_lean_amp::Autocast;
    ///
    /// let device = Device::flex();
    /// let model = LinearConfig::new(4, 2).with_bias(false).init(&device);
    /// let x = Tensor::<2>::ones([3, 4], &device);
    /// let operations = Autocast::new(FloatDType::BF16)
    ///     .explain(&model, x, |model, x| softmax(model.forward(x), 1))?;
    /// let of = |name| operations.iter().find(|operation| operation.name == name).unwrap();
    /// assert_eq!(of("matmul").operands, Some(FloatDType::BF16));
    /// assert_eq!(of("matmul").parameters, ["weight"]);
    /// assert_eq!(of("softmax").result, Some(DType::F32));
    /// # Ok::<(), burn_lean_amp::AmpError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`run`](Self::run), but for the comparison of gradients, which is not made.
    pub fn explain<M: Module, I: Tensors, O: Tensors>(
        &self,
        model: &M,
        input: I,
        forward: impl FnOnce(&M, I) -> O,
    ) -> Result<Vec<AssignedOperation>, AmpError> {
        let device = device_of(model, &input)?;
        let compute = self.compute_on(&devices_of(model, &input))?;
        let _outside = Entered::enter(None);
        let rules = self.rules(compute, &device);
        let recording = record_halves(model, &input, halves(compute), forward)?;
        let graph = recording.graph();
        let assigned = graph.nodes().zip(graph.assign(&rules));
        Ok(assigned
            .map(|(node, assignment)| AssignedOperation {
                name: node.name(),
                parameters: node.parameters().map(|one| one.path.clone()).collect(),
                precision: assignment.precision,
                operands: assignment.operands,
                result: assignment.results,
                widened: assignment.widened,
            })
            .collect())
    }

    fn rules<'a>(&'a self, compute: Compute, device: &'a Device) -> OnDevice<'a> {
        OnDevice {
            lists: &self.lists,
            half: compute.dtype,
            arithmetic: arithmetic(compute, device),
            device,
        }
    }

    /// What the dtype comes to on these devices.
    fn compute_on(&self, devices: &[Device]) -> Result<Compute, AmpError> {
        match self.requested {
            None => Ok(self.compute),
            Some(dtype) => self.devices.resolve(dtype, self.fallback, devices),
        }
    }
}

impl Resolved {
    /// What is known from the start.
    pub(crate) fn known(fallback: Fallback, devices: Vec<Device>, compute: Compute) -> Self {
        Self {
            devices: Mutex::new(vec![(fallback, devices, compute)]),
        }
    }

    fn resolve(
        &self,
        dtype: FloatDType,
        fallback: Fallback,
        devices: &[Device],
    ) -> Result<Compute, AmpError> {
        let known = || self.devices.lock().unwrap_or_else(PoisonError::into_inner);
        let of_these =
            |(by, on, _): &&(Fallback, Vec<Device>, Compute)| *by == fallback && on == devices;
        if let Some((_, _, compute)) = known().iter().find(of_these) {
            return Ok(*compute);
        }
        // Without the lock, since devices compute.
        let compute = resolve(dtype, fallback, devices)?;
        let mut known = known();
        if !known.iter().any(|one| of_these(&one)) {
            known.push((fallback, devices.to_vec(), compute));
        }
        Ok(compute)
    }
}

/// Where a model is; where it has no parameters, its input.
fn devices_of<M: Module, I: Tensors>(model: &M, input: &I) -> Vec<Device> {
    let devices = model.devices();
    match devices.is_empty() {
        true => input_device(input).into_iter().collect(),
        false => devices,
    }
}

/// The device that it computes on, with autodiff where a part of the model or an input has it.
fn device_of<M: Module, I: Tensors>(model: &M, input: &I) -> Result<Device, GraphError> {
    let of_input = input_device(input);
    let trains = of_input.as_ref().is_some_and(Device::is_autodiff);
    match model_device(model).or(of_input) {
        Some(device) if trains && !device.is_autodiff() => Ok(device.autodiff()),
        Some(device) => Ok(device),
        None => Err(GraphError::NoDevice),
    }
}

/// Weights and inputs may be stored in half: the rules say what computes in it.
fn halves(compute: Compute) -> Halves {
    match compute.is_half() {
        true => Halves::AsF32,
        false => Halves::AsStored,
    }
}

/// How the device computes in the dtype, for [`Autocast::run`].
fn arithmetic(compute: Compute, device: &Device) -> Arithmetic {
    if compute.emulated {
        return Arithmetic::Emulated;
    }
    // Burn's CPU backend converts each half number in software, again for each of its uses.
    match BackendKind::of(device) {
        BackendKind::Flex => Arithmetic::Widened,
        _ => Arithmetic::Native,
    }
}
