//! The layout of compressed-tensors: names, axes and bits in the file, the way back, and bad files.

use std::collections::BTreeMap;
use std::path::Path;

use burn::module::{Module, Param};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_lean::quant::{
    ConvertConfig, FakeQuantizeConfig, ForwardQ, Granularity, Mapping, NumberFormat,
    ObserverConfig, QatConfig, QuantError, Scheme, Unsupported, WeightConfig, WeightGranularity,
    calibrate,
    deploy::{CompressedReport, load_compressed_tensors, save_compressed_tensors},
    quantized_weights, save_safetensors,
};
use safetensors::tensor::{Dtype, SafeTensors};

use crate::support::{each_device, parameters, tensor, values, with_numbers};

#[derive(Module, Debug)]
pub(crate) struct Net {
    pub(crate) fc1: Linear,
    norm: LayerNorm,
    fc2: Linear,
}

impl Net {
    pub(crate) fn new(seed: u64, device: &Device) -> Self {
        let net = Self {
            fc1: LinearConfig::new(16, 12).init(device),
            norm: LayerNormConfig::new(12).init(device),
            fc2: LinearConfig::new(12, 8).init(device),
        };
        with_numbers(net, seed)
    }

    pub(crate) fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let x = self.norm.forward(self.fc1.forward_q(x));
        self.fc2.forward_q(x)
    }
}

fn weight(format: NumberFormat, affine: bool, granularity: WeightGranularity) -> WeightConfig {
    let mapping = match affine {
        true => Mapping::Affine,
        false => Mapping::Symmetric,
    };
    WeightConfig::new()
        .with_format(format)
        .with_mapping(mapping)
        .with_granularity(granularity)
}

