//! Operations on tensors of every kind: how elements are moved, chosen and compared.

use burn::backend::ir::BaseOperationIr;
use burn::backend::ops::{BoolTensorOps, FloatTensorOps, IntTensorOps};
use burn::backend::{Dispatch, DispatchDevice, DispatchTensor, TensorMetadata};
use burn::tensor::{BoolDType, IndexingUpdateOp};

use super::shapes::Fetch;
use super::{Done, Operands};

pub(super) fn float(op: &BaseOperationIr, operands: &mut impl Operands) -> Done {
    use BaseOperationIr::*;
    match op {
        Reshape(o) => {
            apply!(operands, o, |x| Dispatch::float_reshape(x, o.out.shape.clone()), float input)
        }
        Expand(o) => {
            apply!(operands, o, |x| Dispatch::float_expand(x, o.out.shape.clone()), float input)
        }
        SwapDims(o) => {
            apply!(operands, o, |x| Dispatch::float_swap_dims(x, o.dim1, o.dim2), float input)
        }
        Permute(o) => unary!(operands, o, float, |x| Dispatch::float_permute(x, &o.axes)),
        Flip(o) => unary!(operands, o, float, |x| Dispatch::float_flip(x, &o.axes)),
        Unfold(o) => {
            apply!(operands, o, |x| Dispatch::float_unfold(x, o.dim, o.size, o.step), float input)
        }
        Slice(o) => apply!(operands, o, |x| Dispatch::float_slice(x, &o.ranges), float tensor),
        SliceAssign(o) => {
            let assign = |x, value| Dispatch::float_slice_assign(x, &o.ranges, value);
            apply!(operands, o, assign, float tensor, float value)
        }
        Select(o) => {
            let select = |x, indices| Dispatch::float_select(x, o.dim, indices);
            apply!(operands, o, select, float tensor, int indices)
        }
        SelectAssign(o) => {
            let assign = |x, i, value| Dispatch::float_select_assign(x, o.dim, i, value, o.update);
            apply!(operands, o, assign, float tensor, int indices, float value)
        }
        Gather(o) => {
            let gather = |x, indices| Dispatch::float_gather(o.dim, x, indices);
            apply!(operands, o, gather, float tensor, int indices)
        }
        Scatter(o) => {
            let scatter = |x, i, value| Dispatch::float_scatter(o.dim, x, i, value, o.update);
            apply!(operands, o, scatter, float tensor, int indices, float value)
        }
        GatherNd(o) => apply!(operands, o, Dispatch::float_gather_nd, float data, int indices),
        ScatterNd(o) => {
            let scatter = |x, i, values| Dispatch::float_scatter_nd(x, i, values, o.reduction);
            apply!(operands, o, scatter, float data, int indices, float values)
        }
        MaskWhere(o) => {
            apply!(operands, o, Dispatch::float_mask_where, float tensor, bool mask, float value)
        }
        MaskFill(o) => {
            let fill = |x, mask| Dispatch::float_mask_fill(x, mask, o.value.into());
            apply!(operands, o, fill, float tensor, bool mask)
        }
        RepeatDim(o) => {
            let repeat = |x| Dispatch::float_repeat_dim(x, o.dim, o.times);
            apply!(operands, o, repeat, float tensor)
        }
        Cat(o) => {
            let parts = o.tensors.iter().map(|part| operands.float(part)).collect();
            operands.set(&o.out, Dispatch::float_cat(parts, o.dim))
        }
        Cast(o) => {
            let dtype = o.out.dtype.into();
            unary!(operands, o, float, |x| Dispatch::float_cast(x, dtype))
        }
        Empty(o) => made!(operands, o, Dispatch::float_empty, o.out.dtype.into()),
        Ones(o) => made!(operands, o, Dispatch::float_ones, o.out.dtype.into()),
        Zeros(o) => made!(operands, o, Dispatch::float_zeros, o.out.dtype.into()),
        Equal(o) => compare!(operands, o, float, Dispatch::float_equal),
        EqualElem(o) => compare_scalar!(operands, o, float, Dispatch::float_equal_elem),
        NotEqual(o) => compare!(operands, o, float, Dispatch::float_not_equal),
        NotEqualElem(o) => compare_scalar!(operands, o, float, Dispatch::float_not_equal_elem),
        All(o) => test!(operands, o, float, Dispatch::float_all),
        Any(o) => test!(operands, o, float, Dispatch::float_any),
        AllDim(o) => test_along!(operands, o, float, Dispatch::float_all_dim),
        AnyDim(o) => test_along!(operands, o, float, Dispatch::float_any_dim),
    }
    Ok(())
}

