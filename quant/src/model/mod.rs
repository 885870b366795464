//! A whole model seen from outside: its quantizers, its float tensors, its records.

pub(crate) mod column_layout;
pub(crate) mod effective;
pub(crate) mod float_parameters;
pub(crate) mod layers;
pub(crate) mod outcome;
pub(crate) mod record;
pub(crate) mod unobserved;
pub(crate) mod walk;
