//! Which backend a device is of.

use burn::backend::{Backend, Dispatch};
use burn::tensor::Device;

/// A backend of Burn, as far as it matters to operations that Burn does not have: they are compiled for some of
/// its backends, for each by a cargo feature.
///
/// ```
/// use burn::tensor::Device;
/// use burn_lean_graph::BackendKind;
///
/// assert_eq!(BackendKind::of(&Device::flex().autodiff()), BackendKind::Flex);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BackendKind {
    /// Flex.
    Flex,
    /// ndarray.
    NdArray,
    /// CubeCL with any of its runtimes: wgpu, Vulkan, Metal, CUDA, its own for CPUs.
    Cube,
    /// The one that only records, for which nothing has to be compiled.
    Capture,
    /// Any other, LibTorch and remote devices for example: there are no operations for it.
    Other,
}

impl BackendKind {
    /// That of a device.
    pub fn of(device: &Device) -> Self {
        Self::named(&Dispatch::name(device.as_dispatch()))
    }

    /// That which Burn gives this name, with or without the layers around it.
    pub fn named(name: &str) -> Self {
        match without_layers(name).as_str() {
            "flex" => Self::Flex,
            "ndarray" => Self::NdArray,
            "capture" => Self::Capture,
            name if name.starts_with("cubecl<") => Self::Cube,
            _ => Self::Other,
        }
    }
}

/// Burn's own name of the backend of a device, in lower case, without the layers around it: `flex`, `ndarray`,
/// `cubecl<wgpu<wgsl>>`…
pub fn backend_name(device: &Device) -> String {
    without_layers(&Dispatch::name(device.as_dispatch()))
}

fn without_layers(name: &str) -> String {
    let name = name.to_lowercase();
    let mut name = name.as_str();
    for layer in ["dispatch<", "autodiff<", "fusion<", "router<"] {
        let inner = name.strip_prefix(layer);
        name = inner
            .and_then(|inner| inner.strip_suffix('>'))
            .unwrap_or(name);
    }
    name.into()
}

/// Whether reading a tensor of this device is no more than a copy.
pub fn in_host_memory(device: &Device) -> bool {
    matches!(
        BackendKind::of(device),
        BackendKind::Flex | BackendKind::NdArray
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backends_are_known_by_their_whole_names() {
        for (name, expected) in [
            ("dispatch<autodiff<flex>>", BackendKind::Flex),
            ("dispatch<ndarray>", BackendKind::NdArray),
            ("dispatch<fusion<cubecl<wgpu<wgsl>>>>", BackendKind::Cube),
            ("cubecl<cpu>", BackendKind::Cube),
            ("dispatch<router<capture>>", BackendKind::Capture),
            ("dispatch<libtorch<cpu>>", BackendKind::Other),
            ("dispatch<autodiff<libtorch<cuda>>>", BackendKind::Other),
            (
                "dispatch<router<remote-RemoteDevice(flex)>>",
                BackendKind::Other,
            ),
        ] {
            assert_eq!(BackendKind::named(name), expected, "{name}");
        }
    }

    #[test]
    fn devices_are_of_their_backend() {
        assert_eq!(BackendKind::of(&Device::flex()), BackendKind::Flex);
        assert_eq!(backend_name(&Device::flex().autodiff()), "flex");
        assert_eq!(BackendKind::of(&Device::capture()), BackendKind::Capture);
        assert!(in_host_memory(&Device::flex().autodiff()));
        assert!(!in_host_memory(&Device::capture()));
    }
}
