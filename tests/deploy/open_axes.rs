//! Axes beside the batch that stay open under a name: lengths, heights, widths.

use burn::module::Module;
use burn::nn::attention::{
    MhaInput, MultiHeadAttention, MultiHeadAttentionConfig, generate_autoregressive_mask,
};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::pool::{MaxPool2d, MaxPool2dConfig};
use burn::nn::{
    BatchNorm, BatchNormConfig, Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear,
    LinearConfig, PaddingConfig2d, PositionalEncoding, PositionalEncodingConfig, RotaryEncoding,
    RotaryEncodingConfig,
};
use burn::tensor::activation::relu;
use burn::tensor::module::{attention, interpolate};
use burn::tensor::ops::{AttentionModuleOptions, InterpolateMode, InterpolateOptions};
use burn::tensor::{Device, Int, Tensor, s};
use burn_lean::deploy::{
    Backend, DeployError, Dimension, EngineConfig, Export, Exported, Form, OpenAxis,
};
use burn_lean::graph::Tensors;
use burn_lean::quant::{PtqConfig, PtqMode, QuantizedForward};

use crate::judge::{Nothing, close, for_the_judge, operators, within_steps};
use crate::support::{each_device, on_each, scratch, tensor, with_numbers};

/// The second axis of the first input.
pub(crate) fn sequence() -> OpenAxis {
    OpenAxis::new("sequence", [(0, 1)])
}

pub(crate) fn open(text: &str) -> Dimension {
    Dimension::Open(text.into())
}

/// Recorded with the first of the inputs, the engines run all of them as Burn does.
pub(crate) fn runs<const D: usize, M: Module, I: Tensors + Clone>(
    model: &M,
    axes: &[OpenAxis],
    inputs: &[I],
    forward: impl Fn(&M, I) -> Tensor<D>,
) -> Exported {
    let record = || Export::record_open(model, &inputs[0], axes, &forward).unwrap();
    let exported = record().to_onnx(Form::Qdq).unwrap();
    for backend in [None, Some(Backend::Own), Some(Backend::Rten)] {
        let config = EngineConfig::new().with_backend(backend);
        let engine = config.compile(record()).unwrap();
        for input in inputs {
            let expected = forward(model, input.clone());
            close(engine.run(input).unwrap(), expected.clone());
            if backend.is_none() {
                for_the_judge(&exported, input, &expected, None);
            }
        }
    }
    exported
}

#[derive(Module, Debug)]
struct Encoder {
    words: Embedding,
    places: Embedding,
    waves: PositionalEncoding,
    attention: MultiHeadAttention,
    norm: LayerNorm,
    head: Linear,
}

impl Encoder {
    fn new(device: &Device) -> Self {
        let waves = PositionalEncodingConfig::new(8).with_max_sequence_size(24);
        let attention = MultiHeadAttentionConfig::new(8, 2).with_dropout(0.0);
        let encoder = Self {
            words: EmbeddingConfig::new(11, 8).init(device),
            places: EmbeddingConfig::new(24, 8).init(device),
            waves: waves.init(device),
            attention: attention.init(device),
            norm: LayerNormConfig::new(8).init(device),
            head: LinearConfig::new(8, 3).init(device),
        };
        with_numbers(encoder, 3)
    }

    /// Positions from a count and from a slice of a table, and a mask that compares counts.
    fn forward(&self, ids: Tensor<2, Int>) -> Tensor<3> {
        let ([batch, length], device) = (ids.dims(), ids.device());
        let places = Tensor::<1, Int>::arange(0..length as i64, &device);
        let places = places.reshape([1, length]).expand([batch, length]);
        let x = self.words.forward(ids) + self.places.forward(places);
        let x = self.norm.forward(self.waves.forward(x));
        let mask = generate_autoregressive_mask(batch, length, &device);
        let y = self
            .attention
            .forward(MhaInput::self_attn(x.clone()).mask_attn(mask));
        self.head.forward(x + y.context)
    }
}

