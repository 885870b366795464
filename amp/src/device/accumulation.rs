//! In what a device adds up the terms of a convolution, of a window, and of an interpolation's gradient.
//!
//! Kernels of Burn's GPU backends add up in the dtype of their operands: in F16 a sum of more than 2,048 equal terms
//! stands still, and in BF16 one of 256; a sum of large ones is infinite, also where their mean is not. The direct convolution
//! is run where nothing was tuned, and may be where it was: a convolution is tried out before its first step.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Mutex, PoisonError};

use burn::backend::ir::{ModuleOperationIr as Module, OperationIr};
use burn::tensor::{Device, FloatDType};
use burn_lean_graph::Node;

use super::{device_name, is_cubecl};

/// Roundings that are no loss: of the result, and some of sums that are split.
const ROUNDINGS: f32 = 4.0;

/// What is tried out once: a kernel is chosen by powers of two.
#[derive(Debug, Clone, PartialEq)]
struct Kind {
    device: Device,
    /// Whether gradients are tried out, too: devices are equal with autodiff and without.
    trains: bool,
    half: FloatDType,
    name: &'static str,
    options: u64,
    sizes: Vec<usize>,
}

/// Whether the device adds up in `half` in this operation, and loses by it, in its forward or, where it has
/// autodiff, its backward pass.
pub(crate) fn adds_up_in_half(node: &Node<'_>, device: &Device, half: FloatDType) -> bool {
    let OperationIr::Module(module) = node.operation() else {
        return false;
    };
    let averages = matches!(
        module,
        Module::AvgPool1d(_) | Module::AvgPool2d(_) | Module::Interpolate(_)
    );
    is_cubecl(device) && (averages || loses_terms(node, module, device, half))
}

/// Whether the device is seen to lose terms of this convolution. False for other operations, and where it
/// cannot be tried out.
fn loses_terms(node: &Node<'_>, module: &Module, device: &Device, half: FloatDType) -> bool {
    static KNOWN: Mutex<Vec<(Kind, bool)>> = Mutex::new(Vec::new());

    let Some(options) = options(module) else {
        return false;
    };
    let shapes = node.operation().inputs().map(|tensor| &tensor.shape);
    let kind = Kind {
        device: device.clone(),
        trains: device.is_autodiff(),
        half,
        name: node.name(),
        options,
        sizes: shapes
            .flat_map(|shape| shape.iter().map(|size| size.next_power_of_two()))
            .collect(),
    };
    let known = || KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, loses)) = known().iter().find(|(of, _)| *of == kind) {
        return *loses;
    }
    // Without the lock, since the device computes.
    let error = node.rounding_error(device, half);
    let roundoff = match half {
        FloatDType::BF16 => 1.0 / 256.0,
        _ => 1.0 / 2048.0,
    };
    let loses = error.is_some_and(|error| error > ROUNDINGS * roundoff);
    if loses {
        tracing::info!(
            device = %device_name(device),
            operation = node.name(),
            module = node.module(),
            ?error,
            "adds up in {half:?} here, and loses terms: it runs in F32, on operands in {half:?}"
        );
    }
    known().push((kind, loses));
    loses
}

/// What a convolution is configured with; `None` for other operations.
fn options(module: &Module) -> Option<u64> {
    let mut hasher = DefaultHasher::new();
    match module {
        Module::Conv1d(of) => of.options.hash(&mut hasher),
        Module::Conv2d(of) => of.options.hash(&mut hasher),
        Module::Conv3d(of) => of.options.hash(&mut hasher),
        Module::ConvTranspose1d(of) => of.options.hash(&mut hasher),
        Module::ConvTranspose2d(of) => of.options.hash(&mut hasher),
        Module::ConvTranspose3d(of) => of.options.hash(&mut hasher),
        _ => return None,
    }
    Some(hasher.finish())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_tried_out_without_gradients_is_tried_out_with_them() {
        let kind = |device: Device| Kind {
            trains: device.is_autodiff(),
            device,
            half: FloatDType::F16,
            name: "conv2d",
            options: 0,
            sizes: Vec::new(),
        };
        assert!(kind(Device::flex()) != kind(Device::flex().autodiff()));
    }
}
