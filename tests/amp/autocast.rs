//! Preparing a model, regions, and devices that cannot.

use burn::module::{Lora, Module, Param, ParamGroup, Reparameterization, Reparameterizer};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig, Lstm, LstmConfig};
use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_lean::amp::{
    AmpError, AutocastConfig, Fallback, autocast::KeptBecause, full_precision, materialize_half,
    parameter_precision, self_test, self_test::SelfTest, supported_dtypes,
};
use burn_lean::graph::GraphError;
use burn_lean::reparam::{AttachError, attach, each_float};

use crate::model::{Mlp, bits};
use crate::support::{cast, devices, each_device, nearest, tensor, values};

const HALVES: [FloatDType; 2] = [FloatDType::F16, FloatDType::BF16];

#[test]
fn a_dtype_that_the_device_lacks_is_refused_with_device_dtype_and_remedy() {
    each_device(|target| {
        for dtype in HALVES {
            if target.device.supports_dtype(dtype) {
                continue;
            }
            let model = Mlp::new(1, &target.device);
            let before = bits(&model);
            let rejected = AutocastConfig::new(dtype).prepare(model).unwrap_err();

            let AmpError::UnsupportedDtype {
                dtype: named,
                supported,
                ..
            } = rejected.error()
            else {
                panic!("{}", rejected.error());
            };
            assert_eq!(*named, dtype);
            assert_eq!(*supported, supported_dtypes(&target.device));
            assert_says!(rejected, &format!("{dtype:?}"), "F32");
            // The model comes back, and nothing was attached.
            assert_eq!(bits(&rejected.into_value()), before);
        }
    });
}

#[test]
fn ndarray_has_no_half_precision_and_flex_has_both() {
    for target in devices() {
        let supported = supported_dtypes(&target.device);
        match target.name {
            "ndarray" => assert_eq!(supported, [FloatDType::F32]),
            "flex" => assert_eq!(
                supported,
                [FloatDType::F32, FloatDType::F16, FloatDType::BF16]
            ),
            _ => assert!(supported.contains(&FloatDType::F32)),
        }
    }
}

#[test]
fn fallback_to_f32_computes_in_f32() {
    each_device(|target| {
        for dtype in HALVES {
            let plain = Mlp::new(1, &target.device);
            let (model, autocast) = AutocastConfig::new(dtype)
                .with_fallback(Fallback::F32)
                .prepare(plain.clone())
                .unwrap();
            let expected = match target.device.supports_dtype(dtype) {
                true => dtype,
                false => FloatDType::F32,
            };
            assert_eq!(autocast.dtype(), expected);
            assert!(!autocast.is_emulated());
            let x = tensor::<2>(3, [2, 6], &target.device);
            let y = autocast.forward(x.clone(), |x| {
                assert_eq!(x.dtype(), expected.into());
                assert_eq!(model.first.weight.val().dtype(), expected.into());
                let y = model.forward(x);
                assert_eq!(y.dtype(), expected.into());
                y
            });
            assert_eq!(y.dtype(), DType::F32);
            // To the bit where nothing is cast, and only there.
            let is_plain = values(y) == values(plain.forward(x));
            assert_eq!(is_plain, expected == FloatDType::F32);
        }
    });
}

#[test]
fn f64_and_quantized_are_no_compute_dtypes() {
    for dtype in [FloatDType::F64, FloatDType::Flex32] {
        let rejected = AutocastConfig::new(dtype)
            .prepare(Mlp::new(1, &Device::flex()))
            .unwrap_err();
        assert_eq!(*rejected.error(), AmpError::NotAComputeDtype { dtype });
    }
}

#[test]
fn a_second_preparation_is_refused_and_gives_the_model_back() {
    let (model, _) = AutocastConfig::new(FloatDType::F16)
        .prepare(Mlp::new(1, &Device::flex()))
        .unwrap();
    let before = bits(&model);
    let rejected = AutocastConfig::new(FloatDType::F16)
        .prepare(model)
        .unwrap_err();
    assert_eq!(
        *rejected.error(),
        AmpError::Attach(AttachError::AlreadyAttached {
            path: "first.weight".into(),
            existing: "master_weight".into(),
        })
    );
    let model = rejected.into_value();
    assert_eq!(bits(&model), before);
    assert!(
        parameter_precision(&model)
            .unwrap()
            .iter()
            .all(|p| p.kept.is_none())
    );
}

