//! Burn's capture device, and tensors on it that look trainable.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::panic::{self, AssertUnwindSafe, UnwindSafe};
use std::sync::Once;

use burn::backend::ir::TensorId;
use burn::backend::ops::{BoolTensorOps, FloatTensorOps, IntTensorOps};
use burn::backend::{
    Autodiff, AutodiffBackend, BackendTensor, Capture, Dispatch, DispatchAutodiffContext,
    DispatchTensor, DispatchTensorKind, TensorMetadata,
};
use burn::tensor::{BoolDType, DType, Device, DeviceConfig, FloatDType, IntDType, Shape, Tensor};

/// The capture device of this thread for what runs on `like`: it makes tensors in the same dtypes
/// by default.
///
/// Burn numbers capture devices with 16 bits and never takes a number back, while one device can
/// record any number of times, one after the other. So there is one for each thread and choice of
/// default dtypes.
pub fn capture_device(like: &Device) -> Device {
    type Defaults = (FloatDType, IntDType, BoolDType);
    thread_local! {
        static CAPTURE: RefCell<HashMap<Defaults, Device>> = RefCell::default();
    }
    let settings = like.settings();
    let defaults = (
        settings.float_dtype,
        settings.int_dtype,
        settings.bool_dtype,
    );
    CAPTURE.with_borrow_mut(|known| {
        let device = known.entry(defaults).or_insert_with(|| {
            let device = Device::capture();
            let config = DeviceConfig::default()
                .float_dtype(settings.float_dtype)
                .int_dtype(settings.int_dtype)
                .bool_dtype(settings.bool_dtype);
            // Burn configures a device before its first use only, and this one only in a scope.
            let configured = device.capture_scope(|scope| {
                let configured = device.clone().configure(config);
                debug_assert!(configured.is_ok(), "{configured:?}");
                scope.complete([], [])
            });
            debug_assert!(configured.is_ok(), "{configured:?}");
            device
        });
        device.clone()
    })
}

/// The tensor in the recording that a value on the capture device stands for.
pub(crate) fn id(tensor: &DispatchTensor) -> Option<TensorId> {
    match &tensor.kind {
        DispatchTensorKind::Capture(
            BackendTensor::Float(t) | BackendTensor::Int(t) | BackendTensor::Bool(t),
        ) => Some(t.id()),
        DispatchTensorKind::Autodiff(inner) => match &**inner {
            DispatchTensorKind::Capture(BackendTensor::Autodiff(t)) => {
                Some(t.clone().into_primitive().id())
            }
            _ => None,
        },
        _ => None,
    }
}

/// A recorded tensor without a value.
pub(crate) fn placeholder(shape: Shape, dtype: DType, device: &Device) -> DispatchTensor {
    let on = device.as_dispatch();
    if dtype.is_float() {
        Dispatch::float_zeros(shape, on, dtype.into())
    } else if dtype.is_bool() {
        Dispatch::bool_zeros(shape, on, dtype.into())
    } else {
        Dispatch::int_zeros(shape, on, dtype.into())
    }
}

/// A recorded float tensor that says to be on an autodiff device, so that modules behave as in
/// training.
///
/// Burn refuses to move tensors to a capture device with autodiff, while its types allow the
/// combination: the tensor is wrapped by hand.
pub(crate) fn as_autodiff(tensor: DispatchTensor) -> DispatchTensor {
    let DispatchTensorKind::Capture(BackendTensor::Float(primitive)) = tensor.kind else {
        return tensor;
    };
    let primitive = <Autodiff<Capture> as AutodiffBackend>::from_inner(primitive);
    // A dispatch tensor knows its shape; the rank of the wrapper is of no interest.
    Tensor::<1>::from_primitive::<Autodiff<Capture>>(primitive).into_dispatch()
}

/// The same, as a leaf whose gradient is wanted.
pub(crate) fn as_leaf(tensor: DispatchTensor) -> DispatchTensor {
    let tensor = as_autodiff(tensor);
    let DispatchTensorKind::Autodiff(inner) = tensor.kind else {
        return tensor;
    };
    let kind = match *inner {
        DispatchTensorKind::Capture(BackendTensor::Autodiff(t)) => {
            DispatchTensorKind::Capture(BackendTensor::Autodiff(t.require_grad()))
        }
        other => other,
    };
    DispatchTensor {
        kind: DispatchTensorKind::Autodiff(Box::new(kind)),
        autodiff: tensor.autodiff,
    }
}

/// The autodiff tensor inside of a recorded one.
pub(crate) fn autodiff_primitive(
    tensor: &DispatchTensor,
) -> Option<burn::backend::tensor::FloatTensor<Autodiff<Capture>>> {
    let DispatchTensorKind::Autodiff(inner) = &tensor.kind else {
        return None;
    };
    match &**inner {
        DispatchTensorKind::Capture(BackendTensor::Autodiff(t)) => Some(t.clone()),
        _ => None,
    }
}

/// A primitive of the capture device as a tensor.
pub(crate) fn from_primitive(
    primitive: burn::backend::tensor::FloatTensor<Capture>,
) -> DispatchTensor {
    DispatchTensor {
        kind: DispatchTensorKind::Capture(BackendTensor::Float(primitive)),
        autodiff: DispatchAutodiffContext::Disabled,
    }
}

/// Runs `body`; a panic in it becomes its message, and is not printed.
pub(crate) fn catch<R>(body: impl FnOnce() -> R) -> Result<R, String> {
    thread_local! {
        static QUIET: Cell<bool> = const { Cell::new(false) };
    }
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let previous = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !QUIET.get() {
                previous(info);
            }
        }));
    });
    let outer = QUIET.replace(true);
    let result = catch_unwind(AssertUnwindSafe(body));
    QUIET.set(outer);
    result
}

fn catch_unwind<R>(body: impl FnOnce() -> R + UnwindSafe) -> Result<R, String> {
    panic::catch_unwind(body).map_err(|payload| message(payload.as_ref()))
}

fn message(payload: &(dyn Any + Send)) -> String {
    payload
        .downcast_ref::<String>()
        .cloned()
        .or_else(|| payload.downcast_ref::<&str>().map(ToString::to_string))
        .unwrap_or_else(|| "it panicked without a message".into())
}

/// Shape and dtype of a tensor, as they identify an input.
pub(crate) fn signature(tensor: &DispatchTensor) -> (Vec<usize>, DType) {
    (tensor.shape().to_vec(), tensor.dtype())
}
