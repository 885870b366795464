//! Gradual pruning of weights that more than a mask acts on: mixed precision, quantization, both.

use burn::module::Module;
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_lean::amp::{Autocast, AutocastConfig, Fallback, autocast::MasterWeight};
use burn_lean::prune::{
    Budget, FisherConfig, GradualConfig, Masks, Pruned, PrunerConfig, RidgeChoice, Selection,
    SolverConfig, SparsityPattern, SparsitySchedule, run::Epoch,
};
use burn_lean::quant::{ConvertConfig, QatConfig, WeightQuantizer, advance, quantizers};
use burn_lean::reparam::{ChainReparameterizer, find};

use crate::support::{Perceptron, on_tracked, tensor};

fn net(device: &Device) -> Perceptron {
    Perceptron::new([8, 8, 4], 1, device)
}

fn loss(net: &Perceptron, x: &Tensor<2>) -> Tensor<1> {
    (net.forward_q(x.clone()) - 0.5).square().mean()
}

fn batches(seed: u64, device: &Device) -> Vec<Tensor<2>> {
    vec![tensor(seed, [32, 8], device)]
}

fn gradual() -> GradualConfig {
    let solver = SolverConfig::new(Budget::Sparsity(0.75));
    let pruner = PrunerConfig::new(solver, FisherConfig::new(16))
        .with_stages(3)
        .with_schedule(SparsitySchedule::Linear { base: 0.25 })
        .with_ridge(RidgeChoice::Fixed(1e-2));
    GradualConfig::new(pruner, 2, 3)
}

fn keeping_all(net: &Perceptron) -> Masks {
    Masks::keeping_all(Selection::of(net, None).unwrap().layout())
}

/// Fraction of the effective weights that is zero.
fn zeros(net: &Perceptron) -> f64 {
    net.zeros() as f64 / net.weights().len() as f64
}

/// Prunes and trains, in a region where there is one; the zeros of each stage hold.
fn run(net: Perceptron, autocast: Option<Autocast>, device: &Device) -> Pruned<Perceptron> {
    let mut optim: ModuleOptimizer = AdamWConfig::new().with_weight_decay(0.1).init();
    let train = |mut net: Perceptron, epoch: &Epoch| {
        if epoch.restart {
            optim = AdamWConfig::new().with_weight_decay(0.1).init();
        }
        for seed in 0..2 {
            let x = tensor::<2>(seed, [32, 8], device);
            let y = match &autocast {
                Some(autocast) => autocast.forward(x, |x| net.forward_q(x)),
                None => net.forward_q(x),
            };
            let grads = (y - 0.5).square().mean().backward();
            let grads = GradientsParams::from_grads(grads, &net);
            net = advance(optim.step(0.01, net, grads));
        }
        let target = [0.25, 0.5, 0.75][epoch.stage];
        assert!(zeros(&net) >= target, "{} of {target}", zeros(&net));
        Ok(net)
    };
    let inner = device.clone().inner();
    let pruned = gradual().prune(net, loss, |seed| batches(seed, &inner), train);
    let pruned = pruned.unwrap();
    assert_eq!(pruned.masks.sparsity(), 0.75);
    // They are those that the model carries.
    assert_eq!(Masks::of(&pruned.model).unwrap(), pruned.masks);
    assert!(zeros(&pruned.model) >= 0.75);
    pruned
}

