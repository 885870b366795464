//! A model that runs on the CPU, with integer kernels, and takes and returns Burn's tensors.

mod candidates;
mod choose;
mod division;
mod example;
mod file;
mod integers;
mod measure;
mod own;
mod pools;
mod program;
mod report;
mod self_test;
mod values;
mod ways;

use std::collections::HashMap;
use std::fmt;
use std::sync::OnceLock;

use burn::backend::{DispatchDevice, TensorMetadata};
use burn::config::Config;
use burn::tensor::DType;
use burn_lean_graph::{Tensors, description, signature};
use serde::{Deserialize, Serialize};

use crate::export::handles::handles;
use crate::{DeployError, Dimension, Export};
use candidates::{Candidate, Kind, Way, evaluate};
use choose::{Chosen, again, choose};

use pools::Pools;

pub use file::OnnxFile;
pub use report::{EngineReport, SparseLayer, SparseOutcome, Timed};
pub use self_test::{IntegerKernels, integer_kernels};
use values::{check_numbers, given, results};

/// In what quantized layers are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Arithmetic {
    /// Integers where they are faster, measured when the engine is compiled. A layer that stays float neither
    /// rounds nor clips its activations: beyond the calibrated range its numbers are not those of the
    /// converted model, and which layers these are differs between machines.
    #[default]
    Fastest,
    /// Integers wherever there is a kernel: there the numbers of the converted model, up to rounding, on every
    /// machine.
    Integer,
    /// Floats: weights are dequantized once, activations stay as they are.
    Float,
}

/// What runs a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Backend {
    /// Burn, on the device of the model, operation by operation: for inputs of the recorded shapes on
    /// that device. Quantized weights are floats of the values that their codes stand for.
    Burn,
    /// [rten](https://github.com/robertknight/rten).
    Rten,
    /// Products of packed weights, exact in integers on every CPU; what comes between them that it
    /// does not know is run by rten.
    Own,
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Burn => "Burn",
            Self::Rten => "rten",
            Self::Own => "own",
        })
    }
}

/// In what weights that stay floats are kept between runs; products are in F32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub enum FloatStorage {
    /// 4 bytes a weight.
    #[default]
    F32,
    /// 2 bytes a weight, rounded to the nearest; matrices with weights beyond 65,504 stay F32.
    F16,
    /// 2 bytes a weight, rounded to the nearest.
    BF16,
}

/// How a model is compiled for the CPU.
///
/// ```
/// use burn_lean_deploy::{Arithmetic, EngineConfig};
///
/// let config = EngineConfig::new();
/// assert_eq!((config.threads, config.backend), (0, None));
/// assert_eq!(config.arithmetic, Arithmetic::Fastest);
/// ```
#[derive(Config, Debug, PartialEq, Eq)]
pub struct EngineConfig {
    /// Threads of the kernels here and of rten; 0 for those of the rayon pool that calls, which Burn's CPU
    /// devices use, too, and as many of rten's, which engines share. With another number an engine has threads of its
    /// own; it does not change Burn's, and leaves Burn out of what is measured. At most 1,024. Default: 0.
    #[config(default = 0)]
    pub threads: usize,
    /// In what quantized layers are computed. Default: what is faster.
    #[config(default = "Arithmetic::Fastest")]
    pub arithmetic: Arithmetic,
    /// What runs the model. Default, `None`: what is fastest when the engine is compiled.
    pub backend: Option<Backend>,
    /// In what weights that stay floats are kept, where that is faster than F32 or
    /// [`backend`](Self::backend) is [`Backend::Own`]. Default: F32.
    #[config(default = "FloatStorage::F32")]
    pub weights: FloatStorage,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self::new()
    }
}

/// A recorded model, compiled for the CPU.
///
/// It computes in F32, and integers of 64 bits in 32, unless Burn runs the model.
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
/// // Sums of 5 terms, of at most 2.5 together.
/// y.into_data().assert_approx_eq::<f32>(&model.forward(x).into_data(), Tolerance::absolute(2e-6));
/// # Ok::<(), burn_lean_deploy::DeployError>(())
/// ```
#[derive(Debug)]
pub struct Engine<O> {
    /// One for each shape of the inputs; the first is of the recorded ones.
    compiled: Vec<Compiled<O>>,
    config: EngineConfig,
    pools: Pools,
}

#[derive(Debug)]
struct Compiled<O> {
    /// With its parameters where another way may be made of them.
    export: Export<O>,
    chosen: Chosen,
    /// The way of the others that is the fastest.
    kind: Option<Kind>,
    /// It, for other sizes of the batch, where the best takes one alone.
    other: OnceLock<Candidate>,
}

