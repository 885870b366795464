//! What a pruner does with the running statistics of BatchNorm layers.

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Distribution, Tensor};
use burn_lean::prune::{
    Budget, FisherConfig, GradualPruner, Method, PruneError, Pruned, PrunerConfig, RidgeChoice,
    RunningStatistics, Selection, SolverConfig, SparseRecord, StageMethod, mean_loss,
    recompute_batch_norm,
};

use crate::support::{each_device, on_each, on_tracked, tensor, values, with_numbers};

#[derive(Module, Debug)]
struct Net {
    conv: Conv2d,
    norm: BatchNorm,
    head: Linear,
}

impl Net {
    /// With the statistics that its layers have on the examples.
    fn new(device: &Device) -> Self {
        let net = Self {
            conv: Conv2dConfig::new([2, 4], [3, 3]).init(device),
            norm: BatchNormConfig::new(4).init(device),
            head: LinearConfig::new(4 * 3 * 3, 2).init(device),
        };
        let loss = |net: &Self, x: &Tensor<4>| net.forward(x);
        recompute_batch_norm(with_numbers(net, 3), loss, [pixels(9, 1.0, device)]).unwrap()
    }

    fn forward(&self, x: &Tensor<4>) -> Tensor<2> {
        let x = relu(self.norm.forward(self.conv.forward(x.clone())));
        self.head.forward(x.flatten(1, 3))
    }

    fn loss(&self, (x, y): &Images) -> Tensor<1> {
        (self.forward(x) - y.clone()).square().mean()
    }

    fn statistics(&self) -> Vec<f32> {
        let mean = values(self.norm.running_mean.value_sync());
        let variance = values(self.norm.running_var.value_sync());
        mean.into_iter().chain(variance).collect()
    }
}

/// Images, with what the net makes of them before it is pruned.
type Images = (Tensor<4>, Tensor<2>);

fn pixels(seed: u64, size: f32, device: &Device) -> Tensor<4> {
    tensor::<4>(seed, [24, 2, 5, 5], device) * size + 0.5 * size
}

fn images(seed: u64, size: f32, device: &Device) -> Images {
    let x = pixels(seed, size, device);
    let y = Net::new(device).forward(&x);
    (x, y)
}

/// By magnitude, of which the statistics know nothing; gradients of the first 24 examples.
fn config(sparsity: f64, ridge: RidgeChoice) -> PrunerConfig {
    let solver = SolverConfig::new(Budget::Sparsity(sparsity)).with_method(Method::Magnitude);
    PrunerConfig::new(solver, FisherConfig::new(24)).with_ridge(ridge)
}

/// Examples for the gradients, then the held-out ones.
fn prune(config: &PrunerConfig, batches: &[Images], device: &Device) -> Pruned<Net> {
    let loader = |_| batches.to_vec();
    config.prune(Net::new(device), Net::loss, loader).unwrap()
}

#[test]
fn new_statistics_are_judged_and_taken_where_they_are_better() {
    on_each(|device| {
        let old = Net::new(device).statistics();
        let batches = [images(1, 1.0, device), images(2, 1.0, device)];
        for ridge in [RidgeChoice::Fixed(1e-2), RidgeChoice::over([1e-2, 1e-1])] {
            let pruned = prune(&config(0.7, ridge.clone()), &batches, device);
            let stage = &pruned.stages[0];
            let judged = stage.statistics.unwrap();
            assert!(judged.recomputed, "{judged:?}");
            assert!(judged.recomputed_loss < judged.kept_loss, "{judged:?}");
            // What comes back is what was judged, and each ridge was judged like that.
            let loss = mean_loss(&pruned.model, Net::loss, &batches[1..]).unwrap();
            assert_eq!(loss, judged.recomputed_loss);
            for candidate in &stage.ridges {
                assert_eq!(candidate.loss, loss);
            }
            assert_ne!(pruned.model.statistics(), old);
            let again = recompute_batch_norm(pruned.model.clone(), Net::loss, [batches[0].clone()]);
            assert_eq!(again.unwrap().statistics(), pruned.model.statistics());
        }
    });
}

