//! Weights that carry a pruning mask and a quantizer, in either order.

use burn::module::{Lora, LoraAdapter, Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::store::ModuleRecord;
use burn::tensor::activation::relu;
use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_lean::amp::{AutocastConfig, Fallback, autocast::MasterWeight};
use burn_lean::prune::{Mask, Masks, masks::ParameterMask};
use burn_lean::quant::{
    ConvertConfig, Dequantize, ForwardQ, GptqConfig, Learned, Mapping, QatConfig, Rounding,
    RoundingConfig, Unsupported, WeightConfig, WeightGranularity, WeightQuantizer, audit, compare,
    deploy::Outcome, inspect::Coverage, load_safetensors, module::LayerInputs,
    qat::AttachQuantizers, quantized_weights, rounding::AdaRoundConfig, save_safetensors,
};
use burn_lean::reparam::{
    Chain, ChainReparameterizer, PathMapper, Trail, attach, find, map_with_path,
};

use crate::support::{each_device, on_each, scratch, tensor, values};

const INPUTS: usize = 16;
const HIDDEN: usize = 32;
const OUTPUTS: usize = 8;

#[derive(Module, Debug)]
struct Net {
    fc1: Linear,
    fc2: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        let linear = |seed: u64, shape: [usize; 2]| Linear {
            weight: Param::from_tensor(tensor(seed, shape, device)),
            bias: Some(Param::from_tensor(tensor(seed + 1, [shape[1]], device))),
        };
        Self {
            fc1: linear(1, [INPUTS, HIDDEN]),
            fc2: linear(3, [HIDDEN, OUTPUTS]),
        }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.fc2.forward_q(relu(self.fc1.forward_q(x)))
    }
}

/// Prunes two of three weights of `fc1`, the largest among them; `fc2` stays dense.
fn kept() -> Vec<bool> {
    let weight = crate::support::numbers(1, INPUTS * HIDDEN);
    let kept = |(index, weight): (usize, &f32)| index % 3 == 0 && weight.abs() < 0.75;
    weight.iter().enumerate().map(kept).collect()
}

fn masks() -> Masks {
    let mask = ParameterMask::new("fc1.weight", [INPUTS, HIDDEN], kept()).unwrap();
    Masks::new(vec![mask]).unwrap()
}

fn no_masks() -> Masks {
    Masks::new(Vec::new()).unwrap()
}

/// Which of the two acts first.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Order {
    MaskFirst,
    QuantizerFirst,
}

const ORDERS: [Order; 2] = [Order::MaskFirst, Order::QuantizerFirst];

fn chained(net: Net, masks: &Masks, config: &QatConfig, order: Order) -> Net {
    let quantizers: AttachQuantizers = config.reparameterizer(&net).unwrap();
    let masks = masks.reparameterizer(&net).unwrap();
    match order {
        Order::MaskFirst => attach(net, ChainReparameterizer::new(masks, quantizers)).unwrap(),
        Order::QuantizerFirst => attach(net, ChainReparameterizer::new(quantizers, masks)).unwrap(),
    }
}

fn samples(device: &Device) -> Vec<Tensor<2>> {
    (0..3)
        .map(|i| tensor(20 + i, [12, INPUTS], device))
        .collect()
}

/// The net with other stored numbers at the paths that end so; what weights carry stays.
fn with_stored(net: Net, ending: &'static str, seed: u64, device: &Device) -> Net {
    struct Store<'a> {
        ending: &'static str,
        seed: u64,
        device: &'a Device,
    }
    impl PathMapper for Store<'_> {
        fn float<const D: usize>(
            &mut self,
            at: &Trail,
            param: Param<Tensor<D>>,
        ) -> Param<Tensor<D>> {
            match at.path().ends_with(self.ending) {
                true => param.map(|old| {
                    let new = tensor(self.seed, old.dims(), self.device);
                    new.set_require_grad(old.is_require_grad())
                }),
                false => param,
            }
        }
    }
    let mut store = Store {
        ending,
        seed,
        device,
    };
    map_with_path(net, &mut store)
}

