//! Groups with dead members, and bounds on operations.

use std::collections::BTreeMap;

use burn::tensor::{Device, Tensor};
use burn_lean::prune::{
    Budget, ChitaConfig, DeadColumns, GradientMatrix, Groups, LayerKind, Layout, Method, Problem,
    PruneError, Ridge, RidgeChoice, SolverConfig, SparsityPattern, solve, solve_with_ridge,
};

use crate::reference::Plain;
use crate::support::numbers;

fn problem(rows: &[Vec<f32>], dense: &[f32], layout: Layout) -> Problem {
    let device = Device::flex();
    let rows: Vec<Tensor<1>> = rows
        .iter()
        .map(|row| Tensor::from_data(&row[..], &device))
        .collect();
    let gradients = GradientMatrix::from_tensor(Tensor::stack::<2>(rows, 0)).unwrap();
    Problem::new(gradients, Tensor::from_data(dense, &device), layout).unwrap()
}

/// Dead weights go first.
fn support(problem: &Problem, mut config: SolverConfig) -> Vec<usize> {
    config.dead_columns.get_or_insert(DeadColumns::PrunedFirst);
    solve(problem, &config).unwrap().support
}

/// Output 0 is worth seven times 0.03 but has a dead weight, output 1 eight times 0.001.
#[test]
fn a_dead_weight_does_not_condemn_its_group() {
    let mut layout = Layout::new();
    layout.push("fc.weight", [8, 3], LayerKind::Linear, 2.0);
    let dense: Vec<f32> = (0..24)
        .map(|index| [0.03, 0.001, 0.002][index % 3])
        .collect();
    let mut gradients = vec![1.0; 24];
    gradients[9] = 0.0;
    let problem = problem(&[gradients], &dense, layout);
    assert_eq!(problem.dead(), [9]);
    let outputs = SparsityPattern::Groups(Groups::Outputs);
    for method in [Method::Magnitude, Method::DiagonalFisher] {
        let config = SolverConfig::new(Budget::Keep(8))
            .with_pattern(outputs.clone())
            .with_method(method);
        let expected: Vec<usize> = (0..8).map(|input| 3 * input).collect();
        assert_eq!(support(&problem, config), expected);
    }
}

#[test]
fn a_group_of_dead_weights_goes_first() {
    let mut layout = Layout::new();
    layout.push("fc.weight", [2, 3], LayerKind::Linear, 2.0);
    let problem = problem(
        &[vec![0.0, 1.0, 1.0, 0.0, 1.0, 1.0]],
        &[5.0, 0.1, 0.2, 5.0, 0.1, 0.2],
        layout,
    );
    let config = SolverConfig::new(Budget::Keep(4))
        .with_pattern(SparsityPattern::Groups(Groups::Outputs))
        .with_method(Method::Magnitude);
    assert_eq!(support(&problem, config), [1, 2, 4, 5]);
}

/// Cheap and dear weights; the bound on operations is the only one.
fn layers() -> Layout {
    let mut layout = Layout::new();
    layout.push("fc.weight", [6, 4], LayerKind::Linear, 2.0);
    layout.push("conv.weight", [4, 4, 1, 2], LayerKind::Conv, 50.0);
    layout
}

#[test]
fn under_a_bound_on_operations_the_search_is_more_than_magnitude() {
    let (mut better, mut others) = (0, 0);
    for seed in 0..10 {
        let plain = Plain::random(400 + seed, 10, 56);
        let problem = plain.problem_with(layers(), &Device::flex());
        let config = |kept, method| {
            let budget = Budget::Flops {
                kept,
                sparsity: None,
            };
            SolverConfig::new(budget).with_method(method)
        };
        let magnitude = solve(&problem, &config(0.25, Method::BackSolve)).unwrap();
        let chita = Method::Chita(ChitaConfig::new());
        let chita = solve(&problem, &config(0.25, chita)).unwrap();
        better += usize::from(chita.objective < 0.99 * magnitude.objective);
        // All cheap weights fit beside some dear ones, which at one bound may be the same.
        let differs = |tenths: u8| {
            let kept = f64::from(tenths) / 10.0;
            let [magnitude, wood] = [Method::BackSolve, Method::WoodFisher { block_size: 56 }]
                .map(|method| solve(&problem, &config(kept, method)).unwrap());
            wood.support != magnitude.support
        };
        others += usize::from((1..=8).any(differs));
    }
    assert!(better >= 8, "better in {better} of 10");
    assert_eq!(others, 10);
}

#[test]
fn a_bound_on_operations_holds_where_no_weight_has_a_positive_score() {
    let layout = layers();
    let dense: Vec<f32> = (1..=56).map(|index| index as f32).collect();
    let problem = problem(&[vec![0.0; 56]], &dense, layout.clone());
    let budget = Budget::Flops {
        kept: 0.1,
        sparsity: None,
    };
    let config = SolverConfig::new(budget).with_method(Method::Magnitude);
    let support = support(&problem, config);
    let cost = |index: &usize| layout.layer_at(*index).unwrap().flops_per_weight;
    let operations: f64 = support.iter().map(cost).sum();
    assert!(!support.is_empty());
    assert!(operations <= 0.1 * layout.flops(), "{operations}");
    // The bound is 164.8: the three largest weights, then what still fits.
    assert!(operations > 0.1 * layout.flops() - 2.0, "{operations}");
}