pub(super) fn int(op: &BaseOperationIr, operands: &mut impl Operands) -> Done {
    use BaseOperationIr::*;
    match op {
        Reshape(o) => {
            apply!(operands, o, |x| Dispatch::int_reshape(x, o.out.shape.clone()), int input)
        }
        Expand(o) => {
            apply!(operands, o, |x| Dispatch::int_expand(x, o.out.shape.clone()), int input)
        }
        SwapDims(o) => {
            apply!(operands, o, |x| Dispatch::int_swap_dims(x, o.dim1, o.dim2), int input)
        }
        Permute(o) => unary!(operands, o, int, |x| Dispatch::int_permute(x, &o.axes)),
        Flip(o) => unary!(operands, o, int, |x| Dispatch::int_flip(x, &o.axes)),
        Unfold(o) => {
            apply!(operands, o, |x| Dispatch::int_unfold(x, o.dim, o.size, o.step), int input)
        }
        Slice(o) => apply!(operands, o, |x| Dispatch::int_slice(x, &o.ranges), int tensor),
        SliceAssign(o) => {
            let assign = |x, value| Dispatch::int_slice_assign(x, &o.ranges, value);
            apply!(operands, o, assign, int tensor, int value)
        }
        Select(o) => {
            let select = |x, indices| Dispatch::int_select(x, o.dim, indices);
            apply!(operands, o, select, int tensor, int indices)
        }
        SelectAssign(o) => {
            let assign = |x, i, value| Dispatch::int_select_assign(x, o.dim, i, value, o.update);
            apply!(operands, o, assign, int tensor, int indices, int value)
        }
        Gather(o) => {
            let gather = |x, indices| Dispatch::int_gather(o.dim, x, indices);
            apply!(operands, o, gather, int tensor, int indices)
        }
        Scatter(o) => {
            let scatter = |x, i, value| Dispatch::int_scatter(o.dim, x, i, value, o.update);
            apply!(operands, o, scatter, int tensor, int indices, int value)
        }
        GatherNd(o) => apply!(operands, o, Dispatch::int_gather_nd, int data, int indices),
        ScatterNd(o) => {
            let scatter = |x, i, values| Dispatch::int_scatter_nd(x, i, values, o.reduction);
            apply!(operands, o, scatter, int data, int indices, int values)
        }
        MaskWhere(o) => {
            apply!(operands, o, Dispatch::int_mask_where, int tensor, bool mask, int value)
        }
        MaskFill(o) => {
            let fill = |x, mask| Dispatch::int_mask_fill(x, mask, o.value.into());
            apply!(operands, o, fill, int tensor, bool mask)
        }
        RepeatDim(o) => {
            apply!(operands, o, |x| Dispatch::int_repeat_dim(x, o.dim, o.times), int tensor)
        }
        Cat(o) => {
            let parts = o.tensors.iter().map(|part| operands.int(part)).collect();
            operands.set(&o.out, Dispatch::int_cat(parts, o.dim))
        }
        Cast(o) => apply!(operands, o, |x| Dispatch::int_cast(x, o.out.dtype.into()), int input),
        Empty(o) => made!(operands, o, Dispatch::int_empty, o.out.dtype.into()),
        Ones(o) => made!(operands, o, Dispatch::int_ones, o.out.dtype.into()),
        Zeros(o) => made!(operands, o, Dispatch::int_zeros, o.out.dtype.into()),
        Equal(o) => compare!(operands, o, int, Dispatch::int_equal),
        EqualElem(o) => compare_scalar!(operands, o, int, Dispatch::int_equal_elem),
        NotEqual(o) => compare!(operands, o, int, Dispatch::int_not_equal),
        NotEqualElem(o) => compare_scalar!(operands, o, int, Dispatch::int_not_equal_elem),
        All(o) => test!(operands, o, int, Dispatch::int_all),
        Any(o) => test!(operands, o, int, Dispatch::int_any),
        AllDim(o) => test_along!(operands, o, int, Dispatch::int_all_dim),
        AnyDim(o) => test_along!(operands, o, int, Dispatch::int_any_dim),
    }
    Ok(())
}

