//! Files of converted models.

use crate::compressed_tensors::{halves, rewritten};
use crate::convert::{Net, full, prepared, samples, weight_only};
use crate::support::{each_device, on_each, scratch, values};
use burn::module::{Module, Param, ParamId};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::tensor::{Bool, DType, Device, Int, Tensor, TensorData};
use burn_lean::quant::{
    ConvertConfig, Learned, Mapping, NumberFormat, ObserverConfig, QatConfig, QuantError,
    WeightConfig, WeightGranularity, calibrate, load_safetensors, quantized_weights,
    save_safetensors,
};
use burn_lean::reparam::sealed::seal_head;
use safetensors::SafeTensors;
use safetensors::tensor::Dtype;
use std::collections::HashMap;
use std::path::Path;

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
            let loaded = load_safetensors(fresh, &path).unwrap();
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

/// Caches and comparisons of files go by their bytes.
#[test]
fn a_model_is_saved_in_the_same_bytes_each_time() {
    let (_folder, path) = scratch("net.safetensors");
    each_device(|target| {
        let net = prepared(full(4), &target.device);
        let (net, _) = ConvertConfig::new().convert(net).unwrap();
        let saved = || {
            save_safetensors(&net, &path).unwrap();
            std::fs::read(&path).unwrap()
        };
        let first = saved();
        for _ in 0..4 {
            assert!(saved() == first);
        }
    });
}

/// Burn panics in a debug build when a GPU gives back 36 bytes of codes and 36 of scales.
#[test]
fn codes_that_do_not_come_back_are_an_error() {
    let (_folder, path) = scratch("table.safetensors");
    each_device(|target| {
        let table: Embedding = EmbeddingConfig::new(9, 8).init(&target.device);
        let config = QatConfig::new().with_weight(WeightConfig::int(4));
        let table = config.with_activation(None).prepare(table).unwrap();
        let (table, _) = ConvertConfig::new().convert(table).unwrap();
        match save_safetensors(&table, &path) {
            Ok(_) => {}
            Err(error) => {
                assert!(target.is_gpu(), "{error}");
                assert_says!(error, "`weight`");
            }
        }
    });
}

/// A file of these tensors and this metadata, with the checksum of what is in it.
pub(crate) fn sealed(tensors: &SafeTensors<'_>, metadata: HashMap<String, String>) -> Vec<u8> {
    let mut views = tensors.tensors();
    let mut bytes = seal_head(&mut views, metadata).unwrap();
    for (_, view) in &views {
        bytes.extend_from_slice(view.data());
    }
    bytes
}

/// The file with the checksum of what is in it.
fn resealed(bytes: &[u8]) -> Vec<u8> {
    let (_, header) = SafeTensors::read_metadata(bytes).unwrap();
    let found = SafeTensors::deserialize(bytes).unwrap();
    sealed(&found, header.metadata().clone().unwrap())
}

fn load(path: &Path) -> QuantError {
    let net = full(4).prepare(Net::new(&Device::flex())).unwrap();
    let rejected = load_safetensors(net, path).unwrap_err();
    // The model comes back as it was.
    assert_eq!(rejected.value().fc1.weight.base().dtype(), DType::F32);
    rejected.into_error()
}

