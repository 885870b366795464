//! Recurrences and attention in integers, and what stays in memory of a model.

use burn::module::Module;
use burn::nn::attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{
    BatchNorm, BatchNormConfig, Gru, GruConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig,
    Lstm, LstmConfig, PaddingConfig2d,
};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor};
use burn_lean::deploy::{
    Arithmetic, Backend, EngineConfig, EngineReport, Execution, Export, Form, Quantization,
};
use burn_lean::graph::Tensors;
use burn_lean::quant::{
    PtqConfig, PtqMode, QatConfig, QuantizedForward, Site, WeightConfig, quantized_weights,
    quantizers,
};

use crate::judge::{close, operators, within_steps};
use crate::quantized::written;
use crate::support::{each_device, tensor, with_numbers};

/// An LSTM, a GRU and a narrow linear layer, on six steps.
#[derive(Module, Debug)]
struct Recurrent {
    lstm: Lstm,
    gru: Gru,
    head: Linear,
}

impl Recurrent {
    fn new(device: &Device) -> Self {
        let net = Self {
            lstm: LstmConfig::new(32, 48, true).init(device),
            gru: GruConfig::new(48, 32, true).init(device),
            head: LinearConfig::new(32, 10).init(device),
        };
        with_numbers(net, 1)
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let (steps, _) = self.lstm.forward(x, None);
        self.head.forward(self.gru.forward(steps, None))
    }
}

/// Two uses of one attention, with a norm between them.
#[derive(Module, Debug)]
struct Attention {
    attention: MultiHeadAttention,
    norm: LayerNorm,
    head: Linear,
}

impl Attention {
    fn new(device: &Device) -> Self {
        let attention = MultiHeadAttentionConfig::new(32, 2).with_dropout(0.0);
        let net = Self {
            attention: attention.init(device),
            norm: LayerNormConfig::new(32).init(device),
            head: LinearConfig::new(32, 10).init(device),
        };
        with_numbers(net, 2)
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let once = |x: Tensor<3>| {
            let y = self.attention.forward(MhaInput::self_attn(x.clone()));
            self.norm.forward(x + y.context)
        };
        self.head.forward(once(once(x)))
    }
}

/// Convolutions, one of them grouped and used twice, and a narrow linear layer.
#[derive(Module, Debug)]
struct Conv {
    first: Conv2d,
    norm: BatchNorm,
    grouped: Conv2d,
    head: Linear,
}

