//! A recipe from training to files, on every device.

use burn::module::Module;
use burn::nn::{Initializer, Linear, LinearConfig};
use burn::optim::SgdConfig;
use burn::tensor::{Device, Int, Tensor};
use burn_lean::amp::Fallback;
use burn_lean::prune::SparseRecord;
use burn_lean::quant::{QatConfig, load_safetensors, quantizers};
use burn_lean::recipe::{
    ComputeDtype, Format, Latency, Progress, PruneMethod, PruneStage, QuantizeStage, RateSchedule,
    Recipe, RecipeError, Run, ShrinkStage, Sparsity, Task, TrainStage,
};
use burn_lean::reparam::each_float;
use std::cell::Cell;
use std::ops::ControlFlow;

use crate::problem::{self, Net, batches, done, task};
use crate::support::{each_device, tensor, values};

pub(crate) fn int8() -> QuantizeStage {
    QuantizeStage::new("int8".parse().unwrap(), "uint8".parse().unwrap())
}

/// All stages, short.
fn whole() -> Recipe {
    let mut int4 = QuantizeStage::new("int4".parse().unwrap(), "uint8".parse().unwrap());
    // Burn cannot read back 4-bit codes of 3 columns on wgpu while it checks itself
    // (docs/upstream/quantized_into_data_debug.md).
    int4.exclude = vec!["head".into()];
    Recipe::new()
        .with_dtype(ComputeDtype::Auto)
        .with_train(TrainStage::new(6, 0.01))
        .with_prune(PruneStage::new(0.8).with_tune(TrainStage::new(3, 3e-3)))
        .with_quantize(int8().with_train(TrainStage::new(2, 1e-3)))
        .with_quantize(int4)
}

pub(crate) fn floats<M: Module>(model: &M) -> Vec<(String, Vec<f32>)> {
    let mut floats = Vec::new();
    each_float(&model.valid(), |at, float| {
        floats.push((at.path(), float.values()));
    });
    floats
}

#[test]
fn every_stage_leaves_a_row_a_model_and_a_file() {
    each_device(|target| {
        let device = target.device.clone();
        let task = task(&device);
        let folder = tempfile::tempdir().unwrap();
        let recipe = whole()
            .with_export(Format::Record)
            .with_export(Format::Safetensors)
            .with_export(Format::Onnx);
        let given = Net::new(24, &device.clone().autodiff());
        let before = floats(&given);
        let outcome = Run::new(&recipe)
            .with_output(folder.path())
            .run(given.clone(), &task)
            .unwrap();
        // Running statistics, too.
        assert_eq!(floats(&given), before);

        let rows: Vec<_> = outcome.rows().collect();
        let names: Vec<&str> = rows.iter().map(|row| row.stage.as_str()).collect();
        assert_eq!(
            names[1..],
            ["pruned 80 %", "pruned 80 %, W8A8", "pruned 80 %, W4A8"]
        );
        assert!(
            ["FP32", "AMP BF16", "AMP F16"].contains(&names[0]),
            "{}",
            names[0]
        );
        // One of three classes by chance.
        assert!(rows[0].accuracy.unwrap() > 60.0, "{rows:?}");
        assert!(
            rows[1..].iter().all(|row| row.bytes < rows[0].bytes),
            "{rows:?}"
        );
        assert!(rows.iter().all(|row| row.latency_ms.unwrap() > 0.0));

        // Zeros hold through training with fake quantization and through conversion.
        let masks = outcome.masks.as_ref().unwrap();
        assert!((masks.sparsity() - 0.8).abs() < 0.01);
        for stage in &outcome.stages[1..] {
            for mask in masks.parameters() {
                let floats = floats(&stage.model);
                let (_, weights) = floats.iter().find(|(path, _)| path == mask.path()).unwrap();
                let pruned = weights.iter().zip(mask.kept()).filter(|(_, kept)| !**kept);
                assert!(
                    pruned.into_iter().all(|(weight, _)| *weight == 0.0),
                    "{}",
                    mask.path()
                );
            }
        }
        for (row, name) in rows.iter().zip([
            slug(names[0]),
            "pruned-80".into(),
            "pruned-80-w8a8".into(),
            "pruned-80-w4a8".into(),
        ]) {
            let size = folder
                .path()
                .join(format!("{name}.model"))
                .metadata()
                .unwrap()
                .len();
            assert_eq!(size, row.bytes, "{name}");
        }
        for extension in ["bpk", "safetensors", "onnx"] {
            for name in ["w8a8", "w4a8"] {
                let path = folder.path().join(format!("pruned-80-{name}.{extension}"));
                assert!(path.metadata().unwrap().len() > 100, "{}", path.display());
            }
        }
        // The file loads where the same quantizers are, and computes the same.
        let path = folder.path().join("pruned-80-w8a8.safetensors");
        let fresh = QatConfig::new().prepare(Net::new(24, &device)).unwrap();
        let loaded = load_safetensors(fresh, &path).unwrap();
        let (x, _) = batches(0, &device).remove(0);
        let last = &outcome.stages[2].model;
        assert_eq!(
            problem::floats(last.valid().body.weight.val()),
            problem::floats(loaded.body.weight.val())
        );
        assert_eq!(
            values(last.valid().forward(x.clone())),
            values(loaded.forward(x))
        );
    });
}

