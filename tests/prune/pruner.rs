//! Pruning a model in one stage and in several.

use burn::module::{Module, ParamGroup};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::activation::relu;
use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_lean::prune::{
    Budget, FisherConfig, Masks, Method, PruneError, Pruned, PrunerConfig, RidgeChoice, Selection,
    SolverConfig, SparsityPattern, SparsitySchedule, mean_loss, model::ExcludedBecause,
    run::StageReport,
};
use burn_lean::reparam::Rejected;

use crate::support::{
    Perceptron, cast, each_device, on_each, parameters, tensor, values, with_numbers,
};

pub(crate) type Pairs = (Tensor<2>, Tensor<2>);

pub(crate) fn net(device: &Device) -> Perceptron {
    Perceptron::new([6, 5, 2], 1, device)
}

pub(crate) fn loss(net: &Perceptron, (x, y): &Pairs) -> Tensor<1> {
    (net.forward(x.clone()) - y.clone()).square().mean()
}

/// Random inputs with the outputs of the untouched net and some noise.
pub(crate) fn pairs(seed: u64, device: &Device) -> Vec<Pairs> {
    let x = tensor::<2>(seed, [16, 6], device);
    let y = net(device).forward(x.clone()) + tensor::<2>(seed + 1, [16, 2], device) * 0.1;
    vec![(x, y.detach())]
}

pub(crate) fn config(sparsity: f64) -> PrunerConfig {
    PrunerConfig::new(
        SolverConfig::new(Budget::Sparsity(sparsity)),
        FisherConfig::new(16),
    )
    .with_ridge(RidgeChoice::Fixed(1e-2))
}

pub(crate) fn prune(
    config: &PrunerConfig,
    device: &Device,
) -> Result<Pruned<Perceptron>, PruneError> {
    let pruned = config.prune(net(device), loss, |seed| pairs(seed, device))?;
    Ok(pruned)
}

pub(crate) fn weights(pruned: &Pruned<Perceptron>) -> Vec<f32> {
    values(pruned.selection.flatten(&pruned.model).unwrap())
}

pub(crate) fn zeros(weights: &[f32]) -> usize {
    weights.iter().filter(|weight| **weight == 0.0).count()
}

#[test]
fn the_model_has_the_zeros_that_the_masks_say_on_every_device() {
    each_device(|target| {
        for device in [target.device.clone(), target.device.clone().autodiff()] {
            let pruned = prune(&config(0.75), &device).unwrap();
            let weights = weights(&pruned);
            // ⌊0.25 · 40⌋ are kept.
            assert_eq!((zeros(&weights), pruned.masks.nonzeros()), (30, 10));
            let kept: Vec<bool> = pruned
                .masks
                .parameters()
                .iter()
                .flat_map(|mask| mask.kept())
                .copied()
                .collect();
            for (weight, kept) in weights.iter().zip(kept) {
                assert_eq!(*weight != 0.0, kept);
            }
            // Biases are those of the dense model.
            let dense = parameters(&net(&device));
            let now = parameters(&pruned.model);
            assert_eq!(dense[1], now[1]);
            assert_eq!(now[0].trains, dense[0].trains);
        }
    });
}

#[test]
fn every_method_prunes_through_the_same_interface() {
    let device = Device::flex();
    let dense = weights_of(&net(&device));
    for method in [
        Method::Random,
        Method::Magnitude,
        Method::DiagonalFisher,
        Method::WoodFisher { block_size: 8 },
        Method::BackSolve,
    ] {
        let mut config = config(0.5);
        config.solver.method = method.clone();
        let pruned = prune(&config, &device).unwrap();
        assert_eq!(zeros(&weights(&pruned)), 20, "{method:?}");
        if method == Method::Magnitude {
            let moved = weights(&pruned);
            assert!(
                moved
                    .iter()
                    .zip(&dense)
                    .all(|(new, old)| *new == 0.0 || new == old)
            );
        }
    }
}

fn weights_of(net: &Perceptron) -> Vec<f32> {
    values(Selection::of(net, None).unwrap().flatten(net).unwrap())
}

