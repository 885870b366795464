//! Quantized models: codes in the file, integers in the engine, and the numbers of the
//! fake-quantized model.

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig, ConvTranspose2d, ConvTranspose2dConfig};
use burn::nn::{Linear, LinearConfig, PaddingConfig2d};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor, TensorData};
use burn_lean::deploy::{
    ActivationQuantization, Arithmetic, Backend, DynamicGrid, ElementType, EngineConfig, Execution,
    Export, Form, Quantization,
};
use burn_lean::graph::Tensors;
use burn_lean::quant::{
    ConvertConfig, ForwardQ, NumberFormat, ObserverConfig, PtqConfig, PtqMode, QatConfig,
    QuantParams, QuantizedTensor, Scheme, Site, Unsupported, WeightConfig, WeightGranularity,
    WeightRange,
    integer::{ConvGeometry, Grid, IntegerConv2d},
    quantized_weights, quantizers,
};

use crate::engine::GRID;
use crate::judge::{close, for_the_judge, operators, output_step, within_a_step};
use crate::support::{each_device, farthest, scratch, tensor, values, with_numbers};

#[derive(Module, Debug)]
struct Net {
    conv: Conv2d,
    depthwise: Conv2d,
    fc1: Linear,
    fc2: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        let conv = Conv2dConfig::new([3, 8], [3, 3]).with_stride([2, 2]);
        let depthwise = Conv2dConfig::new([8, 8], [3, 3]).with_groups(8);
        let padding = PaddingConfig2d::Explicit(1, 1, 1, 1);
        let net = Self {
            conv: conv.with_padding(padding.clone()).init(device),
            depthwise: depthwise.with_padding(padding).init(device),
            fc1: LinearConfig::new(8 * 4 * 4, 32).init(device),
            fc2: LinearConfig::new(32, 5).with_bias(false).init(device),
        };
        with_numbers(net, 1)
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<2> {
        let x = relu(self.conv.forward_q(x));
        let x = relu(self.depthwise.forward_q(x));
        let x = relu(self.fc1.forward_q(x.flatten::<2>(1, 3)));
        self.fc2.forward_q(x)
    }
}

pub(crate) fn images(seed: u64, device: &Device) -> Tensor<4> {
    tensor(seed, [6, 3, 8, 8], device)
}

/// Calibrated on the images that it is asked about.
fn calibrated(mode: PtqMode, weight: WeightConfig, device: &Device) -> Net {
    let device = device.clone().autodiff();
    let config = PtqConfig::new()
        .with_quantize(QatConfig::new().with_weight(weight))
        .with_mode(mode)
        .with_weight_range(WeightRange::MinMax)
        .with_observers(vec![ObserverConfig::MinMax])
        .with_progress(false);
    let images = images(2, &device.clone().inner());
    let (net, _) = config
        .quantize(
            Net::new(&device),
            || vec![images.clone()],
            |net, x| drop(net.forward(x)),
        )
        .unwrap();
    net.valid()
}

/// For the judge: the file of an export, with what the fake-quantized model gives.
pub(crate) fn written<const D: usize, I: Tensors>(
    export: &Export<Tensor<D>>,
    form: Form,
    inputs: &I,
    fake: &Tensor<D>,
) {
    let step = output_step(&values(fake.clone()));
    for_the_judge(&export.to_onnx(form).unwrap(), inputs, fake, Some(step));
}

#[test]
fn integer_layers_give_the_numbers_of_the_fake_quantized_model() {
    each_device(|target| {
        let net = calibrated(PtqMode::Static, WeightConfig::int(8), &target.device);
        let x = images(2, &target.device);
        let export = Export::record(&net, &x, |net, x| net.forward(x)).unwrap();
        written(&export, Form::Qdq, &x, &net.forward(x.clone()));
        written(&export, Form::Integer, &x, &net.forward(x.clone()));
        let integer = EngineConfig::new().with_arithmetic(Arithmetic::Integer);
        let engine = integer.compile(export).unwrap();
        let report = engine.report();
        assert_eq!(report.layers.len(), 4);
        for layer in &report.layers {
            assert_eq!(layer.execution, Execution::Integer, "{report}");
            assert_eq!(layer.reason, None, "{report}");
        }
        let paths: Vec<_> = report
            .layers
            .iter()
            .map(|layer| layer.path.as_str())
            .collect();
        assert_eq!(
            paths,
            [
                "conv.weight",
                "depthwise.weight",
                "fc1.weight",
                "fc2.weight"
            ]
        );
        within_a_step(engine.run(&x).unwrap(), net.forward(x));
    });
}

