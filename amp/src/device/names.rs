//! What a device is called.

use burn::backend::{Backend, Dispatch};
use burn::tensor::Device;
use burn_lean_graph::BackendKind;

/// One of CubeCL's backends: wgpu, Vulkan, CUDA…
pub(crate) fn is_cubecl(device: &Device) -> bool {
    BackendKind::of(device) == BackendKind::Cube
}

/// Burn's own name of the backend, in lower case, without the layers around it: `flex`,
/// `ndarray`, `wgpu<wgsl>`…
pub(crate) fn backend_name(device: &Device) -> String {
    let mut name = Dispatch::name(device.as_dispatch()).to_lowercase();
    for layer in ["dispatch<", "autodiff<", "fusion<", "cubecl<"] {
        if let Some(inner) = name
            .strip_prefix(layer)
            .and_then(|name| name.strip_suffix('>'))
        {
            name = inner.to_string();
        }
    }
    name
}

/// The backend and Burn's identifier of the device, for messages and reports.
pub(crate) fn device_name(device: &Device) -> String {
    let plain = match device.is_autodiff() {
        true => device.clone().inner(),
        false => device.clone(),
    };
    format!("{} ({plain:?})", backend_name(device))
}
