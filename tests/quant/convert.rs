//! From fake-quantized to quantized weights, into records and files and back.

use std::path::Path;

use burn::module::{Module, Param};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::store::ModuleRecord;
use burn::tensor::activation::relu;
use burn::tensor::{DType, Device, Tensor};
use burn_lean::quant::{
    ConvertConfig, ForwardQ, Learned, Mapping, NumberFormat, ObserverConfig, Outcome, QatConfig,
    QuantError, QuantizedTensor, Schedule, Scheme, Storage, Unsupported, WeightConfig,
    WeightGranularity, WeightQuantizer, calibrate, compare, load_safetensors, map_quantizers,
    quantized_weights, quantizers, save_safetensors,
};

use crate::support::{each_device, tensor, values};

/// Two linear layers, one of which sees three axes, and something that is never quantized.
#[derive(Module, Debug)]
struct Net {
    fc1: Linear,
    norm: BatchNorm,
    fc2: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        let linear = |seed: u64, shape: [usize; 2]| Linear {
            weight: Param::from_tensor(tensor(seed, shape, device)),
            bias: Some(Param::from_tensor(tensor(seed + 1, [shape[1]], device))),
        };
        Self {
            fc1: linear(1, [16, 32]),
            norm: BatchNormConfig::new(5).init(device),
            fc2: linear(3, [32, 8]),
        }
    }

    /// `[batch, 5, 16]` to `[batch, 5, 8]`.
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let x = self.norm.forward(self.fc1.forward_q(x));
        self.fc2.forward_q(relu(x))
    }
}

fn full(bits: u8) -> QatConfig {
    QatConfig::new().with_weight(WeightConfig::int(bits))
}

fn weight_only(bits: u8) -> QatConfig {
    full(bits).with_activation(None)
}

fn samples(device: &Device) -> Vec<Tensor<3>> {
    (0..3).map(|i| tensor(20 + i, [4, 5, 16], device)).collect()
}

/// Prepared and, on an autodiff device, run once so that every quantizer has a range.
fn prepared(config: QatConfig, device: &Device) -> Net {
    let training = device.clone().autodiff();
    let net = config.prepare(Net::new(&training)).unwrap();
    for sample in samples(&training) {
        net.forward(sample);
    }
    net.valid()
}

#[test]
fn converted_weights_are_the_fake_quantized_ones_to_the_bit() {
    each_device(|target| {
        for bits in [8, 6, 4, 3, 2] {
            let net = prepared(full(bits), &target.device);
            let expected = [values(net.fc1.weight.val()), values(net.fc2.weight.val())];
            let (converted, report) = ConvertConfig::new().convert(net).unwrap();
            assert!(matches!(
                converted.fc1.weight.base().dtype(),
                DType::QFloat(_)
            ));
            assert_eq!(
                values(converted.fc1.weight.base().dequantize()),
                expected[0]
            );
            assert_eq!(
                values(converted.fc2.weight.base().dequantize()),
                expected[1]
            );
            let paths: Vec<&str> = report.weights.iter().map(|w| w.path.as_str()).collect();
            assert_eq!(paths, ["fc1.weight", "fc2.weight"]);
            assert!(report.ratio() < 0.6, "{}", report.ratio());
        }
    });
}

#[test]
fn a_converted_model_gives_the_codes_of_the_fake_quantized_one() {
    each_device(|target| {
        for bits in [8, 4, 2] {
            let net = prepared(full(bits), &target.device);
            let (converted, mut report) = ConvertConfig::new().convert(net.clone()).unwrap();
            compare(
                &mut report,
                &net,
                &converted,
                samples(&target.device),
                |net, x| net.forward(x.clone()),
            )
            .unwrap();
            for weight in &report.weights {
                let mismatch = weight.mismatch.unwrap();
                assert_eq!(mismatch.weight_codes, 0);
                assert_eq!(mismatch.activation_codes, Some(0), "{report}");
                assert_eq!(mismatch.differing, 0.0);
            }
            assert_eq!(report.output_difference, Some(0.0), "{report}");
        }
    });
}

