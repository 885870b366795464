//! Killed at any moment, again and again, a pruner and a one-shot run come to what they come to in one go,
//! bit by bit.

use std::cell::Cell;
use std::path::Path;

use burn::module::Module;
use burn::tensor::{Device, Tensor};
use burn_lean::oneshot::{OneShot, Preset};
use burn_lean::prune::{
    Budget, FisherConfig, Method, PrunerConfig, RidgeChoice, SolverConfig, SparsitySchedule,
};

use crate::hostile::Kind;
use crate::network::Net;
use crate::support::killed::{as_a_child, lives_until_said};
use crate::support::{numbers, parameters};

/// The test that child processes run.
const CHILD: &str = "killed::as_a_child_process";

/// Moments of work, at one of which the process dies.
struct Moments {
    left: Cell<Option<usize>>,
}

impl Moments {
    fn pass(&self) {
        if self.left.get() == Some(0) {
            // No destructor runs, nothing is flushed.
            std::process::abort();
        }
        self.left.set(self.left.get().map(|left| left - 1));
    }
}

fn inputs(seed: u64, device: &Device) -> Tensor<2> {
    Kind::Ordinary.tensor(seed, [16, 8], device)
}

fn pruned(folder: &Path, moments: &Moments) -> Net {
    let device = Device::flex().autodiff();
    let solver = SolverConfig::new(Budget::Sparsity(0.8)).with_method(Method::BackSolve);
    let config = PrunerConfig::new(solver, FisherConfig::new(8).with_progress(false))
        .with_stages(4)
        .with_schedule(SparsitySchedule::Exponential { base: 0.2 })
        .with_ridge(RidgeChoice::sweep())
        .with_state(Some(folder.into()));
    let loss = |net: &Net, x: &Tensor<2>| {
        moments.pass();
        net.forward(x.clone()).square().mean()
    };
    let pruned = config.prune(Net::of(Kind::Ordinary, 1, &device), loss, |seed| {
        [inputs(seed, &device)]
    });
    pruned.unwrap().model
}

fn compressed(folder: &Path, moments: &Moments) -> Net {
    let device = Device::flex();
    let preset: Preset = "sparse-0.5-w4a16-g3".parse().unwrap();
    let done = OneShot::new(preset)
        .with_state(folder)
        .with_progress(|_, _, _| moments.pass())
        .compress(
            Net::of(Kind::Ordinary, 1, &device),
            [inputs(1, &device), inputs(2, &device)],
            |net: &Net, x| net.forward(x),
        );
    done.unwrap().model
}

fn work(name: &str, folder: &Path, dies: Option<usize>) -> String {
    let moments = Moments {
        left: Cell::new(dies),
    };
    let net = match name {
        "pruner" => pruned(folder, &moments),
        _ => compressed(folder, &moments),
    };
    let said = parameters(&net.valid()).into_iter().map(|one| {
        let bits = one
            .values
            .iter()
            .map(|value| format!("{:x}", value.to_bits()));
        format!("{} {}\n", one.path, bits.collect::<Vec<_>>().join(" "))
    });
    said.collect()
}

#[test]
fn as_a_child_process() {
    as_a_child(|name, folder, dies| work(name, &folder.join("state"), dies));
}

/// `longest`: moments of a life, at most.
fn survives(name: &str, longest: usize) {
    let straight = tempfile::tempdir().unwrap();
    let expected = work(name, &straight.path().join("state"), None);
    for sequence in 0..2 {
        let folder = tempfile::tempdir().unwrap();
        let random = numbers(41 + sequence, 100)
            .into_iter()
            .map(|life| (0.5 * (life + 1.0) * (longest + 1) as f32) as usize);
        // It dies at least once.
        let lives = std::iter::once(1).chain(random);
        let (found, deaths) = lives_until_said(CHILD, name, folder.path(), lives);
        assert!(deaths > 0, "{name}: it never died");
        assert_eq!(found, expected, "{name}: after {deaths} deaths");
    }
}

#[test]
fn a_pruner_in_stages_survives_kills() {
    survives("pruner", 60);
}

#[test]
fn a_one_shot_run_survives_kills() {
    survives("one-shot", 4);
}
