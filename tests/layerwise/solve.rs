//! Supports and values against their definitions.

use burn_lean::layerwise::{
    Gram, Keep, LayerProblem, Method, ProblemConfig, Pull, Support, back_solve, solve,
};

use crate::naive::{Layer, close, dot, gauss, times};

pub(crate) const METHODS: [Method; 6] = [
    Method::Magnitude,
    Method::Wanda,
    Method::SparseGpt { block: 4 },
    Method::Obs,
    Method::Splitting,
    Method::BestSubset,
];

/// Every row's values are those of its own normal equations, also where rows share a support.
#[test]
fn the_back_solve_is_the_minimum_on_the_support() {
    let layer = Layer::random(80, 9, 4, 11);
    let mut kept: Vec<bool> = (0..36).map(|at| at % 3 != 0).collect();
    kept[27..36].fill(false);
    let support = Support::new(9, kept.clone()).unwrap();
    let solution = back_solve(&layer.problem(), &support).unwrap();
    let mut total = 0.0;
    for row in 0..4 {
        let (best, loss) = layer.best(row, &kept[row * 9..row * 9 + 9]);
        total += loss;
        for (found, expected) in solution.weights[row * 9..].iter().zip(best) {
            assert!(
                (f64::from(*found) - expected).abs() < 1e-5,
                "{found} {expected}"
            );
        }
    }
    assert!(
        close(solution.objective, total, 1e-4),
        "{} {total}",
        solution.objective
    );
}

/// Greedy removal with everything solved again each time, at every number of weights.
#[test]
fn elimination_is_greedy_optimal_brain_surgeon() {
    let layer = Layer::random(60, 8, 3, 12);
    let problem = layer.problem();
    let left = |weights| solve(&problem, &Keep::Weights(weights), &Method::Obs).unwrap();
    let mut kept = vec![true; 24];
    for removed in 0..24 {
        let (left, next) = (left(24 - removed), left(23 - removed));
        let loss = next.objective - left.objective;
        assert_eq!(left.support.kept(), kept, "{removed}");
        let cost = |at: usize| {
            let row = at / 8;
            let mut without = kept[row * 8..row * 8 + 8].to_vec();
            let before = layer.best(row, &without).1;
            without[at % 8] = false;
            layer.best(row, &without).1 - before
        };
        let alive: Vec<usize> = (0..24).filter(|at| kept[*at]).collect();
        let costs: Vec<(usize, f64)> = alive.into_iter().map(|at| (at, cost(at))).collect();
        let least = costs.iter().min_by(|a, b| a.1.total_cmp(&b.1)).unwrap();
        assert!(close(loss, least.1, 1e-3), "{removed}: {loss} {}", least.1);
        kept[least.0] = false;
    }
}

/// Column by column with an explicit inverse: what SparseGPT's Cholesky factor stands for.
#[test]
fn sparse_gpt_updates_what_is_right_of_a_pruned_weight() {
    let layer = Layer::random(60, 8, 3, 15);
    let keep = Keep::NOfM { n: 2, m: 4 };
    let solution = solve(&layer.problem(), &keep, &Method::SparseGpt { block: 4 }).unwrap();
    for row in 0..3 {
        let mut w = layer.dense(row);
        for first in [0, 4] {
            // Scores of the group with the weights as they are by then.
            let inverse = |from: usize| -> Vec<Vec<f64>> {
                let h = layer.hessian();
                let part: Vec<Vec<f64>> = h[from..].iter().map(|r| r[from..].to_vec()).collect();
                (0..8 - from)
                    .map(|k| {
                        let unit = (0..8 - from).map(|j| f64::from(u8::from(j == k))).collect();
                        gauss(part.clone(), unit)
                    })
                    .collect()
            };
            let scores: Vec<f64> = (first..first + 4)
                .map(|j| w[j] * w[j] / inverse(j)[0][0])
                .collect();
            let mut order: Vec<usize> = (0..4).collect();
            order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
            for j in first..first + 4 {
                if order[..2].contains(&(j - first)) {
                    continue;
                }
                let p = inverse(j);
                let error = w[j] / p[0][0];
                for k in j..8 {
                    w[k] -= error * p[0][k - j];
                }
                w[j] = 0.0;
            }
        }
        for (found, expected) in solution.weights[row * 8..].iter().zip(w) {
            assert!(
                (f64::from(*found) - expected).abs() < 1e-4,
                "{found} {expected}"
            );
        }
    }
}

