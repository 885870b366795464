//! Sparse records: small, exact, and never mistaken.

use std::io::Read;

use burn::module::{Module, Param, ParamId};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig, LinearLayout};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{Bool, DType, Device, Int, Tensor, TensorData};
use burn_lean::prune::{
    LayerKind, Layout, Masks, PruneError, SparseRecord,
    sparse::{Encoding, RecordFault, RecordSizes},
};
use flate2::Compression;
use flate2::read::{ZlibDecoder, ZlibEncoder};
use proptest::prelude::*;

use crate::seals;
use crate::support::cases::cases;
use crate::support::{
    each_device, numbers, on_each, on_tracked, parameters, tensor, values, with_numbers,
};

#[derive(Module, Debug)]
struct Model {
    conv: Conv2d,
    norm: BatchNorm,
    linear: Linear,
}

fn dense(seed: u64, device: &Device) -> Model {
    let model = Model {
        conv: Conv2dConfig::new([3, 8], [3, 3]).init(device),
        norm: BatchNormConfig::new(8).init(device),
        linear: LinearConfig::new(32, 50).init(device),
    };
    with_numbers(model, seed)
}

fn layout() -> Layout {
    let mut layout = Layout::new();
    layout.push("conv.weight", [8, 3, 3, 3], LayerKind::Conv, 2.0);
    layout.push("linear.weight", [32, 50], LayerKind::Linear, 2.0);
    layout
}

/// Keeps every 20th weight of the linear layer and every second one of the convolution.
fn masked(seed: u64, device: &Device) -> Model {
    let linear = layout().layers()[1].range().step_by(20);
    let support: Vec<usize> = (0..216).step_by(2).chain(linear).collect();
    let masks = Masks::from_support(&layout(), &support).unwrap();
    masks.attach(dense(seed, device)).unwrap()
}

fn pruned(seed: u64, device: &Device) -> Model {
    masked(seed, device).materialize()
}

fn bits<M: Module>(model: &M) -> Vec<(String, Vec<u32>)> {
    let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect();
    parameters(model)
        .into_iter()
        .map(|parameter| (parameter.path, bits(parameter.values)))
        .collect()
}

#[test]
fn a_pruned_model_loads_back_bit_by_bit_on_every_device() {
    each_device(|from| {
        let model = pruned(1, &from.device);
        let bytes = SparseRecord::from_module(&model)
            .unwrap()
            .to_bytes()
            .unwrap();
        let loads_on = |to: &Device| {
            let record = SparseRecord::from_bytes(&bytes).unwrap();
            let loaded = record.load_into(dense(2, to)).unwrap();
            assert_eq!(bits(&loaded), bits(&model));
            assert_eq!(loaded.linear.weight.id, model.linear.weight.id);
        };
        // Also where `BURN_DEVICE` leaves one device alone.
        loads_on(&Device::flex());
        each_device(|to| loads_on(&to.device));
    });
}

#[test]
fn a_masked_model_goes_on_training_from_its_record() {
    on_tracked(|device| {
        let model = masked(1, &device);
        let record = SparseRecord::from_module(&model).unwrap();
        let loaded = record.load_into(masked(2, &device)).unwrap();
        assert_eq!(parameters(&loaded), parameters(&model));
        assert_eq!(Masks::of(&loaded).unwrap(), Masks::of(&model).unwrap());
        let x = tensor::<2>(3, [4, 32], &device);
        let grads = loaded.linear.forward(x).square().mean().backward();
        let grads = GradientsParams::from_grads(grads, &loaded);
        let trained = SgdConfig::new().init().step(0.1, loaded, grads);
        assert_ne!(parameters(&trained), parameters(&model));
        assert_eq!(Masks::of(&trained).unwrap(), Masks::of(&model).unwrap());
    });
}

