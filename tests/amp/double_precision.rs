//! F64, or half, beside F32: records, losses, and optimizers that go on from a checkpoint.

use burn::module::{Module, Param};
use burn::optim::{
    Adam, AdamConfig, AdamState, AdamWConfig, GradientsParams, LearningRate, LionConfig,
    ModuleOptimizer, Optimizer,
};
use burn::tensor::DType::{BF16, F16, F32, F64};
use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use burn_lean::amp::{
    AmpError, Autocast, AutocastConfig, Checkpoints, Fallback, GradScalerConfig, LossScale,
    ResumableOptimizer, calibrate_scale,
};

use crate::support::{each_device, values};

#[derive(Module, Debug)]
struct Two {
    wide: Param<Tensor<1>>,
    narrow: Param<Tensor<1>>,
}

impl Two {
    fn new([wide, narrow]: [DType; 2], device: &Device) -> Self {
        let vector = |dtype| {
            let numbers = Tensor::from_data([1.5f32, -0.25], (device, dtype));
            Param::from_tensor(numbers)
        };
        Self {
            wide: vector(wide),
            narrow: vector(narrow),
        }
    }

    fn prepared(dtypes: [DType; 2], device: &Device) -> (Self, Autocast) {
        AutocastConfig::new(FloatDType::F16)
            .with_fallback(Fallback::Emulate)
            .prepare(Self::new(dtypes, device))
            .unwrap()
    }

    fn dtypes(&self) -> [DType; 2] {
        [&self.wide, &self.narrow].map(|vector| vector.base().dtype())
    }

    fn data(&self) -> [TensorData; 2] {
        [&self.wide, &self.narrow].map(|vector| vector.base().into_data())
    }

    /// After a step with gradients that F32 does not have.
    fn stepped(self, optim: &mut ModuleOptimizer, step: u32) -> Self {
        let device = self.wide.base().device().inner();
        let mut grads = GradientsParams::new();
        for vector in [&self.wide, &self.narrow] {
            let numbers = [1.0 / 3.0, -0.1].map(|number: f64| number / f64::from(step + 1));
            let dtype = vector.base().dtype();
            grads.register::<1>(vector.id, Tensor::from_data(numbers, (&device, dtype)));
        }
        optim.step(0.1, self, grads)
    }

    /// After so many steps, in a checkpoint of that step.
    fn trained(self, optim: &mut ModuleOptimizer, steps: u32, checkpoints: &Checkpoints) -> Self {
        let model = (0..steps).fold(self, |model, step| model.stepped(optim, step));
        let scaler = GradScalerConfig::new(LossScale::None).init().unwrap();
        let saved = checkpoints.save(steps.into(), &model, optim, &scaler);
        saved.unwrap();
        model
    }
}

/// Every device that computes in F64.
fn on_wide(mut test: impl FnMut(Device)) {
    each_device(|target| {
        if target.device.supports_dtype(FloatDType::F64) {
            test(target.device.clone().autodiff());
        }
    });
}

#[test]
fn f32_parameters_of_a_prepared_model_stay_f32_and_f64_ones_take_the_dtype_of_a_record() {
    on_wide(|device| {
        let (prepared, autocast) = Two::prepared([F64, F32], &device);
        for recorded in [F64, F32] {
            let record = Two::new([recorded; 2], &device).into_record();
            let loaded = prepared.clone().try_load_record(record).unwrap();
            assert_eq!(loaded.dtypes(), [recorded, F32]);
            for vector in [&loaded.wide, &loaded.narrow] {
                assert_eq!(values(vector.base()), [1.5, -0.25]);
                assert!(vector.base().is_require_grad());
            }
            let x = Tensor::<1>::ones([2], &device);
            let y = autocast.forward(x, |x| x * loaded.narrow.val());
            assert_eq!(values(y), [1.5, -0.25]);
        }
    });
}

#[test]
fn adam_goes_on_from_a_checkpoint_to_the_bit() {
    on_wide(|device| {
        let adam_w = AdamWConfig::new().with_amsgrad(true).build();
        for fresh in [
            ResumableOptimizer::new(adam_w, &device).init(),
            ResumableOptimizer::new(AdamConfig::new().build(), &device).init(),
        ] {
            let folder = tempfile::tempdir().unwrap();
            let checkpoints = Checkpoints::new(folder.path());
            let mut optim = fresh.clone();
            let new = || Two::new([F64, F32], &device);
            let model = new().trained(&mut optim, 2, &checkpoints);

            let (loaded, mut resumed, _) = checkpoints.load(2, new(), fresh).unwrap();
            assert_eq!(loaded.data(), model.data());
            let expected = model.stepped(&mut optim, 2).data();
            assert_eq!(loaded.stepped(&mut resumed, 2).data(), expected);
        }
    });
}

