//! One walk through the network that leaves every layer pruned and, where asked, fitted.

use std::collections::{HashMap, HashSet};
use std::time::Instant;

use burn::module::Module;
use burn::tensor::{Bool, DType, Tensor};
use burn_lean_graph::{GraphError, Node, Pass, Step, Tensors, Walk};
use burn_lean_layerwise::{
    Gram, LayerProblem, LayerwiseError, ProblemConfig, Pull, Support, back_solve, masked, solve,
};

use crate::host::{bar, read};
use crate::layerwise::divergences::Divergences;
use crate::layerwise::given::{Given, given};
use crate::layerwise::rows::{Sampling, reordered};
use crate::layerwise::stops::{Site, Stop, stops};
use crate::layerwise::{failed, rows, shares, ties};
use crate::model::carried::zero_pruned;
use crate::model::flatten::in_dtype_of;
use crate::{
    PruneError, Pruner, Selection, SparsityPattern,
    layerwise::{Candidate, LayerwiseLayer, Refitted},
};

/// What all candidates share.
#[derive(Clone)]
pub(crate) struct Setting<'a> {
    pub(crate) pruner: &'a Pruner,
    pub(crate) selection: &'a Selection,
    /// By magnitude, in the order of the layout: as many as each layer, and each of its groups, keeps.
    pub(crate) magnitude: &'a [bool],
    pub(crate) sampling: Sampling,
    /// BatchNorm layers that do no more than shift.
    pub(crate) folded: &'a HashSet<String>,
    /// Batches that judge: behind those that layers are fitted to, or the same.
    pub(crate) judges: std::ops::Range<usize>,
}

/// A pruned network.
pub(crate) struct Attempt<M> {
    pub(crate) model: M,
    /// In the order of the layout.
    pub(crate) kept: Vec<bool>,
    pub(crate) divergences: Divergences,
    pub(crate) layers: Vec<LayerwiseLayer>,
    pub(crate) recalibrated: usize,
    /// Batches whose outputs are of other rows than those of the dense network.
    pub(crate) unpaired: usize,
    /// Outputs of the dense network for each batch of the walk, where it was computed beside.
    pub(crate) dense: Vec<Given>,
}

/// What one layer became.
struct Layer {
    /// `[outputs, inputs]`
    weights: Vec<f32>,
    kept: Vec<bool>,
    intercept: Option<Vec<f32>>,
    /// Whether it was fitted to inputs that are the same in every row.
    is_dead: bool,
    report: LayerwiseLayer,
}