fn ids(shape: [usize; 2], device: &Device) -> Tensor<2, Int> {
    let count = shape[0] * shape[1];
    let ids = Tensor::<1, Int>::arange(3..3 + count as i64, device);
    ids.remainder_scalar(11).reshape(shape)
}

#[test]
fn an_encoder_takes_sequences_of_any_length() {
    on_each(|device| {
        let encoder = Encoder::new(device);
        let shapes = [[2, 6], [1, 1], [3, 4], [2, 13], [5, 24]];
        let inputs = shapes.map(|shape| ids(shape, device));
        let exported = runs(
            &encoder,
            &[sequence()],
            &inputs,
            |encoder: &Encoder, ids| encoder.forward(ids),
        );
        assert_eq!(exported.fixed_batch, None);
        let [input, output] = [exported.model.inputs(), exported.model.outputs()];
        assert_eq!(input[0].shape, [open("batch"), open("sequence")]);
        let expected = [open("batch"), open("sequence"), Dimension::Fixed(3)];
        assert_eq!(output[0].shape, expected);
        assert!(operators(&exported).contains(&"Range"));
    });
}

#[test]
fn a_quantized_encoder_takes_sequences_of_any_length() {
    let device = Device::flex();
    let forward = |encoder: &Encoder, ids| encoder.forward(ids);
    let shapes = [[2, 6], [1, 1], [3, 4], [2, 13]];
    let inputs = shapes.map(|shape| ids(shape, &device));
    let config = PtqConfig::new().with_mode(PtqMode::Static);
    let config = config.with_progress(false);
    let quantized = config.quantize_for(Encoder::new(&device), || inputs.clone(), forward);
    let encoder = quantized.unwrap().0.valid();
    let export = Export::record_open(&encoder, &inputs[0], &[sequence()], forward).unwrap();
    let (_folder, path) = scratch("encoder.onnx");
    let exported = export.to_onnx(Form::Qdq).unwrap();
    assert!(operators(&exported).contains(&"QuantizeLinear"));
    exported.model.save(&path).unwrap();
    let file = EngineConfig::new().open(&path).unwrap();
    let own = EngineConfig::new().with_backend(Some(Backend::Own));
    let engine = own.compile(export).unwrap();
    for ids in inputs {
        let fake = QuantizedForward::new().run(&encoder, ids.clone(), forward);
        let fake = fake.unwrap();
        let found = file.run(vec![ids.clone().into_data()]).unwrap().remove(0);
        within_steps(Tensor::from_data(found, &device), fake.clone(), 4.0);
        assert_eq!(engine.run(&ids).unwrap().dims(), fake.dims());
    }
}

#[derive(Module, Debug)]
struct Rotated {
    rotary: RotaryEncoding,
    up: Linear,
}

#[test]
fn rotary_positions_are_as_many_as_the_sequence_is_long() {
    on_each(|device| {
        let model = Rotated {
            rotary: RotaryEncodingConfig::new(16, 8).init(device),
            up: LinearConfig::new(8, 8).init(device),
        };
        let shapes = [[2, 5, 8], [1, 1, 8], [3, 16, 8]];
        let inputs = shapes.map(|shape| tensor::<3>(1, shape, device));
        let forward = |model: &Rotated, x: Tensor<3>| model.up.forward(model.rotary.forward(x));
        runs(&with_numbers(model, 2), &[sequence()], &inputs, forward);
    });
}

/// The matrix of its embedding is that of its output, too: one token is a vector of each example.
#[test]
fn a_tied_head_takes_sequences_of_one() {
    on_each(|device| {
        let table: Embedding = with_numbers(EmbeddingConfig::new(11, 6).init(device), 2);
        let forward = |table: &Embedding, ids: Tensor<2, Int>| {
            let matrix = table.weight.val().transpose().unsqueeze::<3>();
            table.forward(ids).tanh().matmul(matrix)
        };
        let inputs = [[2, 5], [1, 1], [3, 1], [1, 9]].map(|shape| ids(shape, device));
        runs(&table, &[sequence()], &inputs, forward);
    });
}

