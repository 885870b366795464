//! The batch axis: open where the forward pass does not compute with its size.

use burn::nn::attention::{MhaInput, MultiHeadAttentionConfig};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::module::adaptive_avg_pool1d;
use burn::tensor::{Device, Tensor, s};
use burn_lean::deploy::{Backend, DeployError, Dimension, EngineConfig, Export, Form};
use burn_lean::quant::PtqConfig;

use crate::judge::{Nothing, close};
use crate::support::{each_device, on_each, on_tracked, tensor, with_numbers};

#[test]
fn a_model_runs_with_batches_of_any_size() {
    on_each(|device| {
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
        let open = |text: &str| Dimension::Open(text.into());
        assert_eq!(exported.model.inputs()[0].shape[0], open("batch"));
        assert_eq!(exported.model.outputs()[0].shape[0], open("5*batch"));
        let engine = EngineConfig::new().compile(export).unwrap();
        for batch in [1, 3, 4] {
            let x = tensor::<3>(2, [batch, 5, 8], device);
            close(engine.run(&x).unwrap(), forward(&attention, x));
        }
        let longer = tensor::<3>(2, [3, 6, 8], device);
        assert_matches!(engine.run(&longer), Err(DeployError::Mismatch { .. }));
    });
}

/// Burn's linear layer computes batches of one way and of another otherwise.
#[test]
fn a_linear_layer_of_sequences_has_any_batch_from_every_size() {
    on_each(|device| {
        let layer = LinearConfig::new(16, 16);
        for layer in [layer.clone(), layer.with_bias(false)] {
            let layer: Linear = with_numbers(layer.init(device), 4);
            for sizes in [[1, 5], [4, 5], [8, 50], [1, 32]] {
                let [batch, length] = sizes;
                let x = tensor::<3>(1, [batch, length, 16], device);
                let export = Export::record(&layer, &x, |l: &Linear, x| l.forward(x)).unwrap();
                let exported = export.to_onnx(Form::Float).unwrap();
                assert_eq!(exported.fixed_batch, None, "{sizes:?}");
                let engine = EngineConfig::new().compile(export).unwrap();
                for batch in [1, 3, 24] {
                    let x = tensor::<3>(2, [batch, length, 16], device);
                    close(engine.run(&x).unwrap(), layer.forward(x));
                }
            }
        }
    });
}

/// Not a number is not what it is itself, and yet the same operation.
#[test]
fn what_fills_with_nan_has_any_batch() {
    let device = Device::flex();
    let forward = |_: &Nothing, x: Tensor<2>| {
        let below = x.clone().lower_elem(0.0);
        let marked = x.clone().mask_fill(below, f32::NAN);
        x.mask_fill(marked.is_nan(), 0.5)
    };
    let x = tensor::<2>(1, [3, 5], &device);
    let export = Export::record(&Nothing {}, &x, forward).unwrap();
    assert_eq!(export.to_onnx(Form::Float).unwrap().fixed_batch, None);
    let engine = EngineConfig::new().compile(export).unwrap();
    let x = tensor::<2>(2, [4, 5], &device);
    close(engine.run(&x).unwrap(), forward(&Nothing {}, x));
}

/// Of a batch of one, what a layer computed has the shape of a weight with a leading axis.
#[test]
fn products_of_each_example_with_itself_have_any_batch() {
    on_each(|device| {
        let layer: Linear = with_numbers(LinearConfig::new(16, 8).init(device), 4);
        let forward = |layer: &Linear, x: Tensor<3>| {
            let [batch, length, width] = x.dims();
            let rows = layer.forward(x.reshape([batch * length, width]));
            let rows = rows.reshape([batch, length, 8]);
            rows.clone().swap_dims(1, 2).matmul(rows)
        };
        for size in [1, 4] {
            let x = tensor::<3>(1, [size, 5, 16], device);
            let export = Export::record(&layer, &x, forward).unwrap();
            let exported = export.to_onnx(Form::Float).unwrap();
            assert_eq!(exported.fixed_batch, None, "{size}");
            let engine = EngineConfig::new().compile(export).unwrap();
            for batch in [1, 3, 24] {
                let x = tensor::<3>(2, [batch, 5, 16], device);
                close(engine.run(&x).unwrap(), forward(&layer, x));
            }
        }
    });
}

