//! Preparing a model, and what a prepared model computes, trains, records and copies.

use burn::module::{Module, ModuleMapper, Param};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::{GradientsParams, ModuleOptimizer, SgdConfig};
use burn::store::ModuleRecord;
use burn::tensor::activation::relu;
use burn::tensor::{Device, FloatDType, Int, Tensor};
use burn_lean::amp::GradScalerConfig;
use burn_lean::quant::{
    ForwardQ, Granularity, NumberFormat, Override, QatConfig, QuantError, QuantParams, Schedule,
    Scheme, Site, WeightConfig, advance, fake_quantize, load_record,
    model::{float_record, load_float_record},
    module::{Phase, map_quantizers},
    quantizers,
};
use burn_lean::reparam::AttachError;

use crate::support::{
    each_device, on_each, on_tracked, parameters, scratch, tensor, values, with_numbers,
};

/// A small convolutional network.
#[derive(Module, Debug)]
pub(crate) struct Net {
    pub(crate) conv: Conv2d,
    pub(crate) norm: BatchNorm,
    pub(crate) fc1: Linear,
    pub(crate) fc2: Linear,
}

impl Net {
    pub(crate) fn new(seed: u64, device: &Device) -> Self {
        let net = Self {
            conv: Conv2dConfig::new([1, 2], [3, 3]).init(device),
            norm: BatchNormConfig::new(2).init(device),
            fc1: LinearConfig::new(8, 6).init(device),
            fc2: LinearConfig::new(6, 3).init(device),
        };
        with_numbers(net, seed)
    }

    /// `[batch, 1, 4, 4]` to `[batch, 3]`
    pub(crate) fn forward(&self, x: Tensor<4>) -> Tensor<2> {
        let x = relu(self.norm.forward(self.conv.forward_q(x)));
        let x = x.flatten::<2>(1, 3);
        self.fc2.forward_q(relu(self.fc1.forward_q(x)))
    }

    fn plain(&self, x: Tensor<4>) -> Tensor<2> {
        let x = relu(self.norm.forward(self.conv.forward(x)));
        let x = x.flatten::<2>(1, 3);
        self.fc2.forward(relu(self.fc1.forward(x)))
    }
}

pub(crate) fn input(seed: u64, device: &Device) -> Tensor<4> {
    tensor(seed, [5, 1, 4, 4], device)
}

/// One step of SGD towards zero.
fn train_step(model: Net, optimizer: &mut ModuleOptimizer, x: Tensor<4>) -> Net {
    let loss = model.forward(x).square().mean();
    let grads = GradientsParams::from_grads(loss.backward(), &model);
    advance(optimizer.step(0.1, model, grads))
}

fn ranges(model: &Net) -> Vec<(String, Option<(f32, f32)>)> {
    let range = |located: burn_lean::quant::module::Located| {
        let range = located.quantizer.range().ok();
        let range = range.map(|range| (values(range.min)[0], values(range.max)[0]));
        (located.path, range)
    };
    quantizers(model).into_iter().map(range).collect()
}

#[test]
fn a_model_that_is_not_prepared_computes_the_same_bits() {
    each_device(|target| {
        let net = Net::new(1, &target.device);
        let x = input(1, &target.device);
        assert_eq!(values(net.forward(x.clone())), values(net.plain(x)));
    });
}

#[test]
fn prepare_quantizes_weights_and_inputs_of_layers_and_nothing_else() {
    let net = QatConfig::new()
        .prepare(Net::new(1, &Device::flex()))
        .unwrap();
    let found: Vec<_> = quantizers(&net)
        .into_iter()
        .map(|located| (located.path.clone(), located.site, located.parameter))
        .collect();
    let expected = |path: &str, site| {
        let parameter = path.split(".quant").next().map(str::to_string);
        (path.to_string(), site, parameter)
    };
    assert_eq!(
        found,
        [
            expected("conv.weight.quant.weight", Site::Weight),
            expected("conv.weight.quant.input", Site::Input),
            expected("fc1.weight.quant.weight", Site::Weight),
            expected("fc1.weight.quant.input", Site::Input),
            expected("fc2.weight.quant.weight", Site::Weight),
            expected("fc2.weight.quant.input", Site::Input),
        ]
    );
    let axes: Vec<_> = quantizers(&net)
        .into_iter()
        .filter(|located| located.site == Site::Weight)
        .map(|located| located.quantizer.scheme().granularity.clone())
        .collect();
    let axis = |axis| Granularity::PerChannel { axis };
    assert_eq!(axes, [axis(0), axis(1), axis(1)]);
}

