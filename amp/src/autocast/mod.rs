//! Where the forward pass is in half precision: operation by operation, or as a region.

pub(crate) mod config;
pub(crate) mod half;
pub(crate) mod lists;
pub(crate) mod precision;
pub(crate) mod region;
pub(crate) mod run;
pub(crate) mod weight_cast;

pub use config::{AutocastConfig, MasterWeight};
pub use half::materialize_half;
pub use precision::{KeptBecause, ParameterPrecision, parameter_precision};
pub use region::{Autocast, full_precision, to_region};
pub use run::AssignedOperation;
