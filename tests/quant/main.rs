//! The `quant` crate as its users see it, on every device.

#[path = "../support/mod.rs"]
mod support;

mod codes;
mod convert;
mod fake_quantize;
mod fold;
mod layers;
mod learned;
mod prepare;
mod qparams;
mod scheme;
mod storage;
