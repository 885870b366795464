//! Finished stages on disk, so that an interrupted run goes on after the last of them.

use std::fs;
use std::path::{Path, PathBuf};

use burn::module::Module;
use burn::store::ModuleRecord;
use burn::tensor::Bytes;
use burn_lean_reparam::column_layout::ready_to_load;
use burn_lean_reparam::{Attached, Rejected, Training, attached, own_copy, settle};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::host::files::{FILES, io_error};
use crate::{Masks, PruneError};

const MODEL: &str = "model.bpk";
const STAGE: &str = "stage.json";
const CHECKSUMS: &str = "checksums.json";
const VERSION: u32 = 5;

/// A folder with the newest finished stage of one run.
///
/// A stage is written to a folder of another name, flushed, and renamed when it is complete, so
/// that whatever happens either it or the one before loads. Its last file has the checksums of the
/// others.
pub(crate) struct StageStore {
    folder: PathBuf,
    /// The config and what else the stages depend on.
    run: Map<String, Value>,
    /// What the model of the run carries: a stage with anything else would not load into it.
    carried: Vec<Attached>,
}

/// What is known of the stages that are finished.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Done<R> {
    version: u32,
    run: Map<String, Value>,
    pub(crate) masks: Masks,
    /// One for each stage.
    pub(crate) reports: Vec<R>,
}

/// What all versions have in common.
#[derive(Deserialize)]
struct Versioned {
    version: u32,
}

/// A model, and what is known of the stages that it went through.
type Resumed<M, R> = (M, Option<Done<R>>);

/// CRC-32 of the other files of a stage.
#[derive(Debug, Serialize, Deserialize)]
struct Checksums {
    model: u32,
    stage: u32,
}

impl StageStore {
    /// The store of runs with this config, without what changes no number, on a model that carries these
    /// reparameterizations, and with these values of what else they depend on.
    pub(crate) fn new(
        folder: &Path,
        config: &impl Serialize,
        carried: Vec<Attached>,
        more: Vec<(&str, Value)>,
    ) -> Result<Self, PruneError> {
        let run = serde_json::to_value(config).and_then(serde_json::from_value);
        let mut run: Map<String, Value> = run.map_err(|error| PruneError::Record {
            what: "the config of the pruner".into(),
            reason: error.to_string(),
        })?;
        run.extend(more.into_iter().map(|(name, value)| (name.into(), value)));
        Ok(Self {
            folder: folder.to_path_buf(),
            run,
            carried,
        })
    }

    /// The model after the newest finished stage, or a copy of it as it is without one.
    ///
    /// Where a stage of so many is left to do, the folder has to take files: without, that one would be lost.
    pub(crate) fn resume<M: Module, R: DeserializeOwned>(
        &self,
        model: M,
        stages: usize,
    ) -> Result<Resumed<M, R>, Rejected<M, PruneError>> {
        let newest = self.newest::<R>().and_then(|newest| {
            let finished = newest.as_ref().map_or(0, |(done, _)| done.reports.len());
            if finished < stages {
                FILES.create_folder(&self.folder)?;
            }
            Ok(newest)
        });
        let (done, record) = match newest {
            Ok(Some(newest)) => newest,
            // Running statistics, too, which clones of the caller's, a teacher say, share.
            Ok(None) => return Ok((own_copy(&model), None)),
            Err(error) => return Err(Rejected::new(model, error)),
        };
        // Into a copy: clones share running statistics, which a record replaces in place.
        match ready_to_load(model.valid()).try_load_record(record) {
            Ok(loaded) => Ok((Training::of(&model).restore(loaded), Some(done))),
            Err(error) => {
                let error = PruneError::Record {
                    what: format!("the model in {}", self.folder.display()),
                    reason: error.to_string(),
                };
                Err(Rejected::new(model, error))
            }
        }
    }

