//! The threads of an engine: one pool for all ways that it tries, of each kind that it needs.

use std::sync::{Arc, OnceLock};

use rten::ThreadPool;

use crate::DeployError;

/// More are a mistake, and would all be started.
const MOST_THREADS: usize = 1024;

/// Each is started for the first way that needs it.
#[derive(Debug)]
pub(super) struct Pools {
    /// 0 for those of the caller's rayon pool.
    threads: usize,
    own: OnceLock<Arc<rayon::ThreadPool>>,
    rten: OnceLock<Arc<ThreadPool>>,
}

impl Pools {
    pub(super) fn new(threads: usize) -> Result<Self, DeployError> {
        if threads > MOST_THREADS {
            return Err(DeployError::InvalidConfig {
                field: "threads",
                value: threads.to_string(),
                expected: "0 to 1024",
            });
        }
        Ok(Self {
            threads,
            own: OnceLock::new(),
            rten: OnceLock::new(),
        })
    }

    /// Of the engine's own operations; `None` for the caller's.
    pub(super) fn own(&self) -> Result<Option<Arc<rayon::ThreadPool>>, DeployError> {
        if self.threads == 0 || self.own.get().is_some() {
            return Ok(self.own.get().cloned());
        }
        let pool = rayon::ThreadPoolBuilder::new().num_threads(self.threads);
        let pool = pool.build().map_err(|error| DeployError::Load {
            reason: error.to_string(),
        })?;
        Ok(Some(self.own.get_or_init(|| Arc::new(pool)).clone()))
    }

    pub(super) fn rten(&self) -> Arc<ThreadPool> {
        let start = || {
            let threads = match self.threads {
                0 => rayon::current_num_threads(),
                threads => threads,
            };
            Arc::new(ThreadPool::with_num_threads(threads))
        };
        self.rten.get_or_init(start).clone()
    }
}
