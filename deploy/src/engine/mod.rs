//! A model that runs on the CPU, with integer kernels, and takes and returns Burn's tensors.

mod choose;
mod file;
mod program;
mod self_test;
mod values;

use std::fmt;
use std::sync::Arc;

use burn::config::Config;
use burn::tensor::DType;
use burn_lean_graph::{Tensors, signature};
use rten::ThreadPool;
use serde::{Deserialize, Serialize};

use crate::{DeployError, Dimension, Execution, Export, Exported, LayerReport};
use program::Program;

pub use file::OnnxFile;
pub use self_test::{IntegerKernels, integer_kernels};
use values::{given, results};

/// In what quantized layers are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Arithmetic {
    /// Integers where they are faster, measured layer by layer when the engine is compiled.
    #[default]
    Fastest,
    /// Integers wherever there is a kernel.
    Integer,
    /// Floats: weights are dequantized once, activations stay as they are.
    Float,
}

/// How a model is compiled for the CPU.
///
/// ```
/// use burn_lean_deploy::{Arithmetic, EngineConfig};
///
/// let config = EngineConfig::new();
/// assert_eq!(config.threads, 1);
/// assert_eq!(config.arithmetic, Arithmetic::Fastest);
/// ```
#[derive(Config, Debug, PartialEq, Eq)]
pub struct EngineConfig {
    /// Threads of a run. Default: 1.
    #[config(default = 1)]
    pub threads: usize,
    /// In what quantized layers are computed. Default: what is faster.
    #[config(default = "Arithmetic::Fastest")]
    pub arithmetic: Arithmetic,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self::new()
    }
}

/// A recorded model, compiled for the CPU by [rten](https://github.com/robertknight/rten).
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::tensor::{Device, Tensor, Tolerance};
/// use burn_lean_deploy::{EngineConfig, Export};
///
/// let device = Device::flex();
/// let model = LinearConfig::new(4, 2).init(&device);
/// let x = Tensor::<2>::ones([3, 4], &device);
/// let export = Export::record(&model, &x, |model, x| model.forward(x))?;
/// let engine = EngineConfig::new().compile(export)?;
/// let y = engine.run(&x)?;
/// y.into_data().assert_approx_eq::<f32>(&model.forward(x).into_data(), Tolerance::default());
/// # Ok::<(), burn_lean_deploy::DeployError>(())
/// ```
#[derive(Debug)]
pub struct Engine<O> {
    /// One for each shape of the inputs; the first is of the recorded ones.
    compiled: Vec<Compiled<O>>,
    config: EngineConfig,
    pool: Arc<ThreadPool>,
}

#[derive(Debug)]
struct Compiled<O> {
    export: Export<O>,
    exported: Exported,
    program: Program,
}

/// What became of a model in an [`Engine`].
///
/// Prints as a table.
#[derive(Debug, Clone, PartialEq)]
pub struct EngineReport {
    /// Its products and convolutions, in order.
    pub layers: Vec<LayerReport>,
    /// Bytes of all constants: what stays in memory between runs.
    pub resident_bytes: usize,
    /// Why the model takes one size of the batch alone; `None` where it takes any.
    pub fixed_batch: Option<String>,
}

impl EngineReport {
    /// Whether some layer computes in integers.
    pub fn is_integer(&self) -> bool {
        let integer = |layer: &LayerReport| {
            matches!(
                layer.execution,
                Execution::Integer | Execution::WeightsInteger
            )
        };
        self.layers.iter().any(integer)
    }
}

impl fmt::Display for EngineReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for layer in &self.layers {
            let (path, operation) = (&layer.path, layer.operation);
            write!(f, "{path} ({operation}): {}", layer.execution)?;
            match &layer.reason {
                Some(reason) => writeln!(f, ", {reason}")?,
                None => writeln!(f)?,
            }
        }
        writeln!(f, "{} bytes resident", self.resident_bytes)?;
        match &self.fixed_batch {
            Some(reason) => writeln!(f, "one size of the batch alone: {reason}"),
            None => Ok(()),
        }
    }
}

