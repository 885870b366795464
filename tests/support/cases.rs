//! Random cases that are the same ones in every run.

use proptest::prelude::ProptestConfig;
use proptest::test_runner::RngSeed;

/// So many cases, the same every time; with `LEAN_SEED` others.
pub(crate) fn cases(count: usize) -> ProptestConfig {
    let seed = std::env::var("LEAN_SEED").ok();
    let seed = seed.map_or(18, |seed| seed.parse().expect("LEAN_SEED is a number"));
    ProptestConfig {
        cases: u32::try_from(count).expect("so many cases take forever"),
        rng_seed: RngSeed::Fixed(seed),
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}
