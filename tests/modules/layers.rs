//! The layers of burn-nn 0.22.1.

use burn::module::{Module, ModuleDisplay};
use burn::nn::activation::ActivationConfig;
use burn::nn::attention::{
    CrossAttentionCache, CrossAttentionConfig, MhaCache, MhaInput, MultiHeadAttentionConfig,
    generate_autoregressive_mask,
};
use burn::nn::conv::{
    Conv1dConfig, Conv2dConfig, Conv3dConfig, ConvTranspose1dConfig, ConvTranspose2dConfig,
    ConvTranspose3dConfig, DeformConv2dConfig,
};
use burn::nn::interpolate::{Interpolate1dConfig, Interpolate2dConfig, InterpolateMode};
use burn::nn::norm::NormalizationConfig;
use burn::nn::pool::{
    AdaptiveAvgPool1dConfig, AdaptiveAvgPool2dConfig, AdaptiveAvgPool3dConfig, AvgPool1dConfig,
    AvgPool2dConfig, MaxPool1dConfig, MaxPool2dConfig,
};
use burn::nn::transformer::{
    PositionWiseFeedForwardConfig, TransformerDecoderConfig, TransformerDecoderInput,
    TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{
    BatchNormConfig, BiGruConfig, BiLstmConfig, BiRnnConfig, CosineSimilarityConfig, DropoutConfig,
    EmbeddingConfig, Fold4dConfig, GateController, GaussianNoiseConfig, GroupNormConfig, GruConfig,
    Identity, Initializer, InstanceNormConfig, LayerNormConfig, LinearConfig,
    LocalResponseNormConfig, LstmConfig, PairwiseDistanceConfig, PixelShuffleConfig,
    PixelUnshuffleConfig, PositionalEncodingConfig, RmsNormConfig, RnnConfig, RotaryEncodingConfig,
    SwiGluConfig, Unfold4dConfig,
};
use burn::tensor::{Device, Int, Tensor};

use crate::entry::{BATCH, Entry, WIDTH, Way};
use crate::table::{flat, layer};

const REGION: &str = "`full_precision(x, \\|x\\| self.layer.forward(x))`";
const REGION_STATE: &str =
    "`full_precision((x, state), \\|(x, state)\\| self.layer.forward(x, state))`";

/// The input as `[batch, channels or steps, length or features]`.
fn rank_3(h: Tensor<2>) -> Tensor<3> {
    h.reshape([2, 4, 8])
}

fn rank_4(h: Tensor<2>) -> Tensor<4> {
    h.reshape([1, 4, 4, 4])
}

fn rank_5(h: Tensor<2>) -> Tensor<5> {
    h.reshape([1, 4, 2, 2, 4])
}

/// A layer that is called with one tensor in a full-precision region: one rounding of its result.
fn in_region<M: Module + ModuleDisplay + 'static>(
    name: &'static str,
    way: Way,
    note: &'static str,
    build: impl Fn(&Device) -> M + 'static,
    forward: impl Fn(&M, Tensor<2>) -> Tensor<2> + 'static,
) -> Entry {
    layer(name, way, 1, note, build, forward)
}

/// A layer that works as it is, of so many roundings, on an input of this rank.
macro_rules! as_is {
    ($name:literal, $roundings:expr, $rank:ident => $build:expr) => {
        layer($name, Way::WorksAsIs, $roundings, "", $build, |m, h| {
            flat(m.forward($rank(h)))
        })
    };
    ($name:literal, $roundings:expr => $build:expr) => {
        layer($name, Way::WorksAsIs, $roundings, "", $build, |m, h| {
            m.forward(h)
        })
    };
}

/// A recurrent layer that returns a state, too.
macro_rules! with_state {
    ($name:literal => $build:expr) => {
        in_region(
            $name,
            Way::KeptInFp32CalledInRegion,
            REGION_STATE,
            $build,
            |m, h| flat(m.forward(rank_3(h), None).0),
        )
    };
}

pub(crate) fn layers() -> Vec<Entry> {
    let mut all = linear_and_convolution();
    all.extend(normalization());
    all.extend(attention());
    all.extend(recurrent());
    all.extend(positions_and_noise());
    all.extend(pooling_and_reshaping());
    all
}