#[test]
fn each_tensor_is_stored_in_the_smallest_way() {
    let record = SparseRecord::from_module(&pruned(1, &Device::flex())).unwrap();
    let sizes = record.sizes().unwrap();
    let of = |path: &str| {
        let size = sizes.tensors.iter().find(|size| size.path == path).unwrap();
        (size.encoding, size.nonzeros, size.sparse_bytes)
    };
    // 216 weights, half of them zero: a bit for each and 108 values.
    assert_eq!(of("conv.weight"), (Encoding::Bitmask, 108, 27 + 108 * 4));
    // 1600 weights, 80 kept with gaps of 19.
    assert_eq!(of("linear.weight"), (Encoding::Gaps, 80, 80 + 80 * 4));
    assert_eq!(of("linear.bias"), (Encoding::Dense, 50, 50 * 4));
    let file = record.to_bytes().unwrap();
    assert_eq!(sizes.file_bytes, file.len());
    let dense: usize = parameters(&dense(1, &Device::flex()))
        .iter()
        .map(|parameter| parameter.values.len() * 4)
        .sum();
    assert_eq!(sizes.dense_bytes, dense);
    let json = serde_json::to_string(&sizes).unwrap();
    assert_eq!(serde_json::from_str::<RecordSizes>(&json).unwrap(), sizes);
}

#[test]
fn a_mask_costs_little_more_than_a_bit_per_weight() {
    let record = SparseRecord::from_module(&masked(1, &Device::flex())).unwrap();
    let sizes = record.sizes().unwrap();
    let mask = |path: &str| {
        let path = format!("{path}.mask.kept");
        let size = sizes.tensors.iter().find(|size| size.path == path);
        size.unwrap().sparse_bytes
    };
    // The ones of a mask are stored once: four bytes besides the places.
    assert_eq!(mask("conv.weight"), 27 + 4);
    assert_eq!(mask("linear.weight"), 80 + 4);
}

#[derive(Module, Debug)]
struct Kinds {
    float: Param<Tensor<1>>,
    int: Param<Tensor<1, Int>>,
    flags: Param<Tensor<2, Bool>>,
    empty: Param<Tensor<2>>,
}

fn kinds(floats: TensorData, ints: Vec<i32>, flags: Vec<bool>, device: &Device) -> Kinds {
    let dtype = floats.dtype();
    let count = flags.len();
    let ints = TensorData::from(ints.as_slice());
    let ints = Tensor::from_data(ints, (device, DType::I32));
    let flags = Tensor::from_data(TensorData::new(flags, [1, count]), device);
    Kinds {
        float: Param::from_tensor(Tensor::from_data(floats, (device, dtype))),
        int: Param::initialized(ParamId::new(), ints),
        flags: Param::initialized(ParamId::new(), flags),
        empty: Param::from_tensor(Tensor::empty([0, 3], device)),
    }
}

/// Nothing but zeros, with as many elements.
fn blank(model: &Kinds, device: &Device) -> Kinds {
    let count = model.float.dims()[0];
    kinds(
        TensorData::from(vec![0f32; count].as_slice()),
        vec![0; model.int.dims()[0]],
        vec![false; model.flags.dims()[1]],
        device,
    )
}

#[test]
fn signs_of_zeros_and_odd_numbers_keep_their_bits_in_every_dtype() {
    let odd = [
        0.0,
        -0.0,
        f32::NAN,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::MIN_POSITIVE / 4.0,
        -1.5,
        0.0,
        0.0,
        65504.0,
    ];
    let device = Device::flex();
    for dtype in [DType::F32, DType::F16, DType::BF16, DType::F64] {
        let data = TensorData::from(odd.as_slice()).convert_dtype(dtype);
        let model = kinds(
            data.clone(),
            vec![0, -7, 0, i32::MIN],
            vec![true, false],
            &device,
        );
        let record = SparseRecord::from_module(&model).unwrap();
        let loaded = record.load_into(blank(&model, &device)).unwrap();
        let found = loaded.float.base().into_data();
        assert_eq!(found.dtype(), dtype);
        assert_eq!(found.as_bytes(), data.as_bytes());
        assert_eq!(loaded.int.val().into_data(), model.int.val().into_data());
        assert_eq!(
            loaded.flags.val().into_data(),
            model.flags.val().into_data()
        );
    }
}

