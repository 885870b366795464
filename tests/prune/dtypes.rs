//! Models that are not in F32: what pruning does not change keeps its digits.

use burn::module::{Module, ModuleMapper, Param};
use burn::nn::LinearConfig;
use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use burn_lean::prune::{
    Budget, FisherConfig, GradualPruner, Masks, Method, Pruner, PrunerConfig, RidgeChoice,
    Selection, SolverConfig, SparsityPattern, StageMethod, fisher::GradientMethod,
    layerwise::SupportMethod,
};

use crate::support::{Perceptron, each_device, tensor};

/// 6 × 5 + 5 × 2 = 40 weights in F64, none of which F32 has.
fn net(device: &Device) -> Perceptron {
    struct Digits;
    impl ModuleMapper for Digits {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            param.map(|value| {
                let (device, shape) = (value.device(), value.shape());
                let data = value.into_data();
                let digits: Vec<f64> = data.iter::<f64>().map(|x| x * (1.0 + 1e-10)).collect();
                Tensor::from_data(TensorData::new(digits, shape), (&device, DType::F64))
            })
        }
    }
    Perceptron::new([6, 5, 2], 1, device).map(&mut Digits)
}

fn digits(net: &Perceptron) -> Vec<f64> {
    let weights = [&net.first, &net.second].map(|layer| layer.weight.val());
    let data = weights.map(Tensor::into_data);
    let numbers = data.iter().flat_map(|data| data.iter::<f64>());
    numbers.collect()
}

fn inputs(device: &Device) -> [Tensor<2>; 2] {
    [3, 4].map(|seed| tensor::<2>(seed, [24, 6], device).cast(FloatDType::F64))
}

/// Half of the weights are gone, and the others are those of the dense net to the last bit.
fn assert_only_zeros_are_new(pruned: &Perceptron) {
    let (before, after) = (digits(&net(&Device::flex())), digits(pruned));
    let zeros = after.iter().filter(|weight| **weight == 0.0).count();
    assert_eq!(zeros, 20);
    for (new, old) in after.iter().zip(&before) {
        assert!(*new == 0.0 || new == old, "{new} {old}");
    }
}

#[test]
fn weights_in_f64_come_back_from_the_flat_vector_with_all_digits() {
    let net = net(&Device::flex());
    let before = digits(&net);
    assert!(
        before
            .iter()
            .all(|weight| f64::from(*weight as f32) != *weight)
    );
    let selection = Selection::of(&net, None).unwrap();
    let flat = selection.flatten(&net).unwrap();
    assert_eq!(flat.dtype(), DType::F32);
    let same = selection.unflatten(net.clone(), flat.clone()).unwrap();
    assert_eq!(digits(&same), before);
    // What is new is in F32, and what becomes zero is zero.
    let half = selection.unflatten(net.clone(), flat * 0.5).unwrap();
    let pairs = digits(&half).into_iter().zip(&before);
    for (new, old) in pairs {
        assert_eq!(new, f64::from(*old as f32) * 0.5);
    }
    let mut tiny = net;
    tiny.first.weight = tiny.first.weight.map(|weight| weight * 1e-300);
    assert!(digits(&tiny).iter().all(|weight| *weight != 0.0));
    let zeros = Tensor::<1>::zeros([40], (&Device::flex(), DType::F32));
    let zeroed = selection.unflatten(tiny, zeros).unwrap();
    assert!(digits(&zeroed).iter().all(|weight| *weight == 0.0));
}

#[test]
fn weights_in_f64_that_are_kept_by_magnitude_keep_all_digits() {
    let device = Device::flex();
    let (dense, budget) = (net(&device), Budget::Sparsity(0.5));
    let selection = Selection::of(&dense, None).unwrap();
    let pattern = SparsityPattern::Unstructured;
    let masks = Masks::by_magnitude(&dense, &selection, &pattern, &budget).unwrap();
    let masked = masks.attach(dense.clone()).unwrap();
    assert_only_zeros_are_new(&masked.materialize());

    let mut gradual = GradualPruner::new(budget.clone(), 2, 0, 0);
    gradual.method = StageMethod::Magnitude;
    let forward = |net: &Perceptron, x: Tensor<2>| net.forward(x);
    let loader = |_seed| inputs(&device);
    let pruned = gradual.prune(dense.clone(), forward, loader, |net, _| Ok(net));
    assert_only_zeros_are_new(&pruned.unwrap().model);

    let mut solver = SolverConfig::new(budget);
    solver.method = Method::Magnitude;
    let fisher = FisherConfig::new(16).with_method(GradientMethod::Plain);
    let config = PrunerConfig::new(solver, fisher).with_ridge(RidgeChoice::Fixed(1e-2));
    let loss = |net: &Perceptron, x: &Tensor<2>| net.forward(x.clone()).square().mean();
    let pruned = config.prune(dense, loss, |_seed| inputs(&device));
    assert_only_zeros_are_new(&pruned.unwrap().model);
}

#[test]
fn weights_in_f64_that_the_pruner_does_not_fit_keep_all_digits() {
    let device = Device::flex();
    let mut pruner = Pruner::new(Budget::Sparsity(0.5));
    pruner.support = Some(SupportMethod::Magnitude);
    (pruner.refit, pruner.candidates) = (false, false);
    pruner.tuning = Some(0);
    let forward = |net: &Perceptron, x: Tensor<2>| net.forward(x);
    let pruned = pruner.prune(net(&device), forward, inputs(&device));
    assert_only_zeros_are_new(&pruned.unwrap().model);
}

/// CubeCL stores it as F32 under its own name, and casts nothing between the two.
#[test]
fn weights_in_flex32_are_read_where_a_device_has_them() {
    each_device(|target| {
        let device = &target.device;
        if !target.is_gpu() || !device.supports_dtype(DType::Flex32) {
            println!("skipped: no Flex32");
            return;
        }
        let mut layer = LinearConfig::new(4, 3).init(device);
        let weight = Tensor::<2>::full([4, 3], 0.5, (device, DType::Flex32));
        layer.weight = Param::from_tensor(weight);
        let selection = Selection::of(&layer, None).unwrap();
        let (pattern, budget) = (SparsityPattern::Unstructured, Budget::Sparsity(0.5));
        let masks = Masks::by_magnitude(&layer, &selection, &pattern, &budget).unwrap();
        assert_eq!(masks.nonzeros(), 6);
    });
}
