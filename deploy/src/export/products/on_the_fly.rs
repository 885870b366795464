//! Activations whose range is that of the values at hand, where ONNX has no operator for it.

use burn_lean_quant::Mapping;

use super::activation::{Quantized, Reader, ZeroPoint};
use crate::export::Writer;
use crate::onnx::{Attribute, ENGINE};
use crate::quantization::SMALLEST_SCALE;
use crate::{DynamicGrid, ElementType};

/// Values in steps of their scale, rounded: how far their codes are from that of 0.
struct Steps {
    distances: String,
    scale: String,
    /// The distance of the lowest code.
    lowest: String,
    /// The code of 0, counted from the lowest one: that of the values at hand in F32.
    zero_point: ZeroPoint,
}

impl Writer<'_> {
    /// The values that the codes of an activation stand for.
    pub(super) fn round_on_the_fly(&mut self, x: String, grid: DynamicGrid) -> String {
        if self.limits.engine_operators {
            let attributes = vec![Attribute::Grid(grid)];
            return self.emit_in(ENGINE, "RoundActivation", vec![x], "rounded", attributes);
        }
        let steps = self.steps(&x, grid);
        self.emit("Mul", vec![steps.distances, steps.scale], "rounded", vec![])
    }

    /// The codes of an activation as U8.
    pub(super) fn codes_on_the_fly(
        &mut self,
        x: String,
        grid: DynamicGrid,
        reader: Reader,
    ) -> Quantized {
        if self.limits.engine_operators {
            let names = [reader.codes(), "scale", "zero_point"];
            let operator = "QuantizeActivation";
            let attributes = vec![Attribute::Grid(grid)];
            let [codes, scale, zero_point] =
                self.emit_all_in(ENGINE, operator, vec![x], names, attributes);
            return Quantized {
                codes,
                scale,
                zero_point: ZeroPoint::Code(zero_point),
            };
        }
        let steps = self.steps(&x, grid);
        // Counted from the lowest one.
        let inputs = vec![steps.distances, steps.lowest];
        let codes = self.emit("Sub", inputs, "codes", vec![]);
        Quantized {
            codes: self.cast_to(codes, ElementType::U8),
            scale: steps.scale,
            zero_point: match steps.zero_point {
                ZeroPoint::OfRows(name) if !grid.per_token => {
                    ZeroPoint::Code(self.cast_to(name, ElementType::U8))
                }
                zero_point => zero_point,
            },
        }
    }

    /// As [`QuantParams::from_range`](burn_lean_quant::QuantParams::from_range) has it.
    fn steps(&mut self, x: &str, grid: DynamicGrid) -> Steps {
        let codes = (grid.quant_max() - grid.quant_min()) as f32;
        let scale = self.scale_on_the_fly(x, grid);
        let (zero_point, lowest, highest) = match grid.mapping {
            Mapping::Affine => {
                let least = self.extreme("ReduceMin", x, grid);
                let below = self.emit("Div", vec![least, scale.clone()], "Div", vec![]);
                let below = self.emit("Round", vec![below], "Round", vec![]);
                let above = self.emit("Neg", vec![below], "Neg", vec![]);
                let ends = [self.one_number(0.0), self.one_number(codes)];
                let inputs = [above].into_iter().chain(ends.clone()).collect();
                let zero = self.emit("Clip", inputs, "zero_point", vec![]);
                let [lowest, highest] =
                    ends.map(|end| self.emit("Sub", vec![end, zero.clone()], "Sub", vec![]));
                (ZeroPoint::OfRows(zero), lowest, highest)
            }
            _ => {
                let zero = grid.symmetric_zero_point() - grid.quant_min();
                let code = vec![zero as u8];
                let code = self.initializer("zero_point", ElementType::U8, &[], code);
                let zero = zero as f32;
                let ends = [-zero, codes - zero].map(|end| self.one_number(end));
                let [lowest, highest] = ends;
                (ZeroPoint::Code(code), lowest, highest)
            }
        };
        let inverse = self.emit("Reciprocal", vec![scale.clone()], "Reciprocal", vec![]);
        let steps = self.emit("Mul", vec![x.into(), inverse], "Mul", vec![]);
        let steps = self.emit("Round", vec![steps], "Round", vec![]);
        let steps = self.emit("Max", vec![steps, lowest.clone()], "Max", vec![]);
        Steps {
            distances: self.emit("Min", vec![steps, highest], "Min", vec![]),
            scale,
            lowest,
            zero_point,
        }
    }

    fn scale_on_the_fly(&mut self, x: &str, grid: DynamicGrid) -> String {
        let (low, high) = (grid.quant_min() as f32, grid.quant_max() as f32);
        let by = |writer: &mut Self, operator, a: String, number: f32| {
            let number = writer.one_number(number);
            writer.emit(operator, vec![a, number], operator, vec![])
        };
        let scale = match grid.mapping {
            Mapping::Symmetric => {
                let magnitudes = self.emit("Abs", vec![x.into()], "Abs", vec![]);
                let largest = self.extreme("ReduceMax", &magnitudes, grid);
                by(self, "Div", largest, (high - low) / 2.0)
            }
            Mapping::SymmetricNoClipping => {
                let below = self.extreme("ReduceMin", x, grid);
                let below = by(self, "Div", below, low);
                let above = self.extreme("ReduceMax", x, grid);
                let above = by(self, "Div", above, high);
                self.emit("Max", vec![below, above], "Max", vec![])
            }
            Mapping::Affine => {
                // Halves: the whole may be more than the largest number.
                let below = self.extreme("ReduceMin", x, grid);
                let below = by(self, "Mul", below, 0.5);
                let above = self.extreme("ReduceMax", x, grid);
                let above = by(self, "Mul", above, 0.5);
                let half = self.emit("Sub", vec![above, below], "Sub", vec![]);
                by(self, "Div", half, 0.5 * (high - low))
            }
        };
        by(self, "Max", scale, SMALLEST_SCALE)
    }

    /// The least number, or the largest, of each row or of all; 0 is always among them.
    fn extreme(&mut self, operator: &'static str, x: &str, grid: DynamicGrid) -> String {
        let mut inputs = vec![x.to_string()];
        if grid.per_token {
            inputs.push(self.ints(&[-1]));
        }
        let keep = vec![Attribute::Int("keepdims", i64::from(grid.per_token))];
        let found = self.emit(operator, inputs, operator, keep);
        let beside_zero = match operator {
            "ReduceMin" => "Min",
            _ => "Max",
        };
        let zero = self.one_number(0.0);
        self.emit(beside_zero, vec![found, zero], beside_zero, vec![])
    }

    fn one_number(&mut self, number: f32) -> String {
        self.floats("number", &[], &[number])
    }
}
