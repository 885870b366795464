//! What cannot be compressed: typed, with the path, and with the model.

use burn::module::{Module, Param, ParamGroup};
use burn::nn::conv::{Conv2d, Conv2dConfig, ConvTranspose2d, ConvTranspose2dConfig};
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::{Device, Int, Tensor};
use burn_lean::graph::GraphError;
use burn_lean::layerwise::LayerwiseError;
use burn_lean::oneshot::{OneShot, OneShotError, Preset, Target};

use crate::support::{parameters, tensor, values, with_numbers};
use crate::{small_llama, tokens};

#[derive(Module, Debug)]
struct Net {
    layers: Vec<Linear>,
}

impl Net {
    fn new(device: &Device) -> Self {
        let layers = (0..2)
            .map(|_| LinearConfig::new(8, 8).init(device))
            .collect();
        with_numbers(Self { layers }, 3)
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.layers.iter().fold(x, |x, layer| layer.forward(x))
    }
}

/// Experts in one parameter, halves of a fused matrix, a matrix of two factors.
#[derive(Module, Debug)]
struct Unusual {
    experts: Param<Tensor<3>>,
    fused: Param<Tensor<2>>,
    low: Param<Tensor<2>>,
    high: Param<Tensor<2>>,
    head: Linear,
}

#[test]
fn weights_that_are_no_matrix_of_their_own_are_named() {
    let device = Device::flex();
    let model = Unusual {
        experts: Param::from_tensor(tensor(1, [2, 8, 8], &device)),
        fused: Param::from_tensor(tensor(2, [8, 16], &device)),
        low: Param::from_tensor(tensor(3, [8, 2], &device)),
        high: Param::from_tensor(tensor(4, [2, 8], &device)),
        head: LinearConfig::new(8, 8).init(&device),
    };
    let forward = |model: &Unusual, x: Tensor<2>| {
        let [rows, _] = x.dims();
        let both = x.unsqueeze::<3>().expand([2, rows, 8]);
        let x = both
            .matmul(model.experts.val())
            .sum_dim(0)
            .reshape([rows, 8]);
        let [left, right] = [0..8, 8..16].map(|part| model.fused.val().slice_dim(1, part));
        let x = x.clone().matmul(left) * x.matmul(right);
        let x = x.matmul(model.low.val().matmul(model.high.val()));
        model.head.forward(x)
    };
    let mut preset = Preset::w4a16().with_group(8);
    let done = OneShot::new(preset.clone())
        .compress(model.clone(), [tensor(5, [32, 8], &device)], forward)
        .unwrap();
    assert_eq!(done.report.left, ["experts", "fused", "low", "high"]);
    assert_eq!(done.report.layers.len(), 1);
    preset.skip = vec!["experts".into()];
    let done = OneShot::new(preset)
        .compress(model, [tensor(5, [32, 8], &device)], forward)
        .unwrap();
    assert_eq!(done.report.left, ["fused", "low", "high"]);
}

/// The error, after a look at the model that comes with it.
fn refused<M: Module>(
    model: M,
    preset: Preset,
    x: Tensor<2>,
    forward: impl Fn(&M, Tensor<2>) -> Tensor<2>,
) -> OneShotError {
    let before = parameters(&model);
    let rejected = OneShot::new(preset)
        .compress(model, [x], forward)
        .unwrap_err();
    assert_eq!(before, parameters(rejected.value()));
    rejected.into_error()
}

#[test]
fn a_block_or_path_that_is_never_called() {
    let device = Device::flex();
    let x = tensor(1, [20, 8], &device);
    let named = |blocks: Option<Vec<String>>, skip: Vec<String>| {
        let preset = Preset::w8a16().with_blocks(blocks).with_skip(skip);
        refused(Net::new(&device), preset, x.clone(), |model, x| {
            model.layers[0].forward(x)
        })
    };
    let never = |path: &str| OneShotError::NeverCalled { path: path.into() };
    let blocks = vec!["layers.0".into(), "layers.1".into()];
    assert_eq!(named(Some(blocks), Vec::new()), never("layers.1"));
    assert_eq!(named(None, vec!["layers.2".into()]), never("layers.2"));
    // Nobody named it, but it lies beside one that is called.
    assert_eq!(named(None, Vec::new()), never("layers.1"));
    let first = Preset::w8a16().with_blocks(Some(vec!["layers.0".into()]));
    let done = OneShot::new(first).compress(Net::new(&device), [x.clone()], |model, x| {
        model.layers[0].forward(x)
    });
    assert_eq!(done.unwrap().report.layers.len(), 1);
    // Beside one of a group it counts if the group has a parameter of it.
    let of_group = |group: ParamGroup| {
        let oneshot = OneShot::new(Preset::w8a16()).with_blocks_of(group);
        let done = oneshot.compress(Net::new(&device), [x.clone()], |model, x| {
            model.layers[0].forward(x)
        });
        done.map(|done| done.report.layers.len())
            .map_err(|rejected| rejected.into_error())
    };
    assert_eq!(of_group(ParamGroup::from_predicate("layers.0")), Ok(1));
    assert_eq!(of_group(ParamGroup::all()), Err(never("layers.1")));
    assert_eq!(
        named(None, vec!["layers.0".into()]),
        OneShotError::NothingToCompress
    );
}

