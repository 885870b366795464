//! Gradients of single examples from one backward pass, of the models that people train: each kind
//! of layer against one pass per example.

use burn::module::{Module, Param};
use burn::nn::attention::{
    MhaInput, MultiHeadAttention, MultiHeadAttentionConfig, generate_autoregressive_mask,
};
use burn::nn::conv::{
    Conv1d, Conv1dConfig, Conv2d, Conv2dConfig, ConvTranspose1d, ConvTranspose1dConfig,
    ConvTranspose2d, ConvTranspose2dConfig,
};
use burn::nn::loss::{
    BinaryCrossEntropyLossConfig, CrossEntropyLossConfig, HuberLossConfig, Reduction,
};
use burn::nn::pool::{
    AdaptiveAvgPool1dConfig, AvgPool1d, AvgPool1dConfig, MaxPool1d, MaxPool1dConfig,
};
use burn::nn::{
    BiGru, BiGruConfig, BiLstm, BiLstmConfig, Embedding, EmbeddingConfig, Gru, GruConfig,
    LayerNorm, LayerNormConfig, Linear, LinearConfig, Lstm, LstmConfig, PaddingConfig1d,
    PaddingConfig2d, RotaryEncoding, RotaryEncodingConfig,
};
use burn::tensor::activation::gelu;
use burn::tensor::{Device, Int, Tensor};
use burn_lean::prune::Batch;

use super::per_example::{both, close};
use crate::support::{each_device, on_each, tensor, with_numbers};

/// All rows from batched passes, of one and of two examples each, and equal to those of plain ones.
fn all_batched<M: Module, B: Batch>(
    model: &M,
    loss: impl Fn(&M, &B) -> Tensor<1> + Copy,
    batch: B,
) {
    for size in [1, 2] {
        let (batched, plain, report) = both(model, loss, batch.clone(), size, None);
        assert_eq!(report.fallback, None);
        assert_eq!(report.batched_rows, batch.examples() / size);
        assert!(report.unreached.is_empty(), "{:?}", report.unreached);
        close(&batched, &plain);
    }
}

fn classes(count: usize, device: &Device) -> Tensor<1, Int> {
    let labels: Vec<i64> = (0..count as i64).map(|index| index % 3).collect();
    Tensor::from_data(&labels[..], device)
}

fn tokens(examples: usize, length: usize, device: &Device) -> Tensor<2, Int> {
    let count = (examples * length) as i64;
    let tokens: Vec<i64> = (0..count)
        .map(|index| (index * index + index / 3) % 6)
        .collect();
    Tensor::<1, Int>::from_data(&tokens[..], device).reshape([examples, length])
}

fn cross_entropy(logits: Tensor<2>, labels: &Tensor<1, Int>) -> Tensor<1> {
    let loss = CrossEntropyLossConfig::new().init(&logits.device());
    loss.forward(logits, labels.clone())
}

#[test]
fn lstms_use_their_weights_in_every_step() {
    #[derive(Module, Debug)]
    struct Net {
        forth: Lstm,
        both: BiLstm,
        head: Linear,
    }
    let loss = |net: &Net, (x, labels): &(Tensor<3>, Tensor<1, Int>)| {
        let (x, _) = net.forth.forward(x.clone(), None);
        let (x, _) = net.both.forward(x, None);
        cross_entropy(net.head.forward(x.mean_dim(1).flatten(1, 2)), labels)
    };
    on_each(|device| {
        let net = Net {
            forth: LstmConfig::new(3, 4, true).init(device),
            both: BiLstmConfig::new(4, 3, true).init(device),
            head: LinearConfig::new(6, 3).init(device),
        };
        let batch = (tensor(2, [4, 5, 3], device), classes(4, device));
        all_batched(&with_numbers(net, 1), loss, batch);
    });
}

#[test]
fn grus_do_too_with_the_reset_before_and_after_the_product() {
    #[derive(Module, Debug)]
    struct Net {
        after: Gru,
        before: Gru,
        both: BiGru,
        head: Linear,
    }
    let loss = |net: &Net, (x, labels): &(Tensor<3>, Tensor<1, Int>)| {
        let x = net.after.forward(x.clone(), None);
        let x = net.before.forward(x, None);
        let (x, _) = net.both.forward(x, None);
        cross_entropy(net.head.forward(x.mean_dim(1).flatten(1, 2)), labels)
    };
    on_each(|device| {
        let net = Net {
            after: GruConfig::new(3, 4, true).init(device),
            before: GruConfig::new(4, 4, true)
                .with_reset_after(false)
                .init(device),
            both: BiGruConfig::new(4, 3, true).init(device),
            head: LinearConfig::new(6, 3).init(device),
        };
        let batch = (tensor(2, [4, 4, 3], device), classes(4, device));
        all_batched(&with_numbers(net, 1), loss, batch);
    });
}

