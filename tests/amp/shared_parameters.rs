//! A model that holds a network and its frozen copy: Burn gives both the same identities.

use burn::module::Module;
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{Device, FloatDType};
use burn_lean::amp::{
    AmpError, Autocast, AutocastConfig, Fallback, GradScaler, GradScalerConfig, LossScale,
    Speculative, calibrate_scale, inspect_gradients,
};

use crate::model::{Mlp, bits, gradients, loss};
use crate::support::{each_device, values};

#[derive(Module, Debug)]
struct Pair {
    a: Mlp,
    b: Mlp,
}

impl Pair {
    /// A network and its copy, of which the first is trained, or the second.
    fn new(trained: Trained, device: &Device) -> (Self, Autocast) {
        let online = Mlp::new(1, &device.clone().autodiff());
        let target = online.clone().no_grad();
        assert_eq!(online.first.weight.id, target.first.weight.id);
        let (a, b) = match trained {
            Trained::First => (online, target),
            Trained::Second => (target, online),
        };
        prepare(Self { a, b })
    }

    fn trained(&self, trained: Trained) -> &Mlp {
        match trained {
            Trained::First => &self.a,
            Trained::Second => &self.b,
        }
    }
}

#[derive(Debug, Clone, Copy)]
enum Trained {
    First,
    Second,
}

fn prepare<M: Module>(model: M) -> (M, Autocast) {
    AutocastConfig::new(FloatDType::F16)
        .with_fallback(Fallback::Emulate)
        .prepare(model)
        .unwrap()
}

fn scaler() -> GradScaler {
    GradScalerConfig::new(LossScale::Static(1024.0))
        .with_max_norm(Some(0.01))
        .init()
        .unwrap()
}

/// Scaled gradients of the whole pair, of the loss of its trained half.
fn pair_gradients(
    pair: &Pair,
    trained: Trained,
    autocast: &Autocast,
    scaler: &mut GradScaler,
    step: u64,
    factor: f32,
) -> Result<GradientsParams, AmpError> {
    let loss = scaler.scale(loss(pair.trained(trained), autocast, step, factor))?;
    Ok(GradientsParams::from_grads(loss.backward(), pair))
}

/// All gradients of a network.
fn all(model: &Mlp, grads: &GradientsParams) -> Vec<f32> {
    [&model.first, &model.second]
        .into_iter()
        .flat_map(|linear| {
            let bias = linear.bias.as_ref().unwrap();
            let weight = values(grads.get::<2>(linear.weight.id).unwrap());
            [weight, values(grads.get::<1>(bias.id).unwrap())]
        })
        .flatten()
        .collect()
}

#[test]
fn a_gradient_of_two_parameters_is_unscaled_and_clipped_once() {
    each_device(|target| {
        for trained in [Trained::First, Trained::Second] {
            let (pair, autocast) = Pair::new(trained, &target.device);
            let (alone, _) = prepare(Mlp::new(1, &target.device.clone().autodiff()));
            let mut scaler = scaler();

            let grads = gradients(&alone, &autocast, &mut scaler, 0, 1.0).unwrap();
            let unscaled = scaler.unscale(&alone, grads).unwrap();
            let unscaled_alone = all(&alone, unscaled.gradients());
            let clipped = unscaled.clip_norm(&alone, 0.01).unwrap();
            let clipped_alone = all(&alone, clipped.gradients());
            assert_ne!(unscaled_alone, clipped_alone);

            let network = pair.trained(trained);
            let grads = pair_gradients(&pair, trained, &autocast, &mut scaler, 0, 1.0).unwrap();
            let unscaled = scaler.unscale(&pair, grads).unwrap();
            assert_eq!(all(network, unscaled.gradients()), unscaled_alone);
            let clipped = unscaled.clip_norm(&pair, 0.01).unwrap();
            assert_eq!(all(network, clipped.gradients()), clipped_alone);
        }
    });
}

