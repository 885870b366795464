//! Quantization for Burn.

mod adaround;
mod error;
mod float_parameters;
mod fold;
mod gptq;
mod input_statistics;
mod integer;
mod requantize;
mod weight_grid;

pub use adaround::{AdaRoundConfig, adaround};
pub use error::QuantError;
pub use fold::{FoldPair, fold};
pub use gptq::{GptqConfig, gptq};
pub use input_statistics::InputStatistics;
pub use integer::{ConvGeometry, Grid, IntegerConv2d, IntegerLinear};
pub use requantize::{
    Multiplier, Requantization, rounding_divide_by_pot, saturating_rounding_doubling_high_mul,
};
pub use weight_grid::WeightGrid;
