//! The table.

use std::path::Path;

use burn_lean::oneshot::{Pattern, Preset};

use super::engine::InEngine;
use super::support::{Cell, Table};

/// What is measured of a model.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Measured {
    pub(crate) perplexity: f64,
    /// Tokens in a second.
    pub(crate) rate: Option<f64>,
}

/// What came of a method.
#[derive(Debug, Clone)]
pub(crate) struct Row {
    pub(crate) compressed: Measured,
    pub(crate) engine: Option<InEngine>,
    /// Of all parameters as they would be stored.
    pub(crate) bytes: usize,
    pub(crate) seconds: f64,
    /// The most memory beyond what there was before.
    pub(crate) peak: Option<u64>,
}

/// A row for each method.
pub(crate) struct Rows {
    table: Table,
    original: Measured,
}

impl Rows {
    /// None yet, for this model.
    pub(crate) fn new(title: String, original: Measured) -> Self {
        let header = [
            "method",
            "bits",
            "group",
            "asymmetric",
            "sparsity",
            "perplexity",
            "bytes",
            "seconds",
            "peak_bytes",
            "fp32_perplexity",
            "tokens_per_second",
            "fp32_tokens_per_second",
            "engine_perplexity",
            "engine_bytes",
        ];
        Self {
            table: Table::new(title, &header),
            original,
        }
    }

    pub(crate) fn push(&mut self, name: &str, preset: &Preset, row: &Row) {
        let quantize = preset.quantize.as_ref();
        let integer = |number: Option<usize>| Cell::optional_integer(number.map(|n| n as u64));
        self.table.push([
            Cell::from(name),
            integer(quantize.map(|one| usize::from(one.bits))),
            integer(quantize.and_then(|one| one.group)),
            match quantize {
                Some(one) => Cell::Flag(!one.symmetric),
                None => Cell::Empty,
            },
            match preset.prune.as_ref().map(|one| one.pattern) {
                Some(Pattern::NOfM { n, m }) => Cell::from(format!("{n}:{m}")),
                Some(Pattern::PerLayer(part) | Pattern::PerOutput(part)) => Cell::Number(part, 2),
                None => Cell::Empty,
            },
            Cell::Number(row.compressed.perplexity, 4),
            Cell::Integer(row.bytes as u64),
            Cell::Number(row.seconds, 1),
            Cell::optional_integer(row.peak),
            Cell::Number(self.original.perplexity, 4),
            Cell::optional(row.compressed.rate, 0),
            Cell::optional(self.original.rate, 0),
            Cell::optional(row.engine.map(|engine| engine.perplexity), 4),
            Cell::optional_integer(row.engine.map(|engine| engine.bytes as u64)),
        ]);
    }

    pub(crate) fn publish(&self, json: Option<&Path>) -> Result<(), String> {
        self.table.publish(json)
    }
}
