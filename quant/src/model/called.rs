//! Which quantizers a forward pass calls by itself.

use std::collections::HashSet;

use burn::module::Module;
use burn::tensor::Device;
use burn_lean_graph::record;

use crate::{QuantError, quantizers};

/// The paths of the quantizers that `forward` does not call by itself, as a deployed model that is
/// run without a recording calls them.
///
/// `forward` gets the model and the device to create its inputs on; nothing is computed.
///
/// # Errors
///
/// [`QuantError::Graph`] when the forward pass cannot be recorded.
pub(crate) fn uncalled<M: Module, O>(
    model: &M,
    forward: impl FnOnce(&M, &Device) -> O,
) -> Result<Vec<String>, QuantError> {
    let all = quantizers(model);
    let mut called: HashSet<String> = HashSet::new();
    if !all.is_empty() {
        let recording = record(&model.valid(), &(), |model, ()| {
            if let Some(device) = model.devices().first() {
                forward(model, device);
            }
        })?;
        let hooks = recording.graph().hooks().iter();
        called.extend(
            hooks
                .filter(|hook| hook.is_called)
                .map(|hook| hook.path.clone()),
        );
    }
    let uncalled = all.into_iter().map(|located| located.path);
    Ok(uncalled.filter(|path| !called.contains(path)).collect())
}
