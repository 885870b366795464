//! What of a quantized model stays float in a file or an engine, and how that is said.

use std::collections::HashSet;

use burn::module::{Lora, Module, ModuleMapper, Param};
use burn::nn::attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Gru, GruConfig, Linear, LinearConfig};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor};
use burn_lean::deploy::{
    Arithmetic, Backend, EngineConfig, Execution, Export, Form, OnnxNode, Quantization,
};
use burn_lean::quant::{
    FakeQuantizeConfig, ForwardQ, NumberFormat, Override, PtqConfig, QatConfig, QuantizedForward,
    Schedule, Scheme, WeightConfig, WeightGranularity, calibrate, quantized_weights,
};
use burn_lean::reparam::{ChainReparameterizer, attach};

use crate::engine::codes;
use crate::judge::{close, for_the_judge, operators, within_steps};
use crate::quantized::{images, written};
use crate::support::{tensor, values, with_numbers};

#[derive(Module, Debug)]
struct Head {
    fc: Linear,
}

/// Numbers in the place of zeros: an adapter that acts.
struct Fill(u64);

impl ModuleMapper for Fill {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let base = param.base();
        let (shape, device) = (base.dims(), base.device());
        match base.clone().abs().sum().into_scalar::<f32>() == 0.0 {
            true => param.map(|_| tensor::<D>(self.0, shape, &device)),
            false => param,
        }
    }
}

#[test]
fn an_adapter_behind_a_quantizer_is_deployed_with_its_layer_as_floats() {
    let device = Device::flex();
    let net = Head {
        fc: with_numbers(LinearConfig::new(6, 4).init(&device), 3),
    };
    let config = QatConfig::new().with_activation(None);
    let quantizers = config.reparameterizer(&net).unwrap();
    let both = ChainReparameterizer::new(quantizers, Lora::new(2, 1.0));
    let net = attach(net, both).unwrap().map(&mut Fill(11));
    let x = tensor::<2>(5, [4, 6], &device);
    let expected = net.fc.forward(x.clone());
    let codes = quantized_weights(&net).unwrap().remove(0).1;
    let rounded = codes.dequantize::<2>(&device).unwrap();
    assert_ne!(values(net.fc.weight.val()), values(rounded));
    let export = Export::record(&net, &x, |net: &Head, x: Tensor<2>| net.fc.forward(x)).unwrap();
    for form in [Form::Float, Form::Qdq, Form::Integer] {
        let onnx = export.to_onnx(form).unwrap();
        assert!(
            onnx.layers
                .iter()
                .all(|layer| layer.execution == Execution::Float)
        );
    }
    for backend in [Backend::Own, Backend::Rten, Backend::Burn] {
        let config = EngineConfig::new().with_backend(Some(backend));
        let export =
            Export::record(&net, &x, |net: &Head, x: Tensor<2>| net.fc.forward(x)).unwrap();
        let engine = config.compile(export).unwrap();
        close(engine.run(&x).unwrap(), expected.clone());
    }
}

/// A convolution whose weight stays float, before a batch norm.
#[derive(Module, Debug)]
struct Normed {
    conv: Conv2d,
    norm: BatchNorm,
}

#[test]
fn what_quantizes_the_input_of_a_float_layer_before_a_batch_norm_is_in_the_file() {
    let device = Device::flex();
    let model = Normed {
        conv: Conv2dConfig::new([3, 4], [3, 3]).init(&device),
        norm: BatchNormConfig::new(4).init(&device),
    };
    let left = Override::new("conv".into()).with_skip_weight(Some(true));
    let config = QatConfig::new().with_overrides(vec![left]);
    let model = config.prepare(with_numbers(model, 3)).unwrap();
    let forward = |model: &Normed, x: Tensor<4>| model.norm.forward(model.conv.forward_q(x));
    let x = images(2, &device);
    let model = calibrate(model, |model| drop(forward(model, x.clone()))).unwrap();
    let export = Export::record(&model, &x, forward).unwrap();
    let exported = export.to_onnx(Form::Qdq).unwrap();
    let names = operators(&exported);
    assert!(names.contains(&"QuantizeLinear"), "{names:?}");
}

