//! Schedules against the published formulas.

use burn_lean::prune::{PruneError, SparsitySchedule};

const BASE: f64 = 0.3;
const TARGET: f64 = 0.95;

#[test]
fn exponential_closes_half_of_the_rest_in_every_stage() {
    // b + (s-b)·8/7·(2^t - 1)/2^t for f = 4, by hand: factors 0, 4/7, 6/7, 1.
    let targets = SparsitySchedule::Exponential { base: BASE }
        .targets(TARGET, 4)
        .unwrap();
    close(
        &targets,
        &[0.3, 0.3 + 0.65 * 4.0 / 7.0, 0.3 + 0.65 * 6.0 / 7.0, 0.95],
    );
}

#[test]
fn polynomial_is_cubic_in_what_is_left() {
    let targets = SparsitySchedule::Polynomial { base: BASE }
        .targets(TARGET, 3)
        .unwrap();
    close(&targets, &[0.3, 0.95 - 0.65 / 8.0, 0.95]);
}

#[test]
fn linear_takes_equal_steps() {
    let targets = SparsitySchedule::Linear { base: 0.1 }
        .targets(0.9, 5)
        .unwrap();
    close(&targets, &[0.1, 0.3, 0.5, 0.7, 0.9]);
}

#[test]
fn constant_prunes_to_the_target_every_time() {
    assert_eq!(
        SparsitySchedule::Constant.targets(0.6, 3).unwrap(),
        [0.6, 0.6, 0.6]
    );
}

#[test]
fn one_stage_is_the_target_and_the_last_stage_hits_it_exactly() {
    for schedule in [
        SparsitySchedule::Exponential { base: BASE },
        SparsitySchedule::Polynomial { base: BASE },
        SparsitySchedule::Linear { base: BASE },
        SparsitySchedule::Constant,
    ] {
        assert_eq!(schedule.targets(TARGET, 1).unwrap(), [TARGET]);
        for stages in 2..20 {
            let targets = schedule.targets(TARGET, stages).unwrap();
            assert_eq!(targets[stages - 1], TARGET, "{schedule:?}");
            assert!(targets.is_sorted(), "{schedule:?}: {targets:?}");
        }
    }
}

/// 0.9 + (0.2 − 0.9) is above 0.2: of ten weights it keeps one fewer than a budget of 0.2.
#[test]
fn the_first_of_several_stages_is_exactly_the_base() {
    for (base, target) in [
        (0.1, 0.9),
        (0.2, 0.9),
        (0.1, 0.45),
        (0.0, 0.0),
        (BASE, TARGET),
    ] {
        for schedule in [
            SparsitySchedule::Exponential { base },
            SparsitySchedule::Polynomial { base },
            SparsitySchedule::Linear { base },
        ] {
            for stages in 2..20 {
                let targets = schedule.targets(target, stages).unwrap();
                assert_eq!(targets[0], base, "{schedule:?}");
                assert!(targets.is_sorted(), "{schedule:?}: {targets:?}");
            }
        }
    }
}

#[test]
fn impossible_schedules_are_refused() {
    let schedule = SparsitySchedule::Linear { base: 0.5 };
    assert_eq!(
        schedule.targets(1.0, 3),
        Err(PruneError::Sparsity { sparsity: 1.0 })
    );
    let refused = |result: Result<_, PruneError>, name| match result {
        Err(PruneError::InvalidConfig { field, .. }) => assert_eq!(field, name),
        other => panic!("{other:?}"),
    };
    refused(schedule.targets(0.4, 3), "base");
    refused(schedule.targets(0.6, 0), "stages");
}

/// Equal up to a few roundings of numbers below 1.
fn close(found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), expected.len());
    assert_near!(found.iter(), expected, 1e-14);
}