impl Setting<'_> {
    /// Walks through a recorded network; `dense` has the outputs of the dense one for the batches that
    /// judge, where they are known.
    pub(crate) fn attempt<M: Module, O: Tensors>(
        &self,
        model: M,
        walk: Walk<O>,
        candidate: Candidate,
        dense: Option<&[Given]>,
    ) -> Result<Attempt<M>, PruneError> {
        // Layers are fitted to what the dense network has there.
        let forks = dense.is_none() || candidate != Candidate::Magnitude;
        let mut walk = if forks { walk.with_original() } else { walk };
        let stops = stops(&walk, self.selection, &self.still(walk.graph()));
        let products = stops
            .values()
            .filter(|stop| matches!(stop, Stop::Product(_)));
        let bar = bar(candidate.name(), products.count(), self.pruner.progress);
        let mut kept = self.magnitude.to_vec();
        let mut layers = Vec::new();
        let mut replaced = HashSet::new();
        let (mut recalibrated, mut dead) = (0, 0);
        let masked_from = self.mask_what_is_not_fitted(&mut walk, &stops, &mut replaced)?;
        let mut differs = false;
        while let Some(mut step) = walk
            .advance(|node| stops.contains_key(&node.index()))
            .map_err(failed)?
        {
            let at = step.node().index();
            differs |= masked_from.is_some_and(|first| first < at);
            match &stops[&at] {
                Stop::Norm(paths) => {
                    if self.recalibrate(&mut step, paths)? {
                        recalibrated += 1;
                        replaced.extend(paths.clone());
                    }
                }
                Stop::Product(site) => {
                    let layer = self.layer(&mut step, site, candidate, differs)?;
                    self.write_kept(site, &layer.kept, &mut kept);
                    let is_fitted = layer.report.refitted == Refitted::Fitted;
                    if !site.is_shared && (is_fitted || layer.kept.contains(&false)) {
                        self.replace(&mut step, site, &layer)?;
                        replaced.insert(site.product.parameter.path.clone());
                        replaced.extend(site.bias.clone());
                        differs = true;
                    }
                    dead += usize::from(layer.is_dead);
                    layers.push(layer.report);
                    bar.inc(1);
                }
            }
        }
        // One whose inputs came to be constant is judged with the others; where all are, the examples are.
        let mut fitted = layers
            .iter()
            .filter(|one| one.refitted == Refitted::Fitted)
            .peekable();
        if let Some(first) = fitted.peek().copied()
            && fitted.count() == dead
        {
            return Err(nothing_varies(first));
        }
        let dense = match dense {
            Some(dense) => dense.to_vec(),
            None => {
                let batches = 0..walk.batches();
                batches
                    .map(|batch| given(&walk.result(batch, Pass::Original).map_err(failed)?))
                    .collect::<Result<_, _>>()?
            }
        };
        let divergences = self.judge(&mut walk, &dense)?;
        let batches = 0..walk.batches();
        let unpaired = batches
            .filter(|batch| !walk.results_correspond(*batch))
            .count();
        let model = ties::spread(walk.into_model(model), &replaced);
        // What the forward pass does not read has dense values so far.
        let weights = self.selection.flatten(&model)?;
        let mask = Tensor::<1, Bool>::from_data(&kept[..], &weights.device());
        let model = self
            .selection
            .unflatten(model, zero_pruned(weights, mask))?;
        for layer in self.selection.layout().layers() {
            if !layers.iter().any(|done| done.path == layer.path) {
                let kept = kept[layer.range()].iter().filter(|kept| **kept).count();
                layers.push(unfitted(
                    &layer.path,
                    layer.len(),
                    kept,
                    Refitted::NoProduct,
                ));
            }
        }
        Ok(Attempt {
            model,
            kept,
            divergences,
            layers,
            recalibrated,
            unpaired,
            dense,
        })
    }

    /// Puts zeros into the weights that are no product's, those of a transposed convolution for example, and
    /// into those that other operations read, too, maybe before the product does: layers are fitted behind
    /// them, and candidates judged with them. The first operation that reads one.
    fn mask_what_is_not_fitted<O: Tensors>(
        &self,
        walk: &mut Walk<O>,
        stops: &HashMap<usize, Stop>,
        replaced: &mut HashSet<String>,
    ) -> Result<Option<usize>, PruneError> {
        fn masked<const D: usize, O: Tensors>(
            walk: &mut Walk<O>,
            path: &str,
            kept: &[bool],
        ) -> Result<(), GraphError> {
            let weight = walk.parameter::<D>(path, Pass::Original)?;
            let mask = Tensor::<1, Bool>::from_data(kept, &weight.device());
            walk.replace(path, zero_pruned(weight, mask))
        }
        let fitted = stops.values().filter_map(|stop| match stop {
            Stop::Product(site) => (!site.is_shared).then_some(site.layer),
            Stop::Norm(_) => None,
        });
        let fitted: HashSet<usize> = fitted.collect();
        let layers = self.selection.layout().layers();
        // Under the path that is read, maybe that of a copy.
        let mut read = vec![None; layers.len()];
        let by_path = self.selection.layers_by_path();
        for one in walk.graph().parameters() {
            if let Some(at) = by_path.get(one.path.as_str()) {
                read[*at].get_or_insert_with(|| (one.path.clone(), one.id));
            }
        }
        let mut first: Option<usize> = None;
        for ((at, layer), read) in layers.iter().enumerate().zip(read) {
            let kept = &self.magnitude[layer.range()];
            let is_masked = kept.contains(&false) && !fitted.contains(&at);
            let Some((path, id)) = read.filter(|_| is_masked) else {
                continue;
            };
            let reads = |node: Node<'_>| node.parameters().any(|one| one.id == id);
            let reader = walk.graph().nodes().position(reads);
            first = first.into_iter().chain(reader).min();
            let done = match layer.shape.len() {
                1 => masked::<1, O>(walk, &path, kept),
                2 => masked::<2, O>(walk, &path, kept),
                3 => masked::<3, O>(walk, &path, kept),
                4 => masked::<4, O>(walk, &path, kept),
                _ => masked::<5, O>(walk, &path, kept),
            };
            done.map_err(failed)?;
            replaced.insert(path);
        }
        Ok(first)
    }

    /// The weights of a layer by a candidate.
    fn layer<O: Tensors>(
        &self,
        step: &mut Step<'_, O>,
        site: &Site,
        candidate: Candidate,
        differs: bool,
    ) -> Result<Layer, PruneError> {
        let product = &site.product;
        let path = &self.selection.layout().layers()[site.layer].path;
        let original = step.weight(product, Pass::Original).map_err(failed)?;
        let dense = read(original.clone())?;
        let magnitude = self.read_kept(site);
        let is_pattern = matches!(self.pruner.pattern, SparsityPattern::NM { .. });
        let how = match candidate {
            _ if site.is_shared => Refitted::Shared,
            _ if product.is_embedding() => Refitted::NoProduct,
            _ if is_pattern && !site.is_along(self.selection) => Refitted::OtherAxis,
            Candidate::Magnitude => Refitted::Dense,
            // No other values are nearer to the dense ones, and the ridge would shrink them.
            _ if !differs && !magnitude.contains(&false) => Refitted::Dense,
            _ => Refitted::Fitted,
        };
        if how != Refitted::Fitted {
            let pairs = dense.iter().zip(&magnitude);
            let weights = pairs.map(|(w, kept)| if *kept { *w } else { 0.0 });
            let count = magnitude.iter().filter(|kept| **kept).count();
            return Ok(Layer {
                weights: weights.collect(),
                report: unfitted(path, dense.len(), count, how),
                kept: magnitude,
                intercept: None,
                is_dead: false,
            });
        }
        let order = match is_pattern {
            true => site.order(self.selection),
            false => None,
        };
        let per_group = product.outputs_per_group() * product.inputs;
        let mut layer = Layer {
            weights: Vec::with_capacity(dense.len()),
            kept: Vec::with_capacity(dense.len()),
            intercept: site.bias.is_some().then(Vec::new),
            is_dead: false,
            report: unfitted(path, dense.len(), 0, how),
        };
        let (mut errors, mut scales) = (0.0, 0.0);
        let sampled = self.sampling.of(step, product)?;
        layer.report.own_targets = sampled.own_targets(step, product);
        for group in 0..product.groups {
            let first = group * product.outputs_per_group();
            let rows_of_group = first..first + product.outputs_per_group();
            let own = original.clone().slice([rows_of_group]);
            let order = order.as_deref();
            let start = Instant::now();
            let gram = rows::sum(step, site, group, &own, differs, order, sampled)?;
            let summed = start.elapsed();
            let flat = group * per_group..(group + 1) * per_group;
            let located = |source| PruneError::LayerSystem {
                path: path.clone(),
                source,
            };
            let solved = self
                .solve(
                    site,
                    candidate,
                    &gram,
                    &dense[flat.clone()],
                    &magnitude[flat],
                    order,
                )
                .map_err(located)?;
            tracing::debug!(
                path,
                group,
                summed = summed.as_secs_f64(),
                solved = start.elapsed().as_secs_f64() - summed.as_secs_f64(),
                "layer"
            );
            errors += solved.error;
            scales += solved.scale;
            layer.weights.extend(solved.weights);
            layer.kept.extend(solved.kept);
            if let (Some(all), Some(own)) = (&mut layer.intercept, solved.intercept) {
                all.extend(own);
            }
            layer.report.ridge = layer.report.ridge.max(solved.ridge);
            layer.report.dead_features += gram.dead_features(is_centered(self.pruner, site)).len();
            layer.report.rows += gram.rows();
        }
        layer.is_dead = layer.report.dead_features == product.groups * product.inputs;
        if layer.is_dead && layer.report.rows < 2 {
            return Err(nothing_varies(&layer.report));
        }
        layer.report.kept = layer.kept.iter().filter(|kept| **kept).count();
        layer.report.error = Some(errors / f64::max(scales, f64::MIN_POSITIVE));
        Ok(layer)
    }

    /// One group of a layer.
    #[allow(clippy::too_many_arguments)]
    fn solve(
        &self,
        site: &Site,
        candidate: Candidate,
        gram: &Gram,
        dense: &[f32],
        magnitude: &[bool],
        order: Option<&[usize]>,
    ) -> Result<Solved, LayerwiseError> {
        let product = &site.product;
        let d = product.inputs;
        let dense = match order {
            Some(order) => reordered(dense, order),
            None => dense.to_vec(),
        };
        let config = problem_config(self.pruner, site, gram, magnitude);
        let problem = LayerProblem::new(gram, &dense, &config)?;
        let in_order = |kept: &[bool]| -> Vec<bool> {
            match order {
                Some(order) => kept
                    .chunks_exact(d)
                    .flat_map(|row| order.iter().map(|place| row[*place]))
                    .collect(),
                None => kept.to_vec(),
            }
        };
        let solution = match candidate {
            Candidate::MagnitudeFitted => {
                back_solve(&problem, &Support::new(d, in_order(magnitude))?)?
            }
            _ => {
                let count = magnitude.iter().filter(|kept| **kept).count();
                let keep = shares::keep(&self.pruner.pattern, count);
                let method = self.pruner.support_method(problem.outputs(), d);
                let found = solve(&problem, &keep, &method.method())?;
                match self.pruner.refit {
                    true if method.fits(&problem, &keep, &found)? => found,
                    true => back_solve(&problem, &found.support)?,
                    false => masked(&problem, &found.support)?,
                }
            }
        };
        let intercept = problem.intercept(&solution.weights);
        // Where each place of a row is now.
        let now = order.map(|order| {
            let mut now = vec![0; d];
            for (new, old) in order.iter().enumerate() {
                now[*old] = new;
            }
            now
        });
        let back = |at: usize| match &now {
            Some(now) => at / d * d + now[at % d],
            None => at,
        };
        let places = 0..solution.weights.len();
        let kept = solution.support.kept();
        Ok(Solved {
            weights: places
                .clone()
                .map(|at| solution.weights[back(at)])
                .collect(),
            kept: places.map(|at| kept[back(at)]).collect(),
            intercept,
            error: problem.error(&solution.weights)?,
            scale: problem.scale(),
            ridge: problem.ridge(),
        })
    }

    fn replace<O: Tensors>(
        &self,
        step: &mut Step<'_, O>,
        site: &Site,
        layer: &Layer,
    ) -> Result<(), PruneError> {
        let product = &site.product;
        let original = step.weight(product, Pass::Original).map_err(failed)?;
        let shape = [product.outputs, product.inputs];
        let device = original.device();
        let weights =
            Tensor::<1>::from_data(&layer.weights[..], (&device, DType::F32)).reshape(shape);
        step.replace_weight(product, in_dtype_of(weights, original))
            .map_err(failed)?;
        if let (Some(path), Some(intercept)) = (&site.bias, &layer.intercept) {
            let bias = step.parameter::<1>(path, Pass::Original).map_err(failed)?;
            let dtype = burn::tensor::FloatDType::from(bias.dtype());
            let change = Tensor::<1>::from_data(&intercept[..], (&device, DType::F32)).cast(dtype);
            step.replace(path, bias + change).map_err(failed)?;
        }
        Ok(())
    }

    /// Which of the kept weights of the layout are which place of W.
    fn read_kept(&self, site: &Site) -> Vec<bool> {
        let range = self.selection.layout().layers()[site.layer].range();
        let own = &self.magnitude[range];
        (0..own.len()).map(|at| own[native(site, at)]).collect()
    }

    fn write_kept(&self, site: &Site, from: &[bool], kept: &mut [bool]) {
        let range = self.selection.layout().layers()[site.layer].range();
        let own = &mut kept[range];
        for (at, from) in from.iter().enumerate() {
            own[native(site, at)] = *from;
        }
    }
}

