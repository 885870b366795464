//! Which parameters are pruned, and the way to the flat vector and back.

use burn::module::{Lora, Module, Param, ParamGroup};
use burn::nn::conv::{Conv2d, Conv2dConfig, ConvTranspose2d, ConvTranspose2dConfig};
use burn::nn::{
    BatchNorm, BatchNormConfig, Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear,
    LinearConfig, LinearLayout, Lstm, LstmConfig, Relu,
};
use burn::tensor::{Device, Tensor};
use burn_lean::prune::{Budget, LayerKind, PruneError, Pruner, Selection, model::ExcludedBecause};
use burn_lean::quant::{ConvertConfig, QatConfig};

use crate::support::{each_device, parameters, tensor, values, with_numbers};

#[derive(Module, Debug)]
struct Everything {
    linear: Linear,
    column: Linear,
    conv: Conv2d,
    up: ConvTranspose2d,
    embedding: Embedding,
    norm: BatchNorm,
    layer_norm: LayerNorm,
    lstm: Lstm,
    own: Param<Tensor<2>>,
    tied: Linear,
}

impl Everything {
    fn new(device: &Device) -> Self {
        let linear = LinearConfig::new(3, 2).init(device);
        Self {
            tied: linear.clone(),
            linear,
            column: LinearConfig::new(2, 4)
                .with_layout(LinearLayout::Col)
                .init(device),
            conv: Conv2dConfig::new([2, 3], [3, 3]).init(device),
            up: ConvTranspose2dConfig::new([3, 2], [2, 2]).init(device),
            embedding: EmbeddingConfig::new(5, 4).init(device),
            norm: BatchNormConfig::new(3).init(device),
            layer_norm: LayerNormConfig::new(4).init(device),
            lstm: LstmConfig::new(2, 2, false).init(device),
            own: Param::from_tensor(Tensor::ones([2, 2], device)),
        }
    }
}

#[test]
fn weights_of_layers_are_pruned_and_nothing_is_missed_silently() {
    let model = Everything::new(&Device::flex());
    let selection = Selection::of(&model, None).unwrap();
    let kinds: Vec<(&str, LayerKind)> = selection
        .layout()
        .layers()
        .iter()
        .map(|layer| (layer.path.as_str(), layer.kind))
        .collect();
    assert_eq!(
        kinds[..5],
        [
            ("linear.weight", LayerKind::Linear),
            ("column.weight", LayerKind::Linear),
            ("conv.weight", LayerKind::Conv),
            ("up.weight", LayerKind::ConvTranspose),
            ("embedding.weight", LayerKind::Embedding),
        ]
    );
    // Four gates with an input and a hidden transform each.
    assert_eq!(kinds.len(), 5 + 8);
    assert!(
        kinds[5..]
            .iter()
            .all(|(_, kind)| *kind == LayerKind::Recurrent)
    );

    // Every parameter of the model is in the report.
    assert_eq!(selection.parameters().len(), parameters(&model).len());
    let reason = |path: &str| {
        let found = selection
            .parameters()
            .iter()
            .find(|parameter| parameter.path == path);
        found.and_then(|parameter| parameter.excluded.clone())
    };
    assert_eq!(reason("linear.bias"), Some(ExcludedBecause::NoLayerWeight));
    assert_eq!(reason("norm.gamma"), Some(ExcludedBecause::NoLayerWeight));
    assert_eq!(reason("own"), Some(ExcludedBecause::NoLayerWeight));
    assert_eq!(
        reason("norm.running_mean"),
        Some(ExcludedBecause::RunningStatistic)
    );
    assert_eq!(
        reason("tied.weight"),
        Some(ExcludedBecause::TiedTo("linear.weight".into()))
    );
    assert_says!(
        selection,
        "norm.running_var [3]: a running statistic",
        "conv.weight [3, 2, 3, 3]: pruned"
    );
}

