//! Command-line options that every example has.

use std::error::Error;
use std::fmt;
use std::path::PathBuf;
#[cfg(feature = "wgpu")]
use std::sync::OnceLock;

use burn::tensor::{Device, FloatDType};
use burn_lean::amp::{AmpError, AutocastConfig, Fallback};
use clap::{Args, ValueEnum};

#[derive(Debug, Clone, Args)]
pub(crate) struct Options {
    /// Where to compute.
    #[arg(long, value_enum, default_value_t = DeviceName::Flex)]
    pub(crate) device: DeviceName,
    /// Compute dtype of the mixed-precision run; F32 computes without any cast [default: BF16
    /// where the device computes in it, else F16, else F32; always F16 where loss scaling is the subject].
    #[arg(long, value_enum)]
    pub(crate) dtype: Option<Dtype>,
    /// What to do where the device cannot compute in the dtype.
    #[arg(long, value_enum, default_value_t = FallbackName::Error)]
    pub(crate) fallback: FallbackName,
    /// Seed of the initial weights and of the order of the data.
    #[arg(long, default_value_t = 42)]
    pub(crate) seed: u64,
    /// Also write the printed table to this file, as JSON.
    #[arg(long, value_name = "FILE", value_parser = super::output_file)]
    pub(crate) json: Option<PathBuf>,
}

impl Options {
    /// The device, for training: with autodiff, and known to compute in the dtype or to have the
    /// fallback. Checked before anything is trained.
    pub(crate) fn device(&self) -> Result<Device, Box<dyn Error>> {
        let device = self.device.open()?;
        if self.dtype.is_none() && self.dtype(&device) == FloatDType::F32 {
            let name = format!("{:?}", self.device).to_lowercase();
            eprintln!(
                "{name} computes in F32 only, so mixed precision is F32 here too; `--fallback emulate` \
                 rounds to F16"
            );
        }
        let supported = self.autocast(self.dtype(&device)).check(&device);
        supported.map_err(|error| match error {
            AmpError::UnsupportedDtype {
                emulation: true, ..
            } => format!("{error}. Here: `--fallback emulate`, `--fallback f32` or `--dtype f32`"),
            AmpError::UnsupportedDtype { .. } => {
                format!("{error}. Here: `--fallback f32` or `--dtype f32`")
            }
            error => error.to_string(),
        })?;
        Ok(device.autodiff())
    }

    /// The compute dtype that was asked for, or else the one that suits the device.
    ///
    /// BF16 has the exponents of F32, so it needs no loss scale, and where a device has it, it is no
    /// slower than F16. On flex it is several times faster: F16 is computed element by element in
    /// software there, BF16 by widening to F32. Vulkan and WebGPU have F16 only, ndarray F32 only: there
    /// a fallback that was asked for has F16 to stand for.
    pub(crate) fn dtype(&self, device: &Device) -> FloatDType {
        match self.dtype {
            Some(dtype) => dtype.into(),
            None if device.supports_dtype(FloatDType::BF16) => FloatDType::BF16,
            None if device.supports_dtype(FloatDType::F16) => FloatDType::F16,
            None if self.fallback == FallbackName::Error => FloatDType::F32,
            None => FloatDType::F16,
        }
    }

    /// Autocast in `dtype`, with the fallback that was asked for.
    pub(crate) fn autocast(&self, dtype: FloatDType) -> AutocastConfig {
        AutocastConfig::new(dtype).with_fallback(self.fallback())
    }