#[test]
fn a_converted_model_gives_the_same_file_as_the_prepared_one() {
    each_device(|target| {
        let net = calibrated(PtqMode::Static, WeightConfig::int(8), &target.device);
        let x = images(2, &target.device);
        let forward = |net: &Net, x| net.forward(x);
        let prepared = Export::record(&net, &x, forward).unwrap();
        let keep = ConvertConfig::new().with_unsupported(Unsupported::KeepFakeQuantized);
        let (converted, _) = keep.convert(net).unwrap();
        let converted = Export::record(&converted, &x, forward).unwrap();
        for form in [Form::Float, Form::Qdq, Form::Integer] {
            let of = |export: &Export<Tensor<2>>| export.to_onnx(form).unwrap().model;
            assert_eq!(of(&prepared), of(&converted), "{form:?}");
        }
    });
}

#[test]
fn the_file_has_codes_with_one_scale_for_each_channel() {
    each_device(|target| {
        let net = calibrated(PtqMode::Static, WeightConfig::int(8), &target.device);
        let x = images(2, &target.device);
        let export = Export::record(&net, &x, |net: &Net, x| net.forward(x)).unwrap();
        let exported = export.to_onnx(Form::Qdq).unwrap();
        let count = |operator| {
            let all = operators(&exported);
            all.into_iter().filter(|one| *one == operator).count()
        };
        // Of each layer the weight and the activation, of the two convolutions a bias, too.
        assert_eq!(count("QuantizeLinear"), 4);
        assert_eq!(count("DequantizeLinear"), 4 + 4 + 2);
        let constant = |name: &str| {
            let mut all = exported.model.initializers().iter();
            all.find(|one| one.name() == name)
                .unwrap_or_else(|| panic!("no {name}"))
        };
        let codes = quantized_weights(&net).unwrap();
        for (path, weight) in &codes {
            let stored = constant(&format!("{path}.codes"));
            assert_eq!(stored.element(), ElementType::U8);
            let bytes = stored.bytes().iter().map(|byte| i16::from(*byte) - 128);
            assert!(bytes.eq(weight.codes().iter().copied()), "{path}");
            let channels = weight.scale().len();
            assert_eq!(constant(&format!("{path}.scale")).shape(), [channels]);
        }
        // Equal ones have a name in common.
        let zeros = exported.model.initializers().iter();
        let mut zeros = zeros.filter(|one| one.name().ends_with("weight.zero_point"));
        assert!(zeros.all(|one| one.bytes().iter().all(|zero| *zero == 128)));
        assert_eq!(constant("conv.bias.codes").element(), ElementType::I32);
        // Weights of four bits take half a byte.
        let net = calibrated(PtqMode::Static, WeightConfig::int(4), &target.device);
        let export = Export::record(&net, &x, |net: &Net, x| net.forward(x)).unwrap();
        let exported = export.to_onnx(Form::Qdq).unwrap();
        let mut all = exported.model.initializers().iter();
        let stored = all.find(|one| one.name() == "fc1.weight.codes").unwrap();
        assert_eq!(stored.element(), ElementType::I4);
        assert_eq!(stored.bytes().len(), 8 * 4 * 4 * 32 / 2);
    });
}

#[test]
fn dynamic_ranges_are_computed_in_the_graph() {
    each_device(|target| {
        let net = calibrated(PtqMode::Dynamic, WeightConfig::int(8), &target.device);
        let x = images(2, &target.device);
        let export = Export::record(&net, &x, |net: &Net, x| net.forward(x)).unwrap();
        let file = export.to_onnx(Form::Integer).unwrap();
        assert!(operators(&file).contains(&"DynamicQuantizeLinear"));
        for form in [Form::Qdq, Form::Integer] {
            written(&export, form, &x, &net.forward(x.clone()));
        }
        let integer = EngineConfig::new().with_arithmetic(Arithmetic::Integer);
        let engine = integer.compile(export).unwrap();
        assert!(engine.report().is_integer());
        within_a_step(engine.run(&x).unwrap(), net.forward(x));
    });
}

