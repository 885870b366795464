//! From a trained model to a small, fast one: a [`Recipe`] orders what the other crates do (mixed
//! precision, smaller layers, pruning, quantization, export), and [`Run`] does it, inside your own
//! program, resumable at any moment.
//!
//! ```
//! use burn::nn::{Linear, LinearConfig};
//! use burn::tensor::{Device, Distribution, Tensor};
//! use burn_lean_recipe::{Recipe, Run, Task};
//!
//! let device = Device::flex().autodiff();
//! let x = Tensor::<2>::random([64, 8], Distribution::Normal(0.0, 1.0), &device);
//! let y = x.clone().sum_dim(1);
//! let task = Task::new(
//!     |model: &Linear, x: Tensor<2>| model.forward(x),
//!     |output: Tensor<2>, y: Tensor<2>| (output - y).square().mean(),
//!     |_seed| [(x.clone(), y.clone())],
//! );
//! let recipe = Recipe::from_toml(
//!     r#"
//!     dtype = "f32"
//!     [train]
//!     epochs = 2
//!     learning_rate = 0.01
//!     [prune]
//!     sparsity = 0.5
//!     [[quantize]]
//!     weights = "int8"
//!     activations = "none"
//!     "#,
//! )?;
//! let outcome = Run::new(&recipe).run(LinearConfig::new(8, 1).init(&device), &task)?;
//! let names: Vec<_> = outcome.rows().map(|row| row.stage.as_str()).collect();
//! assert_eq!(names, ["FP32", "pruned 50 %", "pruned 50 %, W8"]);
//! assert_eq!(outcome.masks.unwrap().nonzeros(), 4);
//! # Ok::<(), burn_lean_recipe::RecipeError>(())
//! ```
//!
//! Features: `engine` measures latency in the engine for the CPU; `nvml`, which comes with `cuda`, `vulkan`
//! and `wgpu`, the energy of NVIDIA's GPUs; the backends forward to Burn's.

#![cfg_attr(docsrs, feature(doc_cfg))]

mod broken_bound;
mod check;
mod distillation;
mod error;
mod joint;
mod plan;
mod row;
mod run;
mod soup;
mod state;
mod task;
mod tensors;
mod trust;

pub use broken_bound::BrokenBound;
pub use burn_lean_prune::layerwise::Outputs;
pub use distillation::Distillation;
pub use error::RecipeError;
pub use joint::{Joint, JointOutcome};
pub use plan::{
    Bounds, ComputeDtype, Format, Numbers, PruneMethod, PruneStage, QuantizeStage, RateSchedule,
    Recipe, RoundingMethod, ShrinkStage, Sparsity, TrainStage,
};
pub use row::Row;
pub use run::{Latency, Outcome, Progress, Run, StageOutcome};
pub use soup::{GreedySoup, greedy_soup, uniform_soup, uniform_soup_of_records};
pub use task::{Predict, Task};
pub use trust::{
    Answers, Energy, EnergyCounter, EnergyMeter, EnergyPart, LayerSqnr, Perturbation,
    ReliabilityBin, Robustness, Share, Side, Trust, TrustConfig, mcnemar, wilson,
};
