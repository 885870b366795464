//! Pooling.

use burn::backend::ir::{ModuleOperationIr, TensorIr};

use super::{Written, to_ints};
use crate::export::Writer;
use crate::onnx::Attribute;

/// Windows, axis by axis.
struct Windows<'a> {
    size: &'a [usize],
    stride: &'a [usize],
    padding: &'a [usize],
    ceil: bool,
}

impl Windows<'_> {
    fn attributes(&self) -> Vec<Attribute> {
        let pads = [self.padding, self.padding].concat();
        vec![
            Attribute::Ints("kernel_shape", to_ints(self.size)),
            Attribute::Ints("strides", to_ints(self.stride)),
            Attribute::Ints("pads", to_ints(&pads)),
            Attribute::Int("ceil_mode", i64::from(self.ceil)),
        ]
    }
}

impl Writer<'_> {
    pub(super) fn pool(&mut self, op: &ModuleOperationIr) -> Written {
        use ModuleOperationIr::*;
        match op {
            AvgPool1d(o) => {
                let windows = Windows {
                    size: &[o.kernel_size],
                    stride: &[o.stride],
                    padding: &[o.padding],
                    ceil: o.ceil_mode,
                };
                self.average(&o.x, &windows, o.count_include_pad, &o.out)
            }
            AvgPool2d(o) => {
                let windows = Windows {
                    size: &o.kernel_size,
                    stride: &o.stride,
                    padding: &o.padding,
                    ceil: o.ceil_mode,
                };
                self.average(&o.x, &windows, o.count_include_pad, &o.out)
            }
            MaxPool1d(o) => {
                let windows = Windows {
                    size: &[o.kernel_size],
                    stride: &[o.stride],
                    padding: &[o.padding],
                    ceil: o.ceil_mode,
                };
                self.largest(&o.x, &windows, &[o.dilation], &o.out)
            }
            MaxPool2d(o) => {
                let windows = Windows {
                    size: &o.kernel_size,
                    stride: &o.stride,
                    padding: &o.padding,
                    ceil: o.ceil_mode,
                };
                self.largest(&o.x, &windows, &o.dilation, &o.out)
            }
            AdaptiveAvgPool1d(o) => self.adaptive(&o.x, &[o.output_size], &o.out),
            AdaptiveAvgPool2d(o) => self.adaptive(&o.x, &o.output_size, &o.out),
            AdaptiveAvgPool3d(o) => self.adaptive(&o.x, &o.output_size, &o.out),
            _ => Err("this crate does not write it".into()),
        }
    }

    fn average(
        &mut self,
        x: &TensorIr,
        windows: &Windows<'_>,
        include_pad: bool,
        out: &TensorIr,
    ) -> Written {
        let x = self.operand(x)?;
        let mut attributes = windows.attributes();
        attributes.push(Attribute::Int("count_include_pad", i64::from(include_pad)));
        self.put("AveragePool", vec![x], out, attributes);
        Ok(())
    }

    fn largest(
        &mut self,
        x: &TensorIr,
        windows: &Windows<'_>,
        dilations: &[usize],
        out: &TensorIr,
    ) -> Written {
        let x = self.operand(x)?;
        let mut attributes = windows.attributes();
        if dilations.iter().any(|dilation| *dilation != 1) {
            attributes.push(Attribute::Ints("dilations", to_ints(dilations)));
        }
        self.put("MaxPool", vec![x], out, attributes);
        Ok(())
    }

    fn adaptive(&mut self, x: &TensorIr, size: &[usize], out: &TensorIr) -> Written {
        let name = self.operand(x)?;
        if size.iter().all(|size| *size == 1) {
            self.put("GlobalAveragePool", vec![name], out, vec![]);
            return Ok(());
        }
        let given: Vec<usize> = x.shape.iter().skip(2).copied().collect();
        let divides = |(given, size): (&usize, &usize)| given.is_multiple_of(*size);
        if !given.iter().zip(size).all(divides) {
            return Err("its windows have different sizes".into());
        }
        let of: Vec<usize> = given
            .iter()
            .zip(size)
            .map(|(given, size)| given / size)
            .collect();
        let windows = Windows {
            size: &of,
            stride: &of,
            padding: &vec![0; of.len()],
            ceil: false,
        };
        self.put("AveragePool", vec![name], out, windows.attributes());
        Ok(())
    }
}
