//! Every part of the solver against the slow F64 reference, on every device.

use burn::tensor::Device;
use burn_lean::prune::{
    Budget, ChitaConfig, LayerKind, Layout, Method, SolverConfig, problem::Step, solve,
};

use crate::reference::{Plain, distance, dot, vector};
use crate::support::{each_device, numbers, values};

fn back_solve(k: usize) -> SolverConfig {
    SolverConfig::new(Budget::Keep(k)).with_method(Method::BackSolve)
}

/// F32 products of a few dozen terms: some 1e-6 of the largest one.
const F32: f64 = 2e-5;

#[test]
fn the_objective_is_that_of_the_formula() {
    each_device(|target| {
        for first_order in [0.0, 0.25] {
            let plain = Plain {
                first_order,
                ..Plain::random(1, 9, 20)
            };
            let problem = plain.problem(&target.device);
            let w: Vec<f64> = numbers(77, 20).iter().map(|w| f64::from(*w)).collect();
            let weights = vector(&w, &target.device);

            let objective = problem.objective(weights).unwrap();
            let expected = plain.objective(&w);
            assert!((objective.total() - expected).abs() < F32 * expected.abs());
        }
    });
}

#[test]
fn both_forms_of_the_back_solve_reach_the_minimum_on_both_sides_of_k_equal_n() {
    each_device(|target| {
        for first_order in [0.0, 0.1] {
            for k in [1, 11, 12, 13, 29] {
                let plain = Plain {
                    first_order,
                    ..Plain::random(2, 12, 30)
                };
                let solution = solve(&plain.problem(&target.device), &back_solve(k)).unwrap();
                let expected = plain.back_solve(&solution.support);
                assert!(
                    distance(&values(solution.weights), &expected) < 1e-4,
                    "k = {k}"
                );
                assert!(
                    solution.relative_gap < 1e-3,
                    "k = {k}: {}",
                    solution.relative_gap
                );
            }
        }
    });
}

#[test]
fn each_splice_lowers_the_objective() {
    for seed in 0..4 {
        let plain = Plain::random(200 + seed, 15, 60);
        // Stages would leave less to splice.
        let chita = ChitaConfig::new().with_stages(0);
        let config = SolverConfig::new(Budget::Keep(15)).with_method(Method::Chita(chita));
        each_device(|target| {
            let solution = solve(&plain.problem(&target.device), &config).unwrap();
            let splices = solution.trace.iter().filter(|at| at.step == Step::Splice);
            assert!(splices.count() > 0, "seed {seed}: nothing to splice");
            for pair in solution.trace.windows(2) {
                let rise = pair[1].objective - pair[0].objective;
                assert!(
                    rise <= F32 * pair[0].objective.abs(),
                    "seed {seed}: {pair:?}"
                );
            }
        });
    }
}

#[test]
fn leaving_out_negligible_samples_does_not_change_the_minimum() {
    // Half of the samples are 10⁻⁴ as large: left out by the search, not by the last minimum.
    let mut plain = Plain::random(5, 40, 60);
    for row in plain.gradients.iter_mut().step_by(2) {
        row.iter_mut().for_each(|g| *g *= 1e-4);
    }
    each_device(|target| {
        let config = SolverConfig::new(Budget::Keep(45));
        let solution = solve(&plain.problem(&target.device), &config).unwrap();
        let expected = plain.back_solve(&solution.support);
        assert!(distance(&values(solution.weights), &expected) < 1e-4);
    });
}

/// 195 gradients of which none moves a weight against the ridge, along so few directions that
/// together they do.
#[test]
fn samples_that_matter_together_are_not_left_out() {
    let mut plain = Plain::random(8, 200, 60);
    let directions: Vec<Vec<f64>> = plain.gradients[5..9].to_vec();
    let bound = 0.05 * plain.ridge * 200.0;
    for (index, row) in plain.gradients[5..].iter_mut().enumerate() {
        let direction = &directions[index % 4];
        let length = (0.9 * bound / dot(direction, direction)).sqrt();
        *row = direction.iter().map(|x| length * x).collect();
    }
    each_device(|target| {
        let problem = plain.problem(&target.device);
        let solution = solve(&problem, &SolverConfig::new(Budget::Keep(20))).unwrap();
        let [.., searched, last] = &solution.trace[..] else {
            panic!("a search has steps")
        };
        assert!((last.objective / searched.objective - 1.0).abs() < 1e-4);
        let magnitude = solve(&problem, &back_solve(20)).unwrap();
        assert!(solution.objective < magnitude.objective);
    });
}

#[test]
fn a_block_of_everything_is_no_block() {
    let plain = Plain {
        first_order: 0.1,
        ..Plain::random(6, 10, 20)
    };
    each_device(|target| {
        let problem = plain.problem(&target.device);
        let whole = solve(&problem, &back_solve(9)).unwrap();
        let block = solve(&problem, &back_solve(9).with_block_size(Some(20))).unwrap();
        assert_eq!(block.support, whole.support);
        let expected: Vec<f64> = values(whole.weights)
            .iter()
            .map(|w| f64::from(*w))
            .collect();
        assert!(distance(&values(block.weights), &expected) < F32);
        // The trace holds the objective of the block-diagonal problem, here the same one.
        assert!((block.trace[0].objective - whole.objective).abs() < F32 * whole.objective.abs());
    });
}