impl EngineConfig {
    /// Compiles a recorded model.
    ///
    /// Layers whose input and weight are quantized compute codes times codes, summed in I32, where a
    /// kernel does so exactly: U8 activations times I8 weights, one scale for the activation and one
    /// for each output channel. [`integer_kernels`] says what that comes to here: on a CPU that adds
    /// pairs of products in 16 bits a weight with codes beyond ±64 is computed as two, and
    /// convolutions stay float where those of the engine are not exact. Matrices of signed
    /// codes of 4 bits whose input is not quantized are multiplied by floats, block by block.
    /// Everything else runs in floats, and [`Engine::report`] says why.
    ///
    /// With [`Arithmetic::Fastest`] this takes the time of a few runs of each layer.
    ///
    /// # Errors
    ///
    /// Those of [`Export::to_onnx`], and [`DeployError::Load`] for operators and dtypes that the
    /// engine lacks.
    pub fn compile<O: Tensors>(&self, export: Export<O>) -> Result<Engine<O>, DeployError> {
        let pool = Arc::new(ThreadPool::with_num_threads(self.threads.max(1)));
        let first = Compiled::new(export, self.arithmetic, &pool)?;
        Ok(Engine {
            compiled: vec![first],
            config: self.clone(),
            pool,
        })
    }
}

/// The engine computes in F32.
fn check(inputs: &[(Vec<usize>, DType)]) -> Result<(), DeployError> {
    let of_other_floats = inputs
        .iter()
        .find(|(_, dtype)| dtype.is_float() && *dtype != DType::F32);
    match of_other_floats {
        None => Ok(()),
        Some((_, dtype)) => Err(DeployError::Load {
            reason: format!("an input is {dtype:?}, but it computes in F32"),
        }),
    }
}

impl<O: Tensors> Compiled<O> {
    fn new(
        export: Export<O>,
        arithmetic: Arithmetic,
        pool: &Arc<ThreadPool>,
    ) -> Result<Self, DeployError> {
        check(&export.inputs)?;
        let exported = choose::choose(&export, arithmetic, pool)?;
        let program = Program::load(&exported.model, pool.clone())?;
        Ok(Self {
            export,
            exported,
            program,
        })
    }

    /// Whether inputs of these shapes and dtypes can be run.
    fn takes<I: Tensors>(&self, inputs: &I) -> bool {
        let found = signature(inputs);
        let model = &self.exported.model;
        let mut batch = None;
        found.len() == self.export.inputs.len()
            && found
                .iter()
                .zip(&self.export.inputs)
                .zip(&model.inputs)
                .all(|(((shape, dtype), (_, recorded)), info)| {
                    dtype == recorded
                        && shape.len() == info.shape.len()
                        && shape
                            .iter()
                            .zip(&info.shape)
                            .all(|(size, known)| match known {
                                Dimension::Fixed(fixed) => size == fixed,
                                Dimension::Batch(_) => *batch.get_or_insert(*size) == *size,
                            })
                })
    }
}

impl<O: Tensors> Engine<O> {
    /// Compiles the model for inputs of another shape, too. A batch of another size needs none where
    /// [`EngineReport::fixed_batch`] is `None`.
    ///
    /// # Errors
    ///
    /// As [`EngineConfig::compile`].
    pub fn add(&mut self, export: Export<O>) -> Result<(), DeployError> {
        let compiled = Compiled::new(export, self.config.arithmetic, &self.pool)?;
        self.compiled.push(compiled);
        Ok(())
    }

    /// The result of the forward pass, on the device of the inputs.
    ///
    /// # Errors
    ///
    /// [`DeployError::Mismatch`] for inputs of shapes or dtypes that it was not compiled for,
    /// [`DeployError::Run`] where the engine fails.
    pub fn run<I: Tensors>(&self, inputs: &I) -> Result<O, DeployError> {
        let Some(compiled) = self.compiled.iter().find(|one| one.takes(inputs)) else {
            let known = self
                .compiled
                .iter()
                .map(|one| format!("{:?}", one.export.inputs));
            return Err(DeployError::Mismatch {
                compiled: known.collect::<Vec<_>>().join(" or "),
                found: format!("{:?}", signature(inputs)),
            });
        };
        let given = given(inputs)?;
        let values = compiled.program.run(given.values)?;
        let tensors = results(values, &compiled.exported.model.outputs, &given.device)?;
        Ok(compiled.export.recording.result(tensors))
    }

    /// What became of each layer, for the shapes it was compiled for first.
    pub fn report(&self) -> EngineReport {
        let Exported {
            model,
            layers,
            fixed_batch,
        } = &self.compiled[0].exported;
        EngineReport {
            layers: layers.clone(),
            resident_bytes: model.constant_bytes(),
            fixed_batch: fixed_batch.clone(),
        }
    }

    /// The model as it runs.
    pub fn onnx(&self) -> &crate::OnnxModel {
        &self.compiled[0].exported.model
    }
}
