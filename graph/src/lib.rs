//! One recorded forward pass of any [Burn](https://burn.dev) model: its operations, rules for
//! them, and their execution with autodiff on any device.
//!
//! Burn has no hooks for operations, but a device that records them instead of computing. This
//! crate records a forward pass there, in training or evaluation mode, without editing the model
//! and without copying its weights, and executes it:
//!
//! - [`record`] gives a [`Recording`] of a closure over a model and its inputs, with the
//!   operations as a [`Graph`] of [`Node`]s that know the parameters they read;
//! - [`Recording::execute`] runs it under [`Rules`], which say in which precision each operation
//!   runs; gradients arrive at the parameters of the model, so optimizers, schedulers,
//!   checkpoints and adapters stay as they are;
//! - an [`Observer`] looks at each operation of an execution, and may replace what it computes;
//! - [`Graph::assign`] says what the rules come to without running anything;
//! - [`Recording::verify_gradients`] compares the gradients with those of a recorded backward
//!   pass, which shows where a forward pass stops them;
//! - [`Walk`] runs it over several batches in lockstep, shows what arrives at each operation and
//!   replaces parameters on the way, for methods that compress layer by layer;
//! - [`Tensors`] is what such a closure can take and return;
//! - [`Graph::sites`] says where numbers are quantized: inputs of layers, operands of attentions,
//!   sums and concatenations, each a [`Site`] of a parameter's path and a [`Role`];
//! - [`Graph::units`] says which slices of which parameters go together, across residual sums, norms
//!   and concatenations: what can be cut out of a network, and why the rest cannot;
//! - a [`Hook`](hooks::Hook) is an operation that a model carries, a fake quantizer say: a
//!   recording shows it as one node, and an execution calls it.
//!
//! # What a recording cannot follow
//!
//! | in the forward pass | what happens |
//! |---|---|
//! | reading a value (`into_scalar`, `into_data`; Burn's `one_hot`, and its `CTCLoss` with debug assertions) | [`GraphError::Forward`] |
//! | `backward`, `inner`, `to_device` | [`GraphError::Forward`] |
//! | Burn's own quantization of tensors (`quantize`, `quantize_dynamic`) | [`GraphError::Forward`] |
//! | a tensor from outside of the closure's arguments | [`GraphError::Forward`], or [`GraphError::ForeignOutput`] |
//! | `detach` of a result | detached, by [`Recordings`] and [`record_with_backward`] |
//! | `detach` elsewhere | [`GraphError::StopsGradients`] by [`Recording::verify_gradients`] |
//! | `detach` in some steps alone | seen by [`Recordings`] behind a `bool` or a variant of an input, not behind what the closure captures |
//! | a `RunningState` that is updated with a tensor from outside | [`GraphError::RunningState`] |
//! | numbers made on the host | part of the recording: record again where they change |
//! | random numbers | fresh in each execution |
//! | a cast to the dtype that a tensor has in the recording | none: Burn records nothing |
//! | plain tensors in modules | constants: read from the device by each recording, uploaded by each execution |
//! | one BatchNorm in training that is called twice | [`GraphError::Forward`]: call it once, on the concatenated views, or do without a recording |
#![cfg_attr(docsrs, feature(doc_cfg))]

mod backend;
mod capture;
mod conversions;
mod error;
mod execute;
#[cfg(feature = "cube")]
#[doc(hidden)]
pub mod fused;
mod graph;
pub mod hooks;
mod interpret;
mod passes;
mod record;
mod recordings;
mod rules;
mod sites;
mod tensors;
mod units;
mod verify;
mod walk;

pub use backend::{BackendKind, backend_name, in_host_memory};
#[doc(hidden)]
pub use burn_lean_reparam::kind;
pub use conversions::round_all;
pub use error::GraphError;
pub use execute::{HalfStorage, Observed, Observer, ReplacedState, replaced_states};
pub use graph::{
    FewerSteps, Graph, HookInfo, LoopPart, Node, Parameter, Repeated, Role, Rolled, Site, scalars,
};
pub use interpret::name as operation_name;
pub use record::{Halves, Recording, is_recorded, model_device, record, record_halves};
pub use recordings::Recordings;
pub use rules::{Arithmetic, AsRecorded, Assignment, Precision, Rules, is_castable};
pub use sites::{Place, SiteUse, Views};
#[doc(hidden)]
pub use tensors::plain;
pub use tensors::{
    Form, TensorMapper, Tensors, as_constants, cloned, description, evaluated, input_device,
    shapes, signature,
};
pub use units::{FixedBy, UnitAxis, UnitGroup, UnitRole};
pub use verify::{Verified, record_with_backward};
#[doc(hidden)]
pub use walk::host;
pub use walk::{Kernel, Mark, Pass, Product, Residual, ResidualNorm, Results, Step, Walk};
