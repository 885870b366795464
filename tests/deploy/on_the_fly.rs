//! Activations whose range is that of the values at hand, in every form that a quantizer has.

use burn::module::Module;
use burn::nn::attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor, TensorData};
use burn_lean::deploy::{
    ActivationQuantization, Arithmetic, Backend, DynamicGrid, Engine, EngineConfig, Execution,
    Export, Form, Quantization,
};
use burn_lean::quant::{
    FakeQuantizeConfig, Granularity, Mapping, NumberFormat, ObserverConfig, QatConfig,
    QuantizedForward, Scheme, WeightConfig, WeightGranularity,
};

use crate::judge::{for_the_judge, operators, output_step, within_steps};
use crate::support::{tensor, values, with_numbers};

#[derive(Module, Debug)]
struct Head {
    fc: Linear,
}

const WIDTH: usize = 40;

fn head(device: &Device) -> Head {
    let fc = LinearConfig::new(WIDTH, 19).init(device);
    with_numbers(Head { fc }, 3)
}

/// Rows of magnitudes from 1e-3 to 3e4, one of zeros, one without negative numbers.
fn rows(device: &Device) -> Tensor<2> {
    let x = tensor::<2>(5, [7, WIDTH], device);
    let magnitudes = [1.0, 1e-3, 30.0, 3e4, 0.0, 1.0, 100.0];
    let magnitudes = Tensor::<1>::from_floats(magnitudes, device).unsqueeze_dim::<2>(1);
    let x = x * magnitudes;
    let positive = x.clone().slice([5..6]).abs();
    x.slice_assign([5..6], positive)
}

fn schemes() -> Vec<Scheme> {
    let signed = [
        NumberFormat::int8(),
        NumberFormat::int8().narrow(),
        NumberFormat::int(4),
    ];
    let unsigned = [NumberFormat::uint8(), NumberFormat::uint(5)];
    let mut schemes = Vec::new();
    for granularity in [Granularity::PerTensor, Granularity::PerToken] {
        let mut add = |format, mapping| {
            let scheme = Scheme::symmetric(format).with_mapping(mapping);
            schemes.push(scheme.with_granularity(granularity.clone()));
        };
        for format in signed {
            add(format, Mapping::Symmetric);
            add(format, Mapping::SymmetricNoClipping);
            add(format, Mapping::Affine);
        }
        for format in unsigned {
            add(format, Mapping::Symmetric);
            add(format, Mapping::Affine);
        }
    }
    schemes
}

fn prepared<M: Module>(model: M, scheme: Scheme, weight: WeightConfig) -> M {
    let activation = FakeQuantizeConfig::new(scheme).with_observer(ObserverConfig::Memoryless);
    QatConfig::new()
        .with_weight(weight)
        .with_activation(Some(activation))
        .prepare(model)
        .unwrap()
}

pub(crate) fn compiled<M: Module, const D: usize>(
    model: &M,
    x: &Tensor<D>,
    forward: impl Fn(&M, Tensor<D>) -> Tensor<D>,
    backend: Backend,
) -> Engine<Tensor<D>> {
    let export = Export::record(model, x, forward).unwrap();
    assert_eq!(export.quantization().left_float().count(), 0);
    EngineConfig::new()
        .with_arithmetic(Arithmetic::Integer)
        .with_backend(Some(backend))
        .compile(export)
        .unwrap()
}

/// Of each row a share of its largest number: sums of codes are exact, the rest is rounding of F32. And `slack`.
fn assert_rows_agree(found: &Tensor<2>, expected: &Tensor<2>, slack: &[f32], what: &str) {
    let [_, columns] = expected.dims();
    let (found, expected) = (values(found.clone()), values(expected.clone()));
    let rows = found.chunks(columns).zip(expected.chunks(columns));
    for (row, (found, expected)) in rows.enumerate() {
        let most = expected.iter().fold(0.0, |most: f32, x| x.abs().max(most));
        for (a, b) in found.iter().zip(expected) {
            let off = (a - b).abs();
            assert!(
                off <= SHARE * most + slack[row],
                "{what}, row {row}: {a} {b}"
            );
        }
    }
}

/// Some dozens of products, whose sum the other way rounds, of values up to the largest.
const SHARE: f32 = 1e-4;
const NONE: [f32; 16] = [0.0; 16];

