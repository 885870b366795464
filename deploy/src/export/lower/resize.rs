//! Interpolation.

use burn::backend::ir::{InterpolateModeIr, InterpolateOpIr};

use super::Written;
use crate::export::Writer;
use crate::onnx::Attribute;

impl Writer<'_> {
    pub(super) fn interpolate(&mut self, o: &InterpolateOpIr) -> Written {
        let (mode, coordinates) = match (&o.options.mode, o.options.align_corners) {
            (InterpolateModeIr::Nearest, _) => ("nearest", "asymmetric"),
            (InterpolateModeIr::Bilinear, true) => ("linear", "align_corners"),
            (InterpolateModeIr::Bilinear, false) => ("linear", "half_pixel"),
            _ => return Err("only nearest and bilinear interpolation are written".into()),
        };
        let sizes = self.shape(&o.out);
        let inputs = vec![self.operand(&o.x)?, String::new(), String::new(), sizes];
        let mut attributes = vec![
            Attribute::Text("mode", mode),
            Attribute::Text("coordinate_transformation_mode", coordinates),
        ];
        if mode == "nearest" {
            attributes.push(Attribute::Text("nearest_mode", "floor"));
        }
        self.put("Resize", inputs, &o.out, attributes);
        Ok(())
    }
}
