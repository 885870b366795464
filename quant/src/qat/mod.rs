//! Quantization-aware training: preparing a model, quantizing the calls in it, and what happens between
//! its steps.

pub(crate) mod config;
pub(crate) mod flips;
pub(crate) mod forward_q;
pub(crate) mod found;
pub(crate) mod overrides;
pub(crate) mod probe;
pub(crate) mod run;
pub(crate) mod training;
