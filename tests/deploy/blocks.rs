//! Weights of 8 bits with a scale for each block.

use burn::nn::{Linear, LinearConfig};
use burn_lean::deploy::{Arithmetic, ElementType, EngineConfig, Export, Form};
use burn_lean::quant::{PtqConfig, QatConfig, QuantizedForward, WeightConfig, WeightGranularity};

use crate::judge::{operators, within_a_step};
use crate::quantized::written;
use crate::support::{each_device, tensor, with_numbers};

/// A runtime that fuses a product with what dequantizes bytes for it takes scales of blocks for those of
/// columns, so that codes are stored by columns.
#[test]
fn a_matrix_of_bytes_in_blocks_is_stored_by_columns() {
    each_device(|target| {
        for (bits, bias) in [(8, false), (6, false), (8, true)] {
            let device = &target.device;
            let layer = LinearConfig::new(64, 24).with_bias(bias).init(device);
            let layer: Linear = with_numbers(layer, 5);
            let blocks = WeightGranularity::PerBlock { size: 16 };
            let weight = WeightConfig::int(bits).with_granularity(blocks);
            let config = PtqConfig::new()
                .with_quantize(QatConfig::new().with_weight(weight))
                .with_progress(false);
            // As many rows as blocks, too.
            let x = tensor::<2>(6, [4, 64], device);
            let forward = |layer: &Linear, x| layer.forward(x);
            let (layer, _) = config.quantize_for(layer, || [x.clone()], forward).unwrap();
            let quantized = QuantizedForward::new();
            let expected = quantized.run(&layer, x.clone(), forward).unwrap();

            let export = Export::record(&layer, &x, forward).unwrap();
            written(&export, Form::Qdq, &x, &expected);
            let file = export.to_onnx(Form::Qdq).unwrap();
            assert!(operators(&file).contains(&"Transpose"));
            let codes = file.model.initializers().iter();
            let mut codes = codes.filter(|one| one.element() == ElementType::I8);
            assert_eq!(codes.next().unwrap().shape(), [24, 64]);

            let integer = EngineConfig::new().with_arithmetic(Arithmetic::Integer);
            let engine = integer.compile(export).unwrap();
            within_a_step(engine.run(&x).unwrap(), expected);
        }
    });
}
