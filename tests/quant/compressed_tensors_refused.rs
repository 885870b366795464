//! Files in the layout of compressed-tensors that are damaged, or of something else.

use std::path::Path;

use burn::module::Module;
use burn::tensor::{DType, Device};
use burn_lean::quant::{QatConfig, QuantError, deploy::load_compressed_tensors, save_safetensors};
use safetensors::tensor::{Dtype, SafeTensors};

use crate::compressed_tensors::{Net, calibrated, config, halves, kinds, rewritten, saved};
use crate::support::{on_each, parameters, scratch, values};

#[test]
fn a_changed_bit_is_refused_or_changes_nothing() {
    let device = Device::flex();
    let config = QatConfig::new().with_activation(None);
    let net = config.prepare(Net::new(1, &device)).unwrap().valid();
    let (_folder, path) = scratch("model.safetensors");
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
    let (_folder, path) = scratch("model.safetensors");
    let config = config(kinds().remove(3).0);
    let model = calibrated(&config, &device);
    saved(&model, &path);
    let whole = std::fs::read(&path).unwrap();
    let refused = |bytes: &[u8], says: &str| refused(&config, &path, bytes, says);
    for length in [0, 5, 40, whole.len() / 2, whole.len() - 1] {
        refused(&whole[..length], "");
    }
    for (left_out, says) in [
        ("fc1.weight_packed", "`fc1.weight` is missing"),
        ("fc2.weight_shape", "`fc2.weight_shape` is missing"),
        ("norm.bias", "`norm.bias` is missing"),
    ] {
        refused(&without(&whole, left_out), says);
    }
    refused(
        &renamed(&whole, "fc1.bias", "fc1.offset"),
        "`fc1.bias` is missing",
    );
    refused(
        &renamed(&whole, "fc2.bias", "fc1.weight_g_idx"),
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
    let sizes = [1_i64 << 40, 16].map(i64::to_le_bytes).concat();
    let bytes = replaced(&whole, "fc1.weight_shape", Dtype::I64, sizes);
    refused(&bytes, "`fc1.weight_shape` holds 1099511627776");
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

#[test]
fn damaged_scales_of_inputs_are_refused_and_the_model_comes_back() {
    let device = Device::flex();
    let (_folder, path) = scratch("model.safetensors");
    let config = config(kinds().remove(1).0);
    saved(&calibrated(&config, &device), &path);
    let whole = std::fs::read(&path).unwrap();
    let refused = |bytes: &[u8], says: &str| refused(&config, &path, bytes, says);
    let bytes = without(&whole, "fc1.input_scale");
    refused(&bytes, "`fc1.input_scale` is missing");
    let zero_point = i32::MAX.to_le_bytes().to_vec();
    let bytes = replaced(&whole, "fc1.input_zero_point", Dtype::I32, zero_point);
    refused(&bytes, "zero point of `fc1.input_scale` is 2147483647");
}

fn refused(config: &QatConfig, path: &Path, bytes: &[u8], says: &str) {
    std::fs::write(path, bytes).unwrap();
    let fresh = config.prepare(Net::new(2, &Device::flex())).unwrap();
    let before = parameters(&fresh);
    let (back, error) = load_compressed_tensors(fresh, path)
        .unwrap_err()
        .into_parts();
    assert_matches!(error, QuantError::File { .. });
    assert_says!(error, says);
    assert_eq!(parameters(&back), before);
}

fn keep(
    name: &str,
    dtype: Dtype,
    shape: &[usize],
    data: &[u8],
) -> Option<(String, Dtype, Vec<usize>, Vec<u8>)> {
    Some((name.to_string(), dtype, shape.to_vec(), data.to_vec()))
}

fn without(file: &[u8], left_out: &str) -> Vec<u8> {
    rewritten(file, |name, dtype, shape, data| {
        keep(name, dtype, shape, data).filter(|_| name != left_out)
    })
}

fn renamed(file: &[u8], from: &str, to: &str) -> Vec<u8> {
    rewritten(file, |name, dtype, shape, data| {
        keep(if name == from { to } else { name }, dtype, shape, data)
    })
}

fn replaced(file: &[u8], of: &str, dtype: Dtype, bytes: Vec<u8>) -> Vec<u8> {
    rewritten(file, |name, stored, shape, data| match name == of {
        true => keep(name, dtype, shape, &bytes),
        false => keep(name, stored, shape, data),
    })
}

#[test]
fn a_tensor_of_another_kind_is_refused_and_halves_are_read_on_every_device() {
    let (_folder, path) = scratch("model.safetensors");
    on_each(|device| {
        let config = config(kinds().remove(1).0);
        saved(&calibrated(&config, device), &path);
        let whole = std::fs::read(&path).unwrap();
        let refused = |bytes: Vec<u8>, says: &str| {
            std::fs::write(&path, bytes).unwrap();
            let refused = load_compressed_tensors(Net::new(2, device), &path);
            let error = refused.unwrap_err().into_error();
            assert_matches!(error, QuantError::File { .. });
            assert_says!(error, says);
        };
        let of_integers = rewritten(&whole, |name, dtype, shape, data| {
            let is_bias = name == "norm.bias";
            keep(name, if is_bias { Dtype::I32 } else { dtype }, shape, data)
        });
        refused(of_integers, "`norm.bias` is I32");
        // Codes without scales are no floats.
        refused(without(&whole, "fc1.weight_scale"), "`fc1.weight` is I8");
        // One in half among those that are not.
        let with_halves = rewritten(&whole, |name, dtype, shape, data| match name {
            "norm.weight" => keep(name, Dtype::BF16, shape, &halves(data)),
            _ => keep(name, dtype, shape, data),
        });
        std::fs::write(&path, with_halves).unwrap();
        let loaded = load_compressed_tensors(Net::new(2, device), &path).unwrap();
        let gamma = loaded.norm.gamma.val();
        let has_halves = device.supports_dtype(DType::BF16);
        let expected = if has_halves { DType::BF16 } else { DType::F32 };
        assert_eq!(gamma.dtype(), expected);
        let upper = |x: f32| f32::from_bits(x.to_bits() & 0xffff_0000);
        let of_file = values(Net::new(1, device).norm.gamma.val());
        let of_file: Vec<f32> = of_file.into_iter().map(upper).collect();
        assert_eq!(values(gamma), of_file);
    });
}

#[test]
fn a_model_that_quantizes_in_another_way_is_told_so() {
    let device = Device::flex();
    let (_folder, path) = scratch("model.safetensors");
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
        assert_matches!(*error, QuantError::ForeignScheme { .. });
        assert_says!(error, "is INT4, symmetric, per channel, not ");
    }
}

#[test]
fn what_the_metadata_says_of_groups_and_of_inputs_is_minded() {
    let device = Device::flex();
    let (_folder, path) = scratch("model.safetensors");
    // The last occurrence: what is said of inputs comes after what is said of weights.
    let loaded = |kind: usize, from: &str, to: &str| {
        let config = config(kinds().remove(kind).0);
        saved(&calibrated(&config, &device), &path);
        let whole = std::fs::read(&path).unwrap();
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
    let error = loaded(4, r#"group_size\":4"#, r#"group_size\":8"#);
    assert_says!(error, "groups of 8 in 16");
    let error = loaded(1, r#"type\":\"int\""#, r#"type\":\"fpn\""#);
    assert_says!(error, "is FPN8, ", "not UINT8, affine, per tensor");
}