#[test]
fn the_first_training_step_computes_what_the_formulas_say() {
    each_device(|target| {
        let device = target.device.clone().autodiff();
        let layer = with_numbers(LinearConfig::new(4, 3).init(&device), 3);
        let x = tensor::<2>(5, [7, 4], &target.device);
        let weights = Scheme::symmetric(NumberFormat::int8().narrow())
            .with_granularity(Granularity::PerChannel { axis: 1 });
        let inputs = Scheme::affine(NumberFormat::uint8());
        let w = layer.weight.val().inner();
        let w = fake_quantize(w.clone(), &QuantParams::of(&w, &weights).unwrap(), &weights);
        let xq = fake_quantize(x.clone(), &QuantParams::of(&x, &inputs).unwrap(), &inputs);
        let plain = Linear {
            weight: Param::from_tensor(w),
            bias: layer.bias.clone().map(|bias| bias.valid()),
        };
        let expected = values(plain.forward(xq));

        let layer = QatConfig::new().prepare(layer).unwrap();
        let trained = layer.forward_q(Tensor::from_inner(x.clone()));
        assert_eq!(values(trained), expected);
        assert_eq!(values(layer.valid().forward_q(x)), expected);
    });
}

#[test]
fn switched_off_a_prepared_model_computes_the_bits_of_the_float_model() {
    each_device(|target| {
        let device = target.device.clone().autodiff();
        let net = Net::new(1, &device);
        let x = input(1, &target.device);
        let expected = values(net.valid().plain(x.clone()));
        let net = QatConfig::new().prepare(net).unwrap();
        let off = map_quantizers(net, |located| located.quantizer.with_enabled(false));
        assert_eq!(values(off.valid().forward(x)), expected);
    });
}

#[test]
fn training_moves_the_weights_and_observes_without_touching_copies() {
    each_device(|target| {
        let device = target.device.clone().autodiff();
        let net = QatConfig::new().prepare(Net::new(1, &device)).unwrap();
        let before = net.clone();
        let mut optimizer = SgdConfig::new().init();
        let first = train_step(net, &mut optimizer, input(1, &device));
        assert!(ranges(&before).iter().all(|(_, range)| range.is_none()));

        let copy = first.clone();
        let valid = first.valid();
        let fork = first.clone().fork(&device);
        let seen = ranges(&first);
        let second = train_step(first, &mut optimizer, input(2, &device));
        for other in [&copy, &valid, &fork] {
            assert_eq!(ranges(other), seen, "a copy's ranges moved");
        }
        assert_ne!(ranges(&second), seen);
        let weights = |net: &Net| values(net.conv.weight.base());
        assert_ne!(weights(&second), weights(&copy));

        // And the copies observe for themselves.
        copy.forward(input(3, &device));
        assert_ne!(ranges(&copy), seen);
        assert_eq!(ranges(&valid), seen);
        // In validation nothing is observed.
        valid.forward(input(3, &target.device));
        valid.forward(input(3, &device));
        assert_eq!(ranges(&valid), seen);
    });
}

#[test]
fn a_record_brings_back_ranges_step_and_schedule() {
    each_device(|target| {
        let device = target.device.clone().autodiff();
        let schedule = Schedule::new()
            .with_quantize_from(1)
            .with_freeze_observers_at(Some(2))
            .with_freeze_batch_norm_at(Some(3));
        let config = QatConfig::new().with_schedule(schedule);
        let mut net = config.prepare(Net::new(1, &device)).unwrap();
        let mut optimizer = SgdConfig::new().init();
        for seed in 0..3 {
            net = train_step(net, &mut optimizer, input(seed, &device));
        }
        // Takes in the last update of the BatchNorm statistics, which Burn's record leaves out.
        let _ = net.valid();
        let bytes = net.clone().into_record().into_bytes().unwrap();

        // Another schedule and other ranges, which the record replaces.
        let other = QatConfig::new().prepare(Net::new(2, &device)).unwrap();
        other.forward(input(9, &device));
        let loaded = load_record(other, ModuleRecord::from_bytes(bytes).unwrap()).unwrap();
        assert_eq!(ranges(&loaded), ranges(&net));
        for located in quantizers(&loaded) {
            assert_eq!(located.quantizer.step(), 3);
            assert_eq!(located.quantizer.schedule(), schedule);
            assert_eq!(located.quantizer.phase(), Phase::Quantize);
        }
        assert!(!loaded.norm.training.is_enabled());
        assert_eq!(parameters(&loaded.valid()), parameters(&net.valid()));
        let x = input(4, &target.device);
        assert_eq!(
            values(loaded.valid().forward(x.clone())),
            values(net.valid().forward(x))
        );
    });
}