#[derive(Module, Debug)]
struct Normed {
    norm: LayerNorm,
    up: Linear,
    down: Linear,
}

#[test]
fn a_named_block_without_a_weight_of_its_own_is_called_nevertheless() {
    let device = Device::flex();
    let linear = || LinearConfig::new(8, 8).init(&device);
    let (up, down) = (linear(), linear());
    let norm = LayerNormConfig::new(8).init(&device);
    let model = with_numbers(Normed { norm, up, down }, 3);
    let named = |blocks: [&str; 2]| {
        let blocks = blocks.map(String::from).to_vec();
        let preset = Preset::w8a16().with_blocks(Some(blocks));
        let x = tensor(1, [20, 8], &device);
        refused(model.clone(), preset, x, |model, x| {
            let x = model.up.forward(model.norm.forward(x));
            model.down.forward(x)
        })
    };
    let error = named(["norm", "up"]);
    let expected = OneShotError::EmptyBlock {
        path: "norm".into(),
        within: None,
    };
    assert_eq!(error, expected);
    assert_says!(error, "`norm`", "norms");
    let error = named(["up", "up.weight"]);
    let expected = OneShotError::EmptyBlock {
        path: "up.weight".into(),
        within: Some("up".into()),
    };
    assert_eq!(error, expected);
    assert_says!(error, "`up.weight`", "`up`");
    let never = OneShotError::NeverCalled {
        path: "side".into(),
    };
    assert_eq!(named(["up", "side"]), never);
}

#[test]
fn calibration_that_is_too_short() {
    let device = Device::flex();
    let error = refused(
        Net::new(&device),
        Preset::w4a16().with_group(4),
        tensor(1, [7, 8], &device),
        Net::forward,
    );
    let expected = OneShotError::TooFewRows {
        path: "layers.0.weight".into(),
        rows: 7,
        inputs: 8,
    };
    assert_eq!(error, expected);
    let none = OneShot::new(Preset::w8a16()).compress(
        Net::new(&device),
        Vec::<Tensor<2>>::new(),
        Net::forward,
    );
    assert_eq!(
        *none.unwrap_err().error(),
        OneShotError::Graph(GraphError::NoBatch)
    );
}

/// The second layer has 12 inputs.
#[test]
fn calibration_that_is_too_short_for_a_later_layer_is_said_before_the_first_is_solved() {
    let device = Device::flex();
    let layers = [[8, 12], [12, 4]].map(|[from, to]| LinearConfig::new(from, to).init(&device));
    let model = with_numbers(
        Net {
            layers: layers.into(),
        },
        3,
    );
    let mut solved = 0;
    let rejected = OneShot::new(Preset::w4a16().with_group(4))
        .with_progress(|_, _, _| solved += 1)
        .compress(
            model,
            [tensor(1, [6, 8], &device), tensor(2, [5, 8], &device)],
            Net::forward,
        );
    let expected = OneShotError::TooFewRows {
        path: "layers.1.weight".into(),
        rows: 11,
        inputs: 12,
    };
    assert_eq!(rejected.unwrap_err().into_error(), expected);
    assert_eq!(solved, 0);
}