#[test]
fn blocks_are_solved_each_by_itself() {
    let plain = Plain::random(7, 10, 24);
    each_device(|target| {
        let problem = plain.problem(&target.device);
        let solution = solve(&problem, &back_solve(10).with_block_size(Some(8))).unwrap();
        let found = values(solution.weights);
        for block in 0..3 {
            let range = 8 * block..8 * block + 8;
            let alone = Plain {
                gradients: plain
                    .gradients
                    .iter()
                    .map(|row| row[range.clone()].to_vec())
                    .collect(),
                dense: plain.dense[range.clone()].to_vec(),
                ..plain.clone()
            };
            let kept = solution
                .support
                .iter()
                .filter(|index| range.contains(index));
            let kept: Vec<usize> = kept.map(|index| index - range.start).collect();
            assert!(distance(&found[range], &alone.back_solve(&kept)) < 1e-4);
        }
    });
}

#[test]
fn tempering_is_the_problem_of_shorter_and_longer_gradients() {
    let plain = Plain {
        first_order: 0.1,
        ..Plain::random(13, 9, 30)
    };
    // Exponent ½, a zero row stays one.
    let mut expected = plain.clone();
    expected.gradients[4].fill(0.0);
    let start = expected.clone();
    let square = |rows: &[Vec<f64>]| rows.iter().map(|row| dot(row, row)).sum::<f64>();
    for row in &mut expected.gradients {
        let norm = dot(row, row).sqrt();
        row.iter_mut().for_each(|g| *g /= norm.max(1e-9).sqrt());
    }
    let keep = (square(&start.gradients) / square(&expected.gradients)).sqrt();
    expected
        .gradients
        .iter_mut()
        .flatten()
        .for_each(|g| *g *= keep);
    each_device(|target| {
        let tempered = start.problem(&target.device).with_tempering(0.5).unwrap();
        let same = expected.problem(&target.device);
        let w = vector(&vec![0.25; 30], &target.device);
        let found = tempered.objective(w.clone()).unwrap().total();
        let value = expected.objective(&[0.25; 30]);
        assert!((found - value).abs() < 1e-4 * value.abs());
        for method in [
            Method::DiagonalFisher,
            Method::WoodFisher { block_size: 8 },
            Method::Chita(ChitaConfig::new()),
        ] {
            let config = SolverConfig::new(Budget::Keep(10)).with_method(method);
            let found = solve(&tempered, &config).unwrap();
            let expected = solve(&same, &config).unwrap();
            assert_eq!(found.support, expected.support);
            let difference = (found.objective - expected.objective).abs();
            assert!(difference < 1e-4 * expected.objective.abs());
        }
        let back = tempered.with_tempering(0.0).unwrap();
        let found = back.objective(w.clone()).unwrap().total();
        assert!((found - start.objective(&[0.25; 30])).abs() < F32 * found.abs());
    });
}

/// A row whose squares are below the smallest F32 becomes as long as the other one: of both the half, so
/// that without the first weight ½ · ½ is lost, and λ = 0.05.
#[test]
fn tempering_sees_gradients_whose_squares_underflow() {
    let plain = Plain {
        gradients: vec![vec![2e-23, 0.0], vec![0.0, 1.0]],
        dense: vec![1.0, 1.0],
        ridge: 0.05,
        first_order: 0.0,
    };
    each_device(|target| {
        let tempered = plain.problem(&target.device).with_tempering(1.0).unwrap();
        let without = vector(&[0.0, 1.0], &target.device);
        let found = tempered.objective(without).unwrap().total();
        assert!((found - 0.3).abs() < 1e-5, "{found}");
    });
}

/// A block is a parameter at most, however large it may be.
#[test]
fn blocks_without_a_limit_are_parameters() {
    let mut layout = Layout::new();
    layout.push("fc1.weight", [4, 3], LayerKind::Linear, 2.0);
    layout.push("fc2.weight", [3, 2], LayerKind::Linear, 2.0);
    let problem = Plain::random(5, 9, 18).problem_with(layout, &Device::flex());
    let solved = |block_size| {
        let method = Method::WoodFisher { block_size };
        let config = SolverConfig::new(Budget::Keep(9)).with_method(method);
        let solution = solve(&problem, &config).unwrap();
        (solution.support, values(solution.weights))
    };
    assert_eq!(solved(usize::MAX), solved(12));
}

/// With one block of all weights the score is what removing a weight alone costs, the others
/// re-solved: over fewer samples than weights, which are the unknowns then, and over more.
#[test]
fn blocks_score_weights_by_what_their_removal_costs_on_both_sides_of_n() {
    each_device(|target| {
        for n in [6, 19, 20, 60] {
            let plain = Plain::random(31, n, 20);
            let mut costs: Vec<(f64, usize)> = (0..20)
                .map(|pruned| {
                    let others: Vec<usize> = (0..20).filter(|index| *index != pruned).collect();
                    (plain.objective(&plain.back_solve(&others)), pruned)
                })
                .collect();
            costs.sort_by(|a, b| b.0.total_cmp(&a.0));
            for k in [3, 10, 17] {
                let mut expected: Vec<usize> = costs[..k].iter().map(|(_, index)| *index).collect();
                expected.sort_unstable();
                let config = SolverConfig::new(Budget::Keep(k))
                    .with_method(Method::WoodFisher { block_size: 20 });
                let solution = solve(&plain.problem(&target.device), &config).unwrap();
                assert_eq!(solution.support, expected, "n {n}, k {k}");
                let best = plain.back_solve(&expected);
                assert!(distance(&values(solution.weights), &best) < 1e-4);
            }
        }
    });
}
