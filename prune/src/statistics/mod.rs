//! What passes through a model: statistics of BatchNorm, norms of activations.

pub(crate) mod activation_norms;
pub(crate) mod batch_norm;
pub(crate) mod running;
