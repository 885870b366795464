//! The running statistics of before a step under `Amp`.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

use burn::module::Module;

use crate::scaler::running_statistics::RunningStatistics;

/// Those of before the first forward pass since the last step, of each thread that makes passes.
///
/// Shared by clones and forks, as Burn shares the statistics themselves; the replicas of a distributed
/// training run ahead of each other, each on a thread of its own.
#[derive(Debug, Clone, Default)]
pub(crate) struct Statistics(Arc<Mutex<HashMap<ThreadId, RunningStatistics>>>);

impl Statistics {
    /// To be called before each forward pass.
    pub(crate) fn before_forward<M: Module>(&self, model: &M) {
        self.lock()
            .entry(thread::current().id())
            .or_insert_with(|| RunningStatistics::of(model));
    }

    /// To be called in each step: those of this thread; of all where workers make the passes for it.
    pub(crate) fn take(&self) -> RunningStatistics {
        let mut known = self.lock();
        if let Some(own) = known.remove(&thread::current().id()) {
            return own;
        }
        let mut all = RunningStatistics::default();
        for (_, of_worker) in known.drain() {
            all.keep(of_worker);
        }
        all
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<ThreadId, RunningStatistics>> {
        // The values are plain: a panic elsewhere cannot have left them half written.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
