//! More samples than weights, which are solved for over as many rows as there are weights.

use burn::tensor::{Device, Tensor};
use burn_lean::prune::{
    Budget, ChitaConfig, DeadColumns, GradientMatrix, Layout, Method, Problem, Ridge, RidgeChoice,
    Solution, SolverConfig, solve, solve_with_ridge,
};

use crate::reference::{Plain, distance};
use crate::support::{each_device, values};

/// 300 samples of 11 weights, of which one is dead, with a first-order term.
fn plain(seed: u64) -> Plain {
    let mut plain = Plain {
        first_order: 0.3,
        ..Plain::random(seed, 300, 11)
    };
    for row in &mut plain.gradients {
        row[4] = 0.0;
    }
    plain
}

#[test]
fn every_method_finds_the_exact_minimum_on_its_support() {
    let methods = [Method::BackSolve, Method::Chita(ChitaConfig::new())];
    each_device(|target| {
        let plain = plain(1);
        let problem = plain.problem(&target.device);
        for method in &methods {
            let config = SolverConfig::new(Budget::Keep(5))
                .with_method(method.clone())
                .with_dead_columns(Some(DeadColumns::PrunedFirst));
            let solution = solve(&problem, &config).unwrap();
            assert!(!solution.support.contains(&4), "dead weights go first");
            let expected = plain.back_solve(&solution.support);
            let found = values(solution.weights);
            assert!(distance(&found, &expected) < 1e-4, "{method:?}: {found:?}");
            // The linear term makes small differences of large numbers.
            let size: f64 = plain.multiply(&plain.dense).iter().map(|y| y * y).sum();
            let error = (solution.objective - plain.objective(&expected)).abs();
            assert!(error < 1e-6 * size, "{method:?}: {error}");
        }
    });
}

/// Each ridge and each tempering of one problem, and of its clones, has its own minimum.
#[test]
fn ridge_and_tempering_are_those_of_the_problem() {
    let problem = plain(2).problem(&Device::flex());
    let config = SolverConfig::new(Budget::Keep(5));
    let mut objectives = Vec::new();
    for (ridge, exponent) in [(0.05, 0.0), (1.0, 0.0), (0.05, 1.0), (0.05, 0.0)] {
        let problem = problem.clone().with_ridge(ridge).unwrap();
        let problem = problem.with_tempering(exponent).unwrap();
        let solution = solve(&problem, &config).unwrap();
        // From the gradient of the objective over all samples.
        assert!(solution.relative_gap < 1e-9, "{}", solution.relative_gap);
        objectives.push(solution.objective);
    }
    assert_eq!(objectives[0], objectives[3]);
    assert!(objectives[0] < objectives[1]);
}

/// What the candidates of a sweep share leaves each of them its own solution, with more samples than
/// weights and with fewer.
#[test]
fn a_sweep_solves_what_each_of_its_problems_says() {
    for plain in [plain(3), Plain::random(4, 30, 200)] {
        let problem = plain.problem(&Device::flex());
        let config = SolverConfig::new(Budget::Sparsity(0.6));
        let ridges = [1e-3, 1e-1, 10.0].into_iter().flat_map(|value| {
            let term = [(None, 0.0), (Some(0.2), 0.0), (None, 0.7)];
            term.map(|(first_order, exponent)| Ridge {
                value,
                first_order,
                tempering: Some(exponent),
            })
        });
        let ridges: Vec<Ridge> = ridges.collect();
        let mut judged = 0;
        let choice = RidgeChoice::Sweep(ridges.clone());
        let mut judge = |solution: &Solution| {
            let ridge = ridges[judged];
            judged += 1;
            let problem = problem.clone().with_ridge(ridge.value).unwrap();
            let a = ridge.first_order.unwrap_or(problem.first_order());
            let problem = problem.with_first_order(a).unwrap();
            let problem = problem.with_tempering(ridge.tempering.unwrap()).unwrap();
            let alone = solve(&problem, &config).unwrap();
            assert_eq!(solution.support, alone.support, "{ridge:?}");
            let [found, expected] = [solution, &alone].map(|one| values(one.weights.clone()));
            assert!(
                distance(
                    &found,
                    &expected.iter().map(|w| f64::from(*w)).collect::<Vec<_>>()
                ) < 1e-4
            );
            Ok(1.0)
        };
        solve_with_ridge(&problem, &config, &choice, &mut judge).unwrap();
        assert_eq!(judged, 9);
    }
}

/// A system of 40,000 samples would have 32 GB.
#[test]
fn forty_thousand_samples_of_two_weights_are_solved() {
    let device = Device::flex();
    let gradients = GradientMatrix::from_tensor(Tensor::ones([40_000, 2], &device)).unwrap();
    let dense = Tensor::<1>::from_floats([1.0, 2.0], &device);
    let problem = Problem::new(gradients, dense, Layout::anonymous(2)).unwrap();
    let config = SolverConfig::new(Budget::Keep(1));
    let whole = solve(&problem, &config).unwrap();
    assert_eq!(whole.support, [1]);
    // The ridge counts all samples: (1 + ridge)·d = 1 for the change d of the kept weight.
    let kept = values(whole.weights)[1];
    assert!(
        (f64::from(kept) - (2.0 + 1.0 / 1.01)).abs() < 1e-5,
        "{kept}"
    );
    let block = solve(&problem, &config.with_block_size(Some(2))).unwrap();
    assert_eq!(block.support, [1]);
    assert!((whole.objective / block.objective - 1.0).abs() < 1e-5);
}