/// Also where the first stages would keep more than they do.
#[test]
fn masks_that_a_model_comes_with_hold() {
    on_tracked(|device| {
        let dense = net(&device);
        let selection = Selection::of(&dense, None).unwrap();
        let budget = Budget::Sparsity(0.5);
        let first =
            Masks::by_magnitude(&dense, &selection, &SparsityPattern::Unstructured, &budget)
                .unwrap();
        let carried = |masks: &Masks| -> Vec<bool> {
            let kept = masks.parameters().iter().flat_map(|mask| mask.kept());
            kept.copied().collect()
        };
        let is_within = |masks: &Masks| {
            let both = carried(&first).into_iter().zip(carried(masks));
            both.clone().count() > 0 && both.into_iter().all(|(was, is)| was || !is)
        };
        let inner = device.clone().inner();
        let loader = |seed| batches(seed, &inner);
        let masked = first.attach(dense.clone()).unwrap();
        let pruned = gradual().prune(masked, loss, loader, |net, _| {
            assert!(is_within(&Masks::of(&net).unwrap()));
            Ok(net)
        });
        let pruned = pruned.unwrap();
        assert!(is_within(&pruned.masks));
        assert_eq!(pruned.masks.sparsity(), 0.75);

        // One stage that would keep more than there is.
        let solver = SolverConfig::new(Budget::Sparsity(0.25));
        let pruner =
            PrunerConfig::new(solver, FisherConfig::new(16)).with_ridge(RidgeChoice::Fixed(1e-2));
        let masked = first.attach(dense).unwrap();
        let pruned = pruner.prune(masked, loss, loader).unwrap();
        assert_eq!(pruned.masks, first);
        assert_eq!(pruned.stages[0].nonzeros, first.nonzeros());
    });
}

fn half() -> [AutocastConfig; 2] {
    [FloatDType::F16, FloatDType::BF16]
        .map(|dtype| AutocastConfig::new(dtype).with_fallback(Fallback::Emulate))
}

#[test]
fn a_model_in_mixed_precision_is_pruned_gradually_over_its_master_weights() {
    on_tracked(|device| {
        for config in half() {
            let net = net(&device);
            let masks = keeping_all(&net).reparameterizer(&net).unwrap();
            let (net, autocast) = config.prepare_with(net, masks).unwrap();
            let pruned = run(net, Some(autocast), &device);
            for layer in [&pruned.model.first, &pruned.model.second] {
                assert!(
                    find::<MasterWeight, 2>(&layer.weight).is_some(),
                    "the cast is gone"
                );
                assert_eq!(layer.weight.base().dtype(), DType::F32);
            }
        }
    });
}

#[test]
fn a_quantized_model_is_pruned_gradually_and_converts_with_its_zeros() {
    on_tracked(|device| {
        let net = net(&device);
        let chain = ChainReparameterizer::new(
            keeping_all(&net).reparameterizer(&net).unwrap(),
            QatConfig::new().reparameterizer(&net).unwrap(),
        );
        let net = burn_lean::reparam::attach(net, chain).unwrap();
        let pruned = run(net, None, &device);
        // The schedule went on through all stages: 2 + 2 + 3 epochs of two steps.
        let steps: Vec<u64> = quantizers(&pruned.model)
            .iter()
            .map(|located| located.quantizer.step())
            .collect();
        assert!(
            !steps.is_empty() && steps.iter().all(|step| *step == 14),
            "{steps:?}"
        );
        for layer in [&pruned.model.first, &pruned.model.second] {
            assert!(WeightQuantizer::of(&layer.weight).is_some());
        }
        let (converted, _) = ConvertConfig::new().convert(pruned.model.valid()).unwrap();
        assert_matches!(converted.first.weight.base().dtype(), DType::QFloat(_));
        assert!(zeros(&converted) >= 0.75);
    });
}

#[test]
fn all_three_act_on_one_weight() {
    on_tracked(|device| {
        for config in half() {
            let net = net(&device);
            let chain = ChainReparameterizer::new(
                keeping_all(&net).reparameterizer(&net).unwrap(),
                QatConfig::new().reparameterizer(&net).unwrap(),
            );
            let (net, autocast) = config.prepare_with(net, chain).unwrap();
            let pruned = run(net, Some(autocast), &device);
            for layer in [&pruned.model.first, &pruned.model.second] {
                let weight = &layer.weight;
                assert!(WeightQuantizer::of(weight).is_some());
                assert!(find::<MasterWeight, 2>(weight).is_some());
            }
        }
    });
}
