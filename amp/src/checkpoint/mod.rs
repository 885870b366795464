//! Checkpoints of a plain training loop that survive being killed at any moment.

mod files;
mod manifest;
mod moments;
mod optimizer_state;
pub(crate) mod resumable_optimizer;

pub use resumable_optimizer::ResumableOptimizer;

use std::path::{Path, PathBuf};
use std::{fs, io};

use burn::module::Module;
use burn::optim::{ModuleOptimizer, OptimizerRecord};
use burn::store::ModuleRecord;
use burn::tensor::Bytes;
use burn_lean_graph::hooks::check;
use burn_lean_reparam::column_layout::ready_to_load;
use burn_lean_reparam::{Lock, Rejected, settle};
use files::{FILES, damaged, io_error, not_written};
use manifest::{Manifest, ManifestFile};
use optimizer_state::{Parameters, load_state};

use crate::{AmpError, GradScaler, scaler::GradScalerRecord};

/// A folder of checkpoints: model, optimizer and grad scaler of one step each.
///
/// A checkpoint is written to a folder of another name, flushed to the disk, and renamed when it
/// is complete: after a crash or a kill the newest complete one loads as if nothing had happened,
/// and a half-written one is never seen. One of the same step is replaced in the same way: at any
/// moment the old or the new one is there. Every file carries a checksum.
///
/// A folder is for one training. Whoever saves locks the file `checkpoints.lock` there meanwhile, where the file
/// system has locks, and another process or thread that is to write at that moment fails; loading waits for nobody,
/// and begins once more where the checkpoint is replaced meanwhile.
///
/// Not in it: the schedule of the learning rate, random numbers, the place in the data, and gradients of a step
/// that is not complete. A loop that takes them up again goes on as if it had not stopped.
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::optim::AdamWConfig;
/// use burn::tensor::Device;
/// use burn_lean_amp::{Checkpoints, GradScalerConfig, LossScale, ResumableOptimizer};
///
/// let folder = tempfile::tempdir()?;
/// let checkpoints = Checkpoints::new(folder.path()).keep(2);
/// let device = Device::flex().autodiff();
/// let model = LinearConfig::new(2, 2).init(&device);
/// // A plain optimizer loads where Burn's default device is there.
/// let optim = || ResumableOptimizer::new(AdamWConfig::new().build(), &device).init();
/// let scaler = GradScalerConfig::new(LossScale::Static(8.0)).init()?;
/// for step in [10, 20, 30] {
///     checkpoints.save(step, &model, &optim(), &scaler)?;
/// }
/// assert_eq!(checkpoints.steps()?, [20, 30]);
/// let (model, optim, scaler) = checkpoints.load(30, model, optim())?;
/// assert_eq!(scaler.loss_scale(), 8.0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct Checkpoints {
    folder: PathBuf,
    keep: usize,
}

const MODEL: &str = "model.bpk";
const OPTIMIZER: &str = "optimizer.bpk";
const SCALER: &str = "scaler.json";
const MANIFEST: &str = "manifest.json";
/// A complete checkpoint.
const STEP: &str = "step-";
/// A complete checkpoint that takes the place of the one of its step, which may still be there.
const REPLACEMENT: &str = "replacement-";
/// What is being written or removed.
const PARTIAL: &str = "partial-";
const VERSION: u32 = 1;

/// The file that is locked; it stays.
const LOCK: &str = "checkpoints.lock";

/// What is in a checkpoint.
type Parts = (ModuleRecord, OptimizerRecord, GradScaler);

impl Checkpoints {
    /// Checkpoints in `folder`, which is created when the first is saved. Keeps the newest two.
    pub fn new(folder: impl AsRef<Path>) -> Self {
        Self {
            folder: folder.as_ref().to_path_buf(),
            keep: 2,
        }
    }

    /// Keeps the newest `count` checkpoints (at least one) and removes older ones.
    pub fn keep(mut self, count: usize) -> Self {
        self.keep = count.max(1);
        self
    }

    /// Steps of the complete checkpoints, ascending.
    ///
    /// # Errors
    ///
    /// [`AmpError::Io`] when the folder exists but cannot be read.
    pub fn steps(&self) -> Result<Vec<u64>, AmpError> {
        let step = |name: String| {
            let step = name.strip_prefix(STEP);
            let step = step.or_else(|| name.strip_prefix(REPLACEMENT))?;
            step.parse::<u64>().ok()
        };
        let steps = FILES.names(&self.folder)?.into_iter().filter_map(step);
        let mut steps: Vec<u64> = steps
            .filter(|step| is_complete(&self.path(*step)))
            .collect();
        steps.sort_unstable();
        steps.dedup();
        Ok(steps)
    }

