//! FP32, mixed precision, pruned, quantized: each trained, written to its file, and measured as it
//! is read back from there.

use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use burn::module::Module;
use burn::store::ModuleRecord;
use burn::tensor::{Device, FloatDType};
use burn_lean::amp::Autocast;
use burn_lean::prune::{Budget, FisherConfig, PrunerConfig, SolverConfig, SparseRecord};
use burn_lean::quant::{ConvertConfig, LoadConfig, PtqConfig, Unsupported, save_safetensors};

use crate::acoustic_model::{AcousticModel, loss};
use crate::batches::{Batch, shuffled};
use crate::decoding::CharacterErrors;
use crate::support::{self, Options};
use crate::training::{Speech, Training};
use crate::utterance::LENGTHS;

/// One row of the table.
pub(crate) struct Variant {
    pub(crate) name: &'static str,
    pub(crate) errors: CharacterErrors,
    /// Of the file.
    pub(crate) bytes: u64,
    pub(crate) seconds: f64,
    pub(crate) note: String,
}

/// Trains the variants.
pub(crate) struct Variants<'a> {
    pub(crate) speech: &'a Speech,
    pub(crate) options: &'a Options,
    /// Epochs from random weights, and of the fine-tuning.
    pub(crate) epochs: u64,
    pub(crate) fine_tuning: u64,
    /// Learning rate at its highest.
    pub(crate) rate: f64,
    /// Share of the weights to prune.
    pub(crate) sparsity: f64,
    /// Folder of the files.
    pub(crate) out: PathBuf,
}

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Fisher samples, where there are twice as many strings.
const FISHER_SAMPLES: usize = 256;
/// Batches that the ranges of activations come from.
const CALIBRATION: usize = 8;