#[test]
fn a_frozen_copy_changes_neither_step_nor_norm() {
    each_device(|target| {
        let (mut pair, autocast) = Pair::new(Trained::First, &target.device);
        let (mut alone, _) = prepare(Mlp::new(1, &target.device.clone().autodiff()));
        let frozen = bits(&pair.b);
        let mut optims = [SgdConfig::new().init(), SgdConfig::new().init()];
        let mut scalers = [scaler(), scaler()];
        for step in 0..3 {
            let grads =
                pair_gradients(&pair, Trained::First, &autocast, &mut scalers[0], step, 1.0);
            pair = scalers[0]
                .step(&mut optims[0], 0.1, pair, grads.unwrap())
                .unwrap();
            let grads = gradients(&alone, &autocast, &mut scalers[1], step, 1.0).unwrap();
            alone = scalers[1].step(&mut optims[1], 0.1, alone, grads).unwrap();
            let norms = [0, 1].map(|i| scalers[i].report().unwrap().grad_norm);
            assert!(norms[0].unwrap() > 0.01);
            assert_eq!(norms[0], norms[1]);
        }
        assert_eq!(bits(&pair.a), bits(&alone));
        assert_eq!(bits(&pair.b), frozen);
    });
}

#[test]
fn a_shared_gradient_is_reported_once_where_it_is_trained() {
    each_device(|target| {
        for (trained, expected) in [
            (Trained::First, ["a.first.weight", "a.first.bias"]),
            (Trained::Second, ["b.first.weight", "b.first.bias"]),
        ] {
            let (pair, autocast) = Pair::new(trained, &target.device);
            let mut scaler = scaler();
            let grads = pair_gradients(&pair, trained, &autocast, &mut scaler, 0, f32::NAN);
            let grads = grads.unwrap();
            let found = inspect_gradients(&pair, &grads).unwrap();
            assert_eq!(found.len(), 4);
            assert_eq!(found[0].path, expected[0]);
            let calibration = calibrate_scale(&pair, FloatDType::F16, |pair| {
                loss(pair.trained(trained), &autocast, 0, 1.0)
            });
            // 6·8 + 8 and 8·3 + 3.
            assert_eq!(calibration.unwrap().elements, 83);

            let _ = scaler
                .step(&mut SgdConfig::new().init(), 0.1, pair, grads)
                .unwrap();
            let overflow = scaler.report().unwrap().overflow.clone().unwrap();
            let paths: Vec<&str> = overflow.paths().collect();
            assert_eq!(paths.len(), 4, "{paths:?}");
            assert_eq!(paths[..2], expected);
            let details = overflow.inspect().unwrap();
            assert_eq!(details.len(), 4);
            assert_eq!(details[0].path, expected[0]);
        }
    });
}

#[test]
fn a_step_that_is_taken_back_keeps_network_and_copy_apart() {
    each_device(|target| {
        let (mut pair, autocast) = Pair::new(Trained::First, &target.device);
        let copy = pair.clone();
        let factors = [1.0, 1.0, f32::INFINITY, 1.0];
        let mut plain = scaler();
        let mut optim = SgdConfig::new().init();
        let step = |pair: &Pair, scaler: &mut GradScaler, step: usize| {
            let factor = factors[step];
            pair_gradients(pair, Trained::First, &autocast, scaler, step as u64, factor)
        };
        for i in 0..factors.len() {
            let grads = step(&pair, &mut plain, i).unwrap();
            pair = plain.step(&mut optim, 0.1, pair, grads).unwrap();
        }

        let mut training = Speculative::new(copy, SgdConfig::new().init(), scaler());
        for i in 0..factors.len() {
            training
                .step(0.1, |pair, scaler| step(pair, scaler, i))
                .unwrap();
        }
        let (found, _, found_scaler) = training.finish().unwrap();

        assert_eq!(found_scaler.state().skipped_steps, 1);
        assert_ne!(bits(&found.a), bits(&found.b));
        assert_eq!(bits(&found), bits(&pair));
    });
}
