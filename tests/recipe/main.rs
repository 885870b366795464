//! The `recipe` crate as its users see it.

#[macro_use]
#[path = "../support/mod.rs"]
mod support;

mod devices;
mod distillation;
mod empty;
mod energy;
mod formats;
mod joint;
mod outputs;
mod perturbations;
mod plan;
mod problem;
mod refuses;
mod resume;
mod resume_states;
mod shrink;
mod soup;
mod ties;
mod trust;
mod whole_way;
