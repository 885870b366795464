//! Energy, where the machine counts it.

mod nvml;
mod rapl;

use std::fmt::{self, Display};
use std::path::Path;

use burn::tensor::Device;
use serde::{Deserialize, Serialize};

use crate::RecipeError;

/// Energy of an inference in Burn, on the device of the model, or why it is not known.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Energy {
    /// What counters say, whatever else ran on the machine: of a model on a CPU those of its packages, of
    /// a model on a GPU that of the GPU and, where they can be read, those of the packages that feed it.
    Measured {
        /// The sum of the parts. One task is one example in a batch of its own.
        joules_per_task: f64,
        /// 3.6 million joules over that.
        tasks_per_kwh: f64,
        /// Tasks in a second for each watt: the inverse of the joules of a task.
        tasks_per_second_per_watt: f64,
        /// What each kind of counter says.
        #[serde(default)]
        parts: Vec<EnergyPart>,
        /// What is not in the sum, and why.
        #[serde(default)]
        uncounted: Vec<String>,
    },
    /// There is no counter that can be read, or that of the device is not among them.
    NotMeasurable {
        /// Why, for each kind of counter.
        reason: String,
    },
}

/// The joules of a task by one kind of counter.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EnergyPart {
    /// `RAPL (CPU)` or `NVML (GPU)`.
    pub counter: String,
    /// What it says.
    pub joules_per_task: f64,
}

/// A counter of energy.
pub struct EnergyCounter {
    name: String,
    unit: f64,
    last: Option<u64>,
    read: Box<dyn Fn() -> Result<u64, RecipeError>>,
}

impl fmt::Debug for EnergyCounter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("EnergyCounter");
        shown.field("name", &self.name).finish_non_exhaustive()
    }
}

impl EnergyCounter {
    /// A counter whose number is in units of so many joules and only grows; after `last` it begins again
    /// at 0. Those of one name are one part of a sum.
    ///
    /// What `read` fails with is [`RecipeError::EnergyCounter`] with this name.
    pub fn new<E: Display>(
        name: impl Into<String>,
        unit: f64,
        last: Option<u64>,
        read: impl Fn() -> Result<u64, E> + 'static,
    ) -> Self {
        let name = name.into();
        let counter = name.clone();
        Self {
            name,
            unit,
            last,
            read: Box::new(move || read().map_err(|reason| RecipeError::counter(&counter, reason))),
        }
    }

    /// Those of the packages of Intel's and AMD's CPUs (RAPL), as Linux shows them in
    /// `/sys/class/powercap`.
    ///
    /// # Errors
    ///
    /// [`RecipeError::EnergyCounter`]: why there are none.
    pub fn rapl() -> Result<Vec<Self>, RecipeError> {
        Self::rapl_in(Path::new("/sys/class/powercap"))
    }

    /// Those of the packages in another folder.
    ///
    /// # Errors
    ///
    /// [`RecipeError::EnergyCounter`]: why there are none.
    pub fn rapl_in(folder: &Path) -> Result<Vec<Self>, RecipeError> {
        rapl::packages(folder).map_err(|reason| RecipeError::counter(rapl::NAME, reason))
    }

    /// That of NVIDIA's GPU (NVML) at this PCI address, such as `0000:07:00.0`; Volta and later have one.
    ///
    /// # Errors
    ///
    /// [`RecipeError::EnergyCounter`]: why there is none. No library of NVIDIA's on this machine, no such
    /// GPU, no counter in it, a build without the feature `nvml`.
    pub fn nvml(address: &str) -> Result<Self, RecipeError> {
        nvml::gpu(address).map_err(|reason| RecipeError::counter(nvml::NAME, reason))
    }

    fn joules(&self, before: u64, after: u64) -> Result<f64, RecipeError> {
        let units = match (after.checked_sub(before), self.last) {
            (Some(units), _) => units,
            // It has begun again.
            (None, Some(last)) => last.saturating_sub(before).saturating_add(after),
            (None, None) => {
                let reason = format!("it went back from {before} to {after}");
                return Err(RecipeError::counter(&self.name, reason));
            }
        };
        Ok(self.unit * units as f64)
    }
}

/// The counters that say what tasks on one device take.
#[derive(Debug)]
pub struct EnergyMeter {
    counters: Vec<EnergyCounter>,
    uncounted: Vec<String>,
}

impl EnergyMeter {
    /// For tasks on this device.
    ///
    /// # Errors
    ///
    /// As [`on_cpu`](Self::on_cpu) and [`on_gpu`](Self::on_gpu).
    pub fn open(device: &Device) -> Result<Self, RecipeError> {
        match card(device) {
            None => Self::on_cpu(EnergyCounter::rapl()),
            Some(address) => {
                let gpu = address.and_then(|address| EnergyCounter::nvml(&address));
                Self::on_gpu(gpu, EnergyCounter::rapl())
            }
        }
    }

