//! A gradient matrix that is solved in blocks of columns.

use std::ops::Range;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use burn_lean::prune::{
    Budget, DeadColumns, FisherConfig, Groups, Method, PruneError, Pruned, PrunerConfig,
    RidgeChoice, Selection, SolverConfig, SparsityPattern, fisher::GradientMethod,
};

use crate::reference::dot;
use crate::support::{each_device, tensor, values, with_numbers};

/// 30, 10 and 6 weights.
#[derive(Module, Debug)]
struct Net {
    first: Linear,
    second: Linear,
    third: Linear,
}

const L2: f64 = 1e-2;

impl Net {
    fn new(device: &Device) -> Self {
        let net = Self {
            first: LinearConfig::new(6, 5).init(device),
            second: LinearConfig::new(5, 2).init(device),
            third: LinearConfig::new(2, 3).init(device),
        };
        with_numbers(net, 4)
    }

    fn loss(&self, x: &Tensor<2>) -> Tensor<1> {
        let x = self.first.forward(x.clone()).tanh();
        let x = self.second.forward(x).tanh();
        (self.third.forward(x) - 0.5).square().mean()
    }
}

fn examples(device: &Device) -> Vec<Tensor<2>> {
    vec![tensor(5, [16, 6], device)]
}

/// Blocks of at most `width` columns; with the gradient of the loss.
fn config(budget: Budget, method: Method, width: usize) -> PrunerConfig {
    let solver = SolverConfig::new(budget).with_method(method);
    let fisher = FisherConfig::new(16).with_memory_bound(16 * 4 * width);
    PrunerConfig::new(solver, fisher)
        .with_ridge(RidgeChoice::Fixed(L2))
        .with_first_order(Some(true))
        .with_in_blocks(true)
}

fn run(config: &PrunerConfig, net: Net) -> Result<Pruned<Net>, PruneError> {
    let loader = |_| examples(&Device::flex());
    config
        .prune(net, Net::loss, loader)
        .map_err(PruneError::from)
}

fn kept(pruned: &Pruned<Net>) -> Vec<usize> {
    let masks = pruned.masks.parameters().iter();
    masks.map(|mask| mask.nonzeros()).collect()
}

/// The sum over the blocks of ½‖G_b d‖² + λ‖d‖² + a·1ᵀG_b w, for the weights before and after.
fn objective(blocks: &[Range<usize>], dense: &[f32], pruned: &[f32]) -> f64 {
    let device = Device::flex();
    let net = Net::new(&device);
    let selection = Selection::of(&net, None).unwrap();
    let scaled = selection
        .unflatten(net, Tensor::from_data(dense, &device))
        .unwrap();
    let fisher = FisherConfig::new(16)
        .collect(&scaled, &selection, Net::loss, examples(&device))
        .unwrap();
    let wide = |values: &[f32]| -> Vec<f64> { values.iter().map(|x| f64::from(*x)).collect() };
    let mut sum = 0.0;
    for block in blocks {
        let weights = wide(&pruned[block.clone()]);
        let old = wide(&dense[block.clone()]);
        let change: Vec<f64> = weights.iter().zip(&old).map(|(w, old)| w - old).collect();
        sum += L2 * 16.0 / 2.0 * dot(&change, &change);
        for row in 0..16 {
            let row = wide(&fisher.gradients.row(row).unwrap()[block.clone()]);
            sum += 0.5 * dot(&row, &change).powi(2) + dot(&row, &weights);
        }
    }
    sum
}

