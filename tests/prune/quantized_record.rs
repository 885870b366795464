//! One record for a model that is pruned and quantized.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{DType, Device, Tensor};
use burn_lean::prune::{
    LayerKind, Layout, Masks, PruneError, SparseRecord,
    sparse::{Encoding, RecordFault},
};
use burn_lean::quant::{ConvertConfig, QatConfig, WeightConfig};

use crate::support::{each_device, on_each, tensor, values, with_numbers};

const SIDE: usize = 256;

fn dense(device: &Device) -> Linear {
    with_numbers(LinearConfig::new(SIDE, SIDE).init(device), 3)
}

/// Weights only.
fn quantizers(bits: u8) -> QatConfig {
    let config = QatConfig::new().with_weight(WeightConfig::int(bits));
    config.with_activation(None)
}

/// Every tenth weight kept, fake-quantized at so many bits.
fn prepared(bits: u8, device: &Device) -> Linear {
    let mut layout = Layout::new();
    layout.push("weight", [SIDE, SIDE], LayerKind::Linear, 2.0);
    // Not the same columns in every row.
    let support: Vec<usize> = (0..SIDE * SIDE)
        .step_by(10)
        .map(|at| at + at / SIDE % 7 % 6)
        .collect();
    let masks = Masks::from_support(&layout, &support).unwrap();
    let pruned = masks.attach(dense(device)).unwrap().materialize();
    quantizers(bits).prepare(pruned).unwrap()
}

fn converted(bits: u8, device: &Device) -> Linear {
    let prepared = prepared(bits, device);
    ConvertConfig::new().convert(prepared).unwrap().0
}

#[test]
fn codes_of_kept_weights_and_their_places_are_all_that_is_stored() {
    on_each(|device| {
        let model = converted(8, device);
        let record = SparseRecord::from_module(&model).unwrap();
        let bytes = record.to_bytes().unwrap();
        let float = 4 * (SIDE * SIDE + SIDE);
        assert!(
            bytes.len() * 100 <= 15 * float,
            "{} of {float}",
            bytes.len()
        );
        let sizes = record.sizes().unwrap();
        let weight = sizes
            .tensors
            .iter()
            .find(|size| size.path == "weight")
            .unwrap();
        assert_matches!(weight.dtype, DType::QFloat(_));
        assert_ne!(weight.encoding, Encoding::Dense);
        // Small weights may be rounded to 0 as well.
        assert!(
            weight.nonzeros <= SIDE * SIDE / 10 + 1,
            "{}",
            weight.nonzeros
        );
        assert!(weight.nonzeros > SIDE * SIDE / 12, "{}", weight.nonzeros);
        assert!(weight.dense_bytes > SIDE * SIDE);
        assert_eq!(sizes.file_bytes, bytes.len());

        // It loads where the same quantizers are, and computes the same.
        let fresh = quantizers(8)
            .prepare(LinearConfig::new(SIDE, SIDE).init(device))
            .unwrap();
        let record = SparseRecord::from_bytes(&bytes).unwrap();
        let loaded = record.load_into(fresh).unwrap();
        let data = |model: &Linear| model.weight.base().into_data();
        assert_eq!(data(&loaded).as_bytes(), data(&model).as_bytes());
        let x = tensor::<2>(5, [3, SIDE], device);
        assert_eq!(values(loaded.forward(x.clone())), values(model.forward(x)));
    });
}

#[test]
fn codes_of_less_than_a_byte_come_back() {
    each_device(|target| {
        let device = &target.device;
        for bits in [2, 4] {
            let model = converted(bits, device);
            let record = SparseRecord::from_module(&model).unwrap();
            let record = SparseRecord::from_bytes(&record.to_bytes().unwrap()).unwrap();
            let fresh = quantizers(bits).prepare(dense(device)).unwrap();
            let loaded = record.load_into(fresh).unwrap();
            let data = |model: &Linear| model.weight.base().into_data();
            assert_eq!(data(&loaded).as_bytes(), data(&model).as_bytes());
        }
    });
}

