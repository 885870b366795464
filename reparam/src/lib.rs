//! Checked attachment and chaining of [Burn](https://burn.dev) weight reparameterizations.
//!
//! A [`Reparameterization`](burn::module::Reparameterization) changes what a weight *means* in
//! the forward pass: [`Param::val`](burn::module::Param::val) returns the *effective value* while
//! the optimizer keeps updating the stored *base*. Burn lets one parameter carry one of them and
//! drops a second one without a word. This crate adds what several extensions need to share a
//! weight:
//!
//! - [`attach`]: like `Module::apply_reparameterization`, but a second attachment to the same
//!   parameter is an error that names the parameter path;
//! - [`Chain`]: two reparameterizations on one weight, applied one after the other;
//! - [`find()`]: what a parameter carries, also inside of chains whose other links are unknown;
//! - [`unlink_before`]: a chain without the links whose effect is part of the base by now;
//! - [`visit_floats`], [`each_float`]: every float tensor of a model with its path;
//! - [`visit_with_path`], [`map_with_path`]: Burn's visitors and mappers, told where they are;
//! - [`attached`]: which parameters already carry one, and its name;
//! - [`Training`]: which parts of a model train;
//! - [`map_leaf`]: a parameter with another value, which trains as before;
//! - [`join_copies`]: one tensor in all copies of a parameter;
//! - [`column_layout`]: weights that records hold transposed, made ready to load;
//! - [`reductions`]: maxima, sums and tests of whole tensors in several steps;
//! - [`Rejected`]: an error that gives the caller's model back;
//! - [`Files`]: files that are complete or not there.
//!
//! # Order of loading
//!
//! A record of a reparameterized model also holds the state of its reparameterizations. Attach
//! first, load the record afterwards; the other way round Burn reports unused tensors.
//!
//! # Example
//!
//! ```
//! use burn::module::{Lora, Module};
//! use burn::nn::LinearConfig;
//! use burn::tensor::Device;
//! use burn_lean_reparam::{attach, attached};
//!
//! let linear = LinearConfig::new(4, 2).init(&Device::flex());
//! let linear = attach(linear, Lora::new(1, 1.0)).unwrap();
//! assert_eq!(attached(&linear)[0].path, "weight");
//!
//! // Burn alone would drop the second adapter silently.
//! let rejected = attach(linear, Lora::new(1, 1.0)).unwrap_err();
//! assert!(rejected.error().to_string().contains("`weight`"));
//! let linear = rejected.into_value();
//! assert_eq!(linear.num_params(), 4 * 2 + 2 + (4 + 2));
//! ```
#![cfg_attr(docsrs, feature(doc_cfg))]

mod attach;
#[doc(hidden)]
pub mod bits;
mod capture;
mod chain;
pub mod column_layout;
mod files;
mod find;
mod floats;
#[doc(hidden)]
pub mod json;
pub mod reductions;
mod rejected;
#[doc(hidden)]
pub mod sealed;
mod ties;
mod trail;
mod training;
mod unlink;

pub use attach::{AttachError, Attached, attach, attach_if_any, attached, lost};
pub use capture::{catch_quietly, recorded_device, with_capture_device_like};
pub use chain::{Chain, ChainReparameterizer};
pub use files::{Files, Lock};
pub use find::find;
pub use floats::{
    AnyFloat, FloatVisitor, each_float, each_plain_float, visit_floats, visit_plain_floats,
};
pub use rejected::Rejected;
pub use ties::{has_copies, join_copies};
pub use trail::{PathMapper, PathVisitor, Trail, map_with_path, visit_with_path};
pub use training::{Training, evaluated_with_gradients, map_leaf, own_copy, settle};
pub use unlink::unlink_before;