#[test]
fn weights_of_four_bits_are_multiplied_in_blocks() {
    each_device(|target| {
        for granularity in [
            WeightGranularity::PerChannel,
            WeightGranularity::PerBlock { size: 32 },
        ] {
            let weight = WeightConfig::int(4).with_granularity(granularity);
            let device = target.device.clone().autodiff();
            let model: Linear = LinearConfig::new(64, 8).init(&device);
            let config = QatConfig::new().with_weight(weight).with_activation(None);
            let model = config.prepare(with_numbers(model, 5)).unwrap().valid();
            let x = tensor::<2>(6, [3, 64], &target.device);
            let export = Export::record(&model, &x, |model: &Linear, x| model.forward(x)).unwrap();
            for form in [Form::Qdq, Form::Integer] {
                written(&export, form, &x, &model.forward(x.clone()));
            }
            let integer = EngineConfig::new().with_arithmetic(Arithmetic::Integer);
            let engine = integer.compile(export).unwrap();
            assert_eq!(
                engine.report().layers[0].execution,
                Execution::WeightsInteger
            );
            let expected = model.forward(x.clone());
            close(engine.run(&x).unwrap(), expected.clone());
            let one = x.slice([1..2]);
            close(engine.run(&one).unwrap(), expected.slice([1..2]));
        }
    });
}

/// Codes of a weight, with a scale for each channel along an axis.
fn codes<const D: usize>(weight: &Tensor<D>, axis: usize) -> QuantizedTensor {
    let granularity = burn_lean::quant::Granularity::PerChannel { axis };
    let scheme = Scheme::symmetric(NumberFormat::int8().narrow()).with_granularity(granularity);
    let qparams = QuantParams::of(weight, &scheme).unwrap();
    QuantizedTensor::quantize(weight, &qparams, &scheme).unwrap()
}

#[test]
fn sums_of_a_convolution_are_the_integer_reference_to_the_bit() {
    let device = Device::flex();
    for (groups, batch) in [(1, 1), (2, 1), (4, 1), (1, 3), (4, 2)] {
        let config = Conv2dConfig::new([4, 8], [3, 3])
            .with_stride([2, 1])
            .with_padding(PaddingConfig2d::Explicit(1, 1, 1, 1))
            .with_groups(groups)
            .with_bias(false);
        let conv: Conv2d = config.init(&device);
        let weight = tensor::<4>(7, [8, 4 / groups, 3, 3], &device);
        let weight = weight.sign() * 0.5 + tensor::<4>(8, [8, 4 / groups, 3, 3], &device) * 0.01;
        let codes = codes(&weight, 0);
        let x = tensor::<4>(9, [batch, 4, 7, 6], &device).sign();
        let quantization = Quantization::none()
            .with_weight("weight", codes.clone())
            .with_input("weight", ActivationQuantization::Static(GRID));
        let export = Export::record(&conv, &x, |conv: &Conv2d, x| conv.forward(x))
            .unwrap()
            .with_quantization(quantization);
        let integer = EngineConfig::new().with_arithmetic(Arithmetic::Integer);
        let engine = integer.compile(export).unwrap();
        let geometry = ConvGeometry {
            stride: [2, 1],
            padding: [1, 1],
            dilation: [1, 1],
            groups,
        };
        let reference = IntegerConv2d::of(&codes, None, GRID, geometry).unwrap();
        let given: Vec<i32> = values(x.clone())
            .iter()
            .map(|x| GRID.quantize(*x).unwrap())
            .collect();
        let (sums, shape) = reference.accumulate(&given, [batch, 4, 7, 6]).unwrap();
        let channel = |index: usize| index / (shape[2] * shape[3]) % shape[1];
        let expected: Vec<f32> = sums
            .iter()
            .enumerate()
            .map(|(index, sum)| *sum as f32 * (GRID.scale * codes.scale()[channel(index)]))
            .collect();
        let found = values(engine.run(&x).unwrap());
        assert_eq!(engine.report().layers[0].execution, Execution::Integer);
        assert_eq!(found, expected, "{groups} groups");
    }
}