#[test]
fn damaged_and_foreign_files_are_refused() {
    let (_folder, path) = scratch("net.safetensors");
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
    assert!(reason(load(&path)).contains("its checksum is wrong"));
    std::fs::write(&path, resealed(&bad)).unwrap();
    assert!(reason(load(&path)).contains("`fc1.weight`: the scale"));

    // More elements than can be counted.
    let (_, header) = safetensors::SafeTensors::read_metadata(&good).unwrap();
    let mut metadata = header.metadata().clone().unwrap();
    let mut quantized: serde_json::Value = serde_json::from_str(&metadata["quantized"]).unwrap();
    quantized["fc1.weight"]["shape"] = serde_json::json!([1_u64 << 40, 1_u64 << 40]);
    quantized["fc1.weight"]["scheme"]["granularity"] = "PerTensor".into();
    metadata.insert("quantized".into(), quantized.to_string());
    let bad = sealed(&tensors, metadata);
    std::fs::write(&path, &bad).unwrap();
    assert!(reason(load(&path)).contains("can be counted"));

    // A weight that the model has no place for, and the file no codes.
    let mut metadata = header.metadata().clone().unwrap();
    let mut quantized: serde_json::Value = serde_json::from_str(&metadata["quantized"]).unwrap();
    quantized["fc9.weight"] = quantized["fc1.weight"].clone();
    metadata.insert("quantized".into(), quantized.to_string());
    let bad = sealed(&tensors, metadata);
    std::fs::write(&path, &bad).unwrap();
    assert!(reason(load(&path)).contains("no parameter for its `fc9.weight`"));

    // −8 is no code of the narrow range.
    let codes = tensors.tensor("fc1.weight.codes").unwrap().data();
    let start = codes.as_ptr() as usize - good.as_ptr() as usize;
    let mut bad = good.clone();
    bad[start] = 0x88;
    std::fs::write(&path, resealed(&bad)).unwrap();
    assert!(reason(load(&path)).contains("-8"));

    let replaced = |from: &str, to: &str| {
        assert_eq!(from.len(), to.len());
        let at = good
            .windows(from.len())
            .position(|window| window == from.as_bytes())
            .unwrap();
        let mut bad = good.clone();
        bad[at..at + to.len()].copy_from_slice(to.as_bytes());
        std::fs::write(&path, resealed(&bad)).unwrap();
        reason(load(&path))
    };
    assert!(replaced("burn-lean-quant", "burn-lean-other").contains("no file of a quantized"));
    for other in ["2", "7"] {
        let version = format!("\"version\":\"{other}\"");
        let expected = format!("version {other}");
        assert!(replaced("\"version\":\"4\"", &version).contains(&expected));
    }
    assert!(replaced("\"fc1.bias\"", "\"fc1.bios\"").contains("`fc1.bias` is missing"));

    // Of another scheme, and of another model.
    save_safetensors(&prepared(full(8), &Device::flex()), &path).unwrap();
    let error = load(&path);
    assert!(
        error.to_string().starts_with("parameter `fc1.weight`: "),
        "{error}"
    );
    assert_says!(error, "is INT8 narrow", "not INT4 narrow");
    std::fs::write(&path, &good).unwrap();
    let wide = LinearConfig::new(3, 4).init(&Device::flex());
    let rejected = load_safetensors(wide, &path).unwrap_err();
    assert!(reason(rejected.into_error()).contains("`weight` is missing"));
}

/// A layer, and a number of steps.
#[derive(Module, Debug)]
struct Counted {
    fc: Linear,
    steps: Param<Tensor<1, Int>>,
}

