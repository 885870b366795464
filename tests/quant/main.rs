//! The `quant` crate as its users see it, on every device.

#[path = "../support/mod.rs"]
mod support;

mod codes;
mod fake_quantize;
mod learned;
mod qparams;
mod scheme;
