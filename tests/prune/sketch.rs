//! Sketches of the Fisher samples against all of them.

use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, FloatDType, Tensor};
use burn_lean::prune::{
    Budget, Fisher, FisherConfig, GradientMatrix, Layout, Problem, PruneError, Ridge, RidgeChoice,
    Selection, SketchConfig, SolverConfig, solve,
};

use crate::on_disk::rows_of;
use crate::pruner::{config, prune, weights};
use crate::support::{each_device, tensor, values, with_numbers};

fn sketched(x: &Tensor<2>, rows: usize) -> Fisher {
    let config = FisherConfig::new(x.dims()[0]).with_sketch(Some(SketchConfig::new(rows)));
    rows_of(&config, x, &x.device()).unwrap()
}

fn problem(gradients: GradientMatrix, first_order: f64) -> Problem {
    let (p, device) = (gradients.parameters(), gradients.device());
    let problem = Problem::new(gradients, tensor(2, [p], &device), Layout::anonymous(p)).unwrap();
    problem.with_first_order(first_order).unwrap()
}

fn rows(matrix: &GradientMatrix) -> Vec<Vec<f64>> {
    let row = |at| matrix.row(at).unwrap().into_iter().map(f64::from).collect();
    (0..matrix.samples()).map(row).collect()
}

/// GᵀG
fn gram(rows: &[Vec<f64>]) -> Vec<Vec<f64>> {
    let p = rows[0].len();
    let element = |i: usize, j: usize| rows.iter().map(|row| row[i] * row[j]).sum();
    (0..p)
        .map(|i| (0..p).map(|j| element(i, j)).collect())
        .collect()
}

/// Gradients of very different lengths that share a mean, 150 of them: three passes.
fn gradients(device: &Device) -> Tensor<2> {
    let x = tensor::<2>(3, [150, 8], device);
    let lengths = tensor::<2>(4, [150, 1], device).powi_scalar(3) * 5.0;
    x * lengths + tensor::<2>(5, [1, 8], device)
}

#[test]
fn the_sum_of_all_gradients_and_their_number_are_exact() {
    each_device(|target| {
        let x = gradients(&target.device);
        let all = problem(GradientMatrix::from_tensor(x.clone()).unwrap(), 0.5);
        let fisher = sketched(&x, 6);
        assert_eq!(
            (fisher.report.samples, fisher.report.bytes),
            (150, 6 * 8 * 4)
        );
        let sum = values(x.clone().sum_dim(0));
        let first = fisher.gradients.row(0).unwrap();
        for (sum, first) in sum.iter().zip(first) {
            // 150 additions in F32.
            assert!((sum - first * 150f32.sqrt()).abs() < 1e-3, "{sum} {first}");
        }
        let norm: f64 = rows(all.gradients()).iter().flatten().map(|g| g * g).sum();
        let report = fisher.report.sketch.unwrap();
        assert!((report.squared_norm - norm).abs() < 1e-4 * norm);
        assert_eq!(report.rows, 6);
        // λ counts samples, and α adds up all of their gradients.
        let few = problem(fisher.gradients, 0.5);
        assert_eq!(few.lambda(), all.lambda());
        for seed in 5..8 {
            let at = tensor(seed, [8], &target.device);
            let [few, all] = [&few, &all].map(|problem| problem.objective(at.clone()).unwrap());
            assert!((few.linear - all.linear).abs() < 1e-3, "{few:?} {all:?}");
            assert_eq!(few.ridge, all.ridge);
        }
    });
}

#[test]
fn random_signs_are_as_far_off_as_they_say() {
    each_device(|target| {
        let x = gradients(&target.device);
        let all = gram(&rows(&GradientMatrix::from_tensor(x.clone()).unwrap()));
        let fisher = sketched(&x, 40);
        let report = fisher.report.sketch.unwrap();
        let sketch = gram(&rows(&fisher.gradients));
        let pairs = all.iter().flatten().zip(sketch.iter().flatten());
        let off = pairs.map(|(g, s)| (g - s).powi(2)).sum::<f64>().sqrt();
        // The root of a mean: twice it is far out.
        assert!(
            off > 0.1 * report.error && off < 2.0 * report.error,
            "{off}, {report:?}"
        );
        assert!(report.error < report.squared_norm);
        // The same batches give the same matrix.
        let again = sketched(&x, 40);
        assert_eq!(rows(&again.gradients), rows(&fisher.gradients));
    });
}

/// 30 rows are over twice as many as weights: they are reduced once more.
#[test]
fn a_sketch_of_many_rows_has_its_minimum_over_fewer() {
    each_device(|target| {
        let x = tensor::<2>(3, [90, 12], &target.device);
        let few = problem(sketched(&x, 30).gradients, 0.5);
        let solution = solve(&few, &SolverConfig::new(Budget::Keep(5))).unwrap();
        // From the gradient of the objective over all 30.
        assert!(solution.relative_gap < 1e-6, "{}", solution.relative_gap);
    });
}

