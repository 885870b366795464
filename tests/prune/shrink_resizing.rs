//! Smaller layers where numbers that are written into the model follow.

use burn::module::Module;
use burn::nn::attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig};
use burn::nn::conv::{Conv2d, Conv2dConfig, ConvTranspose2d, ConvTranspose2dConfig};
use burn::nn::{
    BatchNorm, BatchNormConfig, GroupNorm, GroupNormConfig, Linear, LinearConfig, PaddingConfig2d,
};
use burn::store::ModuleRecord;
use burn::tensor::activation::{relu, softmax};
use burn::tensor::{Device, Tensor};
use burn_lean::prune::{PruneError, Shrink, load_shrunk};

use crate::shrink_whole::without;
use crate::support::{on_each, tensor, values, with_numbers};

/// The inverted residual of MobileNets: channels are made, filtered one by one, and put together.
#[derive(Module, Debug)]
struct Inverted {
    expand: Conv2d,
    expand_norm: BatchNorm,
    filter: Conv2d,
    filter_norm: GroupNorm,
    project: Conv2d,
}

impl Inverted {
    fn new(device: &Device) -> Self {
        let conv = |channels| Conv2dConfig::new(channels, [1, 1]).init(device);
        let model = Self {
            expand: conv([3, 12]),
            expand_norm: BatchNormConfig::new(12).init(device),
            filter: Conv2dConfig::new([12, 24], [3, 3])
                .with_groups(12)
                .with_padding(PaddingConfig2d::Same)
                .init(device),
            filter_norm: GroupNormConfig::new(6, 24).init(device),
            project: conv([24, 3]),
        };
        with_numbers(model, 3)
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        let y = relu(self.expand_norm.forward(self.expand.forward(x.clone())));
        let y = relu(self.filter_norm.forward(self.filter.forward(y)));
        x + self.project.forward(y)
    }

    fn resize(&mut self) {
        self.filter.groups = self.filter.weight.dims()[0] / 2;
        self.filter_norm.num_channels = self.filter.weight.dims()[0];
        self.filter_norm.num_groups = self.filter_norm.num_channels / 4;
    }
}

#[test]
fn channels_of_a_depthwise_convolution_go_with_their_groups_and_outputs_stay() {
    on_each(|device| {
        let mut model = Inverted::new(device);
        // The last but one group of the norm: what channels 8 and 9 become.
        model.project.weight = without(model.project.weight, 1, &[16, 17, 18, 19]);
        let x = tensor(5, [2, 3, 6, 6], device);
        let expected = model.forward(x.clone());
        let record = |model: Inverted| {
            let bytes = model.into_record().into_bytes().unwrap();
            ModuleRecord::from_bytes(bytes).unwrap()
        };
        // Without the numbers nothing can go.
        let forward = |model: &Inverted, x| model.forward(x);
        let stays = Shrink::dead().shrink(model, forward, x.clone()).unwrap();
        assert_eq!(stays.report.removed(), 0);
        let shrunk = Shrink::dead()
            .shrink_resizing(stays.model, forward, x.clone(), Inverted::resize)
            .unwrap();
        let small = shrunk.model;
        assert_eq!(shrunk.report.removed(), 1, "{}", shrunk.report);
        assert_eq!(small.expand.weight.dims(), [10, 3, 1, 1]);
        assert_eq!(small.expand_norm.gamma.dims(), [10]);
        assert_eq!(small.filter.weight.dims(), [20, 1, 3, 3]);
        assert_eq!((small.filter.groups, small.filter_norm.num_groups), (10, 5));
        let off = |y: Tensor<4>| {
            let off = (y - expected.clone()).abs().max();
            off.into_scalar::<f32>()
        };
        assert!(off(small.forward(x.clone())) < 1e-4);
        // And from a file.
        let mut loaded = load_shrunk(Inverted::new(device), record(small)).unwrap();
        loaded.resize();
        assert!(off(loaded.forward(x)) < 1e-4);
    });
}

