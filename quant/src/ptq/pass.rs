//! Calibration data, run through a model as often as a step needs it.

use std::cell::Cell;

use indicatif::{ProgressBar, ProgressStyle};

use crate::{QuantError, module::RunOutcome};

/// Runs all batches through a model.
pub(super) type Run<'a, M> = &'a dyn Fn(&M) -> Result<(), QuantError>;

/// Calibration data that can be run through a model.
pub(super) trait Data<M> {
    /// Calls `with` with a function that runs all batches through a model.
    ///
    /// # Errors
    ///
    /// [`QuantError::NoData`] if there was no batch.
    fn run<O>(&self, name: &str, with: impl FnOnce(Run<'_, M>) -> O) -> Result<O, QuantError>;

    /// Runs the first batch through `model`, if there is one.
    fn run_first(&self, model: &M) -> Result<bool, QuantError>;

    /// Number of batches in a pass; 0 before the first.
    fn count(&self) -> usize;
}

/// Batches, and how they run through a model.
pub(super) struct Pass<B, F> {
    batches: B,
    forward: F,
    count: Cell<usize>,
    progress: bool,
}

impl<B, F> Pass<B, F> {
    pub(super) fn new(batches: B, forward: F, progress: bool) -> Self {
        Self {
            batches,
            forward,
            count: Cell::new(0),
            progress,
        }
    }
}

impl<M, I, B, F, R> Data<M> for Pass<B, F>
where
    I: IntoIterator,
    B: Fn() -> I,
    F: Fn(&M, I::Item) -> R,
    R: RunOutcome,
{
    fn run<O>(&self, name: &str, with: impl FnOnce(Run<'_, M>) -> O) -> Result<O, QuantError> {
        let run = |model: &M| {
            let batches = (self.batches)().into_iter();
            let bar = match (self.progress, batches.size_hint()) {
                (false, _) => ProgressBar::hidden(),
                (true, (_, Some(len))) => ProgressBar::new(len as u64),
                (true, _) => ProgressBar::no_length(),
            };
            if let Ok(style) = ProgressStyle::with_template("{prefix:>22} {wide_bar} {pos}/{len}") {
                bar.set_style(style);
            }
            bar.set_prefix(name.to_string());
            self.count.set(0);
            for batch in batches {
                self.count.set(self.count.get() + 1);
                (self.forward)(model, batch).outcome()?;
                bar.inc(1);
            }
            bar.finish_and_clear();
            Ok(())
        };
        let output = with(&run);
        match self.count.get() {
            0 => Err(QuantError::NoData {
                what: "the calibration".into(),
            }),
            _ => Ok(output),
        }
    }

    fn run_first(&self, model: &M) -> Result<bool, QuantError> {
        let first = (self.batches)().into_iter().next();
        let run = first.map(|batch| (self.forward)(model, batch).outcome());
        Ok(run.transpose()?.is_some())
    }

    fn count(&self) -> usize {
        self.count.get()
    }
}
