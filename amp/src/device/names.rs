//! What a device is called.

use burn::tensor::Device;
use burn_lean_graph::{BackendKind, backend_name};

/// One of CubeCL's backends: wgpu, Vulkan, CUDA…
pub(crate) fn is_cubecl(device: &Device) -> bool {
    BackendKind::of(device) == BackendKind::Cube
}

/// The backend and Burn's identifier of the device, for messages and reports: `flex (…)`, `wgpu<wgsl> (…)`.
pub(crate) fn device_name(device: &Device) -> String {
    let plain = match device.is_autodiff() {
        true => device.clone().inner(),
        false => device.clone(),
    };
    let name = backend_name(device);
    let runtime = name
        .strip_prefix("cubecl<")
        .and_then(|name| name.strip_suffix('>'));
    format!("{} ({plain:?})", runtime.unwrap_or(&name))
}