/// As long as its table: only shorter sequences tell what depends on the length.
#[test]
fn more_positions_than_a_table_has_are_an_error() {
    let device = Device::flex();
    let places = PositionalEncodingConfig::new(4).with_max_sequence_size(8);
    let places: PositionalEncoding = places.init(&device);
    let forward = |places: &PositionalEncoding, x| places.forward(x);
    let shapes = [[2, 8, 4], [1, 1, 4], [3, 5, 4]];
    let inputs = shapes.map(|shape| tensor::<3>(1, shape, &device));
    runs(&places, &[sequence()], &inputs, forward);
    for backend in [Backend::Own, Backend::Rten] {
        let export = Export::record_open(&places, &inputs[0], &[sequence()], forward).unwrap();
        let config = EngineConfig::new().with_backend(Some(backend));
        let engine = config.compile(export).unwrap();
        let longer = engine.run(&tensor::<3>(1, [2, 9, 4], &device)).unwrap_err();
        assert_matches!(longer, DeployError::Run { .. });
        let wider = engine.run(&tensor::<3>(1, [2, 8, 1], &device)).unwrap_err();
        assert_matches!(wider, DeployError::Mismatch { .. });
    }
}

#[derive(Module, Debug)]
struct Fully {
    first: Conv2d,
    norm: BatchNorm,
    pool: MaxPool2d,
    second: Conv2d,
}

impl Fully {
    fn new(device: &Device) -> Self {
        let padding = PaddingConfig2d::Explicit(1, 1, 1, 1);
        let second = Conv2dConfig::new([6, 4], [3, 3]).with_stride([2, 2]);
        let net = Self {
            first: Conv2dConfig::new([3, 6], [3, 3]).init(device),
            norm: BatchNormConfig::new(6).init(device),
            pool: MaxPool2dConfig::new([2, 2]).with_strides([2, 2]).init(),
            second: second.with_padding(padding).init(device),
        };
        with_numbers(net, 4)
    }

    fn features(&self, x: Tensor<4>) -> Tensor<4> {
        let x = relu(self.norm.forward(self.first.forward(x)));
        self.second.forward(self.pool.forward(x))
    }
}

fn height_and_width() -> [OpenAxis; 2] {
    [("height", 2), ("width", 3)].map(|(name, axis)| OpenAxis::new(name, [(0, axis)]))
}

#[test]
fn a_fully_convolutional_net_takes_images_of_any_size() {
    on_each(|device| {
        let net = Fully::new(device);
        let shapes = [[2, 3, 12, 10], [1, 3, 7, 23], [3, 3, 20, 5]];
        let inputs = shapes.map(|shape| tensor::<4>(1, shape, device));
        // As many places as the convolutions leave, which no formula of the inputs says.
        let places = |net: &Fully, x| {
            let x = net.features(x);
            let [batch, channels, height, width] = x.dims();
            let x: Tensor<3> = x.reshape([batch, channels, height * width]);
            x.swap_dims(1, 2)
        };
        let exported = runs(&net, &height_and_width(), &inputs, places);
        let [batch, places, channels] = &exported.model.outputs()[0].shape[..] else {
            panic!("three axes")
        };
        assert_eq!([batch, channels], [&open("batch"), &Dimension::Fixed(4)]);
        assert_matches!(places, Dimension::Open(_));
        // Back to the size of the image.
        let segments = |net: &Fully, x: Tensor<4>| {
            let [_, _, height, width] = x.dims();
            let options = InterpolateOptions::new(InterpolateMode::Bilinear);
            let options = options.with_output_size([height, width]);
            interpolate(net.features(x), options)
        };
        let exported = runs(&net, &height_and_width(), &inputs, segments);
        let [_, _, height, width] = &exported.model.outputs()[0].shape[..] else {
            panic!("four axes")
        };
        assert_eq!([height, width], [&open("height"), &open("width")]);
    });
}

