//! The running statistics of before a step under `Amp`.

use std::sync::{Arc, Mutex, PoisonError};

use burn::module::Module;

use crate::scaler::running_statistics::RunningStatistics;

/// Those of before the first forward pass since the last step.
///
/// Shared by clones and forks, as Burn shares the statistics themselves.
#[derive(Debug, Clone, Default)]
pub(crate) struct Statistics(Arc<Mutex<Option<RunningStatistics>>>);

impl Statistics {
    /// To be called before each forward pass.
    pub(crate) fn before_forward<M: Module>(&self, model: &M) {
        self.lock()
            .get_or_insert_with(|| RunningStatistics::before_forward(model));
    }

    /// To be called in each step.
    pub(crate) fn take(&self) -> RunningStatistics {
        self.lock().take().unwrap_or_default()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<RunningStatistics>> {
        // The value is plain: a panic elsewhere cannot have left it half written.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
