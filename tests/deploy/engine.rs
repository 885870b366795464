//! What runs a model: forced or measured, in which storage, and what the report says of it.

use burn::module::{Module, ModuleMapper, Param};
use burn::nn::conv::{Conv1d, Conv1dConfig, Conv2d, Conv2dConfig, Conv3d, Conv3dConfig};
use burn::nn::pool::{MaxPool2d, MaxPool2dConfig};
use burn::nn::{
    BatchNorm, BatchNormConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig, PaddingConfig1d,
    PaddingConfig2d,
};
use burn::tensor::activation::relu;
use burn::tensor::module::conv2d;
use burn::tensor::ops::ConvOptions;
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_lean::deploy::{
    ActivationQuantization, Arithmetic, Backend, DeployError, DynamicGrid, EngineConfig,
    EngineReport, Execution, Export, FloatStorage, Quantization, integer_kernels,
};
use burn_lean::quant::{
    Granularity, NumberFormat, QuantParams, QuantizedTensor, Scheme,
    integer::{Grid, IntegerLinear},
};

use crate::judge::{Nothing, close, within_a_step};
use crate::support::{each_device, farthest, on_each, tensor, values, with_numbers};

pub(crate) const GRID: Grid = Grid {
    scale: 2.0 / 255.0,
    zero_point: 128,
    quant_min: 0,
    quant_max: 255,
};

#[derive(Module, Debug)]
struct Net {
    first: Conv2d,
    norm: BatchNorm,
    second: Conv2d,
    pool: MaxPool2d,
    head: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        let conv = |from, to| {
            let config = Conv2dConfig::new([from, to], [3, 3]);
            config.with_padding(PaddingConfig2d::Explicit(1, 0, 1, 2))
        };
        let mut norm = BatchNormConfig::new(8).init(device);
        norm.gamma = Param::from_tensor(tensor(5, [8], device));
        Self {
            first: with_numbers(conv(3, 8).init(device), 1),
            norm,
            second: with_numbers(conv(8, 8).with_groups(2).init(device), 2),
            pool: MaxPool2dConfig::new([2, 2]).with_strides([2, 2]).init(),
            head: with_numbers(LinearConfig::new(8 * 4 * 4, 5).init(device), 3),
        }
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<2> {
        let x = relu(self.norm.forward(self.first.forward(x)));
        let x = relu(self.second.forward(x.clone()) + x);
        self.head.forward(self.pool.forward(x).flatten(1, 3))
    }
}

fn run(config: EngineConfig, net: &Net, x: &Tensor<4>) -> (Tensor<2>, EngineReport) {
    let export = Export::record(net, x, |net, x| net.forward(x)).unwrap();
    let engine = config.compile(export).unwrap();
    (engine.run(x).unwrap(), engine.report())
}

#[test]
fn every_backend_gives_the_numbers_of_the_model() {
    each_device(|target| {
        let net = Net::new(&target.device);
        let x = tensor::<4>(2, [3, 3, 8, 8], &target.device);
        let expected = net.forward(x.clone());
        for backend in [Backend::Own, Backend::Rten, Backend::Burn] {
            for threads in [0, 1, 2] {
                let config = EngineConfig::new().with_backend(Some(backend));
                let (found, report) = run(config.with_threads(threads), &net, &x);
                close(found, expected.clone());
                assert_eq!((report.backend, report.times.len()), (backend, 0));
            }
        }
        let (found, report) = run(EngineConfig::new(), &net, &x);
        close(found, expected);
        assert!(report.times.len() >= 3, "{report}");
        assert!(report.times.is_sorted_by_key(|timed| timed.time));
        // Burn stays unless another way is clearly faster.
        let burn = report.times.iter().find(|timed| timed.way == "Burn");
        let burn = burn.expect("Burn is always a candidate");
        let clearly = report.times[0].time.mul_f64(1.04) <= burn.time;
        assert!(clearly || report.backend == Backend::Burn, "{report}");
        assert_says!(report, "run by: ", "Burn: ");
    });
}

