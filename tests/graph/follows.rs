//! What an execution has in common with the model's own pass: numbers, gradients, statistics.

use burn::module::{Lora, Module};
use burn::nn::{Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};
use burn_lean::graph::{AsRecorded, Tensors, Verified, record, record_with_backward};

use crate::models::{ConvNet, Decoder, Recurrent};
use crate::support::{
    Target, each_device, gradients, parameters, seeded, tensor, values, with_numbers,
};

/// Relative error of F32 sums in another order.
const ROUNDING: f32 = 1e-5;

/// Executes `loss` from a recording, and compares it with the model's own pass.
fn same_as_own<M: Module, I: Tensors + Clone>(
    target: &Target,
    build: impl Fn(&Device) -> M,
    input: impl Fn(&Device) -> I,
    loss: impl Fn(&M, I) -> Tensor<1>,
) {
    let device = target.device.clone().autodiff();
    let (own, other) = (build(&device), build(&device));
    let (own, other) = (with_numbers(own, 4), with_numbers(other, 4));
    let input = input(&device);
    let own_loss = loss(&own, input.clone());
    let recording = record_with_backward(&other, &input, |model, input| loss(model, input));
    let recording = recording.unwrap();
    assert_eq!(
        recording.verify_gradients(&other, &input).unwrap(),
        Verified::Same
    );
    let executed = recording.execute(&other, &input, &AsRecorded).unwrap();
    near(
        &values(own_loss.clone()),
        &values(executed.clone()),
        "the loss",
    );
    let of = |model: &M, loss: Tensor<1>| {
        gradients(model, GradientsParams::from_grads(loss.backward(), model))
    };
    let (expected, found) = (of(&own, own_loss), of(&other, executed));
    assert_eq!(expected.len(), found.len(), "parameters with a gradient");
    // Some gradients are zero but for rounding: a bias before a batch normalization.
    let size = expected.iter().flat_map(|(_, _, grad)| grad);
    let size = size.fold(1e-3f32, |most, x| most.max(x.abs()));
    for ((path, _, expected), (other, _, found)) in expected.iter().zip(&found) {
        assert_eq!(path, other);
        near_at(size, expected, found, path);
    }
    // Running statistics, too: they are parameters of the evaluated model.
    let (own, other) = (parameters(&own.valid()), parameters(&other.valid()));
    for (own, other) in own.iter().zip(&other) {
        near(&own.values, &other.values, &own.path);
    }
}

fn near(expected: &[f32], found: &[f32], what: &str) {
    let size = expected.iter().fold(1e-3f32, |most, x| most.max(x.abs()));
    near_at(size, expected, found, what);
}

fn near_at(size: f32, expected: &[f32], found: &[f32], what: &str) {
    assert_eq!(expected.len(), found.len(), "{what}");
    for (expected, found) in expected.iter().zip(found) {
        assert!(
            (expected - found).abs() <= ROUNDING * size,
            "{what}: {found} instead of {expected}"
        );
    }
}

#[test]
fn batch_normalization_in_training() {
    each_device(|target| {
        same_as_own(target, ConvNet::new, ConvNet::batch, |model, batch| {
            model.loss(batch)
        });
    });
}

#[test]
fn a_recurrent_network() {
    each_device(|target| {
        same_as_own(target, Recurrent::new, Recurrent::batch, |model, batch| {
            model.loss(batch)
        });
    });
}

#[test]
fn rotary_positions_attention_and_rms_norm() {
    each_device(|target| {
        same_as_own(target, Decoder::new, Recurrent::batch, |model, batch| {
            model.loss(batch)
        });
    });
}

#[test]
fn an_adapter_on_every_weight_gets_its_gradients() {
    each_device(|target| {
        same_as_own(
            target,
            |device| Recurrent::new(device).apply_reparameterization(Lora::new(2, 3.0)),
            Recurrent::batch,
            |model, batch| model.loss(batch),
        );
    });
}

#[test]
fn gradient_checkpointing() {
    let device = Device::flex().autodiff().gradient_checkpointing();
    let model = with_numbers(Decoder::new(&device), 4);
    let batch = Recurrent::batch(&device);
    let recording = record(&model, &batch, |model, batch| model.loss(batch)).unwrap();
    let executed = recording.execute(&model, &batch, &AsRecorded).unwrap();
    let of = |loss: Tensor<1>| {
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        gradients(&model, grads)
    };
    let (expected, found) = (of(model.loss(batch)), of(executed));
    for ((path, _, expected), (_, _, found)) in expected.iter().zip(&found) {
        near(expected, found, path);
    }
}