/// The largest number of a symmetric range is half way between two codes: a last bit of its quotient decides, and rten
/// divides by products. What a code more or less is worth in each row.
fn of_one_code(model: &Head, x: &Tensor<2>, scheme: &Scheme) -> Vec<f32> {
    let weights = values(model.fc.weight.val());
    let largest = weights.iter().fold(0.0, |most: f32, w| w.abs().max(most));
    let codes = scheme.quant_max() - scheme.quant_min();
    let x = values(x.clone());
    let of_row = |row: &[f32]| row.iter().fold(0.0, |most: f32, x| x.abs().max(most));
    let ranges: Vec<f32> = x.chunks(WIDTH).map(of_row).collect();
    let of_all = of_row(&ranges);
    let range = |row: &f32| match scheme.granularity {
        Granularity::PerToken => *row,
        _ => of_all,
    };
    let step = |row: &f32| 2.0 * range(row) / codes * largest;
    ranges.iter().map(step).collect()
}

#[test]
fn engines_and_files_round_rows_as_the_quantizer_does() {
    let device = Device::flex();
    let x = rows(&device);
    let forward = |model: &Head, x| model.fc.forward(x);
    for scheme in schemes() {
        let model = prepared(head(&device), scheme.clone(), WeightConfig::int(8));
        let quantized = QuantizedForward::new();
        let expected = quantized.run(&model, x.clone(), forward).unwrap();
        let one_code = of_one_code(&model, &x, &scheme);
        for (backend, slack) in [(Backend::Own, &NONE[..]), (Backend::Rten, &one_code)] {
            let engine = compiled(&model, &x, forward, backend);
            let layer = &engine.report().layers[0];
            let what = format!("{scheme}, {backend}");
            assert_eq!(layer.execution, Execution::Integer, "{what} {layer:?}");
            assert_rows_agree(&engine.run(&x).unwrap(), &expected, slack, &what);
        }
        let export = Export::record(&model, &x, forward).unwrap();
        let largest = values(expected.clone()).into_iter();
        let largest = largest.fold(0.0, |most: f32, x| x.abs().max(most));
        for form in [Form::Qdq, Form::QdqSigned, Form::Integer] {
            let exported = export.to_onnx(form).unwrap();
            assert_eq!(exported.layers[0].reason, None, "{scheme} {form:?}");
            for_the_judge(&exported, &x, &expected, Some(SHARE * largest));
        }
    }
}

/// A range below 3e-5 has the smallest scale, on the grid of ONNX's own operator, too.
#[test]
fn the_smallest_scale_is_that_of_the_quantizer() {
    let device = Device::flex();
    let x = tensor::<2>(5, [9, 64], &device) * 1e-6;
    let scheme = Scheme::affine(NumberFormat::uint8());
    // A bias would hide numbers as small as these.
    let fc = LinearConfig::new(64, 19).with_bias(false).init(&device);
    let model = with_numbers(Head { fc }, 3);
    let model = prepared(model, scheme.clone(), WeightConfig::int(8));
    let forward = |model: &Head, x| model.fc.forward(x);
    let expected = QuantizedForward::new()
        .run(&model, x.clone(), forward)
        .unwrap();
    let engine = compiled(&model, &x, forward, Backend::Own);
    assert_eq!(engine.report().layers[0].execution, Execution::Integer);
    let what = scheme.to_string();
    assert_rows_agree(&engine.run(&x).unwrap(), &expected, &NONE, &what);
}

/// Numbers of 1e-3 beside 3e4 are 0 on a grid of both.
#[test]
fn small_rows_stand_beside_large_ones() {
    let device = Device::flex();
    let x = rows(&device);
    let scheme = Scheme::symmetric(NumberFormat::int8()).with_granularity(Granularity::PerToken);
    let model = prepared(head(&device), scheme, WeightConfig::int(8));
    let forward = |model: &Head, x| model.fc.forward(x);
    let engine = compiled(&model, &x, forward, Backend::Own);
    let small = x.clone().slice([1..2]);
    let alone = engine.run(&small).unwrap();
    let among = engine.run(&x).unwrap().slice([1..2]);
    assert_eq!(values(alone), values(among));
}