#[test]
fn weights_in_half_precision_take_half_and_are_rounded_once() {
    let device = Device::flex();
    let net = Net::new(&device);
    let x = tensor::<4>(2, [3, 3, 8, 8], &device);
    let own = EngineConfig::new().with_backend(Some(Backend::Own));
    let (_, full) = run(own.clone(), &net, &x);
    for (storage, dtype) in [
        (FloatStorage::F16, burn::tensor::FloatDType::F16),
        (FloatStorage::BF16, burn::tensor::FloatDType::BF16),
    ] {
        // A linear layer alone: the batch normalization is folded into the weights that are rounded.
        let linear: Linear = with_numbers(LinearConfig::new(64, 32).init(&device), 3);
        let rounded = linear.clone().map(&mut Rounded(dtype));
        let x_of = tensor::<2>(4, [5, 64], &device);
        let export = Export::record(&linear, &x_of, |linear: &Linear, x| linear.forward(x));
        let engine = own.clone().with_weights(storage).compile(export.unwrap());
        let engine = engine.unwrap();
        close(engine.run(&x_of).unwrap(), rounded.forward(x_of.clone()));
        let one = x_of.slice([0..1]);
        close(engine.run(&one).unwrap(), rounded.forward(one));
        assert_eq!(engine.report().resident_bytes, 2 * 64 * 32 + 4 * 32);
        let (_, half) = run(own.clone().with_weights(storage), &net, &x);
        assert!(half.resident_bytes < full.resident_bytes * 6 / 10);
    }
}

/// Matrices rounded to a dtype.
struct Rounded(burn::tensor::FloatDType);

impl ModuleMapper for Rounded {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match D {
            2 => param.map(|x| x.cast(self.0).cast(burn::tensor::FloatDType::F32)),
            _ => param,
        }
    }
}

pub(crate) fn codes(weight: &Tensor<2>, format: NumberFormat) -> QuantizedTensor {
    let granularity = Granularity::PerChannel { axis: 1 };
    let scheme = Scheme::symmetric(format).with_granularity(granularity);
    let qparams = QuantParams::of(weight, &scheme).unwrap();
    QuantizedTensor::quantize(weight, &qparams, &scheme).unwrap()
}

fn integer(linear: &Linear, x: &Tensor<2>, weight: QuantizedTensor) -> (Vec<f32>, EngineReport) {
    let quantization = Quantization::none()
        .with_weight("weight", weight)
        .with_input("weight", ActivationQuantization::Static(GRID));
    let export = Export::record(linear, x, |linear: &Linear, x| linear.forward(x)).unwrap();
    // rten, which may be faster, adds biases as floats.
    let config = EngineConfig::new().with_arithmetic(Arithmetic::Integer);
    let config = config.with_backend(Some(Backend::Own));
    let engine = config.compile(export.with_quantization(quantization));
    let engine = engine.unwrap();
    (values(engine.run(x).unwrap()), engine.report())
}

#[test]
fn an_integer_layer_with_a_bias_is_the_integer_reference_to_the_bit() {
    let device = Device::flex();
    for bits in [4, 8] {
        for rows in [1, 2, 7, 40] {
            let linear: Linear = with_numbers(LinearConfig::new(63, 37).init(&device), 3);
            let x = tensor::<2>(4, [rows, 63], &device);
            let weight = codes(&linear.weight.val(), NumberFormat::int(bits).narrow());
            let bias = values(linear.bias.clone().unwrap().val());
            // The steps of four bits are too coarse for a bias.
            let (in_steps, apart) = match bits {
                4 => (None, &bias[..]),
                _ => (Some(&bias[..]), &[0.0; 37][..]),
            };
            let reference = IntegerLinear::of(&weight, in_steps, GRID).unwrap();
            let given = values(x.clone());
            let given: Vec<i32> = given.iter().map(|x| GRID.quantize(*x).unwrap()).collect();
            let sums = reference.dequantize(&reference.accumulate(&given).unwrap());
            let apart = apart.iter().cycle();
            let expected: Vec<f32> = sums.iter().zip(apart).map(|(sum, b)| sum + b).collect();
            let (found, report) = integer(&linear, &x, weight);
            assert_eq!(found, expected, "{bits} bits, {rows} rows");
            let bytes = 64 * 37 * usize::from(bits) / 8;
            // A scale and the code of a bias for each output.
            assert_eq!(report.resident_bytes, bytes + 2 * 4 * 37);
        }
    }
}