fn slug(name: &str) -> String {
    name.to_lowercase().replace(' ', "-")
}

/// Codes of the kept weights and their places, in one file.
#[test]
fn one_record_of_a_pruned_and_quantized_model_has_fifteen_hundredths_of_the_bytes() {
    let device = Device::flex();
    let task = task(&device);
    let recipe = Recipe::new()
        .with_prune(PruneStage::new(0.9))
        .with_quantize(int8());
    let given = Net::new(400, &device.clone().autodiff());
    let outcome = done(&recipe, given, &task);
    let rows: Vec<_> = outcome.rows().collect();
    assert_eq!(rows[0].stage, "dense");
    assert!(rows[2].bytes * 100 <= 15 * rows[0].bytes, "{rows:?}");
    assert_eq!(rows[2].latency_ms, None);

    let model = &outcome.last().model;
    let bytes = SparseRecord::from_module(&model.valid())
        .unwrap()
        .to_bytes()
        .unwrap();
    // Up to the digits of the identities of parameters.
    assert!((bytes.len() as u64).abs_diff(rows[2].bytes) < 200);
    let fresh = QatConfig::new().prepare(Net::new(400, &device)).unwrap();
    let loaded = SparseRecord::from_bytes(&bytes).unwrap().load_into(fresh);
    // The ranges of calibration are in the record, the observers in the config of PTQ.
    let loaded = match loaded {
        Ok(loaded) => loaded,
        Err(error) => panic!("{error}"),
    };
    assert_eq!(quantizers(&loaded).len(), quantizers(model).len());
    assert_eq!(
        problem::floats(loaded.body.weight.val()),
        problem::floats(model.valid().body.weight.val())
    );
}

#[test]
fn every_way_to_prune_and_to_learn_from_the_dense_model_runs() {
    let device = Device::flex();
    let task = task(&device);
    let distilled = |epochs| {
        let distillation = burn_lean::recipe::Distillation::new(2.0, 0.5).with_features(0.1);
        TrainStage::new(epochs, 3e-3)
            .with_schedule(RateSchedule::Cosine)
            .with_distillation(distillation)
    };
    let dense = Recipe::new().with_train(TrainStage::new(2, 0.01));
    for (method, stages) in [
        (PruneMethod::Layerwise, None),
        (PruneMethod::Chita, Some(2)),
        (PruneMethod::Gradual, Some(2)),
    ] {
        let mut prune = PruneStage::new(0.7)
            .with_method(method)
            .with_exclude("conv")
            .with_tune(distilled(1));
        if let Some(stages) = stages {
            prune = prune.with_stages(stages).with_samples(32);
        }
        let recipe = dense.clone().with_prune(prune);
        let outcome = done(&recipe, Net::new(16, &device.clone().autodiff()), &task);
        let masks = outcome.masks.unwrap();
        assert!((masks.sparsity() - 0.7).abs() < 0.01, "{method:?}");
        assert!(masks.get("conv.weight").is_none(), "{method:?}");
        assert!(masks.get("body.weight").is_some(), "{method:?}");
    }
}

/// Half of every four weights along the inputs of an output, also after training and in codes.
#[test]
fn a_pattern_holds_to_the_end() {
    let device = Device::flex();
    let task = task(&device);
    for method in [PruneMethod::Layerwise, PruneMethod::Chita] {
        let prune = PruneStage::new(Sparsity::NOfM { n: 2, m: 4 })
            .with_method(method)
            .with_tune(TrainStage::new(1, 3e-3));
        let recipe = Recipe::new()
            .with_train(TrainStage::new(2, 0.01))
            .with_prune(prune)
            .with_quantize(int8());
        let outcome = done(&recipe, Net::new(16, &device.clone().autodiff()), &task);
        let names: Vec<&str> = outcome.rows().map(|row| row.stage.as_str()).collect();
        assert_eq!(names[1..], ["pruned 2:4", "pruned 2:4, W8A8"]);
        for stage in &outcome.stages[1..] {
            let weight = stage.model.body.weight.val();
            let [inputs, outputs] = weight.dims();
            // Inputs are the first axis of a linear layer.
            let blocks = weight.swap_dims(0, 1).reshape([outputs * inputs / 4, 4]);
            let nonzeros = blocks.not_equal_elem(0.0).int().sum_dim(1);
            assert!(nonzeros.max().into_scalar::<i64>() <= 2, "{method:?}");
        }
    }
}

