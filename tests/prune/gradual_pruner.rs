//! Gradual pruning from inputs: by magnitude and layer by layer, with training between the stages.

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{Device, Tensor};
use burn_lean::prune::{
    Budget, Effort, GradualConfig, GradualPruner, Masks, PruneError, Pruner, Selection,
    SparsityPattern, SparsitySchedule, StageMethod,
    layerwise::{Candidate, Refitted, SupportMethod},
    masks::ParameterMask,
    recompute_batch_norm,
    run::{Epoch, GradualPruned, StageTraining},
};
use burn_lean::reparam::{Rejected, attached};

use crate::pruner::{self, config, pairs};
use crate::support::{Perceptron, on_each, on_tracked, tensor, values, with_numbers};

/// 16 × 12 + 12 × 4 = 240 weights.
fn net(device: &Device) -> Perceptron {
    Perceptron::new([16, 12, 4], 5, device)
}

fn inputs(seed: u64, device: &Device) -> Vec<Tensor<2>> {
    let of = |seed| tensor::<2>(seed, [64, 16], device);
    vec![of(10 * seed), of(10 * seed + 1)]
}

/// To ½, 11/16 and ⅞ of 240.
fn gradual(method: StageMethod, epochs: usize, last_epochs: usize) -> GradualPruner {
    let mut gradual = GradualPruner::new(Budget::Sparsity(0.875), 3, epochs, last_epochs);
    gradual.method = method;
    gradual.schedule = SparsitySchedule::Linear { base: 0.5 };
    gradual
}

fn run(
    gradual: &GradualPruner,
    net: Perceptron,
    train: impl FnMut(Perceptron, &Epoch) -> Result<Perceptron, Rejected<Perceptron, PruneError>>,
) -> Result<GradualPruned<Perceptron>, Rejected<Perceptron, PruneError>> {
    let device = net.devices().remove(0).inner();
    let loader = |seed| inputs(seed, &device);
    gradual.prune(net, |net, x: Tensor<2>| net.forward(x), loader, train)
}

/// One step of SGD towards what the dense net says.
fn towards(dense: &Perceptron, net: Perceptron, rate: f64, seed: u64) -> Perceptron {
    let device = net.devices().remove(0);
    let x = tensor::<2>(1000 + seed, [64, 16], &device);
    let target = Tensor::from_inner(dense.forward(x.clone().without_autodiff()));
    let loss = (net.forward(x) - target).square().mean();
    let grads = GradientsParams::from_grads(loss.backward(), &net);
    SgdConfig::new().init().step(rate, net, grads)
}

fn distance(dense: &Perceptron, net: &Perceptron) -> f32 {
    let x = tensor::<2>(7, [256, 16], &dense.devices().remove(0));
    let error = net.valid().forward(x.clone()) - dense.forward(x);
    error.square().mean().into_scalar()
}

#[test]
fn by_magnitude_the_largest_weights_of_each_stage_stay_as_they_are() {
    on_tracked(|device| {
        let dense = net(&device);
        let pruned = run(
            &gradual(StageMethod::Magnitude, 0, 0),
            dense.clone(),
            |_, _| unreachable!("there are no epochs"),
        )
        .unwrap();
        let nonzeros: Vec<usize> = pruned.stages.iter().map(|stage| stage.nonzeros).collect();
        assert_eq!(nonzeros, [120, 75, 30]);
        // Without training, three stages by magnitude are one.
        let selection = Selection::of(&dense, None).unwrap();
        let (pattern, budget) = (SparsityPattern::Unstructured, Budget::Sparsity(0.875));
        let masks = Masks::by_magnitude(&dense, &selection, &pattern, &budget).unwrap();
        assert_eq!(pruned.masks, masks);
        let expected = masks.attach(dense.clone()).unwrap().materialize();
        assert_eq!(pruned.model.weights(), expected.weights());
        assert_eq!(values(pruned.model.first.bias.as_ref().unwrap().val()), {
            values(dense.first.bias.as_ref().unwrap().val())
        });
        for stage in &pruned.stages {
            let report = &stage.report;
            assert_eq!(report.chosen, Candidate::Magnitude);
            assert_eq!((report.candidates.len(), report.tuning_steps), (1, 0));
            assert!(report.layers.iter().all(|l| l.refitted == Refitted::Dense));
        }
    });
}

