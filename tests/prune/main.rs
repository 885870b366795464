//! The `prune` crate as its users see it, on every device.

#[path = "../support/mod.rs"]
mod support;

mod batch_norm;
mod fisher;
mod mask;
mod pruner;
mod report;
mod schedule;
mod selection;
