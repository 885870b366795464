//! The `prune` crate as its users see it, on every device.

#[path = "../support/mod.rs"]
mod support;

mod gradient_matrix;
mod reference;
mod solver_brute_force;
mod solver_errors;
mod solver_parts;
mod solver_patterns;
mod solver_properties;
mod fisher;
mod mask;
mod nm;
mod batch_norm;
mod fisher;
mod mask;
mod pruner;
mod report;
mod schedule;
mod selection;
mod sparse_record;
