//! Eight bits and fewer.
//!
//! # Without training
//!
//! [`PtqConfig`](crate::quant::PtqConfig) takes a trained model, some inputs and the forward pass:
//!
//! ```
//! use burn::module::Module;
//! use burn::nn::{Linear, LinearConfig};
//! use burn::tensor::{Device, Distribution, Tensor, activation::relu};
//! use burn_lean::prelude::*;
//!
//! #[derive(Module, Debug)]
//! struct Net {
//!     body: Linear,
//!     head: Linear,
//! }
//!
//! impl Net {
//!     fn forward(&self, x: Tensor<2>) -> Tensor<2> {
//!         self.head.forward(relu(self.body.forward(x)))
//!     }
//! }
//!
//! let device = Device::flex();
//! let net = Net {
//!     body: LinearConfig::new(16, 32).init(&device),
//!     head: LinearConfig::new(32, 4).init(&device),
//! };
//! let batches = || (0..4).map(|_| Tensor::<2>::random([8, 16], Distribution::Default, &device));
//! let x = batches().next().unwrap();
//! let float = net.forward(x.clone());
//!
//! let config = PtqConfig::new().with_progress(false);
//! let (net, report) = config.quantize_for(net, batches, Net::forward)?;
//! assert_eq!(report.activations.len(), 2);
//! // It is run with its quantizers, now and after it is converted; the pass is recorded once.
//! let quantized = QuantizedForward::new().cached();
//! let prepared = quantized.run(&net, x.clone(), Net::forward)?;
//! let (net, _) = ConvertConfig::new().convert(net)?;
//! let converted = quantized.run(&net, x, Net::forward)?;
//! assert_eq!(converted.to_data(), prepared.into_data());
//! assert!((converted - float).abs().max().into_scalar::<f32>() < 0.1);
//! # Ok::<(), burn_lean::quant::QuantError>(())
//! ```
//!
//! # With training
//!
//! The model is prepared, the forward pass of the loop is run by `QuantizedForward`, and the end is the
//! same conversion: `QatConfig::new().with_weight(WeightConfig::int(4)).prepare(model)?`, then
//! `quantized.run(&model, batch, |model, batch| loss(model, batch))?`. Schedules move on by
//! themselves; where several runs make one step,
//! [`without_schedule`](crate::quant::QuantizedForward::without_schedule) leaves them to
//! [`advance`](crate::quant::advance()), or to the step of a gradient scaler.
//! [`prepare_for`](crate::quant::QatConfig::prepare_for) also takes the forward pass and finds what has no
//! layer: matrices, rotated queries and keys, and with `QatConfig::with_sums(true)` residual sums and
//! concatenations.
//!
//! # What to try, in this order
//!
//! 1. [`fold_for`](crate::quant::fold_for): BatchNorm into the layers before it, before anything is quantized,
//!    but after pruning and fine-tuning: a folded one is measured anew no more.
//! 2. W8A8 without training. [`audit`](crate::quant::audit()) says what is quantized,
//!    [`health`](crate::quant::health()) how well.
//! 3. W4 without training: GPTQ and ranges of the least squared error, with nothing chosen.
//! 4. [`sensitivity`](crate::quant::sensitivity()) and
//!    [`MixedPrecisionConfig`](crate::quant::MixedPrecisionConfig): a few layers at 8 bits.
//! 5. Training with fake quantization: W4A4, W3A3, W2A2.
