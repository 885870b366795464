//! The `amp` crate as its users see it, on every device.

#[path = "../support/mod.rs"]
mod support;

mod audit;
mod autocast;
mod clipping;
mod emulation;
mod grad_scaler;
mod model;
mod resume;
mod running_statistics;
mod shared_parameters;
mod speculative;
