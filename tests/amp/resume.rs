//! Training that is killed goes on from its last checkpoint, bit for bit.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use burn::module::{Module, Param, ParamGroup};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig, LinearLayout};
use burn::optim::decay::WeightDecayConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::{Device, FloatDType, Tensor};
use burn_lean::amp::{AmpError, Checkpoints, GradScaler, GradScalerConfig, ResumableOptimizer};

use crate::model::{bits, gradients, prepared};
use crate::support::{tensor, values, with_numbers};

const STEPS: u64 = 12;
const FOLDER: &str = "BURN_LEAN_TEST_CHECKPOINTS";

fn factor(step: u64) -> f32 {
    if step % 5 == 2 { f32::INFINITY } else { 1.0 }
}

/// Trains to the last step, from the newest checkpoint in `folder`, one for each three steps; calls `at`
/// inside of a step.
fn train(folder: &Path, mut at: impl FnMut(u64)) -> (Vec<u32>, GradScaler) {
    let checkpoints = Checkpoints::new(folder);
    let (mut model, autocast) = prepared(1, FloatDType::F16, &Device::flex());
    let mut optim = AdamWConfig::new().init();
    let mut scaler = GradScalerConfig::for_dtype(FloatDType::F16).init().unwrap();
    let mut first = 0;
    if let Some(step) = checkpoints.latest().unwrap() {
        (model, optim, scaler) = checkpoints.load(step, model, optim).unwrap();
        first = step;
    }
    for step in first..STEPS {
        let grads = gradients(&model, &autocast, &mut scaler, step, factor(step)).unwrap();
        at(step);
        model = scaler.step(&mut optim, 0.05, model, grads).unwrap();
        if step % 3 == 2 {
            checkpoints.save(step + 1, &model, &optim, &scaler).unwrap();
        }
    }
    (bits(&model), scaler)
}

/// Not a test by itself: the process that the tests below kill.
#[test]
fn child_that_trains_until_it_is_killed() {
    let Some(folder) = std::env::var_os(FOLDER) else {
        return;
    };
    train(Path::new(&folder), |step| println!("\nin step {step}"));
}

fn spawn(folder: &Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "resume::child_that_trains_until_it_is_killed"])
        .args(["--nocapture", "--test-threads=1"])
        .env(FOLDER, folder)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

fn assert_resumes_as_if_never_killed(folder: &Path) {
    let (found, scaler) = train(folder, |_| {});
    let uninterrupted = tempfile::tempdir().unwrap();
    let (expected, expected_scaler) = train(uninterrupted.path(), |_| {});
    assert_eq!(found, expected);
    assert_eq!(scaler.state(), expected_scaler.state());
    assert_eq!(scaler.state().skipped_steps, 2);
}

#[test]
fn killed_in_the_middle_of_a_step_training_continues_bit_exactly() {
    let folder = tempfile::tempdir().unwrap();
    let mut child = spawn(folder.path());
    let output = BufReader::new(child.stdout.take().unwrap());
    let reached = output
        .lines()
        .map_while(Result::ok)
        .any(|line| line == "in step 8");
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(reached, "the child ended before step 8");
    assert!(Checkpoints::new(folder.path()).latest().unwrap() >= Some(6));
    assert_resumes_as_if_never_killed(folder.path());
}