#[test]
fn a_group_names_what_the_default_would_not() {
    let model = Everything::new(&Device::flex());
    let group = ParamGroup::from_paths(vec!["own", "linear.bias"]);
    let selection = Selection::of(&model, Some(&group)).unwrap();
    assert_eq!(selection.layout().len(), 4 + 2);
    let weight = &selection.parameters()[0];
    assert_eq!(weight.excluded, Some(ExcludedBecause::NotInGroup));
}

#[test]
fn flatten_and_unflatten_are_inverse_on_every_device() {
    each_device(|target| {
        for device in [target.device.clone(), target.device.clone().autodiff()] {
            let model = with_numbers(Everything::new(&device), 1);
            let selection = Selection::of(&model, None).unwrap();
            let flat = selection.flatten(&model).unwrap();
            let before = parameters(&model);
            let model = selection.unflatten(model, flat.clone() * 2.0).unwrap();
            let doubled = values(selection.flatten(&model).unwrap());
            let flat = values(flat);
            assert!(
                flat.iter()
                    .zip(&doubled)
                    .all(|(old, new)| 2.0 * old == *new)
            );
            for (old, new) in before.iter().zip(parameters(&model)) {
                let selected = selection.layout().layer(&old.path).is_some();
                // The tied copy follows the one that was selected.
                let (source, factor) = match old.path.as_str() {
                    "tied.weight" => (&before[0], 2.0),
                    _ => (old, if selected { 2.0 } else { 1.0 }),
                };
                let expected: Vec<f32> = source.values.iter().map(|value| factor * value).collect();
                assert_eq!(new.values, expected, "{}", old.path);
                assert_eq!(new.trains, old.trains, "{}", old.path);
            }
        }
    });
}

#[test]
fn a_layer_in_column_layout_keeps_its_record() {
    let model = with_numbers(Everything::new(&Device::flex()), 2);
    let selection = Selection::of(&model, None).unwrap();
    let flat = selection.flatten(&model).unwrap();
    let model = selection.unflatten(model, flat.clone() * 0.5).unwrap();
    let loaded = Everything::new(&Device::flex()).load_record(model.clone().into_record());
    // The loaded model has the record's values under identities of its own.
    let again = Selection::of(&loaded, None).unwrap();
    assert_eq!(values(again.flatten(&loaded).unwrap()), values(flat * 0.5));
}

#[test]
fn a_model_without_weights_is_refused() {
    let norm = LayerNormConfig::new(4).init(&Device::flex());
    let error = Selection::of(&norm, None).unwrap_err();
    assert_matches!(error, PruneError::AllExcluded { .. });
    assert_says!(
        error,
        "`gamma` [4] (no weight of a linear",
        "`Pruner::group`"
    );
    let relu = Relu::new();
    let error = Selection::of(&relu, None).unwrap_err();
    assert_eq!(error, PruneError::NoPrunableParameter);
}

