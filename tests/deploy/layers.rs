//! Burn's layers.

use burn::module::{Module, Param};
use burn::nn::attention::{
    MhaInput, MultiHeadAttention, MultiHeadAttentionConfig, generate_autoregressive_mask,
};
use burn::nn::conv::{
    Conv1d, Conv1dConfig, Conv2d, Conv2dConfig, ConvTranspose2d, ConvTranspose2dConfig,
};
use burn::nn::pool::{AdaptiveAvgPool2dConfig, AvgPool2dConfig, MaxPool2dConfig};
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{
    BatchNorm, BatchNormConfig, Embedding, EmbeddingConfig, GroupNormConfig, Gru, GruConfig,
    InstanceNormConfig, LayerNormConfig, Linear, LinearConfig, Lstm, LstmConfig, PReluConfig,
    PaddingConfig2d, RmsNormConfig, RotaryEncoding, RotaryEncodingConfig, SwiGluConfig,
};
use burn::tensor::activation::{hard_sigmoid, hard_swish, leaky_relu, relu};
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_lean::deploy::{Backend, EngineConfig, Export};

use crate::judge::{Nothing, close, operators, same};
use crate::support::{each_device, numbers, on_each, tensor, with_numbers};

#[derive(Module, Debug)]
struct Mlp {
    fc1: Linear,
    fc2: Linear,
}

#[test]
fn constants_have_the_paths_of_the_parameters() {
    on_each(|device| {
        let mlp = Mlp {
            fc1: LinearConfig::new(5, 7).init(device),
            fc2: LinearConfig::new(7, 3).with_bias(false).init(device),
        };
        let mlp = with_numbers(mlp, 1);
        let x = tensor::<2>(1, [4, 5], device);
        let exported = same(&mlp, x, |mlp, x| mlp.fc2.forward(relu(mlp.fc1.forward(x))));
        let mut names: Vec<_> = exported
            .model
            .initializers()
            .iter()
            .map(|i| i.name())
            .collect();
        names.sort();
        assert_eq!(names, ["fc1.bias", "fc1.weight", "fc2.weight"]);
        assert_eq!(operators(&exported), ["MatMul", "Add", "Relu", "MatMul"]);
    });
}

#[test]
fn a_constant_of_no_path_has_a_name() {
    each_device(|target| {
        let matrix = tensor::<2>(1, [5, 3], &target.device);
        let x = tensor::<2>(2, [4, 5], &target.device);
        let model = Param::from_tensor(matrix);
        let exported = same(&model, x, |model: &Param<Tensor<2>>, x| {
            x.matmul(model.val())
        });
        assert_eq!(exported.model.initializers()[0].name(), "parameter");
    });
}

#[derive(Module, Debug)]
struct ConvNet {
    stem: Conv2d,
    stem_norm: BatchNorm,
    depthwise: Conv2d,
    pointwise: Conv2d,
    norm: BatchNorm,
    head: Linear,
}