#[test]
fn learned_scales_are_converted_as_they_were_learned() {
    each_device(|target| {
        let weight = WeightConfig::int(4).with_learned(Learned::Lsq);
        let net = prepared(full(4).with_weight(weight), &target.device);
        let weights = quantized_weights(&net).unwrap();
        let expected = values(net.fc1.weight.val());
        let (converted, _) = ConvertConfig::new().convert(net).unwrap();
        assert_eq!(values(converted.fc1.weight.base().dequantize()), expected);
        assert_eq!(quantized_weights(&converted).unwrap(), weights);
    });
}

#[test]
fn norms_biases_and_statistics_stay_float() {
    each_device(|target| {
        let net = prepared(full(8), &target.device);
        let (converted, report) = ConvertConfig::new().convert(net).unwrap();
        assert_eq!(converted.norm.gamma.base().dtype(), DType::F32);
        assert_eq!(converted.norm.running_var.value().dtype(), DType::F32);
        assert_eq!(converted.fc1.bias.unwrap().base().dtype(), DType::F32);
        // Weights of 512 and 256 elements; 40 bias and 4 · 5 norm values; quantizer state.
        assert!(report.other_bytes > 4 * (40 + 20));
        assert_eq!(report.float_bytes(), report.other_bytes + 4 * (512 + 256));
    });
}

#[test]
fn only_the_named_parameters_are_converted() {
    let net = prepared(full(8), &Device::flex());
    let config = ConvertConfig::new().with_parameters(Some(vec!["fc2.weight".into()]));
    let (converted, report) = config.convert(net).unwrap();
    assert_eq!(converted.fc1.weight.base().dtype(), DType::F32);
    assert!(matches!(
        converted.fc2.weight.base().dtype(),
        DType::QFloat(_)
    ));
    assert_eq!(report.weights.len(), 1);
}

#[test]
fn a_record_of_a_converted_model_loads_into_a_prepared_one() {
    each_device(|target| {
        let net = prepared(full(8), &target.device);
        let x = samples(&target.device).remove(0);
        let (converted, report) = ConvertConfig::new().convert(net.clone()).unwrap();
        let expected = values(converted.forward(x.clone()));
        let bytes = converted.into_record().into_bytes().unwrap();
        let float_bytes = net.clone().into_record().into_bytes().unwrap().len();
        assert!(bytes.len() < float_bytes);
        assert!(bytes.len() > report.bytes());

        let record = ModuleRecord::from_bytes(bytes).unwrap();
        let fresh = full(8).prepare(Net::new(&target.device)).unwrap();
        let loaded = fresh.load_record(record);
        assert!(matches!(loaded.fc1.weight.base().dtype(), DType::QFloat(_)));
        assert_eq!(values(loaded.forward(x)), expected);
        assert_eq!(
            quantized_weights(&loaded).unwrap(),
            quantized_weights(&net).unwrap()
        );
    });
}

#[test]
fn files_hold_as_many_bits_as_the_codes_have() {
    let folder = tempfile::tempdir().unwrap();
    each_device(|target| {
        for bits in [8, 4, 2, 3] {
            let net = prepared(full(bits), &target.device);
            let x = samples(&target.device).remove(0);
            let path = folder.path().join("net.safetensors");
            let size = save_safetensors(&net, &path).unwrap();
            assert_eq!(size, std::fs::metadata(&path).unwrap().len());
            let file = std::fs::read(&path).unwrap();
            let tensors = safetensors::SafeTensors::deserialize(&file).unwrap();
            let codes = tensors.tensor("fc1.weight.codes").unwrap();
            assert_eq!(codes.data().len(), 512 * bits as usize / 8);

            let fresh = full(bits).prepare(Net::new(&target.device)).unwrap();
            let loaded = load_safetensors(fresh, &path, Storage::Auto).unwrap();
            let (converted, _) = ConvertConfig::new().convert(net.clone()).unwrap();
            assert_eq!(
                values(loaded.forward(x.clone())),
                values(converted.forward(x))
            );
            // A converted model saves the same codes.
            let again = folder.path().join("again.safetensors");
            save_safetensors(&converted, &again).unwrap();
            let file = std::fs::read(&again).unwrap();
            let again = safetensors::SafeTensors::deserialize(&file).unwrap();
            assert_eq!(
                again.tensor("fc1.weight.codes").unwrap().data(),
                codes.data()
            );
        }
    });
}

