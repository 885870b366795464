//! Integers that their dtype does not hold: of 8 and 16 bits the engine has Burn's numbers, and an input that 32 bits do
//! not hold is an error.

use burn::tensor::IntDType::{self, I8, I16, U8, U16};
use burn::tensor::{Device, Int, Tensor};
use burn_lean::deploy::{Backend, DeployError, EngineConfig, Export};
use burn_lean::graph::Tensors;

use crate::judge::Nothing;

const NARROW: [IntDType; 4] = [I8, U8, I16, U16];

#[test]
fn casts_of_integers_keep_the_lowest_bits() {
    let device = Device::flex();
    let x = [300.0, -1.0, 40_000.0, -70_000.0, 5.0, -128.0];
    let x = Tensor::<1>::from_floats(x, &device);
    for dtype in NARROW {
        same_integers(&x, |_, x: Tensor<1>| {
            let whole = x.int().cast(dtype);
            (whole.clone(), whole.float())
        });
    }
    for [from, to] in [[U8, I8], [I16, U8], [U16, I16], [I8, U16]] {
        same_integers(&x, |_, x: Tensor<1>| {
            let whole = x.int().cast(from).cast(to);
            (whole.clone(), whole.float())
        });
    }
}

#[test]
fn casts_of_floats_end_at_the_ends() {
    let device = Device::flex();
    let x = [300.0, -1.5, 40_000.0, -70_000.0, 5.75, 3e9];
    let x = Tensor::<1>::from_floats(x, &device);
    for dtype in NARROW {
        same_integers(&x, |_, x: Tensor<1>| {
            let whole = x.cast(dtype);
            (whole.clone(), whole.float())
        });
    }
}

#[test]
fn arithmetic_wraps_before_its_result_is_read() {
    let device = Device::flex();
    let x = Tensor::<1, Int>::from_data([100, 200, 7, 255], &device);
    for dtype in NARROW {
        same_integers(&x.clone().cast(dtype), |_, x: Tensor<1, Int>| {
            let sum = x.clone() + 100;
            let whole = sum * x.clone() - x;
            (whole.clone(), whole.float())
        });
    }
}

#[test]
fn an_input_beyond_32_bits_is_an_error() {
    let device = Device::flex();
    let x = Tensor::<1, Int>::from_data([-1, 5], &device).cast(IntDType::U64);
    let forward = |_: &Nothing, x: Tensor<1, Int>| x.float();
    let export = Export::record(&Nothing {}, &x, forward).unwrap();
    let config = EngineConfig::new().with_backend(Some(Backend::Own));
    let engine = config.compile(export).unwrap();
    let Err(DeployError::Run { reason }) = engine.run(&x) else {
        panic!("18446744073709551615 is no I32");
    };
    assert!(reason.contains("does not fit I32"), "{reason}");
}

/// Runs a model of integers, and floats that are made of them: exactly as Burn does.
fn same_integers<I: Tensors + Clone>(
    input: &I,
    forward: impl Fn(&Nothing, I) -> (Tensor<1, Int>, Tensor<1>),
) {
    let (integers, floats) = forward(&Nothing {}, input.clone());
    for backend in [Backend::Own, Backend::Rten] {
        let export = Export::record(&Nothing {}, input, &forward).unwrap();
        let config = EngineConfig::new().with_backend(Some(backend));
        let engine = config.compile(export).unwrap();
        let (found, found_floats) = engine.run(input).unwrap();
        let found = found.into_data();
        found.assert_eq(&integers.clone().into_data(), true);
        let found = found_floats.into_data();
        found.assert_eq(&floats.clone().into_data(), true);
    }
}
