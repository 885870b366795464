//! The Gram matrix: streamed, merged, about zero and about the mean.

use burn_lean::layerwise::{Gram, LayerProblem, Method, ProblemConfig, Pull};

use crate::naive::{Layer, close, second_moments};

/// 700 rows in parts of 1, 255, 256, 188 are the sum of all.
#[test]
fn parts_add_up() {
    let layer = Layer::random(700, 7, 1, 1);
    let mut gram = Gram::new(7);
    let mut rest = &layer.x[..];
    for rows in [1, 255, 256, 188] {
        let (part, after) = rest.split_at(rows * 7);
        gram.add(part).unwrap();
        rest = after;
    }
    assert_eq!(gram.rows(), 700);
    let expected = second_moments(&layer.x, 700, 7);
    for (at, value) in gram.matrix(false).iter().enumerate() {
        assert!(
            close(*value, expected[at / 7][at % 7], 1e-5),
            "{at}: {value}"
        );
    }
}

/// Features with means of 1,000 and deviations of 1 keep five digits of their covariance.
#[test]
fn a_large_mean_costs_no_digits() {
    let mut layer = Layer::random(512, 5, 1, 2);
    let small = layer.x.clone();
    layer.x.iter_mut().for_each(|x| *x += 1000.0);
    // As the numbers are after rounding.
    let rounded: Vec<f32> = layer.x.iter().map(|x| x - 1000.0).collect();
    let mean = |x: &[f32], j: usize| -> f64 {
        x.iter()
            .skip(j)
            .step_by(5)
            .map(|x| f64::from(*x))
            .sum::<f64>()
            / 512.0
    };
    let matrix = layer.gram().matrix(true);
    let moments = second_moments(&rounded, 512, 5);
    for i in 0..5 {
        for j in 0..5 {
            let expected = moments[i][j] - mean(&rounded, i) * mean(&rounded, j);
            let found = matrix[i * 5 + j];
            assert!((found - expected).abs() < 1e-5 * moments[i][i].max(moments[j][j]));
        }
        assert!(close(
            layer.gram().mean()[i],
            1000.0 + mean(&rounded, i),
            1e-9
        ));
    }
    assert_ne!(small, rounded);
}

#[test]
fn merging_is_adding() {
    let layer = Layer::random(300, 4, 2, 3);
    let targets: Vec<f32> = (0..600).map(|at| (at as f32 * 0.37).sin() + 3.0).collect();
    let mut all = Gram::with_targets(4, 2);
    all.add_with_targets(&layer.x, &targets).unwrap();
    let mut first = Gram::with_targets(4, 2);
    first
        .add_with_targets(&layer.x[..400], &targets[..200])
        .unwrap();
    let mut second = Gram::with_targets(4, 2);
    second
        .add_with_targets(&layer.x[400..], &targets[200..])
        .unwrap();
    first.merge(&second).unwrap();
    for centered in [false, true] {
        assert_near!(first.matrix(centered).iter(), all.matrix(centered), 1e-6);
        // XᵀY and YᵀY show in the objective.
        let config = ProblemConfig {
            centered,
            ..ProblemConfig::new()
        };
        let one = LayerProblem::new(&first, &layer.w, &config).unwrap();
        let two = LayerProblem::new(&all, &layer.w, &config).unwrap();
        let (one, two) = (
            one.objective(&layer.w).unwrap(),
            two.objective(&layer.w).unwrap(),
        );
        assert!(close(one, two, 1e-5), "{one} {two}");
    }
}

/// f is half the mean squared error and the ridge, by the definition.
#[test]
fn the_objective_is_the_error_of_the_outputs() {
    let layer = Layer::random(200, 6, 2, 4);
    let targets: Vec<f32> = (0..400).map(|at| (at as f32 * 0.7).cos()).collect();
    let mut gram = Gram::with_targets(6, 2);
    gram.add_with_targets(&layer.x, &targets).unwrap();
    let importance = Some(vec![2.0, 0.5]);
    let config = ProblemConfig {
        importance,
        ..ProblemConfig::new()
    };
    let problem = LayerProblem::new(&gram, &layer.w, &config).unwrap();
    let weights: Vec<f32> = layer.w.iter().map(|w| 0.5 * w).collect();
    let mut expected = 0.0;
    for (row, importance) in [2.0, 0.5].into_iter().enumerate() {
        for at in 0..200 {
            let x = &layer.x[at * 6..at * 6 + 6];
            let w = &weights[row * 6..row * 6 + 6];
            let y: f64 = x
                .iter()
                .zip(w)
                .map(|(x, w)| f64::from(*x) * f64::from(*w))
                .sum();
            let error = y - f64::from(targets[at * 2 + row]);
            expected += importance * 0.5 * error * error / 200.0;
        }
        for j in 0..6 {
            let change = f64::from(weights[row * 6 + j]) - f64::from(layer.w[row * 6 + j]);
            expected += importance * 0.5 * problem.ridge() * change * change;
        }
    }
    let found = problem.objective(&weights).unwrap();
    assert!(close(found, expected, 1e-5), "{found} {expected}");
    // Pulled to zero, the ridge is that of the weights.
    let config = ProblemConfig {
        pull: Pull::Zero,
        ..ProblemConfig::new()
    };
    let problem = LayerProblem::new(&layer.gram(), &layer.w, &config).unwrap();
    let square: f64 = layer.w.iter().map(|w| f64::from(*w) * f64::from(*w)).sum();
    let found = problem.objective(&layer.w).unwrap();
    assert!(
        close(found, 0.5 * problem.ridge() * square, 1e-5),
        "{found}"
    );
}