#[test]
fn a_half_model_is_pruned_in_stages() {
    let device = Device::flex();
    for dtype in [FloatDType::F16, FloatDType::BF16] {
        let config = config(0.8)
            .with_stages(2)
            .with_schedule(SparsitySchedule::Linear { base: 0.4 });
        let net = cast(net(&device), dtype);
        let loss = |net: &Perceptron, x: &Tensor<2>| net.forward(x.clone()).square().mean();
        let batches = |seed| [tensor::<2>(seed, [16, 6], &device).cast(dtype)];
        let pruned = config.prune(net, loss, batches).unwrap();
        // ⌊(1 - 0.8) · 40⌋ are 7 in F64.
        assert_eq!(zeros(&weights(&pruned)), 33);
        let weight = pruned.model.first.weight.val();
        assert_eq!(weight.dtype(), DType::from(dtype));
    }
}

#[test]
fn the_objective_is_that_of_the_last_stage_and_targets_follow_the_schedule() {
    let device = Device::flex();
    let config = config(0.8)
        .with_stages(3)
        .with_schedule(SparsitySchedule::Linear { base: 0.4 });
    let pruned = prune(&config, &device).unwrap();
    let stages: Vec<(f64, usize)> = pruned
        .stages
        .iter()
        .map(|stage| (stage.target, stage.nonzeros))
        .collect();
    // k = ⌊(1 - s) · 40⌋ in F64: 0.4 + (0.8 - 0.4) / 2 is a little above 0.6, 1 - 0.8 below 0.2.
    assert_eq!(stages, [(0.4, 24), (0.4 + 0.4 / 2.0, 15), (0.8, 7)]);
    assert_eq!(zeros(&weights(&pruned)), 33);
    let last = &pruned.stages[2];
    assert_eq!(last.objective, last.terms.total());
    // With the gradient of the loss from the first stage on.
    assert_ne!(pruned.stages[0].terms.linear, 0.0);
}

#[test]
fn zeros_stay_zero() {
    let device = Device::flex();
    let mut masks: Vec<Masks> = Vec::new();
    let config = config(0.7)
        .with_stages(6)
        .with_schedule(SparsitySchedule::Constant);
    config
        .prune_with(
            net(&device),
            loss,
            |seed| pairs(seed, &device),
            |model, mask, _| {
                masks.push(mask.clone());
                Ok(model)
            },
        )
        .unwrap();
    let kept = |masks: &Masks| -> Vec<bool> {
        let masks = masks.parameters().iter();
        masks.flat_map(|mask| mask.kept().to_vec()).collect()
    };
    for pair in masks.windows(2) {
        let mut both = kept(&pair[0]).into_iter().zip(kept(&pair[1]));
        assert!(both.all(|(before, after)| before || !after));
    }
}

#[test]
fn the_same_seed_gives_the_same_model_and_the_loader_gets_one_seed_per_stage() {
    let device = Device::flex();
    let config = config(0.6).with_stages(3).with_seed(40);
    let mut seeds = Vec::new();
    let mut run = || {
        let loader = |seed| {
            seeds.push(seed);
            pairs(seed, &device)
        };
        let pruned = config.prune(net(&device), loss, loader).unwrap();
        weights(&pruned)
    };
    let once = run();
    assert_eq!(once, run());
    assert_eq!(seeds, [40, 41, 42, 40, 41, 42]);
}

#[test]
fn an_interrupted_run_goes_on_after_its_last_finished_stage() {
    let device = Device::flex();
    let folder = tempfile::tempdir().unwrap();
    let config = config(0.8)
        .with_stages(4)
        .with_state(Some(folder.path().join("run")));
    let whole = weights(&prune(&config.clone().with_state(None), &device).unwrap());

    // The power goes off in the third stage.
    let mut stages = 0;
    let interrupted = config.prune_with(
        net(&device),
        loss,
        |seed| pairs(seed, &device),
        |model, _, _| {
            stages += 1;
            match stages {
                3 => Err(Rejected::new(
                    model,
                    PruneError::Training {
                        reason: "power".into(),
                    },
                )),
                _ => Ok(model),
            }
        },
    );
    assert_matches!(
        interrupted.unwrap_err().into_error(),
        PruneError::Training { .. }
    );
    let mut seeds = Vec::new();
    let resumed = config
        .prune(net(&device), loss, |seed| {
            seeds.push(seed);
            pairs(seed, &device)
        })
        .unwrap();
    assert_eq!(seeds, [2, 3]);
    assert_eq!(resumed.stages.len(), 4);
    assert_eq!(weights(&resumed), whole);
    // A finished run is not run again, whoever looks on.
    let mut config = config;
    config.fisher = config.fisher.with_progress(false);
    let again = config.prune(net(&device), loss, |_| -> Vec<Pairs> { unreachable!() });
    assert_eq!(weights(&again.unwrap()), whole);
}