#[test]
fn a_file_of_quantized_weights_loads_into_a_plain_model() {
    let folder = tempfile::tempdir().unwrap();
    each_device(|target| {
        let net = prepared(weight_only(4), &target.device);
        let path = folder.path().join("net.safetensors");
        save_safetensors(&net, &path).unwrap();
        let plain = load_safetensors(Net::new(&target.device), &path, Storage::Auto).unwrap();
        assert!(WeightQuantizer::of(&plain.fc1.weight).is_none());
        let expected = values(net.fc1.weight.val());
        assert_eq!(values(plain.fc1.weight.base()), expected);
    });
}

fn load(path: &Path) -> QuantError {
    let net = full(4).prepare(Net::new(&Device::flex())).unwrap();
    let rejected = load_safetensors(net, path, Storage::Auto).unwrap_err();
    // The model comes back as it was.
    assert_eq!(rejected.value().fc1.weight.base().dtype(), DType::F32);
    rejected.into_error()
}

#[test]
fn damaged_and_foreign_files_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("net.safetensors");
    let reason = |error: QuantError| match error {
        QuantError::File { reason, .. } => reason,
        other => panic!("{other:?}"),
    };
    assert!(reason(load(&path)).contains("No such file"));
    std::fs::write(&path, b"nonsense").unwrap();
    reason(load(&path));

    let net = prepared(full(4), &Device::flex());
    save_safetensors(&net, &path).unwrap();
    let good = std::fs::read(&path).unwrap();
    std::fs::write(&path, &good[..good.len() - 7]).unwrap();
    reason(load(&path));

    // The scale of a channel becomes NaN.
    let tensors = safetensors::SafeTensors::deserialize(&good).unwrap();
    let scale = tensors.tensor("fc1.weight.scale").unwrap().data();
    let start = scale.as_ptr() as usize - good.as_ptr() as usize;
    let mut bad = good.clone();
    bad[start..start + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    std::fs::write(&path, &bad).unwrap();
    assert!(reason(load(&path)).contains("`fc1.weight`: the scale"));

    // −8 is no code of the narrow range.
    let codes = tensors.tensor("fc1.weight.codes").unwrap().data();
    let start = codes.as_ptr() as usize - good.as_ptr() as usize;
    let mut bad = good.clone();
    bad[start] = 0x88;
    std::fs::write(&path, &bad).unwrap();
    assert!(reason(load(&path)).contains("-8"));

    let replaced = |from: &str, to: &str| {
        assert_eq!(from.len(), to.len());
        let at = good
            .windows(from.len())
            .position(|window| window == from.as_bytes())
            .unwrap();
        let mut bad = good.clone();
        bad[at..at + to.len()].copy_from_slice(to.as_bytes());
        std::fs::write(&path, bad).unwrap();
        reason(load(&path))
    };
    assert!(replaced("burn-lean-quant", "burn-lean-other").contains("no file of a quantized"));
    assert!(replaced("\"version\":\"2\"", "\"version\":\"7\"").contains("version 7"));
    assert!(replaced("\"fc1.bias\"", "\"fc1.bios\"").contains("`fc1.bias` is missing"));

    // Of another scheme, and of another model.
    save_safetensors(&prepared(full(8), &Device::flex()), &path).unwrap();
    let error = load(&path);
    assert!(
        error.to_string().starts_with("parameter `fc1.weight`: "),
        "{error}"
    );
    assert!(
        error
            .to_string()
            .contains("another scheme than INT4 narrow"),
        "{error}"
    );
    std::fs::write(&path, &good).unwrap();
    let wide = LinearConfig::new(3, 4).init(&Device::flex());
    let rejected = load_safetensors(wide, &path, Storage::Auto).unwrap_err();
    assert!(reason(rejected.into_error()).contains("`weight` is missing"));
}