#[test]
fn a_quantized_convolutional_net_takes_images_of_any_size() {
    let device = Device::flex();
    let forward = |net: &Fully, x| net.features(x);
    let shapes = [[2, 3, 12, 10], [1, 3, 7, 23], [3, 3, 20, 5]];
    let inputs = shapes.map(|shape| tensor::<4>(1, shape, &device));
    let config = PtqConfig::new().with_mode(PtqMode::Static);
    let config = config.with_progress(false);
    let quantized = config.quantize_for(Fully::new(&device), || inputs.clone(), forward);
    let net = quantized.unwrap().0.valid();
    let axes = height_and_width();
    let export = Export::record_open(&net, &inputs[0], &axes, forward).unwrap();
    let (_folder, path) = scratch("net.onnx");
    export
        .to_onnx(Form::Qdq)
        .unwrap()
        .model
        .save(&path)
        .unwrap();
    let file = EngineConfig::new().open(&path).unwrap();
    for x in inputs {
        let fake = QuantizedForward::new().run(&net, x.clone(), forward);
        let found = file.run(vec![x.into_data()]).unwrap().remove(0);
        within_steps(Tensor::from_data(found, &device), fake.unwrap(), 2.0);
    }
}

#[test]
fn pixels_are_repeated_to_twice_as_many() {
    let device = Device::flex();
    let shapes = [[1, 2, 4, 3], [2, 2, 1, 7], [1, 2, 9, 1]];
    let inputs = shapes.map(|shape| tensor::<4>(1, shape, &device));
    let scaled = |factor: f32| {
        move |_: &Nothing, x: Tensor<4>| {
            let options = InterpolateOptions::new(InterpolateMode::Nearest);
            interpolate(x, options.with_scale_factor([factor, factor]))
        }
    };
    let axes = height_and_width();
    let exported = runs(&Nothing {}, &axes, &inputs, scaled(2.0));
    assert_eq!(exported.model.outputs()[0].shape[2], open("2*height"));
    // A file would list their places.
    let reason = refused(&Nothing {}, &axes, &inputs[0], scaled(3.0));
    assert_says!(reason, "nearest");
}

#[test]
fn a_cache_and_what_comes_new_have_lengths_of_their_own() {
    on_each(|device| {
        let axes = [
            OpenAxis::new("past", [(0, 2)]),
            OpenAxis::new("new", [(1, 2)]),
        ];
        let inputs = [[3, 5], [1, 1], [6, 1], [2, 9]].map(|lengths| {
            lengths.map(|length| tensor::<4>(length as u64, [2, 2, length, 4], device))
        });
        let inputs = inputs.map(|[past, new]| (past, new));
        let forward = |_: &Nothing, (past, new): (Tensor<4>, Tensor<4>)| {
            let keys = Tensor::cat(vec![past, new.clone()], 2);
            let options = AttentionModuleOptions {
                is_causal: true,
                ..AttentionModuleOptions::default()
            };
            attention(new, keys.clone(), keys, None, None, options)
        };
        let exported = runs(&Nothing {}, &axes, &inputs, forward);
        assert_eq!(exported.model.outputs()[0].shape[2], open("new"));
        let joined = |_: &Nothing, (past, new): (Tensor<4>, Tensor<4>)| {
            Tensor::cat(vec![past, new], 2).swap_dims(1, 2)
        };
        let exported = runs(&Nothing {}, &axes, &inputs, joined);
        assert_eq!(exported.model.outputs()[0].shape[1], open("past + new"));
    });
}