#[derive(Module, Debug)]
struct Empty {
    width: usize,
}

#[test]
fn an_empty_model_is_refused() {
    let rejected = AutocastConfig::new(FloatDType::F16)
        .prepare(Empty { width: 3 })
        .unwrap_err();
    assert_eq!(
        *rejected.error(),
        AmpError::Attach(AttachError::NoParameters)
    );
    assert_eq!(rejected.value().width, 3);
}

#[test]
fn half_parameters_are_no_master_weights() {
    let mut model = Mlp::new(1, &Device::flex());
    model.second.weight = Param::from_tensor(model.second.weight.val().cast(FloatDType::BF16));
    let rejected = AutocastConfig::new(FloatDType::BF16)
        .prepare(model)
        .unwrap_err();
    assert_eq!(
        *rejected.error(),
        AmpError::ParameterDtype {
            path: "second.weight".into(),
            dtype: DType::BF16,
        }
    );
}

#[derive(Module, Debug)]
struct Mixed {
    linear: Linear,
    norm: BatchNorm,
    recurrent: Lstm,
    head: Linear,
}

impl Mixed {
    fn new(device: &Device) -> Self {
        Self {
            linear: LinearConfig::new(4, 4).init(device),
            norm: BatchNormConfig::new(4).init(device),
            recurrent: LstmConfig::new(4, 4, true).init(device),
            head: LinearConfig::new(4, 2).init(device),
        }
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let x = self.linear.forward(x);
        let x = full_precision(x, |x| {
            let x = self.norm.forward(x.swap_dims(1, 2)).swap_dims(1, 2);
            self.recurrent.forward(x, None).0
        });
        self.head.forward(x)
    }
}

#[test]
fn batch_norm_recurrent_and_requested_parameters_stay_in_f32() {
    let (model, _) = AutocastConfig::new(FloatDType::F16)
        .with_full_precision(Some(ParamGroup::from_predicate("head")))
        .prepare(Mixed::new(&Device::flex()))
        .unwrap();
    for parameter in parameter_precision(&model).unwrap() {
        let expected = match parameter.path.split('.').next().unwrap() {
            "linear" => None,
            "norm" => Some(KeptBecause::BatchNorm),
            "recurrent" => Some(KeptBecause::Recurrent),
            // After preparation nobody knows why, only that it was not prepared.
            _ => Some(KeptBecause::NotPrepared),
        };
        assert_eq!(parameter.kept, expected, "{}", parameter.path);
    }
}

/// `haed` would be computed in half, and nobody told.
#[test]
fn a_group_of_no_parameter_is_refused_with_the_model() {
    let config = |part: &str| {
        AutocastConfig::new(FloatDType::F16)
            .with_full_precision(Some(ParamGroup::from_predicate(part)))
    };
    let model = Mixed::new(&Device::flex());
    let before = bits(&model);
    let (model, error) = config("haed").prepare(model).unwrap_err().into_parts();
    assert_says!(error, "full_precision", "haed");
    let (model, error) = config("haed")
        .materialize_half(model)
        .unwrap_err()
        .into_parts();
    assert_says!(error, "full_precision", "haed");
    assert_eq!(bits(&model), before);
    // What stays in F32 anyway may be named.
    assert!(config("norm").prepare(model).is_ok());
}

#[test]
fn a_region_runs_what_burn_cannot_run_in_half() {
    each_device(|target| {
        for dtype in HALVES {
            let device = target.device.clone().autodiff();
            let plain = Mixed::new(&device);
            let (model, autocast) = AutocastConfig::new(dtype)
                .with_fallback(Fallback::Emulate)
                .prepare(plain.clone())
                .unwrap();
            let x = tensor::<3>(5, [2, 3, 4], &device);
            let expected = values(plain.valid().forward(x.clone().inner()));
            let found = autocast.forward(x.inner(), |x| model.valid().forward(x));
            assert_eq!(found.dtype(), DType::F32);
            // Two half layers around an F32 one, values of order 1: a few roundings of 2⁻⁸.
            assert_near!(values(found).into_iter(), expected, 8.0 / 256.0);
        }
    });
}

