//! What a recipe is refused for before anything is trained.

use burn::module::{Lora, Module, ParamGroup};
use burn::nn::{Dropout, DropoutConfig, Linear, LinearConfig};
use burn::optim::SgdConfig;
use burn::tensor::{Device, Int, Tensor};
use burn_lean::prune::Masks;
use burn_lean::quant::QatConfig;
use burn_lean::recipe::{
    ComputeDtype, Distillation, Format, Latency, PruneMethod, PruneStage, QuantizeStage,
    RateSchedule, Recipe, RecipeError, RoundingMethod, Run, ShrinkStage, Sparsity, Task,
    TrainStage,
};
use burn_lean::reparam::{attach, attached};
use std::ops::ControlFlow;

use crate::problem::{Net, batches, done, task};
use crate::support::{tensor, with_numbers};
use crate::whole_way::{floats, int8};

#[test]
fn what_the_task_or_the_run_lacks_is_told_before_training() {
    let device = Device::flex();
    let plain = || {
        Task::new(
            |model: &Net, x: Tensor<4>| model.forward(x),
            |logits: Tensor<2>, _: Tensor<1, burn::tensor::Int>| logits.square().mean(),
            |_| -> Vec<(Tensor<4>, Tensor<1, burn::tensor::Int>)> { panic!("nothing is trained") },
        )
    };
    let tune =
        TrainStage::new(1, 0.1).with_distillation(burn_lean::recipe::Distillation::new(1.0, 0.5));
    let given = || Net::new(16, &device.clone().autodiff());
    let distills = Recipe::new().with_prune(PruneStage::new(0.5).with_tune(tune));
    let exports = Recipe::new().with_export(Format::Onnx);
    for (recipe, method) in [
        (distills, "Task::with_logits"),
        (exports, "Run::with_output"),
    ] {
        let rejected = Run::new(&recipe).run(given(), &plain()).unwrap_err();
        assert_says!(rejected, method);
        let RecipeError::TaskLacks { .. } = rejected.error() else {
            panic!("{rejected:?}");
        };
        assert_eq!(floats(rejected.value()), floats(&given()));
    }
    #[cfg(feature = "ndarray")]
    {
        #[allow(deprecated)]
        let ndarray = Device::ndarray();
        let half = Recipe::new()
            .with_dtype(ComputeDtype::Bf16)
            .with_train(TrainStage::new(1, 0.1));
        let rejected = Run::new(&half)
            .run(Net::new(16, &ndarray.autodiff()), &plain())
            .unwrap_err();
        assert_matches!(rejected.error(), RecipeError::Amp(_));
    }
}

/// Why a recipe is refused, before anything has begun.
fn refused(recipe: &Recipe, device: &Device) -> RecipeError {
    let mut begun = false;
    let rejected = Run::new(recipe)
        .with_progress(|_| {
            begun = true;
            ControlFlow::Continue(())
        })
        .run(Net::new(16, &device.clone().autodiff()), &task(device))
        .unwrap_err();
    assert!(!begun, "{recipe:?}");
    rejected.into_error()
}

#[test]
fn paths_and_sizes_that_do_not_fit_are_refused_before_training() {
    let device = Device::flex();
    let train = Recipe::new().with_train(TrainStage::new(1, 0.01));
    let mut large = PruneStage::new(0.5).with_method(PruneMethod::Chita);
    // Batches are of 16.
    large.batch_size = Some(17);
    let prune = PruneStage::new(0.5).with_exclude("haed");
    let shrink = ShrinkStage::new(0.5).with_exclude("conv.wieght");
    let quantize = |weights: &str, exclude: &str| {
        let mut quantize = QuantizeStage::new(weights.parse().unwrap(), "uint8".parse().unwrap());
        quantize.exclude = vec![exclude.into()];
        train.clone().with_quantize(int8()).with_quantize(quantize)
    };
    for (recipe, stage, field) in [
        (train.clone().with_prune(prune), "prune", "exclude"),
        (train.clone().with_shrink(shrink), "shrink", "exclude"),
        (train.clone().with_prune(large), "prune", "batch_size"),
        (quantize("int4", "haed"), "quantize[1]", "exclude"),
        // Nothing that is quantized.
        (quantize("int4", "bias"), "quantize[1]", "exclude"),
    ] {
        match refused(&recipe, &device) {
            RecipeError::Invalid {
                stage: at,
                field: found,
                ..
            } => assert_eq!((at.as_str(), found), (stage, field)),
            other => panic!("{other:?}"),
        }
    }
}