    /// Writes a checkpoint; it replaces one of the same step.
    ///
    /// # Errors
    ///
    /// [`AmpError::LaterCheckpoint`] if there is one of a later step: training went back, and what
    /// came after must be given up with [`discard_after`](Self::discard_after) first.
    /// [`AmpError::CheckpointsInUse`] while another process or thread writes there.
    /// [`AmpError::Io`] or [`AmpError::Record`]; earlier checkpoints are untouched.
    pub fn save<M: Module>(
        &self,
        step: u64,
        model: &M,
        optim: &ModuleOptimizer,
        scaler: &GradScaler,
    ) -> Result<(), AmpError> {
        let _lock = self.lock()?;
        if let Some(latest) = self.latest()?
            && latest > step
        {
            return Err(AmpError::LaterCheckpoint { step, latest });
        }
        self.tidy()?;
        settle(model);
        let partial = self.named(PARTIAL, step);
        fs::create_dir_all(&partial)
            .map_err(|error| io_error("cannot create", &partial, &error))?;
        // One after the other, so that only one of them is in memory at a time.
        let path = partial.join(MODEL);
        let written = model.clone().into_record().save(&path);
        written.map_err(|error| not_written(&path, &error))?;
        let path = partial.join(OPTIMIZER);
        let written = optim.to_record().save(&path);
        written.map_err(|error| not_written(&path, &error))?;
        let path = partial.join(SCALER);
        let scaler = serde_json::to_vec_pretty(&scaler.to_record())
            .map_err(|error| not_written(&path, &error))?;
        FILES.write_plain(&path, &scaler)?;

        let files = [MODEL, OPTIMIZER, SCALER].map(|name| ManifestFile::of(&partial, name));
        let manifest = Manifest {
            version: VERSION,
            step,
            files: files.into_iter().collect::<Result<_, _>>()?,
        };
        let path = partial.join(MANIFEST);
        let manifest =
            serde_json::to_vec_pretty(&manifest).map_err(|error| not_written(&path, &error))?;
        FILES.write_plain(&path, &manifest)?;
        FILES.flush(&partial)?;
        match self.named(STEP, step).exists() {
            // No rename goes over a folder that is not empty.
            true => {
                FILES.rename(&partial, &self.named(REPLACEMENT, step))?;
                self.replace(step)?;
            }
            false => FILES.rename(&partial, &self.named(STEP, step))?,
        }

        let steps = self.steps()?;
        for old in &steps[..steps.len().saturating_sub(self.keep)] {
            self.discard(*old)?;
        }
        Ok(())
    }

    /// Removes the checkpoints of steps after `step`: training goes on from there instead.
    ///
    /// # Errors
    ///
    /// [`AmpError::CheckpointsInUse`] while another process or thread writes there, if there are such
    /// checkpoints; [`AmpError::Io`].
    pub fn discard_after(&self, step: u64) -> Result<(), AmpError> {
        if self.latest()?.is_none_or(|latest| latest <= step) {
            return Ok(());
        }
        let _lock = self.lock()?;
        let steps = self.steps()?;
        steps
            .into_iter()
            .filter(|later| *later > step)
            .try_for_each(|later| self.discard(later))
    }

    fn discard(&self, step: u64) -> Result<(), AmpError> {
        [STEP, REPLACEMENT]
            .map(|prefix| self.named(prefix, step))
            .iter()
            .filter(|folder| folder.exists())
            .try_for_each(|folder| self.remove_complete(folder, step))
    }

    fn remove_complete(&self, folder: &Path, step: u64) -> Result<(), AmpError> {
        // Renamed first: a removal that is cut short must not leave half a checkpoint behind.
        let doomed = self.named(PARTIAL, step);
        FILES.remove_folder(&doomed)?;
        FILES.rename(folder, &doomed)?;
        FILES.remove_folder(&doomed)
    }

    /// Puts a replacement in its place.
    fn replace(&self, step: u64) -> Result<(), AmpError> {
        let old = self.named(STEP, step);
        if old.exists() {
            self.remove_complete(&old, step)?;
        }
        FILES.rename(&self.named(REPLACEMENT, step), &old)
    }

