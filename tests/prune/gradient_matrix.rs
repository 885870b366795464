//! The store of gradients.

use burn::tensor::{Device, FloatDType, Tensor};
use burn_lean::prune::{Budget, GradientMatrix, Layout, Problem, PruneError, SolverConfig, solve};

use crate::reference::{Plain, vector};
use crate::support::{each_device, on_each, tensor};

#[test]
fn rows_that_are_pushed_are_the_matrix() {
    each_device(|target| {
        let whole = tensor(1, [6, 10], &target.device);
        let mut pushed =
            GradientMatrix::with_capacity(6, 10, FloatDType::F32, &target.device).unwrap();
        for rows in [0..1, 1..4, 4..6] {
            pushed.push(whole.clone().slice([rows, 0..10])).unwrap();
        }
        assert_eq!((pushed.samples(), pushed.filled()), (6, 6));
        let objective = |gradients| {
            let dense = tensor(2, [10], &target.device);
            let problem = Problem::new(gradients, dense, Layout::anonymous(10)).unwrap();
            problem.objective(tensor(3, [10], &target.device)).unwrap()
        };
        assert_eq!(
            objective(pushed),
            objective(GradientMatrix::from_tensor(whole).unwrap())
        );
    });
}

#[test]
fn half_storage_solves_the_problem_of_the_rounded_gradients() {
    let mut plain = Plain::random(11, 8, 20);
    let halves = |g: &mut f64| *g = half::bf16::from_f64(*g).to_f64();
    plain.gradients.iter_mut().flatten().for_each(halves);
    each_device(|target| {
        if !target.device.supports_dtype(FloatDType::BF16) {
            let refused =
                GradientMatrix::with_capacity(1, 1, FloatDType::BF16, &target.device).unwrap_err();
            assert_matches!(refused, PruneError::UnsupportedDtype { .. });
            return;
        }
        let mut gradients =
            GradientMatrix::with_capacity(8, 20, FloatDType::BF16, &target.device).unwrap();
        assert_eq!(gradients.bytes(), 8 * 20 * 2);
        for row in &plain.gradients {
            let row = vector(row, &target.device).unsqueeze::<2>();
            gradients.push(row).unwrap();
        }
        let dense = vector(&plain.dense, &target.device);
        let problem = Problem::new(gradients, dense, Layout::anonymous(20)).unwrap();
        let problem = problem.with_ridge(plain.ridge).unwrap();
        let config = SolverConfig::new(Budget::Keep(8));
        let found = solve(&problem, &config).unwrap();
        let expected = solve(&plain.problem(&Device::flex()), &config).unwrap();
        assert_eq!(found.support, expected.support);
        assert!((found.objective - expected.objective).abs() < 1e-4 * expected.objective);
    });
}

/// Of an example that the network is sure of.
#[test]
fn tempering_takes_a_gradient_that_is_next_to_nothing_beside_the_others() {
    on_each(|device| {
        let rows = Tensor::<2>::from_floats([[1.0, 0.0], [0.0, 1e-40]], device);
        let gradients = GradientMatrix::from_tensor(rows).unwrap();
        let ones = Tensor::ones([2], device);
        let problem = Problem::new(gradients, ones, Layout::anonymous(2)).unwrap();
        let problem = problem.with_tempering(1.0).unwrap();
        let objective = problem.objective(Tensor::zeros([2], device)).unwrap();
        // The first row has half of the squares, or all of them where 1e-40 is 0 on the device.
        let near = |fit: f64| (objective.fit - fit).abs() < 1e-6;
        assert!(near(0.25) || near(0.5), "{objective:?}");
        assert!(objective.total().is_finite(), "{objective:?}");
    });
}

