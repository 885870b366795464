//! BatchNorm statistics that a schedule freezes.

use burn::module::{Flag, Module, Param};
use burn_lean_reparam::{PathMapper, Trail, map_with_path};

use crate::module::walk::own_quantizers;

/// Freezes BatchNorm statistics if the schedule says so for the current step.
///
/// [`advance`](crate::advance) does this. Burn does not record whether a BatchNorm is frozen: call this after a
/// record of the middle of a training was loaded without [`load_record`](crate::load_record).
///
/// It never thaws one: whether a frozen one was frozen by the schedule or by the model's author
/// cannot be told. After a record of an earlier step, load into a model that was not frozen yet.
pub fn apply_schedule<M: Module>(model: M) -> M {
    match freezes_batch_norm(&model) {
        true => freeze_batch_norm(model),
        false => model,
    }
}

/// Whether the schedule says that BatchNorm statistics are frozen in the current step.
pub(crate) fn freezes_batch_norm<M: Module>(model: &M) -> bool {
    own_quantizers(model)
        .iter()
        .any(|quantizer| quantizer.schedule().freezes_batch_norm(quantizer.step()))
}

pub(crate) fn freeze_batch_norm<M: Module>(model: M) -> M {
    map_with_path(model, &mut FreezeBatchNorm)
}

/// Switches the training flag of BatchNorm layers off.
struct FreezeBatchNorm;

impl PathMapper for FreezeBatchNorm {
    fn flag(&mut self, at: &Trail, flag: Param<Flag>) -> Param<Flag> {
        match at.container() {
            "Struct:BatchNorm" => flag.with_value(false),
            _ => flag,
        }
    }
}
