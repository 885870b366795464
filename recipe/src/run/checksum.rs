//! By what a state folder knows the model that its run began with.

use burn::module::{Module, Param};
use burn::tensor::{Bool, Int, Tensor, TensorData};
use burn_lean_quant::quantizers;
use burn_lean_reparam::{PathVisitor, Trail, visit_with_path};

use crate::state::Checksums;

/// Of the tensors of a model, and of what its weights carry.
pub(crate) fn checksums<M: Module>(model: &M) -> Checksums {
    let model = model.valid();
    let located = quantizers(&model);
    let mut sums = Sums {
        weights: crc32fast::Hasher::new(),
        carried: crc32fast::Hasher::new(),
        quantizers: located.iter().map(|at| format!("{}.", at.path)).collect(),
    };
    visit_with_path(&model, &mut sums);
    for at in &located {
        let quantizer = &at.quantizer;
        let (config, schedule) = (quantizer.config(), quantizer.schedule());
        let said = format!(
            "{} {config} {schedule} {} {} {} {}",
            at.path,
            quantizer.step(),
            quantizer.is_enabled(),
            quantizer.is_observed(),
            quantizer.is_learning(),
        );
        sums.carried.update(said.as_bytes());
    }
    Checksums {
        weights: sums.weights.finalize(),
        carried: sums.carried.finalize(),
    }
}

struct Sums {
    weights: crc32fast::Hasher,
    carried: crc32fast::Hasher,
    /// What paths in a quantizer begin with.
    quantizers: Vec<String>,
}

impl Sums {
    fn is_in_quantizer(&self, at: &Trail) -> bool {
        let path = at.path();
        let mut quantizers = self.quantizers.iter();
        quantizers.any(|quantizer| path.starts_with(quantizer.as_str()))
    }

    fn add(&mut self, at: &Trail, data: TensorData) {
        let sum = match at.is_attached() || self.is_in_quantizer(at) {
            true => &mut self.carried,
            false => &mut self.weights,
        };
        sum.update(at.path().as_bytes());
        sum.update(data.as_bytes());
    }
}

impl PathVisitor for Sums {
    fn float<const D: usize>(&mut self, at: &Trail, param: &Param<Tensor<D>>) {
        self.add(at, param.base().to_data());
    }

    fn int<const D: usize>(&mut self, at: &Trail, param: &Param<Tensor<D, Int>>) {
        // Those of a quantizer also say whether a value ever came by a copy of it, as in an earlier run they do.
        if !self.is_in_quantizer(at) {
            self.add(at, param.val().to_data());
        }
    }

    fn bool<const D: usize>(&mut self, at: &Trail, param: &Param<Tensor<D, Bool>>) {
        self.add(at, param.val().to_data());
    }
}
