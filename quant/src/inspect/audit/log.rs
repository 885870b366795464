//! What the quantizers say about themselves while an audit records.

use std::cell::RefCell;

use burn::backend::Capture;
use burn::backend::ir::TensorId;
use burn::tensor::Tensor;

use crate::{Phase, Scheme};

/// One pass of a tensor through a quantizer.
#[derive(Debug, Clone)]
pub(super) struct Entry {
    pub(super) output: TensorId,
    pub(super) quantizer: String,
    pub(super) scheme: Scheme,
    pub(super) phase: Phase,
}

#[derive(Debug, Clone, Default)]
pub(super) struct Log {
    entries: Vec<Entry>,
    /// Tensors that a layer starts from and that are nothing but zeros.
    pub(super) zeros: Vec<TensorId>,
}

thread_local! {
    static RECORDING: RefCell<Option<Log>> = const { RefCell::new(None) };
}

/// Whether an audit records on this thread.
pub(crate) fn is_recording() -> bool {
    RECORDING.with_borrow(Option::is_some)
}

/// During an audit, stands for what a quantizer does to `x`: a tensor of its own, which the log
/// names. Outside of one, nothing.
pub(crate) fn stand_in<const D: usize>(
    x: &Tensor<D>,
    quantizer: &str,
    scheme: &Scheme,
    phase: Phase,
) -> Option<Tensor<D>> {
    RECORDING.with_borrow_mut(|recording| {
        let log = recording.as_mut()?;
        // Any operation that is recorded and keeps the numbers gives the output an id of its own.
        let output = x.clone().add_scalar(0.0);
        let id = output.clone().try_into_primitive::<Capture>().ok()?.id();
        log.entries.push(Entry {
            output: id,
            quantizer: quantizer.to_string(),
            scheme: scheme.clone(),
            phase,
        });
        Some(output)
    })
}

/// During an audit, tells that the zeros in `x` are the layer's own, not those of some input.
pub(crate) fn zeros<const D: usize>(x: &Tensor<D>) {
    RECORDING.with_borrow_mut(|recording| {
        if let Some(log) = recording
            && let Ok(tensor) = x.clone().try_into_primitive::<Capture>()
        {
            log.zeros.push(tensor.id());
        }
    });
}

impl Log {
    /// Runs `forward` with a fresh log, and returns it. `forward` does not unwind.
    pub(super) fn during<O>(forward: impl FnOnce() -> O) -> (O, Self) {
        let outer = RECORDING.replace(Some(Self::default()));
        let output = forward();
        let log = RECORDING.replace(outer);
        (output, log.unwrap_or_default())
    }

    /// The pass that put out this tensor.
    pub(super) fn entry(&self, output: TensorId) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.output == output)
    }

    pub(super) fn was_used(&self, quantizer: &str) -> bool {
        self.entries
            .iter()
            .any(|entry| entry.quantizer == quantizer)
    }
}
