//! The `quant` crate as its users see it, on every device.

#[path = "../support/mod.rs"]
mod support;

mod codes;
mod fake_quantize;
mod layers;
mod learned;
mod prepare;
mod qparams;
mod quantizers;
mod scheme;
