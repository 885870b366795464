//! What arrives at a group of layers, summed up over all batches.

use burn::tensor::{DType, Tensor};
use burn_lean_graph::{GraphError, Pass, Step, Tensors};
use burn_lean_layerwise::Gram;

use crate::block::Group;
use crate::tokens::rounded;
use crate::{OneShotError, Preset, Target};

/// Rows of a convolution that are unfolded at a time.
const CHUNK: usize = 4096;

/// XᵀX of a group's inputs, and XᵀY with the targets of all its layers side by side; for each group
/// of a convolution.
#[derive(Debug, Clone)]
pub(crate) struct Sums {
    pub(crate) grams: Vec<Gram>,
    /// Mean |x| and largest |x| of each feature, over all groups of a convolution.
    pub(crate) mean_abs: Vec<f64>,
    pub(crate) max_abs: Vec<f32>,
}

impl Sums {
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
        let own = |at: usize| group.layers[at].product.outputs_per_group();
        let before: usize = (0..layer).map(own).sum();
        match gram.outputs() {
            0 => gram.clone(),
            _ => gram.of_outputs(before..before + own(layer)),
        }
    }
}

/// Sums up over all batches at a step of the first layer of a group.
pub(crate) fn collect<O: Tensors>(
    step: &mut Step<'_, O>,
    group: &Group,
    preset: &Preset,
) -> Result<Sums, OneShotError> {
    let first = &group.layers[0].product;
    let target = preset.target;
    let rounds = preset
        .activations
        .as_ref()
        .filter(|_| !first.is_convolution());
    let features = first.inputs;
    let outputs = match target {
        Target::OwnInputs => 0,
        Target::Original => group
            .layers
            .iter()
            .map(|one| one.product.outputs_per_group())
            .sum(),
    };
    let mut sums = Sums {
        grams: vec![Gram::with_targets(features, outputs); first.groups],
        mean_abs: vec![0.0; features],
        max_abs: vec![0.0; features],
    };
    for batch in 0..step.batches() {
        let residual = match target {
            Target::OwnInputs => vec![None; group.layers.len()],
            Target::Original => residuals(step, group, batch)?,
        };
        for part in 0..first.groups {
            let originals = match target {
                Target::OwnInputs => Vec::new(),
                Target::Original => rows(step, group, batch, Pass::Original, part)?,
            };
            let mut start = 0;
            for (at, x) in rows(step, group, batch, Pass::Replaced, part)?
                .into_iter()
                .enumerate()
            {
                let count = x.dims()[0];
                sums.note_magnitudes(&x);
                let x = match rounds {
                    Some(activations) => rounded(x, activations.bits),
                    None => x,
                };
                let targets = match originals.get(at) {
                    None => Vec::new(),
                    Some(original) => {
                        let mut targets = Vec::new();
                        for (layer, residual) in group.layers.iter().zip(&residual) {
                            let own = layer.product.outputs_per_group();
                            let weight = step.weight(&layer.product, Pass::Original)?;
                            let weight = weight.slice([part * own..(part + 1) * own]);
                            let mut y = original.clone().matmul(weight.transpose());
                            if let Some(residual) = residual {
                                y = y + residual.clone().slice([start..start + count]);
                            }
                            targets.push(y);
                        }
                        floats(Tensor::cat(targets, 1))
                    }
                };
                let added = sums.grams[part].add_with_targets(&floats(x), &targets);
                added.map_err(|source| OneShotError::Layer {
                    path: group.layers[0].path().into(),
                    source,
                })?;
                start += count;
            }
        }
    }
    let count = (sums.rows() * first.groups).max(1) as f64;
    sums.mean_abs.iter_mut().for_each(|sum| *sum /= count);
    Ok(sums)
}

impl Sums {
    fn note_magnitudes(&mut self, x: &Tensor<2>) {
        // A column of halves may add up to more than a half holds.
        let x = x.clone().cast(DType::F32).abs();
        let sum = floats(x.clone().sum_dim(0));
        let max = floats(x.max_dim(0));
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

/// The rows of a batch in parts: one part but for convolutions, whose patches take much memory.
fn rows<O: Tensors>(
    step: &mut Step<'_, O>,
    group: &Group,
    batch: usize,
    pass: Pass,
    part: usize,
) -> Result<Vec<Tensor<2>>, GraphError> {
    let product = &group.layers[0].product;
    let chunk = if product.is_convolution() {
        CHUNK
    } else {
        usize::MAX / 2
    };
    let mut rows = Vec::new();
    step.rows(product, batch, pass, part, chunk, |x| rows.push(x))?;
    Ok(rows)
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
            None => None,
            Some(id) => {
                let original = step.tensor_rows(batch, id, Pass::Original)?;
                let change = original - step.tensor_rows(batch, id, Pass::Replaced)?;
                // Of what is masked out, -∞, nothing changed.
                let finite = change.clone().is_finite();
                Some(change.mask_fill(finite.bool_not(), 0.0))
            }
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