#[test]
fn the_transposed_layout_of_a_linear_layer_comes_back() {
    let device = Device::flex();
    let linear = || {
        let config = LinearConfig::new(3, 5).with_layout(LinearLayout::Col);
        config.init(&device)
    };
    let model = linear();
    let expected = values(model.weight.val());
    let record = SparseRecord::from_module(&model).unwrap();
    let loaded = record.load_into(linear()).unwrap();
    assert_eq!(values(loaded.weight.val()), expected);
}

proptest! {
    #![proptest_config(cases(64))]

    #[test]
    fn whatever_is_recorded_comes_back(
        floats in prop::collection::vec(prop_oneof![8 => Just(0u32), 2 => any::<u32>()], 1..400),
        ints in prop::collection::vec(prop_oneof![8 => Just(0), 2 => any::<i32>()], 1..40),
        flags in prop::collection::vec(any::<bool>(), 1..40),
    ) {
        let device = Device::flex();
        let floats: Vec<f32> = floats.into_iter().map(f32::from_bits).collect();
        let floats = TensorData::from(floats.as_slice());
        let model = kinds(floats.clone(), ints, flags, &device);
        let bytes = SparseRecord::from_module(&model).unwrap().to_bytes().unwrap();
        let record = SparseRecord::from_bytes(&bytes).unwrap();
        let loaded = record.load_into(blank(&model, &device)).unwrap();
        let found = loaded.float.base().into_data();
        prop_assert_eq!(found.as_bytes(), floats.as_bytes());
        prop_assert_eq!(loaded.int.val().into_data(), model.int.val().into_data());
        prop_assert_eq!(loaded.flags.val().into_data(), model.flags.val().into_data());
        let sizes = record.sizes().unwrap();
        prop_assert!(sizes.tensors.iter().all(|size| size.sparse_bytes <= size.dense_bytes));
    }

    #[test]
    fn one_changed_byte_is_always_noticed(at in 0usize..10_000, change in 1u8..=255) {
        let mut bytes = small().to_bytes().unwrap();
        let at = at % bytes.len();
        bytes[at] ^= change;
        let error = SparseRecord::from_bytes(&bytes).unwrap_err();
        let typed = matches!(error, PruneError::SparseRecord { .. });
        prop_assert!(typed, "{}", error);
    }
}

/// The same path and shape, but other numbers: nothing that Burn's own loading would survive.
#[test]
fn a_record_of_another_kind_of_numbers_is_refused() {
    #[derive(Module, Debug)]
    struct Floats {
        value: Param<Tensor<1>>,
    }
    #[derive(Module, Debug)]
    struct Ints {
        value: Param<Tensor<1, Int>>,
    }
    #[derive(Module, Debug)]
    struct Flags {
        value: Param<Tensor<1, Bool>>,
    }
    on_each(|device| {
        let floats = || Floats {
            value: Param::from_tensor(Tensor::from_floats([1.0, 0.0], device)),
        };
        let ints = || Ints {
            value: Param::initialized(ParamId::new(), Tensor::from_ints([1, 0], device)),
        };
        let flags = || Flags {
            value: Param::initialized(
                ParamId::new(),
                Tensor::from_data(TensorData::from([true, false]), device),
            ),
        };
        let records = [
            SparseRecord::from_module(&floats()).unwrap(),
            SparseRecord::from_module(&ints()).unwrap(),
            SparseRecord::from_module(&flags()).unwrap(),
        ];
        let refused = |result: Option<PruneError>, kind: &str| {
            let error = result.unwrap();
            assert_matches!(error, PruneError::RecordKind { .. });
            assert_says!(error, "`value`", kind);
        };
        for (of, record) in records.iter().enumerate() {
            if of != 0 {
                let rejected = record.load_into(floats()).unwrap_err();
                refused(Some(rejected.error().clone()), "floating-point numbers");
                assert_eq!(values(rejected.into_value().value.val()), [1.0, 0.0]);
            }
            if of != 1 {
                refused(
                    record.load_into(ints()).err().map(PruneError::from),
                    "integers",
                );
            }
            if of != 2 {
                refused(
                    record.load_into(flags()).err().map(PruneError::from),
                    "flags",
                );
            }
        }
    });
}