#[test]
fn an_affine_weight_is_refused_or_stays_fake_quantized() {
    each_device(|target| {
        let weight = WeightConfig::new()
            .with_format(NumberFormat::int8())
            .with_mapping(Mapping::Affine);
        let config = full(8).with_weight(weight);
        let net = prepared(config.clone(), &target.device);
        let rejected = ConvertConfig::new().convert(net).unwrap_err();
        let error = rejected.error().to_string();
        assert!(error.starts_with("parameter `fc1.weight`: "), "{error}");
        assert!(error.contains("no zero point"), "{error}");
        let net = rejected.into_value();

        let keep = ConvertConfig::new().with_unsupported(Unsupported::KeepFakeQuantized);
        let (kept, report) = keep.convert(net.clone()).unwrap();
        assert!(matches!(
            report.weights[0].outcome,
            Outcome::KeptFakeQuantized { .. }
        ));
        assert!(
            report.to_string().contains("stays fake-quantized"),
            "{report}"
        );
        let x = samples(&target.device).remove(0);
        assert_eq!(values(kept.forward(x.clone())), values(net.forward(x)));

        // From its file, with the scale and the zero point that it had.
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("net.safetensors");
        save_safetensors(&kept, &path).unwrap();
        let fresh = config.prepare(Net::new(&target.device)).unwrap();
        let loaded = load_safetensors(fresh, &path, Storage::Auto).unwrap();
        let x = samples(&target.device).remove(0);
        assert_eq!(values(loaded.forward(x.clone())), values(net.forward(x)));
        assert_eq!(
            quantized_weights(&loaded).unwrap(),
            quantized_weights(&net).unwrap()
        );
    });
}

/// Bytes of the tensors in a file: without its header.
fn tensor_bytes(path: &Path) -> usize {
    let file = std::fs::read(path).unwrap();
    let header = u64::from_le_bytes(file[..8].try_into().unwrap());
    file.len() - 8 - header as usize
}

#[test]
fn every_file_that_can_be_written_can_be_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("net.safetensors");
    let again = folder.path().join("again.safetensors");
    let formats = [
        NumberFormat::uint(4),
        NumberFormat::uint8(),
        NumberFormat::int8(),
        NumberFormat::int(4),
        NumberFormat::int(4).narrow(),
    ];
    each_device(|target| {
        for format in formats {
            for mapping in [Mapping::Affine, Mapping::Symmetric] {
                for learned in [Learned::None, Learned::Lsq] {
                    if (mapping, learned) == (Mapping::Affine, Learned::Lsq) {
                        continue;
                    }
                    let weight = WeightConfig::new()
                        .with_format(format)
                        .with_mapping(mapping)
                        .with_learned(learned);
                    let config = full(8).with_weight(weight);
                    let net = prepared(config.clone(), &target.device);
                    save_safetensors(&net, &path).unwrap();
                    let fresh = config.prepare(Net::new(&target.device)).unwrap();
                    let loaded = load_safetensors(fresh, &path, Storage::Auto).unwrap();
                    let x = samples(&target.device).remove(0);
                    let case = format!("{format:?} {mapping:?} {learned:?}");
                    assert_eq!(
                        values(loaded.forward(x.clone())),
                        values(net.forward(x)),
                        "{case}"
                    );
                    // And written again as it was.
                    save_safetensors(&loaded, &again).unwrap();
                    let codes = |model| quantized_weights(model).unwrap();
                    assert_eq!(codes(&loaded), codes(&net), "{case}");
                    assert_eq!(tensor_bytes(&again), tensor_bytes(&path), "{case}");
                }
            }
        }
    });
}

