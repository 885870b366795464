//! What an execution has in common with the model's own pass: numbers, gradients, statistics.

use std::collections::HashMap;

use burn::module::{Lora, Module, RunningState};
use burn::nn::{BatchNorm, BatchNormConfig, Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::activation::{log_softmax, quiet_softmax, softmax, softmin};
use burn::tensor::module::batch_norm;
use burn::tensor::{Device, Int, Tensor};
use burn_lean::graph::hooks::stop_gradient;
use burn_lean::graph::{AsRecorded, Tensors, Verified, record, record_with_backward};

use crate::models::{ConvNet, Decoder, Recurrent};
use crate::support::{
    Target, each_device, gradients, on_tracked, parameters, seeded, tensor, values, with_numbers,
};
use crate::walk::{near, near_at};

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
    same_states(&own, &other);
}

/// Parameters and running states, which are parameters of the evaluated model.
fn same_states<M: Module>(own: &M, other: &M) {
    let (own, other) = (parameters(&own.valid()), parameters(&other.valid()));
    for (own, other) in own.iter().zip(&other) {
        near(&own.values, &other.values, &own.path);
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
fn batch_normalization_in_training_is_one_operation() {
    let device = Device::flex().autodiff();
    let model = ConvNet::new(&device);
    let batch = ConvNet::batch(&device);
    let recording = record(&model, &batch, |model, batch| model.loss(batch)).unwrap();
    let nodes = recording.graph().nodes();
    let norms = nodes.filter(|node| node.name() == "batch_norm_train");
    assert_eq!(norms.count(), 2);
}

#[test]
fn a_frozen_batch_normalization_keeps_its_statistics_and_the_next_gets_its_own() {
    on_tracked(|device| {
        let build = || {
            let norm = || BatchNormConfig::new(8).init(&device);
            with_numbers((norm().freeze(), norm()), 4)
        };
        let (own, other) = (build(), build());
        let x = tensor::<2>(1, [6, 8], &device);
        let forward =
            |norms: &(BatchNorm, BatchNorm), x: Tensor<2>| norms.1.forward(norms.0.forward(x));
        let recording = record(&other, &x, forward).unwrap();
        for _ in 0..2 {
            let y = recording.execute(&other, &x, &AsRecorded).unwrap();
            near(&values(forward(&own, x.clone())), &values(y), "y");
        }
        same_states(&own, &other);
        assert_eq!(parameters(&other.0), parameters(&build().0));
    });
}

/// A layer whose results are centered by what it has seen.
#[derive(Module, Debug)]
struct Centered {
    layer: Linear,
    /// A constant of the module, which no visitor sees.
    scale: Tensor<1>,
    center: RunningState<Tensor<1>>,
    /// The mean of the last batch: its next value does not depend on it.
    last: RunningState<Tensor<1>>,
}

impl Centered {
    fn new(device: &Device) -> Self {
        Self {
            layer: LinearConfig::new(4, 3).init(device),
            scale: Tensor::from_floats([1.0, 2.0, 3.0], device),
            center: RunningState::new(Tensor::zeros([3], device)),
            last: RunningState::new(Tensor::ones([3], device)),
        }
    }

    fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        let y = self.layer.forward(x) * self.scale.clone().unsqueeze::<2>();
        let mean = y.clone().detach().mean_dim(0).reshape([3]);
        let center = self.center.value_sync();
        self.center
            .update(center.clone() * 0.9 + mean.clone() * 0.1);
        self.last.update(mean);
        (y - center.unsqueeze::<2>()).square().mean()
    }
}

#[test]
fn running_states_of_any_name_move() {
    each_device(|target| {
        let batch = |device: &Device| tensor::<2>(1, [5, 4], device);
        same_as_own(target, Centered::new, batch, |model, x| model.loss(x));
    });
}

#[test]
fn a_kept_recording_goes_on_from_passes_without_one() {
    on_tracked(|device| {
        let build = || with_numbers(BatchNormConfig::new(4).init(&device), 4);
        let (own, other) = (build(), build());
        let x = |seed| tensor::<2>(seed, [6, 4], &device);
        let recording = record(&other, &x(1), |norm, x| norm.forward(x)).unwrap();
        for seed in 2..5 {
            let _ = own.forward(x(seed));
            match seed {
                3 => drop(recording.execute(&other, &x(seed), &AsRecorded).unwrap()),
                _ => drop(other.forward(x(seed))),
            }
        }
        same_states(&own, &other);
    });
}

#[test]
fn batch_normalization_by_other_statistics_is_not_by_those_of_the_batch() {
    each_device(|target| {
        let norm = with_numbers(BatchNormConfig::new(4).init(&target.device), 4);
        let x = tensor::<2>(1, [6, 4], &target.device);
        let forward = |norm: &BatchNorm, x: Tensor<2>| {
            let mean = norm.running_mean.value() + 0.5;
            let variance = norm.running_var.value() * 2.0;
            let (gamma, beta) = (norm.gamma.val(), norm.beta.val());
            batch_norm(x, gamma, beta, mean, variance, norm.epsilon)
        };
        let recording = record(&norm, &x, forward).unwrap();
        let executed = recording.execute(&norm, &x, &AsRecorded).unwrap();
        near(&values(forward(&norm, x)), &values(executed), "y");
    });
}

#[test]
fn a_part_in_evaluation_stays_in_it() {
    on_tracked(|device| {
        let student = with_numbers(ConvNet::new(&device), 4);
        let teacher = with_numbers(ConvNet::with_dropout(0.5, &device), 5).valid();
        let model = (student, teacher);
        let before = parameters(&model.1);
        let (x, _) = ConvNet::batch(&device);
        let forward = |model: &(ConvNet, ConvNet), x: Tensor<4>| {
            (model.0.forward(x.clone()), model.1.forward(x))
        };
        let recording = record_with_backward(&model, &x, forward).unwrap();
        let verified = recording.verify_gradients(&model, &x).unwrap();
        assert_eq!(verified, Verified::Same);
        let (student, teacher) = recording.execute(&model, &x, &AsRecorded).unwrap();
        let own = forward(&model, x);
        near(&values(own.0), &values(student), "in training");
        near(&values(own.1), &values(teacher), "in evaluation");
        assert_eq!(before, parameters(&model.1));
    });
}

/// Tokens, so that no input says whether it trains.
#[derive(Module, Debug)]
struct Normed {
    embedding: Embedding,
    norm: BatchNorm,
}

impl Normed {
    fn new(device: &Device) -> Self {
        Self {
            embedding: EmbeddingConfig::new(7, 5).init(device),
            norm: BatchNormConfig::new(6).init(device),
        }
    }

    fn loss(&self, tokens: Tensor<2, Int>) -> Tensor<1> {
        let y = self.norm.forward(self.embedding.forward(tokens));
        y.powi_scalar(3).mean()
    }
}

#[test]
fn a_model_whose_first_part_is_in_evaluation_trains() {
    each_device(|target| {
        let build = |device: &Device| (Normed::new(device).valid(), Normed::new(device));
        let batch = |device: &Device| Recurrent::batch(device).0;
        same_as_own(target, build, batch, |model, tokens| model.1.loss(tokens));
    });
}

#[test]
fn a_result_that_is_detached_has_no_gradient() {
    on_tracked(|device| {
        let linear = || LinearConfig::new(3, 3).init(&device);
        let model: (Linear, Linear) = (linear(), linear());
        let x = tensor::<2>(1, [2, 3], &device);
        let forward = |model: &(Linear, Linear), x: Tensor<2>| {
            let (y, z) = (model.0.forward(x.clone()), model.1.forward(x));
            (y, z.detach() * 2.0)
        };
        let recording = record_with_backward(&model, &x, forward).unwrap();
        let verified = recording.verify_gradients(&model, &x).unwrap();
        assert_eq!(verified, Verified::Same);
        let (y, z) = recording.execute(&model, &x, &AsRecorded).unwrap();
        assert!(y.is_tracked());
        assert!(!z.is_tracked());
        near(&values(forward(&model, x).1), &values(z), "z");
    });
}

#[test]
fn the_entries_of_a_map_are_taken_by_their_keys() {
    let device = Device::flex();
    let model: Linear = LinearConfig::new(3, 3).init(&device);
    let given = || -> HashMap<&'static str, Tensor<2>> {
        let x = |seed| tensor::<2>(seed, [2, 3], &device);
        HashMap::from([("x", x(1)), ("y", x(2)), ("z", x(3))])
    };
    let forward = |model: &Linear, given: HashMap<&'static str, Tensor<2>>| {
        let of = |key: &str| given[key].clone();
        model.forward(of("x") - of("y") * 2.0 + of("z") * 3.0)
    };
    let recording = record(&model, &given(), forward).unwrap();
    let expected = values(forward(&model, given()));
    // Each map has an order of its own.
    for _ in 0..10 {
        let executed = recording.execute(&model, &given(), &AsRecorded).unwrap();
        near(&expected, &values(executed), "y");
    }
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
    let _guard = seeded(&device, 5);
    let draw = |verify: bool| {
        device.seed(5);
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
    // Other tests of the process draw from the same generator, one in between now and then: what
    // verification draws itself would be missing each time.
    assert!((0..20).any(|_| draw(false) == draw(true)));
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

#[test]
fn no_gradient_goes_through_what_a_softmax_subtracts() {
    type Way = fn(Tensor<2>) -> Tensor<2>;
    let ways: [(&str, Way); 5] = [
        ("softmax", |x| softmax(x, 1)),
        ("softmax of columns", |x| softmax(x, 0)),
        ("softmin", |x| softmin(x, 1)),
        ("log_softmax", |x| log_softmax(x, 1)),
        ("quiet_softmax", |x| quiet_softmax(x, 1)),
    ];
    on_tracked(|device| {
        let model: Linear = LinearConfig::new(5, 6).init(&device);
        let model = with_numbers(model, 4);
        let weights = tensor::<2>(7, [3, 6], &device);
        for magnitude in [1.0, 10.0, 100.0, 1000.0, 30_000.0] {
            let x = tensor::<2>(5, [3, 5], &device) * magnitude;
            for (name, way) in ways {
                let of = |loss: Tensor<1>| {
                    gradients(&model, GradientsParams::from_grads(loss.backward(), &model))
                };
                let input = (x.clone(), weights.clone());
                let loss = |model: &Linear, (x, w): (Tensor<2>, Tensor<2>)| {
                    (way(model.forward(x)) * w).sum()
                };
                let own = of(loss(&model, input.clone()));
                let recording = record_with_backward(&model, &input, loss).unwrap();
                let executed = of(recording.execute(&model, &input, &AsRecorded).unwrap());
                // Bit by bit: one that did go through it is zero but for rounding.
                assert_eq!(own, executed, "{name} at {magnitude}");
            }
        }
    });
}

/// A straight-through estimator, a target of the model's own, and a factor that counts as a constant.
#[test]
fn gradients_stop_where_the_pass_says_so() {
    each_device(|target| {
        same_as_own(
            target,
            |device| LinearConfig::new(4, 3).init(device),
            |device| tensor::<2>(1, [5, 4], device),
            |model: &Linear, x| {
                let y = model.forward(x.clone());
                let through = y.clone() + stop_gradient(y.clone().round() - y.clone());
                let target = stop_gradient(model.forward(x * 0.5));
                let off = (through - target).powi_scalar(2).mean();
                off + (y.clone() * stop_gradient(y)).sum()
            },
        );
    });
}

#[test]
fn nothing_is_left_of_a_stop_in_an_evaluation() {
    let device = Device::flex();
    let model: Linear = LinearConfig::new(4, 3).init(&device);
    let x = tensor::<2>(1, [5, 4], &device);
    let plain = record(&model, &x, |model, x| model.forward(x)).unwrap();
    let stopped = record(&model, &x, |model, x| stop_gradient(model.forward(x))).unwrap();
    assert_eq!(stopped.graph().nodes().len(), plain.graph().nodes().len());
}