    /// For tasks on the CPU: what a GPU takes meanwhile is none of theirs.
    ///
    /// # Errors
    ///
    /// [`RecipeError::Energy`]: what is wrong with the packages.
    pub fn on_cpu(packages: Result<Vec<EnergyCounter>, RecipeError>) -> Result<Self, RecipeError> {
        let counters = packages.map_err(not_measurable)?;
        Ok(Self {
            counters,
            uncounted: Vec::new(),
        })
    }

    /// For tasks on a GPU. Packages that cannot be read are not in the sum, and the report says so.
    ///
    /// # Errors
    ///
    /// [`RecipeError::Energy`]: what is wrong with the GPU, and with the packages. Those alone would leave
    /// out most of a task.
    pub fn on_gpu(
        gpu: Result<EnergyCounter, RecipeError>,
        packages: Result<Vec<EnergyCounter>, RecipeError>,
    ) -> Result<Self, RecipeError> {
        match (gpu, packages) {
            (Ok(gpu), Ok(packages)) => Ok(Self {
                counters: [gpu].into_iter().chain(packages).collect(),
                uncounted: Vec::new(),
            }),
            (Ok(gpu), Err(error)) => Ok(Self {
                counters: vec![gpu],
                uncounted: vec![error.to_string()],
            }),
            (Err(gpu), Ok(_)) => Err(not_measurable(format!(
                "{gpu}; {} alone is no measure of it",
                rapl::NAME
            ))),
            (Err(gpu), Err(packages)) => Err(not_measurable(format!("{gpu}; {packages}"))),
        }
    }

    /// Runs tasks and says what they took; `run` gives their number.
    pub fn energy(&self, run: impl FnOnce() -> usize) -> Energy {
        self.measure(run)
            .unwrap_or_else(|error| Energy::NotMeasurable {
                reason: error.to_string(),
            })
    }

    fn measure(&self, run: impl FnOnce() -> usize) -> Result<Energy, RecipeError> {
        let read = || -> Result<Vec<u64>, RecipeError> {
            let read = self.counters.iter().map(|counter| (counter.read)());
            read.collect::<Result<Vec<u64>, RecipeError>>()
                .map_err(not_measurable)
        };
        let before = read()?;
        let tasks = run();
        let after = read()?;
        if tasks == 0 {
            return Err(not_measurable(
                "no task was done in the time that was given",
            ));
        }
        let mut parts: Vec<EnergyPart> = Vec::new();
        for (counter, (before, after)) in self.counters.iter().zip(before.iter().zip(&after)) {
            let joules = counter.joules(*before, *after).map_err(not_measurable)?;
            let joules_per_task = joules / tasks as f64;
            match parts.iter_mut().find(|part| part.counter == counter.name) {
                Some(part) => part.joules_per_task += joules_per_task,
                None => parts.push(EnergyPart {
                    counter: counter.name.clone(),
                    joules_per_task,
                }),
            }
        }
        let is_still = |part: &&EnergyPart| !(part.joules_per_task > 0.0);
        if let Some(still) = parts.iter().find(is_still) {
            let reason = "it did not move in so short a time";
            return Err(not_measurable(RecipeError::counter(&still.counter, reason)));
        }
        let joules_per_task: f64 = parts.iter().map(|part| part.joules_per_task).sum();
        if !(joules_per_task > 0.0) {
            return Err(not_measurable("there is no counter"));
        }
        Ok(Energy::Measured {
            joules_per_task,
            tasks_per_kwh: 3.6e6 / joules_per_task,
            tasks_per_second_per_watt: 1.0 / joules_per_task,
            parts,
            uncounted: self.uncounted.clone(),
        })
    }
}

fn not_measurable(reason: impl Display) -> RecipeError {
    RecipeError::Energy {
        reason: reason.to_string(),
    }
}

/// The PCI address of the card that a device is, or why NVML does not count it; `None` for a CPU.
#[cfg(any(
    feature = "cpu",
    feature = "cuda",
    feature = "metal",
    feature = "vulkan",
    feature = "wgpu"
))]
fn card(device: &Device) -> Option<Result<String, RecipeError>> {
    let card = device.identity()?.physical?;
    let reason = match (card.vendor, card.pci_address) {
        (Some(vendor), _) if vendor != burn::tensor::PciVendor::Nvidia => {
            format!("it counts GPUs of NVIDIA, and this one is of {vendor}")
        }
        (_, Some(address)) => return Some(Ok(address.to_string())),
        (_, None) => "the device does not say its PCI address".into(),
    };
    Some(Err(RecipeError::counter(nvml::NAME, reason)))
}

/// There is no device but the CPU.
#[cfg(not(any(
    feature = "cpu",
    feature = "cuda",
    feature = "metal",
    feature = "vulkan",
    feature = "wgpu"
)))]
fn card(_: &Device) -> Option<Result<String, RecipeError>> {
    None
}