#[test]
fn integers_that_divide_are_measured_with_ones() {
    let device = Device::flex();
    let linear: Linear = with_numbers(LinearConfig::new(1, 2).init(&device), 3);
    let forward = |linear: &Linear, (x, counts): (Tensor<2, Int>, Tensor<2, Int>)| {
        linear.forward((x / counts).float())
    };
    let numbers = |numbers: [[i32; 1]; 2]| Tensor::<2, Int>::from_ints(numbers, &device);
    let x = (numbers([[7], [9]]), numbers([[2], [3]]));
    let export = Export::record(&linear, &x, forward).unwrap();
    let engine = EngineConfig::new().compile(export).unwrap();
    close(engine.run(&x).unwrap(), forward(&linear, x));
}

#[test]
fn a_wide_integer_layer_is_the_reference_however_it_is_packed() {
    let device = Device::flex();
    let linear: Linear = with_numbers(LinearConfig::new(70, 160).init(&device), 3);
    let weight = codes(&linear.weight.val(), NumberFormat::int8().narrow());
    let bias = values(linear.bias.clone().unwrap().val());
    let reference = IntegerLinear::of(&weight, Some(&bias), GRID).unwrap();
    let mut ways = Vec::new();
    // One row, and so many that products for many rows are faster, where the CPU has them.
    for rows in [1, 400] {
        let x = tensor::<2>(4, [rows, 70], &device);
        let given = values(x.clone());
        let given: Vec<i32> = given.iter().map(|x| GRID.quantize(*x).unwrap()).collect();
        let sums = reference.accumulate(&given).unwrap();
        let (found, report) = integer(&linear, &x, weight.clone());
        assert_eq!(found, reference.dequantize(&sums), "{report}");
        assert_eq!(report.layers[0].execution, Execution::Integer, "{report}");
        ways.extend(report.times.into_iter().map(|timed| timed.way));
    }
    let measured = ways.iter().any(|way| way.contains("many rows"));
    assert_eq!(measured, !integer_kernels().products_saturate, "{ways:?}");
}

#[test]
fn the_least_code_of_a_weight_is_multiplied_exactly() {
    let device = Device::flex();
    let mut linear: Linear = LinearConfig::new(16, 2).with_bias(false).init(&device);
    let numbers: Vec<f32> = (0..32).map(|i| [-1.28, 1.27, 0.5][i % 3]).collect();
    let weight = Tensor::<2>::from_data(TensorData::new(numbers, [16, 2]), &device);
    linear.weight = Param::from_tensor(weight.clone());
    let scheme = Scheme::symmetric(NumberFormat::int8());
    let scheme = scheme.with_granularity(Granularity::PerChannel { axis: 1 });
    let scale = Tensor::<1>::from_floats([0.01, 0.01], &device);
    let qparams = QuantParams {
        zero_point: scale.zeros_like(),
        scale,
    };
    let weight = QuantizedTensor::quantize(&weight, &qparams, &scheme).unwrap();
    assert!(weight.codes().contains(&-128));
    let x = Tensor::<2>::full([3, 16], -1.0, &device);
    let reference = IntegerLinear::of(&weight, None, GRID).unwrap();
    let code = GRID.quantize(-1.0).unwrap();
    let sums = reference.accumulate(&[code; 3 * 16]).unwrap();
    let (found, report) = integer(&linear, &x, weight);
    assert_eq!(report.layers[0].execution, Execution::Integer, "{report}");
    assert_eq!(found, reference.dequantize(&sums));
}

