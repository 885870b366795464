//! Quantized models in the layout of [compressed-tensors](https://github.com/vllm-project/compressed-tensors),
//! which Transformers, llm-compressor and, for grids that it has kernels for ([which](PretrainedFolder#readers)), vLLM
//! read.
//!
//! A [safetensors](https://github.com/huggingface/safetensors) file, with PyTorch's names and axes: the
//! weight of a linear layer is `[d_output, d_input]`, gains and offsets of norms are `weight` and `bias`.
//! Of a layer at path `P`:
//!
//! | name | dtype, shape | content |
//! |---|---|---|
//! | `P.weight` | I8, `[d_output, d_input]` | codes where the input of the layer is rounded, too (`int-quantized`) |
//! | `P.weight_packed` | I32, `[d_output, ⌈bits · d_input / 32⌉]` | codes where it is not, plus 2ᵇ⁻¹, low bits first (`pack-quantized`) |
//! | `P.weight_shape` | I64, `[2]` | of the weight, where it is packed |
//! | `P.weight_scale` | F32, `[1]`, `[d_output, 1]` or `[d_output, groups]` | value of one step |
//! | `P.weight_zero_point` | I8, as the scale; I32, packed along the outputs, where the weight is and has several | affine weights only |
//! | `P.input_scale`, `P.input_zero_point` | F32 and I8, `[1]` | of an input that is quantized per tensor with a range of its own |
//! | all others | their own | every other tensor of the model |
//!
//! The metadata has `format` (`pt`), `crc32` (a checksum, which a program that changes the file leaves out) and
//! `quantization_config`, the JSON that belongs under that name into
//! a `config.json` beside the file: a [`PretrainedFolder`] has both, with the names of the network there.
//! A file of both kinds of weights is `mixed-precision`; linear layers of floats are in `ignore`. Codes of 3,
//! 5, 6 and 7 bits lie as the library has them since 0.18, and are read as it had them before, too.
//! Weights of 2:4 without their zeros (`sparse-24-bitmask`: `P.compressed`, `P.bitmask`, `P.shape`) are read from files of
//! other programs, and written as floats, since the library reads them no more. Codes of unsigned formats are stored as signed ones, with their zero
//! points: the values are the same.

mod codes;
mod config;
mod contents;
mod layout;
mod load;
mod pretrained;
mod save;
mod sparse;
mod targets;

pub use load::{load_compressed_tensors, load_pretrained};
pub use pretrained::PretrainedFolder;
pub use save::{CompressedReport, save_compressed_tensors};