fn linear_and_convolution() -> Vec<Entry> {
    // Rounded: the weight, the sum of products, the bias, the sum with it.
    const AFFINE: u32 = 4;
    vec![
        as_is!("Linear", AFFINE => |d| LinearConfig::new(WIDTH, WIDTH).init(d)),
        layer(
            "Embedding",
            Way::WorksAsIs,
            2,
            "the lookup returns half values; indices pass through the region unchanged; the gradients of a row \
             are summed in half: of 4,096 equal ones 2,048 are left in F16, 256 in BF16. Where rows come that \
             often, `full_precision(x, \\|x\\| self.layer.forward(x))`, or `run`",
            |d| EmbeddingConfig::new(8, WIDTH).init(d),
            |m, h| {
                let indices = Tensor::<1, Int>::arange(0..BATCH as i64, &h.device());
                h + m
                    .forward(indices.reshape([BATCH, 1]))
                    .reshape([BATCH, WIDTH])
            },
        ),
        as_is!("Conv1d", AFFINE, rank_3 => |d| Conv1dConfig::new(4, 4, 3).init(d)),
        as_is!("Conv2d", AFFINE, rank_4 => |d| Conv2dConfig::new([4, 4], [3, 3]).init(d)),
        as_is!("Conv3d", AFFINE, rank_5 => |d| Conv3dConfig::new([4, 4], [2, 2, 3]).init(d)),
        as_is!("ConvTranspose1d", AFFINE, rank_3 => |d| {
            ConvTranspose1dConfig::new([4, 4], 3).init(d)
        }),
        as_is!("ConvTranspose2d", AFFINE, rank_4 => |d| {
            ConvTranspose2dConfig::new([4, 4], [3, 3]).init(d)
        }),
        as_is!("ConvTranspose3d", AFFINE, rank_5 => |d| {
            ConvTranspose3dConfig::new([4, 4], [2, 2, 3]).init(d)
        }),
        layer(
            "DeformConv2d",
            Way::WorksAsIs,
            // Offsets and mask, the interpolation between four pixels, then as a convolution.
            AFFINE + 7,
            "reads between pixels at positions in half, which has no fraction of a pixel beyond 1,024 in F16 and 128 in BF16: on \
             larger images `full_precision`, or `run`",
            |d| DeformConv2dConfig::new([4, 4], [3, 3]).init(d),
            |m, h| {
                // Offsets between pixels: on a pixel the derivative of the interpolation jumps.
                let x = rank_4(h);
                let offset = Tensor::full_like(&x.clone().slice([0..1, 0..1, 0..2, 0..2]), 0.375)
                    .expand([1, 18, 2, 2]);
                let mask = offset.clone().slice([0..1, 0..9]);
                flat(m.forward(x, offset, Some(mask)))
            },
        ),
    ]
}

fn normalization() -> Vec<Entry> {
    // Mean, difference, square, variance, root, quotient; gamma and product, beta and sum.
    const NORM: u32 = 10;
    vec![
        as_is!("LayerNorm", NORM => |d| LayerNormConfig::new(WIDTH).init(d)),
        as_is!("RmsNorm", NORM => |d| RmsNormConfig::new(WIDTH).init(d)),
        as_is!("GroupNorm", NORM, rank_3 => |d| GroupNormConfig::new(2, 4).init(d)),
        as_is!("InstanceNorm", NORM, rank_3 => |d| InstanceNormConfig::new(4).init(d)),
        layer(
            "LocalResponseNorm",
            Way::WorksAsIs,
            // Square, mean, product, sum, power, quotient.
            6,
            "squares its input: in F16 it overflows above 255",
            |_| LocalResponseNormConfig::new(3).init(),
            |m, h| flat(m.forward(rank_3(h))),
        ),
        in_region(
            "BatchNorm",
            Way::KeptInFp32CalledInRegion,
            REGION,
            |d| BatchNormConfig::new(4).init(d),
            |m, h| flat(m.forward(rank_3(h))),
        ),
        in_region(
            "Normalization::Batch",
            Way::KeptInFp32CalledInRegion,
            REGION,
            |d| NormalizationConfig::Batch(BatchNormConfig::new(4)).init(d),
            |m, h| flat(m.forward(rank_3(h))),
        ),
        layer(
            "Normalization (the others)",
            Way::WorksAsIs,
            NORM,
            "as the layer inside",
            |d| NormalizationConfig::Layer(LayerNormConfig::new(8)).init(d),
            |m, h| flat(m.forward(rank_3(h))),
        ),
    ]
}

