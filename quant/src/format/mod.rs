//! Which numbers a quantized tensor can hold: number formats, schemes, the groups that share a scale, and
//! the parameters of the grid.

pub(crate) mod groups;
pub(crate) mod number_format;
pub(crate) mod qparams;
pub(crate) mod scale_format;
pub(crate) mod scheme;
pub(crate) mod step;