impl ConvNet {
    fn new(device: &Device) -> Self {
        let stem = Conv2dConfig::new([2, 4], [3, 3])
            .with_stride([2, 2])
            .with_bias(false);
        Self {
            stem: stem
                .with_padding(PaddingConfig2d::Explicit(0, 1, 1, 0))
                .init(device),
            stem_norm: BatchNormConfig::new(4).init(device),
            depthwise: Conv2dConfig::new([4, 4], [3, 3])
                .with_groups(4)
                .with_dilation([2, 1])
                .with_padding(PaddingConfig2d::Explicit(2, 1, 2, 1))
                .init(device),
            pointwise: Conv2dConfig::new([4, 4], [1, 1]).init(device),
            norm: BatchNormConfig::new(4).init(device),
            head: LinearConfig::new(4, 3).init(device),
        }
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<2> {
        let x = relu(self.stem_norm.forward(self.stem.forward(x)));
        let y = self
            .pointwise
            .forward(relu(self.depthwise.forward(x.clone())));
        let y = relu(self.norm.forward(y) + x);
        let y = AdaptiveAvgPool2dConfig::new([1, 1]).init().forward(y);
        self.head.forward(y.flatten::<2>(1, 3))
    }
}

#[test]
fn a_conv_net_with_its_batch_norms_folded() {
    each_device(|target| {
        let net = with_numbers(ConvNet::new(&target.device), 2);
        let x = tensor::<4>(2, [3, 2, 8, 8], &target.device);
        let exported = same(&net, x, |net, x| net.forward(x));
        let found = operators(&exported);
        assert_eq!(found.iter().filter(|one| **one == "Conv").count(), 3);
        assert!(!found.contains(&"BatchNormalization"));
    });
}

#[derive(Module, Debug)]
struct Normalized {
    linear: Linear,
    norm: BatchNorm,
}

#[derive(Module, Debug)]
struct Columns {
    linear: Linear,
    shift: Param<Tensor<3>>,
}

#[derive(Module, Debug)]
struct Pixels {
    conv: Conv2d,
    shift: Param<Tensor<4>>,
}

#[test]
fn what_follows_a_product_acts_along_its_own_axis() {
    on_each(|device| {
        // As many channels as columns, as many rows as columns, as many channels as pixels of a side.
        let model = Normalized {
            linear: LinearConfig::new(20, 16).init(device),
            norm: BatchNormConfig::new(16).init(device),
        };
        let x = tensor::<3>(11, [3, 16, 20], device);
        same(&with_numbers(model, 16), x, |model, x| {
            model.norm.forward(model.linear.forward(x))
        });
        for shape in [[1_usize, 1, 8], [1, 8, 1]] {
            let model = Columns {
                linear: LinearConfig::new(4, 8).init(device),
                shift: Param::from_tensor(Tensor::zeros(shape, device)),
            };
            let x = tensor::<3>(12, [3, 8, 4], device);
            same(&with_numbers(model, 17), x, |model, x| {
                model.linear.forward(x) + model.shift.val()
            });
        }
        for shape in [[1_usize, 8, 1, 1], [1, 1, 8, 1], [1, 1, 1, 8]] {
            let model = Pixels {
                conv: Conv2dConfig::new([2, 8], [3, 3]).init(device),
                shift: Param::from_tensor(Tensor::zeros(shape, device)),
            };
            let x = tensor::<4>(13, [3, 2, 10, 10], device);
            same(&with_numbers(model, 18), x, |model, x| {
                model.conv.forward(x) + model.shift.val()
            });
        }
    });
}

#[test]
fn convolutions_of_other_kinds() {
    on_each(|device| {
        let conv: Conv1d = Conv1dConfig::new(3, 4, 3).with_stride(2).init(device);
        let x = tensor::<3>(3, [2, 3, 9], device);
        same(&with_numbers(conv, 3), x, |conv, x| conv.forward(x));
        let up = ConvTranspose2dConfig::new([3, 2], [3, 3])
            .with_stride([2, 2])
            .with_padding([1, 1])
            .with_padding_out([1, 1]);
        let up: ConvTranspose2d = up.init(device);
        let x = tensor::<4>(4, [2, 3, 4, 4], device);
        same(&with_numbers(up, 4), x, |up, x| up.forward(x));
    });
}

#[test]
fn pooling() {
    each_device(|target| {
        let x = tensor::<4>(5, [2, 3, 8, 8], &target.device);
        let nothing = crate::judge::Nothing {};
        same(&nothing, x.clone(), |_, x| {
            let max = MaxPool2dConfig::new([3, 3])
                .with_strides([2, 2])
                .with_padding(PaddingConfig2d::Explicit(1, 1, 1, 1));
            max.init().forward(x)
        });
        same(&nothing, x.clone(), |_, x| {
            let average = AvgPool2dConfig::new([3, 3])
                .with_strides([2, 2])
                .with_padding(PaddingConfig2d::Explicit(1, 1, 1, 1))
                .with_count_include_pad(false);
            average.init().forward(x)
        });
        same(&nothing, x, |_, x| {
            AdaptiveAvgPool2dConfig::new([4, 2]).init().forward(x)
        });
    });
}

/// The largest numbers of windows of 3 × 3 in steps of 2, NaN where a window has one.
fn largest(pixels: &[f32], [rows, columns]: [usize; 2], pad: usize, step: usize) -> Vec<f32> {
    let mut found = Vec::new();
    for (image, row, column) in (0..6)
        .flat_map(|image| (0..rows).map(move |row| (image, row)))
        .flat_map(|(image, row)| (0..columns).map(move |column| (image, row, column)))
    {
        let mut most = f32::NEG_INFINITY;
        for tap in 0..9 {
            let y = (2 * row + tap / 3 * step).wrapping_sub(pad);
            let x = (2 * column + tap % 3 * step).wrapping_sub(pad);
            if y < 7 && x < 6 {
                let pixel = pixels[(image * 7 + y) * 6 + x];
                most = if pixel > most || pixel.is_nan() {
                    pixel
                } else {
                    most
                };
            }
        }
        found.push(most);
    }
    found
}

/// As PyTorch has it. rten pools without dilation, and NaN away.
#[test]
fn windows_that_reach_beyond_the_end_keep_nan() {
    let mut pixels = numbers(5, 2 * 3 * 7 * 6);
    for at in [0, 7, 40, 41, 100, 251] {
        pixels[at] = f32::NAN;
    }
    on_each(|device| {
        let x = TensorData::new(pixels.clone(), [2, 3, 7, 6]);
        let x = Tensor::<4>::from_data(x, device);
        for (pad, step) in [(0, 1), (1, 1), (1, 2)] {
            let max = MaxPool2dConfig::new([3, 3]).with_strides([2, 2]);
            let max = max.with_padding(PaddingConfig2d::Explicit(pad, pad, pad, pad));
            let max = max.with_dilation([step, step]).with_ceil_mode(true).init();
            let forward = |_: &Nothing, x: Tensor<4>| max.forward(x);
            let shape = forward(&Nothing {}, x.clone()).dims();
            let expected = largest(&pixels, [shape[2], shape[3]], pad, step);
            assert!(expected.iter().any(|x| x.is_nan()));
            let expected = Tensor::from_data(TensorData::new(expected, shape), device);
            let export = Export::record(&Nothing {}, &x, forward).unwrap();
            let config = EngineConfig::new().with_backend(Some(Backend::Own));
            close(config.compile(export).unwrap().run(&x).unwrap(), expected);
        }
    });
}

#[test]
fn normalizations() {
    on_each(|device| {
        let x = tensor::<3>(6, [2, 4, 6], device) * 30.0;
        let norm = LayerNormConfig::new(6).init(device);
        same(&with_numbers(norm, 5), x.clone(), |norm, x| norm.forward(x));
        let norm = RmsNormConfig::new(6).init(device);
        same(&with_numbers(norm, 6), x.clone(), |norm, x| norm.forward(x));
        let norm = GroupNormConfig::new(2, 4).init(device);
        same(&with_numbers(norm, 7), x.clone(), |norm, x| norm.forward(x));
        let norm = InstanceNormConfig::new(4).init(device);
        same(&with_numbers(norm, 8), x.clone(), |norm, x| norm.forward(x));
        let norm = BatchNormConfig::new(4).init(device);
        same(&with_numbers(norm, 9), x, |norm, x| norm.forward(x));
    });
}

#[test]
fn gated_and_parametric_activations() {
    on_each(|device| {
        let x = tensor::<3>(7, [2, 3, 6], device);
        let glu = SwiGluConfig::new(6, 8).init(device);
        same(&with_numbers(glu, 10), x.clone(), |glu, x| glu.forward(x));
        let prelu = PReluConfig::new().with_num_parameters(3).init(device);
        same(&with_numbers(prelu, 11), x, |prelu, x| prelu.forward(x));
    });
}

/// Squeezed and excited, as mobile networks do, behind a convolution and behind nothing.
#[test]
fn gates_of_channels_and_joined_features() {
    each_device(|target| {
        let device = &target.device;
        let conv = Conv2dConfig::new([3, 4], [3, 2]).init(device);
        let conv: Conv2d = with_numbers(conv, 2);
        let x = tensor::<4>(1, [2, 3, 7, 5], device);
        let pool = AdaptiveAvgPool2dConfig::new([1, 1]).init();
        let gated = |x: Tensor<4>| {
            let x = hard_swish(x * 3.0);
            let gate = hard_sigmoid(pool.forward(x.clone()), 0.25, 0.4);
            let joined = Tensor::cat(vec![x.clone() * gate, leaky_relu(x.clone(), 0.1), x], 1);
            let rows = Tensor::cat(vec![joined.clone(), joined], 2);
            rows.flatten::<2>(1, 3)
        };
        same(&conv, x.clone(), |conv, x| gated(conv.forward(x)));
        same(&conv, x, |_, x| gated(x));
    });
}

#[test]
fn attention_with_and_without_masks() {
    on_each(|device| {
        let attention: MultiHeadAttention = MultiHeadAttentionConfig::new(8, 2)
            .with_dropout(0.0)
            .init(device);
        let attention = with_numbers(attention, 12);
        let x = tensor::<3>(8, [2, 5, 8], device);
        same(&attention, x.clone(), |attention, x| {
            attention.forward(MhaInput::self_attn(x)).context
        });
        same(&attention, x, |attention, x| {
            let [batch, length, _] = x.dims();
            let mask = generate_autoregressive_mask(batch, length, &x.device());
            attention
                .forward(MhaInput::self_attn(x).mask_attn(mask))
                .context
        });
    });
}

#[test]
fn a_transformer_encoder() {
    each_device(|target| {
        let config = TransformerEncoderConfig::new(8, 16, 2, 2).with_dropout(0.0);
        let encoder: TransformerEncoder = config.init(&target.device);
        let x = tensor::<3>(9, [2, 5, 8], &target.device);
        same(&with_numbers(encoder, 13), x, |encoder, x| {
            encoder.forward(TransformerEncoderInput::new(x))
        });
    });
}

#[derive(Module, Debug)]
struct Recurrent {
    embedding: Embedding,
    lstm: Lstm,
    gru: Gru,
    head: Linear,
}

#[test]
fn tokens_through_recurrences() {
    on_each(|device| {
        let net = Recurrent {
            embedding: EmbeddingConfig::new(7, 5).init(device),
            lstm: LstmConfig::new(5, 6, true).init(device),
            gru: GruConfig::new(6, 4, true).init(device),
            head: LinearConfig::new(4, 3).init(device),
        };
        let tokens = Tensor::<1, Int>::arange(0..12, device)
            .remainder_scalar(7)
            .reshape([2, 6]);
        same(
            &with_numbers(net, 14),
            tokens,
            |net, tokens: Tensor<2, Int>| {
                let (steps, _) = net.lstm.forward(net.embedding.forward(tokens), None);
                net.head.forward(net.gru.forward(steps, None))
            },
        );
    });
}

#[derive(Module, Debug)]
struct Rotary {
    rotary: RotaryEncoding,
    up: Linear,
}

#[test]
fn rotary_positions() {
    each_device(|target| {
        let model = Rotary {
            rotary: RotaryEncodingConfig::new(16, 8).init(&target.device),
            up: LinearConfig::new(8, 8).init(&target.device),
        };
        let x = tensor::<3>(10, [2, 5, 8], &target.device);
        same(&with_numbers(model, 15), x, |model, x| {
            model.up.forward(model.rotary.forward(x))
        });
    });
}
