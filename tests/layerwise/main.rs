//! The `layerwise` crate as its users see it, against naive dense computations.

mod gram;
mod naive;
mod refusals;
mod search;
mod solve;
