//! How the models of the example are trained and quantized.

use std::fmt;

use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::tensor::Tensor;
use burn_lean::quant::{
    FakeQuantizeConfig, GptqConfig, Learned, NumberFormat, ObserverConfig, PtqConfig, QatConfig,
    QuantError, QuantizedForward, RangeMethod, Rounding, RoundingConfig, Schedule, Scheme,
    WeightConfig, WeightRange, module::learned_parameters, rounding::AdaRoundConfig,
};

use crate::support::{self, ConvNet, Images};

/// Bits of weights and activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Bits {
    weights: u8,
    activations: u8,
}

impl Bits {
    pub(crate) const ALL: [Self; 4] = [
        Self::new(8, 8),
        Self::new(4, 8),
        Self::new(4, 4),
        Self::new(2, 8),
    ];

    const fn new(weights: u8, activations: u8) -> Self {
        Self {
            weights,
            activations,
        }
    }

    /// Which of all it is.
    pub(crate) fn place(self) -> Option<usize> {
        Self::ALL.iter().position(|bits| *bits == self)
    }

    /// Per-channel weights and per-tensor activations.
    fn config(self, learned: Learned) -> QatConfig {
        let activation = Scheme::affine(NumberFormat::uint(self.activations));
        QatConfig::new()
            .with_weight(WeightConfig::int(self.weights).with_learned(learned))
            .with_activation(Some(
                FakeQuantizeConfig::new(activation).with_learned(learned),
            ))
    }
}

impl fmt::Display for Bits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "W{}A{}", self.weights, self.activations)
    }
}

/// How long and how fast.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Training {
    pub(crate) epochs: usize,
    /// Learning rate of AdamW at the start; it falls to zero along a cosine.
    rate: f64,
}

const BATCH_SIZE: usize = 32;

impl Training {
    pub(crate) fn new(epochs: usize, rate: f64) -> Self {
        Self { epochs, rate }
    }

    fn steps(&self, images: &Images) -> usize {
        self.epochs * images.len().div_ceil(BATCH_SIZE)
    }

    fn rate(&self, step: usize, steps: usize) -> f64 {
        let progress = step as f64 / steps as f64;
        self.rate * 0.5 * (1.0 + (std::f64::consts::PI * progress).cos())
    }
}

/// Logits `[batch, 10]`, with the quantizers that the model carries, if any.
pub(crate) fn logits(model: &ConvNet, images: Tensor<4>) -> Result<Tensor<2>, QuantError> {
    QuantizedForward::new().run(model, images, |model, images| model.forward(images))
}

/// A plain training loop. What quantization adds to it is that the forward pass is run with the
/// quantizers of the model, and an optimizer of their own for learned scales, which want no weight
/// decay.
pub(crate) fn train(
    mut model: ConvNet,
    training: &Training,
    images: &Images,
    seed: u64,
    name: &str,
) -> Result<ConvNet, QuantError> {
    let device = model.devices().remove(0);
    let optimizer: ModuleOptimizer = AdamWConfig::new().with_weight_decay(1e-4).init();
    let scales = AdamWConfig::new().with_weight_decay(0.0).build();
    let mut optimizer = optimizer.with_group(learned_parameters(), scales, None);
    let cross_entropy = CrossEntropyLossConfig::new().init(&device);
    let quantized = QuantizedForward::new();
    let steps = training.steps(images);
    let bar = support::progress(steps, format!("{name}, seed {}", seed as u32));
    let mut step = 0;
    for epoch in 0..training.epochs as u64 {
        for batch in images.shuffled(seed.wrapping_add(epoch), BATCH_SIZE, &device) {
            let logits =
                quantized.run(&model, batch.images, |model, images| model.forward(images))?;
            let loss = cross_entropy.forward(logits, batch.labels);
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            model = optimizer.step(training.rate(step, steps), model, grads);
            step += 1;
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    Ok(model)
}

/// Fine-tunes with learned step sizes.
pub(crate) fn quantize_in_training(
    model: ConvNet,
    bits: Bits,
    (training, seed): (&Training, u64),
    images: &Images,
) -> Result<ConvNet, QuantError> {
    // Eight steps collect ranges; of a training shorter than sixteen, half of it.
    let observed = (training.steps(images) / 2).min(8) as u64;
    let config = bits
        .config(Learned::Lsq)
        .with_schedule(Schedule::new().with_quantize_from(observed));
    let model = config.prepare(model)?;
    train(model, training, images, seed, &format!("QAT {bits}"))
}

/// Images for calibration.
const CALIBRATION: usize = 512;

/// Tries several ways and returns the model that is best on validation images, with its way.
pub(crate) fn quantize_after_training(
    model: ConvNet,
    bits: Bits,
    images: &Images,
    validate: impl Fn(&ConvNet) -> f64,
) -> Result<(ConvNet, String), QuantError> {
    let device = model.devices().remove(0);
    let images = images.take(CALIBRATION);
    let roundings = [
        Rounding::Nearest,
        Rounding::Gptq(GptqConfig::new()),
        Rounding::AdaRound(AdaRoundConfig::new()),
    ];
    let mut best: Option<(f64, ConvNet, String)> = None;
    for range in [WeightRange::MinMax, WeightRange::LeastSquares] {
        for rounding in &roundings {
            let config = PtqConfig::new()
                .with_quantize(bits.config(Learned::None))
                .with_observers(vec![
                    ObserverConfig::MinMax,
                    ObserverConfig::histogram(RangeMethod::Search),
                    ObserverConfig::histogram(RangeMethod::percentile()),
                ])
                .with_weight_range(range)
                .with_rounding(RoundingConfig::new().with_rounding(rounding.clone()));
            let (quantized, _) = config.quantize(
                model.clone(),
                || images.ordered(BATCH_SIZE, &device),
                |model, batch| logits(model, batch.images),
            )?;
            let accuracy = validate(&quantized);
            if best.as_ref().is_none_or(|(best, ..)| accuracy > *best) {
                let way = format!("{range:?}, {rounding:?}");
                best = Some((accuracy, quantized, way));
            }
        }
    }
    match best {
        Some((_, model, way)) => Ok((model, way)),
        None => Ok((model, "none".into())),
    }
}
