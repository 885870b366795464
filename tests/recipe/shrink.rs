//! Recipes that make layers smaller.

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Linear, LinearConfig};
use burn::store::ModuleRecord;
use burn::tensor::activation::relu;
use burn::tensor::{Int, Tensor};
use burn_lean::prune::load_shrunk;
use burn_lean::recipe::{
    ComputeDtype, Distillation, Latency, PruneStage, QuantizeStage, Recipe, RecipeError, Run,
    ShrinkStage, Task, TrainStage,
};

use crate::problem::{Net, batches, task};
use crate::support::{each_device, values};

#[test]
fn later_stages_start_from_the_smaller_model_and_its_file_loads() {
    each_device(|target| {
        let device = target.device.clone();
        let task = task(&device);
        let folder = tempfile::tempdir().unwrap();
        let recipe = Recipe::new()
            .with_train(TrainStage::new(6, 0.01))
            .with_shrink(ShrinkStage::new(0.5).with_tune(TrainStage::new(4, 5e-3)))
            .with_prune(PruneStage::new(0.5))
            .with_quantize(QuantizeStage::new(
                "int8".parse().unwrap(),
                "uint8".parse().unwrap(),
            ));
        let outcome = Run::new(&recipe)
            .with_output(folder.path())
            .run(Net::new(24, &device.clone().autodiff()), &task)
            .unwrap();
        let rows: Vec<_> = outcome.rows().collect();
        let names: Vec<&str> = rows.iter().map(|row| row.stage.as_str()).collect();
        assert_eq!(
            names[1..],
            [
                "shrunk to 50 %",
                "shrunk to 50 %, pruned 50 %",
                "shrunk to 50 %, pruned 50 %, W8A8"
            ]
        );
        let parameters = |stage: usize| outcome.stages[stage].model.num_params();
        assert!(2 * parameters(1) < parameters(0) + 100, "{names:?}");
        assert_eq!(parameters(2), parameters(1));
        assert!(rows[1].nonzeros < rows[0].nonzeros && rows[2].nonzeros < rows[1].nonzeros);
        assert!(rows[1].bytes < rows[0].bytes && rows[3].bytes < rows[1].bytes);
        // One of three classes by chance.
        assert!(rows[1].accuracy.unwrap() > 60.0, "{rows:?}");

        let bytes = std::fs::read(folder.path().join("shrunk-to-50.model")).unwrap();
        let record = ModuleRecord::from_bytes(burn::tensor::Bytes::from_bytes_vec(bytes)).unwrap();
        let loaded = load_shrunk(Net::new(24, &device), record).unwrap();
        let (x, _) = batches(0, &device).remove(0);
        assert_eq!(
            values(loaded.forward(x.clone())),
            values(outcome.stages[1].model.valid().forward(x))
        );
    });
}

#[test]
fn layers_that_are_excluded_keep_their_sizes() {
    let device = burn::tensor::Device::flex();
    let task = task(&device);
    let recipe = Recipe::new().with_shrink(ShrinkStage::new(0.7).with_exclude("conv"));
    let model = Net::new(24, &device.clone().autodiff());
    let outcome = Run::new(&recipe).run(model, &task).unwrap();
    let small = &outcome.last().model;
    assert_eq!(small.conv.weight.dims()[0], 4);
    assert!(small.body.weight.dims()[1] < 24);
}

