//! Operations on floats alone.

use burn::backend::Dispatch;
use burn::backend::ir::FloatOperationIr;
use burn::backend::ops::{FloatTensorOps, QTensorOps};
use burn::backend::quantization::QuantizationParametersPrimitive;

use super::shapes::Fetch;
use super::{Done, Operands};

pub(super) fn run(op: &FloatOperationIr, operands: &mut impl Operands) -> Done {
    use FloatOperationIr::*;
    match op {
        Exp(o) => unary!(operands, o, float, Dispatch::float_exp),
        Log(o) => unary!(operands, o, float, Dispatch::float_log),
        Log1p(o) => unary!(operands, o, float, Dispatch::float_log1p),
        Erf(o) => unary!(operands, o, float, Dispatch::float_erf),
        Sqrt(o) => unary!(operands, o, float, Dispatch::float_sqrt),
        Recip(o) => unary!(operands, o, float, Dispatch::float_recip),
        Powf(o) => binary!(operands, o, float, Dispatch::float_powf),
        PowfScalar(o) => scalar!(operands, o, float, Dispatch::float_powf_scalar),
        Hypot(o) => binary!(operands, o, float, Dispatch::float_hypot),
        Sin(o) => unary!(operands, o, float, Dispatch::float_sin),
        Cos(o) => unary!(operands, o, float, Dispatch::float_cos),
        Tan(o) => unary!(operands, o, float, Dispatch::float_tan),
        Sinh(o) => unary!(operands, o, float, Dispatch::float_sinh),
        Cosh(o) => unary!(operands, o, float, Dispatch::float_cosh),
        Tanh(o) => unary!(operands, o, float, Dispatch::float_tanh),
        ArcSin(o) => unary!(operands, o, float, Dispatch::float_asin),
        ArcSinh(o) => unary!(operands, o, float, Dispatch::float_asinh),
        ArcCos(o) => unary!(operands, o, float, Dispatch::float_acos),
        ArcCosh(o) => unary!(operands, o, float, Dispatch::float_acosh),
        ArcTan(o) => unary!(operands, o, float, Dispatch::float_atan),
        ArcTanh(o) => unary!(operands, o, float, Dispatch::float_atanh),
        ArcTan2(o) => binary!(operands, o, float, Dispatch::float_atan2),
        Round(o) => unary!(operands, o, float, Dispatch::float_round),
        Floor(o) => unary!(operands, o, float, Dispatch::float_floor),
        Ceil(o) => unary!(operands, o, float, Dispatch::float_ceil),
        Trunc(o) => unary!(operands, o, float, Dispatch::float_trunc),
        IsNan(o) => test!(operands, o, float, Dispatch::float_is_nan),
        IsInf(o) => test!(operands, o, float, Dispatch::float_is_inf),
        IntoInt(o) => {
            apply!(operands, o, |x| Dispatch::float_into_int(x, o.out.dtype.into()), float input)
        }
        Matmul(o) => binary!(operands, o, float, Dispatch::float_matmul),
        Cross(o) => {
            apply!(operands, o, |x, y| Dispatch::float_cross(x, y, o.dim), float lhs, float rhs)
        }
        Random(o) => {
            let random =
                |shape, device, dtype| Dispatch::float_random(shape, o.distribution, device, dtype);
            made!(operands, o, random, o.out.dtype.into())
        }
        GridSample2d(o) => {
            let options = o.options.clone().into();
            let sample = |x, grid| Dispatch::float_grid_sample_2d(x, grid, options);
            apply!(operands, o, sample, float tensor, float grid)
        }
        Quantize(o) => {
            let tensor = operands.float(&o.tensor);
            let scales = operands.float(&o.qparams.scales);
            let global = operands.optional(&o.qparams.global);
            let qparams = QuantizationParametersPrimitive { scales, global };
            operands.set(&o.out, Dispatch::quantize(tensor, &o.scheme, qparams))
        }
        Dequantize(o) => {
            let dtype = o.out.dtype.into();
            unary!(operands, o, float, |x| Dispatch::dequantize(x, dtype))
        }
    }
    Ok(())
}
