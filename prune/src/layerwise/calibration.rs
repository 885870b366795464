//! The dense network, and the batches that it is walked through with.

use std::ops::Range;
use std::path::PathBuf;

use burn::module::Module;
use burn::tensor::Device;
use burn_lean_graph::{Tensors, Walk, cloned};

use crate::layerwise::division::to_fit_and_to_judge;
use crate::layerwise::failed;
use crate::layerwise::inputs::Plain;
use crate::{PruneError, Pruner};

/// The dense network, with batches that layers are fitted to and, after those, batches that judge.
pub(crate) struct Calibration<'a, M, I, O> {
    /// A copy, of running statistics, too.
    pub(crate) dense: M,
    pub(crate) forward: &'a dyn Fn(&M, I) -> O,
    /// Without autodiff, on the network's device.
    batches: Vec<I>,
    /// Of so many of them, the first ones, layers are fitted to.
    pub(crate) fitted: usize,
    /// Examples in these.
    pub(crate) examples: usize,
    /// Examples in those that only judge.
    pub(crate) held_out: usize,
    /// Folder for what walks keep between two operations.
    spill: Option<PathBuf>,
}

/// The batches of one walk.
pub(crate) struct Extent {
    /// Which of all.
    pub(crate) batches: Vec<usize>,
    /// Of so many of them, the first ones, layers are fitted to.
    pub(crate) fitted: usize,
    /// Those of them that judge.
    pub(crate) judges: Range<usize>,
}

impl<'a, M: Module, I: Tensors, O: Tensors> Calibration<'a, M, I, O> {
    /// As many batches as the pruner asks for. Where `is_judged` a part of the only one judges, if its parts
    /// give what the whole gives.
    pub(crate) fn new(
        pruner: &Pruner,
        dense: M,
        forward: &'a dyn Fn(&M, I) -> O,
        batches: impl IntoIterator<Item = I>,
        is_judged: bool,
    ) -> Result<Self, PruneError> {
        let device = dense.devices().into_iter().next();
        let mut calibration = Self {
            dense,
            forward,
            batches: Vec::new(),
            fitted: 0,
            examples: 0,
            held_out: 0,
            spill: pruner.spill.clone(),
        };
        calibration.take(pruner, batches, device.as_ref())?;
        if let ([only], true) = (&calibration.batches[..], is_judged) {
            match to_fit_and_to_judge(&calibration.dense, &forward, only)? {
                Some(parts) => {
                    (calibration.examples, calibration.held_out) =
                        (count(&parts[0]), count(&parts[1]));
                    calibration.batches = parts.into();
                }
                None => tracing::warn!(
                    "layers are fitted to the only batch, which judges them, too: give another one"
                ),
            }
        }
        Ok(calibration)
    }

    fn take(
        &mut self,
        pruner: &Pruner,
        batches: impl IntoIterator<Item = I>,
        device: Option<&Device>,
    ) -> Result<(), PruneError> {
        for batch in batches {
            let count = count(&batch);
            if count == 0 {
                // There is nothing to sum up, to judge or to tune by.
                continue;
            }
            let batch = batch.map_tensors(&mut Plain(device));
            if self.examples < pruner.examples {
                self.examples += count;
                self.fitted += 1;
            } else if self.held_out < pruner.held_out {
                self.held_out += count;
            } else {
                break;
            }
            self.batches.push(batch);
        }
        // Where the batches end early, the last one judges.
        if self.held_out == 0 && self.fitted > 1 && pruner.held_out > 0 {
            self.fitted -= 1;
            self.held_out = count(&self.batches[self.fitted]);
            self.examples -= self.held_out;
        }
        match self.batches.is_empty() {
            true => Err(PruneError::NoSamples),
            false => Ok(()),
        }
    }

    /// Those that layers are fitted to.
    pub(crate) fn to_fit(&self) -> &[I] {
        &self.batches[..self.fitted]
    }

    /// All batches.
    pub(crate) fn all(&self) -> Extent {
        let count = self.batches.len();
        Extent {
            batches: (0..count).collect(),
            fitted: self.fitted,
            judges: match self.held_out {
                0 => 0..self.fitted,
                _ => self.fitted..count,
            },
        }
    }

    /// The first batch to fit to, and those that judge.
    pub(crate) fn few(&self) -> Extent {
        let all = self.all();
        if self.held_out == 0 {
            return Extent { fitted: 1, ..all };
        }
        let batches: Vec<usize> = [0].into_iter().chain(all.judges).collect();
        Extent {
            fitted: 1,
            judges: 1..batches.len(),
            batches,
        }
    }

    /// A walk through a network.
    pub(crate) fn walk(&self, model: &M, extent: &Extent) -> Result<Walk<O>, PruneError> {
        let batches = extent.batches.iter().map(|at| cloned(&self.batches[*at]));
        let walk = Walk::record(model, batches, self.forward).map_err(failed)?;
        if walk.graph().nodes().any(|node| node.is_random()) {
            return Err(PruneError::NotLayerwise {
                what: "a forward pass that draws random numbers, by which candidates differ more than by their weights (give one that does not, of the mean say)".into(),
            });
        }
        match &self.spill {
            Some(folder) => walk.spilling_to(folder).map_err(failed),
            None => Ok(walk),
        }
    }
}

/// Examples of a batch: what its first tensor has along the first axis.
fn count(batch: &impl Tensors) -> usize {
    let shapes = burn_lean_graph::shapes(batch);
    let shape = shapes.first().map_or(&[][..], Vec::as_slice);
    shape.first().copied().unwrap_or(1)
}
