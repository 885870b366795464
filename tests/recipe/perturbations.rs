//! What is done to the inputs of a test set.

use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_lean::recipe::Perturbation;

use crate::support::{tensor, values};

#[test]
fn perturbations_do_what_they_say_and_the_same_again() {
    let device = Device::flex();
    let x = Tensor::<3>::from_data([[[1.0, 2.0, 3.0, 6.0]]], &device);
    let apply = |perturbation: Perturbation| values(perturbation.apply(&x, 0));
    assert_eq!(apply(Perturbation::Shift(1)), [1.0, 1.0, 2.0, 3.0]);
    assert_eq!(apply(Perturbation::Shift(-2)), [3.0, 6.0, 6.0, 6.0]);
    assert_eq!(apply(Perturbation::Shift(9)), [1.0; 4]);
    assert_eq!(apply(Perturbation::Shift(i64::MIN)), [6.0; 4]);
    // The variance is (4 + 1 + 0 + 9) / 4.
    let deviation = 3.5f32.sqrt();
    for (found, plain) in apply(Perturbation::Offset(-2.0))
        .iter()
        .zip([1.0, 2.0, 3.0, 6.0])
    {
        assert!((found - (plain - 2.0 * deviation)).abs() < 1e-5);
    }
    let large = Tensor::<2>::from_data(
        TensorData::new(
            (0..10_000).map(|at| (at % 2) as f32).collect::<Vec<_>>(),
            [100, 100],
        ),
        &device,
    );
    let noisy = Perturbation::Noise(0.5).apply(&large, 7);
    assert_eq!(
        values(noisy.clone()),
        values(Perturbation::Noise(0.5).apply(&large, 7))
    );
    assert_ne!(
        values(noisy.clone()),
        values(Perturbation::Noise(0.5).apply(&large, 8))
    );
    let noise: Vec<f32> = values(noisy - large);
    let mean = noise.iter().sum::<f32>() / 1e4;
    let deviation = (noise.iter().map(|x| x * x).sum::<f32>() / 1e4).sqrt();
    // Half of a deviation of 0.5; four standard errors.
    assert!(
        mean.abs() < 0.01 && (deviation - 0.25).abs() < 0.008,
        "{mean} {deviation}"
    );
    // Labels and other integers stay.
    let ids = Tensor::<2, burn::tensor::Int>::from_data([[1, 2]], &device);
    assert_eq!(
        Perturbation::Noise(9.0).apply(&ids, 0).into_data(),
        ids.into_data()
    );
}

#[test]
fn inputs_in_half_precision_stay_in_it() {
    let x = tensor::<2>(3, [4, 5], &Device::flex()).cast(DType::F16);
    for perturbation in [
        Perturbation::Noise(0.5),
        Perturbation::Offset(0.5),
        Perturbation::Shift(1),
    ] {
        let found = perturbation.apply(&x, 0);
        assert_eq!(found.dtype(), DType::F16, "{perturbation:?}");
    }
}

/// Times in seconds: F32 has one number in 128.
#[test]
fn inputs_in_double_precision_keep_their_numbers() {
    const LAST: [f64; 3] = [1.7e9 + 0.125, 1.7e9 + 1.25, 1.7e9 + 2.5];
    let device = Device::flex();
    let times = TensorData::new(LAST.to_vec(), [1, 3]);
    let times = Tensor::<2>::from_data(times, (&device, DType::F64));
    let read = |data: TensorData| data.iter::<f64>().collect::<Vec<_>>();
    // A shift does nothing to vectors.
    let shifted = Perturbation::Shift(1).apply(&times, 0);
    assert_eq!(read(shifted.into_data()), LAST);
    let series = times.clone().unsqueeze::<3>();
    let shifted = Perturbation::Shift(1).apply(&series, 0);
    assert_eq!(read(shifted.into_data()), [LAST[0], LAST[0], LAST[1]]);
    let mean = LAST.iter().sum::<f64>() / 3.0;
    let squares = LAST.iter().map(|time| (time - mean).powi(2));
    let deviation = (squares.sum::<f64>() / 3.0).sqrt();
    let later = Perturbation::Offset(2.0).apply(&times, 0);
    // Numbers are 2⁻²² apart there.
    let expected = LAST.map(|time| time + 2.0 * deviation);
    assert_near!(read(later.into_data()).into_iter(), expected, 1e-6);
}
