//! Who is told how far a run is.

use std::cell::RefCell;
use std::fmt;
use std::ops::ControlFlow;

use indicatif::{ProgressBar, ProgressStyle};

use crate::{RecipeError, Row};

/// Something that has happened in a run.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Progress {
    /// A stage begins, or goes on after a restart.
    Started {
        /// Its name, as in the rows.
        stage: String,
    },
    /// A step of training is done.
    Step {
        /// The stage.
        stage: String,
        /// Epoch, from 0, and number of epochs.
        epoch: (usize, usize),
        /// Batch, from 0, and number of batches; `None` where nobody has counted them.
        batch: (usize, Option<usize>),
    },
    /// A checkpoint is on the disk.
    Checkpoint {
        /// The stage.
        stage: String,
    },
    /// What a stage left is written, and about to take its place.
    Keeping {
        /// The stage.
        stage: String,
    },
    /// A stage is done, or was done by an earlier run.
    Finished {
        /// What came out.
        row: Row,
    },
}

/// A callback that can end the run.
type Callback<'a> = Box<dyn FnMut(&Progress) -> ControlFlow<()> + 'a>;

/// Bars, a callback, or nobody.
pub(crate) struct Listener<'a> {
    bar: Option<ProgressBar>,
    callback: Option<RefCell<Callback<'a>>>,
}

impl fmt::Debug for Listener<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Listener").finish_non_exhaustive()
    }
}

impl<'a> Listener<'a> {
    /// Bars on a terminal.
    pub(crate) fn bars() -> Self {
        let bar = ProgressBar::no_length();
        let template = "{prefix:>26} {wide_bar} {pos}/{len} {msg} {eta}";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        Self {
            bar: Some(bar),
            callback: None,
        }
    }

    pub(crate) fn callback(callback: impl FnMut(&Progress) -> ControlFlow<()> + 'a) -> Self {
        Self {
            bar: None,
            callback: Some(RefCell::new(Box::new(callback))),
        }
    }

    /// Tells it; fails where the callback ends the run.
    pub(crate) fn tell(&self, progress: &Progress) -> Result<(), RecipeError> {
        if let Some(bar) = &self.bar {
            show(bar, progress);
        }
        let flow = match &self.callback {
            Some(callback) => callback.borrow_mut()(progress),
            None => ControlFlow::Continue(()),
        };
        match (flow, progress) {
            (ControlFlow::Continue(()), _) => Ok(()),
            (ControlFlow::Break(()), progress) => Err(RecipeError::Interrupted {
                stage: progress.stage().into(),
            }),
        }
    }
}

impl Progress {
    /// The name of the stage.
    pub fn stage(&self) -> &str {
        match self {
            Self::Started { stage }
            | Self::Step { stage, .. }
            | Self::Checkpoint { stage }
            | Self::Keeping { stage } => stage,
            Self::Finished { row } => &row.stage,
        }
    }
}

fn show(bar: &ProgressBar, progress: &Progress) {
    match progress {
        Progress::Started { stage } => {
            bar.reset();
            bar.unset_length();
            bar.set_message("");
            bar.set_prefix(stage.clone());
        }
        Progress::Step { epoch, batch, .. } => {
            if let Some(batches) = batch.1 {
                bar.set_length((epoch.1 * batches) as u64);
            }
            bar.set_position((epoch.0 * batch.1.unwrap_or(0) + batch.0 + 1) as u64);
            bar.set_message(format!("epoch {}/{}", epoch.0 + 1, epoch.1));
        }
        Progress::Checkpoint { .. } | Progress::Keeping { .. } => {}
        Progress::Finished { .. } => bar.finish_and_clear(),
    }
}
