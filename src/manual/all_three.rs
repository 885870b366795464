//! Pruned, quantized, in mixed precision: one weight.
//!
//! A weight carries one reparameterization; a chain of two is one. The mask comes first, so that pruned
//! weights are exactly 0 in the quantized model, too; casts need none, since
//! [`Autocast::run`](crate::amp::Autocast::run) sees the operations.
//!
//! ```
//! use burn::module::Module;
//! use burn::nn::LinearConfig;
//! use burn::optim::{AdamWConfig, GradientsParams};
//! use burn::tensor::{Device, Distribution, FloatDType, Tensor};
//! use burn_lean::prelude::*;
//!
//! let device = Device::flex().autodiff();
//! let model = LinearConfig::new(16, 8).init(&device);
//! let x = Tensor::<2>::random([64, 16], Distribution::Default, &device);
//! // Of two batches the last one judges.
//! let pruned = Pruner::new(Budget::Sparsity(0.5))
//!     .prune(model, |model, x| model.forward(x), x.clone().chunk(2, 0))?;
//!
//! let chain = ChainReparameterizer::new(
//!     pruned.masks.reparameterizer(&pruned.model)?,
//!     QatConfig::new().reparameterizer(&pruned.model)?,
//! );
//! let mut model = attach(pruned.model, chain)?;
//! let autocast = Autocast::new(FloatDType::BF16);
//! let mut scaler = GradScalerConfig::for_dtype(FloatDType::BF16).init()?;
//! let mut optim = AdamWConfig::new().init();
//! for _ in 0..3 {
//!     let loss = autocast.run(&model, x.clone(), |model, x| model.forward(x).square().mean())?;
//!     let grads = GradientsParams::from_grads(scaler.scale(loss)?.backward(), &model);
//!     model = advance(scaler.step(&mut optim, 1e-3, model, grads)?);
//! }
//! let (model, _) = ConvertConfig::new().convert(model)?;
//! let zeros = model.weight.val().equal_elem(0.0).int().sum().into_scalar::<i64>();
//! assert!(zeros >= 64);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! `SparseRecord` is then the one file: codes of the weights that are left, and where they are.
//! The example `combined` does this on images, in a plain loop and in the Learner.
