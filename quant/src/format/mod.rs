//! Which numbers, and which elements share a scale.

pub(crate) mod groups;
pub(crate) mod number_format;
pub(crate) mod scale_format;
pub(crate) mod scheme;
pub(crate) mod step;

pub use number_format::NumberFormat;
pub use scale_format::{ScaleFormat, ScaleRounding};
pub use scheme::{Granularity, Mapping, Scheme};