/// A language model: rotary positions, a causal mask, and the table of tokens as the head.
#[derive(Module, Debug)]
struct Language {
    embedding: Embedding,
    query: Linear,
    rotary: RotaryEncoding,
    attention: MultiHeadAttention,
    norm: LayerNorm,
    up: Linear,
    down: Linear,
}

impl Language {
    fn new(device: &Device) -> Self {
        let net = Self {
            embedding: EmbeddingConfig::new(6, 4).init(device),
            query: LinearConfig::new(4, 4).with_bias(false).init(device),
            rotary: RotaryEncodingConfig::new(8, 4).init(device),
            attention: MultiHeadAttentionConfig::new(4, 2)
                .with_dropout(0.0)
                .init(device),
            norm: LayerNormConfig::new(4).init(device),
            up: LinearConfig::new(4, 8).init(device),
            down: LinearConfig::new(8, 4).init(device),
        };
        with_numbers(net, 4)
    }

    fn loss(&self, tokens: &Tensor<2, Int>) -> Tensor<1> {
        self.loss_of_next(tokens, CrossEntropyLossConfig::new())
    }

    /// Of the next token, all examples being equally long.
    fn loss_of_next(&self, tokens: &Tensor<2, Int>, loss: CrossEntropyLossConfig) -> Tensor<1> {
        let [examples, length] = tokens.dims();
        let steps = length - 1;
        let x = self.embedding.forward(tokens.clone().narrow(1, 0, steps));
        let mask = generate_autoregressive_mask(examples, steps, &x.device());
        let query = self.rotary.forward(self.query.forward(x.clone()));
        let input = MhaInput::new(query, x.clone(), x.clone()).mask_attn(mask);
        let x = x + self.attention.forward(input).context;
        let x = x.clone()
            + self
                .down
                .forward(gelu(self.up.forward(self.norm.forward(x))));
        let logits = x.matmul(self.embedding.weight.val().transpose().unsqueeze());
        let next = tokens.clone().narrow(1, 1, steps).flatten(0, 1);
        loss.init(&logits.device())
            .forward(logits.flatten(0, 1), next)
    }
}

#[test]
fn rotary_positions_causal_masks_and_tied_embeddings_have_rows() {
    each_device(|target| {
        let net = Language::new(&target.device);
        all_batched(&net, Language::loss, tokens(4, 5, &target.device));
    });
}

/// Not among the first three of the five tokens.
const PADDING: usize = 5;

#[test]
fn smoothed_labels_and_as_much_padding_in_every_example_have_rows() {
    let smoothed = |net: &Language, tokens: &Tensor<2, Int>| {
        let loss = CrossEntropyLossConfig::new().with_smoothing(Some(0.1));
        net.loss_of_next(tokens, loss)
    };
    each_device(|target| {
        let net = Language::new(&target.device);
        all_batched(&net, smoothed, tokens(4, 5, &target.device));
        // Two tokens of padding each.
        let padded = tokens(4, 5, &target.device).slice_fill([0..4, 3..5], PADDING as i64);
        all_batched(&net, without_padding, padded.clone());
        let both = |net: &Language, tokens: &Tensor<2, Int>| {
            let loss = CrossEntropyLossConfig::new().with_smoothing(Some(0.1));
            net.loss_of_next(tokens, loss.with_pad_tokens(Some(vec![PADDING])))
        };
        all_batched(&net, both, padded);
    });
}

fn without_padding(net: &Language, tokens: &Tensor<2, Int>) -> Tensor<1> {
    let loss = CrossEntropyLossConfig::new().with_pad_tokens(Some(vec![PADDING]));
    net.loss_of_next(tokens, loss)
}

/// The mean over the tokens of a batch is that over its examples only if they are equally long.
#[test]
fn more_padding_in_one_example_than_in_another_takes_plain_passes_with_the_reason() {
    each_device(|target| {
        let net = Language::new(&target.device);
        let padded = tokens(4, 5, &target.device).slice_fill([0..1, 2..5], PADDING as i64);
        let (batched, plain, report) = both(&net, without_padding, padded, 1, None);
        assert_eq!(batched, plain);
        assert_eq!(report.batched_rows, 0);
        assert_says!(report.fallback.unwrap(), "its loss is not their mean");
    });
}

/// Waves: pooled over time, taken apart and put together again by transposed convolutions.
#[derive(Module, Debug)]
struct Waves {
    padded: Conv1d,
    largest: MaxPool1d,
    mean: AvgPool1d,
    back: ConvTranspose1d,
    in_groups: ConvTranspose1d,
    head: Linear,
}