/// Fake quantization acts on activations in F32 training, too: ranges are observed.
#[test]
fn quantizers_act_in_every_dtype() {
    let device = Device::flex();
    let task = task(&device);
    for dtype in [ComputeDtype::F32, ComputeDtype::F16, ComputeDtype::Bf16] {
        let recipe = Recipe::new()
            .with_dtype(dtype)
            .with_fallback(Fallback::Emulate)
            .with_quantize(int8().with_train(TrainStage::new(1, 1e-3)));
        let outcome = done(&recipe, Net::new(16, &device.clone().autodiff()), &task);
        let found = quantizers(&outcome.last().model);
        assert_eq!(found.len(), 6);
        assert!(
            found.iter().all(|one| one.quantizer.is_observed()),
            "{dtype:?}"
        );
    }
}

#[test]
fn exclude_means_the_same_in_every_stage() {
    let device = Device::flex();
    let task = task(&device);
    for text in ["ead", "h*d.w", "**ad"] {
        let mut quantize = int8();
        quantize.exclude = vec![text.into()];
        let recipe = Recipe::new()
            .with_shrink(ShrinkStage::new(0.7).with_exclude(text))
            .with_prune(PruneStage::new(0.5).with_exclude(text))
            .with_quantize(quantize);
        let outcome = done(&recipe, Net::new(24, &device.clone().autodiff()), &task);
        let small = &outcome.stages[1].model;
        assert!(small.conv.weight.dims()[0] < 4, "{text}");
        assert_eq!(small.body.weight.dims()[1], 24, "{text}");
        let masks = outcome.masks.as_ref().unwrap();
        assert!(masks.get("body.weight").is_some(), "{text}");
        assert!(masks.get("head.weight").is_none(), "{text}");
        // Weight and input of two layers.
        assert_eq!(quantizers(&outcome.last().model).len(), 4, "{text}");
    }
}

/// Another pass may have other batches than the first one.
#[test]
fn a_loader_whose_batches_become_small_or_none_ends_the_stage() {
    let device = Device::flex();
    let mut prune = PruneStage::new(0.5)
        .with_method(PruneMethod::Chita)
        .with_samples(8);
    prune.batch_size = Some(16);
    let recipe = Recipe::new().with_prune(prune);
    for (left, said) in [(4usize, "a batch of 4 examples"), (0, "ended after 0 of 8")] {
        let prunes = Cell::new(false);
        let task = Task::new(
            |model: &Net, x: Tensor<4>| model.forward(x),
            |logits: Tensor<2>, _: Tensor<1, Int>| logits.square().mean(),
            |seed| -> Vec<(Tensor<4>, Tensor<1, Int>)> {
                let all = batches(seed, &device).into_iter();
                match (prunes.get(), left) {
                    (false, _) => all.collect(),
                    (true, 0) => Vec::new(),
                    (true, left) => {
                        let cut = |(x, labels): (Tensor<4>, Tensor<1, Int>)| {
                            (x.slice([0..left]), labels.slice([0..left]))
                        };
                        all.map(cut).collect()
                    }
                }
            },
        );
        let rejected = Run::new(&recipe)
            .with_latency(Latency::None)
            .with_progress(|progress| {
                if let Progress::Started { stage } = progress {
                    prunes.set(stage.starts_with("pruned"));
                }
                ControlFlow::Continue(())
            })
            .run(Net::new(16, &device.clone().autodiff()), &task)
            .unwrap_err();
        assert_says!(rejected, said);
    }
}

/// A line through zero.
fn line(device: &Device) -> Linear {
    LinearConfig::new(1, 1)
        .with_bias(false)
        .with_initializer(Initializer::Zeros)
        .init(&device.clone().autodiff())
}

#[test]
fn schedules_move_whether_or_not_the_loader_counts_its_batches() {
    let device = Device::flex();
    let x = tensor::<2>(3, [4, 1], &device);
    let batch = (x.clone(), x.mul_scalar(3.0));
    let train = TrainStage::new(2, 0.1)
        .with_schedule(RateSchedule::Cosine)
        .with_warmup(0.5);
    let recipe = Recipe::new()
        .with_dtype(ComputeDtype::F32)
        .with_train(train);
    let trained = |counts: bool| {
        let task = Task::new(
            |model: &Linear, x: Tensor<2>| model.forward(x),
            |y: Tensor<2>, target: Tensor<2>| (y - target).square().mean(),
            |_| -> Box<dyn Iterator<Item = (Tensor<2>, Tensor<2>)>> {
                let batches = vec![batch.clone(); 6].into_iter();
                match counts {
                    true => Box::new(batches),
                    false => Box::new(batches.filter(|_| true)),
                }
            },
        );
        let outcome = done(&recipe, line(&device), &task);
        values(outcome.last().model.valid().weight.val())
    };
    assert_eq!(trained(false), trained(true));
}

