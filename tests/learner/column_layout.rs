//! Layers whose records hold their weights transposed: Burn compares the shape of what it loads with that of the
//! weight, once that was used.

use burn::module::{Module, ModuleDisplay};
use burn::nn::{Linear, LinearConfig, LinearLayout};
use burn::optim::SgdConfig;
use burn::tensor::activation::relu;
use burn::tensor::{Device, FloatDType, Tensor};
use burn::train::{InferenceStep, Learner, TrainOutput, TrainStep};
use burn_lean::prune::{LayerKind, Layout, Masks};
use burn_lean_amp::{
    AfterStep, Amp, AmpInferenceStep, AmpTrainStep, Autocast, AutocastConfig, GradScalerConfig,
};

use crate::after_step::training;
use crate::devices::{on_tracked, with_numbers};
use crate::support::{Batch, bits, samples};

#[derive(Module, Debug)]
struct Column {
    first: Linear,
    second: Linear,
}

impl Column {
    fn new(seed: u64, device: &Device) -> Self {
        let linear = |from, to| {
            let config = LinearConfig::new(from, to).with_layout(LinearLayout::Col);
            config.init(device)
        };
        let net = Self {
            first: linear(2, 8),
            second: linear(8, 1),
        };
        with_numbers(net, seed)
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.second.forward(relu(self.first.forward(x)))
    }

    /// With 10 of the 16 weights of the first layer, and all of the second.
    fn masked(self) -> Self {
        let mut layout = Layout::new();
        layout.push("first.weight", [2, 8], LayerKind::Linear, 2.0);
        layout.push("second.weight", [8, 1], LayerKind::Linear, 1.0);
        let kept: Vec<usize> = (0..10).chain(16..24).collect();
        let masks = Masks::from_support(&layout, &kept).unwrap();
        masks.attach(self).unwrap()
    }
}

impl AmpTrainStep for Column {
    type Input = Batch;
    type Output = ();

    fn train_step(&self, autocast: &Autocast, batch: Batch) -> (Tensor<1>, ()) {
        let y = autocast.forward(batch.x, |x| self.forward(x));
        ((y - batch.y).square().mean(), ())
    }
}

impl AmpInferenceStep for Column {
    type Input = Batch;
    type Output = ();

    fn inference_step(&self, _autocast: &Autocast, _batch: Batch) {}
}

impl TrainStep for Column {
    type Input = Batch;
    type Output = ();

    fn step(&self, batch: Batch) -> TrainOutput<()> {
        let loss = (self.forward(batch.x) - batch.y).square().mean();
        TrainOutput::new(self, loss.backward(), ())
    }
}

impl InferenceStep for Column {
    type Input = Batch;
    type Output = ();

    fn step(&self, _batch: Batch) {}
}

fn numbers<M: Module>(model: &M) -> Vec<f32> {
    let bits = bits(model).into_iter().flat_map(|(_, bits)| bits);
    bits.map(f32::from_bits).collect()
}

/// Of models with these seeds: one trains at a stretch, the other goes on from the first one's checkpoint.
fn assert_resumes<M>(model: impl Fn(u64) -> M)
where
    M: TrainStep<Input = Batch, Output = ()>
        + InferenceStep<Input = Batch, Output = ()>
        + Module
        + ModuleDisplay
        + std::fmt::Display
        + 'static,
{
    let learner = |seed| Learner::new(model(seed), SgdConfig::new().init(), 0.1);
    let whole = tempfile::tempdir().unwrap();
    let whole = training(whole.path(), samples(16))
        .num_epochs(2)
        .launch(learner(1));
    assert!(whole.error.is_none(), "{:?}", whole.error);

    let directory = tempfile::tempdir().unwrap();
    let train = || training(directory.path(), samples(16)).with_default_checkpointers();
    train().num_epochs(1).launch(learner(1));
    let resumed = train().num_epochs(2).checkpoint(1).launch(learner(2));
    // Not to the last bit: a transposed matrix is multiplied in another order.
    assert_near!(
        numbers(&resumed.model).into_iter(),
        numbers(&whole.model),
        1e-5
    );
}

fn autocast() -> AutocastConfig {
    AutocastConfig::new(FloatDType::F32)
}

#[test]
fn a_layer_in_column_layout_goes_on_from_burns_checkpoint() {
    on_tracked(|device| {
        let scaler = GradScalerConfig::for_dtype(FloatDType::F32);
        assert_resumes(|seed| Amp::new(Column::new(seed, &device), &autocast(), &scaler).unwrap());
        // Its weights were used: they were given numbers.
        assert_resumes(|seed| AfterStep::new(Column::new(seed, &device), |net| net));
        assert_resumes(|seed| AfterStep::new(Column::new(seed, &device).masked(), |net| net));
    });
}

#[test]
fn what_is_prepared_or_masked_takes_the_record_of_such_a_layer() {
    on_tracked(|device| {
        for prepares in [true, false] {
            let new = |seed| {
                let net = Column::new(seed, &device);
                match prepares {
                    true => autocast().prepare(net).unwrap().0,
                    false => net.masked(),
                }
            };
            let (saved, other) = (new(1), new(2));
            let loaded = other.try_load_record(saved.clone().into_record()).unwrap();
            assert_eq!(bits(&loaded), bits(&saved));
            assert!(loaded.first.weight.is_require_grad());
        }
    });
}