#[test]
fn a_schedule_observes_then_quantizes_then_freezes() {
    on_tracked(|device| {
        let schedule = Schedule::new()
            .with_quantize_from(2)
            .with_freeze_observers_at(Some(4))
            .with_freeze_batch_norm_at(Some(3));
        let config = QatConfig::new().with_schedule(schedule);
        let mut net = config.prepare(Net::new(1, &device)).unwrap();
        for step in 0..6 {
            let x = input(step, &device);
            let before = ranges(&net);
            let quantized = values(net.forward(x.clone()));
            let plain = map_quantizers(net.clone(), |at| at.quantizer.with_enabled(false));
            // The batch statistics of a training step do not depend on the running ones.
            let plain = values(plain.forward(x));
            assert_eq!(quantized == plain, step < 2, "step {step}");
            assert_eq!(ranges(&net) == before, step >= 4, "step {step}");
            assert_eq!(net.norm.training.is_enabled(), step < 3, "step {step}");
            net = advance(net);
        }
    });
}

#[test]
fn after_a_rollback_the_first_advance_counts_a_step() {
    let device = Device::flex().autodiff();
    let step = |net: &Net| quantizers(net)[0].quantizer.step();
    let net = QatConfig::new().prepare(Net::new(1, &device)).unwrap();
    let record = net.clone().into_record().into_bytes().unwrap();
    let mut scaler = GradScalerConfig::for_dtype(FloatDType::F32).init().unwrap();
    let loss = net.forward(input(0, &device)).square().mean();
    let grads = GradientsParams::from_grads(scaler.scale(loss).unwrap().backward(), &net);
    let optim = &mut SgdConfig::new().init();
    let net = scaler.step(optim, 0.1, net, grads).unwrap();
    assert_eq!(step(&net), 1);

    let net = load_record(net, ModuleRecord::from_bytes(record).unwrap()).unwrap();
    assert_eq!(step(&net), 0);
    assert_eq!(step(&advance(net)), 1);
}

#[test]
fn float_records_go_into_prepared_models_and_out_of_them() {
    on_each(|device| {
        let float = Net::new(1, device);
        let record = float.clone().into_record();
        let prepared = QatConfig::new().prepare(Net::new(2, device)).unwrap();
        // Burn alone misses the state of the quantizers.
        assert!(prepared.clone().try_load_record(record.clone()).is_err());
        let prepared = load_float_record(prepared, record).unwrap();
        assert_eq!(quantizers(&prepared).len(), 6);

        let back = Net::new(3, device).load_record(float_record(&prepared));
        assert_eq!(parameters(&back), parameters(&float));
    });
}

#[test]
fn a_float_record_of_another_model_is_refused() {
    let device = Device::flex();
    let prepared = QatConfig::new().prepare(Net::new(2, &device)).unwrap();
    let other = LinearConfig::new(2, 2).init(&device).into_record();
    let rejected = load_float_record(prepared, other).unwrap_err();
    assert_matches!(rejected.error(), QuantError::Record { .. });
    assert_eq!(quantizers(rejected.value()).len(), 6);
}

#[test]
fn a_second_prepare_is_an_error_that_names_the_weight() {
    let config = QatConfig::new();
    let net = config.prepare(Net::new(1, &Device::flex())).unwrap();
    let rejected = config.prepare(net).unwrap_err();
    let expected = AttachError::AlreadyAttached {
        path: "conv.weight".into(),
        existing: "quant".into(),
    };
    assert_eq!(*rejected.error(), QuantError::Attach(expected));
    assert_eq!(quantizers(rejected.value()).len(), 6);
}

#[test]
fn overrides_change_what_their_pattern_matches_and_the_last_decides() {
    let config = QatConfig::new().with_overrides(vec![
        Override::new("conv".into()).with_skip(Some(true)),
        Override::new("fc*".into()).with_weight_bits(Some(4)),
        Override::new("fc2".into())
            .with_weight_bits(Some(2))
            .with_skip_activation(Some(true)),
        // What it does not mention stays as the others say.
        Override::new("**".into()).with_outputs(Some(false)),
    ]);
    let net = config.prepare(Net::new(1, &Device::flex())).unwrap();
    let found: Vec<_> = quantizers(&net)
        .iter()
        .map(|located| format!("{}: {}", located.name(), located.quantizer.scheme().format))
        .collect();
    assert_eq!(
        found,
        [
            "fc1.weight: INT4 narrow",
            "input of `fc1`: UINT8",
            "fc2.weight: INT2 narrow",
        ]
    );
}

