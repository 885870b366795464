//! Gradients that are not finite.

use burn::module::{Module, Param};
use burn::optim::GradientsParams;
use burn::tensor::{Int, Tensor};
use burn_lean_reparam::{FloatVisitor, reductions};

use super::one_pass::finite;
use super::reads::Reads;
use super::walk::visit_once;
use crate::AmpError;

/// What there is to say of a gradient that is not finite, on the device.
#[derive(Debug, Clone)]
pub(crate) struct OverflowingParameter {
    pub(crate) path: String,
    pub(crate) elements: usize,
    pub(crate) non_finite: Tensor<1, Int>,
    pub(crate) largest_finite: Tensor<1>,
}

/// How many elements are not finite, and the largest magnitude of the others.
pub(crate) fn non_finite<const D: usize>(x: Tensor<D>) -> (Tensor<1, Int>, Tensor<1>) {
    let bad = x.clone().is_finite().bool_not();
    (
        bad.clone().int().sum(),
        reductions::max(x.mask_fill(bad, 0.0).abs()),
    )
}

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

/// Describes the gradients named in `paths`, on the device; nothing is read.
pub(crate) fn describe_overflow<M: Module>(
    model: &M,
    grads: &GradientsParams,
    paths: &[String],
) -> Vec<OverflowingParameter> {
    if paths.is_empty() {
        return Vec::new();
    }
    let mut visitor = Describe {
        paths,
        grads,
        found: Vec::new(),
    };
    visit_once(model, &mut visitor);
    visitor.found
}

struct Describe<'a> {
    paths: &'a [String],
    grads: &'a GradientsParams,
    found: Vec<OverflowingParameter>,
}

impl FloatVisitor for Describe<'_> {
    fn visit<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>) {
        if !self.paths.iter().any(|wanted| wanted == path) {
            return;
        }
        if let Some(grad) = self.grads.get::<D>(param.id) {
            let elements = grad.shape().num_elements();
            let (non_finite, largest_finite) = non_finite(grad);
            self.found.push(OverflowingParameter {
                path: path.to_string(),
                elements,
                non_finite,
                largest_finite,
            });
        }
    }
}
