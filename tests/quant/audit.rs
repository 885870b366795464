//! The audit names every product of a model, and what quantizes its operands.

use std::collections::BTreeMap;

use burn::module::{Lora, Module};
use burn::nn::attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::gru::{Gru, GruConfig};
use burn::nn::{
    BatchNorm, BatchNormConfig, EmbeddingConfig, Linear, LinearConfig, Lstm, LstmConfig,
};
use burn::tensor::activation::{relu, sigmoid};
use burn::tensor::{Device, FloatDType, Int, Tensor};
use burn_lean::amp::AutocastConfig;
use burn_lean::quant::{
    ConvertConfig, ForwardQ, Override, QatConfig, Role, Schedule, audit,
    fold::NotFoldable,
    inspect::{Audit, Cause, Coverage, FunctionalSite},
    module::Phase,
    qat::AttachQuantizers,
};
use burn_lean::reparam::{ChainReparameterizer, attach};

/// Convolution and batch norm, a residual connection, a linear layer with a batch norm, attention.
#[derive(Module, Debug)]
struct Network {
    conv: Conv2d,
    conv_norm: BatchNorm,
    linear: Linear,
    linear_norm: BatchNorm,
    attention: MultiHeadAttention,
}

impl Network {
    fn new(device: &Device) -> Self {
        Self {
            conv: Conv2dConfig::new([2, 2], [1, 1]).init(device),
            conv_norm: BatchNormConfig::new(2).with_epsilon(1e-3).init(device),
            linear: LinearConfig::new(16, 8).init(device),
            linear_norm: BatchNormConfig::new(2).init(device),
            attention: MultiHeadAttentionConfig::new(8, 2).init(device),
        }
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<3> {
        let y = self.conv_norm.forward(self.conv.forward(x.clone()));
        let x = relu(y + x).flatten::<3>(2, 3);
        let x = self.linear_norm.forward(self.linear.forward(x));
        self.attention.forward(MhaInput::self_attn(x)).context
    }
}

fn network_audit() -> Audit {
    let model = Network::new(&Device::flex());
    let x = Tensor::ones([3, 2, 4, 4], &Device::flex());
    audit(&model, x, |model, x| model.forward(x)).unwrap()
}

/// Operation, roles of the operands and the layers that they belong to.
fn listed(audit: &Audit) -> Vec<(&str, Vec<(Role, &str)>)> {
    let sites = audit.sites.iter().map(|site| {
        let operands = site.operands.iter();
        let operands = operands.map(|operand| (operand.role, operand.layer.as_str()));
        (site.operation.as_str(), operands.collect())
    });
    sites.collect()
}

#[test]
fn an_unprepared_model_lists_its_layers_in_order_and_why_they_are_float() {
    let audit = network_audit();
    let paths: Vec<&str> = audit
        .layers
        .iter()
        .map(|layer| layer.weight_path.as_str())
        .collect();
    assert_eq!(
        paths,
        [
            "conv.weight",
            "linear.weight",
            "attention.query.weight",
            "attention.key.weight",
            "attention.value.weight",
            "attention.output.weight",
        ]
    );
    for layer in &audit.layers {
        assert_eq!(layer.weight, Coverage::Float(Cause::WeightNotPrepared));
        assert_eq!(layer.input, Some(Coverage::Float(Cause::InputNotPrepared)));
        assert_eq!(layer.uses, 1);
    }
    assert!(!audit.is_covered());
    assert_eq!(audit.layers[0].operation, "conv2d");
    assert_eq!(audit.layers[0].shape, [3, 2, 4, 4]);
}

#[test]
fn attention_residuals_and_softmax_are_functional_sites() {
    let audit = network_audit();
    let [query, key, value] = ["query", "key", "value"];
    let layer = |name: &str| format!("attention.{name}.weight");
    let (query, key, value) = (layer(query), layer(key), layer(value));
    assert_eq!(
        listed(&audit),
        [
            (
                "add",
                vec![
                    (Role::SumLeft, "conv.weight"),
                    (Role::SumRight, "conv.weight")
                ]
            ),
            (
                "matmul",
                vec![(Role::Output, query.as_str()), (Role::Output, &key)]
            ),
            ("softmax", vec![(Role::Probabilities, query.as_str())]),
            ("matmul", vec![(Role::Output, value.as_str())]),
        ]
    );
}

#[test]
fn batch_norms_are_paired_with_the_layer_before_them_and_their_epsilon() {
    let audit = network_audit();
    let [pair, other] = &audit.norm_pairs[..] else {
        panic!("{:?}", audit.norm_pairs)
    };
    // The linear layer's norm is over the axis before the layer's outputs.
    assert_eq!(other.not_foldable, Some(NotFoldable::OtherAxis));
    assert_eq!(pair.not_foldable, None);
    assert_eq!(
        (pair.layer.as_str(), pair.norm.as_str()),
        ("conv", "conv_norm")
    );
    assert_eq!(pair.epsilon, 1e-3);
    assert_eq!(pair.weight, "conv.weight");
    assert_eq!(pair.bias.as_deref(), Some("conv.bias"));
    assert_eq!(
        (pair.gamma.as_str(), pair.beta.as_str()),
        ("conv_norm.gamma", "conv_norm.beta")
    );
}

#[test]
fn steps_of_a_recurrence_are_one_layer_with_many_uses() {
    let device = Device::flex();
    let model = LstmConfig::new(4, 4, true).init(&device);
    let x = Tensor::<3>::ones([2, 5, 4], &device);
    let audit = audit(&model, x, |model, x| model.forward(x, None).0).unwrap();
    // Input and hidden transform of four gates, in each of the five steps; the first hidden state is
    // zeros.
    let mut uses: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for layer in &audit.layers {
        let of_layer = uses.entry(&layer.weight_path).or_default();
        of_layer.push(layer.uses);
    }
    assert_eq!(uses.len(), 8, "{audit}");
    for (path, uses) in uses {
        let expected = match path.contains("hidden") {
            true => vec![1, 4],
            false => vec![5],
        };
        assert_eq!(uses, expected, "{path}");
    }
}

#[test]
fn the_input_of_an_embedding_has_no_coverage() {
    let device = Device::flex();
    let model = EmbeddingConfig::new(10, 4).init(&device);
    let tokens = Tensor::<2, Int>::zeros([2, 3], &device);
    let audit = audit(&model, tokens, |model, tokens| model.forward(tokens)).unwrap();
    assert_eq!(audit.layers[0].operation, "embedding");
    assert_eq!(audit.layers[0].input, None);
}

#[test]
fn an_audit_reads_back_from_json() {
    let audit = network_audit();
    let json = serde_json::to_string(&audit).unwrap();
    assert_eq!(serde_json::from_str::<Audit>(&json).unwrap(), audit);
}

#[test]
fn a_forward_pass_that_panics_is_an_error_with_the_reason() {
    let model = LinearConfig::new(4, 4).init(&Device::flex());
    let error = audit(&model, (), |_, ()| -> () { panic!("wrong shape") }).unwrap_err();
    assert_says!(error, "wrong shape");
}

/// A network that calls one of its layers as Burn does, and the others with their quantizers.
#[derive(Module, Debug)]
struct Mixed {
    first: Linear,
    second: Linear,
    last: Linear,
}

impl Mixed {
    fn new(device: &Device) -> Self {
        let linear = |outputs| LinearConfig::new(4, outputs).init(device);
        Self {
            first: linear(4),
            second: linear(4),
            last: linear(2),
        }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let x = relu(self.first.forward_q(x));
        self.last.forward_q(relu(self.second.forward(x)))
    }
}

fn mixed_audit(model: &Mixed) -> Audit {
    let x = Tensor::ones([3, 4], &Device::flex());
    audit(model, x, |model, x| model.forward(x)).unwrap()
}

#[test]
fn a_prepared_model_names_the_quantizers_and_the_call_that_goes_around_one() {
    let config =
        QatConfig::new().with_overrides(vec![Override::new("last".into()).with_skip(Some(true))]);
    let model = config.prepare(Mixed::new(&Device::flex())).unwrap();
    let audit = mixed_audit(&model);
    let by = |coverage: &Coverage| match coverage {
        Coverage::FakeQuantized { quantizer, scheme } => (quantizer.clone(), scheme.to_string()),
        other => panic!("{other}"),
    };
    assert_eq!(
        by(&audit.layers[0].weight),
        (
            "first.weight.quant.weight".into(),
            "INT8 narrow, symmetric, per channel (axis 1)".into()
        )
    );
    assert_eq!(
        by(audit.layers[0].input.as_ref().unwrap()),
        (
            "first.weight.quant.input".into(),
            "UINT8, affine, per tensor".into()
        )
    );
    // A recorded forward pass quantizes what its code does not.
    let quantizer = "second.weight.quant.input".to_string();
    assert_eq!(by(audit.layers[1].input.as_ref().unwrap()).0, quantizer);
    assert!(audit.layers[1].weight.is_quantized());
    assert_eq!(
        audit.layers[2].weight,
        Coverage::Float(Cause::WeightNotPrepared)
    );
    assert_eq!(audit.uncalled, [quantizer]);
    assert_eq!(audit.unused, [""; 0]);
    assert!(!audit.is_covered());
}

#[test]
fn a_plain_call_of_a_layer_that_is_elsewhere_called_with_its_quantizer_is_named() {
    let device = Device::flex();
    let model = QatConfig::new().prepare(LinearConfig::new(4, 4).init(&device));
    let x = Tensor::<2>::ones([3, 4], &device);
    let audit = audit(&model.unwrap(), x, |model, x| {
        model.forward(model.forward_q(x))
    })
    .unwrap();
    let inputs = audit.layers.iter().map(|layer| layer.input.clone());
    let quantizer = "weight.quant.input".to_string();
    let plain = Some(Coverage::Float(Cause::PlainForward { quantizer }));
    assert_eq!(inputs.filter(|input| *input == plain).count(), 1, "{audit}");
    assert!(!audit.is_covered());
}

#[test]
fn a_quantizer_of_a_layer_that_is_not_called_is_unused() {
    let device = Device::flex();
    let model = QatConfig::new().prepare(Mixed::new(&device)).unwrap();
    let x = Tensor::<2>::ones([3, 4], &device);
    let audit = audit(&model, x, |model, x| model.first.forward(x)).unwrap();
    let expected = ["second", "last"]
        .map(|layer| ["weight", "input"].map(|site| format!("{layer}.weight.quant.{site}")));
    assert_eq!(audit.unused, expected.concat());
    assert_eq!(audit.uncalled, ["first.weight.quant.input"]);
}

#[test]
fn a_quantizer_that_only_observes_leaves_its_values_float() {
    let config = QatConfig::new().with_schedule(Schedule::new().with_quantize_from(10));
    let model = config.prepare(Mixed::new(&Device::flex())).unwrap();
    assert_eq!(
        mixed_audit(&model).layers[0].weight,
        Coverage::Float(Cause::NotQuantizing {
            quantizer: "first.weight.quant.weight".into(),
            phase: Phase::Observe,
        })
    );
}

#[test]
fn a_cast_after_the_quantizer_keeps_the_weight_quantized_and_a_sum_does_not() {
    let device = Device::flex();
    let covered = |chain: fn(AttachQuantizers) -> ChainReparameterizer<AttachQuantizers, Lora>| {
        let model = LinearConfig::new(4, 2).init(&device);
        let quantizers = QatConfig::new().reparameterizer(&model).unwrap();
        let model = attach(model, chain(quantizers)).unwrap();
        let x = Tensor::<2>::ones([3, 4], &device);
        let audit = audit(&model, x, |model, x| model.forward_q(x));
        audit.unwrap().layers[0].weight.clone()
    };
    let added = covered(|quantizers| ChainReparameterizer::new(quantizers, Lora::new(1, 1.0)));
    assert!(
        matches!(&added, Coverage::Float(Cause::Changed { operation, .. }) if operation == "add"),
        "{added}"
    );

    let model = LinearConfig::new(4, 2).init(&device);
    let quantizers = QatConfig::new().reparameterizer(&model).unwrap();
    let autocast = AutocastConfig::new(FloatDType::F16);
    let (model, autocast) = autocast.prepare_with(model, quantizers).unwrap();
    let x = Tensor::<2>::ones([3, 4], &device);
    let audit = audit(&model, x, |model, x| {
        autocast.forward(x, |x| model.forward_q(x))
    });
    assert!(audit.unwrap().layers[0].weight.is_quantized());
}

#[test]
fn every_product_of_a_prepared_attention_is_covered() {
    #[derive(Module, Debug)]
    struct Attention {
        attention: MultiHeadAttention,
    }
    let model = Attention {
        attention: MultiHeadAttentionConfig::new(8, 2).init(&Device::flex()),
    };
    let model = QatConfig::new().prepare(model).unwrap();
    let x = Tensor::ones([2, 3, 8], &Device::flex());
    let called = audit(&model, x.clone(), |model, x| {
        model
            .attention
            .forward_q(burn_lean::quant::qat::MhaInput::self_attn(x))
            .context
    })
    .unwrap();
    // Both routes quantize the same.
    let recorded = audit(&model, x, |model, x| {
        model.attention.forward(MhaInput::self_attn(x)).context
    })
    .unwrap();
    for audit in [&called, &recorded] {
        assert!(audit.is_covered(), "{audit}");
        assert!(
            audit.sites.iter().all(FunctionalSite::is_quantized),
            "{audit}"
        );
        assert_eq!(audit.sites.len(), 3);
        assert_eq!(audit.unused, [""; 0]);
    }
    assert_eq!(called.uncalled, [""; 0]);
    assert_eq!(recorded.uncalled.len(), 4 + 3 + 1);
}

#[test]
fn a_converted_weight_is_stored() {
    let device = Device::flex();
    let model = QatConfig::new()
        .with_activation(None)
        .prepare(LinearConfig::new(4, 2).init(&device))
        .unwrap();
    let (model, _) = ConvertConfig::new().convert(model).unwrap();
    let x = Tensor::<2>::ones([3, 4], &device);
    let audit = audit(&model, x, |model, x| model.forward_q(x)).unwrap();
    assert!(
        matches!(&audit.layers[0].weight, Coverage::Stored(scheme) if scheme.contains("Q8S")),
        "{audit}"
    );
}

/// A squeeze-and-excite gate, an outer product, a difference, and a normalization by hand.
#[derive(Module, Debug)]
struct Gated {
    body: Conv2d,
    gate: Linear,
    left: Linear,
    right: Linear,
}

impl Gated {
    fn new(device: &Device) -> Self {
        Self {
            body: Conv2dConfig::new([2, 4], [1, 1]).init(device),
            gate: LinearConfig::new(4, 4).init(device),
            left: LinearConfig::new(4, 3).init(device),
            right: LinearConfig::new(4, 5).init(device),
        }
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<3> {
        let x = self.body.forward(x);
        let pooled = x.clone().mean_dim(2).mean_dim(3).flatten::<2>(1, 3);
        let gate = sigmoid(self.gate.forward(pooled));
        let gated = x * gate.unsqueeze_dims::<4>(&[2, 3]);
        // A normalization: its mean and its deviation come from what they normalize.
        let mean = gated.clone().mean_dim(1);
        let centred = gated.clone() - mean;
        let deviation = centred.clone().powi_scalar(2).mean_dim(1).sqrt();
        let normal = centred * deviation.recip();
        let normal = normal.mean_dim(2).mean_dim(3).flatten::<2>(1, 3);
        let left = self.left.forward(normal.clone());
        let right = self.right.forward(normal);
        let outer: Tensor<3> = left.clone().unsqueeze_dim::<3>(2) * right.clone().unsqueeze_dim(1);
        let difference = left.narrow(1, 0, 1) - right.narrow(1, 0, 1);
        outer + difference.unsqueeze_dim::<3>(2)
    }
}

#[test]
fn gates_outer_products_and_differences_are_sites_and_normalizations_are_not() {
    let model = Gated::new(&Device::flex());
    let x = Tensor::ones([1, 2, 3, 3], &Device::flex());
    let audit = audit(&model, x, |model, x| model.forward(x)).unwrap();
    let [factors, differences, sums] = [
        [Role::FactorLeft, Role::FactorRight],
        [Role::DifferenceLeft, Role::DifferenceRight],
        [Role::SumLeft, Role::SumRight],
    ];
    let operands = |roles: [Role; 2], layer| roles.map(|role| (role, layer)).to_vec();
    assert_eq!(
        listed(&audit),
        [
            ("mul", operands(factors, "gate.weight")),
            ("mul", operands(factors, "right.weight")),
            ("sub", operands(differences, "right.weight")),
            ("add", operands(sums, "right.weight")),
        ]
    );
}

#[test]
fn recurrent_layers_are_covered_from_their_zero_state_on() {
    #[derive(Module, Debug)]
    struct Recurrent {
        lstm: Lstm,
        gru: Gru,
        reset_before: Gru,
    }
    let device = Device::flex();
    let model = Recurrent {
        lstm: LstmConfig::new(4, 4, true).init(&device),
        gru: GruConfig::new(4, 4, true).init(&device),
        reset_before: GruConfig::new(4, 4, true)
            .with_reset_after(false)
            .init(&device),
    };
    // An input of zeros is an input all the same.
    let x = Tensor::<3>::zeros([2, 3, 4], &device);
    let run = |model: &Recurrent, x| {
        let (x, _) = model.lstm.forward_q((x, None));
        let x = model.gru.forward_q((x, None));
        model.reset_before.forward_q((x, None))
    };
    let prepared = QatConfig::new().prepare(model.clone()).unwrap();
    let covered = audit(&prepared, x.clone(), run).unwrap();
    assert!(covered.is_covered(), "{covered}");
    let zeros = covered.layers.iter();
    let zeros = zeros.filter(|layer| layer.input == Some(Coverage::Zero));
    assert_eq!(zeros.map(|layer| layer.uses).sum::<usize>(), 4 + 3 + 3);
    let plain = audit(&model, x.clone(), run).unwrap();
    assert!(!plain.is_covered());
    // With its weights alone it is not.
    let weights = QatConfig::new()
        .with_activation(None)
        .prepare(model)
        .unwrap();
    assert!(!audit(&weights, x, run).unwrap().is_covered());
}
