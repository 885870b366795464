//! What is said of parameters that stay, once in a run, however many stages it has; and of gradients that
//! say nothing.

use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::activation::log_softmax;
use burn::tensor::{Device, Tensor};
use burn_lean::prune::{
    Budget, FisherConfig, GradualPruner, PrunerConfig, RidgeChoice, Selection, SolverConfig,
    StageMethod,
};

use crate::support::{tensor, warnings, with_numbers};

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

/// The only one of the warnings that contains this.
fn the_only<'a>(said: &'a [String], what: &str) -> &'a str {
    let lines: Vec<_> = said.iter().filter(|line| line.contains(what)).collect();
    let [line] = lines[..] else {
        panic!("{lines:?}");
    };
    line
}

fn assert_names_both_matrices_once(said: &[String]) {
    let line = the_only(said, "not pruned");
    assert_says!(line, "`down` [4, 2]", "`up` [2, 4]", "parameter group");
}

#[test]
fn matrices_of_the_model_itself_are_named_once_for_all_stages() {
    let device = Device::flex();
    for method in [StageMethod::Magnitude, StageMethod::Layerwise] {
        let mut gradual = GradualPruner::new(Budget::Sparsity(0.75), 3, 0, 0);
        gradual.method = method;
        let inputs = |_seed| [1, 2].map(|seed| tensor::<2>(seed, [24, 6], &device));
        let ((), said) = warnings("burn_lean_prune", || {
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
    let ((), said) = warnings("burn_lean_prune", || {
        let loss = |net: &Net, x: &Tensor<2>| net.forward(x.clone()).square().mean();
        let loader = |seed| [tensor::<2>(seed, [8, 6], &device)];
        let pruned = config.prune(Net::new(&device), loss, loader).unwrap();
        assert_eq!(pruned.stages.len(), 3);
    });
    let line = the_only(&said, "does not depend on");
    assert_says!(line, "unused.weight");
    assert_names_both_matrices_once(&said);
}

/// Cross entropy over one class is 0 whatever the weights are.
#[test]
fn a_loss_without_any_gradient_is_named() {
    let device = Device::flex();
    let model: Linear = with_numbers(LinearConfig::new(6, 1).init(&device), 1);
    let selection = Selection::of(&model, None).unwrap();
    let x = tensor::<2>(1, [8, 6], &device);
    let (fisher, said) = warnings("burn_lean_prune", || {
        let loss = |model: &Linear, x: &Tensor<2>| {
            let logits = model.forward(x.clone());
            log_softmax(logits, 1).mean().neg()
        };
        FisherConfig::new(8).collect(&model, &selection, loss, [x])
    });
    let zeros = fisher.unwrap().report.zero_columns;
    assert_eq!(zeros, [("weight".to_string(), 6)]);
    let line = the_only(&said, "magnitude alone decides");
    assert_says!(line, "cross entropy over one class");
}
