//! Operations on floats and ints: arithmetic, comparisons, reductions, orders.

use burn::backend::Dispatch;
use burn::backend::ir::NumericOperationIr;
use burn::backend::ops::{FloatTensorOps, IntTensorOps};

use super::shapes::Fetch;
use super::{Done, Operands};

pub(super) fn float(op: &NumericOperationIr, operands: &mut impl Operands) -> Done {
    use NumericOperationIr::*;
    match op {
        Add(o) => binary!(operands, o, float, Dispatch::float_add),
        AddScalar(o) => scalar!(operands, o, float, Dispatch::float_add_scalar),
        Sub(o) => binary!(operands, o, float, Dispatch::float_sub),
        SubScalar(o) => scalar!(operands, o, float, Dispatch::float_sub_scalar),
        Mul(o) => binary!(operands, o, float, Dispatch::float_mul),
        MulScalar(o) => scalar!(operands, o, float, Dispatch::float_mul_scalar),
        Div(o) => binary!(operands, o, float, Dispatch::float_div),
        DivScalar(o) => scalar!(operands, o, float, Dispatch::float_div_scalar),
        Rem(o) => binary!(operands, o, float, Dispatch::float_remainder),
        RemScalar(o) => scalar!(operands, o, float, Dispatch::float_remainder_scalar),
        Powi(o) => apply!(operands, o, Dispatch::float_powi, float lhs, int rhs),
        PowiScalar(o) => scalar!(operands, o, float, Dispatch::float_powi_scalar),
        Neg(o) => unary!(operands, o, float, Dispatch::float_neg),
        Abs(o) => unary!(operands, o, float, Dispatch::float_abs),
        Sign(o) => unary!(operands, o, float, Dispatch::float_sign),
        Clamp(o) => {
            let clamp = |x| Dispatch::float_clamp(x, o.min.into(), o.max.into());
            apply!(operands, o, clamp, float tensor)
        }
        ClampMin(o) => scalar!(operands, o, float, Dispatch::float_clamp_min),
        ClampMax(o) => scalar!(operands, o, float, Dispatch::float_clamp_max),
        Greater(o) => compare!(operands, o, float, Dispatch::float_greater),
        GreaterElem(o) => compare_scalar!(operands, o, float, Dispatch::float_greater_elem),
        GreaterEqual(o) => compare!(operands, o, float, Dispatch::float_greater_equal),
        GreaterEqualElem(o) => {
            compare_scalar!(operands, o, float, Dispatch::float_greater_equal_elem)
        }
        Lower(o) => compare!(operands, o, float, Dispatch::float_lower),
        LowerElem(o) => compare_scalar!(operands, o, float, Dispatch::float_lower_elem),
        LowerEqual(o) => compare!(operands, o, float, Dispatch::float_lower_equal),
        LowerEqualElem(o) => compare_scalar!(operands, o, float, Dispatch::float_lower_equal_elem),
        Sum(o) => unary!(operands, o, float, Dispatch::float_sum),
        SumDim(o) => along!(operands, o, float, Dispatch::float_sum_dim),
        SumDims(o) => unary!(operands, o, float, |x| Dispatch::float_sum_dims(x, &o.axes)),
        Mean(o) => unary!(operands, o, float, Dispatch::float_mean),
        MeanDim(o) => along!(operands, o, float, Dispatch::float_mean_dim),
        Prod(o) => unary!(operands, o, float, Dispatch::float_prod),
        ProdDim(o) => along!(operands, o, float, Dispatch::float_prod_dim),
        Max(o) => unary!(operands, o, float, Dispatch::float_max),
        MaxDim(o) => along!(operands, o, float, Dispatch::float_max_dim),
        Min(o) => unary!(operands, o, float, Dispatch::float_min),
        MinDim(o) => along!(operands, o, float, Dispatch::float_min_dim),
        MaxAbs(o) => unary!(operands, o, float, Dispatch::float_max_abs),
        MaxAbsDim(o) => along!(operands, o, float, Dispatch::float_max_abs_dim),
        CumSum(o) => along!(operands, o, float, Dispatch::float_cumsum),
        CumProd(o) => along!(operands, o, float, Dispatch::float_cumprod),
        CumMin(o) => along!(operands, o, float, Dispatch::float_cummin),
        CumMax(o) => along!(operands, o, float, Dispatch::float_cummax),
        MaxDimWithIndices(o) => {
            let dtype = o.out_indices.dtype.into();
            let max = |x| Dispatch::float_max_dim_with_indices(x, o.dim, dtype);
            apply_with_indices!(operands, o, max, float tensor)
        }
        MinDimWithIndices(o) => {
            let dtype = o.out_indices.dtype.into();
            let min = |x| Dispatch::float_min_dim_with_indices(x, o.dim, dtype);
            apply_with_indices!(operands, o, min, float tensor)
        }
        ArgMax(o) => {
            let dtype = o.out.dtype.into();
            apply!(operands, o, |x| Dispatch::float_argmax(x, o.axis, dtype), float input)
        }
        ArgMin(o) => {
            let dtype = o.out.dtype.into();
            apply!(operands, o, |x| Dispatch::float_argmin(x, o.axis, dtype), float input)
        }
        TopK(o) => {
            let k = o.accumulator_len;
            apply!(operands, o, |x| Dispatch::float_topk(x, o.axis, k), float input)
        }
        ArgTopK(o) => {
            let (k, dtype) = (o.accumulator_len, o.out.dtype.into());
            apply!(operands, o, |x| Dispatch::float_argtopk(x, o.axis, k, dtype), float input)
        }
        TopKWithIndices(o) => {
            let dtype = o.out_indices.dtype.into();
            let topk = |x| Dispatch::float_topk_with_indices(x, o.dim, o.k, dtype);
            apply_with_indices!(operands, o, topk, float tensor)
        }
        Sort(o) => {
            apply!(operands, o, |x| Dispatch::float_sort(x, o.dim, o.descending), float input)
        }
        SortWithIndices(o) => {
            let dtype = o.out_indices.dtype.into();
            let sort = |x| Dispatch::float_sort_with_indices(x, o.dim, o.descending, dtype);
            apply_with_indices!(operands, o, sort, float input)
        }
        ArgSort(o) => {
            let sort = |x| Dispatch::float_argsort(x, o.dim, o.descending, o.out.dtype.into());
            unary!(operands, o, float, sort)
        }
        Pad(o) => {
            apply!(operands, o, |x| Dispatch::float_pad(x, &o.padding, o.mode.into()), float input)
        }
        Full(o) => {
            let (device, dtype) = (operands.device(), o.out.dtype.into());
            let (shape, value) = (o.out.shape.clone(), o.value.into());
            operands.set(&o.out, Dispatch::float_full(shape, value, &device, dtype))
        }
        IntRandom(_) => return Err("it makes ints, and is declared to make floats"),
    }
    Ok(())
}