/// The largest sum of |w₀| under both bounds, by trying a million prices: a support, or a few weights
/// more than one, since a price decides about all weights that are worth the same.
fn best_by_price(layout: &Layout, dense: &[f32], operations: f64, k: usize) -> f64 {
    let cost = |index: usize| layout.layer_at(index).unwrap().flops_per_weight;
    let costs: Vec<f64> = (0..dense.len()).map(cost).collect();
    let at = |price: f64| {
        let worth = |index: usize| f64::from(dense[index].abs()) - price * costs[index];
        let mut order: Vec<usize> = (0..dense.len()).filter(|at| worth(*at) > 0.0).collect();
        order.sort_by(|a, b| worth(*b).total_cmp(&worth(*a)));
        order.truncate(k);
        order
    };
    let (mut low, mut high) = (0.0, 1.0);
    for _ in 0..60 {
        let price = 0.5 * (low + high);
        let used: f64 = at(price).into_iter().map(|index| costs[index]).sum();
        match used <= operations {
            true => high = price,
            false => low = price,
        }
    }
    at(high)
        .into_iter()
        .map(|index| f64::from(dense[index].abs()))
        .sum()
}

#[test]
fn a_bound_on_operations_keeps_what_is_worth_them() {
    let mut layout = Layout::new();
    layout.push("fc.weight", [40, 20], LayerKind::Linear, 2.0);
    layout.push("conv.weight", [20, 10, 1, 2], LayerKind::Conv, 50.0);
    layout.push("table.weight", [30, 10], LayerKind::Embedding, 0.0);
    let dense = numbers(11, 1500);
    let problem = problem(&[vec![1.0; 1500]], &dense, layout.clone());
    for (kept, sparsity) in [
        (0.9, None),
        (0.3, None),
        (0.01, None),
        (0.3, Some(0.5)),
        (0.3, Some(0.9)),
        (0.02, Some(0.9)),
    ] {
        let config = SolverConfig::new(Budget::Flops { kept, sparsity });
        let config = config.with_method(Method::Magnitude);
        let support = support(&problem, config);
        let cost = |index: &usize| layout.layer_at(*index).unwrap().flops_per_weight;
        let operations: f64 = support.iter().map(cost).sum();
        let bound = kept * layout.flops();
        let k = sparsity.map_or(1500, |s| Budget::kept_count(s, 1500).unwrap());
        assert!(
            operations <= bound && support.len() <= k,
            "{kept} {sparsity:?}"
        );
        let found: f64 = support.iter().map(|at| f64::from(dense[*at].abs())).sum();
        let best = best_by_price(&layout, &dense, bound, k);
        // One weight may be missing where the last one that is taken does not fit.
        assert!(
            found >= best - 1.0,
            "{kept} {sparsity:?}: {found} of {best}"
        );
        assert!(
            found <= best + 1.0,
            "{kept} {sparsity:?}: {found} of {best}"
        );
    }
}

#[test]
fn operations_that_no_weight_costs_cannot_be_bounded() {
    let mut layout = Layout::new();
    layout.push("table.weight", [4, 2], LayerKind::Embedding, 0.0);
    let problem = Plain::random(1, 3, 8).problem_with(layout, &Device::flex());
    let budget = Budget::Flops {
        kept: 0.5,
        sparsity: None,
    };
    let error = solve(&problem, &SolverConfig::new(budget)).unwrap_err();
    assert_matches!(error, PruneError::Infeasible { .. });
}

/// The cheapest kept weights improve only against a weight that they may not make room for.
#[test]
fn exchanges_that_are_not_allowed_do_not_end_the_search() {
    let small: Vec<f32> = (0..600)
        .map(|index| if index % 2 == 0 { 0.1 } else { 0.001 })
        .collect();
    let dense: Vec<f32> = small.into_iter().chain([0.9, 0.8]).collect();
    let mut gradients = vec![0.0; 600];
    gradients.extend([0.1, 10.0]);
    let mut layout = Layout::new();
    layout.push("first.weight", [600], LayerKind::Other, 2.0);
    layout.push("second.weight", [2], LayerKind::Other, 2.0);
    let problem = problem(&[gradients], &dense, layout);
    let chita = ChitaConfig::new().with_stages(0);
    let config = |budget| {
        SolverConfig::new(budget)
            .with_method(Method::Chita(chita.clone()))
            .with_dead_columns(Some(DeadColumns::Priced))
    };
    for config in [
        config(Budget::PerLayer(0.5)),
        config(Budget::Pattern).with_pattern(SparsityPattern::NM { n: 1, m: 2 }),
    ] {
        let solution = solve(&problem, &config).unwrap();
        assert_eq!(solution.support.last(), Some(&601));
        assert_eq!(solution.support.len(), 301);
    }
    // Nor do weights of a layer that keeps all of them stand in the way of the others.
    let targets = BTreeMap::from([("second.weight".to_string(), 0.5)]);
    let solution = solve(&problem, &config(Budget::PerLayerTargets(targets))).unwrap();
    assert_eq!(solution.support.last(), Some(&601));
    assert_eq!(solution.support.len(), 601);
}

