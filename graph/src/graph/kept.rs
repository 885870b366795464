//! What was found out about a graph, for who asks the same again.

use std::any::Any;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

/// One thing that was found out. A copy, which may become another graph, begins without.
#[derive(Default)]
pub(crate) struct Kept(Mutex<Option<(Key, Arc<dyn Any + Send + Sync>)>>);

/// Who asks, and for what.
type Key = (&'static str, u64);

impl Kept {
    /// What is kept for `key`, or else what `find` gives, which is kept then; without a key nothing is.
    pub(crate) fn of<T: Any + Send + Sync>(
        &self,
        key: Option<Key>,
        find: impl FnOnce() -> T,
    ) -> Arc<T> {
        let Some(key) = key else {
            return Arc::new(find());
        };
        let kept = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let known = kept().clone().filter(|(of, _)| *of == key);
        if let Some(known) = known.and_then(|(_, known)| known.downcast().ok()) {
            return known;
        }
        // Without the lock: others may execute meanwhile.
        let found = Arc::new(find());
        *kept() = Some((key, found.clone()));
        found
    }
}

impl Clone for Kept {
    fn clone(&self) -> Self {
        Self::default()
    }
}

impl fmt::Debug for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Kept")
    }
}
