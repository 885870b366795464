//! Gradient matrices, and activations, in files.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, FloatDType, Tensor};
use burn_lean::prune::{
    Budget, ChitaConfig, Effort, Fisher, FisherConfig, GradientMatrix, Layout, Method, Problem,
    PruneError, Pruner, PrunerConfig, RidgeChoice, Selection, SolverConfig, solve,
};

use crate::pruner::{config, loss, net, pairs, prune, weights};
use crate::support::{each_device, parameters, tensor, values, with_numbers};
use crate::tuning;

/// A model whose gradient of an example is the example.
fn rows_of(config: &FisherConfig, x: &Tensor<2>, device: &Device) -> Result<Fisher, PruneError> {
    let model = LinearConfig::new(x.dims()[1], 1)
        .with_bias(false)
        .init(device);
    let selection = Selection::of(&model, None)?;
    let output = |model: &Linear, x: &Tensor<2>| model.forward(x.clone()).mean();
    config.collect(&model, &selection, output, [x.clone()])
}

/// On disk: 32 columns may be in memory, four of them in one block.
fn bounded(samples: usize, folder: &tempfile::TempDir) -> FisherConfig {
    FisherConfig::new(samples)
        .with_memory_bound(samples * 32 * 4)
        .with_on_disk(Some(folder.path().into()))
}

#[test]
fn rows_on_disk_are_those_in_memory_and_their_file_has_no_name() {
    let folder = tempfile::tempdir().unwrap();
    each_device(|target| {
        let x = tensor::<2>(3, [12, 60], &target.device);
        for dtype in [FloatDType::F32, FloatDType::F16, FloatDType::BF16] {
            if !target.device.supports_dtype(dtype) {
                continue;
            }
            let on_disk = bounded(12, &folder)
                .with_memory_bound(960)
                .with_dtype(dtype);
            let in_memory = FisherConfig::new(12).with_dtype(dtype);
            let [on_disk, in_memory] =
                [on_disk, in_memory].map(|config| rows_of(&config, &x, &target.device).unwrap());
            assert!(on_disk.report.on_disk && !in_memory.report.on_disk);
            assert!(on_disk.gradients.is_on_disk());
            assert_eq!(on_disk.report.bytes, in_memory.report.bytes);
            assert_eq!(on_disk.report.zero_columns, in_memory.report.zero_columns);
            for row in 0..12 {
                let rows = [&on_disk, &in_memory].map(|fisher| fisher.gradients.row(row).unwrap());
                assert_eq!(rows[0], rows[1], "{dtype:?}, row {row}");
            }
            assert_eq!(folder.path().read_dir().unwrap().count(), 0);
        }
    });
}

/// Every way to look at the matrix: gathered and consecutive columns, products from both sides.
#[test]
fn every_method_solves_the_same_problem_from_disk() {
    let folder = tempfile::tempdir().unwrap();
    let methods = [
        (Method::Chita(ChitaConfig::new()), None),
        (Method::Chita(ChitaConfig::new()), Some(16)),
        (Method::BackSolve, None),
        (Method::DiagonalFisher, None),
        (Method::WoodFisher { block_size: 16 }, None),
    ];
    each_device(|target| {
        let x = tensor::<2>(3, [12, 60], &target.device);
        let configs = [bounded(12, &folder), FisherConfig::new(12)];
        let problems = configs.map(|config| {
            let gradients = rows_of(&config, &x, &target.device).unwrap().gradients;
            let dense = tensor(2, [60], &target.device);
            let problem = Problem::new(gradients, dense, Layout::anonymous(60)).unwrap();
            problem.with_first_order(0.5).unwrap()
        });
        for (method, block_size) in &methods {
            let temperings = if matches!(method, Method::BackSolve) {
                2
            } else {
                1
            };
            for tempering in [0.0, 0.5].into_iter().take(temperings) {
                let config = SolverConfig::new(Budget::Keep(20))
                    .with_method(method.clone())
                    .with_block_size(*block_size);
                let [found, expected] = problems.each_ref().map(|problem| {
                    let problem = problem.clone().with_tempering(tempering).unwrap();
                    solve(&problem, &config).unwrap()
                });
                let name = target.name;
                assert_eq!(found.support, expected.support, "{name}: {method:?}");
                let difference = (found.objective - expected.objective).abs();
                // Sums of the same products in another order.
                assert!(
                    difference < 1e-5 * expected.objective.abs().max(1.0),
                    "{name}: {method:?}: {} for {}",
                    found.objective,
                    expected.objective
                );
            }
        }
        let shards = problems
            .each_ref()
            .map(|problem| problem.gradients().clone());
        // 24 rows of 60 are beyond the bound of the matrix in a file; where none is, there is no bound.
        let joined = GradientMatrix::concat(&shards).unwrap();
        assert!(joined.is_on_disk());
        assert_eq!(joined.row(1).unwrap(), joined.row(13).unwrap());
        let [_, in_memory] = &shards;
        for row in 0..12 {
            assert_eq!(joined.row(row).unwrap(), in_memory.row(row).unwrap());
        }
        let alone = shards.map(|shard| GradientMatrix::concat(&[shard]).unwrap());
        assert_eq!(alone.map(|one| one.is_on_disk()), [true, false]);
    });
}

