//! The threads of an engine: one pool for all ways that it tries, of each kind that it needs.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use rten::ThreadPool;

use crate::DeployError;

/// More are a mistake, and would all be started.
const MOST_THREADS: usize = 1024;

/// Those of engines that leave the number to the caller's pool, by number: each pool has as many threads as the
/// machine, for any number of engines.
static SHARED: Mutex<BTreeMap<usize, Weak<ThreadPool>>> = Mutex::new(BTreeMap::new());

/// Each is started for the first way that needs it.
#[derive(Debug)]
pub(super) struct Pools {
    /// 0 for those of the caller's rayon pool.
    threads: usize,
    own: OnceLock<Arc<rayon::ThreadPool>>,
    /// For as long as a way has it. Not shared: engines that run at once have as many threads as they say, each.
    rten: Mutex<Weak<ThreadPool>>,
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
            rten: Mutex::default(),
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
        match self.threads {
            0 => {
                let threads = rayon::current_num_threads();
                started(lock(&SHARED).entry(threads).or_default(), threads)
            }
            threads => started(&mut lock(&self.rten), threads),
        }
    }
}

/// The pool, started where nothing holds it any more.
fn started(pool: &mut Weak<ThreadPool>, threads: usize) -> Arc<ThreadPool> {
    pool.upgrade().unwrap_or_else(|| {
        let started = Arc::new(ThreadPool::with_num_threads(threads));
        *pool = Arc::downgrade(&started);
        started
    })
}

fn lock<T>(pool: &Mutex<T>) -> MutexGuard<'_, T> {
    pool.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engines_share_the_threads_of_rten_unless_they_say_how_many() {
        let [one, other] = [0, 0].map(|threads| Pools::new(threads).unwrap().rten());
        assert!(Arc::ptr_eq(&one, &other));
        let [one, other] = [2, 2].map(|threads| Pools::new(threads).unwrap());
        let pool = one.rten();
        assert!(Arc::ptr_eq(&pool, &one.rten()));
        assert!(!Arc::ptr_eq(&pool, &other.rten()));
        // Threads that no way runs on end.
        let left = Arc::downgrade(&pool);
        drop(pool);
        assert!(left.upgrade().is_none());
        assert_eq!(one.rten().run(rayon::current_num_threads), 2);
    }
}
