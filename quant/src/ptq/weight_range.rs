//! Weight ranges with the least squared error.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use burn::module::Module;
use burn::tensor::Tensor;

use super::WeightRange;
use crate::probe::{Seen, watch_weights};
use crate::{QuantError, QuantParams, Range, Site, map_quantizers};

/// Shares of the full range that are tried, from the whole down to 0.2: at 2 bits the best for a
/// bell curve is near 0.4, at 4 bits near 0.7.
const SHARES: usize = 41;
const LEAST: f32 = 0.2;

/// The prepared model with a range for each weight, taken from its values.
pub(super) fn choose<M: Module>(model: M, method: WeightRange) -> Result<M, QuantError> {
    // A range is needed before the weight is seen on its way through the quantizer.
    let model = map_quantizers(model, |located| match located.site {
        Site::Weight => located.quantizer.calibrating(),
        _ => located.quantizer,
    });
    watch_weights(&model, |_| ());
    let mut failed = None;
    let model = map_quantizers(model, |located| match located.site {
        Site::Weight => {
            let quantizer = located.quantizer.clone();
            quantizer.calibrated().unwrap_or_else(|error| {
                failed = Some(error);
                located.quantizer
            })
        }
        _ => located.quantizer,
    });
    if let Some(error) = failed {
        return Err(error);
    }
    if method == WeightRange::MinMax {
        return Ok(model);
    }
    let ranges = Rc::new(RefCell::new(HashMap::new()));
    let found = ranges.clone();
    watch_weights(&model, move |seen| {
        if seen.scheme.format.is_int() {
            let range = least_squares(seen);
            found.borrow_mut().insert(seen.path.to_string(), range);
        }
    });
    let mut ranges = ranges.take();
    Ok(map_quantizers(model, |located| {
        match ranges.remove(located.quantizer.path()) {
            Some(range) => located.quantizer.with_range(range),
            None => located.quantizer,
        }
    }))
}

/// For each group the share of its range with the least Σ (w − w̃)².
fn least_squares(seen: &Seen<'_>) -> Range {
    let groups = &seen.groups;
    let elements = seen.x.dims();
    let full = Range {
        min: groups.reduce(seen.x.clone(), |x| x.min_dim(1)),
        max: groups.reduce(seen.x.clone(), |x| x.max_dim(1)),
    };
    let (quant_min, quant_max) = (seen.scheme.quant_min(), seen.scheme.quant_max());
    let mut best: Option<(Tensor<1>, Range)> = None;
    for step in 0..SHARES {
        let share = 1.0 - (1.0 - LEAST) * step as f32 / (SHARES - 1) as f32;
        let range = Range {
            min: full.min.clone() * share,
            max: full.max.clone() * share,
        };
        let qparams = QuantParams::from_range(range.clone(), seen.scheme);
        let scale = groups.expand(qparams.scale, elements);
        let zero_point = groups.expand(qparams.zero_point, elements);
        let codes = (seen.x.clone() * scale.clone().recip()).round() + zero_point.clone();
        let quantized = (codes.clamp(quant_min, quant_max) - zero_point) * scale;
        let error = (seen.x.clone() - quantized).square();
        let error = groups.reduce(error, |x| x.sum_dim(1));
        best = Some(match best {
            None => (error, range),
            Some((least, chosen)) => {
                let better = error.clone().lower(least.clone());
                let chosen = Range {
                    min: chosen.min.mask_where(better.clone(), range.min),
                    max: chosen.max.mask_where(better.clone(), range.max),
                };
                (least.mask_where(better, error), chosen)
            }
        });
    }
    best.map_or(full, |(_, range)| range)
}