/// One step of SGD from 0 at x = 1: the gradient of (w − 3)² is −6.
#[test]
fn a_task_brings_its_own_optimizer() {
    let device = Device::flex();
    let recipe = Recipe::new()
        .with_dtype(ComputeDtype::F32)
        .with_train(TrainStage::new(1, 0.25));
    let one = Tensor::<2>::ones([1, 1], &device);
    let task = Task::new(
        |model: &Linear, x: Tensor<2>| model.forward(x),
        |y: Tensor<2>, target: Tensor<2>| (y - target).square().mean(),
        |_| [(one.clone(), one.clone().mul_scalar(3.0))],
    )
    .with_optimizer(|_| SgdConfig::new().init());
    let outcome = done(&recipe, line(&device), &task);
    let weight = values(outcome.last().model.valid().weight.val());
    assert_eq!(weight, [1.5]);
}

#[test]
fn a_loader_without_a_batch_and_an_evaluation_that_fails_are_errors() {
    let device = Device::flex();
    let given = || Net::new(16, &device.clone().autodiff());
    let recipe = Recipe::new().with_train(TrainStage::new(1, 0.1));
    let empty = Task::new(
        |model: &Net, x: Tensor<4>| model.forward(x),
        |logits: Tensor<2>, _: Tensor<1, burn::tensor::Int>| logits.square().mean(),
        |_| Vec::new(),
    );
    // Nothing here needs one.
    let nothing = Recipe::new();
    let run = Run::new(&nothing).with_latency(Latency::None);
    assert_eq!(
        run.run(given(), &empty).unwrap().dense().row.latency_ms,
        None
    );
    let rejected = Run::new(&recipe).run(given(), &empty).unwrap_err();
    assert_matches!(rejected.error(), RecipeError::NoBatch { .. });
    let failing = task(&device).with_evaluation(|_| Err(RecipeError::task("no test set")));
    let rejected = Run::new(&Recipe::new()).run(given(), &failing).unwrap_err();
    assert_eq!(rejected.to_string(), "stage `dense`: no test set");
}

#[test]
fn a_callback_hears_of_everything_and_can_end_the_run() {
    let device = Device::flex();
    let task = task(&device);
    let recipe = Recipe::new().with_train(TrainStage::new(2, 0.01));
    let given = || Net::new(16, &device.clone().autodiff());
    let mut steps = Vec::new();
    let mut finished = Vec::new();
    Run::new(&recipe)
        .with_progress(|progress| {
            match progress {
                Progress::Step { epoch, batch, .. } => steps.push((*epoch, *batch)),
                Progress::Finished { row } => finished.push(row.stage.clone()),
                _ => {}
            }
            ControlFlow::Continue(())
        })
        .run(given(), &task)
        .unwrap();
    assert_eq!(steps.len(), 12);
    assert_eq!(steps[7], ((1, 2), (1, Some(6))));
    assert_eq!(finished.len(), 1);
    let rejected = Run::new(&recipe)
        .with_progress(|progress| match progress {
            Progress::Step { .. } => ControlFlow::Break(()),
            _ => ControlFlow::Continue(()),
        })
        .run(given(), &task)
        .unwrap_err();
    assert_matches!(rejected.error(), RecipeError::Interrupted { .. });
}

/// A network that calls its layers with their quantizers by itself.
#[derive(Module, Debug)]
struct Calls {
    body: burn::nn::Linear,
}

#[burn_lean::quant::quantize_calls(crate = burn_lean::quant)]
impl Calls {
    fn forward(&self, x: Tensor<4>) -> Tensor<2> {
        self.body.forward(x.flatten(1, 3))
    }
}

/// Whatever device the loader makes its batches on.
#[test]
fn a_network_that_calls_its_quantizers_itself_is_trained_pruned_and_quantized() {
    let device = Device::flex();
    let recipe = Recipe::new()
        .with_dtype(ComputeDtype::F32)
        .with_prune(PruneStage::new(0.5))
        .with_quantize(int8().with_train(TrainStage::new(1, 1e-3)));
    for loads_on in [device.clone(), device.clone().autodiff()] {
        let task = Task::new(
            |model: &Calls, x: Tensor<4>| model.forward(x),
            |logits: Tensor<2>, _: Tensor<1, burn::tensor::Int>| logits.square().mean(),
            |seed| batches(seed, &loads_on),
        );
        let given = Calls {
            body: burn::nn::LinearConfig::new(36, 3).init(&device.clone().autodiff()),
        };
        let outcome = done(&recipe, given, &task);
        let found = quantizers(&outcome.last().model);
        assert_eq!(found.len(), 2);
        assert!(found.iter().all(|one| one.quantizer.is_observed()));
    }
}
