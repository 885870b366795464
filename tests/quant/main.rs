//! The `quant` crate as its users see it, on every device.

#[path = "../support/mod.rs"]
mod support;

mod convert;
mod fake_quantize;
mod fold;
mod integer;
mod layers;
mod prepare;
mod rounding;
mod storage;
