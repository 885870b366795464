//! The `layerwise` crate as its users see it, against naive dense computations.

#[macro_use]
#[path = "../support/asserts.rs"]
mod asserts;
#[path = "../support/cases.rs"]
mod cases;
mod gram;
mod naive;
mod refusals;
mod search;
mod solve;
mod splitting;
