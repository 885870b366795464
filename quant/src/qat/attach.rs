//! Quantizers that are attached to the weights of a model.

use std::collections::HashMap;

use burn::module::{Param, Reparameterizer};
use burn::tensor::Tensor;

use crate::WeightQuantizer;
use crate::model::column_layout;

/// Attaches the quantizers that a [`QatConfig`](crate::QatConfig) made for a model, or that a file names.
#[derive(Debug)]
pub struct AttachQuantizers {
    pub(crate) quantizers: HashMap<String, WeightQuantizer>,
}

impl Reparameterizer for AttachQuantizers {
    type Reparam = WeightQuantizer;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<WeightQuantizer>) {
        let Some(mut quantizer) = self.quantizers.remove(path) else {
            return (param, None);
        };
        let dtype = param.base().dtype();
        if dtype.is_float() {
            quantizer.weight = quantizer.weight.with_dtype(dtype.into());
        }
        let param = column_layout::quantizable(param, quantizer.weight.scheme());
        (param, Some(quantizer))
    }
}
