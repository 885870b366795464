//! Activations that no value came by: told before the training, refused or left float at the end,
//! and recovered without training again.

use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig, SwiGlu, SwiGluConfig};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::activation::softmax;
use burn::tensor::{Device, FloatDType, Tensor};
use burn_lean::amp::GradScalerConfig;
use burn_lean::quant::{
    ConvertConfig, FakeQuantizeConfig, ForwardQ, GptqConfig, Learned, NumberFormat, ObserverConfig,
    Override, PtqConfig, PtqMode, QatConfig, QuantError, QuantizedForward, Rounding,
    RoundingConfig, Scheme, Site, WeightConfig, advance, audit, calibrate, model::Unobserved,
    qat::calibrate_unobserved, quantizers, rounding::AdaRoundConfig,
};

use crate::support::{farthest, tensor, values, warnings, with_numbers};

/// The second layer is called past its quantizer, the third not at all.
#[derive(Module, Debug)]
struct Net {
    first: Linear,
    second: Linear,
    third: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        let layer = || LinearConfig::new(6, 6).init(device);
        let net = Self {
            first: layer(),
            second: layer(),
            third: layer(),
        };
        with_numbers(net, 2)
    }

    /// With the plain `forward` of the second layer.
    fn past(&self, x: Tensor<2>) -> Tensor<2> {
        self.second.forward(self.first.forward_q(x))
    }

    /// Past all quantizers.
    fn plain(&self, x: Tensor<2>) -> Tensor<2> {
        let x = self.second.forward(self.first.forward(x));
        self.third.forward(x)
    }

    fn all(&self, x: Tensor<2>) -> Tensor<2> {
        let x = self.second.forward_q(self.first.forward_q(x));
        self.third.forward_q(x)
    }
}

fn batch(device: &Device) -> Tensor<2> {
    tensor::<2>(4, [8, 6], device)
}

fn dynamic() -> QatConfig {
    let scheme = Scheme::affine(NumberFormat::uint8());
    let activation = FakeQuantizeConfig::new(scheme).with_observer(ObserverConfig::Memoryless);
    QatConfig::new().with_activation(Some(activation))
}

/// The layers that an error names, and whether all say that no value came by.
fn named(error: &QuantError) -> Vec<String> {
    match error {
        QuantError::Several { errors } => errors.iter().flat_map(named).collect(),
        QuantError::Parameter { path, error } => {
            let known = matches!(
                **error,
                QuantError::NeverObserved
                    | QuantError::NeverCalled
                    | QuantError::ConstantRange { .. }
            );
            assert!(known, "{error}");
            vec![path.clone()]
        }
        other => panic!("{other}"),
    }
}

fn enabled(net: &Net) -> Vec<bool> {
    [&net.first, &net.second, &net.third]
        .map(|layer| {
            let quantizers = burn_lean::quant::WeightQuantizer::of(&layer.weight).unwrap();
            quantizers.input.as_ref().unwrap().is_enabled()
        })
        .to_vec()
}

#[test]
fn steps_of_a_grad_scaler_say_once_which_layers_are_called_past_their_quantizers() {
    type Forward = fn(&Net, Tensor<2>) -> Tensor<2>;
    let device = Device::flex().autodiff();
    let activations = Override::new("**".into()).with_skip_weight(Some(true));
    let activations = QatConfig::new().with_overrides(vec![activations]);
    let cases: [(QatConfig, Forward, &[&str], u64); 3] = [
        (QatConfig::new(), Net::all, &[], 3),
        (QatConfig::new(), Net::past, &["second", "third"], 3),
        // Nothing acts that would count a step but `advance`.
        (activations, Net::plain, &["first", "second", "third"], 1),
    ];
    for (config, forward, passed_by, steps) in cases {
        let mut net = config.prepare(Net::new(&device)).unwrap();
        let mut scaler = GradScalerConfig::for_dtype(FloatDType::F32).init().unwrap();
        let mut optim = SgdConfig::new().init();
        let (net, said) = warnings("burn_lean_graph::hooks", || {
            for _ in 0..3 {
                let loss = forward(&net, batch(&device)).square().mean();
                let loss = scaler.scale(loss).unwrap();
                let grads = GradientsParams::from_grads(loss.backward(), &net);
                net = scaler.step(&mut optim, 0.01, net, grads).unwrap();
            }
            advance(net)
        });
        let all = quantizers(&net);
        assert!(all.iter().all(|one| one.quantizer.step() == steps));
        assert_eq!(said.len(), usize::from(!passed_by.is_empty()), "{said:?}");
        for layer in ["first", "second", "third"] {
            let name = format!("`{layer}.weight.");
            let is_named = said.iter().any(|one| one.contains(&name));
            assert_eq!(is_named, passed_by.contains(&layer), "{layer}: {said:?}");
        }
    }
}