#[test]
fn stages_of_another_run_or_damaged_ones_are_refused() {
    let device = Device::flex();
    let folder = tempfile::tempdir().unwrap();
    let config = config(0.8)
        .with_stages(2)
        .with_state(Some(folder.path().into()));
    prune(&config, &device).unwrap();
    match prune(&config.clone().with_ridge(RidgeChoice::Fixed(0.5)), &device) {
        Err(PruneError::StagesOfAnotherRun { field, .. }) => assert_eq!(field, "ridge"),
        other => panic!("{:?}", other.map(|_| ())),
    }
    // Another digit, and it is still JSON: other masks, or another report.
    let stage = folder.path().join("stage-1").join("stage.json");
    let intact = std::fs::read(&stage).unwrap();
    let masks = intact
        .windows(7)
        .position(|part| part == b"\"masks\"")
        .unwrap();
    let digits = (masks..intact.len()).filter(|at| intact[*at].is_ascii_digit());
    for at in digits.step_by(3).take(40) {
        let mut changed = intact.clone();
        changed[at] = b'0' + (changed[at] - b'0' + 1) % 10;
        std::fs::write(&stage, changed).unwrap();
        match prune(&config, &device) {
            Err(PruneError::Record { reason, .. }) => {
                assert_says!(reason, "checksum of stage.json");
            }
            other => panic!("{:?}", other.map(|_| ())),
        }
    }
    std::fs::write(&stage, intact).unwrap();
    prune(&config, &device).unwrap();
    let model = folder.path().join("stage-1").join("model.bpk");
    let mut bytes = std::fs::read(&model).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(&model, bytes).unwrap();
    match prune(&config, &device) {
        Err(PruneError::Record { reason, .. }) => assert_says!(reason, "checksum"),
        other => panic!("{:?}", other.map(|_| ())),
    }
    std::fs::remove_file(&model).unwrap();
    assert_matches!(
        prune(&config, &device).map(|_| ()),
        Err(PruneError::Io {
            action: "cannot read",
            ..
        })
    );
}