#[test]
fn a_tensor_of_another_kind_is_refused_and_halves_are_read_on_every_device() {
    let (_folder, path) = scratch("counted.safetensors");
    on_each(|device| {
        let steps = TensorData::from([3_i32, 4]);
        let steps = Tensor::<1, Int>::from_data(steps, (device, DType::I32));
        let counted = Counted {
            fc: LinearConfig::new(16, 8).init(device),
            steps: Param::initialized(ParamId::new(), steps),
        };
        let prepared = weight_only(4).prepare(counted.clone()).unwrap();
        save_safetensors(&prepared, &path).unwrap();
        let whole = std::fs::read(&path).unwrap();
        let retyped = |of: &'static str, to: Dtype| {
            rewritten(&whole, move |name, dtype, shape, data| {
                let (dtype, data) = match name == of {
                    true if to == Dtype::BF16 => (to, halves(data)),
                    true => (to, data.to_vec()),
                    false => (dtype, data.to_vec()),
                };
                Some((name.to_string(), dtype, shape.to_vec(), data))
            })
        };
        for (name, dtype, says) in [
            ("fc.bias", Dtype::I32, "`fc.bias` is I32"),
            ("steps", Dtype::F32, "`steps` is F32"),
        ] {
            std::fs::write(&path, resealed(&retyped(name, dtype))).unwrap();
            let rejected = load_safetensors(counted.clone(), &path).unwrap_err();
            assert_eq!(rejected.value().steps.val().dtype(), DType::I32);
            let error = rejected.into_error();
            assert_matches!(error, QuantError::File { .. });
            assert_says!(error, says);
        }
        // A bias in half precision, and a weight whose values are.
        let bytes = retyped("fc.bias", Dtype::BF16);
        let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
        let mut metadata = header.metadata().clone().unwrap();
        let entries = metadata.get_mut("quantized").unwrap();
        *entries = entries.replace(r#""dtype":"F32""#, r#""dtype":"BF16""#);
        assert_says!(entries, "BF16");
        let found = SafeTensors::deserialize(&bytes).unwrap();
        let bytes = sealed(&found, metadata);
        std::fs::write(&path, bytes).unwrap();
        let has_halves = device.supports_dtype(DType::BF16);
        let expected = if has_halves { DType::BF16 } else { DType::F32 };
        let before = values(counted.fc.bias.clone().unwrap().val());
        let loaded = load_safetensors(counted, &path).unwrap();
        let bias = loaded.fc.bias.clone().unwrap().val();
        assert_eq!(
            (loaded.fc.weight.val().dtype(), bias.dtype()),
            (expected, expected)
        );
        let upper = |x: f32| f32::from_bits(x.to_bits() & 0xffff_0000);
        let before: Vec<f32> = before.into_iter().map(upper).collect();
        assert_eq!(values(bias), before);
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
                    let loaded = load_safetensors(fresh, &path).unwrap();
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
fn integers_and_bools_are_counted_as_they_are_held_and_as_a_file_has_them() {
    #[derive(Module, Debug)]
    struct Kept {
        fc: Linear,
        steps: Param<Tensor<1, Int>>,
        seen: Param<Tensor<1, Bool>>,
    }
    let (_folder, path) = scratch("kept.safetensors");
    let device = Device::flex();
    let steps = Tensor::<1, Int>::from_data(TensorData::from([3_i64; 5]), (&device, DType::I64));
    let seen = Tensor::<1, Int>::zeros([1000], &device).bool();
    let bytes_of_bool = seen.dtype().size();
    let [small, large] = [(1, 1), (5, 1000)].map(|(of_steps, of_seen)| {
        let model = Kept {
            fc: LinearConfig::new(16, 8).init(&device),
            steps: Param::initialized(ParamId::new(), steps.clone().slice([0..of_steps])),
            seen: Param::initialized(ParamId::new(), seen.clone().slice([0..of_seen])),
        };
        let prepared = weight_only(4).prepare(model).unwrap();
        let (converted, report) = ConvertConfig::new().convert(prepared).unwrap();
        save_safetensors(&converted, &path).unwrap();
        assert_eq!(report.packed_bytes(), tensor_bytes(&path));
        report.other_bytes
    });
    assert_eq!(large - small, 4 * 8 + 999 * bytes_of_bool);
}

#[cfg(unix)]
#[test]
fn who_reads_a_file_that_is_written_again_reads_the_old_one() {
    use std::io::Read;

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("net.safetensors");
    save_safetensors(&prepared(full(4), &Device::flex()), &path).unwrap();
    let before = std::fs::read(&path).unwrap();
    let mut reader = std::fs::File::open(&path).unwrap();
    let length = save_safetensors(&prepared(full(8), &Device::flex()), &path).unwrap();
    let mut found = Vec::new();
    reader.read_to_end(&mut found).unwrap();
    assert!(found == before);
    assert_eq!(std::fs::metadata(&path).unwrap().len(), length);
    // Nothing else is left there.
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn a_file_of_blocks_holds_codes_and_scales_and_the_report_counts_its_bytes() {
    let (_folder, path) = scratch("net.safetensors");
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
    let (_folder, path) = scratch("model.safetensors");
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