#[test]
fn a_matrix_refuses_rows_it_was_not_made_for() {
    let device = Device::flex();
    let mut gradients = GradientMatrix::with_capacity(2, 3, FloatDType::F32, &device).unwrap();
    let wide = gradients.push(Tensor::zeros([1, 4], &device)).unwrap_err();
    assert_eq!(
        wide,
        PruneError::Mismatch {
            what: "weights per gradient",
            expected: 3,
            found: 4
        }
    );
    let many = gradients.push(Tensor::zeros([3, 3], &device)).unwrap_err();
    assert_matches!(
        many,
        PruneError::Mismatch {
            expected: 2,
            found: 3,
            ..
        }
    );
    assert_eq!(gradients.filled(), 0);

    let none = GradientMatrix::with_capacity(0, 3, FloatDType::F32, &device).unwrap_err();
    assert_eq!(none, PruneError::NoSamples);
    let none = GradientMatrix::with_capacity(2, 0, FloatDType::F32, &device).unwrap_err();
    assert_eq!(none, PruneError::NoPrunableParameter);
    let wide = GradientMatrix::with_capacity(2, 3, FloatDType::F64, &device).unwrap_err();
    assert_matches!(
        wide,
        PruneError::UnsupportedDtype {
            dtype: FloatDType::F64,
            ..
        }
    );
}

#[test]
fn a_matrix_that_is_not_full_is_no_problem_yet() {
    let device = Device::flex();
    let mut gradients = GradientMatrix::with_capacity(3, 2, FloatDType::F32, &device).unwrap();
    gradients.push(Tensor::ones([2, 2], &device)).unwrap();
    let error = Problem::new(gradients, Tensor::ones([2], &device), Layout::anonymous(2));
    assert_eq!(
        error.unwrap_err(),
        PruneError::IncompleteGradients {
            expected: 3,
            found: 2
        }
    );
}

/// Collected in shards, on devices of their own: rows, problem and solution are those of one collection.
#[test]
fn shards_of_the_fisher_samples_are_the_whole_to_the_bit() {
    let plain = Plain::random(13, 12, 30);
    let rows = |range: std::ops::Range<usize>, device: &Device| {
        let rows = plain.gradients[range.clone()].iter().flatten();
        let rows: Vec<f64> = rows.copied().collect();
        vector(&rows, device).reshape([range.len(), 30])
    };
    let config = SolverConfig::new(Budget::Keep(9));
    let solved = |gradients: GradientMatrix, device: &Device| {
        let dense = vector(&plain.dense, device);
        let problem = Problem::new(gradients, dense, Layout::anonymous(30)).unwrap();
        let solution = solve(&problem, &config).unwrap();
        (solution.support, solution.objective)
    };
    on_each(|device| {
        let whole = GradientMatrix::from_tensor(rows(0..12, device)).unwrap();
        let mut open = GradientMatrix::with_capacity(9, 30, FloatDType::F32, device).unwrap();
        // Of the room for nine rows four are filled.
        open.push(rows(5..9, device)).unwrap();
        let shards = [
            GradientMatrix::from_tensor(rows(0..5, device)).unwrap(),
            open,
            GradientMatrix::from_tensor(rows(9..12, &Device::flex())).unwrap(),
        ];
        let merged = GradientMatrix::concat(&shards).unwrap();
        assert_eq!((merged.samples(), merged.filled()), (12, 12));
        for row in 0..12 {
            assert_eq!(merged.row(row).unwrap(), whole.row(row).unwrap());
        }
        assert_eq!(solved(merged, device), solved(whole, device));
    });
    let other = GradientMatrix::from_tensor(tensor(1, [2, 7], &Device::flex())).unwrap();
    let one = GradientMatrix::from_tensor(rows(0..2, &Device::flex())).unwrap();
    let refused = GradientMatrix::concat(&[one, other]).unwrap_err();
    assert_matches!(
        refused,
        PruneError::Mismatch {
            expected: 30,
            found: 7,
            ..
        }
    );
    assert_matches!(
        GradientMatrix::concat(&[]).unwrap_err(),
        PruneError::NoSamples
    );
}
