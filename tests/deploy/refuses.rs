//! What is refused, with what it says.

use burn::module::{Module, Param};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::tensor::{Device, FloatDType, Int, Tensor, TensorData};
use burn_lean::deploy::{
    ActivationQuantization, Backend, DeployError, ElementType, EngineConfig, Export, Form,
    Quantization, integer_kernels,
};
use burn_lean::quant::{
    Granularity, NumberFormat, PtqConfig, QuantError, QuantParams, QuantizedForward,
    QuantizedTensor, Scheme, integer::Grid,
};

use crate::judge::Nothing;
use crate::support::{cast, each_device, on_each, scratch, tensor, values, with_numbers};

#[derive(Module, Debug)]
struct Patches {
    conv: Conv2d,
    weights: Linear,
}

#[test]
fn an_operation_without_an_operator_is_named_with_its_module() {
    on_each(|device| {
        let model = Patches {
            conv: Conv2dConfig::new([1, 2], [3, 3]).init(device),
            weights: LinearConfig::new(4, 4).init(device),
        };
        let x = tensor::<2>(1, [3, 4], device);
        let refused = |forward: fn(&Patches, Tensor<2>) -> Tensor<2>| {
            let export = Export::record(&model, &x, forward).unwrap();
            let refused = export.to_onnx(Form::Float).unwrap_err();
            assert_says!(refused, "has no ONNX operator");
            match refused {
                DeployError::Operator {
                    operation, module, ..
                } => (operation, module),
                other => panic!("{other}"),
            }
        };
        // It reads a parameter; it reads none, after one that does; nothing before it does.
        let weights = "`weights`".to_string();
        let of_weight = |model: &Patches, x: Tensor<2>| {
            let y = x.clone() + 1.0;
            y.atan2(x.matmul(model.weights.weight.val())) + model.weights.weight.val().slice([0..3])
        };
        let found = refused(of_weight);
        assert_eq!(found, ("atan2", format!("what follows {weights}")));
        let found = refused(|model, x| x.atan2(model.weights.weight.val().slice([0..3])));
        assert_eq!(found, ("atan2", weights));
        let found = refused(|model, x| x.cumprod(1) * model.weights.weight.val().slice([0..3]));
        assert_eq!(found, ("cumprod", "a module that is not known".into()));
    });
}

#[test]
fn a_forward_pass_that_reads_a_value_is_refused() {
    each_device(|target| {
        let x = tensor::<2>(2, [3, 4], &target.device);
        let forward = |_: &Nothing, x: Tensor<2>| {
            let first = x.clone().sum().into_scalar::<f32>();
            x * first
        };
        let refused = Export::record(&Nothing {}, &x, forward).unwrap_err();
        assert_matches!(refused, DeployError::Graph(_));
        assert_says!(refused, "there is no export without a recording");
        // It would not run by itself either.
        let forward = |_: &Nothing, x: Tensor<2>| x.reshape([5, 5]);
        let refused = Export::record(&Nothing {}, &x, forward).unwrap_err();
        assert!(!refused.to_string().contains("no export"), "{refused}");
    });
}

#[test]
fn the_engine_refuses_half_precision() {
    each_device(|target| {
        if !target.device.supports_dtype(FloatDType::F16) {
            return;
        }
        let x = tensor::<2>(3, [3, 4], &target.device).cast(FloatDType::F16);
        let export = Export::record(&Nothing {}, &x, |_, x: Tensor<2>| x * 2.0).unwrap();
        // The file has it: 2 in half precision is 0x4000.
        let onnx = export.to_onnx(Form::Float).unwrap().model;
        let elements = [onnx.inputs()[0].element, onnx.outputs()[0].element];
        assert_eq!(elements, [ElementType::F16; 2]);
        let operators: Vec<&str> = onnx.nodes().iter().map(|node| node.operator()).collect();
        assert_eq!(operators, ["Mul"]);
        let [two] = onnx.initializers() else {
            panic!("{:?}", onnx.initializers())
        };
        assert_eq!(
            (two.element(), two.bytes()),
            (ElementType::F16, &[0, 0x40][..])
        );
        assert_matches!(
            EngineConfig::new().compile(export).unwrap_err(),
            DeployError::Load { .. }
        );
    });
}