#[test]
fn weights_of_eight_bits_alone_are_multiplied_by_floats() {
    on_each(|device| {
        let linear: Linear = with_numbers(LinearConfig::new(50, 20).init(device), 3);
        let weight = codes(&linear.weight.val(), NumberFormat::int8().narrow());
        let mut plain = linear.clone();
        plain.weight = Param::from_tensor(weight.dequantize(device).unwrap());
        let x = tensor::<2>(4, [9, 50], device);
        let export = Export::record(&linear, &x, |linear: &Linear, x| linear.forward(x)).unwrap();
        let quantization = Quantization::none().with_weight("weight", weight);
        let config = EngineConfig::new().with_arithmetic(Arithmetic::Integer);
        let engine = config.compile(export.with_quantization(quantization));
        let engine = engine.unwrap();
        let layer = &engine.report().layers[0];
        assert_eq!(layer.execution, Execution::WeightsInteger);
        close(engine.run(&x).unwrap(), plain.forward(x.clone()));
        let one = x.slice([3..4]);
        close(engine.run(&one).unwrap(), plain.forward(one));
    });
}

#[test]
fn a_weight_alone_with_a_scale_for_each_input_is_multiplied_by_floats() {
    let device = Device::flex();
    // More outputs than inputs: a scale of the outputs is missing.
    let linear: Linear = with_numbers(LinearConfig::new(6, 9).init(&device), 3);
    let granularity = Granularity::PerChannel { axis: 0 };
    let scheme = Scheme::symmetric(NumberFormat::int8()).with_granularity(granularity);
    // Inputs of sizes that are far from each other.
    let sizes = Tensor::<1>::from_floats([0.01, 0.1, 1.0, 2.0, 4.0, 8.0], &device);
    let weight = linear.weight.val() * sizes.unsqueeze_dim::<2>(1);
    let qparams = QuantParams::of(&weight, &scheme).unwrap();
    let weight = QuantizedTensor::quantize(&weight, &qparams, &scheme).unwrap();
    let mut plain = linear.clone();
    plain.weight = Param::from_tensor(weight.dequantize(&device).unwrap());
    let x = tensor::<2>(4, [9, 6], &device);
    let export = Export::record(&linear, &x, |linear: &Linear, x| linear.forward(x)).unwrap();
    let quantization = Quantization::none().with_weight("weight", weight);
    let config = EngineConfig::new().with_arithmetic(Arithmetic::Integer);
    let config = config.with_backend(Some(Backend::Own));
    let engine = config.compile(export.with_quantization(quantization));
    let engine = engine.unwrap();
    let layer = &engine.report().layers[0];
    assert_eq!(layer.execution, Execution::WeightsInteger);
    close(engine.run(&x).unwrap(), plain.forward(x));
}

#[test]
fn a_model_that_stays_in_burn_holds_its_weights_once_until_another_batch_comes() {
    let device = Device::flex();
    for size in [4, 64, 256] {
        let linear: Linear = with_numbers(LinearConfig::new(size, size).init(&device), 3);
        let forward = |linear: &Linear, x: Tensor<2>| linear.forward(x);
        let x = tensor::<2>(4, [8, size], &device);
        let export = Export::record(&linear, &x, forward).unwrap();
        let engine = EngineConfig::new().compile(export).unwrap();
        let bytes = 4 * (size * size + size);
        let stays = engine.report().backend == Backend::Burn;
        if stays {
            assert_eq!(engine.report().resident_bytes, bytes);
        }
        for rows in [8, 9, 1, 9, 8] {
            let x = tensor::<2>(5, [rows, size], &device);
            close(engine.run(&x).unwrap(), forward(&linear, x));
        }
        if stays {
            assert!(engine.report().resident_bytes >= 2 * bytes);
        }
    }
}

