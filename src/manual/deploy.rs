//! Out of Burn.
//!
//! | wanted | take |
//! |---|---|
//! | a record that Burn loads | `ConvertConfig::convert`, then `into_record` |
//! | a small file for this library | [`save_safetensors`](crate::quant::save_safetensors): as many bits as the codes have; [`SparseRecord`](crate::prune::SparseRecord): without the zeros |
//! | a half-precision file, and inference from it | [`materialize_half`](crate::amp::materialize_half()), then [`save_safetensors`](crate::quant::save_safetensors) |
//! | vLLM, Transformers | [`save_compressed_tensors`](crate::quant::deploy::save_compressed_tensors): their layout of quantized and of 2:4 weights |
//! | another runtime | [`Export::to_onnx`](crate::deploy::Export::to_onnx): ONNX, quantized with `Form::Qdq` |
//! | fast on this CPU | `EngineConfig::compile` (feature `engine`); of a pruned model, too: it finds out which matrices are faster without their zeros |
//!
//! ```
//! use burn::nn::LinearConfig;
//! use burn::tensor::{Device, Tensor};
//! use burn_lean::deploy::Form;
//! use burn_lean::prelude::*;
//!
//! let device = Device::flex();
//! let model = LinearConfig::new(8, 4).init(&device);
//! let x = Tensor::<2>::ones([1, 8], &device);
//! let export = Export::record(&model, &x, |model, x| model.forward(x))?;
//! let exported = export.to_onnx(Form::Float)?;
//! assert!(!exported.model.to_bytes()?.is_empty());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
