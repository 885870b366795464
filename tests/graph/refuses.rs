//! What a recording cannot follow is an error that says where.

use burn::module::{Module, RunningState};
use burn::nn::{BatchNorm, BatchNormConfig, DropoutConfig, Linear, LinearConfig};
use burn::tensor::activation::softmax;
use burn::tensor::{Device, Distribution, FloatDType, Int, Tensor, TensorData};
use burn_lean::graph::{AsRecorded, GraphError, Tensors, Verified, record, record_with_backward};

use crate::support::{each_device, on_tracked, tensor, values};

fn linear(device: &Device) -> Linear {
    LinearConfig::new(3, 3).init(device)
}

fn error<O: Tensors>(forward: impl FnOnce(&(Linear, Linear), Tensor<2>) -> O) -> GraphError {
    let device = Device::flex().autodiff();
    let model = (linear(&device), linear(&device));
    let x = tensor::<2>(1, [2, 3], &device);
    match record(&model, &x, forward) {
        Ok(_) => panic!("it was recorded"),
        Err(error) => error,
    }
}

#[test]
fn reading_a_value_is_refused_with_the_place() {
    let error = error(|model, x| {
        let y = model.0.forward(x);
        let y = model.1.forward(y);
        let mean = y.clone().mean().into_scalar::<f32>();
        y * mean
    });
    let GraphError::Forward { after, .. } = &error else {
        panic!("{error}")
    };
    assert_says!(after, "`mean`", "`1.");
    assert_says!(error, "into_scalar");
}

#[test]
fn what_the_closure_was_not_given_is_refused_with_what_to_do() {
    let device = Device::flex().autodiff();
    let weights = tensor::<2>(2, [2, 3], &device);
    let other = linear(&device);
    let errors = [
        error(|model, x| model.0.forward(x) * weights.clone()),
        error(|model, x| other.forward(model.0.forward(x))),
    ];
    for error in errors {
        assert_matches!(error, GraphError::Forward { .. });
        assert_says!(error, "pass tensors in its input");
    }
}

#[test]
fn a_backward_pass_inside_is_refused() {
    let error = error(|model, x| {
        let loss = model.0.forward(x).sum();
        let grads = loss.backward();
        model.0.weight.grad(&grads).unwrap()
    });
    assert_matches!(error, GraphError::Forward { .. });
}

#[test]
fn moving_to_a_device_is_refused() {
    let error = error(|model, x| {
        let x = x.to_device(&Device::flex());
        model.0.forward(x)
    });
    assert_matches!(error, GraphError::Forward { .. });
}

#[test]
fn a_tensor_off_the_tape_is_refused_in_training_and_goes_in_evaluation() {
    let forward = |model: &(Linear, Linear), x: Tensor<2>| {
        let target = model.1.forward(x.clone()).inner();
        model.0.forward(x) - Tensor::from_inner(target)
    };
    let error = error(forward);
    let GraphError::Forward { reason, after } = &error else {
        panic!("{error}")
    };
    assert_says!(reason, "do not support autodiff");
    assert_says!(after, "`1.");
    // `detach` is what a recording can follow.
    assert_says!(error, "`inner`");
    let detached = |model: &(Linear, Linear), x: Tensor<2>| {
        model.0.forward(x.clone()) - model.1.forward(x).detach()
    };
    for device in [Device::flex().autodiff(), Device::flex()] {
        let model = (linear(&device), linear(&device));
        let x = tensor::<2>(1, [2, 3], &device);
        assert!(record(&model, &x, detached).is_ok());
    }
    let model = (linear(&Device::flex()), linear(&Device::flex()));
    let x = tensor::<2>(1, [2, 3], &Device::flex());
    let off = |model: &(Linear, Linear), x: Tensor<2>| {
        model.0.forward(x.clone()) - model.1.forward(x).inner()
    };
    assert!(record(&model, &x, off).is_ok());
}

#[test]
fn a_batch_norm_that_is_called_twice_is_refused_and_of_both_views_at_once_goes() {
    let device = Device::flex().autodiff();
    let norm: BatchNorm = BatchNormConfig::new(3).init(&device);
    let views = [1, 2].map(|seed| tensor::<2>(seed, [2, 3], &device));
    let twice = record(&norm, &views, |norm, [a, b]| {
        norm.forward(a) + norm.forward(b)
    });
    let error = twice.map(|_| ()).unwrap_err();
    assert_matches!(error, GraphError::Forward { .. });
    assert_says!(error, "both batches joined");
    let once = record(&norm, &views, |norm, [a, b]| {
        let y = norm.forward(Tensor::cat(vec![a, b], 0));
        y.clone().slice([0..2]) + y.slice([2..4])
    });
    assert!(once.is_ok());
}

