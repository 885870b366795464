//! The distillation loss against its formula, with its gradient.

use burn::tensor::{Device, Tensor};
use burn_lean::recipe::Distillation;

use crate::support::{each_device, numbers, tensor, values};

const ROWS: usize = 3;
const CLASSES: usize = 5;

fn softmax(row: &[f64]) -> Vec<f64> {
    let sum: f64 = row.iter().map(|z| z.exp()).sum();
    row.iter().map(|z| z.exp() / sum).collect()
}

/// ½ and 4: numbers that are exact.
#[test]
fn logits_cost_the_divergence_times_the_squared_temperature() {
    each_device(|target| {
        let device = &target.device.clone().autodiff();
        for t in [0.5, 1.0, 4.0] {
            let student = tensor::<2>(1, [ROWS, CLASSES], device).require_grad();
            let teacher = tensor::<2>(2, [ROWS, CLASSES], device);
            let loss = Distillation::new(t, 1.0).logits(student.clone(), teacher);
            let (z, v) = (numbers(1, ROWS * CLASSES), numbers(2, ROWS * CLASSES));
            let (mut expected, mut gradient) = (0.0, Vec::new());
            for row in 0..ROWS {
                let scaled = |z: &[f32]| {
                    let row = &z[row * CLASSES..(row + 1) * CLASSES];
                    row.iter().map(|z| f64::from(*z) / t).collect::<Vec<f64>>()
                };
                let (q, p) = (softmax(&scaled(&z)), softmax(&scaled(&v)));
                for (p, q) in p.iter().zip(&q) {
                    expected += t * t * p * (p / q).ln() / ROWS as f64;
                    // T² · (q − p) / T
                    gradient.push(t * (q - p) / ROWS as f64);
                }
            }
            let found = f64::from(values(loss.clone())[0]);
            assert!(
                (found - expected).abs() < 1e-5 * (1.0 + expected),
                "{t}: {found} {expected}"
            );
            let grads = loss.backward();
            let found = values(student.grad(&grads).unwrap());
            for (found, expected) in found.iter().zip(gradient) {
                assert!(
                    (f64::from(*found) - expected).abs() < 1e-5,
                    "{found} {expected}"
                );
            }
        }
    });
}

/// Of sequences, `[batch, positions, classes]`, at all magnitudes.
#[test]
fn positions_count_like_examples() {
    each_device(|target| {
        for size in [1.0, 300.0, 3e4] {
            let device = target.device.clone().autodiff();
            let student = Tensor::<3>::from_floats([[[1.0, 0.0, -1.0], [0.0, 0.5, 1.0]]], &device);
            let teacher = Tensor::<3>::from_floats([[[0.0, 0.5, 0.0], [0.0, 0.5, 1.0]]], &device);
            let student = (student * size).require_grad();
            let teacher = teacher * size;
            let loss = Distillation::new(1.0, 1.0).logits(student.clone(), teacher);
            let softmax = |row: [f64; 3]| {
                let most = row.iter().fold(f64::MIN, |all, x| all.max(*x));
                let parts = row.map(|x| (x - most).exp());
                let sum: f64 = parts.iter().sum();
                (parts.map(|x| x / sum), row.map(|x| x - most - sum.ln()))
            };
            let (s, log_s) = softmax([size, 0.0, -size]);
            let (t, log_t) = softmax([0.0, 0.5 * size, 0.0]);
            let terms = (0..3).map(|at| match t[at] > 0.0 {
                true => t[at] * (log_t[at] - log_s[at]),
                false => 0.0,
            });
            // Of two positions the second is right already.
            let expected = terms.sum::<f64>() / 2.0;
            let found = loss.clone().into_scalar::<f64>();
            assert!(
                (found - expected).abs() <= 1e-5 * expected,
                "{found} {expected}"
            );
            let grads = loss.backward();
            let gradient = values(student.grad(&grads).unwrap());
            for (at, found) in gradient.iter().enumerate() {
                let expected = match at < 3 {
                    true => (s[at] - t[at]) / 2.0,
                    false => 0.0,
                };
                assert!(
                    (f64::from(*found) - expected).abs() < 1e-6,
                    "{found} {expected}"
                );
            }
        }
    });
}

/// A quarter of a loss of 8 whose gradient is 8, three quarters of the teacher's: 2 + ¾·KL.
#[test]
fn a_loop_of_ones_own_gets_the_shares_of_targets_and_teacher() {
    each_device(|target| {
        let device = &target.device.clone().autodiff();
        let student = tensor::<2>(1, [ROWS, CLASSES], device).require_grad();
        let teacher = tensor::<2>(2, [ROWS, CLASSES], device);
        let targets = Tensor::<1>::from_data([1.0], device).require_grad();
        let distillation = Distillation::new(2.0, 0.75);
        let taught = distillation.logits(student.clone(), teacher.clone());
        let loss = distillation.loss(targets.clone() * 8.0, student.clone(), teacher);
        let expected = 2.0 + 0.75 * values(taught.clone())[0];
        let found = values(loss.clone())[0];
        assert!((found - expected).abs() < 1e-5, "{found} {expected}");
        let grads = loss.backward();
        assert_eq!(values(targets.grad(&grads).unwrap()), [2.0]);
        let whole = values(student.grad(&taught.backward()).unwrap());
        let share = values(student.grad(&grads).unwrap());
        for (share, whole) in share.iter().zip(whole) {
            assert!((share - 0.75 * whole).abs() < 1e-6, "{share} {whole}");
        }
    });
}

/// A third class that neither model can say, then one that the teacher alone never says.
#[test]
fn a_class_that_the_teacher_gives_no_probability_costs_nothing() {
    each_device(|target| {
        let device = &target.device.clone().autodiff();
        let row = |values: [f32; 3]| Tensor::<2>::from_data([values], device);
        let masked = f32::NEG_INFINITY;
        for third in [masked, 0.0] {
            let student = row([0.0, 0.0, third]).require_grad();
            let teacher = row([2.0, 0.0, masked]);
            let loss = Distillation::new(1.0, 1.0).logits(student.clone(), teacher);
            let p = softmax(&[2.0, 0.0]);
            let q = softmax(&[0.0, 0.0, f64::from(third)]);
            let expected: f64 = p.iter().zip(&q).map(|(p, q)| p * (p / q).ln()).sum();
            let found = f64::from(values(loss.clone())[0]);
            assert!((found - expected).abs() < 1e-5, "{found} {expected}");
            let found = values(student.grad(&loss.backward()).unwrap());
            // q − p
            for (found, expected) in found.iter().zip([q[0] - p[0], q[1] - p[1], q[2]]) {
                let error = (f64::from(*found) - expected).abs();
                assert!(error < 1e-5, "{found} {expected}");
            }
        }
    });
}

#[test]
fn features_cost_the_mean_of_their_mean_squared_errors() {
    let device = Device::flex();
    let row = |values: [f32; 2]| Tensor::<2>::from_data([values], &device);
    let distillation = Distillation::new(1.0, 0.0).with_features(1.0);
    let error = distillation.feature_error(
        vec![row([0.0, 0.0]), row([1.0, 1.0])],
        vec![row([2.0, 0.0]), row([1.0, 5.0])],
    );
    // (4/2 + 16/2) / 2
    assert_eq!(values(error.unwrap()), [5.0]);
    assert!(distillation.feature_error(vec![], vec![]).is_none());
}
