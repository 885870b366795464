//! Ranges of weights from their values.

use std::collections::HashMap;

use burn::module::Module;
use burn::tensor::{FloatDType, Tensor};

use super::{WeightRange, keeping};
use crate::format::groups::Groups;
use crate::model::unobserved::{LeftFloat, Unobserved};
use crate::module::listen::watch::{WeightVisitor, visit_weights};
use crate::qat::training::{WeightRanges, calibrated};
use crate::{FakeQuantize, QuantError, fake::Range, module::map_quantizers, quantizers};

/// Shares of the full range that are tried, from the whole down to 0.2: at 2 bits the best for a
/// bell curve is near 0.4, at 4 bits near 0.7.
fn shares() -> impl Iterator<Item = f32> {
    (0..=40).map(|step| 1.0 - 0.02 * step as f32)
}

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
            Some(range) => keeping(located.quantizer, range),
            None => located.quantizer,
        }
    }))
}

/// The prepared model with a range from its values for each weight whose observer remembers: where nothing is trained,
/// nothing else comes by. And what has none, and so is left float where that is asked for.
pub(super) fn observe<M: Module>(
    model: M,
    unobserved: Unobserved,
) -> Result<(M, Vec<LeftFloat>), QuantError> {
    let lacks_one = |quantizer: &FakeQuantize| {
        quantizer.is_of_weight() && quantizer.keeps_range() && !quantizer.has_range()
    };
    if !quantizers(&model)
        .iter()
        .any(|located| lacks_one(&located.quantizer))
    {
        return Ok((model, Vec::new()));
    }
    let show = |model: &M| visit_weights(model, &mut Shown);
    calibrated(&model, lacks_one, unobserved, WeightRanges::Observed, show)
}

/// Each weight comes by its quantizer.
struct Shown;

impl WeightVisitor for Shown {
    fn visit<const D: usize>(&mut self, _: &str, quantizer: &FakeQuantize, weight: Tensor<D>) {
        drop(quantizer.forward(weight));
    }
}

struct Ranges {
    method: WeightRange,
    /// By path of the quantizer.
    found: HashMap<String, Range>,
    error: Option<QuantError>,
}

impl WeightVisitor for Ranges {
    fn visit<const D: usize>(&mut self, path: &str, quantizer: &FakeQuantize, weight: Tensor<D>) {
        let scheme = quantizer.scheme();
        let weight = weight.cast(FloatDType::F32);
        let range = Groups::new(&scheme.granularity, &weight.dims()).and_then(|groups| {
            let full = Range::of(&weight, scheme)?;
            Ok(match self.method {
                WeightRange::Auto if !scheme.format.has_few_integers() => full,
                WeightRange::Auto | WeightRange::LeastSquares => {
                    full.least_squares(&weight, &groups, scheme, shares())
                }
                WeightRange::MinMax => full,
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
