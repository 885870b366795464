//! NVIDIA's GPUs (NVML).

use super::EnergyCounter;

pub(super) const NAME: &str = "NVML (GPU)";

#[cfg(all(feature = "nvml", any(target_os = "linux", target_os = "windows")))]
pub(super) fn gpu(address: &str) -> Result<EnergyCounter, String> {
    use nvml_wrapper::Nvml;
    use nvml_wrapper::error::NvmlError;

    let said = |error: NvmlError| match error {
        NvmlError::NotSupported => {
            "this GPU counts no energy (Volta and later do), and power times time is no measurement"
                .to_string()
        }
        error => error.to_string(),
    };
    let nvml = Nvml::init().map_err(said)?;
    let address = address.to_string();
    // A device borrows the library, so it is looked up each time.
    let read = move || -> Result<u64, String> {
        let device = nvml.device_by_pci_bus_id(address.as_str()).map_err(said)?;
        device.total_energy_consumption().map_err(said)
    };
    read()?;
    Ok(EnergyCounter::new(NAME, 1e-3, None, read))
}

#[cfg(not(all(feature = "nvml", any(target_os = "linux", target_os = "windows"))))]
pub(super) fn gpu(_: &str) -> Result<EnergyCounter, String> {
    Err("this build goes without it: it is in the feature `nvml`, on Linux and Windows".into())
}
