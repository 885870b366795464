//! The audit as tables.

use std::fmt;

use burn_lean_graph::Site;

use crate::table::table;

use super::{Audit, AuditedOperand, Cause, Coverage};

impl fmt::Display for Coverage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::FakeQuantized { quantizer, scheme } => write!(f, "{scheme} by {quantizer}"),
            Self::Stored(scheme) => write!(f, "stored: {scheme}"),
            Self::Zero => f.write_str("zeros"),
            Self::Float(cause) => write!(f, "float: {cause}"),
        }
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::WeightNotPrepared => f.write_str("no quantizer on this weight"),
            Self::InputNotPrepared => f.write_str("no quantizer for this input"),
            Self::PlainForward { quantizer } => {
                write!(
                    f,
                    "{quantizer} is called elsewhere, not here: call `forward_q`"
                )
            }
            Self::NotQuantizing { quantizer, phase } => {
                write!(f, "{quantizer} does not quantize in this phase ({phase})")
            }
            Self::Changed {
                quantizer,
                operation,
            } => write!(f, "{operation} changes it after {quantizer}"),
            Self::NoQuantizer => f.write_str("no quantizer"),
        }
    }
}

impl fmt::Display for AuditedOperand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", Site::new(&self.layer, self.role))
    }
}

impl fmt::Display for Audit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut layers = table(&["layer", "operation", "uses", "input", "weight"]);
        for layer in &self.layers {
            let input = layer.input.as_ref();
            layers.add_row([
                layer.weight_path.clone(),
                layer.operation.clone(),
                layer.uses.to_string(),
                input.map_or("indices".into(), Coverage::to_string),
                layer.weight.to_string(),
            ]);
        }
        let covered = self.layers.iter().filter(|layer| layer.is_quantized());
        let (covered, all) = (covered.count(), self.layers.len());
        writeln!(f, "{layers}")?;
        write!(
            f,
            "{covered} of {all} layers are quantized, weight and input"
        )?;
        if !self.sites.is_empty() {
            let mut sites = table(&["without a weight", "uses", "operand", "is"]);
            for site in &self.sites {
                for (index, operand) in site.operands.iter().enumerate() {
                    let (operation, uses) = match index {
                        0 => (site.operation.clone(), site.uses.to_string()),
                        _ => (String::new(), String::new()),
                    };
                    let coverage = operand.coverage.to_string();
                    sites.add_row([operation, uses, operand.to_string(), coverage]);
                }
            }
            write!(f, "\n{sites}")?;
        }
        if !self.norm_pairs.is_empty() {
            let mut pairs = table(&["batch norm", "after", "fold"]);
            for pair in &self.norm_pairs {
                let fold = pair.not_foldable.map(|reason| format!("no: {reason}"));
                pairs.add_row([
                    pair.norm.clone(),
                    format!("{} ({})", pair.layer, pair.operation),
                    fold.unwrap_or_else(|| "yes".into()),
                ]);
            }
            write!(f, "\n{pairs}")?;
        }
        for (paths, what) in [
            (
                &self.uncalled,
                "quantizers that act in a recorded forward pass alone",
            ),
            (&self.unused, "quantizers that act nowhere"),
        ] {
            if !paths.is_empty() {
                write!(f, "\n{what}: {}", paths.join(", "))?;
            }
        }
        Ok(())
    }
}
