//! Factors between layers: what one divides its outputs by, those that read them multiply by.

use burn::tensor::{DType, Tensor, TensorData};
use burn_lean_graph::{Pass, Tensors, Walk};
use faer::linalg::matmul::matmul;
use faer::{Accum, Mat, MatRef, get_global_parallelism};

use crate::block::Group;
use crate::collect::{Sums, floats};
use crate::solve::nearest;
use crate::{OneShotError, Preset, Quantize, Scaling};

/// Exponents that the search tries.
const STEPS: usize = 20;

/// Moves factors into the weights of a group, out of what it reads; whether there was a place.
pub(crate) fn scale<O: Tensors>(
    walk: &mut Walk<O>,
    group: &Group,
    sums: &Sums,
    preset: &Preset,
) -> Result<bool, OneShotError> {
    let (Some(scaling), Some(quantize), Some(producer)) =
        (&preset.scaling, &preset.quantize, &group.producer)
    else {
        return Ok(false);
    };
    let mut weights = Vec::new();
    for layer in &group.layers {
        let weight = walk.weight(&layer.product, Pass::Replaced)?;
        weights.push(floats(weight));
    }
    let factors = match scaling {
        Scaling::Awq => searched(sums, &weights, quantize, group)?,
        Scaling::SmoothQuant { alpha } => smoothed(sums, &weights, *alpha),
    };
    let inputs = factors.len();
    for (layer, values) in group.layers.iter().zip(weights) {
        let scaled = values
            .iter()
            .enumerate()
            .map(|(at, w)| (f64::from(*w) * factors[at % inputs]) as f32);
        let shape = [layer.product.outputs, inputs];
        let old = walk.weight(&layer.product, Pass::Replaced)?;
        let scaled = TensorData::new(scaled.collect::<Vec<f32>>(), shape);
        let scaled = Tensor::<2>::from_data(scaled, (&old.device(), old.dtype()));
        walk.replace_weight(&layer.product, scaled)?;
    }
    for path in &producer.vectors {
        divide_vector(walk, path, &factors)?;
    }
    if let Some(product) = &producer.matrix {
        let old = walk.weight(product, Pass::Replaced)?;
        walk.replace_weight(product, divided(old, &factors))?;
    }
    Ok(true)
}

/// max|x|^α / max|w|^(1−α) of each feature; of a dead one 1, or what leaves its weights within the range of the others.
fn smoothed(sums: &Sums, weights: &[Vec<f32>], alpha: f64) -> Vec<f64> {
    let inputs = sums.max_abs.len();
    let largest = |at: usize| {
        let of_weight = weights
            .iter()
            .flat_map(|one| one.iter().skip(at).step_by(inputs));
        f64::from(of_weight.fold(0.0f32, |most, w| most.max(w.abs())))
    };
    let is_live = |at: usize| sums.max_abs[at] > 0.0;
    let of_live = |at: usize| {
        f64::from(sums.max_abs[at]).powf(alpha) / largest(at).powf(1.0 - alpha).max(1e-5)
    };
    let live = (0..inputs).filter(|at| is_live(*at));
    let widest = live.map(|at| of_live(at) * largest(at)).fold(0.0, f64::max);
    (0..inputs)
        .map(|at| match is_live(at) {
            true => of_live(at),
            // What nothing moves widens no range.
            false if widest > 0.0 => (widest / largest(at).max(f64::MIN_POSITIVE)).min(1.0),
            false => 1.0,
        })
        .collect()
}