impl Variants<'_> {
    /// FP32, and the model with autodiff that the others start from.
    pub(crate) fn fp32(&self) -> Result<(Variant, AcousticModel)> {
        let start = Instant::now();
        let autocast = Autocast::new(FloatDType::F32);
        let training = self.training("fp32");
        let model = self.speech.train(self.new_model(), &autocast, &training)?;
        let seconds = start.elapsed().as_secs_f64();
        let file = self.file("fp32.bpk");
        model.valid().into_record().save(&file)?;
        let row = Variant {
            name: "fp32",
            errors: self.errors_of(&self.load_fp32()?)?,
            bytes: bytes(&file)?,
            seconds,
            note: "Burn's record".into(),
        };
        Ok((row, model))
    }

    /// The shipped FP32 model, for inference.
    pub(crate) fn load_fp32(&self) -> Result<AcousticModel> {
        let record = ModuleRecord::load(self.file("fp32.bpk"))?;
        Ok(AcousticModel::new(&self.device()).try_load_record(record)?)
    }

    /// Mixed precision from the same initial weights over the same batches.
    pub(crate) fn amp(&self, dtype: FloatDType) -> Result<Variant> {
        let start = Instant::now();
        let config = self.options.autocast(dtype);
        // A recording for each length of a batch.
        let autocast = config.init(&self.speech.device)?.cached();
        let training = self.training("amp");
        let model = self.speech.train(self.new_model(), &autocast, &training)?;
        let seconds = start.elapsed().as_secs_f64();

        let (half, _) = config.materialize_half(model)?;
        let file = self.file("amp.bpk");
        half.into_record().save(&file)?;
        let record = ModuleRecord::load(&file)?.cast_to_module_dtype();
        let device = self.device();
        let loaded = AcousticModel::new(&device).try_load_record(record)?;
        let errors = self.speech.errors(&device, |spectra| {
            autocast.run(&loaded, spectra, AcousticModel::forward)
        })?;
        Ok(Variant {
            name: "amp",
            errors,
            bytes: bytes(&file)?,
            seconds,
            note: format!(
                "{} operation by operation; record with weights in {}",
                support::dtype_name(&autocast),
                // Where rounding is emulated, the numbers are F32.
                if autocast.is_emulated() {
                    "F32"
                } else {
                    "half precision"
                }
            ),
        })
    }

    /// Pruned with the defaults, and fine-tuned with the zeros held.
    pub(crate) fn pruned(&self, model: AcousticModel) -> Result<Variant> {
        let start = Instant::now();
        let speech = self.speech;
        // Strings of other joins than those of the training.
        let strings = speech.strings(self.epochs, LENGTHS);
        let samples = FISHER_SAMPLES.min(strings.len() / 2).max(1);
        let solver = SolverConfig::new(Budget::Sparsity(self.sparsity));
        let pruned = PrunerConfig::new(solver, FisherConfig::new(samples)).prune(
            model,
            |model, batch: &Batch| loss(model, batch.clone()),
            |seed| shuffled(&strings, seed, &speech.log_mel, &speech.device),
        )?;
        let nonzeros = pruned.masks.nonzeros();
        let model = pruned.masks.attach(pruned.model)?;
        let training = Training {
            name: "pruned",
            epochs: self.fine_tuning,
            first_round: self.epochs + 1,
            rate: 0.5 * self.rate,
            from_scratch: false,
        };
        let autocast = Autocast::new(FloatDType::F32);
        let model = speech.train(model, &autocast, &training)?;
        let seconds = start.elapsed().as_secs_f64();

        let file = self.file("pruned.sparse");
        SparseRecord::from_module(&model.valid().materialize())?.save(&file)?;
        let loaded = SparseRecord::open(&file)?.load_into(AcousticModel::new(&self.device()))?;
        Ok(Variant {
            name: "pruned",
            errors: self.errors_of(&loaded)?,
            bytes: bytes(&file)?,
            seconds,
            note: format!(
                "sparsity {}, {nonzeros} weights left; sparse record",
                self.sparsity
            ),
        })
    }

    /// Weights and activations of 8 bits, without training.
    pub(crate) fn w8a8(&self, model: &AcousticModel) -> Result<Variant> {
        let start = Instant::now();
        let speech = self.speech;
        let device = self.device();
        let strings = speech.strings(self.epochs, LENGTHS);
        let config = PtqConfig::new();
        let (quantized, _) = config.quantize(
            model.valid(),
            || shuffled(&strings, 0, &speech.log_mel, &device).take(CALIBRATION),
            |model, (spectra, ..)| {
                model.forward(spectra);
            },
        )?;
        let (converted, report) = ConvertConfig::new()
            .with_unsupported(Unsupported::KeepFakeQuantized)
            .convert(quantized)?;
        let seconds = start.elapsed().as_secs_f64();

        let file = self.file("w8a8.safetensors");
        let bytes = save_safetensors(&converted, &file)?;
        let prepared = config.qat_config().prepare(AcousticModel::new(&device))?;
        let (loaded, _) = LoadConfig::new().load(prepared, &file)?;
        let float = match report.left_float.len() {
            0 => "all inputs of layers quantized".to_string(),
            count => format!("{count} activations in F32"),
        };
        Ok(Variant {
            name: "w8a8",
            errors: self.errors_of(&loaded)?,
            bytes,
            seconds,
            note: format!(
                "after training; {} weights, {float}; norms, softmax and sums in F32",
                report.weights.len()
            ),
        })
    }

    fn training(&self, name: &'static str) -> Training {
        Training {
            name,
            epochs: self.epochs,
            first_round: 0,
            rate: self.rate,
            from_scratch: true,
        }
    }

    /// The same initial weights for everyone.
    fn new_model(&self) -> AcousticModel {
        self.speech.device.seed(self.speech.seed);
        AcousticModel::new(&self.speech.device)
    }

    fn errors_of(&self, model: &AcousticModel) -> Result<CharacterErrors> {
        let errors = self
            .speech
            .errors(&self.device(), |spectra| Ok(model.forward(spectra)))?;
        Ok(errors)
    }

    /// Without autodiff.
    fn device(&self) -> Device {
        self.speech.device.clone().inner()
    }

    fn file(&self, name: &str) -> PathBuf {
        self.out.join(format!("speech_ctc-{name}"))
    }
}

fn bytes(file: &Path) -> Result<u64> {
    Ok(fs::metadata(file)?.len())
}
