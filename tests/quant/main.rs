//! The `quant` crate as its users see it, on every device.

#[path = "../support/mod.rs"]
mod support;

mod audit;
mod fake_quantize;
mod prepare;