impl Conv {
    fn new(device: &Device) -> Self {
        let conv = |channels, groups| {
            Conv2dConfig::new(channels, [3, 3])
                .with_groups(groups)
                .with_padding(PaddingConfig2d::Explicit(1, 1, 1, 1))
                .init(device)
        };
        let net = Self {
            first: conv([4, 24], 1),
            norm: BatchNormConfig::new(24).init(device),
            grouped: conv([24, 24], 4),
            head: LinearConfig::new(24 * 36, 10).init(device),
        };
        with_numbers(net, 3)
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<2> {
        let x = relu(self.norm.forward(self.first.forward(x)));
        let x = relu(self.grouped.forward(x));
        let x = relu(self.grouped.forward(x));
        self.head.forward(x.flatten(1, 3))
    }
}

/// With ranges from the inputs that it is asked about.
fn calibrated<const D: usize, M: Module, I: Tensors + Clone>(
    model: M,
    mode: PtqMode,
    bits: u8,
    x: &I,
    forward: &impl Fn(&M, I) -> Tensor<D>,
) -> M {
    let config = PtqConfig::new()
        .with_quantize(QatConfig::new().with_weight(WeightConfig::int(bits)))
        .with_mode(mode)
        .with_progress(false);
    let quantized = config.quantize_for(model, || vec![x.clone()], forward);
    quantized.unwrap().0.valid()
}

fn in_integers<const D: usize, M: Module, I: Tensors + Clone>(
    model: &M,
    x: &I,
    forward: &impl Fn(&M, I) -> Tensor<D>,
) -> (Tensor<D>, EngineReport) {
    let export = Export::record(model, x, forward).unwrap();
    let engine = EngineConfig::new()
        .with_arithmetic(Arithmetic::Integer)
        .with_backend(Some(Backend::Own))
        .compile(export)
        .unwrap();
    (engine.run(x).unwrap(), engine.report())
}

/// Packed codes with their scales, and what stays float.
fn packed<M: Module>(model: &M) -> usize {
    let weights = quantized_weights(model).unwrap();
    let elements: usize = weights.iter().map(|(_, codes)| codes.codes().len()).sum();
    let codes: usize = weights.iter().map(|(_, codes)| codes.packed_bytes()).sum();
    codes + 4 * (model.clone().materialize().num_params() - elements)
}

/// Products with a weight are of codes, and each weight is held once.
fn judge<const D: usize, M: Module, I: Tensors + Clone>(
    model: M,
    x: I,
    forward: impl Fn(&M, I) -> Tensor<D>,
) {
    let floats = 4 * model.num_params();
    let net = calibrated(model, PtqMode::Static, 8, &x, &forward);
    let (found, report) = in_integers(&net, &x, &forward);
    let weights = quantized_weights(&net).unwrap();
    for (path, _) in &weights {
        let mut uses = report.layers.iter().filter(|layer| layer.path == *path);
        assert!(uses.clone().count() > 0, "no {path}: {report}");
        assert!(
            uses.all(|layer| layer.execution == Execution::Integer),
            "{report}"
        );
    }
    let packed = packed(&net);
    println!(
        "{} resident, {packed} packed, {floats} in F32",
        report.resident_bytes
    );
    assert!(
        10 * report.resident_bytes <= 11 * packed,
        "{packed}: {report}"
    );
    let fake = QuantizedForward::new().run(&net, x.clone(), &forward);
    let fake = fake.unwrap();
    let export = Export::record(&net, &x, &forward).unwrap();
    written(&export, Form::Qdq, &x, &fake);
    within_steps(found, fake, 4.0);
}

#[test]
fn gates_of_recurrences_are_products_of_codes_and_held_once() {
    each_device(|target| {
        let x = tensor::<3>(1, [3, 6, 32], &target.device);
        judge(Recurrent::new(&target.device), x, Recurrent::forward);
    });
}

#[test]
fn projections_of_an_attention_are_products_of_codes_and_held_once() {
    each_device(|target| {
        let x = tensor::<3>(2, [3, 5, 32], &target.device);
        judge(Attention::new(&target.device), x, Attention::forward);
    });
}

#[test]
fn convolutions_in_groups_take_no_more_than_their_codes() {
    each_device(|target| {
        let x = tensor::<4>(3, [2, 4, 6, 6], &target.device);
        let net = Conv::new(&target.device);
        let net = burn_lean::quant::fold_for(net, x.clone(), Conv::forward).unwrap();
        judge(net, x, Conv::forward);
    });
}

/// Codes of 4 bits alone: matrices are multiplied by floats, kernels are floats.
fn no_more_than_floats<const D: usize, M: Module, I: Tensors + Clone>(
    model: M,
    x: I,
    forward: impl Fn(&M, I) -> Tensor<D>,
) {
    let own = EngineConfig::new().with_backend(Some(Backend::Own));
    let compile = |config: &EngineConfig, model: &M| {
        let export = Export::record(model, &x, &forward).unwrap();
        let engine = config.compile(export).unwrap();
        close(engine.run(&x).unwrap(), forward(model, x.clone()));
        engine.report()
    };
    let floats = compile(&own, &model).resident_bytes;
    // Beside the parameters, bounds of slices and the like.
    let parameters = 4 * model.num_params();
    println!("{floats} in F32, {parameters} of parameters");
    assert!(100 * floats <= 101 * parameters, "{floats} {parameters}");
    let net = calibrated(model, PtqMode::WeightOnly, 4, &x, &forward);
    for arithmetic in [Arithmetic::Integer, Arithmetic::Float] {
        let report = compile(&own.clone().with_arithmetic(arithmetic), &net);
        println!("{} with codes of 4 bits", report.resident_bytes);
        // Norms are folded into floats, and stay beside codes.
        let most = floats.max(parameters);
        assert!(report.resident_bytes <= most, "{most}: {report}");
    }
}

#[test]
fn no_way_takes_more_than_the_floats_of_the_model() {
    let device = Device::flex();
    let steps = tensor::<3>(1, [3, 6, 32], &device);
    no_more_than_floats(Recurrent::new(&device), steps, Recurrent::forward);
    let images = tensor::<4>(3, [2, 4, 6, 6], &device);
    no_more_than_floats(Conv::new(&device), images, Conv::forward);
}

#[test]
fn products_of_activations_and_their_probabilities_are_quantized_in_the_file() {
    let device = Device::flex().autodiff();
    let config = MultiHeadAttentionConfig::new(8, 2).with_dropout(0.0);
    let attention = with_numbers(config.init(&device), 12);
    let attention = QatConfig::new().prepare(attention).unwrap();
    let x = tensor::<3>(11, [2, 4, 8], &device.clone().inner());
    let forward = |attention: &MultiHeadAttention, x: Tensor<3>| {
        attention.forward(MhaInput::self_attn(x)).context
    };
    let quantized = QuantizedForward::new();
    let attention = quantized
        .calibrate(attention, [x.clone()], forward)
        .unwrap()
        .valid();
    // From the model alone only weights and inputs are known.
    assert!(
        Quantization::of(&attention)
            .unwrap()
            .left_float()
            .next()
            .is_some()
    );
    let export = Export::record(&attention, &x, forward).unwrap();
    let left: Vec<_> = export.quantization().left_float().collect();
    assert!(left.is_empty(), "{left:?}");
    let exported = export.to_onnx(Form::Qdq).unwrap();
    let all = operators(&exported);
    let count = |operator| all.iter().filter(|one| **one == operator).count();
    // Query, key and value read one input, with a quantizer each, but of equal ranges; then the two
    // products, and the output.
    let expected = quantizers(&attention)
        .iter()
        .filter(|one| one.site != Site::Weight)
        .count();
    assert_eq!(count("QuantizeLinear"), expected - 2);
    // The same numbers as with the quantizers in Burn, up to the border of two codes.
    let fake = quantized.run(&attention, x.clone(), forward).unwrap();
    written(&export, Form::Qdq, &x, &fake);
    let engine = EngineConfig::new().with_arithmetic(Arithmetic::Integer);
    within_steps(engine.compile(export).unwrap().run(&x).unwrap(), fake, 4.0);
}
