//! Which slices of parameters go together.

use burn::module::Module;
use burn::nn::attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::activation::{gelu, relu, sigmoid};
use burn::tensor::{Device, Int, Tensor};
use burn_lean::graph::{FixedBy, UnitGroup, UnitRole, record};

use crate::models::ConvNet;

/// The axes of a group, as `path:axis`.
fn axes(group: &UnitGroup) -> Vec<String> {
    let axes = group.axes.iter();
    axes.map(|one| format!("{}:{}", one.path, one.axis))
        .collect()
}

/// The group of the units that lie along an axis.
fn along<'a>(groups: &'a [UnitGroup], path: &str, axis: usize) -> &'a UnitGroup {
    let here = |group: &&UnitGroup| {
        group
            .axes
            .iter()
            .any(|one| one.path == path && one.axis == axis)
    };
    groups
        .iter()
        .find(here)
        .unwrap_or_else(|| panic!("{path}: {groups:#?}"))
}

#[test]
fn a_residual_sum_ties_the_channels_of_its_terms_with_their_norms_and_readers() {
    let device = Device::flex();
    let model = ConvNet::new(&device);
    let (x, _) = ConvNet::batch(&device);
    let recording = record(&model, &x, |model, x| model.forward(x)).unwrap();
    let groups = recording.graph().units();
    let tied = along(&groups, "first.weight", 0);
    assert_eq!((tied.units, &tied.fixed), (4, &None));
    let found = axes(tied);
    for axis in [
        "first.weight:0",
        "first.bias:0",
        "first_norm.gamma:0",
        "first_norm.running_var:0",
        "second.weight:0",
        "second.weight:1",
        "second_norm.running_mean:0",
        "head.weight:0",
    ] {
        assert!(found.contains(&axis.to_string()), "{axis} of {found:?}");
    }
    let reader = tied
        .axes
        .iter()
        .find(|one| one.path == "head.weight")
        .unwrap();
    assert_eq!(reader.role, UnitRole::Reads);
    assert_eq!(
        along(&groups, "head.weight", 1).fixed,
        Some(FixedBy::Output)
    );
    assert_eq!(
        along(&groups, "first.weight", 1).fixed,
        Some(FixedBy::Input)
    );
}

#[derive(Module, Debug)]
struct Branches {
    left: Conv2d,
    right: Conv2d,
    head: Linear,
}

#[test]
fn a_concatenation_and_a_flattening_spread_a_channel_over_places_of_the_reader() {
    let device = Device::flex();
    let model = Branches {
        left: Conv2dConfig::new([1, 2], [1, 1]).init(&device),
        right: Conv2dConfig::new([1, 3], [1, 1]).init(&device),
        head: LinearConfig::new(5 * 4, 2).init(&device),
    };
    let forward = |model: &Branches, x: Tensor<4>| {
        let both = vec![model.left.forward(x.clone()), model.right.forward(x)];
        model
            .head
            .forward(relu(Tensor::cat(both, 1)).flatten::<2>(1, 3))
    };
    let x = Tensor::<4>::zeros([3, 1, 2, 2], &device);
    let groups = record(&model, &x, forward).unwrap().graph().units();
    let right = along(&groups, "right.weight", 0);
    assert_eq!((right.units, &right.fixed), (3, &None));
    let reader = right
        .axes
        .iter()
        .find(|one| one.path == "head.weight")
        .unwrap();
    // Behind the two channels of the other branch, four places each.
    assert_eq!(reader.places[0], [8, 9, 10, 11]);
    assert_eq!(reader.places[2], [16, 17, 18, 19]);
    assert_eq!(along(&groups, "left.weight", 0).units, 2);
}

#[test]
fn channels_of_a_convolution_with_groups_stay() {
    let device = Device::flex();
    let model = vec![
        Conv2dConfig::new([2, 4], [1, 1]).init(&device),
        Conv2dConfig::new([4, 4], [3, 3])
            .with_groups(4)
            .init(&device),
        Conv2dConfig::new([4, 2], [1, 1]).init(&device),
    ];
    let forward =
        |model: &Vec<Conv2d>, x: Tensor<4>| model.iter().fold(x, |x, layer| layer.forward(x));
    let x = Tensor::<4>::zeros([1, 2, 4, 4], &device);
    let groups = record(&model, &x, forward).unwrap().graph().units();
    for (path, axis) in [("0.weight", 0), ("1.weight", 0), ("2.weight", 1)] {
        assert_eq!(
            along(&groups, path, axis).fixed,
            Some(FixedBy::Groups),
            "{path}"
        );
    }
}

