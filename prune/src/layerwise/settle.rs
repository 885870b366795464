//! The end of every walk: running statistics, and the judge.

use std::collections::HashSet;

use burn::module::Module;
use burn_lean_graph::{Graph, Pass, Step, Tensors, Walk};

use crate::PruneError;
use crate::layerwise::attempt::Setting;
use crate::layerwise::divergences::{Divergences, Measure};
use crate::layerwise::given::{Given, outputs};
use crate::layerwise::stops::{Stop, stops};
use crate::layerwise::{failed, norm, ties};

impl Setting<'_> {
    /// Measures running statistics anew behind weights that stay as they are now, and judges.
    pub(crate) fn settle<M: Module, O: Tensors>(
        &self,
        model: M,
        mut walk: Walk<O>,
        dense: &[Given],
    ) -> Result<(M, Divergences), PruneError> {
        let stops = stops(&walk, self.selection, &self.still(walk.graph()));
        let mut measured = HashSet::new();
        while let Some(mut step) = walk
            .advance(|node| matches!(stops.get(&node.index()), Some(Stop::Norm(_))))
            .map_err(failed)?
        {
            if let Stop::Norm(paths) = &stops[&step.node().index()]
                && self.recalibrate(&mut step, paths)?
            {
                measured.extend(paths.clone());
            }
        }
        let divergences = self.judge(&mut walk, dense)?;
        let model = ties::spread(walk.into_model(model), &measured);
        Ok((model, divergences))
    }

    /// Paths of the BatchNorm layers that keep their statistics.
    pub(super) fn still(&self, graph: &Graph) -> HashSet<String> {
        let layers = self.selection.layout().layers();
        let by_path = self.selection.layers_by_path();
        let is_pruned = |path: &str| {
            let layer = by_path.get(path);
            layer.is_some_and(|at| self.magnitude[layers[*at].range()].contains(&false))
        };
        let mut still = norm::still(graph, is_pruned);
        still.extend(self.folded.iter().cloned());
        still
    }

    pub(super) fn recalibrate<O: Tensors>(
        &self,
        step: &mut Step<'_, O>,
        paths: &[String; 2],
    ) -> Result<bool, PruneError> {
        Ok(self.pruner.recalibrate && norm::recalibrate(step, paths, self.sampling.batches)?)
    }

    /// How far the outputs of a finished walk are from those of the dense network.
    pub(super) fn judge<O: Tensors>(
        &self,
        walk: &mut Walk<O>,
        dense: &[Given],
    ) -> Result<Divergences, PruneError> {
        let measures = Measure::of(self.pruner.outputs, dense);
        let mut divergences = Divergences::default();
        for batch in self.judges.clone() {
            let pruned = walk.result(batch, Pass::Replaced).map_err(failed)?;
            divergences.add(&measures, batch, &dense[batch], outputs(&pruned)?)?;
        }
        Ok(divergences)
    }
}
