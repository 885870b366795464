//! Masks: exact zeros, whatever happens to the weights behind them.

use burn::module::{Module, Param, ParamGroup, Reparameterization, Reparameterizer};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{Linear, LinearConfig};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_lean::amp::{Autocast, AutocastConfig, Fallback};
use burn_lean::prune::{
    Budget, LayerKind, Layout, Masks, PruneError, Selection, SparsityPattern, masks::ParameterMask,
};
use burn_lean::quant::QatConfig;
use burn_lean::reparam::{AttachError, ChainReparameterizer, attach, attached};

use crate::support::{each_device, numbers, parameters, tensor, values, with_numbers};

#[derive(Module, Debug)]
pub(crate) struct Model {
    conv: Conv2d,
    linear: Linear,
}

impl Model {
    fn forward(&self, x: Tensor<4>) -> Tensor<2> {
        let x = self.conv.forward(x);
        self.linear.forward(x.flatten(1, 3))
    }
}

pub(crate) fn dense(device: &Device) -> Model {
    let model = Model {
        conv: Conv2dConfig::new([1, 2], [2, 2]).init(device),
        linear: LinearConfig::new(2 * 2 * 2, 3).init(device),
    };
    with_numbers(model, 1)
}

fn layout() -> Layout {
    let mut layout = Layout::new();
    layout.push("conv.weight", [2, 1, 2, 2], LayerKind::Conv, 8.0);
    layout.push("linear.weight", [8, 3], LayerKind::Linear, 2.0);
    layout
}

/// Keeps the weights whose index is a multiple of `every`.
pub(crate) fn masks(every: usize) -> Masks {
    let support: Vec<usize> = (0..layout().len()).step_by(every).collect();
    Masks::from_support(&layout(), &support).unwrap()
}

fn loss(model: &Model, seed: u64) -> Tensor<1> {
    let device = model.linear.weight.base().device();
    let x = tensor(seed, [4, 1, 3, 3], &device);
    (model.forward(x) - 1.0).square().mean()
}

pub(crate) fn train(mut model: Model, optim: &mut ModuleOptimizer, steps: u64) -> Model {
    for step in 0..steps {
        let grads = loss(&model, step).backward();
        let grads = GradientsParams::from_grads(grads, &model);
        model = optim.step(0.05, model, grads);
    }
    model
}