#[test]
fn a_row_that_is_not_finite_is_nan_alone() {
    let device = Device::flex();
    let x = tensor::<2>(5, [3, WIDTH], &device);
    for mapping in [Mapping::Symmetric, Mapping::Affine] {
        let scheme = Scheme::symmetric(NumberFormat::int8()).with_mapping(mapping);
        let scheme = scheme.with_granularity(Granularity::PerToken);
        let model = prepared(head(&device), scheme, WeightConfig::int(8));
        let engine = compiled(
            &model,
            &x,
            |model: &Head, x| model.fc.forward(x),
            Backend::Own,
        );
        let whole = values(engine.run(&x).unwrap());
        for number in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut broken = values(x.clone());
            broken[WIDTH + 7] = number;
            let broken = TensorData::new(broken, [3, WIDTH]);
            let found = values(
                engine
                    .run(&Tensor::<2>::from_data(broken, &device))
                    .unwrap(),
            );
            assert_eq!(found[..19], whole[..19], "{number}");
            assert!(found[19..38].iter().all(|x| x.is_nan()), "{number}");
            assert_eq!(found[38..], whole[38..], "{number}");
        }
    }
}

/// Rows of an image are mixed by a convolution, so that no product of codes has one scale.
#[test]
fn convolutions_take_dynamic_ranges_of_whole_tensors() {
    #[derive(Module, Debug)]
    struct Net {
        conv: Conv2d,
    }
    let device = Device::flex();
    let net = || {
        let conv = Conv2dConfig::new([3, 5], [3, 3]).init(&device);
        with_numbers(Net { conv }, 4)
    };
    let forward = |net: &Net, x| net.conv.forward(x);
    let x = tensor::<4>(6, [2, 3, 6, 6], &device);
    let signed = Scheme::symmetric(NumberFormat::int8());
    let model = prepared(net(), signed.clone(), WeightConfig::int(8));
    let expected = QuantizedForward::new()
        .run(&model, x.clone(), forward)
        .unwrap();
    let engine = compiled(&model, &x, forward, Backend::Own);
    assert_eq!(engine.report().layers[0].execution, Execution::Integer);
    let found = values(engine.run(&x).unwrap());
    for (a, b) in found.iter().zip(values(expected)) {
        assert!((a - b).abs() <= 1e-5, "{a} {b}");
    }
    let of_rows = signed.with_granularity(Granularity::PerToken);
    let model = prepared(net(), of_rows, WeightConfig::int(8));
    let expected = QuantizedForward::new()
        .run(&model, x.clone(), forward)
        .unwrap();
    let export = Export::record(&model, &x, forward).unwrap();
    let integer = export.to_onnx(Form::Integer).unwrap().layers.remove(0);
    assert_eq!(integer.execution, Execution::DequantizedOnce);
    assert!(integer.reason.unwrap().contains("mixes rows"));
    // In floats they are as any other.
    let qdq = export.to_onnx(Form::Qdq).unwrap();
    assert_eq!(qdq.layers[0].reason, None);
    for_the_judge(&qdq, &x, &expected, Some(1e-5));
}

/// As language models are quantized for CPUs: codes of 4 bits in groups of inputs, activations by rows.
#[test]
fn weights_in_groups_are_multiplied_by_codes_of_rows() {
    let device = Device::flex();
    let activations = [
        Scheme::symmetric(NumberFormat::int8().narrow()).with_granularity(Granularity::PerToken),
        Scheme::affine(NumberFormat::int8()).with_granularity(Granularity::PerToken),
        Scheme::symmetric(NumberFormat::int8()),
        Scheme::affine(NumberFormat::uint8()),
    ];
    for (inputs, size, bits) in [
        (64, 32, 4),
        (96, 48, 4),
        (40, 20, 4),
        (64, 16, 8),
        (2112, 8, 4),
    ] {
        for scheme in &activations {
            let x = tensor::<2>(5, [9, inputs], &device);
            let fc = LinearConfig::new(inputs, 19).init(&device);
            let weight = WeightConfig::int(bits);
            let weight = weight.with_granularity(WeightGranularity::PerBlock { size });
            let model = prepared(with_numbers(Head { fc }, 3), scheme.clone(), weight);
            let forward = |model: &Head, x| model.fc.forward(x);
            let expected = QuantizedForward::new()
                .run(&model, x.clone(), forward)
                .unwrap();
            let engine = compiled(&model, &x, forward, Backend::Own);
            let layer = &engine.report().layers[0];
            assert_eq!(layer.execution, Execution::Integer, "{layer:?}");
            assert_eq!(layer.reason, None);
            assert_eq!(layer.weight_bytes, inputs * 19 * bits as usize / 8);
            let what = format!("{scheme}, {inputs} inputs in blocks of {size}");
            assert_rows_agree(&engine.run(&x).unwrap(), &expected, &NONE, &what);
            let one = x.clone().slice([4..5]);
            if scheme.granularity == Granularity::PerToken {
                let expected = expected.slice([4..5]);
                assert_rows_agree(&engine.run(&one).unwrap(), &expected, &NONE, &what);
            }
        }
    }
}