/// Whether means are free: a bias takes them over, or a normalization that is measured anew.
pub(crate) fn is_centered(pruner: &Pruner, site: &Site) -> bool {
    site.bias.is_some() || site.is_normalized && pruner.recalibrate
}

/// What a layer's problem is made with; `kept` has as many of its weights as stay.
pub(crate) fn problem_config(
    pruner: &Pruner,
    site: &Site,
    gram: &Gram,
    kept: &[bool],
) -> ProblemConfig {
    let centered = is_centered(pruner, site);
    let variances = gram.target_squares(centered);
    // Outputs that are normalized count by what they vary.
    let mean = variances.iter().sum::<f64>() / variances.len().max(1) as f64;
    let importance = (site.is_normalized && mean > 0.0)
        .then(|| variances.iter().map(|v| 1.0 / (v + 1e-3 * mean)).collect());
    ProblemConfig {
        ridge: pruner.ridge,
        centered,
        // Where all weights stay, those that the inputs say nothing of stay as they are.
        pull: match kept.contains(&false) {
            true => Pull::Zero,
            false => Pull::Dense,
        },
        importance,
    }
}

/// The place in the parameter of a place in W.
fn native(site: &Site, at: usize) -> usize {
    let product = &site.product;
    match product.is_transposed() {
        true => at % product.inputs * product.outputs + at / product.inputs,
        false => at,
    }
}

/// A group of a layer, in the order of its parameter's places.
struct Solved {
    weights: Vec<f32>,
    kept: Vec<bool>,
    intercept: Option<Vec<f32>>,
    error: f64,
    scale: f64,
    ridge: f64,
}

fn nothing_varies(layer: &LayerwiseLayer) -> PruneError {
    PruneError::LayerSystem {
        path: layer.path.clone(),
        source: LayerwiseError::NothingVaries { rows: layer.rows },
    }
}

fn unfitted(path: &str, weights: usize, kept: usize, refitted: Refitted) -> LayerwiseLayer {
    LayerwiseLayer {
        path: path.into(),
        weights,
        kept,
        refitted,
        error: None,
        ridge: 0.0,
        dead_features: 0,
        rows: 0,
        own_targets: 0,
    }
}
