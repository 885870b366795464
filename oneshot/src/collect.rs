//! What arrives at a group of layers, summed up over all batches.

use burn::tensor::{DType, Tensor};
use burn_lean_graph::{GraphError, Pass, Step, Tensors};
use burn_lean_layerwise::{Gram, LayerwiseError};
use burn_lean_reparam::reductions;

use crate::block::Group;
use crate::{OneShotError, Preset, Target};
use burn_lean_quant::qat::tokens::rounded;

/// Rows of a convolution that are unfolded at a time.
const CHUNK: usize = 4096;
/// Rows of short batches that are summed up together: each sum touches all of XᵀX, however few there are.
const TOGETHER: usize = 1024;

/// XᵀX of a group's inputs, and XᵀY with the targets of all its layers side by side; for each group
/// of a convolution.
#[derive(Debug, Clone)]
pub(crate) struct Sums {
    pub(crate) grams: Vec<Gram>,
    /// Mean |x| and largest |x| of each feature, over all groups of a convolution.
    pub(crate) mean_abs: Vec<f64>,
    pub(crate) max_abs: Vec<f32>,
    /// Batches whose rows are not those of the original model, in which targets are of these inputs.
    pub(crate) own_targets: usize,
    /// Rows of the only group, and their targets, that are not summed up yet.
    waiting: (Vec<f32>, Vec<f32>),
}

impl Sums {
    /// Without any row.
    fn new(group: &Group, target: Target) -> Self {
        let first = &group.layers[0].product;
        let outputs = match target {
            Target::OwnInputs => 0,
            Target::Original => outputs(group),
        };
        Self {
            grams: vec![Gram::with_targets(first.inputs, outputs); first.groups],
            mean_abs: vec![0.0; first.inputs],
            max_abs: vec![0.0; first.inputs],
            own_targets: 0,
            waiting: (Vec::new(), Vec::new()),
        }
    }

    pub(crate) fn rows(&self) -> usize {
        self.grams[0].rows()
    }

    /// Bytes of the sums.
    pub(crate) fn bytes(&self) -> usize {
        let of = |gram: &Gram| 8 * gram.features() * (gram.features() + gram.outputs());
        self.grams.iter().map(of).sum()
    }

    /// The sums for one group of a convolution, with the targets of one layer.
    pub(crate) fn of(&self, group: &Group, layer: usize, part: usize) -> Gram {
        let gram = &self.grams[part];
        let outputs = |at: usize| group.layers[at].product.outputs_per_group();
        let before: usize = (0..layer).map(outputs).sum();
        match gram.outputs() {
            0 => gram.clone(),
            _ => gram.of_outputs(before..before + outputs(layer)),
        }
    }

    /// Adds rows of one group of a convolution, and their targets where there are some.
    fn add(
        &mut self,
        part: usize,
        x: Tensor<2>,
        targets: Vec<f32>,
        preset: &Preset,
        is_rounded: bool,
    ) -> Result<(), LayerwiseError> {
        if preset.scaling.is_some() {
            self.note_magnitudes(&x);
        }
        let x = match &preset.activations {
            Some(activations) if is_rounded => rounded(x, activations.bits),
            _ => x,
        };
        if self.grams.len() > 1 {
            return self.grams[part].add_with_targets(&floats(x), &targets);
        }
        let (inputs, wanted) = &mut self.waiting;
        match inputs.is_empty() {
            true => (*inputs, *wanted) = (floats(x), targets),
            false => {
                inputs.extend(floats(x));
                wanted.extend(targets);
            }
        }
        match inputs.len() < TOGETHER * self.grams[0].features() {
            true => Ok(()),
            false => self.add_waiting(),
        }
    }

    /// Sums up the rows that wait.
    fn add_waiting(&mut self) -> Result<(), LayerwiseError> {
        let (inputs, targets) = std::mem::take(&mut self.waiting);
        self.grams[0].add_with_targets(&inputs, &targets)
    }

    fn note_magnitudes(&mut self, x: &Tensor<2>) {
        // A column of halves may add up to more than a half holds.
        let x = x.clone().cast(DType::F32).abs();
        let sum = floats(reductions::sum_dim(x.clone(), 0));
        let max = floats(reductions::max_dim(x, 0));
        self.mean_abs
            .iter_mut()
            .zip(sum)
            .for_each(|(all, one)| *all += f64::from(one));
        self.max_abs
            .iter_mut()
            .zip(max)
            .for_each(|(all, one)| *all = all.max(one));
    }
}

/// Outputs of all layers of a group, for each group of a convolution.
fn outputs(group: &Group) -> usize {
    let layers = group.layers.iter();
    layers.map(|one| one.product.outputs_per_group()).sum()
}