#[test]
fn the_objective_counts_blocks_of_which_nothing_or_all_is_kept() {
    let device = Device::flex();
    let net = Net::new(&device);
    let selection = Selection::of(&net, None).unwrap();
    let dense = values(selection.flatten(&net).unwrap());
    // The second block, of the second and the third layer, is below the largest of the first one.
    let mut small = dense.clone();
    small[30..].iter_mut().for_each(|weight| *weight *= 0.3);
    let first = [("first.weight".to_string(), 0.5)];
    for (dense, budget, expected) in [
        (&small, Budget::Keep(8), [8, 0, 0]),
        (
            &dense,
            Budget::PerLayerTargets(first.clone().into()),
            [15, 10, 6],
        ),
    ] {
        for method in [Method::Magnitude, Method::BackSolve] {
            // The first layer in one block, and cut in two.
            for (width, blocks) in [(30, &[0..30, 30..46][..]), (20, &[0..20, 20..40, 40..46])] {
                let net = Net::new(&device);
                let selection = Selection::of(&net, None).unwrap();
                let net = selection
                    .unflatten(net, Tensor::from_data(&dense[..], &device))
                    .unwrap();
                let pruned = run(&config(budget.clone(), method.clone(), width), net).unwrap();
                assert_eq!(kept(&pruned), expected, "{method:?}");
                let weights = values(pruned.selection.flatten(&pruned.model).unwrap());
                let expected = objective(blocks, dense, &weights);
                let found = pruned.stages[0].objective;
                assert!(
                    (found - expected).abs() < 1e-4 * expected.abs(),
                    "{method:?}: {found}, not {expected}"
                );
            }
        }
    }
}

/// With the gradient of the loss, a block that stays dense has a minimum of its own.
#[test]
fn a_block_that_stays_dense_moves_to_its_minimum() {
    let device = Device::flex();
    let targets = [("first.weight".to_string(), 0.5)];
    let budget = Budget::PerLayerTargets(targets.into());
    let run = |first_order| {
        let config = config(budget.clone(), Method::BackSolve, 30);
        run(
            &config.with_first_order(Some(first_order)),
            Net::new(&device),
        )
        .unwrap()
    };
    let third = |net: &Net| values(net.third.weight.val());
    let dense = third(&Net::new(&device));
    assert_eq!(third(&run(false).model), dense);
    assert_ne!(third(&run(true).model), dense);
}

#[test]
fn budgets_by_layer_and_by_operation_hold_inside_of_a_block() {
    let device = Device::flex();
    // The first two layers are one block.
    let width = 40;
    for seed in 0..5 {
        let net = with_numbers(Net::new(&device), 20 + seed);
        let chita = || Method::Chita(burn_lean::prune::ChitaConfig::new());
        let run = |budget| run(&config(budget, chita(), width), net.clone()).unwrap();
        assert_eq!(kept(&run(Budget::PerLayer(0.5))), [15, 5, 3]);
        let targets = [("second.weight".to_string(), 0.7)];
        assert_eq!(
            kept(&run(Budget::PerLayerTargets(targets.into()))),
            [30, 3, 6]
        );
        let costs = [
            ("first.weight".to_string(), 2.0),
            ("second.weight".to_string(), 20.0),
            ("third.weight".to_string(), 2.0),
        ];
        let budget = Budget::Flops {
            kept: 0.3,
            sparsity: None,
        };
        let config = config(budget, chita(), width).with_flops(Some(costs.into()));
        let pruned = self::run(&config, net.clone()).unwrap();
        let kept = kept(&pruned);
        let operations = 2 * kept[0] + 20 * kept[1] + 2 * kept[2];
        // 0.3 of 60 + 200 + 12
        assert!((62..=81).contains(&operations), "{operations}: {kept:?}");
    }
}

#[test]
fn groups_of_single_weights_find_their_block() {
    let device = Device::flex();
    let magnitude = config(Budget::Sparsity(0.5), Method::Magnitude, 30);
    let groups = vec![vec![0, 29], vec![44, 30, 45]];
    let with = |groups: Vec<Vec<usize>>| {
        let mut config = magnitude.clone();
        config.solver.pattern = SparsityPattern::Groups(Groups::Custom(groups));
        run(&config, Net::new(&device))
    };
    let pruned = with(groups.clone()).unwrap();
    let kept: Vec<bool> = pruned
        .masks
        .parameters()
        .iter()
        .flat_map(|mask| mask.kept().to_vec())
        .collect();
    for group in groups {
        assert!(group.iter().all(|index| kept[*index] == kept[group[0]]));
    }
    let across = with(vec![vec![2, 31]]).map(|_| ());
    match across {
        Err(PruneError::Infeasible { reason }) => assert_says!(reason, "weight 31"),
        other => panic!("{other:?}"),
    }
}

