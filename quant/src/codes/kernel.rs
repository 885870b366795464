//! Weights as the kernels of a CPU multiply by their codes.

mod convolution;
mod ends;
mod linear;
mod matrix;
pub(crate) mod steps;

use burn::module::Param;
use burn::tensor::{DType, Tensor};
use burn_lean_graph::hooks::is_active;
use burn_lean_kernels::{CodeGrid, in_shares};

use crate::codes::product::Factors;
use crate::fake::qparams::is_scale;
use crate::format::groups::{Counts, Groups, Run};
use crate::module::resident::on_host;
use crate::range::observer::read;
use crate::{QuantParams, QuantizedTensor, Scheme, WeightQuantizer};
use ends::Ends;

pub(crate) use convolution::{PackedConvolution, conv1d, conv2d};
pub(crate) use linear::linear;
pub(crate) use matrix::Packed;

/// The grid of combs, whose numbers are −1, 0 and 1.
const UNIT: CodeGrid = CodeGrid {
    scale: 1.0,
    low: -1,
    high: 1,
};

/// What was made of the weight of a layer, for good.
struct Tried<P> {
    factors: Factors,
    /// Of a convolution.
    groups: usize,
    /// `None` where it cannot be packed.
    packed: Option<P>,
    ends: Ends,
}

impl<P> Tried<P> {
    fn new<const D: usize>(
        weight: &Param<Tensor<D>>,
        quantizers: &WeightQuantizer,
        (factors, groups): (Factors, usize),
        pack: impl FnOnce(&QuantizedTensor) -> Result<P, String>,
    ) -> Self {
        let quantized = QuantizedTensor::from_stored(weight.base(), &quantizers.weight);
        Self {
            factors,
            groups,
            packed: quantized.ok().and_then(|codes| pack(&codes).ok()),
            ends: Ends::default(),
        }
    }
}

/// The quantizers of a layer that a kernel may compute with this input as things are: its weight was converted so, and
/// Burn would refuse nothing.
fn acting<'a, const W: usize, const D: usize>(
    weight: &'a Param<Tensor<W>>,
    x: &Tensor<D>,
) -> Option<&'a WeightQuantizer> {
    // Of a chain, whose other link acts, too, nothing is in the product.
    let quantizers = weight.reparameterization::<WeightQuantizer>()?;
    if !quantizers.weight.is_in_product() || is_active() || x.is_autodiff() {
        return None;
    }
    // What Burn refuses, it is to refuse here, too. Whether there is autodiff, devices do not compare.
    let device = weight.lazy_device();
    let is_like = x.dtype() == DType::F32 && x.device() == device;
    let is_here = is_like && on_host(&device) && !device.is_autodiff();
    (is_here && !x.dims().contains(&0)).then_some(quantizers)
}

/// The grid of all rows of such an input, or of each; `None` for other groups, and for what is no scale.
fn grids(qparams: &QuantParams, scheme: &Scheme, dims: &[usize]) -> Option<Vec<CodeGrid>> {
    let groups = Groups::new(&scheme.granularity, dims).ok()?;
    let is_whole = match groups.runs() {
        [] => true,
        [all] => all.counts == Counts::Elements,
        [rows, row] => {
            let of_row = Run {
                counts: Counts::Elements,
                len: *dims.last()?,
            };
            rows.counts == Counts::Groups && *row == of_row
        }
        _ => false,
    };
    if !is_whole {
        return None;
    }
    let scales = read(qparams.scale.clone()).ok()?;
    let zero_points = read(qparams.zero_point.clone()).ok()?;
    let grid = |(scale, zero_point): (f32, f32)| {
        let low = scheme.quant_min() - zero_point;
        let high = scheme.quant_max() - zero_point;
        let fits = |distance: f32| distance.fract() == 0.0 && distance.abs() <= 255.0;
        let largest = low.abs().max(high.abs()) * scale;
        let is_grid = is_scale(scale) && fits(low) && fits(high) && largest.is_finite();
        is_grid.then_some(CodeGrid {
            scale,
            low: low as i16,
            high: high as i16,
        })
    };
    scales.into_iter().zip(zero_points).map(grid).collect()
}

/// The codes of rows of `inputs` numbers; `None` where a number is not finite.
fn codes(x: &[f32], inputs: usize, grids: &[CodeGrid]) -> Option<Vec<i16>> {
    let mut codes = vec![0; x.len()];
    let are_finite = in_shares(&mut codes, inputs, |first, codes| {
        let x = &x[first * inputs..][..codes.len()];
        let [grid] = grids else {
            let rows = x.chunks(inputs).zip(codes.chunks_mut(inputs));
            let each = rows.zip(&grids[first..]);
            // All of them: no code is left as it was.
            return each.fold(true, |are_finite, ((x, codes), grid)| {
                grid.quantize(x, codes) && are_finite
            });
        };
        grid.quantize(x, codes)
    });
    are_finite.into_iter().all(|is| is).then_some(codes)
}

/// Numbers from −1 to 1 without order.
#[cfg(test)]
fn numbers(count: usize, seed: u32) -> Vec<f32> {
    let number = |index: u32| {
        let mixed = (index ^ seed.wrapping_mul(0x85EB_CA6B)).wrapping_mul(0x9E37_79B9);
        ((mixed ^ (mixed >> 15)).wrapping_mul(0x2C1B_3C6D) >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count as u32).map(number).collect()
}
