//! What follows the sums of a product, and becomes part of it.

use std::sync::Arc;

use burn_lean_kernels::Epilogue;

use super::Planner;
use crate::OnnxNode;
use crate::engine::own::attributes::float;
use crate::engine::own::linear::Ends;

/// What the sums of a product are of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Sums {
    #[default]
    Floats,
    /// Codes: they are cast to floats, and multiplied by scales.
    Integers,
    /// Codes in blocks, whose scales are those of the weight alone: they are multiplied by that of the other side.
    Steps,
}

/// What follows the sums of a product.
#[derive(Default)]
pub(super) struct Tail<'a> {
    kind: Sums,
    /// Known, or of the weight alone.
    pub(super) scale: Option<Vec<f32>>,
    pub(super) is_dynamic: bool,
    pub(super) bias: Option<Vec<f32>>,
    pub(super) gain: Option<[Vec<f32>; 2]>,
    pub(super) clamp: Option<(f32, f32)>,
    pub(super) nodes: Vec<usize>,
    pub(super) output: &'a str,
}

impl<'a> Planner<'a> {
    /// What follows sums of `channels`, with as many axes `behind` that of the channels, if the model says
    /// it in the way that products are written.
    pub(super) fn tail(
        &self,
        sums: &'a str,
        channels: usize,
        behind: usize,
        kind: Sums,
    ) -> Option<Tail<'a>> {
        let per_channel = |name: &str| self.per_channel(name, channels, behind);
        let mut tail = Tail {
            kind,
            output: sums,
            ..Tail::default()
        };
        if kind != Sums::Floats {
            let mut made = sums;
            if kind == Sums::Integers {
                let (cast, node) = self
                    .sole(sums)
                    .filter(|(_, node)| node.operator == "Cast")?;
                tail.nodes.push(cast);
                made = node.outputs.first()?;
            }
            let (at, node) = self.sole(made).filter(|(_, node)| node.operator == "Mul")?;
            let step = node.other(made)?;
            match per_channel(step) {
                Some(scale) => tail.scale = Some(scale),
                None => {
                    // The scale of the values at hand, times those of the weight.
                    let product = &self.model.nodes[*self.makers.get(step)?];
                    let scales = (product.operator == "Mul").then(|| {
                        let mut all = product.inputs.iter();
                        all.find_map(|name| per_channel(name))
                    });
                    tail.scale = Some(scales??);
                    tail.is_dynamic = true;
                }
            }
            tail.nodes.push(at);
            tail.output = node.outputs.first()?;
        }
        while let Some((at, node)) = self.sole(tail.output) {
            let untouched = tail.clamp.is_none() && tail.gain.is_none();
            match node.operator {
                "Add" if untouched && tail.bias.is_none() => {
                    let bias = node.other(tail.output);
                    let Some(bias) = bias.and_then(per_channel) else {
                        break;
                    };
                    tail.bias = Some(bias);
                }
                // It is along the second axis, which of a matrix product need not be that of the columns.
                "BatchNormalization" if untouched && behind > 0 => match self.affine(node) {
                    Some(gain) if gain[0].len() == channels => tail.gain = Some(gain),
                    _ => break,
                },
                "Relu" | "Clip" => match self.limits(node) {
                    Some((low, high)) => {
                        let (before, after) =
                            tail.clamp.unwrap_or((f32::NEG_INFINITY, f32::INFINITY));
                        if before > high || after < low {
                            break;
                        }
                        tail.clamp = Some((before.max(low), after.min(high)));
                    }
                    None => break,
                },
                _ => break,
            }
            tail.nodes.push(at);
            tail.output = node.outputs.first()?;
        }
        Some(tail)
    }

    /// One number for each channel: also one for all.
    fn per_channel(&self, name: &str, channels: usize, behind: usize) -> Option<Vec<f32>> {
        let values = self.constants.floats(name)?;
        // Axes that are missing are missing in front.
        let mut axes = self.constants.get(name)?.shape.iter().rev();
        let is_along = axes.nth(behind) == Some(&channels);
        match values[..] {
            [value] => Some(vec![value; channels]),
            _ if values.len() == channels && is_along => Some(values),
            _ => None,
        }
    }

    /// γ / √(σ² + ε), and what is added.
    pub(super) fn affine(&self, node: &OnnxNode) -> Option<[Vec<f32>; 2]> {
        let mut parts = node.inputs.iter().skip(1);
        let mut next = || self.constants.floats(parts.next()?);
        let (gamma, beta, mean, variance) = (next()?, next()?, next()?, next()?);
        let epsilon = float(node, "epsilon")?;
        let gain: Vec<f32> = gamma
            .iter()
            .zip(&variance)
            .map(|(gamma, variance)| gamma / (variance + epsilon).sqrt())
            .collect();
        let shift = (0..gain.len()).map(|c| beta[c] - mean[c] * gain[c]);
        let shift = shift.collect();
        Some([gain, shift])
    }

    pub(super) fn limits(&self, node: &OnnxNode) -> Option<(f32, f32)> {
        if node.operator == "Relu" {
            return Some((0.0, f32::INFINITY));
        }
        let limit = |at: usize, none: f32| match node.inputs.get(at).map(String::as_str) {
            None | Some("") => Some(none),
            Some(name) => self.constants.number(name),
        };
        Some((limit(1, f32::NEG_INFINITY)?, limit(2, f32::INFINITY)?))
    }

    /// What happens to the sums of channels of a weight from `first` on.
    pub(super) fn ends(
        &mut self,
        weight: &str,
        tail: &Tail<'_>,
        first: usize,
        count: usize,
    ) -> Arc<Ends> {
        let ends = of_tail(tail, first, count);
        let bytes = ends.bytes();
        let (ends, is_new) = self.ends.once(weight, ends);
        if is_new {
            self.resident_bytes += bytes;
        }
        ends
    }
}

