//! Sketches of the Fisher samples against all of them.

use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, FloatDType, Tensor};
use burn_lean::prune::{
    Budget, Fisher, FisherConfig, GradientMatrix, Layout, Problem, PruneError, RidgeChoice,
    Selection, SketchConfig, SolverConfig, fisher::SketchMethod, solve,
};

use crate::on_disk::rows_of;
use crate::pruner::{config, prune, weights};
use crate::support::{each_device, tensor, values, with_numbers};

const METHODS: [SketchMethod; 2] = [SketchMethod::FrequentDirections, SketchMethod::RandomSigns];

fn sketched(x: &Tensor<2>, rows: usize, method: SketchMethod) -> Fisher {
    let sketch = SketchConfig::new(rows).with_method(method);
    let config = FisherConfig::new(x.dims()[0]).with_sketch(Some(sketch));
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

/// ‖G v‖²
fn square(rows: &[Vec<f64>], v: &[f64]) -> f64 {
    let product = |row: &Vec<f64>| row.iter().zip(v).map(|(g, v)| g * v).sum::<f64>();
    rows.iter().map(|row| product(row).powi(2)).sum()
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
        for method in METHODS {
            let fisher = sketched(&x, 6, method);
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
        }
    });
}

#[test]
fn frequent_directions_are_below_the_fisher_by_no_more_than_they_say() {
    each_device(|target| {
        let x = gradients(&target.device);
        let all = rows(&GradientMatrix::from_tensor(x.clone()).unwrap());
        for count in [3, 5, 8] {
            let fisher = sketched(&x, count, SketchMethod::FrequentDirections);
            let sketch = rows(&fisher.gradients);
            let report = fisher.report.sketch.unwrap();
            // H has r = ℓ − 1 rows; the published bound, of which the mean is left out.
            let mean: f64 = sketch[0].iter().map(|g| g * g).sum();
            let published = (report.squared_norm - mean) / ((count - 1) / 2 + 1) as f64;
            assert!(report.error <= published, "{report:?}");
            let [all_gram, gram] = [gram(&all), gram(&sketch)];
            // The largest difference is in the direction that powers of the difference turn to.
            let mut v = vec![1.0; 8];
            for _ in 0..200 {
                let next = |i: usize| {
                    let terms = (0..8).map(|j| (all_gram[i][j] - gram[i][j]) * v[j]);
                    terms.sum::<f64>()
                };
                let turned: Vec<f64> = (0..8).map(next).collect();
                let length = turned.iter().map(|v| v * v).sum::<f64>().sqrt();
                v = turned.into_iter().map(|v| v / length).collect();
            }
            let largest = square(&all, &v) - square(&sketch, &v);
            let rounding = 1e-4 * report.squared_norm;
            assert!(largest <= report.error + rounding, "{largest}, {report:?}");
            for seed in 0..20 {
                let v: Vec<f64> = tensor::<1>(seed, [8], &target.device)
                    .into_data()
                    .iter::<f64>()
                    .collect();
                assert!(square(&sketch, &v) <= square(&all, &v) + rounding);
            }
        }
        // Directions that are all kept lose nothing.
        let whole = sketched(&x, 20, SketchMethod::FrequentDirections);
        let error = whole.report.sketch.unwrap().error;
        assert!(error < 1e-4 * whole.report.sketch.unwrap().squared_norm);
        for seed in 0..5 {
            let v: Vec<f64> = values(tensor::<1>(seed, [8], &target.device))
                .into_iter()
                .map(f64::from)
                .collect();
            let [few, all] = [square(&rows(&whole.gradients), &v), square(&all, &v)];
            assert!((few - all).abs() < 1e-4 * all, "{few} {all}");
        }
    });
}

#[test]
fn random_signs_are_as_far_off_as_they_say() {
    each_device(|target| {
        let x = gradients(&target.device);
        let all = gram(&rows(&GradientMatrix::from_tensor(x.clone()).unwrap()));
        let fisher = sketched(&x, 40, SketchMethod::RandomSigns);
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
        let again = sketched(&x, 40, SketchMethod::RandomSigns);
        assert_eq!(rows(&again.gradients), rows(&fisher.gradients));
    });
}

/// Of gradients that lie near a plane, no direction is lost, and the solution is that of all.
#[test]
fn a_sketch_of_few_directions_has_the_solution_of_all_samples() {
    each_device(|target| {
        let device = &target.device;
        let plane = tensor::<2>(1, [90, 2], device).matmul(tensor(2, [2, 12], device));
        let x = plane + tensor::<2>(3, [1, 12], device);
        let all = problem(GradientMatrix::from_tensor(x.clone()).unwrap(), 0.5);
        // 30 rows are over twice as many as weights: they are reduced once more.
        for count in [7, 30] {
            let fisher = sketched(&x, count, SketchMethod::FrequentDirections);
            let few = problem(fisher.gradients, 0.5);
            let config = SolverConfig::new(Budget::Keep(5));
            let [found, expected] = [&few, &all].map(|problem| solve(problem, &config).unwrap());
            assert_eq!(found.support, expected.support);
            assert!(
                (found.objective - expected.objective).abs() < 1e-4 * expected.objective.abs(),
                "{} for {}",
                found.objective,
                expected.objective
            );
        }
    });
}

#[test]
fn sketches_of_several_collections_are_one() {
    let device = Device::flex();
    let x = gradients(&device);
    let halves = [0..70, 70..150].map(|rows| x.clone().slice([rows, 0..8]));
    let sketch = |x: &Tensor<2>| sketched(x, 20, SketchMethod::FrequentDirections).gradients;
    let joined = GradientMatrix::concat(&halves.each_ref().map(sketch)).unwrap();
    let [few, all] = [joined, GradientMatrix::from_tensor(x).unwrap()];
    let [few, all] = [problem(few, 0.5), problem(all, 0.5)];
    assert_eq!(few.lambda(), all.lambda());
    let at = tensor::<1>(6, [8], &device);
    let [few, all] = [few, all].map(|problem| problem.objective(at.clone()).unwrap());
    assert!((few.total() - all.total()).abs() < 1e-3 * all.total().abs());
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
    let few = problem(sketched(&x, 6, METHODS[0]).gradients, 0.0);
    assert!(few.clone().with_tempering(0.0).is_ok());
    let error = few.with_tempering(1.0).unwrap_err();
    assert!(matches!(
        error,
        PruneError::InvalidConfig {
            field: "tempering",
            ..
        }
    ));
    // Before any gradient is taken.
    let mut config = config(0.75).with_ridge(RidgeChoice::with_and_without_tempering([0.1]));
    config.fisher.sketch = Some(SketchConfig::new(6));
    let error = prune(&config, &device).unwrap_err();
    assert!(matches!(
        error,
        PruneError::InvalidConfig {
            field: "tempering",
            ..
        }
    ));
}

#[test]
fn the_pruner_prunes_by_a_sketch() {
    each_device(|target| {
        for method in METHODS {
            let mut config = config(0.75).with_stages(2);
            config.fisher.sketch = Some(SketchConfig::new(8).with_method(method));
            let pruned = prune(&config, &target.device).unwrap();
            assert_eq!(weights(&pruned).iter().filter(|w| **w != 0.0).count(), 10);
            for stage in &pruned.stages {
                let gradients = &stage.gradients;
                assert_eq!((gradients.samples, gradients.bytes), (16, 8 * 40 * 4));
                assert_eq!(gradients.sketch.unwrap().rows, 8);
            }
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
    for method in METHODS {
        let config =
            FisherConfig::new(73).with_sketch(Some(SketchConfig::new(9).with_method(method)));
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
}
