//! Whether this crate was built for the backend of a device.
//!
//! Fake quantization is an operation of its own, compiled for the backends whose cargo feature this
//! crate has; Burn may have more.

use burn::backend::{Backend, Dispatch};
use burn::tensor::Device;

use crate::QuantError;

/// # Errors
///
/// [`QuantError::MissingFeature`]
pub(crate) fn check(device: &Device) -> Result<(), QuantError> {
    let name = Dispatch::name(device.as_dispatch()).to_lowercase();
    match feature(&name) {
        Some((feature, false)) => Err(QuantError::MissingFeature {
            backend: name,
            feature,
        }),
        _ => Ok(()),
    }
}

/// The cargo feature for the backend of this name, and whether this crate has it. None for the
/// backend that only records, which needs none.
fn feature(name: &str) -> Option<(&'static str, bool)> {
    // All others are the one CubeCL backend.
    let cube = cfg!(feature = "cube");
    let known = [
        ("ndarray", "ndarray", cfg!(feature = "ndarray")),
        ("flex", "flex", cfg!(feature = "flex")),
        ("cuda", "cuda", cube),
        ("spirv", "vulkan", cube),
        ("vulkan", "vulkan", cube),
        ("msl", "metal", cube),
        ("metal", "metal", cube),
        ("cpu", "cpu", cube),
    ];
    if name.contains("capture") {
        return None;
    }
    let found = known.iter().find(|(part, ..)| name.contains(part));
    Some(found.map_or(("wgpu", cube), |(_, feature, has)| (*feature, *has)))
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
            assert_eq!(feature(name).unwrap().0, expected, "{name}");
        }
        assert_eq!(feature("capture"), None);
    }

    #[cfg(not(feature = "cube"))]
    #[test]
    fn without_the_feature_it_is_an_error_that_names_it() {
        assert_eq!(feature("cubecl<wgpu<wgsl>>"), Some(("wgpu", false)));
    }
}
