//! Burn's capture device, and tensors on it that look trainable.

use burn::backend::ir::TensorId;
use burn::backend::ops::{BoolTensorOps, FloatTensorOps, IntTensorOps};
use burn::backend::{
    Autodiff, AutodiffBackend, BackendTensor, Capture, Dispatch, DispatchAutodiffContext,
    DispatchTensor, DispatchTensorKind, TensorMetadata,
};
use burn::tensor::{DType, Device, Shape, Tensor};

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

/// Shape and dtype of a tensor, as they identify an input.
pub(crate) fn signature(tensor: &DispatchTensor) -> (Vec<usize>, DType) {
    (tensor.shape().to_vec(), tensor.dtype())
}
