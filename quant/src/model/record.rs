//! Records of float models and of prepared ones.

use burn::module::Module;
use burn::store::{ModuleRecord, RecordError};
use burn_lean_reparam::column_layout::ready_to_load;
use burn_lean_reparam::{Rejected, settle};

use crate::QuantError;
use crate::model::batch_norm::apply_schedule;
use crate::module::walk::{hide, quantizers};

/// Loads a record of the float model into the prepared one.
///
/// As strict as Burn's `try_load_record`, except that nothing is expected for the quantizers:
/// they stay as they are.
///
/// # Errors
///
/// [`QuantError::Record`] if a tensor of the model is missing in the record, or the other way
/// round. The model comes back in the error.
pub fn load_float_record<M: Module>(
    model: M,
    record: ModuleRecord,
) -> Result<M, Rejected<M, QuantError>> {
    let loaded = hide(|| try_load(&model, record, "float record", |_| Ok(())));
    loaded.map_err(|error| Rejected::new(model, error))
}

/// The record of the float model in a prepared one: as if it had never been prepared.
///
/// Weights are recorded before quantization.
pub fn float_record<M: Module>(model: &M) -> ModuleRecord {
    settle(model);
    hide(|| model.clone().into_record())
}

/// Loads the record of a prepared model into a model that was prepared in the same way.
///
/// As Burn's `try_load_record`, which refuses the weights of linear layers in column layout once they
/// were used; and checks that the record is of the same schemes; goes on in the
/// step that was recorded.
///
/// # Errors
///
/// [`QuantError::Record`] where Burn refuses it; [`QuantError::ForeignScheme`] with the path of
/// the first quantizer of another scheme. The model comes back in the error.
pub fn load_record<M: Module>(
    model: M,
    record: ModuleRecord,
) -> Result<M, Rejected<M, QuantError>> {
    match try_load(&model, record, "record", check_schemes) {
        Ok(loaded) => Ok(apply_schedule(loaded)),
        Err(error) => Err(Rejected::new(model, error)),
    }
}

/// # Errors
///
/// [`QuantError::ForeignScheme`] with the path of the first quantizer that was loaded from one of
/// another scheme.
pub(crate) fn check_schemes<M: Module>(loaded: &M) -> Result<(), QuantError> {
    let mut quantizers = quantizers(loaded).into_iter();
    quantizers.try_for_each(|located| located.quantizer.with_path(located.path).check())
}

/// Loads a record; leaves `model` as it is where that fails.
///
/// Clones share running statistics, which a record replaces in place: a record that is refused half
/// way would change those of `model`. `valid` copies them, so it is tried, and checked, on that.
fn try_load<M: Module>(
    model: &M,
    record: ModuleRecord,
    what: &str,
    check: impl FnOnce(&M) -> Result<(), QuantError>,
) -> Result<M, QuantError> {
    let refused = |error: RecordError| QuantError::Record {
        what: what.to_string(),
        reason: error.to_string(),
    };
    let trial = ready_to_load(model.valid()).try_load_record(record.clone());
    check(&trial.map_err(refused)?)?;
    let ready = ready_to_load(model.clone());
    ready.try_load_record(record).map_err(refused)
}
