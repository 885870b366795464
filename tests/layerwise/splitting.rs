//! Supports of large layers, and values by conjugate gradients.

use burn_lean::layerwise::{Keep, LayerProblem, Method, ProblemConfig, back_solve, solve};

use crate::naive::Layer;

fn keeps(outputs: usize, inputs: usize) -> [Keep; 4] {
    [
        Keep::Weights(outputs * inputs / 2),
        Keep::Weights(outputs * inputs / 10),
        Keep::PerRow(inputs / 3),
        Keep::NOfM { n: 2, m: 4 },
    ]
}

#[test]
fn pulling_all_weights_at_once_is_below_choosing_one_after_the_other() {
    let (mut sums, mut best) = ([0.0; 3], 0.0);
    for seed in 0..6 {
        let layer = Layer::random(200, 48, 16, seed);
        let problem = layer.problem();
        for keep in keeps(16, 48) {
            let objective = |method| solve(&problem, &keep, &method).unwrap().objective;
            // As a share of what magnitude has, so that all shapes count.
            let magnitude = objective(Method::Magnitude);
            let others = [
                Method::SparseGpt { block: 128 },
                Method::Obs,
                Method::Splitting,
            ];
            for (sum, method) in sums.iter_mut().zip(others) {
                *sum += objective(method) / magnitude;
            }
            best += objective(Method::BestSubset) / magnitude;
        }
    }
    let [sparse_gpt, obs, splitting] = sums;
    assert!(splitting < obs && obs < sparse_gpt, "{sums:?}");
    assert!(
        best <= splitting && splitting < 1.1 * best,
        "{sums:?}, {best}"
    );
}

#[test]
fn values_are_nearly_those_that_are_exact_on_the_support() {
    for seed in 0..4 {
        let layer = Layer::random(60, 24, 8, seed);
        let problem = layer.problem();
        for keep in keeps(8, 24) {
            let found = solve(&problem, &keep, &Method::Splitting).unwrap();
            let exact = back_solve(&problem, &found.support).unwrap();
            // The iterations end where one lowers the objective by a millionth; some hundred could follow.
            let (above, least) = (found.objective - exact.objective, exact.objective);
            assert!(
                (-1e-6..=1e-3).contains(&(above / least)),
                "{keep:?}: {above} of {least}"
            );
            let is_zero = |(w, kept): (&f32, &bool)| *kept || w.to_bits() == 0;
            assert!(found.weights.iter().zip(found.support.kept()).all(is_zero));
        }
    }
}

#[test]
fn rows_of_more_importance_keep_more() {
    let layer = Layer::random(100, 24, 4, 5);
    let config = ProblemConfig {
        importance: Some(vec![1.0, 1.0, 1.0, 100.0]),
        ..ProblemConfig::new()
    };
    let problem = LayerProblem::new(&layer.gram(), &layer.w, &config).unwrap();
    let found = solve(&problem, &Keep::Weights(48), &Method::Splitting).unwrap();
    let of = |row: &[bool]| row.iter().filter(|kept| **kept).count();
    let counts: Vec<usize> = found.support.kept().chunks(24).map(of).collect();
    assert!(
        counts[..3].iter().all(|count| *count < counts[3]),
        "{counts:?}"
    );
}
