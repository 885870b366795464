//! Physically smaller layers from whole units that pruning left without weights, or that matter least.
//!
//! A unit (a hidden feature, a channel) can go in two cases:
//!
//! - nothing reads it: its weights in the following layers are all zero;
//! - it is constant: its weights in its own layer are all zero, so that it puts out the same
//!   number c whatever comes in. What the following layer makes of c moves into that layer's bias.
//!
//! Everything else keeps its value and its order. Which slices of parameters a unit consists of is read
//! off the recorded forward pass ([`Shrink`]).

mod cut;
mod load;
mod readers;
mod report;
mod scores;
mod whole;

pub use load::load_shrunk;
pub use report::{ShrinkReport, ShrunkGroup};
pub use whole::{Shrink, Shrunk};