#[test]
fn patterns_and_budgets_reach_the_solver_in_every_stage() {
    let device = Device::flex();
    let mut patterned = config(0.0).with_stages(2);
    patterned.solver.budget = Budget::Pattern;
    patterned.solver.pattern = SparsityPattern::NM { n: 1, m: 2 };
    // Of the five inputs of the second layer no pairs can be made: it is left out, unless it is named.
    let pruned = prune(&patterned, &device).unwrap();
    assert_eq!(zeros(&weights(&pruned)), 15);
    assert_eq!(pruned.selection.layout().layers()[0].path, "first.weight");
    let excluded = &pruned.selection.parameters()[2];
    let because = ExcludedBecause::PatternDoesNotDivide {
        pattern: "1:2".into(),
        axis: 0,
        length: 5,
    };
    assert_eq!(
        (&*excluded.path, &excluded.excluded),
        ("second.weight", &Some(because))
    );
    assert!(
        pruned
            .selection
            .to_string()
            .contains("1:2 does not divide the 5 of axis 0")
    );
    patterned.group = Some(ParamGroup::from_predicate("weight"));
    assert_matches!(
        prune(&patterned, &device).map(|_| ()),
        Err(PruneError::PatternDoesNotDivide { .. })
    );
    patterned.group = None;
    patterned.solver.pattern = SparsityPattern::NM { n: 1, m: 4 };
    assert_matches!(
        prune(&patterned, &device).map(|_| ()),
        Err(PruneError::PatternDoesNotDivide { .. })
    );

    for budget in [
        Budget::Keep(8),
        Budget::PerLayer(0.8),
        Budget::PerLayerTargets([("first.weight".to_string(), 0.9)].into()),
        Budget::Flops {
            kept: 0.2,
            sparsity: None,
        },
    ] {
        let mut config = config(0.0)
            .with_stages(3)
            .with_schedule(SparsitySchedule::Linear { base: 0.2 });
        config.solver.budget = budget.clone();
        let mut kept: Vec<Vec<usize>> = Vec::new();
        let mut targets = Vec::new();
        let look = |model, masks: &Masks, report: &StageReport| {
            targets.push(report.target);
            kept.push(
                masks
                    .parameters()
                    .iter()
                    .map(|mask| mask.nonzeros())
                    .collect(),
            );
            Ok(model)
        };
        let loader = |seed| pairs(seed, &device);
        let pruned = config.prune_with(net(&device), loss, loader, look);
        pruned.unwrap();
        let totals: Vec<usize> = kept.iter().map(|kept| kept.iter().sum()).collect();
        // Of all 40 weights; those of the named layer are 30.
        let expected = match budget {
            Budget::PerLayerTargets(_) => [0.2, 0.55, 0.9].map(|target| target * 30.0 / 40.0),
            _ => [0.2, 0.5, 0.8],
        };
        for (found, expected) in targets.iter().zip(expected) {
            assert!((found - expected).abs() < 1e-12, "{budget:?}: {targets:?}");
        }
        match budget {
            // ⌊0.8 · 30⌋, ⌊0.5 · 30⌋, ⌊0.2 · 30⌋ in F64, and the same of 10.
            Budget::PerLayer(_) => assert_eq!(kept, [[24, 8], [15, 5], [5, 1]]),
            // The named one goes from 0.2 to 0.9 in the same steps.
            Budget::PerLayerTargets(_) => assert_eq!(kept, [[24, 10], [13, 10], [2, 10]]),
            _ => assert_eq!(totals, [32, 20, 8], "{budget:?}"),
        }
    }
}

#[test]
fn a_first_convolution_of_three_channels_is_left_out_of_a_pattern_of_four() {
    #[derive(Module, Debug)]
    struct Images {
        first: Conv2d,
        second: Conv2d,
        head: Linear,
    }
    let conv = |channels| Conv2dConfig::new(channels, [2, 2]).init(&Device::flex());
    let net = Images {
        first: conv([3, 4]),
        second: conv([4, 4]),
        head: LinearConfig::new(4, 2).init(&Device::flex()),
    };
    let loss = |net: &Images, (x, y): &(Tensor<4>, Tensor<2>)| {
        let x = net.second.forward(relu(net.first.forward(x.clone())));
        let x = relu(x).mean_dim(2).mean_dim(3).flatten(1, 3);
        (net.head.forward(x) - y.clone()).square().mean()
    };
    on_each(|device| {
        let batch = (tensor(3, [16, 3, 4, 4], device), tensor(4, [16, 2], device));
        let mut config = config(0.0).with_stages(2);
        config.solver.budget = Budget::Pattern;
        config.solver.pattern = SparsityPattern::NM { n: 2, m: 4 };
        let net = with_numbers(net.clone().to_device(device), 1);
        let pruned = config.prune(net.clone(), loss, |_| [batch.clone()]);
        let pruned = pruned.unwrap();
        let layers = pruned.selection.layout().layers().iter();
        let paths: Vec<&str> = layers.map(|layer| &*layer.path).collect();
        assert_eq!(paths, ["second.weight", "head.weight"]);
        let excluded = pruned.selection.parameters().iter();
        let excluded = excluded.filter_map(|parameter| parameter.excluded.as_ref());
        let reasons: Vec<String> = excluded.map(ToString::to_string).collect();
        let reason = "2:4 does not divide the 3 of axis 1".to_string();
        assert!(reasons.contains(&reason), "{reasons:?}");
        // All of it is there, and of the others half of each four input channels.
        assert_eq!(
            values(pruned.model.first.weight.val()),
            values(net.first.weight.val())
        );
        let second = pruned.model.second.weight.val().equal_elem(0.0).int();
        assert_eq!(values(second.sum_dim(1).float()), [2.0; 4 * 2 * 2]);
        let head = pruned.model.head.weight.val().equal_elem(0.0).int();
        assert_eq!(values(head.sum_dim(0).float()), [2.0; 2]);
    });
}

