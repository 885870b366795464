//! What is refused, with what it says.

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{FloatDType, Tensor, TensorData};
use burn_lean::deploy::{DeployError, EngineConfig, Export, Form};

use crate::judge::Nothing;
use crate::support::{each_device, tensor};

#[derive(Module, Debug)]
struct Patches {
    conv: Conv2d,
    weights: Linear,
}

#[test]
fn an_operation_without_an_operator_is_named_with_its_module() {
    each_device(|target| {
        let device = &target.device;
        let model = Patches {
            conv: Conv2dConfig::new([1, 2], [3, 3]).init(device),
            weights: LinearConfig::new(4, 4).init(device),
        };
        let x = tensor::<2>(1, [3, 4], device);
        let forward =
            |model: &Patches, x: Tensor<2>| x.cumprod(1) * model.weights.weight.val().slice([0..3]);
        let export = Export::record(&model, &x, forward).unwrap();
        let refused = export.to_onnx(Form::Float).unwrap_err();
        let DeployError::Operator { operation, .. } = &refused else {
            panic!("{refused}")
        };
        assert_eq!(*operation, "cumprod");
        assert!(refused.to_string().contains("no operator"), "{refused}");
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
        assert!(matches!(refused, DeployError::Graph(_)), "{refused}");
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
        assert!(export.to_onnx(Form::Float).is_ok());
        assert!(matches!(
            EngineConfig::new().compile(export).unwrap_err(),
            DeployError::Load { .. }
        ));
    });
}

#[test]
fn files_are_written_whole_and_broken_ones_refused() {
    let device = burn::tensor::Device::flex();
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
    y[0].assert_approx_eq::<f32>(&expected, burn::tensor::Tolerance::default());
    assert!(matches!(
        file.run(vec![]).unwrap_err(),
        DeployError::Mismatch { .. }
    ));

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
    assert!(matches!(missing, DeployError::File { .. }), "{missing}");
    let nowhere = onnx
        .save(folder.path().join("no/folder/x.onnx"))
        .unwrap_err();
    assert!(matches!(nowhere, DeployError::File { .. }), "{nowhere}");
}
