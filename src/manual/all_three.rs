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
//!     // Moves the schedules of the quantizers on, too.
//!     model = scaler.step(&mut optim, 1e-3, model, grads)?;
//! }
//! let (model, _) = ConvertConfig::new().convert(model)?;
//! let zeros = model.weight.val().equal_elem(0.0).int().sum().into_scalar::<i64>();
//! assert!(zeros >= 64);
//!
//! // Codes of the weights that are left, in one file. The masks are in the codes, and their place in the
//! // chain is empty: so it is in the model that loads them.
//! let file = SparseRecord::from_module(&model)?.to_bytes()?;
//! let fresh = LinearConfig::new(16, 8).init(&device);
//! let chain = ChainReparameterizer::new(
//!     Masks::new(Vec::new())?.reparameterizer(&fresh)?,
//!     QatConfig::new().reparameterizer(&fresh)?,
//! );
//! let loaded = SparseRecord::from_bytes(&file)?.load_into(attach(fresh, chain)?.valid())?;
//! assert_eq!(loaded.weight.val().into_data(), model.weight.val().into_data());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Gradually, with training between the stages, the masks are there from the start, and keep all:
//!
//! ```
//! # use burn::module::Module;
//! # use burn::nn::LinearConfig;
//! # use burn::optim::{AdamWConfig, GradientsParams};
//! # use burn::tensor::{Device, Distribution, FloatDType, Tensor};
//! # use burn_lean::prelude::*;
//! use burn_lean::prune::{GradualConfig, SparsitySchedule, Selection};
//!
//! # let device = Device::flex().autodiff();
//! # let model = LinearConfig::new(16, 8).init(&device);
//! # let x = Tensor::<2>::random([64, 16], Distribution::Default, &device);
//! let masks = Masks::keeping_all(Selection::of(&model, None)?.layout());
//! let chain = ChainReparameterizer::new(
//!     masks.reparameterizer(&model)?,
//!     QatConfig::new().reparameterizer(&model)?,
//! );
//! let model = attach(model, chain)?;
//! let autocast = Autocast::new(FloatDType::BF16);
//! let mut optim = AdamWConfig::new().init();
//! let pruner = PrunerConfig::new(SolverConfig::new(Budget::Sparsity(0.75)), FisherConfig::new(16))
//!     .with_stages(3)
//!     .with_schedule(SparsitySchedule::Linear { base: 0.25 });
//! let pruned = GradualConfig::new(pruner, 1, 2).prune(
//!     model,
//!     |model, x: &Tensor<2>| model.forward(x.clone()).square().mean(),
//!     |_seed| [x.clone().inner()],
//!     |model, epoch| {
//!         if epoch.restart {
//!             optim = AdamWConfig::new().init();
//!         }
//!         let loss = autocast.run(&model, x.clone(), |model, x| model.forward(x).square().mean());
//!         let loss = loss.expect("it can be recorded");
//!         let grads = GradientsParams::from_grads(loss.backward(), &model);
//!         Ok(advance(optim.step(epoch.learning_rate(0.0), model, grads)))
//!     },
//! )?;
//! // Each stage replaced the masks, and left the quantizers alone.
//! assert_eq!(Masks::of(&pruned.model)?.sparsity(), 0.75);
//! let (model, _) = ConvertConfig::new().convert(pruned.model.valid())?;
//! let zeros = model.weight.val().equal_elem(0.0).int().sum().into_scalar::<i64>();
//! assert!(zeros >= 96);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! A file of [`save_safetensors`](crate::quant::save_safetensors) loads into quantizers without a chain, too.
//! The example `combined` does this on images, in a plain loop and in the Learner.