/// Blocks are regressions of their own: a layer that stays dense changes nothing in another one.
#[test]
fn a_layer_that_stays_dense_changes_nothing_in_one_that_is_pruned() {
    let methods = [
        (Method::WoodFisher { block_size: 20 }, None),
        (Method::Chita(ChitaConfig::new()), Some(20)),
    ];
    let mut others = 0;
    for seed in 0..5 {
        let plain = Plain::random(500 + seed, 12, 200);
        let alone = Plain {
            gradients: plain.gradients.iter().map(|g| g[..20].to_vec()).collect(),
            dense: plain.dense[..20].to_vec(),
            ..plain.clone()
        };
        let mut layout = Layout::new();
        layout.push("a.weight", [5, 4], LayerKind::Linear, 2.0);
        let alone = alone.problem_with(layout.clone(), &Device::flex());
        layout.push("b.weight", [18, 10], LayerKind::Linear, 2.0);
        let beside = plain.problem_with(layout, &Device::flex());
        let targets = [("a.weight".to_string(), 0.75)];
        for (method, block_size) in &methods {
            let found = |problem: &Problem, budget| {
                let config = SolverConfig::new(budget)
                    .with_method(method.clone())
                    .with_block_size(*block_size);
                solve(problem, &config).unwrap().support
            };
            let budget = Budget::PerLayerTargets(BTreeMap::from(targets.clone()));
            let mut both = found(&beside, budget);
            assert_eq!(both.len(), 185);
            both.retain(|index| *index < 20);
            let expected = found(&alone, Budget::Sparsity(0.75));
            assert_eq!(both, expected, "{method:?}, seed {seed}");
            let magnitude =
                SolverConfig::new(Budget::Sparsity(0.75)).with_method(Method::Magnitude);
            let magnitude = solve(&alone, &magnitude).unwrap().support;
            others += usize::from(expected != magnitude);
        }
    }
    assert!(
        others >= 5,
        "other weights than the largest in {others} of 10"
    );
}

/// A removal that F32 products cannot take back leaves no positive pivot at a small ridge.
#[test]
fn a_ridge_that_is_too_small_does_not_end_a_sweep() {
    let problem = problem(
        &[vec![4096.0, 1.0], vec![12288.0, 3.0]],
        &[1.0, 1.0],
        Layout::anonymous(2),
    );
    let config = SolverConfig::new(Budget::Keep(1));
    let small = solve(&problem.clone().with_ridge(1e-12).unwrap(), &config);
    assert_matches!(small, Err(PruneError::NotPositiveDefinite { size: 2, .. }));
    let mut judged = 0;
    let mut judge = |_: &_| {
        judged += 1;
        Ok(1.0)
    };
    let sweep = |ridges: &[f64], judge: &mut dyn FnMut(&_) -> _| {
        let choice = RidgeChoice::over(ridges.iter().copied());
        solve_with_ridge(&problem, &config, &choice, judge)
    };
    let found = sweep(&[1e-12, 1e6], &mut judge).unwrap();
    assert_eq!(found.chosen.value, 1e6);
    assert_eq!(found.candidates.len(), 2);
    assert!(found.candidates[0].loss.is_nan() && found.candidates[0].objective.is_nan());
    assert_eq!(judged, 1);
    // A loss that is NaN for all chooses nothing.
    let unjudged = sweep(&[1e6, 1e7], &mut |_| Ok(f64::NAN)).map(|sweep| sweep.chosen);
    assert_matches!(unjudged, Err(PruneError::NaNLosses { candidates: 2 }));
    let none = sweep(&[1e-12, 1e-13], &mut |_| Ok(1.0)).map(|sweep| sweep.chosen);
    assert_matches!(none, Err(PruneError::NotPositiveDefinite { .. }));
}

#[test]
fn a_sweep_with_a_number_out_of_its_range_is_refused() {
    let problem = Plain::random(1, 3, 4).problem(&Device::flex());
    let ridge = |value, first_order, tempering| Ridge {
        value,
        first_order,
        tempering,
    };
    for (name, ridge) in [
        ("ridge", ridge(0.0, None, None)),
        ("first_order", ridge(1.0, Some(-1.0), None)),
        ("tempering", ridge(1.0, None, Some(2.0))),
    ] {
        let config = SolverConfig::new(Budget::Keep(2));
        let choice = RidgeChoice::Sweep(vec![ridge]);
        match solve_with_ridge(&problem, &config, &choice, &mut |_| unreachable!()) {
            Err(PruneError::InvalidConfig { field, .. }) => assert_eq!(field, name),
            other => panic!("{name}: {:?}", other.map(|_| ())),
        }
    }
}
