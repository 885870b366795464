//! Models of which some parts are for evaluation and others train: each comes back as it was.

use burn::module::{Flag, Module, ModuleVisitor, Param};
use burn::nn::{BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Linear, LinearConfig};
use burn::store::ModuleRecord;
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor};
use burn_lean::prune::{Budget, Effort, Pruner, Shrink, load_shrunk, recompute_batch_norm};

use crate::support::{each_device, tensor, with_numbers};

#[derive(Module, Debug)]
struct Net {
    body: Linear,
    norm: BatchNorm,
    dropout: Dropout,
    head: Linear,
}

impl Net {
    fn new(seed: u64, device: &Device) -> Self {
        let net = Self {
            body: LinearConfig::new(6, 16).init(device),
            norm: BatchNormConfig::new(16).init(device),
            dropout: DropoutConfig::new(0.5).init(),
            head: LinearConfig::new(16, 3).init(device),
        };
        with_numbers(net, seed)
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let hidden = relu(self.norm.forward(self.body.forward(x)));
        self.head.forward(self.dropout.forward(hidden))
    }
}

/// Two networks, of which one may be for evaluation.
#[derive(Module, Debug)]
struct Pair {
    first: Net,
    second: Net,
}

impl Pair {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.first.forward(x.clone()) + self.second.forward(x)
    }
}

/// Whether each tensor is on a device with autodiff and has gradients, and which flags are on.
#[derive(Debug, Default, PartialEq)]
struct State(Vec<(bool, bool)>, Vec<bool>);

impl State {
    fn of(pair: &Pair) -> Self {
        let mut state = Self::default();
        pair.visit(&mut state);
        state
    }
}

impl ModuleVisitor for State {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let value = param.val();
        self.0.push((value.is_autodiff(), value.is_require_grad()));
    }

    fn visit_flag(&mut self, flag: &Param<Flag>) {
        self.1.push(flag.is_enabled());
    }
}

/// Pairs in which the first, the second, both and none train, with a frozen layer in each.
fn pairs(device: &Device) -> Vec<Pair> {
    let device = device.clone().autodiff();
    let net = |seed, trains| {
        let mut net = Net::new(seed, &device);
        net.body = net.body.no_grad();
        match trains {
            true => net,
            false => net.valid(),
        }
    };
    let pairs = [(true, false), (false, true), (true, true), (false, false)];
    pairs
        .map(|(first, second)| Pair {
            first: net(1, first),
            second: net(2, second),
        })
        .to_vec()
}

/// What comes back is in the states of what went in, and trains where all of that did.
fn each_part_stays(work: impl Fn(Pair, &Device) -> Pair) {
    each_device(|target| {
        for pair in pairs(&target.device) {
            let before = State::of(&pair);
            assert_eq!(before.0.len(), 2 * 8);
            let after = work(pair, &target.device);
            assert_eq!(State::of(&after), before);
            // As the parts of a model that trains do.
            let trained = State::of(&after.valid().train());
            let expected = pairs(&target.device).remove(2);
            assert_eq!(trained, State::of(&expected));
        }
    });
}

#[test]
fn statistics_that_are_measured_anew() {
    each_part_stays(|pair, device| {
        let batches = [1, 2].map(|seed| tensor::<2>(seed, [8, 6], &device.clone().autodiff()));
        let forward = |pair: &Pair, x: &Tensor<2>| pair.forward(x.clone());
        recompute_batch_norm(pair, forward, batches).unwrap()
    });
}

#[test]
fn a_model_that_is_pruned_layer_by_layer() {
    each_part_stays(|pair, device| {
        let batches = [1, 2].map(|seed| tensor::<2>(seed, [20, 6], device));
        let pruner = Pruner::new(Budget::Sparsity(0.3)).with_effort(Effort::Quick);
        let pruned = pruner.prune(pair, |pair, x| pair.forward(x), batches);
        pruned.unwrap().model
    });
}

#[test]
fn a_model_that_is_shrunk_and_one_that_takes_its_record() {
    each_part_stays(|pair, device| {
        let new = pair.clone();
        let x = tensor::<2>(1, [4, 6], device);
        let shrunk = Shrink::to(0.6).shrink(pair, |pair, x| pair.forward(x), x);
        let shrunk = shrunk.unwrap();
        assert!(shrunk.report.removed() > 0);
        let state = State::of(&shrunk.model);
        let bytes = shrunk.model.into_record().into_bytes().unwrap();
        let loaded = load_shrunk(new, ModuleRecord::from_bytes(bytes).unwrap()).unwrap();
        assert_eq!(State::of(&loaded), state);
        loaded
    });
}