fn of_tail(tail: &Tail<'_>, first: usize, count: usize) -> Ends {
    let part = |values: &[f32]| values[first..first + count].to_vec();
    let mut epilogue = Epilogue::new(count);
    let scale = tail.scale.as_deref().map(part);
    let bias = tail.bias.as_deref().map(part);
    let codes = match (&scale, &bias) {
        (Some(scale), Some(bias)) if tail.kind == Sums::Integers && !tail.is_dynamic => {
            bias_codes(bias, scale)
        }
        _ => None,
    };
    match (codes, bias) {
        (Some(codes), _) => epilogue = epilogue.with_code_bias(&codes),
        (None, Some(bias)) => epilogue = epilogue.with_bias(&bias),
        (None, None) => {}
    }
    if let Some([gain, shift]) = &tail.gain {
        epilogue = epilogue.with_gain(&part(gain), &part(shift));
    }
    if let Some((low, high)) = tail.clamp {
        epilogue = epilogue.with_clamp(low, high);
    }
    match (scale, tail.is_dynamic) {
        (Some(scale), false) => Ends {
            epilogue: epilogue.with_scale(&scale),
            dynamic: None,
        },
        (dynamic, _) => Ends { epilogue, dynamic },
    }
}

/// Biases as multiples of the scales; `None` where one does not fit 32 bits, or is too far from a
/// multiple: products of few bits have coarse steps, and half of one moves codes of the next layers.
fn bias_codes(bias: &[f32], scale: &[f32]) -> Option<Vec<i32>> {
    let largest = bias.iter().fold(0.0, |most, bias| bias.abs().max(most));
    let code = |(bias, scale): (&f32, &f32)| {
        let steps = (bias / scale).round_ties_even();
        // Far from where sums of codes are, so that adding one stays in 32 bits.
        let fits = steps.abs() < f32::powi(2.0, 29);
        let is_near = (steps * scale - bias).abs() <= largest / 4096.0;
        (fits && is_near).then_some(steps as i32)
    };
    bias.iter().zip(scale).map(code).collect()
}