#[derive(Module, Debug)]
struct Normalized {
    conv: Conv2d,
    norm: BatchNorm,
}

#[test]
fn a_model_of_another_dtype_is_written_in_it_alone() {
    let device = Device::flex();
    for dtype in [FloatDType::F16, FloatDType::F64] {
        let model = Normalized {
            conv: Conv2dConfig::new([1, 2], [3, 3]).init(&device),
            norm: BatchNormConfig::new(2).init(&device),
        };
        let model = cast(model, dtype);
        let x = tensor::<4>(5, [2, 1, 6, 6], &device).cast(dtype);
        let forward = |model: &Normalized, x: Tensor<4>| model.norm.forward(model.conv.forward(x));
        let export = Export::record(&model, &x, forward).unwrap();
        let onnx = export.to_onnx(Form::Float).unwrap().model;
        let element = onnx.inputs()[0].element;
        let mut constants = onnx.initializers().iter();
        assert!(constants.all(|constant| constant.element() == element));
        let last = onnx.nodes().last().unwrap();
        assert_eq!(last.operator(), "BatchNormalization");
    }
}

#[test]
fn codes_in_a_model_of_another_dtype_are_refused() {
    let device = Device::flex();
    let linear: Linear = LinearConfig::new(8, 4).init(&device);
    let scheme = Scheme::symmetric(NumberFormat::int8().narrow());
    let scheme = scheme.with_granularity(Granularity::PerChannel { axis: 1 });
    let weight = linear.weight.val();
    let qparams = QuantParams::of(&weight, &scheme).unwrap();
    let codes = QuantizedTensor::quantize(&weight, &qparams, &scheme).unwrap();
    let half = cast(linear, FloatDType::F16);
    let x = tensor::<2>(6, [3, 8], &device).cast(FloatDType::F16);
    let export = Export::record(&half, &x, |linear: &Linear, x| linear.forward(x)).unwrap();
    let export = export.with_quantization(Quantization::none().with_weight("weight", codes));
    for form in [Form::Float, Form::Qdq, Form::Integer] {
        let refused = export.to_onnx(form).unwrap_err();
        let DeployError::Dtype { what, dtype } = &refused else {
            panic!("{refused}")
        };
        assert_eq!((what.as_str(), dtype.as_str()), ("quantized weight", "F16"));
    }
}

#[test]
fn integers_of_more_than_32_bits_are_left_to_burn() {
    let device = Device::flex();
    let numbers = TensorData::from([1_i64, 2, 3]);
    let dtype = numbers.dtype();
    let numbers = Tensor::<1, Int>::from_data(numbers, (&device, dtype));
    let inputs = (numbers, tensor::<2>(7, [3, 4], &device));
    let linear: Linear = LinearConfig::new(4, 2).init(&device);
    let record = || {
        let forward = |linear: &Linear, (numbers, x): (Tensor<1, Int>, Tensor<2>)| {
            (numbers + 5_000_000_000_i64, linear.forward(x))
        };
        Export::record(&linear, &inputs, forward).unwrap()
    };
    for backend in [None, Some(Backend::Own), Some(Backend::Rten)] {
        let config = EngineConfig::new().with_backend(backend);
        let DeployError::Load { reason } = config.compile(record()).unwrap_err() else {
            panic!("another error")
        };
        assert_says!(reason, "is 5000000000");
    }
    let burn = EngineConfig::new().with_backend(Some(Backend::Burn));
    let (found, _) = burn.compile(record()).unwrap().run(&inputs).unwrap();
    let found: Vec<i64> = found.into_data().iter().collect();
    assert_eq!(found, [5_000_000_001, 5_000_000_002, 5_000_000_003]);
}