/// Masked and prepared, run once in training, with a base that is not zero behind the mask.
fn prepared(config: &QatConfig, order: Order, device: &Device) -> Net {
    let training = device.clone().autodiff();
    let net = chained(Net::new(&training), &masks(), config, order);
    let net = with_stored(net, "fc1.weight", 1, &training);
    for sample in samples(&training) {
        net.forward(sample);
    }
    net.valid()
}

fn configs() -> Vec<QatConfig> {
    let mut configs = Vec::new();
    for bits in [8, 4] {
        for granularity in [WeightGranularity::PerTensor, WeightGranularity::PerChannel] {
            for learned in [Learned::None, Learned::Lsq] {
                let weight = WeightConfig::int(bits)
                    .with_granularity(granularity)
                    .with_learned(learned);
                configs.push(QatConfig::new().with_weight(weight));
            }
        }
    }
    configs
}

fn assert_pruned_are_zero(weight: &[f32]) {
    for (value, kept) in weight.iter().zip(kept()) {
        assert!(kept || *value == 0.0, "{value}");
    }
    assert!(weight.iter().any(|value| *value != 0.0));
}

#[test]
fn a_masked_weight_is_converted_to_the_bit() {
    each_device(|target| {
        for config in configs() {
            for order in ORDERS {
                let net = prepared(&config, order, &target.device);
                let expected = values(net.fc1.weight.val());
                assert_pruned_are_zero(&expected);
                let (converted, mut report) = ConvertConfig::new().convert(net.clone()).unwrap();
                let base = converted.fc1.weight.base();
                assert_matches!(base.dtype(), DType::QFloat(_));
                assert_eq!(values(base.dequantize()), expected, "{order:?}");
                assert_eq!(values(converted.fc1.weight.val()), expected, "{order:?}");
                assert_eq!(
                    values(converted.fc2.weight.val()),
                    values(net.fc2.weight.val())
                );
                // A mask before the quantizer is part of the codes now; one behind it stays.
                let mask = find::<Mask, 2>(&converted.fc1.weight);
                assert_eq!(mask.is_some(), order == Order::QuantizerFirst);
                assert!(WeightQuantizer::of(&converted.fc1.weight).is_some());

                let x = samples(&target.device);
                compare(&mut report, &net, &converted, x, |net, x| {
                    net.forward(x.clone())
                })
                .unwrap();
                assert_eq!(report.output_difference, Some(0.0), "{report}");
                assert_eq!(report.largest_mismatch(), Some(0), "{report}");
            }
        }
    });
}

#[test]
fn the_range_of_a_masked_weight_is_that_of_what_is_kept() {
    let weight = WeightConfig::int(8).with_granularity(WeightGranularity::PerTensor);
    let config = QatConfig::new().with_weight(weight);
    let net = prepared(&config, Order::MaskFirst, &Device::flex());
    let largest = values(net.fc1.weight.base())
        .iter()
        .zip(kept())
        .filter(|(_, kept)| *kept)
        .fold(0.0_f32, |largest, (value, _)| largest.max(value.abs()));
    let weights = quantized_weights(&net).unwrap();
    assert_eq!(weights[0].0, "fc1.weight");
    assert_eq!(weights[0].1.scale(), [largest / 127.0]);
}

#[test]
fn a_mask_costs_nothing_once_it_is_converted() {
    let config = QatConfig::new();
    let device = Device::flex();
    let plain = config.prepare(Net::new(&device)).unwrap();
    let bytes = |net: Net| {
        let x = samples(&device.clone().autodiff());
        let net = net.train();
        x.into_iter().for_each(|x| drop(net.forward(x)));
        ConvertConfig::new().convert(net).unwrap().1.bytes()
    };
    let masked = prepared(&config, Order::MaskFirst, &device);
    assert_eq!(bytes(masked), bytes(plain));
}

