//! Mixed precision under Burn's `Learner` and `SupervisedTraining`, on CPU devices.

mod checkpoint;
mod divergence;
mod schedule;
mod strategies;
mod support;
mod training;