#[test]
fn a_backend_without_a_kernel_for_integers_is_refused_with_the_layer() {
    let device = Device::flex();
    let config = Conv2dConfig::new([4, 8], [3, 3]).with_groups(2);
    let conv: Conv2d = config.init(&device);
    let x = tensor::<4>(9, [1, 4, 7, 6], &device);
    let compile = |backend| {
        let quantization = Quantization::none()
            .with_weight("weight", codes(&conv.weight.val(), 0))
            .with_input("weight", ActivationQuantization::Static(GRID));
        let export = Export::record(&conv, &x, |conv: &Conv2d, x| conv.forward(x)).unwrap();
        let integer = EngineConfig::new().with_arithmetic(Arithmetic::Integer);
        let config = integer.with_backend(Some(backend));
        config.compile(export.with_quantization(quantization))
    };
    let refused = compile(Backend::Burn).unwrap_err().to_string();
    assert_says!(refused, "allow another backend");
    // It has one where the machine multiplies without saturating.
    match compile(Backend::Rten) {
        Ok(engine) => assert_eq!(engine.report().layers[0].execution, Execution::Integer),
        Err(refused) => assert_says!(refused, "`weight`: "),
    }
}

#[test]
fn a_transposed_convolution_has_codes_in_the_file_and_a_line_in_the_report() {
    let device = Device::flex();
    let config = ConvTranspose2dConfig::new([3, 4], [2, 2]).with_stride([2, 2]);
    let mut up: ConvTranspose2d = with_numbers(config.init(&device), 4);
    let weight = codes(&up.weight.val(), 1);
    let x = tensor::<4>(11, [2, 3, 4, 4], &device);
    let quantization = Quantization::none()
        .with_weight("weight", weight.clone())
        .with_input("weight", ActivationQuantization::Static(GRID));
    let export = Export::record(&up, &x, |up: &ConvTranspose2d, x| up.forward(x))
        .unwrap()
        .with_quantization(quantization);

    let written = export.to_onnx(Form::Qdq).unwrap();
    let expected = [
        "QuantizeLinear",
        "DequantizeLinear",
        "DequantizeLinear",
        "DequantizeLinear",
        "ConvTranspose",
    ];
    assert_eq!(operators(&written), expected);
    let constant = |name: &str| {
        let mut all = written.model.initializers().iter();
        let found = all.find(|one| one.name() == name).unwrap();
        (found.element(), found.shape().to_vec())
    };
    assert_eq!(
        constant("weight.codes"),
        (ElementType::U8, vec![3, 4, 2, 2])
    );
    assert_eq!(constant("weight.scale"), (ElementType::F32, vec![4]));
    let layer = &written.layers[0];
    assert_eq!(
        (layer.path.as_str(), layer.execution, layer.weight_bytes),
        ("weight", Execution::Qdq, 48)
    );

    // The file gives the numbers of the grids.
    let (_folder, path) = scratch("up.onnx");
    written.model.save(&path).unwrap();
    let file = EngineConfig::new().open(&path).unwrap();
    let found = file.run(vec![x.clone().into_data()]).unwrap().remove(0);
    let found: Vec<f32> = found.iter().collect();
    up.weight = up.weight.map(|_| weight.dequantize::<4>(&device).unwrap());
    let rounded = values(x.clone()).into_iter();
    let rounded = rounded.map(|x| GRID.dequantize(GRID.quantize(x).unwrap()));
    let rounded = TensorData::new(rounded.collect::<Vec<f32>>(), x.dims());
    let expected = up.forward(Tensor::from_data(rounded, &device));
    let step = output_step(&values(expected.clone()));
    for_the_judge(&written, &x, &expected, Some(step));
    let expected = values(expected);
    assert_eq!(found.len(), expected.len());
    assert_near!(found.iter(), &expected, 1e-4);

    let integer = EngineConfig::new().with_arithmetic(Arithmetic::Integer);
    let report = integer.compile(export).unwrap().report();
    let layer = &report.layers[0];
    assert_eq!(layer.execution, Execution::DequantizedOnce);
    assert!(
        layer.reason.as_ref().unwrap().contains("transposed"),
        "{layer:?}"
    );
}

/// Which of so many parts of a result are NaN as a whole; no other may have one.
pub(crate) fn lost(found: Vec<f32>, parts: usize) -> Vec<bool> {
    let part = |part: &[f32]| {
        let lost = part[0].is_nan();
        assert!(part.iter().all(|x| x.is_nan() == lost), "{part:?}");
        lost
    };
    found.chunks(found.len() / parts).map(part).collect()
}