#[test]
fn the_pruner_solves_the_whole_problem_beyond_its_memory_bound() {
    let folder = tempfile::tempdir().unwrap();
    each_device(|target| {
        let in_memory = config(0.75).with_ridge(RidgeChoice::over([1e-3, 1e-1]));
        let mut on_disk = in_memory.clone();
        on_disk.fisher = bounded(16, &folder);
        // The loader has 16 examples to a batch.
        let run = |config: &PrunerConfig| {
            let loader = |seed| [pairs(seed, &target.device), pairs(seed + 9, &target.device)];
            let loader = |seed| loader(seed).concat();
            config.prune(net(&target.device), loss, loader).unwrap()
        };
        let [found, expected] = [&on_disk, &in_memory].map(run);
        assert_eq!(found.masks, expected.masks);
        for stage in &found.stages {
            assert!(stage.gradients.on_disk);
            assert_eq!(stage.gradients.bytes, 16 * 40 * 4);
        }
        assert_eq!(folder.path().read_dir().unwrap().count(), 0);
    });
}

/// 30, 10 and 6 weights.
#[derive(Module, Debug)]
struct Net {
    first: Linear,
    second: Linear,
    third: Linear,
}

/// The third layer is not used, and has the largest weights.
#[test]
fn a_layer_that_the_loss_does_not_use_is_pruned_first_from_disk_too() {
    let folder = tempfile::tempdir().unwrap();
    each_device(|target| {
        let device = &target.device;
        let net = Net {
            first: LinearConfig::new(6, 5).init(device),
            second: LinearConfig::new(5, 2).init(device),
            third: LinearConfig::new(2, 3).init(device),
        };
        let net = with_numbers(net, 4);
        let selection = Selection::of(&net, None).unwrap();
        let mut weights = values(selection.flatten(&net).unwrap());
        weights[40..].iter_mut().for_each(|weight| *weight = 10.0);
        let weights = Tensor::from_data(&weights[..], device);
        let net = selection.unflatten(net, weights).unwrap();
        let loss = |net: &Net, x: &Tensor<2>| {
            let x = net.first.forward(x.clone()).tanh();
            net.second.forward(x).square().mean()
        };
        for fisher in [bounded(16, &folder), FisherConfig::new(16)] {
            let kept = |budget, method: &Method| {
                let solver = SolverConfig::new(budget).with_method(method.clone());
                let pruned = PrunerConfig::new(solver, fisher.clone())
                    .with_ridge(RidgeChoice::Fixed(1e-2))
                    .prune(net.clone(), loss, |_| [tensor::<2>(5, [16, 6], device)])
                    .unwrap();
                let report = &pruned.stages[0].gradients;
                assert_eq!(report.on_disk, fisher.on_disk.is_some());
                assert_eq!(report.unreached, ["third.weight"]);
                assert_eq!(report.zero_columns, [("third.weight".into(), 6)]);
                let masks = pruned.masks.parameters().iter();
                masks.map(|mask| mask.nonzeros()).collect::<Vec<_>>()
            };
            for method in [
                Method::Magnitude,
                Method::BackSolve,
                Method::Chita(ChitaConfig::new()),
            ] {
                let kept = kept(Budget::Keep(20), &method);
                assert_eq!((kept[0] + kept[1], kept[2]), (20, 0), "{method:?}");
            }
            // Where the budget leaves room, unused weights come back after all others.
            assert_eq!(kept(Budget::Keep(42), &Method::BackSolve), [30, 10, 2]);
        }
    });
}