#[test]
fn outside_of_a_region_the_prepared_model_is_the_plain_model() {
    each_device(|target| {
        let plain = Mlp::new(1, &target.device);
        let x = tensor::<2>(3, [2, 6], &target.device);
        let expected = values(plain.forward(x.clone()));
        let (model, _) = AutocastConfig::new(FloatDType::F16)
            .with_fallback(Fallback::Emulate)
            .prepare(plain)
            .unwrap();
        assert_eq!(values(model.forward(x)), expected);
        assert_eq!(bits(&model.clone().materialize()), bits(&model));
    });
}

#[test]
fn a_panic_in_the_forward_pass_leaves_the_region() {
    let (model, autocast) = AutocastConfig::new(FloatDType::F16)
        .prepare(Mlp::new(1, &Device::flex()))
        .unwrap();
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        autocast.forward((), |()| {
            if model.first.weight.val().dtype() == DType::F16 {
                panic!("a forward pass failed")
            }
        })
    }));
    assert!(caught.is_err());
    assert_eq!(model.first.weight.val().dtype(), DType::F32);
}

#[test]
fn regions_nest_and_full_precision_switches_them_off() {
    let (model, autocast) = AutocastConfig::new(FloatDType::F16)
        .prepare(Mlp::new(1, &Device::flex()))
        .unwrap();
    let dtype = || model.first.weight.val().dtype();
    autocast.forward((), |()| {
        assert_eq!(dtype(), DType::F16);
        full_precision((), |()| {
            assert_eq!(dtype(), DType::F32);
            autocast.forward((), |()| assert_eq!(dtype(), DType::F16));
            assert_eq!(dtype(), DType::F32);
        });
        assert_eq!(dtype(), DType::F16);
        std::thread::scope(|scope| {
            let other = scope.spawn(|| model.first.weight.val().dtype());
            assert_eq!(other.join().unwrap(), DType::F32);
        });
    });
    assert_eq!(dtype(), DType::F32);
}

#[test]
fn f64_tensors_pass_a_region_unchanged() {
    let (_, autocast) = AutocastConfig::new(FloatDType::F16)
        .prepare(Mlp::new(1, &Device::flex()))
        .unwrap();
    let x = Tensor::<1>::ones([2], &Device::flex()).cast(FloatDType::F64);
    let y = autocast.forward(x, |x| {
        assert_eq!(x.dtype(), DType::F64);
        x
    });
    assert_eq!(y.dtype(), DType::F64);
}

#[test]
fn zero_element_tensors_pass_a_region() {
    each_device(|target| {
        let (_, autocast) = AutocastConfig::new(FloatDType::F16)
            .with_fallback(Fallback::Emulate)
            .prepare(Mlp::new(1, &target.device))
            .unwrap();
        let x = Tensor::<2>::zeros([0, 6], &target.device);
        assert_eq!(autocast.forward(x, |x| x).dims(), [0, 6]);
    });
}

#[test]
fn the_self_test_finds_what_the_device_does() {
    each_device(|target| {
        for dtype in supported_dtypes(&target.device) {
            let test = self_test(&target.device, dtype).unwrap();
            assert!(test.failure().is_none(), "{test:?}");
            assert_eq!(test.matmul_of_4096_ones, 4096.0, "{test:?}");
        }
    });
}

#[test]
fn a_self_test_that_fails_is_an_error_that_names_the_check() {
    let mut test = self_test(&Device::flex(), FloatDType::F16).unwrap();
    test.doubled_60000 = 65504.0;
    let error = test.failure().unwrap().to_string();
    assert_says!(error, "60000 · 2", "65504");
    test.detects_computed_nan = false;
    assert_says!(test.failure().unwrap(), "computed NaN");
}