/// Burn swaps the axes of one vector of each example where the matrices are one, as those of a batch of one are.
#[test]
fn a_vector_of_each_example_times_its_matrix_has_any_batch() {
    on_each(|device| {
        let layer: Linear = with_numbers(LinearConfig::new(6, 24).init(device), 4);
        // The weights of a layer are those that another one gives.
        let forward = |layer: &Linear, x: Tensor<2>| {
            let [batch, _] = x.dims();
            let matrices = layer.forward(x.clone()).reshape([batch, 6, 4]);
            x.unsqueeze_dim::<3>(1).matmul(matrices).reshape([batch, 4])
        };
        for size in [1, 4] {
            let x = tensor::<2>(1, [size, 6], device);
            let export = Export::record(&layer, &x, forward).unwrap();
            assert_eq!(
                export.to_onnx(Form::Float).unwrap().fixed_batch,
                None,
                "{size}"
            );
            for backend in [Backend::Own, Backend::Rten] {
                let export = Export::record(&layer, &x, forward).unwrap();
                let config = EngineConfig::new().with_backend(Some(backend));
                let engine = config.compile(export).unwrap();
                for batch in [1, 3, 24] {
                    let x = tensor::<2>(2, [batch, 6], device);
                    close(engine.run(&x).unwrap(), forward(&layer, x));
                }
            }
        }
        // With its quantizers: of the input of the layer, and of the matrices that it gives.
        let config = PtqConfig::new().with_progress(false);
        for size in [1, 4] {
            let x = tensor::<2>(1, [size, 6], device);
            let (layer, _) = config
                .quantize_for(layer.clone(), || [x.clone()], forward)
                .unwrap();
            let exported = Export::record(&layer, &x, forward).unwrap();
            let exported = exported.to_onnx(Form::Qdq).unwrap();
            assert_eq!(exported.fixed_batch, None, "{size}");
            let nodes = exported.model.nodes().iter();
            let rounded = nodes.filter(|node| node.operator() == "QuantizeLinear");
            assert_eq!(rounded.count(), 2, "{size}");
        }
    });
}

#[test]
fn where_the_size_is_computed_with_it_is_fixed_and_said() {
    each_device(|target| {
        let x = tensor::<2>(3, [3, 4], &target.device);
        let forward = |_: &Nothing, x: Tensor<2>| {
            let [batch, _] = x.dims();
            x / (batch as f32).sqrt()
        };
        let export = Export::record(&Nothing {}, &x, forward).unwrap();
        let exported = export.to_onnx(Form::Float).unwrap();
        assert_says!(exported.fixed_batch.as_deref().unwrap(), "div_scalar");
        assert_eq!(exported.model.inputs()[0].shape[0], Dimension::Fixed(3));
        let mut engine = EngineConfig::new().compile(export).unwrap();
        close(engine.run(&x).unwrap(), forward(&Nothing {}, x.clone()));
        // Another size is compiled beside it.
        let other = tensor::<2>(3, [5, 4], &target.device);
        assert_matches!(engine.run(&other), Err(DeployError::Mismatch { .. }));
        engine
            .add(Export::record(&Nothing {}, &other, forward).unwrap())
            .unwrap();
        close(engine.run(&other).unwrap(), forward(&Nothing {}, other));
        close(engine.run(&x).unwrap(), forward(&Nothing {}, x));
    });
}

/// Beside one that takes all sizes.
#[test]
fn what_was_added_for_a_size_runs_it() {
    let device = Device::flex();
    let of = |rows: usize, more: f32| {
        let x = tensor::<2>(3, [rows, 4], &device);
        let forward = move |_: &Nothing, x: Tensor<2>| x + more;
        let export = Export::record(&Nothing {}, &x, forward).unwrap();
        (export, forward(&Nothing {}, x.clone()), x)
    };
    let (all, of_two, two) = of(2, 1.0);
    let (eight, of_eight, x) = of(8, 2.0);
    let mut engine = EngineConfig::new().compile(all).unwrap();
    engine.add(eight).unwrap();
    close(engine.run(&x).unwrap(), of_eight);
    close(engine.run(&two).unwrap(), of_two);
    let seven = tensor::<2>(3, [7, 4], &device);
    close(engine.run(&seven).unwrap(), seven + 1.0);
}

/// Why the batch of a function is fixed, recorded with one of a size.
fn fixed(
    size: usize,
    device: &Device,
    forward: fn(&Nothing, Tensor<2>) -> Tensor<2>,
) -> Option<String> {
    let x = tensor::<2>(5, [size, 4], device);
    let export = Export::record(&Nothing {}, &x, forward).unwrap();
    export.to_onnx(Form::Float).unwrap().fixed_batch
}

#[test]
fn a_size_that_is_the_same_for_the_next_batch_is_fixed() {
    on_each(|device| {
        let halves = |_: &Nothing, x: Tensor<2>| {
            let half = x.dims()[0] / 2;
            x.clone().slice([0..half]) + x.slice([half..2 * half])
        };
        assert!(fixed(4, device, halves).unwrap().contains("slice"));
        assert!(fixed(3, device, |_, x| x.slice([0..8])).is_some());
        assert!(fixed(3, device, |_, x| x.median(0)).is_some());
        // Windows of half of the batch.
        let pooled = |_: &Nothing, x: Tensor<2>| {
            let x = x.swap_dims(0, 1).unsqueeze::<3>();
            adaptive_avg_pool1d(x, 2).reshape([4, 2])
        };
        assert!(fixed(4, device, pooled).is_some());
    });
}

#[test]
fn a_constant_with_the_size_in_it_is_fixed() {
    on_each(|device| {
        let divided = |_: &Nothing, x: Tensor<2>| {
            let count = Tensor::<1>::from_floats([x.dims()[0] as f32], &x.device());
            x / count.reshape([1, 1])
        };
        assert!(fixed(3, device, divided).unwrap().contains("a constant"));
        let halved = |_: &Nothing, x: Tensor<2>| {
            let two = Tensor::<1>::from_floats([2.0], &x.device());
            x / two.reshape([1, 1])
        };
        assert_eq!(fixed(3, device, halved), None);
    });
}