#[test]
fn what_has_no_code_is_nan_in_its_row_or_image_alone() {
    let device = Device::flex();
    let linear: Linear = with_numbers(LinearConfig::new(16, 6).init(&device), 3);
    let conv: Conv2d = with_numbers(Conv2dConfig::new([2, 4], [3, 3]).init(&device), 4);
    let config = EngineConfig::new().with_arithmetic(Arithmetic::Integer);
    let own = config.clone().with_backend(Some(Backend::Own));
    for how in [
        ActivationQuantization::Static(GRID),
        ActivationQuantization::Dynamic(DynamicGrid::uint8()),
    ] {
        let quantization = |weight| {
            let codes = Quantization::none().with_weight("weight", weight);
            codes.with_input("weight", how)
        };
        let rows = tensor::<2>(12, [3, 16], &device);
        let of_rows = || {
            let export = Export::record(&linear, &rows, |linear: &Linear, x| linear.forward(x));
            let quantization = quantization(codes(&linear.weight.val(), 1));
            export.unwrap().with_quantization(quantization)
        };
        let images = tensor::<4>(13, [2, 2, 5, 5], &device);
        let of_images = Export::record(&conv, &images, |conv: &Conv2d, x| conv.forward(x));
        let of_images = of_images.unwrap();
        let of_images = of_images.with_quantization(quantization(codes(&conv.weight.val(), 0)));
        let of_rows_own = own.compile(of_rows()).unwrap();
        let of_images = own.compile(of_images).unwrap();
        let broken = |mut numbers: Vec<f32>, number| {
            // In the second row, and in the second image.
            let at = numbers.len() * 5 / 8;
            numbers[at] = number;
            numbers
        };
        for number in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            // Infinities are the ends of a grid that is known.
            let is_lost = number.is_nan() || matches!(how, ActivationQuantization::Dynamic(_));
            let x = TensorData::new(broken(values(rows.clone()), number), [3, 16]);
            let x = Tensor::<2>::from_data(x, &device);
            let found = lost(values(of_rows_own.run(&x).unwrap()), 3);
            assert_eq!(found, [false, is_lost, false], "{number} {how:?}");
            let x = TensorData::new(broken(values(images.clone()), number), [2, 2, 5, 5]);
            let x = Tensor::<4>::from_data(x, &device);
            let found = lost(values(of_images.run(&x).unwrap()), 2);
            assert_eq!(found, [false, is_lost], "{number} {how:?}");
        }
        let rten = config.clone().with_backend(Some(Backend::Rten));
        let rten = rten.compile(of_rows()).unwrap();
        for number in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let x = TensorData::new(broken(values(rows.clone()), number), [3, 16]);
            let refused = rten.run(&Tensor::<2>::from_data(x, &device)).unwrap_err();
            let refused = refused.to_string();
            assert!(refused.contains("have no code"), "{number}: {refused}");
        }
    }
}