#[test]
fn training_between_the_stages_holds_the_zeros_and_brings_the_net_back() {
    on_tracked(|device| {
        for method in [StageMethod::Magnitude, StageMethod::Layerwise] {
            let dense = net(&device).valid();
            let mut zeros = Vec::new();
            let mut seed = 0;
            let trained = run(&gradual(method, 8, 16), net(&device), |net, epoch| {
                seed += 1;
                let net = towards(&dense, net, epoch.learning_rate(0.5), seed);
                zeros.push(net.zeros());
                Ok(net)
            })
            .unwrap();
            let expected = [[120; 8].as_slice(), &[165; 8], &[210; 16]].concat();
            // A layer may be fitted with zeros among what it keeps.
            let held = zeros
                .iter()
                .zip(&expected)
                .all(|(zeros, least)| match method {
                    StageMethod::Magnitude => zeros == least,
                    _ => zeros >= least,
                });
            assert!(
                held && zeros.len() == expected.len(),
                "{method:?}: {zeros:?}"
            );
            assert_eq!(trained.masks.nonzeros(), 30);
            assert!(attached(&trained.model).is_empty());
            assert!(trained.model.first.weight.is_require_grad());
            let bare = run(&gradual(method, 0, 0), net(&device), |net, _| Ok(net)).unwrap();
            let (trained, bare) = (
                distance(&dense, &trained.model),
                distance(&dense, &bare.model),
            );
            assert!(trained < bare, "{method:?}: {trained} {bare}");
        }
    });
}

#[test]
fn one_stage_layer_by_layer_is_the_pruner() {
    on_each(|device| {
        let mut gradual = GradualPruner::new(Budget::Sparsity(0.8), 1, 0, 0);
        gradual.method = StageMethod::Layerwise;
        gradual.seed = 3;
        let staged = run(&gradual, net(device), |net, _| Ok(net)).unwrap();
        let mut pruner = Pruner::new(Budget::Sparsity(0.8));
        pruner.tuning = Some(0);
        let forward = |net: &Perceptron, x: Tensor<2>| net.forward(x);
        let alone = pruner
            .prune(net(device), forward, inputs(3, device))
            .unwrap();
        assert_eq!(staged.model.weights(), alone.model.weights());
        assert_eq!(staged.masks, alone.masks);
        let divergence =
            |report: &burn_lean::prune::layerwise::LayerwiseReport| report.candidates[0].divergence;
        assert_eq!(
            divergence(&staged.stages[0].report),
            divergence(&alone.report)
        );
    });
}

#[derive(Module, Debug)]
struct Normed {
    conv: Conv2d,
    norm: BatchNorm,
}

impl Normed {
    fn new(device: &Device) -> Self {
        let net = Self {
            conv: Conv2dConfig::new([2, 6], [3, 3]).init(device),
            norm: BatchNormConfig::new(6).init(device),
        };
        with_numbers(net, 4)
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        self.norm.forward(self.conv.forward(x))
    }
}

#[test]
fn statistics_of_every_stage_are_those_of_its_pruned_weights() {
    on_each(|device| {
        let batches = |seed: u64| [tensor::<4>(seed, [8, 2, 5, 5], device)];
        let recalibrated = |net: Normed, seed| {
            let look = |net: &Normed, x: &Tensor<4>| net.forward(x.clone());
            recompute_batch_norm(net, look, batches(seed)).unwrap()
        };
        for recalibrate in [true, false] {
            let mut gradual = GradualPruner::new(Budget::Sparsity(0.75), 2, 1, 1);
            gradual.method = StageMethod::Magnitude;
            gradual.pruner.recalibrate = recalibrate;
            let dense = Normed::new(device);
            let mut seen = Vec::new();
            gradual
                .prune(
                    dense.clone(),
                    |net, x: Tensor<4>| net.forward(x),
                    batches,
                    |net, epoch| {
                        seen.push((
                            values(net.norm.running_mean.value_sync()),
                            match recalibrate {
                                true => recalibrated(net.clone().materialize(), epoch.stage as u64),
                                false => dense.clone(),
                            },
                        ));
                        Ok(net)
                    },
                )
                .unwrap();
            assert_eq!(seen.len(), 2);
            for (found, expected) in seen {
                let expected = values(expected.norm.running_mean.value_sync());
                // Means of numbers of order one, summed in another order.
                assert_near!(found.iter(), expected, 1e-4);
            }
        }
    });
}

