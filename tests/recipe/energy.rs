//! Energy from counters that say known numbers.

use std::cell::RefCell;

use burn::tensor::Device;
use burn_lean::recipe::{Energy, EnergyCounter, EnergyMeter, RecipeError};

/// A counter in units of so many joules that says one number after the other.
fn counter(name: &str, unit: f64, values: &[u64]) -> EnergyCounter {
    let values: Vec<u64> = values.into();
    let values = RefCell::new(values.into_iter());
    let read = move || values.borrow_mut().next().ok_or("it is gone".to_string());
    EnergyCounter::new(name, unit, None, read)
}

fn missing_counter(counter: &str, reason: &str) -> RecipeError {
    RecipeError::EnergyCounter {
        counter: counter.into(),
        reason: reason.into(),
    }
}

fn parts(energy: &Energy) -> Vec<(&str, f64)> {
    let Energy::Measured { parts, .. } = energy else {
        panic!("{energy:?}");
    };
    let parts = parts.iter();
    parts
        .map(|part| (part.counter.as_str(), part.joules_per_task))
        .collect()
}

fn reason(energy: &Energy) -> &str {
    match energy {
        Energy::NotMeasurable { reason } => reason,
        measured => panic!("{measured:?}"),
    }
}

#[test]
fn energy_of_a_cpu_is_what_the_counters_of_all_packages_say() {
    let folder = tempfile::tempdir().unwrap();
    let meter = || EnergyMeter::on_cpu(EnergyCounter::rapl_in(folder.path()));
    let error = meter().unwrap_err();
    let RecipeError::Energy { reason } = &error else {
        panic!("{error}");
    };
    assert!(reason.starts_with("RAPL (CPU): "), "{reason}");
    let write = |package: &str, file: &str, text: &str| {
        let package = folder.path().join(package);
        std::fs::create_dir_all(&package).unwrap();
        std::fs::write(package.join(file), format!("{text}\n")).unwrap();
    };
    let domains = [
        ("intel-rapl:0", "package-0"),
        ("intel-rapl:1", "package-1"),
        ("intel-rapl:0:0", "core"),
        ("intel-rapl:2", "psys"),
    ];
    for (domain, name) in domains {
        write(domain, "name", name);
        write(domain, "energy_uj", "900");
        write(domain, "max_energy_range_uj", "1000");
    }
    let energy = meter().unwrap().energy(|| {
        write("intel-rapl:0", "energy_uj", "950");
        // It has begun again after 1000.
        write("intel-rapl:1", "energy_uj", "50");
        // Neither a part of a package nor the platform around it counts twice.
        write("intel-rapl:0:0", "energy_uj", "999");
        write("intel-rapl:2", "energy_uj", "999");
        2
    });
    let [("RAPL (CPU)", joules)] = parts(&energy)[..] else {
        panic!("{energy:?}");
    };
    // (50 + 150) µJ of two tasks.
    assert!((joules - 100e-6).abs() < 1e-15, "{joules}");
    // A number that cannot be read is none.
    write("intel-rapl:1", "energy_uj", "secret");
    assert!(meter().unwrap_err().to_string().contains("energy_uj"));
}

/// 30 J of the GPU, 6 J of the CPU.
#[test]
fn energy_of_a_gpu_is_its_own_and_that_of_the_packages() {
    let gpu = || counter("NVML (GPU)", 1e-3, &[5_000, 35_000]);
    let cpu = || counter("RAPL (CPU)", 1e-6, &[1, 6_000_001]);
    let meter = EnergyMeter::on_gpu(Ok(gpu()), Ok(vec![cpu()])).unwrap();
    let energy = meter.energy(|| 12);
    assert_eq!(parts(&energy), [("NVML (GPU)", 2.5), ("RAPL (CPU)", 0.5)]);
    let Energy::Measured {
        joules_per_task,
        tasks_per_kwh,
        tasks_per_second_per_watt,
        uncounted,
        ..
    } = energy
    else {
        panic!("there are joules");
    };
    assert_eq!((joules_per_task, tasks_per_kwh), (3.0, 1.2e6));
    // 12 tasks in a second are 36 W.
    assert!((tasks_per_second_per_watt - 12.0 / 36.0).abs() < 1e-15);
    assert!(uncounted.is_empty());

    // Without the packages it is that of the GPU alone, and says so.
    let locked = || Err(missing_counter("RAPL (CPU)", "permission denied"));
    let energy = EnergyMeter::on_gpu(Ok(gpu()), locked()).unwrap();
    let energy = energy.energy(|| 12);
    assert_eq!(parts(&energy), [("NVML (GPU)", 2.5)]);
    let Energy::Measured { uncounted, .. } = energy else {
        panic!("there are joules");
    };
    assert_eq!(uncounted, ["RAPL (CPU): permission denied"]);

    // Without the GPU it is not known, whatever the packages say.
    let missing = || Err(missing_counter("NVML (GPU)", "no driver"));
    let error = EnergyMeter::on_gpu(missing(), Ok(vec![cpu()])).unwrap_err();
    let expected = "not measurable here: NVML (GPU): no driver; RAPL";
    assert!(error.to_string().starts_with(expected), "{error}");
    let error = EnergyMeter::on_gpu(missing(), locked()).unwrap_err();
    let both = "NVML (GPU): no driver; RAPL (CPU): permission denied";
    assert_eq!(error.to_string(), format!("not measurable here: {both}"));
}

#[test]
fn energy_of_no_task_and_of_counters_that_fail_is_not_measurable() {
    let meter = |values: &[u64]| {
        let gpu = counter("NVML (GPU)", 1e-3, values);
        EnergyMeter::on_gpu(Ok(gpu), Err(missing_counter("RAPL (CPU)", "none"))).unwrap()
    };
    let said = |values: &[u64], tasks| reason(&meter(values).energy(|| tasks)).to_string();
    let no_task = "not measurable here: no task was done in the time that was given";
    assert_eq!(said(&[1, 9], 0), no_task);
    assert!(said(&[7, 7], 5).contains("NVML (GPU): it did not move"));
    // The driver was loaded anew.
    assert!(said(&[9, 2], 5).contains("NVML (GPU): it went back from 9 to 2"));
    assert!(said(&[9], 5).contains("NVML (GPU): it is gone"));
    let nothing = EnergyMeter::on_cpu(Ok(Vec::new())).unwrap();
    assert!(reason(&nothing.energy(|| 5)).contains("there is no counter"));
}

/// With NVIDIA's library or without it, in a build with the feature `nvml` or without it.
#[test]
fn a_gpu_that_is_not_there_has_no_counter() {
    let error = EnergyCounter::nvml("ffff:ff:1f.7").unwrap_err();
    let RecipeError::EnergyCounter { counter, .. } = &error else {
        panic!("{error}");
    };
    assert_eq!(counter, "NVML (GPU)");
    // A CPU has nothing to do with it.
    if let Err(error) = EnergyMeter::open(&Device::flex()) {
        let reason = error.to_string();
        assert!(
            reason.contains("RAPL") && !reason.contains("NVML"),
            "{reason}"
        );
    }
}
