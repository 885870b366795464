//! What became of a model in an engine.

use std::fmt;
use std::time::Duration;

use serde::Serialize;

use crate::LayerReport;
use crate::engine::Backend;

/// A way to run the model, and how long a run took when the engine was compiled.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Timed {
    /// What ran it.
    pub way: String,
    /// The shortest of some runs.
    pub time: Duration,
}

/// A float weight of which half or more is zero, in the engine.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SparseLayer {
    /// Path of the weight.
    pub path: String,
    /// Its numbers that are not zero.
    pub nonzeros: usize,
    /// All of them.
    pub weights: usize,
    /// What became of its zeros.
    pub outcome: SparseOutcome,
}

/// What became of the zeros of a weight.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub enum SparseOutcome {
    /// They are left out: faster here, or as fast in fewer bytes.
    LeftOut {
        /// The shortest product without them, when the engine was compiled.
        sparse: Duration,
        /// With them.
        dense: Duration,
    },
    /// They are multiplied: faster here.
    Multiplied {
        /// The shortest product without them, when the engine was compiled.
        sparse: Duration,
        /// With them.
        dense: Duration,
    },
    /// They are multiplied, since the whole model is faster in another way.
    OtherWay,
    /// They are multiplied, since there is no product without them.
    NoProduct {
        /// Of what.
        reason: &'static str,
    },
}

impl SparseLayer {
    /// Whether its zeros are left out.
    pub fn is_left_out(&self) -> bool {
        matches!(self.outcome, SparseOutcome::LeftOut { .. })
    }
}

impl fmt::Display for SparseLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            path,
            nonzeros,
            weights,
            ..
        } = self;
        write!(f, "{path}: {nonzeros} of {weights} weights are not zero; ")?;
        match &self.outcome {
            SparseOutcome::LeftOut { sparse, dense } => {
                write!(f, "{sparse:.1?} without the zeros, {dense:.1?} with them")
            }
            SparseOutcome::Multiplied { sparse, dense } => write!(
                f,
                "multiplied with the zeros, {dense:.1?}, {sparse:.1?} without them"
            ),
            SparseOutcome::OtherWay => f.write_str("the model is faster in another way"),
            SparseOutcome::NoProduct { reason } => write!(f, "multiplied with the zeros: {reason}"),
        }
    }
}

/// What became of a model in an [`Engine`](crate::Engine).
///
/// Prints as a table.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct EngineReport {
    /// What runs the model.
    pub backend: Backend,
    /// The ways that were measured for the recorded shapes, the fastest first; empty where there was
    /// one alone.
    pub times: Vec<Timed>,
    /// Its products, convolutions and quantized embeddings, in order.
    pub layers: Vec<LayerReport>,
    /// Float weights of which half or more is zero, and what that is good for here.
    pub sparse: Vec<SparseLayer>,
    /// Bytes of all constants: what stays in memory between runs, those that Burn shares with the model
    /// included, and those of all shapes that were [added](crate::Engine::add).
    pub resident_bytes: usize,
    /// Why the model takes one size of the batch alone; `None` where it takes any.
    pub fixed_batch: Option<String>,
}

impl EngineReport {
    /// Whether some layer computes in integers.
    pub fn is_integer(&self) -> bool {
        self.layers.iter().any(LayerReport::is_integer)
    }
}

impl fmt::Display for EngineReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "run by: {}", self.backend)?;
        for Timed { way, time } in &self.times {
            writeln!(f, "  {way}: {time:.1?}")?;
        }
        for layer in &self.layers {
            let (path, operation) = (&layer.path, layer.operation);
            write!(f, "{path} ({operation}): {}", layer.execution)?;
            match &layer.reason {
                Some(reason) => writeln!(f, ", {reason}")?,
                None => writeln!(f)?,
            }
        }
        for layer in &self.sparse {
            writeln!(f, "{layer}")?;
        }
        writeln!(f, "{} bytes resident", self.resident_bytes)?;
        match &self.fixed_batch {
            Some(reason) => writeln!(f, "one size of the batch alone: {reason}"),
            None => Ok(()),
        }
    }
}