#[test]
fn pooling_over_time_and_transposed_convolutions_have_rows() {
    let loss = |net: &Waves, (x, targets): &(Tensor<3>, Tensor<2, Int>)| {
        let x = net.largest.forward(net.padded.forward(x.clone()));
        let x = net.mean.forward(x).tanh();
        let x = net.in_groups.forward(net.back.forward(x)).tanh();
        let x = AdaptiveAvgPool1dConfig::new(3).init().forward(x);
        let logits = net.head.forward(x.flatten(1, 2));
        let loss = BinaryCrossEntropyLossConfig::new().with_logits(true);
        loss.init(&logits.device()).forward(logits, targets.clone())
    };
    on_each(|device| {
        let net = Waves {
            padded: Conv1dConfig::new(2, 4, 4)
                .with_padding(PaddingConfig1d::Explicit(2, 1))
                .init(device),
            largest: MaxPool1dConfig::new(2).init(),
            mean: AvgPool1dConfig::new(3).with_stride(1).init(),
            back: ConvTranspose1dConfig::new([4, 6], 3)
                .with_stride(2)
                .with_padding(1)
                .with_padding_out(1)
                .init(device),
            in_groups: ConvTranspose1dConfig::new([6, 4], 3)
                .with_groups(2)
                .with_dilation(2)
                .init(device),
            head: LinearConfig::new(4 * 3, 3).init(device),
        };
        let labels: Tensor<2, Int> = tokens(4, 3, device).remainder_scalar(2);
        let batch = (tensor(3, [4, 2, 14], device), labels);
        all_batched(&with_numbers(net, 2), loss, batch);
    });
}

/// An autoencoder of images.
#[derive(Module, Debug)]
struct Autoencoder {
    down: Conv2d,
    up: ConvTranspose2d,
    last: ConvTranspose2d,
}

impl Autoencoder {
    fn new(device: &Device) -> Self {
        let net = Self {
            down: Conv2dConfig::new([2, 4], [3, 4])
                .with_stride([2, 2])
                .with_padding(PaddingConfig2d::Explicit(1, 2, 0, 1))
                .init(device),
            up: ConvTranspose2dConfig::new([4, 4], [3, 2])
                .with_stride([2, 3])
                .with_padding([1, 0])
                .with_padding_out([1, 1])
                .with_groups(2)
                .init(device),
            last: ConvTranspose2dConfig::new([4, 2], [2, 3])
                .with_dilation([1, 2])
                .init(device),
        };
        with_numbers(net, 6)
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        self.last
            .forward(self.up.forward(self.down.forward(x).tanh()))
    }

    fn loss(&self, x: &Tensor<4>) -> Tensor<1> {
        let y = self.forward(x.clone());
        let target = x
            .clone()
            .mean_dim(1)
            .mean_dim(2)
            .mean_dim(3)
            .expand(y.dims());
        HuberLossConfig::new(0.3)
            .init()
            .forward(y, target, Reduction::Mean)
    }
}

#[test]
fn transposed_convolutions_of_images_and_uneven_padding_have_rows() {
    each_device(|target| {
        let net = Autoencoder::new(&target.device);
        all_batched(
            &net,
            Autoencoder::loss,
            tensor(9, [4, 2, 7, 8], &target.device),
        );
    });
}

/// Weights that are turned before they are used, by hand.
#[derive(Module, Debug)]
struct Turned {
    left: Param<Tensor<2>>,
    joint: Param<Tensor<2>>,
    cube: Param<Tensor<3>>,
}

impl Turned {
    fn loss(&self, x: &Tensor<3>) -> Tensor<1> {
        // [examples, 4, 5]: a matrix before its vectors, as a value and transposed.
        let x = self.left.val().unsqueeze::<3>().matmul(x.clone());
        let x = self
            .left
            .val()
            .transpose()
            .unsqueeze::<3>()
            .matmul(x.tanh());
        // Two matrices in one parameter, as recurrent layers of other frameworks have them.
        let joint = self.joint.val();
        let [first, second] = [joint.clone().slice([0..3, 0..5]), joint.slice([3..6, 0..5])];
        let one = x.clone().matmul(first.transpose().unsqueeze());
        let two = x.matmul(second.transpose().unsqueeze()).tanh();
        // A kernel with its axes in another order, as a matrix.
        let cube = self.cube.val().permute([2, 0, 1]).reshape([6, 2]);
        Tensor::cat(vec![one, two], 2)
            .matmul(cube.unsqueeze())
            .tanh()
            .mean()
    }
}

#[test]
fn weights_that_are_transposed_cut_or_permuted_have_rows() {
    on_each(|device| {
        let param = |seed, shape| Param::from_tensor(tensor::<2>(seed, shape, device));
        let net = Turned {
            left: param(1, [4, 4]),
            joint: param(2, [6, 5]),
            cube: Param::from_tensor(tensor(3, [3, 2, 2], device)),
        };
        let all = burn::module::ParamGroup::from_predicate("");
        let x = tensor::<3>(5, [4, 4, 5], device);
        for size in [1, 2] {
            let (batched, plain, report) = both(&net, Turned::loss, x.clone(), size, Some(&all));
            assert_eq!(report.fallback, None);
            assert_eq!(report.batched_rows, 4 / size);
            close(&batched, &plain);
        }
    });
}
