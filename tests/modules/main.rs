//! Every module of burn-nn 0.22.1 goes through AMP, in every precision of the device matrix.
//!
//! Each module is measured under autocast against the FP32 model with the same parameters on flex, and
//! trained behind a linear layer.
//!
//! # Tolerances
//!
//! Rounding to half precision perturbs a number by at most the unit roundoff `u` of the dtype:
//! 2⁻¹¹ for F16, 2⁻⁸ for BF16. Each entry of the table counts the roundings `r` on its longest
//! path; a linear layer before it adds 5 (input, weight, product, bias, sum). If all of them
//! erred in the same direction, the output would be off by `u · r` of its size, so this is the
//! tolerance of the output in the L2 norm. A gradient is a product of forward values and of the
//! values that come back, and the derivatives on the way back are taken at perturbed points:
//! three times as much, measured against the norm of the gradient of all parameters together,
//! because some gradients are zero but for rounding (the bias of attention keys); that of the input
//! against its own. Where that is half of them or more, as for transformers in BF16, half is asked for: no
//! gradient at all is off by one.

#[path = "../support/mod.rs"]
mod support;

mod activations;
mod entry;
mod layers;
mod losses;
mod table;
mod unedited;

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::tensor::{Device, FloatDType};
use entry::{Entry, Precision, SEED, Way};
use support::{Target, each_device};
use table::table;
use unedited::{Doubt, Route, check};

/// Roundings in a linear layer before a module.
const FRONT: u32 = 5;

#[test]
fn outputs_and_gradients_in_a_region_are_close_to_fp32() {
    for_every_module(|entry, precision| {
        let route = Route::Region(precision.config());
        let measured = entry.measured(&route, precision, 1.0);
        let measured = measured.map_err(|error| error.to_string())?;
        match check(&measured, &route, precision, entry, 1.0) {
            Err(Doubt::Wrong(failure)) => Err(failure),
            Err(Doubt::NoBound) if precision.dtype == FloatDType::F16 => Err("no bound".into()),
            _ => Ok(()),
        }
    });
}

#[test]
fn an_adamw_step_lowers_the_loss() {
    for_every_module(|entry, precision| {
        if !entry.has_backward(precision) {
            return Ok(());
        }
        let (before, after) = entry.subject.losses(precision);
        match after < before {
            true => Ok(()),
            false => Err(format!("loss went from {before} to {after}")),
        }
    });
}

#[test]
fn modules_without_a_backward_pass_on_a_device_have_none_in_fp32_either() {
    each_device(|target| {
        for entry in table() {
            if entry.no_backward.contains(&target.name) {
                let device = target.device.clone().autodiff();
                let result = catch_unwind(AssertUnwindSafe(|| {
                    entry.subject.fp32_gradients(&device);
                }));
                assert!(result.is_err(), "{} on {}", entry.name, target.name);
            }
        }
    });
}

#[test]
fn prepare_keeps_in_fp32_what_the_table_says() {
    for entry in table() {
        let kept = entry.subject.kept(&flex_in_f16());
        let expected = entry.way == Way::KeptInFp32CalledInRegion;
        assert_eq!(!kept.is_empty(), expected, "{}: {kept:?}", entry.name);
    }
}

#[test]
fn modules_of_a_region_panic_without_it_on_flex() {
    for entry in table() {
        let result = catch_unwind(AssertUnwindSafe(|| {
            entry.subject.call_without_region(&flex_in_f16());
        }));
        let needs_region = matches!(
            entry.way,
            Way::KeptInFp32CalledInRegion | Way::CalledInRegion
        );
        assert_eq!(result.is_err(), needs_region, "{}", entry.name);
    }
}

#[test]
fn no_module_is_listed_twice() {
    let table = table();
    let names: BTreeSet<_> = table.iter().map(|entry| entry.name).collect();
    assert_eq!(names.len(), table.len());
}

#[test]
fn the_documented_table_is_the_tested_one() {
    let path = &support::checkout().join("amp/MODULES.md");
    let text = table::text(&table());
    if std::env::var("UPDATE_MODULES").is_ok_and(|value| value == "1") {
        std::fs::write(path, &text).unwrap();
    }
    let file = std::fs::read_to_string(path).unwrap_or_default();
    assert!(
        file == text,
        "amp/MODULES.md differs: run with UPDATE_MODULES=1"
    );
}

fn flex_in_f16() -> Precision {
    Precision {
        target: Target {
            name: "flex",
            device: Device::flex(),
        },
        dtype: FloatDType::F16,
        emulated: false,
    }
}

/// Runs `check` on the whole table and every precision, and fails with all that failed.
fn for_every_module(check: impl Fn(&Entry, &Precision) -> Result<(), String>) {
    let mut failures = Vec::new();
    each_device(|target| {
        for precision in Precision::of(target) {
            for entry in table() {
                let result = catch_unwind(AssertUnwindSafe(|| check(&entry, &precision)));
                let failure = match result {
                    Ok(Ok(())) => continue,
                    Ok(Err(failure)) => failure,
                    Err(panic) => format!("panicked: {}", message(panic.as_ref())),
                };
                failures.push(format!(
                    "{} on {} in {:?}: {failure}",
                    entry.name, target.name, precision.dtype
                ));
            }
        }
    });
    assert!(
        failures.is_empty(),
        "with the device seed {SEED}:\n{}",
        failures.join("\n")
    );
}

fn message(panic: &(dyn std::any::Any + Send)) -> String {
    panic
        .downcast_ref::<String>()
        .cloned()
        .or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string))
        .unwrap_or_else(|| "no message".into())
}

fn within(error: f32, tolerance: f32, what: &str) -> Result<(), String> {
    match error <= tolerance {
        true => Ok(()),
        false => Err(format!(
            "{what} is off by {error:e}, more than {tolerance:e}"
        )),
    }
}

fn norm(values: &[f32]) -> f32 {
    values.iter().map(|value| value * value).sum::<f32>().sqrt()
}

fn distance(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let difference: Vec<f32> = a.iter().zip(b).map(|(a, b)| a - b).collect();
    norm(&difference)
}
