//! How many cases a test takes, and how many of them came to a result.

use std::sync::atomic::{AtomicUsize, Ordering};

use proptest::prelude::ProptestConfig;

use crate::support;

/// `few` times the number in the environment variable `LEAN_CASES`, 1 without it.
pub(crate) fn count(few: usize) -> usize {
    let times = std::env::var("LEAN_CASES").ok();
    let times = times.map(|times| times.parse::<usize>().expect("LEAN_CASES is a number"));
    few * times.unwrap_or(1)
}

/// The same cases every time, so many as [`count`] says; with `LEAN_SEED` others.
pub(crate) fn cases(few: usize) -> ProptestConfig {
    support::cases::cases(count(few))
}

/// How many random cases came to a result: what refuses all of them never does anything wrong.
pub(crate) struct Tally {
    all: AtomicUsize,
    results: AtomicUsize,
}

impl Tally {
    pub(crate) const fn new() -> Self {
        Self {
            all: AtomicUsize::new(0),
            results: AtomicUsize::new(0),
        }
    }

    pub(crate) fn case(&self) {
        self.all.fetch_add(1, Ordering::Relaxed);
    }

    /// The case had a result, and it was looked at.
    pub(crate) fn result(&self) {
        self.results.fetch_add(1, Ordering::Relaxed);
    }

    /// One of so many cases, and one at least, came to a result.
    pub(crate) fn assert_one_of(&self, cases: usize) {
        let all = self.all.load(Ordering::Relaxed);
        let results = self.results.load(Ordering::Relaxed);
        println!("{results} of {all} cases came to a result");
        assert!(
            results > 0 && results * cases >= all,
            "{results} of {all} cases came to a result"
        );
    }
}