#[test]
fn ends_tokens_and_products_of_sizes_are_computed_in_the_file() {
    on_each(|device| {
        let shapes = [[2, 5, 4], [1, 1, 4], [3, 2, 4], [2, 9, 4]];
        let inputs = shapes.map(|shape| tensor::<3>(1, shape, device));
        let forward = |_: &Nothing, x: Tensor<3>| {
            let [batch, length, width] = x.dims();
            let last = x.clone().slice(s![.., length - 1.., ..]);
            let token = Tensor::<3>::ones([1, 1, width], &x.device()).repeat_dim(0, batch);
            let from = Tensor::<1, Int>::arange(1..length as i64 + 2, &x.device());
            let from = from.float().reshape([1, length + 1, 1]);
            let x = Tensor::cat(vec![token, x * last], 1) * from;
            x.reshape([batch * (length + 1), width])
        };
        let exported = runs(&Nothing {}, &[sequence()], &inputs, forward);
        let rows = &exported.model.outputs()[0].shape[0];
        assert_eq!(*rows, open("batch*(sequence + 1)"));
    });
}

/// Two halvings, and what was before them beside what is doubled again: multiples of four.
#[test]
fn heights_of_which_multiples_alone_fit_stay_open() {
    let device = Device::flex();
    let forward = |_: &Nothing, x: Tensor<4>| {
        let pool = MaxPool2dConfig::new([2, 2]).with_strides([2, 2]).init();
        let halved = |x| pool.forward(x);
        let doubled = |x: Tensor<4>| {
            let options = InterpolateOptions::new(InterpolateMode::Nearest);
            interpolate(x, options.with_scale_factor([2.0, 2.0]))
        };
        let half = halved(x.clone());
        let up = doubled(halved(half.clone()));
        let up = doubled(Tensor::cat(vec![half, up], 1));
        Tensor::cat(vec![x, up], 1)
    };
    let inputs = [[8, 12], [4, 4], [16, 20], [24, 4]]
        .map(|[height, width]| tensor::<4>(1, [1, 2, height, width], &device));
    runs(&Nothing {}, &height_and_width(), &inputs, forward);
}

/// Two inputs of one length, one of which has no batch.
#[test]
fn axes_of_one_name_have_one_size() {
    let device = Device::flex();
    let of = |batch, length| {
        let weights = tensor::<1>(2, [length], &device);
        (tensor::<2>(1, [batch, length], &device), weights)
    };
    let axis = OpenAxis::new("length", [(0, 1), (1, 0)]);
    let forward = |_: &Nothing, (x, weights): (Tensor<2>, Tensor<1>)| x * weights.unsqueeze::<2>();
    let inputs = [of(2, 4), of(1, 1), of(3, 7)];
    let exported = runs(&Nothing {}, std::slice::from_ref(&axis), &inputs, forward);
    assert_eq!(exported.fixed_batch, None);
    assert_eq!(exported.model.inputs()[1].shape, [open("length")]);
    let export = Export::record_open(&Nothing {}, &inputs[0], &[axis], forward).unwrap();
    let engine = EngineConfig::new().compile(export).unwrap();
    let differ = (inputs[0].0.clone(), inputs[2].1.clone());
    assert_matches!(engine.run(&differ), Err(DeployError::Mismatch { .. }));
}

