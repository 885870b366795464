//! What was quantized and how well: coverage, health, sensitivity, bits by layer, comparisons.

pub(crate) mod audit;
pub(crate) mod compare;
pub(crate) mod health;
pub(crate) mod mixed;
pub(crate) mod sensitivity;
pub(crate) mod table;
