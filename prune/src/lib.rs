//! Pruning for Burn.

mod bits;
mod error;
mod layout;
mod mask;
mod masking;
mod masks;
mod walk;

pub use error::PruneError;
pub use layout::{Layer, LayerKind, Layout};
pub use mask::Mask;
pub use masking::{AttachMasks, rewind};
pub use masks::{Masks, ParameterMask};