fn small() -> SparseRecord {
    let model = kinds(
        TensorData::from(numbers(1, 30).as_slice()),
        vec![0, 0, 1],
        vec![true],
        &Device::flex(),
    );
    SparseRecord::from_module(&model).unwrap()
}

fn fault(bytes: &[u8]) -> RecordFault {
    match SparseRecord::from_bytes(bytes).unwrap_err() {
        PruneError::SparseRecord { fault, .. } => fault,
        other => panic!("{other}"),
    }
}

#[test]
fn cut_off_records_are_refused_at_every_length() {
    let bytes = small().to_bytes().unwrap();
    for length in 0..bytes.len() {
        let found = fault(&bytes[..length]);
        let expected = match length {
            0..8 => RecordFault::NotARecord,
            8..12 => RecordFault::Length {
                expected: 12,
                found: length as u64,
            },
            12..20 => RecordFault::Length {
                expected: 20,
                found: length as u64,
            },
            _ => RecordFault::Length {
                expected: bytes.len() as u64,
                found: length as u64,
            },
        };
        assert_eq!(found, expected);
    }
    let appended = [&bytes[..], &[0]].concat();
    assert_matches!(fault(&appended), RecordFault::Length { .. });
}

#[test]
fn every_fault_is_told_apart() {
    let bytes = small().to_bytes().unwrap();
    let mut foreign = bytes.clone();
    foreign[0] = b'X';
    assert_eq!(fault(&foreign), RecordFault::NotARecord);
    for found in [2, 4] {
        let mut other = bytes.clone();
        other[8] = found;
        let expected = RecordFault::Version {
            found: found.into(),
            supported: 3,
        };
        assert_eq!(fault(&other), expected);
    }
    let mut damaged = bytes.clone();
    let last = bytes.len() - 5;
    damaged[last] ^= 1;
    assert_matches!(fault(&damaged), RecordFault::Checksum { .. });
    assert_eq!(seals::record(&bytes), bytes);
}

/// The file with something else in its header, and a length and checksum that fit.
pub(crate) fn with_header(bytes: &[u8], from: &str, to: &str) -> Vec<u8> {
    let length = u64::from_le_bytes(bytes[20..28].try_into().unwrap()) as usize;
    let (compressed, tensors) = bytes[28..].split_at(length);
    let mut header = String::new();
    ZlibDecoder::new(compressed)
        .read_to_string(&mut header)
        .unwrap();
    assert!(header.contains(from), "{from} in {header}");
    let header = header.replacen(from, to, 1);
    let mut compressed = Vec::new();
    ZlibEncoder::new(header.as_bytes(), Compression::best())
        .read_to_end(&mut compressed)
        .unwrap();
    let mut changed = bytes[..20].to_vec();
    changed.extend((compressed.len() as u64).to_le_bytes());
    changed.extend(compressed);
    changed.extend(tensors);
    seals::record(&changed)
}

#[test]
fn a_header_that_is_not_compressed_soundly_is_refused() {
    let mut bytes = small().to_bytes().unwrap();
    bytes[28] ^= 0xff;
    let fault = fault(&seals::record(&bytes));
    assert_matches!(fault, RecordFault::Header { .. });
}

