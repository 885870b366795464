//! Recording a forward pass: a device to record on, and what becomes of a panic while it is.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::{Mutex, Once, PoisonError};

use burn::tensor::{BoolDType, Device, DeviceConfig, FloatDType, IntDType};

/// Calls `record` with one of Burn's capture devices that no other caller has at the moment, and that
/// makes tensors in the same dtypes by default as `like`: what a recording is executed on later.
///
/// Burn numbers capture devices with 16 bits, never uses a number twice, and panics at the 65,537th
/// device of a process. So devices are lent: as many are made as are in use at the same time.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_lean_reparam::with_capture_device_like;
///
/// let operations = with_capture_device_like(&Device::flex(), |device| {
///     let captured = device.capture_scope(|scope| {
///         let _ = Tensor::<1>::ones([2], device) + 1.0;
///         scope.complete([], [])
///     });
///     captured.unwrap().graph.operations.len()
/// });
/// assert_eq!(operations, 2);
/// ```
///
/// A device that was lent when `record` panicked is not lent again. While `record` runs,
/// [`recorded_device`] is `like`.
pub fn with_capture_device_like<T>(like: &Device, record: impl FnOnce(&Device) -> T) -> T {
    static FREE: Mutex<Vec<(Defaults, Device)>> = Mutex::new(Vec::new());
    let settings = like.settings();
    let defaults = (
        settings.float_dtype,
        settings.int_dtype,
        settings.bool_dtype,
    );
    let free = || FREE.lock().unwrap_or_else(PoisonError::into_inner);
    let lent = {
        let mut free = free();
        let position = free.iter().position(|(of, _)| *of == defaults);
        position.map(|position| free.swap_remove(position).1)
    };
    let device = lent.unwrap_or_else(|| configured(defaults));
    let recorded = {
        let _like = Like(RECORDED.replace(Some((device.clone(), like.clone()))));
        record(&device)
    };
    free().push((defaults, device));
    recorded
}

thread_local! {
    /// The capture device of the recording that this thread makes, and what it is like.
    static RECORDED: RefCell<Option<(Device, Device)>> = const { RefCell::new(None) };
}

/// What was recorded before, put back also where the recording panics.
struct Like(Option<(Device, Device)>);

impl Drop for Like {
    fn drop(&mut self) {
        RECORDED.set(self.0.take());
    }
}

/// The device that a recording of this thread will run on, for the capture device that it is made on;
/// any other device as it is.
///
/// A capture device says that it has every dtype, so a forward pass that asks
/// [`Device::supports_dtype`] asks that of this one.
///
/// ```
/// use burn::tensor::Device;
/// use burn_lean_reparam::{recorded_device, with_capture_device_like};
///
/// let device = Device::flex();
/// with_capture_device_like(&device, |capture| {
///     assert_ne!(*capture, device);
///     assert_eq!(recorded_device(capture), device);
/// });
/// assert_eq!(recorded_device(&device), device);
/// ```
pub fn recorded_device(device: &Device) -> Device {
    let plain = |device: &Device| match device.is_autodiff() {
        true => device.clone().inner(),
        false => device.clone(),
    };
    let found = RECORDED.with_borrow(|recorded| {
        let (capture, like) = recorded.as_ref()?;
        (plain(device) == *capture).then(|| like.clone())
    });
    found.unwrap_or_else(|| device.clone())
}

/// The dtypes that a device makes floats, ints and bools in.
type Defaults = (FloatDType, IntDType, BoolDType);

/// Burn configures a device before its first use only, and a capture device only in a scope.
fn configured((float, int, bool): Defaults) -> Device {
    let device = Device::capture();
    let config = DeviceConfig::default()
        .float_dtype(float)
        .int_dtype(int)
        .bool_dtype(bool);
    let scope = device.capture_scope(|scope| {
        let configured = device.clone().configure(config);
        debug_assert!(configured.is_ok(), "{configured:?}");
        scope.complete([], [])
    });
    debug_assert!(scope.is_ok(), "{scope:?}");
    device
}

/// Calls `run`; where it panics, returns the message with its place, and prints nothing.
///
/// For code of the user's that may rightly panic, such as a forward pass on a device that has no
/// numbers. Panics of other threads are reported as ever. The first call puts a panic hook around the
/// one that the process has; a hook that is set later replaces both.
///
/// ```
/// use burn_lean_reparam::catch_quietly;
///
/// assert_eq!(catch_quietly(|| 1), Ok(1));
/// let message = catch_quietly(|| panic!("no value")).unwrap_err();
/// assert!(message.starts_with("no value (at "), "{message}");
/// ```
///
/// # Errors
///
/// The message of the panic.
pub fn catch_quietly<T>(run: impl FnOnce() -> T) -> Result<T, String> {
    install();
    let outer = QUIET.replace(true);
    let result = catch_unwind(AssertUnwindSafe(run));
    QUIET.set(outer);
    result.map_err(|payload| {
        let message = message(payload.as_ref());
        match PLACE.take() {
            Some(place) => format!("{message} (at {place})"),
            None => message,
        }
    })
}

thread_local! {
    /// Whether a panic of this thread is caught and told by its catcher.
    static QUIET: Cell<bool> = const { Cell::new(false) };
    /// Where the last such panic was.
    static PLACE: RefCell<Option<String>> = const { RefCell::new(None) };
}

fn install() {
    static INSTALLED: Once = Once::new();
    // A thread that unwinds may not set a hook; it installs none, and prints.
    if std::thread::panicking() {
        return;
    }
    INSTALLED.call_once(|| {
        let previous = take_hook();
        set_hook(Box::new(move |panic| match QUIET.get() {
            true => {
                let place = panic.location().map(ToString::to_string);
                PLACE.with_borrow_mut(|last| *last = place);
            }
            false => previous(panic),
        }));
    });
}

fn message(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(|text| text.to_string());
    text.or_else(|| payload.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a panic without a message".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One more than there are numbers.
    #[test]
    fn devices_do_not_run_out() {
        for _ in 0..=u32::from(u16::MAX) + 1 {
            with_capture_device_like(&Device::flex(), |device| {
                let captured = device.capture_scope(|scope| scope.complete([], []));
                assert!(captured.is_ok());
            });
        }
    }

    #[test]
    fn recordings_inside_of_each_other_have_devices_of_their_own() {
        with_capture_device_like(&Device::flex(), |outer| {
            with_capture_device_like(&Device::flex(), |inner| assert_ne!(outer, inner));
        });
    }

    #[test]
    fn a_panic_that_is_caught_inside_of_another_leaves_the_outer_one_quiet() {
        let outer = catch_quietly(|| {
            assert!(catch_quietly(|| panic!("inner")).is_err());
            assert!(QUIET.get());
            panic!("outer {}", 2)
        });
        let message = outer.unwrap_err();
        assert!(message.starts_with("outer 2 (at "), "{message}");
        assert!(!QUIET.get());
    }
}
