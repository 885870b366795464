//! Quantized embeddings: floats where they are run, codes in files.

use burn::module::{Module, Param};
use burn::nn::{Embedding, EmbeddingConfig};
use burn::tensor::activation::softmax;
use burn::tensor::{Device, Int, Tensor};
use burn_lean::deploy::{ElementType, EngineConfig, Execution, Export, Form, Quantization};
use burn_lean::quant::{
    Granularity, Mapping, NumberFormat, PtqConfig, QatConfig, QuantParams, QuantizedForward,
    QuantizedTensor, Scheme, WeightConfig,
};

use crate::engine::codes;
use crate::judge::{close, operators, within_a_step};
use crate::quantized::written;
use crate::support::{each_device, scratch, tensor, values, with_numbers};

/// A table of 16 words with 8 numbers each, and some of them.
fn words(device: &Device) -> (Embedding, Tensor<2, Int>) {
    let embedding = with_numbers(EmbeddingConfig::new(16, 8).init(device), 3);
    let tokens = Tensor::from_ints([[3, 15, 0], [7, 7, 1]], device);
    (embedding, tokens)
}

fn forward(embedding: &Embedding, tokens: Tensor<2, Int>) -> Tensor<3> {
    embedding.forward(tokens)
}

#[test]
fn a_quantized_embedding_is_floats_where_it_is_run_and_the_reports_say_so() {
    let device = Device::flex();
    let (mut embedding, tokens) = words(&device);
    let weight = codes(&embedding.weight.val(), NumberFormat::int8());
    let export = Export::record(&embedding, &tokens, forward).unwrap();
    let quantization = Quantization::none().with_weight("weight", weight.clone());
    let export = export.with_quantization(quantization);
    for (form, execution, bytes) in [
        (Form::Qdq, Execution::Qdq, 16 * 8),
        (Form::Float, Execution::DequantizedOnce, 4 * 16 * 8),
    ] {
        let layers = export.to_onnx(form).unwrap().layers;
        assert_eq!(layers.len(), 1);
        let layer = &layers[0];
        assert_eq!(
            (layer.path.as_str(), layer.execution, layer.weight_bytes),
            ("weight", execution, bytes)
        );
    }
    let engine = EngineConfig::new().compile(export).unwrap();
    let layer = engine.report().layers.remove(0);
    assert_eq!(layer.execution, Execution::DequantizedOnce);
    assert!(layer.reason.unwrap().contains("rows are taken"));
    embedding.weight = Param::from_tensor(weight.dequantize(&device).unwrap());
    close(engine.run(&tokens).unwrap(), forward(&embedding, tokens));
}

/// Of a table, a row and a column each scale: what is dequantized are rows, or the table.
#[test]
fn a_file_has_the_codes_of_a_quantized_embedding() {
    let device = Device::flex();
    let (embedding, tokens) = words(&device);
    let rows = ["Gather", "DequantizeLinear"];
    let table = ["DequantizeLinear", "Gather"];
    for (granularity, bits, expected) in [
        (Granularity::PerTensor, 8, rows.to_vec()),
        (
            Granularity::PerChannel { axis: 0 },
            8,
            // Codes, scales and zero points.
            ["Gather", "Gather", rows[0], rows[1]].to_vec(),
        ),
        (Granularity::PerChannel { axis: 1 }, 8, table.to_vec()),
        (Granularity::PerTensor, 4, table.to_vec()),
    ] {
        let scheme = Scheme::symmetric(NumberFormat::int(bits)).with_granularity(granularity);
        let qparams = QuantParams::of(&embedding.weight.val(), &scheme).unwrap();
        let weight = QuantizedTensor::quantize(&embedding.weight.val(), &qparams, &scheme).unwrap();
        let export = Export::record(&embedding, &tokens, forward).unwrap();
        let quantization = Quantization::none().with_weight("weight", weight.clone());
        let exported = export
            .with_quantization(quantization)
            .to_onnx(Form::Qdq)
            .unwrap();
        let mut found = operators(&exported);
        found.retain(|operator| table.contains(operator));
        assert_eq!(found, expected);
        // The table is there once, as codes, with its scales.
        let initializers = exported.model.initializers();
        let tables = initializers.iter().filter(|one| one.shape() == [16, 8]);
        let tables: Vec<_> = tables.map(|one| one.bytes().to_vec()).collect();
        let bytes: Vec<u8> = match bits {
            8 => weight
                .codes()
                .iter()
                .map(|code| (*code + 128) as u8)
                .collect(),
            _ => {
                let pairs = weight.codes().chunks(2);
                let byte = |pair: &[i16]| (pair[0] & 15) as u8 | ((pair[1] & 15) << 4) as u8;
                pairs.map(byte).collect()
            }
        };
        assert_eq!(tables, [bytes]);
        let scales: Vec<u8> = weight
            .scale()
            .iter()
            .flat_map(|s| s.to_le_bytes())
            .collect();
        assert!(initializers.iter().any(|one| one.bytes() == scales));
        assert_eq!(exported.layers[0].weight_bytes, 16 * 8 * bits as usize / 8);
    }
}