#[test]
fn a_weight_that_blocks_share() {
    let device = Device::flex();
    let mut model = Net::new(&device);
    model.layers[1].weight = model.layers[0].weight.clone();
    let x = tensor(1, [20, 8], &device);
    let error = refused(model.clone(), Preset::w8a16(), x.clone(), Net::forward);
    let expected = OneShotError::SharedWeight {
        paths: vec!["layers.0.weight".into(), "layers.1.weight".into()],
        operations: 2,
        blocks: "layers.0, layers.1".into(),
    };
    assert_eq!(error, expected);
    let said = error.to_string();
    assert!(
        said.starts_with("`layers.0.weight` = `layers.1.weight` is one weight"),
        "{said}"
    );
    // Skipped at one path it would change with the other; the same in a block that is not named.
    let one = Preset::w8a16().with_skip(vec!["layers.1".into()]);
    assert_eq!(
        refused(model.clone(), one, x.clone(), Net::forward),
        expected
    );
    let named = Preset::w8a16().with_blocks(Some(vec!["layers.0".into()]));
    let error = refused(model.clone(), named, x.clone(), Net::forward);
    assert!(
        matches!(&error, OneShotError::SharedWeight { blocks, .. } if blocks == "layers.0"),
        "{error}"
    );
    // Skipped at both paths there is nothing left; the tied head of the Llama is no such case.
    let skip = Preset::w8a16().with_skip(vec!["layers".into()]);
    assert_eq!(
        refused(model, skip, x, Net::forward),
        OneShotError::NothingToCompress
    );
}

/// An encoder and a decoder with the same kernel.
#[derive(Module, Debug)]
struct Tied {
    down: Conv2d,
    up: ConvTranspose2d,
}

#[test]
fn a_kernel_that_a_transposed_convolution_reads_too() {
    let device = Device::flex();
    let down = Conv2dConfig::new([4, 8], [3, 3]).init(&device);
    let mut up = ConvTranspose2dConfig::new([8, 4], [3, 3]).init(&device);
    up.weight = down.weight.clone();
    let x = tensor::<4>(1, [2, 4, 6, 6], &device);
    let forward = |model: &Tied, x: Tensor<4>| model.up.forward(model.down.forward(x));
    let done = OneShot::new(Preset::w8a16()).compress(Tied { down, up }, [x], forward);
    let expected = OneShotError::SharedWeight {
        paths: vec!["down.weight".into(), "up.weight".into()],
        operations: 2,
        blocks: "down, up".into(),
    };
    assert_eq!(*done.unwrap_err().error(), expected);
}

#[test]
fn a_weight_of_a_recurrence() {
    let device = Device::flex();
    let model = Net::new(&device);
    let twice = |model: &Net, x: Tensor<2>| {
        let x = model.layers[0].forward(x);
        model.layers[0].forward(x.slice(burn::tensor::s![.., 0..8]))
    };
    let x = tensor(1, [20, 8], &device);
    let said = refused(model, Preset::w8a16(), x, twice).to_string();
    assert!(
        said.contains("again and again") && !said.contains("its own copy"),
        "{said}"
    );
}

#[test]
fn duplicate_inputs_need_a_ridge_which_the_error_names() {
    let device = Device::flex();
    let half = tensor::<2>(1, [20, 4], &device);
    let x = Tensor::cat(vec![half.clone(), half], 1);
    let preset = Preset::sparse(0.5).with_ridge(0.0);
    let error = refused(Net::new(&device), preset, x.clone(), Net::forward);
    let OneShotError::Layer { path, source } = &error else {
        panic!("{error}");
    };
    assert_eq!(path, "layers.0.weight");
    assert!(
        matches!(source, LayerwiseError::NotPositiveDefinite { .. }),
        "{error}"
    );
    let done = OneShot::new(Preset::sparse(0.5)).compress(Net::new(&device), [x], Net::forward);
    assert!(done.unwrap().report.layers[0].relative_error < 0.1);
}

#[test]
fn dead_inputs_are_counted_and_cost_nothing() {
    let device = Device::flex();
    let mask = Tensor::<1>::from_floats([1., 1., 0., 1., 1., 0., 1., 1.], &device);
    let x = tensor::<2>(1, [20, 8], &device) * mask.unsqueeze();
    let model = Net::new(&device);
    for preset in [Preset::sparse(0.25), Preset::w4a16().with_group(4)] {
        let done = OneShot::new(preset)
            .compress(model.clone(), [x.clone()], Net::forward)
            .unwrap();
        assert_eq!(done.report.layers[0].dead_inputs, 2);
        assert!(
            values(done.model.forward(x.clone()))
                .iter()
                .all(|y| y.is_finite())
        );
    }
    // A quarter of the weights belong to dead inputs: without them nothing changes.
    let mut preset = Preset::sparse(0.25);
    preset.target = Target::OwnInputs;
    let done = OneShot::new(preset)
        .compress(model.clone(), [x.clone()], Net::forward)
        .unwrap();
    assert!(done.report.layers[0].relative_error < 1e-9);
    // On a grid they are at the codes nearest to what they were, which is no error either.
    let done = OneShot::new(Preset::w4a16().with_group(4).as_published())
        .compress(model.clone(), [x], Net::forward)
        .unwrap();
    let dense = values(model.layers[0].weight.val().transpose());
    let grid = done.weights[0].grid.as_ref().unwrap();
    for (at, (found, dense)) in done.weights[0].values.iter().zip(&dense).enumerate() {
        let of = at / 4;
        let steps = (0..16).map(|code| code as f32 - f32::from(grid.zero_points[of]));
        let nearest = steps.map(|steps| (steps * grid.scales[of] - dense).abs());
        let nearest = nearest.fold(f32::INFINITY, f32::min);
        if [2, 5].contains(&(at % 8)) {
            assert!((found - dense).abs() <= nearest + 1e-6, "{at}: {found}");
        }
    }
    assert!(done.report.layers[0].relative_error < 0.05);
}