    /// Keeps a finished stage, and removes the ones before.
    pub(crate) fn save<M: Module, R: Clone + Serialize>(
        &self,
        stage: usize,
        model: &M,
        masks: &Masks,
        reports: &[R],
    ) -> Result<(), PruneError> {
        let failed = |what: &str, reason: String| PruneError::Record {
            what: what.into(),
            reason,
        };
        self.check_carried(&attached(model))?;
        settle(model);
        let record = model.clone().into_record();
        let bytes = record
            .into_bytes()
            .map_err(|e| failed("the model", e.to_string()))?;
        let done = Done {
            version: VERSION,
            run: self.run.clone(),
            masks: masks.clone(),
            reports: reports.to_vec(),
        };
        let json = serde_json::to_vec(&done).map_err(|e| failed("the stage", e.to_string()))?;
        let checksums = Checksums {
            model: crc32fast::hash(&bytes),
            stage: crc32fast::hash(&json),
        };
        let checksums = serde_json::to_vec_pretty(&checksums)
            .map_err(|e| failed("the checksums of a stage", e.to_string()))?;
        let partial = self.folder.join(format!("partial-{stage}"));
        let target = self.folder.join(format!("stage-{stage}"));
        FILES.remove_folder(&partial)?;
        fs::create_dir_all(&partial)
            .map_err(|error| io_error("cannot create", &partial, &error))?;
        FILES.write(&partial.join(MODEL), &bytes)?;
        FILES.write(&partial.join(STAGE), &json)?;
        FILES.write(&partial.join(CHECKSUMS), &checksums)?;
        FILES.remove_folder(&target)?;
        FILES.rename(&partial, &target)?;
        for older in self.stages()?.into_iter().filter(|older| *older < stage) {
            FILES.remove_folder(&self.folder.join(format!("stage-{older}")))?;
        }
        Ok(())
    }

    /// Refuses a stage that carries something else than the model of the run.
    fn check_carried(&self, now: &[Attached]) -> Result<(), PruneError> {
        let name = |all: &[Attached], path: &str| {
            let found = all.iter().find(|attached| attached.path == path);
            found.map(|attached| attached.name.clone())
        };
        for Attached { path, .. } in self.carried.iter().chain(now) {
            let (then, now) = (name(&self.carried, path), name(now, path));
            if then != now {
                return Err(PruneError::StageReparameterized {
                    path: path.clone(),
                    then,
                    now,
                });
            }
        }
        Ok(())
    }

    fn newest<R: DeserializeOwned>(&self) -> Result<Option<(Done<R>, ModuleRecord)>, PruneError> {
        let Some(stage) = self.stages()?.into_iter().max() else {
            return Ok(None);
        };
        let folder = self.folder.join(format!("stage-{stage}"));
        let damaged = |reason: String| PruneError::Record {
            what: format!("the stage in {}", folder.display()),
            reason,
        };
        let checksums = FILES.read(&folder.join(CHECKSUMS))?;
        let checksums: Checksums =
            serde_json::from_slice(&checksums).map_err(|e| damaged(e.to_string()))?;
        let json = FILES.read(&folder.join(STAGE))?;
        if crc32fast::hash(&json) != checksums.stage {
            return Err(damaged(format!("the checksum of {STAGE} is wrong")));
        }
        // Before what only this version has.
        let Versioned { version } =
            serde_json::from_slice(&json).map_err(|e| damaged(e.to_string()))?;
        if version != VERSION {
            return Err(damaged(format!(
                "it is of version {version}, not {VERSION}: remove the folder {} to run its stages anew, or \
                 name another folder",
                self.folder.display()
            )));
        }
        let done: Done<R> = serde_json::from_slice(&json).map_err(|e| damaged(e.to_string()))?;
        let run = as_read(&self.run).map_err(|e| damaged(e.to_string()))?;
        if let Some(field) = differing(&done.run, &run) {
            return Err(PruneError::StagesOfAnotherRun {
                path: self.folder.display().to_string(),
                field,
            });
        }
        let model = FILES.read(&folder.join(MODEL))?;
        if crc32fast::hash(&model) != checksums.model {
            return Err(damaged(format!("the checksum of {MODEL} is wrong")));
        }
        let record = ModuleRecord::from_bytes(Bytes::from_bytes_vec(model))
            .map_err(|error| damaged(error.to_string()))?;
        Ok(Some((done, record)))
    }

    /// Numbers of the finished stages that are there.
    fn stages(&self) -> Result<Vec<usize>, PruneError> {
        let names = FILES.names(&self.folder)?;
        let number = |name: String| name.strip_prefix("stage-")?.parse().ok();
        Ok(names.into_iter().filter_map(number).collect())
    }
}

/// As it reads from a file: serde_json may take a number for the one next to it.
fn as_read(run: &Map<String, Value>) -> Result<Map<String, Value>, serde_json::Error> {
    serde_json::from_str(&serde_json::to_string(run)?)
}

/// The first name whose value differs, or that only one of them has.
fn differing(one: &Map<String, Value>, other: &Map<String, Value>) -> Option<String> {
    let mut names = one.keys().chain(other.keys());
    names
        .find(|name| one.get(*name) != other.get(*name))
        .cloned()
}