/// As GPTQ stores them: a zero point for each group of inputs.
#[test]
fn weights_in_groups_may_have_zero_points() {
    let device = Device::flex();
    let x = tensor::<2>(5, [3, 96], &device);
    let forward = |model: &Head, x| model.fc.forward(x);
    let of_rows = Scheme::symmetric(NumberFormat::int8()).with_granularity(Granularity::PerToken);
    let formats = [
        NumberFormat::uint(4),
        NumberFormat::int(4),
        NumberFormat::uint8(),
    ];
    for format in formats {
        for size in [32, 96] {
            let weight = WeightConfig::new()
                .with_format(format)
                .with_mapping(Mapping::Affine)
                .with_granularity(WeightGranularity::PerBlock { size });
            let fc = LinearConfig::new(96, 19).init(&device);
            let head = with_numbers(Head { fc }, 3);
            let plain = QatConfig::new().with_activation(None);
            let plain = plain
                .with_weight(weight.clone())
                .prepare(head.clone())
                .unwrap();
            let rounded = prepared(head, of_rows.clone(), weight);
            let what = format!("{format} in groups of {size}");
            for (model, execution) in [
                (plain, Execution::WeightsInteger),
                (rounded, Execution::Integer),
            ] {
                let quantized = QuantizedForward::new();
                let expected = quantized.run(&model, x.clone(), forward).unwrap();
                let engine = compiled(&model, &x, forward, Backend::Own);
                let layer = &engine.report().layers[0];
                assert_eq!(layer.execution, execution, "{what} {layer:?}");
                assert_rows_agree(&engine.run(&x).unwrap(), &expected, &NONE, &what);
                if execution == Execution::WeightsInteger && format.bits() == 4 {
                    let export = Export::record(&model, &x, forward).unwrap();
                    let file = export.to_onnx(Form::Integer).unwrap();
                    assert!(operators(&file).contains(&"MatMulNBits"), "{what}");
                    for_the_judge(&file, &x, &expected, Some(1e-4));
                }
            }
        }
    }
}

/// No operator of ONNX multiplies such codes.
#[test]
fn files_have_weights_in_groups_as_floats_and_round_what_they_are_multiplied_by() {
    let device = Device::flex();
    let x = tensor::<2>(5, [3, 64], &device);
    let fc = LinearConfig::new(64, 19).init(&device);
    let scheme = Scheme::affine(NumberFormat::int8()).with_granularity(Granularity::PerToken);
    let weight = WeightConfig::int(4);
    let weight = weight.with_granularity(WeightGranularity::PerBlock { size: 32 });
    let model = prepared(with_numbers(Head { fc }, 3), scheme, weight);
    let forward = |model: &Head, x| model.fc.forward(x);
    let expected = QuantizedForward::new()
        .run(&model, x.clone(), forward)
        .unwrap();
    let export = Export::record(&model, &x, forward).unwrap();
    let qdq = export.to_onnx(Form::Qdq).unwrap();
    assert_eq!(qdq.layers[0].reason, None);
    assert!(operators(&qdq).contains(&"ReduceMax"));
    for_the_judge(&qdq, &x, &expected, Some(1e-4));
    let integer = export.to_onnx(Form::Integer).unwrap().layers.remove(0);
    assert_eq!(integer.execution, Execution::WeightsInteger);
    assert!(integer.reason.unwrap().contains("its input is not rounded"));
}

#[derive(Module, Debug)]
struct Projections {
    query: Linear,
    key: Linear,
}