#[test]
fn the_training_of_a_stage_comes_at_once_where_it_is_asked_for() {
    let device = Device::flex();
    let gradual = gradual(StageMethod::Magnitude, 0, 4);
    let mut seen = Vec::new();
    let train = |net: Perceptron, training: &StageTraining| {
        let rates = [0.0, 0.5, 1.0].map(|progress| training.learning_rate(progress));
        seen.push((training.stage, training.stages, training.epochs, rates));
        Ok(net)
    };
    let forward = |net: &Perceptron, x: Tensor<2>| net.forward(x);
    let loader = |seed| inputs(seed, &device);
    gradual
        .prune_by_stage(net(&device), forward, loader, train)
        .unwrap();
    let [(stage, stages, epochs, rates)] = seen[..] else {
        panic!("{seen:?}");
    };
    assert_eq!((stage, stages, epochs), (2, 3, 4));
    assert_near!(rates.into_iter(), [0.1, 0.5 * (0.1 + 1e-5), 1e-5], 1e-12);
}

#[test]
fn from_gradients_the_stages_are_the_same_at_once_and_epoch_by_epoch() {
    let device = Device::flex().autodiff();
    let pruner = config(0.8)
        .with_stages(2)
        .with_schedule(SparsitySchedule::Linear { base: 0.4 });
    let gradual = GradualConfig::new(pruner, 2, 3);
    let step = |model: Perceptron, rate: f64| {
        let grads = pruner::loss(&model, &pairs(7, &device)[0]).backward();
        let grads = GradientsParams::from_grads(grads, &model);
        SgdConfig::new().init().step(rate, model, grads)
    };
    let start = || pruner::net(&device);
    let loader = |seed| pairs(seed, &device);
    let by_epoch = gradual.prune(start(), pruner::loss, loader, |model, epoch| {
        Ok(step(model, epoch.learning_rate(0.0)))
    });
    let by_stage = gradual.prune_by_stage(start(), pruner::loss, loader, |mut model, training| {
        for epoch in 0..training.epochs {
            let progress = epoch as f64 / training.epochs as f64;
            model = step(model, training.learning_rate(progress));
        }
        Ok(model)
    });
    let (by_epoch, by_stage) = (by_epoch.unwrap(), by_stage.unwrap());
    assert_eq!(pruner::weights(&by_epoch), pruner::weights(&by_stage));
    assert_eq!(by_epoch.masks, by_stage.masks);
}

#[test]
fn what_cannot_be_done_is_refused_with_the_model() {
    let device = Device::flex();
    let refused = |gradual: &GradualPruner, net: Perceptron| {
        let rejected = run(gradual, net, |_, _| unreachable!("refused before training"));
        rejected.unwrap_err().into_parts()
    };
    let dense = net(&device);
    let with = |change: &dyn Fn(&mut GradualPruner)| {
        let mut gradual = gradual(StageMethod::Layerwise, 1, 1);
        change(&mut gradual);
        let (net, error) = refused(&gradual, net(&device));
        assert_eq!(net.weights(), dense.weights());
        error
    };
    for rate in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let error = with(&|gradual| gradual.last_learning_rate = rate);
        let expected = "last_learning_rate";
        assert!(
            matches!(error, PruneError::InvalidConfig { field, .. } if field == expected),
            "{error}"
        );
    }
    let error = with(&|gradual| gradual.stages = 0);
    assert_matches!(
        error,
        PruneError::InvalidConfig {
            field: "stages",
            ..
        }
    );
    // A pattern is there or not, whatever the schedule says.
    let error = with(&|gradual| {
        gradual.stages = 0;
        gradual.pruner.budget = Budget::All;
    });
    assert_matches!(
        error,
        PruneError::InvalidConfig {
            field: "stages",
            ..
        }
    );
    let error = with(&|gradual| gradual.pruner.budget = Budget::Sparsity(1.0));
    assert_eq!(error, PruneError::Sparsity { sparsity: 1.0 });

    let all = Masks::keeping_all(Selection::of(&dense, None).unwrap().layout());
    let masked = all.attach(net(&device)).unwrap();
    let (net, error) = refused(&gradual(StageMethod::Magnitude, 1, 1), masked);
    assert_eq!(
        error,
        PruneError::CarriesReparameterization {
            path: "first.weight".into(),
            name: "mask".into()
        }
    );
    assert_eq!(attached(&net).len(), 2);
}

