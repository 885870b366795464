//! Numbers other than INT8 in a recipe.

use std::collections::HashSet;

use burn::module::Module;
use burn_lean::prune::{Mask, Masks, SparseRecord};
use burn_lean::quant::{NumberFormat, QatConfig, WeightConfig};
use burn_lean::recipe::{Format, Latency, PruneStage, QuantizeStage, Recipe, Run, TrainStage};
use burn_lean::reparam::{ChainReparameterizer, attach, find};

use crate::problem::{self, Net, task};
use crate::support::{each_device, values};

const WIDTH: usize = 24;

/// FP8 and FP4 have floats that a weight, divided by its scale, is one of, trained or not.
#[test]
fn floats_of_8_and_4_bits_run_in_a_recipe() {
    each_device(|target| {
        let device = target.device.clone();
        let task = task(&device);
        for (weights, activations, magnitudes, name) in [
            ("e4m3", "e4m3", 127, "WE4M3AE4M3"),
            ("e5m2", "none", 124, "WE5M2"),
            ("e2m1", "uint8", 8, "WE2M1A8"),
        ] {
            let folder = tempfile::tempdir().unwrap();
            let mut stage =
                QuantizeStage::new(weights.parse().unwrap(), activations.parse().unwrap());
            // docs/upstream/quantized_into_data_debug.md: 4-bit codes of 3 columns on wgpu.
            stage.exclude = vec!["head".into()];
            let recipe = Recipe::new()
                .with_train(TrainStage::new(6, 0.01))
                .with_quantize(stage.with_train(TrainStage::new(1, 1e-3)))
                .with_export(Format::Safetensors);
            let outcome = Run::new(&recipe)
                .with_latency(Latency::None)
                .with_output(folder.path())
                .run(Net::new(WIDTH, &device.clone().autodiff()), &task)
                .unwrap();
            let rows: Vec<_> = outcome.rows().collect();
            assert_eq!(rows[1].stage, name);
            assert!(rows[1].accuracy.unwrap() > 80.0, "{rows:?}");

            // A column has one scale, and no more magnitudes than the format.
            let weights = problem::floats(outcome.last().model.valid().body.weight.val());
            for column in 0..WIDTH {
                let own = weights.iter().skip(column).step_by(WIDTH);
                let found: HashSet<u32> = own.map(|weight| weight.abs().to_bits()).collect();
                assert!(
                    (3..=magnitudes).contains(&found.len()),
                    "{name}: {}",
                    found.len()
                );
            }
            // Less than the weights of one layer in F32.
            let file = format!("{}.safetensors", name.to_lowercase());
            let bytes = folder.path().join(file).metadata().unwrap().len();
            assert!(bytes < 4 * weights.len() as u64, "{name}: {bytes}");
        }
    });
}

/// Burn has no tensors of FP8. Zeros that were held in training are zeros of the rounded values, as in codes.
#[test]
fn pruned_floats_of_8_bits_are_rounded_in_the_record_and_need_no_masks() {
    each_device(|target| {
        let device = target.device.clone();
        let task = task(&device);
        let folder = tempfile::tempdir().unwrap();
        let mut stage = QuantizeStage::new("e4m3".parse().unwrap(), "none".parse().unwrap());
        stage.fold = false;
        // One that is quantized and was not pruned.
        let recipe = Recipe::new()
            .with_prune(PruneStage::new(0.5).with_exclude("head"))
            .with_quantize(stage.with_train(TrainStage::new(1, 1e-3)));
        let outcome = Run::new(&recipe)
            .with_latency(Latency::None)
            .with_output(folder.path())
            .run(Net::new(WIDTH, &device.clone().autodiff()), &task)
            .unwrap();
        let model = outcome.last().model.valid();
        for weight in [&model.body.weight, &model.head.weight] {
            assert_eq!(problem::floats(weight.base()), values(weight.val()));
            assert!(find::<Mask, 2>(weight).is_none());
        }
        let kept = outcome.masks.as_ref().unwrap().get("body.weight").unwrap();
        let weights = values(model.body.weight.val());
        let mut all = weights.iter().zip(kept.kept());
        assert!(all.all(|(weight, kept)| *kept || *weight == 0.0));

        let config = QatConfig::new()
            .with_weight(WeightConfig::new().with_format(NumberFormat::E4M3))
            .with_activation(None);
        let fresh = Net::new(WIDTH, &device);
        let no_masks = Masks::new(Vec::new()).unwrap();
        let chain = ChainReparameterizer::new(
            no_masks.reparameterizer(&fresh).unwrap(),
            config.reparameterizer(&fresh).unwrap(),
        );
        let fresh = attach(fresh, chain).unwrap();
        let file = folder.path().join("pruned-50-we4m3.model");
        let loaded = SparseRecord::open(file).unwrap().load_into(fresh).unwrap();
        assert_eq!(values(loaded.body.weight.val()), weights);
        assert_eq!(
            values(loaded.head.weight.val()),
            values(model.head.weight.val())
        );
    });
}