#[test]
fn sketches_of_several_collections_are_one() {
    let device = Device::flex();
    let x = gradients(&device);
    let halves = [0..70, 70..150].map(|rows| x.clone().slice([rows, 0..8]));
    let halves = halves.map(|x| sketched(&x, 20).gradients);
    let joined = GradientMatrix::concat(&halves).unwrap();
    let [joined, all] =
        [joined, GradientMatrix::from_tensor(x).unwrap()].map(|rows| problem(rows, 0.5));
    assert_eq!(joined.lambda(), all.lambda());
    let at = tensor::<1>(6, [8], &device);
    let fits = halves.map(|rows| problem(rows, 0.5).objective(at.clone()).unwrap().fit);
    let [joined, all] = [joined, all].map(|problem| problem.objective(at.clone()).unwrap());
    assert!((joined.fit - fits[0] - fits[1]).abs() < 1e-5 * joined.fit);
    assert!((joined.linear - all.linear).abs() < 1e-3);
    assert_eq!(joined.ridge, all.ridge);
}

#[test]
fn what_a_sketch_cannot_be_is_refused() {
    let device = Device::flex();
    let x = gradients(&device);
    for (rows, dtype, field) in [
        (2, FloatDType::F32, "sketch.rows"),
        (150, FloatDType::F32, "sketch.rows"),
        (6, FloatDType::BF16, "dtype"),
    ] {
        let config = FisherConfig::new(150)
            .with_dtype(dtype)
            .with_sketch(Some(SketchConfig::new(rows)));
        let error = rows_of(&config, &x, &device).unwrap_err();
        let is_it =
            matches!(error, PruneError::InvalidConfig { field: found, .. } if found == field);
        assert!(is_it, "{error}");
    }
    let few = problem(sketched(&x, 6).gradients, 0.0);
    assert!(few.clone().with_tempering(0.0).is_ok());
    let error = few.with_tempering(1.0).unwrap_err();
    assert_matches!(
        error,
        PruneError::InvalidConfig {
            field: "tempering",
            ..
        }
    );
    // Before any gradient is taken.
    let tempered = Ridge {
        value: 0.1,
        first_order: None,
        tempering: Some(1.0),
    };
    let mut config = config(0.75).with_ridge(RidgeChoice::Sweep(vec![tempered]));
    config.fisher.sketch = Some(SketchConfig::new(6));
    let error = prune(&config, &device).unwrap_err();
    assert_matches!(
        error,
        PruneError::InvalidConfig {
            field: "tempering",
            ..
        }
    );
}

/// 6 rows, and beside them up to 64 of a pass over single examples, or 4 of one over groups of 16.
#[test]
fn the_memory_bound_counts_the_rows_that_a_sketch_has_not_summed_up() {
    let device = Device::flex();
    let x = gradients(&device);
    let config = |samples: usize, bound: usize| {
        FisherConfig::new(samples)
            .with_sketch(Some(SketchConfig::new(6)))
            .with_memory_bound(bound)
    };
    let bytes = |rows| GradientMatrix::bytes_needed(rows, 8, FloatDType::F32);
    // Not even one.
    let error = rows_of(&config(150, bytes(7) - 1), &x, &device).unwrap_err();
    let expected = PruneError::MemoryBound {
        samples: 7,
        parameters: 8,
        dtype: FloatDType::F32,
        needed: bytes(7),
        bound: bytes(7) - 1,
    };
    assert_eq!(error, expected);
    for rows in [7, 8, 69, 70] {
        assert!(rows_of(&config(150, bytes(rows)), &x, &device).is_ok());
    }
    let groups = config(9, bytes(10)).with_batch_size(16);
    let fisher = rows_of(&groups, &x, &device).unwrap();
    assert_eq!(fisher.report.bytes, bytes(6));
}

#[test]
fn the_pruner_prunes_by_a_sketch() {
    each_device(|target| {
        let mut config = config(0.75).with_stages(2);
        config.fisher.sketch = Some(SketchConfig::new(8));
        let pruned = prune(&config, &target.device).unwrap();
        assert_eq!(weights(&pruned).iter().filter(|w| **w != 0.0).count(), 10);
        for stage in &pruned.stages {
            let gradients = &stage.gradients;
            assert_eq!((gradients.samples, gradients.bytes), (16, 8 * 40 * 4));
            assert_eq!(gradients.sketch.unwrap().rows, 8);
        }
    });
}

/// A wrong row in the second pass takes back those of the first.
#[test]
fn rows_that_are_taken_again_are_in_the_sketch_once() {
    let device = Device::flex();
    let linear = with_numbers(LinearConfig::new(3, 2).init(&device), 1);
    let selection = Selection::of(&linear, None).unwrap();
    // The mean over positive inputs: of several examples, not their mean.
    let loss = |model: &Linear, x: &Tensor<2>| {
        let counts = x.clone().slice([0..x.dims()[0], 0..1]);
        let losses = model.forward(x.clone()).square().sum_dim(1) * counts.clone();
        losses.sum() / counts.sum()
    };
    let even = tensor::<2>(1, [64, 3], &device)
        .slice_assign([0..64, 0..1], Tensor::ones([64, 1], &device));
    let odd = tensor::<2>(2, [9, 3], &device).abs() + 0.5;
    let config = FisherConfig::new(73).with_sketch(Some(SketchConfig::new(9)));
    let collect = |config: FisherConfig| {
        let batches = [even.clone(), odd.clone()];
        config.collect(&linear, &selection, loss, batches).unwrap()
    };
    use burn_lean::prune::fisher::GradientMethod::{Batched, Plain};
    let found = collect(config.clone().with_method(Batched));
    let plain = collect(config.with_method(Plain));
    assert!(found.report.fallback.is_some());
    assert_eq!(rows(&found.gradients), rows(&plain.gradients));
    assert_eq!(found.report.sketch, plain.report.sketch);
}