#[test]
fn numbers_that_are_not_finite() {
    let device = Device::flex();
    let x = tensor::<2>(1, [20, 8], &device) / Tensor::<2>::zeros([20, 8], &device);
    let error = refused(
        Net::new(&device),
        Preset::w4a16().with_group(4),
        x,
        Net::forward,
    );
    let OneShotError::Layer {
        path,
        source: LayerwiseError::NotFinite { .. },
    } = &error
    else {
        panic!("{error}");
    };
    assert_eq!(path, "layers.0.weight");
}

/// Before the layers in front of it have taken their time.
#[test]
fn a_late_weight_that_is_not_finite() {
    let device = Device::flex();
    let mut net = Net::new(&device);
    net.layers[1].weight = net.layers[1].weight.clone().map(|w| w / 0.0);
    let mut begun = false;
    let rejected = OneShot::new(Preset::w4a16().with_group(4))
        .with_progress(|_, _, _| begun = true)
        .compress(net, [tensor::<2>(1, [20, 8], &device)], Net::forward);
    let error = rejected.unwrap_err().into_error();
    let OneShotError::Layer {
        path,
        source: LayerwiseError::NotFinite { .. },
    } = &error
    else {
        panic!("{error}");
    };
    assert_eq!(path, "layers.1.weight");
    assert!(!begun);
}

#[test]
fn patterns_that_do_not_divide() {
    let device = Device::flex();
    let preset: Preset = "sparse-1:3".parse().unwrap();
    let error = refused(
        Net::new(&device),
        preset,
        tensor(1, [20, 8], &device),
        Net::forward,
    );
    let OneShotError::DoesNotFit { path, .. } = &error else {
        panic!("{error}");
    };
    assert_eq!(path, "layers.0.weight");
}

/// Before the layers that it does divide have taken their time.
#[test]
fn a_pattern_that_does_not_divide_a_late_layer() {
    let device = Device::flex();
    let mut net = Net::new(&device);
    net.layers.push(LinearConfig::new(8, 6).init(&device));
    net.layers.push(LinearConfig::new(6, 8).init(&device));
    let mut begun = false;
    let preset: Preset = "sparse-2:4".parse().unwrap();
    let rejected = OneShot::new(preset)
        .with_progress(|_, _, _| begun = true)
        .compress(net, [tensor::<2>(1, [20, 8], &device)], Net::forward);
    let rejected = rejected.unwrap_err();
    let OneShotError::DoesNotFit { path, .. } = rejected.error() else {
        panic!("{}", rejected.error());
    };
    assert_eq!(path, "layers.3.weight");
    drop(rejected);
    assert!(!begun);
}

#[test]
fn a_model_in_training() {
    let device = Device::flex().autodiff();
    let rejected = OneShot::new(Preset::w8a16()).compress(
        small_llama(&device),
        tokens(&device),
        |model, x| model.forward(x),
    );
    assert_eq!(
        *rejected.unwrap_err().error(),
        OneShotError::Graph(GraphError::Training)
    );
}

#[test]
fn a_model_of_embeddings_alone() {
    let device = Device::flex();
    let table: Embedding = EmbeddingConfig::new(6, 4).init(&device);
    let indices = Tensor::<2, Int>::zeros([1, 3], &device);
    let rejected =
        OneShot::new(Preset::w8a16()).compress(table, [indices], |table, x| table.forward(x));
    assert_eq!(
        *rejected.unwrap_err().error(),
        OneShotError::NothingToCompress
    );
}