#[test]
fn a_converted_model_is_refused_for_its_codes() {
    let model = with_numbers(LinearConfig::new(4, 3).init(&Device::flex()), 2);
    let model = QatConfig::new()
        .with_activation(None)
        .prepare(model)
        .unwrap();
    let (model, _) = ConvertConfig::new().convert(model).unwrap();
    match Selection::of(&model, None) {
        Err(PruneError::Quantized { path }) => assert_eq!(path, "weight"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn an_adapter_that_would_fill_the_zeros_is_refused() {
    let device = Device::flex();
    let model = LinearConfig::new(4, 3)
        .init(&device)
        .apply_lora(Lora::new(2, 1.0));
    // A fresh adapter adds nothing; a trained one does.
    let model = with_numbers(model, 3);
    match Selection::of(&model, None) {
        Err(PruneError::Reparameterized { path, .. }) => assert_eq!(path, "weight"),
        other => panic!("{other:?}"),
    }
    // Folded in, it is a weight like any other.
    assert_eq!(
        Selection::of(&model.materialize(), None)
            .unwrap()
            .layout()
            .len(),
        12
    );
}

#[test]
fn weights_of_another_model_or_length_are_refused() {
    let device = Device::flex();
    let model = LinearConfig::new(4, 3).init(&device);
    let other = LinearConfig::new(4, 3).init(&device);
    let selection = Selection::of(&model, None).unwrap();
    assert_matches!(
        selection.flatten(&other),
        Err(PruneError::OtherModel { .. })
    );
    let zeros = Tensor::zeros([12], &device);
    let before = parameters(&other);
    let (other, error) = selection.unflatten(other, zeros).unwrap_err().into_parts();
    assert_matches!(error, PruneError::OtherModel { .. });
    assert_eq!(parameters(&other), before);
    let before = parameters(&model);
    let zeros = Tensor::zeros([11], &device);
    let (model, error) = selection.unflatten(model, zeros).unwrap_err().into_parts();
    let expected = PruneError::Mismatch {
        what: "weights of the model",
        expected: 12,
        found: 11,
    };
    assert_eq!(error, expected);
    assert_eq!(parameters(&model), before);
}

/// Nothing is written before all that was selected is found.
#[test]
fn a_model_with_some_of_the_selected_weights_comes_back_unchanged() {
    let device = Device::flex();
    let both = [3, 2].map(|outputs| LinearConfig::new(4, outputs).init(&device));
    let selection = Selection::of(&both, None).unwrap();
    let one = [both[0].clone(), LinearConfig::new(4, 2).init(&device)];
    let before = parameters(&one);
    let zeros = Tensor::zeros([20], &device);
    let rejected = selection.unflatten(one, zeros).unwrap_err();
    assert_eq!(parameters(rejected.value()), before);
}

/// Burn knows the shape that such a weight is stored in before it knows the one it has.
#[test]
fn a_fresh_layer_in_column_layout_has_the_shape_that_it_will_have() {
    let device = Device::flex();
    let column = LinearConfig::new(8, 3)
        .with_layout(LinearLayout::Col)
        .init(&device);
    let selection = Selection::of(&column, None).unwrap();
    assert_eq!(selection.layout().layers()[0].shape, [8, 3]);
    assert_eq!(selection.flatten(&column).unwrap().dims(), [24]);
}

/// A target network, or a teacher: Burn's `clone` keeps the identity of a parameter.
#[derive(Module, Debug)]
struct Two {
    online: Linear,
    target: Linear,
}

#[test]
fn a_clone_with_values_of_its_own_is_refused_before_they_are_lost() {
    let device = Device::flex();
    let online: Linear = with_numbers(LinearConfig::new(4, 3).init(&device), 1);
    let clone = Two {
        target: online.clone(),
        online,
    };
    let selection = Selection::of(&clone, None).unwrap();
    assert_eq!(selection.layout().len(), 12);

    let other = |field: &str| {
        let mut two = clone.clone();
        match field {
            "weight" => two.target.weight = two.target.weight.map(|w| w * -0.7),
            _ => two.target.bias = two.target.bias.map(|bias| bias.map(|b| b + 1.0)),
        }
        two
    };
    for field in ["weight", "bias"] {
        let two = other(field);
        let before = parameters(&two);
        let inputs = [tensor::<2>(3, [6, 4], &device), tensor(4, [6, 4], &device)];
        let forward =
            |two: &Two, x: Tensor<2>| two.online.forward(x.clone()) + two.target.forward(x);
        let rejected = Pruner::new(Budget::Sparsity(0.5)).prune(two, forward, inputs);
        let rejected = rejected.unwrap_err();
        let expected = PruneError::CopiesDiffer {
            path: format!("target.{field}"),
            first: format!("online.{field}"),
        };
        assert_eq!(*rejected.error(), expected);
        assert_eq!(parameters(rejected.value()), before);
    }
}
