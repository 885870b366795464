//! Energy, where the machine counts it.

mod nvml;
mod rapl;

use std::fmt;
use std::path::Path;

use burn::tensor::Device;
use serde::{Deserialize, Serialize};

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
    read: Box<dyn Fn() -> Result<u64, String>>,
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
    pub fn new(
        name: impl Into<String>,
        unit: f64,
        last: Option<u64>,
        read: impl Fn() -> Result<u64, String> + 'static,
    ) -> Self {
        Self {
            name: name.into(),
            unit,
            last,
            read: Box::new(read),
        }
    }

    /// Those of the packages of Intel's and AMD's CPUs (RAPL), as Linux shows them in
    /// `/sys/class/powercap`.
    ///
    /// # Errors
    ///
    /// Why there are none.
    pub fn rapl() -> Result<Vec<Self>, String> {
        Self::rapl_in(Path::new("/sys/class/powercap"))
    }

    /// Those of the packages in another folder.
    ///
    /// # Errors
    ///
    /// Why there are none.
    pub fn rapl_in(folder: &Path) -> Result<Vec<Self>, String> {
        rapl::packages(folder).map_err(|reason| format!("{}: {reason}", rapl::NAME))
    }

    /// That of NVIDIA's GPU (NVML) at this PCI address, such as `0000:07:00.0`; Volta and later have one.
    ///
    /// # Errors
    ///
    /// Why there is none: no library of NVIDIA's on this machine, no such GPU, no counter in it, a build
    /// without the feature `nvml`.
    pub fn nvml(address: &str) -> Result<Self, String> {
        nvml::gpu(address).map_err(|reason| format!("{}: {reason}", nvml::NAME))
    }

    fn value(&self) -> Result<u64, String> {
        (self.read)().map_err(|reason| format!("{}: {reason}", self.name))
    }

    fn joules(&self, before: u64, after: u64) -> Result<f64, String> {
        let units = match (after.checked_sub(before), self.last) {
            (Some(units), _) => units,
            // It has begun again.
            (None, Some(last)) => last.saturating_sub(before).saturating_add(after),
            (None, None) => {
                let name = &self.name;
                return Err(format!("{name}: it went back from {before} to {after}"));
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
    pub fn open(device: &Device) -> Result<Self, String> {
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
    /// Why it is not measurable: what is wrong with the packages.
    pub fn on_cpu(packages: Result<Vec<EnergyCounter>, String>) -> Result<Self, String> {
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
    /// Why it is not measurable: what is wrong with the GPU, and with the packages. Those alone would leave
    /// out most of a task.
    pub fn on_gpu(
        gpu: Result<EnergyCounter, String>,
        packages: Result<Vec<EnergyCounter>, String>,
    ) -> Result<Self, String> {
        match (gpu, packages) {
            (Ok(gpu), Ok(packages)) => Ok(Self {
                counters: [gpu].into_iter().chain(packages).collect(),
                uncounted: Vec::new(),
            }),
            (Ok(gpu), Err(reason)) => Ok(Self {
                counters: vec![gpu],
                uncounted: vec![reason],
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
            .unwrap_or_else(|reason| Energy::NotMeasurable {
                reason: not_measurable(reason),
            })
    }

    fn measure(&self, run: impl FnOnce() -> usize) -> Result<Energy, String> {
        let read = || -> Result<Vec<u64>, String> {
            self.counters.iter().map(EnergyCounter::value).collect()
        };
        let before = read()?;
        let tasks = run();
        let after = read()?;
        if tasks == 0 {
            return Err("no task was done in the time that was given".into());
        }
        let mut parts: Vec<EnergyPart> = Vec::new();
        for (counter, (before, after)) in self.counters.iter().zip(before.iter().zip(&after)) {
            let joules_per_task = counter.joules(*before, *after)? / tasks as f64;
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
            let counter = &still.counter;
            return Err(format!("{counter}: it did not move in so short a time"));
        }
        let joules_per_task: f64 = parts.iter().map(|part| part.joules_per_task).sum();
        if !(joules_per_task > 0.0) {
            return Err("there is no counter".into());
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

fn not_measurable(reason: String) -> String {
    format!("not measurable here: {reason}")
}

/// The PCI address of the card that a device is, or why NVML does not count it; `None` for a CPU.
#[cfg(any(
    feature = "cpu",
    feature = "cuda",
    feature = "metal",
    feature = "vulkan",
    feature = "wgpu"
))]
fn card(device: &Device) -> Option<Result<String, String>> {
    let card = device.identity()?.physical?;
    let reason = match (card.vendor, card.pci_address) {
        (Some(vendor), _) if vendor != burn::tensor::PciVendor::Nvidia => {
            format!("it counts GPUs of NVIDIA, and this one is of {vendor}")
        }
        (_, Some(address)) => return Some(Ok(address.to_string())),
        (_, None) => "the device does not say its PCI address".into(),
    };
    Some(Err(format!("{}: {reason}", nvml::NAME)))
}

/// There is no device but the CPU.
#[cfg(not(any(
    feature = "cpu",
    feature = "cuda",
    feature = "metal",
    feature = "vulkan",
    feature = "wgpu"
)))]
fn card(_: &Device) -> Option<Result<String, String>> {
    None
}
