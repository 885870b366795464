//! Converted weights whose codes go into the product of the device: only where that product was looked at.

use burn::module::{Module, Param};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig, PaddingConfig2d};
use burn::tensor::{DType, Int, Tensor, TensorData};
use burn_lean::quant::{
    ConversionReport, ConvertConfig, Dequantize, ForwardQ, LoadConfig, QatConfig, Unsupported,
    WeightConfig, WeightGranularity,
    deploy::{ConvertedWeight, Outcome},
    save_safetensors,
};

use crate::support::{Target, each_device, scratch, tensor, values, with_numbers};

/// Whether kernels of this project stand for the product of codes that the device lacks.
fn has_kernels(target: &Target) -> bool {
    target.name != "wgpu"
}

#[derive(Module, Debug)]
struct Net {
    embedding: Embedding,
    conv: Conv2d,
    grouped: Conv2d,
    depthwise: Conv2d,
    linear: Linear,
}

impl Net {
    fn new(target: &Target) -> Self {
        let device = &target.device;
        let net = Self {
            embedding: EmbeddingConfig::new(16, 64).init(device),
            conv: Conv2dConfig::new([4, 8], [3, 3]).init(device),
            grouped: in_groups(2).init(device),
            depthwise: in_groups(32).init(device),
            linear: LinearConfig::new(64, 256).init(device),
        };
        with_numbers(net, 3)
    }
}

fn in_groups(groups: usize) -> Conv2dConfig {
    let config = Conv2dConfig::new([32, 32], [3, 3]).with_padding(PaddingConfig2d::Same);
    config.with_groups(groups)
}

fn converted<M: Module>(model: M, weight: WeightConfig) -> (M, M, ConversionReport) {
    let config = QatConfig::new().with_weight(weight).with_activation(None);
    let prepared: M = config.prepare(model).unwrap();
    let convert = ConvertConfig::new()
        .with_unsupported(Unsupported::KeepFakeQuantized)
        .with_dequantize(Dequantize::InProduct);
    let (converted, report) = convert.convert(prepared.clone()).unwrap();
    (prepared, converted, report)
}

fn is_quantized(weight: &Param<Tensor<2>>) -> bool {
    matches!(weight.val().dtype(), DType::QFloat(_))
}

/// The layer gets codes where the report says so, floats where it gives a reason.
fn agrees(target: &Target, weight: &ConvertedWeight, layer: &Linear) {
    println!("{}: {weight:?}", target.name);
    match weight.dequantize {
        Dequantize::InProduct => {
            assert_matches!(weight.outcome, Outcome::Converted { .. });
            assert_eq!(weight.why_once, None);
            // A kernel is called by `forward_q`, and keeps packed codes; whoever asks for the weight gets values.
            let packed = weight.resident_bytes - weight.bytes;
            assert_eq!(is_quantized(&layer.weight), !has_kernels(target));
            assert_eq!(packed > 0, has_kernels(target));
            assert!(packed < 2 * layer.weight.val().shape().num_elements());
        }
        _ => {
            assert_eq!(weight.dequantize, Dequantize::Once);
            assert!(weight.why_once.is_some());
            assert!(!is_quantized(&layer.weight));
        }
    }
}

/// Both are sums of 64 products in some order.
fn assert_close(found: &[f32], expected: &[f32]) {
    let largest = expected
        .iter()
        .fold(0f32, |largest, x| largest.max(x.abs()));
    assert_near!(found.iter(), expected, 1e-5 * largest);
}

#[test]
fn a_linear_layer_gives_what_it_gave_before_whether_it_multiplies_by_codes_or_not() {
    each_device(|target| {
        let weights = [
            WeightConfig::int(8),
            WeightConfig::int(4),
            WeightConfig::int(8).with_granularity(WeightGranularity::PerTensor),
            WeightConfig::int(4).with_granularity(WeightGranularity::PerBlock { size: 32 }),
        ];
        for weight in weights {
            let (prepared, converted, report) = converted(Net::new(target).linear, weight);
            let [of_weight] = &report.weights[..] else {
                panic!("{report}");
            };
            agrees(target, of_weight, &converted);
            for rows in [1, 5, 64] {
                let x = tensor::<2>(rows as u64, [rows, 64], &target.device);
                let expected = values(prepared.valid().forward(x.clone()));
                assert_close(&values(converted.forward(x.clone())), &expected);
                assert_close(&values(converted.forward_q(x)), &expected);
            }
            // In a batch of sequences, and of one dimension.
            let x = tensor::<3>(7, [2, 3, 64], &target.device);
            let expected = values(prepared.valid().forward(x.clone()));
            assert_close(&values(converted.forward(x.clone())), &expected);
            assert_close(&values(converted.forward_q(x)), &expected);
            let x = tensor::<1>(8, [64], &target.device);
            let expected = values(prepared.valid().forward(x.clone()));
            assert_close(&values(converted.forward(x.clone())), &expected);
            assert_close(&values(converted.forward_q(x)), &expected);
        }
    });
}

