//! The one training loop of all variants, and the error rate of a model.

use std::ops::RangeInclusive;

use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, Tensor};
use burn_lean::amp::{AmpError, Autocast, GradScalerConfig};

use crate::acoustic_model::{AcousticModel, ctc_loss};
use crate::batches::{BATCH_SIZE, batch, by_length, shuffled};
use crate::corpus::Corpus;
use crate::decoding::{CharacterErrors, greedy};
use crate::log_mel::LogMel;
use crate::support;
use crate::utterance::{LENGTHS, Utterance, strings};

/// Times that each test recording is heard, in other strings.
const TEST_ROUNDS: u64 = 5;

/// What all variants have in common.
pub(crate) struct Speech {
    pub(crate) corpus: Corpus,
    pub(crate) log_mel: LogMel,
    /// With autodiff.
    pub(crate) device: Device,
    pub(crate) seed: u64,
    /// The same ones, whatever the seed.
    pub(crate) test: Vec<Utterance>,
}

impl Speech {
    pub(crate) fn new(corpus: Corpus, device: Device, seed: u64) -> Self {
        let rounds = (0..TEST_ROUNDS).flat_map(|round| strings(&corpus.test, LENGTHS, round));
        Self {
            test: rounds.collect(),
            corpus,
            log_mel: LogMel::new(),
            device,
            seed,
        }
    }

    /// Strings of training recordings, others for each round.
    pub(crate) fn strings(&self, round: u64, lengths: RangeInclusive<usize>) -> Vec<Utterance> {
        // Far from the seeds of the test strings and of other runs.
        let seed = self.seed.wrapping_mul(1 << 20).wrapping_add(1 << 16);
        strings(&self.corpus.train, lengths, seed.wrapping_add(round))
    }

    /// Trains with AdamW; the learning rate rises to its highest over the first tenth of the steps
    /// and falls to zero along a cosine.
    ///
    /// Every epoch joins the recordings anew. `autocast` in F32 is a training in F32.
    pub(crate) fn train(
        &self,
        mut model: AcousticModel,
        autocast: &Autocast,
        training: &Training,
    ) -> Result<AcousticModel, AmpError> {
        let mut optim = AdamWConfig::new().with_weight_decay(1e-2).init();
        let mut scaler = GradScalerConfig::for_dtype(autocast.dtype())
            .with_max_norm(Some(1.0))
            .init()?;
        let bar = support::progress(training.epochs as usize, training.name);
        for epoch in 0..training.epochs {
            let round = training.first_round + epoch;
            let strings = self.strings(round, training.lengths(epoch));
            let steps = strings.len().div_ceil(BATCH_SIZE) as f64;
            let mut losses = Vec::new();
            let batches = shuffled(&strings, round, &self.log_mel, &self.device);
            for (step, (spectra, labels, lengths)) in batches.enumerate() {
                let done = epoch as f64 + step as f64 / steps;
                let rate = training.rate * share(done / training.epochs as f64);
                let logits = autocast.run(&model, spectra, AcousticModel::forward)?;
                // In F32, outside: with debug assertions Burn's CTC loss reads the lengths, which a
                // recording does not have.
                let loss = ctc_loss(logits, labels, lengths);
                // Read at the end of the epoch: a GPU would wait for the host here.
                losses.push(loss.clone().inner());
                let grads = scaler.scale(loss)?.backward();
                let grads = GradientsParams::from_grads(grads, &model);
                model = scaler.step(&mut optim, rate, model, grads)?;
            }
            let losses = Tensor::cat(losses, 0).into_data();
            let loss = losses.iter::<f64>().sum::<f64>() / steps;
            bar.set_message(format!("loss {loss:.3}"));
            bar.inc(1);
            tracing::info!(name = training.name, epoch, loss, "epoch");
        }
        bar.finish_and_clear();
        Ok(model)
    }

    /// Error rate over the test strings, for a model on any device.
    pub(crate) fn errors(
        &self,
        device: &Device,
        logits: impl Fn(Tensor<3>) -> Result<Tensor<3>, AmpError>,
    ) -> Result<CharacterErrors, AmpError> {
        let mut errors = CharacterErrors::default();
        for group in by_length(&self.test) {
            let (spectra, ..) = batch(&group, &self.log_mel, device);
            for (utterance, heard) in group.iter().zip(greedy(logits(spectra)?)) {
                errors.add(&utterance.symbols, &heard);
            }
        }
        Ok(errors)
    }
}

/// How a model is trained.
pub(crate) struct Training {
    pub(crate) name: &'static str,
    pub(crate) epochs: u64,
    /// Number of the first epoch's strings; those of a number are always the same.
    pub(crate) first_round: u64,
    /// Learning rate at its highest.
    pub(crate) rate: f64,
    /// Whether the model knows nothing: then the first quarter of the epochs has single symbols, and
    /// the second up to three. Longer strings at once keep a new model at blanks alone for long.
    pub(crate) from_scratch: bool,
}

impl Training {
    /// Symbols of a string in an epoch.
    fn lengths(&self, epoch: u64) -> RangeInclusive<usize> {
        match self.from_scratch {
            true if 4 * epoch < self.epochs => 1..=1,
            true if 2 * epoch < self.epochs => 1..=3,
            _ => LENGTHS,
        }
    }
}

/// The share of the highest learning rate at a point of the training, from 0 to 1.
fn share(done: f64) -> f64 {
    const WARM_UP: f64 = 0.1;
    match done < WARM_UP {
        true => (done / WARM_UP).max(0.01),
        false => {
            let fallen = (done - WARM_UP) / (1.0 - WARM_UP);
            0.5 * (1.0 + (std::f64::consts::PI * fallen).cos())
        }
    }
}
