//! Language models, in one pass over a little text.
//!
//! [`OneShot`](crate::oneshot::OneShot) walks through a model layer by layer. What arrives at a layer comes
//! from the compressed layers before it; the layer's weights are pruned, rounded to a grid, or both, one after
//! the other, so that it gives what the original model gives there. No labels, no loss, no gradients:
//!
//! ```
//! use burn::module::Module;
//! use burn::nn::{Linear, LinearConfig};
//! use burn::tensor::{Device, Distribution, Tensor, activation::relu};
//! use burn_lean::oneshot::{OneShot, load_compressed};
//! use burn_lean::quant::deploy::PretrainedFolder;
//!
//! #[derive(Module, Debug)]
//! struct Net {
//!     body: Linear,
//!     head: Linear,
//! }
//!
//! impl Net {
//!     fn new(device: &Device) -> Self {
//!         Self {
//!             body: LinearConfig::new(16, 32).init(device),
//!             head: LinearConfig::new(32, 8).init(device),
//!         }
//!     }
//!
//!     fn forward(&self, x: Tensor<2>) -> Tensor<2> {
//!         self.head.forward(relu(self.body.forward(x)))
//!     }
//! }
//!
//! let device = Device::flex();
//! let batches = [0, 1].map(|_| Tensor::<2>::random([64, 16], Distribution::Default, &device));
//! let done = OneShot::new("sparse-0.5-w4a16-g8".parse()?)
//!     .compress(Net::new(&device), batches.clone(), Net::forward)?;
//! let zeros: usize = done.report.layers.iter().map(|layer| layer.zeros).sum();
//! assert!(zeros >= (16 * 32 + 32 * 8) / 2);
//!
//! // Packed codes and scales, without the zeros; the same numbers again.
//! let folder = tempfile::tempdir()?;
//! let file = folder.path().join("model.safetensors");
//! done.save(&file)?;
//! let loaded = load_compressed(Net::new(&device), &file)?.model;
//! let [x, _] = batches;
//! assert_eq!(loaded.forward(x.clone()).into_data(), done.model.forward(x).into_data());
//!
//! // Codes, scales and zero points as quantizers of `quant`: a folder for Transformers and vLLM, with the names
//! // that the network has there; an ONNX file and the engine of `deploy` take this model, too.
//! let prepared = done.prepare(None)?;
//! assert_eq!(prepared.left_float, []);
//! let mut writer = PretrainedFolder::create(folder.path().join("vllm"))?;
//! writer.add(&prepared.model, |path| format!("model.{path}"))?;
//! let report = writer.finish(serde_json::json!({ "model_type": "mine" }))?;
//! assert_eq!(report.quantized, ["model.body.weight", "model.head.weight"]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # What to ask for
//!
//! | preset | is |
//! |---|---|
//! | `w8a16` | 8-bit weights, a scale for each output |
//! | `w4a16-g32` | 4 bits, a scale for 32 inputs: GPTQ with searched ranges and refined codes |
//! | `sparse-2:4`, `sparse-0.5` | zeros, chosen as best subsets |
//! | `sparse-2:4-w4a16-g32` | zeros first, then codes of the weights that stay, which make good for each other |
//! | `w8a8` | 8-bit weights, rounded to nearest after SmoothQuant, and 8-bit inputs: errors are reported for rounded inputs |
//! | `w4a8-g32` | the same with 4-bit weights, each group with a zero point, that are solved for rounded inputs: for Transformers, ONNX and the engine, not for vLLM |
//!
//! With the last two, [`Compressed::prepare`](crate::oneshot::Compressed::prepare) with the preset's activations
//! makes the layers round their inputs. With zeros and a grid, zeros stay where pruning left them, unless
//! [`exchange_zeros`](crate::oneshot::Quantize::exchange_zeros) lets them move while codes are chosen.
//! [`PretrainedFolder`](crate::quant::deploy::PretrainedFolder#readers) has a table of which programs read which grid;
//! [`check_layer`](crate::oneshot::Preset::check_layer) says before a model is loaded whether the calibration text is
//! long enough for a layer.
//!
//! A [`Preset`](crate::oneshot::Preset) is also built field by field: AWQ, SmoothQuant, SparseGPT, Wanda,
//! magnitude; [`as_published`](crate::oneshot::Preset::as_published) is the method of the paper alone.
//!
//! # Large models
//!
//! [`with_state`](crate::oneshot::OneShot::with_state) goes on after the last finished block,
//! [`spilling_to`](crate::oneshot::OneShot::spilling_to) keeps activations in files, and
//! [`compress_blocks`](crate::oneshot::OneShot::compress_blocks) has one block in memory at a time.
//! [`KvCache`](crate::quant::KvCache) keeps keys and values in 8 bits; in a recorded pass it goes in with
//! the tokens and comes back with the logits. Attentions, encoders and decoders of `burn-nn` take it with
//! [`forward_q`](crate::quant::ForwardQ), in the place of `forward_cache` and
//! `forward_autoregressive_inference`, whose own caches are private: there weights alone are quantized, and keys
//! and values stay floats.
//!
//! The example `llama_compress` takes the folder of a Llama as it comes from Hugging Face (`config.json`, shards, the scaled rotations of
//! Llama 3.1), or a file with the names of Hugging Face or Meta, without biases. A head that is a matrix of its own stays
//! as it is there, as its readers expect it; `--head` compresses it, too.
