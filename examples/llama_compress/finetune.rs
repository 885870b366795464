//! What is left of a pruned model learns to do as the original model.

use std::error::Error;

use burn::module::{Module, ParamGroup};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_lean::oneshot::Compressed;
use burn_lean::prune::Masks;
use burn_lean::recipe::Distillation;
use burn_lean::reparam::each_float;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::checkpoint::Windows;
use super::llama::Llama;

/// Windows in a step.
const BATCH: usize = 4;
/// Learning rate at its highest, after the first tenth of the steps; it falls towards zero.
const RATE: f64 = 2e-3;

/// How long, and from which seed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Finetuning {
    pub(crate) steps: usize,
    pub(crate) seed: u64,
}

/// Trains all parameters of a pruned model on windows of text, with its zeros held; `each` is told the
/// loss of each step. The report stays that of pruning.
pub(crate) fn finetune(
    done: &Compressed<Llama>,
    original: &Llama,
    windows: &Windows,
    Finetuning { steps, seed }: Finetuning,
    device: &Device,
    mut each: impl FnMut(Tensor<1>),
) -> Result<Compressed<Llama>, Box<dyn Error>> {
    let paths = done.weights.iter().map(|weight| weight.path.clone());
    let masks = Masks::from_zeros(&done.model, &ParamGroup::from_paths(paths.collect()))?;
    let mut model = masks.attach(done.model.clone().train())?;
    let training = device.clone().autodiff();
    let mut optimizer = AdamWConfig::new().with_weight_decay(0.0).init();
    let mut rng = StdRng::seed_from_u64(seed);
    let inputs = windows.length - 1;
    for step in 0..steps {
        let tokens: Vec<i32> = (0..BATCH)
            .flat_map(|_| {
                let window = rng.random_range(0..windows.count()) * windows.length;
                windows.tokens[window..window + inputs].to_vec()
            })
            .collect();
        let tokens = TensorData::new(tokens, [BATCH, inputs]);
        let teacher = original.forward(Tensor::<2, Int>::from_data(tokens.clone(), device));
        let student = model.forward(Tensor::from_data(tokens, &training));
        let loss = Distillation::new(1.0, 1.0).logits(student, teacher.autodiff());
        each(loss.clone().detach());
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(rate(step, steps), model, grads);
    }
    let model = model.valid().materialize();
    let mut weights = done.weights.clone();
    each_float(&model, |at, float| {
        let path = at.path();
        let Some(weight) = weights.iter_mut().find(|one| one.path == path) else {
            return;
        };
        let (outputs, inputs) = (weight.outputs, weight.inputs);
        let stored = float.values();
        let by_output = |at: usize| stored[at % inputs * outputs + at / inputs];
        weight.values = match weight.transposed {
            true => (0..stored.len()).map(by_output).collect(),
            false => stored,
        };
    });
    Ok(Compressed {
        model,
        report: done.report.clone(),
        weights,
    })
}

fn rate(step: usize, steps: usize) -> f64 {
    // The last step is one, too.
    let done = (step + 1) as f64 / (steps + 1) as f64;
    RATE * (10.0 * done).min((1.0 - done) / 0.9)
}