#[test]
fn statistics_that_are_worse_on_the_held_out_examples_are_not_taken() {
    let device = Device::flex();
    let old = Net::new(&device).statistics();
    // The gradients come from examples of another size, and hardly anything is pruned.
    let batches = [images(1, 100.0, &device), images(2, 1.0, &device)];
    let config = config(0.02, RidgeChoice::Fixed(1e-2));
    let judged = prune(&config, &batches, &device);
    let statistics = judged.stages[0].statistics.unwrap();
    assert!(
        statistics.kept_loss < statistics.recomputed_loss,
        "{statistics:?}"
    );
    assert!(!statistics.recomputed);
    assert_eq!(judged.model.statistics(), old);
    let forced = config.with_running_statistics(RunningStatistics::Recomputed);
    let forced = prune(&forced, &batches, &device);
    assert!(forced.stages[0].statistics.unwrap().recomputed);
    assert_ne!(forced.model.statistics(), old);
}

#[test]
fn statistics_can_be_kept_and_are_judged_by_the_samples_where_nothing_is_held_out() {
    let device = Device::flex();
    let batches = [images(1, 1.0, &device), images(2, 1.0, &device)];
    let fixed = config(0.7, RidgeChoice::Fixed(1e-2));
    let kept = fixed
        .clone()
        .with_running_statistics(RunningStatistics::Kept);
    let kept = prune(&kept, &batches, &device);
    assert_eq!(kept.stages[0].statistics, None);
    assert_eq!(kept.model.statistics(), Net::new(&device).statistics());

    let judged = prune(&fixed, &batches[..1], &device);
    let statistics = judged.stages[0].statistics.unwrap();
    let loss = mean_loss(&judged.model, Net::loss, &batches[..1]).unwrap();
    assert_eq!(statistics.recomputed_loss.min(statistics.kept_loss), loss);
}

#[test]
fn a_batch_whose_parts_differ_is_refused_before_it_is_looked_at() {
    let device = Device::flex();
    let (x, y) = images(1, 1.0, &device);
    let batch = (x, y.slice([0..5]));
    let config = config(0.7, RidgeChoice::Fixed(1e-2));
    let rejected = config.prune(Net::new(&device), Net::loss, |_| [batch.clone()]);
    let error = rejected.unwrap_err().into_error();
    assert_matches!(error, PruneError::Mismatch { .. });
}

/// A step without a look at the model afterwards: Burn keeps its statistics apart.
fn stepped(net: Net, seed: u64) -> Net {
    let device = net.devices().remove(0);
    let loss = net.loss(&images(seed, 1.0, &device));
    let grads = GradientsParams::from_grads(loss.backward(), &net);
    SgdConfig::new().init().step(0.01, net, grads)
}

#[test]
fn a_run_that_goes_on_has_the_statistics_of_the_last_step_and_leaves_those_of_clones() {
    each_device(|target| {
        let device = target.device.clone().autodiff();
        let folder = tempfile::tempdir().unwrap();
        let dense = Net::new(&device);
        let before = dense.valid().statistics();
        let run = |trains: bool| {
            let mut gradual = GradualPruner::new(Budget::Sparsity(0.75), 2, 1, 1);
            gradual.state = Some(folder.path().into());
            let loader = |seed| [pixels(seed, 1.0, &target.device)];
            let forward = |net: &Net, x: Tensor<4>| net.forward(&x);
            let pruned = gradual.prune(dense.clone(), forward, loader, |net, epoch| {
                assert!(trains, "all stages are finished");
                Ok(stepped(net, 50 + epoch.stage as u64))
            });
            let model = pruned.unwrap().model;
            let weight = model.conv.weight.val();
            assert!(weight.is_autodiff() && weight.is_require_grad());
            model.valid().statistics()
        };
        let whole = run(true);
        assert_ne!(whole, before);
        assert_eq!(run(false), whole);
        assert_eq!(dense.valid().statistics(), before);
    });
}

#[test]
fn a_sparse_record_has_the_statistics_of_the_last_step_and_replaces_those_of_a_later_one() {
    on_tracked(|device| {
        let net = stepped(Net::new(&device), 50);
        let record = SparseRecord::from_module(&net).unwrap();
        let expected = net.valid().statistics();
        let later = stepped(net, 51);
        let clone = later.clone();
        let loaded = record.load_into(later).unwrap();
        assert_eq!(loaded.valid().statistics(), expected);
        assert!(loaded.conv.weight.val().is_require_grad());
        assert_ne!(clone.valid().statistics(), expected);
    });
}