#[test]
fn a_tensor_from_outside_is_refused_in_an_operation() {
    let outside = tensor::<2>(2, [2, 3], &Device::flex().autodiff());
    let error = error(|model, x| model.0.forward(x) + outside);
    assert_matches!(error, GraphError::Forward { .. });
}

#[test]
fn a_tensor_from_outside_is_refused_as_a_result() {
    let outside = tensor::<2>(2, [2, 3], &Device::flex());
    let error = error(|model, x| (model.0.forward(x), outside));
    assert_eq!(error, GraphError::ForeignOutput { index: 1 });
}

#[test]
fn the_models_own_panic_is_told() {
    let error = error(|_, x| -> Tensor<2> { panic!("no batch of {:?}", x.dims()) });
    assert_says!(error, "no batch of [2, 3]");
}

#[test]
fn a_stopped_gradient_is_found_with_its_parameter() {
    let device = Device::flex().autodiff();
    let model = (linear(&device), linear(&device));
    let x = tensor::<2>(1, [2, 3], &device);
    let recording = record_with_backward(&model, &x, |model, x| {
        let target = model.1.forward(x.clone()).detach();
        let y = model.0.forward(x);
        (y - target).powi_scalar(2).mean()
    });
    let error = recording.unwrap().verify_gradients(&model, &x).unwrap_err();
    let GraphError::StopsGradients { parameter, error } = error else {
        panic!("{error}")
    };
    assert!(parameter.starts_with("1.") && error > 0.5, "{parameter}");
}

#[test]
fn a_stopped_gradient_behind_a_zero_weight_is_found() {
    let device = Device::flex().autodiff();
    let mut model = (linear(&device), linear(&device));
    model.1.weight = model.1.weight.map(|weight| {
        let zeros = weight.zeros_like();
        zeros.detach().require_grad()
    });
    let x = tensor::<2>(1, [2, 3], &device);
    let recording = record_with_backward(&model, &x, |model, x| {
        let h = model.0.forward(x);
        model.1.forward(h.clone() + h.detach()).sum()
    });
    let error = recording.unwrap().verify_gradients(&model, &x).unwrap_err();
    assert_matches!(error, GraphError::StopsGradients { .. });
}

/// The plain sum of such results is a constant, whatever their weights are.
#[test]
fn a_gradient_that_is_stopped_before_a_normalization_is_found() {
    on_tracked(|device| {
        let model = (linear(&device), BatchNormConfig::new(3).init(&device));
        let x = tensor::<2>(1, [8, 3], &device);
        type Model = (Linear, BatchNorm);
        let verified = |forward: fn(&Model, Tensor<2>) -> Tensor<2>| {
            let recording = record_with_backward(&model, &x, forward).unwrap();
            recording.verify_gradients(&model, &x)
        };
        for stopped in [
            |(linear, norm): &Model, x| norm.forward(linear.forward(x).detach()),
            |(linear, _): &Model, x| {
                let y = linear.forward(x);
                y.clone() + softmax(y.detach(), 1) * 50.0
            },
        ] {
            assert_matches!(verified(stopped), Err(GraphError::StopsGradients { .. }));
        }
        for whole in [
            |(linear, norm): &Model, x| norm.forward(linear.forward(x)),
            |(linear, _): &Model, x| softmax(linear.forward(x), 1),
        ] {
            assert_eq!(verified(whole).unwrap(), Verified::Same);
        }
    });
}

/// What the gradients are of a linear layer whose weights are all this number.
fn verified<O: Tensors>(
    weight: f32,
    forward: impl FnOnce(&Linear, Tensor<2>) -> O,
) -> Result<Verified, GraphError> {
    let device = Device::flex().autodiff();
    let mut model = linear(&device);
    model.weight = model.weight.map(|value| {
        let value = value.full_like(weight);
        value.detach().require_grad()
    });
    let x = tensor::<2>(1, [2, 3], &device);
    let recording = record_with_backward(&model, &x, forward).unwrap();
    recording.verify_gradients(&model, &x)
}

#[test]
fn a_stopped_gradient_of_a_small_positive_weight_is_found() {
    let error = verified(0.01, |model, _| {
        let log = model.weight.val().log();
        (log.clone() * log.detach()).sum()
    });
    let error = error.unwrap_err();
    assert_matches!(error, GraphError::StopsGradients { .. });
}

