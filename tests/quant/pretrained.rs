//! Folders as Transformers has them: names, files, configuration, and the way back.

use std::path::Path;

use burn::nn::{Linear, LinearConfig};
use burn::tensor::Device;
use burn_lean::quant::deploy::{PretrainedFolder, load_pretrained};
use burn_lean::quant::{QatConfig, QuantError, WeightConfig, quantized_weights};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde_json::{Value, json};

use crate::compressed_tensors::{Net, calibrated, config, kinds};
use crate::support::{each_device, parameters, values, with_numbers};

fn named(path: &str) -> String {
    format!(
        "model.{}",
        path.replace("fc1", "up_proj").replace("fc2", "down_proj")
    )
}

fn read(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn file_names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

#[test]
fn a_model_comes_back_from_a_folder_with_the_names_of_another_network() {
    each_device(|target| {
        for (weight, format, _) in kinds() {
            let config = config(weight);
            let parent = tempfile::tempdir().unwrap();
            let folder = parent.path().join("model");
            let model = calibrated(&config, &target.device);
            let mut writer = PretrainedFolder::create(&folder).unwrap();
            writer.add(&model, named).unwrap();
            let report = writer
                .finish(json!({ "model_type": "mine", "quantization_config": "of before" }))
                .unwrap();
            assert_eq!(report.format, format);
            assert_eq!(
                report.quantized,
                ["model.up_proj.weight", "model.down_proj.weight"]
            );
            assert_eq!(file_names(&folder), ["config.json", "model.safetensors"]);
            let said = read(&folder.join("config.json"));
            assert_eq!(said["model_type"], "mine");
            let group = &said["quantization_config"]["config_groups"]["group_0"];
            assert_eq!(
                group["targets"],
                json!(["model.up_proj", "model.down_proj"])
            );
            let fresh = config.prepare(Net::new(2, &target.device)).unwrap();
            let loaded = load_pretrained(fresh, &folder, named).unwrap();
            let codes = |model: &Net| quantized_weights(model).unwrap();
            assert_eq!(codes(&loaded), codes(&model));
            let plain = load_pretrained(Net::new(2, &target.device), &folder, named).unwrap();
            assert_eq!(
                values(plain.fc1.weight.val()),
                values(model.fc1.weight.val())
            );
        }
    });
}

fn layer(seed: u64) -> Linear {
    let layer = LinearConfig::new(16, 8).with_bias(false);
    with_numbers(layer.init(&Device::flex()), seed)
}

#[test]
fn parts_of_a_model_become_files_with_an_index() {
    let parent = tempfile::tempdir().unwrap();
    let folder = parent.path().join("model");
    let config = QatConfig::new()
        .with_weight(WeightConfig::int(3))
        .with_activation(None);
    let quantized: Vec<Linear> = (0..2)
        .map(|seed| config.prepare(layer(seed)).unwrap())
        .collect();
    let head = layer(2);
    let mut writer = PretrainedFolder::create(&folder).unwrap();
    for (number, part) in quantized.iter().enumerate() {
        let name = |path: &str| format!("layers.{number}.{path}");
        writer.add(part, name).unwrap();
    }
    writer.add(&head, |path| format!("head.{path}")).unwrap();
    // What is already there is not written over, and another tensor of the same name is not taken.
    let twice = writer
        .add(&head, |path| format!("head.{path}"))
        .unwrap_err();
    assert_says!(twice, "named `head.weight`");
    let report = writer.finish(json!({})).unwrap();
    assert_eq!(report.quantized, ["layers.0.weight", "layers.1.weight"]);
    let [first, second, third] = [1, 2, 3].map(|at| format!("model-0000{at}-of-00003.safetensors"));
    assert_eq!(
        file_names(&folder),
        [
            "config.json",
            &first,
            &second,
            &third,
            "model.safetensors.index.json"
        ]
    );
    let index = read(&folder.join("model.safetensors.index.json"));
    assert_eq!(index["weight_map"]["layers.1.weight_packed"], *second);
    assert_eq!(index["weight_map"]["head.weight"], *third);
    // 8 rows of two words, 8 scales and the shape, twice; 128 floats.
    assert_eq!(index["metadata"]["total_size"], 2 * (64 + 32 + 16) + 512);
    let said = &read(&folder.join("config.json"))["quantization_config"];
    assert_eq!(said["ignore"], json!(["head"]));
    assert_eq!(
        said["config_groups"]["group_0"]["targets"],
        json!(["layers.0", "layers.1"])
    );
    let fresh: Vec<Linear> = (3..6).map(layer).collect();
    let names = |path: &str| match path.strip_prefix("2.") {
        Some(rest) => format!("head.{rest}"),
        None => format!("layers.{path}"),
    };
    let loaded = load_pretrained(fresh, &folder, names).unwrap();
    for (loaded, saved) in loaded.iter().zip(quantized.iter().chain([&head])) {
        assert_eq!(values(loaded.weight.val()), values(saved.weight.val()));
    }
    // A folder with a model is nobody's to write to.
    let error = PretrainedFolder::create(&folder).unwrap_err();
    assert_matches!(error, QuantError::File { .. });
    assert_says!(error, "already");
}

#[test]
fn a_folder_of_floats_is_read_as_it_is() {
    let parent = tempfile::tempdir().unwrap();
    let mut writer = PretrainedFolder::create(parent.path()).unwrap();
    writer.add(&layer(1), str::to_string).unwrap();
    let report = writer.finish(json!({})).unwrap();
    assert_eq!(report.format, "dense");
    assert_eq!(read(&parent.path().join("config.json")), json!({}));
    let loaded = load_pretrained(layer(2), parent.path(), str::to_string).unwrap();
    assert_eq!(parameters(&loaded), parameters(&layer(1)));
}

/// Writes matrices, each of one number.
fn write_shard(path: &Path, matrices: &[(&str, f32)]) {
    let bytes = matrices.iter().map(|(_, number)| number.to_le_bytes());
    let bytes: Vec<Vec<u8>> = bytes.map(|bytes| bytes.repeat(8 * 16)).collect();
    let names = matrices.iter().map(|(name, _)| *name);
    let views = bytes
        .iter()
        .map(|bytes| TensorView::new(Dtype::F32, vec![8, 16], bytes).unwrap());
    let file = safetensors::serialize(names.zip(views), None).unwrap();
    std::fs::write(path, file).unwrap();
}

#[test]
fn a_tensor_comes_from_the_file_that_the_index_names_and_is_in_no_other() {
    let parent = tempfile::tempdir().unwrap();
    let folder = parent.path();
    let [a, b, whole] = ["a", "b", "model"].map(|name| folder.join(format!("{name}.safetensors")));
    let index = folder.join("model.safetensors.index.json");
    std::fs::write(folder.join("config.json"), "{}").unwrap();
    let places = json!({ "0.weight": "b.safetensors", "1.weight": "a.safetensors" });
    std::fs::write(&index, json!({ "weight_map": places }).to_string()).unwrap();
    let load = || load_pretrained(vec![layer(3), layer(4)], folder, str::to_string);
    let weights = || -> Vec<Vec<f32>> {
        let loaded = load().unwrap();
        let weights = loaded.iter().map(|layer| values(layer.weight.val()));
        weights.collect()
    };
    let refused = |says: &str| {
        let error = load().unwrap_err().into_error();
        assert_matches!(error, QuantError::File { .. });
        assert_says!(error, says);
    };
    write_shard(&a, &[("1.weight", 1.0)]);
    write_shard(&b, &[("0.weight", 0.5)]);
    assert_eq!(weights(), [vec![0.5; 128], vec![1.0; 128]]);
    // An older one in the first file.
    write_shard(&a, &[("0.weight", 2.0), ("1.weight", 1.0)]);
    refused("both `a.safetensors` and `b.safetensors` have `0.weight`");
    // Only there, and nowhere.
    write_shard(&b, &[("2.weight", 0.5)]);
    refused("index.json: it says that `0.weight` is in `b.safetensors`, where it is not");
    write_shard(&a, &[("1.weight", 1.0)]);
    refused("index.json: it says that `0.weight` is in `b.safetensors`, where it is not");
    // As Transformers: one file, where there is one.
    write_shard(&whole, &[("0.weight", 3.0), ("1.weight", 4.0)]);
    assert_eq!(weights(), [vec![3.0; 128], vec![4.0; 128]]);
}

#[test]
fn what_is_no_folder_of_a_model_is_refused_and_the_model_comes_back() {
    let parent = tempfile::tempdir().unwrap();
    let folder = parent.path();
    let refused = |says: &str| {
        let rejected = load_pretrained(layer(2), folder, str::to_string).unwrap_err();
        let (back, error) = rejected.into_parts();
        assert_matches!(error, QuantError::File { .. });
        assert_says!(error, says);
        assert_eq!(parameters(&back), parameters(&layer(2)));
    };
    refused("config.json");
    let config = folder.join("config.json");
    std::fs::write(&config, "[").unwrap();
    refused("config.json");
    std::fs::write(&config, "{}").unwrap();
    refused("model.safetensors");
    let index = folder.join("model.safetensors.index.json");
    std::fs::write(
        &index,
        r#"{"weight_map": {"weight": "../model.safetensors"}}"#,
    )
    .unwrap();
    refused("which is no file of it");
    std::fs::write(&index, r#"{"weight_map": {"weight": "other.safetensors"}}"#).unwrap();
    refused("other.safetensors");
    std::fs::remove_file(&index).unwrap();
    std::fs::remove_file(&config).unwrap();
    let mut writer = PretrainedFolder::create(folder).unwrap();
    writer.add(&layer(1), str::to_string).unwrap();
    let error = writer.finish("no object").unwrap_err();
    assert_says!(error, "no JSON object");
    // Nothing in its place: what was written is not taken for a model.
    assert_eq!(file_names(folder), ["model-00001.safetensors"]);
    let bytes = std::fs::read(folder.join("model-00001.safetensors")).unwrap();
    assert_eq!(
        SafeTensors::deserialize(&bytes).unwrap().names(),
        ["weight"]
    );
}

/// The codes are on the disk, and only the writer knows what they mean.
#[test]
fn a_configuration_that_is_refused_costs_nothing_but_another_call() {
    let parent = tempfile::tempdir().unwrap();
    let folder = parent.path();
    let config = QatConfig::new()
        .with_weight(WeightConfig::int(4))
        .with_activation(None);
    let model: Vec<Linear> = vec![config.prepare(layer(1)).unwrap()];
    let mut writer = PretrainedFolder::create(folder).unwrap();
    writer.add(&model, str::to_string).unwrap();
    // The text of a file instead of what it says.
    let text = r#"{"model_type":"x"}"#;
    assert_says!(writer.finish(text).unwrap_err(), "no JSON object");
    let report = writer.finish(json!({ "model_type": "x" })).unwrap();
    assert_eq!(report.quantized, ["0.weight"]);
    assert_eq!(file_names(folder), ["config.json", "model.safetensors"]);
    let loaded = load_pretrained(vec![layer(2)], folder, str::to_string).unwrap();
    assert_eq!(
        values(loaded[0].weight.val()),
        values(model[0].weight.val())
    );
    // One more part gives the files other names.
    let head = |path: &str| format!("head.{path}");
    writer.add(&layer(3), head).unwrap();
    writer.finish(json!({})).unwrap();
    let names = |path: &str| path.replace("1.", "head.");
    let loaded = load_pretrained(vec![layer(2), layer(2)], folder, names).unwrap();
    assert_eq!(
        values(loaded[0].weight.val()),
        values(model[0].weight.val())
    );
    assert_eq!(parameters(&loaded[1]), parameters(&layer(3)));
}
