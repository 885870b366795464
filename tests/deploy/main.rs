//! Models out of Burn: what is written as ONNX, judged by an engine that is not Burn's.

#[path = "../support/mod.rs"]
mod support;

mod batch;
mod engine;
mod functions;
mod judge;
mod layers;
mod movement;
mod pruned;
mod quantized;
mod refuses;
