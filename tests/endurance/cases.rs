//! How many cases a test takes.

use proptest::prelude::ProptestConfig;

/// `few` times the number in the environment variable `LEAN_CASES`, 1 without it.
pub(crate) fn count(few: usize) -> usize {
    let times = std::env::var("LEAN_CASES").ok();
    let times = times.map(|times| times.parse::<usize>().expect("LEAN_CASES is a number"));
    few * times.unwrap_or(1)
}

/// The same cases every time, so many as [`count`] says; with `LEAN_SEED` others.
pub(crate) fn cases(few: usize) -> ProptestConfig {
    let seed = std::env::var("LEAN_SEED").ok();
    let seed = seed.map_or(18, |seed| seed.parse().expect("LEAN_SEED is a number"));
    ProptestConfig {
        cases: count(few) as u32,
        rng_seed: proptest::test_runner::RngSeed::Fixed(seed),
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}