/// A sequence that a recurrent layer reads is rounded as a whole: the views of it are operations of the quantized
/// recording alone.
#[test]
fn the_operands_of_an_attention_are_rounded_beside_a_recurrent_layer() {
    #[derive(Module, Debug)]
    struct Both {
        attention: MultiHeadAttention,
        gru: Gru,
    }
    let device = Device::flex();
    let model = Both {
        attention: MultiHeadAttentionConfig::new(6, 2)
            .with_dropout(0.0)
            .init(&device),
        gru: GruConfig::new(6, 4, true).init(&device),
    };
    let forward = |model: &Both, x: Tensor<3>| {
        let context = model.attention.forward(MhaInput::self_attn(x)).context;
        model.gru.forward(context, None)
    };
    let x = tensor::<3>(5, [2, 5, 6], &device);
    let config = PtqConfig::new().with_progress(false);
    let model = with_numbers(model, 3);
    let (model, _) = config.quantize_for(model, || [x.clone()], forward).unwrap();
    let export = Export::record(&model, &x, forward).unwrap();
    let left: Vec<&str> = export.quantization().left_float().collect();
    assert!(left.is_empty(), "{left:?}");
    let exported = export.to_onnx(Form::Qdq).unwrap();
    let nodes = exported.model.nodes();
    let made_by = |name: &String| {
        let maker = nodes.iter().find(|node| node.outputs().contains(name));
        maker.map(OnnxNode::operator)
    };
    // Queries by keys, and what comes of them by values.
    let products = nodes.iter().filter(|node| {
        let inputs = node.inputs();
        node.operator() == "MatMul"
            && inputs.len() == 2
            && inputs
                .iter()
                .all(|name| made_by(name) == Some("DequantizeLinear"))
            && !inputs.iter().any(|name| name.contains("weight"))
    });
    assert!(products.count() >= 2, "{:?}", operators(&exported));
    let fake = QuantizedForward::new().run(&model, x.clone(), forward);
    let fake = fake.unwrap();
    written(&export, Form::Qdq, &x, &fake);
    let engine = EngineConfig::new()
        .with_arithmetic(Arithmetic::Integer)
        .compile(export)
        .unwrap();
    within_steps(engine.run(&x).unwrap(), fake, 4.0);
}

#[test]
fn outputs_are_rounded_before_what_reads_them() {
    let device = Device::flex();
    let model = with_numbers(
        [LinearConfig::new(6, 5), LinearConfig::new(5, 4)].map(|layer| layer.init(&device)),
        3,
    );
    let config = QatConfig::new().with_outputs(true);
    let model = config.prepare(model).unwrap();
    let run = |model: &[Linear; 2], x: Tensor<2>| {
        let x = model[0].forward_q(x);
        // One operation reads it twice.
        model[1].forward_q(relu(x.clone()) + x.clone() * x)
    };
    let x = tensor::<2>(5, [4, 6], &device);
    let model = calibrate(model, |model| drop(run(model, x.clone()))).unwrap();
    let export = Export::record(&model, &x, run).unwrap();
    assert_eq!(export.quantization().left_float().count(), 0);
    let exported = export.to_onnx(Form::Qdq).unwrap();
    let names = operators(&exported);
    let rounded = names.iter().filter(|name| **name == "QuantizeLinear");
    assert_eq!(rounded.count(), 4, "{names:?}");
    written(&export, Form::Qdq, &x, &run(&model, x.clone()));
    let integer = EngineConfig::new().with_arithmetic(Arithmetic::Integer);
    let engine = integer.compile(export).unwrap();
    let found = engine.run(&x).unwrap();
    let steps: HashSet<u32> = values(found.clone())
        .into_iter()
        .map(f32::to_bits)
        .collect();
    let fake: HashSet<u32> = values(run(&model, x.clone()))
        .into_iter()
        .map(f32::to_bits)
        .collect();
    assert!(steps.len() <= fake.len() + 1, "results are on their grid");
    within_steps(found, run(&model, x), 2.0);
}

