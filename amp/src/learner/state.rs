//! The state of a grad scaler as tensors, so that it rides in the record of a module.

use burn::module::{Module, Param, ParamId};
use burn::tensor::{DType, Device, Int, Tensor, TensorData, Transaction};

use crate::{AmpError, scaler::LossScaleState};

/// Layout of [`StateTensors`]; part of the record format.
const VERSION: i32 = 1;

/// A [`LossScaleState`] on the device: the source of truth, of which there is no copy on the host.
///
/// A loaded record replaces it, a clone has its own, a fork takes it along. It never has a gradient;
/// the factors are on the autodiff device of the model only because Burn's distributed training
/// asks that of every float parameter.
#[derive(Module, Debug)]
pub(crate) struct StateTensors {
    /// The loss scale and its inverse, F32, `[2]`. The inverse is stored because not every device
    /// divides exactly.
    factors: Param<Tensor<1>>,
    /// Version, growth tracker, hysteresis left, consecutive skips, then skipped steps and steps
    /// as two words each, low word first; I32, `[8]`, which every device has.
    counters: Param<Tensor<1, Int>>,
}

impl StateTensors {
    pub(crate) fn new(state: &LossScaleState, device: &Device) -> Self {
        Self {
            factors: Param::initialized(ParamId::new(), factors(state, device)),
            counters: Param::initialized(ParamId::new(), counters(state, device)),
        }
    }

    /// The same parameters with another value.
    pub(crate) fn with_state(&self, state: &LossScaleState) -> Self {
        let device = self.factors.lazy_device();
        Self {
            factors: Param::initialized(self.factors.id, factors(state, &device)),
            counters: Param::initialized(self.counters.id, counters(state, &device)),
        }
    }

    /// Under which the losses of a step travel with its gradients.
    pub(crate) fn id(&self) -> ParamId {
        self.factors.id
    }

    /// The loss scale, `[1]`.
    pub(crate) fn scale(&self) -> Tensor<1> {
        self.factors.val().without_autodiff().slice(0..1)
    }

    /// `1 / scale`, `[1]`.
    pub(crate) fn inverse_scale(&self) -> Tensor<1> {
        self.factors.val().without_autodiff().slice(1..2)
    }

    /// Adds both tensors to a read on `device`; [`parse`] takes what comes back.
    pub(crate) fn register(&self, transaction: Transaction, device: &Device) -> Transaction {
        let factors = self.factors.val().without_autodiff();
        let counters = self.counters.val().without_autodiff();
        transaction
            .register(factors.to_device(device))
            .register(counters.to_device(device))
    }

    /// Reads the state from the device.
    pub(crate) fn read(&self) -> Result<LossScaleState, AmpError> {
        let device = self.factors.lazy_device().without_autodiff();
        let transaction = self.register(Transaction::default(), &device);
        parse(&crate::gradients::read(transaction)?)
    }
}

fn factors(state: &LossScaleState, device: &Device) -> Tensor<1> {
    let data = TensorData::from([state.scale, state.inverse_scale()]);
    Tensor::from_data(data, (device, DType::F32))
}

fn counters(state: &LossScaleState, device: &Device) -> Tensor<1, Int> {
    let device = device.clone().without_autodiff();
    let data = TensorData::from([
        VERSION,
        state.growth_tracker as i32,
        state.hysteresis_left,
        state.consecutive_skips as i32,
        state.skipped_steps as i32,
        (state.skipped_steps >> 32) as i32,
        state.steps as i32,
        (state.steps >> 32) as i32,
    ]);
    Tensor::from_data(data, (&device, DType::I32))
}

/// The inverse of [`StateTensors::new`], with checks: a record may come from anywhere.
pub(crate) fn parse(data: &[TensorData]) -> Result<LossScaleState, AmpError> {
    let rejected = |reason: String| AmpError::Record {
        what: "loss scale state".into(),
        reason,
    };
    let [factors, counters] = data else {
        return Err(rejected(
            "the device returned another number of tensors".into(),
        ));
    };
    let factors: Vec<f32> = factors.iter().collect();
    let counters: Vec<i32> = counters.iter().collect();
    let version = counters.first().copied().unwrap_or(0);
    if version != VERSION {
        return Err(rejected(format!(
            "it has version {version}, this build reads version {VERSION}"
        )));
    }
    let (&[scale, inverse], &[_, growth, hysteresis_left, consecutive, a, b, c, d]) =
        (factors.as_slice(), counters.as_slice())
    else {
        return Err(rejected(format!(
            "{} factors and {} counters, instead of 2 and 8",
            factors.len(),
            counters.len()
        )));
    };
    let word = |low: i32, high: i32| u64::from(low as u32) | u64::from(high as u32) << 32;
    let state = LossScaleState {
        scale,
        growth_tracker: growth as u32,
        hysteresis_left,
        consecutive_skips: consecutive as u32,
        skipped_steps: word(a, b),
        steps: word(c, d),
    };
    state.validate()?;
    if inverse != state.inverse_scale() {
        return Err(rejected(format!(
            "{inverse} is not the inverse of the loss scale {scale}"
        )));
    }
    Ok(state)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_survives_the_tensors() {
        let state = LossScaleState {
            scale: 48_000.5,
            growth_tracker: u32::MAX,
            hysteresis_left: -3,
            consecutive_skips: 2_147_483_648,
            skipped_steps: 4_294_967_297,
            steps: u64::MAX,
        };

        let read = StateTensors::new(&state, &Device::flex()).read();

        assert_eq!(read, Ok(state));
    }

    #[test]
    fn a_state_of_another_version_is_refused() {
        let state = crate::LossScale::Static(2.0).init();
        let mut tensors = StateTensors::new(&state, &Device::flex());
        tensors.counters = tensors.counters.map(|counters| counters + 6);

        let error = tensors.read().unwrap_err();

        assert!(error.to_string().contains("version 7"), "{error}");
    }

    #[test]
    fn a_damaged_scale_is_refused() {
        let state = crate::LossScale::Static(2.0).init();
        for damaged in [[f32::NAN, 0.5], [0.0, 0.5], [-2.0, -0.5], [2.0, 0.25]] {
            let mut tensors = StateTensors::new(&state, &Device::flex());
            tensors.factors = tensors
                .factors
                .map(|factors| Tensor::from_data(damaged, &factors.device()));

            let error = tensors.read().unwrap_err();

            assert!(
                matches!(error, AmpError::Record { .. }),
                "{damaged:?}: {error}"
            );
        }
    }
}
