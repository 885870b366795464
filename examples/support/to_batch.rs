//! Batches for the data loaders of Burn's Learner.

use burn::data::dataloader::batcher::Batcher;
use burn::tensor::{Device, Tensor, TensorData};

use super::Batch;

/// Makes batches of pixels and labels.
#[derive(Clone)]
pub(crate) struct ToBatch {
    pub(crate) side: usize,
}

impl Batcher<(Vec<f32>, i64), Batch> for ToBatch {
    fn batch(&self, items: Vec<(Vec<f32>, i64)>, device: &Device) -> Batch {
        let count = items.len();
        let (pixels, labels): (Vec<Vec<f32>>, Vec<i64>) = items.into_iter().unzip();
        let shape = [count, 1, self.side, self.side];
        Batch {
            images: Tensor::from_data(TensorData::new(pixels.concat(), shape), device),
            labels: Tensor::from_data(TensorData::new(labels, [count]), device),
        }
    }
}
