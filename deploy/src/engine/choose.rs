//! Which of the ways to run a model is the fastest here.

use std::cmp::Reverse;
use std::time::{Duration, Instant};

use burn_lean_graph::{Recording, Tensors};

use super::candidates::{Candidate, Kind};
use super::example::Example;
use super::measure::{Samples, pick, sample};
use super::pools::Pools;
use super::report::{SparseLayer, Timed};
use super::ways::{Made, each};
use super::{Arithmetic, EngineConfig};
use crate::{DeployError, Export, LayerReport};

/// A way that takes so many times as long as another in its first runs goes before the next one is made: not
/// all of them hold the weights at once.
const FAR: u32 = 3;
/// Those first runs, after the one that packs and allocates.
const FIRST_RUNS: u32 = 3;
/// After so long no further one begins.
const FIRST_TIME: Duration = Duration::from_millis(20);

/// What was chosen.
#[derive(Debug)]
pub(super) struct Chosen {
    pub(super) best: Candidate,
    /// For other sizes of the batch, where the best takes one alone.
    pub(super) other: Option<Candidate>,
    pub(super) times: Vec<Timed>,
    /// Weights of which half is zero.
    pub(super) sparse: Vec<SparseLayer>,
}

/// Ways that were made and run.
struct Race<'a, O> {
    recording: &'a Recording<O>,
    /// Whether slow ones go: not where it is the number of layers in integers that decides.
    drops: bool,
    /// The first one: while it is alone it is not run.
    alone: Option<Candidate>,
    /// Whether another one came.
    is_run: bool,
    runs: Vec<(Duration, Candidate)>,
    /// Too slow.
    slow: Vec<Slow>,
    /// Did not run; with other inputs they may, where those are integers.
    failed: Vec<Candidate>,
    error: Option<DeployError>,
}

/// What is left of a way that was too slow.
struct Slow {
    timed: Timed,
    integers: usize,
    layers: Vec<LayerReport>,
}

impl<O: Tensors> Race<'_, O> {
    fn take(&mut self, candidate: Result<Candidate, DeployError>, example: &Example) {
        let candidate = match candidate {
            Ok(candidate) => candidate,
            Err(error) => {
                self.error.get_or_insert(error);
                return;
            }
        };
        match (self.is_run, self.alone.take()) {
            (false, None) => self.alone = Some(candidate),
            (_, first) => {
                self.is_run = true;
                first.into_iter().for_each(|one| self.run(one, example));
                self.run(candidate, example);
            }
        }
    }

    fn run(&mut self, candidate: Candidate, example: &Example) {
        match first_time(&candidate, self.recording, example) {
            Ok(time) => {
                self.runs.push((time, candidate));
                self.drop_slow();
            }
            Err(error) => {
                self.error.get_or_insert(error);
                if example.has_integers {
                    self.failed.push(candidate);
                }
            }
        }
    }

    fn drop_slow(&mut self) {
        let times = self.runs.iter().filter(|(_, one)| !one.is_burn());
        let Some(fastest) = times.map(|(time, _)| *time).min().filter(|_| self.drops) else {
            return;
        };
        let slow = |(time, one): &mut (Duration, Candidate)| {
            !one.is_burn() && *time > fastest.saturating_mul(FAR)
        };
        let slow = self.runs.extract_if(.., slow);
        self.slow.extend(slow.map(|(time, one)| Slow {
            timed: Timed {
                way: one.name(),
                time,
            },
            integers: one.integers(),
            layers: one.exported.layers,
        }));
    }
}

/// How long a way takes, by few runs after one that packs, allocates and shows whether it runs at all.
fn first_time<O: Tensors>(
    candidate: &Candidate,
    recording: &Recording<O>,
    example: &Example,
) -> Result<Duration, DeployError> {
    candidate.run(recording, example)?;
    let begin = Instant::now();
    let mut shortest = Duration::MAX;
    for run in 0..FIRST_RUNS {
        if run > 0 && begin.elapsed() > FIRST_TIME {
            break;
        }
        let start = Instant::now();
        candidate.run(recording, example)?;
        shortest = shortest.min(start.elapsed());
    }
    Ok(shortest)
}

fn nothing() -> DeployError {
    DeployError::Load {
        reason: "nothing that the configuration allows runs the model: allow another backend, or \
                 `Arithmetic::Fastest`"
            .into(),
    }
}

