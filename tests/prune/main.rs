//! The `prune` crate as its users see it, on every device.

#[path = "../support/mod.rs"]
mod support;

mod fisher;
mod mask;
mod nm;
mod schedule;
mod selection;
mod shrink;
mod sparse_linear;
mod sparse_record;