fn optimizers() -> [(&'static str, ModuleOptimizer); 2] {
    let momentum = SgdConfig::new()
        .with_momentum(Some(MomentumConfig::new()))
        .with_weight_decay(Some(burn::optim::decay::WeightDecayConfig::new(0.1)));
    [
        ("AdamW", AdamWConfig::new().with_weight_decay(0.1).init()),
        ("SGD with momentum", momentum.init()),
    ]
}

/// Effective values of both weights, one after the other like the flat vector.
fn effective(model: &Model) -> Vec<f32> {
    let mut weights = values(model.conv.weight.val());
    weights.extend(values(model.linear.weight.val()));
    weights
}

/// Asserts positive zeros exactly where `masks` prunes.
pub(crate) fn assert_zeros(model: &Model, masks: &Masks) {
    let kept = masks.parameters().iter().flat_map(ParameterMask::kept);
    for (at, (value, kept)) in effective(model).into_iter().zip(kept).enumerate() {
        match kept {
            true => assert_ne!(value, 0.0, "kept weight {at}"),
            false => assert_eq!(value.to_bits(), 0, "pruned weight {at} is {value}"),
        }
    }
}

#[test]
fn pruned_weights_stay_zero_under_weight_decay_and_old_momentum() {
    each_device(|target| {
        for (name, mut optim) in optimizers() {
            println!("{name}");
            let model = dense(&target.device.clone().autodiff());
            // Momentum of the dense weights is still there when the mask comes.
            let model = train(model, &mut optim, 3);
            let model = masks(3).attach(model).unwrap();
            let before = effective(&model);
            let model = train(model, &mut optim, 5);
            assert_zeros(&model, &masks(3));
            assert_ne!(effective(&model), before, "nothing was trained");
            assert_zeros(&model.clone().materialize(), &masks(3));
            // Nor is what is left behind the mask a weight to choose from.
            let selection = Selection::of(&model, None).unwrap();
            let seen = values(selection.flatten(&model).unwrap());
            assert_eq!(seen, effective(&model));
            let half = Budget::Sparsity(0.5);
            let all = SparsityPattern::Unstructured;
            let largest = Masks::by_magnitude(&model, &selection, &all, &half).unwrap();
            let old = masks(3);
            let pairs = largest.parameters().iter().zip(old.parameters());
            let kept = pairs.flat_map(|(new, old)| new.kept().iter().zip(old.kept()));
            assert!(kept.filter(|(_, old)| **old).all(|(new, _)| *new));
        }
    });
}

#[test]
fn gradients_are_those_of_the_materialized_model_and_zero_where_pruned() {
    each_device(|target| {
        let model = masks(2).attach(dense(&target.device.clone().autodiff()));
        let model = model.unwrap();
        let plain = model.valid().materialize().train();
        let gradients = |model: &Model| {
            let grads = loss(model, 7).backward();
            let conv = values(model.conv.weight.base().grad(&grads).unwrap());
            let linear = values(model.linear.weight.base().grad(&grads).unwrap());
            [conv, linear].concat()
        };
        let (masked, plain) = (gradients(&model), gradients(&plain));
        let masks = masks(2);
        let kept = masks.parameters().iter().flat_map(ParameterMask::kept);
        for (at, kept) in kept.enumerate() {
            let expected = if *kept { plain[at] } else { 0.0 };
            assert_eq!(masked[at], expected, "gradient of weight {at}");
            assert_ne!(plain[at], 0.0, "the test shows nothing at {at}");
        }
    });
}

#[test]
fn a_broken_base_stays_behind_the_mask() {
    each_device(|target| {
        let mut model = masks(2).attach(dense(&target.device)).unwrap();
        let mut broken = values(model.linear.weight.base());
        (broken[1], broken[3], broken[5]) = (f32::INFINITY, f32::NAN, -1.0);
        let broken = burn::tensor::TensorData::new(broken, [8, 3]);
        let device = target.device.clone();
        let record = {
            let mut plain = model.clone().materialize();
            plain.linear.weight = Param::from_data(broken, &device);
            plain.into_record().allow_partial(true)
        };
        model = model.try_load_record(record).unwrap();
        assert!(values(model.linear.weight.base())[3].is_nan());
        assert_zeros(&model, &masks(2));
    });
}

#[test]
fn attaching_zeroes_the_base_and_keeps_identities() {
    each_device(|target| {
        let model = dense(&target.device.clone().autodiff());
        let ids = [model.conv.weight.id, model.linear.weight.id];
        let bias = values(model.linear.bias.as_ref().unwrap().base());
        let model = masks(3).attach(model).unwrap();
        assert_eq!([model.conv.weight.id, model.linear.weight.id], ids);
        assert!(model.linear.weight.base().is_require_grad());
        assert_eq!(
            values(model.linear.weight.base()),
            values(model.linear.weight.val())
        );
        assert_eq!(values(model.linear.bias.as_ref().unwrap().base()), bias);
        let names: Vec<_> = attached(&model).into_iter().map(|on| on.path).collect();
        assert_eq!(names, ["conv.weight", "linear.weight"]);
    });
}

#[test]
fn masks_come_back_from_a_model_and_from_the_zeros_of_a_checkpoint() {
    each_device(|target| {
        let model = masks(3).attach(dense(&target.device)).unwrap();
        assert_eq!(Masks::of(&model).unwrap(), masks(3));
        let bytes = model.materialize().into_record().into_bytes().unwrap();

        let record = burn::store::ModuleRecord::from_bytes(bytes).unwrap();
        let checkpoint = dense(&target.device).try_load_record(record).unwrap();
        assert!(Masks::of(&checkpoint).unwrap().is_empty());
        let found = Masks::from_zeros(&checkpoint, &ParamGroup::all()).unwrap();
        assert_eq!(found, masks(3));
        let convolution = ParamGroup::from_predicate("conv");
        let found = Masks::from_zeros(&checkpoint, &convolution).unwrap();
        assert_eq!(found.parameters(), &masks(3).parameters()[..1]);
        let none = ParamGroup::from_predicate("bias");
        let error = Masks::from_zeros(&checkpoint, &none).unwrap_err();
        assert_eq!(error, PruneError::NoPrunableParameter);
    });
}

#[test]
fn the_record_of_a_masked_model_loads_on_every_other_device() {
    each_device(|from| {
        let model = masks(3).attach(dense(&from.device)).unwrap();
        let bytes = model.clone().into_record().into_bytes().unwrap();
        let loads_on = |to: &Device| {
            let record = burn::store::ModuleRecord::from_bytes(bytes.clone()).unwrap();
            let other = masks(2).attach(dense(to)).unwrap();
            let loaded = other.try_load_record(record).unwrap();
            assert_eq!(Masks::of(&loaded).unwrap(), masks(3));
            assert_eq!(effective(&loaded), effective(&model));
            let moved = model.clone().to_device(to);
            assert_eq!(effective(&moved), effective(&model));
        };
        // Also where `BURN_DEVICE` leaves one device alone.
        loads_on(&Device::flex());
        each_device(|to| loads_on(&to.device));
    });
}

#[test]
fn the_mask_of_another_model_is_refused_and_the_model_comes_back() {
    let device = Device::flex();
    let mask = |path: &str, shape: [usize; 2]| {
        let kept = vec![true; shape[0] * shape[1]];
        Masks::new(vec![ParameterMask::new(path, shape, kept).unwrap()]).unwrap()
    };
    for (mask, model_shape) in [
        (mask("linear.weight", [3, 8]), Some(vec![8, 3])),
        (mask("head.weight", [8, 3]), None),
    ] {
        let expected = PruneError::MaskOfAnotherModel {
            path: mask.parameters()[0].path().into(),
            mask: mask.parameters()[0].shape().into(),
            model: model_shape,
        };
        let before = parameters(&dense(&device));
        let rejected = mask.attach(dense(&device)).unwrap_err();
        assert_eq!(*rejected.error(), expected);
        assert_eq!(parameters(rejected.value()), before);
        let error = mask.replace(rejected.into_value()).unwrap_err();
        assert_eq!(*error.error(), expected);
    }
}

#[test]
fn masks_are_attached_once_and_replaced_only_where_there_are_some() {
    let device = Device::flex();
    let error = masks(2).replace(dense(&device)).unwrap_err().into_error();
    let path = "conv.weight".to_string();
    assert_eq!(error, PruneError::NotMasked { path });
    let model = masks(2).attach(dense(&device)).unwrap();
    let error = masks(4).attach(model).unwrap_err().into_error();
    assert_matches!(error, PruneError::Attach(_));
}

#[test]
fn impossible_masks_are_refused() {
    let error = Masks::from_support(&layout(), &[0, 32]).unwrap_err();
    let expected = PruneError::SupportIndex {
        index: 32,
        parameters: 32,
    };
    assert_eq!(error, expected);
    let mask = ParameterMask::new("weight", [2], vec![true, false]).unwrap();
    let error = Masks::new(vec![mask.clone(), mask]).unwrap_err();
    let path = "weight".to_string();
    assert_eq!(error, PruneError::DuplicateMask { path });
    let error = ParameterMask::new("weight", [2], vec![true]).unwrap_err();
    let expected = PruneError::Mismatch {
        what: "flags of a mask",
        expected: 2,
        found: 1,
    };
    assert_eq!(error, expected);
}

#[test]
fn masks_survive_serialization_and_damage_is_noticed() {
    let masks = masks(3);
    let json = serde_json::to_string(&masks).unwrap();
    assert_eq!(serde_json::from_str::<Masks>(&json).unwrap(), masks);
    for damaged in [
        json.replace("[2,1,2,2]", "[2,1,2,3]"),
        json.replace("[2,1,2,2]", "[2,18446744073709551615]"),
        json.replace("[8,3]", "[7,3]"),
    ] {
        assert_ne!(damaged, json);
        let error = serde_json::from_str::<Masks>(&damaged).unwrap_err();
        assert_says!(error, "one bit for each");
    }
}

#[test]
fn replaced_masks_prune_further_while_the_optimizer_goes_on() {
    each_device(|target| {
        let mut optim = AdamWConfig::new().init();
        let model = dense(&target.device.clone().autodiff());
        let model = train(masks(2).attach(model).unwrap(), &mut optim, 3);
        let mut unpruned_optim = optim.clone();
        let unpruned = model.clone();

        let model = masks(4).replace(model).unwrap();
        assert_eq!(Masks::of(&model).unwrap(), masks(4));
        assert_eq!(model.linear.weight.id, unpruned.linear.weight.id);
        assert_zeros(&model, &masks(4));
        // One step on equal gradients moves the survivors as if nothing had happened: the
        // optimizer knows them.
        let step = |model: Model, optim: &mut ModuleOptimizer| {
            let mut grads = GradientsParams::new();
            let gradient = tensor::<2>(9, [8, 3], &target.device);
            grads.register(model.linear.weight.id, gradient);
            values(optim.step(0.05, model, grads).linear.weight.val())
        };
        let moved = step(model, &mut optim);
        let expected = step(unpruned, &mut unpruned_optim);
        let masks = masks(4);
        let kept = masks.get("linear.weight").unwrap().kept();
        for (at, kept) in kept.iter().enumerate() {
            let expected = if *kept { expected[at] } else { 0.0 };
            assert_eq!(moved[at], expected, "weight {at}");
        }
    });
}

#[test]
fn a_weight_that_returns_starts_from_zero() {
    each_device(|target| {
        let mut optim = SgdConfig::new()
            .with_momentum(Some(MomentumConfig::new()))
            .init();
        let model = dense(&target.device.clone().autodiff());
        let model = train(model, &mut optim, 2);
        // The old momentum moves the base behind the mask.
        let model = train(masks(4).attach(model).unwrap(), &mut optim, 2);
        assert_ne!(values(model.linear.weight.base())[1], 0.0);
        let survivors = effective(&model);
        let model = masks(2).replace(model).unwrap();
        assert_eq!(Masks::of(&model).unwrap(), masks(2));
        assert_eq!(effective(&model), survivors);
        assert_eq!(
            values(model.linear.weight.base()),
            values(model.linear.weight.val())
        );
        let model = train(model, &mut SgdConfig::new().init(), 1);
        assert_zeros(&model, &masks(2));
    });
}

fn half_precision() -> [AutocastConfig; 2] {
    [FloatDType::F16, FloatDType::BF16]
        .map(|dtype| AutocastConfig::new(dtype).with_fallback(Fallback::Emulate))
}

#[test]
fn zeros_are_exact_in_the_half_precision_of_autocast() {
    each_device(|target| {
        for config in half_precision() {
            let model = dense(&target.device.clone().autodiff());
            let reparameterizer = masks(3).reparameterizer(&model).unwrap();
            let (model, autocast) = config.prepare_with(model, reparameterizer).unwrap();
            assert_eq!(Masks::of(&model).unwrap(), masks(3));
            let mut optim = AdamWConfig::new().init();
            let model = (0..3).fold(model, |model, step| {
                let x = tensor(step, [4, 1, 3, 3], &target.device.clone().autodiff());
                let y = autocast.forward(x, |x| model.forward(x));
                let grads = y.square().mean().backward();
                let grads = GradientsParams::from_grads(grads, &model);
                optim.step(0.05, model, grads)
            });
            let inside = inside(autocast, &model);
            let native = target.name == "flex";
            assert!(!native || inside.dtype() != DType::F32, "nothing was cast");
            let masks = masks(3);
            let kept = masks.get("linear.weight").unwrap().kept();
            for (value, kept) in values(inside).into_iter().zip(kept) {
                assert_eq!(value != 0.0, *kept);
            }
            assert_zeros(&model, &masks);
        }
    });
}

/// The weight as the forward pass sees it.
fn inside(autocast: Autocast, model: &Model) -> Tensor<2> {
    let mut weight = None;
    autocast.forward((), |()| weight = Some(model.linear.weight.val()));
    weight.unwrap()
}

/// Rounds to a grid, with the gradient of the identity: stands for fake quantization.
#[derive(Module, Debug)]
struct Rounded {}

impl Reparameterization for Rounded {
    const NAME: &'static str = "rounded";

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        let rounded = (base.clone().detach() * 8.0).round() / 8.0;
        rounded + (base.clone() - base.detach())
    }
}