#[test]
fn sums_beyond_32_bits_do_not_panic() {
    let device = Device::flex();
    let x = Tensor::<1, Int>::from_ints([i32::MAX, 1], &device);
    for backend in [Backend::Own, Backend::Rten] {
        let forward = |_: &Nothing, x: Tensor<1, Int>| x.clone() * x;
        let export = Export::record(&Nothing {}, &x, forward).unwrap();
        let config = EngineConfig::new().with_backend(Some(backend));
        let engine = config.compile(export).unwrap();
        // Where numbers are checked, in a build for development, an error; elsewhere the low bits.
        assert_matches!(engine.run(&x), Ok(_) | Err(DeployError::Run { .. }));
    }
}

/// To measure a pruned weight, the whole model is run.
#[test]
fn sums_beyond_32_bits_do_not_panic_where_zeros_are_measured() {
    let device = Device::flex();
    let mut linear: Linear = LinearConfig::new(64, 64).init(&device);
    let weight = (0..64 * 64).map(|at| f32::from(u8::from(at % 97 == 0)));
    let weight = TensorData::new(weight.collect::<Vec<f32>>(), [64, 64]);
    linear.weight = Param::from_data(weight, &device);
    let numbers = Tensor::<1, Int>::from_ints([1, 2, 3], &device);
    let inputs = (numbers, tensor::<2>(7, [3, 64], &device));
    let forward = |linear: &Linear, (numbers, x): (Tensor<1, Int>, Tensor<2>)| {
        (numbers + i32::MAX + i32::MAX, linear.forward(x))
    };
    let export = Export::record(&linear, &inputs, forward).unwrap();
    let own = EngineConfig::new().with_backend(Some(Backend::Own));
    // As above.
    let made = own.compile(export).unwrap().run(&inputs);
    assert_matches!(made, Ok(_) | Err(DeployError::Run { .. }));
}

/// Burn panics at it.
#[test]
fn a_division_by_integers_of_zero_is_an_error_in_every_way() {
    let device = Device::flex();
    let counts = Tensor::<1, Int>::from_ints([1, 2, 3], &device);
    let zeros = counts.zeros_like();
    let inputs = (counts, tensor::<2>(7, [3, 4], &device));
    let linear: Linear = LinearConfig::new(4, 2).init(&device);
    let record = || {
        let forward = |linear: &Linear, (counts, x): (Tensor<1, Int>, Tensor<2>)| {
            (counts.clone() / counts, linear.forward(x))
        };
        Export::record(&linear, &inputs, forward).unwrap()
    };
    let all = [Backend::Own, Backend::Rten, Backend::Burn].map(Some);
    for backend in all.into_iter().chain([None]) {
        let config = EngineConfig::new().with_backend(backend);
        let engine = config.compile(record()).unwrap();
        let (found, _) = engine.run(&inputs).unwrap();
        let found: Vec<i64> = found.into_data().iter().collect();
        assert_eq!(found, [1, 1, 1]);
        let refused = engine.run(&(zeros.clone(), inputs.1.clone())).unwrap_err();
        assert_matches!(refused, DeployError::Run { .. });
    }
}

