//! The `quant` crate as its users see it, on every device.

#[path = "../support/mod.rs"]
mod support;

mod audit;
mod convert;
mod fake_quantize;
mod fold;
mod health;
mod layers;
mod prepare;
mod ptq;
mod sensitivity;
mod storage;
