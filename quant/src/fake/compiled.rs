//! Whether this crate was built for the backend of a device.
//!
//! Fake quantization is an operation of its own, compiled for the backends whose cargo feature this
//! crate has; Burn may have more.

use burn::backend::{Backend, Dispatch};
use burn::tensor::Device;
use burn_lean_graph::{BackendKind, GraphError};

use crate::QuantError;

/// # Errors
///
/// [`QuantError::MissingFeature`], [`GraphError::UnsupportedBackend`].
pub(crate) fn check(device: &Device) -> Result<(), QuantError> {
    let name = Dispatch::name(device.as_dispatch()).to_lowercase();
    match feature(&name)? {
        Some((feature, false)) => Err(QuantError::MissingFeature {
            backend: name,
            feature,
        }),
        _ => Ok(()),
    }
}

/// The cargo feature for the backend of this name, and whether this crate has it. None for the
/// backend that only records, which needs none.
fn feature(name: &str) -> Result<Option<(&'static str, bool)>, GraphError> {
    match BackendKind::named(name) {
        BackendKind::Flex => Ok(Some(("flex", cfg!(feature = "flex")))),
        BackendKind::NdArray => Ok(Some(("ndarray", cfg!(feature = "ndarray")))),
        BackendKind::Cube => Ok(Some((runtime(name), cfg!(feature = "cube")))),
        BackendKind::Capture => Ok(None),
        BackendKind::Other => Err(GraphError::UnsupportedBackend {
            backend: name.into(),
        }),
    }
}

/// The cargo feature for a runtime of CubeCL.
fn runtime(name: &str) -> &'static str {
    let known = [
        ("cuda", "cuda"),
        ("spirv", "vulkan"),
        ("vulkan", "vulkan"),
        ("msl", "metal"),
        ("metal", "metal"),
        ("cpu", "cpu"),
    ];
    let found = known.iter().find(|(part, _)| name.contains(part));
    found.map_or("wgpu", |(_, feature)| *feature)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_backend_needs_its_feature() {
        for (name, expected) in [
            ("dispatch<autodiff<flex>>", "flex"),
            ("dispatch<ndarray>", "ndarray"),
            ("fusion<cubecl<wgpu<wgsl>>>", "wgpu"),
            ("fusion<cubecl<wgpu<spirv>>>", "vulkan"),
            ("cubecl<wgpu<msl>>", "metal"),
            ("fusion<cubecl<cuda>>", "cuda"),
            ("cubecl<cpu>", "cpu"),
        ] {
            let found = feature(name).unwrap().unwrap();
            assert_eq!(found.0, expected, "{name}");
        }
        assert_eq!(feature("capture"), Ok(None));
    }

    #[test]
    fn no_feature_is_named_for_a_backend_that_has_none() {
        for name in ["libtorch<cpu>", "libtorch<cuda>", "router<remote-0>"] {
            let error = feature(name).unwrap_err();
            assert!(error.to_string().contains(name), "{error}");
        }
    }

    #[cfg(not(feature = "cube"))]
    #[test]
    fn without_the_feature_it_is_an_error_that_names_it() {
        assert_eq!(feature("cubecl<wgpu<wgsl>>"), Ok(Some(("wgpu", false))));
    }
}