#[test]
fn files_are_written_whole_and_broken_ones_refused() {
    let device = Device::flex();
    let linear = LinearConfig::new(4, 2).init(&device);
    let x = tensor::<2>(4, [3, 4], &device);
    let export = Export::record(&linear, &x, |linear, x| linear.forward(x)).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("linear.onnx");
    let onnx = export.to_onnx(Form::Float).unwrap().model;
    let length = onnx.save(&path).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    assert_eq!(bytes.len() as u64, length);
    let config = EngineConfig::new();
    let file = config.open(&path).unwrap();
    let y = file.run(vec![x.clone().into_data()]).unwrap();
    let expected: TensorData = linear.forward(x).into_data();
    // Sums of 5 terms, of at most 2.5 together.
    y[0].assert_approx_eq::<f32>(&expected, burn::tensor::Tolerance::absolute(2e-6));
    let refused = file.run(vec![]).unwrap_err();
    assert_says!(refused, "has 1 inputs, but got 0");
    assert_matches!(refused, DeployError::FileInputs { .. });

    for broken in [&bytes[..bytes.len() / 2], b"no model at all", &[]] {
        std::fs::write(&path, broken).unwrap();
        let loaded = config.open(&path);
        let failed = match loaded {
            Err(DeployError::Load { .. }) => true,
            Err(other) => panic!("{other}"),
            // What happens to be a model without operators gives nothing.
            Ok(file) => !matches!(file.run(vec![expected.clone()]), Ok(found) if !found.is_empty()),
        };
        assert!(failed, "{} bytes", broken.len());
    }
    let missing = config.open(folder.path().join("missing.onnx")).unwrap_err();
    assert_matches!(missing, DeployError::File { .. });
    let nowhere = onnx
        .save(folder.path().join("no/folder/x.onnx"))
        .unwrap_err();
    assert_matches!(nowhere, DeployError::File { .. });
}

/// Convolutions of codes in a file, which not every machine computes right.
#[test]
fn files_of_integer_convolutions_are_right_or_refused() {
    let device = Device::flex();
    let conv: Conv2d = Conv2dConfig::new([3, 4], [3, 3]).init(&device);
    let x = tensor::<4>(4, [2, 3, 6, 6], &device);
    let forward = |conv: &Conv2d, x: Tensor<4>| conv.forward(x);
    let ptq = PtqConfig::new().with_progress(false);
    let (model, _) = ptq
        .quantize_for(with_numbers(conv, 3), || [x.clone()], forward)
        .unwrap();
    let export = Export::record(&model, &x, forward).unwrap();
    let written = export.to_onnx(Form::Integer).unwrap().model;
    assert!(
        written
            .nodes()
            .iter()
            .any(|node| node.operator() == "ConvInteger")
    );
    let (_folder, path) = scratch("conv.onnx");
    written.save(&path).unwrap();
    let opened = EngineConfig::new().open(&path);
    match (integer_kernels().exact_convolutions, opened) {
        (false, Err(DeployError::Load { reason })) => {
            assert_says!(reason, "`ConvInteger`", "Form::Qdq");
        }
        (true, Ok(file)) => {
            let found = file.run(vec![x.clone().into_data()]).unwrap().remove(0);
            let expected = QuantizedForward::new().run(&model, x, forward).unwrap();
            let expected = values(expected);
            let largest = expected.iter().fold(0.0f32, |most, y| most.max(y.abs()));
            assert_near!(found.iter::<f32>(), expected, 1e-2 * largest);
        }
        (exact, other) => panic!("{exact}: {other:?}"),
    }
}

#[test]
fn a_grid_that_no_byte_holds_is_refused_with_its_path() {
    let device = Device::flex();
    let model = LinearConfig::new(4, 2).init(&device);
    let x = Tensor::<2>::ones([3, 4], &device);
    let grid = |zero_point, quant_min, quant_max| Grid {
        scale: 0.01,
        zero_point,
        quant_min,
        quant_max,
    };
    let written = |grid: Grid| {
        let how = ActivationQuantization::Static(grid);
        let quantization = Quantization::none().with_input("weight", how);
        let export = Export::record(&model, &x, |model: &Linear, x| model.forward(x)).unwrap();
        export.with_quantization(quantization).to_onnx(Form::Qdq)
    };
    for wide in [grid(300, 0, 1023), grid(0, -256, 255)] {
        assert_says!(written(wide).unwrap_err(), "`weight`");
    }
    assert_matches!(
        written(grid(7, 0, 6)),
        Err(DeployError::Quant(QuantError::InvalidConfig {
            field: "zero_point",
            ..
        }))
    );
    assert!(written(grid(3, 0, 15)).is_ok());
    assert!(written(grid(-3, -8, 7)).is_ok());
}
