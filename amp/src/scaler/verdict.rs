//! What a step is decided on: the one read from the device, and what it says.

use burn::module::Module;
use burn::tensor::{Tensor, TensorData, Transaction};

use crate::gradients::{Place, Unscaled, overflowing, read, same_device};
use crate::scaler::report::SkipCause;
use crate::{AmpError, LossScale};

/// A read that decides on a step, not yet made.
pub(crate) struct Reading {
    pub(crate) transaction: Transaction,
    pub(crate) paths: Vec<String>,
    /// For each of `paths`, where its flags are among the first tensors, of which there are `flags`.
    places: Vec<Vec<Place>>,
    flags: usize,
    has_norm: bool,
    losses: usize,
    of_all_losses: bool,
}

impl Reading {
    /// Collects the flags, the norm and the losses.
    pub(crate) fn of(unscaled: &Unscaled, losses: &[Tensor<1>]) -> Self {
        let mut reading = Self {
            transaction: Transaction::default(),
            paths: Vec::with_capacity(unscaled.flags.places.len()),
            places: Vec::with_capacity(unscaled.flags.places.len()),
            flags: unscaled.flags.tensors.len(),
            has_norm: false,
            losses: 0,
            of_all_losses: unscaled.of_all_losses,
        };
        let Some(first) = unscaled.flags.tensors.first() else {
            return reading;
        };
        let device = first.device();
        let mut register = |tensor: Tensor<1>| {
            let tensor = same_device(tensor, &device);
            reading.transaction = std::mem::take(&mut reading.transaction).register(tensor);
        };
        for flags in &unscaled.flags.tensors {
            register(flags.clone());
        }
        for ((_, path), places) in unscaled.parameters.iter().zip(&unscaled.flags.places) {
            if !places.is_empty() {
                reading.paths.push(path.clone());
                reading.places.push(places.clone());
            }
        }
        if let Some(norm) = &unscaled.norm {
            register(norm.clone());
            reading.has_norm = true;
        }
        for loss in losses {
            register(match loss.dims() {
                [1] => loss.clone(),
                _ => loss.clone().sum(),
            });
            reading.losses += 1;
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
        let (flags, others) = data.split_at(self.flags);
        let flags: Vec<Vec<f32>> = flags
            .iter()
            .map(|data| data.iter::<f32>().collect())
            .collect();
        let is_finite = |place: &Place| {
            let numbers = &flags[place.tensor][place.range.clone()];
            numbers.iter().all(|number| number.is_finite())
        };
        let overflowing = self
            .paths
            .into_iter()
            .zip(self.places)
            .filter(|(_, places)| !places.iter().all(is_finite))
            .map(|(path, _)| path)
            .collect();
        let mut numbers = others.iter().map(first);
        let norm = if self.has_norm { numbers.next() } else { None };
        Verdict {
            overflowing,
            norm,
            losses: numbers.take(self.losses).collect(),
            found_elsewhere: false,
            of_all_losses: self.of_all_losses,
        }
    }
}

fn first(data: &TensorData) -> f32 {
    data.iter::<f32>().next().unwrap_or(0.0)
}

/// What the read said.
#[derive(Debug, Default)]
pub(crate) struct Verdict {
    pub(crate) overflowing: Vec<String>,
    pub(crate) norm: Option<f32>,
    /// Of every loss that may be one of this step.
    losses: Vec<f32>,
    pub(crate) found_elsewhere: bool,
    /// Whether all of the losses are of this step.
    of_all_losses: bool,
}

impl Verdict {
    /// Whether what was read here is finite.
    pub(crate) fn is_finite(&self) -> bool {
        let numbers = [self.norm, self.loss()];
        self.overflowing.is_empty() && numbers.into_iter().flatten().all(f32::is_finite)
    }

    /// Says which gradients are not finite where sums of squares served as flags: a sum may overflow
    /// by itself. Reads only where one of them is not finite.
    pub(crate) fn exact<M: Module>(
        mut self,
        model: &M,
        unscaled: &Unscaled,
    ) -> Result<Self, AmpError> {
        if unscaled.flags_are_squares && !self.overflowing.is_empty() {
            self.overflowing = overflowing(model, &unscaled.grads, &self.overflowing)?;
        }
        self.found_elsewhere = unscaled.found_elsewhere;
        Ok(self)
    }

    /// Whether a loss can be one of this step: a loss that is not finite hardly gives finite gradients,
    /// and where there is one, it is the cause of those that are not.
    fn is_of_this_step(&self, loss: f32) -> bool {
        let fits = |loss: f32| loss.is_finite() == self.overflowing.is_empty();
        self.of_all_losses || fits(loss) || !self.losses.iter().any(|loss| fits(*loss))
    }

    /// Those of `losses`, which were read, that belong to another optimizer's step.
    pub(crate) fn not_of_this_step(&self, losses: &[Tensor<1>]) -> Vec<Tensor<1>> {
        let read = losses.iter().zip(&self.losses);
        read.filter(|(_, value)| !self.is_of_this_step(**value))
            .map(|(loss, _)| loss.clone())
            .collect()
    }

    /// Mean of the losses of this step.
    pub(crate) fn loss(&self) -> Option<f32> {
        let own = self
            .losses
            .iter()
            .filter(|loss| self.is_of_this_step(**loss));
        let (sum, count) = own.fold((0.0, 0), |(sum, count), loss| (sum + loss, count + 1));
        (count > 0).then(|| sum / count as f32)
    }

    pub(crate) fn cause(&self, rule: &LossScale, scale: f32) -> Option<SkipCause> {
        if !self.overflowing.is_empty() {
            return Some(match self.loss() {
                Some(loss) if !loss.is_finite() => SkipCause::LossNotFinite,
                _ if scale > 1.0 && matches!(rule, LossScale::Static(_)) => {
                    SkipCause::ScaleIsStatic
                }
                _ if rule.at_floor(scale) => SkipCause::ScaleAtFloor,
                _ => SkipCause::ScaleTooHigh,
            });
        }
        match (self.norm, self.loss()) {
            (Some(norm), _) if !norm.is_finite() => Some(SkipCause::NormNotFinite),
            // Of a batch without examples, for one: its gradients are 0, and statistics NaN.
            (_, Some(loss)) if !loss.is_finite() => Some(SkipCause::LossNotFinite),
            _ => self.found_elsewhere.then_some(SkipCause::OtherReplica),
        }
    }
}