fn attention() -> Vec<Entry> {
    // Query and key (4 each), scores, their scale, softmax (maximum, difference, exponential, sum,
    // quotient), value (4), context, output (4).
    const ATTENTION: u32 = 24;
    // Two affine maps and an activation.
    const FEED_FORWARD: u32 = 12;
    const NORM: u32 = 10;
    vec![
        layer(
            "MultiHeadAttention",
            Way::WorksAsIs,
            ATTENTION,
            "masks are boolean and pass unchanged; `min_float` must be finite in F16 (the default \
             −10⁴ is)",
            |d| {
                MultiHeadAttentionConfig::new(8, 2)
                    .with_dropout(0.0)
                    .init(d)
            },
            |m, h| {
                let x = rank_3(h);
                let mask = generate_autoregressive_mask(2, 4, &x.device());
                flat(m.forward(MhaInput::self_attn(x).mask_attn(mask)).context)
            },
        ),
        layer(
            "CrossAttention",
            Way::WorksAsIs,
            ATTENTION,
            "as MultiHeadAttention",
            |d| {
                CrossAttentionConfig::new(8, 8, 2, 1, 4)
                    .with_dropout(0.0)
                    .init(d)
            },
            |m, h| {
                let x = rank_3(h);
                flat(m.forward(x.clone(), x, None))
            },
        ),
        as_is!("PositionWiseFeedForward", FEED_FORWARD, rank_3 => |d| {
            PositionWiseFeedForwardConfig::new(8, 8).with_dropout(0.0).init(d)
        }),
        in_region(
            "PositionWiseFeedForward with SwiGlu or PRelu inside",
            Way::CalledInRegion,
            "Burn hides the parameters of this activation from every visitor: they are neither \
             cast nor trained",
            |d| {
                PositionWiseFeedForwardConfig::new(8, 8)
                    .with_dropout(0.0)
                    .with_activation(ActivationConfig::SwiGlu(
                        SwiGluConfig::new(8, 8)
                            .with_initializer(Initializer::Constant { value: 0.25 }),
                    ))
                    .init(d)
            },
            |m, h| flat(m.forward(rank_3(h))),
        ),
        layer(
            "TransformerEncoder",
            Way::WorksAsIs,
            ATTENTION + FEED_FORWARD + 2 * NORM + 2,
            "also TransformerEncoderLayer",
            |d| {
                TransformerEncoderConfig::new(8, 8, 2, 1)
                    .with_dropout(0.0)
                    .init(d)
            },
            |m, h| flat(m.forward(TransformerEncoderInput::new(rank_3(h)))),
        ),
        layer(
            "TransformerDecoder",
            Way::WorksAsIs,
            2 * ATTENTION + FEED_FORWARD + 3 * NORM + 3,
            "also TransformerDecoderLayer",
            |d| {
                TransformerDecoderConfig::new(8, 8, 2, 1)
                    .with_dropout(0.0)
                    .init(d)
            },
            |m, h| {
                let x = rank_3(h);
                flat(m.forward(TransformerDecoderInput::new(x.clone(), x)))
            },
        ),
        layer(
            "MhaCache",
            Way::WorksAsIs,
            ATTENTION,
            "holds tensors (TensorCache) in the dtype of the region that filled it: use it in one region, and \
             do not carry it out of it",
            |d| {
                MultiHeadAttentionConfig::new(8, 2)
                    .with_dropout(0.0)
                    .init(d)
            },
            |m, h| {
                let x = rank_3(h);
                let mut cache = MhaCache::autoregressive();
                m.forward_cache(
                    MhaInput::self_attn(x.clone().slice([0..2, 0..3])),
                    &mut cache,
                );
                flat(m.forward_cache(MhaInput::self_attn(x), &mut cache).context)
            },
        ),
        layer(
            "CrossAttentionCache",
            Way::WorksAsIs,
            ATTENTION,
            "as MhaCache",
            |d| {
                CrossAttentionConfig::new(8, 8, 2, 1, 4)
                    .with_dropout(0.0)
                    .init(d)
            },
            |m, h| {
                let x = rank_3(h);
                let mut cache = CrossAttentionCache::new();
                m.forward_cache(x.clone(), x.clone(), None, &mut cache);
                flat(m.forward_cache(x.clone(), x, None, &mut cache))
            },
        ),
        layer(
            "TransformerEncoderAutoregressiveCache",
            Way::WorksAsIs,
            ATTENTION + FEED_FORWARD + 2 * NORM + 2,
            "as MhaCache; also TransformerEncoderLayerAutoregressiveCache",
            |d| {
                TransformerEncoderConfig::new(8, 8, 2, 1)
                    .with_dropout(0.0)
                    .init(d)
            },
            |m, h| {
                let x = rank_3(h);
                let mut cache = m.new_autoregressive_cache();
                let start = TransformerEncoderInput::new(x.clone().slice([0..2, 0..3]));
                m.forward_autoregressive_inference(start, &mut cache);
                let input = TransformerEncoderInput::new(x);
                flat(m.forward_autoregressive_inference(input, &mut cache))
            },
        ),
        layer(
            "TransformerDecoderAutoregressiveCache",
            Way::WorksAsIs,
            2 * ATTENTION + FEED_FORWARD + 3 * NORM + 3,
            "as MhaCache; also TransformerDecoderLayerAutoregressiveCache",
            |d| {
                TransformerDecoderConfig::new(8, 8, 2, 1)
                    .with_dropout(0.0)
                    .init(d)
            },
            |m, h| {
                let x = rank_3(h);
                let mut cache = m.new_autoregressive_cache();
                let start = x.clone().slice([0..2, 0..3]);
                let start = TransformerDecoderInput::new(start, x.clone());
                m.forward_autoregressive_inference(start, &mut cache);
                let input = TransformerDecoderInput::new(x.clone(), x);
                flat(m.forward_autoregressive_inference(input, &mut cache))
            },
        ),
    ]
}

