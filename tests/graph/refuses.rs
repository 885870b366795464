//! What a recording cannot follow is an error that says where.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor, TensorData};
use burn_lean::graph::{AsRecorded, GraphError, Tensors, record, record_with_backward};

use crate::support::tensor;

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
    assert!(after.contains("`mean`") && after.contains("`1."), "{after}");
    assert!(error.to_string().contains("into_scalar"), "{error}");
}

#[test]
fn a_backward_pass_inside_is_refused() {
    let error = error(|model, x| {
        let loss = model.0.forward(x).sum();
        let grads = loss.backward();
        model.0.weight.grad(&grads).unwrap()
    });
    assert!(matches!(error, GraphError::Forward { .. }), "{error}");
}

#[test]
fn moving_to_a_device_is_refused() {
    let error = error(|model, x| {
        let x = x.to_device(&Device::flex());
        model.0.forward(x)
    });
    assert!(matches!(error, GraphError::Forward { .. }), "{error}");
}

#[test]
fn a_tensor_from_outside_is_refused_in_an_operation() {
    let outside = tensor::<2>(2, [2, 3], &Device::flex().autodiff());
    let error = error(|model, x| model.0.forward(x) + outside);
    assert!(matches!(error, GraphError::Forward { .. }), "{error}");
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
    assert!(error.to_string().contains("no batch of [2, 3]"), "{error}");
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
    assert!(
        matches!(error, GraphError::StopsGradients { .. }),
        "{error}"
    );
}

#[test]
fn other_shapes_and_other_models_are_refused() {
    let device = Device::flex();
    let model = linear(&device);
    let x = tensor::<2>(1, [2, 3], &device);
    let recording = record(&model, &x, |model, x| model.forward(x)).unwrap();
    let more = tensor::<2>(1, [4, 3], &device);
    let error = recording.execute(&model, &more, &AsRecorded).unwrap_err();
    assert!(error.to_string().contains("[4, 3]"), "{error}");
    let other: Linear = LinearConfig::new(3, 5).init(&device);
    let error = recording.execute(&other, &x, &AsRecorded).unwrap_err();
    assert!(error.to_string().contains("`weight`"), "{error}");
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