#[test]
fn statistics_that_are_not_finite_are_refused_by_magnitude_too() {
    let device = Device::flex();
    let mut gradual = GradualPruner::new(Budget::Sparsity(0.5), 1, 0, 0);
    gradual.method = StageMethod::Magnitude;
    gradual.pruner.examples = 24;
    let loader = |seed| {
        let x = pixels(seed, 1.0, &device);
        [x.clone() * f32::NAN, x]
    };
    let forward = |net: &Net, x: Tensor<4>| net.forward(&x);
    let net = Net::new(&device);
    let before = net.statistics();
    let pruned = gradual.prune(net, forward, loader, |net, _| Ok(net));
    let (net, error) = pruned.unwrap_err().into_parts();
    let path = "norm.running_mean".into();
    assert_eq!(error, PruneError::NonFiniteStatistics { path });
    assert_eq!(net.statistics(), before);
}

/// Burn's copies of a model share running statistics: a dense teacher is one.
#[test]
fn copies_of_the_dense_model_keep_their_statistics() {
    let device = Device::flex().autodiff();
    let folder = tempfile::tempdir().unwrap();
    // Also where stages are kept.
    for state in [None, Some(folder.path().to_path_buf())] {
        let dense = Net::new(&device);
        let teacher = dense.clone();
        let before = teacher.statistics();
        let solver = SolverConfig::new(Budget::Sparsity(0.5));
        let config = PrunerConfig::new(solver, FisherConfig::new(24))
            .with_ridge(RidgeChoice::Fixed(1e-2))
            .with_running_statistics(RunningStatistics::Kept)
            .with_state(state);
        let loader = |seed| [images(seed, 1.0, &Device::flex())];
        let pruned = config.prune_with(dense, Net::loss, loader, |model, _, _| {
            model.forward(&pixels(7, 5.0, &device));
            Ok(model)
        });
        assert_ne!(pruned.unwrap().model.statistics(), before);
        assert_eq!(teacher.statistics(), before);
    }
}

/// Those that judge are held out, also where they are in the batch of the samples.
#[test]
fn new_statistics_are_those_of_the_examples_that_gave_the_gradients() {
    let device = Device::flex();
    let solver = SolverConfig::new(Budget::Sparsity(0.5));
    let folder = tempfile::tempdir().unwrap();
    let fisher = FisherConfig::new(10).with_on_disk(Some(folder.path().into()));
    let whole = fisher.bytes_needed(&Selection::of(&Net::new(&device), None).unwrap());
    for bound in [whole, whole / 4] {
        let config = PrunerConfig::new(solver.clone(), fisher.clone().with_memory_bound(bound))
            .with_ridge(RidgeChoice::Fixed(1e-2))
            .with_running_statistics(RunningStatistics::Recomputed);
        let batch = images(1, 1.0, &device);
        let pruned = config
            .prune(Net::new(&device), Net::loss, |_| [batch.clone()])
            .unwrap();
        assert_eq!(pruned.stages[0].gradients.on_disk, bound < whole);
        let seen = [burn_lean::prune::Batch::slice(&batch, 0..10)];
        let expected = recompute_batch_norm(pruned.model.clone(), Net::loss, seen).unwrap();
        assert_eq!(pruned.model.statistics(), expected.statistics());
    }
}

/// Two passes over the same batch then have other statistics.
#[test]
fn new_statistics_of_a_forward_pass_that_draws_numbers_are_those_of_the_draws() {
    on_tracked(|device| {
        for seed in 0..6 {
            device.seed(seed);
            let batches = (0..8).map(|_| Tensor::<2>::zeros([256, 1], &device));
            let noisy = |norm: &BatchNorm, x: &Tensor<2>| {
                let noise = x.random_like(Distribution::Normal(0.0, 100.0));
                norm.forward(x.clone() + noise)
            };
            let norm = BatchNormConfig::new(1).init(&device);
            let norm = recompute_batch_norm(norm, noisy, batches).unwrap();
            let variance = values(norm.running_var.value_sync())[0];
            // Of 2048 draws, within 6 standard errors of 10,000.
            assert!((8_000.0..12_000.0).contains(&variance), "{variance}");
        }
    });
}