/// Every method keeps what it is told to, in the shape it is told, with zeros elsewhere, and says
/// what its weights cost.
#[test]
fn all_methods_obey_all_shapes() {
    let layer = Layer::random(60, 12, 5, 16);
    let problem = layer.problem();
    for keep in [
        Keep::Weights(23),
        Keep::Weights(0),
        Keep::Weights(60),
        Keep::PerRow(5),
        Keep::NOfM { n: 2, m: 4 },
        Keep::NOfM { n: 1, m: 3 },
    ] {
        for method in METHODS {
            let solution = solve(&problem, &keep, &method).unwrap();
            let kept = solution.support.kept();
            let most = match keep {
                Keep::Weights(count) => count,
                Keep::PerRow(count) => 5 * count,
                Keep::NOfM { n, m } => 60 / m * n,
            };
            assert_eq!(solution.support.count(), most, "{keep:?} {method:?}");
            let pairs = solution.weights.iter().zip(kept);
            assert!(pairs.clone().all(|(w, kept)| *kept || *w == 0.0));
            let count = |part: &[bool]| part.iter().filter(|kept| **kept).count();
            match keep {
                Keep::PerRow(n) => assert!(kept.chunks(12).all(|row| count(row) == n)),
                Keep::NOfM { n, m } => assert!(kept.chunks(m).all(|group| count(group) == n)),
                Keep::Weights(_) => {}
            }
            let rows = solution.weights.chunks(12).enumerate();
            let loss: f64 = rows
                .map(|(row, w)| {
                    let w: Vec<f64> = w.iter().map(|w| f64::from(*w)).collect();
                    layer.loss(row, &w)
                })
                .sum();
            let error = (solution.objective - loss).abs();
            assert!(error <= 1e-4 * loss + 1e-9, "{} {loss}", solution.objective);
        }
    }
}

/// The objective of the dense weights is 0, and `scale` that of none, without the ridge.
#[test]
fn scale_is_the_error_of_nothing() {
    let layer = Layer::random(60, 6, 2, 19);
    let problem = LayerProblem::new(&layer.gram(), &layer.w, &ProblemConfig::new()).unwrap();
    let none: f64 = (0..2).map(|row| layer.loss(row, &[0.0; 6])).sum();
    let squares: f64 = (0..2)
        .map(|row| dot(&layer.dense(row), &layer.dense(row)))
        .sum();
    let without = none - 0.5 * problem.ridge() * squares;
    assert!(close(problem.scale(), without, 1e-4));
    assert!(close(problem.objective(&[0.0; 12]).unwrap(), none, 1e-4));
    assert!(close(problem.error(&[0.0; 12]).unwrap(), without, 1e-4));
    assert!(problem.objective(&layer.w).unwrap().abs() < 1e-6 * none);
    let h = layer.hessian();
    let w = layer.dense(0);
    assert!(dot(&w, &times(&h, &w)) > 0.0);
}

/// One weight of 1 and inputs ±1 with a ridge as large as they are: pulled to zero it is fitted to ½,
/// and half of the output is a quarter of its square. Pulled to itself it stays.
#[test]
fn an_error_has_no_ridge_in_it() {
    let mut gram = Gram::with_targets(1, 1);
    gram.add_with_targets(&[1.0, -1.0], &[1.0, -1.0]).unwrap();
    for (pull, fitted, objective) in [(Pull::Zero, 0.5_f32, 0.25), (Pull::Dense, 1.0, 0.0)] {
        let config = ProblemConfig {
            ridge: 1.0,
            pull,
            ..ProblemConfig::new()
        };
        let problem = LayerProblem::new(&gram, &[1.0], &config).unwrap();
        let solution = back_solve(&problem, &Support::full(1, 1)).unwrap();
        assert_eq!(solution.weights, [fitted]);
        assert_eq!(solution.objective, objective);
        assert_eq!(problem.scale(), 0.5);
        let off = f64::from(1.0 - fitted);
        assert_eq!(problem.error(&solution.weights), Ok(0.5 * off * off));
    }
}

/// A block of all columns, whatever its number.
#[test]
fn sparse_gpt_takes_a_block_without_a_limit() {
    let layer = Layer::random(40, 8, 2, 20);
    let problem = layer.problem();
    let keep = Keep::NOfM { n: 2, m: 4 };
    let of = |block| solve(&problem, &keep, &Method::SparseGpt { block }).unwrap();
    assert_eq!(of(usize::MAX), of(8));
}
