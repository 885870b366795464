//! The audit as a table.

use std::collections::BTreeMap;
use std::fmt;

use super::{Audit, AuditedOperation, CallSite, Finding};

impl fmt::Display for AuditedOperation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} of {:?} to {:?}",
            self.name, self.inputs, self.outputs
        )?;
        if !self.parameters.is_empty() {
            write!(f, " with {}", self.parameters.join(", "))?;
        }
        Ok(())
    }
}

impl fmt::Display for Audit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "Forward pass in {:?} on {}", self.dtype, self.device)?;
        writeln!(
            f,
            "{:<24} {:<14} {:>6}  findings",
            "operation", "dtype", "count"
        )?;
        let mut rows: BTreeMap<(String, String), (usize, Vec<Finding>)> = BTreeMap::new();
        for operation in &self.operations {
            let dtypes = match operation.inputs.is_empty() {
                true => &operation.outputs,
                false => &operation.inputs,
            };
            let dtypes: Vec<String> = dtypes.iter().map(|dtype| format!("{dtype:?}")).collect();
            let row = rows
                .entry((operation.name.clone(), dtypes.join("+")))
                .or_default();
            row.0 += 1;
            row.1.extend(&operation.findings);
            row.1.sort_unstable();
            row.1.dedup();
        }
        for ((name, dtype), (count, findings)) in &rows {
            let findings: Vec<String> = findings.iter().map(|found| format!("{found:?}")).collect();
            writeln!(
                f,
                "{name:<24} {dtype:<14} {count:>6}  {}",
                findings.join(", ")
            )?;
        }
        let sites = self.call_sites();
        let errors: Vec<String> = sites
            .iter()
            .filter(|site| site.finding.is_error())
            .map(CallSite::to_string)
            .collect();
        if !errors.is_empty() {
            writeln!(
                f,
                "to be called in `full_precision`:\n  {}",
                errors.join("\n  ")
            )?;
        }
        let is_told =
            |site: &&CallSite| site.overflows_from.is_some() || !site.summed_in_half.is_empty();
        for site in sites.iter().filter(is_told) {
            writeln!(f, "{site}")?;
        }
        let kept: Vec<String> = self
            .parameters
            .iter()
            .filter_map(|parameter| {
                let kept = parameter.kept?;
                Some(format!("{} ({kept:?})", parameter.path))
            })
            .collect();
        writeln!(
            f,
            "parameters: {} cast, {} kept in F32{}{}",
            self.parameters.len() - kept.len(),
            kept.len(),
            if kept.is_empty() { "" } else { ": " },
            kept.join(", ")
        )?;
        let memory = &self.memory;
        write!(
            f,
            "bytes: {} master weights + {} cast weights + {} activations = {} ({:.2} of {} in F32)",
            memory.master_weights,
            memory.cast_weights,
            memory.activations,
            memory.total(),
            memory.ratio(),
            memory.total_f32()
        )
    }
}
