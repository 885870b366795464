//! Values that are the best on their support, at any ridge.

use burn_lean::prune::{Budget, ChitaConfig, Method, Solution, SolverConfig, solve};

use crate::reference::Plain;
use crate::support::{each_device, values};

/// n samples and p weights with a ridge.
fn plain(n: usize, p: usize, ridge: f64) -> Plain {
    Plain {
        ridge,
        ..Plain::random(7, n, p)
    }
}

/// By how much the objective is above the minimum on the support, as a fraction of it; all in F64.
fn excess(plain: &Plain, solution: &Solution) -> f64 {
    let weights = values(solution.weights.clone());
    let weights: Vec<f64> = weights.iter().map(|weight| f64::from(*weight)).collect();
    let best = plain.objective(&plain.back_solve(&solution.support));
    plain.objective(&weights) / best - 1.0
}

#[test]
fn a_small_ridge_is_not_lost_where_there_are_more_samples_than_kept_weights() {
    each_device(|target| {
        for (n, p, k) in [(60, 40, 20), (60, 40, 8), (300, 40, 20)] {
            for ridge in [1e-2, 1e-6, 1e-8, 1e-10] {
                let plain = plain(n, p, ridge);
                let problem = plain.problem(&target.device);
                let config = SolverConfig::new(Budget::Keep(k)).with_method(Method::BackSolve);
                let excess = excess(&plain, &solve(&problem, &config).unwrap());
                assert!(excess < 1e-9, "n {n}, k {k}, ridge {ridge}: {excess:e}");
            }
        }
    });
}

#[test]
fn a_small_ridge_is_not_lost_where_there_are_fewer_samples_than_kept_weights() {
    each_device(|target| {
        for ridge in [1e-2, 1e-4, 1e-6] {
            let plain = plain(40, 200, ridge);
            let problem = plain.problem(&target.device);
            for method in [Method::BackSolve, Method::Chita(ChitaConfig::new())] {
                let config = SolverConfig::new(Budget::Keep(100)).with_method(method);
                let excess = excess(&plain, &solve(&problem, &config).unwrap());
                // Of an objective of λ, what the rounding of the weights to F32 leaves.
                assert!(excess < 1e-6 + 1e-10 / ridge, "ridge {ridge}: {excess:e}");
            }
        }
    });
}

#[test]
fn chita_solves_what_a_back_solve_does_at_a_small_ridge() {
    each_device(|target| {
        for (n, p, k) in [(40, 200, 20), (40, 40, 20), (80, 40, 20)] {
            for ridge in [1e-4, 1e-6, 1e-8] {
                let plain = plain(n, p, ridge);
                let problem = plain.problem(&target.device);
                let config = SolverConfig::new(Budget::Keep(k));
                let config = config.with_method(Method::Chita(ChitaConfig::new()));
                let excess = excess(&plain, &solve(&problem, &config).unwrap());
                assert!(excess < 1e-6, "n {n}, p {p}, ridge {ridge}: {excess:e}");
            }
        }
    });
}

#[test]
fn nothing_is_claimed_where_the_ridge_is_lost_in_rounding() {
    each_device(|target| {
        let config = SolverConfig::new(Budget::Keep(60));
        let solved = |ridge| {
            let problem = plain(30, 100, ridge).problem(&target.device);
            solve(&problem, &config).unwrap()
        };
        let known = solved(1e-2).relative_gap;
        assert!(known < 1e-2, "{known}");
        assert_eq!(solved(1e-20).relative_gap, 1.0);
    });
}
