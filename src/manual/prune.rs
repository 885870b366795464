//! Fewer weights.
//!
//! # From inputs alone
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
//! let device = Device::flex().autodiff();
//! let net = Net {
//!     body: LinearConfig::new(16, 64).init(&device),
//!     head: LinearConfig::new(64, 4).init(&device),
//! };
//! // Layers are fitted to the first batch; the last one judges.
//! let inputs = [192, 64].map(|examples| {
//!     Tensor::<2>::random([examples, 16], Distribution::Default, &device)
//! });
//! let forward = |net: &Net, x| net.head.forward(relu(net.body.forward(x)));
//! let pruned = Pruner::new(Budget::Sparsity(0.5)).prune(net, forward, inputs)?;
//! assert_eq!(pruned.masks.nonzeros(), (16 * 64 + 64 * 4) / 2);
//! // The zeros hold under any optimizer …
//! let net = pruned.masks.attach(pruned.model)?;
//! // … and are not stored.
//! let bytes = SparseRecord::from_module(&net.valid().materialize())?.to_bytes()?;
//! assert!(bytes.len() < 4 * (16 * 64 + 64 * 4 + 64 + 4));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Outputs are taken for logits of classes; of a regression, a forecast, a reconstruction say
//! `Pruner::new(budget).with_outputs(Outputs::Values)`, in the stages of
//! [`GradualPruner`](crate::prune::GradualPruner) `gradual.pruner.outputs`. Of several outputs all count,
//! those after the first as values.
//!
//! # From a data loader of Burn's
//!
//! Its items are results, and `iter` borrows the loader, so that a closure that makes one gives a whole epoch:
//!
#![cfg_attr(feature = "train", doc = "```")]
#![cfg_attr(not(feature = "train"), doc = "```text")]
//! use burn::data::dataloader::{DataLoader, DataLoaderBuilder, batcher::Batcher};
//! use burn::data::dataset::InMemDataset;
//! use burn::nn::{Linear, LinearConfig};
//! use burn::tensor::{Device, Tensor};
//! use burn_lean::prelude::*;
//!
//! #[derive(Clone)]
//! struct Stack;
//!
//! impl Batcher<[f32; 4], Tensor<2>> for Stack {
//!     fn batch(&self, items: Vec<[f32; 4]>, device: &Device) -> Tensor<2> {
//!         let rows = items.into_iter().map(|item| Tensor::<2>::from_data([item], device));
//!         Tensor::cat(rows.collect(), 0)
//!     }
//! }
//!
//! let device = Device::flex();
//! let items: Vec<[f32; 4]> = (0..96)
//!     .map(|at| [0, 1, 2, 3].map(|of| (at as f32 * (of as f32 + 1.3)).sin()))
//!     .collect();
//! let build = |seed: u64| {
//!     let loader = DataLoaderBuilder::new(Stack).batch_size(32).shuffle(seed);
//!     loader.set_device(device.clone()).build(InMemDataset::new(items.clone()))
//! };
//! let net: Linear = LinearConfig::new(4, 8).init(&device);
//!
//! // Some batches, and a closure that gives them from the start each time.
//! let loader = build(1);
//! let batches = || loader.iter().map(|batch| batch.expect("the data can be read"));
//! let pruner = Pruner::new(Budget::Sparsity(0.5)).with_outputs(Outputs::Values);
//! let pruned = pruner.prune(net, |net, x| net.forward(x), batches())?;
//! let ptq = PtqConfig::new().with_progress(false);
//! let (net, _) = ptq.quantize_for(pruned.model, batches, |net: &Linear, x| net.forward(x))?;
//!
//! // In the order of a seed.
//! let epoch = |seed: u64| build(seed).iter().map(Result::unwrap).collect::<Vec<Tensor<2>>>();
//! let loss = |net: &Linear, x: &Tensor<2>| net.forward(x.clone()).square().mean();
//! let chita = PrunerConfig::new(SolverConfig::new(Budget::Sparsity(0.5)), FisherConfig::new(32));
//! let pruned = chita.prune(LinearConfig::new(4, 8).init(&device), loss, epoch)?;
//! assert_eq!(pruned.masks.nonzeros(), 16);
//! # drop(net);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # From gradients
//!
//! [`PrunerConfig`](crate::prune::PrunerConfig) is CHITA, the best subset of weights under the
//! empirical Fisher, in one stage or several; it takes a loss and labelled batches, budgets per layer
//! or in operations, and N:M patterns. Take the first to begin with.
//!
//! Either takes the weights of all layers of the model that it is given, frozen ones, too: what is not to lose
//! any, a teacher beside its student or the target of a bootstrap, is left out by the
//! [`ParamGroup`](burn::module::ParamGroup) in `PrunerConfig::group` or `Pruner::group`. What the loss does not depend on is pruned
//! first, with a warning. A loss across examples, a contrastive one for instance, needs several of them to a
//! sample: `FisherConfig::with_batch_size`.
//!
//! Its gradient matrix has a row for each of n samples and a column for each weight. Where that is beyond
//! memory, it can be in a file:
//!
//! ```
//! use burn::nn::LinearConfig;
//! use burn::tensor::{Device, Distribution, Tensor};
//! use burn_lean::prelude::*;
//!
//! let device = Device::flex();
//! let inputs = Tensor::<2>::random([96, 16], Distribution::Default, &device);
//! // 64 rows of 128 numbers; 8 KiB of them may be in memory, the others are in an unnamed file.
//! let on_disk = FisherConfig::new(64)
//!     .with_memory_bound(8 << 10)
//!     .with_on_disk(Some(std::env::temp_dir()));
//! let pruned = PrunerConfig::new(SolverConfig::new(Budget::Sparsity(0.75)), on_disk).prune(
//!     LinearConfig::new(16, 8).init(&device),
//!     |model, x: &Tensor<2>| model.forward(x.clone()).square().mean(),
//!     |_seed| [inputs.clone()],
//! )?;
//! assert!(pruned.stages[0].gradients.on_disk);
//! assert_eq!(pruned.stages[0].gradients.bytes, 32 << 10);
//! # Ok::<(), burn_lean::prune::PruneError>(())
//! ```
//!
//! # In stages, with training between them
//!
//! Most zeros for the accuracy: prune a part, train with the zeros held, prune further. What prunes is
//! `Pruner` or magnitude ([`GradualPruner`](crate::prune::GradualPruner)), or CHITA
//! ([`GradualConfig`](crate::prune::GradualConfig)); `state` names a folder, and a run that was killed goes on
//! after the newest finished stage in it. What trains is yours, here in mixed precision with the dense network
//! as a teacher:
//!
//! ```
//! use burn::module::Module;
//! use burn::nn::loss::CrossEntropyLossConfig;
//! use burn::nn::{Linear, LinearConfig};
//! use burn::optim::{GradientsParams, SgdConfig};
//! use burn::tensor::{Device, Distribution, FloatDType, Int, Tensor};
//! use burn_lean::prelude::*;
//! use burn_lean::prune::{GradualPruner, PruneError};
//! use burn_lean::recipe::Distillation;
//!
//! let device = Device::flex().autodiff();
//! let net: Linear = LinearConfig::new(16, 4).init(&device);
//! let x = Tensor::<2>::random([96, 16], Distribution::Default, &device);
//! let labels = Tensor::<1, Int>::zeros([96], &device);
//!
//! let teacher = net.valid(); // a copy of its own
//! let autocast = Autocast::new(FloatDType::BF16);
//! let mut scaler = GradScalerConfig::for_dtype(FloatDType::BF16).init()?;
//! let mut optim = SgdConfig::new().init();
//! let mut gradual = GradualPruner::new(Budget::Sparsity(0.75), 3, 1, 2); // stages, epochs, last ones
//! gradual.learning_rate = 0.05;
//! let pruned = gradual.prune(
//!     net,
//!     |net, x: Tensor<2>| net.forward(x),
//!     |_seed| [x.clone().inner()],
//!     |net, epoch| {
//!         if epoch.restart {
//!             optim = SgdConfig::new().init();
//!         }
//!         // For each batch of the epoch:
//!         let taught = Tensor::from_inner(teacher.forward(x.clone().inner()));
//!         let batch = (x.clone(), labels.clone(), taught);
//!         let loss = autocast.run(&net, batch, |net, (x, labels, taught)| {
//!             let logits = net.forward(x);
//!             let cross_entropy = CrossEntropyLossConfig::new().init(&logits.device());
//!             let at_labels = cross_entropy.forward(logits.clone(), labels);
//!             Distillation::new(4.0, 0.9).loss(at_labels, logits, taught)
//!         });
//!         let scaled = match loss.and_then(|loss| scaler.scale(loss)) {
//!             Ok(scaled) => scaled,
//!             Err(error) => return Err(PruneError::training(net, error)),
//!         };
//!         let grads = GradientsParams::from_grads(scaled.backward(), &net);
//!         let stepped = scaler.step(&mut optim, epoch.learning_rate(0.5), net, grads);
//!         stepped.map_err(|rejected| {
//!             rejected.map_error(|error| PruneError::Training { reason: error.to_string() })
//!         })
//!     },
//! )?;
//! assert_eq!(pruned.masks.nonzeros(), 16);
//! assert_eq!(pruned.stages.len(), 3);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Under Burn's Learner the epochs of a stage are one training: `prune_by_stage`, with the program in
//! [`learner`](super::learner#gradual-pruning). BatchNorm statistics are measured anew in every stage.
//! What comes of it, beside the dense network trained for as long: `cargo bench --features train --bench
//! gradual`.
//!
//! # Afterwards
//!
//! Fine-tune with the masks attached. [`Masks::from_zeros`](crate::prune::Masks::from_zeros) recovers
//! them from a checkpoint. Zeros make files smaller, and nothing faster by themselves:
//! [`Shrink`](crate::prune::Shrink) makes a whole model's layers smaller in one call, where units are
//! gone, or down to a share of the multiplications; with
//! [`shrink_resizing`](crate::prune::Shrink::shrink_resizing) through depthwise convolutions and the heads of
//! an attention of your own, too.
//!
//! To quantize it without training: `materialize()` first (a weight with a mask takes no quantizer beside it, only in
//! a chain), then [`fold_for`](crate::quant::fold_for),
//! [`PtqConfig::quantize_for`](crate::quant::PtqConfig::quantize_for),
//! [`Export::record`](crate::deploy::Export::record); zeros stay zeros.
