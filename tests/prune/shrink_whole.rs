//! A whole model with smaller layers, in one call.

use burn::module::{Module, Param, ParamGroup};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{
    BatchNorm, BatchNormConfig, Embedding, EmbeddingConfig, InstanceNorm, InstanceNormConfig,
    Linear, LinearConfig,
};
use burn::tensor::activation::{elu, mish, relu};
use burn::tensor::{Device, Distribution, Int, Tensor};
use burn_lean::prune::{Masks, PruneError, Selection, Shrink, shrink::Shrunk};

use crate::support::{each_device, on_each, parameters, tensor, values, with_numbers};

/// A residual network with a shortcut that has a convolution, as ResNets have.
#[derive(Module, Debug)]
struct Residual {
    stem: Conv2d,
    stem_norm: BatchNorm,
    inner: Conv2d,
    inner_norm: BatchNorm,
    outer: Conv2d,
    outer_norm: BatchNorm,
    shortcut: Conv2d,
    head: Linear,
}

impl Residual {
    fn new(device: &Device) -> Self {
        let conv = |channels| {
            Conv2dConfig::new(channels, [3, 3])
                .with_bias(false)
                .init(device)
        };
        let model = Self {
            stem: conv([2, 6]),
            stem_norm: BatchNormConfig::new(6).init(device),
            inner: conv([6, 8]),
            inner_norm: BatchNormConfig::new(8).init(device),
            outer: conv([8, 10]),
            outer_norm: BatchNormConfig::new(10).init(device),
            shortcut: Conv2dConfig::new([6, 10], [5, 5]).init(device),
            head: LinearConfig::new(10, 3).init(device),
        };
        with_numbers(model, 5)
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<2> {
        let x = relu(self.stem_norm.forward(self.stem.forward(x)));
        let y = relu(self.inner_norm.forward(self.inner.forward(x.clone())));
        let y = self.outer_norm.forward(self.outer.forward(y));
        let y = relu(y + self.shortcut.forward(x));
        let [examples, channels, ..] = y.dims();
        let y = y.mean_dim(3).mean_dim(2).reshape([examples, channels]);
        self.head.forward(y)
    }

    fn batch(device: &Device) -> Tensor<4> {
        tensor(9, [4, 2, 10, 10], device)
    }
}

/// The weight with zeros at some places of an axis.
pub(crate) fn without<const D: usize>(
    weight: Param<Tensor<D>>,
    axis: usize,
    places: &[usize],
) -> Param<Tensor<D>> {
    weight.map(|weight| {
        let mut value = weight.inner_or_self();
        for place in places {
            let mut ranges: Vec<std::ops::Range<usize>> =
                value.dims().iter().map(|n| 0..*n).collect();
            ranges[axis] = *place..place + 1;
            let ranges: [std::ops::Range<usize>; D] = ranges.try_into().unwrap();
            value = value.slice_fill(ranges, 0.0);
        }
        value
    })
}

/// Without autodiff, where there is any.
trait Inner {
    fn inner_or_self(self) -> Self;
}

impl<const D: usize> Inner for Tensor<D> {
    fn inner_or_self(self) -> Self {
        self.without_autodiff()
    }
}

#[test]
fn channels_that_nothing_reads_go_with_all_that_belongs_to_them_and_outputs_stay() {
    each_device(|target| {
        let device = target.device.clone();
        let mut model = Residual::new(&device);
        model.outer.weight = without(model.outer.weight, 1, &[1, 5]);
        let x = Residual::batch(&device);
        let expected = model.forward(x.clone());
        let shrunk = Shrink::dead()
            .shrink(model, |model, x| model.forward(x), x.clone())
            .unwrap();
        let small = shrunk.model;
        assert_eq!(shrunk.report.removed(), 2);
        assert_eq!(small.inner.weight.dims(), [6, 6, 3, 3]);
        assert_eq!(small.inner_norm.gamma.dims(), [6]);
        assert_eq!(small.inner_norm.running_var.value_sync().dims(), [6]);
        assert_eq!(small.outer.weight.dims(), [10, 6, 3, 3]);
        assert_eq!(small.shortcut.weight.dims(), [10, 6, 5, 5]);
        let off = (small.forward(x) - expected)
            .abs()
            .max()
            .into_scalar::<f32>();
        assert!(off < 1e-4, "{off}");
    });
}

#[test]
fn channels_on_both_sides_of_a_sum_go_together_where_the_sum_is_not_read() {
    let device = Device::flex();
    let mut model = Residual::new(&device);
    model.head.weight = without(model.head.weight, 0, &[0, 9]);
    let x = Residual::batch(&device);
    let shrunk = Shrink::dead()
        .shrink(model, |model, x| model.forward(x), x)
        .unwrap();
    assert_eq!(shrunk.model.outer.weight.dims(), [8, 8, 3, 3]);
    assert_eq!(shrunk.model.shortcut.weight.dims(), [8, 6, 5, 5]);
    assert_eq!(shrunk.model.shortcut.bias.unwrap().dims(), [8]);
    assert_eq!(shrunk.model.outer_norm.beta.dims(), [8]);
}

#[test]
fn a_channel_made_of_nothing_goes_only_if_it_arrives_as_zero() {
    let device = Device::flex();
    let mut model = Residual::new(&device);
    model.inner.weight = without(model.inner.weight, 0, &[2, 3]);
    // What BatchNorm makes of nothing: beta − mean · gamma / deviation.
    let level = |values: [f32; 8]| Param::from_data(values, &device);
    let (mut mean, mut beta) = ([0.1; 8], [0.5; 8]);
    (mean[2], mean[3]) = (0.0, 0.0);
    (beta[2], beta[3]) = (-1.0, 1.0);
    model.inner_norm.beta = level(beta);
    let mean = Tensor::<1>::from_data(mean, &device);
    model.inner_norm.running_mean = burn::module::RunningState::new(mean);
    let x = Residual::batch(&device);
    let expected = model.forward(x.clone());
    let shrunk = Shrink::dead()
        .shrink(model, |model, x| model.forward(x), x.clone())
        .unwrap();
    assert_eq!(shrunk.model.inner.weight.dims()[0], 7);
    let off = (shrunk.model.forward(x) - expected)
        .abs()
        .max()
        .into_scalar::<f32>();
    assert!(off < 1e-4, "{off}");
}

#[test]
fn one_unit_stays_where_all_are_gone() {
    let device = Device::flex();
    let mut model = Residual::new(&device);
    model.outer.weight = model.outer.weight.map(|weight| weight.zeros_like());
    let x = Residual::batch(&device);
    let shrunk = Shrink::dead()
        .shrink(model, |model, x| model.forward(x), x)
        .unwrap();
    assert_eq!(shrunk.model.inner.weight.dims()[0], 1);
}

#[test]
fn a_share_of_the_multiplications_is_reached_and_the_model_still_trains() {
    let device = Device::flex().autodiff();
    let model = Residual::new(&device);
    let x = Residual::batch(&device);
    let shrunk = Shrink::to(0.5)
        .shrink(model, |model, x| model.forward(x), x.clone())
        .unwrap();
    let report = &shrunk.report;
    assert!(report.multiplications_after <= 0.5 * report.multiplications_before);
    assert!(report.multiplications_after > 0.3 * report.multiplications_before);
    // 36 · 9 · 12 · ... of the stem alone cannot be the whole: every group lost some.
    assert!(shrunk.model.head.weight.dims()[0] < 10, "{report}");
    let grads = shrunk.model.forward(x).square().mean().backward();
    assert!(shrunk.model.inner.weight.grad(&grads).is_some());
}

#[test]
fn excepted_parameters_keep_their_units() {
    let device = Device::flex();
    let shrunk = Shrink::to(0.7)
        .except(ParamGroup::from_predicate("inner"))
        .shrink(
            Residual::new(&device),
            |model, x| model.forward(x),
            Residual::batch(&device),
        )
        .unwrap();
    assert_eq!(shrunk.model.inner.weight.dims()[0], 8);
    assert!(shrunk.report.to_string().contains("they are excepted"));
}

#[test]
fn sizes_written_into_the_forward_pass_are_an_error_with_the_model() {
    let device = Device::flex();
    let model = vec![
        LinearConfig::new(4, 6).init(&device),
        LinearConfig::new(6, 2).init(&device),
    ];
    let forward = |model: &Vec<Linear>, x: Tensor<2>| {
        let x = model[0].forward(x).reshape([4, 6]);
        model[1].forward(relu(x))
    };
    let x = tensor(2, [4, 4], &device);
    let rejected = Shrink::to(0.5).shrink(model, forward, x).unwrap_err();
    assert_matches!(rejected.error(), PruneError::CannotShrink { .. });
    assert_eq!(rejected.into_value()[0].weight.dims(), [4, 6]);
}

/// Burn's `InstanceNorm` has the number of its channels as a constant and refuses any other.
#[test]
fn channels_of_a_norm_that_has_their_number_stay_and_the_others_go() {
    #[derive(Module, Debug)]
    struct Styled {
        stem: Conv2d,
        norm: InstanceNorm,
        body: Conv2d,
        head: Conv2d,
    }
    let device = Device::flex();
    let conv = |channels| Conv2dConfig::new(channels, [3, 3]).init(&device);
    let model = Styled {
        stem: conv([2, 6]),
        norm: InstanceNormConfig::new(6).init(&device),
        body: conv([6, 12]),
        head: conv([12, 3]),
    };
    let forward = |model: &Styled, x: Tensor<4>| {
        let x = relu(model.norm.forward(model.stem.forward(x)));
        model.head.forward(relu(model.body.forward(x)))
    };
    let x = tensor(3, [2, 2, 9, 9], &device);
    let before = values(forward(&model, x.clone()));
    let shrunk = Shrink::to(0.6).shrink(model, forward, x.clone()).unwrap();
    let report = shrunk.report.to_string();
    assert_eq!(shrunk.model.stem.weight.dims()[0], 6, "{report}");
    assert!(shrunk.model.body.weight.dims()[0] < 9, "{report}");
    let said = "stem.weight: 6 units stay: their number is written into the model";
    assert_says!(report, said);
    assert_ne!(values(forward(&shrunk.model, x.clone())), before);
    // Where that is all there is, the error says it.
    let rejected = Shrink::to(0.3).shrink(shrunk.model, forward, x);
    let error = rejected.unwrap_err().error().to_string();
    assert_says!(error, "those that `stem.weight` makes stay: their number");
}

#[test]
fn an_exception_that_no_parameter_meets_is_an_error() {
    let device = Device::flex();
    let rejected = Shrink::to(0.7)
        .except(ParamGroup::from_predicate("iner"))
        .shrink(
            Residual::new(&device),
            |model, x| model.forward(x),
            Residual::batch(&device),
        );
    assert_matches!(
        rejected.unwrap_err().error(),
        PruneError::InvalidConfig {
            field: "except",
            ..
        }
    );
}

#[test]
fn a_share_that_cannot_be_reached_is_an_error_that_says_what_is() {
    let device = Device::flex();
    let rejected = Shrink::to(0.01)
        .shrink(
            Residual::new(&device),
            |model, x| model.forward(x),
            Residual::batch(&device),
        )
        .unwrap_err();
    assert!(rejected.error().to_string().contains("are left, not 0.01"));
    for share in [0.0, -1.0, 1.5, f64::NAN] {
        let model = Residual::new(&device);
        let x = Residual::batch(&device);
        let rejected = Shrink::to(share).shrink(model, |model, x| model.forward(x), x);
        assert_matches!(
            rejected.unwrap_err().error(),
            PruneError::InvalidConfig { .. }
        );
    }
}

#[test]
fn masks_are_folded_in() {
    let device = Device::flex();
    let model = Residual::new(&device);
    let selection = Selection::of(&model, None).unwrap();
    let layout = selection.layout();
    let support: Vec<usize> = layout
        .layers()
        .iter()
        .flat_map(|layer| {
            let per_output = layer.len() / layer.shape[0].max(1);
            let range = layer.range();
            let is_inner = layer.path == "inner.weight";
            // Without the first output channel of `inner`.
            range.filter(move |at| !is_inner || at - layer.range().start >= per_output)
        })
        .collect();
    let masks = Masks::from_support(layout, &support).unwrap();
    let mut model = masks.attach(model).unwrap();
    let zero = Tensor::<1>::zeros([8], &device);
    model.inner_norm.beta = Param::from_tensor(zero.clone());
    model.inner_norm.running_mean = burn::module::RunningState::new(zero);
    let x = Residual::batch(&device);
    let shrunk = Shrink::dead()
        .shrink(model, |model, x| model.forward(x), x)
        .unwrap();
    assert_eq!(shrunk.model.inner.weight.dims()[0], 7);
}

#[test]
fn units_that_one_weight_makes_and_reads_stay_unless_it_is_zero_there() {
    let device = Device::flex();
    let mut tied = with_numbers(LinearConfig::new(5, 6).init(&device), 2);
    let forward = |tied: &Linear, x: Tensor<2>| {
        let hidden = relu(tied.forward(x));
        hidden.matmul(tied.weight.val().transpose())
    };
    let x = tensor(3, [4, 5], &device);
    let shrunk = Shrink::dead().shrink(tied.clone(), forward, x.clone());
    assert_eq!(shrunk.unwrap().model.weight.dims(), [5, 6]);

    tied.weight = without(tied.weight, 1, &[2]);
    let expected = forward(&tied, x.clone());
    let shrunk = Shrink::dead().shrink(tied, forward, x.clone()).unwrap();
    assert_eq!(shrunk.model.weight.dims(), [5, 5]);
    let off = (forward(&shrunk.model, x) - expected).abs().max();
    assert!(off.into_scalar::<f32>() < 1e-6);
}

#[test]
fn tied_layers_count_once_for_each_use_and_stay_tied() {
    #[derive(Module, Debug)]
    struct Twins {
        left: Linear,
        right: Linear,
        head: Linear,
    }
    let device = Device::flex();
    let left = with_numbers(LinearConfig::new(3, 8).init(&device), 2);
    let twins = Twins {
        right: left.clone(),
        left,
        head: with_numbers(LinearConfig::new(8, 2).init(&device), 5),
    };
    let forward = |twins: &Twins, x: Tensor<2>| {
        let right = relu(twins.right.forward(x.clone() * 0.5));
        twins.head.forward(relu(twins.left.forward(x)) + right)
    };
    let x = tensor(3, [4, 3], &device);
    // 4 examples · 8 features · (3 + 3 + 2), at least one feature stays.
    for (share, features) in [(0.5, 4), (0.125, 1)] {
        let shrunk = Shrink::to(share).shrink(twins.clone(), forward, x.clone());
        let Shrunk { model, report } = shrunk.unwrap();
        assert_eq!(report.multiplications_before, 256.0);
        assert_eq!(report.multiplications_after, 256.0 * share);
        assert_eq!(model.left.weight.dims(), [3, features]);
        assert_eq!(model.left.weight.id, model.right.weight.id);
        assert_ne!(model.left.weight.id, twins.left.weight.id);
        let [left, right] = [&model.left, &model.right].map(|layer| layer.bias.as_ref().unwrap());
        assert_eq!(left.id, right.id);
        assert_eq!(values(left.val()), values(right.val()));
    }
}

#[test]
fn every_output_is_compared_in_its_own_scale() {
    let device = Device::flex();
    let of = |seed, size: [usize; 2]| {
        with_numbers(LinearConfig::new(size[0], size[1]).init(&device), seed)
    };
    let mut model = vec![of(1, [4, 6]), of(2, [6, 2])];
    model[1].weight = without(model[1].weight.clone(), 0, &[2]);
    let x = tensor(3, [4, 4], &device);
    // Each makes something of the number of units, 6 before and 5 after.
    type Made = fn(Tensor<2>, f64) -> Tensor<2>;
    let second: Made = |y, units| y * units;
    let small: Made = |y, units| y * units * 1e-6;
    let not_a_number: Made = |y, units| y * 0.0 / (units - 5.0);
    for (made, is_alone) in [(second, false), (small, true), (not_a_number, true)] {
        let forward = |model: &Vec<Linear>, x: Tensor<2>| {
            let hidden = relu(model[0].forward(x));
            let units = hidden.dims()[1] as f64;
            let y = model[1].forward(hidden);
            let made = made(y.clone(), units);
            if is_alone {
                (made, None)
            } else {
                (y, Some(made))
            }
        };
        let shrunk = Shrink::dead().shrink(model.clone(), forward, x.clone());
        let shrunk = shrunk.unwrap();
        assert_eq!(shrunk.report.removed(), 0);
        let said = "their number is written into the model";
        assert!(shrunk.report.to_string().contains(said));
        assert_eq!(shrunk.model[0].weight.dims(), [4, 6]);
    }
}

#[test]
fn what_cannot_be_compared_is_refused_with_the_reason() {
    on_each(|device| {
        let refused = |model: Residual, forward: fn(&Residual, Tensor<4>) -> Tensor<2>| {
            let shrunk = Shrink::to(0.6).shrink(model, forward, Residual::batch(device));
            shrunk.map(drop).unwrap_err().to_string()
        };
        let mut broken = Residual::new(device);
        broken.head.bias = broken
            .head
            .bias
            .map(|bias| bias.map(|bias| bias * f32::NAN));
        let error = refused(broken, Residual::forward);
        assert_says!(error, "NaN");
        let error = refused(Residual::new(device), |model, x| {
            let noise = x.random_like(Distribution::Normal(0.0, 1.0));
            model.forward(x + noise)
        });
        assert_says!(error, "random numbers");
    });
    let device = Device::flex();
    let layers: Vec<Linear> = vec![
        LinearConfig::new(4, 6).init(&device),
        LinearConfig::new(6, 2).init(&device),
    ];
    let nothing = Tensor::<2>::zeros([0, 4], &device);
    let shrunk = Shrink::to(0.6).shrink(
        layers,
        |layers, x| layers.iter().fold(x, |x, layer| layer.forward(relu(x))),
        nothing,
    );
    assert_eq!(*shrunk.unwrap_err().error(), PruneError::NoSamples);
}

/// Masks of comparisons have the places of what is compared.
#[test]
fn units_go_behind_activations_that_compare() {
    let device = Device::flex();
    let model = [[6, 16], [16, 3]].map(|[from, to]| LinearConfig::new(from, to).init(&device));
    let model = with_numbers(model.to_vec(), 3);
    let x = tensor::<2>(1, [5, 6], &device);
    let activations: [fn(Tensor<2>) -> Tensor<2>; 4] = [
        mish,
        |x| elu(x, 1.0),
        |x| x.clone().mask_fill(x.lower_elem(0.1), 0.0),
        |x| {
            let others = x.clone().neg();
            x.clone().mask_where(x.greater(others.clone()), others)
        },
    ];
    for activation in activations {
        let forward = |model: &Vec<Linear>, x| model[1].forward(activation(model[0].forward(x)));
        let shrunk = Shrink::to(0.5).shrink(model.clone(), forward, x.clone());
        let shrunk = shrunk.map_err(|rejected| rejected.to_string()).unwrap();
        assert_eq!(shrunk.model[0].weight.dims(), [6, 8]);
    }
}

/// Nothing is pruned layer by layer here, and CHITA makes no layer smaller.
#[test]
fn a_forward_pass_that_reads_a_value_is_no_reason_for_another_method() {
    let device = Device::flex();
    let model = LinearConfig::new(4, 6).init(&device);
    let forward = |model: &Linear, x: Tensor<2>| {
        let scale = x.clone().sum().into_scalar::<f32>();
        model.forward(x * scale)
    };
    let x = tensor(2, [4, 4], &device);
    let rejected = Shrink::to(0.5).shrink(model, forward, x).unwrap_err();
    let error = rejected.error();
    assert_matches!(error, PruneError::ShrinkNotRecorded { .. });
    assert_says!(error, "making layers smaller needs a recorded forward pass");
    assert!(!error.to_string().contains("CHITA"), "{error}");
}

/// Its bias, of one number, gets a second axis of one place.
#[test]
fn the_only_output_stays_because_it_is_one() {
    let device = Device::flex();
    let model = [[4, 6], [6, 1]].map(|[from, to]| LinearConfig::new(from, to).init(&device));
    let model: Vec<Linear> = with_numbers(model.to_vec(), 3);
    let forward = |model: &Vec<Linear>, x: Tensor<2>| model[1].forward(relu(model[0].forward(x)));
    let x = tensor::<2>(1, [5, 4], &device);
    let shrunk = Shrink::to(0.6).shrink(model, forward, x);
    let shrunk = shrunk.map_err(|rejected| rejected.to_string()).unwrap();
    assert_eq!(shrunk.model[1].weight.dims(), [3, 1]);
    let report = shrunk.report.to_string();
    assert_says!(report, "1 unit stays: outputs of the model");
    assert!(!report.contains("reshape"), "{report}");
}

/// A recording computes nothing, so that the index is met later.
#[test]
fn a_batch_that_the_forward_pass_panics_at_gives_the_model_back() {
    let device = Device::flex();
    let table: Embedding = EmbeddingConfig::new(5, 4).init(&device);
    let model = (table, LinearConfig::new(4, 2).init(&device));
    let before = parameters(&model);
    let forward = |model: &(Embedding, Linear), tokens: Tensor<2, Int>| {
        model.1.forward(model.0.forward(tokens))
    };
    let beyond = Tensor::<2, Int>::from_ints([[1, 5]], &device);
    let rejected = Shrink::to(0.5).shrink(model, forward, beyond).unwrap_err();
    assert!(
        matches!(
            rejected.error(),
            PruneError::Panics {
                closure: "forward pass",
                ..
            }
        ),
        "{}",
        rejected.error()
    );
    assert_eq!(parameters(rejected.value()), before);
}
