//! Files in the form in which runtimes find their integer kernels.

use burn::module::{Module, Param};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig, PaddingConfig2d};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor};
use burn_lean::deploy::{ElementType, Execution, Export, Exported, Form};
use burn_lean::quant::{
    FakeQuantizeConfig, NumberFormat, ObserverConfig, PtqConfig, PtqMode, QatConfig,
    QuantizedForward, Scheme, WeightConfig, fold_for,
};

use crate::judge::{for_the_judge, operators, output_step};
use crate::quantized::images;
use crate::support::{tensor, values, with_numbers};

#[derive(Module, Debug)]
struct Block {
    conv: Conv2d,
    norm: BatchNorm,
}

#[derive(Module, Debug)]
struct Chain {
    blocks: Vec<Block>,
}

impl Chain {
    fn new(bias: bool, device: &Device) -> Self {
        let block = |(at, from): (u64, usize)| Block {
            conv: Conv2dConfig::new([from, 4], [3, 3])
                .with_padding(PaddingConfig2d::Same)
                .with_bias(bias)
                .init(device),
            norm: {
                let mut norm = BatchNormConfig::new(4).init(device);
                norm.gamma = Param::from_tensor(tensor(5 + at, [4], device));
                norm.beta = Param::from_tensor(tensor(15 + at, [4], device));
                norm
            },
        };
        let blocks = [(0, 3), (1, 4), (2, 4)].map(block);
        with_numbers(
            Self {
                blocks: blocks.into(),
            },
            7,
        )
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        let blocks = self.blocks.iter();
        blocks.fold(x, |x, block| {
            relu(block.norm.forward(block.conv.forward(x)))
        })
    }
}

fn written<const D: usize, const E: usize, M: Module>(
    model: &M,
    x: &Tensor<E>,
    forward: impl Fn(&M, Tensor<E>) -> Tensor<D>,
    form: Form,
) -> Exported {
    let quantized = QuantizedForward::new();
    let expected = quantized.run(model, x.clone(), &forward).unwrap();
    let export = Export::record(model, x, &forward).unwrap();
    let exported = export.to_onnx(form).unwrap();
    let step = output_step(&values(expected.clone()));
    for_the_judge(&exported, x, &expected, Some(step));
    exported
}

/// ONNX Runtime makes one integer operator of a convolution, its ReLU and what quantizes it, if nothing else is
/// between them.
#[test]
fn nothing_is_left_in_a_file_of_a_norm_that_was_folded() {
    let device = Device::flex();
    for bias in [true, false] {
        let model = Chain::new(bias, &device);
        let x = images(3, &device);
        let folded = fold_for(model, x.clone(), Chain::forward).unwrap();
        let batches = || [x.clone()];
        let (model, _) = PtqConfig::new()
            .quantize_for(folded, batches, Chain::forward)
            .unwrap();
        for form in [Form::Qdq, Form::QdqSigned, Form::Integer, Form::Float] {
            let exported = written(&model, &x, Chain::forward, form);
            let names = operators(&exported);
            assert!(!names.contains(&"BatchNormalization"), "{names:?}");
            if form == Form::Qdq {
                let nodes = exported.model.nodes();
                for conv in nodes.iter().filter(|node| node.operator() == "Conv") {
                    assert_eq!(conv.inputs().len(), 3, "a bias");
                    let out = &conv.outputs()[0];
                    let reader = nodes.iter().find(|node| node.inputs().contains(out));
                    assert_eq!(reader.unwrap().operator(), "Relu");
                }
            }
        }
    }
}

#[derive(Module, Debug)]
struct Head {
    fc: Linear,
}

fn head(device: &Device) -> Head {
    let fc = LinearConfig::new(6, 4).init(device);
    with_numbers(Head { fc }, 3)
}

