//! What every room needs of the host: numbers of tensors, files, packed flags, bars.

mod bar;
pub(crate) mod bits;
pub(crate) mod files;
mod read;

pub(crate) use bar::bar;
pub(crate) use burn_lean_graph::in_host_memory;
pub(crate) use read::{mismatch, read, read_all, select};

/// Bytes of the host that a system may use with all that solving it takes: here a product to be added
/// to it, and its factor, so that it may have 29,308 unknowns.
pub(crate) const HOST_BYTES: usize = 16 << 30;