#[test]
fn a_file_of_blocks_holds_codes_and_scales_and_the_report_counts_its_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("net.safetensors");
    let device = Device::flex();
    for (size, bits_per_weight) in [(16, 6.0), (32, 5.0)] {
        let layer = || LinearConfig::new(512, 256).with_bias(false).init(&device);
        let weight = WeightConfig::int(4).with_granularity(WeightGranularity::PerBlock { size });
        for observer in [ObserverConfig::Memoryless, ObserverConfig::MinMax] {
            let config = weight_only(4).with_weight(weight.clone().with_observer(observer));
            let prepared = config.prepare(layer()).unwrap();
            let run = |layer: &Linear| drop(layer.weight.val());
            let prepared = match observer {
                ObserverConfig::Memoryless => prepared,
                _ => calibrate(prepared, run).unwrap(),
            };
            let (converted, report) = ConvertConfig::new().convert(prepared).unwrap();
            save_safetensors(&converted, &path).unwrap();
            let bytes = tensor_bytes(&path);
            assert_eq!(report.packed_bytes(), bytes, "{observer:?}");
            let bits = 8.0 * bytes as f64 / (512.0 * 256.0);
            // What is left of the quantizer are some integers.
            assert!(bits < bits_per_weight + 0.01, "{observer:?}: {bits}");
        }
    }
}

#[test]
fn conversion_needs_ranges_and_quantizers() {
    let device = Device::flex();
    let error = |net: Net| ConvertConfig::new().convert(net).unwrap_err().into_error();

    let plain = error(Net::new(&device));
    assert!(matches!(plain, QuantError::NothingToConvert));

    let unobserved = full(8).prepare(Net::new(&device)).unwrap();
    let text = error(unobserved).to_string();
    assert!(
        text.contains("input of `fc1`") && text.contains("no data was observed"),
        "{text}"
    );

    let later = Schedule::new().with_quantize_from(100);
    let text = error(prepared(full(8).with_schedule(later), &device)).to_string();
    assert!(
        text.contains("`fc1.weight`") && text.contains("does not quantize"),
        "{text}"
    );

    let net = prepared(full(8), &device);
    let named = |name: &str| {
        ConvertConfig::new()
            .with_parameters(Some(vec![name.into()]))
            .convert(net.clone())
            .unwrap_err()
            .into_error()
    };
    assert!(matches!(
        named("fc3.weight"),
        QuantError::UnknownParameter { .. }
    ));
    assert!(matches!(
        named("norm.gamma"),
        QuantError::UnsupportedLayer { .. }
    ));
}

#[test]
fn a_switched_off_quantizer_is_not_converted() {
    let net = prepared(full(8), &Device::flex());
    let net = map_quantizers(net, |located| {
        let off = located.parameter.as_deref() == Some("fc1.weight");
        located.quantizer.with_enabled(!off)
    });
    let (converted, report) = ConvertConfig::new().convert(net).unwrap();
    assert_eq!(report.weights.len(), 1);
    assert_eq!(converted.fc1.weight.base().dtype(), DType::F32);
    assert_eq!(quantizers(&converted).len(), 4);
}

