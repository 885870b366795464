//! Gradients of single examples from one backward pass, against one pass each.

use burn::module::{Module, Param};
use burn::nn::attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig};
use burn::nn::conv::{Conv1d, Conv1dConfig, Conv2d, Conv2dConfig};
use burn::nn::pool::{MaxPool2d, MaxPool2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::nn::{PaddingConfig1d, PaddingConfig2d, loss::CrossEntropyLossConfig};
use burn::tensor::activation::{gelu, relu};
use burn::tensor::{Bool, DType, Device, Distribution, Int, Tensor, TensorData};
use burn_lean::prune::{
    Batch, FisherConfig, Masks, Selection,
    fisher::{FisherReport, GradientMethod},
};
use burn_lean::stop_gradient;

use crate::support::{devices, each_device, on_each, tensor, with_numbers};

/// Convolutions with stride, dilation, groups and a skip connection, then a linear layer.
#[derive(Module, Debug)]
struct Images {
    first: Conv2d,
    second: Conv2d,
    norm: BatchNorm,
    pool: MaxPool2d,
    head: Linear,
}

impl Images {
    fn new(device: &Device) -> Self {
        let conv = |channels| Conv2dConfig::new(channels, [3, 3]);
        let net = Self {
            first: conv([2, 4]).with_stride([2, 2]).init(device),
            second: conv([4, 4])
                .with_groups(2)
                .with_dilation([2, 2])
                .with_padding(PaddingConfig2d::Explicit(2, 2, 2, 2))
                .init(device),
            norm: BatchNormConfig::new(4).init(device),
            pool: MaxPool2dConfig::new([2, 2]).init(),
            head: LinearConfig::new(4 * 2 * 2, 3).init(device),
        };
        with_numbers(net, 3)
    }

    fn loss(&self, batch: &(Tensor<4>, Tensor<1, Int>)) -> Tensor<1> {
        let x = relu(self.first.forward(batch.0.clone()));
        let x = self.norm.forward(self.second.forward(x.clone())) + x;
        let logits = self.head.forward(self.pool.forward(x).flatten(1, 3));
        let loss = CrossEntropyLossConfig::new().init(&logits.device());
        loss.forward(logits, batch.1.clone())
    }
}

fn images(count: usize, device: &Device) -> (Tensor<4>, Tensor<1, Int>) {
    let labels: Vec<i64> = (0..count as i64).map(|index| index % 3).collect();
    let labels = Tensor::from_data(TensorData::new(labels, [count]), device);
    (tensor(5, [count, 2, 9, 9], device), labels)
}

/// A sequence model: the same linear layer twice, attention, a sum over positions.
#[derive(Module, Debug)]
struct Sequence {
    input: Linear,
    attention: MultiHeadAttention,
    own: Param<Tensor<2>>,
}

impl Sequence {
    fn new(device: &Device) -> Self {
        let net = Self {
            input: LinearConfig::new(4, 4).init(device),
            attention: MultiHeadAttentionConfig::new(4, 2)
                .with_dropout(0.0)
                .init(device),
            own: Param::from_tensor(Tensor::ones([4, 2], device)),
        };
        with_numbers(net, 8)
    }

    fn loss(&self, x: &Tensor<3>) -> Tensor<1> {
        let x = gelu(self.input.forward(self.input.forward(x.clone())));
        let x = self.attention.forward(MhaInput::self_attn(x)).context;
        let [batch, length, _] = x.dims();
        let y = x.reshape([batch * length, 4]).matmul(self.own.val());
        y.tanh().square().mean()
    }
}

/// Both ways, and the report of the batched one.
pub(crate) fn both<M: Module, B: Batch>(
    model: &M,
    loss: impl Fn(&M, &B) -> Tensor<1> + Copy,
    batch: B,
    size: usize,
    group: Option<&burn::module::ParamGroup>,
) -> (Vec<Vec<f32>>, Vec<Vec<f32>>, FisherReport) {
    let selection = Selection::of(model, group).unwrap();
    let n = batch.examples() / size;
    let config = FisherConfig::new(n).with_batch_size(size);
    let rows = |config: FisherConfig| {
        let fisher = config
            .collect(model, &selection, loss, [batch.clone()])
            .unwrap();
        let rows = (0..n)
            .map(|row| fisher.gradients.row(row).unwrap())
            .collect();
        (rows, fisher.report)
    };
    let (batched, report) = rows(config.clone());
    let (plain, _) = rows(config.with_method(GradientMethod::Plain));
    (batched, plain, report)
}

/// Equal up to 1e-5 of the largest number: some hundred products in another order.
pub(crate) fn close(found: &[Vec<f32>], expected: &[Vec<f32>]) {
    let lengths = |rows: &[Vec<f32>]| rows.iter().map(Vec::len).collect::<Vec<_>>();
    assert_eq!(lengths(found), lengths(expected));
    let largest = expected
        .iter()
        .flatten()
        .fold(0f32, |max, x| max.max(x.abs()));
    assert!(largest > 0.0);
    assert_near!(
        found.iter().flatten(),
        expected.iter().flatten(),
        1e-5 * largest
    );
}

#[test]
fn convolutions_in_one_pass_have_the_gradients_of_one_pass_each() {
    each_device(|target| {
        let net = Images::new(&target.device);
        for size in [1, 3] {
            let (batched, plain, report) =
                both(&net, Images::loss, images(6, &target.device), size, None);
            assert_eq!(report.fallback, None);
            assert_eq!(report.batched_rows, 6 / size);
            close(&batched, &plain);
        }
    });
}

#[test]
fn sequences_and_weights_that_are_used_twice_do_too() {
    each_device(|target| {
        let net = Sequence::new(&target.device);
        let all = burn::module::ParamGroup::from_predicate("weight")
            .fuse(&burn::module::ParamGroup::from_path("own"));
        for size in [1, 2] {
            let x = tensor::<3>(2, [4, 3, 4], &target.device);
            let (batched, plain, report) = both(&net, Sequence::loss, x, size, Some(&all));
            assert_eq!(report.fallback, None);
            assert_eq!(report.batched_rows, 4 / size);
            close(&batched, &plain);
        }
    });
}

/// A bootstrapped target, of which few examples have one: no gradient goes there.
#[test]
fn what_a_loss_stops_is_stopped_in_one_pass_too() {
    each_device(|target| {
        let net = with_numbers(LinearConfig::new(3, 2).init(&target.device), 1);
        let loss = |net: &Linear, batch: &(Tensor<2>, Tensor<2>, Tensor<2>)| {
            let (x, next, live) = batch.clone();
            let target = stop_gradient(net.forward(next)) * live * 10.0 + 1.0;
            (net.forward(x) - target).square().mean()
        };
        let of = |seed| tensor::<2>(seed, [16, 3], &target.device);
        let live = of(3).slice([0..16, 0..1]).greater_elem(0.8).float();
        let batch = (of(1), of(2), live);
        let (batched, plain, report) = both(&net, loss, batch, 1, None);
        assert_eq!((report.fallback, report.batched_rows), (None, 16));
        close(&batched, &plain);
    });
}

/// A contrastive loss of one example is a constant.
#[test]
fn a_loss_across_examples_has_gradients_of_several() {
    let device = Device::flex();
    let net = with_numbers(LinearConfig::new(3, 2).init(&device), 1);
    let loss = |net: &Linear, x: &Tensor<2>| {
        let y = net.forward(x.clone());
        (y.clone() - y.mean_dim(0)).square().mean()
    };
    let selection = Selection::of(&net, None).unwrap();
    let zeros = |config: FisherConfig| {
        let x = tensor::<2>(1, [8, 3], &device);
        let fisher = config.collect(&net, &selection, loss, [x]).unwrap();
        fisher.report.zero_columns
    };
    let all = [("weight".to_string(), 6)];
    assert_eq!(zeros(FisherConfig::new(8)), all);
    assert_eq!(zeros(FisherConfig::new(2).with_batch_size(4)), []);
}

#[test]
fn what_is_not_known_falls_back_to_plain_passes_with_a_reason() {
    let device = Device::flex();
    let x = || tensor::<2>(1, [4, 3], &device);
    let linear = with_numbers(LinearConfig::new(3, 2).init(&device), 1);
    let reason = |loss: fn(&Linear, &Tensor<2>) -> Tensor<1>| {
        let (batched, plain, report) = both(&linear, loss, x(), 1, None);
        assert_eq!(batched, plain);
        assert_eq!(report.batched_rows, 0);
        report.fallback.unwrap()
    };
    // A sum instead of a mean; a statistic over the batch; a penalty on the weight; a readout.
    let text = reason(|model, x| model.forward(x.clone()).sum());
    assert_says!(text, "a plain backward pass");
    let text = reason(|model, x| {
        let y = model.forward(x.clone());
        (y.clone() - y.mean_dim(0)).square().mean() + model.forward(x.clone()).mean()
    });
    assert_says!(text, "a plain backward pass");
    let text =
        reason(|model, x| model.forward(x.clone()).mean() + model.weight.val().square().sum());
    assert_says!(text, "a weight is used by");
    let text = reason(|model, x| {
        let y = model.forward(x.clone()).mean();
        let scale = y.clone().into_scalar::<f32>().abs() + 1.0;
        y / scale
    });
    assert!(!text.is_empty());
    let text = reason(|model, x| model.forward(x.clone()).mean() + model.weight.val().sum());
    assert_says!(text, "a weight is used by sum", "`weight`");
}

#[test]
fn a_layer_with_small_gradients_that_are_wrong_is_found_out() {
    #[derive(Module, Debug)]
    struct Placed {
        input: Linear,
        place: Embedding,
        head: Linear,
    }
    let device = Device::flex();
    let net = Placed {
        input: LinearConfig::new(2, 3).init(&device),
        place: EmbeddingConfig::new(4, 3).init(&device),
        head: LinearConfig::new(3, 1).init(&device),
    };
    let net = with_numbers(net, 4);
    // As many places as examples: one looks like the other.
    let loss = |net: &Placed, x: &Tensor<3>| {
        let places = Tensor::<1, Int>::arange(0..4, &x.device()).unsqueeze::<2>();
        let y = net.input.forward(x.clone()) + net.place.forward(places) * 2e-4;
        net.head.forward(y.tanh()).square().mean()
    };
    let x = tensor::<3>(3, [4, 4, 2], &device);
    let (batched, plain, report) = both(&net, loss, x, 1, None);
    assert_says!(report.fallback.unwrap(), "`place.weight`");
    assert_eq!(batched, plain);
}

#[test]
fn embeddings_and_convolutions_over_time_do_too() {
    #[derive(Module, Debug)]
    struct Words {
        embedding: Embedding,
        over_time: Conv1d,
        head: Linear,
    }
    let loss = |words: &Words, x: &Tensor<2, Int>| {
        let x = words.embedding.forward(x.clone()).swap_dims(1, 2);
        let x: Tensor<2> = words.over_time.forward(x).flatten(1, 2);
        words.head.forward(x).square().mean()
    };
    on_each(|device| {
        let words = Words {
            embedding: EmbeddingConfig::new(5, 3).init(device),
            over_time: Conv1dConfig::new(3, 4, 3)
                .with_stride(2)
                .with_padding(PaddingConfig1d::Explicit(1, 1))
                .init(device),
            head: LinearConfig::new(4 * 3, 2).init(device),
        };
        let words = with_numbers(words, 7);
        let x = [[0, 1, 1, 3, 0], [4, 4, 2, 1, 1], [2, 0, 3, 4, 4], [1; 5]];
        let x = Tensor::<2, Int>::from_data(x, device);
        for size in [1, 2] {
            let (batched, plain, report) = both(&words, loss, x.clone(), size, None);
            assert_eq!(report.fallback, None);
            close(&batched, &plain);
        }
    });
}

#[test]
fn masked_weights_take_plain_passes() {
    let device = Device::flex();
    let linear = LinearConfig::new(3, 2).init(&device);
    let layout = Selection::of(&linear, None).unwrap().layout().clone();
    let masked = Masks::from_support(&layout, &[0, 3])
        .unwrap()
        .attach(linear)
        .unwrap();
    let loss = |model: &Linear, x: &Tensor<2>| model.forward(x.clone()).square().mean();
    let (batched, plain, report) = both(&masked, loss, tensor(1, [4, 3], &device), 1, None);
    assert_eq!(batched, plain);
    assert!(report.fallback.is_some());
    // Pruned weights have no gradient.
    assert_eq!(report.zero_columns, [("weight".to_string(), 4)]);
}

/// Others than the device's own, and from a loader that is elsewhere: of every kind it has its own.
#[test]
fn tokens_in_integers_of_any_width_have_the_same_rows() {
    #[derive(Module, Debug)]
    struct Words {
        table: Embedding,
        head: Linear,
    }
    type Tokens = (Tensor<2, Int>, Tensor<2, Bool>);
    let loss = |words: &Words, (tokens, padding): &Tokens| {
        let y = words.head.forward(words.table.forward(tokens.clone()));
        let y: Tensor<2> = y.flatten(1, 2);
        y.mask_fill(padding.clone(), 0.0).square().mean()
    };
    each_device(|target| {
        let words = Words {
            table: EmbeddingConfig::new(5, 3).init(&target.device),
            head: LinearConfig::new(3, 1).init(&target.device),
        };
        let words = with_numbers(words, 7);
        let selection = Selection::of(&words, None).unwrap();
        let rows = |device: &Device, dtype: DType| -> Vec<Vec<f32>> {
            let tokens = [[1, 2], [3, 4], [0, 1], [2, 2]];
            let padding = [[false, true], [false, false], [true, false], [false, false]];
            let batch = (
                Tensor::<2, Int>::from_data(tokens, (device, dtype)),
                Tensor::<2, Bool>::from_data(padding, device),
            );
            let fisher = FisherConfig::new(4).collect(&words, &selection, loss, [batch]);
            let fisher = fisher.unwrap();
            assert_eq!(fisher.report.fallback, None);
            let rows = (0..4).map(|row| fisher.gradients.row(row).unwrap());
            rows.collect()
        };
        let expected = rows(&target.device, DType::I32);
        for source in devices() {
            for dtype in [DType::I32, DType::I64] {
                if source.device.supports_dtype(dtype) {
                    close(&rows(&source.device, dtype), &expected);
                }
            }
        }
    });
}

#[test]
fn a_loss_that_draws_random_numbers_takes_plain_passes_and_says_why() {
    let device = Device::flex();
    let linear = with_numbers(LinearConfig::new(3, 2).init(&device), 1);
    let selection = Selection::of(&linear, None).unwrap();
    let loss = |model: &Linear, x: &Tensor<2>| {
        let noise = x.random_like(Distribution::Normal(0.0, 1.0));
        model.forward(x.clone() + noise).square().mean()
    };
    let x = tensor::<2>(1, [4, 3], &device);
    let fisher = FisherConfig::new(4).collect(&linear, &selection, loss, [x]);
    let report = fisher.unwrap().report;
    assert_eq!(report.batched_rows, 0);
    assert_says!(report.fallback.unwrap(), "draws random numbers");
}
