//! Every error, provoked.

use burn_lean::layerwise::{
    Gram, Keep, LayerProblem, LayerwiseError, Method, ProblemConfig, Support, back_solve, masked,
    solve,
};

use crate::naive::Layer;

fn mismatch(what: &'static str, expected: usize, found: usize) -> LayerwiseError {
    LayerwiseError::Mismatch {
        what,
        expected,
        found,
    }
}

#[test]
fn rows_that_do_not_fit_are_refused_whole() {
    let mut gram = Gram::new(3);
    let error = gram.add(&[1.0; 4]).unwrap_err();
    assert_matches!(
        error,
        LayerwiseError::Mismatch {
            expected: 3,
            found: 4,
            ..
        }
    );
    let error = gram.add(&[1.0, f32::NAN, 2.0]).unwrap_err();
    assert_matches!(error, LayerwiseError::NotFinite { index: 1, .. });
    assert_eq!(gram.rows(), 0);
    let mut targets = Gram::with_targets(3, 2);
    assert_matches!(targets.add(&[1.0; 3]), Err(LayerwiseError::Mismatch { .. }));
    let error = targets.add_with_targets(&[1.0; 6], &[1.0; 3]).unwrap_err();
    assert_matches!(
        error,
        LayerwiseError::Mismatch {
            expected: 4,
            found: 3,
            ..
        }
    );
    let error = targets.merge(&gram).unwrap_err();
    assert_eq!(error, mismatch("outputs", 2, 0));
}

#[test]
fn a_gram_matrix_without_rows_is_no_problem() {
    let config = ProblemConfig::new();
    let error = LayerProblem::new(&Gram::new(2), &[1.0, 2.0], &config).unwrap_err();
    assert_eq!(error, LayerwiseError::NoRows);
}

/// Two equal features without ridge.
#[test]
fn a_singular_system_names_feature_and_ridge() {
    let mut gram = Gram::new(2);
    gram.add(&[1.0, 1.0, 2.0, 2.0]).unwrap();
    let config = ProblemConfig {
        ridge: 0.0,
        ..ProblemConfig::new()
    };
    let error = LayerProblem::new(&gram, &[1.0, 1.0], &config).unwrap_err();
    let expected = LayerwiseError::NotPositiveDefinite {
        feature: 1,
        ridge: 0.0,
    };
    assert_eq!(error, expected);
    assert_says!(error, "raise the ridge");
    assert!(LayerProblem::new(&gram, &[1.0, 1.0], &ProblemConfig::new()).is_ok());
}

/// Their squares are F32 numbers, their products with the targets are not.
#[test]
fn products_that_overflow_are_no_problem() {
    let mut gram = Gram::with_targets(1, 1);
    gram.add_with_targets(&[1e19, -1e19], &[1e20, -1e20])
        .unwrap();
    let error = LayerProblem::new(&gram, &[1.0], &ProblemConfig::new()).unwrap_err();
    let expected = LayerwiseError::NotFinite {
        what: "the sum of products of inputs and targets",
        index: 0,
    };
    assert_eq!(error, expected);
}

/// Two features that are nearly one: what is left of two weights is their sum.
#[test]
fn weights_beyond_the_largest_number_are_an_error() {
    let mut gram = Gram::new(2);
    gram.add(&[1.0, 1.01, -2.0, -2.01, 3.0, 2.99]).unwrap();
    let problem = LayerProblem::new(&gram, &[3e38, 3.1e38], &ProblemConfig::new()).unwrap();
    let solved = |method| solve(&problem, &Keep::Weights(1), &method);
    assert!(solved(Method::Magnitude).is_ok());
    for method in [
        Method::SparseGpt { block: 2 },
        Method::Obs,
        Method::BestSubset,
    ] {
        let found = solved(method);
        let what = "the solution";
        let expected = LayerwiseError::NotFinite { what, index: 1 };
        assert_eq!(found.unwrap_err(), expected, "{method:?}");
    }
}

#[test]
fn configs_out_of_range_are_refused() {
    let layer = Layer::random(20, 4, 2, 41);
    let gram = layer.gram();
    let refused = |config: ProblemConfig| LayerProblem::new(&gram, &layer.w, &config).unwrap_err();
    for ridge in [-1.0, f64::NAN, f64::INFINITY] {
        let error = refused(ProblemConfig {
            ridge,
            ..ProblemConfig::new()
        });
        assert_matches!(error, LayerwiseError::InvalidConfig { field: "ridge", .. });
    }
    let importance = |values: &[f64]| ProblemConfig {
        importance: Some(values.to_vec()),
        ..ProblemConfig::new()
    };
    let error = refused(importance(&[1.0, 0.0]));
    assert_matches!(
        error,
        LayerwiseError::InvalidConfig {
            field: "importance",
            ..
        }
    );
    assert_matches!(refused(importance(&[1.0])), LayerwiseError::Mismatch { .. });
}

#[test]
fn shapes_that_do_not_fit_are_refused() {
    let problem = Layer::random(20, 6, 2, 42).problem();
    let refused = |keep: Keep| solve(&problem, &keep, &Method::Magnitude).unwrap_err();
    let error = refused(Keep::NOfM { n: 2, m: 4 });
    assert_eq!(
        error,
        LayerwiseError::DoesNotDivide {
            group: 4,
            features: 6
        }
    );
    assert_matches!(
        refused(Keep::NOfM { n: 0, m: 0 }),
        LayerwiseError::DoesNotDivide { .. }
    );
    let error = refused(Keep::Weights(13));
    assert_eq!(
        error,
        LayerwiseError::KeepsTooMany {
            keep: 13,
            weights: 12
        }
    );
    assert_matches!(
        refused(Keep::PerRow(7)),
        LayerwiseError::KeepsTooMany { .. }
    );
    assert_matches!(
        refused(Keep::NOfM { n: 4, m: 3 }),
        LayerwiseError::KeepsTooMany { .. }
    );
    let error = Support::new(6, vec![true; 13]).unwrap_err();
    assert_eq!(error, mismatch("weights in whole rows", 12, 13));
    let small = Support::full(1, 6);
    let of_support = mismatch("weights of the support", 12, 6);
    assert_eq!(back_solve(&problem, &small).unwrap_err(), of_support);
    assert_eq!(masked(&problem, &small).unwrap_err(), of_support);
    let groups = Keep::NOfM { n: 1, m: 4 };
    assert_eq!(
        groups.highest(&[0.0; 12], 6).unwrap_err(),
        LayerwiseError::DoesNotDivide {
            group: 4,
            features: 6
        }
    );
    let error = Keep::Weights(1).highest(&[0.0; 13], 6).unwrap_err();
    assert_eq!(error, mismatch("scores in whole rows", 12, 13));
    let error = problem.objective(&[0.0; 5]).unwrap_err();
    assert_eq!(error, mismatch("weights", 12, 5));
}

#[test]
fn an_objective_beyond_f64_is_refused() {
    let mut gram = Gram::new(2);
    gram.add(&[1.0, 1.0, 2.0, 3.0]).unwrap();
    let config = ProblemConfig {
        ridge: 1e300,
        ..ProblemConfig::new()
    };
    let error = LayerProblem::new(&gram, &[1.0, 1e20, 1.0, 1.0], &config).unwrap_err();
    let LayerwiseError::NotFinite { what, index: 0 } = error else {
        panic!("{error}");
    };
    assert_says!(what, "ridge");
}
