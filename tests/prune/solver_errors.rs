//! Every way in which a problem or its configuration is refused.

use std::collections::BTreeMap;

use burn::tensor::{Device, Tensor};
use burn_lean::prune::{
    Budget, ChitaConfig, GradientMatrix, Groups, LayerKind, Layout, Method, Problem, PruneError,
    SolverConfig, SparsityPattern, solve,
};

use crate::reference::Plain;
use crate::support::each_device;

fn refused(config: SolverConfig) -> PruneError {
    let mut layout = Layout::new();
    layout.push("fc1.weight", [4, 3], LayerKind::Linear, 2.0);
    layout.push("fc2.weight", [3, 2], LayerKind::Linear, 2.0);
    let problem = Plain::random(1, 5, 18).problem_with(layout, &Device::flex());
    solve(&problem, &config).unwrap_err()
}

#[test]
fn a_sparsity_is_a_fraction() {
    for sparsity in [-0.1, 1.0, 90.0, f64::NAN] {
        let error = refused(SolverConfig::new(Budget::Sparsity(sparsity)));
        assert_matches!(error, PruneError::Sparsity { .. });
    }
    let error = refused(SolverConfig::new(Budget::Sparsity(90.0)));
    assert!(error.to_string().contains("percent are divided by 100"));
}

#[test]
fn something_is_kept_and_something_pruned() {
    for k in [0, 18, 19] {
        let error = refused(SolverConfig::new(Budget::Keep(k)));
        let expected = PruneError::KeptCount {
            k,
            parameters: 18,
            path: None,
        };
        assert_eq!(error, expected);
    }
    // 0.9 of 6 weights keeps none.
    let error = refused(SolverConfig::new(Budget::PerLayer(0.9)));
    let path = Some("fc2.weight".to_string());
    assert_eq!(
        error,
        PruneError::KeptCount {
            k: 0,
            parameters: 6,
            path
        }
    );
}

/// ⌊(1 − 0.9) · 400⌋ in F64 is 39, and an output of the head has 40 weights.
#[test]
fn a_layer_that_keeps_less_than_a_group_is_refused() {
    let mut layout = Layout::new();
    layout.push("body.weight", [20, 30], LayerKind::Linear, 2.0);
    layout.push("head.weight", [40, 10], LayerKind::Linear, 2.0);
    let problem = Plain::random(1, 3, 1000).problem_with(layout, &Device::flex());
    let config = |budget| {
        SolverConfig::new(budget)
            .with_pattern(SparsityPattern::Groups(Groups::Outputs))
            .with_method(Method::Magnitude)
    };
    let error = solve(&problem, &config(Budget::PerLayer(0.9))).unwrap_err();
    assert_matches!(error, PruneError::Infeasible { .. });
    assert_says!(error, "39", "`head.weight`", "40");
    // With 43 or 44 there is room for one.
    let targets = BTreeMap::from([("head.weight".to_string(), 0.89)]);
    let solution = solve(&problem, &config(Budget::PerLayerTargets(targets))).unwrap();
    let of_head = solution.support.iter().filter(|index| **index >= 600);
    assert_eq!(of_head.count(), 40);
}

#[test]
fn targets_name_parameters_that_exist() {
    let targets = BTreeMap::from([("fc3.weight".to_string(), 0.5)]);
    let error = refused(SolverConfig::new(Budget::PerLayerTargets(targets)));
    assert_says!(error, "fc1.weight, fc2.weight");
}

#[test]
fn patterns_divide_their_layers() {
    let pattern = SparsityPattern::NM { n: 2, m: 4 };
    let error = refused(SolverConfig::new(Budget::Pattern).with_pattern(pattern));
    assert_eq!(
        error,
        PruneError::PatternDoesNotDivide {
            pattern: "2:4".into(),
            path: "fc2.weight".into(),
            shape: vec![3, 2],
            axis: 0,
            multiple: 4
        }
    );
    let heads = SparsityPattern::Groups(Groups::Heads(2));
    let error = refused(SolverConfig::new(Budget::Sparsity(0.5)).with_pattern(heads));
    assert_matches!(
        error,
        PruneError::PatternDoesNotDivide {
            axis: 1,
            multiple: 2,
            ..
        }
    );
}

#[test]
fn numbers_outside_of_their_range_are_named() {
    let half = || SolverConfig::new(Budget::Sparsity(0.5));
    let cases = [
        (
            "expansion",
            half().with_method(Method::Chita(ChitaConfig::new().with_expansion(0.5))),
        ),
        (
            "block_size",
            half()
                .with_method(Method::Magnitude)
                .with_block_size(Some(3)),
        ),
        ("block_size", half().with_block_size(Some(0))),
        (
            "block_size",
            half().with_method(Method::WoodFisher { block_size: 0 }),
        ),
        (
            "pattern",
            half().with_pattern(SparsityPattern::NM { n: 2, m: 2 }),
        ),
        ("budget", SolverConfig::new(Budget::Pattern)),
        (
            "flops.kept",
            SolverConfig::new(Budget::Flops {
                kept: 1.5,
                sparsity: None,
            }),
        ),
    ];
    for (name, config) in cases {
        match refused(config) {
            PruneError::InvalidConfig { field, .. } => assert_eq!(field, name),
            other => panic!("{name}: {other}"),
        }
    }
}