#[test]
fn training_that_fails_gives_its_model_back_with_the_masks() {
    let device = Device::flex();
    let rejected = run(
        &gradual(StageMethod::Layerwise, 1, 1),
        net(&device),
        |net, epoch| match epoch.stage {
            1 => Err(PruneError::training(net, "x")),
            _ => Ok(net),
        },
    );
    let (net, error) = rejected.unwrap_err().into_parts();
    assert_eq!(error, PruneError::Training { reason: "x".into() });
    assert_eq!(Masks::of(&net).unwrap().nonzeros(), 75);
}

#[test]
fn a_budget_of_half_or_less_is_pruned_to_at_once() {
    let schedule = |sparsity| GradualPruner::new(Budget::Sparsity(sparsity), 3, 1, 1).schedule;
    assert_eq!(schedule(0.5), SparsitySchedule::Constant);
    assert_eq!(schedule(0.9), SparsitySchedule::Polynomial { base: 0.5 });
    assert_eq!(
        GradualPruner::new(Budget::Sparsity(0.9), 3, 1, 1)
            .pruner
            .tuning,
        Some(0)
    );
}

#[test]
fn a_run_that_was_killed_goes_on_after_the_newest_finished_stage_with_the_same_numbers() {
    on_tracked(|device| {
        let dense = net(&device).valid();
        for method in [StageMethod::Magnitude, StageMethod::Layerwise] {
            // Training that depends on the model and the epoch alone.
            let step = |net: Perceptron, epoch: &Epoch| {
                let seed = (10 * epoch.stage + epoch.epoch) as u64;
                towards(&dense, net, epoch.learning_rate(0.5), seed)
            };
            let whole = run(&gradual(method, 2, 2), net(&device), |net, epoch| {
                Ok(step(net, epoch))
            })
            .unwrap();
            let folder = tempfile::tempdir().unwrap();
            let mut kept = gradual(method, 2, 2);
            kept.state = Some(folder.path().join("stages"));
            let rejected = run(&kept, net(&device), |net, epoch| {
                match (epoch.stage, epoch.epoch) {
                    (1, 1) => Err(PruneError::training(net, "killed")),
                    _ => Ok(step(net, epoch)),
                }
            });
            assert!(rejected.is_err());
            let mut seen = Vec::new();
            let resumed = run(&kept, net(&device), |net, epoch| {
                seen.push((epoch.stage, epoch.epoch));
                Ok(step(net, epoch))
            })
            .unwrap();
            assert_eq!(seen, [(1, 0), (1, 1), (2, 0), (2, 1)], "{method:?}");
            assert_eq!(resumed.model.weights(), whole.model.weights(), "{method:?}");
            assert_eq!(resumed.masks, whole.masks);
            assert_eq!(resumed.stages.len(), 3);
            // A finished run answers at once, whatever trains.
            let again = run(&kept, net(&device), |_, _| unreachable!("nothing is left"));
            let again = again.unwrap();
            assert_eq!(again.model.weights(), whole.model.weights());
            assert!(again.model.first.weight.is_require_grad());
            // Not for another run.
            kept.last_epochs = 3;
            let error = run(&kept, net(&device), |net, _| Ok(net)).unwrap_err();
            let other = matches!(
                error.error(),
                PruneError::StagesOfAnotherRun { field, .. } if field == "last_epochs"
            );
            assert!(other, "{error}");
        }
    });
}

