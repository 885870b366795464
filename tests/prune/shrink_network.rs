//! Whole networks without the units that pruning emptied: what goes together, what stays and why.

use burn::module::{Module, ModuleMapper, Param, ParamGroup};
use burn::nn::attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::pool::{MaxPool2d, MaxPool2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig, PaddingConfig2d};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor, TensorData};
use burn_lean::prune::{Masks, PruneError, ShrinkReport, shrink};

use crate::support::{each_device, parameters, tensor, values, with_numbers};

/// A stem, a residual block, pooling, two linear layers.
#[derive(Module, Debug)]
struct Net {
    stem: Conv2d,
    norm: BatchNorm,
    inner: Conv2d,
    outer: Conv2d,
    pool: MaxPool2d,
    body: Linear,
    head: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        let conv = |from, to| {
            let config = Conv2dConfig::new([from, to], [3, 3]);
            config
                .with_padding(PaddingConfig2d::Explicit(1, 1, 1, 1))
                .init(device)
        };
        let net = Self {
            stem: conv(3, 8),
            norm: BatchNormConfig::new(8).init(device),
            inner: conv(8, 6),
            outer: conv(6, 8),
            pool: MaxPool2dConfig::new([2, 2]).with_strides([2, 2]).init(),
            body: LinearConfig::new(8 * 4, 10).init(device),
            head: LinearConfig::new(10, 3).init(device),
        };
        with_numbers(net, 1)
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<2> {
        let x = relu(self.norm.forward(self.stem.forward(x)));
        let x = self.outer.forward(relu(self.inner.forward(x.clone()))) + x;
        let x = self.pool.forward(x).flatten(1, 3);
        self.head.forward(relu(self.body.forward(x)))
    }
}

/// Zeros at some indices of an axis of the parameters at some paths.
struct Empty<'a>(Vec<(&'a str, usize, Vec<usize>)>, Vec<String>);

fn empty<M: Module>(model: M, slices: Vec<(&str, usize, Vec<usize>)>) -> M {
    model.map(&mut Empty(slices, Vec::new()))
}

impl ModuleMapper for Empty<'_> {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.1.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.1.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let path = self.1.join(".");
        let slices = self.0.iter().filter(|(of, ..)| *of == path);
        slices.fold(param, |param, (_, axis, units)| {
            param.map(|value| {
                let (device, shape) = (value.device(), value.dims());
                let inner: usize = shape[axis + 1..].iter().product();
                let mut numbers = values(value);
                for (index, number) in numbers.iter_mut().enumerate() {
                    if units.contains(&(index / inner % shape[*axis])) {
                        *number = 0.0;
                    }
                }
                Tensor::from_data(TensorData::new(numbers, shape), &device)
            })
        })
    }
}

fn close(found: Tensor<2>, expected: Tensor<2>) {
    for (found, expected) in values(found).into_iter().zip(values(expected)) {
        let bound = 1e-5 * expected.abs().max(1.0);
        assert!((found - expected).abs() <= bound, "{found}, not {expected}");
    }
}

/// Units before and after, of the group that this weight makes.
fn of(report: &ShrinkReport, maker: &str) -> (usize, usize) {
    let mut groups = report.groups.iter();
    let group = groups.find(|group| group.makers.iter().any(|path| path == maker));
    let group = group.unwrap_or_else(|| panic!("no group of {maker}: {report}"));
    (group.units, group.kept)
}

#[test]
fn units_go_together_through_norms_sums_pooling_and_reshapes() {
    each_device(|target| {
        let silent = |unit: usize| {
            vec![
                ("stem.weight", 0, vec![unit]),
                ("stem.bias", 0, vec![unit]),
                ("norm.beta", 0, vec![unit]),
                ("norm.running_mean", 0, vec![unit]),
                ("outer.weight", 0, vec![unit]),
                ("outer.bias", 0, vec![unit]),
            ]
        };
        let mut slices = silent(2);
        slices.extend([
            // Nothing reads channel 5 of the sum.
            ("inner.weight", 1, vec![5]),
            ("body.weight", 0, (20..24).collect()),
            // Of channel 6 the second layer still reads a position.
            ("inner.weight", 1, vec![6]),
            ("body.weight", 0, vec![24, 25, 27]),
            // Two channels inside of the block: one is not read, one makes a 0.
            ("outer.weight", 1, vec![1]),
            ("inner.weight", 0, vec![3]),
            ("inner.bias", 0, vec![3]),
            // Features of the body.
            ("head.weight", 0, vec![0, 4, 9]),
        ]);
        let net = empty(Net::new(&target.device), slices);
        let x = tensor::<4>(2, [2, 3, 4, 4], &target.device);
        let expected = net.forward(x.clone());
        let (small, report) = shrink(net, x.clone(), Net::forward).unwrap();
        close(small.forward(x.clone()), expected);
        let sum = &report.groups[0];
        assert_eq!(sum.makers, ["stem.weight", "outer.weight"], "{report}");
        assert_eq!(sum.readers, ["inner.weight", "body.weight"], "{report}");
        assert_eq!(of(&report, "stem.weight"), (8, 6), "{report}");
        assert_eq!(of(&report, "inner.weight"), (6, 4), "{report}");
        assert_eq!(of(&report, "body.weight"), (10, 7), "{report}");
        let last = report.groups.last().unwrap();
        assert_eq!(last.blocked.as_deref(), Some("they are a result"));
        assert_eq!(small.stem.weight.dims(), [6, 3, 3, 3]);
        assert_eq!(small.inner.weight.dims(), [4, 6, 3, 3]);
        assert_eq!(small.norm.running_var.value().dims(), [6]);
        assert_eq!(small.body.weight.dims(), [24, 7]);
        let numbers: usize = parameters(&small).iter().map(|one| one.values.len()).sum();
        assert_eq!(report.numbers[1], numbers);
        assert!(report.numbers[1] < report.numbers[0]);
        // Another batch, and again: nothing more goes.
        let x = tensor::<4>(5, [3, 3, 4, 4], &target.device);
        let (again, report) = shrink(small.clone(), x.clone(), Net::forward).unwrap();
        assert_eq!(report.numbers[0], report.numbers[1]);
        close(again.forward(x.clone()), small.forward(x));
    });
}