/// With free means the intercept makes the mean output right.
#[test]
fn the_intercept_restores_the_mean() {
    let mut layer = Layer::random(400, 4, 1, 5);
    layer.x.iter_mut().for_each(|x| *x += 2.0);
    let targets: Vec<f32> = layer.x.chunks_exact(4).map(|x| 3.0 * x[0] + 7.0).collect();
    let mut gram = Gram::with_targets(4, 1);
    gram.add_with_targets(&layer.x, &targets).unwrap();
    let config = ProblemConfig {
        centered: true,
        ..ProblemConfig::new()
    };
    let problem = LayerProblem::new(&gram, &[3.0, 0.0, 0.0, 0.0], &config).unwrap();
    let intercept = problem.intercept(&[3.0, 0.0, 0.0, 0.0]).unwrap();
    assert!((intercept[0] - 7.0).abs() < 1e-3, "{intercept:?}");
    let plain = LayerProblem::new(&gram, &[3.0, 0.0, 0.0, 0.0], &ProblemConfig::new()).unwrap();
    assert_eq!(plain.intercept(&[3.0, 0.0, 0.0, 0.0]), None);
}

/// Whatever the weight of a feature that is always 0: the outputs are the same.
#[test]
fn weights_of_dead_features_cost_nothing() {
    let mut gram = Gram::new(2);
    gram.add(&[1.0, 0.0, -1.0, 0.0]).unwrap();
    let problem = LayerProblem::new(&gram, &[1.0, 3.0], &ProblemConfig::new()).unwrap();
    assert_eq!(problem.dead_features(), [1]);
    for weights in [[1.0, 3.0], [1.0, 0.0], [1.0, -100.0]] {
        assert_eq!(problem.objective(&weights), Ok(0.0));
        assert_eq!(problem.error(&weights), Ok(0.0));
    }
    // ½ (1 − ½)² with E x² = 1.
    assert!((problem.scale() - 0.5).abs() < 1e-12);
    assert!((problem.error(&[0.5, 3.0]).unwrap() - 0.125).abs() < 1e-12);
}

/// Squares below the smallest F32, about a mean of 0.
#[test]
fn a_feature_with_tiny_values_is_not_dead() {
    let mut gram = Gram::new(2);
    gram.add(&[1.0, 1e-23, -1.0, -1e-23]).unwrap();
    assert!(gram.dead_features(false).is_empty());
    assert!((gram.squares(false)[1] / 1e-46 - 1.0).abs() < 1e-6);
    let problem = LayerProblem::new(&gram, &[1.0, 3.0], &ProblemConfig::new()).unwrap();
    assert!(problem.dead_features().is_empty());
    let keep = burn_lean::layerwise::Keep::PerRow(2);
    let solution = burn_lean::layerwise::solve(&problem, &keep, &Method::Obs).unwrap();
    assert_near!(solution.weights.into_iter(), [1.0, 3.0], 1e-5);
}

/// A feature that is always 0 costs nothing and ends at 0; a constant one where means are free.
#[test]
fn dead_features_are_found_and_go_first() {
    let mut layer = Layer::random(100, 6, 2, 6);
    layer.x.chunks_exact_mut(6).for_each(|x| {
        x[2] = 0.0;
        x[4] = 3.0;
    });
    let gram = layer.gram();
    assert_eq!(gram.dead_features(false), [2]);
    assert_eq!(gram.dead_features(true), [2, 4]);
    for centered in [false, true] {
        let config = ProblemConfig {
            ridge: 0.0,
            centered,
            ..ProblemConfig::new()
        };
        let problem = LayerProblem::new(&gram, &layer.w, &config).unwrap();
        let dead = problem.dead_features().len();
        let keep = burn_lean::layerwise::Keep::PerRow(6 - dead);
        for method in crate::solve::METHODS {
            if matches!(method, Method::SparseGpt { .. }) {
                continue; // decides a block of columns at a time
            }
            let solution = burn_lean::layerwise::solve(&problem, &keep, &method).unwrap();
            for row in 0..2 {
                assert!(!solution.support.kept()[row * 6 + 2], "{method:?}");
                assert_eq!(solution.weights[row * 6 + 2], 0.0);
            }
            assert!(
                solution.objective < 1e-9,
                "{method:?}: {}",
                solution.objective
            );
        }
    }
}