impl EngineConfig {
    /// Compiles a recorded model.
    ///
    /// Layers whose input and weight are quantized can compute codes times codes, summed in I32: activations of
    /// at most 8 bits, with one scale or one for each row ([`DynamicGrid`](crate::DynamicGrid)), times weights with
    /// one scale for each output channel or, of matrices, for each block of inputs, also with zero points. The
    /// sums are those of [`IntegerLinear`](burn_lean_quant::integer::IntegerLinear) and
    /// [`IntegerConv2d`](burn_lean_quant::integer::IntegerConv2d), on every CPU, with biases in steps of the products
    /// where none is moved by more than 1/4096 of the largest, as F32 elsewhere. Matrices of codes whose
    /// input is not quantized can be multiplied by floats, block by block. Everything else runs in
    /// floats, and [`Engine::report`] says why.
    ///
    /// Unless [`backend`](Self::backend) and [`arithmetic`](Self::arithmetic) leave one way alone, this
    /// takes the time of some runs of each: all products in integers, all in floats, without the zeros
    /// of pruned matrices, rten, and Burn. The fastest for the recorded shapes stays; Burn, unless
    /// another one is faster by 10 %. Where Burn stays, other sizes of open axes are run by the fastest
    /// other way; of a model that is not quantized it is made when the first of them comes.
    ///
    /// Integers of 8, 16 and 64 bits are computed in 32, unless Burn runs the model: an input that does not fit is
    /// [`DeployError::Run`], and what is computed may not leave them. Casts to 8 and 16 bits, and arithmetic in
    /// them, are as on Burn's `flex` device: an integer beyond has its lowest bits, a float that is cast the nearest
    /// end; but what a scatter adds up has them in results alone.
    ///
    /// A pruned model, with its [masks](burn::module::Reparameterization) or after them, needs nothing
    /// else: each matrix of which half or more is zero (also one of 2:4) is measured with and without
    /// its zeros, and [`EngineReport::sparse`] says what became of it.
    ///
    /// # Errors
    ///
    /// Those of [`Export::to_onnx`], and [`DeployError::Load`] for operators and dtypes that the
    /// engine lacks, and for integers in the model that 32 bits do not hold; [`DeployError::Run`] where no
    /// way runs the inputs that several are measured with, numbers between -1 and 1 and integers of 0, or of 1;
    /// [`DeployError::InvalidConfig`] for [`threads`](Self::threads).
    pub fn compile<O: Tensors>(&self, export: Export<O>) -> Result<Engine<O>, DeployError> {
        let pools = Pools::new(self.threads)?;
        let first = Compiled::new(export, self, &pools)?;
        Ok(Engine {
            compiled: vec![first],
            config: self.clone(),
            pools,
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
        mut export: Export<O>,
        config: &EngineConfig,
        pools: &Pools,
    ) -> Result<Self, DeployError> {
        check(&export.inputs)?;
        let mut chosen = choose(&export, config, pools)?;
        let kind = chosen.other.as_ref().map(Candidate::kind);
        let is_quantized = !export.quantization().is_empty();
        let other = match chosen.other.take() {
            // What it would be made of is larger than it is.
            Some(one) if is_quantized => OnceLock::from(one),
            _ => OnceLock::new(),
        };
        if kind.is_none() || is_quantized {
            export.forget_parameters();
        }
        Ok(Self {
            export,
            chosen,
            kind,
            other,
        })
    }

    /// The way for inputs that the best does not take, made when the first of them comes: until then the
    /// weights are held once.
    fn other(
        &self,
        config: &EngineConfig,
        pools: &Pools,
    ) -> Result<Option<&Candidate>, DeployError> {
        let (Some(kind), None) = (self.kind, self.other.get()) else {
            return Ok(self.other.get());
        };
        let made = again(&self.export, config, pools, kind)?;
        Ok(Some(self.other.get_or_init(|| made)))
    }

    /// Whether inputs of these shapes and dtypes can be run.
    fn takes(&self, found: &[(Vec<usize>, DType)]) -> bool {
        let model = &self.chosen.best.exported.model;
        let mut sizes: HashMap<&str, usize> = HashMap::new();
        let inputs = &self.export.inputs;
        found.len() == inputs.len()
            && found.iter().zip(inputs).zip(&model.inputs).all(
                |(((shape, dtype), (_, recorded)), info)| {
                    dtype == recorded
                        && shape.len() == info.shape.len()
                        && shape
                            .iter()
                            .zip(&info.shape)
                            .all(|(size, known)| match known {
                                Dimension::Fixed(fixed) => size == fixed,
                                Dimension::Open(name) => {
                                    *sizes.entry(name).or_insert(*size) == *size
                                }
                            })
                },
            )
    }
}

impl<O: Tensors> Engine<O> {
    /// Compiles the model for inputs of another shape, too, or with other numbers beside their tensors (of a
    /// [`Tensors`] struct; a position, say), which are those of the recording in all that is computed. A batch of another size needs none where
    /// [`EngineReport::fixed_batch`] is `None`, nor do other sizes along an [`OpenAxis`](crate::OpenAxis).
    ///
    /// # Errors
    ///
    /// As [`EngineConfig::compile`].
    pub fn add(&mut self, export: Export<O>) -> Result<(), DeployError> {
        let compiled = Compiled::new(export, &self.config, &self.pools)?;
        self.compiled.push(compiled);
        Ok(())
    }

    /// The result of the forward pass, on the device of the inputs.
    ///
    /// NaN stays NaN: of a product in integers, the row or the image that has it, and of what else is
    /// rounded, the row; but of a NaN or an infinity a ReLU or a clamp that rten computes may make a number, and its
    /// max pooling and extremes (`max_dim`, `min_dim`) may give the largest of the other numbers.
    /// Infinities are the ends of a grid that is known, and NaN where it is that of the values at hand.
    ///
    /// An index below 0 (of a `select`, a `gather`, a `scatter`, an embedding) counts from the end of its axis, unless
    /// Burn runs the model: its CPU devices refuse it.
    ///
    /// # Errors
    ///
    /// [`DeployError::Mismatch`] for inputs of shapes or dtypes, or with numbers or variants beside their
    /// tensors, that it was not compiled for,
    /// [`DeployError::Run`] where the engine fails, and for NaN and infinities in an input where rten
    /// computes in integers.
    pub fn run<I: Tensors>(&self, inputs: &I) -> Result<O, DeployError> {
        let (shapes, described) = (signature(inputs), description(inputs));
        let of_this_form = || {
            let all = self.compiled.iter();
            all.filter(|one| one.export.described == described)
        };
        // One of these very shapes before one that takes any size.
        let made_for = of_this_form().find(|one| one.export.inputs == shapes);
        let takes = || of_this_form().find(|one| one.takes(&shapes));
        let Some(compiled) = made_for.or_else(takes) else {
            let all = self.compiled.iter();
            let known = all.map(|one| format!("{:?}", one.export.inputs));
            let fits = self.compiled.iter().any(|one| one.takes(&shapes));
            return Err(DeployError::Mismatch {
                compiled: known.collect::<Vec<_>>().join(" or "),
                found: match fits {
                    true => format!("{shapes:?} with other numbers or variants beside the tensors"),
                    false => format!("{shapes:?}"),
                },
            });
        };
        let (export, best) = (&compiled.export, &compiled.chosen.best);
        let mut way = best;
        if let Way::Burn(parameters) = &best.way {
            let tensors = handles(inputs);
            let device = &export.device;
            let here = tensors.iter().all(|one| Some(one.device()) == *device);
            if here && shapes == export.inputs {
                return evaluate(&export.recording, parameters, &tensors);
            }
            let other = compiled.other(&self.config, &self.pools)?;
            way = other.ok_or_else(|| {
                let mut devices = tensors.iter().map(TensorMetadata::device);
                let elsewhere = devices.find(|one| Some(one) != device.as_ref());
                let on = |device: Option<&DispatchDevice>| {
                    device.map_or(String::new(), |device| format!(" on {device:?}"))
                };
                let found = elsewhere.as_ref().or(device.as_ref());
                DeployError::Mismatch {
                    compiled: format!("{:?}{}", export.inputs, on(device.as_ref())),
                    found: format!("{shapes:?}{}", on(found)),
                }
            })?;
        }
        let given = given(inputs)?;
        if matches!(way.way, Way::Rten(_)) && way.is_integer() {
            check_numbers(&given.values)?;
        }
        let values = way.compute(given.values)?;
        let tensors = results(values, &way.exported.model.outputs, &given.device)?;
        Ok(export.recording.result(tensors))
    }

    /// What became of each layer, for the shapes it was compiled for first.
    pub fn report(&self) -> EngineReport {
        let chosen = &self.compiled[0].chosen;
        let Chosen {
            best,
            times,
            sparse,
            ..
        } = chosen;
        let all = self.compiled.iter();
        let all = all.flat_map(|one| std::iter::once(&one.chosen.best).chain(one.other.get()));
        EngineReport {
            backend: best.backend,
            times: times.clone(),
            layers: best.exported.layers.clone(),
            sparse: sparse.clone(),
            resident_bytes: all.map(Candidate::resident_bytes).sum(),
            fixed_batch: best.exported.fixed_batch.clone().or_else(|| {
                let alone = matches!(best.way, Way::Burn(_)) && self.compiled[0].kind.is_none();
                let why = "Burn alone runs it, for the shapes it was recorded with";
                alone.then(|| why.into())
            }),
        }
    }
}
