//! Replicas that train at once on threads of their own, each as if it were alone.

use std::sync::Barrier;
use std::thread::{scope, yield_now};

use burn::module::Module;
use burn::nn::{BatchNorm, BatchNormConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, FloatDType, Tensor};
use burn_lean::amp::{Autocast, DynamicLossScale, GradScalerConfig, LossScale};

use crate::cases::count;
use crate::hostile::Kind;
use crate::network::Net;
use crate::support::{numbers, parameters};

#[derive(Module, Debug)]
struct Replica {
    norm: BatchNorm,
    net: Net,
}

impl Replica {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.net.forward(self.norm.forward(x))
    }
}

/// Bits of all weights and running statistics after training, and how many steps were skipped.
fn trained(autocast: &Autocast, replica: u64, between: impl Fn(u64)) -> (Vec<u32>, u64) {
    let device = Device::flex().autodiff();
    let mut model = Replica {
        norm: BatchNormConfig::new(8).init(&device),
        net: Net::of(Kind::Ordinary, 100 * replica, &device),
    };
    let rule = DynamicLossScale {
        growth_interval: 10,
        ..DynamicLossScale::default()
    };
    let mut scaler = GradScalerConfig::new(LossScale::Dynamic(rule))
        .init()
        .unwrap();
    let mut optim = AdamWConfig::new().init();
    for step in 0..count(60) as u64 {
        // Each replica has broken batches of its own.
        let kind = match (step + 3 * replica) % 13 {
            0 => Kind::OneInfinity,
            _ => Kind::Ordinary,
        };
        let x = kind.tensor::<2>(1000 * replica + step, [16, 8], &device);
        let forward = |model: &Replica, x| model.forward(x).square().mean();
        let loss = autocast.run(&model, x, forward).unwrap();
        between(step);
        let loss = scaler.scale(loss).unwrap();
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        between(step);
        model = scaler.step(&mut optim, 1e-3, model, grads).unwrap();
    }
    let parameters = parameters(&model).into_iter();
    let bits = parameters.flat_map(|parameter| parameter.values.into_iter().map(f32::to_bits));
    (bits.collect(), scaler.state().skipped_steps)
}

#[test]
fn replicas_under_load_end_as_each_alone() {
    const REPLICAS: u64 = 6;
    for autocast in [
        Autocast::new(FloatDType::F16),
        // One store of recordings for all of them.
        Autocast::new(FloatDType::F16).cached(),
    ] {
        let alone: Vec<_> = (0..REPLICAS)
            .map(|replica| trained(&autocast, replica, |_| ()))
            .collect();
        let all = Barrier::new(REPLICAS as usize);
        let at_once: Vec<_> = scope(|threads| {
            let replicas: Vec<_> = (0..REPLICAS)
                .map(|replica| {
                    let (autocast, all) = (&autocast, &all);
                    threads.spawn(move || {
                        all.wait();
                        trained(autocast, replica, |step| {
                            let pauses = numbers(replica + 7 * step, 1)[0].abs() * 20.0;
                            (0..pauses as usize).for_each(|_| yield_now());
                        })
                    })
                })
                .collect();
            replicas
                .into_iter()
                .map(|replica| replica.join().unwrap())
                .collect()
        });
        assert!(alone.iter().all(|(_, skipped)| *skipped > 0));
        assert!(at_once == alone);
    }
}
