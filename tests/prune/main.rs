//! The `prune` crate as its users see it, on every device.

#[macro_use]
#[path = "../support/mod.rs"]
mod support;

#[path = "../endurance/seals.rs"]
#[allow(dead_code)]
mod seals;

mod batch_norm;
mod dtypes;
mod fisher;
mod fisher_checks;
mod gradient_matrix;
mod gradual;
mod gradual_chains;
mod gradual_pruner;
mod grid;
mod layerwise;
mod layerwise_edges;
mod layerwise_norms;
mod layerwise_row_order;
mod layerwise_shared;
mod layerwise_sums;
mod many_samples;
mod mask;
mod mixed;
mod on_disk;
mod per_example;
mod per_example_models;
mod pruner;
mod pruner_start;
mod pruner_state;
mod quantized_record;
mod recording;
mod reference;
mod report;
mod rewind;
mod running_statistics;
mod schedule;
mod selection;
mod shrink_constants;
mod shrink_record;
mod shrink_resizing;
mod shrink_whole;
mod solver_brute_force;
mod solver_budgets;
mod solver_errors;
mod solver_exact;
mod solver_operations;
mod solver_parts;
mod solver_patterns;
mod solver_properties;
mod sparse_record;
mod splicing;
mod tuning;
mod warnings;
