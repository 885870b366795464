//! What is said of parameters that stay: once in a run, however many stages it has.

use std::sync::{Arc, Mutex};

use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use burn_lean::prune::{
    Budget, FisherConfig, GradualPruner, PrunerConfig, RidgeChoice, SolverConfig, StageMethod,
};

use crate::support::{tensor, with_numbers};

/// A layer, one that nothing reads, and matrices of its own.
#[derive(Module, Debug)]
struct Net {
    layer: Linear,
    unused: Linear,
    down: Param<Tensor<2>>,
    up: Param<Tensor<2>>,
}

impl Net {
    fn new(device: &Device) -> Self {
        let own = |seed, shape: [usize; 2]| Param::from_tensor(tensor(seed, shape, device));
        let layer = || LinearConfig::new(6, 4).init(device);
        Self {
            layer: with_numbers(layer(), 1),
            unused: with_numbers(layer(), 2),
            down: own(3, [4, 2]),
            up: own(4, [2, 4]),
        }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let x = self.layer.forward(x);
        x.clone() + x.matmul(self.down.val()).matmul(self.up.val())
    }
}

/// Warnings of the crate.
#[derive(Clone, Default)]
struct Said(Arc<Mutex<Vec<String>>>);

impl Said {
    fn while_running(run: impl FnOnce()) -> Self {
        let said = Self::default();
        // Of two subscribers both are asked whichever thread comes first; of one, only its own thread is.
        let _second = tracing::Dispatch::new(said.clone());
        tracing::subscriber::with_default(said.clone(), run);
        said
    }

    fn of(&self, what: &str) -> Vec<String> {
        let lines = self.0.lock().unwrap();
        lines.iter().filter(|l| l.contains(what)).cloned().collect()
    }
}

impl tracing::Subscriber for Said {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        let is_ours = metadata.target().starts_with("burn_lean_prune");
        is_ours && *metadata.level() == tracing::Level::WARN
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn event(&self, event: &tracing::Event<'_>) {
        event.record(&mut self.clone());
    }
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

impl tracing::field::Visit for Said {
    fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
        if field.name() == "message" {
            self.0.lock().unwrap().push(format!("{value:?}"));
        }
    }
}

fn assert_names_both_matrices_once(said: &Said) {
    let lines = said.of("not pruned");
    let [line] = &lines[..] else {
        panic!("{lines:?}");
    };
    assert_says!(line, "`down` [4, 2]", "`up` [2, 4]", "parameter group");
}

#[test]
fn matrices_of_the_model_itself_are_named_once_for_all_stages() {
    let device = Device::flex();
    for method in [StageMethod::Magnitude, StageMethod::Layerwise] {
        let mut gradual = GradualPruner::new(Budget::Sparsity(0.75), 3, 0, 0);
        gradual.method = method;
        let inputs = |_seed| [1, 2].map(|seed| tensor::<2>(seed, [24, 6], &device));
        let said = Said::while_running(|| {
            let forward = |net: &Net, x: Tensor<2>| net.forward(x);
            let pruned = gradual.prune(Net::new(&device), forward, inputs, |net, _| Ok(net));
            assert_eq!(pruned.unwrap().stages.len(), 3);
        });
        assert_names_both_matrices_once(&said);
    }
}

#[test]
fn what_the_loss_does_not_depend_on_is_named_once_for_all_stages() {
    let device = Device::flex();
    let solver = SolverConfig::new(Budget::Sparsity(0.75));
    let config = PrunerConfig::new(solver, FisherConfig::new(8))
        .with_stages(3)
        .with_ridge(RidgeChoice::Fixed(1e-2));
    let said = Said::while_running(|| {
        let loss = |net: &Net, x: &Tensor<2>| net.forward(x.clone()).square().mean();
        let loader = |seed| [tensor::<2>(seed, [8, 6], &device)];
        let pruned = config.prune(Net::new(&device), loss, loader).unwrap();
        assert_eq!(pruned.stages.len(), 3);
    });
    let lines = said.of("does not depend on");
    let [line] = &lines[..] else {
        panic!("{lines:?}");
    };
    assert_says!(line, "unused.weight");
    assert_names_both_matrices_once(&said);
}
