//! A map that lets go of what was used longest ago.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::hash::Hash;

#[derive(Debug)]
pub(super) struct LastUsed<K, V> {
    /// Each with the count of all uses at its last one.
    entries: HashMap<K, (u64, V)>,
    uses: u64,
}

impl<K, V> Default for LastUsed<K, V> {
    fn default() -> Self {
        Self {
            entries: HashMap::new(),
            uses: 0,
        }
    }
}

impl<K: Clone + Eq + Hash, V> LastUsed<K, V> {
    pub(super) fn get(&mut self, key: &K) -> Option<&mut V> {
        self.uses += 1;
        let (last, value) = self.entries.get_mut(key)?;
        *last = self.uses;
        Some(value)
    }

    /// Of more than `most` lets one go.
    pub(super) fn insert(&mut self, key: K, value: V, most: usize) {
        self.uses += 1;
        self.entries.insert(key, (self.uses, value));
        if self.entries.len() > most {
            let oldest = self.entries.iter().min_by_key(|(_, (last, _))| *last);
            if let Some(oldest) = oldest.map(|(key, _)| key.clone()) {
                self.entries.remove(&oldest);
            }
        }
    }

    /// All but the `most` that were used last.
    pub(super) fn older(&self, most: usize) -> impl Iterator<Item = &V> {
        let mut all: Vec<_> = self.entries.values().collect();
        all.sort_unstable_by_key(|(last, _)| Reverse(*last));
        all.into_iter().skip(most).map(|(_, value)| value)
    }

    /// Takes all out whose key is one of these.
    pub(super) fn take_where(&mut self, is_one: impl Fn(&K) -> bool) -> Vec<V> {
        let taken = self.entries.extract_if(|key, _| is_one(key));
        taken.map(|(_, (_, value))| value).collect()
    }
}