/// Sums up over all batches at a step of the first layer of a group.
pub(crate) fn collect<O: Tensors>(
    step: &mut Step<'_, O>,
    group: &Group,
    preset: &Preset,
) -> Result<Sums, OneShotError> {
    let first = &group.layers[0].product;
    let mut sums = Sums::new(group, preset.target);
    let of_first = |source| OneShotError::Layer {
        path: group.layers[0].path().into(),
        source,
    };
    for batch in 0..step.batches() {
        let targets = match preset.target {
            Target::OwnInputs => Vec::new(),
            Target::Original if step.rows_correspond(first, batch) => {
                let residuals = residuals(step, group, batch)?;
                targets(step, group, batch, Pass::Original, &residuals)?
            }
            // A row of the original model is that of another token.
            Target::Original => {
                sums.own_targets += 1;
                let none = vec![None; group.layers.len()];
                targets(step, group, batch, Pass::Replaced, &none)?
            }
        };
        // Both passes have the same places, so that their chunks have the same rows.
        let mut targets = targets.into_iter();
        let mut added = Ok(());
        rows(step, group, batch, Pass::Replaced, |part, x| {
            let targets = targets.next().unwrap_or_default();
            if added.is_ok() {
                added = sums.add(part, x, targets, preset, !first.is_convolution());
            }
        })?;
        added.map_err(of_first)?;
    }
    sums.add_waiting().map_err(of_first)?;
    let count = (sums.rows() * first.groups).max(1) as f64;
    sums.mean_abs.iter_mut().for_each(|sum| *sum /= count);
    Ok(sums)
}

/// What the original layers of `group` give for what arrives in a pass, side by side, and the residuals: `[rows,
/// outputs]` of each chunk of [`rows`]. All of it is as large as their outputs; the patches of a convolution
/// are many times that.
fn targets<O: Tensors>(
    step: &mut Step<'_, O>,
    group: &Group,
    batch: usize,
    pass: Pass,
    residuals: &[Option<Tensor<2>>],
) -> Result<Vec<Vec<f32>>, GraphError> {
    let mut weights = Vec::new();
    for layer in &group.layers {
        let outputs = layer.product.outputs_per_group();
        weights.push((outputs, step.weight(&layer.product, Pass::Original)?));
    }
    let mut chunks = Vec::new();
    rows(step, group, batch, pass, |part, x| {
        let layers = weights.iter().zip(residuals);
        let outputs = layers.map(|((outputs, weight), residual)| {
            let weight = weight.clone().slice([part * outputs..(part + 1) * outputs]);
            // Products of a forward pass that casts a weight are in the dtype of what it is multiplied with.
            let y = x.clone().matmul(weight.transpose().cast(x.dtype()));
            match residual {
                // Convolutions have none, and all rows of others come at once.
                Some(residual) => y + residual.clone(),
                None => y,
            }
        });
        let outputs: Vec<Tensor<2>> = outputs.collect();
        chunks.push(floats(Tensor::cat(outputs, 1)));
    })?;
    Ok(chunks)
}

/// Calls `each` with the rows of a batch and their group of a convolution, all at once but for convolutions,
/// whose patches take much memory: they come a few examples at a time.
fn rows<O: Tensors>(
    step: &mut Step<'_, O>,
    group: &Group,
    batch: usize,
    pass: Pass,
    each: impl FnMut(usize, Tensor<2>),
) -> Result<(), GraphError> {
    let product = &group.layers[0].product;
    let chunk = match product.is_convolution() {
        true => CHUNK,
        false => usize::MAX / 2,
    };
    step.rows_of_groups(product, batch, pass, chunk, each)
}

/// For each layer, by how much the summand beside its output is off in the compressed model.
fn residuals<O: Tensors>(
    step: &mut Step<'_, O>,
    group: &Group,
    batch: usize,
) -> Result<Vec<Option<Tensor<2>>>, GraphError> {
    let mut found = Vec::new();
    for layer in &group.layers {
        found.push(match layer.residual {
            Some(id) if step.places_correspond(batch, id) => {
                let original = step.tensor_rows(batch, id, Pass::Original)?;
                let change = original - step.tensor_rows(batch, id, Pass::Replaced)?;
                // Of what is masked out, -∞, nothing changed.
                let finite = change.clone().is_finite();
                Some(change.mask_fill(finite.bool_not(), 0.0))
            }
            _ => None,
        });
    }
    Ok(found)
}

/// The values of a tensor in F32, row by row.
pub(crate) fn floats<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    let data = tensor.into_data();
    match data.as_slice::<f32>() {
        Ok(values) => values.to_vec(),
        Err(_) => data.iter::<f32>().collect(),
    }
}
