//! Mixed precision under Burn's `Learner` and `SupervisedTraining`, on every device.

#[macro_use]
#[path = "../support/mod.rs"]
mod devices;

mod after_step;
mod checkpoint;
mod column_layout;
mod divergence;
mod gradual;
mod other_models;
mod own_steps;
mod schedule;
mod strategies;
mod support;
mod training;