#[test]
fn a_bias_is_not_rounded_to_the_steps_of_few_bits() {
    let device = Device::flex();
    let few = FakeQuantizeConfig::new(Scheme::affine(NumberFormat::uint(2)));
    let config = QatConfig::new()
        .with_weight(WeightConfig::int(2))
        .with_activation(Some(few));
    let linear: Linear = with_numbers(LinearConfig::new(6, 4).init(&device), 3);
    let linear = config.prepare(linear).unwrap();
    let run = |linear: &Linear, x: Tensor<2>| linear.forward_q(x);
    let x = tensor::<2>(5, [4, 6], &device);
    let linear = calibrate(linear, |linear| drop(run(linear, x.clone()))).unwrap();
    let export = Export::record(&linear, &x, run).unwrap();
    let integer = EngineConfig::new().with_arithmetic(Arithmetic::Integer);
    let engine = integer.with_backend(Some(Backend::Own)).compile(export);
    let engine = engine.unwrap();
    assert!(engine.report().is_integer());
    close(engine.run(&x).unwrap(), run(&linear, x));

    let conv: Conv2d = with_numbers(Conv2dConfig::new([3, 4], [3, 3]).init(&device), 3);
    let conv = config.prepare(conv).unwrap();
    let run = |conv: &Conv2d, x: Tensor<4>| conv.forward_q(x);
    let x = images(2, &device);
    let conv = calibrate(conv, |conv| drop(run(conv, x.clone()))).unwrap();
    let exported = Export::record(&conv, &x, run).unwrap().to_onnx(Form::Qdq);
    let exported = exported.unwrap();
    let names = operators(&exported);
    let floats = names.iter().filter(|name| **name == "DequantizeLinear");
    assert_eq!(floats.count(), 2, "{names:?}");
}

#[test]
fn an_output_that_a_quantizer_rounds_again_is_said_to_stay_float() {
    let device = Device::flex();
    let model = with_numbers(
        [LinearConfig::new(6, 5), LinearConfig::new(5, 5)].map(|layer| layer.init(&device)),
        3,
    );
    let config = QatConfig::new().with_outputs(true);
    let model = config.prepare(model).unwrap();
    let run = |model: &[Linear; 2], x: Tensor<2>| {
        let x = model[0].forward_q(x);
        model[1].forward_q(x.clone()) + relu(x)
    };
    let x = tensor::<2>(5, [4, 6], &device);
    let model = calibrate(model, |model| drop(run(model, x.clone()))).unwrap();
    let export = Export::record(&model, &x, run).unwrap();
    let left: Vec<&str> = export.quantization().left_float().collect();
    let why = "output of `0`: `another quantizer` reads it as it is, too";
    assert_eq!(left, [why]);
}

#[test]
fn quantizers_that_only_observe_are_not_in_the_file() {
    let device = Device::flex();
    let later = Schedule::new().with_quantize_from(3);
    let left = Override::new("fc".into()).with_skip_weight(Some(true));
    let config = QatConfig::new()
        .with_overrides(vec![left])
        .with_schedule(later);
    let model = Head {
        fc: with_numbers(LinearConfig::new(6, 4).init(&device), 3),
    };
    let model = config.prepare(model).unwrap();
    let x = tensor::<2>(5, [4, 6], &device);
    let export = Export::record(&model, &x, |model: &Head, x| model.fc.forward_q(x)).unwrap();
    let left: Vec<&str> = export.quantization().left_float().collect();
    assert!(left[0].contains("does not quantize yet"), "{left:?}");
    let exported = export.to_onnx(Form::Qdq).unwrap();
    assert_eq!(operators(&exported), ["MatMul", "Add"]);
}