/// The third layer is not used, and has the largest weights.
#[test]
fn a_layer_that_the_loss_does_not_use_is_pruned_first_in_blocks_too() {
    each_device(|target| {
        let net = Net::new(&target.device);
        let selection = Selection::of(&net, None).unwrap();
        let mut weights = values(selection.flatten(&net).unwrap());
        weights[40..].iter_mut().for_each(|weight| *weight = 10.0);
        let weights = Tensor::from_data(&weights[..], &target.device);
        let net = selection.unflatten(net, weights).unwrap();
        let loss = |net: &Net, x: &Tensor<2>| {
            let x = net.first.forward(x.clone()).tanh();
            net.second.forward(x).square().mean()
        };
        let loader = |_| examples(&target.device);
        for method in [
            Method::Magnitude,
            Method::BackSolve,
            Method::Chita(burn_lean::prune::ChitaConfig::new()),
        ] {
            // In one piece, with the second layer, alone, and in two blocks of its own.
            for width in [46, 30, 10, 4] {
                let config = config(Budget::Keep(20), method.clone(), width);
                let pruned = config.prune(net.clone(), loss, loader).unwrap();
                let report = &pruned.stages[0].gradients;
                assert_eq!(report.unreached, ["third.weight"], "{width}");
                assert_eq!(report.zero_columns, [("third.weight".into(), 6)]);
                let kept = kept(&pruned);
                assert_eq!((kept[0] + kept[1], kept[2]), (20, 0), "{method:?} {width}");
            }
        }
        // Where the budget leaves room, unused weights come back after all others.
        for width in [30, 10] {
            let config = config(Budget::Keep(42), Method::BackSolve, width);
            let pruned = config.prune(net.clone(), loss, loader).unwrap();
            assert_eq!(kept(&pruned), [30, 10, 2]);
        }
    });
}

#[test]
fn a_loss_that_depends_on_no_prunable_parameter_is_refused_in_blocks_too() {
    let device = Device::flex();
    let loss = |net: &Net, x: &Tensor<2>| net.loss(x).detach();
    for method in [GradientMethod::Batched, GradientMethod::Plain] {
        let mut config = config(Budget::Sparsity(0.5), Method::Magnitude, 30);
        config.fisher.method = method;
        // Else the gradients are looked at before any block.
        config.solver.dead_columns = Some(DeadColumns::Priced);
        let rejected = config.prune(Net::new(&device), loss, |_| examples(&device));
        match rejected.unwrap_err().into_error() {
            PruneError::Loss { reason } => {
                assert_says!(reason, "no prunable parameter");
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn parts_of_a_batch_with_other_numbers_of_examples_are_refused_before_any_block() {
    let device = Device::flex();
    let config = config(Budget::Sparsity(0.5), Method::Magnitude, 10);
    let batch = (
        tensor::<2>(5, [16, 6], &device),
        tensor::<2>(6, [15, 3], &device),
    );
    let loss =
        |net: &Net, batch: &(Tensor<2>, Tensor<2>)| net.loss(&batch.0) + batch.1.clone().mean();
    let rejected = config.prune(Net::new(&device), loss, |_| [batch.clone()]);
    let expected = PruneError::Mismatch {
        what: "examples in a part of a batch",
        expected: 16,
        found: 15,
    };
    assert_eq!(rejected.unwrap_err().into_error(), expected);
}

#[test]
fn batches_smaller_than_what_a_gradient_averages_are_refused_however_many_there_are() {
    let device = Device::flex();
    let mut config = config(Budget::Sparsity(0.5), Method::BackSolve, 20);
    config.fisher = config.fisher.with_batch_size(32);
    let endless = |_| std::iter::repeat_with(|| tensor::<2>(5, [16, 6], &device));
    let error = config.prune(Net::new(&device), Net::loss, endless);
    let (examples, batch_size) = (16, 32);
    let expected = PruneError::SmallBatch {
        examples,
        batch_size,
    };
    assert_eq!(*error.unwrap_err().error(), expected);
}
