//! All of it in one run.
//!
//! A [`Recipe`](crate::recipe::Recipe) says what is done, in TOML, in JSON or by a builder; a
//! [`Task`](crate::recipe::Task) says to what: forward pass, loss and data, as closures of your own program.
//!
//! ```
//! use std::ops::ControlFlow;
//!
//! use burn::module::Module;
//! use burn::nn::{Linear, LinearConfig};
//! use burn::tensor::{Device, Distribution, Tensor, activation::relu};
//! use burn_lean::recipe::{Progress, Recipe, Run, Task};
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
//! let device = Device::flex().autodiff();
//! let x = Tensor::<2>::random([64, 8], Distribution::Normal(0.0, 1.0), &device);
//! let y = x.clone().sum_dim(1);
//! let task = Task::new(
//!     |net: &Net, x: Tensor<2>| net.forward(x),
//!     |output: Tensor<2>, y: Tensor<2>| (output - y).square().mean(),
//!     // An epoch of batches, in the order of the seed.
//!     |_seed| [(x.clone(), y.clone())],
//! );
//! let recipe = Recipe::from_toml(
//!     r#"
//!     dtype = "f32"
//!     train = { epochs = 20, learning_rate = 0.01, schedule = "cosine" }
//!     [prune]
//!     sparsity = 0.5
//!     [[quantize]]
//!     weights = "int8"
//!     "#,
//! )?;
//! let net = Net {
//!     body: LinearConfig::new(8, 16).init(&device),
//!     head: LinearConfig::new(16, 1).init(&device),
//! };
//! let state = tempfile::tempdir()?;
//! let mut steps = 0;
//! for _ in 0..2 {
//!     let outcome = Run::new(&recipe)
//!         .with_state(state.path())
//!         .with_progress(|progress| {
//!             steps += usize::from(matches!(progress, Progress::Step { .. }));
//!             ControlFlow::Continue(())
//!         })
//!         .run(net.clone(), &task)?;
//!     let names: Vec<_> = outcome.rows().map(|row| row.stage.as_str()).collect();
//!     assert_eq!(names, ["FP32", "pruned 50 %", "pruned 50 %, W8A8"]);
//!     assert_eq!(outcome.masks.unwrap().nonzeros(), (8 * 16 + 16) / 2);
//! }
//! // The second run found every stage done.
//! assert_eq!(steps, 20);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # The stages
//!
//! | table | does |
//! |---|---|
//! | `[train]` | trains, in half precision where the device computes in it; without it the model is taken as it is |
//! | `[shrink]` | cuts channels and features down to a share of the multiplications |
//! | `[prune]` | zeros: `layerwise` from inputs (of a regression with `outputs = "values"`), `chita` and `gradual` from gradients |
//! | `[[quantize]]` | one or several ways, each from what pruning left: with `train` QAT, without it PTQ |
//! | `[bounds]` | a run does not look at them: `TrustConfig::new().with_bounds(recipe.bounds)`, `compare`, `check` |
//!
//! `tune` in the second and the third trains what is left, `distillation` in it learns from the dense model.
//! `exclude` in `[shrink]`, `[prune]` and `[[quantize]]` names parts of paths of parameters that are left alone;
//! `*` stands for any characters but dots, `**` for any. Fields that do not fit each other, the model or the batches are refused
//! before anything is computed.
//!
//! # Going on
//!
//! With [`with_state`](crate::recipe::Run::with_state) a run that was killed goes on from its last finished
//! stage or checkpoint. The folder refuses another recipe and another initial model, and other data where
//! [`with_identity`](crate::recipe::Run::with_identity) says what the data are.
//!
//! # What came out
//!
//! Each row of the [`Outcome`](crate::recipe::Outcome) has accuracy, bytes, nonzeros and latency.
//! [`TrustConfig::compare`](crate::recipe::TrustConfig::compare) sets a compressed model beside the original
//! on labelled examples: accuracy with its interval, where they disagree, calibration, robustness, signal to
//! noise of every layer, energy, as a page and as JSON; [`Bounds`](crate::recipe::Bounds) make it the gate of a
//! CI. The example `recipe` is a whole program.
//!
//! [`Energy`](crate::recipe::Energy) comes from counters of the machine: of a model on the CPU those of its
//! packages (RAPL, on Linux; `energy_uj` in `/sys/class/powercap` must be readable, which often only root may),
//! of a model on an NVIDIA GPU that of the GPU (NVML, Volta and later) and the packages beside it, each by its
//! name, and their sum. Where the counter of the device cannot be read it is not measurable, and says why: no
//! power times time, no figures of others.
