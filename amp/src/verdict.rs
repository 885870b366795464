//! What a step is decided on: the one read from the device, and what it says.

use burn::tensor::{Tensor, TensorData, Transaction};

use crate::gradients::{Unscaled, read, same_device};
use crate::report::SkipCause;
use crate::{AmpError, LossScale};

/// A read that decides on a step, not yet made.
pub(crate) struct Reading {
    pub(crate) transaction: Transaction,
    pub(crate) paths: Vec<String>,
    has_norm: bool,
    losses: Option<usize>,
}

impl Reading {
    /// Collects the flags and the norm, and the sum and number of the losses.
    pub(crate) fn of(unscaled: &Unscaled, losses: Option<&(Tensor<1>, usize)>) -> Self {
        let mut reading = Self {
            transaction: Transaction::default(),
            paths: Vec::with_capacity(unscaled.flags.len()),
            has_norm: false,
            losses: None,
        };
        let Some((_, first)) = unscaled.flags.first() else {
            return reading;
        };
        let device = first.device();
        let mut register = |tensor: Tensor<1>| {
            let tensor = same_device(tensor, &device);
            reading.transaction = std::mem::take(&mut reading.transaction).register(tensor);
        };
        for (path, flag) in &unscaled.flags {
            register(flag.clone());
            reading.paths.push(path.clone());
        }
        if let Some(norm) = &unscaled.norm {
            register(norm.clone());
            reading.has_norm = true;
        }
        if let Some((sum, count)) = losses {
            register(sum.clone().sum());
            reading.losses = Some(*count);
        }
        reading
    }

    /// Reads and waits; free when there is nothing to read.
    pub(crate) fn wait(mut self) -> Result<Verdict, AmpError> {
        if self.paths.is_empty() {
            return Ok(Verdict::default());
        }
        let data = read(std::mem::take(&mut self.transaction))?;
        Ok(self.verdict(&data))
    }

    pub(crate) fn verdict(self, data: &[TensorData]) -> Verdict {
        let mut numbers = data
            .iter()
            .map(|data| data.iter::<f32>().next().unwrap_or(0.0));
        let overflowing = self
            .paths
            .into_iter()
            .zip(&mut numbers)
            .filter(|(_, flag)| !flag.is_finite())
            .map(|(path, _)| path)
            .collect();
        let norm = if self.has_norm { numbers.next() } else { None };
        let loss = self
            .losses
            .and_then(|count| numbers.next().map(|sum| sum / count as f32));
        Verdict {
            overflowing,
            norm,
            loss,
        }
    }
}

/// What the read said.
#[derive(Debug, Default)]
pub(crate) struct Verdict {
    pub(crate) overflowing: Vec<String>,
    pub(crate) norm: Option<f32>,
    pub(crate) loss: Option<f32>,
}

impl Verdict {
    pub(crate) fn cause(&self, rule: &LossScale, scale: f32) -> Option<SkipCause> {
        if !self.overflowing.is_empty() {
            return Some(match self.loss {
                Some(loss) if !loss.is_finite() => SkipCause::LossNotFinite,
                _ if rule.at_floor(scale) => SkipCause::ScaleAtFloor,
                _ => SkipCause::ScaleTooHigh,
            });
        }
        match self.norm {
            Some(norm) if !norm.is_finite() => Some(SkipCause::NormNotFinite),
            _ => None,
        }
    }
}
