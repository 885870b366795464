//! Pruning layer by layer where a BatchNorm keeps its statistics.

use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use burn_lean::prune::{Budget, Effort, Pruner};

use crate::layerwise::features;
use crate::support::{on_each, parameters, tensor, values, with_numbers};

/// The first layer's weights were trained with the statistics that are there, whatever the examples have.
#[test]
fn a_batch_norm_before_all_pruned_layers_stays_as_it_was_trained() {
    on_each(|device| {
        let norm = BatchNormConfig::new(4).init(device);
        let layer: Linear = with_numbers(LinearConfig::new(4, 4).init(device), 5);
        let before = parameters(&norm);
        let model = (norm, layer);
        let forward = |m: &(BatchNorm, Linear), x: Tensor<2>| m.1.forward(m.0.forward(x));
        let inputs = [1, 2].map(|seed| tensor::<2>(seed, [200, 4], device) * 5.0 + 5.0);
        let expected = values(forward(&model, inputs[0].clone()));
        let mut pruner = Pruner::new(Budget::Keep(15)).with_effort(Effort::Quick);
        pruner.candidates = false;
        pruner.ridge = 1e-6;
        let pruned = pruner.prune(model, forward, inputs.clone()).unwrap();
        assert_eq!(pruned.report.recalibrated, 0);
        assert_eq!(parameters(&pruned.model.0), before);
        let found = values(forward(&pruned.model, inputs[0].clone()));
        let pairs = expected.iter().zip(&found);
        let error: f32 = pairs.map(|(x, y)| (x - y).powi(2)).sum();
        let power: f32 = expected.iter().map(|x| x.powi(2)).sum();
        assert!(error < 0.05 * power, "{error} of {power}");
    });
}

/// Two inputs of different scale go through one layer and one BatchNorm, or copies of it: statistics of the
/// second call would be wrong for the first.
#[test]
fn a_batch_norm_that_is_called_twice_keeps_its_statistics() {
    type Siamese = (Linear, Vec<BatchNorm>);
    let device = Device::flex();
    let norm = with_numbers(BatchNormConfig::new(4).init(&device), 6);
    let layer: Linear = with_numbers(LinearConfig::new(6, 4).init(&device), 5);
    for second in [0, 1] {
        let model: Siamese = (layer.clone(), vec![norm.clone(), norm.clone()]);
        let before = parameters(&norm);
        let forward = |m: &Siamese, x: Tensor<2>| {
            let hidden = [x.clone(), x * 10.0 + 50.0].map(|x| m.0.forward(x));
            let [one, other] = hidden;
            let sides = vec![m.1[0].forward(one), m.1[second].forward(other)];
            Tensor::cat(sides, 1)
        };
        let mut pruner = Pruner::new(Budget::Sparsity(0.5));
        for tuning in [0, 2] {
            pruner.tuning = Some(tuning);
            let inputs = features(3, 40, 6, &device);
            let pruned = pruner.prune(model.clone(), forward, inputs).unwrap();
            assert_eq!(pruned.report.recalibrated, 0);
            let statistics = |model: &BatchNorm| {
                let both = [&model.running_mean, &model.running_var];
                both.map(|one| values(one.value_sync()))
            };
            for copy in &pruned.model.1 {
                assert_eq!(statistics(copy), statistics(&norm), "{second} {tuning}");
            }
        }
        assert_eq!(parameters(&norm), before);
    }
}