/// As a forward pass that has no `Embedding` looks words up.
#[test]
fn rows_that_are_selected_are_taken_of_codes() {
    let forward = |table: &Embedding, ids: Tensor<1, Int>| table.weight.val().select(0, ids);
    each_device(|target| {
        let device = &target.device;
        let (mut table, _) = words(device);
        let ids = Tensor::<1, Int>::from_ints([3, 15, 0, 7, 7], device);
        let floats = table.weight.val();
        for granularity in [
            Granularity::PerTensor,
            Granularity::PerChannel { axis: 0 },
            Granularity::PerChannel { axis: 1 },
        ] {
            let what = format!("{granularity:?}");
            let scheme = Scheme::symmetric(NumberFormat::int8()).with_granularity(granularity);
            let qparams = QuantParams::of(&floats, &scheme).unwrap();
            let weight = QuantizedTensor::quantize(&floats, &qparams, &scheme).unwrap();
            table.weight = Param::from_tensor(weight.dequantize(device).unwrap());
            let expected = forward(&table, ids.clone());
            let export = Export::record(&table, &ids, forward).unwrap();
            let quantization = Quantization::none().with_weight("weight", weight);
            let export = export.with_quantization(quantization);
            let file = export.to_onnx(Form::Qdq).unwrap();
            assert_eq!(file.layers.len(), 1, "{what}");
            let layer = &file.layers[0];
            assert_eq!(
                (layer.path.as_str(), layer.execution, layer.weight_bytes),
                ("weight", Execution::Qdq, 16 * 8),
                "{what}"
            );
            // No codes and indices are turned into other shapes.
            assert!(!operators(&file).contains(&"Reshape"), "{what}");
            written(&export, Form::Qdq, &ids, &expected);
            let (_folder, path) = scratch("table.onnx");
            file.model.save(&path).unwrap();
            let opened = EngineConfig::new().open(&path).unwrap();
            let found = opened.run(vec![ids.clone().into_data()]).unwrap().remove(0);
            assert_near!(found.iter::<f32>(), values(expected.clone()), 1e-6);
            let engine = EngineConfig::new().compile(export).unwrap();
            let layer = engine.report().layers.remove(0);
            assert_eq!(layer.execution, Execution::DequantizedOnce, "{what}");
            close(engine.run(&ids).unwrap(), expected);
        }
    });
}

/// Scales of blocks of a row are taken with the row, or the table is dequantized: codes of 4 bits are not taken.
#[test]
fn a_file_has_the_codes_of_an_embedding_with_blocks_in_its_rows() {
    let device = Device::flex();
    let (mut embedding, tokens) = words(&device);
    let blocks = Granularity::PerBlock {
        extents: vec![1, 4],
    };
    let floats = embedding.weight.val();
    for bits in [4, 8] {
        for mapping in [Mapping::Symmetric, Mapping::Affine] {
            let format = match mapping {
                Mapping::Affine => NumberFormat::uint(bits),
                _ => NumberFormat::int(bits),
            };
            let scheme = Scheme::symmetric(format).with_mapping(mapping);
            let scheme = scheme.with_granularity(blocks.clone());
            let qparams = QuantParams::of(&floats, &scheme).unwrap();
            let weight = QuantizedTensor::quantize(&floats, &qparams, &scheme).unwrap();
            embedding.weight = Param::from_tensor(weight.dequantize(&device).unwrap());
            let export = Export::record(&embedding, &tokens, forward).unwrap();
            let quantization = Quantization::none().with_weight("weight", weight);
            let export = export.with_quantization(quantization);
            let layer = export.to_onnx(Form::Qdq).unwrap().layers.remove(0);
            assert_eq!(
                (layer.execution, layer.weight_bytes, layer.reason),
                (Execution::Qdq, 16 * 8 * usize::from(bits) / 8, None)
            );
            let expected = forward(&embedding, tokens.clone());
            written(&export, Form::Qdq, &tokens, &expected);
        }
    }
}

/// A table by which weights over its rows are multiplied.
#[derive(Module, Debug)]
struct Soft {
    table: Embedding,
}

impl Soft {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        softmax(x, 1).matmul(self.table.weight.val())
    }
}

/// A runtime that fuses a product with what dequantizes its operands takes scales of rows for those of columns,
/// or fails where there are not as many, so that no such node is there.
#[test]
fn a_matrix_with_scales_of_its_rows_is_multiplied_by_them() {
    each_device(|target| {
        for (rows, mapping) in [
            (16, Mapping::Symmetric),
            (8, Mapping::Symmetric),
            (8, Mapping::Affine),
        ] {
            let device = &target.device;
            let table = with_numbers(EmbeddingConfig::new(rows, 8).init(device), 3);
            let x = tensor::<2>(4, [5, rows], device);
            let forward = |net: &Soft, x| net.forward(x);
            let weight = WeightConfig::int(8).with_mapping(mapping);
            let config = PtqConfig::new()
                .with_quantize(QatConfig::new().with_weight(weight))
                .with_progress(false);
            let net = Soft { table };
            let (net, _) = config.quantize_for(net, || [x.clone()], forward).unwrap();
            let expected = QuantizedForward::new()
                .run(&net, x.clone(), forward)
                .unwrap();
            let export = Export::record(&net, &x, forward).unwrap();
            written(&export, Form::Qdq, &x, &expected);
            let file = export.to_onnx(Form::Qdq).unwrap();
            assert_eq!(file.layers[0].execution, Execution::Qdq);
            // Those of activations alone.
            let nodes = operators(&file);
            let count = |operator| nodes.iter().filter(|one| **one == operator).count();
            assert_eq!(count("DequantizeLinear"), count("QuantizeLinear"));
            let bytes = file.model.initializers().iter();
            let mut bytes = bytes.filter(|one| one.element() == ElementType::U8);
            assert!(bytes.any(|one| one.shape() == [rows, 8]));
            let engine = EngineConfig::new().compile(export).unwrap();
            within_a_step(engine.run(&x).unwrap(), expected);
        }
    });
}
