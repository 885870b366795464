//! Gradients that are not finite.

use burn::module::{Module, Param};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use burn_lean_reparam::FloatVisitor;

use super::one_pass::finite;
use super::reads::Reads;
use super::walk::visit_once;
use crate::AmpError;

/// Of the gradients at `paths`, those that are not finite. Reads the device.
pub(crate) fn overflowing<M: Module>(
    model: &M,
    grads: &GradientsParams,
    paths: &[String],
) -> Result<Vec<String>, AmpError> {
    let mut flags = Flags {
        paths,
        grads,
        found: Vec::new(),
        reads: Reads::default(),
    };
    visit_once(model, &mut flags);
    let data = flags.reads.wait()?;
    let flagged = flags.found.into_iter().zip(&data);
    Ok(flagged
        .filter(|(_, flag)| !flag.iter::<f32>().all(|flag| flag.is_finite()))
        .map(|(path, _)| path)
        .collect())
}

struct Flags<'a> {
    paths: &'a [String],
    grads: &'a GradientsParams,
    found: Vec<String>,
    reads: Reads,
}

impl FloatVisitor for Flags<'_> {
    fn visit<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>) {
        if self.paths.iter().any(|wanted| wanted == path)
            && let Some(grad) = self.grads.get::<D>(param.id)
        {
            self.found.push(path.to_string());
            self.reads.register(finite(grad));
        }
    }
}
