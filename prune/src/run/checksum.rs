//! By what kept stages know the model that their run began with.

use std::collections::HashSet;

use burn::backend::ExecutionError;
use burn::module::{Module, Param, ParamId};
use burn::tensor::{Int, Tensor, TensorData};
use burn_lean_reparam::{PathVisitor, Trail, catch_quietly, settle, visit_with_path};
use serde_json::Value;

use crate::{PruneError, Selection};

/// CRC-32 of the weights that are pruned, and of the rest of the model.
pub(crate) fn checksums<M: Module>(
    model: &M,
    selection: &Selection,
    weights: &[f32],
) -> Result<Vec<(&'static str, Value)>, PruneError> {
    let weights: Vec<u8> = weights.iter().flat_map(|w| w.to_le_bytes()).collect();
    let mut rest = Rest {
        pruned: selection.ids().iter().copied().collect(),
        sum: Ok(crc32fast::Hasher::new()),
    };
    settle(model);
    visit_with_path(model, &mut rest);
    let rest = rest.sum?.finalize();
    Ok(vec![
        ("model", crc32fast::hash(&weights).into()),
        ("rest", rest.into()),
    ])
}

/// What is not pruned: biases, norms, statistics, and what weights carry.
struct Rest {
    pruned: HashSet<ParamId>,
    sum: Result<crc32fast::Hasher, PruneError>,
}

impl Rest {
    fn add(&mut self, at: &Trail, read: impl FnOnce() -> Result<TensorData, ExecutionError>) {
        let Ok(sum) = &mut self.sum else {
            return;
        };
        // Burn panics in a debug build where some numbers of bytes come back from a GPU.
        let data = catch_quietly(read).and_then(|data| data.map_err(|error| error.to_string()));
        match data {
            Ok(data) => {
                sum.update(at.path().as_bytes());
                sum.update(data.as_bytes());
            }
            Err(reason) => self.sum = Err(PruneError::Device { reason }),
        }
    }
}

impl PathVisitor for Rest {
    fn float<const D: usize>(&mut self, at: &Trail, param: &Param<Tensor<D>>) {
        if at.is_attached() || !self.pruned.contains(&param.id) {
            let base = param.base().without_autodiff();
            self.add(at, || base.try_into_data());
        }
    }

    /// Of masks alone: those of a quantizer also say whether a value ever came by a copy of it.
    fn int<const D: usize>(&mut self, at: &Trail, param: &Param<Tensor<D, Int>>) {
        if at.container() == "Struct:Mask" {
            let kept = param.val();
            self.add(at, || kept.try_into_data());
        }
    }
}