pub(super) fn int(op: &NumericOperationIr, operands: &mut impl Operands) -> Done {
    use NumericOperationIr::*;
    match op {
        Add(o) => binary!(operands, o, int, Dispatch::int_add),
        AddScalar(o) => scalar!(operands, o, int, Dispatch::int_add_scalar),
        Sub(o) => binary!(operands, o, int, Dispatch::int_sub),
        SubScalar(o) => scalar!(operands, o, int, Dispatch::int_sub_scalar),
        Mul(o) => binary!(operands, o, int, Dispatch::int_mul),
        MulScalar(o) => scalar!(operands, o, int, Dispatch::int_mul_scalar),
        Div(o) => binary!(operands, o, int, Dispatch::int_div),
        DivScalar(o) => scalar!(operands, o, int, Dispatch::int_div_scalar),
        Rem(o) => binary!(operands, o, int, Dispatch::int_remainder),
        RemScalar(o) => scalar!(operands, o, int, Dispatch::int_remainder_scalar),
        Powi(o) => binary!(operands, o, int, Dispatch::int_powi),
        PowiScalar(o) => scalar!(operands, o, int, Dispatch::int_powi_scalar),
        Neg(o) => unary!(operands, o, int, Dispatch::int_neg),
        Abs(o) => unary!(operands, o, int, Dispatch::int_abs),
        Sign(o) => unary!(operands, o, int, Dispatch::int_sign),
        Clamp(o) => {
            let clamp = |x| Dispatch::int_clamp(x, o.min.into(), o.max.into());
            apply!(operands, o, clamp, int tensor)
        }
        ClampMin(o) => scalar!(operands, o, int, Dispatch::int_clamp_min),
        ClampMax(o) => scalar!(operands, o, int, Dispatch::int_clamp_max),
        Greater(o) => compare!(operands, o, int, Dispatch::int_greater),
        GreaterElem(o) => compare_scalar!(operands, o, int, Dispatch::int_greater_elem),
        GreaterEqual(o) => compare!(operands, o, int, Dispatch::int_greater_equal),
        GreaterEqualElem(o) => compare_scalar!(operands, o, int, Dispatch::int_greater_equal_elem),
        Lower(o) => compare!(operands, o, int, Dispatch::int_lower),
        LowerElem(o) => compare_scalar!(operands, o, int, Dispatch::int_lower_elem),
        LowerEqual(o) => compare!(operands, o, int, Dispatch::int_lower_equal),
        LowerEqualElem(o) => compare_scalar!(operands, o, int, Dispatch::int_lower_equal_elem),
        Sum(o) => unary!(operands, o, int, Dispatch::int_sum),
        SumDim(o) => along!(operands, o, int, Dispatch::int_sum_dim),
        SumDims(o) => {
            let axes = o.axes.iter().copied();
            apply!(operands, o, |x| axes.fold(x, Dispatch::int_sum_dim), int input)
        }
        Mean(o) => unary!(operands, o, int, Dispatch::int_mean),
        MeanDim(o) => along!(operands, o, int, Dispatch::int_mean_dim),
        Prod(o) => unary!(operands, o, int, Dispatch::int_prod),
        ProdDim(o) => along!(operands, o, int, Dispatch::int_prod_dim),
        Max(o) => unary!(operands, o, int, Dispatch::int_max),
        MaxDim(o) => along!(operands, o, int, Dispatch::int_max_dim),
        Min(o) => unary!(operands, o, int, Dispatch::int_min),
        MinDim(o) => along!(operands, o, int, Dispatch::int_min_dim),
        MaxAbs(o) => unary!(operands, o, int, Dispatch::int_max_abs),
        MaxAbsDim(o) => along!(operands, o, int, Dispatch::int_max_abs_dim),
        CumSum(o) => along!(operands, o, int, Dispatch::int_cumsum),
        CumProd(o) => along!(operands, o, int, Dispatch::int_cumprod),
        CumMin(o) => along!(operands, o, int, Dispatch::int_cummin),
        CumMax(o) => along!(operands, o, int, Dispatch::int_cummax),
        // Indices of ints have the dtype of the ints.
        MaxDimWithIndices(o) => {
            let max = |x| Dispatch::int_max_dim_with_indices(x, o.dim);
            apply_with_indices!(operands, o, max, int tensor)
        }
        MinDimWithIndices(o) => {
            let min = |x| Dispatch::int_min_dim_with_indices(x, o.dim);
            apply_with_indices!(operands, o, min, int tensor)
        }
        ArgMax(o) => along!(operands, o, int, Dispatch::int_argmax),
        ArgMin(o) => along!(operands, o, int, Dispatch::int_argmin),
        TopK(o) => {
            apply!(operands, o, |x| Dispatch::int_topk(x, o.axis, o.accumulator_len), int input)
        }
        ArgTopK(o) => {
            apply!(operands, o, |x| Dispatch::int_argtopk(x, o.axis, o.accumulator_len), int input)
        }
        TopKWithIndices(o) => {
            let topk = |x| Dispatch::int_topk_with_indices(x, o.dim, o.k);
            apply_with_indices!(operands, o, topk, int tensor)
        }
        Sort(o) => apply!(operands, o, |x| Dispatch::int_sort(x, o.dim, o.descending), int input),
        SortWithIndices(o) => {
            let sort = |x| Dispatch::int_sort_with_indices(x, o.dim, o.descending);
            apply_with_indices!(operands, o, sort, int input)
        }
        ArgSort(o) => {
            apply!(operands, o, |x| Dispatch::int_argsort(x, o.dim, o.descending), int input)
        }
        Pad(o) => {
            apply!(operands, o, |x| Dispatch::int_pad(x, &o.padding, o.mode.into()), int input)
        }
        Full(o) => {
            let (device, dtype) = (operands.device(), o.out.dtype.into());
            let (shape, value) = (o.out.shape.clone(), o.value.into());
            operands.set(&o.out, Dispatch::int_full(shape, value, &device, dtype))
        }
        IntRandom(o) => {
            let random =
                |shape, device, dtype| Dispatch::int_random(shape, o.distribution, device, dtype);
            made!(operands, o, random, o.out.dtype.into())
        }
    }
    Ok(())
}