#[test]
fn a_share_is_reached_through_depthwise_convolutions_and_the_model_still_trains() {
    let device = Device::flex().autodiff();
    let model = Inverted::new(&device);
    let x: Tensor<4> = tensor(5, [2, 3, 6, 6], &device);
    let shrunk = Shrink::to(0.4)
        .shrink_resizing(
            model,
            |model, x| model.forward(x),
            x.clone(),
            Inverted::resize,
        )
        .unwrap();
    let report = shrunk.report;
    assert!(report.multiplications_after <= 0.4 * report.multiplications_before);
    // Multiplications of every convolution are one for each channel.
    assert!(shrunk.model.filter.groups <= 4);
    let gradients = shrunk.model.forward(x).sum().backward();
    let gradient = shrunk.model.filter.weight.grad(&gradients).unwrap();
    assert_eq!(gradient.dims()[0], 2 * shrunk.model.filter.groups);
}

#[test]
fn channels_of_a_transposed_depthwise_convolution_go() {
    #[derive(Module, Debug)]
    struct Up {
        first: Conv2d,
        up: ConvTranspose2d,
        last: Conv2d,
    }
    let device = Device::flex();
    let conv = |channels| Conv2dConfig::new(channels, [1, 1]).init(&device);
    let mut model = with_numbers(
        Up {
            first: conv([2, 6]),
            up: ConvTranspose2dConfig::new([6, 6], [2, 2])
                .with_stride([2, 2])
                .with_groups(6)
                .init(&device),
            last: conv([6, 2]),
        },
        7,
    );
    model.last.weight = without(model.last.weight, 1, &[0, 4]);
    let forward = |model: &Up, x| model.last.forward(model.up.forward(model.first.forward(x)));
    let x = tensor(1, [2, 2, 3, 3], &device);
    let expected = values(forward(&model, x.clone()));
    let shrunk = Shrink::dead()
        .shrink_resizing(model, forward, x.clone(), |model| {
            let [channels, ..] = model.up.weight.dims();
            model.up.groups = channels;
            model.up.channels = [channels; 2];
        })
        .unwrap();
    assert_eq!(shrunk.model.up.weight.dims(), [4, 1, 2, 2]);
    let found = values(forward(&shrunk.model, x));
    assert_near!(found.iter(), &expected, 1e-4);
}

#[test]
fn of_groups_of_several_channels_the_same_of_all_go_and_their_number_stays() {
    // That of ResNeXt.
    let device = Device::flex();
    let conv = |[i, o, groups]: [usize; 3]| {
        let config = Conv2dConfig::new([i, o], [3, 3]).with_groups(groups);
        config.init(&device)
    };
    let model = [[3, 8, 1], [8, 12, 2], [12, 4, 1]].map(conv).to_vec();
    let mut model = with_numbers(model, 2);
    // The second channel of both groups that are made; and the first that are read.
    model[2].weight = without(model[2].weight.clone(), 1, &[1, 7]);
    model[1].weight = without(model[1].weight.clone(), 1, &[0]);
    let forward =
        |model: &Vec<Conv2d>, x: Tensor<4>| model.iter().fold(x, |x, layer| relu(layer.forward(x)));
    let x = tensor(4, [2, 3, 8, 8], &device);
    let expected = values(forward(&model, x.clone()));
    let shrunk = Shrink::dead().shrink(model, forward, x.clone()).unwrap();
    let small = shrunk.model;
    assert_eq!(small[0].weight.dims(), [6, 3, 3, 3]);
    assert_eq!(small[1].weight.dims(), [10, 3, 3, 3]);
    assert_eq!(
        (small[1].groups, small[2].weight.dims()),
        (2, [4, 10, 3, 3])
    );
    let found = values(forward(&small, x));
    assert_near!(found.iter(), &expected, 1e-3);
}

/// Attention whose queries share keys and values, as those of Llamas.
#[derive(Module, Debug)]
struct Grouped {
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    heads: usize,
    shared: usize,
}

impl Grouped {
    const WIDTH: usize = 4;