#[test]
fn operations_that_read_other_tensors_are_fixed() {
    each_device(|target| {
        let differences = |_: &Nothing, x: Tensor<2>| {
            let (a, b) = (x.clone().exp(), x.clone().sin());
            match x.dims()[0] % 2 {
                0 => a - b,
                _ => b - a,
            }
        };
        assert!(fixed(3, &target.device, differences).is_some());
        // Results in another order.
        let swapped = |_: &Nothing, x: Tensor<2>| {
            let (a, b) = (x.clone().exp(), x.clone().sin());
            match x.dims()[0] % 2 {
                0 => (a, b),
                _ => (b, a),
            }
        };
        let x = tensor::<2>(6, [3, 4], &target.device);
        let export = Export::record(&Nothing {}, &x, swapped).unwrap();
        assert!(export.to_onnx(Form::Float).unwrap().fixed_batch.is_some());
    });
}

#[test]
fn a_single_example_that_is_computed_otherwise_fixes_the_size() {
    on_each(|device| {
        let centred = |_: &Nothing, x: Tensor<2>| match x.dims()[0] {
            1 => x,
            _ => x.clone() - x.mean_dim(0),
        };
        assert_says!(fixed(4, device, centred).unwrap(), "a batch of one");
        // One that is refused is not missed.
        let many = |_: &Nothing, x: Tensor<2>| {
            assert!(x.dims()[0] > 1, "two examples at least");
            x.clone() - x.mean_dim(0)
        };
        assert_eq!(fixed(4, device, many), None);
    });
}

#[test]
fn nothing_of_a_tensor_may_be_taken() {
    let device = Device::flex();
    let forward = |_: &Nothing, x: Tensor<2>| {
        let end = x.dims()[1];
        Tensor::cat(vec![x.clone().slice(s![.., end..]), x * 2.0], 1)
    };
    let x = tensor::<2>(5, [3, 4], &device);
    for backend in [Backend::Own, Backend::Rten] {
        let export = Export::record(&Nothing {}, &x, forward).unwrap();
        let config = EngineConfig::new().with_backend(Some(backend));
        let engine = config.compile(export).unwrap();
        close(engine.run(&x).unwrap(), forward(&Nothing {}, x.clone()));
    }
}

#[test]
fn what_is_sorted_or_assigned_along_the_batch_is_all_of_it() {
    each_device(|target| {
        let forward = |_: &Nothing, x: Tensor<2>| {
            let (sorted, order) = x.clone().sort_with_indices(0);
            let second = x.clone().slice([1..2]);
            let assigned = x.slice_assign(s![0..1, ..], second);
            sorted + order.float() * 2.0 + assigned
        };
        let x = tensor::<2>(7, [3, 4], &target.device);
        for backend in [Backend::Own, Backend::Rten] {
            let export = Export::record(&Nothing {}, &x, forward).unwrap();
            assert_eq!(export.to_onnx(Form::Float).unwrap().fixed_batch, None);
            let config = EngineConfig::new().with_backend(Some(backend));
            let engine = config.compile(export).unwrap();
            for batch in [2, 3, 7] {
                let x = tensor::<2>(8, [batch, 4], &target.device);
                close(engine.run(&x).unwrap(), forward(&Nothing {}, x));
            }
        }
    });
}

#[test]
fn an_empty_batch_is_fixed() {
    let device = Device::flex();
    let linear: Linear = LinearConfig::new(4, 2).init(&device);
    let x = Tensor::<2>::zeros([0, 4], &device);
    let export = Export::record(&linear, &x, |linear: &Linear, x| linear.forward(x)).unwrap();
    let exported = export.to_onnx(Form::Float).unwrap();
    assert!(exported.fixed_batch.unwrap().contains("empty"));
    assert_eq!(exported.model.inputs()[0].shape[0], Dimension::Fixed(0));
}

#[test]
fn training_devices_are_recorded_for_inference() {
    on_tracked(|device| {
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

#[test]
fn a_count_over_the_batch_is_computed_for_each_batch() {
    each_device(|target| {
        let layer: Linear = with_numbers(LinearConfig::new(4, 3).init(&target.device), 4);
        let forward = |layer: &Linear, x: Tensor<2>| {
            let count = Tensor::<2>::ones([x.dims()[0], 1], &x.device()).sum_dim(0);
            layer.forward(x).sum_dim(0) / count
        };
        let x = tensor::<2>(1, [3, 4], &target.device);
        for backend in [None, Some(Backend::Own), Some(Backend::Rten)] {
            let export = Export::record(&layer, &x, forward).unwrap();
            let config = EngineConfig::new().with_backend(backend);
            let engine = config.compile(export).unwrap();
            assert_eq!(engine.report().fixed_batch, None);
            for batch in [3, 6, 1] {
                let x = tensor::<2>(2, [batch, 4], &target.device);
                close(engine.run(&x).unwrap(), forward(&layer, x));
            }
        }
    });
}