#[test]
fn weights_without_integers_in_onnx_are_the_floats_of_their_codes() {
    let device = Device::flex();
    let floats = WeightConfig::new().with_format(NumberFormat::E4M3);
    let blocks = WeightConfig::int(8).with_granularity(WeightGranularity::PerBlock { size: 2 });
    for weight in [floats, blocks] {
        let conv: Conv2d = Conv2dConfig::new([4, 4], [3, 3]).init(&device);
        let config = QatConfig::new().with_weight(weight).with_activation(None);
        let model = config.prepare(with_numbers(conv, 3)).unwrap();
        let x = tensor::<4>(2, [2, 4, 6, 6], &device);
        let expected = model.forward(x.clone());
        let record = || Export::record(&model, &x, |conv: &Conv2d, x| conv.forward(x)).unwrap();
        for form in [Form::Float, Form::Qdq, Form::Integer] {
            let exported = record().to_onnx(form).unwrap();
            for_the_judge(&exported, &x, &expected, None);
            let layer = &exported.layers[0];
            assert_eq!(layer.execution, Execution::DequantizedOnce);
            assert!(layer.reason.is_some());
        }
        for backend in [Backend::Own, Backend::Rten, Backend::Burn] {
            let config = EngineConfig::new().with_backend(Some(backend));
            let engine = config.compile(record()).unwrap();
            close(engine.run(&x).unwrap(), expected.clone());
        }
    }
}

/// Blocks of 8 of 18 and of 17 inputs: blocks of 2 say the first, none but single weights the second.
#[test]
fn ragged_blocks_are_smaller_ones_or_the_floats_of_their_codes() {
    let device = Device::flex();
    let weight = WeightConfig::int(8).with_granularity(WeightGranularity::PerBlock { size: 8 });
    let config = QatConfig::new().with_weight(weight).with_activation(None);
    for (inputs, has_codes) in [(18, true), (17, false)] {
        let layer: Linear = LinearConfig::new(inputs, 4).init(&device);
        let model = config.prepare(with_numbers(layer, 3)).unwrap();
        let x = tensor::<2>(2, [3, inputs], &device);
        let expected = model.forward(x.clone());
        let record = || Export::record(&model, &x, |layer: &Linear, x| layer.forward(x)).unwrap();
        let exported = record().to_onnx(Form::Qdq).unwrap();
        for_the_judge(&exported, &x, &expected, None);
        assert_eq!(
            exported.layers[0].reason.is_none(),
            has_codes,
            "{exported:?}"
        );
        for backend in [Backend::Own, Backend::Rten, Backend::Burn] {
            let config = EngineConfig::new().with_backend(Some(backend));
            let engine = config.compile(record()).unwrap();
            close(engine.run(&x).unwrap(), expected.clone());
        }
    }
}

/// A matrix that is read beside half of it.
#[derive(Module, Debug)]
struct Beside {
    w: Param<Tensor<2>>,
}

impl Beside {
    fn both(&self) -> Tensor<2> {
        let w = self.w.val();
        Tensor::cat(vec![w.clone(), w * 0.5], 1)
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        x.matmul(self.both())
    }
}

#[test]
fn what_is_computed_from_a_quantized_weight_is_computed_from_its_codes() {
    let device = Device::flex();
    let model = Beside {
        w: Param::from_tensor(tensor(3, [6, 4], &device)),
    };
    let weight = codes(&model.w.val(), NumberFormat::int(2));
    let rounded = Beside {
        w: Param::from_tensor(weight.dequantize(&device).unwrap()),
    };
    let x = tensor::<2>(5, [3, 6], &device);
    let expected = rounded.forward(x.clone());
    let record = || {
        let export = Export::record(&model, &x, Beside::forward).unwrap();
        export.with_quantization(Quantization::none().with_weight("w", weight.clone()))
    };
    for form in [Form::Float, Form::Qdq, Form::Integer] {
        let exported = record().to_onnx(form).unwrap();
        for_the_judge(&exported, &x, &expected, None);
        let mut constants = exported.model.initializers().iter();
        let matrix = constants.find(|one| one.shape() == [6, 8]).unwrap();
        let (numbers, _) = matrix.bytes().as_chunks::<4>();
        let numbers = numbers.iter().map(|bytes| f32::from_le_bytes(*bytes));
        assert_eq!(numbers.collect::<Vec<_>>(), values(rounded.both()));
    }
    for backend in [Backend::Own, Backend::Rten, Backend::Burn] {
        let config = EngineConfig::new()
            .with_arithmetic(Arithmetic::Float)
            .with_backend(Some(backend));
        let engine = config.compile(record()).unwrap();
        close(engine.run(&x).unwrap(), expected.clone());
    }
}