#[test]
fn floats_stay_where_integers_do_not_fit_and_the_report_says_why() {
    let device = Device::flex();
    let linear: Linear = LinearConfig::new(8, 4).init(&device);
    let x = tensor::<2>(10, [3, 8], &device);
    let weight = linear.weight.val();
    let compile = |quantization: Quantization| {
        let export = Export::record(&linear, &x, |linear: &Linear, x| linear.forward(x)).unwrap();
        let integer = EngineConfig::new().with_arithmetic(Arithmetic::Integer);
        let engine = integer
            .compile(export.with_quantization(quantization))
            .unwrap();
        engine.report().layers.remove(0)
    };
    let affine = Scheme::affine(NumberFormat::uint8());
    let qparams = QuantParams::of(&weight, &affine).unwrap();
    let affine = QuantizedTensor::quantize(&weight, &qparams, &affine).unwrap();
    let of_rows = codes(&weight, 0);
    let static_input = ActivationQuantization::Static(GRID);
    for (codes, execution, why) in [
        (affine, Execution::Integer, None),
        (of_rows, Execution::WeightsInteger, Some("not rounded")),
    ] {
        let quantization = Quantization::none().with_weight("weight", codes);
        let quantization = quantization.with_input("weight", static_input);
        let layer = compile(quantization.clone());
        let reason = layer.reason.unwrap_or_default();
        assert_eq!(layer.execution, execution, "{reason}");
        assert!(reason.contains(why.unwrap_or_default()), "{reason}");
        // ONNX has no operator for either.
        let export = Export::record(&linear, &x, |linear: &Linear, x| linear.forward(x)).unwrap();
        let file = export.with_quantization(quantization);
        let layer = file.to_onnx(Form::Integer).unwrap().layers.remove(0);
        assert_eq!(layer.execution, Execution::DequantizedOnce);
        let reason = layer.reason.unwrap_or_default();
        let why = "its weight has a zero point, or other scales than one for each output channel";
        assert_eq!(reason, why);
    }
    // Codes of 8 bits alone are multiplied by floats.
    let layer = compile(Quantization::none().with_weight("weight", codes(&weight, 1)));
    assert_eq!(
        (layer.execution, layer.reason),
        (Execution::WeightsInteger, None)
    );
    let layer = compile(Quantization::none());
    assert_eq!((layer.execution, layer.reason), (Execution::Float, None));
    // 50,000 · 255 · 127 fits 32 bits, but not beside a bias of any size.
    let linear: Linear = LinearConfig::new(50_000, 1).init(&device);
    let ones = Tensor::<2>::ones([50_000, 1], &device);
    let x = tensor::<2>(10, [1, 50_000], &device);
    let quantization = Quantization::none()
        .with_weight("weight", codes(&ones, 1))
        .with_input("weight", static_input);
    let export = Export::record(&linear, &x, |linear: &Linear, x| linear.forward(x)).unwrap();
    let config = EngineConfig::new().with_arithmetic(Arithmetic::Integer);
    let config = config.with_backend(Some(Backend::Own));
    let engine = config.compile(export.with_quantization(quantization));
    let layer = engine.unwrap().report().layers.remove(0);
    assert_eq!(layer.execution, Execution::DequantizedOnce);
    assert!(layer.reason.unwrap().contains("32 bits"));
}

#[test]
fn the_fastest_form_gives_close_numbers_and_says_what_it_chose() {
    let device = Device::flex();
    let net = calibrated(PtqMode::Static, WeightConfig::int(8), &device);
    let x = images(2, &device);
    let export = Export::record(&net, &x, |net: &Net, x| net.forward(x)).unwrap();
    let engine = EngineConfig::new().compile(export).unwrap();
    let report = engine.report();
    for layer in &report.layers {
        let floats = layer.execution == Execution::DequantizedOnce;
        assert_eq!(floats, layer.reason.is_some(), "{report}");
    }
    let found = values(engine.run(&x).unwrap());
    let fake = values(net.forward(x));
    let off = farthest(&found, &fake);
    let bound = rounding(&net);
    assert!(off <= bound, "{off} {bound}");
}

/// How far the outputs of a net whose activations stay floats may be from those of codes: rounding moves
/// each term by half a step, which weights of an output add up, and ReLU makes no larger.
fn rounding(net: &Net) -> f32 {
    let grids: Vec<_> = quantizers(net)
        .into_iter()
        .filter(|one| one.site == Site::Input)
        .map(|one| (one.parameter.unwrap(), Grid::of(&one.quantizer).unwrap()))
        .collect();
    let half_step = |path: &str| {
        let (_, grid) = grids.iter().find(|(of, _)| of == path).unwrap();
        grid.scale / 2.0
    };
    // The largest sum of what an output weighs; of kernels outputs come first, of matrices last.
    let kernel = |conv: &Conv2d| largest_sum(conv.weight.val().flatten::<2>(1, 3).transpose());
    let matrix = |linear: &Linear| largest_sum(linear.weight.val());
    let layers = [
        ("conv.weight", kernel(&net.conv)),
        ("depthwise.weight", kernel(&net.depthwise)),
        ("fc1.weight", matrix(&net.fc1)),
        ("fc2.weight", matrix(&net.fc2)),
    ];
    let layers = layers.into_iter();
    layers.fold(0.0, |off, (path, sum)| (off + half_step(path)) * sum)
}

/// Of the columns of a matrix.
fn largest_sum(matrix: Tensor<2>) -> f32 {
    matrix.abs().sum_dim(0).max().into_scalar()
}
