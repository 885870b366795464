//! Random budgets, patterns, methods and problems.

use burn::module::Module;
use burn::tensor::{Device, Tensor};
use burn_lean::layerwise::{self, Gram, Keep, LayerProblem, ProblemConfig, Pull};
use burn_lean::prune::{
    Budget, ChitaConfig, DeadColumns, Effort, FisherConfig, GradientMatrix, Groups, LayerKind,
    Layout, Masks, Method, Problem, Pruner, PrunerConfig, Ridge, RidgeChoice, Shares, SolverConfig,
    SparseRecord, SparsityPattern, SparsitySchedule, layerwise::SupportMethod, solve,
};
use proptest::prelude::*;

use crate::cases::{Tally, cases};
use crate::hostile::{Kind, kind, length};
use crate::network::Net;
use crate::support::{parameters, values};

fn share() -> impl Strategy<Value = f64> {
    prop_oneof![
        18 => 0.0f64..1.0,
        1 => Just(0.0),
        1 => Just(1.0),
        1 => Just(-0.5),
        1 => Just(f64::NAN),
        1 => Just(1.0 - 1e-17),
        1 => Just(f64::INFINITY),
    ]
}

fn budget() -> impl Strategy<Value = Budget> {
    prop_oneof![
        4 => share().prop_map(Budget::Sparsity),
        2 => (0usize..100).prop_map(Budget::Keep),
        2 => share().prop_map(Budget::PerLayer),
        1 => share().prop_map(|share| Budget::PerLayerTargets([("a".to_string(), share)].into())),
        2 => (share(), proptest::option::of(share()))
            .prop_map(|(kept, sparsity)| Budget::Flops { kept, sparsity }),
        2 => Just(Budget::Pattern),
    ]
}

fn pattern() -> impl Strategy<Value = SparsityPattern> {
    let groups = prop_oneof![
        Just(Groups::Outputs),
        Just(Groups::Inputs),
        (0usize..5).prop_map(Groups::Heads),
    ];
    prop_oneof![
        8 => Just(SparsityPattern::Unstructured),
        2 => (0usize..5, 0usize..6).prop_map(|(n, m)| SparsityPattern::NM { n, m }),
        2 => groups.prop_map(SparsityPattern::Groups),
    ]
}

fn method() -> impl Strategy<Value = Method> {
    let chita = (0.5f64..4.0, 0usize..5, 0usize..5).prop_map(|(expansion, stages, splices)| {
        let chita = ChitaConfig::new()
            .with_expansion(expansion)
            .with_stages(stages)
            .with_max_splices(splices);
        Method::Chita(chita)
    });
    prop_oneof![
        1 => Just(Method::Random),
        1 => Just(Method::Magnitude),
        1 => Just(Method::DiagonalFisher),
        1 => (0usize..60).prop_map(|block_size| Method::WoodFisher { block_size }),
        1 => Just(Method::BackSolve),
        4 => chita,
    ]
}

fn layout(shapes: &[([usize; 2], u8)]) -> Layout {
    let mut layout = Layout::new();
    for (index, (shape, kind)) in shapes.iter().enumerate() {
        let path = ["a", "b", "c"][index % 3];
        match kind {
            0 => layout.push(path, shape.to_vec(), LayerKind::Other, 0.0),
            1 => layout.push(path, [shape[0], shape[1], 1, 1], LayerKind::Conv, 32.0),
            _ => layout.push(path, shape.to_vec(), LayerKind::Linear, 2.0),
        }
    }
    layout
}

static SOLVERS: Tally = Tally::new();
static LAYERS: Tally = Tally::new();

#[test]
fn any_solver_gives_finite_weights_within_the_budget_or_an_error() {
    solvers();
    SOLVERS.assert_one_of(100);
}

#[test]
fn any_layer_gives_finite_weights_or_an_error() {
    layers();
    LAYERS.assert_one_of(50);
}

