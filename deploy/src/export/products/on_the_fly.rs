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
    /// In F32.
    zero_point: String,
}

impl Writer<'_> {
    /// The values that the codes of an activation stand for.
    pub(super) fn round_on_the_fly(&mut self, x: String, grid: DynamicGrid) -> String {
        let key = format!("rounded {x} {grid:?}");
        self.written_once(key, |writer| {
            if writer.limits.engine_operators {
                let attributes = grid.attributes();
                return writer.emit_in(ENGINE, "RoundActivation", vec![x], "rounded", attributes);
            }
            let Steps {
                distances, scale, ..
            } = writer.steps(&x, grid);
            writer.emit("Mul", vec![distances, scale], "rounded", vec![])
        })
    }

    /// The codes of an activation as U8.
    pub(super) fn codes_on_the_fly(
        &mut self,
        x: String,
        grid: DynamicGrid,
        reader: Reader,
    ) -> Quantized {
        let key = format!("quantized {x} {grid:?} {reader:?}");
        let names = ["codes", "scale", "zero_point"];
        if self.limits.engine_operators {
            let [codes, scale, zero_point] = self.all_once(key, |writer| {
                writer.emit_all_in(
                    ENGINE,
                    "QuantizeActivation",
                    vec![x],
                    names,
                    grid.attributes(),
                )
            });
            let zero_point = ZeroPoint::Code(zero_point);
            return Quantized {
                codes,
                scale,
                zero_point,
            };
        }
        let [codes, scale, zero_point] = self.all_once(key, |writer| {
            let Steps {
                distances,
                scale,
                zero_point,
            } = writer.steps(&x, grid);
            // Codes from 0 on.
            let lowest = writer.one_number(grid.quant_min() as f32);
            let zero_point = writer.emit("Sub", vec![zero_point, lowest], "zero_point", vec![]);
            let inputs = vec![distances, zero_point.clone()];
            let codes = writer.emit("Add", inputs, "codes", vec![]);
            let codes = writer.cast_to(codes, ElementType::U8);
            let zero_point = match grid.per_token && grid.mapping == Mapping::Affine {
                true => zero_point,
                false => writer.cast_to(zero_point, ElementType::U8),
            };
            [codes, scale, zero_point]
        });
        let zero_point = match grid.per_token && grid.mapping == Mapping::Affine {
            true => ZeroPoint::OfRows(zero_point),
            false => ZeroPoint::Code(zero_point),
        };
        Quantized {
            codes,
            scale,
            zero_point,
        }
    }

    /// As [`QuantParams::from_range`](burn_lean_quant::QuantParams::from_range) has it.
    fn steps(&mut self, x: &str, grid: DynamicGrid) -> Steps {
        let (low, high) = (grid.quant_min() as f32, grid.quant_max() as f32);
        let smallest = self.one_number(SMALLEST_SCALE);
        let two = |writer: &mut Self, operator, a: &str, b: &str| {
            writer.emit(operator, vec![a.into(), b.into()], operator, vec![])
        };
        let by = |writer: &mut Self, operator, a: &str, number: f32| {
            let number = writer.one_number(number);
            two(writer, operator, a, &number)
        };
        let (scale, zero_point, ends) = match grid.mapping {
            Mapping::Symmetric => {
                let magnitudes = self.emit("Abs", vec![x.into()], "Abs", vec![]);
                let largest = self.extreme("ReduceMax", &magnitudes, grid);
                let scale = by(self, "Div", &largest, (high - low) / 2.0);
                (scale, None, None)
            }
            Mapping::SymmetricNoClipping | Mapping::Affine => {
                let least = self.extreme("ReduceMin", x, grid);
                let least = by(self, "Min", &least, 0.0);
                let most = self.extreme("ReduceMax", x, grid);
                let most = by(self, "Max", &most, 0.0);
                if grid.mapping == Mapping::SymmetricNoClipping {
                    let below = by(self, "Div", &least, low);
                    let above = by(self, "Div", &most, high);
                    (two(self, "Max", &below, &above), None, None)
                } else {
                    // Halves: the whole may be more than the largest number.
                    let below = by(self, "Mul", &least, 0.5);
                    let above = by(self, "Mul", &most, 0.5);
                    let half = two(self, "Sub", &above, &below);
                    let scale = by(self, "Div", &half, 0.5 * (high - low));
                    let scale = two(self, "Max", &scale, &smallest);
                    let below = two(self, "Div", &least, &scale);
                    let below = self.emit("Round", vec![below], "Round", vec![]);
                    let lowest = self.one_number(low);
                    let zero = two(self, "Sub", &lowest, &below);
                    let zero = by(self, "Max", &zero, low);
                    let zero = by(self, "Min", &zero, high);
                    let highest = self.one_number(high);
                    let ends = [
                        two(self, "Sub", &lowest, &zero),
                        two(self, "Sub", &highest, &zero),
                    ];
                    (scale, Some(zero), Some(ends))
                }
            }
        };
        let scale = two(self, "Max", &scale, &smallest);
        let zero = grid.symmetric_zero_point() as f32;
        let [lowest, highest] = match ends {
            Some(ends) => ends,
            None => [self.one_number(low - zero), self.one_number(high - zero)],
        };
        let inverse = self.emit("Reciprocal", vec![scale.clone()], "Reciprocal", vec![]);
        let steps = two(self, "Mul", x, &inverse);
        let steps = self.emit("Round", vec![steps], "Round", vec![]);
        let steps = two(self, "Max", &steps, &lowest);
        let distances = two(self, "Min", &steps, &highest);
        let zero_point = match zero_point {
            Some(zero_point) => zero_point,
            None => self.one_number(zero),
        };
        Steps {
            distances,
            scale,
            zero_point,
        }
    }

    /// Of each row, or of all.
    fn extreme(&mut self, operator: &'static str, x: &str, grid: DynamicGrid) -> String {
        let mut inputs = vec![x.to_string()];
        if grid.per_token {
            inputs.push(self.ints(&[-1]));
        }
        let keep = vec![Attribute::Int("keepdims", i64::from(grid.per_token))];
        self.emit(operator, inputs, operator, keep)
    }

    fn one_number(&mut self, number: f32) -> String {
        self.floats("number", &[], &[number])
    }
}