#[test]
fn a_self_test_reads_back_from_json_with_its_infinity() {
    let test = self_test(&Device::flex(), FloatDType::F16).unwrap();
    assert_eq!(test.doubled_60000, f32::INFINITY);
    let json = serde_json::to_string(&test).unwrap();
    assert_eq!(serde_json::from_str::<SelfTest>(&json).unwrap(), test);
}

#[test]
fn a_device_can_be_checked_before_there_is_a_model() {
    each_device(|target| {
        for dtype in [FloatDType::F32, FloatDType::F16, FloatDType::BF16] {
            let checked = AutocastConfig::new(dtype).check(&target.device);
            assert_eq!(checked.is_ok(), target.device.supports_dtype(dtype));
            let emulated = AutocastConfig::new(dtype).with_fallback(Fallback::Emulate);
            emulated.check(&target.device).unwrap();
        }
    });
}

#[test]
fn a_parameter_with_an_adapter_is_reported_by_what_it_computes_in() {
    let config = AutocastConfig::new(FloatDType::F16)
        .with_full_precision(Some(ParamGroup::from_predicate("second")));
    let (model, _) = config
        .prepare_with(Mlp::new(1, &Device::flex()), Lora::new(1, 1.0))
        .unwrap();
    let precision = parameter_precision(&model).unwrap();
    let kept = |path: &str| precision.iter().find(|p| p.path == path).unwrap().kept;
    assert_eq!(kept("first.weight"), None);
    assert_eq!(kept("second.weight"), Some(KeptBecause::NotPrepared));
    assert_eq!(
        kept("first.weight.chain.first.a"),
        Some(KeptBecause::NotPrepared)
    );
}

#[test]
fn the_factors_of_an_adapter_are_master_weights_too() {
    let prepared = |seed| {
        let config = AutocastConfig::new(FloatDType::F16).with_fallback(Fallback::Emulate);
        let model = Mlp::new(seed, &Device::flex());
        config.prepare_with(model, Lora::new(1, 1.0)).unwrap().0
    };
    let record = cast(prepared(1), FloatDType::F16).into_record();
    let loaded = prepared(2).try_load_record(record).unwrap();
    let mut factors = 0;
    each_float(&loaded, |at, float| {
        assert_eq!(float.dtype(), DType::F32, "{}", at.path());
        factors += usize::from(at.is_attached());
    });
    assert_eq!(factors, 4);
}

/// Looks at its values, which a recording does not have.
#[derive(Module, Debug)]
struct Normalized {}

impl Reparameterization for Normalized {
    const NAME: &'static str = "normalized";

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        let largest = base.clone().abs().max().into_scalar::<f32>();
        base.div_scalar(largest)
    }
}

struct NormalizeMatrices;

impl Reparameterizer for NormalizeMatrices {
    type Reparam = Normalized;

    fn reparameterize<const D: usize>(
        &mut self,
        _path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<Normalized>) {
        (param, (D > 1).then_some(Normalized {}))
    }
}

#[test]
fn weights_that_cannot_be_recorded_are_an_error_with_its_cause() {
    let model = attach(Mlp::new(1, &Device::flex()), NormalizeMatrices).unwrap();
    let error = parameter_precision(&model).unwrap_err();
    assert_matches!(
        error,
        AmpError::EffectiveWeights(GraphError::Forward { .. })
    );
    assert!(std::error::Error::source(&error).is_some());
}

#[cfg(feature = "ndarray")]
#[test]
#[should_panic(expected = "the model was prepared on another device")]
#[allow(deprecated)]
fn an_input_on_a_device_without_the_dtype_is_a_panic_and_no_garbage() {
    let (_, autocast) = AutocastConfig::new(FloatDType::F16)
        .prepare(Mlp::new(1, &Device::flex()))
        .unwrap();
    autocast.forward(Tensor::<1>::ones([2], &Device::ndarray()), |x| x);
}

mod own_modules {
    //! Of the names of Burn's modules.

    use burn::module::{Module, Param};
    use burn::nn::{BatchNorm as BurnBatchNorm, Linear};
    use burn::tensor::Tensor;

    #[derive(Module, Debug)]
    pub(super) struct BatchNorm {
        pub(super) linear: Linear,
        pub(super) running_mean: Param<Tensor<1>>,
        pub(super) norm: BurnBatchNorm,
    }