proptest! {
    #![proptest_config(cases(600))]

    fn solvers(
        shapes in proptest::collection::vec((proptest::array::uniform2(length(7)), 0u8..3), 1..4),
        n in length(9), gradients in kind(), dense in kind(), seed in 0u64..10_000,
        ridge in prop_oneof![15 => 1e-6f64..1.0, 1 => Just(0.0), 1 => Just(f64::NAN), 1 => Just(1e-300),
            1 => Just(1e300), 1 => Just(-1.0)],
        first_order in prop_oneof![9 => Just(0.0), 6 => -1f64..1.0, 1 => Just(f64::INFINITY)],
        tempering in prop_oneof![9 => Just(0.0), 3 => 0f64..=1.0, 1 => Just(f64::NAN)],
        config in (budget(), pattern(), method(), proptest::option::of(0usize..40), 0usize..3),
    ) {
        SOLVERS.case();
        let device = Device::flex();
        let layout = layout(&shapes);
        let p = layout.len();
        let g = GradientMatrix::from_tensor(gradients.tensor(seed, [n, p], &device));
        let w = dense.tensor(seed + 1, [p], &device);
        let problem = g.and_then(|g| Problem::new(g, w, layout));
        let problem = problem
            .and_then(|problem| problem.with_ridge(ridge))
            .and_then(|problem| problem.with_first_order(first_order))
            .and_then(|problem| problem.with_tempering(tempering));
        let Ok(problem) = problem else { return Ok(()) };
        let (budget, pattern, method, block_size, dead) = config;
        let config = SolverConfig::new(budget.clone())
            .with_pattern(pattern)
            .with_method(method)
            .with_block_size(block_size)
            .with_dead_columns([None, Some(DeadColumns::Priced), Some(DeadColumns::PrunedFirst)][dead]);
        let Ok(solution) = solve(&problem, &config) else { return Ok(()) };
        let weights = values(solution.weights);
        prop_assert!(weights.iter().all(|w| w.is_finite()), "{:?}", weights);
        prop_assert!(!solution.objective.is_nan());
        prop_assert!(solution.support.is_sorted_by(|a, b| a < b));
        for (index, weight) in weights.iter().enumerate() {
            prop_assert!(*weight == 0.0 || solution.support.binary_search(&index).is_ok());
        }
        match budget {
            Budget::Keep(k) => prop_assert!(solution.support.len() <= k),
            Budget::Sparsity(share) => {
                let k = Budget::kept_count(share, p).unwrap();
                prop_assert!(solution.support.len() <= k);
            }
            _ => {}
        }
        SOLVERS.result();
    }

    fn layers(
        o in length(5), d in length(9), rows in length(12), x in kind(), w in kind(),
        seed in 0u64..10_000, ridge in prop_oneof![15 => 0f64..0.1, 1 => Just(f64::NAN), 1 => Just(1e300)],
        centered in any::<bool>(), zero in any::<bool>(), targets in any::<bool>(),
        keep in (0..3, 0usize..40, 0usize..6), method in 0..5, block in 0usize..10,
        importance in proptest::option::of(kind()),
    ) {
        LAYERS.case();
        let inputs = x.values(seed, rows * d);
        let outputs = x.values(seed + 2, rows * o);
        let mut gram = if targets { Gram::with_targets(d, o) } else { Gram::new(d) };
        let added = match targets {
            true => gram.add_with_targets(&inputs, &outputs),
            false => gram.add(&inputs),
        };
        if added.is_err() {
            return Ok(());
        }
        let config = ProblemConfig {
            ridge,
            centered,
            pull: if zero { Pull::Zero } else { Pull::Dense },
            importance: importance.map(|kind| {
                kind.values(seed + 3, o).into_iter().map(f64::from).collect()
            }),
        };
        let Ok(problem) = LayerProblem::new(&gram, &w.values(seed + 1, o * d), &config) else {
            return Ok(());
        };
        let keep = match keep {
            (0, count, _) => Keep::Weights(count),
            (1, count, _) => Keep::PerRow(count),
            (_, n, m) => Keep::NOfM { n, m },
        };
        let method = match method {
            0 => layerwise::Method::Magnitude,
            1 => layerwise::Method::Wanda,
            2 => layerwise::Method::SparseGpt { block },
            3 => layerwise::Method::Obs,
            _ => layerwise::Method::BestSubset,
        };
        if let Ok(solution) = layerwise::solve(&problem, &keep, &method) {
            prop_assert!(solution.weights.iter().all(|w| w.is_finite()), "{:?}", solution);
            prop_assert!(!solution.objective.is_nan(), "{:?}", solution);
            let kept = solution.weights.iter().filter(|w| **w != 0.0).count();
            let most = match keep {
                Keep::Weights(count) => count,
                Keep::PerRow(count) => count * o,
                Keep::NOfM { n, m } => o * d / m * n,
            };
            prop_assert!(kept <= most);
            LAYERS.result();
        }
    }
}

fn is_finite(net: &Net) -> bool {
    let parameters = parameters(net);
    let mut values = parameters.iter().flat_map(|one| &one.values);
    values.all(|value| value.is_finite())
}

/// What must hold of a pruner, whatever comes; whether it pruned.
fn prunes(config: &PrunerConfig, x: Kind, w: Kind, seed: u64) -> Result<bool, TestCaseError> {
    let device = Device::flex().autodiff();
    let net = Net::of(w, seed, &device);
    let loss = |net: &Net, x: &Tensor<2>| net.forward(x.clone()).square().mean();
    let before = parameters(&net);
    let sound = is_finite(&net);
    match config.prune(net, loss, |_| [x.tensor::<2>(seed + 5, [14, 8], &device)]) {
        Ok(pruned) => {
            prop_assert!(!sound || is_finite(&pruned.model));
            let record = SparseRecord::from_module(&pruned.model.valid()).unwrap();
            let bytes = record.to_bytes().unwrap();
            let again = SparseRecord::from_bytes(&bytes).unwrap();
            prop_assert_eq!(again, record);
            Ok(true)
        }
        Err(rejected) => {
            let after = parameters(rejected.value());
            // A stage may have been finished before.
            let is_as_before = format!("{after:?}") == format!("{before:?}");
            prop_assert!(config.stages > 1 || is_as_before);
            prop_assert!(!sound || is_finite(rejected.value()));
            Ok(false)
        }
    }
}