#[test]
fn preparing_with_the_forward_pass_names_every_layer_that_is_called_past_its_quantizer() {
    let device = Device::flex();
    for config in [QatConfig::new(), dynamic()] {
        let run = |net: &Net, device: &Device| net.past(Tensor::ones([1, 6], device));
        let rejected = config.prepare_with(Net::new(&device), run).unwrap_err();
        assert_eq!(
            named(rejected.error()),
            ["input of `second`", "input of `third`"]
        );
        // The model comes back as it was.
        assert!(quantizers(rejected.value()).is_empty());
        let run = |net: &Net, device: &Device| net.all(Tensor::ones([1, 6], device));
        let net = config.prepare_with(Net::new(&device), run).unwrap();
        assert_eq!(quantizers(&net).len(), 6);
    }
}

#[test]
fn a_dynamic_model_that_calls_a_layer_past_its_quantizer_is_refused_or_reported() {
    let device = Device::flex();
    let config = PtqConfig::new()
        .with_mode(PtqMode::Dynamic)
        .with_progress(false);
    let run = |net: &Net, x: Tensor<2>| drop(net.past(x));
    let data = || [batch(&device)];
    let rejected = config.quantize(Net::new(&device), data, run).unwrap_err();
    assert_eq!(
        named(rejected.error()),
        ["input of `second`", "input of `third`"]
    );
    let said = rejected.error().to_string();
    assert_says!(said, ": input of `second`: ");
    assert!(!said.contains("parameter `input"), "{said}");
    let lenient = config.clone().with_unobserved(Unobserved::LeaveFloat);
    let (net, report) = lenient.quantize(Net::new(&device), data, run).unwrap();
    let left: Vec<&str> = report
        .left_float
        .iter()
        .map(|left| left.name.as_str())
        .collect();
    assert_eq!(left, ["input of `second`", "input of `third`"]);
    assert_eq!(enabled(&net), [true, false, false]);
    assert!(report.to_string().contains("input of `third` stays float"));
    ConvertConfig::new().convert(net).unwrap();

    // Without data the conversion is the first to know.
    let none = || Vec::<Tensor<2>>::new();
    let (net, _) = config.quantize(Net::new(&device), none, run).unwrap();
    let rejected = ConvertConfig::new().convert(net).unwrap_err();
    assert_eq!(named(rejected.error()).len(), 3);
    let net = rejected.into_value();
    // One look at the forward pass is enough.
    let converter = ConvertConfig::new().with_unobserved(Unobserved::LeaveFloat);
    let past = |net: &Net, device: &Device| net.past(Tensor::ones([1, 6], device));
    let (converted, report) = converter.convert_with(net.clone(), past).unwrap();
    assert_eq!(report.left_float.len(), 2);
    assert_eq!(enabled(&converted), [true, false, false]);
    let rejected = ConvertConfig::new()
        .convert_with(net.clone(), past)
        .unwrap_err();
    assert_eq!(named(rejected.error()).len(), 2);
    // So is one call.
    net.all(batch(&device));
    let (converted, report) = ConvertConfig::new().convert(net).unwrap();
    assert_eq!(report.left_float, []);
    assert_eq!(enabled(&converted), [true; 3]);
}

/// A plain `forward` shows no inputs, which only a rounding that is asked for needs.
#[test]
fn weights_alone_of_layers_called_past_their_quantizers_are_rounded_to_nearest_or_refused() {
    let device = Device::flex();
    let quantize = QatConfig::new().with_weight(WeightConfig::int(4));
    let config = PtqConfig::new()
        .with_mode(PtqMode::WeightOnly)
        .with_quantize(quantize)
        .with_progress(false);
    let run = |net: &Net, x: Tensor<2>| drop(net.plain(x));
    let data = || [batch(&device)];
    let none = Vec::<Tensor<2>>::new;
    let (net, report) = config.quantize(Net::new(&device), data, run).unwrap();
    assert_eq!((report.batches, report.rounding.weights.len()), (1, 0));
    let nearest = report.rounding.nearest.iter();
    let nearest: Vec<&str> = nearest.map(|(path, _)| path.as_str()).collect();
    assert_eq!(nearest, ["first.weight", "second.weight", "third.weight"]);
    assert_says!(report, "rounded to nearest", "forward_q", "quantize_for");
    // As without data.
    let (same, _) = config.quantize(Net::new(&device), none, run).unwrap();
    let weights =
        |net: &Net| [&net.first, &net.second, &net.third].map(|layer| values(layer.weight.val()));
    assert_eq!(weights(&net), weights(&same));
    assert_ne!(weights(&net), weights(&Net::new(&device)));

    for rounding in [
        Rounding::Gptq(GptqConfig::new()),
        Rounding::AdaRound(AdaRoundConfig::new()),
    ] {
        let rounding = RoundingConfig::new().with_rounding(rounding);
        let config = config.clone().with_rounding(rounding);
        let rejected = config.quantize(Net::new(&device), data, run).unwrap_err();
        assert_matches!(rejected.error(), QuantError::NoLayerInputs);
        let remedies = ["forward_q", "QuantizedForward::run", "quantize_for"];
        for remedy in remedies {
            assert_says!(rejected, remedy);
        }
        assert!(quantizers(rejected.value()).is_empty());
        let rejected = config.quantize(Net::new(&device), none, run).unwrap_err();
        assert_matches!(rejected.error(), QuantError::NoData { .. });
    }
}