/// What only some examples have, and none of the first batch.
#[test]
fn a_stopped_gradient_behind_an_input_of_zeros_is_found() {
    let device = Device::flex().autodiff();
    let model = linear(&device);
    let x = tensor::<2>(1, [2, 3], &device);
    let forward = |model: &Linear, (x, mask): (Tensor<2>, Tensor<2>)| {
        let y = model.forward(x);
        let target = softmax(y.clone(), 1).detach();
        y.clone().square().mean() + (y * target * mask).mean()
    };
    let given = (x, Tensor::zeros([2, 1], &device));
    let recording = record_with_backward(&model, &given, forward).unwrap();
    let error = recording.verify_gradients(&model, &given).unwrap_err();
    assert_matches!(error, GraphError::StopsGradients { .. });
}

/// A loss of consistency: each view has a mask of its own.
#[test]
fn a_stopped_gradient_between_two_random_views_is_found() {
    on_tracked(|device| {
        let model = (linear(&device), DropoutConfig::new(0.5).init());
        let x = tensor::<2>(1, [32, 3], &device);
        let recording = record_with_backward(&model, &x, |(linear, dropout), x| {
            let view = |x: Tensor<2>| dropout.forward(linear.forward(x));
            let (seen, target) = (view(x.clone()), view(x).detach());
            (seen - target).square().mean()
        });
        let error = recording.unwrap().verify_gradients(&model, &x).unwrap_err();
        assert_matches!(error, GraphError::StopsGradients { .. });
    });
}

/// One for each example, or one for all: whole branches are left out.
#[test]
fn a_stopped_gradient_behind_a_random_mask_of_few_numbers_is_found() {
    for shape in [[1, 1], [2, 1]] {
        let error = verified(0.5, |model, x| {
            let y = model.forward(x);
            let keep = Tensor::<2>::random(shape, Distribution::Bernoulli(0.5), &y.device());
            y.clone().square().mean() + (y.clone() * y.detach() * keep).mean()
        });
        assert_matches!(error.unwrap_err(), GraphError::StopsGradients { .. });
    }
}

#[test]
fn gradients_that_are_not_finite_are_not_taken_for_the_same() {
    let found = verified(-1.0, |model, _| model.weight.val().sqrt().sum());
    assert_eq!(found, Ok(Verified::NotFinite));
}

#[test]
fn a_stopped_gradient_of_results_in_two_dtypes_is_found() {
    let error = verified(0.5, |model, x| {
        let y = model.forward(x);
        let product = y.clone() * y.detach();
        (product.clone(), product.cast(FloatDType::F16))
    });
    let error = error.unwrap_err();
    assert_matches!(error, GraphError::StopsGradients { .. });
}

#[test]
fn without_the_backward_pass_nothing_is_said_to_be_the_same() {
    let device = Device::flex().autodiff();
    let model = linear(&device);
    let x = tensor::<2>(1, [2, 3], &device);
    let forward = |model: &Linear, x: Tensor<2>| model.forward(x);
    let recording = record(&model, &x, forward).unwrap();
    let found = recording.verify_gradients(&model, &x);
    assert_eq!(found, Ok(Verified::NotRecorded));
    // Nothing has a gradient.
    let forward = |model: &Linear, x: Tensor<2>| model.forward(x).detach();
    let recording = record_with_backward(&model, &x, forward).unwrap();
    let found = recording.verify_gradients(&model, &x);
    assert_eq!(found, Ok(Verified::Same));
}

#[test]
fn a_running_state_from_outside_is_refused_with_its_path() {
    #[derive(Module, Debug)]
    struct Counted {
        layer: Linear,
        count: RunningState<Tensor<1>>,
    }
    let device = Device::flex().autodiff();
    let model = Counted {
        layer: linear(&device),
        count: RunningState::new(Tensor::zeros([1], &device)),
    };
    let x = tensor::<2>(1, [2, 3], &device);
    let outside = Tensor::<1>::ones([1], &device);
    let error = record(&model, &x, |model, x| {
        model.count.update(outside);
        model.layer.forward(x)
    });
    let GraphError::RunningState { path, .. } = error.unwrap_err() else {
        panic!("another error")
    };
    assert_eq!(path, "count");
}