#[test]
fn a_weight_that_stays_fake_quantized_keeps_its_mask() {
    let weight = WeightConfig::new().with_mapping(Mapping::Affine);
    let config = QatConfig::new().with_weight(weight);
    let net = prepared(&config, Order::MaskFirst, &Device::flex());
    let expected = values(net.fc1.weight.val());
    // Zero is on every grid, with a zero point too.
    assert_pruned_are_zero(&expected);
    let keep = ConvertConfig::new().with_unsupported(Unsupported::KeepFakeQuantized);
    let (kept, report) = keep.convert(net.clone()).unwrap();
    assert_matches!(report.weights[0].outcome, Outcome::KeptFakeQuantized { .. });
    assert!(find::<Mask, 2>(&kept.fc1.weight).is_some());
    assert_eq!(values(kept.fc1.weight.val()), expected);
    // A file can hold it: its codes have a zero point.
    let weights = quantized_weights(&net).unwrap();
    let values = values(weights[0].1.dequantize::<2>(&Device::flex()).unwrap());
    assert_eq!(values, expected);
}

#[test]
fn a_record_of_a_converted_model_loads_into_a_chain_without_masks() {
    each_device(|target| {
        let config = QatConfig::new().with_weight(WeightConfig::int(4));
        let net = prepared(&config, Order::MaskFirst, &target.device);
        let x = samples(&target.device).remove(0);
        let (converted, _) = ConvertConfig::new().convert(net).unwrap();
        let expected = values(converted.forward(x.clone()));
        let bytes = converted.into_record().into_bytes().unwrap();
        let record = ModuleRecord::from_bytes(bytes).unwrap();
        let fresh = Net::new(&target.device);
        let fresh = chained(fresh, &no_masks(), &config, Order::MaskFirst);
        let loaded = fresh.load_record(record);
        assert_eq!(values(loaded.forward(x)), expected);
    });
}

#[test]
fn a_file_of_a_masked_model_loads_with_and_without_masks() {
    let (_folder, path) = scratch("net.safetensors");
    each_device(|target| {
        for order in ORDERS {
            let config = QatConfig::new().with_weight(WeightConfig::int(4));
            let net = prepared(&config, order, &target.device);
            let x = samples(&target.device).remove(0);
            let expected = values(net.forward(x.clone()));
            let (converted, _) = ConvertConfig::new().convert(net.clone()).unwrap();
            for model in [&net, &converted] {
                save_safetensors(model, &path).unwrap();
                let same = chained(Net::new(&target.device), &masks(), &config, order);
                let mut models = vec![same];
                if order == Order::MaskFirst {
                    // The mask is part of the codes: it need not be there.
                    let net = || Net::new(&target.device);
                    models.push(chained(net(), &no_masks(), &config, order));
                    models.push(config.prepare(net()).unwrap());
                }
                for model in models {
                    let loaded = load_safetensors(model, &path).unwrap();
                    let base = loaded.fc1.weight.base();
                    assert_matches!(base.dtype(), DType::QFloat(_));
                    assert_pruned_are_zero(&values(base.dequantize()));
                    assert_eq!(values(loaded.forward(x.clone())), expected, "{order:?}");
                }
            }
        }
    });
}

/// Mask, quantizer and cast on one weight: three crates, of which none knows the others.
#[test]
fn a_masked_weight_under_autocast_is_converted_and_loaded() {
    let (_folder, path) = scratch("net.safetensors");
    on_each(|device| {
        let quant = QatConfig::new().with_activation(None);
        let prepare = |masks: &Masks| {
            let net = Net::new(device);
            let both = ChainReparameterizer::new(
                masks.reparameterizer(&net).unwrap(),
                quant.reparameterizer(&net).unwrap(),
            );
            let config = AutocastConfig::new(FloatDType::F16).with_fallback(Fallback::Emulate);
            config.prepare_with(net, both).unwrap()
        };
        let (net, autocast) = prepare(&masks());
        let inside = |net: &Net| {
            let x = samples(device).remove(0);
            values(autocast.forward(x, |x| net.forward(x)))
        };
        let expected = [values(net.fc1.weight.val()), inside(&net)];
        assert_pruned_are_zero(&expected[0]);
        let (converted, _) = ConvertConfig::new().convert(net).unwrap();
        assert!(find::<Mask, 2>(&converted.fc1.weight).is_none());
        assert!(find::<MasterWeight, 2>(&converted.fc1.weight).is_some());
        assert_eq!(
            [values(converted.fc1.weight.val()), inside(&converted)],
            expected
        );
        save_safetensors(&converted, &path).unwrap();
        for masks in [masks(), no_masks()] {
            let (fresh, _) = prepare(&masks);
            let loaded = load_safetensors(fresh, &path).unwrap();
            assert_eq!([values(loaded.fc1.weight.val()), inside(&loaded)], expected);
        }
    });
}