/// In whichever dtype its moments were loaded.
#[test]
fn adam_goes_on_from_a_checkpoint_in_f64_with_f32_master_weights() {
    on_wide(|device| {
        let adam_w = || AdamWConfig::new().build();
        for fresh in [
            ResumableOptimizer::new(adam_w(), &device).init(),
            adam_w().into(),
        ] {
            let folder = tempfile::tempdir().unwrap();
            let checkpoints = Checkpoints::new(folder.path());
            let mut optim = fresh.clone();
            let model = Two::new([F64; 2], &device).trained(&mut optim, 2, &checkpoints);

            let (new, _) = Two::prepared([F32; 2], &device);
            let (loaded, mut resumed, _) = checkpoints.load(2, new, fresh).unwrap();
            assert_eq!(loaded.dtypes(), [F32; 2]);
            let expected = values(model.stepped(&mut optim, 2).wide.base());
            let found = loaded.stepped(&mut resumed, 2);
            assert_eq!(found.dtypes(), [F32; 2]);
            // Numbers of about 1 that were rounded a few times.
            assert_near!(values(found.wide.base()).iter(), &expected, 1e-6);
        }
    });
}

/// Its F64 parameters become F32 with the record, as their moments do.
#[test]
fn a_prepared_f64_model_goes_on_from_a_checkpoint_in_f32_to_the_bit() {
    on_wide(|device| {
        for fresh in [
            ResumableOptimizer::new(AdamWConfig::new().build(), &device).init(),
            ResumableOptimizer::new(LionConfig::new().build(), &device).init(),
            AdamWConfig::new().init(),
        ] {
            let folder = tempfile::tempdir().unwrap();
            let checkpoints = Checkpoints::new(folder.path());
            let mut optim = fresh.clone();
            let model = Two::new([F32; 2], &device).trained(&mut optim, 2, &checkpoints);

            let (new, _) = Two::prepared([F64, F32], &device);
            let (loaded, mut resumed, _) = checkpoints.load(2, new, fresh).unwrap();
            assert_eq!(loaded.dtypes(), [F32; 2]);
            let expected = model.stepped(&mut optim, 2).data();
            assert_eq!(loaded.stepped(&mut resumed, 2).data(), expected);
        }
    });
}

/// Adam for weights in half, with moments in F32.
#[derive(Clone)]
struct WideAdam(Adam);

impl Optimizer for WideAdam {
    type State<const D: usize> = AdamState<D>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        tensor: Tensor<D>,
        grad: Tensor<D>,
        state: Option<AdamState<D>>,
    ) -> (Tensor<D>, Option<AdamState<D>>) {
        let dtype = tensor.dtype();
        let (tensor, state) = self
            .0
            .step::<D>(lr, tensor.cast(F32), grad.cast(F32), state);
        (tensor.cast(dtype), state)
    }

    fn to_device<const D: usize>(state: AdamState<D>, device: &Device) -> AdamState<D> {
        Adam::to_device::<D>(state, device)
    }
}

#[test]
fn moments_of_an_optimizer_around_adam_are_its_own() {
    let device = Device::flex().autodiff();
    for dtype in [F16, BF16] {
        let new = || Two::new([dtype, F32], &device);
        let wide = WideAdam(AdamConfig::new().build());
        let mut plain = ModuleOptimizer::from(wide.clone());
        let expected = (0..3).fold(new(), |model, step| model.stepped(&mut plain, step));

        let fresh = ResumableOptimizer::new(wide, &device).init();
        let folder = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::new(folder.path());
        let mut optim = fresh.clone();
        let model = new().trained(&mut optim, 2, &checkpoints);
        assert_eq!(model.stepped(&mut optim, 2).data(), expected.data());

        let (loaded, mut resumed, _) = checkpoints.load(2, new(), fresh).unwrap();
        assert_eq!(loaded.stepped(&mut resumed, 2).data(), expected.data());
    }
}

#[test]
fn a_state_that_burn_loads_in_another_dtype_is_refused() {
    on_wide(|device| {
        for fresh in [
            ResumableOptimizer::new(LionConfig::new().build(), &device).init(),
            AdamWConfig::new().init(),
        ] {
            let folder = tempfile::tempdir().unwrap();
            let checkpoints = Checkpoints::new(folder.path());
            let new = || Two::new([F64, F32], &device);
            new().trained(&mut fresh.clone(), 1, &checkpoints);

            let rejected = checkpoints.load(1, new(), fresh).err().unwrap();
            let expected = AmpError::OptimizerDtype {
                parameter: "wide".into(),
                recorded: F64,
                loaded: F32,
            };
            assert_eq!(*rejected.error(), expected);
            assert_says!(
                rejected,
                "ResumableOptimizer",
                "if all parameters have one dtype",
                "F64 as its default"
            );
            assert_eq!(rejected.value().data(), new().data());
        }
    });
}

#[test]
fn a_loss_in_f64_calibrates_the_scale() {
    on_wide(|device| {
        let model = Two::new([F64, F32], &device);
        let loss = |model: &Two| model.wide.val().square().sum();
        let calibration = calibrate_scale(&model, FloatDType::F16, loss).unwrap();
        assert_eq!((calibration.largest, calibration.elements), (3.0, 2));
    });
}
