//! What was quantized and how well: coverage, health, sensitivity, bits by layer, comparisons.

pub(crate) mod audit;
pub(crate) mod compare;
pub(crate) mod health;
pub(crate) mod mixed;
pub(crate) mod sensitivity;

pub use audit::{Audit, AuditedLayer, AuditedOperand, Cause, Coverage, FunctionalSite, audit};
pub use compare::compare;
pub use health::{Health, QuantizerHealth, health};
pub use mixed::{Allocation, AllocationReport, MixedPrecisionConfig, Precision};
pub use sensitivity::{LayerSensitivity, Sensitivity, sensitivity};
