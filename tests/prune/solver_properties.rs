//! Laws that hold for every problem, and the equality of devices.

use burn::tensor::Device;
use burn_lean::prune::{
    Budget, ChitaConfig, DeadColumns, Method, PruneError, Ridge, RidgeChoice, Solution,
    SolverConfig, solve, solve_with_ridge,
};
use proptest::prelude::*;

use crate::reference::Plain;
use crate::support::cases::cases;
use crate::support::{each_device, values};

fn methods() -> Vec<Method> {
    vec![
        Method::Random,
        Method::Magnitude,
        Method::DiagonalFisher,
        Method::WoodFisher { block_size: 7 },
        Method::BackSolve,
        Method::Chita(ChitaConfig::new()),
    ]
}

proptest! {
    #![proptest_config(cases(40))]

    #[test]
    fn every_method_keeps_k_weights_and_zeros_elsewhere(
        seed in 0u64..10_000, n in 1usize..20, p in 2usize..40, share in 0.0f64..1.0,
    ) {
        let k = 1 + (share * (p - 2) as f64) as usize;
        let plain = Plain::random(seed, n, p);
        let problem = plain.problem(&Device::flex());
        for method in methods() {
            let config = SolverConfig::new(Budget::Keep(k)).with_method(method);
            let solution = solve(&problem, &config).unwrap();
            prop_assert_eq!(solution.support.len(), k);
            prop_assert!(solution.support.is_sorted_by(|a, b| a < b));
            for (index, weight) in values(solution.weights).into_iter().enumerate() {
                let kept = solution.support.binary_search(&index).is_ok();
                prop_assert!(kept || weight == 0.0);
            }
            prop_assert!(solution.objective.is_finite());
        }
    }

    #[test]
    fn blocks_keep_k_weights_in_any_number_of_stages(
        seed in 0u64..10_000, n in 1usize..20, p in 2usize..40, share in 0.0f64..1.0,
        block_size in 1usize..45, stages in 0usize..=3, expansion in 1.0f64..4.0,
    ) {
        let k = 1 + (share * (p - 2) as f64) as usize;
        let problem = Plain::random(seed, n, p).problem(&Device::flex());
        let chita = ChitaConfig::new().with_stages(stages).with_expansion(expansion);
        for method in [Method::Chita(chita), Method::BackSolve] {
            let config = SolverConfig::new(Budget::Keep(k))
                .with_method(method)
                .with_block_size(Some(block_size));
            let solution = solve(&problem, &config).unwrap();
            prop_assert_eq!(solution.support.len(), k);
            for (index, weight) in values(solution.weights).into_iter().enumerate() {
                let kept = solution.support.binary_search(&index).is_ok();
                prop_assert!(kept || weight == 0.0);
            }
        }
    }

    #[test]
    fn splicing_without_stages_is_not_worse_than_the_magnitude_support(
        seed in 0u64..10_000, n in 2usize..20, p in 6usize..40,
    ) {
        let problem = Plain::random(seed, n, p).problem(&Device::flex());
        let objective = |method| {
            let config = SolverConfig::new(Budget::Sparsity(0.5)).with_method(method);
            solve(&problem, &config).unwrap().objective
        };
        let back_solve = objective(Method::BackSolve);
        let magnitude = objective(Method::Magnitude);
        let spliced = objective(Method::Chita(ChitaConfig::new().with_stages(0)));
        let slack = 1e-5 * magnitude.abs();
        prop_assert!(back_solve <= magnitude + slack);
        prop_assert!(spliced <= back_solve + slack);
    }

    #[test]
    fn the_order_of_the_weights_does_not_matter(
        seed in 0u64..10_000, n in 2usize..15, p in 5usize..25, by in 1usize..25,
    ) {
        // A rotation is a permutation, too.
        let plain = Plain::random(seed, n, p);
        let mut rotated = plain.clone();
        let by = by % p;
        rotated.gradients.iter_mut().for_each(|row| row.rotate_left(by));
        rotated.dense.rotate_left(by);
        let config = SolverConfig::new(Budget::Keep(p / 2));
        let own = solve(&plain.problem(&Device::flex()), &config).unwrap();
        let other = solve(&rotated.problem(&Device::flex()), &config).unwrap();
        let mut support: Vec<usize> = other.support.iter().map(|j| (j + by) % p).collect();
        support.sort_unstable();
        prop_assert_eq!(support, own.support);
        prop_assert!((other.objective - own.objective).abs() <= 1e-4 * own.objective);
    }

    #[test]
    fn powers_of_two_scale_the_objective_and_nothing_else(
        seed in 0u64..10_000, n in 2usize..15, p in 5usize..25, exponent in -3i32..4,
    ) {
        // c·G with c²·ridge is the same regression times c².
        let plain = Plain::random(seed, n, p);
        let factor = 2f64.powi(exponent);
        let mut scaled = plain.clone();
        scaled.ridge *= factor * factor;
        scaled.gradients.iter_mut().flatten().for_each(|g| *g *= factor);
        let config = SolverConfig::new(Budget::Keep(p / 2));
        let own = solve(&plain.problem(&Device::flex()), &config).unwrap();
        let other = solve(&scaled.problem(&Device::flex()), &config).unwrap();
        prop_assert_eq!(&other.support, &own.support);
        let expected = factor * factor * own.objective;
        prop_assert!((other.objective - expected).abs() <= 1e-4 * expected);
    }
}