#[test]
fn codes_that_are_given_are_those_of_every_backend() {
    on_each(|device| {
        let linear: Linear = with_numbers(LinearConfig::new(16, 6).init(device), 3);
        // So few that the values are far from those of the model.
        let weight = codes(&linear.weight.val(), NumberFormat::int(2).narrow());
        let mut rounded = linear.clone();
        rounded.weight = Param::from_tensor(weight.dequantize(device).unwrap());
        let x = tensor::<2>(4, [3, 16], device);
        for backend in [Backend::Own, Backend::Rten, Backend::Burn] {
            let forward = |linear: &Linear, x: Tensor<2>| linear.forward(x);
            let export = Export::record(&linear, &x, forward).unwrap();
            let quantization = Quantization::none().with_weight("weight", weight.clone());
            let config = EngineConfig::new().with_backend(Some(backend));
            let config = config.with_arithmetic(Arithmetic::Float);
            let engine = config.compile(export.with_quantization(quantization));
            close(engine.unwrap().run(&x).unwrap(), rounded.forward(x.clone()));
        }
    });
}

#[test]
fn a_convolution_along_three_axes_is_floats_and_the_report_says_why() {
    let device = Device::flex();
    let conv: Conv3d = with_numbers(Conv3dConfig::new([2, 3], [2, 2, 2]).init(&device), 3);
    let scheme = Scheme::symmetric(NumberFormat::int8().narrow());
    let qparams = QuantParams::of(&conv.weight.val(), &scheme).unwrap();
    let weight = QuantizedTensor::quantize(&conv.weight.val(), &qparams, &scheme).unwrap();
    let x = tensor::<5>(4, [1, 2, 3, 4, 3], &device);
    let forward = |conv: &Conv3d, x: Tensor<5>| conv.forward(x);
    let export = Export::record(&conv, &x, forward).unwrap();
    let quantization = Quantization::none()
        .with_weight("weight", weight)
        .with_input("weight", ActivationQuantization::Static(GRID));
    let engine = EngineConfig::new().compile(export.with_quantization(quantization));
    let report = engine.unwrap().report();
    // No other way runs it, so no other batch.
    let fixed = report.fixed_batch.unwrap();
    assert!(fixed.starts_with("Burn alone runs it"), "{fixed}");
    let layer = &report.layers[0];
    assert_eq!(layer.execution, Execution::DequantizedOnce);
    let reason = layer.reason.as_ref().unwrap();
    assert!(reason.contains("one or two axes"));
    // The others do not run it: said when they are compiled, not with the first inputs.
    for backend in [Backend::Own, Backend::Rten] {
        let export = Export::record(&conv, &x, forward).unwrap();
        let config = EngineConfig::new().with_backend(Some(backend));
        let error = config.compile(export).unwrap_err();
        assert_matches!(error, DeployError::Load { .. });
        assert!(
            error
                .to_string()
                .contains("`weight` is of a convolution along three axes")
        );
    }
    // Nor where a configuration leaves Burn out by itself: its threads are those of the pool that calls.
    let export = Export::record(&conv, &x, forward).unwrap();
    let error = EngineConfig::new().with_threads(2).compile(export);
    let error = error.unwrap_err().to_string();
    assert_says!(error, "`weight` is of a convolution along three axes");
}

#[test]
fn a_model_without_parameters_is_run_by_burn_where_its_inputs_are() {
    let device = Device::flex();
    let x = tensor::<2>(4, [2, 3], &device);
    let forward = |_: &Nothing, x: Tensor<2>| x * 2.0;
    let export = Export::record(&Nothing {}, &x, forward).unwrap();
    let config = EngineConfig::new().with_backend(Some(Backend::Burn));
    let engine = config.compile(export).unwrap();
    assert_eq!(engine.report().backend, Backend::Burn);
    let expected = values(x.clone() * 2.0);
    assert_eq!(values(engine.run(&x).unwrap()), expected);
    #[cfg(feature = "ndarray")]
    {
        // The shapes are the same.
        #[allow(deprecated)]
        let elsewhere = x.to_device(&Device::ndarray());
        let refused = engine.run(&elsewhere).unwrap_err();
        assert_says!(refused, "Flex", "NdArray");
    }
}

