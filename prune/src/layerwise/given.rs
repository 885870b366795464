//! What a network gives for a batch: on its device, and as numbers on the host.

use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_lean_graph::{TensorMapper, Tensors};

use crate::PruneError;
use crate::host::read;

/// The float tensors that a network gives for a batch, as [`outputs`] has them, on the host: all but tuning read
/// them there.
pub(crate) type Given = Arc<[Numbers]>;

/// The numbers of one of them.
#[derive(Debug)]
pub(crate) struct Numbers {
    /// `[places, width]`
    values: Vec<f32>,
    /// At least 1.
    width: usize,
    /// Of the tensor.
    dtype: DType,
}

impl Numbers {
    fn of(tensor: Tensor<2>) -> Result<Self, PruneError> {
        let ([_, width], dtype) = (tensor.dims(), tensor.dtype());
        Ok(Self {
            values: read(tensor)?,
            width: width.max(1),
            dtype,
        })
    }

    pub(crate) fn values(&self) -> &[f32] {
        &self.values
    }

    pub(crate) fn width(&self) -> usize {
        self.width
    }

    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    /// Rows, of any place of any example.
    pub(crate) fn places(&self) -> usize {
        self.values.len() / self.width
    }

    /// Those of some of so many examples.
    pub(crate) fn of_examples(&self, examples: &Range<usize>, all: usize) -> &[f32] {
        let per_example = self.places() / all.max(1);
        let end = match examples.end == all {
            true => self.places(),
            false => examples.end * per_example,
        };
        &self.values[examples.start * per_example * self.width..end * self.width]
    }

    /// [`of_examples`](Self::of_examples) on a device, in F32.
    pub(crate) fn tensor(&self, examples: &Range<usize>, all: usize, device: &Device) -> Tensor<2> {
        let values = self.of_examples(examples, all).to_vec();
        let shape = [values.len() / self.width, self.width];
        Tensor::from_data(TensorData::new(values, shape), (device, DType::F32))
    }
}

/// The float tensors of an output on the host.
pub(crate) fn given(output: &impl Tensors) -> Result<Given, PruneError> {
    outputs(output)?.into_iter().map(Numbers::of).collect()
}

/// The float tensors of an output, the last axis of each as columns, all others as rows; of one axis, which
/// counts examples, a row for each. A number alone, without an axis for examples beside it, is no output but a
/// loss of the model's own, where there are others.
pub(crate) fn outputs(output: &impl Tensors) -> Result<Vec<Tensor<2>>, PruneError> {
    struct All(Vec<Tensor<2>>);
    impl TensorMapper for All {
        fn float<const D: usize>(&mut self, tensor: &Tensor<D>) -> Tensor<D> {
            let width = match D {
                1 => 1,
                _ => tensor.dims()[D - 1].max(1),
            };
            let rows = tensor.shape().num_elements() / width;
            if D > 1 || rows > 1 || self.0.is_empty() {
                self.0.push(tensor.clone().reshape([rows, width]));
            }
            tensor.clone()
        }
    }
    let mut all = All(Vec::new());
    let _ = output.map_tensors(&mut all);
    match all.0.is_empty() {
        false => Ok(all.0),
        true => Err(PruneError::NotLayerwise {
            what: "a forward pass without a float output to compare by".into(),
        }),
    }
}