/// Projections of a sequence, each of which turns it into a matrix, round it once.
#[test]
fn what_several_layers_read_is_rounded_once() {
    let device = Device::flex();
    let x = rows(&device).reshape([1, 7, WIDTH]);
    let linear = || LinearConfig::new(WIDTH, 19).init(&device);
    let model = with_numbers(
        Projections {
            query: linear(),
            key: linear(),
        },
        3,
    );
    let scheme = Scheme::symmetric(NumberFormat::int8()).with_granularity(Granularity::PerToken);
    let model = prepared(model, scheme, WeightConfig::int(8));
    let forward =
        |model: &Projections, x: Tensor<3>| model.query.forward(x.clone()) + model.key.forward(x);
    let expected = QuantizedForward::new()
        .run(&model, x.clone(), forward)
        .unwrap();
    let export = Export::record(&model, &x, forward).unwrap();
    for form in [Form::Qdq, Form::Integer] {
        let exported = export.to_onnx(form).unwrap();
        let operators = operators(&exported);
        let count = |name| operators.iter().filter(|one| **one == name).count();
        assert_eq!(count("ReduceMax"), 1, "{operators:?}");
        assert_eq!(count("Round"), 1, "{operators:?}");
        let largest = values(expected.clone()).into_iter().map(f32::abs);
        let largest = largest.fold(0.0, f32::max);
        for_the_judge(&exported, &x, &expected, Some(SHARE * largest));
    }
    let engine = compiled(&model, &x, forward, Backend::Own);
    let found = engine.run(&x).unwrap().reshape([7, 19]);
    assert_rows_agree(&found, &expected.reshape([7, 19]), &NONE, "own");
}

/// Heads of an attention read parts of rows that were rounded as a whole; a slice of a tensor has not the range of all
/// of it.
#[test]
fn what_is_viewed_in_parts_is_rounded_before() {
    let device = Device::flex();
    let attention = MultiHeadAttentionConfig::new(16, 4).with_dropout(0.0);
    let attention = with_numbers(attention.init(&device), 3);
    let x = tensor::<3>(5, [2, 3, 16], &device) * 30.0;
    type Forward = fn(&MultiHeadAttention, Tensor<3>) -> Tensor<3>;
    for granularity in [Granularity::PerTensor, Granularity::PerToken] {
        let scheme = Scheme::symmetric(NumberFormat::int(4)).with_granularity(granularity);
        let attend: Forward = |model, x| model.forward(MhaInput::self_attn(x)).context;
        let sliced: Forward = |model, x| {
            let y = model.query.forward(x.clone()) + model.key.forward(x);
            model.value.forward(y.slice([0..2, 0..1, 0..16]))
        };
        // Operands of a product of two activations stay floats where products are of integers.
        for (forward, is_attention) in [(attend, true), (sliced, false)] {
            let activation = FakeQuantizeConfig::new(scheme.clone());
            let activation = activation.with_observer(ObserverConfig::Memoryless);
            let config = QatConfig::new()
                .with_activation(Some(activation))
                .with_attention(is_attention)
                .with_outputs(true);
            let model = config
                .prepare_for(attention.clone(), x.clone(), forward)
                .unwrap();
            let quantized = QuantizedForward::new();
            let expected = quantized.run(&model, x.clone(), forward).unwrap();
            let export = Export::record(&model, &x, forward).unwrap();
            let left: Vec<_> = export.quantization().left_float().collect();
            assert!(left.is_empty(), "{left:?}");
            let largest = values(expected.clone()).into_iter().map(f32::abs);
            let largest = largest.fold(0.0, f32::max);
            let judged = |form| {
                let exported = export.to_onnx(form).unwrap();
                for_the_judge(&exported, &x, &expected, Some(SHARE * largest));
            };
            judged(Form::Qdq);
            if is_attention {
                continue;
            }
            judged(Form::Integer);
            let engine = EngineConfig::new()
                .with_arithmetic(Arithmetic::Integer)
                .with_backend(Some(Backend::Own));
            let found = values(engine.compile(export).unwrap().run(&x).unwrap());
            for (found, expected) in found.iter().zip(values(expected)) {
                assert!(
                    (found - expected).abs() <= SHARE * largest,
                    "{scheme}: {found} {expected}"
                );
            }
        }
    }
}