#[test]
fn a_file_of_a_masked_model_loads_into_a_plain_one() {
    let (_folder, path) = scratch("net.safetensors");
    let config = QatConfig::new().with_activation(None);
    let net = prepared(&config, Order::MaskFirst, &Device::flex());
    save_safetensors(&net, &path).unwrap();
    let plain = load_safetensors(Net::new(&Device::flex()), &path).unwrap();
    let expected = values(net.fc1.weight.val());
    assert_eq!(values(plain.fc1.weight.base().dequantize()), expected);
}

#[test]
fn pruned_weights_stay_zero_under_any_rounding() {
    let device = Device::flex();
    let weight = WeightConfig::int(3);
    let config = QatConfig::new().with_weight(weight).with_activation(None);
    let roundings = [
        Rounding::Gptq(GptqConfig::new()),
        Rounding::AdaRound(AdaRoundConfig::new().with_iterations(200)),
    ];
    for rounding in roundings {
        let masked = prepared(&config, Order::MaskFirst, &device);
        // Pruned and then quantized: the zeros are all that tells.
        let materialized = masks().attach(Net::new(&device)).unwrap().materialize();
        let folded = config.prepare(materialized).unwrap();
        for net in [masked, folded] {
            let run = |net: &Net| {
                samples(&device)
                    .into_iter()
                    .for_each(|x| drop(net.forward(x)))
            };
            let inputs = LayerInputs::collect(&net, run).unwrap();
            let rounding = RoundingConfig::new().with_rounding(rounding.clone());
            let (rounded, report) = rounding.apply(net, &inputs).unwrap();
            assert!(report.weights[0].changed > 0.0);
            assert!(report.weights[0].error < report.weights[0].nearest_error);
            let expected = values(rounded.fc1.weight.val());
            assert_pruned_are_zero(&expected);
            // The stored weight lies on its grid.
            assert_eq!(values(rounded.fc1.weight.base()), expected);
            let (converted, _) = ConvertConfig::new().convert(rounded).unwrap();
            assert_eq!(values(converted.fc1.weight.val()), expected);
        }
    }
}

#[test]
fn an_adapter_before_the_quantizer_is_folded_into_the_codes() {
    each_device(|target| {
        let config = QatConfig::new().with_activation(None);
        let net = Net::new(&target.device);
        let quantizers = config.reparameterizer(&net).unwrap();
        let both = ChainReparameterizer::new(Lora::new(2, 1.0), quantizers);
        // An adapter starts at zero.
        let net = with_stored(attach(net, both).unwrap(), ".b", 7, &target.device);
        let expected = values(net.fc1.weight.val());
        let before = values(net.fc1.weight.base());
        assert_ne!(expected, before);
        let (converted, _) = ConvertConfig::new().convert(net).unwrap();
        assert!(find::<LoraAdapter, 2>(&converted.fc1.weight).is_none());
        assert_eq!(values(converted.fc1.weight.val()), expected);
    });
}

#[test]
fn an_adapter_behind_the_quantizer_stays() {
    let config = QatConfig::new().with_activation(None);
    let device = Device::flex();
    let net = Net::new(&device);
    let quantizers = config.reparameterizer(&net).unwrap();
    let both = ChainReparameterizer::new(quantizers, Lora::new(2, 1.0));
    let net = with_stored(attach(net, both).unwrap(), ".b", 7, &device);
    let expected = values(net.fc1.weight.val());
    let (converted, _) = ConvertConfig::new().convert(net).unwrap();
    let chain = converted
        .fc1
        .weight
        .reparameterization::<Chain<WeightQuantizer, LoraAdapter>>()
        .unwrap();
    assert!(chain.second.is_some());
    assert_eq!(values(converted.fc1.weight.val()), expected);
}

