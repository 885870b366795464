//! The layout of compressed-tensors: names, axes and bits in the file, and the way back.

use std::collections::BTreeMap;
use std::path::Path;

use burn::module::{Module, Param};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::{Device, Tensor, TensorData};
use burn_lean::quant::{
    ConvertConfig, FakeQuantizeConfig, ForwardQ, Granularity, Mapping, NumberFormat,
    ObserverConfig, QatConfig, Scheme, Unsupported, WeightConfig, WeightGranularity, calibrate,
    deploy::{CompressedReport, load_compressed_tensors, save_compressed_tensors},
    quantized_weights,
};
use safetensors::tensor::{Dtype, SafeTensors};

use crate::support::{each_device, parameters, scratch, tensor, values, with_numbers};

#[derive(Module, Debug)]
pub(crate) struct Net {
    pub(crate) fc1: Linear,
    pub(crate) norm: LayerNorm,
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

/// Each kind of weight that the layout has, with its format and the names of its tensors.
pub(crate) fn kinds() -> Vec<(WeightConfig, &'static str, &'static [&'static str])> {
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

/// With inputs that are rounded where weights are bytes, and without where they are packed in words.
pub(crate) fn config(weight: WeightConfig) -> QatConfig {
    let activation = FakeQuantizeConfig::new(Scheme::affine(NumberFormat::uint8()));
    let is_of_bytes = weight.format.bits() == 8;
    QatConfig::new()
        .with_weight(weight)
        .with_activation(is_of_bytes.then_some(activation))
}

pub(crate) fn calibrated(config: &QatConfig, device: &Device) -> Net {
    let training = device.clone().autodiff();
    let prepared = config.prepare(Net::new(1, &training)).unwrap();
    let x = tensor::<2>(3, [9, 16], device);
    let run = |net: &Net| drop(net.forward(x.clone()));
    calibrate(prepared, run).unwrap().valid()
}

pub(crate) fn saved(model: &Net, path: &Path) -> CompressedReport {
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
            expected.push("fc1.bias".into());
            if format == "int-quantized" {
                expected.extend(["fc1.input_scale", "fc1.input_zero_point"].map(Into::into));
            }
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
    let (_folder, path) = scratch("model.safetensors");
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
    let (_folder, path) = scratch("model.safetensors");
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
    let (_folder, path) = scratch("model.safetensors");
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
    // Products of codes with codes take bytes, whatever the bits.
    assert_eq!(config["format"], "int-quantized");
    let found = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(found.tensor("fc1.weight").unwrap().dtype(), Dtype::I8);
}

#[test]
fn layers_of_both_formats_and_of_floats_are_told_apart() {
    let device = Device::flex();
    let (_folder, path) = scratch("model.safetensors");
    let activation = FakeQuantizeConfig::new(Scheme::affine(NumberFormat::uint8()));
    let rounded = QatConfig::new().with_activation(Some(activation));
    let packed = QatConfig::new().with_activation(None);
    let layer = |seed| -> Linear { with_numbers(LinearConfig::new(8, 8).init(&device), seed) };
    let run = |layer: &Linear| drop(layer.forward_q(tensor::<2>(3, [9, 8], &device)));
    let model = vec![
        calibrate(rounded.prepare(layer(1)).unwrap(), run).unwrap(),
        packed.prepare(layer(2)).unwrap(),
        layer(3),
    ];
    let report = save_compressed_tensors(&model, &path).unwrap();
    assert_eq!(report.format, "mixed-precision");
    assert_eq!(report.quantized, ["0.weight", "1.weight"]);
    let bytes = std::fs::read(&path).unwrap();
    let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
    let config = &header.metadata().as_ref().unwrap()["quantization_config"];
    let config: serde_json::Value = serde_json::from_str(config).unwrap();
    assert_eq!(config["ignore"], serde_json::json!(["2"]));
    let groups = &config["config_groups"];
    assert_eq!(groups["group_0"]["format"], "int-quantized");
    assert_eq!(groups["group_1"]["format"], "pack-quantized");
    let fresh: Vec<Linear> = (4..7).map(layer).collect();
    let loaded = load_compressed_tensors(fresh, &path).unwrap();
    for (loaded, saved) in loaded.iter().zip(&model) {
        assert_eq!(values(loaded.weight.val()), values(saved.weight.val()));
    }
}

#[test]
fn what_the_layout_cannot_hold_stays_float_and_is_reported() {
    let device = Device::flex();
    let conv: Conv2d = with_numbers(Conv2dConfig::new([2, 3], [3, 3]).init(&device), 1);
    let config = QatConfig::new().with_activation(None);
    let model = config.prepare(conv).unwrap();
    let (_folder, path) = scratch("model.safetensors");
    let report = save_compressed_tensors(&model, &path).unwrap();
    assert_eq!(
        (report.format.as_str(), report.quantized.len()),
        ("dense", 0)
    );
    let [(name, reason)] = &report.left_out[..] else {
        panic!("{report:?}")
    };
    assert_eq!(name, "weight");
    assert_says!(reason, "matrices");
    let fresh: Conv2d = with_numbers(Conv2dConfig::new([2, 3], [3, 3]).init(&device), 2);
    let loaded = load_compressed_tensors(fresh, &path).unwrap();
    assert_eq!(values(loaded.weight.val()), values(model.weight.val()));
}

/// As `sparse-24-bitmask` of other programs: kept values of each output, and a bit for each element.
#[test]
fn a_matrix_of_two_of_four_is_read_without_its_zeros() {
    each_device(|target| {
        let mut net = Net::new(1, &target.device);
        let mut numbers = values(net.fc1.weight.val());
        let is_kept = |input: usize, output: usize| !matches!((input + output) % 4, 1 | 2);
        for (index, number) in numbers.iter_mut().enumerate() {
            if !is_kept(index / 12, index % 12) {
                *number = 0.0;
            }
        }
        let (mut kept, mut bitmask) = (Vec::new(), vec![0_u8; 12 * 2]);
        for (output, input) in (0..12 * 16).map(|at| (at / 16, at % 16)) {
            if is_kept(input, output) {
                kept.extend(numbers[input * 12 + output].to_le_bytes());
                bitmask[output * 2 + input / 8] |= 1 << (input % 8);
            }
        }
        let data = TensorData::new(numbers, [16, 12]);
        net.fc1.weight = Param::from_data(data, &target.device);
        let (_folder, path) = scratch("model.safetensors");
        saved(&net, &path);
        let sizes: Vec<u8> = [12_i64, 16]
            .into_iter()
            .flat_map(i64::to_le_bytes)
            .collect();
        let bytes = std::fs::read(&path).unwrap();
        let mut tensors = contents(&bytes);
        tensors.remove("fc1.weight").unwrap();
        let parts = [
            ("compressed", Dtype::F32, vec![12, 8], kept),
            ("bitmask", Dtype::U8, vec![12, 2], bitmask),
            ("shape", Dtype::I64, vec![2, 1], sizes),
        ];
        for (part, dtype, shape, data) in parts {
            tensors.insert(format!("fc1.{part}"), (dtype, shape, data));
        }
        std::fs::write(&path, in_a_file(&tensors, &bytes)).unwrap();
        let loaded = load_compressed_tensors(Net::new(2, &target.device), &path).unwrap();
        assert_eq!(parameters(&loaded), parameters(&net));
    });
}

/// A model that rounds no inputs would compute something else than the file is of.
#[test]
fn a_file_of_rounded_inputs_is_refused_by_a_model_prepared_without() {
    let device = Device::flex();
    let dynamic = FakeQuantizeConfig::new(
        Scheme::symmetric(NumberFormat::int8()).with_granularity(Granularity::PerToken),
    )
    .with_observer(ObserverConfig::Memoryless);
    let (_folder, path) = scratch("model.safetensors");
    let rounded = QatConfig::new().with_activation(Some(dynamic));
    saved(&calibrated(&rounded, &device), &path);
    let without = || {
        let config = QatConfig::new().with_activation(None);
        config.prepare(Net::new(2, &device)).unwrap()
    };
    let error = load_compressed_tensors(without(), &path).unwrap_err();
    assert_says!(error.error(), "fc1");
    assert_says!(error.error(), "with_activation");
    // Without quantizers it is floats of what the codes stand for, as told.
    load_compressed_tensors(Net::new(2, &device), &path).unwrap();
    let fresh = rounded.prepare(Net::new(2, &device)).unwrap();
    load_compressed_tensors(fresh, &path).unwrap();
}

/// What is in a file; the order of the metadata is of chance.
fn contents(bytes: &[u8]) -> Tensors {
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

type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

/// The file with some tensors changed or left out.
pub(crate) fn rewritten(
    bytes: &[u8],
    change: impl Fn(&str, Dtype, &[usize], &[u8]) -> Option<(String, Dtype, Vec<usize>, Vec<u8>)>,
) -> Vec<u8> {
    let found = SafeTensors::deserialize(bytes).unwrap();
    let changed: Tensors = found
        .iter()
        .filter_map(|(name, view)| {
            let (name, dtype, shape, data) = change(name, view.dtype(), view.shape(), view.data())?;
            Some((name, (dtype, shape, data)))
        })
        .collect();
    in_a_file(&changed, bytes)
}

/// These tensors with the metadata of a file.
fn in_a_file(tensors: &Tensors, bytes: &[u8]) -> Vec<u8> {
    let (_, header) = SafeTensors::read_metadata(bytes).unwrap();
    let views = tensors.iter().map(|(name, (dtype, shape, data))| {
        let view = safetensors::tensor::TensorView::new(*dtype, shape.clone(), data);
        (name, view.unwrap())
    });
    // As other programs write: the checksum is that of the file that was.
    let mut metadata = header.metadata().clone().unwrap();
    metadata.remove("crc32");
    safetensors::serialize(views, Some(metadata)).unwrap()
}

/// The upper halves of F32.
pub(crate) fn halves(data: &[u8]) -> Vec<u8> {
    data.chunks_exact(4)
        .flat_map(|word| [word[2], word[3]])
        .collect()
}