#[derive(Debug, Clone)]
struct RoundMatrices;

impl Reparameterizer for RoundMatrices {
    type Reparam = Rounded;

    fn reparameterize<const D: usize>(
        &mut self,
        _path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<Rounded>) {
        (param, (D > 1).then_some(Rounded {}))
    }
}

#[test]
fn masks_are_replaced_inside_a_chain_of_three() {
    each_device(|target| {
        for config in half_precision() {
            let model = dense(&target.device.clone().autodiff());
            let chain =
                ChainReparameterizer::new(masks(2).reparameterizer(&model).unwrap(), RoundMatrices);
            let (model, autocast) = config.prepare_with(model, chain).unwrap();
            assert_eq!(Masks::of(&model).unwrap(), masks(2));
            let model = masks(4).replace(model).unwrap();
            assert_eq!(Masks::of(&model).unwrap(), masks(4));
            let masks = masks(4);
            let kept = masks.get("linear.weight").unwrap().kept();
            let base = values(model.linear.weight.base());
            let found = values(inside(autocast, &model));
            for (at, kept) in kept.iter().enumerate() {
                // Eighths below 1 are exact in F16 and BF16. Ties do not occur in these numbers.
                let expected = if *kept {
                    (base[at] * 8.0).round() / 8.0
                } else {
                    0.0
                };
                assert_eq!(found[at], expected, "weight {at}");
            }
        }
    });
}

