//! By what a state folder knows the model that its run began with.

use burn::module::{Module, Param};
use burn::tensor::{Bool, Int, Tensor, TensorData};
use burn_lean_quant::quantizers;
use burn_lean_reparam::{PathVisitor, Trail, visit_with_path};

/// CRC-32 of the tensors of a model and of what its weights carry: adapters, masks, ranges and scales. Of
/// quantizers also what they are set to, and their step.
pub(crate) fn checksum<M: Module>(model: &M) -> u32 {
    let model = model.valid();
    let located = quantizers(&model);
    let mut sum = Checksum {
        hasher: crc32fast::Hasher::new(),
        quantizers: located.iter().map(|at| format!("{}.", at.path)).collect(),
    };
    visit_with_path(&model, &mut sum);
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
        sum.hasher.update(said.as_bytes());
    }
    sum.hasher.finalize()
}

struct Checksum {
    hasher: crc32fast::Hasher,
    /// What paths in a quantizer begin with.
    quantizers: Vec<String>,
}

impl Checksum {
    fn add(&mut self, at: &Trail, data: TensorData) {
        self.hasher.update(at.path().as_bytes());
        self.hasher.update(data.as_bytes());
    }
}

impl PathVisitor for Checksum {
    fn float<const D: usize>(&mut self, at: &Trail, param: &Param<Tensor<D>>) {
        self.add(at, param.base().to_data());
    }

    fn int<const D: usize>(&mut self, at: &Trail, param: &Param<Tensor<D, Int>>) {
        let path = at.path();
        let is_in = |quantizer: &String| path.starts_with(quantizer.as_str());
        // Those of a quantizer also say whether a value ever came by a copy of it, as in an earlier run they do.
        if !self.quantizers.iter().any(is_in) {
            self.add(at, param.val().to_data());
        }
    }

    fn bool<const D: usize>(&mut self, at: &Trail, param: &Param<Tensor<D, Bool>>) {
        self.add(at, param.val().to_data());
    }
}