#[test]
fn a_group_that_does_not_fit_is_infeasible() {
    // The smallest output is one of fc2, of 3 weights.
    let outputs = SparsityPattern::Groups(Groups::Outputs);
    let config = SolverConfig::new(Budget::Keep(2)).with_pattern(outputs);
    assert_matches!(refused(config), PruneError::Infeasible { .. });
}

#[test]
fn ridge_and_first_order_are_checked() {
    let problem = Plain::random(1, 3, 4).problem(&Device::flex());
    for ridge in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let error = problem.clone().with_ridge(ridge).unwrap_err();
        assert_matches!(error, PruneError::InvalidConfig { field: "ridge", .. });
    }
    for exponent in [-0.1, 1.1, f64::NAN] {
        let error = problem.clone().with_tempering(exponent).unwrap_err();
        assert_matches!(
            error,
            PruneError::InvalidConfig {
                field: "tempering",
                ..
            }
        );
    }
    for a in [-1.0, f64::NAN] {
        let error = problem.clone().with_first_order(a).unwrap_err();
        assert_matches!(
            error,
            PruneError::InvalidConfig {
                field: "first_order",
                ..
            }
        );
    }
}

#[test]
fn numbers_that_are_not_finite_are_named_with_path_and_sample() {
    each_device(|target| {
        let mut layout = Layout::new();
        layout.push("a", [2], LayerKind::Other, 2.0);
        layout.push("b", [2], LayerKind::Other, 2.0);
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let gradients = [[1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, bad]];
            let gradients = Tensor::<2>::from_floats(gradients, &target.device);
            let gradients = GradientMatrix::from_tensor(gradients).unwrap();
            // A zero weight does not hide an infinite gradient.
            let dense = Tensor::<1>::from_floats([1.0, 1.0, 1.0, 0.0], &target.device);
            match Problem::new(gradients, dense, layout.clone()).unwrap_err() {
                PruneError::NonFiniteGradient {
                    sample,
                    path,
                    index,
                    value,
                } => {
                    assert_eq!((sample, path.as_str(), index), (1, "b", 1));
                    assert!(!value.is_finite());
                }
                other => panic!("{other}"),
            }

            let gradients = Tensor::<2>::from_floats([[1.0, 2.0, 3.0, 4.0]], &target.device);
            let gradients = GradientMatrix::from_tensor(gradients).unwrap();
            let dense = Tensor::<1>::from_floats([1.0, 1.0, bad, 0.0], &target.device);
            match Problem::new(gradients, dense, layout.clone()).unwrap_err() {
                PruneError::NonFiniteWeight { path, index, .. } => {
                    assert_eq!((path.as_str(), index), ("b", 0));
                }
                other => panic!("{other}"),
            }
        }
    });
}

#[test]
fn gradients_too_large_to_multiply_are_named() {
    let device = Device::flex();
    let gradients = Tensor::<2>::from_floats([[1.0, 2.0], [3e38, 3e38]], &device);
    let gradients = GradientMatrix::from_tensor(gradients).unwrap();
    let dense = Tensor::<1>::from_floats([2.0, 2.0], &device);
    let error = Problem::new(gradients, dense, Layout::anonymous(2)).unwrap_err();
    assert_eq!(error, PruneError::Overflow { sample: 1 });
}

#[test]
fn sizes_that_belong_together_are_compared() {
    let device = Device::flex();
    let gradients = || GradientMatrix::from_tensor(Tensor::ones([2, 3], &device)).unwrap();
    let dense = |p: usize| Tensor::<1>::ones([p], &device);
    let error = Problem::new(gradients(), dense(4), Layout::anonymous(3)).unwrap_err();
    assert_matches!(
        error,
        PruneError::Mismatch {
            expected: 3,
            found: 4,
            ..
        }
    );
    let error = Problem::new(gradients(), dense(3), Layout::anonymous(5)).unwrap_err();
    assert_matches!(
        error,
        PruneError::Mismatch {
            expected: 3,
            found: 5,
            ..
        }
    );
    let problem = Problem::new(gradients(), dense(3), Layout::anonymous(3)).unwrap();
    let error = problem.objective(dense(2)).unwrap_err();
    assert_matches!(
        error,
        PruneError::Mismatch {
            expected: 3,
            found: 2,
            ..
        }
    );
}
