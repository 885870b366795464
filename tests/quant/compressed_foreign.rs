//! Files in the layout of compressed-tensors as other programs write them.

use std::collections::HashMap;

use burn::module::{Module, Param};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::tensor::Device;
use burn_lean::quant::{
    NumberFormat, Override, QatConfig, QuantError, WeightConfig,
    deploy::{load_compressed_tensors, save_compressed_tensors},
    quantized_weights,
    rounding::set_weight_qparams,
};
use safetensors::tensor::SafeTensors;
use serde_json::{Value, json};

use crate::support::{scratch, values, with_numbers};

#[derive(Module, Debug)]
struct Words {
    table: Embedding,
    head: Linear,
}

fn words(seed: u64, device: &Device) -> Words {
    let words = Words {
        table: EmbeddingConfig::new(6, 8).init(device),
        head: LinearConfig::new(8, 6).init(device),
    };
    with_numbers(words, seed)
}

/// A table of 4 bits and a layer of 8.
fn config() -> QatConfig {
    let table = Override::new("table".into()).with_weight_bits(Some(4));
    QatConfig::new()
        .with_activation(None)
        .with_overrides(vec![table])
}

/// The file with these targets of its groups, one each.
fn targeting(file: &[u8], targets: [&str; 2]) -> Vec<u8> {
    let (_, header) = SafeTensors::read_metadata(file).unwrap();
    let mut metadata = header.metadata().clone().unwrap();
    // That of the file that was.
    metadata.remove("crc32");
    let of_before = &metadata["quantization_config"];
    let mut config: Value = serde_json::from_str(of_before).unwrap();
    for (at, target) in targets.iter().enumerate() {
        config["config_groups"][format!("group_{at}")]["targets"] = json!([target]);
    }
    metadata.insert("quantization_config".into(), config.to_string());
    let found = SafeTensors::deserialize(file).unwrap();
    safetensors::serialize(found.iter(), Some(metadata)).unwrap()
}

#[test]
fn groups_have_their_layers_by_patterns_and_by_classes() {
    let device = Device::flex();
    let (_folder, path) = scratch("words.safetensors");
    let model = config().prepare(words(1, &device)).unwrap();
    save_compressed_tensors(&model, &path).unwrap();
    let file = std::fs::read(&path).unwrap();
    for targets in [
        ["re:^table$", "re:^head$"],
        ["re:t", "re:.*ead"],
        ["Embedding", "Linear"],
        // A name goes before a pattern, and a pattern before a class.
        ["re:.*", "head"],
        ["Embedding", "re:head"],
    ] {
        std::fs::write(&path, targeting(&file, targets)).unwrap();
        let prepared = config().prepare(words(2, &device)).unwrap();
        for fresh in [words(2, &device), prepared] {
            let loaded = load_compressed_tensors(fresh, &path).unwrap();
            let weights = |words: &Words| {
                let [table, head] = [&words.table.weight, &words.head.weight];
                [values(table.val()), values(head.val())]
            };
            assert_eq!(weights(&loaded), weights(&model), "{targets:?}");
        }
    }
}

#[test]
fn a_target_that_is_no_pattern_or_of_no_layer_is_refused() {
    let device = Device::flex();
    let (_folder, path) = scratch("words.safetensors");
    let model = config().prepare(words(1, &device)).unwrap();
    save_compressed_tensors(&model, &path).unwrap();
    let file = std::fs::read(&path).unwrap();
    let refused = |targets: [&str; 2], says: &str| {
        std::fs::write(&path, targeting(&file, targets)).unwrap();
        let error = load_compressed_tensors(words(2, &device), &path).unwrap_err();
        assert_matches!(error.error(), QuantError::File { .. });
        assert_says!(error, says);
    };
    refused(
        ["re:^(?!head)", "head"],
        "`re:^(?!head)` of its group `group_0`",
    );
    // A pattern is one of the start of a name.
    refused(["re:able", "head"], "`table.weight`: no group");
}

#[test]
fn the_lowest_integer_asks_for_a_format_that_has_it() {
    let device = Device::flex();
    let (_folder, path) = scratch("lowest.safetensors");
    let mut linear: Linear = LinearConfig::new(2, 1).with_bias(false).init(&device);
    linear.weight = Param::from_data([[-128.0], [3.0]], &device);
    let prepared = |format: NumberFormat| {
        let weight = WeightConfig::new().with_format(format);
        let config = QatConfig::new().with_weight(weight).with_activation(None);
        config.prepare(linear.clone()).unwrap()
    };
    let whole = || prepared(NumberFormat::int8());
    let scales = HashMap::from([("weight".to_string(), vec![1.0_f32].into())]);
    let model = set_weight_qparams(whole(), &scales).unwrap();
    save_compressed_tensors(&model, &path).unwrap();
    let loaded = load_compressed_tensors(whole(), &path).unwrap();
    assert_eq!(quantized_weights(&loaded).unwrap()[0].1.codes(), [-128, 3]);
    let narrow = prepared(NumberFormat::int8().narrow());
    let error = load_compressed_tensors(narrow, &path).unwrap_err();
    assert_matches!(error.error(), QuantError::File { .. });
    assert_says!(error, "`weight`", "`NumberFormat::int8()`", "`narrow()`");
}
