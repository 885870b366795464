//! A matrix of codes as the file has it, and what an input is quantized with.

use super::config::Arguments;
use super::layout::turn;
use crate::module::walk::Located;
use crate::range::observer::read;
use crate::{Granularity, NumberFormat, QuantError, QuantizedTensor, Scheme};

/// Signed codes, outputs first.
pub(super) struct Codes {
    pub(super) shape: [usize; 2],
    pub(super) codes: Vec<i32>,
    pub(super) groups: [usize; 2],
    pub(super) scale: Vec<f32>,
    pub(super) zero_point: Vec<i32>,
    pub(super) arguments: Arguments,
}

/// From the layout's signed codes to those of a scheme.
pub(super) fn shift(scheme: &Scheme) -> i32 {
    match scheme.quant_min() < 0.0 {
        true => 0,
        false => 1 << (scheme.format.bits() - 1),
    }
}

fn arguments(scheme: &Scheme, strategy: &str) -> Arguments {
    Arguments {
        num_bits: scheme.format.bits(),
        kind: "int".into(),
        symmetric: scheme.mapping.is_symmetric(),
        strategy: Some(strategy.into()),
        group_size: None,
        dynamic: false.into(),
    }
}

impl Codes {
    /// Of a matrix, whose outputs come last where it is `turned`; or why the layout cannot hold it.
    pub(super) fn of(weight: &QuantizedTensor, turned: bool) -> Result<Self, String> {
        let scheme = weight.scheme();
        let [rows, columns] = weight.shape()[..] else {
            return Err("the layout has codes of matrices alone".into());
        };
        if !scheme.format.is_int() {
            return Err(format!("{scheme} has no integers"));
        }
        let groups = scheme.group_shape(weight.shape());
        let groups = groups.map_err(|error| error.to_string())?;
        if weight.groups().is_ok_and(|groups| groups.are_ragged()) {
            return Err(format!(
                "{scheme} has a last group that is smaller than the others"
            ));
        }
        let shift = shift(scheme);
        let zero_points = weight.zero_point().iter();
        let found = Self {
            shape: [rows, columns],
            codes: weight
                .codes()
                .iter()
                .map(|code| i32::from(*code) - shift)
                .collect(),
            groups: [groups[0], groups[1]],
            scale: weight.scale().to_vec(),
            zero_point: zero_points.map(|zero| *zero as i32 - shift).collect(),
            arguments: arguments(scheme, "tensor"),
        };
        let mut found = if turned { found.turned() } else { found };
        let [outputs, terms] = found.shape;
        let (strategy, size) = match found.groups {
            [1, 1] => ("tensor", None),
            [of, 1] if of == outputs => ("channel", None),
            [of, groups] if of == outputs => ("group", Some((terms / groups) as i64)),
            _ => return Err(format!("{scheme} has groups that are no part of an output")),
        };
        found.arguments.strategy = Some(strategy.into());
        found.arguments.group_size = size;
        Ok(found)
    }

    /// With its axes swapped.
    fn turned(self) -> Self {
        let ([rows, columns], [g0, g1]) = (self.shape, self.groups);
        Self {
            shape: [columns, rows],
            codes: turn(&self.codes, rows, columns),
            groups: [g1, g0],
            scale: turn(&self.scale, g0, g1),
            zero_point: turn(&self.zero_point, g0, g1),
            arguments: self.arguments,
        }
    }

    /// As the scales are stored.
    pub(super) fn scale_shape(&self) -> Vec<usize> {
        match self.groups {
            [1, 1] => vec![1],
            groups => groups.to_vec(),
        }
    }

    /// In the model's order of axes, with the model's scheme, or that of the file for a model that has
    /// none.
    pub(super) fn quantized(
        self,
        turned: bool,
        scheme: Option<&Scheme>,
    ) -> Result<QuantizedTensor, QuantError> {
        let found = if turned { self.turned() } else { self };
        let (shape, groups) = (found.shape.to_vec(), found.groups.to_vec());
        let Arguments {
            num_bits,
            symmetric,
            ..
        } = found.arguments;
        let scheme = match scheme {
            None => {
                let format = NumberFormat::int(num_bits);
                let scheme = match symmetric {
                    true => Scheme::symmetric(format),
                    false => Scheme::affine(format),
                };
                let extents = shape.iter().zip(&groups).map(|(of, count)| of / count);
                scheme.with_granularity(match groups[..] {
                    [1, 1] => Granularity::PerTensor,
                    _ => Granularity::PerBlock {
                        extents: extents.collect(),
                    },
                })
            }
            Some(scheme) => {
                let fits = scheme.format.is_int()
                    && scheme.format.bits() == num_bits
                    && scheme.mapping.is_symmetric() == symmetric
                    && scheme
                        .group_shape(&shape)
                        .is_ok_and(|found| found == groups);
                if !fits {
                    return Err(QuantError::ForeignScheme {
                        expected: scheme.to_string(),
                        found: found.arguments.to_string(),
                    });
                }
                scheme.clone()
            }
        };
        let shift = shift(&scheme);
        let codes = found.codes.into_iter().map(|code| code + shift);
        let codes: Vec<i32> = codes.collect();
        let is_narrow = scheme.format.narrow() == scheme.format;
        // Other programs use the lowest code, too.
        if is_narrow && codes.iter().any(|code| (*code as f32) < scheme.quant_min()) {
            return Err(QuantError::InvalidConfig {
                field: "format",
                value: scheme.format.to_string(),
                expected: "one with the lowest code, which the file uses: prepare the model with the \
                           weight format `NumberFormat::int8()`, or `int(bits)`, without `narrow()`",
            });
        }
        let zero_points = found.zero_point.into_iter();
        let zero_points = zero_points.map(|zero| (zero + shift) as f32);
        QuantizedTensor::new(codes, shape, found.scale, zero_points.collect(), scheme)
    }
}

/// How the input of a layer is quantized, with the scale and the zero point that it keeps.
pub(super) struct Input {
    pub(super) arguments: Arguments,
    pub(super) range: Option<(f32, i32)>,
}

impl Input {
    /// Or why the layout has no place for it.
    pub(super) fn of(located: &Located) -> Result<Result<Self, String>, QuantError> {
        let quantizer = &located.quantizer;
        let scheme = quantizer.scheme();
        let is_static = quantizer.has_static_range() || quantizer.is_learning();
        let strategy = match (&scheme.granularity, is_static) {
            (Granularity::PerTensor, _) => "tensor",
            (Granularity::PerToken, false) => "token",
            _ => {
                return Ok(Err(format!("{scheme} is neither per tensor nor per token")));
            }
        };
        if !scheme.format.is_int() {
            return Ok(Err(format!("{scheme} has no integers")));
        }
        let mut arguments = arguments(scheme, strategy);
        arguments.dynamic = (!is_static).into();
        if !is_static {
            return Ok(Ok(Self {
                arguments,
                range: None,
            }));
        }
        let qparams = quantizer.qparams().map_err(|error| match error {
            located @ QuantError::Parameter { .. } => located,
            error => error.at(located.name()),
        })?;
        let (scale, zero) = (read(qparams.scale)?, read(qparams.zero_point)?);
        Ok(Ok(Self {
            arguments,
            range: Some((scale[0], zero[0] as i32 - shift(scheme))),
        }))
    }
}