#[test]
fn a_long_chain_of_operations_compiles_on_a_small_stack() {
    const STEPS: usize = 20_000;
    let compile_and_run = || {
        let device = Device::flex();
        let x = tensor::<2>(1, [2, 3], &device);
        let step = |x: Tensor<2>, _| x.mul_scalar(0.9999_f32);
        let forward = |_: &Nothing, x: Tensor<2>| (0..STEPS).fold(x, step);
        let export = Export::record(&Nothing {}, &x, forward).unwrap();
        let config = EngineConfig::new().with_backend(Some(Backend::Own));
        let engine = config.compile(export).unwrap();
        let number = |x: f32| (0..STEPS).fold(x, |x, _| x * 0.9999);
        let expected: Vec<f32> = values(x.clone()).into_iter().map(number).collect();
        assert_eq!(values(engine.run(&x).unwrap()), expected);
    };
    // That of threads that Rust and Tokio start.
    let thread = std::thread::Builder::new().stack_size(2 << 20);
    thread.spawn(compile_and_run).unwrap().join().unwrap();
}

#[test]
fn threads_beyond_any_machine_are_refused_and_not_started() {
    let device = Device::flex();
    let model = LinearConfig::new(2, 2).init(&device);
    let x = tensor::<2>(4, [1, 2], &device);
    let export = Export::record(&model, &x, |model: &Linear, x| model.forward(x)).unwrap();
    let error = EngineConfig::new().with_threads(100_000).compile(export);
    let error = error.unwrap_err().to_string();
    assert_eq!(error, "threads is 100000, but must be 0 to 1024");
}

/// A learned position for each of 30 rows, before a norm.
#[derive(Module, Debug)]
struct Positions {
    positions: Param<Tensor<3>>,
    norm: LayerNorm,
}

#[test]
fn constants_between_products_are_counted() {
    let device = Device::flex();
    let model = Positions {
        positions: Param::from_tensor(tensor(1, [1, 30, 20], &device)),
        norm: LayerNormConfig::new(20).init(&device),
    };
    let forward = |model: &Positions, x: Tensor<3>| model.norm.forward(x + model.positions.val());
    let x = tensor::<3>(2, [2, 30, 20], &device);
    let export = Export::record(&model, &x, forward).unwrap();
    let config = EngineConfig::new().with_backend(Some(Backend::Own));
    let engine = config.compile(export).unwrap();
    close(engine.run(&x).unwrap(), forward(&model, x));
    assert_eq!(engine.report().resident_bytes, 4 * (30 * 20 + 2 * 20));
}

/// A kernel and a matrix that read the same images.
#[derive(Module, Debug)]
struct Twice {
    conv: Conv2d,
    matrix: Param<Tensor<4>>,
}

#[test]
fn codes_are_read_by_windows_and_by_rows() {
    let device = Device::flex();
    let config = Conv2dConfig::new([3, 3], [3, 3]).with_bias(false);
    let config = config.with_padding(PaddingConfig2d::Explicit(1, 1, 1, 1));
    let mut model = Twice {
        conv: with_numbers(config.init(&device), 1),
        matrix: Param::from_tensor(tensor(2, [1, 1, 8, 8], &device)),
    };
    let scheme = Scheme::symmetric(NumberFormat::int8().narrow());
    let codes = |weight: &Tensor<4>| {
        let qparams = QuantParams::of(weight, &scheme).unwrap();
        QuantizedTensor::quantize(weight, &qparams, &scheme).unwrap()
    };
    let (kernel, matrix) = (codes(&model.conv.weight.val()), codes(&model.matrix.val()));
    model.conv.weight = Param::from_tensor(kernel.dequantize(&device).unwrap());
    model.matrix = Param::from_tensor(matrix.dequantize(&device).unwrap());
    let forward =
        |model: &Twice, x: Tensor<4>| model.conv.forward(x.clone()) + x.matmul(model.matrix.val());
    let x = tensor::<4>(3, [2, 3, 8, 8], &device);
    let own = EngineConfig::new().with_backend(Some(Backend::Own));
    let own = own.with_arithmetic(Arithmetic::Integer);
    for how in [
        ActivationQuantization::Dynamic(DynamicGrid::uint8()),
        ActivationQuantization::Static(GRID),
    ] {
        let quantization = Quantization::none()
            .with_weight("conv.weight", kernel.clone())
            .with_weight("matrix", matrix.clone())
            .with_input("conv.weight", how)
            .with_input("matrix", how);
        let export = Export::record(&model, &x, forward).unwrap();
        let engine = own.compile(export.with_quantization(quantization));
        let engine = engine.unwrap();
        let report = engine.report();
        assert_eq!(report.layers.len(), 2, "{report}");
        assert!(
            report
                .layers
                .iter()
                .all(|layer| layer.execution == Execution::Integer),
            "{report}"
        );
        let found = engine.run(&x).unwrap();
        // Half a step of 1/127 in each of 27 and 8 terms of weights up to 1.
        let expected = values(forward(&model, x.clone()));
        assert!(farthest(&values(found.clone()), &expected) < 35.0 / 254.0);
        if let ActivationQuantization::Static(grid) = how {
            let rounded = (x.clone() / grid.scale).round().clamp(-128.0, 127.0) * grid.scale;
            within_a_step(found, forward(&model, rounded));
        }
    }
}