#[test]
fn contradictions_behind_a_correct_checksum_are_refused() {
    let bytes = small().to_bytes().unwrap();
    let with_header = |from: &str, to: &str| with_header(&bytes, from, to);
    let header_fault = [
        with_header("[{", "[["),
        with_header("\"bytes\":120", "\"bytes\":119"),
    ];
    for bytes in header_fault {
        let fault = fault(&bytes);
        assert_matches!(fault, RecordFault::Header { .. });
    }
    for bytes in [
        with_header("\"bytes\":120", "\"bytes\":1000000"),
        with_header("\"shape\":[30]", "\"shape\":[4294967296,4294967296,4]"),
    ] {
        let fault = fault(&bytes);
        assert_matches!(fault, RecordFault::Tensor { .. });
    }
    // What a tensor's bytes must be is known when the model is.
    let device = Device::flex();
    let model = || {
        kinds(
            TensorData::from(numbers(1, 30).as_slice()),
            vec![0; 3],
            vec![true],
            &device,
        )
    };
    for (from, to) in [
        ("\"encoding\":\"dense\"", "\"encoding\":\"gaps\""),
        ("\"encoding\":\"dense\"", "\"encoding\":\"bitmask\""),
        ("\"nonzeros\":1", "\"nonzeros\":2"),
        ("\"dtype\":\"F32\"", "\"dtype\":\"F16\""),
        ("\"encoding\":\"bitmask\"", "\"encoding\":\"dense\""),
    ] {
        let record = SparseRecord::from_bytes(&with_header(from, to)).unwrap();
        let rejected = record.load_into(model()).unwrap_err();
        let typed = matches!(
            rejected.error(),
            PruneError::SparseRecord {
                fault: RecordFault::Tensor { .. },
                ..
            }
        );
        assert!(typed, "{from}: {}", rejected.error());
    }
}

#[test]
fn the_record_of_another_model_is_refused_and_the_model_comes_back() {
    let device = Device::flex();
    let record = SparseRecord::from_module(&dense(1, &device)).unwrap();
    let other = Model {
        linear: LinearConfig::new(50, 32).init(&device),
        ..dense(2, &device)
    };
    let before = parameters(&other);
    let rejected = record.load_into(other).unwrap_err();
    let expected = PruneError::RecordOfAnotherModel {
        path: "linear.weight".into(),
        record: Some(vec![32, 50]),
        model: Some(vec![50, 32]),
    };
    assert_eq!(*rejected.error(), expected);
    assert_eq!(parameters(rejected.value()), before);

    let error = record.load_into(masked(2, &device)).unwrap_err();
    let expected = PruneError::RecordOfAnotherModel {
        path: "conv.weight.mask.kept".into(),
        record: None,
        model: Some(vec![216]),
    };
    assert_eq!(error.into_error(), expected);
    let record = SparseRecord::from_module(&masked(1, &device)).unwrap();
    let error = record.load_into(dense(2, &device)).unwrap_err();
    let expected = PruneError::RecordOfAnotherModel {
        path: "conv.weight.mask.kept".into(),
        record: Some(vec![216]),
        model: None,
    };
    assert_eq!(error.into_error(), expected);
}

#[cfg(feature = "ndarray")]
#[test]
#[allow(deprecated)] // `Device::ndarray`, which has no half types.
fn a_dtype_that_the_device_lacks_is_an_error() {
    let floats = TensorData::from([1f32, 0.0].as_slice()).convert_dtype(DType::BF16);
    let model = kinds(floats, vec![1], vec![true], &Device::flex());
    let record = SparseRecord::from_module(&model).unwrap();
    let blank = blank(&model, &Device::ndarray());
    let error = record.load_into(blank).unwrap_err().into_error();
    assert_matches!(
        error,
        PruneError::RecordDtype {
            dtype: DType::BF16,
            ..
        }
    );
}

#[test]
fn files_are_replaced_as_a_whole() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.sparse");
    let device = Device::flex();
    for seed in [1, 2] {
        let model = pruned(seed, &device);
        SparseRecord::from_module(&model)
            .unwrap()
            .save(&path)
            .unwrap();
        let record = SparseRecord::open(&path).unwrap();
        assert_eq!(
            bits(&record.load_into(dense(3, &device)).unwrap()),
            bits(&model)
        );
    }
    let files = std::fs::read_dir(folder.path()).unwrap().count();
    assert_eq!(files, 1, "something partial was left");

    let nowhere = folder.path().join("missing").join("model.sparse");
    let error = small().save(&nowhere).unwrap_err();
    assert_matches!(
        error,
        PruneError::Io {
            action: "cannot write",
            ..
        }
    );
    let error = SparseRecord::open(&nowhere).unwrap_err();
    assert_matches!(
        error,
        PruneError::Io {
            action: "cannot read",
            ..
        }
    );
    std::fs::write(&path, b"something else").unwrap();
    let error = SparseRecord::open(&path).unwrap_err().to_string();
    assert_says!(error, "model.sparse", "no sparse record");
}