#[test]
fn other_shapes_and_other_models_are_refused() {
    let device = Device::flex();
    let model = linear(&device);
    let x = tensor::<2>(1, [2, 3], &device);
    let recording = record(&model, &x, |model, x| model.forward(x)).unwrap();
    let more = tensor::<2>(1, [4, 3], &device);
    let error = recording.execute(&model, &more, &AsRecorded).unwrap_err();
    assert_says!(error, "[4, 3]");
    let other: Linear = LinearConfig::new(3, 5).init(&device);
    let error = recording.execute(&other, &x, &AsRecorded).unwrap_err();
    assert_says!(error, "`weight`");
}

#[test]
fn a_model_without_tensors_has_no_device() {
    #[derive(Module, Debug)]
    struct Nothing {}
    let error = record(&Nothing {}, &(), |_, ()| ())
        .map(|_| ())
        .unwrap_err();
    assert_eq!(error, GraphError::NoDevice);
}

#[test]
fn numbers_made_inside_are_those_of_the_recording() {
    let device = Device::flex();
    let model = linear(&device);
    let x = tensor::<2>(1, [2, 3], &device);
    let mut count = 0.0f32;
    let mut run = || {
        count += 1.0;
        let recording = record(&model, &x, |_, x| {
            Tensor::<1>::from_data(TensorData::from([count]), &x.device())
        })
        .unwrap();
        let value = || {
            let value = recording.execute(&model, &x, &AsRecorded).unwrap();
            value.into_scalar::<f32>()
        };
        (value(), value())
    };
    assert_eq!([run(), run()], [(1.0, 1.0), (2.0, 2.0)]);
}

/// A cache that the closure keeps for itself: its tensors are those of the first recording.
#[test]
fn a_state_that_an_earlier_pass_left_is_refused_with_what_to_do() {
    let device = Device::flex();
    let (model, x) = (linear(&device), tensor::<2>(1, [2, 3], &device));
    let mut kept: Option<Tensor<2>> = None;
    let mut step = |x: &Tensor<2>| {
        let recording = record(&model, x, |model, x| {
            let y = model.forward(x);
            let y = match kept.take() {
                Some(before) => y + before,
                None => y,
            };
            kept = Some(y.clone());
            y
        })?;
        recording.execute(&model, x, &AsRecorded)
    };
    step(&x).unwrap();
    assert_says!(step(&x).unwrap_err(), "goes in with the inputs");
    // With the inputs it is a state like any other.
    let mut kept = Tensor::<2>::zeros([2, 3], &device);
    for _ in 0..2 {
        let input = (x.clone(), kept);
        let recording = record(&model, &input, |model, (x, kept)| model.forward(x) + kept).unwrap();
        kept = recording.execute(&model, &input, &AsRecorded).unwrap();
    }
    let twice = model.forward(x) * 2.0;
    assert_eq!(kept.into_data(), twice.into_data());
}

#[test]
#[allow(deprecated)] // ndarray is supported as long as Burn has it.
fn tensors_of_several_devices_are_refused_by_name() {
    let (here, there) = (Device::flex().autodiff(), Device::ndarray().autodiff());
    let x = tensor::<2>(1, [2, 3], &here);
    let run = |model: &(Linear, BatchNorm), x: Tensor<2>, unread: Tensor<2>| {
        let input = (x, unread);
        let forward = |model: &(Linear, BatchNorm), (x, _): (Tensor<2>, Tensor<2>)| {
            model.1.forward(model.0.forward(x)).mean()
        };
        let recording = record_with_backward(model, &input, forward)?;
        recording.verify_gradients(model, &input)?;
        recording.execute(model, &input, &AsRecorded)
    };
    let model = || (linear(&here), BatchNormConfig::new(3).init(&here));
    let elsewhere = |result: Result<Tensor<1>, GraphError>| match result {
        Err(GraphError::SeveralDevices {
            what,
            found,
            device,
        }) => {
            assert!(
                found.contains("NdArray") && device.contains("Flex"),
                "{found} {device}"
            );
            what
        }
        result => panic!("{result:?}"),
    };
    let moved = x.clone().to_device(&there);
    assert!(run(&model(), x.clone(), x.clone()).is_ok());
    // What nobody reads may be anywhere.
    assert!(run(&model(), x.clone(), moved.clone()).is_ok());
    let what = elsewhere(run(&model(), moved, x.clone()));
    assert_eq!(what, "tensor 0 of the input");
    let mut split = model();
    split.1 = split.1.fork(&there);
    assert_eq!(elsewhere(run(&split, x.clone(), x.clone())), "`1.gamma`");
    // Burn's clones share running statistics.
    let copied = model();
    let _copy = copied.clone().fork(&there);
    assert_says!(elsewhere(run(&copied, x.clone(), x.clone())), "running_");
}