#[test]
fn a_convolution_along_one_axis_is_run() {
    each_device(|target| {
        let config = Conv1dConfig::new(6, 4, 3).with_stride(2).with_groups(2);
        let conv: Conv1d = config
            .with_padding(PaddingConfig1d::Explicit(1, 2))
            .init(&target.device);
        let conv = with_numbers(conv, 3);
        let x = tensor::<3>(4, [2, 6, 9], &target.device);
        let export = Export::record(&conv, &x, |conv: &Conv1d, x| conv.forward(x)).unwrap();
        let config = EngineConfig::new().with_backend(Some(Backend::Own));
        let found = config.compile(export).unwrap().run(&x).unwrap();
        close(found, conv.forward(x));
    });
}

/// As many outputs along the width as channels.
#[test]
fn a_bias_that_is_computed_is_added_to_the_channels_of_an_integer_convolution() {
    let device = Device::flex();
    let config = Conv2dConfig::new([3, 4], [3, 3]).with_bias(false);
    let conv: Conv2d = with_numbers(config.init(&device), 3);
    let granularity = Granularity::PerChannel { axis: 0 };
    let scheme = Scheme::symmetric(NumberFormat::int8().narrow()).with_granularity(granularity);
    let qparams = QuantParams::of(&conv.weight.val(), &scheme).unwrap();
    let weight = QuantizedTensor::quantize(&conv.weight.val(), &qparams, &scheme).unwrap();
    let convolve = |weight: Tensor<4>, x: Tensor<4>, biases: Tensor<2>| {
        let options = ConvOptions::new([1, 1], [0, 0], [1, 1], 1);
        let bias: Tensor<1> = biases.sum_dim(0).reshape([4]);
        conv2d(x, weight, Some(bias), options)
    };
    let forward =
        |conv: &Conv2d, (x, biases): (Tensor<4>, Tensor<2>)| convolve(conv.weight.val(), x, biases);
    let x = tensor::<4>(4, [2, 3, 6, 6], &device);
    let biases = tensor::<2>(5, [2, 4], &device) * 3.0;
    let inputs = (x.clone(), biases.clone());
    let export = Export::record(&conv, &inputs, forward).unwrap();
    let quantization = Quantization::none()
        .with_weight("weight", weight.clone())
        .with_input("weight", ActivationQuantization::Static(GRID));
    let own = EngineConfig::new().with_backend(Some(Backend::Own));
    let own = own.with_arithmetic(Arithmetic::Integer);
    let engine = own.compile(export.with_quantization(quantization));
    let engine = engine.unwrap();
    assert_eq!(engine.report().layers[0].execution, Execution::Integer);
    let rounded = (x / GRID.scale).round().clamp(-128.0, 127.0) * GRID.scale;
    let expected = convolve(weight.dequantize(&device).unwrap(), rounded, biases);
    assert_eq!(expected.dims(), [2, 4, 4, 4]);
    within_a_step(engine.run(&inputs).unwrap(), expected);
}