#[test]
fn reports_survive_json_and_print_every_weight() {
    let net = prepared(full(4), &Device::flex());
    let (converted, mut report) = ConvertConfig::new().convert(net.clone()).unwrap();
    let x = samples(&Device::flex());
    compare(&mut report, &net, &converted, x, |net, x| {
        net.forward(x.clone())
    })
    .unwrap();
    let json = serde_json::to_string(&report).unwrap();
    assert_eq!(
        serde_json::from_str::<burn_lean::quant::ConversionReport>(&json).unwrap(),
        report
    );
    let text = report.to_string();
    for part in [
        "fc1.weight",
        "fc2.weight",
        "Q4S Native",
        "INT4 narrow",
        "total",
    ] {
        assert!(text.contains(part), "{text}");
    }
    let none: Vec<Tensor<3>> = Vec::new();
    let error = compare(&mut report, &net, &converted, none, |net, x| {
        net.forward(x.clone())
    });
    assert!(matches!(error, Err(QuantError::NoData { .. })));
}

#[test]
fn codes_and_scales_that_do_not_fit_are_refused() {
    let scheme = Scheme::symmetric(NumberFormat::int(4).narrow());
    let new = |codes: Vec<i32>, scale: Vec<f32>| {
        QuantizedTensor::new(codes, vec![2], scale, vec![0.0], scheme.clone()).unwrap_err()
    };
    assert!(matches!(
        new(vec![1], vec![1.0]),
        QuantError::LengthMismatch { .. }
    ));
    assert!(matches!(
        new(vec![1, -8], vec![1.0]),
        QuantError::CodeOutOfRange { code: -8, .. }
    ));
    assert!(matches!(
        new(vec![1, 2], vec![0.0]),
        QuantError::InvalidScale { .. }
    ));
    assert!(matches!(
        new(vec![1, 2], vec![1.0; 2]),
        QuantError::LengthMismatch { .. }
    ));
}

/// On a GPU, a convolution's codes are packed along its input channels; two fill no word.
#[test]
fn a_convolution_is_converted_where_the_device_can_hold_it() {
    each_device(|target| {
        for channels in [2, 4, 8] {
            let conv = Conv2dConfig::new([channels, 5], [3, 3]).init(&target.device);
            let conv: Conv2d = weight_only(8).prepare(conv).unwrap();
            let x = tensor::<4>(5, [1, channels, 6, 6], &target.device);
            let expected = values(conv.forward(x.clone()));
            match ConvertConfig::new().convert(conv) {
                Ok((converted, _)) => {
                    assert!(channels > 2 || target.name != "wgpu");
                    let base = converted.weight.base();
                    assert!(matches!(base.dtype(), DType::QFloat(_)));
                    assert_eq!(values(converted.forward(x)), expected);
                }
                Err(rejected) => {
                    assert_eq!((channels, target.name), (2, "wgpu"));
                    let text = rejected.error().to_string();
                    assert!(
                        text.contains("no axis of [5, 2, 3, 3] is a multiple of the 4"),
                        "{text}"
                    );
                }
            }
        }
    });
}

/// Bytes of a multilayer perceptron for 28 × 28 pixels, as files.
#[test]
fn a_file_of_eight_bits_is_a_quarter_of_the_float_record() {
    #[derive(Module, Debug)]
    struct Perceptron {
        fc1: Linear,
        fc2: Linear,
    }
    let device = Device::flex();
    let model = Perceptron {
        fc1: LinearConfig::new(784, 256).init(&device),
        fc2: LinearConfig::new(256, 10).init(&device),
    };
    let float = model.clone().into_record().into_bytes().unwrap().len() as f64;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    for (bits, goal) in [(8, 0.27), (4, 0.14), (2, 0.08)] {
        let prepared = weight_only(bits).prepare(model.clone()).unwrap();
        let file = save_safetensors(&prepared, &path).unwrap() as f64;
        let (converted, report) = ConvertConfig::new().convert(prepared).unwrap();
        let record = converted.into_record().into_bytes().unwrap().len() as f64;
        println!(
            "W{bits}: file {:.3}, record {:.3}, {}",
            file / float,
            record / float,
            report.ratio()
        );
        assert!(file / float < goal, "{}", file / float);
        // On the CPU a code takes a byte in Burn's own record, whatever its bits.
        assert!(record / float < 0.27, "{}", record / float);
    }
}
