//! Ranges of weights from their values.

use std::collections::HashMap;

use burn::module::Module;
use burn::tensor::{FloatDType, Tensor};

use super::WeightRange;
use crate::format::groups::Groups;
use crate::module::listen::watch::{Weight, WeightVisitor, visit_weights};
use crate::{FakeQuantize, QuantError, QuantParams, Scheme, fake::Range, module::map_quantizers};

/// Shares of the full range that are tried, from the whole down to 0.2: at 2 bits the best for a
/// bell curve is near 0.4, at 4 bits near 0.7.
const SHARES: usize = 41;
const LEAST: f32 = 0.2;

/// The prepared model with a range for each weight.
pub(super) fn choose<M: Module>(model: M, method: WeightRange) -> Result<M, QuantError> {
    let mut ranges = Ranges {
        method,
        found: HashMap::new(),
        error: None,
    };
    visit_weights(&model, &mut ranges);
    if let Some(error) = ranges.error {
        return Err(error);
    }
    Ok(map_quantizers(model, |located| {
        match ranges.found.remove(located.quantizer.path()) {
            Some(range) => located.quantizer.with_range(range),
            None => located.quantizer,
        }
    }))
}

struct Ranges {
    method: WeightRange,
    /// By path of the quantizer.
    found: HashMap<String, Range>,
    error: Option<QuantError>,
}

impl WeightVisitor for Ranges {
    fn visit<const D: usize>(&mut self, path: &str, quantizer: &FakeQuantize, weight: Weight<D>) {
        let scheme = quantizer.scheme();
        let weight = weight.value.cast(FloatDType::F32);
        let range = Groups::new(&scheme.granularity, &weight.dims()).and_then(|groups| {
            let full = Range::of(&weight, scheme)?;
            Ok(match self.method {
                WeightRange::Auto if !scheme.format.has_few_integers() => full,
                WeightRange::Auto | WeightRange::LeastSquares if scheme.format.is_int() => {
                    let weight = weight.flatten::<1>(0, D - 1);
                    least_squares(&weight, full, &groups, scheme)
                }
                _ => full,
            })
        });
        match range {
            Ok(range) => {
                self.found.insert(quantizer.path().to_string(), range);
            }
            Err(error) => {
                self.error.get_or_insert(error.at(path));
            }
        }
    }
}

/// For each group the share of its range with the least Σ (w − w̃)².
fn least_squares(weight: &Tensor<1>, full: Range, groups: &Groups, scheme: &Scheme) -> Range {
    let elements = weight.dims();
    let mut best: Option<(Tensor<1>, Range)> = None;
    for step in 0..SHARES {
        let share = 1.0 - (1.0 - LEAST) * step as f32 / (SHARES - 1) as f32;
        let range = Range {
            min: full.min.clone() * share,
            max: full.max.clone() * share,
        };
        let qparams = QuantParams::from_range(range.clone(), scheme);
        let scale = groups.expand(qparams.scale, elements);
        let zero_point = groups.expand(qparams.zero_point, elements);
        let codes = (weight.clone() * scale.clone().recip()).round() + zero_point.clone();
        let codes = codes.clamp(scheme.quant_min(), scheme.quant_max());
        let error = groups.mean((weight.clone() - (codes - zero_point) * scale).square());
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
