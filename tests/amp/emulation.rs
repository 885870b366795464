//! Emulated half precision against the `half` crate.

use burn::module::{Module, Param};
use burn::tensor::{FloatDType, Tensor, TensorData};
use burn_lean::amp::{AutocastConfig, Fallback};
use half::{bf16, f16};
use proptest::prelude::*;

use crate::support::cases::cases;
use crate::support::{devices, values};

#[derive(Module, Debug)]
struct Vector {
    values: Param<Tensor<1>>,
}

/// Rounds through the emulated cast of a weight on ndarray.
#[allow(deprecated)]
fn emulated(dtype: FloatDType, x: &[f32]) -> Vec<f32> {
    let device = burn::tensor::Device::ndarray();
    let model = Vector {
        values: Param::from_tensor(Tensor::from_data(TensorData::from(x), &device)),
    };
    let (model, autocast) = AutocastConfig::new(dtype)
        .with_fallback(Fallback::Emulate)
        .prepare(model)
        .unwrap();
    assert!(autocast.is_emulated());
    values(autocast.forward((), |()| model.values.val()))
}

fn assert_same(found: f32, expected: f32, x: f32) {
    assert!(
        found.to_bits() == expected.to_bits() || (found.is_nan() && expected.is_nan()),
        "{x:e} gave {found:e} instead of {expected:e}"
    );
}

#[test]
fn every_half_returns_to_itself() {
    let halves: Vec<f32> = (0..=u16::MAX)
        .map(|bits| f16::from_bits(bits).to_f32())
        .collect();
    for (x, found) in halves.iter().zip(emulated(FloatDType::F16, &halves)) {
        assert_same(found, *x, *x);
    }
    let halves: Vec<f32> = (0..=u16::MAX)
        .map(|bits| bf16::from_bits(bits).to_f32())
        .collect();
    for (x, found) in halves.iter().zip(emulated(FloatDType::BF16, &halves)) {
        assert_same(found, *x, *x);
    }
}

/// Neighbours of every F16 number and of every midpoint between two: the hard cases of rounding.
#[test]
fn midpoints_of_all_halves_round_to_even() {
    let mut x = Vec::new();
    for bits in 0..f16::INFINITY.to_bits() {
        let low = f64::from(f16::from_bits(bits));
        let high = match bits + 1 == f16::INFINITY.to_bits() {
            true => 65536.0,
            false => f64::from(f16::from_bits(bits + 1)),
        };
        let middle = ((low + high) / 2.0) as f32;
        x.extend([middle, middle.next_up(), middle.next_down(), -middle]);
    }
    for (x, found) in x.iter().zip(emulated(FloatDType::F16, &x)) {
        assert_same(found, f16::from_f32(*x).to_f32(), *x);
    }
}

proptest! {
    #![proptest_config(cases(64))]

    #[test]
    fn random_numbers_round_as_the_half_crate_does(bits in prop::collection::vec(any::<u32>(), 256)) {
        let x: Vec<f32> = bits.into_iter().map(f32::from_bits).collect();
        for (x, found) in x.iter().zip(emulated(FloatDType::F16, &x)) {
            assert_same(found, f16::from_f32(*x).to_f32(), *x);
        }
        for (x, found) in x.iter().zip(emulated(FloatDType::BF16, &x)) {
            assert_same(found, bf16::from_f32(*x).to_f32(), *x);
        }
    }

    #[test]
    fn rounding_is_monotone_and_idempotent(a in any::<f32>(), b in any::<f32>()) {
        for dtype in [FloatDType::F16, FloatDType::BF16] {
            let (low, high) = if a <= b { (a, b) } else { (b, a) };
            let once = emulated(dtype, &[low, high]);
            prop_assert!(once[0] <= once[1], "{:?}", once);
            prop_assert_eq!(emulated(dtype, &once), once);
        }
    }
}

#[test]
fn emulation_underflows_gradients_as_f16_does() {
    for target in devices() {
        let device = target.device.clone().autodiff();
        let model = Vector {
            values: Param::from_tensor(Tensor::ones([1], &device)),
        };
        let (model, autocast) = AutocastConfig::new(FloatDType::F16)
            .with_fallback(Fallback::Emulate)
            .prepare(model)
            .unwrap();
        for (factor, expected) in [(2f32.powi(-24), 2f32.powi(-24)), (2f32.powi(-26), 0.0)] {
            let loss = autocast.forward((), |()| model.values.val()).sum() * factor;
            let gradient = model.values.base().grad(&loss.backward()).unwrap();
            assert_eq!(values(gradient), [expected], "{}", target.name);
        }
    }
}
