//! Whether two sets of gradients are the same.

use burn::backend::ir::TensorId;

use crate::record::Leaf;
use crate::{GraphError, Verified};

/// How much further than by some roundings of each operation gradients must be apart.
const NOISE: f64 = 4.0;

/// `noisy`: the recorded ones with some more rounding.
pub(super) fn compare(
    gradients: &[(Leaf, Option<TensorId>)],
    recorded: &[Vec<f32>],
    executed: &[Vec<f32>],
    noisy: Option<&[Vec<f32>]>,
    tolerance: f64,
) -> Result<Verified, GraphError> {
    let wide = |values: &[f32]| values.iter().copied().map(f64::from).collect::<Vec<_>>();
    let distance = |a: &[f32], b: &[f32]| {
        let pairs = wide(a).into_iter().zip(wide(b));
        norm(pairs.map(|(a, b)| a - b))
    };
    let mut worst: Option<(&Leaf, f64)> = None;
    let mut is_finite = true;
    let both = recorded.iter().zip(executed);
    for (index, ((leaf, _), (right, found))) in gradients.iter().zip(both).enumerate() {
        let off = distance(right, found);
        if !off.is_finite() {
            is_finite = false;
            continue;
        }
        let noise = noisy.map_or(0.0, |noisy| distance(right, &noisy[index]));
        if off <= NOISE * noise {
            continue;
        }
        let size = match norm(wide(right)) {
            0.0 => norm(wide(found)),
            size => size,
        };
        let error = off / size;
        if worst.is_none_or(|(_, most)| error > most) {
            worst = Some((leaf, error));
        }
    }
    match worst {
        Some((leaf, error)) if error > tolerance => Err(GraphError::StopsGradients {
            parameter: leaf.name.clone(),
            error: error as f32,
        }),
        _ if is_finite => Ok(Verified::Same),
        _ => Ok(Verified::NotFinite),
    }
}

fn norm(values: impl IntoIterator<Item = f64>) -> f64 {
    let squares = values.into_iter().map(|value| value * value);
    squares.sum::<f64>().sqrt()
}