#[test]
fn bad_configs_give_the_model_back() {
    let device = Device::flex();
    let refused = |config: PrunerConfig| {
        let rejected = config
            .prune(net(&device), loss, |seed| pairs(seed, &device))
            .unwrap_err();
        let (model, error) = rejected.into_parts();
        assert_eq!(weights_of(&model), weights_of(&net(&device)));
        error
    };
    assert_eq!(refused(config(1.0)), PruneError::Sparsity { sparsity: 1.0 });
    assert_matches!(refused(config(0.99)), PruneError::KeptCount { k: 0, .. });
    assert_matches!(refused(config(0.0)), PruneError::KeptCount { k: 40, .. });
    assert_matches!(
        refused(config(0.5).with_ridge(RidgeChoice::Fixed(0.0))),
        PruneError::InvalidConfig { field: "ridge", .. }
    );
    assert_matches!(
        refused(config(0.5).with_stages(0)),
        PruneError::InvalidConfig {
            field: "stages",
            ..
        }
    );
    let nothing = config(0.5).with_group(Some(ParamGroup::from_path("none")));
    assert_says!(refused(nothing), "(not in the parameter group)");
    let mut long = config(0.5);
    long.fisher.samples = 17;
    assert_matches!(refused(long), PruneError::LoaderEnded { found: 16, .. });
}

#[test]
fn masks_that_a_model_carries_hold_while_it_is_pruned_further() {
    let device = Device::flex().autodiff();
    let first = prune(&config(0.5), &device).unwrap();
    let masked = first.masks.attach(first.model).unwrap();
    let further = config(0.75)
        .prune(masked, loss, |seed| pairs(seed, &device))
        .unwrap();
    for (before, after) in first
        .masks
        .parameters()
        .iter()
        .zip(further.masks.parameters())
    {
        let pairs = before.kept().iter().zip(after.kept());
        assert!(pairs.into_iter().all(|(before, after)| *before || !after));
    }
    let model = further.masks.replace(further.model).unwrap();
    assert_eq!(Masks::of(&model).unwrap(), further.masks);
}

#[test]
fn of_several_stages_the_judge_says_whether_the_gradient_counts() {
    let device = Device::flex();
    let mut sweep = config(0.6)
        .with_stages(2)
        .with_ridge(RidgeChoice::over([1e-3, 1e-1]));
    sweep.fisher.samples = 8;
    for (first_order, factors) in [
        (None, vec![None, None, Some(0.0), Some(0.0)]),
        (Some(true), vec![None, None]),
        (Some(false), vec![None, None]),
    ] {
        let pruned = prune(&sweep.clone().with_first_order(first_order), &device).unwrap();
        for stage in &pruned.stages {
            let judged = stage.ridges.iter().map(|judged| judged.ridge.first_order);
            assert_eq!(judged.collect::<Vec<_>>(), factors);
        }
    }
}

#[test]
fn the_ridge_is_the_one_that_held_out_examples_like_best() {
    let device = Device::flex();
    let mut sweep = config(0.6).with_ridge(RidgeChoice::over([1e-3, 1e-1, 10.0]));
    // Eight for the gradients, eight to judge.
    sweep.fisher.samples = 8;
    let pruned = prune(&sweep, &device).unwrap();
    let stage = &pruned.stages[0];
    assert_eq!(stage.ridges.len(), 3);
    let losses = stage.ridges.iter().map(|judged| judged.loss);
    let best = losses.fold(f64::INFINITY, f64::min);
    let chosen = stage
        .ridges
        .iter()
        .find(|judged| judged.ridge == stage.ridge);
    assert_eq!(chosen.unwrap().loss, best);
    let (x, y) = pairs(0, &device).remove(0);
    let held_out = [(x.slice([8..16]), y.slice([8..16]))];
    let loss = mean_loss(&pruned.model, loss, &held_out).unwrap();
    assert_eq!(loss, best);

    sweep.fisher.samples = 16;
    assert_matches!(
        prune(&sweep, &device).map(|_| ()),
        Err(PruneError::NoHeldOut)
    );
}
