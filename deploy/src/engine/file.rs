//! An ONNX file, whoever wrote it.

use std::path::Path;

use burn::tensor::{DType, TensorData};
use burn_lean_reparam::catch_quietly;
use rten::Value;

use super::EngineConfig;
use super::pools::Pools;
use super::program::Program;
use super::self_test::{IntegerKernels, integer_kernels};
use super::values::{shaped, to_data, to_value};
use crate::DeployError;
use crate::onnx::lengths;

/// An ONNX file that is ready to run.
#[derive(Debug)]
pub struct OnnxFile {
    program: Program,
}

impl EngineConfig {
    /// Loads an ONNX file, as it is, for rten: of the config only [`threads`](Self::threads) matters.
    ///
    /// # Errors
    ///
    /// [`DeployError::File`] where it cannot be read, [`DeployError::Load`] for a file that is no
    /// ONNX, or that has operators or dtypes that the engine lacks or computes wrongly on this CPU
    /// ([`integer_kernels`](crate::integer_kernels)); [`DeployError::InvalidConfig`] for
    /// [`threads`](Self::threads).
    pub fn open(&self, path: impl AsRef<Path>) -> Result<OnnxFile, DeployError> {
        let path = path.as_ref();
        let bytes = std::fs::read(path).map_err(|error| DeployError::File {
            path: path.to_path_buf(),
            reason: error.to_string(),
        })?;
        let load = |reason| DeployError::Load { reason };
        let operators = lengths::check(&bytes).map_err(load)?;
        let IntegerKernels {
            products_saturate,
            exact_convolutions,
        } = integer_kernels();
        for (operator, wrong) in [
            ("ConvInteger", !exact_convolutions),
            ("MatMulInteger", products_saturate),
        ] {
            if wrong && operators.contains(operator.as_bytes()) {
                return Err(load(format!(
                    "it has `{operator}`, whose results are wrong on this CPU (`integer_kernels`): write the \
                     model with `QuantizeLinear` and `DequantizeLinear` (`Form::Qdq`), or compile it from Burn"
                )));
            }
        }
        let pool = Pools::new(self.threads)?.rten();
        // Of what nobody wrote on purpose the loader says so, or panics.
        let program = catch_quietly(|| Program::from_bytes(bytes, pool));
        let program = program.map_err(load)??;
        Ok(OnnxFile { program })
    }
}

impl OnnxFile {
    /// Its outputs, in the order of the file, for these inputs, in the order of the file.
    ///
    /// Integers are computed as I32, bools are I32, and come back so.
    ///
    /// # Errors
    ///
    /// [`DeployError::FileInputs`] for another number of inputs, [`DeployError::Run`] where the engine
    /// fails.
    pub fn run(&self, inputs: Vec<TensorData>) -> Result<Vec<TensorData>, DeployError> {
        let (expected, found) = (self.program.input_count(), inputs.len());
        if found != expected {
            return Err(DeployError::FileInputs { expected, found });
        }
        let values = inputs.into_iter().map(of_file);
        let values = values.collect::<Result<Vec<Value>, _>>();
        let values = values.map_err(|reason| DeployError::Run { reason })?;
        let results = catch_quietly(|| self.program.run(values));
        let results = results.map_err(|reason| DeployError::Run { reason })??;
        results.into_iter().map(to_data).collect()
    }
}

/// A file says itself where it takes bytes.
fn of_file(data: TensorData) -> Result<Value, String> {
    let shape = data.shape().to_vec();
    match data.dtype() {
        DType::U8 => shaped(shape, data.iter::<u8>().collect()),
        DType::I8 => shaped(shape, data.iter::<i8>().collect()),
        _ => to_value(data),
    }
}
