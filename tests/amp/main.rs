//! The `amp` crate as its users see it, on every device.

#[macro_use]
#[path = "../support/mod.rs"]
mod support;

mod audit;
mod autocast;
mod checkpoints;
mod clipping;
#[cfg(feature = "ndarray")]
mod devices;
mod divergence;
mod double_precision;
#[cfg(feature = "ndarray")]
mod emulation;
mod grad_scaler;
mod gradient_checkpointing;
mod half;
mod model;
mod optimizers;
mod placement;
mod positions;
mod precision;
mod recordings;
mod regions;
mod resume;
mod run;
mod run_edges;
mod running_statistics;
mod scaler_records;
mod shared_parameters;
mod speculative;
mod sums;
mod unscaling;
mod weight_cast;