#[test]
fn a_later_override_takes_back_what_an_earlier_one_left_out() {
    let config = QatConfig::new().with_overrides(vec![
        Override::new("**".into()).with_skip(Some(true)),
        Override::new("fc*".into()).with_skip(Some(false)),
        Override::new("fc1".into()).with_skip_weight(Some(true)),
        Override::new("fc2".into()).with_skip_activation(Some(true)),
    ]);
    let net = config.prepare(Net::new(1, &Device::flex())).unwrap();
    let found = quantizers(&net).into_iter();
    let found = found.filter(|located| located.quantizer.is_enabled());
    let found: Vec<_> = found.map(|located| located.name()).collect();
    assert_eq!(found, ["input of `fc1`", "fc2.weight"]);
}

#[test]
fn choices_about_activations_where_none_is_quantized_are_refused() {
    let refused = |config: QatConfig| {
        let rejected = config.prepare(Net::new(1, &Device::flex())).unwrap_err();
        match rejected.into_error() {
            QuantError::InvalidConfig { field, .. } => field,
            other => panic!("{other}"),
        }
    };
    let weights = || QatConfig::new().with_activation(None);
    let fc1 = || Override::new("fc1".into());
    let bits = vec![fc1().with_activation_bits(Some(4))];
    assert_eq!(refused(weights().with_outputs(true)), "activation");
    assert_eq!(
        refused(weights().with_overrides(bits.clone())),
        "activation"
    );
    // Another layer's activations do not make fc1's wish come true.
    let of_fc2 = Override::new("fc2".into()).with_activation(QatConfig::new().activation);
    let with_fc2 = [bits, vec![of_fc2]].concat();
    assert_eq!(refused(weights().with_overrides(with_fc2)), "activation");
    // Sums are shown by a forward pass alone.
    assert_eq!(refused(QatConfig::new().with_sums(true)), "sums");
    let both = fc1()
        .with_skip_activation(Some(true))
        .with_outputs(Some(true));
    assert_eq!(
        refused(QatConfig::new().with_overrides(vec![both])),
        "skip_activation"
    );
}

#[test]
fn patterns_and_groups_that_match_nothing_are_errors() {
    use burn::module::ParamGroup;
    let net = || Net::new(1, &Device::flex());
    let unknown = Override::new("fc3".into());
    let config = QatConfig::new().with_overrides(vec![unknown]);
    let error = config.prepare(net()).unwrap_err().into_error();
    assert!(matches!(&error, QuantError::UnknownPath { pattern, .. } if pattern == "fc3"));
    assert_says!(error, "fc1.weight");

    let group = ParamGroup::from_predicate("decoder");
    let config = QatConfig::new().with_group(Some(group));
    let error = config.prepare(net()).unwrap_err().into_error();
    assert_matches!(error, QuantError::NothingInGroup { .. });

    let all = Override::new("**".into()).with_skip(Some(true));
    let config = QatConfig::new().with_overrides(vec![all]);
    let error = config.prepare(net()).unwrap_err().into_error();
    assert_eq!(error, QuantError::NothingToQuantize);

    // No group was given that could match nothing.
    let norm = burn::nn::BatchNormConfig::new(3).init(&Device::flex());
    let error = QatConfig::new().prepare(norm).unwrap_err().into_error();
    assert_eq!(error, QuantError::NothingToQuantize);
}

#[test]
fn a_config_survives_json() {
    use burn::config::Config;
    let config = QatConfig::new()
        .with_weight(WeightConfig::int(4))
        .with_overrides(vec![Override::new("fc1".into()).with_skip(Some(true))])
        .with_schedule(Schedule::new().with_quantize_from(7));
    let (_folder, path) = scratch("qat.json");
    config.save(&path).unwrap();
    let loaded = QatConfig::load(&path).unwrap();
    assert_eq!(loaded.to_string(), config.to_string());
    assert_eq!(loaded.weight, config.weight);
    assert_eq!(loaded.schedule.quantize_from, 7);
    assert!(config.to_string().contains("narrow_range"));
}

#[test]
fn a_mapper_that_leaves_integers_alone_reads_nothing_back() {
    /// Looks at every integer parameter, as something that reads would.
    #[derive(Default)]
    struct Uninitialized(Vec<bool>);
    impl ModuleMapper for Uninitialized {
        fn map_int<const D: usize>(
            &mut self,
            param: Param<Tensor<D, Int>>,
        ) -> Param<Tensor<D, Int>> {
            self.0.push(param.is_initialized());
            param
        }
    }
    let net = QatConfig::new()
        .prepare(Net::new(1, &Device::flex()))
        .unwrap();
    let mut mapper = Uninitialized::default();
    let net = net.map(&mut mapper).map(&mut mapper);
    assert_eq!(mapper.0, [false; 12]);
    drop(net);
}
