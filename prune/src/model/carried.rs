//! The masks that a model carries.

use burn::module::{Module, Param, ParamId};
use burn::tensor::{Bool, Int, Tensor};
use burn_lean_reparam::{PathVisitor, Trail, visit_with_path};

/// `base` with a positive zero wherever `kept`, of as many flags, is false.
pub(crate) fn zero_pruned<const D: usize>(base: Tensor<D>, kept: Tensor<1, Bool>) -> Tensor<D> {
    zero_where(base, kept.bool_not())
}

/// `base` with a positive zero wherever `pruned`, of as many flags, is true.
///
/// Filled instead of multiplied: 0 · x is NaN for an infinite x and -0 for a negative one.
pub(crate) fn zero_where<const D: usize>(base: Tensor<D>, pruned: Tensor<1, Bool>) -> Tensor<D> {
    let pruned = pruned.reshape(base.shape());
    base.mask_fill(pruned, 0.0)
}

/// The parameter whose masks a walk comes to next.
///
/// Burn visits the base of a parameter, then enters a "module" of container type
/// `Reparameterization`; the mask may lie deeper, in a chain.
#[derive(Default)]
pub(crate) struct Bearer(Option<ParamId>);

impl Bearer {
    /// Notes the parameter, unless it belongs to a reparameterization.
    pub(crate) fn at_parameter(&mut self, at: &Trail, id: ParamId) -> bool {
        let base = !at.is_attached();
        if base {
            self.0 = Some(id);
        }
        base
    }

    /// The parameter with the mask that the walk is in.
    pub(crate) fn masked(&self, at: &Trail) -> Option<ParamId> {
        let inside_mask = at.is_attached() && at.container() == "Struct:Mask";
        self.0.filter(|_| inside_mask)
    }
}

/// A mask on a parameter.
pub(crate) struct AttachedMask {
    pub(crate) path: String,
    /// Of the parameter.
    pub(crate) id: ParamId,
    pub(crate) shape: Vec<usize>,
    pub(crate) kept: Tensor<1, Bool>,
}

/// The masks on the parameters of a model, alone or in a chain.
pub(crate) fn attached_masks<M: Module>(model: &M) -> Vec<AttachedMask> {
    let mut finder = AttachedMasks::default();
    visit_with_path(model, &mut finder);
    finder.masks
}

#[derive(Default)]
struct AttachedMasks {
    bearer: Bearer,
    path: String,
    shape: Vec<usize>,
    masks: Vec<AttachedMask>,
}

impl PathVisitor for AttachedMasks {
    fn float<const D: usize>(&mut self, at: &Trail, param: &Param<Tensor<D>>) {
        if self.bearer.at_parameter(at, param.id) {
            self.path = at.path();
            self.shape = param.base().shape().to_vec();
        }
    }

    fn int<const D: usize>(&mut self, at: &Trail, param: &Param<Tensor<D, Int>>) {
        if let Some(id) = self.bearer.masked(at) {
            self.masks.push(AttachedMask {
                path: self.path.clone(),
                id,
                shape: self.shape.clone(),
                kept: param.val().flatten(0, D - 1).not_equal_elem(0),
            });
        }
    }
}