#[test]
fn layers_that_do_not_multiply_a_matrix_are_dequantized_once_and_say_so() {
    each_device(|target| {
        let (prepared, converted, report) = converted(Net::new(target), WeightConfig::int(8));
        for weight in &report.weights {
            if weight.path == "linear.weight" {
                agrees(target, weight, &converted.linear);
                continue;
            }
            // A kernel convolves, where it is not slower.
            if weight.dequantize == Dequantize::InProduct {
                let convolves = ["conv.weight", "grouped.weight", "depthwise.weight"];
                assert!(
                    convolves.contains(&&*weight.path) && has_kernels(target),
                    "{report}"
                );
                assert!(weight.resident_bytes > weight.bytes && weight.why_once.is_none());
                continue;
            }
            assert_eq!(weight.dequantize, Dequantize::Once, "{report}");
            assert!(weight.why_once.is_some(), "{report}");
        }
        let text = report.to_string();
        let layers = match has_kernels(target) {
            true => "linear layers and convolutions along one or two axes",
            false => "linear layers",
        };
        let reason = format!(
            "`embedding.weight` is dequantized once: codes are multiplied by in {layers} alone"
        );
        assert_says!(text, &reason);
        let prepared = prepared.valid();
        let tokens = TensorData::from([[0, 3, 15]]);
        let tokens = || Tensor::<2, Int>::from_data(tokens.clone(), &target.device);
        assert_eq!(
            values(converted.embedding.forward(tokens())),
            values(prepared.embedding.forward(tokens()))
        );
        let image = || tensor::<4>(5, [1, 4, 6, 6], &target.device);
        let expected = values(prepared.conv.forward(image()));
        assert_eq!(values(converted.conv.forward(image())), expected);
        assert_close(&values(converted.conv.forward_q(image())), &expected);
        let images = || tensor::<4>(6, [3, 32, 7, 5], &target.device);
        for (prepared, converted) in [
            (&prepared.grouped, &converted.grouped),
            (&prepared.depthwise, &converted.depthwise),
        ] {
            let expected = values(prepared.forward(images()));
            assert_close(&values(converted.forward(images())), &expected);
            assert_close(&values(converted.forward_q(images())), &expected);
        }
    });
}

#[test]
fn a_file_is_loaded_so_into_prepared_and_plain_models() {
    let (_folder, path) = scratch("model.safetensors");
    let load = LoadConfig::new().with_dequantize(Dequantize::InProduct);
    each_device(|target| {
        let config = QatConfig::new().with_activation(None);
        let plain = || with_numbers(Net::new(target).linear, 9);
        let prepared = config.prepare(Net::new(target).linear).unwrap();
        save_safetensors(&prepared, &path).unwrap();
        let x = || tensor::<2>(4, [3, 64], &target.device);
        let expected = values(prepared.valid().forward(x()));
        for model in [plain(), config.prepare(plain()).unwrap()] {
            let (loaded, report) = load.load(model, &path).unwrap();
            agrees(target, &report.weights[0], &loaded);
            assert_close(&values(loaded.forward(x())), &expected);
            assert_close(&values(loaded.forward_q(x())), &expected);
        }
    });
}

/// Blocks of Burn have at most 255 numbers along an axis, and 257 is prime.
#[test]
fn a_weight_whose_scales_are_beside_its_codes_says_so() {
    let (_folder, path) = scratch("model.safetensors");
    each_device(|target| {
        let plain = || LinearConfig::new(257, 8).init(&target.device);
        let (prepared, converted, report) = converted(plain(), WeightConfig::int(8));
        assert_matches!(report.weights[0].outcome, Outcome::Converted { .. });
        let x = tensor::<2>(4, [3, 257], &target.device);
        let expected = values(prepared.valid().forward(x.clone()));
        assert_eq!(values(converted.forward(x.clone())), expected);
        save_safetensors(&prepared, &path).unwrap();
        let mut reports = vec![report];
        let every_use = (plain(), Dequantize::EveryUse);
        let in_product = [plain(), prepared].map(|model| (model, Dequantize::InProduct));
        for (model, dequantize) in in_product.into_iter().chain([every_use]) {
            let load = LoadConfig::new().with_dequantize(dequantize);
            let (loaded, report) = load.load(model, &path).unwrap();
            assert_eq!(values(loaded.valid().forward(x.clone())), expected);
            assert_close(&values(loaded.valid().forward_q(x.clone())), &expected);
            reports.push(report);
        }
        for report in reports {
            let [weight] = &report.weights[..] else {
                panic!("{report}");
            };
            // A kernel has the scales.
            if weight.dequantize == Dequantize::InProduct {
                assert!(has_kernels(target), "{report}");
                continue;
            }
            assert_eq!(weight.dequantize, Dequantize::Once);
            let reason = weight.why_once.as_deref().unwrap();
            let reasons = [
                "its scales are not in Burn's tensor",
                "times as long as that with its floats",
                "it carries no quantizer",
            ];
            let known = if has_kernels(target) {
                &reasons[..]
            } else {
                &reasons[..1]
            };
            assert!(known.iter().any(|known| reason.contains(known)), "{reason}");
        }
    });
}

#[test]
fn a_record_is_dequantized_once_since_another_device_may_load_it() {
    each_device(|target| {
        let (prepared, converted, report) =
            converted(Net::new(target).linear, WeightConfig::int(8));
        agrees(target, &report.weights[0], &converted);
        let bytes = converted.clone().into_record().into_bytes().unwrap();
        let record = burn::store::ModuleRecord::from_bytes(bytes).unwrap();
        let loaded = burn_lean::quant::load_record(prepared, record).unwrap();
        assert!(!is_quantized(&loaded.weight));
        // Where it is, it stays what it is.
        let here = converted.clone().to_device(&target.device);
        assert_eq!(is_quantized(&here.weight), is_quantized(&converted.weight));
        let copy = converted.valid();
        assert_eq!(is_quantized(&copy.weight), is_quantized(&converted.weight));
    });
}