/// What is left when all has gone that can go depends on shapes alone.
#[test]
fn a_share_that_shrinking_cannot_reach_is_refused_before_training() {
    let recipe = Recipe::new()
        .with_train(TrainStage::new(1, 0.01))
        .with_shrink(ShrinkStage::new(1e-4));
    let error = refused(&recipe, &Device::flex()).to_string();
    assert_says!(error, "of the multiplications are left");
}

/// Stages bring masks and quantizers of their own, and a weight holds one reparameterization.
#[test]
fn a_weight_that_carries_something_is_refused_before_training() {
    let device = Device::flex();
    let task = task(&device);
    let given = || Net::new(16, &device.clone().autodiff());
    let body = ParamGroup::from_paths(vec!["body.weight"]);
    let masks = Masks::from_zeros(&given(), &body).unwrap();
    let tune = TrainStage::new(1, 0.01).with_schedule(RateSchedule::Cosine);
    let train = Recipe::new().with_train(tune.clone());
    let by = |method| {
        let prune = PruneStage::new(0.5).with_method(method);
        train.clone().with_prune(prune.with_tune(tune.clone()))
    };
    let recipes = [
        (by(PruneMethod::Layerwise), "prune"),
        (by(PruneMethod::Chita), "prune"),
        (by(PruneMethod::Gradual), "prune"),
        (train.clone().with_quantize(int8()), "quantize[0]"),
        (
            train.clone().with_quantize(int8().with_train(tune.clone())),
            "quantize[0]",
        ),
    ];
    for (model, path, carries) in [
        (masks.attach(given()).unwrap(), "body.weight", "mask"),
        (
            QatConfig::new().prepare(given()).unwrap(),
            "conv.weight",
            "quant",
        ),
        // What it adds is 0 until it is trained.
        (
            attach(given(), Lora::new(1, 1.0)).unwrap(),
            "body.weight",
            "lora",
        ),
    ] {
        for (recipe, at) in &recipes {
            let mut begun = false;
            let rejected = Run::new(recipe)
                .with_latency(Latency::None)
                .with_progress(|_| {
                    begun = true;
                    ControlFlow::Continue(())
                })
                .run(model.clone(), &task)
                .unwrap_err();
            assert!(!begun, "{carries}: {recipe:?}");
            match rejected.error() {
                RecipeError::Reparameterized {
                    stage,
                    path: found,
                    name,
                } => assert_eq!(
                    (stage.as_str(), found.as_str(), name.as_str()),
                    (*at, path, carries)
                ),
                other => panic!("{carries}: {other}"),
            }
            assert_eq!(attached(rejected.value()), attached(&model));
        }
    }
    // The other weights can be quantized all the same.
    let mut others = int8();
    others.exclude = vec!["body".into()];
    let masked = masks.attach(given()).unwrap();
    let outcome = done(&train.with_quantize(others), masked, &task);
    assert_eq!(outcome.stages.len(), 2);
}

#[test]
fn pruning_that_finds_no_weight_is_refused_before_training() {
    let device = Device::flex();
    let train = Recipe::new().with_train(TrainStage::new(1, 0.01));
    for method in [PruneMethod::Layerwise, PruneMethod::Chita] {
        let prune = PruneStage::new(0.5)
            .with_method(method)
            .with_exclude("weight");
        let error = refused(&train.clone().with_prune(prune), &device).to_string();
        assert_says!(error, "`prune.exclude` is weight", "no weight is left");
        // No layer has a multiple of 7 inputs.
        let prune = PruneStage::new(Sparsity::NOfM { n: 3, m: 7 }).with_method(method);
        let error = refused(&train.clone().with_prune(prune), &device).to_string();
        assert_says!(error, "`prune`", "3:7");
    }
}

/// The convolution has one input channel.
#[test]
fn layers_that_a_pattern_does_not_divide_stay_dense_beside_excluded_ones() {
    let device = Device::flex();
    for method in [PruneMethod::Layerwise, PruneMethod::Chita] {
        let prune = PruneStage::new(Sparsity::NOfM { n: 2, m: 4 });
        let prune = prune.with_method(method).with_exclude("head");
        let recipe = Recipe::new().with_prune(prune);
        let outcome = done(
            &recipe,
            Net::new(16, &device.clone().autodiff()),
            &task(&device),
        );
        let masks = outcome.masks.unwrap();
        let paths: Vec<&str> = masks.parameters().iter().map(|one| one.path()).collect();
        assert_eq!(paths, ["body.weight"], "{method:?}");
    }
}

