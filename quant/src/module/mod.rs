//! The quantizer as a module: what it is set to, what it has observed, what it does now, and where a
//! model has one.

pub(crate) mod config;
pub(crate) mod control;
pub(crate) mod effective;
pub(crate) mod hook;
pub(crate) mod listen;
pub(crate) mod on_tape;
pub(crate) mod outcome;
pub(crate) mod quantizer;
pub(crate) mod resident;
pub(crate) mod schedule;
pub(crate) mod sites;
pub(crate) mod walk;
pub(crate) mod weight;
pub(crate) mod weight_config;

pub use config::{FakeQuantizeConfig, Learned, learned_parameters};
pub use listen::input_statistics::InputStatistics;
pub use listen::layer_inputs::LayerInputs;
pub use outcome::{RunOutcome, TensorOutcome};
pub use quantizer::FakeQuantize;
pub use resident::Dequantize;
pub use schedule::{Phase, Schedule};
pub use sites::SiteQuantizers;
pub use walk::{Located, Site, map_quantizers, quantizers};
pub use weight::WeightQuantizer;
pub use weight_config::{WeightConfig, WeightGranularity};
