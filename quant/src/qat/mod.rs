//! Quantization-aware training: preparing a model, quantizing the calls in it, and what happens between
//! its steps.

pub(crate) mod attach;
pub(crate) mod choices;
pub(crate) mod config;
pub(crate) mod forward_q;
pub(crate) mod found_sites;
pub(crate) mod kv_cache;
pub(crate) mod overrides;
pub(crate) mod probe;
pub(crate) mod run;
#[doc(hidden)]
pub mod tokens;
pub(crate) mod training;

pub use attach::AttachQuantizers;
pub use config::QatConfig;
pub use forward_q::{
    DecoderCache, ForwardQ, MhaInput, TransformerDecoderInput, TransformerEncoderInput,
};
pub use found_sites::FoundSites;
pub use kv_cache::{KvCache, KvFormat};
pub use overrides::Override;
pub use run::QuantizedForward;
pub use training::{advance, calibrate, calibrate_unobserved, merge_observers, set_schedule};
