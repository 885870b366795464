//! What errors are made of: closures, recordings, models that come back.

use burn_lean_graph::GraphError;
use burn_lean_reparam::Rejected;

use crate::PruneError;

impl PruneError {
    /// A training between stages that failed, with its model: what the closures of
    /// [`GradualConfig`](crate::GradualConfig) and [`GradualPruner`](crate::GradualPruner) return.
    ///
    /// ```
    /// use burn_lean_prune::PruneError;
    ///
    /// let rejected = PruneError::training("model", "the loss is NaN");
    /// assert_eq!(rejected.to_string(), "training between the stages failed: the loss is NaN");
    /// assert_eq!(rejected.into_value(), "model");
    /// ```
    pub fn training<M>(model: M, reason: impl ToString) -> Rejected<M, PruneError> {
        let reason = reason.to_string();
        Rejected::new(model, Self::Training { reason })
    }

    /// Of what a closure said when it panicked.
    pub(crate) fn panics(closure: &'static str) -> impl FnOnce(String) -> Self {
        move |reason| Self::Panics { closure, reason }
    }

    /// Of a recording or a walk that failed: `not_recorded` where the forward pass is none that can be recorded.
    pub(crate) fn of_graph(
        source: GraphError,
        not_recorded: impl FnOnce(GraphError) -> Self,
    ) -> Self {
        match source {
            source if source.is_of_recording() => not_recorded(source),
            GraphError::Spill { folder, reason } => Self::Io {
                action: "cannot keep activations in",
                path: folder.display().to_string(),
                reason,
            },
            source => Self::Graph(source),
        }
    }
}

impl<M> From<Rejected<M, PruneError>> for PruneError {
    fn from(rejected: Rejected<M, PruneError>) -> Self {
        rejected.into_error()
    }
}