fn recurrent() -> Vec<Entry> {
    use Way::KeptInFp32CalledInRegion as Kept;
    vec![
        with_state!("Lstm" => |d| LstmConfig::new(8, 8, true).init(d)),
        with_state!("BiLstm" => |d| BiLstmConfig::new(8, 8, true).init(d)),
        in_region(
            "Gru",
            Kept,
            REGION_STATE,
            |d| GruConfig::new(8, 8, true).init(d),
            |m, h| flat(m.forward(rank_3(h), None)),
        ),
        with_state!("BiGru" => |d| BiGruConfig::new(8, 8, true).init(d)),
        with_state!("Rnn" => |d| RnnConfig::new(8, 8, true).init(d)),
        with_state!("BiRnn" => |d| BiRnnConfig::new(8, 8, true).init(d)),
        in_region(
            "GateController",
            Kept,
            "the two linear maps of a recurrent cell",
            |d| {
                let initializer = Initializer::XavierNormal { gain: 1.0 };
                GateController::new(WIDTH, WIDTH, true, initializer, d)
            },
            |m, h| m.gate_product(h.clone(), h),
        ),
    ]
}

fn positions_and_noise() -> Vec<Entry> {
    vec![
        in_region(
            "PositionalEncoding",
            Way::CalledInRegion,
            REGION,
            |d| {
                PositionalEncodingConfig::new(8)
                    .with_max_sequence_size(8)
                    .init(d)
            },
            |m, h| flat(m.forward(rank_3(h))),
        ),
        in_region(
            "RotaryEncoding",
            Way::CalledInRegion,
            "`full_precision(x, \\|x\\| self.layer.apply(x, start))`",
            |d| RotaryEncodingConfig::new(8, 8).init(d),
            |m, h| flat(m.forward(rank_3(h))),
        ),
        in_region(
            "GaussianNoise",
            Way::CalledInRegion,
            REGION,
            |_| GaussianNoiseConfig::new(0.01).init(),
            |m, h| m.forward(h),
        )
        .random(),
        as_is!("Dropout", 2 => |_| DropoutConfig::new(0.1).init()).random(),
        as_is!("Identity", 0 => |_| Identity::new()),
    ]
}