#[test]
fn settings_read_back_from_json() {
    let mut gradual = GradualPruner::new(Budget::Sparsity(0.875), 3, 2, 4);
    gradual.method = StageMethod::Layerwise;
    gradual.schedule = SparsitySchedule::Constant;
    gradual.pruner = Pruner::new(Budget::Sparsity(0.875)).with_effort(Effort::Quick);
    gradual.pruner.support = Some(SupportMethod::Wanda);
    gradual.pruner.spill = Some("activations".into());
    let json = serde_json::to_value(&gradual).unwrap();
    let read: GradualPruner = serde_json::from_value(json.clone()).unwrap();
    assert_eq!(serde_json::to_value(&read).unwrap(), json);
    assert_eq!((read.stages, read.epochs, read.last_epochs), (3, 2, 4));
    assert_eq!(read.method, StageMethod::Layerwise);
    assert_eq!(read.pruner.effort, Effort::Quick);
    assert_eq!(read.pruner.support, Some(SupportMethod::Wanda));
    // What is no setting of a run is as by default.
    assert!(read.pruner.progress && read.pruner.spill.is_none());
    // A misspelt one would be as by default, too, and nobody told.
    let text = json.to_string();
    for (name, wrong) in [
        ("\"tuning\"", "tunning"),
        ("\"support\"", "suport"),
        ("\"seed\"", "sed"),
    ] {
        let misspelt = text.replace(name, &format!("\"{wrong}\""));
        let error = serde_json::from_str::<GradualPruner>(&misspelt).unwrap_err();
        assert_says!(error, wrong);
    }
    let flops = r#"{"flops": {"kept": 0.5, "sparcity": 0.9}}"#;
    let error = serde_json::from_str::<Budget>(flops).unwrap_err();
    assert_says!(error, "sparcity");
    assert_eq!(read.state, None);
}

/// Pruned weights would grow again, and the report would still speak of zeros.
#[test]
fn a_model_that_comes_back_without_its_masks_is_refused_with_it() {
    let device = Device::flex().autodiff();
    let folded = |net: Perceptron| Ok(net.valid().materialize().train());
    let refused = run(
        &gradual(StageMethod::Magnitude, 0, 1),
        net(&device),
        |net, _| folded(net),
    );
    let (model, error) = refused.unwrap_err().into_parts();
    assert_matches!(error, PruneError::MasksLost { stage: 2, .. });
    assert!(attached(&model).is_empty());

    let (net, folded) = (pruner::net(&device), |net: Perceptron| {
        Ok(net.valid().materialize().train())
    });
    let config = GradualConfig::new(config(0.875).with_stages(2), 1, 1);
    let refused = config.prune(
        net,
        pruner::loss,
        |_| pairs(1, &device),
        |net, _| folded(net),
    );
    let error = refused.unwrap_err().into_error();
    assert_matches!(error, PruneError::MasksLost { stage: 0, .. });
}

/// As a checkpoint brings them that was saved before its stage was pruned anew.
#[test]
fn a_model_that_comes_back_with_other_masks_is_refused_with_it() {
    let device = Device::flex().autodiff();
    let others = |net: &Perceptron| {
        let masks = Masks::of(net).unwrap();
        let masks = masks.parameters().iter().map(|mask| {
            let kept = mask.kept().iter().map(|kept| !kept).collect();
            ParameterMask::new(mask.path(), mask.shape(), kept).unwrap()
        });
        Masks::new(masks.collect()).unwrap()
    };
    let refused = run(
        &gradual(StageMethod::Magnitude, 0, 1),
        net(&device),
        |net, _| others(&net).replace(net),
    );
    let (model, error) = refused.unwrap_err().into_parts();
    let expected = PruneError::MasksLost {
        path: "first.weight".into(),
        stage: 2,
    };
    assert_eq!(error, expected);
    // Those that it came back with: all but 30.
    assert_eq!(Masks::of(&model).unwrap().nonzeros(), 210);

    let config = GradualConfig::new(config(0.875).with_stages(2), 1, 1);
    let refused = config.prune(
        pruner::net(&device),
        pruner::loss,
        |_| pairs(1, &device),
        |net, _| others(&net).replace(net),
    );
    let error = refused.unwrap_err().into_error();
    assert_matches!(error, PruneError::MasksLost { stage: 0, .. });
}
