//! Listening to the quantizers of a model while it runs.

use std::cell::RefCell;

use burn::tensor::{Int, Tensor};

use crate::QuantError;

/// Codes that a quantizer gave in one call.
#[derive(Debug, Clone)]
pub(crate) struct Tapped {
    /// Path of the quantizer, as its messages name it.
    pub(crate) path: String,
    pub(crate) codes: Vec<i32>,
}

#[derive(Default)]
struct Tap {
    tapped: Vec<Tapped>,
    error: Option<QuantError>,
}

thread_local! {
    static TAP: RefCell<Option<Tap>> = const { RefCell::new(None) };
}

/// Whether someone listens on this thread.
pub(crate) fn is_open() -> bool {
    TAP.with_borrow(Option::is_some)
}

/// Called by a quantizer with its codes. Reads from the device.
pub(crate) fn record<const D: usize>(path: &str, codes: Tensor<D, Int>) {
    let read = codes.try_into_data();
    TAP.with_borrow_mut(|tap| {
        let Some(tap) = tap else { return };
        match read {
            Ok(data) => tap.tapped.push(Tapped {
                path: path.to_string(),
                codes: data.iter::<i32>().collect(),
            }),
            Err(error) => {
                tap.error = Some(QuantError::Device {
                    reason: error.to_string(),
                });
            }
        }
    });
}

/// What the quantizers that `run` calls on this thread give, in order.
pub(crate) fn listen<T>(run: impl FnOnce() -> T) -> Result<(T, Vec<Tapped>), QuantError> {
    let guard = Guard(TAP.replace(Some(Tap::default())));
    let result = run();
    let tap = TAP.take().unwrap_or_default();
    drop(guard);
    match tap.error {
        Some(error) => Err(error),
        None => Ok((result, tap.tapped)),
    }
}

/// Stops listening, also when the model panics.
struct Guard(Option<Tap>);

impl Drop for Guard {
    fn drop(&mut self) {
        TAP.set(self.0.take());
    }
}
