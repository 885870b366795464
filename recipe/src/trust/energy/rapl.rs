//! The packages of CPUs (RAPL).

use std::fs;
use std::path::Path;

use super::EnergyCounter;

pub(super) const NAME: &str = "RAPL (CPU)";

pub(super) fn packages(folder: &Path) -> Result<Vec<EnergyCounter>, String> {
    let entries = fs::read_dir(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let mut counters = Vec::new();
    for entry in entries.flatten() {
        // A package is `intel-rapl:0`; `intel-rapl:0:0` is a part of it.
        let name = entry.file_name();
        let name = name.to_str().unwrap_or_default();
        let package = name.strip_prefix("intel-rapl:");
        if package.is_none_or(|package| package.contains(':')) {
            continue;
        }
        // The whole platform, the packages in it.
        let said = fs::read_to_string(entry.path().join("name"));
        if said.is_ok_and(|name| name.trim() == "psys") {
            continue;
        }
        let counter = entry.path().join("energy_uj");
        number(&counter)?;
        let last = number(&entry.path().join("max_energy_range_uj"))?;
        let read = move || number(&counter);
        counters.push(EnergyCounter::new(NAME, 1e-6, Some(last), read));
    }
    match counters.is_empty() {
        true => Err(format!("{} has no package", folder.display())),
        false => Ok(counters),
    }
}

fn number(path: &Path) -> Result<u64, String> {
    let text = fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
    let number = text.trim().parse();
    number.map_err(|error| format!("{}: {error}", path.display()))
}