/// Nothing but rounding is left of them, in one order in the recording and in another in the model.
#[test]
fn gradients_that_are_zero_but_for_rounding_are_no_stopped_ones() {
    use FloatDType::{BF16, F16, F32, F64};
    each_device(|target| {
        // Not every function of a shader has each dtype that its device has.
        let has = |dtype: FloatDType| {
            dtype == F32 || !target.is_gpu() && target.device.supports_dtype(dtype)
        };
        let device = target.device.clone().autodiff();
        for dtype in [F32, F64, F16, BF16]
            .into_iter()
            .filter(|dtype| has(*dtype))
        {
            let mut model = linear(&device);
            let as_leaf = |value: Tensor<2>| value.cast(dtype).detach().require_grad();
            model.weight = model.weight.map(as_leaf);
            let bias = model.bias.take().unwrap();
            model.bias = Some(bias.map(|value| value.cast(dtype).detach().require_grad()));
            let x = tensor::<2>(1, [5, 3], &device).cast(dtype);
            let verified = |forward: fn(&Linear, Tensor<2>) -> Tensor<1>| {
                let recording = record_with_backward(&model, &x, forward).unwrap();
                recording.verify_gradients(&model, &x)
            };
            // Sums of a softmax are 1, whatever goes in; so are norms of what is normalized.
            let whole: [fn(&Linear, Tensor<2>) -> Tensor<1>; 2] = [
                |model, x| softmax(model.forward(x) * 30.0, 1).sum(),
                |model, x| {
                    let y = model.forward(x);
                    let norm = y.clone().powi_scalar(2).sum_dim(1).sqrt();
                    (y / norm).powi_scalar(2).sum()
                },
            ];
            for forward in whole {
                assert_eq!(verified(forward), Ok(Verified::Same), "{dtype:?}");
            }
            let error = verified(|model, x| {
                let y = model.forward(x);
                let norm = y.clone().powi_scalar(2).sum_dim(1).sqrt().detach();
                (y / norm).powi_scalar(2).sum()
            });
            let error = error.unwrap_err();
            assert_matches!(error, GraphError::StopsGradients { .. });
        }
    });
}

#[test]
fn one_hot_says_what_gives_the_same() {
    let device = Device::flex().autodiff();
    let model = linear(&device);
    let x = tensor::<2>(1, [2, 3], &device);
    let labels = Tensor::<1, Int>::from_ints([2, 0], &device);
    let loss =
        |model: &Linear, x: Tensor<2>, targets: Tensor<2>| (model.forward(x) * targets).sum();
    let input = (x, labels);
    let error = record(
        &model,
        &input,
        |model: &Linear, (x, labels): (Tensor<2>, Tensor<1, Int>)| {
            loss(model, x, labels.one_hot::<2>(3).float())
        },
    );
    let error = error.unwrap_err().to_string();
    assert_says!(error, "`one_hot`");
    let recording = record(
        &model,
        &input,
        |model: &Linear, (x, labels): (Tensor<2>, Tensor<1, Int>)| {
            let classes = Tensor::<1, Int>::arange(0..3, &labels.device()).unsqueeze();
            loss(
                model,
                x,
                labels.unsqueeze_dim::<2>(1).equal(classes).float(),
            )
        },
    );
    let found = recording
        .unwrap()
        .execute(&model, &input, &AsRecorded)
        .unwrap();
    let (x, labels) = input;
    let expected = loss(&model, x, labels.one_hot::<2>(3).float());
    assert_eq!(values(found), values(expected));
}

/// Whose size says nothing of how it is stepped along.
#[test]
fn a_stopped_gradient_that_is_small_beside_others_is_found() {
    on_tracked(|device| {
        let model = (linear(&device), linear(&device));
        for size in [1.0, 1e2, 1e5] {
            let x = tensor::<2>(1, [5, 3], &device) * size;
            let recording = record_with_backward(&model, &x, |(large, small), x| {
                let y = small.forward(x.clone() / size);
                let gate = y.clone() * y.detach();
                large.forward(x).powi_scalar(2).mean() + gate.powi_scalar(2).mean()
            });
            let error = recording.unwrap().verify_gradients(&model, &x).unwrap_err();
            let GraphError::StopsGradients { parameter, error } = error else {
                panic!("{error}")
            };
            assert!(
                parameter.starts_with("1.") && error > 0.5,
                "{parameter}, {error}"
            );
        }
    });
}
