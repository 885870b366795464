//! What a run refuses before any gradient is computed, and what its stages aim at.

use burn::tensor::{Device, Tensor};
use burn_lean::prune::{
    Budget, FisherConfig, Masks, PruneError, PruneReport, PrunerConfig, RidgeChoice, Selection,
    SolverConfig, SparsityPattern, SparsitySchedule,
};

use crate::pruner::{Pairs, config, loss, net, pairs, prune};
use crate::support::{Perceptron, each_device, tensor, values};

/// The error of a run whose loader must not be touched.
fn refused(config: PrunerConfig) -> PruneError {
    let device = Device::flex();
    let nothing = |_| -> Vec<Pairs> { unreachable!("the loader was asked for examples") };
    let rejected = config.prune(net(&device), loss, nothing);
    rejected.unwrap_err().into_error()
}

#[test]
fn a_bad_config_costs_no_gradients() {
    let with = |change: &dyn Fn(&mut PrunerConfig)| {
        let mut config = config(0.5);
        change(&mut config);
        refused(config)
    };
    let field = |change: &dyn Fn(&mut PrunerConfig)| match with(change) {
        PruneError::InvalidConfig { field, .. } => field,
        other => panic!("{other}"),
    };
    assert_matches!(refused(config(0.0)), PruneError::KeptCount { k: 40, .. });
    for k in [0, 40, 50] {
        let error = with(&|config| config.solver.budget = Budget::Keep(k));
        assert!(
            matches!(error, PruneError::KeptCount { k: found, .. } if found == k),
            "{error}"
        );
    }
    let targets = [("third.weight".to_string(), 0.5)];
    let error = with(&|config| {
        config.solver.budget = Budget::PerLayerTargets(targets.clone().into());
    });
    assert_matches!(error, PruneError::UnknownLayer { .. });
    let misspelt = [("secnd.weight".to_string(), 100.0)];
    let error = with(&|config| config.flops = Some(misspelt.clone().into()));
    assert_says!(error, "`secnd.weight`", "second.weight");
    let error = with(&|config| config.solver.pattern = SparsityPattern::NM { n: 1, m: 4 });
    assert_matches!(error, PruneError::PatternDoesNotDivide { .. });
    assert_eq!(field(&|c| c.ridge = RidgeChoice::Fixed(0.0)), "ridge");
    assert_eq!(field(&|c| c.ridge = RidgeChoice::over([])), "ridge");
    assert_eq!(
        field(&|c| c.ridge = RidgeChoice::over([1.0, -1.0])),
        "ridge"
    );
    assert_eq!(
        field(&|c| {
            c.ridge = RidgeChoice::sweep();
            c.held_out = 0;
        }),
        "held_out"
    );
    assert_eq!(field(&|c| c.solver.block_size = Some(0)), "block_size");
    assert_eq!(field(&|c| c.fisher.batch_size = 0), "batch_size");
    let error = with(&|config| config.fisher.memory_bound = 16 * 4 * 25);
    assert_matches!(error, PruneError::MemoryBound { .. });
}

/// A gradient would be no number either, and zero times the weight is none.
#[test]
fn a_weight_that_is_no_number_is_named_before_any_gradient() {
    each_device(|target| {
        // Of 30 and 10 weights; the check of a mask zeroes every second one.
        for (index, value) in [(32, f32::NAN), (33, f32::INFINITY)] {
            let net = net(&target.device);
            let selection = Selection::of(&net, None).unwrap();
            let mut weights = values(selection.flatten(&net).unwrap());
            weights[index] = value;
            let broken = Tensor::from_data(&weights[..], &target.device);
            let net = selection.unflatten(net, broken).unwrap();
            let all: Vec<usize> = (0..40).collect();
            let masks = Masks::from_support(selection.layout(), &all).unwrap();
            let masked = masks.attach(net.clone()).unwrap();
            let is_expected = |error: &PruneError| match error {
                PruneError::NonFiniteWeight {
                    path,
                    index: at,
                    value: found,
                } => {
                    let same = *found == value || found.is_nan() && value.is_nan();
                    path == "second.weight" && *at == index - 30 && same
                }
                _ => false,
            };
            for net in [net.clone(), masked] {
                let nothing = |_| -> Vec<Pairs> { unreachable!("the loader was asked") };
                let rejected = config(0.5).prune(net, loss, nothing).unwrap_err();
                assert!(is_expected(rejected.error()), "{}", rejected.error());
            }
            let fisher = FisherConfig::new(4);
            let batches = pairs(1, &target.device);
            let error = fisher.collect(&net, &selection, loss, batches);
            let error = error.unwrap_err();
            assert!(is_expected(&error), "{error}");
        }
    });
}