/// The factors mean|x|^r of the exponent r whose rounded weights have the least output error.
fn searched(
    sums: &Sums,
    weights: &[Vec<f32>],
    quantize: &Quantize,
    group: &Group,
) -> Result<Vec<f64>, OneShotError> {
    let inputs = sums.mean_abs.len();
    let gram = sums.grams[0].matrix(false);
    let mut is_live = vec![1.0_f64; inputs];
    for at in sums.grams[0].dead_features(false) {
        is_live[at] = 0.0;
    }
    let mut best: Option<(f64, Vec<f64>)> = None;
    // One after the other: each has products that take all cores, and weights of its own.
    for step in 0..STEPS {
        let factors = factors_of(&sums.mean_abs, step as f64 / STEPS as f64);
        // The grid sees scaled weights and inputs.
        let diagonal: Vec<f64> = (0..inputs)
            .map(|at| gram[at * inputs + at] / (factors[at] * factors[at]))
            .collect();
        let mut error = 0.0_f64;
        for (layer, weight) in group.layers.iter().zip(weights) {
            let scaled = weight.iter().enumerate();
            let scaled: Vec<f64> = scaled
                .map(|(at, w)| is_live[at % inputs] * f64::from(*w) * factors[at % inputs])
                .collect();
            let rounded =
                nearest(&scaled, &diagonal, quantize).map_err(|source| OneShotError::Layer {
                    path: layer.path().into(),
                    source,
                })?;
            // As the inputs see it that are not scaled.
            let pairs = rounded.iter().zip(&scaled).enumerate();
            let off: Vec<f64> = pairs
                .map(|(at, (q, w))| (f64::from(*q) - w) / factors[at % inputs])
                .collect();
            error += output_error(&off, &gram, inputs);
        }
        if best
            .as_ref()
            .is_none_or(|(least, _)| error.total_cmp(least).is_lt())
        {
            best = Some((error, factors));
        }
    }
    Ok(best.map_or_else(|| vec![1.0; inputs], |(_, factors)| factors))
}

/// Around 1, and 1 for features that are dead.
fn factors_of(mean_abs: &[f64], exponent: f64) -> Vec<f64> {
    let raw: Vec<f64> = mean_abs
        .iter()
        .map(|x| x.powf(exponent).max(1e-4))
        .collect();
    let live = || {
        raw.iter()
            .zip(mean_abs)
            .filter(|(_, x)| **x > 0.0)
            .map(|(f, _)| *f)
    };
    let middle = (live().fold(0.0, f64::max) * live().fold(f64::INFINITY, f64::min)).sqrt();
    let factor = |(f, x): (&f64, &f64)| match *x > 0.0 && middle.is_finite() {
        true => f / middle,
        false => 1.0,
    };
    raw.iter().zip(mean_abs).map(factor).collect()
}

/// Σ over outputs of eᵀ H e.
fn output_error(off: &[f64], hessian: &[f64], inputs: usize) -> f64 {
    let outputs = off.len() / inputs.max(1);
    let mut product = Mat::<f64>::zeros(inputs, outputs);
    matmul(
        product.as_mut(),
        Accum::Replace,
        MatRef::from_row_major_slice(hessian, inputs, inputs),
        MatRef::from_column_major_slice(off, inputs, outputs),
        1.0,
        get_global_parallelism(),
    );
    let rows = off.chunks_exact(inputs.max(1)).enumerate();
    rows.map(|(row, off)| {
        let pairs = product.col_as_slice(row).iter().zip(off);
        pairs.map(|(h, e)| h * e).sum::<f64>()
    })
    .sum()
}

/// Divides a vector that the walk carries.
fn divide_vector<O: Tensors>(
    walk: &mut Walk<O>,
    path: &str,
    factors: &[f64],
) -> Result<(), OneShotError> {
    let old = walk.parameter::<1>(path, Pass::Replaced)?;
    Ok(walk.replace(path, divided(old, factors))?)
}

/// Along the first axis; in F32, since the weights take the factors as they are, not rounded to half.
fn divided<const D: usize>(old: Tensor<D>, factors: &[f64]) -> Tensor<D> {
    let dtype = old.dtype();
    let mut shape = [1; D];
    shape[0] = factors.len();
    let by: Vec<f32> = factors.iter().map(|f| *f as f32).collect();
    let by = Tensor::from_data(TensorData::new(by, shape), (&old.device(), DType::F32));
    (old.cast(DType::F32) / by).cast(dtype)
}
