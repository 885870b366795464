//! Several devices, as far as one CPU can show them.

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::nn::LinearConfig;
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{Device, FloatDType, Tensor};
use burn::train::{ExecutionStrategy, Learner, MultiDeviceOptim, TrainingStrategy};
use burn_lean::prune::{LayerKind, Layout, Masks};
use burn_lean::quant::{ForwardQ, Learned, QatConfig, WeightConfig};
use burn_lean::reparam::{ChainReparameterizer, attach, map_leaf};
use burn_lean_amp::{Amp, GradScalerConfig};

use crate::devices::{each_device, on_tracked, tensor, with_numbers};
use crate::support::{
    Mlp, Row, amp, batch, bits, error_of, samples, samples_with_infinity, scaler, training,
};

#[test]
fn two_workers_train_with_the_optimizer_on_the_main_device() {
    two_workers_train(MultiDeviceOptim::OptimMainDevice);
}

#[test]
fn two_workers_train_with_a_sharded_optimizer() {
    two_workers_train(MultiDeviceOptim::OptimSharded);
}

fn two_workers_train(optim: MultiDeviceOptim) {
    let device = Device::flex().autodiff();
    let amp = amp(
        &device,
        FloatDType::F16,
        &GradScalerConfig::for_dtype(FloatDType::F16),
    );
    let before = error_of(amp.model(), &device);

    // Four steps an epoch of two batches each; one batch of the second worker is infinite.
    let model = train(amp, optim, samples_with_infinity(32, &[30]), 10);

    let state = model.state().unwrap();
    assert_eq!((state.steps, state.skipped_steps), (40, 10));
    assert_eq!(state.scale, 64.0);
    let after = error_of(model.model(), &device);
    assert!(after < 0.1 * before, "{before} -> {after}");
}

#[test]
fn both_places_of_the_optimizer_give_the_same_step() {
    let config = scaler().with_max_norm(Some(0.5));
    let device = Device::flex().autodiff();
    let model = |optim| {
        let amp = amp(&device, FloatDType::F16, &config);
        train(amp, optim, samples(8), 1)
    };

    let main = model(MultiDeviceOptim::OptimMainDevice);
    let sharded = model(MultiDeviceOptim::OptimSharded);

    assert_eq!(bits(main.model()), bits(sharded.model()));
    assert_eq!(main.state(), sharded.state());
}

fn train(amp: Amp<Mlp>, optim: MultiDeviceOptim, rows: Vec<Row>, epochs: usize) -> Amp<Mlp> {
    let directory = tempfile::tempdir().unwrap();
    let devices = vec![Device::flex().autodiff(), Device::flex().autodiff()];
    let strategy = ExecutionStrategy::multi(devices, optim);
    let result = training(directory.path(), rows, 4)
        .with_training_strategy(TrainingStrategy::Default(strategy))
        .num_epochs(epochs)
        .launch(Learner::new(amp, SgdConfig::new().init(), 0.05));
    assert!(result.error.is_none(), "{:?}", result.error);
    result.model
}

// Burn reduces gradients over devices on CUDA only. This does by hand what its distributed
// strategy does: a learner per replica, batches of their own, the same reduced gradients.
#[test]
fn replicas_with_the_same_reduced_gradients_stay_in_lock_step() {
    on_tracked(|device| {
        let amp = amp(&device, FloatDType::F16, &scaler());
        let schedule = amp.lr_scheduler(0.1).unwrap();
        let mut main = Learner::new(amp, SgdConfig::new().init(), schedule);
        let mut other = main.clone();
        main.fork(&device);
        other.fork(&device);

        for broken in [false, true, false, true, true] {
            let broken: &[usize] = if broken { &[1] } else { &[] };
            let mut grads = [
                main.train_step(batch(&samples_with_infinity(4, broken), &device))
                    .grads,
                other.train_step(batch(&samples(7), &device)).grads,
            ];
            main.model().model().visit(&mut Reduce(&mut grads));
            for (learner, grads) in [&mut main, &mut other].into_iter().zip(grads) {
                learner.lr_step();
                learner.optimizer_step(grads);
            }
        }

        let state = main.model().state().unwrap();
        assert_eq!((state.steps, state.skipped_steps), (5, 3));
        assert_eq!(other.model().state().unwrap(), state);
        assert_eq!(bits(main.model().model()), bits(other.model().model()));
        // Burn's distributed training marks every float parameter, which only autodiff tensors bear.
        main.model().visit(&mut OnAutodiff);
    });
}

/// Adds the gradients of two replicas up, for both.
struct Reduce<'a>(&'a mut [GradientsParams; 2]);

impl ModuleVisitor for Reduce<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let [a, b] = &mut *self.0;
        let sum = a.remove::<D>(param.id).unwrap() + b.remove::<D>(param.id).unwrap();
        a.register(param.id, sum.clone());
        b.register(param.id, sum);
    }
}

struct OnAutodiff;

impl ModuleVisitor for OnAutodiff {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        assert!(param.val().is_autodiff());
    }
}

/// Marks every float parameter as Burn's distributed training does, where the device can be marked.
struct Mark {
    can_be: bool,
}

impl ModuleMapper for Mark {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, value, mapper) = param.consume();
        assert!(value.is_autodiff());
        let value = match self.can_be {
            true => value.set_distributed(id),
            false => value,
        };
        Param::from_mapped_value(id, value, mapper)
    }
}

/// What is trained has the mark.
struct Marked;

impl ModuleVisitor for Marked {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if param.is_require_grad() {
            assert!(param.base().is_distributed());
        }
    }
}

struct Clip;

impl ModuleMapper for Clip {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        map_leaf(param, |value| value.clamp(-0.5, 0.5))
    }
}

fn masks(support: &[usize]) -> Masks {
    let mut layout = Layout::new();
    layout.push("weight", [4, 2], LayerKind::Linear, 2.0);
    Masks::from_support(&layout, support).unwrap()
}

#[test]
fn masks_and_quantizers_can_be_marked_for_distributed_training_and_stay_so() {
    each_device(|target| {
        let device = target.device.clone().autodiff();
        let net = with_numbers(LinearConfig::new(4, 2).init(&device), 3);
        let weight = WeightConfig::int(4).with_learned(Learned::Lsq);
        let config = QatConfig::new().with_weight(weight);
        let carried = ChainReparameterizer::new(
            masks(&[0, 1, 2, 3, 4, 5]).reparameterizer(&net).unwrap(),
            config.reparameterizer(&net).unwrap(),
        );
        let net = attach(net, carried).unwrap();
        for net in [net.clone(), net.valid().train()] {
            let can_be = target.is_gpu();
            let net = net.map(&mut Mark { can_be });
            // A base with other zeros, a learned scale that begins, clipped weights.
            let net = masks(&[0, 3]).replace(net).unwrap();
            net.forward_q(tensor::<2>(1, [3, 4], &device));
            let net = net.map(&mut Clip);
            assert!(net.weight.is_require_grad());
            if can_be {
                net.visit(&mut Marked);
            }
        }
    });
}
