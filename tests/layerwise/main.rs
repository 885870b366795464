//! The `layerwise` crate as its users see it, against naive dense computations.

#[path = "../support/cases.rs"]
mod cases;
mod gram;
mod naive;
mod refusals;
mod search;
mod solve;
mod splitting;