/// The last batch of a loader is often a smaller one.
#[test]
fn a_batch_size_is_refused_with_that_of_the_largest_batch() {
    let device = Device::flex();
    let task = Task::new(
        |model: &Net, x: Tensor<4>| model.forward(x),
        |logits: Tensor<2>, _: Tensor<1, Int>| logits.square().mean(),
        |seed| {
            let mut all = batches(seed, &device);
            let (x, labels) = all.remove(0);
            all.push((x.slice([0..4]), labels.slice([0..4])));
            all
        },
    );
    let mut prune = PruneStage::new(0.5).with_method(PruneMethod::Chita);
    prune.batch_size = Some(17);
    let recipe = Recipe::new().with_prune(prune);
    let rejected = Run::new(&recipe)
        .with_latency(Latency::None)
        .run(Net::new(16, &device.clone().autodiff()), &task)
        .unwrap_err();
    assert_says!(rejected.error(), "at most 16,");
}

#[test]
fn blocks_that_do_not_divide_a_layer_are_refused_before_training_for_the_fisher() {
    let device = Device::flex();
    let train = Recipe::new().with_train(TrainStage::new(1, 0.01));
    // The layers have 1, 64 and 16 inputs: else the last block has what is left.
    let plain = train.clone().with_quantize(int8().with_block(5));
    let given = || Net::new(16, &device.clone().autodiff());
    Run::new(&plain).run(given(), &task(&device)).unwrap();
    let fisher = int8().with_rounding(RoundingMethod::Fisher);
    let recipe = train.with_quantize(fisher.with_block(5));
    match refused(&recipe, &device) {
        RecipeError::Stage { stage, error } => {
            assert_eq!(stage, "quantize[0]");
            assert!(matches!(*error, RecipeError::Quant(_)), "{error:?}");
        }
        other => panic!("{other:?}"),
    }
}

/// Layer by layer, folding and ONNX files look at the operations of the forward pass, and come after the training.
#[test]
fn a_forward_pass_that_cannot_be_recorded_is_refused_before_training() {
    let device = Device::flex();
    let reads = Task::new(
        |model: &Net, x: Tensor<4>| {
            let largest = x.clone().max().into_scalar::<f32>();
            model.forward(x / largest)
        },
        |logits: Tensor<2>, _: Tensor<1, Int>| logits.square().mean(),
        |seed| batches(seed, &device).into_iter(),
    );
    let train = Recipe::new().with_train(TrainStage::new(1, 0.01));
    let mut unfolded = int8();
    unfolded.fold = false;
    for (recipe, stage) in [
        (train.clone().with_prune(PruneStage::new(0.5)), "pruned"),
        (train.clone().with_quantize(int8()), "W8A8"),
        (
            train
                .clone()
                .with_quantize(unfolded.clone())
                .with_export(Format::Onnx),
            "export",
        ),
    ] {
        let mut begun = false;
        let folder = tempfile::tempdir().unwrap();
        let rejected = Run::new(&recipe)
            .with_latency(Latency::None)
            .with_output(folder.path())
            .with_progress(|_| {
                begun = true;
                ControlFlow::Continue(())
            })
            .run(Net::new(16, &device.clone().autodiff()), &reads)
            .unwrap_err();
        assert!(!begun, "{stage}");
        match rejected.error() {
            RecipeError::Stage { stage: at, .. } => assert!(at.starts_with(stage), "{at}"),
            other => panic!("{other}"),
        }
    }
}

/// Why a training fails, by the batches, the learning rate and the model.
fn failed(
    dtype: ComputeDtype,
    rate: f64,
    change: impl Fn(Tensor<4>) -> Tensor<4>,
    model: impl FnOnce(Net) -> Net,
) -> RecipeError {
    let device = Device::flex();
    let task = Task::new(
        |model: &Net, x: Tensor<4>| model.forward(x),
        |logits: Tensor<2>, _: Tensor<1, Int>| logits.square().mean(),
        |seed| {
            let all = batches(seed, &device).into_iter();
            all.map(|(x, labels)| (change(x), labels))
                .collect::<Vec<_>>()
        },
    );
    let recipe = Recipe::new()
        .with_dtype(dtype)
        .with_train(TrainStage::new(2, rate));
    let net = model(Net::new(16, &device.clone().autodiff()));
    let rejected = Run::new(&recipe)
        .with_latency(Latency::None)
        .run(net, &task)
        .unwrap_err();
    let mut error = rejected.into_error();
    while let RecipeError::Stage { error: inner, .. } = error {
        error = *inner;
    }
    error
}