#[derive(Module, Debug)]
struct Block {
    table: Embedding,
    attention: MultiHeadAttention,
    norm: LayerNorm,
    up: Linear,
    down: Linear,
}

#[test]
fn of_a_transformer_the_hidden_features_can_go_and_the_rest_says_why_not() {
    let device = Device::flex();
    let model = Block {
        table: EmbeddingConfig::new(5, 8).init(&device),
        attention: MultiHeadAttentionConfig::new(8, 2).init(&device),
        norm: LayerNormConfig::new(8).init(&device),
        up: LinearConfig::new(8, 16).init(&device),
        down: LinearConfig::new(16, 8).init(&device),
    };
    let forward = |model: &Block, x: Tensor<2, Int>| {
        let x = model.table.forward(x);
        let y = model
            .attention
            .forward(MhaInput::self_attn(x.clone()))
            .context;
        let x = model.norm.forward(x + y);
        x.clone() + model.down.forward(gelu(model.up.forward(x)))
    };
    let x = Tensor::<2, Int>::zeros([2, 3], &device);
    let groups = record(&model, &x, forward).unwrap().graph().units();
    let hidden = along(&groups, "up.weight", 1);
    assert_eq!((hidden.units, &hidden.fixed), (16, &None));
    assert_eq!(axes(hidden), ["up.weight:1", "up.bias:0", "down.weight:0"]);
    let free: Vec<_> = groups
        .iter()
        .filter(|group| group.fixed.is_none())
        .collect();
    assert_eq!(free.len(), 1, "{free:#?}");
    // Features of the residual stream are normalized together; heads are split by a reshape.
    assert_eq!(
        along(&groups, "table.weight", 1).fixed,
        Some(FixedBy::Reduction)
    );
    let heads = along(&groups, "attention.query.weight", 1);
    assert_matches!(heads.fixed, Some(FixedBy::Reshape | FixedBy::Attention));
}

#[test]
fn a_tied_weight_makes_its_units_and_reads_them() {
    let device = Device::flex();
    let tied = LinearConfig::new(5, 6).init(&device);
    let forward = |tied: &Linear, x: Tensor<2>| {
        let hidden = relu(tied.forward(x));
        hidden.matmul(tied.weight.val().transpose())
    };
    let x = Tensor::<2>::zeros([2, 5], &device);
    let groups = record(&tied, &x, forward).unwrap().graph().units();
    let hidden = along(&groups, "weight", 1);
    assert_eq!((hidden.units, &hidden.fixed), (6, &None));
    let roles: Vec<UnitRole> = hidden.axes.iter().map(|one| one.role).collect();
    assert_eq!(roles, [UnitRole::MakesAndReads, UnitRole::Follows]);
    assert!(!hidden.varies);
}

#[test]
fn units_vary_under_a_gate_or_a_mask_that_the_inputs_make() {
    let device = Device::flex();
    let model = vec![
        LinearConfig::new(3, 4).init(&device),
        LinearConfig::new(3, 1).init(&device),
        LinearConfig::new(4, 2).init(&device),
    ];
    type Gated = fn(Tensor<2>, Tensor<2>) -> Tensor<2>;
    let times: Gated = |x, gate| x * sigmoid(gate);
    let masked: Gated = |x, gate| x.mask_fill(gate.lower_elem(0.0), 0.0);
    let alone: Gated = |x, _| x;
    for (gated, varies) in [(times, true), (masked, true), (alone, false)] {
        let forward = |model: &Vec<Linear>, x: Tensor<2>| {
            let gate = model[1].forward(x.clone());
            model[2].forward(gated(relu(model[0].forward(x)), gate))
        };
        let x = Tensor::<2>::zeros([2, 3], &device);
        let groups = record(&model, &x, forward).unwrap().graph().units();
        let hidden = along(&groups, "0.weight", 1);
        assert_eq!((hidden.units, &hidden.fixed), (4, &None));
        assert_eq!(hidden.varies, varies);
    }
}