#[test]
fn an_observed_layer_that_the_deployed_forward_pass_calls_past_its_quantizer_is_found() {
    let device = Device::flex();
    let net = QatConfig::new().prepare(Net::new(&device)).unwrap();
    let net = calibrate(net, |net| drop(net.all(batch(&device)))).unwrap();
    ConvertConfig::new().convert(net.clone()).unwrap();
    let past = |net: &Net, device: &Device| net.past(Tensor::ones([1, 6], device));
    let rejected = ConvertConfig::new().convert_with(net, past).unwrap_err();
    assert_eq!(
        named(rejected.error()),
        ["input of `second`", "input of `third`"]
    );
}

#[test]
fn static_ptq_leaves_float_what_has_no_range_and_says_so() {
    let device = Device::flex();
    let config = PtqConfig::new().with_progress(false);
    // Called, but with zeros alone: a dead layer. The third is not called.
    let run = |net: &Net, x: Tensor<2>| {
        net.first.forward_q(x.clone());
        net.second.forward_q(x * 0.0);
    };
    let data = || [batch(&device)];
    let rejected = config.quantize(Net::new(&device), data, run).unwrap_err();
    assert_eq!(named(rejected.error()).len(), 2);
    let config = config.with_unobserved(Unobserved::LeaveFloat);
    let (net, report) = config.quantize(Net::new(&device), data, run).unwrap();
    let left: Vec<_> = report
        .left_float
        .iter()
        .map(|left| (left.name.as_str(), left.reason.as_str()))
        .collect();
    assert_eq!(left.len(), 2, "{left:?}");
    assert_eq!(
        (left[0].0, left[1].0),
        ("input of `second`", "input of `third`")
    );
    assert!(left[0].1.contains("all values observed are 0"), "{left:?}");
    assert!(left[1].1.contains("no data was observed"), "{left:?}");
    assert_eq!(enabled(&net), [true, false, false]);
    let (converted, _) = ConvertConfig::new().convert(net).unwrap();
    // Its weight is quantized all the same.
    let x = batch(&device);
    let expected = values(converted.third.forward(x.clone()));
    assert_eq!(values(converted.third.forward_q(x)), expected);
    // A value that is no number is an error whatever is to be left float.
    let run = |net: &Net, x: Tensor<2>| drop(net.all(x / 0.0));
    let rejected = config.quantize(Net::new(&device), data, run).unwrap_err();
    assert_says!(rejected, "infinite or not a number");
}

#[test]
fn what_was_never_observed_in_training_is_left_float_or_recovered_without_training() {
    let device = Device::flex().autodiff();
    let scheme = Scheme::affine(NumberFormat::uint8());
    for learned in [Learned::None, Learned::Lsq] {
        let activation = FakeQuantizeConfig::new(scheme.clone()).with_learned(learned);
        let config = QatConfig::new().with_activation(Some(activation));
        let net = config.prepare(Net::new(&device)).unwrap();
        net.past(batch(&device));
        let rejected = ConvertConfig::new().convert(net).unwrap_err();
        assert_eq!(
            named(rejected.error()),
            ["input of `second`", "input of `third`"]
        );
        let net = rejected.into_value();
        let lenient = ConvertConfig::new().with_unobserved(Unobserved::LeaveFloat);
        let (_, report) = lenient.convert(net.clone()).unwrap();
        assert_eq!(report.left_float.len(), 2);
        assert!(report.to_string().contains("input of `second` stays float"));

        let input = |net: &Net| {
            let quantizers = burn_lean::quant::WeightQuantizer::of(&net.first.weight).unwrap();
            let qparams = quantizers.input.as_ref().unwrap().qparams().unwrap();
            [values(qparams.scale), values(qparams.zero_point)]
        };
        let before = input(&net);
        // Other data than it was trained on, which must not move what it has.
        let wide = batch(&Device::flex()) * 5.0;
        let net = calibrate_unobserved(net, |net| drop(net.all(wide))).unwrap();
        assert_eq!(input(&net), before);
        let (_, report) = ConvertConfig::new().convert(net).unwrap();
        assert_eq!(report.left_float, []);
    }
}

