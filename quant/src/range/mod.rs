//! From what a tensor was seen to hold to the range of its grid: observers, histograms, and how they
//! clip.

pub(crate) mod calibrator;
pub(crate) mod histogram;
pub(crate) mod min_max;
pub(crate) mod observer;