/// They are outputs, which shrinking leaves as they are; what comes before them gets smaller.
#[test]
fn features_that_teach_keep_their_size() {
    let device = burn::tensor::Device::flex();
    let hidden = |model: &Net, x: Tensor<4>| {
        let x = relu(model.norm.forward(model.conv.forward(x)));
        relu(model.body.forward(x.flatten::<2>(1, 3)))
    };
    let task = Task::new(
        |model: &Net, x: Tensor<4>| {
            let hidden: Tensor<2> = hidden(model, x);
            (model.head.forward(hidden.clone()), hidden)
        },
        |(logits, _): (Tensor<2>, Tensor<2>), _: Tensor<1, Int>| logits.square().mean(),
        |seed| batches(seed, &device),
    )
    .with_logits(|(logits, _): &(Tensor<2>, Tensor<2>)| logits.clone())
    .with_features(|(_, hidden): &(Tensor<2>, Tensor<2>)| vec![hidden.clone()]);
    let distillation = Distillation::new(2.0, 0.5).with_features(1.0);
    let tune = TrainStage::new(1, 1e-3).with_distillation(distillation);
    let shrink = ShrinkStage::new(0.7).with_tune(tune);
    let run = |shrink: ShrinkStage| {
        let recipe = Recipe::new()
            .with_dtype(ComputeDtype::F32)
            .with_shrink(shrink);
        let model = Net::new(24, &device.clone().autodiff());
        let run = Run::new(&recipe).with_latency(Latency::None);
        run.run(model, &task)
    };
    let outcome = run(shrink.clone()).unwrap();
    let small = &outcome.last().model;
    assert_eq!(small.body.weight.dims()[1], 24);
    assert!(small.conv.weight.dims()[0] < 4);

    let rejected = run(shrink.with_exclude("conv")).unwrap_err();
    assert_says!(rejected.error(), "cannot make the layers smaller");
}

#[test]
fn what_cannot_be_is_refused_before_anything_is_computed() {
    for (text, field) in [
        ("[shrink]\nshare = 0.0", "share"),
        ("[shrink]\nshare = 1.0", "share"),
        ("[shrink]\nshare = 0.5\nexclude = [\"\"]", "exclude"),
        (
            "[shrink]\nshare = 0.5\ntune = { epochs = 0, learning_rate = 0.1 }",
            "epochs",
        ),
    ] {
        let error = Recipe::from_toml(text).unwrap_err();
        assert_matches!(error, RecipeError::Invalid { .. });
        assert_says!(error, field);
    }
    let error = Recipe::from_toml("[shrink]\nexclude = [\"head\"]").unwrap_err();
    assert_matches!(error, RecipeError::File { .. });
    assert_says!(error, "`share`");
}

/// Channels are made, filtered one by one, and put together.
#[derive(Module, Debug)]
struct Separable {
    make: Conv2d,
    filter: Conv2d,
    head: Linear,
}

#[test]
fn depthwise_convolutions_get_smaller_with_their_groups_and_a_restart_has_them() {
    let device = burn::tensor::Device::flex();
    let task = Task::new(
        |model: &Separable, x: Tensor<4>| {
            let x = relu(model.filter.forward(relu(model.make.forward(x))));
            let [examples, channels, ..] = x.dims();
            let x = x.mean_dim(3).mean_dim(2).reshape([examples, channels]);
            model.head.forward(x)
        },
        |logits: Tensor<2>, labels: Tensor<1, Int>| {
            CrossEntropyLossConfig::new()
                .init(&logits.device())
                .forward(logits, labels)
        },
        |seed| batches(seed, &device),
    )
    .with_resizing(|model: &mut Separable| model.filter.groups = model.filter.weight.dims()[0]);
    let trains = device.clone().autodiff();
    let given = Separable {
        make: Conv2dConfig::new([1, 12], [3, 3]).init(&trains),
        filter: Conv2dConfig::new([12, 12], [3, 3])
            .with_groups(12)
            .init(&trains),
        head: LinearConfig::new(12, 3).init(&trains),
    };
    let state = tempfile::tempdir().unwrap();
    let run = || {
        let shrink = ShrinkStage::new(0.5).with_tune(TrainStage::new(1, 1e-3));
        let recipe = Recipe::new()
            .with_dtype(ComputeDtype::F32)
            .with_shrink(shrink);
        let run = Run::new(&recipe)
            .with_latency(Latency::None)
            .with_state(state.path());
        run.run(given.clone(), &task).unwrap()
    };
    let [first, again] = [run(), run()];
    let small = &first.last().model;
    assert!(small.filter.groups <= 6);
    assert_eq!(small.filter.weight.dims(), [small.filter.groups, 1, 3, 3]);
    assert_eq!(again.last().model.filter.groups, small.filter.groups);
    let (x, _) = batches(0, &device).remove(0);
    let of = |model: &Separable| {
        let x = model.filter.forward(model.make.forward(x.clone()));
        values(x)
    };
    assert_eq!(of(&again.last().model.valid()), of(&small.valid()));
}