    /// Ends what a save or a removal left behind that was cut short.
    fn tidy(&self) -> Result<(), AmpError> {
        for name in FILES.names(&self.folder)? {
            let path = self.folder.join(&name);
            let partial = name.strip_prefix(PARTIAL);
            if partial.is_some_and(|step| step.parse::<u64>().is_ok()) {
                FILES.remove_folder(&path)?;
            } else if let Some(step) = name.strip_prefix(REPLACEMENT)
                && let Ok(step) = step.parse()
            {
                match is_complete(&path) {
                    true => self.replace(step)?,
                    false => FILES.remove_folder(&path)?,
                }
            }
        }
        Ok(())
    }

    /// The newest complete checkpoint, if there is one.
    ///
    /// # Errors
    ///
    /// As [`steps`](Self::steps).
    pub fn latest(&self) -> Result<Option<u64>, AmpError> {
        Ok(self.steps()?.pop())
    }

    /// Loads a checkpoint into a prepared model and a fresh optimizer.
    ///
    /// Burn loads the state of an optimizer on its default device, whatever the model is on, and
    /// moves it with the next step. Where a GPU backend is compiled in and there is no GPU, that is
    /// [`AmpError::OptimizerState`]: set the environment variable `BURN_DEVICE` to the device that
    /// is there (`flex`, `ndarray`), or make the optimizer with a
    /// [`ResumableOptimizer`].
    ///
    /// It also loads the state in the default dtype of that device. A state of F64 parameters, or one in F32 on a
    /// device whose default is half, is [`AmpError::OptimizerDtype`], unless it is of `Adam` or `AdamW` in a
    /// [`ResumableOptimizer`]; for others give the device the default that the parameters have, if that is one dtype.
    ///
    /// The parameters take the identities of the checkpoint, which in a new process are others than those of a
    /// new model: groups of an optimizer that name identities (`ParamGroup::from_ids`) would match nothing any
    /// more. Name paths, or use [`load_with`](Self::load_with).
    ///
    /// # Errors
    ///
    /// [`AmpError::NoCheckpoint`] for a step without one; [`AmpError::Io`] for a file that cannot be read,
    /// [`AmpError::Record`] for one that is missing or damaged, with what to remove and where training then goes on,
    /// or of another version, of another model or another kind of optimizer, [`AmpError::OptimizerState`] and
    /// [`AmpError::OptimizerDtype`]. The model comes back in the error, unchanged.
    pub fn load<M: Module>(
        &self,
        step: u64,
        model: M,
        optim: ModuleOptimizer,
    ) -> Result<(M, ModuleOptimizer, GradScaler), Rejected<M, AmpError>> {
        self.load_with(step, model, |_| optim)
    }

    /// Like [`load`](Self::load), with an optimizer that is made from the loaded model: for groups that name
    /// identities.
    ///
    /// # Errors
    ///
    /// As [`load`](Self::load).
    pub fn load_with<M: Module>(
        &self,
        step: u64,
        model: M,
        optim: impl FnOnce(&M) -> ModuleOptimizer,
    ) -> Result<(M, ModuleOptimizer, GradScaler), Rejected<M, AmpError>> {
        let loaded = self.read(step).and_then(|(record, state, mut scaler)| {
            let folder = self.path(step);
            let refused = |error| damaged(&folder.join(MODEL), &error);
            // Clones share running statistics, which a record replaces in place, so a record that
            // is refused half way would change the caller's. `valid` copies them.
            let trial = ready_to_load(model.valid()).try_load_record(record.clone());
            let trial = trial.map_err(refused)?;
            check(&trial).map_err(|(path, reason)| {
                damaged(&folder.join(MODEL), &format!("`{path}`: {reason}"))
            })?;
            let optim = optim(&trial);
            let parameters = Parameters::of(&trial);
            // Its parameters are on the device, too: not beside those of the loaded model.
            drop(trial);
            let optim = load_state(optim, state, &folder, &parameters)?;
            let ready = ready_to_load(model.clone());
            let loaded = ready.try_load_record(record).map_err(refused)?;
            scaler.remember_statistics(&loaded);
            Ok((loaded, optim, scaler))
        });
        loaded.map_err(|error| Rejected::new(model, error))
    }