    /// The fallback that was asked for.
    pub(crate) fn fallback(&self) -> Fallback {
        match self.fallback {
            FallbackName::Error => Fallback::Error,
            FallbackName::F32 => Fallback::F32,
            FallbackName::Emulate => Fallback::Emulate,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Dtype {
    F32,
    F16,
    Bf16,
}

impl From<Dtype> for FloatDType {
    fn from(dtype: Dtype) -> Self {
        match dtype {
            Dtype::F32 => Self::F32,
            Dtype::F16 => Self::F16,
            Dtype::Bf16 => Self::BF16,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum FallbackName {
    /// End with an error.
    Error,
    /// Compute in F32 after all.
    F32,
    /// Round F32 numbers to the dtype.
    Emulate,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum DeviceName {
    /// Burn's CPU backend ndarray, F32 only (cargo feature `ndarray`).
    Ndarray,
    /// Burn's CPU backend flex.
    Flex,
    /// The default GPU through WebGPU (cargo feature `wgpu`).
    Wgpu,
    /// The default GPU through Vulkan (cargo feature `vulkan`).
    Vulkan,
    /// The first NVIDIA GPU (cargo feature `cuda`).
    Cuda,
}

impl DeviceName {
    /// The device, without autodiff.
    pub(crate) fn open(self) -> Result<Device, DeviceError> {
        match self {
            // Burn 0.22 deprecates ndarray, and is the last to ship it.
            #[cfg(feature = "ndarray")]
            #[allow(deprecated)]
            Self::Ndarray => Ok(Device::ndarray()),
            #[cfg(not(feature = "ndarray"))]
            Self::Ndarray => Err(DeviceError::NotCompiled("ndarray")),
            Self::Flex => Ok(Device::flex()),
            #[cfg(feature = "wgpu")]
            Self::Wgpu => {
                // Burn sets it up once in a process.
                static OPENED: OnceLock<Result<Device, DeviceError>> = OnceLock::new();
                let open = || {
                    let device = Device::wgpu_options().init();
                    device.map_err(|error| error.to_string())
                };
                OPENED.get_or_init(|| probe(self, open)).clone()
            }
            #[cfg(not(feature = "wgpu"))]
            Self::Wgpu => Err(DeviceError::NotCompiled("wgpu")),
            #[cfg(feature = "vulkan")]
            Self::Vulkan => probe(self, || Ok(Device::vulkan(Default::default()))),
            #[cfg(not(feature = "vulkan"))]
            Self::Vulkan => Err(DeviceError::NotCompiled("vulkan")),
            #[cfg(feature = "cuda")]
            Self::Cuda => probe(self, || Ok(Device::cuda(0))),
            #[cfg(not(feature = "cuda"))]
            Self::Cuda => Err(DeviceError::NotCompiled("cuda")),
        }
    }
}

/// Why there is no device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum DeviceError {
    /// The cargo feature that is missing.
    NotCompiled(&'static str),
    /// It is compiled in, but does not come up on this machine.
    NotFound { device: DeviceName, reason: String },
}

impl fmt::Display for DeviceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotCompiled(feature) => write!(
                f,
                "the device `{feature}` is not in this binary: run cargo with `--features {feature}`"
            ),
            Self::NotFound { device, reason } => {
                let device = format!("{device:?}").to_lowercase();
                write!(f, "no device for `{device}`: {reason}; try `--device flex`")
            }
        }
    }
}

impl Error for DeviceError {}

/// Opens a GPU and asks it a first question: without a driver some of Burn's runtimes panic here.
fn probe(
    name: DeviceName,
    open: impl FnOnce() -> Result<Device, String>,
) -> Result<Device, DeviceError> {
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let opened = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let device = open()?;
        let _ = device.supports_dtype(FloatDType::F32);
        Ok(device)
    }));
    std::panic::set_hook(hook);
    let reason = match opened {
        Ok(Ok(device)) => return Ok(device),
        Ok(Err(reason)) => reason,
        Err(panic) => match (panic.downcast_ref::<String>(), panic.downcast_ref::<&str>()) {
            (Some(reason), _) => reason.clone(),
            (_, Some(reason)) => reason.to_string(),
            _ => "its driver did not start".into(),
        },
    };
    Err(DeviceError::NotFound {
        device: name,
        reason,
    })
}
