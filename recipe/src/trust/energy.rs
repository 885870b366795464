//! Energy, where the machine counts it.

use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// Energy of an inference, or why it is not known.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Energy {
    /// Measured over all packages of the machine, whatever else ran on it.
    Measured {
        /// One task is one example in a batch of its own.
        joules_per_task: f64,
        /// 3.6 million joules over that.
        tasks_per_kwh: f64,
        /// Tasks in a second for each watt: the inverse of the joules of a task.
        tasks_per_second_per_watt: f64,
    },
    /// There is no counter that can be read.
    NotMeasurable {
        /// Why.
        reason: String,
    },
}

impl Energy {
    /// Of so many joules for so many tasks.
    pub fn of(joules: f64, tasks: usize) -> Self {
        let joules_per_task = joules / tasks.max(1) as f64;
        if !(joules_per_task > 0.0) {
            return Self::NotMeasurable {
                reason: "not measurable here: the counters did not move".into(),
            };
        }
        Self::Measured {
            joules_per_task,
            tasks_per_kwh: 3.6e6 / joules_per_task,
            tasks_per_second_per_watt: 1.0 / joules_per_task,
        }
    }
}

/// Intel's and AMD's energy counters (RAPL) as Linux shows them.
#[derive(Debug, Clone)]
pub struct Rapl {
    /// Counter [µJ], and the value after which it begins again.
    packages: Vec<(PathBuf, u64)>,
}

impl Rapl {
    /// The counters of the packages in `/sys/class/powercap`.
    ///
    /// # Errors
    ///
    /// Why there are none.
    pub fn open() -> Result<Self, String> {
        Self::open_in(Path::new("/sys/class/powercap"))
    }

    /// The counters of the packages in another folder.
    ///
    /// # Errors
    ///
    /// Why there are none.
    pub fn open_in(folder: &Path) -> Result<Self, String> {
        let refused = |reason: String| format!("not measurable here: {reason}");
        let entries = fs::read_dir(folder)
            .map_err(|error| refused(format!("{}: {error}", folder.display())))?;
        let mut packages = Vec::new();
        for entry in entries.flatten() {
            // A package is `intel-rapl:0`; `intel-rapl:0:0` is a part of it.
            let name = entry.file_name();
            let name = name.to_str().unwrap_or_default();
            let package = name.strip_prefix("intel-rapl:");
            if package.is_none_or(|package| package.contains(':')) {
                continue;
            }
            let counter = entry.path().join("energy_uj");
            number(&counter).map_err(refused)?;
            let range = number(&entry.path().join("max_energy_range_uj")).map_err(refused)?;
            packages.push((counter, range));
        }
        packages.sort();
        match packages.is_empty() {
            true => Err(refused(format!("{} has no package", folder.display()))),
            false => Ok(Self { packages }),
        }
    }

    /// Runs something; gives the joules that all packages took meanwhile.
    ///
    /// # Errors
    ///
    /// A counter that can no longer be read.
    pub fn joules(&self, run: impl FnOnce()) -> Result<f64, String> {
        let read = || -> Result<Vec<u64>, String> {
            self.packages.iter().map(|(path, _)| number(path)).collect()
        };
        let before = read()?;
        run();
        let after = read()?;
        let packages = self.packages.iter().zip(before.iter().zip(&after));
        let micro = packages.map(|((_, range), (before, after))| match after >= before {
            true => after - before,
            // It has begun again.
            false => after + range.saturating_sub(*before),
        });
        Ok(1e-6 * micro.sum::<u64>() as f64)
    }
}

fn number(path: &Path) -> Result<u64, String> {
    let text = fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
    let number = text.trim().parse();
    number.map_err(|error| format!("{}: {error}", path.display()))
}