/// Why axes cannot stay open.
fn refused<const D: usize, M: Module, I: Tensors>(
    model: &M,
    axes: &[OpenAxis],
    input: &I,
    forward: impl Fn(&M, I) -> Tensor<D>,
) -> String {
    match Export::record_open(model, input, axes, forward) {
        Err(DeployError::OpenAxis { reason, .. }) => reason,
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_computes_with_a_length_is_named() {
    each_device(|target| {
        let x = tensor::<2>(1, [2, 6], &target.device);
        let of = |forward: fn(&Nothing, Tensor<2>) -> Tensor<2>| {
            refused(&Nothing {}, &[sequence()], &x, forward)
        };
        let root = of(|_, x| x.clone() / (x.dims()[1] as f32).sqrt());
        assert_says!(root, "`div_scalar` of a module");
        let half = of(|_, x| {
            let half = x.dims()[1] / 2;
            x.slice(s![.., 0..half])
        });
        assert_says!(half, "`slice`");
        assert_says!(of(|_, x| x.slice(s![.., 0..10])), "`slice`");
        let host = of(|_, x| {
            let length = x.dims()[1];
            let ramp: Vec<f32> = (0..length).map(|place| place as f32).collect();
            let ramp = Tensor::<1>::from_floats(&ramp[..], &x.device());
            x.sin() + ramp.reshape([1, length])
        });
        assert_says!(host, "a constant of shape", "read by `reshape`");
        let alone = of(|_, x| match x.dims()[1] {
            1 => x,
            _ => x.clone() - x.mean_dim(1),
        });
        assert_says!(alone, "a sequence of one");
        let only = of(|_, x| {
            assert_eq!(x.dims()[1], 6, "six, no more and no less");
            x.exp()
        });
        assert_says!(only, "six, no more");
    });
}

/// Attention of channels, whose features lie along the axis, divides by the root of its size.
#[test]
fn attention_along_an_open_axis_needs_a_scale_of_its_own() {
    each_device(|target| {
        let axes = [OpenAxis::new("length", [(0, 3)])];
        let inputs = [6, 1, 11].map(|length| tensor::<4>(3, [2, 1, 5, length], &target.device));
        let scaled = |scale| {
            move |_: &Nothing, x: Tensor<4>| {
                let options = AttentionModuleOptions {
                    scale,
                    ..AttentionModuleOptions::default()
                };
                attention(x.clone(), x.clone(), x, None, None, options)
            }
        };
        let reason = refused(&Nothing {}, &axes, &inputs[0], scaled(None));
        assert_says!(reason, "give `scale`");
        runs(&Nothing {}, &axes, &inputs, scaled(Some(0.3)));
    });
}

#[test]
fn a_batch_that_is_named_has_to_stay_open() {
    let device = Device::flex();
    let x = tensor::<2>(1, [3, 4], &device);
    let forward = |_: &Nothing, x: Tensor<2>| {
        let [batch, _] = x.dims();
        x / (batch as f32).sqrt()
    };
    let batch = OpenAxis::new("batch", [(0, 0)]);
    let reason = refused(&Nothing {}, &[batch], &x, forward);
    assert_says!(reason, "div_scalar");
    // Without it the file has one batch, and any length.
    let export = Export::record_open(&Nothing {}, &x, &[sequence()], forward).unwrap();
    let exported = export.to_onnx(Form::Float).unwrap();
    assert!(exported.fixed_batch.unwrap().contains("div_scalar"));
    let shape = &exported.model.inputs()[0].shape;
    assert_eq!(*shape, [Dimension::Fixed(3), open("sequence")]);
}

#[test]
fn axes_that_inputs_do_not_have_are_refused() {
    let device = Device::flex();
    let x = tensor::<2>(1, [3, 4], &device);
    let invalid = |axes: &[OpenAxis]| {
        let forward = |_: &Nothing, x: Tensor<2>| x.exp();
        match Export::record_open(&Nothing {}, &x, axes, forward) {
            Err(DeployError::InvalidConfig { field, value, .. }) => {
                assert_eq!(field, "open_axes");
                value
            }
            other => panic!("{other:?}"),
        }
    };
    let value = invalid(&[OpenAxis::new("length", [(0, 2)])]);
    assert_eq!(value, "axis 2 of input 0 for `length`");
    let value = invalid(&[OpenAxis::new("length", [(1, 0)])]);
    assert_eq!(value, "axis 0 of input 1 for `length`");
    assert_eq!(invalid(&[OpenAxis::new("", [(0, 1)])]), "``");
    assert_eq!(invalid(&[sequence(), sequence()]), "`sequence`");
    let value = invalid(&[sequence(), OpenAxis::new("length", [(0, 1)])]);
    assert_eq!(value, "axis 1 of input 0 for `length`");
    let value = invalid(&[OpenAxis::new("length", [(0, 0), (0, 1)])]);
    assert_eq!(value, "`length` of 2 sizes");
    let value = invalid(&[OpenAxis::new("length", [])]);
    assert_eq!(value, "`length` of 0 sizes");
}