#[test]
fn quantizers_after_a_mask_keep_its_zeros_under_autocast() {
    each_device(|target| {
        for config in half_precision() {
            let model = dense(&target.device.clone().autodiff());
            let masks = masks(3);
            let chain = ChainReparameterizer::new(
                masks.reparameterizer(&model).unwrap(),
                QatConfig::new().reparameterizer(&model).unwrap(),
            );
            let (model, autocast) = config.prepare_with(model, chain).unwrap();
            assert_eq!(Masks::of(&model).unwrap(), masks);
            let mut optim = AdamWConfig::new().with_weight_decay(0.1).init();
            let model = (0..3).fold(model, |model, step| {
                let x = tensor(step, [4, 1, 3, 3], &target.device.clone().autodiff());
                let y = autocast.forward(x, |x| model.forward(x));
                let grads = GradientsParams::from_grads(y.square().mean().backward(), &model);
                optim.step(0.05, model, grads)
            });
            let weights = values(inside(autocast, &model));
            let kept = masks.get("linear.weight").unwrap().kept();
            let zeros = weights.iter().zip(kept).filter(|(_, kept)| !**kept);
            assert!(zeros.clone().count() > 0);
            assert!(zeros.into_iter().all(|(weight, _)| *weight == 0.0));
            assert!(weights.iter().any(|weight| *weight != 0.0));
            let plain = model.materialize();
            let zeros = values(plain.linear.weight.base()).into_iter().zip(kept);
            assert!(
                zeros
                    .into_iter()
                    .all(|(weight, kept)| *kept || weight == 0.0)
            );
        }
    });
}