#[test]
fn what_takes_the_range_at_hand_quantizes_while_others_get_theirs() {
    let device = Device::flex();
    let net = QatConfig::new().prepare(Net::new(&device)).unwrap();
    let weight = |net: &Net| values(net.third.weight.val());
    let expected = weight(&net);
    assert_ne!(expected, values(net.third.weight.base()));
    let net = calibrate_unobserved(net, |net| {
        assert_eq!(weight(net), expected);
        net.all(batch(&device));
    })
    .unwrap();
    assert_eq!(weight(&net), expected);
    let all = quantizers(&net);
    assert!(all.iter().all(|located| located.quantizer.is_observed()));
    // Learned scales that have no first value yet get it.
    let weight = WeightConfig::int(4).with_learned(Learned::Lsq);
    let config = QatConfig::new().with_weight(weight);
    let net = config.prepare(Net::new(&device)).unwrap();
    let net = calibrate_unobserved(net, |net| drop(net.all(batch(&device)))).unwrap();
    let weights = quantizers(&net).into_iter();
    let mut weights = weights.filter(|located| located.site == Site::Weight);
    assert!(weights.all(|located| located.quantizer.is_learning()));
}

#[test]
fn a_gated_unit_quantizes_the_inputs_of_both_of_its_layers() {
    #[derive(Module, Debug)]
    struct Gated {
        unit: SwiGlu,
    }
    #[burn_lean::quant::quantize_calls(crate = burn_lean::quant)]
    impl Gated {
        fn forward(&self, x: Tensor<2>) -> Tensor<2> {
            self.unit.forward(x)
        }
    }
    let device = Device::flex();
    let net = Gated {
        unit: with_numbers(SwiGluConfig::new(6, 4).with_bias(true).init(&device), 1),
    };
    let x = batch(&device);
    let expected = values(net.unit.forward(x.clone()));
    assert_eq!(values(net.forward(x.clone())), expected);
    let run = |net: &Gated, device: &Device| net.forward(Tensor::ones([1, 6], device));
    let net = QatConfig::new().prepare_with(net, run).unwrap();
    let net = calibrate(net, |net| drop(net.forward(x.clone()))).unwrap();
    let audit = audit(&net, x.clone(), |net, x| net.forward(x)).unwrap();
    assert!(audit.is_covered());
    assert_eq!(audit.uncalled, [""; 0]);
    let found = values(net.forward(x));
    assert_ne!(found, expected);
    assert_near!(found.iter(), &expected, 0.05);
}

/// Queries that are learned, as those of a decoder of detections: `q` multiplies parameters alone.
#[derive(Module, Debug)]
struct Queries {
    latents: Param<Tensor<2>>,
    q: Linear,
    k: Linear,
    head: Linear,
}

impl Queries {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let queries = self.q.forward(self.latents.val().unsqueeze::<3>());
        let keys = self.k.forward(x);
        let scores = softmax(keys.clone().matmul(queries.swap_dims(1, 2)), 1);
        self.head.forward(scores.swap_dims(1, 2).matmul(keys))
    }
}

#[test]
fn layers_of_parameters_alone_have_no_range_to_wait_for() {
    let device = Device::flex();
    let layer = |outputs| LinearConfig::new(6, outputs).init(&device);
    let model = Queries {
        latents: Param::from_tensor(Tensor::zeros([5, 6], &device)),
        q: layer(6),
        k: layer(6),
        head: layer(3),
    };
    let model = with_numbers(model, 3);
    let x = tensor::<3>(4, [2, 7, 6], &device);
    let ptq = PtqConfig::new().with_progress(false);
    let (quantized, _) = ptq
        .quantize_for(model.clone(), || [x.clone()], Queries::forward)
        .unwrap();
    let all = quantizers(&quantized);
    let has = |name: &str| all.iter().any(|located| located.name() == name);
    assert!(has("q.weight") && has("input of `k`") && has("input of `head`"));
    assert!(!has("input of `q`"));
    let (converted, _) = ConvertConfig::new().convert(quantized.clone()).unwrap();
    let run = |model: &Queries| {
        let quantized = QuantizedForward::new();
        values(quantized.run(model, x.clone(), Queries::forward).unwrap())
    };
    assert_eq!(run(&converted), run(&quantized));
    let plain = values(model.forward(x.clone()));
    let found = run(&quantized);
    let largest = plain.iter().fold(0.0f32, |most, a| most.max(a.abs()));
    // Eight bits, three rounded products.
    assert!(farthest(&found, &plain) < 0.1 * largest);
}
