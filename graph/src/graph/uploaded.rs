//! The constants of a graph on a device, for the executions to come.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::backend::ir::TensorId;
use burn::backend::{DispatchAutodiffContext, DispatchDevice, DispatchTensor};

/// Constants on a device, by the names that they have in the graph.
pub(crate) type Constants = Arc<Vec<(TensorId, DispatchTensor)>>;

/// What a graph keeps of its constants on a device: nothing before a second execution there, since most graphs run
/// once. A copy, which may become another graph, begins without.
#[derive(Default)]
pub(crate) struct Uploaded(Arc<Mutex<Option<Last>>>);

/// Where the last execution was, and what it left there.
pub(crate) struct Last {
    place: Place,
    constants: Option<Constants>,
}

/// A device, and how autodiff takes part on it: devices are equal whatever that is.
type Place = (DispatchDevice, DispatchAutodiffContext);

impl Uploaded {
    /// The constants on `device`: those that are kept there, or else what `upload` gives.
    pub(crate) fn on(
        &self,
        device: &DispatchDevice,
        upload: impl FnOnce() -> Vec<(TensorId, DispatchTensor)>,
    ) -> Constants {
        let Some(place) = place(device) else {
            return Arc::new(upload());
        };
        let mut last = self.lock();
        let before = last.take_if(|last| last.place != place);
        let is_again = last.is_some();
        let known = last.get_or_insert_with(|| Last {
            place: place.clone(),
            constants: None,
        });
        if let Some(constants) = &known.constants {
            return constants.clone();
        }
        // Without the lock: others may execute meanwhile, and what was elsewhere is let go.
        drop(last);
        drop(before);
        let constants = Arc::new(upload());
        if is_again
            && let Some(last) = self.lock().as_mut()
            && last.place == place
        {
            last.constants = Some(constants.clone());
        }
        constants
    }

    /// The same, not a copy that begins without.
    pub(crate) fn shared(&self) -> Self {
        Self(self.0.clone())
    }

    /// Keeps nothing until there were two further executions.
    #[must_use = "it is for the caller to drop, without locks"]
    pub(crate) fn let_go(&self) -> Option<Last> {
        self.lock().take()
    }

    fn lock(&self) -> MutexGuard<'_, Option<Last>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// `None` on a device that records: what is uploaded to it belongs to one recording.
fn place(device: &DispatchDevice) -> Option<Place> {
    let autodiff = match device {
        DispatchDevice::Autodiff(device) => {
            DispatchAutodiffContext::Enabled(device.gradient_checkpointing_strategy())
        }
        _ => DispatchAutodiffContext::Disabled,
    };
    match device.clone().inner() {
        DispatchDevice::Capture(_) => None,
        device => Some((device, autodiff)),
    }
}

impl Clone for Uploaded {
    fn clone(&self) -> Self {
        Self::default()
    }
}

impl fmt::Debug for Uploaded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Uploaded")
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use burn::tensor::{Device, TensorData};

    use super::*;
    use crate::execute::upload;

    /// For each of some executions, whether the constants were uploaded for it.
    fn uploads(uploaded: &Uploaded, device: &Device, executions: usize) -> Vec<bool> {
        let device = device.as_dispatch();
        let execute = |_| {
            let is_new = Cell::new(false);
            uploaded.on(device, || {
                is_new.set(true);
                let data = TensorData::from([1.0f32, 2.0]);
                vec![(TensorId::new(0), upload(data, device))]
            });
            is_new.get()
        };
        (0..executions).map(execute).collect()
    }

    #[test]
    fn constants_stay_on_a_device_from_the_second_execution_on() {
        let plain = Device::flex();
        let uploaded = Uploaded::default();
        for device in [
            plain.clone(),
            plain.clone().autodiff(),
            plain.clone().autodiff().gradient_checkpointing(),
        ] {
            let found = uploads(&uploaded, &device, 4);
            assert_eq!(found, [true, true, false, false], "{device:?}");
        }
        // Where they were before, nothing is left; nor in a copy.
        assert_eq!(uploads(&uploaded, &plain, 3), [true, true, false]);
        assert_eq!(uploads(&uploaded.clone(), &plain, 1), [true]);
        assert_eq!(uploads(&uploaded.shared(), &plain, 1), [false]);
        drop(uploaded.let_go());
        assert_eq!(uploads(&uploaded, &plain, 3), [true, true, false]);
        let recording = Device::capture();
        assert_eq!(place(recording.as_dispatch()), None);
    }

    #[test]
    fn a_graph_that_runs_once_leaves_nothing_and_another_until_it_is_dropped() {
        let device = Device::flex();
        let device = device.as_dispatch();
        let uploaded = Uploaded::default();
        let execute = || {
            let data = TensorData::from([1.0f32]);
            let constants = uploaded.on(device, || vec![(TensorId::new(0), upload(data, device))]);
            Arc::downgrade(&constants)
        };
        assert!(execute().upgrade().is_none());
        let kept = execute();
        assert!(kept.upgrade().is_some());
        drop(uploaded);
        assert!(kept.upgrade().is_none());
    }
}