    /// Reads a checkpoint, and again, at most three times, where another one is in its place meanwhile.
    fn read(&self, step: u64) -> Result<Parts, AmpError> {
        let mut again = 3;
        loop {
            let folder = self.path(step);
            let path = folder.join(MANIFEST);
            let manifest = fs::read(&path);
            let parts = match &manifest {
                Ok(manifest) => self.read_from(step, &folder, manifest),
                Err(error) if is_complete(&folder) => Err(io_error("cannot read", &path, error)),
                Err(_) => Err(self.no_checkpoint(step)),
            };
            let manifest = manifest.ok();
            let is_another = || self.path(step) != folder || fs::read(&path).ok() != manifest;
            match parts {
                Err(_) if again > 0 && is_another() => again -= 1,
                parts => return parts,
            }
        }
    }

    fn read_from(&self, step: u64, folder: &Path, manifest: &[u8]) -> Result<Parts, AmpError> {
        // For what is damaged alone: what another version wrote is whole, and may be worth keeping.
        let broken = |path: &Path, reason: &dyn std::fmt::Display| {
            let advice = self.without(step, folder);
            damaged(path, &format!("{reason}; {advice}"))
        };
        let read = |path: &Path| {
            fs::read(path).map_err(|error| match error.kind() {
                io::ErrorKind::NotFound => broken(path, &"it is missing"),
                _ => io_error("cannot read", path, &error),
            })
        };
        let path = folder.join(MANIFEST);
        let manifest: Manifest =
            serde_json::from_slice(manifest).map_err(|error| broken(&path, &error))?;
        if manifest.version != VERSION {
            return Err(damaged(
                &path,
                &format!("version {} instead of {VERSION}", manifest.version),
            ));
        }
        if manifest.step != step {
            return Err(damaged(
                &path,
                &format!(
                    "it is of step {}: the folder was renamed or copied",
                    manifest.step
                ),
            ));
        }
        let checked = |name: &str| {
            let path = folder.join(name);
            let bytes = read(&path)?;
            match manifest.files.iter().find(|file| file.name == name) {
                Some(file)
                    if file.bytes == bytes.len() && file.crc32 == crc32fast::hash(&bytes) =>
                {
                    Ok((path, bytes))
                }
                _ => Err(broken(&path, &"its checksum does not match the manifest")),
            }
        };
        let (path, bytes) = checked(MODEL)?;
        let model = ModuleRecord::from_bytes(Bytes::from_bytes_vec(bytes))
            .map_err(|error| damaged(&path, &error))?;
        let (path, bytes) = checked(OPTIMIZER)?;
        let optim = OptimizerRecord::from_bytes(Bytes::from_bytes_vec(bytes))
            .map_err(|error| damaged(&path, &error))?;
        let (path, bytes) = checked(SCALER)?;
        let scaler: GradScalerRecord =
            serde_json::from_slice(&bytes).map_err(|error| damaged(&path, &error))?;
        Ok((model, optim, GradScaler::from_record(scaler)?))
    }

    /// Keeps other writers out of the folder, which is made where there is none.
    fn lock(&self) -> Result<Lock, AmpError> {
        let folder = &self.folder;
        fs::create_dir_all(folder).map_err(|error| io_error("cannot create", folder, &error))?;
        FILES.lock(&folder.join(LOCK), || AmpError::CheckpointsInUse {
            folder: folder.display().to_string(),
        })
    }

    fn no_checkpoint(&self, step: u64) -> AmpError {
        match self.steps() {
            Ok(steps) => AmpError::NoCheckpoint {
                step,
                folder: self.folder.display().to_string(),
                steps,
            },
            Err(error) => error,
        }
    }

    /// What to remove of a damaged checkpoint of `step` in `folder`, and where training then goes on.
    fn without(&self, step: u64, folder: &Path) -> String {
        let replaced = self.named(STEP, step);
        // What it was to replace may still be there.
        let is_left = |other: &u64| *other != step || replaced != folder && is_complete(&replaced);
        let steps = self.steps().unwrap_or_default();
        let then = match steps.into_iter().rfind(is_left) {
            Some(latest) => format!("go on from step {latest}"),
            None => "begin anew".into(),
        };
        format!("remove the folder {} to {then}", folder.display())
    }

    /// Where a complete checkpoint is.
    fn path(&self, step: u64) -> PathBuf {
        let replacement = self.named(REPLACEMENT, step);
        match is_complete(&replacement) {
            true => replacement,
            false => self.named(STEP, step),
        }
    }

    fn named(&self, prefix: &str, step: u64) -> PathBuf {
        self.folder.join(format!("{prefix}{step}"))
    }
}

/// The manifest is written last: without it, a folder of this name is no checkpoint.
fn is_complete(folder: &Path) -> bool {
    folder.join(MANIFEST).is_file()
}
