//! Out of Burn.
//!
//! | wanted | take |
//! |---|---|
//! | a record that Burn loads | `ConvertConfig::convert`, then `into_record` |
//! | a small file for this library, loaded in a process that knows the architecture alone | [`save_safetensors`](crate::quant::save_safetensors), [`load_safetensors`](crate::quant::load_safetensors): as many bits as the codes have, with the quantizers of activations (they act in `QuantizedForward::run` and in exports); [`SparseRecord`](crate::prune::SparseRecord): without the zeros |
//! | a half-precision file, and inference from it | [`materialize_half`](crate::amp::materialize_half()), then [`save_safetensors`](crate::quant::save_safetensors) |
//! | vLLM, Transformers | [`PretrainedFolder`](crate::quant::deploy::PretrainedFolder): a folder that they load, with the names of the network there; [`save_compressed_tensors`](crate::quant::deploy::save_compressed_tensors): one file in the same layout |
//! | another runtime | [`Export::to_onnx`](crate::deploy::Export::to_onnx): ONNX, quantized with `Form::Qdq`, for TensorRT with `Form::QdqSigned`; in half from a model of [`materialize_half`](crate::amp::materialize_half()) with half inputs (not with a BatchNorm) |
//! | fast on this CPU | `EngineConfig::compile` (feature `engine`); of a pruned model, too: it finds out which matrices are faster without their zeros |
//!
//! ```
//! use burn::nn::{Linear, LinearConfig};
//! use burn::tensor::{Device, Distribution, Tensor};
//! use burn_lean::deploy::{EngineConfig, Form}; // `EngineConfig` with the feature `engine`
//! use burn_lean::prelude::*;
//!
//! let device = Device::flex();
//! let model: Linear = LinearConfig::new(8, 4).init(&device);
//! let x = Tensor::<2>::random([16, 8], Distribution::Default, &device);
//! let config = PtqConfig::new().with_progress(false);
//! let (model, _) = config.quantize_for(model, || [x.clone()], |model, x| model.forward(x))?;
//!
//! let export = Export::record(&model, &x, |model: &Linear, x| model.forward(x))?;
//! let exported = export.to_onnx(Form::Qdq)?;
//! let count = |operator: &str| {
//!     let nodes = exported.model.nodes().iter();
//!     nodes.filter(|node| node.operator() == operator).count()
//! };
//! // The input becomes codes; it and the weight, which is codes in the file, become floats.
//! assert_eq!((count("QuantizeLinear"), count("DequantizeLinear")), (1, 2));
//!
//! let engine = EngineConfig::new().compile(export)?;
//! let outputs = engine.run(&x)?;
//! let prepared = QuantizedForward::new().run(&model, x, |model, x| model.forward(x))?;
//! // Where floats are faster here, the engine takes them, and inputs are not rounded: 8 of them by half a
//! // step of 1/255 at most, times weights of at most 0.36. `Arithmetic::Integer` rounds the inputs of layers as the
//! // model does; the operands of attentions and sums stay floats in an engine.
//! assert!((outputs - prepared).abs().max().into_scalar::<f32>() < 6e-3);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # What the engine chooses
//!
//! - Codes times codes are summed exactly on every CPU, by [rten-gemm](https://github.com/robertknight/rten) where that
//!   is faster and as exact; rows and groups of inputs may have a scale each. Of matrices that are mostly zero it also
//!   tries the nonzero numbers alone: a pruned model, masks and all, needs no other call. Where integers or zeros do not
//!   pay, the report says so, layer by layer.
//! - Burn stays unless another way is faster by 10 % in the shortest run and in the median of the rounds.
//! - With `Arithmetic::Integer` every layer that has a kernel rounds its input, whatever it costs; operands of products of
//!   two activations, as attentions have them, stay floats.
//! - Matrices in integers keep a quarter of the bytes, and are fastest where weights do not fit the cache.
//!   `materialize_half` of `amp` stores weights in F16 or BF16, in memory and in a file.
//!
//! A converted model that runs in Burn, without an engine, multiplies floats that were dequantized once, and rounds
//! activations on the way: in the networks of `benches/RESULTS.md` it takes 0.81 to 1.41 times as long as FP32, run by
//! `QuantizedForward::new().cached()`. Without `cached` each call records the pass; small recurrent layers, depthwise
//! networks and MLPs of less than 0.1 ms were seen at two to four times. The report of the conversion names the layers,
//! and `ConvertConfig::with_activations(Activations::Float)` leaves them float.
//! `ConvertConfig::with_dequantize(Dequantize::InProduct)` has a kernel multiply by the codes in layers that are called by
//! `forward_q` (feature `engine`), where that is exact and not slower.
//!
//! # Sequences of any length
//!
//! The batch is open without being asked to, other axes are by name. What the network makes of their sizes is
//! computed in the file. A recurrent layer over one of them, or a `for` loop over its steps, is one step in a `Loop`:
//!
//! ```
//! use burn::nn::{Lstm, LstmConfig};
//! use burn::tensor::{Device, Distribution, Tensor};
//! use burn_lean::deploy::{EngineConfig, Form, OpenAxis};
//! use burn_lean::prelude::*;
//!
//! let device = Device::flex();
//! let lstm: Lstm = LstmConfig::new(8, 16, true).init(&device);
//! let forward = |lstm: &Lstm, x: Tensor<3>| lstm.forward(x, None).0;
//! let of = |steps| Tensor::<3>::random([2, steps, 8], Distribution::Default, &device);
//!
//! let axes = [OpenAxis::new("steps", [(0, 1)])];
//! let export = Export::record_open(&lstm, &of(6), &axes, forward)?;
//! let onnx = export.to_onnx(Form::Float)?.model;
//! assert!(onnx.nodes().iter().any(|node| node.operator() == "Loop"));
//!
//! let engine = EngineConfig::new().compile(export)?;
//! let x = of(90);
//! let difference = engine.run(&x)? - forward(&lstm, x);
//! assert!(difference.abs().max().into_scalar::<f32>() < 1e-5);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