#[test]
fn a_first_stage_that_prunes_nothing_is_refused() {
    let staged = |schedule| config(0.8).with_stages(3).with_schedule(schedule);
    for schedule in [
        SparsitySchedule::Exponential { base: 0.0 },
        SparsitySchedule::Linear { base: 0.0 },
    ] {
        let error = refused(staged(schedule));
        assert_matches!(error, PruneError::KeptCount { k: 40, .. });
    }
}

/// ⌊(1 - 0.8)·40⌋ is 7 in F64.
#[test]
fn no_stage_keeps_fewer_than_the_last() {
    let mut config = config(0.0)
        .with_stages(3)
        .with_schedule(SparsitySchedule::Constant);
    config.solver.budget = Budget::Keep(8);
    let pruned = prune(&config, &Device::flex()).unwrap();
    let nonzeros: Vec<usize> = pruned.stages.iter().map(|stage| stage.nonzeros).collect();
    assert_eq!(nonzeros, [8, 8, 8]);
}

/// The first layer meets four positions of a sequence, the second one vector.
fn of_sequence(net: &Perceptron, x: &Tensor<3>) -> Tensor<1> {
    let x = net.first.forward(x.clone()).tanh().mean_dim(1);
    net.second.forward(x).square().mean()
}

#[test]
fn a_bound_on_operations_counts_those_of_the_model() {
    let device = Device::flex();
    let net = net(&device);
    let budget = Budget::Flops {
        kept: 0.3,
        sparsity: None,
    };
    let counted = PrunerConfig::new(SolverConfig::new(budget), FisherConfig::new(8))
        .with_ridge(RidgeChoice::Fixed(1e-2))
        .with_stages(2);
    let run = |config: &PrunerConfig| {
        let loader = |seed| [tensor::<3>(seed, [8, 4, 6], &device)];
        config.prune(net.clone(), of_sequence, loader).unwrap()
    };
    let pruned = run(&counted);
    let report = PruneReport::new(&pruned.model, &pruned.selection).unwrap();
    assert_eq!(report.dense_flops, 30.0 * 8.0 + 10.0 * 2.0);
    assert!(report.flops <= 0.3 * report.dense_flops, "{}", report.flops);
    // Nothing but the bound takes weights away, so it is used up.
    assert!(report.flops > 0.3 * report.dense_flops - 8.0);

    // What the config says is not counted.
    let costs = [
        ("first.weight".to_string(), 2.0),
        ("second.weight".to_string(), 100.0),
    ];
    let said = run(&counted.clone().with_flops(Some(costs.into())));
    assert_eq!(said.selection.layout().flops(), 30.0 * 2.0 + 10.0 * 100.0);
    assert!(said.masks.get("second.weight").unwrap().nonzeros() <= 3);

    let nan = counted.with_flops(Some([("first.weight".to_string(), f64::NAN)].into()));
    let nothing = |_| -> Vec<Tensor<3>> { unreachable!() };
    let error = nan.prune(net.clone(), of_sequence, nothing).unwrap_err();
    assert_matches!(
        error.error(),
        PruneError::InvalidConfig { field: "flops", .. }
    );
    // A loader without a batch to count on.
    let error = PrunerConfig { flops: None, ..nan }
        .prune(net, of_sequence, |_| Vec::<Tensor<3>>::new())
        .unwrap_err();
    assert_matches!(error.error(), PruneError::LoaderEnded { found: 0, .. });
}
