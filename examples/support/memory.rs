//! How much memory a part of a program needs, as Linux counts it.

use std::fs;

/// Resident memory beyond what there was at the start.
///
/// Counts what was touched: an allocator's count would have memory in it that a library reserves,
/// for the packing of matrices for one, and hardly uses.
#[derive(Debug)]
pub(crate) struct PeakMemory {
    before: Option<u64>,
}

impl PeakMemory {
    /// From now on.
    pub(crate) fn start() -> Self {
        let memory = Self {
            before: status("VmRSS:"),
        };
        memory.forget_peak();
        memory
    }

    /// Looks for the peak from now on, still compared with the start.
    pub(crate) fn forget_peak(&self) {
        // Where this is refused, the peak is that of the whole process: too large, not too small.
        let _ = fs::write("/proc/self/clear_refs", "5");
    }

    /// The largest amount since, in bytes; `None` on other systems than Linux.
    pub(crate) fn bytes(&self) -> Option<u64> {
        Some(status("VmHWM:")?.saturating_sub(self.before?))
    }
}

/// A line of the process's status, in bytes.
fn status(name: &str) -> Option<u64> {
    let text = fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kilobytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(1024 * kilobytes)
}