    #[derive(Module, Debug)]
    pub(super) struct GateController {
        pub(super) gate: Linear,
    }
}

#[test]
fn a_models_own_struct_of_the_name_of_one_of_burns_is_its_own() {
    let device = Device::flex();
    let linear = || LinearConfig::new(2, 2).init(&device);
    let norm = own_modules::BatchNorm {
        linear: linear(),
        running_mean: Param::from_tensor(Tensor::zeros([2], &device)),
        norm: BatchNormConfig::new(2).init(&device),
    };
    let gate = own_modules::GateController { gate: linear() };
    let (model, _) = AutocastConfig::new(FloatDType::F16)
        .prepare((norm, gate))
        .unwrap();
    for parameter in parameter_precision(&model).unwrap() {
        let expected = match parameter.path.starts_with("0.norm.") {
            true => Some(KeptBecause::BatchNorm),
            false => None,
        };
        assert_eq!(parameter.kept, expected, "{}", parameter.path);
    }
}

#[test]
fn a_record_in_half_precision_loads_as_f32_master_weights() {
    each_device(|target| {
        for dtype in HALVES {
            if !target.device.supports_dtype(dtype) {
                continue;
            }
            let device = target.device.clone().autodiff();
            let (other, _) = AutocastConfig::new(dtype)
                .prepare(Mlp::new(2, &device))
                .unwrap();
            let (half, _) = materialize_half(other.clone(), dtype).unwrap();
            let half = half.into_record();
            let (model, autocast) = AutocastConfig::new(dtype)
                .prepare(Mlp::new(1, &device))
                .unwrap();
            let model = model.try_load_record(half).unwrap();
            for parameter in [model.first.weight.base(), model.second.weight.base()] {
                assert_eq!(parameter.dtype(), DType::F32);
                assert!(parameter.is_require_grad());
            }
            let expected: Vec<f32> = values(other.first.weight.base())
                .into_iter()
                .map(|value| nearest(dtype, value))
                .collect();
            assert_eq!(values(model.first.weight.base()), expected);
            // And it trains: gradients are F32.
            let x = tensor::<2>(3, [2, 6], &device);
            let grads = autocast.forward(x, |x| model.forward(x)).sum().backward();
            let grad = model.first.weight.base().grad(&grads).unwrap();
            assert_eq!(grad.dtype(), DType::F32);
        }
    });
}

/// A network and a copy of it have the same identities, and paths of their own.
#[test]
fn what_is_kept_in_full_precision_is_kept_at_its_path_alone() {
    let device = Device::flex();
    let mlp = Mlp::new(1, &device);
    let config = AutocastConfig::new(FloatDType::BF16)
        .with_full_precision(Some(ParamGroup::from_predicate("0.first")));
    let (pair, autocast) = config.prepare((mlp.clone(), mlp.clone())).unwrap();
    autocast.forward((), |()| {
        let dtype = |mlp: &Mlp| mlp.first.weight.val().dtype();
        assert_eq!([dtype(&pair.0), dtype(&pair.1)], [DType::F32, DType::BF16]);
    });
    let kept: Vec<String> = parameter_precision(&pair)
        .unwrap()
        .into_iter()
        .filter(|one| one.kept.is_some())
        .map(|one| one.path)
        .collect();
    assert_eq!(kept, ["0.first.weight", "0.first.bias"]);
    let (half, _) = config.materialize_half((mlp.clone(), mlp)).unwrap();
    let dtype = |mlp: &Mlp| mlp.first.weight.val().dtype();
    assert_eq!([dtype(&half.0), dtype(&half.1)], [DType::F32, DType::BF16]);
    // What one of them carries, the other does not.
    let mlp = Mlp::new(1, &device);
    let (prepared, _) = AutocastConfig::new(FloatDType::BF16)
        .prepare(mlp.clone())
        .unwrap();
    let rest = AutocastConfig::new(FloatDType::BF16)
        .with_full_precision(Some(ParamGroup::from_predicate("0")));
    let again = rest.prepare((prepared, mlp));
    assert!(again.is_ok(), "{}", again.unwrap_err());
}