/// Operands of a sum are rounded, too, and added as floats.
/// A step does not know of later ones, in Burn, in an engine and in a file.
#[test]
fn each_step_of_a_loop_has_a_range_of_its_own() {
    let device = Device::flex();
    let forward = |head: &Head, x: Tensor<3>| {
        let steps = x.iter_dim(1).map(|x| head.fc.forward(x));
        Tensor::cat(steps.collect(), 1)
    };
    let magnitudes = [1.0, 3.0, 10.0, 100.0, 1e3, 3e4];
    let magnitudes = Tensor::<1>::from_floats(magnitudes, &device).reshape([1, 6, 1]);
    let x = tensor::<3>(5, [2, 6, WIDTH], &device) * magnitudes;
    for scheme in [
        Scheme::symmetric(NumberFormat::int8()),
        Scheme::affine(NumberFormat::uint8()),
    ] {
        let what = format!("{scheme:?}");
        let model = prepared(head(&device), scheme, WeightConfig::int(8));
        let run = |x: Tensor<3>| QuantizedForward::new().run(&model, x, forward).unwrap();
        let whole = run(x.clone());
        let alone = (0..6).map(|step| run(x.clone().narrow(1, step, 1)));
        assert_eq!(
            values(whole.clone()),
            values(Tensor::cat(alone.collect(), 1))
        );
        let rows = |y: Tensor<3>| y.flatten::<2>(0, 1);
        let engine = compiled(&model, &x, forward, Backend::Own);
        let found = rows(engine.run(&x).unwrap());
        assert_rows_agree(&found, &rows(whole.clone()), &[0.0; 12], &what);
        let export = Export::record(&model, &x, forward).unwrap();
        let exported = export.to_onnx(Form::Qdq).unwrap();
        for_the_judge(&exported, &x, &whole, None);
    }
}

#[test]
fn operands_that_no_weight_meets_are_rounded_too() {
    let device = Device::flex();
    let x = tensor::<2>(5, [6, 16], &device);
    let forward = |head: &Head, x: Tensor<2>| x.clone() + head.fc.forward(x);
    for granularity in [Granularity::PerToken, Granularity::PerTensor] {
        // Of 4 bits: what is not rounded is far off.
        let scheme = Scheme::symmetric(NumberFormat::int(4)).with_granularity(granularity);
        let fc = LinearConfig::new(16, 16).init(&device);
        let head = with_numbers(Head { fc }, 3);
        let activation =
            FakeQuantizeConfig::new(scheme.clone()).with_observer(ObserverConfig::Memoryless);
        let config = QatConfig::new()
            .with_activation(Some(activation))
            .with_sums(true);
        let model = config.prepare_for(head, x.clone(), forward).unwrap();
        let quantized = QuantizedForward::new();
        let expected = quantized.run(&model, x.clone(), forward).unwrap();
        let engine = compiled(&model, &x, forward, Backend::Own);
        let found = engine.run(&x).unwrap();
        within_steps(found, expected.clone(), 1.0);
        let export = Export::record(&model, &x, forward).unwrap();
        let qdq = export.to_onnx(Form::Qdq).unwrap();
        let operators = operators(&qdq);
        let rounded = operators.iter().filter(|name| **name == "ReduceMax");
        // Of the input, which is rounded once for both, and of the layer's output.
        assert_eq!(rounded.count(), 2, "{scheme} {operators:?}");
        let step = output_step(&values(expected.clone()));
        for_the_judge(&qdq, &x, &expected, Some(step));
    }
}

#[test]
fn a_grid_of_other_numbers_is_refused() {
    let device = Device::flex();
    let x = tensor::<2>(5, [3, WIDTH], &device);
    let model = head(&device);
    let grid = DynamicGrid {
        format: NumberFormat::E4M3,
        ..DynamicGrid::uint8()
    };
    let export = Export::record(&model, &x, |model: &Head, x| model.fc.forward(x)).unwrap();
    let how = ActivationQuantization::Dynamic(grid);
    let export = export.with_quantization(Quantization::none().with_input("fc.weight", how));
    let refused = export.to_onnx(Form::Qdq).unwrap_err().to_string();
    assert!(refused.contains("E4M3"), "{refused}");
}