/// QLoRA: codes at rest, and an adapter that trains over them.
#[test]
fn an_adapter_trains_over_codes_that_stay() {
    on_each(|device| {
        let config = QatConfig::new()
            .with_activation(None)
            .with_weight(WeightConfig::int(4));
        let net = Net::new(device);
        let quantizers = config.reparameterizer(&net).unwrap();
        let both = ChainReparameterizer::new(quantizers, Lora::new(2, 4.0));
        let convert = ConvertConfig::new().with_dequantize(Dequantize::EveryUse);
        let converted = convert.convert(attach(net, both).unwrap());
        let mut net = converted.unwrap().0.train();
        let base = |net: &Net| net.fc1.weight.base().into_data();
        let before = base(&net);
        assert_matches!(net.fc1.weight.base().dtype(), DType::QFloat(_));
        let device = device.clone().autodiff();
        let x = tensor::<2>(5, [32, INPUTS], &device);
        let target = tensor::<2>(6, [32, OUTPUTS], &device);
        let mut optim = AdamWConfig::new().init();
        let mut losses = Vec::new();
        for _ in 0..40 {
            let loss = (net.forward(x.clone()) - target.clone()).square().mean();
            losses.push(loss.clone().into_scalar::<f32>());
            let grads = GradientsParams::from_grads(loss.backward(), &net);
            net = optim.step(0.02, net, grads);
        }
        assert!(losses[39] < 0.5 * losses[0], "{losses:?}");
        assert_eq!(base(&net), before);
    });
}

#[test]
fn an_audit_sees_through_masks() {
    for order in ORDERS {
        let net = prepared(&QatConfig::new(), order, &Device::flex());
        let (converted, _) = ConvertConfig::new().convert(net.clone()).unwrap();
        for (net, stored) in [(net, false), (converted, true)] {
            let x = Tensor::ones([2, INPUTS], &Device::flex());
            let audit = audit(&net, x, |net, x| net.forward(x)).unwrap();
            assert!(audit.is_covered(), "{order:?} {audit}");
            assert_eq!(audit.layers[0].weight_path, "fc1.weight");
            let is_stored = matches!(audit.layers[0].weight, Coverage::Stored(_));
            assert_eq!(is_stored, stored, "{audit}");
        }
    }
}

#[test]
fn a_masked_model_that_was_converted_is_what_the_user_measures() {
    // The flow of a user: prune, then quantize with the masks held, then convert.
    let device = Device::flex();
    let training = device.clone().autodiff();
    let linear = LinearConfig::new(INPUTS, OUTPUTS).init(&training);
    let kept: Vec<bool> = (0..INPUTS * OUTPUTS).map(|index| index % 4 == 0).collect();
    let mask = ParameterMask::new("weight", [INPUTS, OUTPUTS], kept).unwrap();
    let masks = Masks::new(vec![mask]).unwrap();
    let chain = ChainReparameterizer::new(
        masks.reparameterizer(&linear).unwrap(),
        QatConfig::new().reparameterizer(&linear).unwrap(),
    );
    let linear = attach(linear, chain).unwrap();
    let grads = linear
        .forward_q(tensor::<2>(5, [4, INPUTS], &training))
        .square()
        .sum()
        .backward();
    let gradient = values(linear.weight.base().grad(&grads).unwrap());
    assert!(
        gradient
            .iter()
            .enumerate()
            .all(|(i, g)| i % 4 == 0 || *g == 0.0)
    );
    let expected = values(linear.valid().weight.val());
    let (converted, report) = ConvertConfig::new().convert(linear).unwrap();
    assert_eq!(values(converted.weight.val()), expected);
    assert_says!(report, "weight");
}