#[test]
fn a_constant_that_is_no_zero_stays() {
    let device = Device::flex();
    let net = empty(Net::new(&device), vec![("inner.weight", 0, vec![3])]);
    let mut bias = values(net.inner.bias.as_ref().unwrap().val());
    bias[3] = 0.25;
    let mut net = net;
    net.inner.bias = Some(Param::from_data(TensorData::new(bias, [6]), &device));
    let x = tensor::<4>(2, [2, 3, 4, 4], &device);
    let (small, report) = shrink(net, x, Net::forward).unwrap();
    assert_eq!(of(&report, "inner.weight"), (6, 6));
    assert_eq!(small.inner.weight.dims(), [6, 8, 3, 3]);
}

#[test]
fn masks_are_folded_in_and_one_unit_stays() {
    let device = Device::flex();
    let all = (0..10).collect::<Vec<_>>();
    let zeros = empty(Net::new(&device), vec![("head.weight", 0, all)]);
    let masks = Masks::from_zeros(&zeros, &ParamGroup::from_path("head.weight")).unwrap();
    let masked = masks.attach(Net::new(&device)).unwrap();
    let x = tensor::<4>(2, [2, 3, 4, 4], &device);
    let expected = zeros.forward(x.clone());
    let (small, report) = shrink(masked, x.clone(), Net::forward).unwrap();
    assert_eq!(of(&report, "body.weight"), (10, 1), "{report}");
    close(small.forward(x), expected);
}

#[derive(Module, Debug)]
struct Depthwise {
    first: Conv2d,
    each: Conv2d,
    last: Conv2d,
}

#[derive(Module, Debug)]
struct Attending {
    body: Linear,
    attention: MultiHeadAttention,
}

#[test]
fn what_is_not_followed_stays_and_the_report_says_why() {
    let device = Device::flex();
    let conv = |from, to, groups| {
        let config = Conv2dConfig::new([from, to], [1, 1]).with_groups(groups);
        config.init(&device)
    };
    let net = Depthwise {
        first: conv(2, 4, 1),
        each: conv(4, 4, 4),
        last: conv(4, 2, 1),
    };
    let net = empty(with_numbers(net, 1), vec![("last.weight", 1, vec![1])]);
    let x = tensor::<4>(2, [1, 2, 3, 3], &device);
    let forward = |net: &Depthwise, x| net.last.forward(net.each.forward(net.first.forward(x)));
    let (_, report) = shrink(net, x, forward).unwrap();
    for maker in ["first.weight", "each.weight"] {
        let group = report.groups.iter().find(|one| one.makers == [maker]);
        let group = group.unwrap_or_else(|| panic!("{report}"));
        let reason = group.blocked.as_deref().unwrap_or_default();
        assert!(reason.contains("groups of channels"), "{report}");
        assert_eq!(group.kept, 4);
    }

    let net = Attending {
        body: LinearConfig::new(4, 4).init(&device),
        attention: MultiHeadAttentionConfig::new(4, 2)
            .with_dropout(0.0)
            .init(&device),
    };
    let net = with_numbers(net, 1);
    let x = tensor::<3>(2, [1, 3, 4], &device);
    let forward = |net: &Attending, x| {
        let x = net.body.forward(x);
        net.attention.forward(MhaInput::self_attn(x)).context
    };
    let expected = values(forward(&net, x.clone()));
    let (same, report) = shrink(net, x.clone(), forward).unwrap();
    assert_eq!(values(forward(&same, x)), expected);
    assert_eq!(report.numbers[0], report.numbers[1]);
    let projections = report.groups.iter().filter(|group| group.blocked.is_some());
    assert!(projections.count() >= 4, "{report}");
}

#[test]
fn a_forward_pass_with_sizes_of_its_own_is_refused_and_the_model_comes_back() {
    let device = Device::flex();
    let net = empty(Net::new(&device), vec![("head.weight", 0, vec![0])]);
    let x = tensor::<4>(2, [2, 3, 4, 4], &device);
    // Slices are not followed: nothing goes.
    let sliced = |net: &Net, x: Tensor<4>| {
        let x = relu(net.norm.forward(net.stem.forward(x)));
        let x = relu(net.body.forward(net.pool.forward(x).flatten::<2>(1, 3)));
        net.head.forward(x.clone()) + x.slice([0..2, 0..3])
    };
    let (net, report) = shrink(net, x.clone(), sliced).unwrap();
    assert_eq!(of(&report, "body.weight"), (10, 10), "{report}");
    let before = parameters(&net);
    let forward = |net: &Net, x: Tensor<4>| {
        let x = relu(net.norm.forward(net.stem.forward(x)));
        let x = relu(net.body.forward(net.pool.forward(x).flatten::<2>(1, 3)));
        net.head.forward(x.reshape([2, 10]))
    };
    let (net, error) = shrink(net, x, forward).unwrap_err().into_parts();
    let PruneError::CannotShrink { reason } = &error else {
        panic!("{error}")
    };
    assert!(
        reason.contains("does not take the smaller network"),
        "{reason}"
    );
    assert_eq!(parameters(&net), before);
}