#[test]
fn killed_in_the_middle_of_a_checkpoint_training_continues_bit_exactly() {
    let folder = tempfile::tempdir().unwrap();
    let mut child = spawn(folder.path());
    // Whatever instant this hits, the rule is the same; mostly it is inside of the write.
    let partial = folder.path().join("partial-6");
    while !partial.exists() && child.try_wait().unwrap().is_none() {
        std::thread::yield_now();
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let latest = Checkpoints::new(folder.path()).latest().unwrap();
    assert!(latest >= Some(3), "{latest:?}");
    assert_resumes_as_if_never_killed(folder.path());
}

#[test]
fn a_refused_checkpoint_leaves_running_statistics_alone() {
    #[derive(Module, Debug)]
    struct Net {
        norm: BatchNorm,
        head: Linear,
    }
    let device = Device::flex().autodiff();
    let net = |outputs| Net {
        norm: BatchNormConfig::new(3).init(&device),
        head: LinearConfig::new(3, outputs).init(&device),
    };
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::new(folder.path());
    let scaler = GradScalerConfig::for_dtype(FloatDType::F16).init().unwrap();
    let trained = net(2);
    let x = Tensor::<2>::from_data([[4.0, 1.0, -2.0], [8.0, 1.0, -6.0]], &device);
    trained.norm.forward(x);
    let optim = AdamWConfig::new().init();
    checkpoints.save(1, &trained, &optim, &scaler).unwrap();

    let rejected = checkpoints.load(1, net(4), optim).err().unwrap();
    assert_matches!(rejected.error(), AmpError::Record { .. });
    let mean = rejected.value().norm.running_mean.value().into_data();
    assert_eq!(mean.try_to_vec::<f32>().unwrap(), [0.0; 3]);

    let (loaded, ..) = checkpoints
        .load(1, net(2), AdamWConfig::new().init())
        .unwrap();
    // Momentum 0.1 of the means 6, 1 and -4.
    let mean = loaded.norm.running_mean.value().into_data();
    let mean = mean.try_to_vec::<f32>().unwrap();
    assert_near!(mean.iter(), [0.6, 0.1, -0.4], 1e-6);
}

/// Not a test by itself: loads a checkpoint where Burn's default device is not there.
#[test]
fn child_that_loads_without_the_default_device() {
    let Some(folder) = std::env::var_os(FOLDER_WITHOUT_DEVICE) else {
        return;
    };
    let checkpoints = Checkpoints::new(Path::new(&folder));
    let (model, autocast) = prepared(1, FloatDType::F16, &Device::flex());
    let before = bits(&model);
    let plain = checkpoints.load(STEPS, model, AdamWConfig::new().init());
    let model = match plain {
        // There is a GPU after all.
        Ok(_) => prepared(1, FloatDType::F16, &Device::flex()).0,
        Err(rejected) => {
            let error = rejected.error();
            assert_matches!(error, AmpError::OptimizerState { .. });
            let text = error.to_string();
            let remedies = ["BURN_DEVICE", "ResumableOptimizer"];
            assert!(
                remedies.iter().all(|remedy| text.contains(remedy)),
                "{text}"
            );
            println!("\nrefused");
            rejected.into_value()
        }
    };
    assert_eq!(bits(&model), before);
    if std::env::var_os("BURN_DEVICE").is_some() {
        // Then Burn cannot even name its default device.
        return;
    }
    let optim = ResumableOptimizer::new(AdamWConfig::new().build(), &Device::flex()).init();
    let (mut model, mut optim, mut scaler) = checkpoints.load(STEPS, model, optim).unwrap();
    for step in STEPS..STEPS + 2 {
        let grads = gradients(&model, &autocast, &mut scaler, step, 1.0).unwrap();
        model = scaler.step(&mut optim, 0.05, model, grads).unwrap();
    }
    println!("\ntrained to {:?}", bits(&model));
}

const FOLDER_WITHOUT_DEVICE: &str = "BURN_LEAN_TEST_NO_DEVICE";

fn load_elsewhere(folder: &Path, environment: &[(&str, Option<&str>)]) -> String {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args([
            "--exact",
            "resume::child_that_loads_without_the_default_device",
        ])
        .args(["--nocapture", "--test-threads=1"])
        .env(FOLDER_WITHOUT_DEVICE, folder);
    for (name, value) in environment {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}{errors}");
    text
}

#[test]
fn a_training_on_the_cpu_goes_on_where_there_is_no_gpu() {
    let folder = tempfile::tempdir().unwrap();
    let (_, scaler) = train(folder.path(), |_| {});
    let (mut model, autocast) = prepared(1, FloatDType::F16, &Device::flex());
    let checkpoints = Checkpoints::new(folder.path());
    let optim = ResumableOptimizer::new(AdamWConfig::new().build(), &Device::flex()).init();
    let (loaded, mut optim, mut loaded_scaler) = checkpoints.load(STEPS, model, optim).unwrap();
    assert_eq!(loaded_scaler.state(), scaler.state());
    model = loaded;
    for step in STEPS..STEPS + 2 {
        let grads = gradients(&model, &autocast, &mut loaded_scaler, step, 1.0).unwrap();
        model = loaded_scaler.step(&mut optim, 0.05, model, grads).unwrap();
    }
    let expected = format!("trained to {:?}", bits(&model));

    // No driver of Vulkan or OpenGL is found at such a path.
    let none = Some("/nonexistent/driver.json");
    let text = load_elsewhere(
        folder.path(),
        &[
            ("BURN_DEVICE", None),
            ("VK_DRIVER_FILES", none),
            ("VK_ICD_FILENAMES", none),
            ("__EGL_VENDOR_LIBRARY_FILENAMES", none),
        ],
    );
    assert_says!(text, &expected);
}

#[test]
fn a_default_device_that_is_not_in_the_build_is_an_error_that_keeps_the_model() {
    let folder = tempfile::tempdir().unwrap();
    train(folder.path(), |_| {});
    let text = load_elsewhere(folder.path(), &[("BURN_DEVICE", Some("no such device"))]);
    assert_says!(text, "refused");
}

/// A record brings the identities of its parameters: groups that name those of a new model match nothing.
#[test]
fn groups_that_name_identities_are_made_of_the_loaded_model() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::new(folder.path());
    let device = Device::flex().autodiff();
    let optimizer = |model: &Linear| {
        let decays = SgdConfig::new().with_weight_decay(Some(WeightDecayConfig::new(0.5)));
        let optimizer: ModuleOptimizer = decays.init();
        let weight = ParamGroup::from_ids(vec![model.weight.id]);
        optimizer.with_group(weight, SgdConfig::new().build(), None)
    };
    let new = || {
        let mut layer = LinearConfig::new(2, 1).init(&device);
        layer.weight = Param::from_data([[1.0], [2.0]], &device);
        layer.bias = Some(Param::from_data([4.0], &device));
        layer
    };
    let trained = new();
    let scaler = GradScalerConfig::for_dtype(FloatDType::F16).init().unwrap();
    checkpoints
        .save(1, &trained, &optimizer(&trained), &scaler)
        .unwrap();
    let loaded = checkpoints.load_with(1, new(), optimizer);
    let (model, mut optim, mut scaler) = loaded.unwrap();
    assert_eq!(model.weight.id, trained.weight.id);
    let x = Tensor::<2>::zeros([1, 2], &device);
    let loss = scaler.scale(model.forward(x).sum() * 0.0).unwrap();
    let grads = GradientsParams::from_grads(loss.backward(), &model);
    let model = scaler.step(&mut optim, 0.5, model, grads).unwrap();
    let values = |tensor: Tensor<1>| tensor.into_data().try_to_vec::<f32>().unwrap();
    // Without decay, and with it: 4 · (1 − 0.5 · 0.5).
    assert_eq!(values(model.weight.val().flatten(0, 1)), [1.0, 2.0]);
    assert_eq!(values(model.bias.unwrap().val()), [3.0]);
}

