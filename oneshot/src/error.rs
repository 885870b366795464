//! Why a model cannot be compressed, where, and what to do.

use burn_lean_graph::GraphError;
use burn_lean_layerwise::LayerwiseError;
use burn_lean_quant::QuantError;

/// Why a model could not be compressed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum OneShotError {
    /// The forward pass cannot be followed.
    #[error("{}{}", .0, instead(.0))]
    Graph(#[from] GraphError),
    /// The forward pass of a block cannot be followed
    /// ([`OneShot::compress_blocks`](crate::OneShot::compress_blocks)).
    #[error("in block `{path}`: {source}{}", instead(.source))]
    Block {
        /// The name of the block.
        path: String,
        /// What is wrong there.
        source: GraphError,
    },
    /// Weights cannot be given quantizers ([`Compressed::prepare`](crate::Compressed::prepare)).
    #[error(transparent)]
    Quantization(#[from] QuantError),
    /// A layer cannot be solved.
    #[error("`{path}`: {source}")]
    Layer {
        /// Path of the weight.
        path: String,
        /// What is wrong with its numbers.
        source: LayerwiseError,
    },
    /// The forward pass does not reach a part of the model that was named, or a block beside others.
    #[error(
        "the forward pass calls nothing under `{path}`: check the path and the model, or name the \
         blocks (`blocks`) without it"
    )]
    NeverCalled {
        /// The path of that part.
        path: String,
    },
    /// A block that was named is called, and has no weight of its own to compress.
    #[error("`{path}` of `blocks` has no weight to compress: {}", without(.path, .within))]
    EmptyBlock {
        /// Its path.
        path: String,
        /// The block, named before it, that its weights are of; of several in it the first.
        within: Option<String>,
    },
    /// No weight is left to compress.
    #[error(
        "the forward pass has no product with a weight to compress: every one is an embedding, \
         shared with an embedding, under a path of `skip`, or no matrix of its own (several in one \
         parameter, a part of one). A weight that carries a \
         reparameterization has to be materialized first (`Module::materialize`)"
    )]
    NothingToCompress,
    /// No compressed weight is on a grid that a quantizer has ([`Compressed::prepare`](crate::Compressed::prepare)).
    #[error(
        "no weight is on a grid that a quantizer has{}: what is pruned alone stays float, ready for \
         `Export::record`; save it with `Compressed::save`",
        .first.as_ref().map(|(path, why)| format!(" (`{path}`: {why})")).unwrap_or_default()
    )]
    NothingOnAGrid {
        /// The first that is on another grid, and why no quantizer has it.
        first: Option<(String, String)>,
    },
    /// A weight is read by several operations: what suits one does not suit the other.
    #[error(
        "{} is one weight that {operations} operations read, in {blocks}. {}, or name all of its paths in \
         `skip` to leave it as it is",
        listed(.paths),
        match .paths.len() {
            1 => "A layer that is called again and again, such as that of a recurrence, is compressed by \
                  `PtqConfig` and `Pruner`: use those",
            _ => "Give each its own copy",
        }
    )]
    SharedWeight {
        /// Paths under which they read it.
        paths: Vec<String>,
        /// How many operations read it.
        operations: usize,
        /// The blocks in which they are.
        blocks: String,
    },
    /// Fewer calibration rows than inputs: XᵀX has no full rank.
    #[error(
        "`{path}` has {inputs} inputs, but the calibration data give {rows} rows: calibrate with at \
         least as many (rows are tokens, or positions of an image, over all batches)"
    )]
    TooFewRows {
        /// Path of the weight.
        path: String,
        /// Rows over all batches.
        rows: usize,
        /// Inputs of an output.
        inputs: usize,
    },
    /// A pattern or a group does not fit a weight.
    #[error("`{path}`: {why}")]
    DoesNotFit {
        /// Path of the weight.
        path: String,
        /// What does not fit.
        why: String,
    },
    /// A value of a preset is out of range.
    #[error("{field} is {value}, but must be {expected}")]
    InvalidConfig {
        /// The field.
        field: &'static str,
        /// What it is.
        value: String,
        /// What it may be.
        expected: &'static str,
    },
    /// A weight is not the one that was compressed.
    #[error(
        "`{path}` is not what was compressed: it was trained since, or folded with an adapter, and its codes \
         stand for other values. Train what `prepare` gives, whose quantizers have these codes, and save \
         that; an adapter that is not folded is saved beside the codes"
    )]
    Changed {
        /// Path of the weight.
        path: String,
    },
    /// Files of a state folder, or a compressed file, cannot be written, read or used.
    #[error("{file}: {reason}")]
    File {
        /// The file or folder.
        file: String,
        /// What is wrong.
        reason: String,
    },
}

