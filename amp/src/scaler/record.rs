//! The grad scaler's state on disk.

use serde::{Deserialize, Serialize};

use crate::{AmpError, GradScaler, GradScalerConfig, LossScale, scaler::LossScaleState};

/// Everything a [`GradScaler`] needs to go on as if it had never stopped.
///
/// Serialize it with any serde format that keeps F32 exact; JSON does. Take it between steps: the
/// losses of a half-accumulated batch are not part of it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct GradScalerRecord {
    /// Version of this format.
    pub version: u32,
    /// The scaler's configuration.
    pub config: GradScalerConfig,
    /// The loss scale, its trackers and counters.
    pub state: LossScaleState,
}

impl GradScalerRecord {
    /// The version that this release writes and reads.
    pub const VERSION: u32 = 1;
}

impl GradScaler {
    /// The configuration and the full state.
    pub fn to_record(&self) -> GradScalerRecord {
        GradScalerRecord {
            version: GradScalerRecord::VERSION,
            config: self.config.clone(),
            state: self.state,
        }
    }

    /// Continues from a record.
    ///
    /// ```
    /// use burn_lean_amp::{GradScaler, GradScalerConfig, LossScale};
    ///
    /// let scaler = GradScalerConfig::new(LossScale::Static(128.0)).init()?;
    /// let json = serde_json::to_string(&scaler.to_record()).unwrap();
    /// let resumed = GradScaler::from_record(serde_json::from_str(&json).unwrap())?;
    /// assert_eq!(resumed.state(), scaler.state());
    /// # Ok::<(), burn_lean_amp::AmpError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`AmpError::Record`] for another version or an impossible state,
    /// [`AmpError::InvalidConfig`] for an impossible configuration.
    pub fn from_record(record: GradScalerRecord) -> Result<Self, AmpError> {
        if record.version != GradScalerRecord::VERSION {
            return Err(AmpError::Record {
                what: "grad scaler".into(),
                reason: format!(
                    "it has version {}, this release reads {}",
                    record.version,
                    GradScalerRecord::VERSION
                ),
            });
        }
        let mut scaler = record.config.init()?;
        record.state.validate_for(&scaler.config.loss_scale)?;
        scaler.load_state(record.state)?;
        Ok(scaler)
    }

    /// Replaces the state and keeps the configuration.
    ///
    /// An F16 run can be resumed in BF16: a static scale of 1, which [`LossScale::for_dtype`] gives for it,
    /// takes the state of a run with any other scale. Its own scale stays 1, `steps` and `skipped_steps` go
    /// on, and `consecutive_skips` is 0. Of [`LossScale::None`], too, `steps` and `skipped_steps` go on. The other way
    /// round, the state of a run without loss scale is refused: begin with the first scale instead.
    ///
    /// # Errors
    ///
    /// [`AmpError::Record`] for a state that no scaler can be in, and, but for the two above, for one that
    /// no scaler of this configuration can be in: that of another kind of loss scale, of another static
    /// scale, or outside of floor and ceiling.
    pub fn load_state(&mut self, state: LossScaleState) -> Result<(), AmpError> {
        let state = state.continued(&self.config.loss_scale)?;
        self.state = match self.config.loss_scale {
            LossScale::None => state.restarted(&LossScale::None),
            _ => state,
        };
        self.scaled_by = None;
        Ok(())
    }
}