/// Each kind of weight that the layout has, with the names of its tensors.
fn kinds() -> Vec<(WeightConfig, &'static str, &'static [&'static str])> {
    use WeightGranularity::{PerBlock, PerChannel, PerTensor};
    let (int, uint) = (NumberFormat::int, NumberFormat::uint);
    let of_bytes: &[&str] = &["weight", "weight_scale"];
    let of_words: &[&str] = &["weight_packed", "weight_scale", "weight_shape"];
    let groups = PerBlock { size: 4 };
    vec![
        (weight(int(8), false, PerTensor), "int-quantized", of_bytes),
        (
            weight(int(8).narrow(), false, PerChannel),
            "int-quantized",
            of_bytes,
        ),
        (
            weight(uint(8), true, PerChannel),
            "int-quantized",
            &["weight", "weight_scale", "weight_zero_point"],
        ),
        (
            weight(int(4), false, PerChannel),
            "pack-quantized",
            of_words,
        ),
        (weight(int(3), false, groups), "pack-quantized", of_words),
        (
            weight(uint(4), true, groups),
            "pack-quantized",
            &[
                "weight_packed",
                "weight_scale",
                "weight_shape",
                "weight_zero_point",
            ],
        ),
    ]
}

fn config(weight: WeightConfig) -> QatConfig {
    let activation = FakeQuantizeConfig::new(Scheme::affine(NumberFormat::uint8()));
    QatConfig::new()
        .with_weight(weight)
        .with_activation(Some(activation))
}

fn calibrated(config: &QatConfig, device: &Device) -> Net {
    let training = device.clone().autodiff();
    let prepared = config.prepare(Net::new(1, &training)).unwrap();
    let x = tensor::<2>(3, [9, 16], device);
    let run = |net: &Net| drop(net.forward(x.clone()));
    calibrate(prepared, run).unwrap().valid()
}

fn saved(model: &Net, path: &Path) -> CompressedReport {
    save_compressed_tensors(model, path).unwrap()
}

#[test]
fn codes_scales_and_names_are_those_of_the_layout_and_come_back_exactly() {
    each_device(|target| {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        for (weight, format, names) in kinds() {
            let (kind, config) = (format!("{weight:?}"), config(weight));
            let model = calibrated(&config, &target.device);
            let report = saved(&model, &path);
            assert_eq!(report.format, format, "{kind}");
            assert_eq!(report.quantized, ["fc1.weight", "fc2.weight"]);
            assert_eq!(report.left_out, []);
            let bytes = std::fs::read(&path).unwrap();
            assert_eq!(report.bytes, bytes.len() as u64);
            let found = SafeTensors::deserialize(&bytes).unwrap();
            let mut expected: Vec<String> =
                names.iter().map(|name| format!("fc1.{name}")).collect();
            expected
                .extend(["fc1.bias", "fc1.input_scale", "fc1.input_zero_point"].map(Into::into));
            expected.sort();
            let mut of_fc1 = found.names();
            of_fc1.retain(|name| name.starts_with("fc1."));
            of_fc1.sort();
            assert_eq!(of_fc1, expected, "{kind}");
            assert_eq!(found.tensor("norm.weight").unwrap().shape(), [12]);

            // Into a model without quantizers: the values that fake quantization gave.
            let plain = load_compressed_tensors(Net::new(2, &target.device), &path).unwrap();
            for (loaded, trained) in [(&plain.fc1, &model.fc1), (&plain.fc2, &model.fc2)] {
                assert_eq!(
                    values(loaded.weight.val()),
                    values(trained.weight.val()),
                    "{kind}"
                );
                let bias = |linear: &Linear| values(linear.bias.as_ref().unwrap().val());
                assert_eq!(bias(loaded), bias(trained));
            }
            // Into a prepared one: the same codes, scales and activations.
            let fresh = config.prepare(Net::new(2, &target.device)).unwrap();
            let loaded = load_compressed_tensors(fresh, &path).unwrap();
            let codes = |model: &Net| quantized_weights(model).unwrap();
            assert_eq!(codes(&loaded), codes(&model), "{kind}");
            let x = tensor::<2>(4, [5, 16], &target.device);
            let outputs = |model: &Net| values(model.forward(x.clone()));
            assert_eq!(outputs(&loaded), outputs(&model), "{kind}");
            for_the_library(&path, &plain);
            // A converted model is written as it was before.
            let convert = ConvertConfig::new().with_unsupported(Unsupported::KeepFakeQuantized);
            let (converted, _) = convert.convert(model).unwrap();
            let again = folder.path().join("again.safetensors");
            saved(&converted, &again);
            let again = std::fs::read(&again).unwrap();
            assert!(contents(&again) == contents(&bytes), "{kind}");
        }
    });
}

#[test]
fn words_hold_the_codes_of_an_output_from_the_low_bits_on() {
    let device = Device::flex();
    let mut linear = LinearConfig::new(9, 2).with_bias(false).init(&device);
    // The steps are 1: codes are the numbers themselves.
    let numbers: Vec<f32> = (0..18)
        .map(|at| [7.0, -7.0][at % 2] + (at / 2) as f32 * [-1.0, 1.0][at % 2])
        .collect();
    linear.weight = Param::from_data(TensorData::new(numbers, [9, 2]), &device);
    let config = QatConfig::new()
        .with_weight(WeightConfig::int(4))
        .with_activation(None);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let model = config.prepare(linear).unwrap();
    save_compressed_tensors(&model, &path).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    let found = SafeTensors::deserialize(&bytes).unwrap();
    let packed = found.tensor("weight_packed").unwrap();
    assert_eq!((packed.dtype(), packed.shape()), (Dtype::I32, &[2, 2][..]));
    let words: Vec<u32> = packed
        .data()
        .chunks(4)
        .map(|word| u32::from_le_bytes(word.try_into().unwrap()))
        .collect();
    // 7, 6, … 0, -1 and -7, -6, … 0, 1, each plus 8.
    assert_eq!(words, [0x89ab_cdef, 0x7, 0x8765_4321, 0x9]);
    let shape = found.tensor("weight_shape").unwrap();
    assert_eq!(shape.data()[..1], [2]);
    let scale = found.tensor("weight_scale").unwrap();
    assert_eq!(scale.shape(), [2, 1]);
}

#[test]
fn the_zero_point_of_a_single_output_is_a_number_of_its_own() {
    let device = Device::flex();
    let linear: Linear = with_numbers(LinearConfig::new(9, 1).init(&device), 3);
    let granularity = WeightGranularity::PerChannel;
    let config = QatConfig::new()
        .with_weight(weight(NumberFormat::uint(4), true, granularity))
        .with_activation(None);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let model = config.prepare(linear).unwrap();
    save_compressed_tensors(&model, &path).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    let found = SafeTensors::deserialize(&bytes).unwrap();
    // One scale is one of the tensor, of which the layout packs no zero point.
    let zero = found.tensor("weight_zero_point").unwrap();
    assert_eq!((zero.dtype(), zero.shape()), (Dtype::I8, &[1][..]));
    let codes = &quantized_weights(&model).unwrap()[0].1;
    assert_eq!(zero.data(), [(codes.zero_point()[0] as i8 - 8) as u8]);
    let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
    let metadata = header.metadata().clone().unwrap();
    assert!(metadata["quantization_config"].contains(r#""strategy":"tensor""#));
    let plain: Linear = LinearConfig::new(9, 1).init(&device);
    let plain = load_compressed_tensors(plain, &path).unwrap();
    assert_eq!(values(plain.weight.val()), values(model.weight.val()));
}

#[test]
fn the_metadata_says_how_each_layer_is_quantized() {
    let device = Device::flex();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let groups = WeightGranularity::PerBlock { size: 4 };
    let dynamic = FakeQuantizeConfig::new(
        Scheme::symmetric(NumberFormat::int8()).with_granularity(Granularity::PerToken),
    )
    .with_observer(ObserverConfig::Memoryless);
    let config = QatConfig::new()
        .with_weight(weight(NumberFormat::int(4), false, groups))
        .with_activation(Some(dynamic));
    saved(&calibrated(&config, &device), &path);
    let bytes = std::fs::read(&path).unwrap();
    let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
    let metadata = header.metadata().clone().unwrap();
    assert_eq!(metadata["format"], "pt");
    let config: serde_json::Value = serde_json::from_str(&metadata["quantization_config"]).unwrap();
    assert_eq!(config["quant_method"], "compressed-tensors");
    assert_eq!(config["quantization_status"], "compressed");
    let group = &config["config_groups"]["group_0"];
    assert_eq!(group["targets"], serde_json::json!(["fc1", "fc2"]));
    let weights = &group["weights"];
    assert_eq!(
        (&weights["num_bits"], &weights["group_size"]),
        (&4.into(), &4.into())
    );
    assert_eq!(
        (&weights["strategy"], &weights["symmetric"]),
        (&"group".into(), &true.into())
    );
    let inputs = &group["input_activations"];
    assert_eq!(
        (&inputs["strategy"], &inputs["dynamic"]),
        (&"token".into(), &true.into())
    );
}

#[test]
fn what_the_layout_cannot_hold_stays_float_and_is_reported() {
    let device = Device::flex();
    let conv: Conv2d = with_numbers(Conv2dConfig::new([2, 3], [3, 3]).init(&device), 1);
    let config = QatConfig::new().with_activation(None);
    let model = config.prepare(conv).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let report = save_compressed_tensors(&model, &path).unwrap();
    assert_eq!(
        (report.format.as_str(), report.quantized.len()),
        ("dense", 0)
    );
    let [(name, reason)] = &report.left_out[..] else {
        panic!("{report:?}")
    };
    assert_eq!(name, "weight");
    assert!(reason.contains("matrices"), "{reason}");
    let fresh: Conv2d = with_numbers(Conv2dConfig::new([2, 3], [3, 3]).init(&device), 2);
    let loaded = load_compressed_tensors(fresh, &path).unwrap();
    assert_eq!(values(loaded.weight.val()), values(model.weight.val()));
}

#[test]
fn a_matrix_of_two_of_four_is_stored_without_its_zeros() {
    each_device(|target| {
        let mut net = Net::new(1, &target.device);
        let mut numbers = values(net.fc1.weight.val());
        for (index, number) in numbers.iter_mut().enumerate() {
            // Along the inputs, which are the rows here.
            if matches!((index / 12 + index % 12) % 4, 1 | 2) {
                *number = 0.0;
            }
        }
        let data = TensorData::new(numbers, [16, 12]);
        net.fc1.weight = Param::from_data(data, &target.device);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        let report = saved(&net, &path);
        assert_eq!(report.sparse, ["fc1.weight"]);
        let bytes = std::fs::read(&path).unwrap();
        let found = SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(found.tensor("fc1.compressed").unwrap().shape(), [12, 8]);
        assert_eq!(found.tensor("fc1.bitmask").unwrap().shape(), [12, 2]);
        assert!(found.tensor("fc1.weight").is_err());
        let loaded = load_compressed_tensors(Net::new(2, &target.device), &path).unwrap();
        assert_eq!(parameters(&loaded), parameters(&net));
        for_the_library(&path, &loaded);
    });
}

/// What is in a file; the order of the metadata is of chance.
fn contents(bytes: &[u8]) -> BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)> {
    let found = SafeTensors::deserialize(bytes).unwrap();
    let tensors = found.iter().map(|(name, view)| {
        let (shape, data) = (view.shape().to_vec(), view.data().to_vec());
        (name.to_string(), (view.dtype(), shape, data))
    });
    tensors.collect()
}

/// With `LEAN_COMPRESSED=DIR`: the file, and the float weights, outputs first, for
/// `tools/read_compressed_tensors.py`.
fn for_the_library(path: &Path, plain: &Net) {
    let Some(folder) = std::env::var_os("LEAN_COMPRESSED") else {
        return;
    };
    let folder = Path::new(&folder);
    let index = (0..).find(|index| !folder.join(format!("{index}.safetensors")).exists());
    let index = index.unwrap();
    std::fs::copy(path, folder.join(format!("{index}.safetensors"))).unwrap();
    let weights = [("fc1.weight", &plain.fc1), ("fc2.weight", &plain.fc2)];
    let tensors: Vec<(&str, Vec<usize>, Vec<u8>)> = weights
        .into_iter()
        .map(|(name, linear)| {
            let data = linear.weight.val().transpose().into_data();
            (name, data.shape().to_vec(), data.as_bytes().to_vec())
        })
        .collect();
    let views = tensors.iter().map(|(name, shape, bytes)| {
        let view = safetensors::tensor::TensorView::new(Dtype::F32, shape.clone(), bytes);
        (*name, view.unwrap())
    });
    let bytes = safetensors::serialize(views, None).unwrap();
    std::fs::write(folder.join(format!("{index}.expected.safetensors")), bytes).unwrap();
}

/// The file with some tensors changed or left out.
pub(crate) fn rewritten(
    bytes: &[u8],
    change: impl Fn(&str, Dtype, &[usize], &[u8]) -> Option<(String, Dtype, Vec<usize>, Vec<u8>)>,
) -> Vec<u8> {
    let found = SafeTensors::deserialize(bytes).unwrap();
    let (_, header) = SafeTensors::read_metadata(bytes).unwrap();
    let changed: BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)> = found
        .iter()
        .filter_map(|(name, view)| {
            let (name, dtype, shape, data) = change(name, view.dtype(), view.shape(), view.data())?;
            Some((name, (dtype, shape, data)))
        })
        .collect();
    let views = changed.iter().map(|(name, (dtype, shape, data))| {
        let view = safetensors::tensor::TensorView::new(*dtype, shape.clone(), data);
        (name, view.unwrap())
    });
    // As other programs write: the checksum is that of the file that was.
    let mut metadata = header.metadata().clone().unwrap();
    metadata.remove("crc32");
    safetensors::serialize(views, Some(metadata)).unwrap()
}

#[test]
fn a_changed_bit_is_refused_or_changes_nothing() {
    let device = Device::flex();
    let config = QatConfig::new().with_activation(None);
    let net = config.prepare(Net::new(1, &device)).unwrap().valid();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    saved(&net, &path);
    let whole = std::fs::read(&path).unwrap();
    let load = || load_compressed_tensors(Net::new(2, &device), &path);
    let expected = parameters(&load().unwrap());
    let mut refused = 0;
    let places = (0..whole.len()).step_by(7);
    for at in places.clone() {
        let mut bytes = whole.clone();
        bytes[at] ^= 1 << (at % 8);
        std::fs::write(&path, bytes).unwrap();
        match load() {
            // The name of the checksum in the metadata.
            Ok(loaded) => assert_eq!(parameters(&loaded), expected),
            Err(_) => refused += 1,
        }
    }
    assert!(refused + 1 >= places.len());
}

#[test]
fn truncated_and_foreign_files_are_refused_and_the_model_comes_back() {
    let device = Device::flex();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let (weight, ..) = kinds().remove(3);
    let config = config(weight);
    let model = calibrated(&config, &device);
    saved(&model, &path);
    let whole = std::fs::read(&path).unwrap();
    let refused = |bytes: &[u8], says: &str| {
        std::fs::write(&path, bytes).unwrap();
        let fresh = config.prepare(Net::new(2, &device)).unwrap();
        let before = parameters(&fresh);
        let (back, error) = load_compressed_tensors(fresh, &path)
            .unwrap_err()
            .into_parts();
        assert!(matches!(error, QuantError::File { .. }), "{error}");
        assert!(error.to_string().contains(says), "{error}");
        assert_eq!(parameters(&back), before);
    };
    for length in [0, 5, 40, whole.len() / 2, whole.len() - 1] {
        refused(&whole[..length], "");
    }
    let keep = |name: &str, dtype, shape: &[usize], data: &[u8]| {
        Some((name.to_string(), dtype, shape.to_vec(), data.to_vec()))
    };
    for (left_out, says) in [
        ("fc1.weight_packed", "`fc1.weight` is missing"),
        ("fc2.weight_shape", "`fc2.weight_shape` is missing"),
        ("norm.bias", "`norm.bias` is missing"),
        ("fc1.input_scale", "`fc1.input_scale` is missing"),
    ] {
        let bytes = rewritten(&whole, |name, dtype, shape, data| {
            keep(name, dtype, shape, data).filter(|_| name != left_out)
        });
        refused(&bytes, says);
    }
    let renamed = |from: &'static str, to: &'static str| {
        rewritten(&whole, move |name, dtype, shape, data| {
            let name = if name == from { to } else { name };
            Some((name.to_string(), dtype, shape.to_vec(), data.to_vec()))
        })
    };
    refused(&renamed("fc1.bias", "fc1.offset"), "`fc1.bias` is missing");
    refused(
        &renamed("fc1.input_zero_point", "fc1.weight_g_idx"),
        "order of activations",
    );
    // Scales that are no numbers to divide by, words of another width.
    let bytes = rewritten(&whole, |name, dtype, shape, data| {
        let data = match name {
            "fc1.weight_scale" => vec![0; data.len()],
            _ => data.to_vec(),
        };
        Some((name.to_string(), dtype, shape.to_vec(), data))
    });
    refused(&bytes, "fc1.weight");
    let bytes = rewritten(&whole, |name, dtype, shape, data| match name {
        "fc1.weight_packed" => Some((
            name.to_string(),
            dtype,
            vec![shape[1], shape[0]],
            data.to_vec(),
        )),
        _ => keep(name, dtype, shape, data),
    });
    refused(&bytes, "words");
    // Integers that nothing here holds.
    let replaced = |of: &'static str, dtype, bytes: Vec<u8>| {
        rewritten(&whole, move |name, stored, shape, data| match name == of {
            true => Some((name.to_string(), dtype, shape.to_vec(), bytes.clone())),
            false => keep(name, stored, shape, data),
        })
    };
    let sizes = [1_i64 << 40, 16].map(i64::to_le_bytes).concat();
    let bytes = replaced("fc1.weight_shape", Dtype::I64, sizes);
    refused(&bytes, "`fc1.weight_shape` holds 1099511627776");
    let zero_point = i32::MAX.to_le_bytes().to_vec();
    let bytes = replaced("fc1.input_zero_point", Dtype::I32, zero_point);
    refused(&bytes, "zero point of `fc1.input_scale` is 2147483647");
    // Our own layout, and a configuration of another method.
    save_safetensors(&model, &path).unwrap();
    refused(&std::fs::read(&path).unwrap(), "`quantization_config`");
    let found = SafeTensors::deserialize(&whole).unwrap();
    for (config, says) in [
        ("{", "`quantization_config`"),
        (r#"{"quant_method": "gptq"}"#, "of the method `gptq`"),
        (r#"{"quant_method": "compressed-tensors"}"#, "no group"),
    ] {
        let metadata = [("quantization_config".to_string(), config.to_string())];
        let bytes = safetensors::serialize(found.iter(), Some(metadata.into())).unwrap();
        refused(&bytes, says);
    }
}

/// The upper halves of F32.
pub(crate) fn halves(data: &[u8]) -> Vec<u8> {
    data.chunks_exact(4)
        .flat_map(|word| [word[2], word[3]])
        .collect()
}

#[test]
fn a_tensor_of_another_kind_is_refused_and_halves_are_read_on_every_device() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    each_device(|target| {
        let device = &target.device;
        let config = config(kinds().remove(1).0);
        saved(&calibrated(&config, device), &path);
        let whole = std::fs::read(&path).unwrap();
        let changed = |of: &'static str, dtype: Dtype| {
            let bytes = rewritten(&whole, move |name, stored, shape, data| {
                let (dtype, data) = match name == of {
                    true if dtype == Dtype::BF16 => (dtype, halves(data)),
                    true => (dtype, data.to_vec()),
                    false => (stored, data.to_vec()),
                };
                Some((name.to_string(), dtype, shape.to_vec(), data))
            });
            std::fs::write(&path, bytes).unwrap();
            load_compressed_tensors(Net::new(2, device), &path)
        };
        let refused = changed("norm.bias", Dtype::I32).unwrap_err().into_error();
        assert!(matches!(refused, QuantError::File { .. }), "{refused}");
        assert!(
            refused.to_string().contains("`norm.bias` is I32"),
            "{refused}"
        );
        let loaded = changed("norm.weight", Dtype::BF16).unwrap();
        let gamma = loaded.norm.gamma.val();
        let has_halves = device.supports_dtype(DType::BF16);
        let expected = if has_halves { DType::BF16 } else { DType::F32 };
        assert_eq!(gamma.dtype(), expected);
        let upper = |x: f32| f32::from_bits(x.to_bits() & 0xffff_0000);
        let of_file = values(Net::new(1, device).norm.gamma.val());
        let of_file: Vec<f32> = of_file.into_iter().map(upper).collect();
        assert_eq!(values(gamma), of_file);
        // Codes without scales are no floats.
        let bytes = rewritten(&whole, |name, dtype, shape, data| {
            let kept = (name.to_string(), dtype, shape.to_vec(), data.to_vec());
            (name != "fc1.weight_scale").then_some(kept)
        });
        std::fs::write(&path, bytes).unwrap();
        let refused = load_compressed_tensors(Net::new(2, device), &path);
        let refused = refused.unwrap_err().into_error();
        assert!(
            refused.to_string().contains("`fc1.weight` is I8"),
            "{refused}"
        );
    });
}

