//! One row of the table: a module, how it goes through AMP, and the means to measure it.

use burn::module::{Module, ModuleDisplay};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_lean::amp::{
    AmpError, Autocast, AutocastConfig, Fallback, GradScalerConfig, autocast::KeptBecause,
    full_precision, parameter_precision,
};

use crate::support::{Target, seeded, tensor, with_numbers};
use crate::unedited::{Measured, Route};

/// How a module goes through AMP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    /// Nothing to do: parameters are cast, the call computes in half precision.
    WorksAsIs,
    /// `prepare` keeps its parameters in F32; the call goes into a full-precision region.
    KeptInFp32CalledInRegion,
    /// It computes with F32 constants; the call goes into a full-precision region.
    CalledInRegion,
    /// A loss: computed in F32, outside of the autocast region.
    OutsideInFp32,
}

/// Where, and in which precision, a module is measured.
#[derive(Debug, Clone)]
pub(crate) struct Precision {
    pub(crate) target: Target,
    pub(crate) dtype: FloatDType,
    pub(crate) emulated: bool,
}

impl Precision {
    /// Half the distance from 1 to the next number: 11 significant bits in F16, 8 in BF16.
    pub(crate) fn unit_roundoff(&self) -> f32 {
        match self.dtype {
            FloatDType::F16 => 2f32.powi(-11),
            _ => 2f32.powi(-8),
        }
    }

    /// The precisions of the matrix on one device.
    pub(crate) fn of(target: &Target) -> Vec<Self> {
        // Vulkan and WebGPU have no arithmetic in BF16; ndarray has none in either, and emulates both.
        let has = |dtype: &FloatDType| !target.is_gpu() || target.device.supports_dtype(*dtype);
        [FloatDType::F16, FloatDType::BF16]
            .into_iter()
            .filter(has)
            .map(|dtype| Self {
                target: target.clone(),
                dtype,
                emulated: target.name == "ndarray",
            })
            .collect()
    }

    fn device(&self) -> Device {
        self.target.device.clone().autodiff()
    }

    pub(crate) fn config(&self) -> AutocastConfig {
        AutocastConfig::new(self.dtype).with_fallback(match self.emulated {
            true => Fallback::Emulate,
            false => Fallback::Error,
        })
    }
}

/// A module of the table.
pub(crate) struct Entry {
    pub(crate) name: &'static str,
    pub(crate) way: Way,
    /// What the table says about it, in Markdown.
    pub(crate) note: &'static str,
    /// Roundings to half precision on the longest path through the module: one for each operand
    /// that is cast and one for each result that is stored.
    pub(crate) roundings: u32,
    /// It draws random numbers when it trains.
    pub(crate) random: bool,
    /// Devices where Burn has no backward pass for it, in FP32 neither.
    pub(crate) no_backward: &'static [&'static str],
    pub(crate) subject: Box<dyn Subject>,
}

/// The form in which a module is measured.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Form {
    pub(crate) random: bool,
    /// Whether the device has its backward pass.
    pub(crate) has_backward: bool,
}

impl Entry {
    pub(crate) fn has_backward(&self, precision: &Precision) -> bool {
        !self.no_backward.contains(&precision.target.name)
    }

    /// Outputs and, where the device has a backward pass, gradients in both precisions.
    pub(crate) fn measured(
        &self,
        route: &Route,
        precision: &Precision,
        magnitude: f32,
    ) -> Result<Measured, AmpError> {
        let form = Form {
            random: self.random,
            has_backward: self.has_backward(precision),
        };
        self.subject.measured(route, precision, magnitude, form)
    }
}

/// The measurements; object-safe, so that modules of any type share one table.
pub(crate) trait Subject {
    /// The gradients of the FP32 model on a device, for their failure only.
    fn fp32_gradients(&self, device: &Device);
    /// Outputs and gradients in both precisions, at a magnitude of the input.
    fn measured(
        &self,
        route: &Route,
        precision: &Precision,
        magnitude: f32,
        form: Form,
    ) -> Result<Measured, AmpError>;
    /// The FP32 loss before and after an AdamW step with gradients of a region.
    fn losses(&self, precision: &Precision) -> (f32, f32);
    /// Why parameters stay in F32, for each that does.
    fn kept(&self, precision: &Precision) -> Vec<KeptBecause>;
    /// Calls the module under autocast without its full-precision region.
    fn call_without_region(&self, precision: &Precision);
}

/// The tiny model around a module: its input comes from a linear layer, so that a gradient has to
/// pass through the module even when it has no parameter of its own.
#[derive(Module, Debug)]
pub(crate) struct Probe<M: Module> {
    front: Linear,
    layer: M,
}

pub(crate) const BATCH: usize = 4;
pub(crate) const WIDTH: usize = 16;
/// For the modules that draw random numbers.
pub(crate) const SEED: u64 = 11;

