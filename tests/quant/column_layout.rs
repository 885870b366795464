//! Linear layers in column layout: prepared and converted records load again.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig, LinearLayout};
use burn::store::ModuleRecord;
use burn::tensor::{DType, Device};
use burn_lean::quant::{
    ConvertConfig, ForwardQ, QatConfig, Unsupported, WeightConfig, WeightGranularity, calibrate,
    load_record, load_safetensors,
    model::{float_record, load_float_record},
    quantized_weights, save_safetensors,
};

use crate::support::{each_device, tensor, values};

/// Not square, so that the two layouts differ in shape.
fn column(seed: u64, device: &Device) -> Linear {
    let layer = LinearConfig::new(16, 8)
        .with_layout(LinearLayout::Col)
        .init(device);
    let bias = layer
        .bias
        .map(|bias| bias.map(|_| tensor(seed + 1, [8], device)));
    Linear {
        weight: layer.weight.map(|_| tensor(seed, [16, 8], device)),
        bias,
    }
}

fn config(weight: WeightConfig) -> QatConfig {
    QatConfig::new().with_weight(weight)
}

fn prepared(seed: u64, weight: &WeightConfig, device: &Device) -> Linear {
    let layer = config(weight.clone())
        .prepare(column(seed, device))
        .unwrap();
    let x = tensor::<2>(9, [4, 16], device);
    calibrate(layer, |layer| drop(layer.forward_q(x))).unwrap()
}

fn reread(layer: &Linear) -> ModuleRecord {
    let bytes = layer.clone().into_record().into_bytes().unwrap();
    ModuleRecord::from_bytes(bytes).unwrap()
}

fn output(layer: &Linear, device: &Device) -> Vec<f32> {
    values(layer.forward_q(tensor::<2>(10, [3, 16], device)))
}

fn weights() -> [WeightConfig; 3] {
    [
        WeightConfig::int(8),
        WeightConfig::int(4).with_granularity(WeightGranularity::PerTensor),
        WeightConfig::int(4).with_granularity(WeightGranularity::PerBlock { size: 8 }),
    ]
}

#[test]
fn prepared_and_converted_records_load_into_a_prepared_model() {
    each_device(|target| {
        for weight in weights() {
            let device = &target.device;
            let layer = prepared(1, &weight, device);
            let expected = output(&layer, device);
            let loaded = load_record(prepared(3, &weight, device), reread(&layer)).unwrap();
            assert_eq!(output(&loaded, device), expected, "{weight:?}");

            let converter = ConvertConfig::new().with_unsupported(Unsupported::KeepFakeQuantized);
            let (converted, _) = converter.convert(layer).unwrap();
            assert_eq!(output(&converted, device), expected, "{weight:?}");
            let record = reread(&converted);
            let loaded = load_record(prepared(3, &weight, device), record).unwrap();
            assert_eq!(output(&loaded, device), expected, "{weight:?}");
            assert_eq!(
                quantized_weights(&loaded).unwrap(),
                quantized_weights(&converted).unwrap()
            );
            if !target.is_gpu() {
                let dtype = loaded.weight.base().dtype();
                assert!(matches!(dtype, DType::QFloat(_)), "{weight:?} {dtype:?}");
            }
        }
    });
}

#[test]
fn a_newly_prepared_layer_loads_with_burns_own_call() {
    let device = Device::flex();
    let weight = WeightConfig::int(8);
    let layer = prepared(1, &weight, &device);
    let fresh = config(weight).prepare(column(3, &device)).unwrap();
    let loaded = fresh.try_load_record(reread(&layer)).unwrap();
    assert_eq!(output(&loaded, &device), output(&layer, &device));
}

#[test]
fn float_records_and_files_go_from_layout_to_layout_as_in_burn() {
    let device = Device::flex();
    let weight = WeightConfig::int(8);
    let layer = prepared(1, &weight, &device);
    // Not its outputs: a transposed matrix is multiplied in another order.
    let float = |layer: &Linear| {
        let bias = layer.bias.as_ref().map(|bias| values(bias.val()));
        (values(layer.weight.base()), bias)
    };
    let loaded = load_float_record(prepared(3, &weight, &device), float_record(&layer)).unwrap();
    assert_eq!(float(&loaded), float(&layer));
    // A layer that was never used, as Burn loads it.
    let plain = LinearConfig::new(16, 8)
        .with_layout(LinearLayout::Col)
        .init(&device);
    let plain = plain.try_load_record(float_record(&layer)).unwrap();
    assert_eq!(float(&plain), float(&layer));

    let path = tempfile::tempdir().unwrap();
    let path = path.path().join("column.safetensors");
    save_safetensors(&layer, &path).unwrap();
    let loaded = load_safetensors(prepared(3, &weight, &device), &path).unwrap();
    assert_eq!(output(&loaded, &device), output(&layer, &device));
}
