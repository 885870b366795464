//! A whole model seen from outside: its float tensors, its records, activations without a range.

pub(crate) mod batch_norm;
pub(crate) mod called;
pub(crate) mod channel_layout;
pub(crate) mod column_layout;
pub(crate) mod float_parameters;
pub(crate) mod layers;
pub(crate) mod record;
pub(crate) mod unobserved;

pub use batch_norm::apply_schedule;
pub use record::{float_record, load_float_record, load_record};
pub use unobserved::{Activations, LeftFloat, Unobserved};
