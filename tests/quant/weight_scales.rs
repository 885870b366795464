//! Scales that were chosen elsewhere.

use std::collections::HashMap;

use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, TensorData};
use burn_lean::quant::{
    ConvertConfig, ForwardQ, Mapping, NumberFormat, ObserverConfig, QatConfig, QuantError,
    WeightConfig, WeightGranularity, WeightQuantizer, load_record,
    qat::merge_observers,
    quantized_weights,
    rounding::{GroupParams, set_weight_qparams},
};

use crate::support::{on_each, on_tracked, tensor, values, with_numbers};

const SHAPE: [usize; 2] = [64, 32];

fn config() -> QatConfig {
    QatConfig::new()
        .with_weight(WeightConfig::int(8))
        .with_activation(None)
}

fn linear(device: &Device) -> Linear {
    with_numbers(LinearConfig::new(SHAPE[0], SHAPE[1]).init(device), 5)
}

/// Scales that no range of F32 numbers gives back: (s · 127) / 127 is another number.
fn awkward() -> Vec<f32> {
    let is_lost = |scale: &f32| (scale * 127.0) / 127.0 != *scale;
    let scales: Vec<f32> = (0..)
        .map(|at| 1.5e-2 + 1e-7 * at as f32)
        .filter(is_lost)
        .take(32)
        .collect();
    scales
}

fn of(path: &str, scales: Vec<f32>) -> HashMap<String, GroupParams> {
    HashMap::from([(path.to_string(), scales.into())])
}

#[test]
fn scales_are_kept_bit_by_bit_through_records_and_conversion() {
    on_each(|device| {
        let scales = awkward();
        let prepared = config().prepare(linear(device)).unwrap();
        let model = set_weight_qparams(prepared, &of("weight", scales.clone())).unwrap();
        let fake = values(model.weight.val());
        let fresh = config().prepare(linear(device)).unwrap();
        let loaded = load_record(fresh, model.clone().into_record()).unwrap();
        let (converted, _) = ConvertConfig::new().convert(model.clone()).unwrap();
        for model in [model, loaded, converted] {
            let (_, weight) = quantized_weights(&model).unwrap().remove(0);
            assert_eq!(weight.scale(), scales);
            let decoded = weight.codes().iter().enumerate();
            let decoded: Vec<f32> = decoded
                .map(|(at, code)| f32::from(*code) * scales[at % SHAPE[1]])
                .collect();
            assert_eq!(decoded, fake);
        }
    });
}

#[test]
fn scales_of_weights_stay_in_training_whatever_their_observer() {
    on_tracked(|device| {
        let linear = LinearConfig::new(16, 2).with_bias(false);
        let mut linear: Linear = linear.init(&device);
        // All the codes of INT4, of which the lowest is wider than what the mapping gives a range.
        let numbers: Vec<f32> = (0..32).map(|at| 0.1 * ((at / 2) as f32 - 8.0)).collect();
        linear.weight = Param::from_data(TensorData::new(numbers, [16, 2]), &device);
        let weight = WeightConfig::new()
            .with_format(NumberFormat::int(4))
            .with_observer(ObserverConfig::MinMax);
        let prepared = config().with_weight(weight).prepare(linear).unwrap();
        let model = set_weight_qparams(prepared, &of("weight", vec![0.1; 2])).unwrap();
        let scales = |model: &Linear| {
            let quantizer = WeightQuantizer::of(&model.weight).unwrap();
            values(quantizer.weight.qparams().unwrap().scale)
        };
        model.forward_q(tensor::<2>(1, [3, 16], &device));
        assert_eq!(scales(&model), [0.1; 2]);
        let replica = model.clone();
        let merged = merge_observers(model, &[replica]).unwrap();
        assert_eq!(scales(&merged), [0.1; 2]);
    });
}

#[test]
fn what_does_not_fit_is_refused_with_the_model_as_it_was() {
    let device = Device::flex();
    let refused = |config: QatConfig, path: &str, scales: Vec<f32>| {
        let model = config.prepare(linear(&device)).unwrap();
        let before = values(model.weight.val());
        let (model, error) = set_weight_qparams(model, &of(path, scales))
            .unwrap_err()
            .into_parts();
        assert_eq!(values(model.weight.val()), before);
        error
    };
    let located = |error: QuantError| match error {
        QuantError::Parameter { path, error } => {
            assert_eq!(path, "weight");
            *error
        }
        other => other,
    };
    let unknown = refused(config(), "wheight", vec![0.1; 32]);
    assert_matches!(unknown, QuantError::UnknownParameter { .. });
    let bias = refused(config(), "bias", vec![0.1; 32]);
    assert_matches!(bias, QuantError::UnsupportedLayer { .. });
    let blocks = WeightConfig::int(8).with_granularity(WeightGranularity::PerBlock { size: 16 });
    let few = located(refused(
        config().with_weight(blocks),
        "weight",
        vec![0.1; 32],
    ));
    let expected = QuantError::LengthMismatch {
        what: "scales".into(),
        expected: 128,
        found: 32,
    };
    assert_eq!(few.to_string(), expected.to_string());
    for bad in [0.0, -1.0, f32::NAN, f32::INFINITY, 2.9e-39] {
        let mut scales = vec![0.1; 32];
        scales[7] = bad;
        let error = located(refused(config(), "weight", scales));
        assert_matches!(error, QuantError::InvalidScale { .. });
    }
    let affine = WeightConfig::int(8).with_mapping(Mapping::Affine);
    let affine = located(refused(
        config().with_weight(affine),
        "weight",
        vec![0.1; 32],
    ));
    assert_matches!(affine, QuantError::UnsupportedScheme { .. });
}
