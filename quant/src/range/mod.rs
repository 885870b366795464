//! From data to a range: observers, histograms, the choice of a range.

pub(crate) mod calibrator;
pub(crate) mod histogram;
pub(crate) mod observer;
pub(crate) mod state;

pub use calibrator::{entropy, mse, percentile, search};
pub use histogram::{Histogram, RangeMethod};
pub use observer::ObserverConfig;
