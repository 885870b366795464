//! Weights that stay floats in a converted model: rounded ones, with nothing before their quantizers.

use std::collections::{HashMap, HashSet};

use burn::module::{Module, Param};
use burn::tensor::{FloatDType, Tensor};
use burn_lean_quant::deploy::{ConvertedWeight, Outcome};
use burn_lean_quant::rounding::{GroupParams, set_weight_qparams};
use burn_lean_quant::{QuantError, QuantizedTensor, WeightQuantizer, quantized_weights};
use burn_lean_reparam::{PathMapper, Trail, map_leaf, map_with_path, unlink_before};

use crate::RecipeError;

/// The converted model whose weights that Burn does not hold as codes are the values of their codes. What acts
/// before their quantizers, a mask, is part of these and taken off, as of weights that are codes.
pub(super) fn rounded<M: Module>(model: M, weights: &[ConvertedWeight]) -> Result<M, RecipeError> {
    let is_float =
        |one: &&ConvertedWeight| matches!(one.outcome, Outcome::KeptFakeQuantized { .. });
    let floats = weights.iter().filter(is_float);
    let floats: HashSet<&str> = floats.map(|one| one.path.as_str()).collect();
    if floats.is_empty() {
        return Ok(model);
    }
    let codes: HashMap<String, QuantizedTensor> = quantized_weights(&model)?
        .into_iter()
        .filter(|(path, _)| floats.contains(path.as_str()))
        .collect();
    // Those of now: the range of rounded values may give others in the last bit.
    let qparams = codes
        .iter()
        .map(|(path, codes)| (path.clone(), group_params(codes)));
    let model = set_weight_qparams(model, &qparams.collect())?;
    let mut store = Store { codes, error: None };
    let model = map_with_path(model, &mut store);
    match store.error {
        Some(error) => Err(error.into()),
        None => Ok(unlink_before::<WeightQuantizer, _>(model, |path| {
            floats.contains(path)
        })),
    }
}

fn group_params(codes: &QuantizedTensor) -> GroupParams {
    GroupParams {
        scales: codes.scale().to_vec(),
        zero_points: match codes.scheme().mapping.is_symmetric() {
            true => Vec::new(),
            false => codes.zero_point().to_vec(),
        },
    }
}

/// Stores the values of codes, by the paths of their weights.
struct Store {
    codes: HashMap<String, QuantizedTensor>,
    error: Option<QuantError>,
}

impl PathMapper for Store {
    fn float<const D: usize>(&mut self, at: &Trail, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(codes) = self.codes.get(&at.path()) else {
            return param;
        };
        map_leaf(param, |base| match codes.dequantize::<D>(&base.device()) {
            Ok(values) => values.cast(FloatDType::from(base.dtype())),
            Err(error) => {
                self.error = Some(error);
                base
            }
        })
    }
}
