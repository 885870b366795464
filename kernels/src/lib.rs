//! Products with packed weights, for inference on a CPU.
//!
//! A weight is packed once, in panels of 16 columns, in the form in which it stays in memory:
//!
//! - [`IntegerMatrix`]: codes of 4 or 8 bits, multiplied by codes. Pairs of 16-bit products are summed
//!   in 32 bits (`vpmaddwd` on x86), so that no sum saturates on any CPU: the result is exact. For left
//!   sides of many rows, on a CPU that sums four products of 8 bits exactly (VNNI, for one), it can be
//!   packed for those. Rows may have a scale each ([`Epilogue::with_row_scale`]), and blocks of the weight
//!   scales and zero points of their own ([`Blocks`]);
//! - [`FloatMatrix`]: F32, F16, BF16, or codes with scales, multiplied by floats; what is narrower than
//!   F32 is widened in registers;
//! - [`SparseMatrix`]: the nonzero weights of each column.
//!
//! Left sides are rows ([`Rows::dense`]) or the windows of a convolution over an image whose channels
//! come last ([`Windows`]); [`Epilogue`] says what happens to the sums. Work is shared by the threads of
//! rayon's current pool where there is enough of it; the result does not depend on their number.
//!
//! ```
//! use burn_lean_kernels::{Epilogue, IntegerMatrix, Rows};
//!
//! // Codes [k, n] = [2, 1] of the weights 3 · 0.25 and −1 · 0.25.
//! let weight = IntegerMatrix::new(&[3, -1], 2, 1, 8)?;
//! let epilogue = Epilogue::new(1).with_scale(&[0.5 * 0.25]);
//! // Inputs 1.0 and −2.0 on a grid of steps of 0.5: distances from the code of zero.
//! let mut output = [0.0];
//! weight.multiply(&Rows::dense(&[2, -4], 2), &epilogue, &mut output);
//! assert_eq!(output, [1.0 * 0.75 + 2.0 * 0.25]);
//! # Ok::<(), burn_lean_kernels::KernelError>(())
//! ```
#![forbid(unsafe_code)]

mod blocks;
mod depthwise;
mod dots;
mod drive;
mod elementwise;
mod epilogue;
mod error;
mod float;
mod integer;
mod layout;
mod quantize;
mod rows;
mod shares;
mod simd;
mod sparse;

pub use blocks::Blocks;
pub use depthwise::Depthwise;
pub use elementwise::{add, clamp, gelu, layer_norm, sigmoid, softmax, sum, tanh, transpose};
pub use epilogue::Epilogue;
pub use error::KernelError;
pub use float::{FloatMatrix, Storage};
pub use integer::IntegerMatrix;
pub use quantize::{CodeGrid, finite_range};
pub use rows::{Geometry, Left, Rows, Windows};
pub use shares::in_shares;
pub use sparse::SparseMatrix;