#[test]
fn all_devices_give_the_same_solution() {
    let plain = Plain::random(8, 30, 80);
    for method in methods() {
        let config = SolverConfig::new(Budget::Sparsity(0.7)).with_method(method.clone());
        let expected = solve(&plain.problem(&Device::flex()), &config).unwrap();
        each_device(|target| {
            let solution = solve(&plain.problem(&target.device), &config).unwrap();
            assert_eq!(solution.support, expected.support, "{method:?}");
            let difference = (solution.objective - expected.objective).abs();
            assert!(
                difference <= 1e-4 * expected.objective,
                "{method:?}: {difference}"
            );
        });
    }
}

#[test]
fn the_same_seed_gives_the_same_random_support_and_another_one_another() {
    let problem = Plain::random(9, 5, 50).problem(&Device::flex());
    let support = |seed| {
        let config = SolverConfig::new(Budget::Keep(20)).with_method(Method::Random);
        solve(&problem, &config.with_seed(seed)).unwrap().support
    };
    assert_eq!(support(1), support(1));
    assert_ne!(support(1), support(2));
}

#[test]
fn dead_weights_go_first_where_that_is_wanted_and_by_their_price_otherwise() {
    let mut plain = Plain::random(10, 8, 20);
    for row in &mut plain.gradients {
        row[3] = 0.0;
        row[11] = 0.0;
    }
    plain.dense[3] = 50.0;
    plain.dense[11] = -40.0;
    each_device(|target| {
        let problem = plain.problem(&target.device);
        assert_eq!(problem.dead(), [3, 11]);
        for method in methods() {
            let config = SolverConfig::new(Budget::Keep(18)).with_method(method);
            let pruned_first = config
                .clone()
                .with_dead_columns(Some(DeadColumns::PrunedFirst));
            let first = solve(&problem, &pruned_first).unwrap();
            let alive: Vec<usize> = (0..20).filter(|index| ![3, 11].contains(index)).collect();
            assert_eq!(first.support, alive);

            // The objective alone, which a solver goes by, keeps them: they cost λ·50² and λ·40².
            if config.method != Method::Random {
                let support = solve(&problem, &config).unwrap().support;
                assert!(support.contains(&3) && support.contains(&11));
                let priced = config.with_dead_columns(Some(DeadColumns::Priced));
                assert_eq!(solve(&problem, &priced).unwrap().support, support);
            }
        }
        // Where the budget leaves room, the larger dead weight comes back before the other.
        let config =
            SolverConfig::new(Budget::Keep(19)).with_dead_columns(Some(DeadColumns::PrunedFirst));
        assert!(solve(&problem, &config).unwrap().support.contains(&3));
    });
}

#[test]
fn the_ridge_that_is_judged_best_is_chosen_and_all_are_reported() {
    let problem = Plain::random(12, 10, 30).problem(&Device::flex());
    let config = SolverConfig::new(Budget::Keep(10));
    let choice = RidgeChoice::over([1.0, 0.1, 0.01]);
    // The judge wants the pruned weights to have a certain length.
    let length = |solution: &Solution| -> f64 {
        let weights = values(solution.weights.clone());
        weights.iter().map(|w| f64::from(*w).powi(2)).sum()
    };
    let middle = solve(&problem.clone().with_ridge(0.1).unwrap(), &config).unwrap();
    let wanted = length(&middle);
    let mut judge = |solution: &Solution| Ok((length(solution) - wanted).abs());
    let sweep = solve_with_ridge(&problem, &config, &choice, &mut judge).unwrap();
    assert_eq!(sweep.chosen.value, 0.1);
    assert_eq!(sweep.solution.support, middle.support);
    let ridges: Vec<f64> = sweep.candidates.iter().map(|at| at.ridge.value).collect();
    assert_eq!(ridges, [1.0, 0.1, 0.01]);
    assert_eq!(sweep.candidates[1].loss, 0.0);

    // A loss that is not a number never wins; the first-order term can be swept, too.
    let ridge = |value, first_order| Ridge {
        value,
        first_order,
        tempering: None,
    };
    let choice = RidgeChoice::Sweep(vec![ridge(1.0, None), ridge(1.0, Some(0.1))]);
    let mut calls = 0;
    let mut judge = |_: &Solution| {
        calls += 1;
        Ok(if calls == 1 { f64::NAN } else { 5.0 })
    };
    let sweep = solve_with_ridge(&problem, &config, &choice, &mut judge).unwrap();
    assert_eq!(sweep.chosen.first_order, Some(0.1));

    let mut judge = |_: &Solution| Err(PruneError::NoSamples);
    let error = solve_with_ridge(&problem, &config, &choice, &mut judge).unwrap_err();
    assert_eq!(error, PruneError::NoSamples);
    let mut judge = |_: &Solution| Ok(0.0);
    let nothing = RidgeChoice::over([]);
    let error = solve_with_ridge(&problem, &config, &nothing, &mut judge).unwrap_err();
    assert_matches!(error, PruneError::InvalidConfig { field: "ridge", .. });
    let fixed = RidgeChoice::Fixed(0.1);
    let sweep = solve_with_ridge(&problem, &config, &fixed, &mut judge).unwrap();
    assert_eq!(sweep.solution.support, middle.support);
    assert!(sweep.candidates.is_empty());
}