#[test]
fn a_training_that_gets_nowhere_is_an_error_that_says_why() {
    for dtype in [ComputeDtype::F32, ComputeDtype::Bf16, ComputeDtype::F16] {
        let error = failed(dtype, 0.01, |x| x * f32::NAN, |net| net);
        match error {
            RecipeError::Diverged { epoch, .. } => assert!(epoch <= 1, "{dtype:?}: {epoch}"),
            other => panic!("{dtype:?}: {other}"),
        }
    }
    let narrow = |x: Tensor<4>| x.slice_dim(3, 0..2);
    let error = failed(ComputeDtype::F32, 0.01, narrow, |net| net).to_string();
    assert_says!(error, "look at the shapes");
    let error = failed(ComputeDtype::F32, 0.01, |x| x, |net| net.no_grad()).to_string();
    assert_says!(error, "the loss has no gradient");
}

/// The loss before the last step says nothing of what that did.
#[test]
fn weights_that_the_last_step_broke_are_no_finished_stage() {
    let device = Device::flex().autodiff();
    let task = Task::new(
        |model: &Linear, x: Tensor<2>| model.forward(x),
        |y: Tensor<2>, target: Tensor<2>| (y - target).square().mean(),
        |_| {
            let x = Tensor::<2>::from_floats([[1e5]], &Device::flex());
            [(x.clone(), x)]
        },
    )
    .with_optimizer(|_| SgdConfig::new().init());
    let recipe = Recipe::new()
        .with_dtype(ComputeDtype::F32)
        .with_train(TrainStage::new(1, 1e30));
    let model = LinearConfig::new(1, 1).with_bias(false).init(&device);
    let run = Run::new(&recipe)
        .with_latency(Latency::None)
        .run(model, &task);
    assert_says!(run.unwrap_err(), "`weight` is not finite");
}

#[test]
fn a_distillation_from_one_logit_is_refused() {
    let device = Device::flex().autodiff();
    let model: Linear = with_numbers(LinearConfig::new(3, 1).init(&device), 4);
    let task = Task::new(
        |model: &Linear, x: Tensor<2>| model.forward(x),
        |y: Tensor<2>, target: Tensor<2>| (y - target).square().mean(),
        |seed| {
            let x = tensor::<2>(seed, [8, 3], &Device::flex());
            [(x.clone(), x.mean_dim(1))]
        },
    )
    .with_logits(|y: &Tensor<2>| y.clone());
    let distillation = Distillation::new(2.0, 0.9);
    let tune = TrainStage::new(1, 0.01).with_distillation(distillation);
    let recipe = Recipe::new()
        .with_dtype(ComputeDtype::F32)
        .with_prune(PruneStage::new(0.5).with_tune(tune));
    let run = Run::new(&recipe)
        .with_latency(Latency::None)
        .run(model, &task);
    assert_says!(run.unwrap_err(), "[0, z]");
}

#[test]
fn a_model_without_parameters_is_refused_as_what_it_is() {
    let task = Task::new(
        |model: &Dropout, x: Tensor<2>| model.forward(x),
        |y: Tensor<2>, target: Tensor<2>| (y - target).square().mean(),
        |_| -> Vec<(Tensor<2>, Tensor<2>)> { panic!("nothing is trained") },
    );
    let recipe = Recipe::new();
    let run = Run::new(&recipe).run(DropoutConfig::new(0.5).init(), &task);
    match run.unwrap_err().error() {
        RecipeError::Invalid { stage, field, .. } => {
            assert_eq!((stage.as_str(), *field), ("recipe", "model"));
        }
        other => panic!("{other}"),
    }
}

/// A region or `forward_q` is for programs that call the other crates themselves.
#[test]
fn a_training_that_cannot_be_recorded_is_refused_with_what_a_recipe_can_do() {
    let device = Device::flex().autodiff();
    let task = Task::new(
        |model: &Linear, x: Tensor<2>| {
            let y = model.forward(x);
            let most = y.clone().abs().max().into_scalar::<f32>();
            y / most
        },
        |y: Tensor<2>, target: Tensor<2>| (y - target).square().mean(),
        |seed| {
            let x = tensor::<2>(seed, [8, 3], &Device::flex());
            [(x.clone(), x)]
        },
    );
    let trained = |dtype| {
        let recipe = Recipe::new()
            .with_dtype(dtype)
            .with_train(TrainStage::new(1, 0.01));
        let model: Linear = with_numbers(LinearConfig::new(3, 3).init(&device), 4);
        let run = Run::new(&recipe).with_latency(Latency::None);
        run.run(model, &task).map(|_| ())
    };
    let error = trained(ComputeDtype::F16).unwrap_err().to_string();
    assert_says!(error, "read values", "`dtype = \"f32\"`");
    assert!(!error.contains("AutocastConfig"), "{error}");
    assert!(trained(ComputeDtype::F32).is_ok());
}