impl OneShotError {
    /// The same of a model that is the part `name` of another one.
    pub(crate) fn under(self, name: &str) -> Self {
        let mut error = match self {
            Self::NothingToCompress => {
                return Self::DoesNotFit {
                    path: name.into(),
                    why: Self::NothingToCompress.to_string(),
                };
            }
            // Of no block.
            Self::Graph(GraphError::NoBatch) => return Self::Graph(GraphError::NoBatch),
            Self::Graph(source) => {
                return Self::Block {
                    path: name.into(),
                    source,
                };
            }
            other => other,
        };
        match &mut error {
            Self::NeverCalled { path } if path.is_empty() => *path = name.into(),
            Self::SharedWeight { paths, .. } => {
                for path in paths {
                    *path = format!("{name}.{path}");
                }
            }
            Self::Layer { path, .. }
            | Self::NeverCalled { path }
            | Self::TooFewRows { path, .. }
            | Self::Changed { path }
            | Self::DoesNotFit { path, .. } => *path = format!("{name}.{path}"),
            _ => {}
        }
        error
    }
}

pub(crate) fn invalid<T>(
    field: &'static str,
    value: impl ToString,
    expected: &'static str,
) -> Result<T, OneShotError> {
    Err(OneShotError::InvalidConfig {
        field,
        value: value.to_string(),
        expected,
    })
}

/// What compresses a forward pass that may well run by itself.
fn instead(error: &GraphError) -> &'static str {
    match error.is_of_recording() {
        true => {
            "; without a recording `PtqConfig` quantizes layers that are called by `forward_q`, and \
             `PrunerConfig` prunes from gradients of a loss"
        }
        false => "",
    }
}

/// Why nothing is left of a block.
fn without(path: &str, within: &Option<String>) -> String {
    match within {
        Some(block) if block.len() > path.len() => format!(
            "what is in it is of blocks that are named before it, as `{block}`. Leave it out"
        ),
        Some(block) => format!(
            "what is in it is of block `{block}`, which is named before it. Name one of the two, or the \
             smaller one first"
        ),
        None => "norms, biases, embeddings and what is shared with them (a tied head) stay as they are, and \
                 so does what is under a path of `skip`. Leave it out"
            .into(),
    }
}

fn listed(paths: &[String]) -> String {
    let quoted: Vec<String> = paths.iter().map(|path| format!("`{path}`")).collect();
    quoted.join(" = ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_whose_weights_are_of_a_smaller_one_can_go() {
        let message = |path: &str, within: &str| {
            let (path, within) = (path.into(), Some(within.into()));
            OneShotError::EmptyBlock { path, within }.to_string()
        };
        let smaller = message("layers.0", "layers.0.attn");
        assert!(
            smaller.contains("`layers.0.attn`. Leave it out"),
            "{smaller}"
        );
        let larger = message("layers.0.attn", "layers.0");
        assert!(
            larger.contains("`layers.0`, which is named before it"),
            "{larger}"
        );
    }

    #[test]
    fn who_compresses_without_a_recording_is_named_where_one_is_in_the_way() {
        let stops = GraphError::Operation {
            operation: "custom",
            module: "`layer`".into(),
            why: "it has no name".into(),
        };
        let stops = OneShotError::Graph(stops).to_string();
        assert!(stops.contains("`forward_q`") && stops.contains("`PrunerConfig`"));
        let no_batch = OneShotError::Graph(GraphError::NoBatch);
        assert_eq!(no_batch.to_string(), GraphError::NoBatch.to_string());
    }
}
