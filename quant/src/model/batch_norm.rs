//! BatchNorm statistics that a schedule freezes.

use burn::module::Module;
use burn_lean_graph::hooks::freeze_batch_norm;

use crate::module::walk::own_quantizers;

/// Freezes BatchNorm statistics if the schedule says so for the current step.
///
/// [`advance`](crate::advance) does this, and runs that are recorded (`Autocast::run`,
/// [`QuantizedForward`](crate::QuantizedForward)) go by the schedule themselves. Burn does not record whether a
/// BatchNorm is frozen: where a forward pass is called without a recording, call this after a record of the
/// middle of a training was loaded without [`load_record`](crate::load_record).
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
fn freezes_batch_norm<M: Module>(model: &M) -> bool {
    own_quantizers(model)
        .iter()
        .any(|quantizer| quantizer.schedule().freezes_batch_norm(quantizer.step()))
}