#[test]
fn a_model_that_quantizes_in_another_way_is_told_so() {
    let device = Device::flex();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let all = kinds();
    saved(&calibrated(&config(all[3].0.clone()), &device), &path);
    for other in [1, 4, 5] {
        let fresh = config(all[other].0.clone())
            .prepare(Net::new(2, &device))
            .unwrap();
        let error = load_compressed_tensors(fresh, &path)
            .unwrap_err()
            .into_error();
        let QuantError::Parameter { path, error } = error else {
            panic!("{error}")
        };
        assert_eq!(path, "fc1.weight");
        assert!(
            matches!(*error, QuantError::ForeignScheme { .. }),
            "{error}"
        );
    }
}

#[test]
fn what_the_metadata_says_of_groups_and_of_inputs_is_minded() {
    let device = Device::flex();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let config = config(kinds().remove(4).0);
    saved(&calibrated(&config, &device), &path);
    let whole = std::fs::read(&path).unwrap();
    // The last occurrence: what is said of inputs comes after what is said of weights.
    let loaded = |from: &str, to: &str| {
        assert_eq!(from.len(), to.len());
        let mut windows = whole.windows(from.len());
        let at = windows.rposition(|found| found == from.as_bytes());
        let mut bytes = whole.clone();
        bytes[at.unwrap()..][..to.len()].copy_from_slice(to.as_bytes());
        // As of another program, whose files have no checksum.
        let at = bytes.windows(5).position(|found| found == b"crc32");
        bytes[at.unwrap()..][..5].copy_from_slice(b"other");
        std::fs::write(&path, bytes).unwrap();
        let fresh = config.prepare(Net::new(2, &device)).unwrap();
        load_compressed_tensors(fresh, &path)
            .unwrap_err()
            .into_error()
            .to_string()
    };
    let error = loaded(r#"group_size\":4"#, r#"group_size\":8"#);
    assert!(error.contains("groups of 8 in 16"), "{error}");
    let error = loaded(r#"type\":\"int\""#, r#"type\":\"fpn\""#);
    assert!(error.contains("another scheme"), "{error}");
}