pub(super) fn bool(op: &BaseOperationIr, operands: &mut impl Operands) -> Done {
    use BaseOperationIr::*;
    match op {
        Reshape(o) => {
            apply!(operands, o, |x| Dispatch::bool_reshape(x, o.out.shape.clone()), bool input)
        }
        Expand(o) => {
            apply!(operands, o, |x| Dispatch::bool_expand(x, o.out.shape.clone()), bool input)
        }
        SwapDims(o) => {
            apply!(operands, o, |x| Dispatch::bool_swap_dims(x, o.dim1, o.dim2), bool input)
        }
        Permute(o) => unary!(operands, o, bool, |x| Dispatch::bool_permute(x, &o.axes)),
        Flip(o) => unary!(operands, o, bool, |x| Dispatch::bool_flip(x, &o.axes)),
        Unfold(o) => {
            apply!(operands, o, |x| Dispatch::bool_unfold(x, o.dim, o.size, o.step), bool input)
        }
        Slice(o) => apply!(operands, o, |x| Dispatch::bool_slice(x, &o.ranges), bool tensor),
        SliceAssign(o) => {
            let assign = |x, value| Dispatch::bool_slice_assign(x, &o.ranges, value);
            apply!(operands, o, assign, bool tensor, bool value)
        }
        Select(o) => {
            let (device, dtype) = (operands.device(), operands.bool_dtype());
            let select =
                |x, indices| as_bools(Dispatch::bool_select(x, o.dim, indices), &device, dtype);
            apply!(operands, o, select, bool tensor, int indices)
        }
        SelectAssign(o) => {
            adds(&o.update)?;
            let assign = |x, i, value| Dispatch::bool_select_or(x, o.dim, i, value);
            apply!(operands, o, assign, bool tensor, int indices, bool value)
        }
        Gather(o) => {
            let (device, dtype) = (operands.device(), operands.bool_dtype());
            let gather =
                |x, indices| as_bools(Dispatch::bool_gather(o.dim, x, indices), &device, dtype);
            apply!(operands, o, gather, bool tensor, int indices)
        }
        Scatter(o) => {
            adds(&o.update)?;
            let scatter = |x, i, value| Dispatch::bool_scatter_or(o.dim, x, i, value);
            apply!(operands, o, scatter, bool tensor, int indices, bool value)
        }
        GatherNd(_) | ScatterNd(_) => return Err("Burn has it for floats and ints alone"),
        MaskWhere(o) => {
            apply!(operands, o, Dispatch::bool_mask_where, bool tensor, bool mask, bool value)
        }
        MaskFill(o) => {
            let fill = |x, mask| Dispatch::bool_mask_fill(x, mask, o.value.into());
            apply!(operands, o, fill, bool tensor, bool mask)
        }
        RepeatDim(o) => {
            apply!(operands, o, |x| Dispatch::bool_repeat_dim(x, o.dim, o.times), bool tensor)
        }
        Cat(o) => {
            let parts = o.tensors.iter().map(|part| operands.bool(part)).collect();
            operands.set(&o.out, Dispatch::bool_cat(parts, o.dim))
        }
        // All bools are stored as the device does.
        Cast(o) => unary!(operands, o, bool, |x| x),
        Empty(o) => made!(operands, o, Dispatch::bool_empty, operands.bool_dtype()),
        Ones(o) => made!(operands, o, Dispatch::bool_ones, operands.bool_dtype()),
        Zeros(o) => made!(operands, o, Dispatch::bool_zeros, operands.bool_dtype()),
        Equal(o) => binary!(operands, o, bool, Dispatch::bool_equal),
        EqualElem(o) => scalar!(operands, o, bool, Dispatch::bool_equal_elem),
        NotEqual(o) => binary!(operands, o, bool, Dispatch::bool_not_equal),
        NotEqualElem(o) => scalar!(operands, o, bool, Dispatch::bool_not_equal_elem),
        All(o) => unary!(operands, o, bool, Dispatch::bool_all),
        Any(o) => unary!(operands, o, bool, Dispatch::bool_any),
        AllDim(o) => along!(operands, o, bool, Dispatch::bool_all_dim),
        AnyDim(o) => along!(operands, o, bool, Dispatch::bool_any_dim),
    }
    Ok(())
}

/// Flex says of bools that it has chosen that they are bytes, and refuses to combine them with
/// others.
fn as_bools(chosen: DispatchTensor, device: &DispatchDevice, dtype: BoolDType) -> DispatchTensor {
    if chosen.dtype().is_bool() {
        return chosen;
    }
    let falses = Dispatch::bool_zeros(chosen.shape(), device, dtype);
    Dispatch::bool_mask_fill(falses, chosen, true.into())
}

/// Burn writes bools to places in one way, `or`, which is its addition.
fn adds(update: &IndexingUpdateOp) -> Done {
    use IndexingUpdateOp::*;
    match update {
        Add => Ok(()),
        Assign | Mul | Min | Max => Err("bools can only be added to what is there"),
    }
}