#[test]
fn evaluation_uses_running_statistics_and_changes_none() {
    each_device(|target| {
        let model = with_numbers(ConvNet::new(&target.device), 4);
        let before = parameters(&model);
        let (x, _) = ConvNet::batch(&target.device);
        let recording = record(&model, &x, |model, x| model.forward(x)).unwrap();
        let executed = recording.execute(&model, &x, &AsRecorded).unwrap();
        near(&values(model.forward(x)), &values(executed), "logits");
        assert_eq!(before, parameters(&model));
    });
}

#[test]
fn dropout_is_fresh_in_each_execution() {
    let device = Device::flex().autodiff();
    let model = with_numbers(ConvNet::with_dropout(0.5, &device), 4);
    let batch = ConvNet::batch(&device);
    let _guard = seeded(&device, 5);
    let recording = record(&model, &batch, |model, batch| model.loss(batch)).unwrap();
    let mut losses: Vec<f32> = (0..5)
        .map(|_| {
            let loss = recording.execute(&model, &batch, &AsRecorded).unwrap();
            loss.into_scalar::<f32>()
        })
        .collect();
    losses.sort_by(f32::total_cmp);
    losses.dedup();
    assert!(losses.len() > 1, "{losses:?}");
}

#[test]
fn verification_draws_no_random_numbers() {
    let device = Device::flex().autodiff();
    let model = with_numbers(ConvNet::with_dropout(0.5, &device), 4);
    let batch = ConvNet::batch(&device);
    let recording = record_with_backward(&model, &batch, |model, batch| model.loss(batch)).unwrap();
    let draw = |verify: bool| {
        let _guard = seeded(&device, 5);
        if verify {
            let verified = recording.verify_gradients(&model, &batch).unwrap();
            assert_eq!(verified, Verified::Same);
        }
        values(Tensor::<1>::random(
            [4],
            burn::tensor::Distribution::Default,
            &device,
        ))
    };
    assert_eq!(draw(false), draw(true));
}

#[test]
fn a_frozen_clone_with_the_same_identities_keeps_its_own_values() {
    let device = Device::flex().autodiff();
    let network: Linear = LinearConfig::new(3, 3).init(&device);
    let mut clone = network.clone().freeze();
    clone.weight = clone.weight.map(|weight| weight * 2.0);
    let model = (network, clone);
    let x = tensor::<2>(1, [2, 3], &device);
    let loss = |model: &(Linear, Linear), x: Tensor<2>| {
        (model.0.forward(x.clone()) - model.1.forward(x))
            .abs()
            .sum()
    };
    let recording = record(&model, &x, loss).unwrap();
    let executed = recording.execute(&model, &x, &AsRecorded).unwrap();
    near(&values(loss(&model, x)), &values(executed), "the distance");
}

#[test]
fn results_of_any_form_come_back_with_inputs_among_them() {
    let device = Device::flex();
    let model: Linear = LinearConfig::new(3, 2).init(&device);
    let x = tensor::<2>(1, [2, 3], &device);
    let recording = record(&model, &(x.clone(), 3usize), |model, (x, n)| {
        let y = model.forward(x.clone());
        (Some(x), vec![y.clone(), y.clone() * n as f32], y.argmax(1))
    })
    .unwrap();
    let (same, ys, classes) = recording
        .execute(&model, &(x.clone(), 3), &AsRecorded)
        .unwrap();
    assert_eq!(values(same.unwrap()), values(x.clone()));
    let y = model.forward(x);
    near(&values(y.clone()), &values(ys[0].clone()), "y");
    near(&values(y.clone() * 3.0), &values(ys[1].clone()), "3 y");
    assert_eq!(
        classes.into_data().iter::<i64>().collect::<Vec<_>>(),
        y.argmax(1).into_data().iter::<i64>().collect::<Vec<_>>()
    );
}

#[test]
fn any_number_of_recordings_in_a_process() {
    // Burn has 65,536 capture devices in a process.
    let device = Device::flex();
    let model: Linear = LinearConfig::new(1, 1).init(&device);
    let x = Tensor::<2>::ones([1, 1], &device);
    for _ in 0..70_000 {
        record(&model, &x, |model, x| model.forward(x)).unwrap();
    }
}

#[test]
fn two_threads_record_at_once() {
    std::thread::scope(|scope| {
        for seed in 0..2 {
            scope.spawn(move || {
                let device = Device::flex().autodiff();
                let model = with_numbers(Recurrent::new(&device), seed);
                let batch = Recurrent::batch(&device);
                for _ in 0..10 {
                    let recording = record(&model, &batch, |model, batch| model.loss(batch));
                    let executed = recording.unwrap().execute(&model, &batch, &AsRecorded);
                    let own = model.loss(batch.clone());
                    near(&values(own), &values(executed.unwrap()), "the loss");
                }
            });
        }
    });
}