/// Codes as one device holds them load on another that holds them in the same way, and are refused
/// by one that does not.
#[test]
fn a_device_that_cannot_hold_the_codes_is_an_error() {
    for bits in [2, 4, 8] {
        each_device(|from| {
            let model = converted(bits, &from.device);
            let record = SparseRecord::from_module(&model).unwrap();
            each_device(|to| {
                let fresh = quantizers(bits).prepare(dense(&to.device)).unwrap();
                let what = format!("{bits} bits, {} to {}", from.name, to.name);
                match record.load_into(fresh) {
                    Ok(loaded) => {
                        let data = |model: &Linear| values(model.weight.base().dequantize());
                        assert_eq!(data(&loaded), data(&model), "{what}");
                    }
                    Err(rejected) => {
                        // In words CPUs hold some of them.
                        let differ = from.is_gpu() != to.is_gpu() || bits < 8;
                        assert!(
                            from.name != to.name && differ,
                            "{what}: {}",
                            rejected.error()
                        );
                        let typed = matches!(rejected.error(), PruneError::RecordDtype { .. });
                        assert!(typed, "{what}: {}", rejected.error());
                    }
                }
            });
        });
    }
}

/// The codes of a record whose header says something else about them.
#[test]
fn codes_that_contradict_their_entry_are_refused() {
    let device = Device::flex();
    let model = converted(8, &device);
    let bytes = SparseRecord::from_module(&model)
        .unwrap()
        .to_bytes()
        .unwrap();
    for (from, to) in [
        ("\"bits\":8", "\"bits\":4"),
        ("\"bits\":8", "\"bits\":3"),
        ("\"bits\":8", "\"bits\":8,\"stored_bits\":3"),
        ("\"bits\":8", "\"bits\":8,\"stored_bits\":4"),
        ("\"count\":65536", "\"count\":65535"),
        ("\"count\":65536", "\"count\":99999999999999"),
        ("\"scales\":", "\"scales\":9"),
    ] {
        let bytes = crate::sparse_record::with_header(&bytes, from, to);
        let record = SparseRecord::from_bytes(&bytes).unwrap();
        let fresh = quantizers(8).prepare(dense(&device)).unwrap();
        let rejected = record.load_into(fresh).unwrap_err();
        let typed = matches!(
            rejected.error(),
            PruneError::SparseRecord {
                fault: RecordFault::Tensor { .. },
                ..
            }
        );
        assert!(typed, "{to}: {}", rejected.error());
    }
}

/// Also on ndarray, which holds each in a byte.
#[test]
fn codes_take_as_many_bits_in_the_file_as_their_format_has() {
    takes_few_bits(&Device::flex());
    #[cfg(feature = "ndarray")]
    #[allow(deprecated)] // `Device::ndarray`.
    takes_few_bits(&Device::ndarray());
}

fn takes_few_bits(device: &Device) {
    let bytes = |bits| {
        let model = converted(bits, device);
        let sizes = SparseRecord::from_module(&model).unwrap().sizes().unwrap();
        let weight = sizes.tensors.into_iter().find(|one| one.path == "weight");
        let weight = weight.unwrap();
        // Without the places of the codes that are not zero.
        (weight.nonzeros, weight.sparse_bytes - weight.nonzeros)
    };
    // Half a byte or a quarter for a code, and a scale for each 128 of a column.
    let scales = 4 * SIDE * SIDE / 128;
    let (nonzeros, rest) = bytes(4);
    assert_eq!(rest, nonzeros.div_ceil(2) + scales);
    let (nonzeros, rest) = bytes(2);
    // A few gaps are longer than a byte says.
    let long = rest - (nonzeros.div_ceil(4) + scales);
    assert!(long < 8, "{long}");
}

#[test]
fn a_tensor_of_zeros_alone_takes_its_scales() {
    let device = Device::flex();
    let mut model = dense(&device);
    model.weight = model.weight.map(|weight| {
        // One weight for a scale to be of.
        let mut values = vec![0.0; SIDE * SIDE];
        values[0] = 1.0;
        Tensor::<1>::from_floats(&values[..], &weight.device()).reshape([SIDE, SIDE])
    });
    let model = quantizers(8).prepare(model).unwrap();
    let (model, _) = ConvertConfig::new().convert(model).unwrap();
    let sizes = SparseRecord::from_module(&model).unwrap().sizes().unwrap();
    let weight = sizes
        .tensors
        .iter()
        .find(|size| size.path == "weight")
        .unwrap();
    assert_eq!(weight.nonzeros, 1);
    assert!(weight.sparse_bytes < weight.dense_bytes - SIDE * SIDE + 8);
}