/// Its record is transposed: Burn compares the shape with that of the weight, once it was used.
#[test]
fn a_layer_in_column_layout_goes_on_from_its_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::new(folder.path());
    let device = Device::flex().autodiff();
    let new = |seed: u64| -> Linear {
        let config = LinearConfig::new(16, 8).with_layout(LinearLayout::Col);
        with_numbers(config.init(&device), seed)
    };
    let optimizer = || {
        let config = SgdConfig::new().with_momentum(Some(MomentumConfig::new()));
        config.init()
    };
    let step = |seed: u64, layer: Linear, optim: &mut ModuleOptimizer, scaler: &mut GradScaler| {
        let x = tensor::<2>(seed, [4, 16], &device);
        let loss = (layer.forward(x) - 1.0).square().mean();
        let loss = scaler.scale(loss).unwrap();
        let grads = GradientsParams::from_grads(loss.backward(), &layer);
        scaler.step(optim, 0.05, layer, grads).unwrap()
    };
    let mut optim = optimizer();
    let mut scaler = GradScalerConfig::for_dtype(FloatDType::F16).init().unwrap();
    let trained = step(3, new(1), &mut optim, &mut scaler);
    checkpoints.save(1, &trained, &optim, &scaler).unwrap();

    let loaded = checkpoints.load(1, new(2), optimizer());
    let (loaded, mut loaded_optim, mut loaded_scaler) = loaded.unwrap();
    let weight = |layer: &Linear| values(layer.weight.val());
    assert_eq!(loaded.weight.dims(), [16, 8]);
    assert_eq!(bits(&loaded), bits(&trained));
    assert!(loaded.weight.val().is_require_grad());

    let before = weight(&trained);
    let expected = weight(&step(4, trained, &mut optim, &mut scaler));
    let found = weight(&step(4, loaded, &mut loaded_optim, &mut loaded_scaler));
    assert_ne!(expected, before);
    // Not to the last bit: a transposed matrix is multiplied in another order.
    assert_near!(found.into_iter(), expected, 1e-5);
}