pub(crate) struct Case<M, B, F, L> {
    pub(crate) way: Way,
    pub(crate) build: B,
    /// From `[BATCH, WIDTH]` to any two-dimensional tensor.
    pub(crate) forward: F,
    /// From the output in F32, outside of the region.
    pub(crate) loss: L,
    pub(crate) layer: std::marker::PhantomData<M>,
}

impl<M, B, F, L> Case<M, B, F, L>
where
    M: Module + ModuleDisplay,
    B: Fn(&Device) -> M,
    F: Fn(&M, Tensor<2>) -> Tensor<2>,
    L: Fn(Tensor<2>) -> Tensor<1>,
{
    fn model(&self, device: &Device) -> Probe<M> {
        let model = Probe {
            front: LinearConfig::new(WIDTH, WIDTH).init(device),
            layer: (self.build)(device),
        };
        with_numbers(model, 1)
    }

    fn prepared(&self, precision: &Precision) -> (Probe<M>, Autocast) {
        let model = self.model(&precision.device());
        precision.config().prepare(model).unwrap()
    }

    fn input(&self, device: &Device) -> Tensor<2> {
        tensor(1, [BATCH, WIDTH], device)
    }

    fn forward(&self, model: &Probe<M>, x: Tensor<2>) -> Tensor<2> {
        self.in_region(&model.layer, model.front.forward(x))
    }

    /// The call of the module as it is written in a region.
    pub(crate) fn in_region(&self, layer: &M, h: Tensor<2>) -> Tensor<2> {
        match self.way {
            Way::KeptInFp32CalledInRegion | Way::CalledInRegion => {
                full_precision(h, |h| (self.forward)(layer, h))
            }
            Way::WorksAsIs | Way::OutsideInFp32 => (self.forward)(layer, h),
        }
    }

    fn autocast_forward(
        &self,
        autocast: &Autocast,
        model: &Probe<M>,
        precision: &Precision,
    ) -> Tensor<2> {
        let y = autocast.forward(self.input(&precision.device()), |x| {
            let y = self.forward(model, x);
            let inside = match precision.emulated {
                true => FloatDType::F32,
                false => precision.dtype,
            };
            assert_eq!(y.dtype(), inside.into(), "dtype inside of the region");
            y
        });
        assert_eq!(y.dtype(), DType::F32, "dtype outside of the region");
        y
    }
}

impl<M, B, F, L> Subject for Case<M, B, F, L>
where
    M: Module + ModuleDisplay,
    B: Fn(&Device) -> M,
    F: Fn(&M, Tensor<2>) -> Tensor<2>,
    L: Fn(Tensor<2>) -> Tensor<1>,
{
    fn fp32_gradients(&self, device: &Device) {
        let model = self.model(device);
        (self.loss)(self.forward(&model, self.input(device))).backward();
    }

    fn measured(
        &self,
        route: &Route,
        precision: &Precision,
        magnitude: f32,
        form: Form,
    ) -> Result<Measured, AmpError> {
        self.measure(route, precision, magnitude, form)
    }

    fn losses(&self, precision: &Precision) -> (f32, f32) {
        let (mut model, autocast) = self.prepared(precision);
        let mut scaler = GradScalerConfig::for_dtype(precision.dtype).init().unwrap();
        let mut optim = AdamWConfig::new().init();
        let device = precision.device();
        let fp32 = |model: &Probe<M>| {
            let loss = (self.loss)(self.forward(model, self.input(&device)));
            loss.into_scalar::<f32>()
        };
        let _guard = seeded(&device, SEED);
        let before = fp32(&model);
        // While the scaler looks for its scale, it skips steps.
        loop {
            let loss = (self.loss)(self.autocast_forward(&autocast, &model, precision));
            let grads = scaler.scale(loss).unwrap().backward();
            let grads = GradientsParams::from_grads(grads, &model);
            // Small: along the gradient the loss falls. In FP32 that is more than rounding.
            model = scaler.step(&mut optim, 1e-3, model, grads).unwrap();
            if !scaler.report().unwrap().skipped {
                break;
            }
        }
        device.seed(SEED);
        (before, fp32(&model))
    }

    fn kept(&self, precision: &Precision) -> Vec<KeptBecause> {
        let (model, _) = self.prepared(precision);
        parameter_precision(&model)
            .unwrap()
            .into_iter()
            .filter_map(|parameter| parameter.kept)
            .collect()
    }

    fn call_without_region(&self, precision: &Precision) {
        let (model, autocast) = self.prepared(precision);
        let _guard = seeded(&precision.device(), SEED);
        autocast.forward(self.input(&precision.device()), |x| {
            (self.forward)(&model.layer, model.front.forward(x))
        });
    }
}