#[test]
fn a_folder_that_holds_no_file_is_an_error_with_its_path() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("not there");
    let device = Device::flex();
    let mut config = config(0.75);
    config.fisher = bounded(16, &folder);
    config.fisher.on_disk = Some(path.clone());
    let error = prune(&config, &device).unwrap_err();
    let PruneError::Io {
        action, path: at, ..
    } = error
    else {
        panic!("{error}");
    };
    assert_eq!(action, "cannot create a file in");
    assert_eq!(at, path.display().to_string());
    // What fits into memory asks no disk.
    config.fisher.memory_bound = 16 * 4 * 40;
    assert_eq!(weights(&prune(&config, &device).unwrap()).len(), 40);
}

#[test]
fn a_bound_below_one_column_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let config = bounded(12, &folder).with_memory_bound(12 * 4 - 1);
    let x = tensor::<2>(3, [12, 60], &Device::flex());
    let error = rows_of(&config, &x, &Device::flex()).unwrap_err();
    assert_matches!(error, PruneError::MemoryBound { needed: 48, .. });
}

#[test]
fn stages_go_on_with_another_folder_and_another_memory_bound() {
    let (folder, state) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let device = Device::flex();
    let run = |on_disk: Option<std::path::PathBuf>, bound| {
        let mut config = config(0.75).with_state(Some(state.path().into()));
        config.fisher.on_disk = on_disk;
        config.fisher.memory_bound = bound;
        prune(&config, &device).unwrap()
    };
    let before = run(None, 8 << 30);
    // 16 rows of 40 numbers are beyond the last one.
    for bound in [8 << 30, 16 * 4 * 10] {
        let after = run(Some(folder.path().into()), bound);
        assert_eq!(weights(&before), weights(&after));
    }
}

/// All candidates, tuned: walks of the dense network beside the pruned one, and of the pruned one alone.
#[test]
fn a_network_that_is_pruned_from_activations_on_disk_is_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let spilled = folder.path().join("not/there");
    each_device(|target| {
        let mut pruner = Pruner::new(Budget::Sparsity(0.7)).with_effort(Effort::Thorough);
        pruner.tuning = Some(8);
        let pruners = [pruner.clone(), pruner.spilling_to(&spilled)];
        let [in_memory, on_disk] = pruners.map(|pruner| {
            let mut pruned = tuning::pruned(&pruner, &target.device);
            pruned.report.seconds = 0.0;
            for candidate in &mut pruned.report.candidates {
                candidate.seconds = 0.0;
            }
            pruned
        });
        assert_eq!(on_disk.masks.nonzeros(), in_memory.masks.nonzeros());
        // Kernels of a GPU are fused up to where numbers are read, and sum in another order then.
        if !target.is_gpu() {
            assert_eq!(on_disk.masks, in_memory.masks);
            assert_eq!(on_disk.report, in_memory.report);
            assert_eq!(parameters(&on_disk.model), parameters(&in_memory.model));
        }
        assert_eq!(spilled.read_dir().unwrap().count(), 0);
    });
}

#[test]
fn a_folder_that_cannot_be_written_is_named_and_the_model_comes_back() {
    let device = Device::flex();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, b"").unwrap();
    let model: Linear = with_numbers(LinearConfig::new(6, 3).init(&device), 5);
    let inputs = [1, 2].map(|seed| tensor::<2>(seed, [20, 6], &device));
    let pruner = Pruner::new(Budget::Sparsity(0.5)).spilling_to(file.join("folder"));
    let rejected = pruner.prune(model.clone(), |m, x| m.forward(x), inputs);
    let (back, error) = rejected.unwrap_err().into_parts();
    assert_matches!(error, PruneError::Io { .. });
    assert_says!(error, file.to_str().unwrap());
    assert_eq!(parameters(&back), parameters(&model));
}
