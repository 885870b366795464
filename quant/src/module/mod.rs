//! The quantizer as a module: what it is set to, what it knows, when it acts, and who may listen.

pub(crate) mod config;
pub(crate) mod control;
pub(crate) mod hook;
pub(crate) mod listener;
pub(crate) mod quantizer;
pub(crate) mod resident;
pub(crate) mod schedule;
pub(crate) mod sites;
pub(crate) mod state;
pub(crate) mod tap;
pub(crate) mod watch;
pub(crate) mod weight;
pub(crate) mod weight_config;
