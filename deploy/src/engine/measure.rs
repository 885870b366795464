//! How long each way to run a model takes, and which of them stays.

use std::time::{Duration, Instant};

/// Samples of each way, in turns.
const ROUNDS: usize = 15;
/// Rounds that are taken in any case.
const AT_LEAST: usize = 5;
/// After so long no round begins.
const AT_MOST: Duration = Duration::from_millis(400);
/// A sample is of as many runs as take about this long: the clock and a thread that wakes up do not
/// decide.
const SAMPLE: Duration = Duration::from_micros(500);
const RUNS: u32 = 64;

/// By how much a way must be faster than the model in Burn, to take its place.
const MARGIN: f64 = 0.1;
/// Ways that are so near take the same time.
const SAME: f64 = 0.02;

/// Seconds of a run, one number for each round.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Samples(Vec<f64>);

impl Samples {
    fn shortest(&self) -> f64 {
        self.0.iter().copied().fold(f64::INFINITY, f64::min)
    }

    pub(super) fn time(&self) -> Duration {
        Duration::try_from_secs_f64(self.shortest()).unwrap_or(Duration::MAX)
    }

    /// Median of how much longer another takes, round by round.
    fn ahead_of(&self, other: &Self) -> f64 {
        let pairs = self.0.iter().zip(&other.0);
        let mut ratios: Vec<f64> = pairs.map(|(own, other)| other / own).collect();
        ratios.sort_by(f64::total_cmp);
        ratios.get(ratios.len() / 2).copied().unwrap_or(0.0)
    }
}

/// Samples of ways, each with how long its first run took; in turns, each round with another one
/// first: whose memory is still warm must not decide.
pub(super) fn sample<E>(
    first: &[Duration],
    mut run: impl FnMut(usize) -> Result<(), E>,
) -> Result<Vec<Samples>, E> {
    let runs: Vec<u32> = first.iter().map(|time| runs_of(*time)).collect();
    let mut samples = vec![Samples::default(); first.len()];
    let begin = Instant::now();
    for round in 0..ROUNDS {
        if round >= AT_LEAST && begin.elapsed() > AT_MOST {
            break;
        }
        for turn in 0..first.len() {
            let index = (round + turn) % first.len();
            let start = Instant::now();
            for _ in 0..runs[index] {
                run(index)?;
            }
            let time = start.elapsed().as_secs_f64() / f64::from(runs[index]);
            samples[index].0.push(time);
        }
    }
    Ok(samples)
}

fn runs_of(time: Duration) -> u32 {
    let runs = SAMPLE.as_nanos() / time.as_nanos().max(1);
    u32::try_from(runs).map_or(RUNS, |runs| runs.clamp(1, RUNS))
}

/// Which way stays: the one with the shortest run; of those that are as fast, one that computes in
/// integers, which takes fewer bytes; and the model in Burn as it was, unless another one is faster
/// by a margin, in its shortest run and in the median of the rounds.
pub(super) fn pick(
    samples: &[Samples],
    burn: Option<usize>,
    is_integer: impl Fn(usize) -> bool,
) -> Option<usize> {
    let beats_burn = |index: &usize| {
        burn.is_none_or(|burn| {
            *index != burn
                && samples[*index].shortest() * (1.0 + MARGIN) <= samples[burn].shortest()
                && samples[*index].ahead_of(&samples[burn]) >= 1.0 + MARGIN
        })
    };
    let faster: Vec<usize> = (0..samples.len()).filter(beats_burn).collect();
    let time = |index: &usize| samples[*index].shortest();
    let mut best = faster
        .iter()
        .copied()
        .min_by(|a, b| time(a).total_cmp(&time(b)));
    if let Some(fastest) = best {
        let near = time(&fastest) * (1.0 + SAME);
        let integers = faster.iter().copied();
        let integers = integers.filter(|index| is_integer(*index) && time(index) <= near);
        best = integers.min_by(|a, b| time(a).total_cmp(&time(b))).or(best);
    }
    best.or(burn)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(samples: &[f64]) -> Samples {
        Samples(samples.to_vec())
    }

    fn floats(_: usize) -> bool {
        false
    }

    #[test]
    fn the_shortest_stays_where_burn_is_no_candidate() {
        let all = [of(&[3.0, 2.0]), of(&[1.0, 9.0])];
        assert_eq!(pick(&all, None, floats), Some(1));
        assert_eq!(pick(&[], None, floats), None);
    }

    #[test]
    fn burn_stays_unless_another_one_is_clearly_faster() {
        let burn = of(&[1.00, 1.02, 1.04]);
        // Some percent are noise.
        let near = of(&[0.96, 0.98, 1.00]);
        assert_eq!(pick(&[near, burn.clone()], Some(1), floats), Some(1));
        // One short run that the others do not bear out.
        let lucky = of(&[0.50, 1.30, 1.31]);
        assert_eq!(pick(&[lucky, burn.clone()], Some(1), floats), Some(1));
        let faster = of(&[0.80, 0.82, 0.85]);
        assert_eq!(pick(&[faster, burn], Some(1), floats), Some(0));
    }

    #[test]
    fn of_two_that_are_as_fast_the_integers_stay() {
        let burn = of(&[2.0, 2.0, 2.0]);
        let all = [of(&[1.0; 3]), of(&[1.015; 3]), burn];
        assert_eq!(pick(&all, Some(2), |index| index == 1), Some(1));
        let all = [of(&[1.0; 3]), of(&[1.03; 3]), of(&[2.0; 3])];
        assert_eq!(pick(&all, Some(2), |index| index == 1), Some(0));
        // The fastest of them, not the first.
        let all = [of(&[1.015; 3]), of(&[1.0; 3]), of(&[2.0; 3])];
        assert_eq!(pick(&all, Some(2), |index| index < 2), Some(1));
    }

    #[test]
    fn short_runs_are_sampled_together() {
        assert_eq!(runs_of(Duration::from_millis(20)), 1);
        assert_eq!(runs_of(Duration::from_micros(50)), 10);
        assert_eq!(runs_of(Duration::ZERO), RUNS);
        let sampled = sample(&[Duration::from_millis(1); 2], |_| Ok::<_, ()>(()));
        let rounds: Vec<usize> = sampled.unwrap().iter().map(|one| one.0.len()).collect();
        // All, unless the machine stops this thread for longer than they may take.
        assert!(rounds == [rounds[0]; 2] && (AT_LEAST..=ROUNDS).contains(&rounds[0]));
    }
}