    fn new(device: &Device) -> Self {
        let linear = |[i, o]: [usize; 2]| LinearConfig::new(i, o).init(device);
        let model = Self {
            query: linear([10, 24]),
            key: linear([10, 12]),
            value: linear([10, 12]),
            output: linear([24, 10]),
            heads: 6,
            shared: 3,
        };
        with_numbers(model, 8)
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let [examples, length, _] = x.dims();
        let split = |layer: &Linear, heads: usize| {
            let y = layer.forward(x.clone());
            y.reshape([examples, length, heads, Self::WIDTH])
                .swap_dims(1, 2)
        };
        let repeated = |y: Tensor<4>| {
            let times = self.heads / self.shared;
            y.unsqueeze_dim::<5>(2)
                .expand([examples, self.shared, times, length, Self::WIDTH])
                .reshape([examples, self.heads, length, Self::WIDTH])
        };
        let query = split(&self.query, self.heads);
        let key = repeated(split(&self.key, self.shared));
        let value = repeated(split(&self.value, self.shared));
        let scores = query.matmul(key.transpose()) / (Self::WIDTH as f32).sqrt();
        let found = softmax(scores, 3).matmul(value).swap_dims(1, 2);
        let width = self.heads * Self::WIDTH;
        self.output
            .forward(found.reshape([examples, length, width]))
    }

    fn resize(&mut self) {
        self.heads = self.query.weight.dims()[1] / Self::WIDTH;
        self.shared = self.key.weight.dims()[1] / Self::WIDTH;
    }
}

#[test]
fn heads_that_nothing_reads_go_with_the_keys_and_values_that_they_share() {
    on_each(|device| {
        let mut model = Grouped::new(device);
        // Both heads of the second keys; of the third ones one, which does not go alone.
        let places: Vec<usize> = (8..16).chain(16..20).collect();
        model.output.weight = without(model.output.weight, 0, &places);
        let x = tensor(6, [2, 5, 10], device);
        let expected = values(model.forward(x.clone()));
        let forward = |model: &Grouped, x| model.forward(x);
        let shrunk = Shrink::dead()
            .shrink_resizing(model, forward, x.clone(), Grouped::resize)
            .unwrap();
        let small = shrunk.model;
        assert_eq!((small.heads, small.shared), (4, 2));
        assert_eq!(small.query.weight.dims(), [10, 16]);
        assert_eq!(small.key.bias.as_ref().unwrap().dims(), [8]);
        assert_eq!(small.output.weight.dims(), [16, 10]);
        let found = values(small.forward(x));
        assert_near!(found.iter(), &expected, 1e-3);
    });
}

/// Attention with one projection for queries, keys and values.
#[derive(Module, Debug)]
struct Fused {
    project: Linear,
    output: Linear,
    heads: usize,
}

impl Fused {
    const WIDTH: usize = 4;

    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let [examples, length, _] = x.dims();
        let all = self.project.forward(x);
        let all = all.reshape([examples, length, 3, self.heads, Self::WIDTH]);
        let [query, key, value] = [0, 1, 2].map(|part: usize| {
            let one = all.clone().narrow(2, part, 1);
            one.squeeze_dim::<4>(2).swap_dims(1, 2)
        });
        let found = softmax(query.matmul(key.transpose()), 3).matmul(value);
        let width = self.heads * Self::WIDTH;
        let found = found.swap_dims(1, 2).reshape([examples, length, width]);
        self.output.forward(found)
    }
}

#[test]
fn of_one_projection_for_all_three_whole_heads_go() {
    let device = Device::flex();
    let model = Fused {
        project: LinearConfig::new(10, 3 * 5 * Fused::WIDTH).init(&device),
        output: LinearConfig::new(5 * Fused::WIDTH, 10).init(&device),
        heads: 5,
    };
    let mut model = with_numbers(model, 8);
    model.output.weight = without(model.output.weight, 0, &[4, 5, 6, 7]);
    let x = tensor(6, [2, 5, 10], &device);
    let expected = values(model.forward(x.clone()));
    let forward = |model: &Fused, x| model.forward(x);
    let shrunk = Shrink::dead()
        .shrink_resizing(model, forward, x.clone(), |model| {
            model.heads = model.output.weight.dims()[0] / Fused::WIDTH;
        })
        .unwrap();
    assert_eq!(shrunk.model.project.weight.dims(), [10, 48]);
    assert_eq!(shrunk.model.heads, 4);
    let found = values(shrunk.model.forward(x));
    assert_near!(found.iter(), &expected, 1e-3);
}

