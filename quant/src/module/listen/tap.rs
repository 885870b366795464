//! Listening to the codes that the quantizers of a model give.

use std::sync::Mutex;

use burn::tensor::{Int, Tensor};

use crate::QuantError;
use crate::module::listen::listener::lock;

/// Codes that a quantizer gave in one call.
#[derive(Debug, Clone)]
pub(crate) struct Tapped {
    /// Path of the quantizer, as its messages name it.
    pub(crate) path: String,
    pub(crate) codes: Vec<i32>,
}

/// What was heard so far, in the order in which it came.
#[derive(Debug, Default)]
pub(crate) struct Tap {
    tapped: Vec<Tapped>,
    error: Option<QuantError>,
}

/// Called by a quantizer with its codes. Reads from the device.
pub(crate) fn record<const D: usize>(tap: &Mutex<Tap>, path: &str, codes: Tensor<D, Int>) {
    match codes.try_into_data() {
        Ok(data) => {
            let codes = data.iter::<i32>().collect();
            let path = path.to_string();
            lock(tap).tapped.push(Tapped { path, codes });
        }
        Err(error) => {
            lock(tap).error = Some(QuantError::device(error));
        }
    }
}

impl Tap {
    /// What was heard since the last time.
    pub(crate) fn take(&mut self) -> Result<Vec<Tapped>, QuantError> {
        let heard = std::mem::take(self);
        match heard.error {
            Some(error) => Err(error),
            None => Ok(heard.tapped),
        }
    }
}
