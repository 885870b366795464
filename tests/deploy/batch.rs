//! The batch axis: open where the forward pass does not compute with its size.

use burn::nn::LinearConfig;
use burn::nn::attention::{MhaInput, MultiHeadAttentionConfig};
use burn::tensor::Tensor;
use burn_lean::deploy::{DeployError, Dimension, EngineConfig, Export, Form};

use crate::judge::{Nothing, close};
use crate::support::{each_device, tensor, with_numbers};

#[test]
fn a_model_runs_with_batches_of_any_size() {
    each_device(|target| {
        let device = &target.device;
        let attention = MultiHeadAttentionConfig::new(8, 2)
            .with_dropout(0.0)
            .init(device);
        let attention = with_numbers(attention, 1);
        let forward = |attention: &burn::nn::attention::MultiHeadAttention, x: Tensor<3>| {
            let [batch, length, width] = x.dims();
            let y = attention.forward(MhaInput::self_attn(x)).context;
            // A constant of the size of the batch, and the batch in a product with another axis.
            let ones = Tensor::<3>::ones([batch, length, width], &y.device());
            (y + ones).reshape([batch * length, width])
        };
        let x = tensor::<3>(1, [3, 5, 8], device);
        let export = Export::record(&attention, &x, forward).unwrap();
        let exported = export.to_onnx(Form::Float).unwrap();
        assert_eq!(exported.fixed_batch, None);
        assert_eq!(exported.model.inputs()[0].shape[0], Dimension::Batch(1));
        assert_eq!(exported.model.outputs()[0].shape[0], Dimension::Batch(5));
        let engine = EngineConfig::new().compile(export).unwrap();
        for batch in [1, 3, 4] {
            let x = tensor::<3>(2, [batch, 5, 8], device);
            close(engine.run(&x).unwrap(), forward(&attention, x));
        }
        let longer = tensor::<3>(2, [3, 6, 8], device);
        let refused = engine.run(&longer).unwrap_err();
        assert!(matches!(refused, DeployError::Mismatch { .. }), "{refused}");
    });
}

#[test]
fn where_the_size_is_computed_with_it_is_fixed_and_said() {
    each_device(|target| {
        let x = tensor::<2>(3, [3, 4], &target.device);
        let forward = |_: &Nothing, x: Tensor<2>| {
            let [batch, _] = x.dims();
            x / batch as f32
        };
        let export = Export::record(&Nothing {}, &x, forward).unwrap();
        let exported = export.to_onnx(Form::Float).unwrap();
        let reason = exported.fixed_batch.as_deref().unwrap();
        assert!(reason.contains("div_scalar"), "{reason}");
        assert_eq!(exported.model.inputs()[0].shape[0], Dimension::Fixed(3));
        let mut engine = EngineConfig::new().compile(export).unwrap();
        close(engine.run(&x).unwrap(), forward(&Nothing {}, x.clone()));
        // Another size is compiled beside it.
        let other = tensor::<2>(3, [5, 4], &target.device);
        assert!(engine.run(&other).is_err());
        engine
            .add(Export::record(&Nothing {}, &other, forward).unwrap())
            .unwrap();
        close(engine.run(&other).unwrap(), forward(&Nothing {}, other));
        close(engine.run(&x).unwrap(), forward(&Nothing {}, x));
    });
}

#[test]
fn training_devices_are_recorded_for_inference() {
    each_device(|target| {
        let device = target.device.clone().autodiff();
        let linear = LinearConfig::new(4, 2).init(&device);
        let x = tensor::<2>(4, [3, 4], &device);
        let export = Export::record(&linear, &x, |linear, x| linear.forward(x)).unwrap();
        let engine = EngineConfig::new().compile(export).unwrap();
        close(
            engine.run(&x).unwrap(),
            linear.forward(x).without_autodiff(),
        );
    });
}
