//! Results that do not depend on how many threads compute them.

use burn::module::Module;
use burn::nn::attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::pool::{MaxPool2d, MaxPool2dConfig};
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig, PaddingConfig2d};
use burn::tensor::activation::{gelu, relu};
use burn::tensor::{Device, Tensor};
use burn_lean::deploy::{
    ActivationQuantization, Arithmetic, Backend, DynamicGrid, EngineConfig, Execution, Export,
    Quantization,
};
use burn_lean::quant::{Mapping, NumberFormat, QuantParams, QuantizedTensor, Scheme};

use crate::engine::codes;
use crate::support::{tensor, values, with_numbers};

/// With 16 images of 32 by 32, most operations have 2¹⁶ results or more: threads share them.
#[derive(Module, Debug)]
struct Net {
    conv: Conv2d,
    depthwise: Conv2d,
    pool: MaxPool2d,
    attention: MultiHeadAttention,
    norm: LayerNorm,
    head: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        let padding = PaddingConfig2d::Explicit(1, 1, 1, 1);
        let conv = Conv2dConfig::new([3, 16], [3, 3]).with_padding(padding.clone());
        let depthwise = Conv2dConfig::new([16, 16], [3, 3]).with_padding(padding);
        let attention = MultiHeadAttentionConfig::new(16, 2).with_dropout(0.0);
        let net = Self {
            conv: conv.init(device),
            depthwise: depthwise.with_groups(16).init(device),
            pool: MaxPool2dConfig::new([2, 2]).with_strides([2, 2]).init(),
            attention: attention.init(device),
            norm: LayerNormConfig::new(16).init(device),
            head: LinearConfig::new(16, 5).init(device),
        };
        with_numbers(net, 1)
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<3> {
        let x = gelu(self.conv.forward(x));
        let x = relu(self.depthwise.forward(x.clone())) + x;
        let x = self.pool.forward(x).flatten::<3>(2, 3).swap_dims(1, 2);
        let attended = self.attention.forward(MhaInput::self_attn(x.clone()));
        self.head.forward(self.norm.forward(attended.context + x))
    }

    /// Images by a range of all, rows by ranges of their own.
    fn quantization(&self) -> Quantization {
        let format = NumberFormat::int8().narrow();
        let kernel = |conv: &Conv2d| {
            let scheme = Scheme::symmetric(format);
            let qparams = QuantParams::of(&conv.weight.val(), &scheme).unwrap();
            QuantizedTensor::quantize(&conv.weight.val(), &qparams, &scheme).unwrap()
        };
        let of_all = ActivationQuantization::Dynamic(DynamicGrid::uint8());
        let of_rows = ActivationQuantization::Dynamic(DynamicGrid {
            format: NumberFormat::int8(),
            mapping: Mapping::Symmetric,
            per_token: true,
        });
        Quantization::none()
            .with_weight("conv.weight", kernel(&self.conv))
            .with_input("conv.weight", of_all)
            .with_weight("depthwise.weight", kernel(&self.depthwise))
            .with_input("depthwise.weight", of_all)
            .with_weight("head.weight", codes(&self.head.weight.val(), format))
            .with_input("head.weight", of_rows)
    }
}

#[test]
fn threads_do_not_change_a_bit_of_a_result() {
    let device = Device::flex();
    let net = Net::new(&device);
    let x = tensor::<4>(2, [16, 3, 32, 32], &device);
    // What has no code is noticed by whichever thread has it.
    let broken = Tensor::<4>::full([1, 3, 32, 32], f32::NAN, &device);
    let broken = x.clone().slice_assign([15..16], broken);
    for (quantization, integers) in [(Quantization::none(), 0), (net.quantization(), 3)] {
        let run = |threads: usize| {
            let export = Export::record(&net, &x, |net: &Net, x| net.forward(x)).unwrap();
            let config = EngineConfig::new()
                .with_backend(Some(Backend::Own))
                .with_arithmetic(Arithmetic::Integer)
                .with_threads(threads);
            let engine = config.compile(export.with_quantization(quantization.clone()));
            let engine = engine.unwrap();
            let report = engine.report();
            let executions = report.layers.iter().map(|layer| layer.execution);
            let found = executions.filter(|execution| *execution == Execution::Integer);
            assert_eq!(found.count(), integers, "{report}");
            [&x, &broken].map(|x| values(engine.run(x).unwrap()))
        };
        let one = run(1);
        let missing = [&one[0], &one[1]].map(|y| y.iter().filter(|y| y.is_nan()).count());
        assert_eq!(missing, [0, 16 * 16 * 5]);
        let is_same =
            |(a, b): (&f32, &f32)| (a.is_nan() && b.is_nan()) || a.to_bits() == b.to_bits();
        for threads in [2, 3] {
            for (found, expected) in run(threads).iter().zip(&one) {
                assert_eq!(found.len(), expected.len());
                assert!(found.iter().zip(expected).all(is_same), "{threads} threads");
            }
        }
    }
}
