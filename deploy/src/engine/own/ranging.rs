//! Grids of activations.

use burn_lean_kernels::{CodeGrid, finite_range};
use burn_lean_quant::Mapping;

use crate::DynamicGrid;
use crate::quantization::SMALLEST_SCALE;

/// Where the grid of an activation is from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Ranging {
    Known(CodeGrid),
    /// The values at hand.
    OnTheFly(DynamicGrid),
}

impl Ranging {
    pub(super) fn is_known(self) -> bool {
        matches!(self, Self::Known(_))
    }

    /// Whether each row has a grid of its own.
    pub(super) fn is_per_row(self) -> bool {
        matches!(self, Self::OnTheFly(grid) if grid.per_token)
    }

    /// The grid of values; of those that are finite, where it is of them.
    pub(super) fn grid(self, values: &[f32]) -> CodeGrid {
        match self {
            Self::Known(grid) => grid,
            Self::OnTheFly(grid) => of_range(grid, finite_range(values)),
        }
    }
}

/// As [`QuantParams::from_range`](burn_lean_quant::QuantParams::from_range) has it.
fn of_range(grid: DynamicGrid, [low, high]: [f32; 2]) -> CodeGrid {
    let (quant_min, quant_max) = (grid.quant_min() as f32, grid.quant_max() as f32);
    let scale = match grid.mapping {
        Mapping::Symmetric => high.max(-low) / ((quant_max - quant_min) / 2.0),
        Mapping::SymmetricNoClipping => (low / quant_min).max(high / quant_max),
        Mapping::Affine => (high * 0.5 - low * 0.5) / (0.5 * (quant_max - quant_min)),
    };
    let scale = scale.max(SMALLEST_SCALE);
    let zero_point = match grid.mapping {
        Mapping::Affine => {
            let zero_point = quant_min - (low / scale).round_ties_even();
            zero_point.clamp(quant_min, quant_max) as i32
        }
        _ => grid.symmetric_zero_point(),
    };
    CodeGrid {
        scale,
        low: (grid.quant_min() - zero_point) as i16,
        high: (grid.quant_max() - zero_point) as i16,
    }
}