#[test]
fn signed_files_have_codes_around_zero_and_float_biases() {
    let device = Device::flex();
    let x = tensor::<2>(5, [4, 6], &device);
    let signed = Scheme::symmetric(NumberFormat::int8());
    let observer = ObserverConfig::MinMax;
    let activation = FakeQuantizeConfig::new(signed).with_observer(observer);
    let quantize = QatConfig::new().with_activation(Some(activation));
    let forward = |model: &Head, x| model.fc.forward(x);
    let (model, _) = PtqConfig::new()
        .with_quantize(quantize)
        .quantize_for(head(&device), || [x.clone()], forward)
        .unwrap();
    let exported = written(&model, &x, forward, Form::QdqSigned);
    let constants = exported.model.initializers();
    let of = |name: &str| constants.iter().find(|one| one.name() == name);
    assert_eq!(of("fc.weight.codes").unwrap().element(), ElementType::I8);
    assert!(of("fc.weight.zero_point").is_none());
    assert_eq!(of("fc.bias").unwrap().element(), ElementType::F32);
    let bytes = constants
        .iter()
        .filter(|one| one.element() == ElementType::U8);
    assert_eq!(bytes.count(), 0);
    let usual = written(&model, &x, forward, Form::Qdq);
    let constants = usual.model.initializers();
    let codes = constants.iter().find(|one| one.name() == "fc.weight.codes");
    assert_eq!(codes.unwrap().element(), ElementType::U8);
}

/// ONNX's integers do not hold floats of 8 bits.
#[test]
fn an_activation_that_a_file_leaves_out_is_named_with_its_layer() {
    let device = Device::flex();
    let x = tensor::<2>(5, [4, 6], &device);
    let floats = Scheme::symmetric(NumberFormat::E4M3);
    let dynamic = FakeQuantizeConfig::new(floats).with_observer(ObserverConfig::Memoryless);
    let quantize = QatConfig::new().with_activation(Some(dynamic));
    let model = quantize.prepare(head(&device)).unwrap();
    let export = Export::record(&model, &x, |model: &Head, x| model.fc.forward(x)).unwrap();
    assert_eq!(export.quantization().left_float().count(), 1);
    for form in [Form::Qdq, Form::QdqSigned, Form::Integer] {
        let layer = export.to_onnx(form).unwrap().layers.remove(0);
        assert_ne!(layer.execution, Execution::Float);
        let reason = layer.reason.unwrap_or_default();
        assert!(reason.contains("input of `fc`"), "{form:?}: {reason}");
    }
}

/// Of experts that are one parameter, `[experts, inputs, outputs]`, ONNX Runtime fuses what it then refuses to run,
/// unless something is between the codes and the product.
#[test]
fn stacks_of_matrices_are_stored_as_one() {
    #[derive(Module, Debug)]
    struct Experts {
        stack: Param<Tensor<3>>,
    }
    let device = Device::flex();
    let model = Experts {
        stack: Param::from_tensor(tensor(4, [3, 6, 5], &device)),
    };
    let forward = |model: &Experts, x: Tensor<2>| {
        let [rows, width] = x.dims();
        let x = x.unsqueeze::<3>().expand([3, rows, width]);
        x.matmul(model.stack.val())
    };
    let x = tensor::<2>(5, [4, 6], &device);
    for mode in [PtqMode::Static, PtqMode::Dynamic] {
        let config = PtqConfig::new().with_mode(mode);
        let quantize = QatConfig::new().with_weight(WeightConfig::int(8));
        let config = config.with_quantize(quantize);
        let model = Experts {
            stack: model.stack.clone(),
        };
        let quantized = config.quantize_for(model, || [x.clone()], forward);
        let (model, _) = quantized.unwrap();
        let exported = written(&model, &x, forward, Form::Qdq);
        let constants = exported.model.initializers();
        let codes = constants.iter().find(|one| one.name() == "stack.codes");
        assert_eq!(codes.unwrap().shape(), [18, 5]);
        let nodes = exported.model.nodes();
        let product = nodes.iter().find(|node| node.operator() == "MatMul");
        let weight = &product.unwrap().inputs()[1];
        let made = nodes.iter().find(|node| node.outputs().contains(weight));
        assert_eq!(made.unwrap().operator(), "Reshape");
    }
}