#[derive(Module, Debug)]
struct Mixed {
    attention: MultiHeadAttention,
    up: Linear,
    down: Linear,
}

impl Mixed {
    fn new(device: &Device) -> Self {
        let model = Self {
            attention: MultiHeadAttentionConfig::new(8, 2).init(device),
            up: LinearConfig::new(8, 32).init(device),
            down: LinearConfig::new(32, 2).init(device),
        };
        with_numbers(model, 1)
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let x = self.attention.forward(MhaInput::self_attn(x)).context;
        self.down.forward(relu(self.up.forward(x)))
    }
}

#[test]
fn what_does_not_follow_stays_and_the_rest_goes() {
    let device = Device::flex();
    let x = tensor(3, [2, 4, 8], &device);
    let forward = |model: &Mixed, x| model.forward(x);
    let mut model = Mixed::new(&device);
    let output = model.attention.output.weight;
    model.attention.output.weight = without(output, 0, &[0, 1, 2, 3]);
    model.down.weight = without(model.down.weight, 0, &[7, 9]);
    let shrunk = Shrink::dead()
        .shrink_resizing(model, forward, x, |_| {})
        .unwrap();
    assert_eq!(shrunk.model.up.weight.dims()[1], 30);
    // Burn's attention takes its heads to fill what comes in.
    assert_eq!(shrunk.model.attention.query.weight.dims(), [8, 8]);
    let stays = |path: &str| {
        let mut groups = shrunk.report.groups.iter();
        let group = groups.find(|one| one.units == 2 && one.paths.iter().any(|at| at == path));
        group.unwrap().fixed.clone().unwrap()
    };
    assert_says!(stays("attention.query.weight"), "written into the model");
}

#[test]
fn a_closure_that_does_something_else_is_an_error_with_the_model() {
    let device = Device::flex();
    let x: Tensor<3> = tensor(3, [2, 4, 8], &device);
    let forward = |model: &Mixed, x| model.forward(x);
    type Resize = fn(&mut Mixed);
    let cases: [(Resize, &str); 2] = [
        (
            |model| model.up.weight = model.up.weight.clone().map(|weight| weight * 2.0),
            "changes the outputs",
        ),
        (|model| assert_eq!(model.attention.n_heads, 3), "panics"),
    ];
    for (resize, reason) in cases {
        let model = Mixed::new(&device);
        let before = values(model.up.weight.val());
        let rejected = Shrink::to(0.8)
            .shrink_resizing(model, forward, x.clone(), resize)
            .unwrap_err();
        let (model, error) = rejected.into_parts();
        let is_said = |said: &String| said.contains(reason);
        assert!(
            matches!(&error, PruneError::CannotShrink { reason } if is_said(reason)),
            "{error}"
        );
        assert_eq!(values(model.up.weight.val()), before);
    }
}

/// A state of zeros, of a size that no closure sets.
#[test]
fn what_resizing_does_not_reach_is_not_said_to_follow_with_it() {
    let device = Device::flex();
    let model = [[4, 6], [6, 2]].map(|[from, to]| LinearConfig::new(from, to).init(&device));
    let model: Vec<Linear> = with_numbers(model.to_vec(), 3);
    let forward = |model: &Vec<Linear>, x: Tensor<2>| {
        let hidden = model[0].forward(x);
        let state = Tensor::zeros([4, 6], &hidden.device());
        model[1].forward(hidden + state)
    };
    let x = tensor::<2>(1, [4, 4], &device);
    let plain = Shrink::to(0.5).shrink(model, forward, x.clone());
    let (model, error) = plain.unwrap_err().into_parts();
    assert_says!(error, "written into the model", "`Shrink::shrink_resizing`");
    let resizing = Shrink::to(0.5).shrink_resizing(model, forward, x, |_| {});
    let error = resizing.unwrap_err().to_string();
    assert_says!(error, "written into the model", "`resize` does not reach");
    assert!(!error.contains("shrink_resizing"), "{error}");
}
