//! What must hold whatever comes: a typed error or a right result, never a panic, never NaN out of
//! finite numbers.
//!
//! `LEAN_CASES=100` takes a hundred times as many cases, `LEAN_SEED=1` others.

#[path = "../support/mod.rs"]
mod support;

mod cases;
mod damage;
mod engine;
mod files;
mod hostile;
mod killed;
mod network;
mod one_shot;
#[allow(dead_code)]
mod parsers;
mod precision;
mod pruning;
mod quantization;
mod replicas;