/// A way to run the model in which it was measured before, and that is not Burn's.
pub(super) fn again<O: Tensors>(
    export: &Export<O>,
    config: &EngineConfig,
    pools: &Pools,
    kind: Kind,
) -> Result<Candidate, DeployError> {
    // Which zeros are left out is measured anew: there may be none.
    let (mut same, mut other) = (None, None);
    each(export, config, pools, |candidate, _| {
        if let Ok(candidate) = candidate
            && !candidate.is_burn()
        {
            match candidate.kind() == kind {
                true => same = Some(candidate),
                false => drop(other.get_or_insert(candidate)),
            }
        }
    })?;
    same.or(other).ok_or_else(nothing)
}

/// Everything that can run the model, as the configuration allows, and the fastest of it.
pub(super) fn choose<O: Tensors>(
    export: &Export<O>,
    config: &EngineConfig,
    pools: &Pools,
) -> Result<Chosen, DeployError> {
    let mut race = Race {
        recording: &export.recording,
        drops: config.arithmetic != Arithmetic::Integer,
        alone: None,
        is_run: false,
        runs: Vec::new(),
        slow: Vec::new(),
        failed: Vec::new(),
        error: None,
    };
    let Made { mut example, zeros } = each(export, config, pools, |one, example| {
        race.take(one, example);
    })?;
    if let Some(best) = race.alone {
        return Ok(Chosen {
            best,
            other: None,
            times: Vec::new(),
            sparse: zeros,
        });
    }
    // Integers may be indices, for which 0 will do, or divisors, for which it will not.
    if let ([], [failed, ..]) = (&race.runs[..], &race.failed[..]) {
        example = Example::of(export, &failed.exported.model.inputs, 1)?;
        for one in std::mem::take(&mut race.failed) {
            race.run(one, &example);
        }
    }
    let Race {
        mut runs,
        slow,
        failed,
        error,
        ..
    } = race;
    drop(failed);
    if config.arithmetic == Arithmetic::Integer {
        // Wherever there is a kernel: the fastest of those that have the most layers so.
        let most = runs.iter().map(|(_, one)| one.integers()).max();
        runs.retain(|(_, one)| Some(one.integers()) == most);
    }
    let (samples, mut runs): (Vec<Duration>, Vec<Candidate>) = runs.into_iter().unzip();
    let samples: Vec<Samples> = sample(&samples, |index| {
        runs[index].run(&export.recording, &example)
    })?;
    let burn = runs.iter().position(Candidate::is_burn);
    let Some(chosen) = pick(&samples, burn, |index| runs[index].is_integer()) else {
        return Err(error.unwrap_or_else(nothing));
    };
    let mut order: Vec<(usize, Duration)> = samples.iter().map(Samples::time).enumerate().collect();
    order.sort_by_key(|(_, time)| *time);
    let open = |index: &usize| !runs[*index].is_burn();
    let other = match open(&chosen) {
        true => None,
        false => order.iter().map(|(index, _)| *index).find(open),
    };
    let sampled = order.iter().map(|(index, time)| Timed {
        way: runs[*index].name(),
        time: *time,
    });
    let mut times: Vec<Timed> = sampled.collect();
    times.extend(slow.iter().map(|one| one.timed.clone()));
    times.sort_by_key(|one| one.time);
    let best_time = samples[chosen].time();
    if !runs[chosen].is_integer() {
        // The one with the most layers in integers; of as many, the fastest.
        let sampled = order.iter().map(|(index, time)| {
            let one = &runs[*index];
            (one.integers(), *time, &one.exported.layers)
        });
        let slow = slow.iter();
        let slow = slow.map(|one| (one.integers, one.timed.time, &one.layers));
        let integer = sampled.chain(slow).filter(|(integers, ..)| *integers > 0);
        let integer = integer.max_by_key(|(integers, time, _)| (*integers, Reverse(*time)));
        let integer = integer.map(|(_, time, layers)| (time, layers.clone()));
        if let Some((time, layers)) = integer {
            explain(&mut runs[chosen].exported.layers, &layers, best_time, time);
        }
    }
    let mut runs: Vec<Option<Candidate>> = runs.into_iter().map(Some).collect();
    let Some(mut best) = runs[chosen].take() else {
        return Err(nothing());
    };
    let sparse = best.zeros(zeros);
    Ok(Chosen {
        best,
        other: other.and_then(|index| runs[index].take()),
        times,
        sparse,
    })
}

/// Says of layers that could be integers why they are not.
fn explain(layers: &mut [LayerReport], integer: &[LayerReport], best: Duration, time: Duration) {
    for (layer, other) in layers.iter_mut().zip(integer) {
        layer.reason = match other.is_integer() {
            true => Some(format!(
                "the model takes {best:.1?} in floats, {time:.1?} with integers"
            )),
            false => other.reason.clone(),
        };
    }
}
