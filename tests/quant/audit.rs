//! The audit names every product of a model, and what quantizes its operands.

use burn::module::Module;
use burn::nn::attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, EmbeddingConfig, Linear, LinearConfig, LstmConfig};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Int, Tensor};
use burn_lean::quant::{Audit, Cause, Coverage, NotFoldable, SiteKind, audit};

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
    audit(&model, |model, device| {
        model.forward(Tensor::ones([3, 2, 4, 4], device))
    })
    .unwrap()
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
    assert_eq!(audit.layers[0].operation, "Conv2d");
    assert_eq!(audit.layers[0].shape, [3, 2, 4, 4]);
}

#[test]
fn attention_residuals_and_softmax_are_functional_sites() {
    let audit = network_audit();
    let sites: Vec<_> = audit
        .sites
        .iter()
        .map(|site| {
            let sources = site.operands.iter().map(|(source, _)| source.as_deref());
            (site.kind, sources.collect::<Vec<_>>())
        })
        .collect();
    let weight = |name| Some(name);
    assert_eq!(
        sites,
        [
            (SiteKind::Add, vec![weight("conv.weight"), None]),
            (
                SiteKind::AttentionScores,
                vec![
                    weight("attention.query.weight"),
                    weight("attention.key.weight")
                ]
            ),
            (
                SiteKind::SoftmaxOutput,
                vec![weight("attention.query.weight")]
            ),
            (
                SiteKind::AttentionValues,
                vec![
                    weight("attention.query.weight"),
                    weight("attention.value.weight")
                ]
            ),
        ]
    );
}

#[test]
fn batch_norms_are_paired_with_the_layer_before_them_and_their_epsilon() {
    let audit = network_audit();
    let pairs = audit.fold_pairs();
    // The linear layer's norm is over the axis before the layer's outputs, but audits do not look
    // at axes: `fold` refuses what does not fit.
    assert_eq!(pairs[0].layer, "conv");
    assert_eq!(pairs[0].batch_norm, "conv_norm");
    assert_eq!(pairs[0].epsilon, 1e-3);
    let pair = &audit.norm_pairs[0];
    assert_eq!(pair.weight, "conv.weight");
    assert_eq!(pair.bias.as_deref(), Some("conv.bias"));
    assert_eq!(
        (pair.gamma.as_str(), pair.beta.as_str()),
        ("conv_norm.gamma", "conv_norm.beta")
    );
}

#[test]
fn a_norm_is_not_folded_into_a_layer_that_is_used_without_it() {
    #[derive(Module, Debug)]
    struct Shared {
        linear: Linear,
        norm: BatchNorm,
    }
    let device = Device::flex();
    let model = Shared {
        linear: LinearConfig::new(4, 4).init(&device),
        norm: BatchNormConfig::new(4).init(&device),
    };
    let reason = |forward: fn(&Shared, Tensor<2>) -> Tensor<2>| {
        let audit = audit(&model, |model, device| {
            forward(model, Tensor::ones([8, 4], device))
        });
        audit.unwrap().norm_pairs[0].not_foldable
    };
    assert_eq!(
        reason(|model, x| model.norm.forward(model.linear.forward(x))),
        None
    );
    assert_eq!(
        reason(|model, x| {
            let y = model.linear.forward(x);
            y.clone() + model.norm.forward(y)
        }),
        Some(NotFoldable::OutputShared)
    );
    assert_eq!(
        reason(|model, x| {
            let y = model.norm.forward(model.linear.forward(x));
            model.linear.forward(y)
        }),
        Some(NotFoldable::LayerShared)
    );
    assert_eq!(
        reason(|model, x| {
            let y = model.norm.forward(model.linear.forward(x));
            model.norm.forward(relu(y))
        }),
        Some(NotFoldable::NormShared)
    );
    // Twice the whole pair is the pair.
    assert_eq!(
        reason(|model, x| {
            let y = model.norm.forward(model.linear.forward(x));
            model.norm.forward(model.linear.forward(y))
        }),
        None
    );
}

#[test]
fn steps_of_a_recurrence_are_one_layer_with_many_uses() {
    let model = LstmConfig::new(4, 4, true).init(&Device::flex());
    let audit = audit(&model, |model, device| {
        model.forward(Tensor::<3>::ones([2, 5, 4], device), None).0
    })
    .unwrap();
    // Input and hidden transform of four gates, in each of the five steps.
    assert_eq!(audit.layers.len(), 8);
    assert!(audit.layers.iter().all(|layer| layer.uses == 5), "{audit}");
}

#[test]
fn the_input_of_an_embedding_has_no_coverage() {
    let model = EmbeddingConfig::new(10, 4).init(&Device::flex());
    let audit = audit(&model, |model, device| {
        model.forward(Tensor::<2, Int>::zeros([2, 3], device))
    })
    .unwrap();
    assert_eq!(audit.layers[0].operation, "Embedding");
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
    let error = audit(&model, |_, _| panic!("wrong shape")).unwrap_err();
    assert!(error.to_string().contains("wrong shape"), "{error}");
}