#[derive(Module, Debug)]
struct Tied {
    first: Linear,
    second: Linear,
}

/// A layout, and so the masks that pruning makes, names a tied weight once.
#[test]
fn tied_copies_carry_the_same_mask_after_it_is_replaced() {
    each_device(|target| {
        let first: Linear = with_numbers(LinearConfig::new(4, 3).init(&target.device), 1);
        let model = Tied {
            second: first.clone(),
            first,
        };
        let layout = Selection::of(&model, None).unwrap().layout().clone();
        let masks = |support: &[usize]| Masks::from_support(&layout, support).unwrap();
        let model = masks(&[0, 2, 3, 7, 9]).attach(model).unwrap();
        let model = masks(&[0, 3, 4]).replace(model).unwrap();
        let of_both = Masks::of(&model).unwrap();
        for (linear, path) in [(&model.first, "first"), (&model.second, "second")] {
            let weights = values(linear.weight.val());
            let nonzeros: Vec<usize> = (0..12).filter(|at| weights[*at] != 0.0).collect();
            // What returns starts from zero.
            assert_eq!(nonzeros, [0, 3], "{path}");
            assert_eq!(values(linear.weight.base()), weights, "{path}");
            let mask = of_both.get(&format!("{path}.weight")).unwrap();
            assert_eq!(mask.kept(), masks(&[0, 3, 4]).parameters()[0].kept());
        }
    });
}

#[test]
fn other_reparameterizations_are_not_mistaken_for_masks() {
    let model = attach(dense(&Device::flex()), RoundMatrices).unwrap();
    assert!(Masks::of(&model).unwrap().is_empty());
    let error = masks(2).replace(model).unwrap_err().into_error();
    assert_matches!(error, PruneError::NotMasked { .. });
}

#[test]
fn sparsity_is_the_fraction_of_zeros() {
    let masks = masks(4);
    assert_eq!((masks.weights(), masks.nonzeros()), (32, 8));
    assert_eq!(masks.sparsity(), 0.75);
    assert_eq!(masks.get("conv.weight").unwrap().nonzeros(), 2);
    assert_eq!(Masks::default().sparsity(), 0.0);
    // The numbers that the other tests mask have no zeros of their own.
    assert!(numbers(1, 1000).iter().all(|number| *number != 0.0));
}

#[test]
fn what_was_made_for_another_copy_attaches_nothing_and_says_so() {
    let device = Device::flex();
    let kept = ParameterMask::new("linear.weight", [8, 3], vec![true; 24]).unwrap();
    let masks = Masks::new(vec![kept]).unwrap();
    let (first, second) = (dense(&device), dense(&device));
    let of_first = masks.reparameterizer(&first).unwrap();
    let before = parameters(&second);
    let rejected = attach(second, of_first).unwrap_err();
    let expected = AttachError::NothingChosen {
        parameters: 4,
        first: "conv.weight".into(),
    };
    assert_eq!(*rejected.error(), expected);
    assert_eq!(parameters(rejected.value()), before);
    let of_first = masks.reparameterizer(&first).unwrap();
    assert_eq!(attached(&attach(first, of_first).unwrap()).len(), 1);
    // No masks at all are no mistake.
    let model = Masks::new(vec![]).unwrap().attach(dense(&device)).unwrap();
    assert_eq!(attached(&model).len(), 0);
}