fn pooling_and_reshaping() -> Vec<Entry> {
    use Way::WorksAsIs as AsIs;
    let pair = |h: Tensor<2>| {
        let x = h.reshape([BATCH * 2, WIDTH / 2]);
        (x.clone().narrow(0, 0, BATCH), x.narrow(0, BATCH, BATCH))
    };
    vec![
        as_is!("AvgPool1d", 1, rank_3 => |_| AvgPool1dConfig::new(2).init()),
        as_is!("AvgPool2d", 1, rank_4 => |_| AvgPool2dConfig::new([2, 2]).init()),
        as_is!("MaxPool1d", 0, rank_3 => |_| MaxPool1dConfig::new(2).init()),
        as_is!("MaxPool2d", 0, rank_4 => |_| MaxPool2dConfig::new([2, 2]).init()),
        as_is!("AdaptiveAvgPool1d", 1, rank_3 => |_| AdaptiveAvgPool1dConfig::new(4).init()),
        as_is!("AdaptiveAvgPool2d", 1, rank_4 => |_| AdaptiveAvgPool2dConfig::new([2, 2]).init()),
        as_is!("AdaptiveAvgPool3d", 1, rank_5 => |_| {
            AdaptiveAvgPool3dConfig::new([1, 1, 2]).init()
        }),
        as_is!("Interpolate1d, nearest", 0, rank_3 => |_| {
            let config = Interpolate1dConfig::new().with_output_size(Some(12));
            config.with_mode(InterpolateMode::Nearest).init()
        }),
        layer(
            "Interpolate1d, linear",
            AsIs,
            // Two weights, two products, their sum, along each axis.
            5,
            "Burn has its backward pass on flex only",
            |_| {
                Interpolate1dConfig::new()
                    .with_output_size(Some(12))
                    .with_mode(InterpolateMode::Linear)
                    .init()
            },
            |m, h| flat(m.forward(rank_3(h))),
        )
        .no_backward_on(&["ndarray", "wgpu", "vulkan", "cuda"]),
        as_is!("Interpolate2d, nearest", 0, rank_4 => |_| {
            let config = Interpolate2dConfig::new().with_output_size(Some([6, 6]));
            config.with_mode(InterpolateMode::Nearest).init()
        }),
        layer(
            "Interpolate2d, linear",
            AsIs,
            // Two weights, two products, their sum, along each axis.
            10,
            "Burn has its backward pass on flex only",
            |_| {
                Interpolate2dConfig::new()
                    .with_output_size(Some([6, 6]))
                    .with_mode(InterpolateMode::Linear)
                    .init()
            },
            |m, h| flat(m.forward(rank_4(h))),
        )
        .no_backward_on(&["ndarray", "wgpu", "vulkan", "cuda"]),
        as_is!("PixelShuffle", 0, rank_4 => |_| PixelShuffleConfig::new(2).init()),
        as_is!("PixelUnshuffle", 0, rank_4 => |_| PixelUnshuffleConfig::new(2).init()),
        as_is!("Unfold4d", 0, rank_4 => |_| Unfold4dConfig::new([2, 2]).init()),
        layer(
            "Fold4d",
            AsIs,
            // Up to four overlapping values are added.
            3,
            "",
            |_| Fold4dConfig::new([3, 3], [2, 2]).init(),
            |m, h| flat(m.forward(h.reshape([1, 16, 4]))),
        ),
        layer(
            "CosineSimilarity",
            AsIs,
            // Three sums of products, two roots, their product, the quotient.
            10,
            "`eps` of 10⁻⁸ is zero in F16: a zero vector gives NaN there",
            |_| CosineSimilarityConfig::new().init(),
            move |m, h| {
                let (a, b) = pair(h);
                flat(m.forward(a, b))
            },
        ),
        layer(
            "PairwiseDistance",
            AsIs,
            // Difference, eps, square, sum, root.
            5,
            "",
            |_| PairwiseDistanceConfig::new().init(),
            move |m, h| {
                let (a, b) = pair(h);
                flat(m.forward(a, b))
            },
        ),
    ]
}
