//! Interpolation.

use burn::backend::ir::{InterpolateModeIr, InterpolateOpIr, TensorIr};

use super::Written;
use crate::export::Writer;
use crate::onnx::Attribute;

impl Writer<'_> {
    pub(super) fn interpolate(&mut self, o: &InterpolateOpIr) -> Written {
        if o.options.mode == InterpolateModeIr::Nearest {
            return self.nearest(&o.x, &o.out);
        }
        let coordinates = match (&o.options.mode, o.options.align_corners) {
            (InterpolateModeIr::Bilinear, true) => "align_corners",
            (InterpolateModeIr::Bilinear, false) => "half_pixel",
            _ => return Err("only nearest and bilinear interpolation are written".into()),
        };
        let sizes = self.shape(&o.out);
        let inputs = vec![self.operand(&o.x)?, String::new(), String::new(), sizes];
        let attributes = vec![
            Attribute::Text("mode", "linear"),
            Attribute::Text("coordinate_transformation_mode", coordinates),
        ];
        self.put("Resize", inputs, &o.out, attributes);
        Ok(())
    }

    /// Pixel o of an axis is pixel ⌊o · (from / to)⌋ of the input. Engines compute that place in F32, some as
    /// o / (to / from), which is another one for some sizes (14 → 46, 224 → 32): there the pixels are listed.
    fn nearest(&mut self, x: &TensorIr, out: &TensorIr) -> Written {
        let sizes = |axis: usize| (x.shape[axis], out.shape[axis]);
        if [2, 3].map(sizes).into_iter().all(is_exact) {
            let sizes = self.shape(out);
            let inputs = vec![self.operand(x)?, String::new(), String::new(), sizes];
            let attributes = vec![
                Attribute::Text("mode", "nearest"),
                Attribute::Text("coordinate_transformation_mode", "asymmetric"),
                Attribute::Text("nearest_mode", "floor"),
            ];
            self.put("Resize", inputs, out, attributes);
            return Ok(());
        }
        let mut name = self.operand(x)?;
        for axis in [2, 3] {
            let (from, to) = sizes(axis);
            if from == to {
                continue;
            }
            let place = |o: usize| (o as f64 * (from as f64 / to as f64)).floor() as i64;
            let places: Vec<i64> = (0..to).map(|o| place(o).min(from as i64 - 1)).collect();
            let places = self.ints(&places);
            let along = vec![Attribute::Int("axis", axis as i64)];
            name = self.emit("Gather", vec![name, places], "Gather", along);
        }
        self.set(out, name);
        Ok(())
    }
}

/// Whether engines take the nearest pixels of one size for another that Burn takes: where F32 has both ratios.
pub(crate) fn is_exact((from, to): (usize, usize)) -> bool {
    let (less, more) = (from.min(to), from.max(to));
    less > 0 && more.is_multiple_of(less) && (more / less).is_power_of_two()
}