/// What must hold of pruning layer by layer; whether it pruned.
fn prunes_layers(pruner: &Pruner, x: Kind, w: Kind, seed: u64) -> Result<bool, TestCaseError> {
    let device = Device::flex();
    let net = Net::of(w, seed, &device);
    let sound = is_finite(&net);
    let batches = [0, 1].map(|salt| x.tensor::<2>(seed + salt, [14, 8], &device));
    let pruned = pruner.prune(net, |net: &Net, x| net.forward(x), batches);
    let Ok(pruned) = pruned else { return Ok(false) };
    prop_assert!(!sound || is_finite(&pruned.model), "{:?}", pruned.model);
    let attached = pruned.masks.attach(pruned.model).unwrap();
    prop_assert_eq!(Masks::of(&attached).unwrap(), pruned.masks);
    Ok(true)
}

#[test]
fn ordinary_models_are_not_refused() {
    let methods = [
        Method::Magnitude,
        Method::BackSolve,
        Method::Chita(ChitaConfig::new()),
    ];
    for method in methods {
        let solver = SolverConfig::new(Budget::Sparsity(0.5)).with_method(method);
        let config = PrunerConfig::new(solver, FisherConfig::new(8).with_progress(false))
            .with_ridge(RidgeChoice::Fixed(1e-2));
        assert!(
            prunes(&config, Kind::Ordinary, Kind::Ordinary, 1).unwrap(),
            "{config:?}"
        );
    }
    let supports = [
        SupportMethod::Magnitude,
        SupportMethod::Obs,
        SupportMethod::BestSubset,
    ];
    for support in supports {
        let mut pruner = Pruner::new(Budget::Sparsity(0.5));
        pruner.support = Some(support);
        assert!(
            prunes_layers(&pruner, Kind::Ordinary, Kind::Ordinary, 1).unwrap(),
            "{pruner:?}"
        );
    }
}

proptest! {
    #![proptest_config(cases(40))]

    #[test]
    fn any_pruner_of_a_model_gives_finite_weights_or_an_error(
        budget in budget(), pattern in pattern(), method in method(), x in kind(), w in kind(),
        seed in 0u64..10_000, samples in 0usize..12, stages in 0usize..3, base in share(),
        sweep in any::<bool>(), gradual in any::<bool>(), on_disk in any::<bool>(),
    ) {
        let solver = SolverConfig::new(budget).with_pattern(pattern).with_method(method);
        let ridge = |value| Ridge { value, first_order: None, tempering: None };
        let fisher = FisherConfig::new(samples).with_progress(false);
        let fisher = match on_disk {
            true => fisher.with_memory_bound(1 << 9).with_on_disk(Some(std::env::temp_dir())),
            false => fisher,
        };
        let config = PrunerConfig::new(solver, fisher)
            .with_stages(stages)
            .with_schedule(match gradual {
                true => SparsitySchedule::Polynomial { base },
                false => SparsitySchedule::Exponential { base },
            })
            .with_ridge(match sweep {
                true => RidgeChoice::Sweep(vec![ridge(1e-4), ridge(1e-2)]),
                false => RidgeChoice::Fixed(1e-2),
            });
        prunes(&config, x, w, seed)?;
    }

    #[test]
    fn any_pruning_layer_by_layer_gives_finite_weights_or_an_error(
        budget in budget(), pattern in pattern(), support in 0usize..5, refit in any::<bool>(),
        shares in 0usize..3, x in kind(), w in kind(), seed in 0u64..10_000, held_out in 0usize..9,
        examples in 0usize..20, ridge in prop_oneof![3 => 0f64..0.1, 1 => Just(f64::NAN)],
        quick in any::<bool>(),
    ) {
        let mut pruner = Pruner::new(budget);
        pruner.pattern = pattern;
        pruner.refit = refit;
        pruner.support = Some([
            SupportMethod::Magnitude,
            SupportMethod::Wanda,
            SupportMethod::SparseGpt,
            SupportMethod::Obs,
            SupportMethod::BestSubset,
        ][support]);
        pruner.shares = [Shares::Magnitude, Shares::Lamp, Shares::Auto][shares];
        pruner.held_out = held_out;
        pruner.examples = examples;
        pruner.ridge = ridge;
        pruner.tuning = Some(usize::from(!quick));
        pruner.effort = if quick { Effort::Quick } else { Effort::Standard };
        prunes_layers(&pruner, x, w, seed)?;
    }
}
